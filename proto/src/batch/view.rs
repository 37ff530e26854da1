//! Bytes in, records out.

use bytes::{Buf, Bytes};

use super::header::to_usize;
use super::{BatchError, BatchHeader, Codec, HEADER_BYTES, Record, codec, varint};

/// A whole batch whose checksum has been verified. Cheap to clone.
#[derive(Debug, Clone)]
pub struct BatchView {
    header: BatchHeader,
    bytes: Bytes,
}

impl BatchView {
    /// Checks header, length and checksum of one whole batch.
    ///
    /// # Errors
    /// Whatever makes `bytes` not a batch: [`BatchError`].
    pub fn parse(bytes: Bytes) -> Result<Self, BatchError> {
        let header = BatchHeader::verify(&bytes)?;
        Ok(Self { header, bytes })
    }

    /// The fixed header.
    #[must_use]
    pub fn header(&self) -> &BatchHeader {
        &self.header
    }

    /// The whole batch, header included.
    #[must_use]
    pub fn as_bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// The records, decompressed first if need be (at most [`super::UNCOMPRESSED_BYTES_MAX`],
    /// and what the header says). Without compression they share the batch's memory.
    ///
    /// # Errors
    /// [`BatchError::Decompress`], [`BatchError::LengthMismatch`].
    pub fn records(&self) -> Result<Records, BatchError> {
        let stored = self.bytes.slice(HEADER_BYTES.min(self.bytes.len())..);
        let body = match self.header.codec {
            Codec::None => stored,
            codec => {
                codec::decompress(codec, &stored, to_usize(self.header.uncompressed_bytes))?.into()
            }
        };
        Ok(Records {
            body,
            count: self.header.record_count,
            next: 0,
            base_timestamp_ms: self.header.base_timestamp_ms,
        })
    }
}

/// The records of a batch, in order. After an error it ends.
#[derive(Debug, Clone)]
pub struct Records {
    body: Bytes,
    count: u32,
    next: u32,
    base_timestamp_ms: i64,
}

impl Records {
    fn decode_next(&mut self) -> Result<Record, BatchError> {
        let record = self.next;
        let bad = |what| BatchError::BadRecord { record, what };
        let mut rest: &[u8] = &self.body;
        let content_bytes = varint::take(&mut rest)
            .and_then(|len| usize::try_from(len).ok())
            .ok_or(bad("length"))?;
        let content = rest.get(..content_bytes).ok_or(bad("length"))?;
        let record = Record::decode(&self.body, content, self.next, self.base_timestamp_ms)?;
        let end = self.body.len() - rest.len() + content_bytes;
        self.next += 1;
        if self.next == self.count && end != self.body.len() {
            return Err(bad("bytes after the last record"));
        }
        self.body.advance(end);
        Ok(record)
    }
}

impl Iterator for Records {
    type Item = Result<Record, BatchError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.next >= self.count {
            return None;
        }
        let record = self.decode_next();
        if record.is_err() {
            self.count = 0;
        }
        Some(record)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = to_usize(self.count.saturating_sub(self.next));
        (0, Some(left))
    }
}
