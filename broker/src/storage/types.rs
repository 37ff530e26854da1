//! The words that storage shares with the layers above. Term and index are plain numbers here:
//! storage knows no Raft types.

use std::fmt;

use bytes::Bytes;
use qute_proto::ids::{PartitionId, ReplicaId};

/// One replica on this broker: what a log belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReplicaKey {
    /// The partition.
    pub partition: PartitionId,
    /// The replica, handed out once (S9).
    pub replica: ReplicaId,
}

impl fmt::Display for ReplicaKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.partition, self.replica)
    }
}

/// A place in a log. The first entry of a log has index 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// The leader's term when the entry was made.
    pub term: u64,
    /// The Raft index.
    pub index: u64,
}

/// What a frame holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameKind {
    /// A record batch: the only kind that consumes offsets.
    Batch = 1,
    /// A leader's first entry: nothing.
    Blank = 2,
    /// A membership of the group.
    Membership = 3,
    /// A command to the state machine.
    Command = 4,
    /// What compaction leaves of a range (reserved).
    Gap = 5,
}

impl FrameKind {
    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Batch),
            2 => Some(Self::Blank),
            3 => Some(Self::Membership),
            4 => Some(Self::Command),
            5 => Some(Self::Gap),
            _ => None,
        }
    }
}

/// A frame to append. Its base offset is the log's next offset.
#[derive(Debug, Clone)]
pub struct NewFrame {
    /// The leader's term.
    pub term: u64,
    /// The Raft index; must follow the last one.
    pub index: u64,
    /// What it holds.
    pub kind: FrameKind,
    /// The leader's broker time in Unix milliseconds; never falls (S19).
    pub broker_time_ms: u64,
    /// How many offsets it consumes: the records of a batch, 0 for every other kind.
    pub records: u32,
    /// The content, carried untouched.
    pub payload: Bytes,
}

/// A frame of the log. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The leader's term.
    pub term: u64,
    /// The Raft index.
    pub index: u64,
    /// What it holds.
    pub kind: FrameKind,
    /// Offset of its first record; for other kinds the offset that the next record gets.
    pub base_offset: u64,
    /// How many offsets it consumes.
    pub records: u32,
    /// Broker time in Unix milliseconds.
    pub broker_time_ms: u64,
    /// The content.
    pub payload: Bytes,
}

impl Frame {
    /// Where it stands.
    #[must_use]
    pub fn position(&self) -> Position {
        Position {
            term: self.term,
            index: self.index,
        }
    }

    /// The offset after its last record.
    #[must_use]
    pub fn end_offset(&self) -> u64 {
        self.base_offset + u64::from(self.records)
    }
}

/// A replica's vote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VoteRecord {
    /// In this term.
    pub term: u64,
    /// For this replica.
    pub voted_for: Option<u64>,
    /// Whether that replica is known to have won.
    pub committed: bool,
}

/// When an append counts as done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Durability {
    /// When it is synced.
    #[default]
    Disk,
    /// When the page cache has it; synced in the background. Votes are always synced.
    Memory,
}

/// Settings of one log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogConfig {
    /// A segment is closed before it outgrows this. 4 KiB to 1 GiB.
    pub segment_bytes: u64,
    /// When an append counts as done.
    pub durability: Durability,
}

impl LogConfig {
    /// The smallest segment.
    pub const SEGMENT_BYTES_MIN: u64 = 4 << 10;
    /// The largest segment.
    pub const SEGMENT_BYTES_MAX: u64 = 1 << 30;
}

impl Default for LogConfig {
    fn default() -> Self {
        Self {
            segment_bytes: 128 << 20,
            durability: Durability::Disk,
        }
    }
}

/// Figures of one log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LogStats {
    /// Bytes of frames and headers in its segments, without blocks written ahead.
    pub size_bytes: u64,
    /// Bytes of blocks written ahead.
    pub prewritten_bytes: u64,
    /// Number of segments.
    pub segments: usize,
    /// Frames kept in memory.
    pub cached_bytes: u64,
}
