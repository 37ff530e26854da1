//! Reading: from the cache where it can, else from segment files, each frame checked (S7).
//!
//! Files are read in chunks; payloads are slices of the chunk, not copies.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use super::codec::usize_of;
use super::error::{At as _, Error};
use super::frame::{FRAME_HEADER, FrameHeader};
use super::index::SegmentEnd;
use super::log_core::LogCore;
use super::segment::{Readable, Seek, Segment};
use super::state::{Cached, State};
use super::types::{Frame, FrameKind};

const CHUNK_BYTES_MIN: usize = 64 << 10;
const CHUNK_BYTES_MAX: usize = 4 << 20;

/// What to do with a frame.
enum Take {
    Yes,
    Skip,
    Stop,
}

/// What is looked for.
struct Query<'a> {
    /// Frames at and above this index are not read.
    index_end: u64,
    bytes_max: usize,
    take: &'a dyn Fn(&Seen) -> Take,
}

/// What a decision is made on.
struct Seen {
    index: u64,
    kind: u8,
    base_offset: u64,
    end_offset: u64,
    time_ms: u64,
}

impl Seen {
    fn of_frame(frame: &Frame) -> Self {
        Self {
            index: frame.index,
            kind: frame.kind as u8,
            base_offset: frame.base_offset,
            end_offset: frame.end_offset(),
            time_ms: frame.broker_time_ms,
        }
    }

    fn of_header(header: &FrameHeader) -> Self {
        Self {
            index: header.index,
            kind: header.kind,
            base_offset: header.base_offset,
            end_offset: header.end_offset(),
            time_ms: header.broker_time_ms,
        }
    }
}

/// The frames found so far.
struct Found {
    frames: Vec<Frame>,
    bytes: usize,
    is_done: bool,
}

impl Found {
    /// Whether a frame of this payload is still wanted; at least one always is.
    fn has_room(&mut self, payload: usize, bytes_max: usize) -> bool {
        let fits = self.frames.is_empty() || self.bytes + payload <= bytes_max;
        self.is_done |= !fits;
        fits
    }

    fn push(&mut self, frame: Frame, bytes_max: usize) {
        self.bytes += frame.payload.len();
        self.frames.push(frame);
        self.is_done |= self.bytes >= bytes_max;
    }
}

pub(super) fn by_index(
    core: &LogCore,
    range: Range<u64>,
    bytes_max: usize,
) -> Result<Vec<Frame>, Error> {
    let query = Query {
        index_end: range.end,
        bytes_max,
        take: &|seen| {
            if seen.index < range.start {
                Take::Skip
            } else {
                Take::Yes
            }
        },
    };
    if range.start < core.state.lock().first_index() {
        return Ok(Vec::new());
    }
    collect(core, Seek::Index(range.start), &query)
}

pub(super) fn by_offset(
    core: &LogCore,
    from: u64,
    end: u64,
    bytes_max: usize,
) -> Result<Vec<Frame>, Error> {
    let query = Query {
        index_end: u64::MAX,
        bytes_max,
        take: &|seen| {
            if seen.base_offset >= end {
                Take::Stop
            } else if seen.kind != FrameKind::Batch as u8 || seen.end_offset <= from {
                Take::Skip
            } else {
                Take::Yes
            }
        },
    };
    collect(core, Seek::Offset(from), &query)
}

pub(super) fn is_cached(core: &LogCore, offset: u64) -> bool {
    let source = core.state.lock().source(Seek::Offset(offset), u64::MAX);
    matches!(source, Source::Cache)
}

pub(super) fn offset_at_time(core: &LogCore, time_ms: u64, end: u64) -> Result<Option<u64>, Error> {
    let query = Query {
        index_end: u64::MAX,
        bytes_max: 1,
        take: &|seen| {
            if seen.base_offset >= end {
                Take::Stop
            } else if seen.kind != FrameKind::Batch as u8
                || seen.time_ms < time_ms
                || seen.base_offset == seen.end_offset
            {
                Take::Skip
            } else {
                Take::Yes
            }
        },
    };
    let found = collect(core, Seek::TimeMs(time_ms), &query)?;
    Ok(found.first().map(|frame| frame.base_offset))
}

/// Where the next frames are.
enum Source {
    End,
    Cache,
    File {
        segment: Arc<Segment>,
        index_end: u64,
        first_index: u64,
        cut_epoch: u64,
    },
}

