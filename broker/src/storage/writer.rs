//! The flusher's side of one log: writes frames into the active segment, rolls, cuts, resets.
//!
//! Rounds (S2): frames written between two syncs share a round number; the next round begins only
//! after the sync. A roll and a truncation close the round.

use std::io::IoSlice;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use super::codec::{align_up, usize_of};
use super::error::{At as _, Error};
use super::frame::{FRAME_ALIGN, FRAME_HEADER, FrameHeader, stored_len};
use super::header::{SEGMENT_HEADER, SegmentHeader};
use super::index::{SegmentEnd, SparseIndex};
use super::log_core::LogCore;
use super::segment::{Segment, index_path, segment_name};
use super::state::Plan;
use super::types::Frame;
use crate::env::{File, Fs, read_exact_at, remove_if_there};

/// The page cache takes larger writes at a third of the speed.
const WRITE_BYTES_MAX: usize = 256 << 10;
/// The system takes at most 1024 slices a call.
const SLICES_MAX: usize = 512;
/// Payloads below this are copied together; larger ones are written from where they are.
const COPY_BYTES_MAX: usize = 16 << 10;

/// A frame on its way to disk.
pub(super) struct Pending {
    pub frame: Frame,
    pub content_crc: u32,
    /// It is the first frame of this segment.
    pub starts: Option<Plan>,
}

impl Pending {
    /// Bytes that it takes in a segment.
    pub fn stored_len(&self) -> u64 {
        stored_len(u32::try_from(self.frame.payload.len()).unwrap_or(u32::MAX))
    }
}

/// Where a truncation ends the log.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cut {
    /// Frames at and above this index go.
    pub from_index: u64,
    /// The segment that ends the log then.
    pub keep_base: u64,
    /// Where the last frame that stays begins, and the end after it, its link and round still
    /// unknown; `None` when no frame of that segment stays.
    pub last: Option<(u32, SegmentEnd)>,
}

/// See the module's documentation.
pub(super) struct Writer {
    pub segment: Arc<Segment>,
    pub file: Arc<dyn File>,
    pub end: SegmentEnd,
    /// The round of the frames written next.
    pub round: u64,
    round_start: u32,
    /// Frames of `round` were written and not synced.
    pub round_open: bool,
}

/// Reused buffers of the flusher.
#[derive(Default)]
pub(super) struct Buffers {
    small: Vec<u8>,
    pieces: Vec<Piece>,
    headers: Vec<FrameHeader>,
}

enum Piece {
    /// So many bytes of `small`.
    Small(usize),
    Payload(Bytes),
}

impl Writer {
    pub(super) fn new(
        segment: Arc<Segment>,
        file: Arc<dyn File>,
        end: SegmentEnd,
        round: u64,
    ) -> Self {
        Self {
            segment,
            file,
            end,
            round,
            round_start: end.pos,
            round_open: false,
        }
    }

    /// Writes frames that all belong into the active segment. Returns the bytes written.
    pub(super) fn write(
        &mut self,
        core: &Arc<LogCore>,
        frames: &[Pending],
        buffers: &mut Buffers,
    ) -> Result<u64, Error> {
        if !self.round_open {
            self.round_open = true;
            self.round_start = self.end.pos;
        }
        let start = self.end.pos;
        let mut end = self.end;
        buffers.small.clear();
        buffers.pieces.clear();
        buffers.headers.clear();
        for pending in frames {
            let length = u32::try_from(pending.frame.payload.len()).unwrap_or(u32::MAX);
            let header = FrameHeader::new(
                &pending.frame,
                length,
                pending.content_crc,
                end.link,
                self.round,
                self.round_start,
                self.segment.header.nonce,
            );
            buffers.push(&header, &pending.frame.payload);
            end = end.after(&header);
            buffers.headers.push(header);
        }
        let bytes = u64::from(end.pos - start);
        let (fresh, wants_ahead) = core.ahead.claim(u64::from(end.pos));
        if wants_ahead {
            core.shared.background.write_ahead(core);
        }
        let written = buffers.write_to(self.file.as_ref(), u64::from(start));
        core.shared.space.written(bytes, fresh);
        written.at("write", &self.segment.path)?;
        self.end = end;
        self.segment.note(&buffers.headers);
        Ok(bytes)
    }

    /// The round was synced: the next frames are of a later one.
    pub(super) fn synced(&mut self) {
        if self.round_open {
            self.round_open = false;
            self.round += 1;
        }
    }

    pub(super) fn sync_now(&mut self) -> Result<(), Error> {
        if self.round_open {
            self.file.sync_data().at("sync", &self.segment.path)?;
            self.synced();
        }
        Ok(())
    }

