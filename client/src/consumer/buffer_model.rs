//! The buffer against a model: a reader that hears of changes late, a stream in the middle of a batch,
//! and a program that pauses, resumes and seeks, in any interleaving. Every record from the last seek
//! on is handed out once, in order, and none of a paused partition.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use futures::FutureExt;
use proptest::prelude::*;
use qute_proto::batch::{BatchBuilder, BatchView, Codec, ProducerStamp, RecordRef};
use qute_proto::ids::ProducerId;

use super::buffer::{Buffer, Entry, Handed, Leave, Moved, SlotId, Taken};
use super::credit::Pool;
use crate::error::{Error, ErrorKind};

const SLOTS: usize = 3;
const PREFETCH: u64 = 4096;
/// Each partition's log ends here.
const END: u64 = 60;

#[derive(Debug, Clone)]
enum Op {
    /// The reader hears what was changed.
    Sync,
    /// The reader puts a batch in, of so many records.
    Fetch(SlotId, u64),
    /// The stream takes a record (and a batch, if it has none).
    Take,
    Pause(u32),
    Resume(u32),
    Seek(u32, u64),
}

fn op() -> impl Strategy<Value = Op> {
    let slot = 0..SLOTS;
    let partition = 0..u32::try_from(SLOTS).unwrap();
    prop_oneof![
        2 => Just(Op::Sync),
        5 => (slot, 1u64..5).prop_map(|(slot, records)| Op::Fetch(slot, records)),
        8 => Just(Op::Take),
        1 => partition.clone().prop_map(Op::Pause),
        1 => partition.clone().prop_map(Op::Resume),
        1 => (partition, 0..END).prop_map(|(partition, to)| Op::Seek(partition, to)),
    ]
}

fn batch(records: u64) -> BatchView {
    let mut builder = BatchBuilder::new(usize::MAX);
    for _ in 0..records {
        let record = RecordRef {
            timestamp_ms: 0,
            key: None,
            value: Some(&[7; 200]),
            headers: &[],
        };
        builder.push(&record).unwrap();
    }
    let stamp = ProducerStamp {
        producer_id: ProducerId(0),
        epoch: 0,
        base_sequence: 0,
    };
    let batch = builder.finish(Codec::None).unwrap();
    BatchView::parse(batch.seal(stamp)).unwrap()
}

fn poll(buffer: &Buffer) -> Option<Entry> {
    let mut context = Context::from_waker(Waker::noop());
    match buffer.poll_next(&mut context) {
        Poll::Ready(Some(Handed::Entry { entry, .. })) => Some(entry),
        _ => None,
    }
}

struct InHand {
    slot: SlotId,
    epoch: u64,
    taken: Taken,
    next: u64,
}

struct Model {
    buffer: Buffer,
    /// Round and next offset, as the reader believes.
    reader: [(u64, u64, bool); SLOTS],
    hand: Option<InHand>,
    /// What the program has to get next.
    expected: [u64; SLOTS],
    paused: BTreeSet<SlotId>,
}

impl Model {
    fn new() -> Self {
        let buffer = Buffer::new(Arc::new(Pool::new(PREFETCH)));
        for partition in 0..SLOTS {
            buffer.add(u32::try_from(partition).unwrap(), 0);
        }
        Self {
            buffer,
            reader: [(0, 0, true); SLOTS],
            hand: None,
            expected: [0; SLOTS],
            paused: BTreeSet::new(),
        }
    }

    fn sync(&mut self) {
        while let Some(changed) = self.buffer.changed().now_or_never() {
            for slot in changed {
                let begin = self.buffer.begin(slot).unwrap();
                self.reader[slot] = (begin.round, begin.next, begin.wanted);
            }
        }
    }

    fn fetch(&mut self, slot: SlotId, records: u64) {
        let (round, from, wanted) = self.reader[slot];
        let records = records.min(END.saturating_sub(from));
        if !wanted || records == 0 {
            return;
        }
        let batch = batch(records);
        let bytes = batch.as_bytes().len();
        let until = from + records;
        let taken = Taken {
            base_offset: from,
            from,
            until,
            broker_time_ms: 0,
            high_watermark: END,
            batch,
            credit: Arc::new(self.buffer.pool.hold(0, bytes, bytes)),
        };
        self.buffer.push(slot, round, Entry::Batch(taken), until);
        self.reader[slot].1 = until;
    }