fn collect(core: &LogCore, mut seek: Seek, query: &Query<'_>) -> Result<Vec<Frame>, Error> {
    let mut found = Found {
        frames: Vec::new(),
        bytes: 0,
        is_done: false,
    };
    while !found.is_done {
        core.check()?;
        let source = {
            let state = core.state.lock();
            let source = state.source(seek, query.index_end);
            if matches!(source, Source::Cache) {
                state.collect_cached(seek, query, &mut found);
            }
            source
        };
        let (segment, index_end, first_index, cut_epoch) = match source {
            Source::End | Source::Cache => break,
            Source::File {
                segment,
                index_end,
                first_index,
                cut_epoch,
            } => (segment, index_end, first_index, cut_epoch),
        };
        let shared = &core.shared;
        let walked = segment
            .seek(shared.fs.as_ref(), &shared.files, seek)
            .and_then(|from| {
                let end = from.end.index.min(index_end);
                let walked = walk(core, &segment, &from, end, first_index, query, &mut found);
                walked.map(|()| end)
            });
        match walked {
            // Nothing further is in the file: a cut came in between.
            Ok(next) if matches!(seek, Seek::Index(index) if next <= index) => break,
            Ok(next) => seek = Seek::Index(next),
            // What was cut or purged while it was read is not damage.
            Err(_) if core.state.lock().has_changed(cut_epoch, &segment) => break,
            Err(error) => {
                tracing::error!(replica = %core.key, %error, "a read failed");
                metrics::counter!("qute_storage_read_errors_total").increment(1);
                return Err(error);
            }
        }
    }
    Ok(found.frames)
}

impl State {
    fn source(&self, seek: Seek, index_end: u64) -> Source {
        let end = self.next_index.min(index_end);
        let oldest = self.cache.front().map(|cached| &cached.frame);
        let (is_cached, segment) = match seek {
            Seek::Index(index) => {
                if index >= end {
                    return Source::End;
                }
                let is_cached = oldest.is_some_and(|oldest| oldest.index <= index);
                (is_cached, self.segment_of(index))
            }
            Seek::Offset(offset) => (
                oldest.is_some_and(|oldest| oldest.base_offset <= offset),
                self.last_segment(|segment| segment.header.base_offset <= offset),
            ),
            Seek::TimeMs(time_ms) => (
                oldest.is_some_and(|oldest| oldest.broker_time_ms < time_ms),
                self.last_segment(|segment| segment.header.prev_time_ms < time_ms),
            ),
        };
        if is_cached {
            return Source::Cache;
        }
        let Some(segment) = segment.or_else(|| self.segments.front()) else {
            return Source::End;
        };
        Source::File {
            segment: Arc::clone(segment),
            index_end: end.min(oldest.map_or(u64::MAX, |oldest| oldest.index)),
            first_index: self.first_index(),
            cut_epoch: self.cut_epoch,
        }
    }

    fn last_segment(&self, is_at_or_before: impl Fn(&Segment) -> bool) -> Option<&Arc<Segment>> {
        let at = self
            .segments
            .partition_point(|segment| is_at_or_before(segment));
        self.segments.get(at.checked_sub(1)?)
    }

    fn collect_cached(&self, seek: Seek, query: &Query<'_>, found: &mut Found) {
        let from = match seek {
            Seek::Index(index) => self.cache.front().map_or(0, |oldest| {
                usize_of(index.saturating_sub(oldest.frame.index))
            }),
            Seek::Offset(offset) => self
                .cache
                .partition_point(|cached| cached.frame.end_offset() <= offset),
            Seek::TimeMs(time_ms) => self
                .cache
                .partition_point(|cached| cached.frame.broker_time_ms < time_ms),
        };
        for Cached { frame, .. } in self.cache.iter().skip(from) {
            if frame.index >= query.index_end || found.is_done {
                return;
            }
            match (query.take)(&Seen::of_frame(frame)) {
                Take::Skip => {}
                Take::Stop => return,
                Take::Yes => {
                    if !found.has_room(frame.payload.len(), query.bytes_max) {
                        return;
                    }
                    found.push(frame.clone(), query.bytes_max);
                }
            }
        }
    }

    /// Whether a truncation, reset or purge came in between.
    fn has_changed(&self, cut_epoch: u64, segment: &Segment) -> bool {
        self.cut_epoch != cut_epoch
            || self
                .segments
                .front()
                .is_none_or(|first| first.base_index() > segment.base_index())
    }
}

/// A file read in chunks.
struct Chunks<'a> {
    from: &'a Readable,
    chunk: usize,
    bytes: Bytes,
    at: u32,
}

impl Chunks<'_> {
    /// `len` bytes at `pos`; fewer only at the segment's end.
    fn bytes(&mut self, pos: u32, len: usize) -> std::io::Result<Bytes> {
        let left = usize_of(u64::from(self.from.end.pos.saturating_sub(pos)));
        let len = len.min(left);
        let inside = pos
            .checked_sub(self.at)
            .map(|from| usize_of(u64::from(from)))
            .filter(|from| from + len <= self.bytes.len());
        if let Some(from) = inside {
            return Ok(self.bytes.slice(from..from + len));
        }
        let mut chunk = vec![0; len.max(self.chunk).min(left)];
        let read = self.from.file.read_at(&mut chunk, u64::from(pos))?;
        chunk.truncate(read);
        self.bytes = Bytes::from(chunk);
        self.at = pos;
        Ok(self.bytes.slice(..len.min(read)))
    }
}

