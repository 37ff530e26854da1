//! The fixed header of a batch, readable without decompressing.

use super::{
    BATCH_BYTES_MAX, BatchError, Codec, ENCODED_RECORD_BYTES_MIN, HEADER_BYTES,
    UNCOMPRESSED_BYTES_MAX,
};
use crate::ids::ProducerId;

pub(super) const MAGIC: [u8; 3] = *b"QRB";
pub(super) const VERSION: u8 = 1;
/// The checksum covers everything from here to the end of the body.
pub(super) const CHECKED_FROM: usize = 8;

/// Who wrote a batch and at which place in its sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProducerStamp {
    /// The producer; 0 for a batch that is not idempotent.
    pub producer_id: ProducerId,
    /// Its epoch.
    pub epoch: u32,
    /// Sequence of the batch's first record in its partition; sequences count records.
    pub base_sequence: u64,
}

impl ProducerStamp {
    /// The stamp of a batch that is not idempotent.
    pub const NONE: Self = Self {
        producer_id: ProducerId(0),
        epoch: 0,
        base_sequence: 0,
    };
}

/// The fixed header of a batch. Layout: module header of [`crate::batch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchHeader {
    /// CRC32C of everything behind it.
    pub crc: u32,
    /// How the body is compressed.
    pub codec: Codec,
    /// How many records the batch holds, at least 1: the offsets and sequences it takes.
    pub record_count: u32,
    /// Bytes of the body as stored.
    pub body_bytes: u32,
    /// Bytes of the body uncompressed.
    pub uncompressed_bytes: u32,
    /// Timestamp of the first record, Unix milliseconds.
    pub base_timestamp_ms: i64,
    /// The greatest timestamp, Unix milliseconds.
    pub max_timestamp_ms: i64,
    /// Producer id, epoch and base sequence.
    pub producer: ProducerStamp,
}

