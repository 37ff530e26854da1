//! What a batch must be before it may knock at the door.
//!
//! Pure: header, checksum and limits, never the records themselves (a broker does not
//! decompress). The header bounds what it can: a producer that lies about single records is
//! refused by its own consumers, which check each record against the same limits.

use bytes::Bytes;
use qute_proto::batch::{BATCH_BYTES_MAX, BatchError, BatchHeader};
use qute_proto::ids::ProducerId;

use super::error::Error;
use super::producers::Stamp;

/// Encoding of one record around its key, value and headers, at most: lengths and timestamp.
const RECORD_OVERHEAD_MAX: u64 = 64;
/// Per record header: its two lengths, at most. Records with many headers are bounded by it.
const HEADER_OVERHEAD_MAX: u64 = 10 * 1024;

/// A batch whose header and checksum hold.
#[derive(Debug, Clone)]
pub struct Intake {
    /// As the producer encoded it.
    pub batch: Bytes,
    /// Records, at least 1: the offsets it takes.
    pub records: u32,
    /// Who wrote it; `None` for a batch that is not idempotent.
    pub stamp: Option<Stamp>,
}

/// The stamp of a batch's header; `None` for a batch that is not idempotent.
#[must_use]
pub fn stamp_of(header: &BatchHeader) -> Option<Stamp> {
    (header.producer.producer_id != ProducerId(0)).then_some(Stamp {
        producer: header.producer.producer_id,
        epoch: header.producer.epoch,
        base_sequence: header.producer.base_sequence,
        records: header.record_count,
    })
}

/// Verifies a batch against its own checksum and the limits.
///
/// # Errors
/// [`Error::Corrupt`], [`Error::BatchTooLarge`], [`Error::RecordTooLarge`].
pub fn verify(batch: Bytes, record_bytes_max: u64) -> Result<Intake, Error> {
    // Before the checksum: a huge message costs nothing more.
    if batch.len() > BATCH_BYTES_MAX {
        return Err(too_large(batch.len(), BATCH_BYTES_MAX));
    }
    let header = BatchHeader::verify(&batch).map_err(|error| match error {
        BatchError::BatchTooLarge { size, max } | BatchError::UncompressedTooLarge { size, max } => {
            too_large(size, max)
        }
        other => Error::Corrupt(other.to_string()),
    })?;
    // The largest record is at least the average one.
    let least = u64::from(header.uncompressed_bytes).div_ceil(u64::from(header.record_count.max(1)));
    let slack = RECORD_OVERHEAD_MAX + HEADER_OVERHEAD_MAX;
    if least > record_bytes_max.saturating_add(slack) {
        return Err(Error::RecordTooLarge {
            size_bytes: least,
            max_bytes: record_bytes_max,
        });
    }
    let stamp = stamp_of(&header);
    if stamp.is_some_and(|stamp| stamp.end_sequence().is_none()) {
        return Err(Error::Corrupt("the sequence runs past its range".into()));
    }
    Ok(Intake {
        records: header.record_count,
        stamp,
        batch,
    })
}

fn too_large(size: usize, max: usize) -> Error {
    Error::BatchTooLarge {
        size_bytes: u64::try_from(size).unwrap_or(u64::MAX),
        max_bytes: u64::try_from(max).unwrap_or(u64::MAX),
    }
}