    /// Whether a record was handed out.
    fn take(&mut self) -> Result<bool, TestCaseError> {
        if self.hand.is_none() {
            let mut context = Context::from_waker(Waker::noop());
            let Poll::Ready(handed) = self.buffer.poll_next(&mut context) else {
                return Ok(false);
            };
            let Some(Handed::Entry {
                slot,
                epoch,
                entry: Entry::Batch(taken),
                ..
            }) = handed
            else {
                return Err(TestCaseError::fail("not a batch"));
            };
            let next = taken.from;
            self.hand = Some(InHand {
                slot,
                epoch,
                taken,
                next,
            });
        }
        let Some(mut hand) = self.hand.take() else {
            return Ok(false);
        };
        let slot = hand.slot;
        match self.buffer.leave(slot, hand.epoch, hand.next) {
            Leave::Granted => {
                prop_assert!(!self.paused.contains(&slot));
                prop_assert_eq!(hand.next, self.expected[slot]);
                self.expected[slot] += 1;
                hand.next += 1;
                if hand.next < hand.taken.until {
                    self.hand = Some(hand);
                }
                Ok(true)
            }
            Leave::Paused => {
                prop_assert!(self.paused.contains(&slot));
                self.buffer.put_back(slot, hand.epoch, hand.taken);
                Ok(true)
            }
            Leave::Void => Ok(true),
        }
    }

    fn apply(&mut self, op: Op) -> Result<(), TestCaseError> {
        match op {
            Op::Sync => self.sync(),
            Op::Fetch(slot, records) => self.fetch(slot, records),
            Op::Take => drop(self.take()?),
            Op::Pause(partition) => {
                self.buffer.pause(&[partition]).unwrap();
                self.paused.insert(usize::try_from(partition).unwrap());
            }
            Op::Resume(partition) => {
                self.buffer.resume(&[partition]).unwrap();
                self.paused.remove(&usize::try_from(partition).unwrap());
            }
            Op::Seek(partition, to) => {
                self.buffer.seek(partition, to).unwrap();
                self.expected[usize::try_from(partition).unwrap()] = to;
            }
        }
        let positions = self.buffer.positions();
        let expected = (0u32..).zip(self.expected).collect();
        prop_assert_eq!(positions, expected);
        Ok(())
    }
}

#[test]
fn pause_and_resume_over_a_queued_end_do_not_revive_the_partition() {
    let failed = Entry::Failed(Error::new(ErrorKind::Timeout, "stalled"));
    for end in [Entry::End, failed] {
        let mut model = Model::new();
        model.fetch(0, 2);
        assert!(model.buffer.push(0, 0, end, 2));
        model.buffer.pause(&[0]).unwrap();
        model.sync();
        model.buffer.resume(&[0]).unwrap();
        model.sync();
        assert_eq!(model.reader[0], (2, 2, false));
        // The batch, then the end, then nothing.
        assert!(matches!(poll(&model.buffer), Some(Entry::Batch(_))));
        let end = poll(&model.buffer);
        assert!(matches!(end, Some(Entry::End | Entry::Failed(_))));
        assert!(poll(&model.buffer).is_none());
        model.buffer.seek(0, 1).unwrap();
        model.sync();
        assert_eq!(model.reader[0], (3, 1, true), "a seek does");
    }
}

#[test]
fn moves_with_nothing_between_them_are_one() {
    let model = Model::new();
    for offset in 0..1000 {
        let (from, to) = (offset, offset + 1);
        let error = Error::new(ErrorKind::OffsetOutOfRange, "gone");
        let moved = Moved { from, to, error };
        model.buffer.push(0, 0, Entry::Moved(moved), to);
    }
    let Some(Entry::Moved(moved)) = poll(&model.buffer) else {
        panic!("a move");
    };
    assert_eq!((moved.from, moved.to), (0, 1000));
    assert_eq!(model.buffer.positions()[&0], 1000);
    assert!(poll(&model.buffer).is_none());
}

proptest! {
    #[test]
    fn buffer_gives_every_record_once_whatever_is_steered(
        ops in proptest::collection::vec(op(), 0..300),
    ) {
        let mut model = Model::new();
        for op in ops {
            model.apply(op)?;
        }
        // Everything goes on: the rest comes, to the last record, and nothing is held.
        for partition in 0..3 {
            model.apply(Op::Resume(partition))?;
        }
        loop {
            model.sync();
            for slot in 0..SLOTS {
                model.fetch(slot, 3);
            }
            if !model.take()? {
                break;
            }
        }
        prop_assert_eq!(model.expected, [END; SLOTS]);
        prop_assert_eq!(model.buffer.pool.held(), Default::default());
    }

    #[test]
    fn paused_partitions_together_hold_their_part_at_most(
        fetches in proptest::collection::vec((0..SLOTS, 1u64..5), 0..60),
    ) {
        let mut model = Model::new();
        for (slot, records) in fetches {
            model.fetch(slot, records);
        }
        model.apply(Op::Take)?;
        model.buffer.pause(&[0, 1, 2]).unwrap();
        model.paused = (0..SLOTS).collect();
        // What is in hand goes back.
        model.take()?;
        let held = u64::try_from(model.buffer.pool.held().charge).unwrap();
        prop_assert!(held <= PREFETCH / 4, "{}", held);
    }
}