impl BatchHeader {
    /// Reads and checks the header alone; `bytes` may go on with anything, and the checksum is
    /// not verified.
    ///
    /// # Errors
    /// Whatever makes the header impossible: [`BatchError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, BatchError> {
        let Some(fixed) = bytes.first_chunk::<HEADER_BYTES>() else {
            return Err(BatchError::Truncated {
                needed: HEADER_BYTES,
                have: bytes.len(),
            });
        };
        let mut fields = Fields(fixed);
        let magic = fields.take();
        let [version] = fields.take();
        if magic != MAGIC {
            return Err(BatchError::BadMagic { found: magic });
        }
        if version != VERSION {
            return Err(BatchError::UnsupportedVersion { version });
        }
        let crc = u32::from_le_bytes(fields.take());
        let [codec] = fields.take();
        let reserved: [u8; 3] = fields.take();
        let header = Self {
            crc,
            codec: Codec::from_wire(codec).ok_or(BatchError::UnknownCodec { codec })?,
            record_count: u32::from_le_bytes(fields.take()),
            body_bytes: u32::from_le_bytes(fields.take()),
            uncompressed_bytes: u32::from_le_bytes(fields.take()),
            base_timestamp_ms: i64::from_le_bytes(fields.take()),
            max_timestamp_ms: i64::from_le_bytes(fields.take()),
            producer: {
                let producer_id = ProducerId(u64::from_le_bytes(fields.take()));
                let epoch = u32::from_le_bytes(fields.take());
                let reserved: [u8; 4] = fields.take();
                if reserved != [0; 4] {
                    return Err(BatchError::ReservedBits);
                }
                ProducerStamp {
                    producer_id,
                    epoch,
                    base_sequence: u64::from_le_bytes(fields.take()),
                }
            },
        };
        if reserved != [0; 3] {
            return Err(BatchError::ReservedBits);
        }
        header.check()?;
        Ok(header)
    }

    /// Reads the header of `batch`, which must be one whole batch, and verifies the checksum.
    /// Does not decompress: what a broker does at ingest, replication and recovery.
    ///
    /// # Errors
    /// Whatever makes `batch` not a batch: [`BatchError`].
    pub fn verify(batch: &[u8]) -> Result<Self, BatchError> {
        let header = Self::parse(batch)?;
        let needed = header.batch_bytes();
        if batch.len() < needed {
            return Err(BatchError::Truncated {
                needed,
                have: batch.len(),
            });
        }
        if batch.len() > needed {
            return Err(BatchError::TrailingBytes {
                extra: batch.len() - needed,
            });
        }
        let actual = checksum(batch);
        if actual != header.crc {
            return Err(BatchError::ChecksumMismatch {
                expected: header.crc,
                actual,
            });
        }
        Ok(header)
    }

    /// Bytes of the whole batch, header included.
    #[must_use]
    pub fn batch_bytes(&self) -> usize {
        HEADER_BYTES.saturating_add(to_usize(self.body_bytes))
    }

    /// Sequence that follows the batch's last record.
    #[must_use]
    pub fn next_sequence(&self) -> u64 {
        self.producer
            .base_sequence
            .wrapping_add(u64::from(self.record_count))
    }

    fn check(&self) -> Result<(), BatchError> {
        let (body, uncompressed) = (to_usize(self.body_bytes), to_usize(self.uncompressed_bytes));
        if self.batch_bytes() > BATCH_BYTES_MAX {
            return Err(BatchError::BatchTooLarge {
                size: self.batch_bytes(),
                max: BATCH_BYTES_MAX,
            });
        }
        if uncompressed > UNCOMPRESSED_BYTES_MAX {
            return Err(BatchError::UncompressedTooLarge {
                size: uncompressed,
                max: UNCOMPRESSED_BYTES_MAX,
            });
        }
        if self.record_count == 0 {
            return Err(BatchError::Empty);
        }
        if uncompressed / ENCODED_RECORD_BYTES_MIN < to_usize(self.record_count) {
            return Err(BatchError::ImpossibleCount {
                count: self.record_count,
                uncompressed_bytes: self.uncompressed_bytes,
            });
        }
        if self.codec == Codec::None && body != uncompressed {
            return Err(BatchError::LengthMismatch {
                expected: uncompressed,
                actual: body,
            });
        }
        Ok(())
    }

    /// The header's bytes, the checksum as it stands in `crc`.
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0..3].copy_from_slice(&MAGIC);
        out[3] = VERSION;
        out[4..8].copy_from_slice(&self.crc.to_le_bytes());
        out[8] = self.codec.to_wire();
        out[12..16].copy_from_slice(&self.record_count.to_le_bytes());
        out[16..20].copy_from_slice(&self.body_bytes.to_le_bytes());
        out[20..24].copy_from_slice(&self.uncompressed_bytes.to_le_bytes());
        out[24..32].copy_from_slice(&self.base_timestamp_ms.to_le_bytes());
        out[32..40].copy_from_slice(&self.max_timestamp_ms.to_le_bytes());
        out[40..48].copy_from_slice(&self.producer.producer_id.0.to_le_bytes());
        out[48..52].copy_from_slice(&self.producer.epoch.to_le_bytes());
        out[56..64].copy_from_slice(&self.producer.base_sequence.to_le_bytes());
        out
    }
}

/// The checksum of a batch: of everything behind the checksum's own field.
pub(super) fn checksum(batch: &[u8]) -> u32 {
    crc32c::crc32c(batch.get(CHECKED_FROM..).unwrap_or_default())
}

/// 32 bits fit `usize` wherever this runs.
pub(super) fn to_usize(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// Takes fixed-size fields off the front. The fields of a header add up to its length, so
/// nothing is ever missing (and zeros would stand in for it).
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk::<N>() {
            Some((field, rest)) => {
                self.0 = rest;
                *field
            }
            None => [0; N],
        }
    }
}