    /// Closes the active segment and makes the next one.
    pub(super) fn roll(&mut self, core: &Arc<LogCore>, plan: &Plan) -> Result<(), Error> {
        // S2: a sealed segment is synced to its end before its successor exists.
        self.sync_now()?;
        let shared = &core.shared;
        let header = SegmentHeader {
            replica: core.key.replica.0,
            base_index: plan.base_index,
            base_offset: plan.base_offset,
            nonce: rand::random(),
            round_floor: self.round,
            prev_term: plan.prev_term,
            prev_time_ms: plan.prev_time_ms,
            prev_link: self.end.link,
        };
        let made = create_segment(shared.fs.as_ref(), &core.dir, header)?;
        let closed = std::mem::replace(&mut self.segment, Arc::clone(&made.segment));
        closed.close();
        self.file = made.file;
        self.end = made.end;
        core.ahead.moved(
            self.segment.id,
            self.segment.path.clone(),
            u64::from(self.end.pos),
            u64::from(self.end.pos),
        );
        {
            let mut state = core.state.lock();
            state.planned.retain(|planned| planned.id != plan.id);
            state.segments.push_back(made.segment);
        }
        shared.background.seal(core, closed, self.round);
        metrics::counter!("qute_storage_segments_created_total").increment(1);
        Ok(())
    }

    /// Ends the log at `cut` (S3). The mark is synced already.
    pub(super) fn cut(&mut self, core: &Arc<LogCore>, cut: &Cut) -> Result<(), Error> {
        let shared = &core.shared;
        let (keep, gone) = {
            let mut state = core.state.lock();
            let at = state
                .segments
                .partition_point(|segment| segment.base_index() <= cut.keep_base);
            let gone: Vec<_> = state.segments.split_off(at).into();
            (state.segments.back().cloned(), gone)
        };
        let keep = keep
            .filter(|keep| keep.base_index() == cut.keep_base)
            .ok_or_else(|| Error::Damaged {
                replica: core.key,
                reason: format!("segment {} is not there to be cut", cut.keep_base),
            })?;
        let end = match &cut.last {
            None => SegmentEnd::empty(&keep.header, keep.header_crc),
            Some((pos, end)) => {
                let mut end = *end;
                // The link was not known when the frame was appended.
                let mut bytes = [0; FRAME_HEADER];
                read_exact_at(
                    self.reader(core, &keep)?.as_ref(),
                    &mut bytes,
                    u64::from(*pos),
                )
                .at("read", &keep.path)?;
                let header = FrameHeader::decode(&bytes)
                    .filter(|header| {
                        header.is_placed(keep.header.nonce) && header.index + 1 == cut.from_index
                    })
                    .ok_or_else(|| Error::Damaged {
                        replica: core.key,
                        reason: format!("no frame at {pos} of {}", keep.path.display()),
                    })?;
                end.link = header.local_crc;
                end.round = header.round;
                end
            }
        };
        let is_other = keep.id != self.segment.id;
        self.file = keep.reopen(shared.fs.as_ref(), &shared.files, end)?;
        self.segment = keep;
        self.end = end;
        if is_other {
            // A sealed segment has an index that will no longer be right.
            let index = index_path(&self.segment.path);
            remove_if_there(shared.fs.as_ref(), &index).at("remove", &index)?;
        }
        remove_segments(shared.fs.as_ref(), &core.dir, &gone, is_other)?;
        for segment in &gone {
            shared.files.forget(segment.id);
        }
        let len = self.file.len().at("measure", &self.segment.path)?;
        core.ahead.moved(
            self.segment.id,
            self.segment.path.clone(),
            u64::from(end.pos),
            len,
        );
        Ok(())
    }

    fn reader(&self, core: &LogCore, segment: &Segment) -> Result<Arc<dyn File>, Error> {
        if segment.id == self.segment.id {
            return Ok(Arc::clone(&self.file));
        }
        let shared = &core.shared;
        shared.fs.open(&segment.path).at("open", &segment.path)
    }

    /// Empties the log: it begins anew with the segment of `header`.
    pub(super) fn restart(&mut self, core: &Arc<LogCore>, plan: &Plan) -> Result<(), Error> {
        let shared = &core.shared;
        let gone: Vec<_> = std::mem::take(&mut core.state.lock().segments).into();
        self.round += 1;
        self.round_open = false;
        remove_segments(shared.fs.as_ref(), &core.dir, &gone, false)?;
        for segment in &gone {
            shared.files.forget(segment.id);
        }
        let header = SegmentHeader {
            replica: core.key.replica.0,
            base_index: plan.base_index,
            base_offset: plan.base_offset,
            nonce: rand::random(),
            round_floor: self.round,
            prev_term: plan.prev_term,
            prev_time_ms: plan.prev_time_ms,
            prev_link: 0,
        };
        let made = create_segment(shared.fs.as_ref(), &core.dir, header)?;
        self.segment = Arc::clone(&made.segment);
        self.file = made.file;
        self.end = made.end;
        core.ahead.moved(
            self.segment.id,
            self.segment.path.clone(),
            u64::from(self.end.pos),
            u64::from(self.end.pos),
        );
        core.state.lock().segments.push_back(made.segment);
        Ok(())
    }
}

