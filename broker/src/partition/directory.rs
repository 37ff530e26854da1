//! What the partition layer asks of the layers above, as traits: who leads elsewhere, and what
//! exists at all.

use qute_proto::ids::{BrokerId, PartitionId};

/// Where a partition's leader is believed to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaderHint {
    /// The broker.
    pub broker: BrokerId,
    /// Raft term of that leadership.
    pub leader_epoch: u64,
    /// Client address, `host:port`; empty if unknown.
    pub address: String,
}

/// Whether a partition exists in the cluster, as this broker sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Presence {
    /// It does (here or on other brokers).
    Exists,
    /// The topic does, and has no such partition.
    UnknownPartition,
    /// The topic was deleted: final, an id is never used again.
    Deleted {
        /// Its name, where this broker has seen it.
        name: Option<String>,
        /// There is another topic of that name now.
        made_again: bool,
    },
    /// There is no such topic in this broker's view.
    UnknownTopic {
        /// This broker leads `__cluster` and has confirmed it: the answer is final.
        authoritative: bool,
    },
}

/// Answers for partitions that this broker does not lead. Implemented by the controller from its
/// own copy of the metadata; must not block.
pub trait LeaderDirectory: Send + Sync + 'static {
    /// The newest leader known, if any.
    fn leader(&self, partition: PartitionId) -> Option<LeaderHint>;
    /// Whether it exists.
    fn presence(&self, partition: PartitionId) -> Presence;
}
