//! The producer table: what makes a retried batch harmless (S12).
//!
//! Pure. For each producer it keeps the epoch and the last [`BATCHES_KEPT`] batches (range of
//! sequences, base offset). It is a function of the log alone (S13): entries come in by
//! [`ProducerTable::record`] in log order, and leave by the log's own broker time and order, so
//! every replica holds the same table at the same index. Its owner is the records state machine;
//! the door asks [`ProducerTable::judge`].
//!
//! Sequences count records: a batch that begins at sequence `s` and holds `n` records is followed
//! by one that begins at `s + n`.
//!
//! Checkpoint, little endian, version 1:
//!
//! ```text
//! version u8 | producers u32 | per producer, oldest append first:
//!   id u64 | epoch u32 | last index u64 | last broker time ms u64 | batches u8 (1..=5) |
//!     per batch, oldest first: base sequence u64 | records u32 | base offset u64
//! ```

use std::collections::{BTreeMap, HashMap, VecDeque};

use bytes::{Buf, BufMut};
use qute_proto::ids::{Offset, ProducerId};

/// Batches remembered per producer: how many a client may have in flight per partition.
pub const BATCHES_KEPT: usize = 5;
/// Producers remembered per partition; the least recent goes first.
pub const PRODUCERS_MAX: usize = 32_768;
/// A producer that has not written for this long, by the log's broker time, is forgotten.
pub const EXPIRY_MS: u64 = 24 * 60 * 60 * 1000;
/// While the table is full of producers that wrote within this time, no new one is let in: one of
/// them could still retry a batch.
pub const YOUNG_MS: u64 = 5 * 60 * 1000;

const VERSION: u8 = 1;
const PRODUCER_BYTES: usize = 8 + 4 + 8 + 8 + 1;
const BATCH_BYTES: usize = 8 + 4 + 8;

/// What an idempotent producer wrote on a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Who wrote it.
    pub producer: ProducerId,
    /// The producer's epoch; a newer one fences the older.
    pub epoch: u32,
    /// Sequence of the first record.
    pub base_sequence: u64,
    /// How many records, at least 1.
    pub records: u32,
}

impl Stamp {
    /// Sequence after the last record; `None` past the end of the number range.
    #[must_use]
    pub fn end_sequence(&self) -> Option<u64> {
        self.base_sequence.checked_add(u64::from(self.records))
    }
}

/// What the table says about a batch that wants to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The next of its producer: write it.
    Append,
    /// Already written, with its first record at this offset.
    Duplicate(Offset),
    /// Already written, but so long ago that its offset is forgotten.
    DuplicateUnknownOffset,
    /// Ahead of its turn: the batch before it has not arrived.
    OutOfOrder {
        /// The sequence that would be accepted.
        expected: u64,
    },
    /// The table does not know the producer, and the batch is not its first.
    UnknownProducer,
    /// A newer epoch of the same producer has written.
    Fenced {
        /// The epoch that is in force.
        current: u32,
    },
    /// Overlaps written batches without being one of them: the producer has cut its records into
    /// batches anew, which it must not.
    Overlapping,
}

/// One written batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Sequence of its first record.
    pub base_sequence: u64,
    /// How many records.
    pub records: u32,
    /// Offset of its first record.
    pub base_offset: Offset,
}

