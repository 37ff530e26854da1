//! A broker of one in a temporary directory, for the tests of this layer and of the services
//! above it: the real store, the real Raft, one voter.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use qute_proto::batch::{BatchBuilder, Codec, ProducerStamp, RecordRef};
use qute_proto::ids::{BrokerId, PartitionId, ProducerId, ReplicaId, TopicId};
use tempfile::TempDir;

use super::directory::{LeaderDirectory, LeaderHint, Presence};
use super::registry::{PartitionSpec, ReplicaSettings, Replicas};
use super::replica::Replica;
use crate::env::ManualClock;
use crate::raft::{Groups, GroupsConfig, Identity, Peers};
use crate::storage::{Store, StoreConfig};

/// A test that waits longer than this has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
pub(crate) const START_MS: u64 = 1_700_000_000_000;

pub(crate) struct TestBroker {
    pub(crate) dir: TempDir,
    pub(crate) store: Store,
    pub(crate) groups: Groups,
    pub(crate) replicas: Replicas,
    pub(crate) clock: Arc<ManualClock>,
}

pub(crate) fn partition(number: u32) -> PartitionId {
    PartitionId {
        topic: TopicId(uuid::Uuid::from_u128(77)),
        partition: number,
    }
}

pub(crate) fn spec(number: u32) -> PartitionSpec {
    let replica = ReplicaId(u64::from(number) + 1);
    PartitionSpec {
        partition: partition(number),
        replica,
        settings: ReplicaSettings {
            segment_bytes: 64 << 10,
            record_bytes_max: 1 << 20,
        },
    }
}

pub(crate) fn records(stamp: ProducerStamp, values: &[&[u8]], codec: Codec) -> Bytes {
    let mut builder = BatchBuilder::new(4 << 20);
    for value in values {
        let record = RecordRef {
            key: None,
            value: Some(value),
            headers: &[],
            timestamp_ms: 1,
        };
        builder.push(&record).unwrap();
    }
    builder.finish(codec).unwrap().seal(stamp)
}

/// One batch of `count` small records.
pub(crate) fn batch(producer: u64, base_sequence: u64, count: usize) -> Bytes {
    let stamp = ProducerStamp {
        producer_id: ProducerId(producer),
        epoch: 0,
        base_sequence,
    };
    records(stamp, &vec![&b"value"[..]; count], Codec::None)
}

impl TestBroker {
    pub(crate) async fn start() -> Self {
        Self::start_in(tempfile::tempdir().unwrap()).await
    }

    pub(crate) async fn start_in(dir: TempDir) -> Self {
        Self::start_as(dir, BrokerId(1)).await
    }

    pub(crate) async fn start_as(dir: TempDir, broker: BrokerId) -> Self {
        let config = StoreConfig::new(dir.path());
        let store = tokio::task::spawn_blocking(move || Store::open(config))
            .await
            .unwrap()
            .unwrap();
        let peers = Peers::new(
            Identity {
                broker,
                boot: store.boot(),
                process: store.process(),
            },
            store.earlier_processes(),
        );
        let groups = Groups::new(store.clone(), peers, GroupsConfig::default());
        let clock = Arc::new(ManualClock::new(START_MS));
        let replicas = Replicas::new(groups.clone(), clock.clone());
        Self {
            dir,
            store,
            groups,
            replicas,
            clock,
        }
    }

    pub(crate) async fn restart(self) -> Self {
        Self::start_in(self.stop().await).await
    }

    pub(crate) async fn stop(self) -> TempDir {
        self.replicas.shutdown().await;
        self.groups.close_all().await;
        self.groups.peers().shutdown().await;
        self.store.shutdown().await;
        self.dir
    }

    /// Opens partition `number` and waits until it serves.
    pub(crate) async fn open(&self, number: u32) -> Arc<Replica> {
        self.open_spec(spec(number)).await
    }

    pub(crate) async fn open_spec(&self, spec: PartitionSpec) -> Arc<Replica> {
        let members = BTreeMap::from([(spec.replica, BrokerId(1))]);
        let replica = self.replicas.open(spec).await.unwrap();
        // Says no after a restart, and that is fine.
        replica.group().initialize(members).await.unwrap();
        serving(&replica).await;
        replica
    }
}

/// Waits until the replica is elected and serves.
pub(crate) async fn serving(replica: &Replica) -> u64 {
    let elected = async {
        let mut leadership = replica.group().watch_leadership();
        while !leadership.current().is_local {
            leadership.changed().await.unwrap();
        }
        replica.wait_serving(PATIENCE).await.unwrap()
    };
    tokio::time::timeout(PATIENCE, elected).await.unwrap()
}

/// Knows the topic of [`partition`] with four partitions, led by broker 9, and no other topic.
pub(crate) struct TestDirectory;

impl LeaderDirectory for TestDirectory {
    fn leader(&self, partition: PartitionId) -> Option<LeaderHint> {
        (self.presence(partition) == Presence::Exists).then(|| LeaderHint {
            broker: BrokerId(9),
            leader_epoch: 5,
            address: "elsewhere:7700".into(),
        })
    }

    fn presence(&self, asked: PartitionId) -> Presence {
        if asked.topic != partition(0).topic {
            Presence::UnknownTopic {
                authoritative: false,
            }
        } else if asked.partition >= 4 {
            Presence::UnknownPartition
        } else {
            Presence::Exists
        }
    }
}
