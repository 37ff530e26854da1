//! What a consumer tells its program besides records.

use crate::error::Error;
use crate::record::ConsumedRecord;

/// The records of one batch, from one partition, in offset order. Of batches with very many
/// records each piece comes on its own.
#[derive(Debug, Clone)]
pub struct ConsumedBatch {
    /// The partition.
    pub partition: u32,
    /// The high watermark of the replica that sent the batch, when it did.
    pub high_watermark: u64,
    /// The records; those below the wanted offset are left out.
    pub records: Vec<ConsumedRecord>,
}

/// What happens while a topic is read.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum ConsumerEvent {
    /// Records.
    Batch(ConsumedBatch),
    /// The leader has proven an offset out of range, and by the consumer's policy
    /// ([`crate::OutOfRange`]) the partition goes on elsewhere. Records between the two offsets
    /// are not read.
    #[non_exhaustive]
    Reset {
        /// The partition.
        partition: u32,
        /// The offset that was wanted.
        from: u64,
        /// The offset that is wanted now.
        to: u64,
        /// What the leader said ([`Error::bounds`]).
        error: Error,
    },
    /// The topic has more partitions; they are read from their start.
    #[non_exhaustive]
    PartitionsAdded {
        /// The new ones.
        partitions: Vec<u32>,
    },
    /// The partition is read to its bound ([`crate::Bound`]).
    #[non_exhaustive]
    End {
        /// The partition.
        partition: u32,
    },
    /// With a partition: nothing more of it comes (unless [`crate::ErrorKind::Intercepted`]); the
    /// others go on.
    Failed(Error),
}
