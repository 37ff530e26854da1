//! A log as callers see it, in memory: what was appended counts, synced or not.
//!
//! Guarded by the log's `state` lock, which is held for moments only and never across file access.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::header::SEGMENT_HEADER;
use super::index::{SegmentEnd, TermRuns};
use super::segment::Segment;
use super::types::{Frame, Position, VoteRecord};
use super::writer::Cut;

/// Memory of a cached frame beyond its payload.
const FRAME_OVERHEAD: u64 = 128;

/// A segment that an append has begun and whose file does not exist yet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    /// Unique in this process.
    pub id: u64,
    pub base_index: u64,
    pub base_offset: u64,
    pub prev_term: u64,
    pub prev_time_ms: u64,
}

/// A frame in memory and where it lies, or will.
pub(super) struct Cached {
    pub frame: Frame,
    pub segment_base: u64,
    pub pos: u32,
}

pub(super) fn cost(frame: &Frame) -> u64 {
    frame.payload.len() as u64 + FRAME_OVERHEAD
}

/// The log as callers see it: appended entries count, synced or not.
pub(super) struct State {
    pub purged: Option<Position>,
    pub next_index: u64,
    pub next_offset: u64,
    pub last_time_ms: u64,
    pub terms: TermRuns,
    /// Files, by base index, without gaps.
    pub segments: VecDeque<Arc<Segment>>,
    /// Segments still to be made, later than all files.
    pub planned: VecDeque<Plan>,
    /// Base index of the segment that takes the next frame, and where in it.
    pub tail_base: u64,
    pub tail_pos: u32,
    /// The next frame begins a new segment, whether or not it would fit this one.
    pub roll_asked: bool,
    /// The newest frames, contiguous, up to `next_index`.
    pub cache: VecDeque<Cached>,
    /// Rises with each truncation and reset: what a reader saw before may be gone.
    pub cut_epoch: u64,
    pub committed: Option<Position>,
    pub vote: Option<VoteRecord>,
}

impl State {
    /// The first index that may be read.
    pub(super) fn first_index(&self) -> u64 {
        self.purged.map_or(0, |purged| purged.index + 1)
    }

    pub(super) fn term_at(&self, index: u64) -> Option<u64> {
        if let Some(purged) = self.purged
            && index == purged.index
        {
            return Some(purged.term);
        }
        if index < self.first_index() || index >= self.next_index {
            return None;
        }
        self.terms.term_at(index)
    }

    pub(super) fn last(&self) -> Option<Position> {
        let index = self.next_index.checked_sub(1)?;
        Some(Position {
            term: self.term_at(index)?,
            index,
        })
    }

    /// The cached frame `index`.
    pub(super) fn cached(&self, index: u64) -> Option<&Cached> {
        let first = self.cache.front()?.frame.index;
        self.cache
            .get(super::codec::usize_of(index.checked_sub(first)?))
    }

    /// The file that holds, or would hold, `index`.
    pub(super) fn segment_of(&self, index: u64) -> Option<&Arc<Segment>> {
        let at = self
            .segments
            .partition_point(|segment| segment.base_index() <= index);
        self.segments.get(at.checked_sub(1)?)
    }
}

fn header_pos() -> u32 {
    u32::try_from(SEGMENT_HEADER).unwrap_or(u32::MAX)
}

/// A number for a segment to be made.
pub(super) fn plan_id() -> u64 {
    static PLAN: AtomicU64 = AtomicU64::new(1);
    PLAN.fetch_add(1, Ordering::Relaxed)
}

impl State {
    /// Begins a new segment when a frame of `len` bytes does not fit any more, or when asked. Decided here, at the
    /// append, so that the bases of segments are known before an entry is applied.
    pub(super) fn roll_before(&mut self, len: u64, segment_bytes: u64) -> Option<Plan> {
        let is_full = u64::from(self.tail_pos) + len > segment_bytes;
        let is_empty = self.tail_pos <= header_pos();
        if is_empty || !(is_full || self.roll_asked) {
            return None;
        }
        self.roll_asked = false;
        let plan = Plan {
            id: plan_id(),
            base_index: self.next_index,
            base_offset: self.next_offset,
            prev_term: self.last().map_or(0, |last| last.term),
            prev_time_ms: self.last_time_ms,
        };
        self.planned.push_back(plan);
        self.tail_base = plan.base_index;
        self.tail_pos = header_pos();
        Some(plan)
    }

    pub(super) fn push(&mut self, frame: &Frame, len: u64) {
        self.terms.push(frame.index, frame.term);
        self.next_index = frame.index + 1;
        self.next_offset = frame.end_offset();
        self.last_time_ms = frame.broker_time_ms;
        self.cache.push_back(Cached {
            frame: frame.clone(),
            segment_base: self.tail_base,
            pos: self.tail_pos,
        });
        let pos = u64::from(self.tail_pos) + len;
        self.tail_pos = u32::try_from(pos).unwrap_or(u32::MAX);
    }

    /// Ends the log for callers. Returns what leaves the cache.
    pub(super) fn cut(&mut self, cut: &Cut, end: &SegmentEnd) -> Vec<Cached> {
        self.terms.cut(cut.from_index);
        self.next_index = cut.from_index;
        self.next_offset = end.offset;
        self.last_time_ms = end.time_ms;
        self.tail_pos = end.pos;
        self.committed = self
            .committed
            .filter(|committed| committed.index < cut.from_index);
        self.tail_base = cut.keep_base;
        self.planned.retain(|plan| plan.base_index <= cut.keep_base);
        self.cut_epoch += 1;
        let mut gone = Vec::new();
        while self
            .cache
            .back()
            .is_some_and(|newest| newest.frame.index >= cut.from_index)
        {
            gone.extend(self.cache.pop_back());
        }
        gone
    }

    pub(super) fn reset(
        &mut self,
        position: Position,
        base_offset: u64,
        time_ms: u64,
    ) -> Vec<Cached> {
        self.purged = Some(position);
        self.committed = Some(position);
        self.next_index = position.index + 1;
        self.next_offset = base_offset;
        self.last_time_ms = time_ms;
        self.terms = TermRuns::default();
        self.planned.clear();
        self.tail_base = position.index + 1;
        self.tail_pos = header_pos();
        self.cut_epoch += 1;
        self.cache.drain(..).collect()
    }
}
