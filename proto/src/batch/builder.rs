//! Records in, sealed bytes out.

use bytes::{Bytes, BytesMut};

use super::codec::Compressor;
use super::header::{self, BatchHeader};
use super::{BATCH_BYTES_MAX, BatchError, Codec, HEADER_BYTES, ProducerStamp, RecordRef, varint};

/// What became of a pushed record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Push {
    /// It is in the batch, with this number from 0.
    Added(u32),
    /// The batch is full: finish it and push again into the next.
    Full,
}

/// Collects records into one batch of bounded size. Reusable: [`BatchBuilder::finish`] leaves it
/// empty, its compression context kept.
pub struct BatchBuilder {
    batch_bytes_max: usize,
    /// Header room, then the records.
    buffer: BytesMut,
    record_count: u32,
    base_timestamp_ms: i64,
    max_timestamp_ms: i64,
    compressor: Compressor,
}

impl BatchBuilder {
    /// A builder of batches of at most `batch_bytes_max`, header included and before
    /// compression (clipped to [`BATCH_BYTES_MAX`]). A single record may exceed it.
    #[must_use]
    pub fn new(batch_bytes_max: usize) -> Self {
        Self {
            batch_bytes_max: batch_bytes_max.min(BATCH_BYTES_MAX),
            buffer: BytesMut::new(),
            record_count: 0,
            base_timestamp_ms: 0,
            max_timestamp_ms: i64::MIN,
            compressor: Compressor::default(),
        }
    }

    /// Adds a record, unless the batch would grow over its limit.
    ///
    /// # Errors
    /// [`BatchError::RecordTooLarge`] or [`BatchError::TooManyHeaders`]: no batch takes it. The
    /// builder is unchanged.
    pub fn push(&mut self, record: &RecordRef<'_>) -> Result<Push, BatchError> {
        record.check()?;
        let base = if self.record_count == 0 {
            record.timestamp_ms
        } else {
            self.base_timestamp_ms
        };
        let content = record.content_bytes(base);
        let encoded = varint::len(u64::try_from(content).unwrap_or(u64::MAX)) + content;
        if self.record_count > 0
            && (self.size_bytes() + encoded > self.batch_bytes_max || self.record_count == u32::MAX)
        {
            return Ok(Push::Full);
        }
        if self.record_count == 0 {
            self.buffer.clear();
            self.buffer.resize(HEADER_BYTES, 0);
            self.base_timestamp_ms = base;
        }
        self.buffer.reserve(encoded);
        record.encode(base, content, &mut self.buffer);
        self.max_timestamp_ms = self.max_timestamp_ms.max(record.timestamp_ms);
        let number = self.record_count;
        self.record_count += 1;
        Ok(Push::Added(number))
    }

    /// How many records are in it.
    #[must_use]
    pub fn record_count(&self) -> u32 {
        self.record_count
    }

    /// No record is in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.record_count == 0
    }

    /// Bytes of the batch so far, header included, before compression.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.buffer.len().max(HEADER_BYTES)
    }

    /// Compresses the records and lays the batch out; producer and sequence are set by
    /// [`UnsealedBatch::seal`]. The body stays uncompressed where `codec` would not make it
    /// smaller. The builder is empty afterwards.
    ///
    /// # Errors
    /// [`BatchError::Empty`] without records; [`BatchError::Compress`] if the codec fails (the
    /// records stay in the builder).
    pub fn finish(&mut self, codec: Codec) -> Result<UnsealedBatch, BatchError> {
        if self.record_count == 0 {
            return Err(BatchError::Empty);
        }
        let body = self.buffer.get(HEADER_BYTES..).unwrap_or_default();
        let uncompressed_bytes = length(body)?;
        let compressed = self.compressor.compress(codec, body)?;
        let (codec, body_bytes) = match compressed {
            Some(compressed) => (codec, length(compressed)?),
            None => (Codec::None, uncompressed_bytes),
        };
        let buffer = match compressed {
            Some(compressed) => {
                let mut out = BytesMut::with_capacity(HEADER_BYTES + compressed.len());
                out.resize(HEADER_BYTES, 0);
                out.extend_from_slice(compressed);
                self.buffer.clear();
                out
            }
            None => self.buffer.split(),
        };
        let header = BatchHeader {
            crc: 0,
            codec,
            record_count: self.record_count,
            body_bytes,
            uncompressed_bytes,
            base_timestamp_ms: self.base_timestamp_ms,
            max_timestamp_ms: self.max_timestamp_ms,
            producer: ProducerStamp::NONE,
        };
        self.record_count = 0;
        self.max_timestamp_ms = i64::MIN;
        Ok(UnsealedBatch { header, buffer })
    }
}

fn length(body: &[u8]) -> Result<u32, BatchError> {
    u32::try_from(body.len()).map_err(|_| BatchError::BatchTooLarge {
        size: body.len(),
        max: BATCH_BYTES_MAX,
    })
}

/// A batch that only lacks its producer, sequence and checksum.
#[derive(Debug)]
pub struct UnsealedBatch {
    header: BatchHeader,
    buffer: BytesMut,
}

impl UnsealedBatch {
    /// How many records, and so sequences, it takes.
    #[must_use]
    pub fn record_count(&self) -> u32 {
        self.header.record_count
    }

    /// Bytes of the whole batch as it will be sent.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.buffer.len()
    }

    /// The greatest record timestamp, Unix milliseconds.
    #[must_use]
    pub fn max_timestamp_ms(&self) -> i64 {
        self.header.max_timestamp_ms
    }

    /// Sets producer and sequence, computes the checksum, and gives the batch's bytes.
    #[must_use]
    pub fn seal(mut self, producer: ProducerStamp) -> Bytes {
        self.header.producer = producer;
        self.header.crc = 0;
        let write = |buffer: &mut BytesMut, header: &BatchHeader| {
            if let Some(room) = buffer.get_mut(..HEADER_BYTES) {
                room.copy_from_slice(&header.encode());
            }
        };
        write(&mut self.buffer, &self.header);
        self.header.crc = header::checksum(&self.buffer);
        write(&mut self.buffer, &self.header);
        self.buffer.freeze()
    }
}

/// The same batch under another producer stamp: copies it once. For a producer that has to go on
/// under a new epoch.
///
/// # Errors
/// Whatever makes `batch` not a batch.
pub fn reseal(batch: &[u8], producer: ProducerStamp) -> Result<Bytes, BatchError> {
    let header = BatchHeader::verify(batch)?;
    let buffer = BytesMut::from(batch);
    Ok(UnsealedBatch { header, buffer }.seal(producer))
}
