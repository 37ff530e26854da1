//! What a broker knows of its cluster: an immutable picture of the `__cluster` state.
//!
//! The state machine ([`super::state`]) publishes a new picture after each entry it applies, so
//! that everything else (metadata answers, reconciler, placement) reads without locks. A view
//! never goes back: its `index` only rises within a process.

use std::collections::BTreeMap;
use std::sync::Arc;

use qute_proto::ids::{BrokerId, ClusterId, PartitionId, ReplicaId, TopicId};

use super::settings::TopicSettings;

/// A member of the cluster, as it registered itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broker {
    /// Random, made with its data directory.
    pub id: BrokerId,
    /// The name people see.
    pub name: String,
    /// Where clients reach it, `host:port`.
    pub client_address: String,
    /// Where brokers reach it over TCP, `host:port`.
    pub peer_address: String,
    /// Where gossip reaches it over UDP, `host:port`.
    pub gossip_address: String,
    /// Failure domain; empty if none was set.
    pub rack: String,
    /// Its start counter at its last registration (S23).
    pub boot: u64,
    /// Its process at its last registration (S23).
    pub process_id: u64,
    /// Its replica id in `__cluster` (S9).
    pub cluster_replica: ReplicaId,
    /// It has registered itself from a data directory that knows the cluster.
    pub registered: bool,
}

/// One replica and the broker that keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Assignment {
    /// The replica id: spent once (S9).
    pub replica: ReplicaId,
    /// The broker that keeps it.
    pub broker: BrokerId,
}

/// Where the replicas of one partition live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The present replicas; the first is the preferred leader.
    pub replicas: Vec<Assignment>,
    /// The immutable first placement, the only one that may initialize the group (S10).
    pub first: Vec<Assignment>,
    /// Rises with each change of `replicas` (S16).
    pub version: u64,
    /// Its first leader has reported it: nobody may initialize it any more (S10).
    pub born: bool,
}

/// One incarnation of a topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topic {
    /// Its name.
    pub name: String,
    /// Its incarnation.
    pub id: TopicId,
    /// The settings given at creation, in their normal form.
    pub config: BTreeMap<String, String>,
    /// The same, typed, with defaults filled in.
    pub settings: TopicSettings,
    /// By partition number.
    pub partitions: Vec<Placement>,
}

impl Topic {
    /// It belongs to the cluster itself.
    #[must_use]
    pub fn is_internal(&self) -> bool {
        self.id == TopicId::GROUPS
    }
}

/// Permission to delete one replica (S22).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tombstone {
    /// Which partition it belonged to.
    pub partition: PartitionId,
    /// Which replica.
    pub replica: ReplicaId,
    /// Who keeps it.
    pub broker: BrokerId,
}

/// The `__cluster` state at one index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterView {
    /// Index of the last `__cluster` entry in this picture.
    pub index: u64,
    /// Set by the first command of the cluster.
    pub cluster_id: Option<ClusterId>,
    /// How many partitions `__groups` has; fixed at forming.
    pub groups_partitions: u32,
    /// The founding brokers, by rank.
    pub founding: Vec<BrokerId>,
    /// All members.
    pub brokers: BTreeMap<BrokerId, Arc<Broker>>,
    /// All topics, by name.
    pub topics: BTreeMap<String, Arc<Topic>>,
    /// The same topics, by id.
    pub topics_by_id: BTreeMap<TopicId, Arc<Topic>>,
    /// Replicas that may be deleted, by replica id.
    pub tombstones: BTreeMap<ReplicaId, Tombstone>,
}

impl ClusterView {
    /// The topic of that name.
    #[must_use]
    pub fn topic(&self, name: &str) -> Option<&Arc<Topic>> {
        self.topics.get(name)
    }

    /// The placement of one partition.
    #[must_use]
    pub fn placement(&self, partition: PartitionId) -> Option<&Placement> {
        let number = usize::try_from(partition.partition).ok()?;
        self.topics_by_id
            .get(&partition.topic)?
            .partitions
            .get(number)
    }

    /// A partition by a name that people know.
    #[must_use]
    pub fn name_of(&self, partition: PartitionId) -> String {
        let number = partition.partition;
        match self.topics_by_id.get(&partition.topic) {
            Some(topic) => format!("{}/{number}", topic.name),
            None if partition == PartitionId::CLUSTER => "`__cluster`".to_owned(),
            None => partition.to_string(),
        }
    }

    /// Whether this broker has registered itself: it knows the cluster.
    #[must_use]
    pub fn is_registered(&self, broker: BrokerId) -> bool {
        self.brokers
            .get(&broker)
            .is_some_and(|broker| broker.registered)
    }

    /// Whether every founding broker has registered itself.
    #[must_use]
    pub fn founders_registered(&self) -> bool {
        !self.founding.is_empty() && self.founding.iter().all(|id| self.is_registered(*id))
    }

    /// How many topics people have made, and how many partitions these have together.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        let made = self.topics.values().filter(|topic| !topic.is_internal());
        made.fold((0, 0), |(topics, partitions), topic| {
            (topics + 1, partitions + topic.partitions.len())
        })
    }
}

/// A broker's own name and addresses, as it announces them.
impl From<&Broker> for qute_proto::internal::BrokerAddress {
    fn from(broker: &Broker) -> Self {
        Self {
            broker_id: broker.id.0,
            name: broker.name.clone(),
            client_address: broker.client_address.clone(),
            peer_address: broker.peer_address.clone(),
            gossip_address: broker.gossip_address.clone(),
            rack: broker.rack.clone(),
            boot: broker.boot,
            process_id: broker.process_id,
        }
    }
}
