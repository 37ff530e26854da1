//! Placeholder header, replaced below.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;

use crate::client::Shared;
use crate::error::{Error, Result};
use crate::record::ConsumedRecord;

/// Where reading begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Position {
    /// At the log start offset.
    Start,
    /// At the high watermark: only what is written from now on.
    End,
    /// At this offset.
    Offset(u64),
    /// This many records before the high watermark, per partition.
    Tail(u64),
    /// At the first batch with at least this broker time, Unix milliseconds.
    TimeMs(u64),
}

/// What to do when an offset is proven out of range. Either way the program sees the error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OutOfRange {
    /// The partition stops after the error.
    #[default]
    Stop,
    /// It goes on at the log start offset.
    ToStart,
    /// It goes on at the high watermark.
    ToEnd,
}

/// Prepares a [`Consumer`].
#[derive(Debug, Clone)]
pub struct ConsumerBuilder {}

impl ConsumerBuilder {
    pub(crate) fn new(_shared: Arc<Shared>, _topic: Arc<str>) -> Self {
        Self {}
    }

    /// Reads only these partitions. Default: all.
    #[must_use]
    pub fn partitions(self, _partitions: impl IntoIterator<Item = u32>) -> Self {
        self
    }

    /// Where reading begins. Default: [`Position::Start`].
    #[must_use]
    pub fn start(self, _position: Position) -> Self {
        self
    }

    /// Where reading of one partition begins, whatever [`ConsumerBuilder::start`] says.
    #[must_use]
    pub fn start_at(self, _partition: u32, _position: Position) -> Self {
        self
    }

    /// Ends at the end offsets seen when it is opened, instead of never.
    #[must_use]
    pub fn until_end(self) -> Self {
        self
    }

    /// Bytes of batches fetched ahead of the program. Default 16 MiB.
    #[must_use]
    pub fn prefetch_bytes(self, _bytes: usize) -> Self {
        self
    }

    /// What to do when an offset is proven out of range.
    #[must_use]
    pub fn out_of_range(self, _policy: OutOfRange) -> Self {
        self
    }

    /// A partition without a serving leader for this long is an error. Default: 120 s with
    /// [`ConsumerBuilder::until_end`], never without.
    #[must_use]
    pub fn stall_timeout(self, _timeout: Duration) -> Self {
        self
    }

    /// Finds the topic and the offsets to begin and end at.
    ///
    /// # Errors
    /// Unknown topic or partition, or no leader answered within the client's call timeout.
    pub async fn open(self) -> Result<Consumer> {
        Err(Error::closed("consumer"))
    }
}

/// A stream of records, in offset order per partition. Follows leaders; never skips or doubles.
///
/// An error item concerns one partition or one offset; the stream goes on with the others and
/// ends when no partition is left.
#[derive(Debug)]
pub struct Consumer {}

/// The records of one batch, from one partition, in offset order.
#[derive(Debug, Clone)]
pub struct ConsumedBatch {
    /// The partition.
    pub partition: u32,
    /// The leader's high watermark when it sent the batch.
    pub high_watermark: u64,
    /// The records; those below the wanted offset are left out.
    pub records: Vec<ConsumedRecord>,
}

/// A stream of whole batches; see [`Consumer::into_batches`].
#[derive(Debug)]
pub struct BatchConsumer {}

impl Consumer {
    /// The next offset to be given to the program, per partition.
    #[must_use]
    pub fn positions(&self) -> BTreeMap<u32, u64> {
        BTreeMap::new()
    }

    /// The same records, batch by batch.
    #[must_use]
    pub fn into_batches(self) -> BatchConsumer {
        BatchConsumer {}
    }
}

impl Stream for Consumer {
    type Item = Result<ConsumedRecord>;

    fn poll_next(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(None)
    }
}

impl Stream for BatchConsumer {
    type Item = Result<ConsumedBatch>;

    fn poll_next(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(None)
    }
}
