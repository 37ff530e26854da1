//! One record: borrowed on its way in, sharing the batch's memory on its way out.

use bytes::{Bytes, BytesMut};

use super::{BatchError, RECORD_BYTES_MAX, RECORD_HEADERS_MAX, varint};

/// A named value beside key and value. The value may be absent, which is not the same as empty.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RecordHeader {
    /// Its name: UTF-8, may be empty, may repeat.
    pub name: String,
    /// Its value.
    pub value: Option<Bytes>,
}

/// A record to be put into a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordRef<'a> {
    /// Unix milliseconds.
    pub timestamp_ms: i64,
    /// The key; absent and empty differ.
    pub key: Option<&'a [u8]>,
    /// The value; absent and empty differ.
    pub value: Option<&'a [u8]>,
    /// Headers, in order.
    pub headers: &'a [RecordHeader],
}

/// A record taken out of a batch; key and value share the batch's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its number in the batch, from 0: base offset + this = its offset.
    pub offset_delta: u32,
    /// Unix milliseconds.
    pub timestamp_ms: i64,
    /// The key; absent and empty differ.
    pub key: Option<Bytes>,
    /// The value; absent and empty differ.
    pub value: Option<Bytes>,
    /// Headers, in order.
    pub headers: Vec<RecordHeader>,
}

impl RecordRef<'_> {
    /// Bytes of key, value and headers: what [`RECORD_BYTES_MAX`] bounds.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        let headers: usize = self
            .headers
            .iter()
            .map(|header| header.name.len() + header.value.as_ref().map_or(0, Bytes::len))
            .sum();
        self.key.map_or(0, <[u8]>::len) + self.value.map_or(0, <[u8]>::len) + headers
    }

    /// Refuses what no batch may hold.
    ///
    /// # Errors
    /// [`BatchError::RecordTooLarge`], [`BatchError::TooManyHeaders`].
    pub fn check(&self) -> Result<(), BatchError> {
        if self.headers.len() > RECORD_HEADERS_MAX {
            return Err(BatchError::TooManyHeaders {
                count: self.headers.len(),
                max: RECORD_HEADERS_MAX,
            });
        }
        let size = self.size_bytes();
        if size > RECORD_BYTES_MAX {
            return Err(BatchError::RecordTooLarge {
                size,
                max: RECORD_BYTES_MAX,
            });
        }
        Ok(())
    }

    /// Bytes of the encoded record behind its length prefix.
    pub(super) fn content_bytes(&self, base_timestamp_ms: i64) -> usize {
        let headers: usize = self
            .headers
            .iter()
            .map(|header| {
                varint::len(to_u64(header.name.len()))
                    + header.name.len()
                    + optional_bytes(header.value.as_deref())
            })
            .sum();
        varint::len(delta(self.timestamp_ms, base_timestamp_ms))
            + optional_bytes(self.key)
            + optional_bytes(self.value)
            + varint::len(to_u64(self.headers.len()))
            + headers
    }

    /// Appends the encoded record: length of the rest, timestamp delta, key, value, headers.
    pub(super) fn encode(&self, base_timestamp_ms: i64, content_bytes: usize, out: &mut BytesMut) {
        varint::put(out, to_u64(content_bytes));
        varint::put(out, delta(self.timestamp_ms, base_timestamp_ms));
        put_optional(out, self.key);
        put_optional(out, self.value);
        varint::put(out, to_u64(self.headers.len()));
        for header in self.headers {
            varint::put(out, to_u64(header.name.len()));
            out.extend_from_slice(header.name.as_bytes());
            put_optional(out, header.value.as_deref());
        }
    }
}

impl Record {
    /// Decodes the record that `content` holds (behind the length prefix). Slices of `body`
    /// become key, value and header values.
    pub(super) fn decode(
        body: &Bytes,
        content: &[u8],
        offset_delta: u32,
        base_timestamp_ms: i64,
    ) -> Result<Self, BatchError> {
        let bad = |what| BatchError::BadRecord {
            record: offset_delta,
            what,
        };
        let mut rest = content;
        let delta = varint::take(&mut rest).ok_or(bad("timestamp"))?;
        let key = take_optional(body, &mut rest).ok_or(bad("key"))?;
        let value = take_optional(body, &mut rest).ok_or(bad("value"))?;
        let count = varint::take(&mut rest)
            .and_then(|count| usize::try_from(count).ok())
            .ok_or(bad("header count"))?;
        // Two bytes at least per header: a count beyond that allocates nothing.
        if count > RECORD_HEADERS_MAX || count > rest.len() / 2 {
            return Err(bad("header count"));
        }
        let mut headers = Vec::with_capacity(count);
        for _ in 0..count {
            let name = varint::take(&mut rest)
                .and_then(|len| take_slice(&mut rest, len))
                .and_then(|name| std::str::from_utf8(name).ok())
                .ok_or(bad("header name"))?;
            let value = take_optional(body, &mut rest).ok_or(bad("header value"))?;
            headers.push(RecordHeader {
                name: name.to_owned(),
                value,
            });
        }
        if !rest.is_empty() {
            return Err(bad("bytes after its end"));
        }
        let record = Self {
            offset_delta,
            timestamp_ms: base_timestamp_ms.wrapping_add(varint::unzigzag(delta)),
            key,
            value,
            headers,
        };
        record.as_ref().check()?;
        Ok(record)
    }

    /// The same record, borrowed.
    #[must_use]
    pub fn as_ref(&self) -> RecordRef<'_> {
        RecordRef {
            timestamp_ms: self.timestamp_ms,
            key: self.key.as_deref(),
            value: self.value.as_deref(),
            headers: &self.headers,
        }
    }
}

/// Timestamps wrap around, so any pair of them survives the round trip.
fn delta(timestamp_ms: i64, base_ms: i64) -> u64 {
    varint::zigzag(timestamp_ms.wrapping_sub(base_ms))
}

fn to_u64(value: usize) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}

/// Absent is 0, `n` bytes are `n + 1` and the bytes.
fn put_optional(out: &mut BytesMut, bytes: Option<&[u8]>) {
    match bytes {
        None => varint::put(out, 0),
        Some(bytes) => {
            varint::put(out, to_u64(bytes.len()).saturating_add(1));
            out.extend_from_slice(bytes);
        }
    }
}

fn optional_bytes(bytes: Option<&[u8]>) -> usize {
    bytes.map_or(1, |bytes| {
        varint::len(to_u64(bytes.len()).saturating_add(1)) + bytes.len()
    })
}

fn take_slice<'a>(rest: &mut &'a [u8], len: u64) -> Option<&'a [u8]> {
    let (slice, after) = rest.split_at_checked(usize::try_from(len).ok()?)?;
    *rest = after;
    Some(slice)
}

fn take_optional(body: &Bytes, rest: &mut &[u8]) -> Option<Option<Bytes>> {
    let Some(len) = varint::take(rest)?.checked_sub(1) else {
        return Some(None);
    };
    let slice = take_slice(rest, len)?;
    // An empty slice needs no share of the batch's memory.
    Some(Some(if slice.is_empty() {
        Bytes::new()
    } else {
        body.slice_ref(slice)
    }))
}
