//! Which partition a record goes to: [`Partitioner`], for programs that decide for themselves.
//!
//! Without one, or where it leaves the choice: the record's own partition if it names one; by its key
//! (`murmur3_x86_32(key, seed 0) & 0x7fffffff` modulo the partitions: never by their health, so that
//! a key stays where it is); else in batch-sized runs to the partitions that are fast now
//! (`adaptive.rs`).

use std::fmt;

use super::load::PartitionLoad;
use crate::record::Record;

/// Chooses partitions for a program. Installed with [`crate::ProducerConfig::partitioner`].
///
/// Must not block: it is called inside [`crate::Producer::enqueue`]. A record that names its partition
/// is not asked about.
pub trait Partitioner: Send + Sync + 'static {
    /// The partition of a record, below [`TopicLoad::partitions`] (else the record is refused as
    /// [`crate::ErrorKind::UnknownPartition`]); `None` leaves the choice to the default.
    ///
    /// The order of a key's records is kept only if they all go to one partition: a choice for a
    /// record with a key should not depend on loads.
    fn partition(&self, record: &Record, topic: &TopicLoad<'_>) -> Option<u32>;
}

/// What a [`Partitioner`] sees of a topic.
pub struct TopicLoad<'a> {
    partitions: u32,
    load: &'a dyn Fn(u32) -> PartitionLoad,
}

impl<'a> TopicLoad<'a> {
    /// A topic with these loads: what a partitioner's own tests make.
    pub fn new(partitions: u32, load: &'a dyn Fn(u32) -> PartitionLoad) -> Self {
        Self { partitions, load }
    }

    /// How many partitions the topic has. Never depends on their health; grows when partitions are
    /// added.
    #[must_use]
    pub fn partitions(&self) -> u32 {
        self.partitions
    }

    /// What is known of a partition's traffic; of one that is not there, as of one never used.
    #[must_use]
    pub fn load(&self, partition: u32) -> PartitionLoad {
        if partition < self.partitions {
            (self.load)(partition)
        } else {
            PartitionLoad::untried(false)
        }
    }
}

impl fmt::Debug for TopicLoad<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TopicLoad")
            .field("partitions", &self.partitions)
            .finish_non_exhaustive()
    }
}
