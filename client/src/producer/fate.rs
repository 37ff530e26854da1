//! What becomes of records: one [`Fate`] per batch on the sending side, one [`Ticket`] per record
//! on the program's. A fate that is dropped resolves its tickets.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};

use futures::FutureExt;
use futures::future::Shared;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::Instant;
use tracing::{Span, debug, debug_span, field};

use super::CloseReport;
use crate::error::{Error, Outcome, Result};
use crate::interceptor::Hooks;
use crate::record::RecordMetadata;
use crate::stats::Stats;
use crate::trace;

/// Resolves to the offset of the batch's first record.
pub(super) type BatchFuture = Shared<oneshot::Receiver<Result<u64>>>;

/// Counts fates over a producer's life.
#[derive(Debug, Default)]
pub(super) struct Tally {
    delivered: AtomicU64,
    not_written: AtomicU64,
    unknown: AtomicU64,
    first_error: Mutex<Option<Error>>,
    hooks: Hooks,
    stats: Arc<Stats>,
}

impl Tally {
    pub(super) fn new(hooks: Hooks, stats: Arc<Stats>) -> Self {
        Self {
            hooks,
            stats,
            ..Self::default()
        }
    }

    pub(super) fn report(&self) -> CloseReport {
        CloseReport {
            delivered: self.delivered.load(Ordering::Acquire),
            not_written: self.not_written.load(Ordering::Acquire),
            unknown: self.unknown.load(Ordering::Acquire),
            first_error: self.first_error.lock().clone(),
        }
    }

    fn count(&self, records: u32, result: &Result<u64>) {
        let error = result.as_ref().err();
        let counter = match error.map(Error::outcome) {
            None | Some(Some(Outcome::Ok)) => &self.delivered,
            Some(Some(Outcome::NotWritten)) => &self.not_written,
            Some(Some(Outcome::Unknown) | None) => &self.unknown,
        };
        counter.fetch_add(u64::from(records), Ordering::AcqRel);
        if let Some(error) = error {
            self.first_error.lock().get_or_insert_with(|| error.clone());
        }
    }
}

/// Which partition of which topic, for errors.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) topic: Arc<str>,
    pub(super) partition: u32,
}

impl Place {
    /// Where the record of this number in a batch was written.
    fn written(&self, base_offset: u64, number: u32, timestamp_ms: i64) -> RecordMetadata {
        RecordMetadata {
            topic: Arc::clone(&self.topic),
            partition: self.partition,
            offset: base_offset + u64::from(number),
            timestamp_ms,
        }
    }
}

/// The sending side of a batch's fate. Holds the batch's share of the buffer until then.
#[derive(Debug)]
pub(super) struct Fate {
    sender: Option<oneshot::Sender<Result<u64>>>,
    future: BatchFuture,
    records: u32,
    place: Place,
    tally: Arc<Tally>,
    permits: Vec<OwnedSemaphorePermit>,
    /// Timestamp of each record; kept only for hooks.
    timestamps_ms: Vec<i64>,
    opened_at: Instant,
    /// How often the batch went into a stream: dropped after the first time, its fate is unknown.
    attempt: u32,
    /// From the first time on.
    span: Span,
}

impl Fate {
    pub(super) fn new(place: Place, tally: Arc<Tally>) -> Self {
        tally.stats.buffer_changed();
        let (sender, receiver) = oneshot::channel();
        Self {
            sender: Some(sender),
            future: receiver.shared(),
            records: 0,
            place,
            tally,
            permits: Vec::new(),
            timestamps_ms: Vec::new(),
            opened_at: Instant::now(),
            attempt: 0,
            span: Span::none(),
        }
    }

    pub(super) fn future(&self) -> BatchFuture {
        self.future.clone()
    }

    /// Adds a record and its share of the buffer; gives its ticket.
    pub(super) fn add(&mut self, permits: [OwnedSemaphorePermit; 2], timestamp_ms: i64) -> Ticket {
        if self.permits.is_empty() {
            self.permits.extend(permits);
        } else {
            for (held, permit) in self.permits.iter_mut().zip(permits) {
                held.merge(permit);
            }
        }
        if !self.tally.hooks.is_empty() {
            self.timestamps_ms.push(timestamp_ms);
        }
        let number = self.records;
        self.records += 1;
        Ticket {
            batch: self.future.clone(),
            number,
            timestamp_ms,
            place: self.place.clone(),
        }
    }

