//! Why a partition refused.

use qute_proto::ids::{Offset, PartitionId};

/// What a partition answers instead of what was asked. Says what happened; the API layer adds
/// the leader hint and the wire code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Another replica leads, or none does. Nothing was written.
    #[error("this broker does not lead the partition")]
    NotLeader,
    /// This replica is elected but has not applied its own term's first entry, or is starting.
    #[error("the partition is starting here: retry")]
    NotReady,
    /// This replica follows and has heard no leader for longer than an election takes.
    #[error("this follower has lost its leader: read from another replica")]
    LeaderLost,
    /// The bytes are not a batch.
    #[error("corrupt batch: {0}")]
    Corrupt(String),
    /// At least one record is larger than the topic allows.
    #[error("a record of at least {size_bytes} bytes, the topic takes {max_bytes}")]
    RecordTooLarge {
        /// The least that the largest record can have.
        size_bytes: u64,
        /// Topic setting `record_bytes_max`.
        max_bytes: u64,
    },
    /// The batch is larger than a broker takes.
    #[error("a batch of {size_bytes} bytes, a broker takes {max_bytes}")]
    BatchTooLarge {
        /// Of the batch, or of its records uncompressed.
        size_bytes: u64,
        /// The limit on that.
        max_bytes: u64,
    },
    /// No space that could be promised. Nothing was written.
    #[error("the disk is full: nothing was written; free space, then retry")]
    StorageFull,
    /// The table does not know the producer (S12).
    #[error("the partition does not know the producer: go on under a new epoch, from sequence 0")]
    UnknownProducer,
    /// A batch ahead of its turn.
    #[error("sequence {actual} arrived, {expected} is next: an earlier batch is missing")]
    OutOfOrder {
        /// Sequence that would be accepted.
        expected: u64,
        /// Sequence of the batch.
        actual: u64,
    },
    /// A newer epoch of the producer has written.
    #[error("epoch {actual} of the producer is fenced by epoch {current}")]
    Fenced {
        /// In force.
        current: u32,
        /// Of the batch.
        actual: u32,
    },
    /// Written before, and its offset is forgotten.
    #[error("the batch was written before; its offset is no longer known")]
    DuplicateUnknownOffset,
    /// The producer cut written records into other batches.
    #[error("the batch overlaps written batches without being one of them")]
    Overlapping,
    /// The partition holds as much as it may.
    #[error("too much is in flight for this partition: retry")]
    Overloaded,
    /// Submitted, fate unknown (S11).
    #[error("the write was submitted and its fate is not known")]
    OutcomeUnknown,
    /// The offset can't be read; final when a confirmed leader says so (S18).
    #[error("offset {offset} is outside {log_start}..{high_watermark}")]
    OutOfRange {
        /// Asked for.
        offset: Offset,
        /// First readable offset.
        log_start: Offset,
        /// One past the last committed offset.
        high_watermark: Offset,
    },
    /// The replica found damage and does not serve (S7).
    #[error("the replica is quarantined: {0}")]
    Quarantined(String),
    /// A fault of this broker; the replica does not go on.
    #[error("the replica has failed: {0}")]
    Failed(String),
    /// The partition is not (or no longer) open on this broker.
    #[error("partition {0} is not on this broker")]
    NotHere(PartitionId),
}
