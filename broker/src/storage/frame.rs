//! The frame: how one log entry lies on disk.
//!
//! ```text
//!  0 length u32        payload bytes
//!  4 content_crc u32   CRC32C over payload, then bytes 32..72: the same on every replica (S3, S7)
//!  8 local_crc u32     CRC32C over bytes 0..8, 12..32 and the segment's nonce u64 (S3)
//! 12 prev_link u32     local_crc of the frame before; of the first: the segment header's crc
//! 16 round u64         flush round (S2)
//! 24 round_start u32   file position where that round began
//! 28 flags u32         0
//! 32 term u64
//! 40 index u64
//! 48 base_offset u64
//! 56 broker_time_ms u64
//! 64 records u32       offsets consumed
//! 68 kind u8, 3 zero bytes
//! 72 payload, then zeros up to a multiple of 8
//! ```

use super::codec::{Put, Reader, align_up};
use super::types::{Frame, FrameKind};

/// Bytes before the payload.
pub(super) const FRAME_HEADER: usize = 72;
/// Frames begin at multiples of this.
pub(super) const FRAME_ALIGN: u64 = 8;
/// Largest payload.
pub(super) const PAYLOAD_MAX: usize = 64 << 20;

const CONTENT_FIELDS: usize = 40;
const LOCAL_FIELDS: usize = 36;

/// The fields in front of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FrameHeader {
    pub length: u32,
    pub content_crc: u32,
    pub local_crc: u32,
    pub prev_link: u32,
    pub round: u64,
    pub round_start: u32,
    pub term: u64,
    pub index: u64,
    pub base_offset: u64,
    pub broker_time_ms: u64,
    pub records: u32,
    pub kind: u8,
}

/// Bytes that a frame takes on disk.
pub(super) const fn stored_len(payload_len: u32) -> u64 {
    align_up(FRAME_HEADER as u64 + payload_len as u64, FRAME_ALIGN)
}

fn content_fields(
    term: u64,
    index: u64,
    base_offset: u64,
    broker_time_ms: u64,
    records: u32,
    kind: u8,
) -> [u8; CONTENT_FIELDS] {
    let mut out = [0; CONTENT_FIELDS];
    let (fields, _) = out.as_chunks_mut::<8>();
    let values = [
        term,
        index,
        base_offset,
        broker_time_ms,
        u64::from(records) | (u64::from(kind) << 32),
    ];
    for (field, value) in fields.iter_mut().zip(values) {
        *field = value.to_le_bytes();
    }
    out
}

/// The checksum that is the same on every replica, from the payload's own.
pub(super) fn content_crc(payload_crc: u32, frame: &Frame) -> u32 {
    let fields = content_fields(
        frame.term,
        frame.index,
        frame.base_offset,
        frame.broker_time_ms,
        frame.records,
        frame.kind as u8,
    );
    crc32c::crc32c_append(payload_crc, &fields)
}

impl FrameHeader {
    /// The fields of `frame`; `local_crc` covers where it stands in its segment.
    pub(super) fn new(
        frame: &Frame,
        length: u32,
        content_crc: u32,
        prev_link: u32,
        round: u64,
        round_start: u32,
        nonce: u64,
    ) -> Self {
        let mut header = Self {
            length,
            content_crc,
            local_crc: 0,
            prev_link,
            round,
            round_start,
            term: frame.term,
            index: frame.index,
            base_offset: frame.base_offset,
            broker_time_ms: frame.broker_time_ms,
            records: frame.records,
            kind: frame.kind as u8,
        };
        header.local_crc = header.expected_local_crc(nonce);
        header
    }

    fn expected_local_crc(&self, nonce: u64) -> u32 {
        let mut fields = [0; LOCAL_FIELDS];
        let (words, _) = fields.as_chunks_mut::<4>();
        let [round_low, round_high] = halves(self.round);
        let [nonce_low, nonce_high] = halves(nonce);
        let values = [
            self.length,
            self.content_crc,
            self.prev_link,
            round_low,
            round_high,
            self.round_start,
            0, // flags
            nonce_low,
            nonce_high,
        ];
        for (word, value) in words.iter_mut().zip(values) {
            *word = value.to_le_bytes();
        }
        crc32c::crc32c(&fields)
    }

    pub(super) fn encode_into(&self, out: &mut Vec<u8>) {
        out.put_u32_le(self.length);
        out.put_u32_le(self.content_crc);
        out.put_u32_le(self.local_crc);
        out.put_u32_le(self.prev_link);
        out.put_u64_le(self.round);
        out.put_u32_le(self.round_start);
        out.put_u32_le(0);
        out.extend_from_slice(&content_fields(
            self.term,
            self.index,
            self.base_offset,
            self.broker_time_ms,
            self.records,
            self.kind,
        ));
    }

