//! Checkpoint files: the state of a partition at an index, as `<index, 20 digits>.ckpt`.
//!
//! ```text
//!  0 magic "QUTECKPT"
//!  8 version u32 1
//! 12 crc u32          CRC32C over all other bytes of the file
//! 16 index u64        the last entry that the state includes
//! 24 length u64
//! 32 state
//! ```

use std::path::Path;

use bytes::Bytes;

use super::codec::{Put, Reader, usize_of};
use super::error::{At as _, Error};
use crate::env::{Fs, read_all, write_atomically};

const MAGIC: [u8; 8] = *b"QUTECKPT";
const VERSION: u32 = 1;
const HEADER: usize = 32;
/// Largest state.
pub(super) const STATE_BYTES_MAX: usize = 256 << 20;

pub(super) fn name(index: u64) -> String {
    format!("{index:020}.ckpt")
}

fn encode(index: u64, state: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + state.len());
    out.extend_from_slice(&MAGIC);
    out.put_u32_le(VERSION);
    let mut fields = Vec::with_capacity(16);
    fields.put_u64_le(index);
    fields.put_u64_le(state.len() as u64);
    let crc = crc32c::crc32c_append(crc32c::crc32c(&out), &fields);
    out.put_u32_le(crc32c::crc32c_append(crc, state));
    out.extend_from_slice(&fields);
    out.extend_from_slice(state);
    out
}

fn decode(index: u64, bytes: &[u8]) -> Option<&[u8]> {
    let mut from = Reader::new(bytes);
    let (magic, version, crc) = (from.array::<8>()?, from.u32()?, from.u32()?);
    let rest = bytes.get(16..)?;
    let expected = crc32c::crc32c_append(crc32c::crc32c(bytes.get(..12)?), rest);
    if magic != MAGIC || version != VERSION || crc != expected || from.u64()? != index {
        return None;
    }
    let length = usize_of(from.u64()?);
    (from.len() == length).then(|| from.bytes(length))?
}

/// Writes and syncs a checkpoint (S1: the caller has checked that the log is synced up to it).
pub(super) fn write(fs: &dyn Fs, dir: &Path, index: u64, state: &[u8]) -> Result<(), Error> {
    let path = dir.join(name(index));
    write_atomically(fs, &path, &encode(index, state)).at("write", &path)
}

/// Reads a checkpoint; `None` when it is not whole.
pub(super) fn read(fs: &dyn Fs, dir: &Path, index: u64) -> Result<Option<Bytes>, Error> {
    let path = dir.join(name(index));
    let bytes = read_all(fs, &path, STATE_BYTES_MAX + HEADER).at("read", &path)?;
    let is_whole = decode(index, &bytes).is_some();
    Ok(is_whole.then(|| Bytes::from(bytes).slice(HEADER..)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checkpoint_encoded_has_golden_bytes() {
        let bytes = encode(7, b"state");
        assert_eq!(&bytes[..12], b"QUTECKPT\x01\0\0\0");
        assert_eq!(bytes[12..16], 0xf981_fe1b_u32.to_le_bytes());
        assert_eq!(&bytes[16..], b"\x07\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0state");
        assert_eq!(decode(7, &bytes), Some(&b"state"[..]));
        assert_eq!(decode(8, &bytes), None, "under another name");
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(7, &flipped), None, "bit {bit}");
        }
        assert_eq!(decode(7, &bytes[..20]), None);
    }
}
