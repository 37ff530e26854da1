//! Settings of a topic that is in use.

use std::collections::HashMap;

use bytes::Bytes;
use qute_proto::batch::{Codec, ProducerStamp};
use qute_proto::ids::{ProducerId, TopicId};
use qute_proto::topic::GROUPS_NAME;
use qute_proto::v1::log_client::LogClient;
use qute_proto::v1::produce_response::Result as Outcome;
use qute_proto::v1::{
    AlterTopicRequest, AlterTopicResponse, ErrorCode, MetadataRequest, ProduceRequest, TopicInfo,
};
use tokio_stream::StreamExt as _;

use super::cluster::{Cluster, connect, until};
use crate::partition::registry::Hosted;
use crate::partition::testing::records;

/// Well beyond a small limit: what headers may take is not counted.
const RECORD_BYTES: usize = 60_000;

fn request(name: &str, set: &[(&str, &str)], unset: &[&str]) -> AlterTopicRequest {
    let pair = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    AlterTopicRequest {
        name: name.to_owned(),
        set: set.iter().map(pair).collect(),
        unset: unset.iter().map(|key| (*key).to_owned()).collect(),
        topic_id: Bytes::new(),
    }
}

async fn alter(cluster: &Cluster, at: usize, request: AlterTopicRequest) -> AlterTopicResponse {
    let answer = cluster.admin(at).await.alter_topic(request).await;
    answer.unwrap().into_inner()
}

/// Writes a record of so many bytes to partition 0, at its leader.
async fn produce(cluster: &Cluster, topic: &TopicInfo, sequence: u64, bytes: usize) -> Outcome {
    let leader = topic.partitions[0].leader;
    let at = (0..3).find(|at| cluster.broker(*at).broker_id().0 == leader);
    let mut client = LogClient::new(connect(cluster.address(at.unwrap())).await);
    let stamp = ProducerStamp {
        producer_id: ProducerId(7),
        epoch: 0,
        base_sequence: sequence,
    };
    let request = ProduceRequest {
        correlation_id: 1,
        topic_id: topic.topic_id.clone(),
        partition: 0,
        batch: records(stamp, &[&vec![b'x'; bytes]], Codec::None),
    };
    let answers = client.produce(tokio_stream::iter([request])).await.unwrap();
    let answer = answers.into_inner().next().await.unwrap().unwrap();
    answer.result.unwrap()
}

/// Until a record of so many bytes ends as wished for.
async fn until_produced(
    cluster: &Cluster,
    topic: &TopicInfo,
    bytes: usize,
    wanted: impl Fn(&Outcome) -> bool,
) -> u64 {
    let end = tokio::time::Instant::now() + super::cluster::LONG;
    // A refused record takes no sequence; the first that is written ends the loop or begins the next.
    loop {
        let outcome = produce(cluster, topic, 0, bytes).await;
        if wanted(&outcome) {
            return match outcome {
                Outcome::Ack(ack) => ack.base_offset,
                Outcome::Error(_) => 0,
            };
        }
        assert!(tokio::time::Instant::now() < end, "{outcome:?}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

fn is_too_large(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Error(error) if error.code() == ErrorCode::RecordTooLarge)
}

#[tokio::test(flavor = "multi_thread")]
async fn altered_settings_take_effect_on_open_replicas_and_survive_a_restart() {
    let mut cluster = Cluster::start(|_, _| {}).await;
    let topic = cluster.create_topic("t", 1).await;
    let leader = cluster.controller_seen_by(0).unwrap();
    let follower = (leader + 1) % 3;
    let smaller = request(
        "t",
        &[("record_bytes_max", "100"), ("segment_bytes", "1MiB")],
        &[],
    );
    let refusal = alter(&cluster, follower, smaller.clone())
        .await
        .error
        .unwrap();
    assert_eq!(refusal.code(), ErrorCode::NotLeader);
    assert!(refusal.leader_hint.is_some());

    let answer = alter(&cluster, leader, smaller.clone()).await;
    let config = answer.topic.unwrap().config;
    let expected = [("record_bytes_max", "100"), ("segment_bytes", "1048576")];
    let expected = expected.map(|(key, value)| (key.to_owned(), value.to_owned()));
    assert_eq!(config, HashMap::from(expected));
    until_produced(&cluster, &topic, RECORD_BYTES, is_too_large).await;
    let replicas = || (0..3).flat_map(|at| cluster.broker(at).replicas.list().into_values());
    until("all replicas roll as asked", || {
        replicas().all(|hosted| match hosted {
            Hosted::Open(replica) => replica.group().log().segment_bytes() == 1 << 20,
            Hosted::Quarantined { .. } => false,
        })
    })
    .await;
    // Asked again: nothing is decided.
    let again = alter(&cluster, leader, smaller).await;
    assert!(again.error.is_none() && again.topic.is_some());

    let back = alter(&cluster, leader, request("t", &[], &["record_bytes_max"])).await;
    let config = back.topic.unwrap().config;
    assert_eq!(config.len(), 1, "{config:?}");
    until_produced(&cluster, &topic, RECORD_BYTES, |it| {
        matches!(it, Outcome::Ack(_))
    })
    .await;

    cluster.abort(leader).await;
    cluster.restart(leader).await;
    cluster.ready().await;
    let asked = MetadataRequest {
        min_cluster_index: back.cluster_index,
        ..MetadataRequest::default()
    };
    let view = cluster.admin(leader).await.metadata(asked).await.unwrap();
    assert_eq!(view.into_inner().topics[0].config, config);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_can_not_be_altered_are_refused_finally_and_whole() {
    let cluster = Cluster::start(|_, _| {}).await;
    let before = cluster.create_topic("t", 1).await;
    let leader = cluster.controller_seen_by(0).unwrap();
    let stranger = AlterTopicRequest {
        topic_id: TopicId::random().to_wire(),
        ..request("t", &[("retention_ms", "1d")], &[])
    };
    for (request, code, says) in [
        (
            request("t", &[("retention_ms", "1d"), ("retention", "1")], &[]),
            ErrorCode::InvalidArgument,
            "did you mean",
        ),
        (
            request("t", &[("segment_bytes", "1")], &[]),
            ErrorCode::InvalidArgument,
            "64KiB to 1GiB",
        ),
        (
            request("t", &[], &["colour"]),
            ErrorCode::InvalidArgument,
            "the settings are",
        ),
        (
            request("t", &[("retention_ms", "1d")], &["retention_ms"]),
            ErrorCode::InvalidArgument,
            "either",
        ),
        (
            request("u", &[("retention_ms", "1d")], &[]),
            ErrorCode::UnknownTopic,
            "does not exist",
        ),
        (
            request("../t", &[], &[]),
            ErrorCode::InvalidTopicName,
            "name",
        ),
        (
            request(GROUPS_NAME, &[("retention_ms", "1d")], &[]),
            ErrorCode::InvalidArgument,
            "cluster itself",
        ),
        (stranger, ErrorCode::UnknownTopic, "made again"),
    ] {
        let error = alter(&cluster, leader, request).await.error.unwrap();
        assert_eq!(error.code(), code, "{error:?}");
        assert!(error.message.contains(says), "{error:?}");
        assert_eq!(error.authoritative, code == ErrorCode::UnknownTopic);
    }
    let view = cluster.broker(leader).controller.view();
    let config: HashMap<_, _> = view.topics["t"].config.clone().into_iter().collect();
    assert_eq!(config, before.config);
    cluster.shutdown().await;
}
