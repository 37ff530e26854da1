//! How one broker fares, in its own words: for tools that look after a cluster.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use qute_proto::ids::{BrokerId, ClusterId};
use qute_proto::v1;
use tokio::time::Instant;

use super::cluster::{ROUND_TIMEOUT, read};
use super::{BrokerStatus, ClockReading, ReplicaCounts, StorageSpace};
use crate::client::Client;
use crate::config::Bootstrap;
use crate::error::{Error, Result};
use crate::net::{Address, Lane, cluster_client};

impl Client {
    /// Asks the broker at exactly this address (`host:port`, as in a bootstrap list) who it is and how it fares; 3 s at most.
    /// Works while the cluster is forming, too, and for addresses that the cluster doesn't know.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Unreachable`], [`crate::ErrorKind::Timeout`],
    /// [`crate::ErrorKind::WrongCluster`] if the broker belongs to another cluster than the one that
    /// this client began with, [`crate::ErrorKind::Config`] if that is no address.
    ///
    /// # Cancel safety
    /// Nothing is lost: it only reads.
    pub async fn broker_status(&self, address: &str) -> Result<BrokerStatus> {
        let deadline = Instant::now() + ROUND_TIMEOUT.min(self.shared.config.call_timeout);
        let address = match address.parse::<Bootstrap>()?.addresses() {
            [one] => Address::from(one.as_str()),
            _ => return Err(Error::config(format!("{address:?} names several brokers"))),
        };
        let mut clock = (0, Duration::ZERO);
        let mut hello = v1::HelloResponse::default();
        let ask = async |channel| {
            let mut client = cluster_client(channel);
            let request = v1::HelloRequest {
                client: self.shared.config.client_name.clone(),
                ..v1::HelloRequest::default()
            };
            hello = client.hello(request).await?.into_inner();
            // The connection is warm now: what is measured is one round trip and little more.
            let (sent_ms, sent) = (wall_ms(), Instant::now());
            let answer = client.describe_cluster(v1::DescribeClusterRequest {}).await;
            clock = (sent_ms, sent.elapsed());
            answer
        };
        let connections = &self.shared.connections;
        let mut response = connections
            .call(&address, Lane::Control, deadline, ask)
            .await?;
        let faults = std::mem::take(&mut response.faults);
        let (storage, replicas) = (response.storage.take(), response.replicas.take());
        let (sent_ms, round_trip) = clock;
        Ok(BrokerStatus {
            address: address.to_string(),
            id: BrokerId(hello.broker_id),
            name: hello.broker_name,
            version: hello.version,
            cluster_id: ClusterId::from_wire(&hello.cluster_id),
            clock: (response.time_ms != 0)
                .then(|| ClockReading::told(response.time_ms, sent_ms, round_trip)),
            round_trip,
            storage: storage.map(StorageSpace::told),
            replicas: replicas.map(ReplicaCounts::told),
            faults,
            view: read(&address, response),
        })
    }
}

fn wall_ms() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl ClockReading {
    /// The broker read its clock at some moment of the round trip: half of it is the best guess, and
    /// the other half, with the millisecond that is cut off, the error.
    fn told(time_ms: u64, sent_ms: u64, round_trip: Duration) -> Self {
        let half = round_trip / 2;
        let half_ms = u64::try_from(half.as_millis()).unwrap_or(u64::MAX);
        let expected_ms = sent_ms.saturating_add(half_ms);
        let apart = i128::from(time_ms) - i128::from(expected_ms);
        Self {
            time_ms,
            ahead_ms: i64::try_from(apart).unwrap_or(if apart < 0 { i64::MIN } else { i64::MAX }),
            error_ms: half_ms.saturating_add(1),
        }
    }
}

impl StorageSpace {
    fn told(status: v1::StorageStatus) -> Self {
        Self {
            total_bytes: status.total_bytes,
            available_bytes: status.available_bytes,
            floor_bytes: status.floor_bytes,
        }
    }
}

impl ReplicaCounts {
    fn told(status: v1::ReplicaStatus) -> Self {
        Self {
            desired: status.desired,
            open: status.open,
            quarantined: status.quarantined,
            orphaned: status.orphaned,
            leading: status.leading,
            under_replicated: status.under_replicated,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_is_compared_with_the_middle_of_the_round_trip() {
        let read = |time_ms, sent_ms, ms| {
            let reading = ClockReading::told(time_ms, sent_ms, Duration::from_millis(ms));
            (reading.ahead_ms, reading.error_ms)
        };
        assert_eq!(read(1010, 1000, 20), (0, 11));
        assert_eq!(read(1000, 1000, 0), (0, 1));
        assert_eq!(read(900, 1000, 20), (-110, 11));
        assert_eq!(read(u64::MAX, 0, 0).0, i64::MAX);
        assert_eq!(read(1, u64::MAX, 10).0, i64::MIN);
    }
}
