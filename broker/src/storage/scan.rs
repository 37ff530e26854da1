//! Reading frames one after another, and telling a torn tail from damage (S2).

use std::io;

use super::codec::usize_of;
use super::frame::{FRAME_ALIGN, FRAME_HEADER, FrameHeader};
use super::header::{SEGMENT_HEADER, SegmentHeader};
use super::index::{SegmentEnd, SparseIndex};
use crate::env::File;

const CHUNK: usize = 1 << 20;

/// A window over a file that moves forward.
struct Window<'a> {
    file: &'a dyn File,
    len: u64,
    buf: Vec<u8>,
    at: u64,
}

impl<'a> Window<'a> {
    fn new(file: &'a dyn File) -> io::Result<Self> {
        Ok(Self {
            file,
            len: file.len()?,
            buf: Vec::new(),
            at: 0,
        })
    }

    /// The bytes from `pos`, at least `need` of them unless the file ends before.
    fn bytes(&mut self, pos: u64, need: usize) -> io::Result<&[u8]> {
        let need = need.min(usize_of(self.len.saturating_sub(pos)));
        let inside = pos >= self.at && pos + need as u64 <= self.at + self.buf.len() as u64;
        if !inside {
            let want = need.max(CHUNK).min(usize_of(self.len.saturating_sub(pos)));
            self.buf.resize(want, 0);
            let read = self.file.read_at(&mut self.buf, pos)?;
            self.buf.truncate(read);
            self.at = pos;
        }
        let from = usize_of(pos - self.at).min(self.buf.len());
        Ok(self.buf.get(from..).unwrap_or_default())
    }

    /// The frame at `pos` when it is whole and placed in this file.
    fn frame(&mut self, pos: u64, nonce: u64) -> io::Result<Option<FrameHeader>> {
        let Some(header) = FrameHeader::decode(self.bytes(pos, FRAME_HEADER)?) else {
            return Ok(None);
        };
        if !header.is_placed(nonce) {
            return Ok(None);
        }
        let whole = FRAME_HEADER + usize_of(u64::from(header.length));
        let bytes = self.bytes(pos, whole)?;
        let intact = bytes
            .get(FRAME_HEADER..whole)
            .is_some_and(|payload| header.holds(payload));
        Ok(intact.then_some(header))
    }
}

/// What a scan found.
#[derive(Debug)]
pub(super) struct Scan {
    /// Index of the good frames.
    pub index: SparseIndex,
    /// Where they end.
    pub end: SegmentEnd,
    /// Where the flush round of the last good frame began.
    pub last_round_start: u32,
    /// The highest round of any frame that is placed in this file, good or not.
    pub round_max: u64,
    /// A whole frame of a later round behind the end: what lies between was synced (S2).
    pub evidence: Option<Evidence>,
}

/// Proof that the bytes before it were synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Evidence {
    pub pos: u64,
    pub index: u64,
    pub round: u64,
}

/// Reads a segment up to its last good frame. `is_void(index, round)` tells frames that a
/// truncation cut off (S3): they neither link nor prove anything.
pub(super) fn scan(
    file: &dyn File,
    header: &SegmentHeader,
    header_crc: u32,
    index_end: Option<u64>,
    is_void: &dyn Fn(u64, u64) -> bool,
) -> io::Result<Scan> {
    let mut window = Window::new(file)?;
    let mut found = Scan {
        index: SparseIndex::default(),
        end: SegmentEnd::empty(header, header_crc),
        last_round_start: u32::try_from(SEGMENT_HEADER).unwrap_or(u32::MAX),
        round_max: header.round_floor,
        evidence: None,
    };
    while index_end.is_none_or(|index_end| found.end.index < index_end) {
        let Some(frame) = window.frame(u64::from(found.end.pos), header.nonce)? else {
            break;
        };
        let follows = frame.prev_link == found.end.link
            && frame.index == found.end.index
            && frame.base_offset == found.end.offset
            && frame.round >= found.end.round
            && frame.round_start <= found.end.pos
            && !is_void(frame.index, frame.round);
        if !follows {
            break;
        }
        found.index.note(&frame, found.end.pos);
        found.last_round_start = frame.round_start;
        found.end = found.end.after(&frame);
    }
    found.round_max = found.round_max.max(found.end.round);
    if index_end.is_none() {
        look_behind(&mut window, header.nonce, is_void, &mut found)?;
    }
    Ok(found)
}

