//! The segment header: the first 128 bytes of a segment file, synced before the file gets its name.
//!
//! ```text
//!  0 magic "QUTESEG1"
//!  8 version u32            1
//! 12 crc u32                CRC32C over all other bytes of the header
//! 16 replica u64            whose file this is
//! 24 base_index u64         index of the first frame
//! 32 base_offset u64        offset of the first record
//! 40 nonce u64              random: no frame of another file, or of an earlier life, is placed here (S3)
//! 48 round_floor u64        no frame in here is of an earlier round
//! 56 prev_term u64          term of entry base_index - 1
//! 64 prev_time_ms u64       broker time of that entry
//! 72 prev_link u32          local_crc of the last frame of the segment before (or its header's crc)
//! 76 zeros
//! ```

use super::codec::{Put, Reader};

/// Frames begin here.
pub(super) const SEGMENT_HEADER: usize = 128;
const MAGIC: [u8; 8] = *b"QUTESEG1";
const VERSION: u32 = 1;

/// See the module's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SegmentHeader {
    pub replica: u64,
    pub base_index: u64,
    pub base_offset: u64,
    pub nonce: u64,
    pub round_floor: u64,
    pub prev_term: u64,
    pub prev_time_ms: u64,
    pub prev_link: u32,
}

impl SegmentHeader {
    /// The bytes, and the crc that the first frame links to.
    pub(super) fn encode(&self) -> (Vec<u8>, u32) {
        let mut out = Vec::with_capacity(SEGMENT_HEADER);
        out.extend_from_slice(&MAGIC);
        out.put_u32_le(VERSION);
        let mut rest = Vec::with_capacity(SEGMENT_HEADER);
        rest.put_u64_le(self.replica);
        rest.put_u64_le(self.base_index);
        rest.put_u64_le(self.base_offset);
        rest.put_u64_le(self.nonce);
        rest.put_u64_le(self.round_floor);
        rest.put_u64_le(self.prev_term);
        rest.put_u64_le(self.prev_time_ms);
        rest.put_u32_le(self.prev_link);
        rest.resize(SEGMENT_HEADER - 16, 0);
        let crc = crc32c::crc32c_append(crc32c::crc32c(&out), &rest);
        out.put_u32_le(crc);
        out.extend_from_slice(&rest);
        (out, crc)
    }

    /// The header and its crc, or what is wrong with it.
    pub(super) fn decode(bytes: &[u8]) -> Result<(Self, u32), &'static str> {
        Self::parse(bytes).ok_or("a segment header cut short")?
    }

    fn parse(bytes: &[u8]) -> Option<Result<(Self, u32), &'static str>> {
        let mut from = Reader::new(bytes.get(..SEGMENT_HEADER)?);
        let magic: [u8; 8] = from.array()?;
        if magic != MAGIC {
            return Some(Err("no segment header"));
        }
        let (version, crc) = (from.u32()?, from.u32()?);
        let expected = crc32c::crc32c_append(
            crc32c::crc32c(bytes.get(..12)?),
            bytes.get(16..SEGMENT_HEADER)?,
        );
        if crc != expected {
            return Some(Err("a segment header with a wrong checksum"));
        }
        if version != VERSION {
            return Some(Err("a segment of a newer format"));
        }
        let header = Self {
            replica: from.u64()?,
            base_index: from.u64()?,
            base_offset: from.u64()?,
            nonce: from.u64()?,
            round_floor: from.u64()?,
            prev_term: from.u64()?,
            prev_time_ms: from.u64()?,
            prev_link: from.u32()?,
        };
        Some(Ok((header, crc)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segment_header_encoded_has_golden_bytes() {
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
        let (bytes, crc) = header.encode();
        assert_eq!(bytes.len(), SEGMENT_HEADER);
        assert_eq!(&bytes[..8], b"QUTESEG1");
        assert_eq!(bytes[8..12], [1, 0, 0, 0]);
        assert_eq!(bytes[12..16], crc.to_le_bytes());
        for (at, value) in (16..72).step_by(8).zip(1u8..) {
            assert_eq!(bytes[at..at + 8], [value, 0, 0, 0, 0, 0, 0, 0], "at {at}");
        }
        assert_eq!(bytes[72..76], [8, 0, 0, 0]);
        assert!(bytes[76..].iter().all(|byte| *byte == 0));
        assert_eq!(crc, 0xa083_e1de);
        assert_eq!(SegmentHeader::decode(&bytes), Ok((header, crc)));
    }

    #[test]
    fn segment_header_any_bit_flipped_is_refused() {
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
        let (bytes, _) = header.encode();
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(SegmentHeader::decode(&flipped).is_err(), "bit {bit}");
        }
        assert!(SegmentHeader::decode(&bytes[..100]).is_err());
    }
}
