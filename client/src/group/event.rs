//! What a group's consumer tells its program.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use super::batch::GroupBatch;
pub use super::membership::LostReason;
use crate::error::Error;

/// A partition, by the name of its topic.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopicPartition {
    /// The topic's name.
    pub topic: Arc<str>,
    /// The partition's number, from 0.
    pub partition: u32,
}

impl TopicPartition {
    /// Of that topic, the partition of that number.
    #[must_use]
    pub fn new(topic: impl Into<Arc<str>>, partition: u32) -> Self {
        Self {
            topic: topic.into(),
            partition,
        }
    }
}

impl fmt::Display for TopicPartition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.topic, self.partition)
    }
}

/// What happens while a group is read, in order: a partition's `Assigned` comes before its first batch,
/// and after its `Revoking` or `Lost` none of its batches comes until it is assigned again.
#[derive(Debug)]
#[non_exhaustive]
pub enum GroupEvent {
    /// Records, to be acknowledged.
    Batch(GroupBatch),
    /// Partitions that this member reads from now on.
    Assigned(Assigned),
    /// Partitions that go to another member.
    Revoking(Revoking),
    /// Partitions that were lost.
    Lost(Lost),
    /// The leader has proven an offset out of range, and by the consumer's policy
    /// ([`crate::OutOfRange`]) the partition goes on elsewhere. Records between the two offsets are
    /// not read.
    #[non_exhaustive]
    Reset {
        /// The partition.
        partition: TopicPartition,
        /// The offset that was wanted.
        from: u64,
        /// The offset that is wanted now.
        to: u64,
        /// What the leader said ([`Error::bounds`]).
        error: Error,
    },
    /// A topic was deleted and made again. What was committed for the old one counts for nothing; the
    /// new one is read from its start.
    #[non_exhaustive]
    TopicRecreated {
        /// Its name.
        topic: Arc<str>,
    },
    /// With a partition: nothing more of it comes until it is assigned anew (unless
    /// [`crate::ErrorKind::Intercepted`]). With a topic alone: it was deleted. Otherwise: the group can't
    /// be read, and the stream ends; but for [`crate::ErrorKind::ProcessingLimit`], after which the member
    /// joins again, and [`crate::ErrorKind::NotAssigned`], after which what it has flows on.
    Failed(Error),
}

/// See [`GroupEvent::Assigned`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Assigned {
    /// The partitions.
    pub partitions: Vec<TopicPartition>,
}

/// See [`GroupEvent::Revoking`]. No more batches of these partitions come. Each is given up once all that
/// was handed out of it is acknowledged (and committed, with [`super::CommitMode::Manual`]), or when the program says that
/// it will not be ([`super::GroupControl::give_up`]), and at the deadline in any case; whatever is not
/// acknowledged by then is read again by its next owner.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Revoking {
    /// The partitions.
    pub partitions: Vec<TopicPartition>,
    /// When they are given up at the latest.
    pub deadline: Instant,
}

/// See [`GroupEvent::Lost`]. What was handed out of these partitions and not committed is read again by
/// whoever has them now; acknowledging it changes nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Lost {
    /// The partitions.
    pub partitions: Vec<TopicPartition>,
    /// Why.
    pub reason: LostReason,
}
