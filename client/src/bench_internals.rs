//! For `qute-bench` only, and no part of the API: a producer whose broker is a task beside it that
//! acknowledges every batch at once.

use std::time::Duration;

use qute_proto::ids::{ClusterId, TopicId};
use qute_proto::v1;

use crate::client::Client;
use crate::config::ClientConfig;
use crate::error::Result;
use crate::producer::{Producer, ProducerConfig};

/// In place of a broker's address: the stream to it leads nowhere.
pub(crate) const ADDRESS: &str = "loopback:1";

/// A producer for one topic, without a network. Must be called inside a tokio runtime; the client is
/// to live as long as the producer.
///
/// # Errors
/// [`crate::ErrorKind::Config`].
pub fn producer(
    config: ProducerConfig,
    topic: &str,
    partitions: u32,
) -> Result<(Client, Producer)> {
    // Port 1: nobody is there, and nobody is asked again for an hour.
    let mut client = ClientConfig::new("127.0.0.1:1")?;
    client.backoff_min = Duration::from_secs(3600);
    client.backoff_max = Duration::from_secs(3600);
    let client = Client::lazy(client)?;
    let leader = |partition| v1::PartitionInfo {
        partition,
        leader: 1,
        leader_epoch: 1,
        ..Default::default()
    };
    client.shared.metadata.offer(&v1::MetadataResponse {
        cluster_id: ClusterId::random().to_wire(),
        cluster_index: 1,
        brokers: vec![v1::BrokerInfo {
            broker_id: 1,
            address: ADDRESS.to_owned(),
            ..Default::default()
        }],
        topics: vec![v1::TopicInfo {
            name: topic.to_owned(),
            topic_id: TopicId::random().to_wire(),
            partitions: (0..partitions).map(leader).collect(),
            ..Default::default()
        }],
        ..Default::default()
    })?;
    let producer = client.producer(config)?;
    Ok((client, producer))
}
