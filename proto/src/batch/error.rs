//! Why bytes are not a batch, or a record does not go into one.

use super::Codec;

/// Why bytes are not a batch, or a record does not go into one.
///
/// Nothing here is retriable with the same bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// The bytes end before the batch does.
    #[error("the batch is truncated: {needed} bytes are needed, {have} are there")]
    Truncated {
        /// Bytes that the header asks for (or the header's own length).
        needed: usize,
        /// Bytes that there are.
        have: usize,
    },
    /// The bytes go on after the batch's end.
    #[error("{extra} bytes follow the batch's end")]
    TrailingBytes {
        /// How many.
        extra: usize,
    },
    /// The bytes do not begin with a batch's magic.
    #[error("not a record batch: the magic is {found:02x?}")]
    BadMagic {
        /// The first three bytes.
        found: [u8; 3],
    },
    /// The batch is of a format that this software does not know.
    #[error("record batch format version {version} is not supported")]
    UnsupportedVersion {
        /// The version in the header.
        version: u8,
    },
    /// The codec is not known.
    #[error("unknown compression codec {codec}")]
    UnknownCodec {
        /// The number in the header.
        codec: u8,
    },
    /// Reserved header bytes are in use.
    #[error("reserved header bytes are not zero")]
    ReservedBits,
    /// The batch holds no record.
    #[error("the batch holds no record")]
    Empty,
    /// The record count can't be true for a body of that length.
    #[error("{count} records can't fit {uncompressed_bytes} bytes")]
    ImpossibleCount {
        /// The count in the header.
        count: u32,
        /// The uncompressed length in the header.
        uncompressed_bytes: u32,
    },
    /// The batch is longer than [`super::BATCH_BYTES_MAX`].
    #[error("a batch of {size} bytes is over the limit of {max}")]
    BatchTooLarge {
        /// Its size, header included.
        size: usize,
        /// The limit.
        max: usize,
    },
    /// The body, uncompressed, is longer than [`super::UNCOMPRESSED_BYTES_MAX`].
    #[error("an uncompressed body of {size} bytes is over the limit of {max}")]
    UncompressedTooLarge {
        /// Its size by the header.
        size: usize,
        /// The limit.
        max: usize,
    },
    /// One record is larger than the limit.
    #[error("a record of {size} bytes is over the limit of {max}")]
    RecordTooLarge {
        /// Bytes of key, value and headers.
        size: usize,
        /// The limit.
        max: usize,
    },
    /// One record has too many headers.
    #[error("{count} headers in a record are over the limit of {max}")]
    TooManyHeaders {
        /// How many.
        count: usize,
        /// The limit.
        max: usize,
    },
    /// The content is not what its producer sealed.
    #[error("the checksum does not match: {expected:08x} in the header, {actual:08x} computed")]
    ChecksumMismatch {
        /// In the header.
        expected: u32,
        /// Computed.
        actual: u32,
    },
    /// The lengths in the header contradict each other or what decompression gave.
    #[error("lengths disagree: {expected} bytes by the header, {actual} found")]
    LengthMismatch {
        /// By the header.
        expected: usize,
        /// Found.
        actual: usize,
    },
    /// The body does not decompress.
    #[error("the {codec} body does not decompress")]
    Decompress {
        /// Its codec.
        codec: Codec,
    },
    /// The codec's library failed while compressing.
    #[error("compressing with {codec} failed")]
    Compress {
        /// The codec.
        codec: Codec,
    },
    /// A record in the body makes no sense.
    #[error("record {record} of the batch is malformed: {what}")]
    BadRecord {
        /// Its number in the batch, from 0.
        record: u32,
        /// What is wrong.
        what: &'static str,
    },
}
