//! Placeholder header, replaced below.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::client::Shared;
use crate::config::ProducerConfig;
use crate::error::{Error, Result};
use crate::record::{Record, RecordMetadata};

/// Writes records: batches them per partition, keeps their order, retries without duplicates,
/// follows leaders. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Producer {}

/// The fate of one record: a future that always resolves, also when the producer is dropped.
#[derive(Debug)]
pub struct Ticket {}

impl Future for Ticket {
    type Output = Result<RecordMetadata>;

    fn poll(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(Err(Error::closed("producer")))
    }
}

/// What became of the records of a producer, at its close.
#[derive(Debug, Clone, Default)]
pub struct CloseReport {
    /// Records acknowledged over the producer's life.
    pub delivered: u64,
    /// Records that were not written.
    pub not_written: u64,
    /// Records of unknown fate.
    pub unknown: u64,
    /// Of those that failed, the first one's error.
    pub first_error: Option<Error>,
}

impl Producer {
    pub(crate) fn new(_shared: Arc<Shared>, config: ProducerConfig) -> Result<Self> {
        config.check()?;
        Ok(Self {})
    }

    /// Writes a record and waits for its acknowledgement.
    ///
    /// # Errors
    /// [`Error::outcome`] says whether the record was written, was not, or may have been.
    ///
    /// # Cancel safety
    /// Cancelled before the record is taken in, nothing happens; afterwards it is delivered all
    /// the same.
    pub async fn send(&self, record: Record) -> Result<RecordMetadata> {
        self.enqueue(record).await?.await
    }

    /// Takes a record in and gives a [`Ticket`] that resolves with its fate. Waits while the
    /// buffer is full. Records enqueued one after another keep their order per partition.
    ///
    /// # Errors
    /// The record was not taken in: unknown topic or partition, too large, buffer full until the
    /// delivery timeout, producer closed. The outcome is always not written.
    ///
    /// # Cancel safety
    /// Cancelled, the record is not taken in.
    pub async fn enqueue(&self, _record: Record) -> Result<Ticket> {
        Err(Error::closed("producer"))
    }

    /// Sends what lingers and waits until every record taken in before has its fate.
    ///
    /// # Cancel safety
    /// Loses nothing; the records are still delivered.
    pub async fn flush(&self) {}

    /// Takes no more records, delivers those that are in until `deadline` passes, and reports.
    /// What is not delivered by then resolves as not written or unknown.
    pub async fn close(self, _deadline: Duration) -> CloseReport {
        CloseReport::default()
    }
}