    /// Reads the fields; `None` only when there are too few bytes. Checks nothing.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader::new(bytes);
        let (length, content_crc, local_crc, prev_link) =
            (from.u32()?, from.u32()?, from.u32()?, from.u32()?);
        let (round, round_start, flags) = (from.u64()?, from.u32()?, from.u32()?);
        let (term, index, base_offset) = (from.u64()?, from.u64()?, from.u64()?);
        let (broker_time_ms, records, kind) = (from.u64()?, from.u32()?, from.u8()?);
        let zeros: [u8; 3] = from.array()?;
        // What must be zero and is not makes the kind unknown, hence the frame broken.
        let kind = if flags == 0 && zeros == [0; 3] {
            kind
        } else {
            0
        };
        Some(Self {
            length,
            content_crc,
            local_crc,
            prev_link,
            round,
            round_start,
            term,
            index,
            base_offset,
            broker_time_ms,
            records,
            kind,
        })
    }

    /// Whether the fields that place it in this segment are whole.
    pub(super) fn is_placed(&self, nonce: u64) -> bool {
        FrameKind::from_byte(self.kind).is_some()
            && usize::try_from(self.length).is_ok_and(|length| length <= PAYLOAD_MAX)
            && self.local_crc == self.expected_local_crc(nonce)
    }

    /// Whether the content fields and this payload are whole.
    pub(super) fn holds(&self, payload: &[u8]) -> bool {
        let fields = content_fields(
            self.term,
            self.index,
            self.base_offset,
            self.broker_time_ms,
            self.records,
            self.kind,
        );
        self.content_crc == crc32c::crc32c_append(crc32c::crc32c(payload), &fields)
    }

    pub(super) fn stored_len(&self) -> u64 {
        stored_len(self.length)
    }

    pub(super) fn end_offset(&self) -> u64 {
        self.base_offset.saturating_add(u64::from(self.records))
    }

    /// The frame with its payload; `None` for an unknown kind.
    pub(super) fn into_frame(self, payload: bytes::Bytes) -> Option<Frame> {
        Some(Frame {
            term: self.term,
            index: self.index,
            kind: FrameKind::from_byte(self.kind)?,
            base_offset: self.base_offset,
            records: self.records,
            broker_time_ms: self.broker_time_ms,
            payload,
        })
    }
}

#[allow(
    clippy::cast_possible_truncation,
    reason = "splits a word into its halves"
)]
fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn sample() -> (Frame, FrameHeader) {
        let frame = Frame {
            term: 3,
            index: 7,
            kind: FrameKind::Batch,
            base_offset: 100,
            records: 2,
            broker_time_ms: 1_700_000_000_000,
            payload: Bytes::from_static(b"hello"),
        };
        let crc = content_crc(crc32c::crc32c(&frame.payload), &frame);
        let header = FrameHeader::new(&frame, 5, crc, 0x1122_3344, 9, 128, 0xdead_beef_cafe_f00d);
        (frame, header)
    }

    #[test]
    fn frame_header_encoded_has_golden_bytes() {
        let (_, header) = sample();
        let mut bytes = Vec::new();
        header.encode_into(&mut bytes);
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            concat!(
                "05000000",         // length
                "e38996ac",         // content_crc
                "12be4773",         // local_crc
                "44332211",         // prev_link
                "0900000000000000", // round
                "80000000",         // round_start
                "00000000",         // flags
                "0300000000000000", // term
                "0700000000000000", // index
                "6400000000000000", // base_offset
                "0068e5cf8b010000", // broker_time_ms
                "02000000",         // records
                "01000000",         // kind
            )
        );
        assert_eq!(bytes.len(), FRAME_HEADER);
        assert_eq!(FrameHeader::decode(&bytes), Some(header));
    }

    #[test]
    fn frame_any_bit_flipped_is_not_intact() {
        let (frame, header) = sample();
        let nonce = 0xdead_beef_cafe_f00d;
        let mut bytes = Vec::new();
        header.encode_into(&mut bytes);
        bytes.extend_from_slice(&frame.payload);
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let header = FrameHeader::decode(&flipped).unwrap();
            let intact = header.is_placed(nonce) && header.holds(&flipped[FRAME_HEADER..]);
            assert!(!intact, "bit {bit}");
        }
        assert!(header.is_placed(nonce) && header.holds(&frame.payload));
        assert!(!header.is_placed(nonce + 1), "another file's nonce");
    }
}
