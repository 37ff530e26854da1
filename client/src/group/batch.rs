//! Batches of a group, and their acknowledgement.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use qute_proto::ids::PartitionId;
use tokio::time::Instant;

use super::core::Core;
use super::event::TopicPartition;
use crate::consumer::ConsumedBatch;
use crate::record::ConsumedRecord;

/// The records of one batch of a claimed partition, in offset order.
///
/// Dropped without an acknowledgement, it stays open: nothing from it on is committed as long as the
/// partition is held, and its next owner reads it again.
#[must_use = "what is not acknowledged is read again"]
pub struct GroupBatch {
    batch: ConsumedBatch,
    acker: Acker,
}

/// Acknowledges records of one batch, from anywhere and in any order. Cheap to clone; keeps nothing
/// running.
///
/// What is committed is the contiguous run of acknowledged records from the last commit on. Once the
/// partition is not this member's any more (or is so anew), acknowledgements count for nothing and give
/// `false`: the records are another's to handle.
#[derive(Clone)]
pub struct Acker {
    core: Arc<Core>,
    topic: Arc<str>,
    place: PartitionId,
    claim_epoch: u64,
    offsets: Range<u64>,
}

/// A record with its acknowledgement.
#[derive(Debug)]
pub struct GroupRecord {
    record: ConsumedRecord,
    acker: Acker,
}

impl GroupBatch {
    pub(super) fn new(
        core: &Arc<Core>,
        topic: &Arc<str>,
        place: PartitionId,
        claim_epoch: u64,
        offsets: Range<u64>,
        batch: ConsumedBatch,
    ) -> Self {
        Self {
            batch,
            acker: Acker {
                core: Arc::clone(core),
                topic: Arc::clone(topic),
                place,
                claim_epoch,
                offsets,
            },
        }
    }

    /// The topic's name.
    #[must_use]
    pub fn topic(&self) -> &str {
        &self.acker.topic
    }

    /// The partition.
    #[must_use]
    pub fn partition(&self) -> u32 {
        self.batch.partition
    }

    /// The partition, with its topic.
    #[must_use]
    pub fn topic_partition(&self) -> TopicPartition {
        TopicPartition::new(Arc::clone(&self.acker.topic), self.batch.partition)
    }

    /// The high watermark of the replica that sent the batch, when it did.
    #[must_use]
    pub fn high_watermark(&self) -> u64 {
        self.batch.high_watermark
    }

    /// The epoch of the claim that it was handed out under: rises whenever the partition changes hands.
    #[must_use]
    pub fn claim_epoch(&self) -> u64 {
        self.acker.claim_epoch
    }

    /// From its first record's offset up to, not including, the offset after its last record.
    #[must_use]
    pub fn offsets(&self) -> Range<u64> {
        self.acker.offsets.clone()
    }

    /// The records, at least one.
    #[must_use]
    pub fn records(&self) -> &[ConsumedRecord] {
        &self.batch.records
    }

    /// The records for themselves; [`GroupBatch::acker`] acknowledges them.
    #[must_use]
    pub fn into_records(self) -> Vec<ConsumedRecord> {
        self.batch.records
    }

    /// Everything in the batch is done. False if the partition is not this member's any more: the records
    /// are read again, by whoever has it.
    pub fn ack(self) -> bool {
        self.acker.ack_all()
    }

    /// What acknowledges the batch's records one by one.
    #[must_use]
    pub fn acker(&self) -> Acker {
        self.acker.clone()
    }
}

impl IntoIterator for GroupBatch {
    type Item = GroupRecord;
    type IntoIter = GroupRecords;

    fn into_iter(self) -> GroupRecords {
        GroupRecords {
            records: self.batch.records.into_iter(),
            acker: self.acker,
        }
    }
}

/// The records of a batch, each with its acknowledgement.
#[derive(Debug)]
pub struct GroupRecords {
    records: std::vec::IntoIter<ConsumedRecord>,
    acker: Acker,
}

impl Iterator for GroupRecords {
    type Item = GroupRecord;

    fn next(&mut self) -> Option<GroupRecord> {
        let record = self.records.next()?;
        let acker = self.acker.clone();
        Some(GroupRecord { record, acker })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.records.size_hint()
    }
}

impl GroupRecord {
    /// The record is done; see [`Acker`].
    pub fn ack(self) -> bool {
        self.acker.ack(self.record.offset)
    }

    /// The record for itself.
    #[must_use]
    pub fn into_record(self) -> ConsumedRecord {
        self.record
    }
}

impl Deref for GroupRecord {
    type Target = ConsumedRecord;

    fn deref(&self) -> &ConsumedRecord {
        &self.record
    }
}

impl Acker {
    /// The record at this offset of the batch is done. Twice does no harm. False if it is none of the
    /// batch's, or the partition is not this member's any more.
    pub fn ack(&self, offset: u64) -> bool {
        self.offsets.contains(&offset) && self.send(offset..offset.saturating_add(1))
    }

    /// All records of the batch up to this one, which is included, are done.
    pub fn ack_through(&self, offset: u64) -> bool {
        let until = offset.saturating_add(1).min(self.offsets.end);
        self.offsets.contains(&offset) && self.send(self.offsets.start..until)
    }

    /// Everything in the batch is done.
    pub fn ack_all(&self) -> bool {
        self.send(self.offsets.clone())
    }

    /// The partition is still this member's, by the claim that the batch was handed out under.
    #[must_use]
    pub fn is_held(&self) -> bool {
        let now = Instant::now();
        self.core
            .with(|state| state.membership.holds(self.place, self.claim_epoch, now))
    }

    fn send(&self, offsets: Range<u64>) -> bool {
        let now = Instant::now();
        self.core.with(|state| {
            let (place, epoch) = (self.place, self.claim_epoch);
            let held = state.membership.ack(place, epoch, offsets, now);
            state.commits.acknowledged();
            held
        })
    }
}

impl fmt::Debug for Acker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acker")
            .field("topic", &self.topic)
            .field("partition", &self.place.partition)
            .field("offsets", &self.offsets)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for GroupBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupBatch")
            .field("topic", &self.acker.topic)
            .field("partition", &self.batch.partition)
            .field("offsets", &self.acker.offsets)
            .finish_non_exhaustive()
    }
}