fn damaged(core: &LogCore, segment: &Segment, pos: u32, what: &str) -> Error {
    Error::Damaged {
        replica: core.key,
        reason: format!("{} at position {pos}: {what}", segment.path.display()),
    }
}

/// Goes through a segment from a position that the index gave.
fn walk(
    core: &LogCore,
    segment: &Segment,
    from: &Readable,
    index_end: u64,
    first_index: u64,
    query: &Query<'_>,
    found: &mut Found,
) -> Result<(), Error> {
    let mut chunks = Chunks {
        from,
        chunk: query
            .bytes_max
            .saturating_add(CHUNK_BYTES_MIN / 4)
            .clamp(CHUNK_BYTES_MIN, CHUNK_BYTES_MAX),
        bytes: Bytes::new(),
        at: 0,
    };
    let mut pos = from.pos;
    while pos < from.end.pos && !found.is_done {
        let bytes = chunks.bytes(pos, FRAME_HEADER).at("read", &segment.path)?;
        let header = FrameHeader::decode(&bytes)
            .filter(|header| header.is_placed(segment.header.nonce))
            .ok_or_else(|| damaged(core, segment, pos, "no whole frame"))?;
        if header.index >= index_end {
            break;
        }
        let length = usize_of(u64::from(header.length));
        let decision = if header.index < first_index {
            Take::Skip
        } else {
            (query.take)(&Seen::of_header(&header))
        };
        match decision {
            Take::Skip => {}
            Take::Stop => {
                found.is_done = true;
                break;
            }
            Take::Yes => {
                if !found.has_room(length, query.bytes_max) {
                    break;
                }
                let whole = chunks
                    .bytes(pos, FRAME_HEADER + length)
                    .at("read", &segment.path)?;
                let payload = whole.slice(FRAME_HEADER.min(whole.len())..);
                if payload.len() != length || !header.holds(&payload) {
                    return Err(damaged(
                        core,
                        segment,
                        pos,
                        "the content is not what was written",
                    ));
                }
                let frame = header
                    .into_frame(payload)
                    .ok_or_else(|| damaged(core, segment, pos, "an unknown kind"))?;
                found.push(frame, query.bytes_max);
            }
        }
        pos = u32::try_from(u64::from(pos) + header.stored_len()).unwrap_or(u32::MAX);
    }
    Ok(())
}

/// Base of the segment, position there, and the end after it (without link and round), of an entry.
/// `None` when no segment holds it.
pub(super) fn find_place(
    core: &LogCore,
    index: u64,
) -> Result<Option<(u64, u32, SegmentEnd)>, Error> {
    let end_after = |pos: u32, header: &FrameHeader| {
        SegmentEnd {
            index: header.index,
            offset: 0,
            time_ms: 0,
            term: 0,
            round: 0,
            pos,
            link: 0,
        }
        .after(header)
    };
    let segment = {
        let state = core.state.lock();
        if let Some(cached) = state.cached(index) {
            let length = u32::try_from(cached.frame.payload.len()).unwrap_or(u32::MAX);
            let header = FrameHeader::new(&cached.frame, length, 0, 0, 0, 0, 0);
            let end = end_after(cached.pos, &header);
            return Ok(Some((cached.segment_base, cached.pos, end)));
        }
        match state.segment_of(index) {
            Some(segment) => Arc::clone(segment),
            None => return Ok(None),
        }
    };
    let shared = &core.shared;
    let from = segment.seek(shared.fs.as_ref(), &shared.files, Seek::Index(index))?;
    let mut chunks = Chunks {
        from: &from,
        chunk: CHUNK_BYTES_MIN,
        bytes: Bytes::new(),
        at: 0,
    };
    let mut pos = from.pos;
    while pos < from.end.pos {
        let bytes = chunks.bytes(pos, FRAME_HEADER).at("read", &segment.path)?;
        let header = FrameHeader::decode(&bytes)
            .filter(|header| header.is_placed(segment.header.nonce))
            .ok_or_else(|| damaged(core, &segment, pos, "no whole frame"))?;
        if header.index == index {
            return Ok(Some((segment.base_index(), pos, end_after(pos, &header))));
        }
        pos = u32::try_from(u64::from(pos) + header.stored_len()).unwrap_or(u32::MAX);
    }
    Err(damaged(core, &segment, pos, "the frame is not there"))
}
