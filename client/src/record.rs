//! Records as programs give and get them.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use qute_proto::batch::{RecordHeader, RecordRef};

/// A record to be written. Absent and empty keys and values are different things.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The topic's name.
    pub topic: Arc<str>,
    /// `None`: by key, or wherever it goes fastest if there is no key.
    pub partition: Option<u32>,
    /// The key: records of one key go to one partition and keep their order.
    pub key: Option<Bytes>,
    /// The value.
    pub value: Option<Bytes>,
    /// Headers, in order.
    pub headers: Vec<RecordHeader>,
    /// Unix milliseconds; `None`: now.
    pub timestamp_ms: Option<i64>,
}

impl Record {
    /// A record for `topic` with neither key nor value yet.
    #[must_use]
    pub fn to(topic: impl Into<Arc<str>>) -> Self {
        Self {
            topic: topic.into(),
            partition: None,
            key: None,
            value: None,
            headers: Vec::new(),
            timestamp_ms: None,
        }
    }

    /// Sets the key.
    #[must_use]
    pub fn key(mut self, key: impl Into<Bytes>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Sets the value.
    #[must_use]
    pub fn value(mut self, value: impl Into<Bytes>) -> Self {
        self.value = Some(value.into());
        self
    }

    /// Sets the partition, whatever the key.
    #[must_use]
    pub fn partition(mut self, partition: u32) -> Self {
        self.partition = Some(partition);
        self
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<Bytes>) -> Self {
        self.headers.push(RecordHeader {
            name: name.into(),
            value: Some(value.into()),
        });
        self
    }

    /// Sets the timestamp, Unix milliseconds.
    #[must_use]
    pub fn timestamp_ms(mut self, timestamp_ms: i64) -> Self {
        self.timestamp_ms = Some(timestamp_ms);
        self
    }

    pub(crate) fn as_batch_record(&self, now_ms: i64) -> RecordRef<'_> {
        RecordRef {
            timestamp_ms: self.timestamp_ms.unwrap_or(now_ms),
            key: self.key.as_deref(),
            value: self.value.as_deref(),
            headers: &self.headers,
        }
    }
}

/// Where a record was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordMetadata {
    /// The topic's name.
    pub topic: Arc<str>,
    /// The partition.
    pub partition: u32,
    /// The record's offset.
    pub offset: u64,
    /// Its timestamp, Unix milliseconds.
    pub timestamp_ms: i64,
}

/// A record that was read. Key and value share the memory of the batch they came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConsumedRecord {
    /// The topic's name.
    pub topic: Arc<str>,
    /// The partition.
    pub partition: u32,
    /// The record's offset.
    pub offset: u64,
    /// Unix milliseconds, as the producing program set it.
    pub timestamp_ms: i64,
    /// When the partition's leader stamped the batch, Unix milliseconds.
    pub broker_time_ms: u64,
    /// The key; absent and empty differ.
    pub key: Option<Bytes>,
    /// The value; absent and empty differ.
    pub value: Option<Bytes>,
    /// Headers, in order.
    pub headers: Vec<RecordHeader>,
}

/// Wall clock, Unix milliseconds.
pub(crate) fn now_ms() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .ok()
        .and_then(|since| i64::try_from(since.as_millis()).ok())
        .unwrap_or(0)
}
