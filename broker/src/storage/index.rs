//! The sparse index of a segment: about every 16 KiB, which frame begins where.
//!
//! In memory while the segment is active. Persisted when it is sealed, as `<base index>.idx`:
//!
//! ```text
//!  0 magic "QUTEIDX1"
//!  8 version u32 1, header_crc u32 (over bytes 0..12 and 16..112)
//! 16 nonce u64               of the segment it describes
//! 24 base_index u64
//! 32 end: index u64, offset u64, time_ms u64, term u64, round u64 (exclusive index and offset; the
//!    others are those of the last frame), pos u32, link u32
//! 80 terms u32, entries u32, terms_crc u32, entries_crc u32, zeros to 112
//! 112 terms x (first index u64, term u64)
//!     entries x (index u64, offset u64, time_ms u64, pos u32)
//! ```
//!
//! An index is a hint: one that is absent, damaged or does not match its segment and the header of
//! the segment after it is rebuilt by reading the segment.

use super::codec::{Put, Reader, usize_of};
use super::frame::FrameHeader;
use super::header::{SEGMENT_HEADER, SegmentHeader};

const INTERVAL_BYTES: u32 = 16 << 10;
const MAGIC: [u8; 8] = *b"QUTEIDX1";
const VERSION: u32 = 1;
/// Bytes before the terms.
pub(super) const INDEX_HEADER: usize = 112;
const TERM_BYTES: usize = 16;
const ENTRY_BYTES: usize = 28;

/// One frame that the index knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IndexEntry {
    pub index: u64,
    pub offset: u64,
    pub time_ms: u64,
    pub pos: u32,
}

/// Where a segment ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SegmentEnd {
    /// Index after the last frame.
    pub index: u64,
    /// Offset after the last record.
    pub offset: u64,
    /// Broker time of the last frame.
    pub time_ms: u64,
    /// Term of the last frame.
    pub term: u64,
    /// Flush round of the last frame.
    pub round: u64,
    /// File position after the last frame.
    pub pos: u32,
    /// `local_crc` of the last frame.
    pub link: u32,
}

impl SegmentEnd {
    /// The end of a segment without frames.
    pub(super) fn empty(header: &SegmentHeader, header_crc: u32) -> Self {
        Self {
            index: header.base_index,
            offset: header.base_offset,
            time_ms: header.prev_time_ms,
            term: header.prev_term,
            round: header.round_floor.saturating_sub(1),
            pos: u32::try_from(SEGMENT_HEADER).unwrap_or(u32::MAX),
            link: header_crc,
        }
    }

    /// The end after one more frame at the present one.
    pub(super) fn after(&self, frame: &FrameHeader) -> Self {
        Self {
            index: frame.index + 1,
            offset: frame.end_offset(),
            time_ms: frame.broker_time_ms,
            term: frame.term,
            round: frame.round,
            pos: u32::try_from(u64::from(self.pos) + frame.stored_len()).unwrap_or(u32::MAX),
            link: frame.local_crc,
        }
    }
}

/// First indexes of terms, rising.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TermRuns(Vec<(u64, u64)>);

impl TermRuns {
    pub(super) fn push(&mut self, index: u64, term: u64) {
        if self.0.last().is_none_or(|(_, last)| *last != term) {
            self.0.push((index, term));
        }
    }

    /// Forgets everything at and above `from_index`.
    pub(super) fn cut(&mut self, from_index: u64) {
        while self.0.last().is_some_and(|(first, _)| *first >= from_index) {
            self.0.pop();
        }
    }

    /// Forgets runs that end below `index`.
    pub(super) fn drop_below(&mut self, index: u64) {
        let gone = self
            .0
            .partition_point(|(first, _)| *first <= index)
            .saturating_sub(1);
        self.0.drain(..gone);
    }

    pub(super) fn term_at(&self, index: u64) -> Option<u64> {
        let at = self.0.partition_point(|(first, _)| *first <= index);
        self.0.get(at.checked_sub(1)?).map(|(_, term)| *term)
    }

    pub(super) fn extend(&mut self, later: &Self) {
        for (first, term) in &later.0 {
            self.push(*first, *term);
        }
    }
}