impl Written {
    fn end_sequence(&self) -> u64 {
        self.base_sequence.saturating_add(u64::from(self.records))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Producer {
    epoch: u32,
    /// Raft index of the last append: the key in `order`.
    last_index: u64,
    last_time_ms: u64,
    /// Oldest first, 1 to [`BATCHES_KEPT`].
    batches: VecDeque<Written>,
}

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProducerTable {
    producers: HashMap<ProducerId, Producer>,
    /// Raft index of the last append -> producer. Broker time never falls along the log, so this
    /// is the order of time too.
    order: BTreeMap<u64, ProducerId>,
}

/// Why a checkpoint could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Written by a newer version of the broker.
    #[error("producer table of version {0}, this broker reads {VERSION}")]
    Version(u8),
    /// Shorter than its counts say, or longer.
    #[error("producer table of the wrong length")]
    Length,
    /// A count or a key that no table can have.
    #[error("producer table with an impossible {0}")]
    Impossible(&'static str),
}

/// Judges a batch against a known epoch and its last batches; shared by the applied table and the
/// proposals in flight.
///
/// `batches` are contiguous in sequence, oldest first.
pub(super) fn judge_against<'a>(
    stamp: &Stamp,
    epoch: u32,
    mut batches: impl DoubleEndedIterator<Item = &'a Written> + Clone,
) -> Verdict {
    if stamp.epoch < epoch {
        return Verdict::Fenced { current: epoch };
    }
    if stamp.epoch > epoch {
        return if stamp.base_sequence == 0 {
            Verdict::Append
        } else {
            Verdict::OutOfOrder { expected: 0 }
        };
    }
    let known = batches.clone();
    let Some(next) = batches.next_back().map(Written::end_sequence) else {
        return Verdict::UnknownProducer;
    };
    if stamp.base_sequence == next {
        return Verdict::Append;
    }
    if stamp.base_sequence > next {
        return Verdict::OutOfOrder { expected: next };
    }
    for written in known.clone() {
        if written.base_sequence == stamp.base_sequence && written.records == stamp.records {
            return Verdict::Duplicate(written.base_offset);
        }
    }
    let oldest = known.map(|written| written.base_sequence).next();
    match (stamp.end_sequence(), oldest) {
        (Some(end), Some(oldest)) if end <= oldest => Verdict::DuplicateUnknownOffset,
        _ => Verdict::Overlapping,
    }
}

impl ProducerTable {
    /// What the applied log says about a batch that wants to be written.
    #[must_use]
    pub fn judge(&self, stamp: &Stamp) -> Verdict {
        match self.producers.get(&stamp.producer) {
            Some(known) => judge_against(stamp, known.epoch, known.batches.iter()),
            None if stamp.base_sequence == 0 => Verdict::Append,
            // S12: never guess. The client ends these tickets `Unknown` and takes a new epoch.
            None => Verdict::UnknownProducer,
        }
    }

    /// The epoch and last batches of a producer, oldest first.
    pub(super) fn known(&self, producer: ProducerId) -> Option<(u32, &VecDeque<Written>)> {
        self.producers
            .get(&producer)
            .map(|known| (known.epoch, &known.batches))
    }

    /// Whether a producer that is not in the table may enter now without pushing one out that
    /// could still retry.
    #[must_use]
    pub fn has_room(&self, now_ms: u64) -> bool {
        if self.producers.len() < PRODUCERS_MAX {
            return true;
        }
        self.order
            .first_key_value()
            .and_then(|(_, id)| self.producers.get(id))
            .is_none_or(|oldest| oldest.last_time_ms.saturating_add(YOUNG_MS) < now_ms)
    }

    /// Takes in a batch that the log holds at `index`. Called in log order; total: whatever the
    /// log holds is a fact.
    pub fn record(&mut self, stamp: &Stamp, base_offset: Offset, index: u64, time_ms: u64) {
        let written = Written {
            base_sequence: stamp.base_sequence,
            records: stamp.records,
            base_offset,
        };
        match self.producers.get_mut(&stamp.producer) {
            // The door lets none of these through; an older epoch must not come back.
            Some(known) if stamp.epoch < known.epoch => {}
            Some(known) => {
                if stamp.epoch > known.epoch {
                    known.epoch = stamp.epoch;
                    known.batches.clear();
                }
                if known.batches.len() == BATCHES_KEPT {
                    known.batches.pop_front();
                }
                known.batches.push_back(written);
                self.order.remove(&known.last_index);
                known.last_index = index;
                known.last_time_ms = time_ms;
                self.order.insert(index, stamp.producer);
            }
            None => {
                self.producers.insert(
                    stamp.producer,
                    Producer {
                        epoch: stamp.epoch,
                        last_index: index,
                        last_time_ms: time_ms,
                        batches: VecDeque::from([written]),
                    },
                );
                self.order.insert(index, stamp.producer);
            }
        }
        self.evict(time_ms);
    }

