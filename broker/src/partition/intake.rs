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
        BatchError::BatchTooLarge { size, max }
        | BatchError::UncompressedTooLarge { size, max } => too_large(size, max),
        other => Error::Corrupt(other.to_string()),
    })?;
    // The largest record is at least the average one.
    let least =
        u64::from(header.uncompressed_bytes).div_ceil(u64::from(header.record_count.max(1)));
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

#[cfg(test)]
mod tests {
    use qute_proto::batch::{BatchBuilder, Codec, ProducerStamp, RecordRef};

    use super::*;

    const RECORD_MAX: u64 = 1 << 20;

    fn sealed(values: &[&[u8]], codec: Codec, base_sequence: u64) -> Bytes {
        let mut builder = BatchBuilder::new(4 << 20);
        for value in values {
            let record = RecordRef {
                key: Some(b"k"),
                value: Some(value),
                headers: &[],
                timestamp_ms: 1,
            };
            builder.push(&record).unwrap();
        }
        builder.finish(codec).unwrap().seal(ProducerStamp {
            producer_id: ProducerId(5),
            epoch: 1,
            base_sequence,
        })
    }

    /// Overwrites header bytes and repairs the checksum, as a hostile producer would.
    fn forge(batch: &Bytes, at: usize, with: &[u8]) -> Bytes {
        let mut forged = batch.to_vec();
        forged[at..at + with.len()].copy_from_slice(with);
        let crc = crc32c::crc32c(&forged[8..]);
        forged[4..8].copy_from_slice(&crc.to_le_bytes());
        Bytes::from(forged)
    }

    #[test]
    fn sound_batch_keeps_its_bytes_and_stamp() {
        let batch = sealed(&[b"a", b"b"], Codec::None, 40);
        let intake = verify(batch.clone(), RECORD_MAX).unwrap();
        assert_eq!(intake.batch, batch);
        assert_eq!(intake.records, 2);
        let stamp = intake.stamp.unwrap();
        assert_eq!((stamp.base_sequence, stamp.end_sequence()), (40, Some(42)));
    }

    #[test]
    fn every_truncation_is_corrupt() {
        let batch = sealed(&[b"value"], Codec::None, 0);
        for cut in 0..batch.len() {
            let error = verify(batch.slice(..cut), RECORD_MAX).unwrap_err();
            assert!(matches!(error, Error::Corrupt(_)), "cut at {cut}: {error}");
        }
    }

    #[test]
    fn every_flipped_bit_is_refused() {
        let batch = sealed(&[b"value"], Codec::None, 0);
        for bit in 0..batch.len() * 8 {
            let mut flipped = batch.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(
                verify(Bytes::from(flipped), RECORD_MAX).is_err(),
                "bit {bit}"
            );
        }
    }

    #[test]
    fn four_billion_records_are_refused_by_the_header() {
        let batch = sealed(&[b"value"], Codec::None, 0);
        let forged = forge(&batch, 12, &u32::MAX.to_le_bytes());
        assert!(matches!(verify(forged, RECORD_MAX), Err(Error::Corrupt(_))));
    }

    #[test]
    fn zip_bomb_is_refused_without_decompressing() {
        let value = vec![0; 100_000];
        let batch = sealed(&[&value], Codec::Zstd, 0);
        assert!(batch.len() < 1000);
        let forged = forge(&batch, 20, &(1u32 << 30).to_le_bytes());
        assert!(matches!(
            verify(forged, RECORD_MAX),
            Err(Error::BatchTooLarge { .. })
        ));
    }

    #[test]
    fn record_over_the_topics_limit_is_refused_by_its_bound() {
        let value = vec![0; 100_000];
        let batch = sealed(&[&value], Codec::Zstd, 0);
        assert!(matches!(
            verify(batch.clone(), 50_000),
            Err(Error::RecordTooLarge { .. })
        ));
        assert!(verify(batch, 100_001).is_ok());
    }

    #[test]
    fn batch_over_the_limit_is_refused_before_its_checksum() {
        let huge = Bytes::from(vec![0; BATCH_BYTES_MAX + 1]);
        assert!(matches!(
            verify(huge, RECORD_MAX),
            Err(Error::BatchTooLarge { .. })
        ));
    }

    #[test]
    fn sequence_past_its_range_is_refused() {
        let batch = sealed(&[b"a", b"b"], Codec::None, u64::MAX - 1);
        assert!(matches!(verify(batch, RECORD_MAX), Err(Error::Corrupt(_))));
    }

    #[test]
    fn batch_without_producer_has_no_stamp() {
        let batch = sealed(&[b"a"], Codec::None, 0);
        let forged = forge(&batch, 40, &[0; 8]);
        assert_eq!(verify(forged, RECORD_MAX).unwrap().stamp, None);
    }
}
