//! The state machine of a records partition: the producer table and the log start.
//!
//! The log is the data, so there is little state: what idempotence needs (S12), where the log
//! begins (S17), and how far broker time has come (S19). [`RecordsMachine::apply`] reads nothing
//! but the entry (S13), so two replicas that applied the same prefix hold the same bytes of
//! checkpoint. It runs on the group's apply task; the door and readers look through
//! [`RecordsState`], which is up to date before the group's applied watch moves.
//!
//! Checkpoint, little endian, version 1:
//!
//! ```text
//! version u8 | log start u64 | next offset u64 | last broker time ms u64 | producer table (rest)
//! ```
//!
//! Command, little endian, version 1: `version u8 | kind u8 | body`. Kind 1, *log start*: offset
//! u64. Reply: `status u8 (0 done, 1 not understood) | log start u64`.

use std::sync::Arc;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use parking_lot::Mutex;
use qute_proto::batch::BatchHeader;
use qute_proto::ids::Offset;

use super::intake::stamp_of;
use super::producers::{ProducerTable, Stamp, Verdict};
use crate::raft::{AppliedEntry, EntryKind, RestoreError, StateMachine};

const CHECKPOINT_VERSION: u8 = 1;
const COMMAND_VERSION: u8 = 1;
const KIND_LOG_START: u8 = 1;
const REPLY_DONE: u8 = 0;
const REPLY_UNKNOWN: u8 = 1;

#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct State {
    producers: ProducerTable,
    log_start: Offset,
    /// One past the last applied record.
    next_offset: Offset,
    /// The greatest broker time applied.
    last_time_ms: u64,
}

/// The applied state as the door and readers see it. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct RecordsState {
    /// Held for a table lookup or an insert: never across an await, never during I/O.
    state: Arc<Mutex<State>>,
}

impl RecordsState {
    /// First readable offset (S17).
    #[must_use]
    pub fn log_start(&self) -> Offset {
        self.state.lock().log_start
    }

    /// The greatest broker time in the applied log, Unix milliseconds.
    #[must_use]
    pub fn last_time_ms(&self) -> u64 {
        self.state.lock().last_time_ms
    }

    /// How many producers the table knows.
    #[must_use]
    pub fn producers(&self) -> usize {
        self.state.lock().producers.len()
    }

    /// What the applied log says about a batch.
    #[must_use]
    pub fn judge(&self, stamp: &Stamp) -> Verdict {
        self.state.lock().producers.judge(stamp)
    }

    /// Looks at the producer table.
    pub fn with_producers<T>(&self, look: impl FnOnce(&ProducerTable) -> T) -> T {
        look(&self.state.lock().producers)
    }
}

/// A command to a records partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Records below this offset are no longer readable. Never goes back, never passes the end.
    LogStart(Offset),
}