impl Buffers {
    fn push(&mut self, header: &FrameHeader, payload: &Bytes) {
        let before = self.small.len();
        header.encode_into(&mut self.small);
        let padding = usize_of(align_up(payload.len() as u64, FRAME_ALIGN)) - payload.len();
        if payload.len() < COPY_BYTES_MAX {
            self.small.extend_from_slice(payload);
            self.small.resize(self.small.len() + padding, 0);
            self.push_small(self.small.len() - before);
        } else {
            self.push_small(self.small.len() - before);
            self.pieces.push(Piece::Payload(payload.clone()));
            self.small.resize(self.small.len() + padding, 0);
            self.push_small(padding);
        }
    }

    fn push_small(&mut self, len: usize) {
        match self.pieces.last_mut() {
            Some(Piece::Small(last)) => *last += len,
            _ if len > 0 => self.pieces.push(Piece::Small(len)),
            _ => {}
        }
    }

    /// Writes the pieces in calls of at most [`WRITE_BYTES_MAX`].
    fn write_to(&self, file: &dyn File, mut at: u64) -> std::io::Result<()> {
        let mut small = self.small.as_slice();
        let mut call: Vec<IoSlice<'_>> = Vec::new();
        let mut call_bytes = 0;
        for piece in &self.pieces {
            let mut rest = match piece {
                Piece::Small(len) => {
                    let (taken, left) = small.split_at_checked(*len).unwrap_or((small, &[]));
                    small = left;
                    taken
                }
                Piece::Payload(payload) => payload.as_ref(),
            };
            while !rest.is_empty() {
                let (now, later) = rest
                    .split_at_checked(WRITE_BYTES_MAX - call_bytes)
                    .unwrap_or((rest, &[]));
                call.push(IoSlice::new(now));
                call_bytes += now.len();
                rest = later;
                if call_bytes == WRITE_BYTES_MAX || call.len() == SLICES_MAX {
                    file.write_all_at(&mut call, at)?;
                    at += call_bytes as u64;
                    call.clear();
                    call_bytes = 0;
                }
            }
        }
        if call_bytes > 0 {
            file.write_all_at(&mut call, at)?;
        }
        Ok(())
    }
}

/// A segment just made.
pub(super) struct Made {
    pub segment: Arc<Segment>,
    pub file: Arc<dyn File>,
    pub end: SegmentEnd,
}

/// Makes a segment file: header synced, then named, then the directory synced (S5).
pub(super) fn create_segment(
    fs: &dyn Fs,
    dir: &Path,
    header: SegmentHeader,
) -> Result<Made, Error> {
    let path = dir.join(segment_name(header.base_index));
    let beside = path.with_extension("tmp");
    remove_if_there(fs, &beside).at("remove", &beside)?;
    let file = fs.create_new(&beside).at("create", &beside)?;
    let (bytes, crc) = header.encode();
    file.write_all_at(&mut [IoSlice::new(&bytes)], 0)
        .at("write", &beside)?;
    file.sync_data().at("sync", &beside)?;
    fs.rename(&beside, &path).at("rename", &beside)?;
    fs.sync_dir(dir).at("sync", dir)?;
    let end = SegmentEnd::empty(&header, crc);
    debug_assert_eq!(u64::from(end.pos), SEGMENT_HEADER as u64);
    let segment = Segment::active(
        path,
        header,
        crc,
        Arc::clone(&file),
        SparseIndex::default(),
        end,
    );
    Ok(Made { segment, file, end })
}

/// Removes segment files and their indexes, the newest first, then syncs the directory (S5).
pub(super) fn remove_segments(
    fs: &dyn Fs,
    dir: &Path,
    segments: &[Arc<Segment>],
    sync_anyway: bool,
) -> Result<(), Error> {
    for segment in segments.iter().rev() {
        segment.retire();
        for path in [index_path(&segment.path), segment.path.clone()] {
            remove_if_there(fs, &path).at("remove", &path)?;
        }
    }
    if !segments.is_empty() || sync_anyway {
        fs.sync_dir(dir).at("sync", dir)?;
    }
    Ok(())
}