/// See the module's documentation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct SparseIndex {
    pub entries: Vec<IndexEntry>,
    pub terms: TermRuns,
}

impl SparseIndex {
    /// Notes a frame at `pos`.
    pub(super) fn note(&mut self, frame: &FrameHeader, pos: u32) {
        self.terms.push(frame.index, frame.term);
        if self
            .entries
            .last()
            .is_none_or(|last| pos.saturating_sub(last.pos) >= INTERVAL_BYTES)
        {
            self.entries.push(IndexEntry {
                index: frame.index,
                offset: frame.base_offset,
                time_ms: frame.broker_time_ms,
                pos,
            });
        }
    }

    /// Forgets frames at and above `from_index`.
    pub(super) fn cut(&mut self, from_index: u64) {
        self.terms.cut(from_index);
        while self
            .entries
            .last()
            .is_some_and(|entry| entry.index >= from_index)
        {
            self.entries.pop();
        }
    }

    fn floor(&self, is_at_or_before: impl Fn(&IndexEntry) -> bool) -> u32 {
        let at = self.entries.partition_point(is_at_or_before);
        at.checked_sub(1)
            .and_then(|at| self.entries.get(at))
            .map_or(u32::try_from(SEGMENT_HEADER).unwrap_or(u32::MAX), |entry| {
                entry.pos
            })
    }

    /// Where to begin to look for the frame `index`.
    pub(super) fn floor_index(&self, index: u64) -> u32 {
        self.floor(|entry| entry.index <= index)
    }

    /// Where to begin to look for the record `offset`.
    pub(super) fn floor_offset(&self, offset: u64) -> u32 {
        self.floor(|entry| entry.offset <= offset)
    }

    /// Where to begin to look for the first frame at or after `time_ms`.
    pub(super) fn floor_time(&self, time_ms: u64) -> u32 {
        self.floor(|entry| entry.time_ms < time_ms)
    }

    pub(super) fn encode(&self, header: &SegmentHeader, end: &SegmentEnd) -> Vec<u8> {
        let mut terms = Vec::with_capacity(self.terms.0.len() * TERM_BYTES);
        for (first, term) in &self.terms.0 {
            terms.put_u64_le(*first);
            terms.put_u64_le(*term);
        }
        let mut entries = Vec::with_capacity(self.entries.len() * ENTRY_BYTES);
        for entry in &self.entries {
            entries.put_u64_le(entry.index);
            entries.put_u64_le(entry.offset);
            entries.put_u64_le(entry.time_ms);
            entries.put_u32_le(entry.pos);
        }
        let mut front = Vec::new();
        front.extend_from_slice(&MAGIC);
        front.put_u32_le(VERSION);
        let mut rest = Vec::new();
        rest.put_u64_le(header.nonce);
        rest.put_u64_le(header.base_index);
        for value in [end.index, end.offset, end.time_ms, end.term, end.round] {
            rest.put_u64_le(value);
        }
        rest.put_u32_le(end.pos);
        rest.put_u32_le(end.link);
        rest.put_u32_le(u32::try_from(self.terms.0.len()).unwrap_or(u32::MAX));
        rest.put_u32_le(u32::try_from(self.entries.len()).unwrap_or(u32::MAX));
        rest.put_u32_le(crc32c::crc32c(&terms));
        rest.put_u32_le(crc32c::crc32c(&entries));
        rest.resize(INDEX_HEADER - 16, 0);
        let crc = crc32c::crc32c_append(crc32c::crc32c(&front), &rest);
        let mut out = front;
        out.put_u32_le(crc);
        out.extend_from_slice(&rest);
        out.extend_from_slice(&terms);
        out.extend_from_slice(&entries);
        out
    }
}

/// The first part of an index file.
#[derive(Debug, Clone, Copy)]
pub(super) struct IndexHeader {
    pub nonce: u64,
    pub base_index: u64,
    pub end: SegmentEnd,
    terms: u32,
    entries: u32,
    terms_crc: u32,
    entries_crc: u32,
}

