//! `RaftLogStorage` and `RaftLogReader` over [`Log`]: the Raft log *is* the data log.
//!
//! A batch is written once, into the segment that consumers read. Nothing is kept here: the log
//! knows its entries, its vote and its marks.
//!
//! ```text
//!   openraft core --append--> Log (readable at once) --flusher--> synced --> IOFlushed
//!                 --save_vote, truncate, purge--> awaited inline: the log keeps them fast
//!   replication, apply  <--read-- tail cache, else segment files
//! ```
//!
//! Reads are bounded in bytes, never only in entries: openraft counts entries, and sixty-four of
//! them can be 256 MiB.

use std::fmt::Debug;
use std::io;
use std::ops::{Bound, RangeBounds, RangeInclusive};
use std::sync::Arc;

use futures::{Stream, StreamExt, TryStreamExt};
use openraft::storage::{IOFlushed, LogState, RaftLogReader, RaftLogStorage};
use openraft::{EntryPayload, OptionalSend};

use tokio_util::sync::DropGuard;

use super::codec::{self, vote};
use super::types::{Entry, LogId, Payload, PayloadKind, TypeConfig, Vote, log_id};
use crate::storage::{Frame, FrameKind, Log, NewFrame, Position, VoteRecord};

/// Bytes of one read for replication, at most (but never less than one entry).
const READ_BYTES_MAX: usize = 2 << 20;

/// The log of one replica, as openraft sees it. Clones read the same log.
#[derive(Clone)]
pub struct LogStore {
    log: Arc<Log>,
    // Dropped last of all: the log may then be opened again.
    _closed: Option<Arc<DropGuard>>,
}

impl LogStore {
    pub(super) fn new(log: Arc<Log>, closed: Option<Arc<DropGuard>>) -> Self {
        Self {
            log,
            _closed: closed,
        }
    }

    /// Reads frames from `start` on, at least one if there is one in front of `end`.
    async fn read(&self, start: u64, end: u64) -> Result<Vec<Entry>, io::Error> {
        if start >= end {
            return Ok(Vec::new());
        }
        let frames = read_frames(&self.log, start, end).await?;
        frames.into_iter().map(entry_of_frame).collect()
    }

    fn term_at(&self, index: u64) -> Result<u64, io::Error> {
        self.log
            .term_at(index)
            .ok_or_else(|| io::Error::other(format!("the log has no entry at index {index}")))
    }
}

async fn read_frames(log: &Arc<Log>, start: u64, end: u64) -> Result<Vec<Frame>, io::Error> {
    // From memory at once; a read of files must not hold a worker of the runtime.
    let read = if start >= log.cached_from() {
        log.read(start..end, READ_BYTES_MAX)
    } else {
        let log = Arc::clone(log);
        tokio::task::spawn_blocking(move || log.read(start..end, READ_BYTES_MAX)).await?
    };
    read.map_err(io::Error::other)
}

pub(super) fn position(id: LogId) -> Position {
    Position {
        term: id.leader_id.term,
        index: id.index,
    }
}

pub(super) fn log_id_at(position: Position) -> LogId {
    log_id(position.term, position.index)
}

/// The frame that holds an entry.
pub(super) fn frame_of_entry(entry: &Entry) -> NewFrame {
    let mut frame = NewFrame {
        term: entry.log_id.leader_id.term,
        index: entry.log_id.index,
        kind: FrameKind::Blank,
        broker_time_ms: 0,
        records: 0,
        payload: bytes::Bytes::new(),
    };
    match &entry.payload {
        EntryPayload::Blank => {}
        EntryPayload::Normal(payload) => {
            frame.kind = match payload.kind {
                PayloadKind::Batch => FrameKind::Batch,
                PayloadKind::Command => FrameKind::Command,
            };
            frame.broker_time_ms = payload.broker_time_ms;
            frame.records = payload.records;
            frame.payload = payload.bytes.clone();
        }
        EntryPayload::Membership(membership) => {
            frame.kind = FrameKind::Membership;
            frame.payload = codec::encode_membership(membership);
        }
    }
    frame
}

/// The entry that a frame holds.
pub(super) fn entry_of_frame(frame: Frame) -> Result<Entry, io::Error> {
    let invalid = |what: String| {
        let place = format!("frame {}.{}: {what}", frame.term, frame.index);
        io::Error::new(io::ErrorKind::InvalidData, place)
    };
    let normal = |kind| {
        EntryPayload::Normal(Payload {
            kind,
            broker_time_ms: frame.broker_time_ms,
            records: frame.records,
            base_offset: frame.base_offset,
            bytes: frame.payload.clone(),
            space: None,
        })
    };
    let payload = match frame.kind {
        FrameKind::Blank => EntryPayload::Blank,
        FrameKind::Batch => normal(PayloadKind::Batch),
        FrameKind::Command => normal(PayloadKind::Command),
        FrameKind::Membership => {
            let membership = codec::decode_membership(&frame.payload);
            EntryPayload::Membership(membership.map_err(|error| invalid(error.to_string()))?)
        }
        FrameKind::Gap => return Err(invalid("a gap is no entry".to_owned())),
    };
    Ok(Entry {
        log_id: log_id(frame.term, frame.index),
        payload,
    })
}

/// The half-open range of indexes that `range` means in `log`.
fn bounds(log: &Log, range: &impl RangeBounds<u64>) -> (u64, u64) {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(start) => start.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(end) => end.saturating_add(1),
        Bound::Excluded(end) => *end,
        Bound::Unbounded => u64::MAX,
    };
    // Absent entries are tolerated in front of the log and behind it, nowhere else.
    let first = log.purged().map_or(0, |purged| purged.index + 1);
    let next = log.last().map_or(first, |last| last.index + 1);
    (start.max(first), end.min(next))
}

