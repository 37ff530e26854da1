//! Blocks written ahead of the active segment's end, off the hot path.
//!
//! A sync of blocks that exist costs a third of a sync that must also allocate them and grow the
//! file (`docs/adr/0004-sync-strategy.md`). The background thread writes zeros in pieces; the
//! flusher waits only for a piece that it runs into, and otherwise overtakes.

use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// A piece of zeros written at once.
pub(super) const PIECE_BYTES: u64 = 256 << 10;
const PAGE: u64 = 4096;
const STEP_BYTES_MIN: u64 = 64 << 10;
const STEP_BYTES_MAX: u64 = 4 << 20;

/// What did not work (no file descriptor, no space) is not tried again with each round.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// See the module's documentation.
pub(super) struct Ahead {
    /// Only where somebody waits for syncs.
    is_wanted: bool,
    inner: Mutex<Inner>,
    piece_done: Condvar,
}

struct Inner {
    segment: u64,
    path: PathBuf,
    /// The flusher's position.
    write_pos: u64,
    /// Blocks exist up to here.
    ready_to: u64,
    /// The piece being written.
    busy: Option<Range<u64>>,
    is_queued: bool,
    /// The last piece was given up: none before this.
    not_before: Option<Instant>,
    /// Recent bytes a round: large rounds gain nothing from blocks written ahead.
    round_bytes: u64,
}

/// Rounds of this many bytes are bound by bandwidth, which zeros would only halve.
const ROUND_BYTES_MAX: u64 = 1 << 20;

impl Ahead {
    pub(super) fn new(
        is_wanted: bool,
        segment: u64,
        path: PathBuf,
        write_pos: u64,
        ready_to: u64,
    ) -> Self {
        Self {
            is_wanted,
            inner: Mutex::new(Inner {
                segment,
                path,
                write_pos,
                ready_to,
                busy: None,
                is_queued: false,
                not_before: None,
                round_bytes: 0,
            }),
            piece_done: Condvar::new(),
        }
    }

    /// The flusher goes on in another file, or elsewhere in this one.
    pub(super) fn moved(&self, segment: u64, path: PathBuf, write_pos: u64, ready_to: u64) {
        let mut inner = self.inner.lock();
        while inner.busy.is_some() {
            self.piece_done.wait(&mut inner);
        }
        inner.segment = segment;
        inner.path = path;
        inner.write_pos = write_pos;
        inner.ready_to = ready_to.max(write_pos);
    }

    /// The flusher is about to write up to `end`. Returns how many of those bytes are in blocks
    /// that do not exist yet, and whether more should be written ahead.
    pub(super) fn claim(&self, end: u64) -> (u64, bool) {
        let mut inner = self.inner.lock();
        while inner.busy.as_ref().is_some_and(|piece| piece.start < end) {
            self.piece_done.wait(&mut inner);
        }
        let bytes = end.saturating_sub(inner.write_pos);
        inner.round_bytes = (inner.round_bytes * 7 + bytes) / 8;
        let fresh = end.saturating_sub(inner.ready_to.max(inner.write_pos));
        inner.write_pos = end;
        inner.ready_to = inner.ready_to.max(end);
        let left = inner.ready_to - end;
        let wants = self.is_wanted
            && left < step(end) / 2
            && !inner.is_queued
            && inner.round_bytes < ROUND_BYTES_MAX
            && inner.not_before.is_none_or(|at| at <= Instant::now());
        inner.is_queued |= wants;
        (fresh, wants)
    }

    /// The next piece to write: its file, segment and range; `None` when enough is there.
    pub(super) fn next_piece(&self, segment_bytes: u64) -> Option<(u64, PathBuf, Range<u64>)> {
        let mut inner = self.inner.lock();
        let limit = super::codec::align_up(segment_bytes, PAGE);
        let target = (inner.write_pos + step(inner.write_pos)).min(limit);
        let start = super::codec::align_up(inner.ready_to.max(inner.write_pos), PAGE);
        if start >= target {
            inner.is_queued = false;
            return None;
        }
        let piece = start..(start + PIECE_BYTES).min(super::codec::align_up(target, PAGE));
        inner.busy = Some(piece.clone());
        Some((inner.segment, inner.path.clone(), piece))
    }

    /// The piece is written, or given up.
    pub(super) fn piece_done(&self, is_written: bool) {
        let mut inner = self.inner.lock();
        if let Some(piece) = inner.busy.take()
            && is_written
        {
            inner.ready_to = inner.ready_to.max(piece.end);
        }
        inner.not_before = None;
        if !is_written {
            inner.is_queued = false;
            inner.not_before = Some(Instant::now() + RETRY_AFTER);
        }
        self.piece_done.notify_all();
    }

    /// Bytes of blocks ahead of the write position.
    pub(super) fn bytes(&self) -> u64 {
        let inner = self.inner.lock();
        inner.ready_to.saturating_sub(inner.write_pos)
    }
}

/// Small partitions stay small: the step grows with the segment.
fn step(write_pos: u64) -> u64 {
    write_pos.clamp(STEP_BYTES_MIN, STEP_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn piece_that_failed_is_tried_again_later_not_with_the_next_round() {
        let ahead = Ahead::new(true, 1, PathBuf::from("a"), 0, 0);
        assert_eq!(ahead.claim(100), (100, true));
        assert!(ahead.next_piece(1 << 20).is_some());
        ahead.piece_done(false);
        for end in 1..100 {
            assert_eq!(ahead.claim(100 + end), (1, false), "{end}");
        }
        ahead.inner.lock().not_before = Some(Instant::now());
        assert_eq!(ahead.claim(300), (101, true));
        assert!(ahead.next_piece(1 << 20).is_some());
        ahead.piece_done(true);
        assert!(ahead.next_piece(1 << 20).is_none());
        assert_eq!(ahead.claim(60_000), (0, true));
    }
}