/// S2: looks at every aligned position behind the end for a whole frame of a later round.
fn look_behind(
    window: &mut Window<'_>,
    nonce: u64,
    is_void: &dyn Fn(u64, u64) -> bool,
    found: &mut Scan,
) -> io::Result<()> {
    let end = u64::from(found.end.pos);
    let mut pos = end;
    loop {
        let bytes = window.bytes(pos, FRAME_HEADER)?;
        if bytes.len() < FRAME_HEADER {
            return Ok(());
        }
        // Blocks written ahead are zeros: skipped word by word, without a checksum.
        let zero_words = bytes
            .as_chunks::<8>()
            .0
            .iter()
            .take_while(|word| **word == [0; 8])
            .count();
        if zero_words > 1 {
            pos += (zero_words as u64 - 1) * FRAME_ALIGN;
            continue;
        }
        if let Some(frame) = window.frame(pos, nonce)? {
            found.round_max = found.round_max.max(frame.round);
            let later = frame.round > found.end.round && u64::from(frame.round_start) > end;
            if later && found.evidence.is_none() && !is_void(frame.index, frame.round) {
                found.evidence = Some(Evidence {
                    pos,
                    index: frame.index,
                    round: frame.round,
                });
            }
        }
        pos += FRAME_ALIGN;
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::path::Path;

    use bytes::Bytes;

    use super::super::frame::content_crc;
    use super::super::types::{Frame, FrameKind};
    use super::*;
    use crate::env::{Fs as _, SimFs};

    /// Frames one after another; `None` as link: that of the frame before.
    fn found(frames: &[(u64, u64, Option<u32>)]) -> Scan {
        let header = SegmentHeader {
            replica: 1,
            base_index: 0,
            base_offset: 0,
            nonce: 5,
            round_floor: 1,
            prev_term: 0,
            prev_time_ms: 0,
            prev_link: 0,
        };
        let (mut bytes, crc) = header.encode();
        let mut link = crc;
        for (index, round, other_link) in frames {
            let frame = Frame {
                term: 1,
                index: *index,
                kind: FrameKind::Blank,
                base_offset: 0,
                records: 0,
                broker_time_ms: 0,
                payload: Bytes::new(),
            };
            let at = u32::try_from(bytes.len()).unwrap();
            let content = content_crc(0, &frame);
            let link_before = other_link.unwrap_or(link);
            let frame = FrameHeader::new(&frame, 0, content, link_before, *round, at, 5);
            frame.encode_into(&mut bytes);
            link = frame.local_crc;
        }
        let fs = SimFs::new(1);
        let file = fs.create_new(Path::new("/segment")).unwrap();
        file.write_all_at(&mut [IoSlice::new(&bytes)], 0).unwrap();
        scan(file.as_ref(), &header, crc, None, &|_, _| false).unwrap()
    }

    #[test]
    fn s3_whole_frame_that_does_not_link_is_not_the_next_one() {
        assert_eq!(
            found(&[(0, 1, None), (1, 1, None), (2, 2, None)]).end.index,
            3
        );
        // The right index, but of another history.
        let scan = found(&[(0, 1, None), (1, 1, Some(77))]);
        assert_eq!((scan.end.index, scan.evidence), (1, None));
        assert!(
            found(&[(0, 1, None), (1, 1, Some(77)), (2, 2, None)])
                .evidence
                .is_some()
        );
        // Rounds never fall.
        assert_eq!(found(&[(0, 3, None), (1, 2, None)]).end.index, 1);
    }

    #[test]
    fn s2_highest_round_is_found_behind_the_end_too() {
        let scan = found(&[(0, 1, None), (5, 9, None)]);
        assert_eq!((scan.end.index, scan.round_max), (1, 9));
    }
}