    /// The batch went into a stream, `bytes` long.
    pub(super) fn sent(&mut self, bytes: usize) {
        let Place { topic, partition } = &self.place;
        self.attempt += 1;
        let (records, attempt) = (self.records, self.attempt);
        if attempt == 1 {
            self.span = debug_span!(
                target: trace::PRODUCE,
                "batch",
                %topic,
                partition,
                records,
                bytes,
                attempt = field::Empty,
                offset = field::Empty,
                outcome = field::Empty,
            );
        }
        debug!(target: trace::PRODUCE, parent: &self.span, attempt, "batch sent");
        self.tally.stats.sent(records, bytes, attempt > 1);
    }

    /// Ends the span.
    fn trace(&mut self, result: &Result<u64>) {
        let span = std::mem::replace(&mut self.span, Span::none());
        if span.is_disabled() {
            return;
        }
        span.record("attempt", self.attempt);
        if let Ok(base_offset) = result {
            span.record("offset", base_offset);
        }
        let outcome = match result.as_ref().map_err(Error::outcome) {
            Ok(_) | Err(Some(Outcome::Ok)) => "ok",
            Err(Some(Outcome::NotWritten)) => "not_written",
            Err(Some(Outcome::Unknown) | None) => "unknown",
        };
        span.record("outcome", outcome);
    }

    pub(super) fn written(mut self, base_offset: u64) {
        self.resolve(Ok(base_offset));
    }

    pub(super) fn failed(mut self, error: Error, outcome: Outcome) {
        self.fail(error, outcome);
    }

    fn fail(&mut self, error: Error, outcome: Outcome) {
        let error = error
            .at(&self.place.topic, self.place.partition)
            .with_outcome(outcome);
        self.resolve(Err(error));
    }

    fn resolve(&mut self, result: Result<u64>) {
        if let Some(sender) = self.sender.take() {
            self.trace(&result);
            self.tally.count(self.records, &result);
            let stats = &self.tally.stats;
            stats.resolved(self.records, &result, self.opened_at.elapsed());
            // The buffer's room first: who awaits the ticket may enqueue at once.
            self.permits.clear();
            stats.buffer_changed();
            self.tell_hooks(&result);
            // Nobody may be listening any more.
            let _ = sender.send(result);
        }
    }
}

impl Fate {
    /// Each record's fate, as its ticket will give it.
    fn tell_hooks(&self, result: &Result<u64>) {
        for (number, &timestamp_ms) in (0..).zip(&self.timestamps_ms) {
            let fate = match result {
                Ok(base_offset) => Ok(self.place.written(*base_offset, number, timestamp_ms)),
                Err(error) => Err(error.clone()),
            };
            self.tally.hooks.after_send(&fate);
        }
    }
}

impl Drop for Fate {
    fn drop(&mut self) {
        if self.sender.is_some() {
            let outcome = if self.attempt > 0 {
                Outcome::Unknown
            } else {
                Outcome::NotWritten
            };
            self.fail(Error::closed("producer"), outcome);
        }
    }
}

/// The fate of one record: a future that always resolves, also when the producer is dropped.
///
/// # Cancel safety
/// Dropping it changes nothing about the record.
#[derive(Debug)]
#[must_use = "a ticket tells whether the record was written"]
pub struct Ticket {
    batch: BatchFuture,
    number: u32,
    timestamp_ms: i64,
    place: Place,
}

impl Ticket {
    /// The partition that the record goes to.
    #[must_use]
    pub fn partition(&self) -> u32 {
        self.place.partition
    }
}

impl Future for Ticket {
    type Output = Result<RecordMetadata>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let base_offset = match ready!(self.batch.poll_unpin(cx)) {
            Ok(Ok(base_offset)) => base_offset,
            Ok(Err(error)) => return Poll::Ready(Err(error)),
            // `Fate` resolves on drop: this would be a fault of ours.
            Err(_) => {
                return Poll::Ready(Err(Error::closed("producer").with_outcome(Outcome::Unknown)));
            }
        };
        let written = self
            .place
            .written(base_offset, self.number, self.timestamp_ms);
        Poll::Ready(Ok(written))
    }
}