    /// S12: by the log's own broker time and order only.
    fn evict(&mut self, time_ms: u64) {
        while let Some((&index, &id)) = self.order.first_key_value() {
            let expired = self
                .producers
                .get(&id)
                .is_none_or(|oldest| oldest.last_time_ms.saturating_add(EXPIRY_MS) < time_ms);
            if !expired && self.producers.len() <= PRODUCERS_MAX {
                break;
            }
            self.order.remove(&index);
            self.producers.remove(&id);
        }
    }

    /// How many producers are known.
    #[must_use]
    pub fn len(&self) -> usize {
        self.producers.len()
    }

    /// Whether none is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.producers.is_empty()
    }

    /// Appends the checkpoint form.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.reserve(5 + self.producers.len() * (PRODUCER_BYTES + BATCHES_KEPT * BATCH_BYTES));
        out.put_u8(VERSION);
        out.put_u32_le(u32::try_from(self.order.len()).unwrap_or(u32::MAX));
        for id in self.order.values() {
            let Some(known) = self.producers.get(id) else {
                continue;
            };
            out.put_u64_le(id.0);
            out.put_u32_le(known.epoch);
            out.put_u64_le(known.last_index);
            out.put_u64_le(known.last_time_ms);
            out.put_u8(u8::try_from(known.batches.len()).unwrap_or(u8::MAX));
            for written in &known.batches {
                out.put_u64_le(written.base_sequence);
                out.put_u32_le(written.records);
                out.put_u64_le(written.base_offset.0);
            }
        }
    }

    /// Reads the checkpoint form; all of `input` must be used up.
    ///
    /// # Errors
    /// For anything that [`Self::encode`] does not write. Allocates no more than `input` justifies.
    pub fn decode(mut input: &[u8]) -> Result<Self, DecodeError> {
        let version = input.try_get_u8().map_err(|_| DecodeError::Length)?;
        if version != VERSION {
            return Err(DecodeError::Version(version));
        }
        let count = input.try_get_u32_le().map_err(|_| DecodeError::Length)?;
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        if count > PRODUCERS_MAX {
            return Err(DecodeError::Impossible("count of producers"));
        }
        if input.len() < count.saturating_mul(PRODUCER_BYTES + BATCH_BYTES) {
            return Err(DecodeError::Length);
        }
        let mut table = Self::default();
        for _ in 0..count {
            let (id, known) = decode_producer(&mut input)?;
            let newest = table.order.last_key_value().map(|(&index, _)| index);
            if newest.is_some_and(|newest| newest >= known.last_index) {
                return Err(DecodeError::Impossible("order of appends"));
            }
            table.order.insert(known.last_index, id);
            if table.producers.insert(id, known).is_some() {
                return Err(DecodeError::Impossible("producer listed twice"));
            }
        }
        if input.is_empty() {
            Ok(table)
        } else {
            Err(DecodeError::Length)
        }
    }
}

fn decode_producer(input: &mut &[u8]) -> Result<(ProducerId, Producer), DecodeError> {
    if input.len() < PRODUCER_BYTES {
        return Err(DecodeError::Length);
    }
    let id = ProducerId(input.get_u64_le());
    let epoch = input.get_u32_le();
    let last_index = input.get_u64_le();
    let last_time_ms = input.get_u64_le();
    let kept = usize::from(input.get_u8());
    if kept == 0 || kept > BATCHES_KEPT {
        return Err(DecodeError::Impossible("count of batches"));
    }
    if input.len() < kept * BATCH_BYTES {
        return Err(DecodeError::Length);
    }
    let mut batches = VecDeque::with_capacity(kept);
    for _ in 0..kept {
        batches.push_back(Written {
            base_sequence: input.get_u64_le(),
            records: input.get_u32_le(),
            base_offset: Offset(input.get_u64_le()),
        });
    }
    let producer = Producer {
        epoch,
        last_index,
        last_time_ms,
        batches,
    };
    Ok((id, producer))
}

#[cfg(test)]
mod tests;
