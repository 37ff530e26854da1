//! The record batch: what a producer encodes, brokers carry untouched, and a consumer decodes.
//!
//! ```text
//! offset size  field                          (little endian; layout in docs/FORMATS.md)
//!      0    4  magic "QRB" and format version
//!      4    4  CRC32C of everything from byte 8 to the end of the body
//!      8    1  codec (0 none, 1 lz4 block, 2 zstd frame)
//!      9    3  reserved, zero
//!     12    4  record count, at least 1
//!     16    4  body length as stored
//!     20    4  body length uncompressed
//!     24    8  base timestamp, Unix ms, signed: that of the first record
//!     32    8  max timestamp, Unix ms, signed
//!     40    8  producer id (0: none, the batch is not idempotent)
//!     48    4  producer epoch
//!     52    4  reserved, zero
//!     56    8  base sequence: that of the first record; sequences count records
//!     64       body: the records, compressed as a whole
//! ```
//!
//! Invariants: the checksum made by the producer is the one the consumer verifies; nothing here
//! panics or allocates beyond what the header justifies and the caps allow, whatever the bytes;
//! absent and empty keys and values are different things.
//!
//! | file | holds |
//! | --- | --- |
//! | `header.rs` | the fixed header: [`BatchHeader`], readable without decompressing |
//! | `record.rs` | one record on its own: [`RecordRef`], [`Record`], [`RecordHeader`] |
//! | `builder.rs` | [`BatchBuilder`]: records in, sealed bytes out |
//! | `view.rs` | [`BatchView`] and [`Records`]: bytes in, records out |
//! | `codec.rs` | the codecs |
//! | `varint.rs` | LEB128 and zigzag |
//! | `error.rs` | [`BatchError`] |

mod builder;
#[deny(clippy::indexing_slicing)]
mod codec;
mod error;
#[deny(clippy::indexing_slicing)]
mod header;
#[deny(clippy::indexing_slicing)]
mod record;
#[deny(clippy::indexing_slicing)]
mod varint;
#[deny(clippy::indexing_slicing)]
mod view;

#[cfg(test)]
mod tests;

pub use builder::{BatchBuilder, Push, UnsealedBatch, reseal};
pub use codec::Codec;
pub use error::BatchError;
pub use header::{BatchHeader, ProducerStamp};
pub use record::{Record, RecordHeader, RecordRef};
pub use view::{BatchView, Records};

/// Bytes of the fixed header.
pub const HEADER_BYTES: usize = 64;
/// A batch, header included, is at most this long.
pub const BATCH_BYTES_MAX: usize = 4 * 1024 * 1024;
/// A batch's body, uncompressed, is at most this long.
pub const UNCOMPRESSED_BYTES_MAX: usize = 64 * 1024 * 1024;
/// A record's key, value and headers (names and values) together are at most this long.
pub const RECORD_BYTES_MAX: usize = 1024 * 1024;
/// A record has at most this many headers.
pub const RECORD_HEADERS_MAX: usize = 1024;
/// A record takes at least this many bytes of a body, which bounds the record count.
pub const ENCODED_RECORD_BYTES_MIN: usize = 5;