impl Command {
    /// What is proposed.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(10);
        out.put_u8(COMMAND_VERSION);
        match self {
            Self::LogStart(offset) => {
                out.put_u8(KIND_LOG_START);
                out.put_u64_le(offset.0);
            }
        }
        out.freeze()
    }

    /// Reads a command; `None` for one of a newer broker, or no command at all.
    #[must_use]
    pub fn decode(mut input: &[u8]) -> Option<Self> {
        if input.try_get_u8().ok()? != COMMAND_VERSION {
            return None;
        }
        match input.try_get_u8().ok()? {
            KIND_LOG_START => {
                let offset = input.try_get_u64_le().ok()?;
                input.is_empty().then_some(Self::LogStart(Offset(offset)))
            }
            _ => None,
        }
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct RecordsMachine {
    shared: RecordsState,
}

impl RecordsMachine {
    /// The state before the first entry.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The view that readers keep.
    #[must_use]
    pub fn state(&self) -> RecordsState {
        self.shared.clone()
    }
}

impl State {
    fn apply_batch(&mut self, entry: &AppliedEntry) {
        self.next_offset = Offset(entry.base_offset.0.saturating_add(u64::from(entry.records)));
        // Only batches with a sound header are proposed; whatever else stands in the log is not
        // idempotent.
        let Some(stamp) = BatchHeader::parse(&entry.payload)
            .ok()
            .and_then(|header| stamp_of(&header))
        else {
            return;
        };
        self.producers
            .record(&stamp, entry.base_offset, entry.index, self.last_time_ms);
    }

    fn apply_command(&mut self, payload: &[u8]) -> Bytes {
        let status = match Command::decode(payload) {
            Some(Command::LogStart(offset)) => {
                self.log_start = self.log_start.max(offset.min(self.next_offset));
                REPLY_DONE
            }
            None => REPLY_UNKNOWN,
        };
        let mut reply = BytesMut::with_capacity(9);
        reply.put_u8(status);
        reply.put_u64_le(self.log_start.0);
        reply.freeze()
    }

    fn encode(&self) -> Bytes {
        let mut out = Vec::new();
        out.put_u8(CHECKPOINT_VERSION);
        out.put_u64_le(self.log_start.0);
        out.put_u64_le(self.next_offset.0);
        out.put_u64_le(self.last_time_ms);
        self.producers.encode(&mut out);
        Bytes::from(out)
    }

    fn decode(mut input: &[u8]) -> Result<Self, RestoreError> {
        let short = |_| RestoreError::new("shorter than its fixed part");
        let version = input.try_get_u8().map_err(short)?;
        if version != CHECKPOINT_VERSION {
            return Err(RestoreError::new(format!(
                "version {version}, this broker reads {CHECKPOINT_VERSION}"
            )));
        }
        Ok(Self {
            log_start: Offset(input.try_get_u64_le().map_err(short)?),
            next_offset: Offset(input.try_get_u64_le().map_err(short)?),
            last_time_ms: input.try_get_u64_le().map_err(short)?,
            producers: ProducerTable::decode(input)
                .map_err(|error| RestoreError::new(error.to_string()))?,
        })
    }
}

impl StateMachine for RecordsMachine {
    // S13: nothing but the entry and the state made of earlier entries.
    fn apply(&mut self, entry: &AppliedEntry) -> Bytes {
        let mut state = self.shared.state.lock();
        // S19: never falls. Blank and membership entries carry no time.
        state.last_time_ms = state.last_time_ms.max(entry.broker_time_ms);
        match entry.kind {
            EntryKind::Batch => {
                state.apply_batch(entry);
                Bytes::new()
            }
            EntryKind::Command => state.apply_command(&entry.payload),
            EntryKind::Blank | EntryKind::Membership => Bytes::new(),
        }
    }

    fn checkpoint(&self) -> Bytes {
        self.shared.state.lock().encode()
    }

    fn restore(&mut self, checkpoint: &[u8]) -> Result<(), RestoreError> {
        let restored = if checkpoint.is_empty() {
            State::default()
        } else {
            State::decode(checkpoint)?
        };
        *self.shared.state.lock() = restored;
        Ok(())
    }

    fn log_start(&self) -> Offset {
        self.shared.state.lock().log_start
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use qute_proto::batch::{BatchBuilder, Codec, ProducerStamp, RecordRef};
    use qute_proto::ids::ProducerId;

    use super::*;

    fn batch(producer: u64, base_sequence: u64) -> Bytes {
        let mut builder = BatchBuilder::new(1 << 20);
        let record = RecordRef {
            key: None,
            value: Some(b"v"),
            headers: &[],
            timestamp_ms: 1,
        };
        builder.push(&record).unwrap();
        builder.finish(Codec::None).unwrap().seal(ProducerStamp {
            producer_id: ProducerId(producer),
            epoch: 0,
            base_sequence,
        })
    }

    fn entry(
        index: u64,
        kind: EntryKind,
        base_offset: u64,
        time: u64,
        payload: Bytes,
    ) -> AppliedEntry {
        AppliedEntry {
            term: 1,
            index,
            kind,
            base_offset: Offset(base_offset),
            records: u32::from(kind == EntryKind::Batch),
            broker_time_ms: time,
            payload,
        }
    }

    fn log_start(index: u64, end: u64, offset: u64) -> AppliedEntry {
        let command = Command::LogStart(Offset(offset)).encode();
        entry(index, EntryKind::Command, end, 9, command)
    }

    #[test]
    fn batch_enters_the_table_when_applied() {
        let mut machine = RecordsMachine::new();
        machine.apply(&entry(1, EntryKind::Blank, 0, 0, Bytes::new()));
        machine.apply(&entry(2, EntryKind::Batch, 0, 5, batch(7, 0)));
        let retried = Stamp {
            producer: ProducerId(7),
            epoch: 0,
            base_sequence: 0,
            records: 1,
        };
        assert_eq!(
            machine.state().judge(&retried),
            Verdict::Duplicate(Offset(0))
        );
        assert_eq!(machine.state().last_time_ms(), 5);
    }

    #[test]
    fn log_start_never_goes_back_and_never_passes_the_end() {
        let mut machine = RecordsMachine::new();
        for n in 0..4 {
            machine.apply(&entry(n, EntryKind::Batch, n, 5, batch(7, n)));
        }
        machine.apply(&log_start(4, 4, 2));
        assert_eq!(machine.log_start(), Offset(2));
        machine.apply(&log_start(5, 4, 1));
        assert_eq!(machine.log_start(), Offset(2));
        machine.apply(&log_start(6, 4, 100));
        assert_eq!(machine.log_start(), Offset(4));
    }

    #[test]
    fn unknown_command_is_answered_and_changes_nothing() {
        let mut machine = RecordsMachine::new();
        let before = machine.checkpoint();
        let payload = Bytes::from_static(&[9, 9]);
        let reply = machine.apply(&entry(1, EntryKind::Command, 0, 0, payload));
        assert_eq!(reply.first(), Some(&REPLY_UNKNOWN));
        assert_eq!(machine.checkpoint(), before);
    }

    #[test]
    fn unreadable_batch_in_the_log_is_no_producer() {
        let mut machine = RecordsMachine::new();
        let payload = Bytes::from_static(b"nonsense");
        machine.apply(&entry(1, EntryKind::Batch, 0, 3, payload));
        assert_eq!(machine.state().producers(), 0);
    }

    #[test]
    fn broker_time_never_falls() {
        let mut machine = RecordsMachine::new();
        machine.apply(&entry(1, EntryKind::Batch, 0, 50, batch(7, 0)));
        machine.apply(&entry(2, EntryKind::Batch, 1, 20, batch(7, 1)));
        assert_eq!(machine.state().last_time_ms(), 50);
    }

    #[test]
    fn checkpoint_of_a_newer_version_is_refused() {
        let mut machine = RecordsMachine::new();
        assert!(machine.restore(&[2; 40]).is_err());
        assert!(machine.restore(&[]).is_ok());
    }

    proptest! {
        // S13: a replica that starts from a checkpoint ends in the same state, byte for byte.
        #[test]
        fn checkpoint_and_replay_give_the_same_state(
            steps in prop::collection::vec((0u8..10, 1u64..4, 0u64..100), 1..60),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut entries = Vec::new();
            let mut sequences = [0u64; 4];
            let mut end = 0;
            for (index, (kind, producer, number)) in (0u64..).zip(steps) {
                entries.push(match kind {
                    0 => entry(index, EntryKind::Blank, end, 0, Bytes::new()),
                    1 => log_start(index, end, number),
                    _ => {
                        let slot = usize::try_from(producer).unwrap();
                        let bytes = batch(producer, sequences[slot]);
                        sequences[slot] += 1;
                        end += 1;
                        entry(index, EntryKind::Batch, end - 1, number, bytes)
                    }
                });
            }
            let cut = cut.index(entries.len());
            let (mut through, mut first, mut second) =
                (RecordsMachine::new(), RecordsMachine::new(), RecordsMachine::new());
            entries.iter().for_each(|one| drop(through.apply(one)));
            entries[..cut].iter().for_each(|one| drop(first.apply(one)));
            second.restore(&first.checkpoint()).unwrap();
            entries[cut..].iter().for_each(|one| drop(second.apply(one)));
            prop_assert_eq!(through.checkpoint(), second.checkpoint());
        }

        #[test]
        fn any_checkpoint_bytes_are_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut machine = RecordsMachine::new();
            let _ = machine.restore(&bytes);
            let mut versioned = vec![CHECKPOINT_VERSION];
            versioned.extend_from_slice(&bytes);
            let _ = machine.restore(&versioned);
            let _ = Command::decode(&bytes);
        }
    }
}