impl IndexHeader {
    /// `None` for anything but a whole header of this format.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader::new(bytes.get(..INDEX_HEADER)?);
        let magic: [u8; 8] = from.array()?;
        let (version, crc) = (from.u32()?, from.u32()?);
        let expected = crc32c::crc32c_append(
            crc32c::crc32c(bytes.get(..12)?),
            bytes.get(16..INDEX_HEADER)?,
        );
        if magic != MAGIC || version != VERSION || crc != expected {
            return None;
        }
        Some(Self {
            nonce: from.u64()?,
            base_index: from.u64()?,
            end: SegmentEnd {
                index: from.u64()?,
                offset: from.u64()?,
                time_ms: from.u64()?,
                term: from.u64()?,
                round: from.u64()?,
                pos: from.u32()?,
                link: from.u32()?,
            },
            terms: from.u32()?,
            entries: from.u32()?,
            terms_crc: from.u32()?,
            entries_crc: from.u32()?,
        })
    }

    pub(super) fn terms_len(&self) -> usize {
        usize_of(u64::from(self.terms)).saturating_mul(TERM_BYTES)
    }

    pub(super) fn entries_len(&self) -> usize {
        usize_of(u64::from(self.entries)).saturating_mul(ENTRY_BYTES)
    }

    pub(super) fn decode_terms(&self, bytes: &[u8]) -> Option<TermRuns> {
        if crc32c::crc32c(bytes) != self.terms_crc {
            return None;
        }
        let mut from = Reader::new(bytes);
        let mut terms = TermRuns::default();
        while !from.is_empty() {
            terms.push(from.u64()?, from.u64()?);
        }
        Some(terms)
    }

    pub(super) fn decode_entries(&self, bytes: &[u8]) -> Option<Vec<IndexEntry>> {
        if crc32c::crc32c(bytes) != self.entries_crc {
            return None;
        }
        let mut from = Reader::new(bytes);
        let mut entries = Vec::with_capacity(bytes.len() / ENTRY_BYTES);
        while !from.is_empty() {
            entries.push(IndexEntry {
                index: from.u64()?,
                offset: from.u64()?,
                time_ms: from.u64()?,
                pos: from.u32()?,
            });
        }
        Some(entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_encoded_has_golden_bytes() {
        let header = SegmentHeader {
            replica: 1,
            base_index: 2,
            base_offset: 3,
            nonce: 4,
            round_floor: 5,
            prev_term: 6,
            prev_time_ms: 7,
            prev_link: 8,
        };
        let end = SegmentEnd {
            index: 11,
            offset: 12,
            time_ms: 13,
            term: 14,
            round: 15,
            pos: 16,
            link: 17,
        };
        let mut index = SparseIndex::default();
        index.terms.push(2, 9);
        index.entries.push(IndexEntry {
            index: 2,
            offset: 3,
            time_ms: 8,
            pos: 128,
        });
        let bytes = index.encode(&header, &end);
        assert_eq!(&bytes[..12], b"QUTEIDX1\x01\0\0\0");
        let words: Vec<u64> = bytes[16..72]
            .as_chunks::<8>()
            .0
            .iter()
            .map(|word| u64::from_le_bytes(*word))
            .collect();
        assert_eq!(words, [4, 2, 11, 12, 13, 14, 15]);
        assert_eq!(
            bytes[72..88],
            [16, 0, 0, 0, 17, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]
        );
        assert_eq!(bytes.len(), INDEX_HEADER + TERM_BYTES + ENTRY_BYTES);
        let (terms, entries) = bytes[INDEX_HEADER..].split_at(TERM_BYTES);
        let described = IndexHeader::decode(&bytes).unwrap();
        assert_eq!(
            (described.nonce, described.base_index, described.end),
            (4, 2, end)
        );
        assert_eq!(described.decode_terms(terms), Some(index.terms.clone()));
        assert_eq!(described.decode_entries(entries), Some(index.entries));
        for bit in 0..INDEX_HEADER * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(IndexHeader::decode(&flipped).is_none(), "bit {bit}");
        }
        assert!(described.decode_terms(&[0; 16]).is_none());
        assert!(described.decode_entries(&[0; 28]).is_none());
    }
}