impl RaftLogReader<TypeConfig> for LogStore {
    async fn try_get_log_entries<RB>(&mut self, range: RB) -> Result<Vec<Entry>, io::Error>
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        let (mut start, end) = bounds(&self.log, &range);
        let mut entries = Vec::new();
        while start < end {
            let more = self.read(start, end).await?;
            let Some(last) = more.last() else {
                let hole = format!("the log lacks index {start}, though it reaches to {end}");
                return Err(io::Error::new(io::ErrorKind::InvalidData, hole));
            };
            start = last.log_id.index + 1;
            entries.extend(more);
        }
        Ok(entries)
    }

    async fn entries_stream<RB>(
        &mut self,
        range: RB,
    ) -> impl Stream<Item = Result<Entry, io::Error>> + OptionalSend
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        // In pieces: a whole range of committed entries may be gigabytes at start.
        let (start, end) = bounds(&self.log, &range);
        let reader = self.clone();
        futures::stream::try_unfold((reader, start), move |(reader, start)| async move {
            if start >= end {
                return Ok::<_, io::Error>(None);
            }
            let entries = reader.read(start, end).await?;
            let Some(last) = entries.last() else {
                let hole = format!("the log lacks index {start}, though it reaches to {end}");
                return Err(io::Error::new(io::ErrorKind::InvalidData, hole));
            };
            let next = last.log_id.index + 1;
            Ok(Some((entries, (reader, next))))
        })
        .map_ok(|entries| futures::stream::iter(entries).map(Ok))
        .try_flatten()
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        Ok(self.log.vote().and_then(|record| {
            let voted_for = record.voted_for?;
            Some(vote(record.term, voted_for, record.committed))
        }))
    }

    async fn limited_get_log_entries(
        &mut self,
        start: u64,
        end: u64,
    ) -> Result<Vec<Entry>, io::Error> {
        self.read(start, end).await
    }

    async fn get_key_log_ids(
        &mut self,
        range: RangeInclusive<LogId>,
    ) -> Result<Vec<LogId>, io::Error> {
        // The last entry of each term in the range, found without reading payloads.
        let (mut first, last) = (*range.start(), *range.end());
        let mut ids = Vec::new();
        while first.leader_id < last.leader_id {
            // The last index of this term: terms never fall along the log.
            let (mut low, mut high) = (first.index, last.index);
            while high - low > 1 {
                let middle = low + (high - low) / 2;
                if self.term_at(middle)? == first.leader_id.term {
                    low = middle;
                } else {
                    high = middle;
                }
            }
            ids.push(log_id(first.leader_id.term, low));
            first = log_id(self.term_at(high)?, high);
        }
        ids.push(last);
        Ok(ids)
    }
}

impl RaftLogStorage<TypeConfig> for LogStore {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<TypeConfig>, io::Error> {
        let purged = self.log.purged();
        Ok(LogState {
            last_purged_log_id: purged.map(log_id_at),
            last_log_id: self.log.last().or(purged).map(log_id_at),
        })
    }

    async fn get_log_reader(&mut self) -> Self::LogReader {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        let record = VoteRecord {
            term: vote.leader_id.term,
            voted_for: Some(vote.leader_id.voted_for),
            committed: vote.committed,
        };
        self.log.save_vote(record).await.map_err(io::Error::other)
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), io::Error> {
        if let Some(committed) = committed {
            // Lowered by the log to what is synced (S1).
            self.log.save_committed(position(committed));
        }
        Ok(())
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, io::Error> {
        Ok(self.log.committed().map(log_id_at))
    }

    async fn append<I>(
        &mut self,
        entries: I,
        callback: IOFlushed<TypeConfig>,
    ) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        // S4: the space promised to these entries is theirs until the log has taken them.
        let mut promised = Vec::new();
        let mut frames = Vec::new();
        // S19: time in the log never falls, and entries that bring none take that of the one in
        // front. All replicas do the same, so the content of their frames is the same.
        let mut time_ms = self.log.last_time_ms();
        for entry in entries {
            let mut frame = frame_of_entry(&entry);
            time_ms = time_ms.max(frame.broker_time_ms);
            frame.broker_time_ms = time_ms;
            frames.push(frame);
            if let EntryPayload::Normal(payload) = entry.payload {
                promised.extend(payload.space);
            }
        }
        if frames.is_empty() {
            callback.io_completed(Ok(()));
            return Ok(());
        }
        self.log
            .append(frames, move |result| {
                callback.io_completed(result.map_err(io::Error::other));
            })
            .map_err(io::Error::other)
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> Result<(), io::Error> {
        self.log
            .truncate_after(last.map(|last| last.index))
            .await
            .map_err(io::Error::other)
    }

    async fn purge(&mut self, upto: LogId) -> Result<(), io::Error> {
        if self.log.purged() >= Some(position(upto)) {
            // A snapshot that did not fit the log has emptied it already.
            return Ok(());
        }
        self.log
            .purge(position(upto))
            .await
            .map_err(io::Error::other)?;
        // What is older than the snapshot can never be one again.
        let log = Arc::clone(&self.log);
        tokio::task::spawn_blocking(move || {
            if let Err(error) = log.drop_checkpoints_below(upto.index) {
                tracing::warn!(replica = %log.key(), %error, "old checkpoints not removed");
            }
        });
        Ok(())
    }
}
