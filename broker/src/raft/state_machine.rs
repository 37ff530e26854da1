//! The pure trait that sits on a group.
//!
//! S13: an implementation sees the log and nothing else. No clock, no settings, no file, no
//! randomness: two replicas that applied the same prefix hold the same state.

use bytes::Bytes;
use qute_proto::ids::Offset;

/// What a log entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// An encoded record batch; the only kind that consumes offsets.
    Batch,
    /// The first entry of a leader's term. Its payload is empty.
    Blank,
    /// A change of voters or learners. Its payload is an encoded `internal::Membership`.
    Membership,
    /// A command to the state machine.
    Command,
}

/// A committed entry, as it is handed to [`StateMachine::apply`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppliedEntry {
    /// Term of the leader that proposed it.
    pub term: u64,
    /// Raft index.
    pub index: u64,
    /// What it is.
    pub kind: EntryKind,
    /// The next free offset in front of this entry: a batch's first offset.
    pub base_offset: Offset,
    /// Offsets it consumes: 0 unless it is a batch.
    pub records: u32,
    /// The proposing leader's clock, Unix milliseconds. Never falls along the log; blank and
    /// membership entries have that of the entry in front (S19).
    pub broker_time_ms: u64,
    /// The encoded batch or command.
    pub payload: Bytes,
}

/// A checkpoint that a state machine could not read.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("state machine checkpoint: {reason}")]
pub struct RestoreError {
    /// What is wrong with it.
    pub reason: String,
}

impl RestoreError {
    /// A checkpoint that is wrong in the way `reason` says.
    pub fn new(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
        }
    }
}

/// What a group replicates. Pure (S13): it sees the log and nothing else.
///
/// It is owned by the group and called from one task at a time. What readers need of it is
/// published by the implementation itself (a lock, a watch), before `apply` returns: the group's
/// applied watch moves only afterwards.
pub trait StateMachine: Send + Sync + 'static {
    /// Applies one committed entry and returns the answer to whoever proposed it.
    ///
    /// Called for every entry, in order, without gaps, blank and membership entries included. A
    /// restart applies again what came after the last checkpoint. It must not block and cannot
    /// fail: an entry that makes no sense is answered, not refused.
    fn apply(&mut self, entry: &AppliedEntry) -> Bytes;

    /// The state after the last applied entry. Small: it is written at each segment roll.
    fn checkpoint(&self) -> Bytes;

    /// Replaces the state by a checkpoint's; empty bytes mean the state before the first entry.
    ///
    /// # Errors
    /// The bytes are not a checkpoint of this state machine. The replica then does not open.
    fn restore(&mut self, checkpoint: &[u8]) -> Result<(), RestoreError>;

    /// First offset that must stay readable: the log may be cut below it (S17).
    fn log_start(&self) -> Offset {
        Offset(0)
    }
}
