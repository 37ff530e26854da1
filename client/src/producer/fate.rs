//! What becomes of records: one [`Fate`] per batch on the sending side, one [`Ticket`] per record
//! on the program's. A fate that is dropped resolves its tickets.
//!
//! All tickets of a batch share one allocation; those that are polled before it has its fate leave a
//! waker in it.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;
use tokio::time::Instant;
use tracing::{Span, debug, debug_span, field};

use super::report::{Place, Tally};
use super::room::Room;
use crate::error::{Error, Outcome, Result};
use crate::record::RecordMetadata;
use crate::trace;

impl Place {
    /// Where the record of this number in a batch was written.
    fn written(&self, base_offset: u64, number: u32, timestamp_ms: i64) -> RecordMetadata {
        RecordMetadata {
            topic: Arc::clone(&self.topic),
            partition: self.partition,
            // Links let nothing pass for which this would not fit.
            offset: base_offset.saturating_add(u64::from(number)),
            timestamp_ms,
        }
    }
}

/// What a batch and its tickets share.
#[derive(Debug)]
struct Verdict {
    place: Place,
    /// The offset of the batch's first record, or what became of the batch instead.
    result: OnceLock<Result<u64>>,
    wakers: Mutex<Wakers>,
}

#[derive(Debug, Default)]
struct Wakers {
    slots: Vec<Option<Waker>>,
    /// Slots whose future is gone.
    free: Vec<usize>,
}

/// Resolves once a batch has its fate.
#[derive(Debug)]
pub(super) struct BatchFuture {
    verdict: Arc<Verdict>,
    slot: Option<usize>,
}

impl BatchFuture {
    fn of(verdict: &Arc<Verdict>) -> Self {
        Self {
            verdict: Arc::clone(verdict),
            slot: None,
        }
    }

    /// The result, if it is there.
    pub(super) fn peek(&self) -> Option<&Result<u64>> {
        self.verdict.result.get()
    }

    /// Both are of the same batch.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.verdict, &other.verdict)
    }

    pub(super) fn poll_ref(&mut self, cx: &mut Context<'_>) -> Poll<&Result<u64>> {
        if self.verdict.result.get().is_none() {
            let mut wakers = self.verdict.wakers.lock();
            // Set before the wakers are taken: seen now, or woken later.
            if self.verdict.result.get().is_none() {
                let slot = match self.slot {
                    Some(slot) => slot,
                    None => wakers.free.pop().unwrap_or_else(|| {
                        wakers.slots.push(None);
                        wakers.slots.len() - 1
                    }),
                };
                self.slot = Some(slot);
                match wakers.slots.get_mut(slot) {
                    Some(Some(waker)) => waker.clone_from(cx.waker()),
                    Some(empty) => *empty = Some(cx.waker().clone()),
                    None => {}
                }
                return Poll::Pending;
            }
        }
        match self.verdict.result.get() {
            Some(result) => Poll::Ready(result),
            None => Poll::Pending,
        }
    }
}

impl Clone for BatchFuture {
    fn clone(&self) -> Self {
        Self::of(&self.verdict)
    }
}

impl Future for BatchFuture {
    type Output = Result<u64>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.poll_ref(cx).map(Clone::clone)
    }
}

impl Drop for BatchFuture {
    fn drop(&mut self) {
        if let Some(slot) = self.slot
            && self.verdict.result.get().is_none()
        {
            let mut wakers = self.verdict.wakers.lock();
            if let Some(waker) = wakers.slots.get_mut(slot) {
                *waker = None;
                wakers.free.push(slot);
            }
        }
    }
}

/// The sending side of a batch's fate. Holds the batch's part of the buffer until then.
#[derive(Debug)]
pub(super) struct Fate {
    verdict: Arc<Verdict>,
    records: u32,
    tally: Arc<Tally>,
    room: Arc<Room>,
    /// Of the buffer.
    bytes: usize,
    /// Timestamp of each record; kept only for hooks.
    timestamps_ms: Vec<i64>,
    opened_at: Instant,
    /// How often the batch went into a stream: dropped after the first time, its fate is unknown.
    attempt: u32,
    /// From the first time on.
    span: Span,
}

impl Fate {
    pub(super) fn new(place: Place, room: Arc<Room>, tally: Arc<Tally>, now: Instant) -> Self {
        tally.stats.buffer_changed();
        Self {
            verdict: Arc::new(Verdict {
                place,
                result: OnceLock::new(),
                wakers: Mutex::default(),
            }),
            records: 0,
            tally,
            room,
            bytes: 0,
            timestamps_ms: Vec::new(),
            opened_at: now,
            attempt: 0,
            span: Span::none(),
        }
    }

    pub(super) fn future(&self) -> BatchFuture {
        BatchFuture::of(&self.verdict)
    }

    /// Adds a record and what it takes of the buffer; gives its ticket.
    pub(super) fn add(&mut self, bytes: usize, timestamp_ms: i64) -> Ticket {
        self.bytes += bytes;
        if !self.tally.hooks.is_empty() {
            self.timestamps_ms.push(timestamp_ms);
        }
        let number = self.records;
        self.records += 1;
        Ticket {
            batch: self.future(),
            number,
            timestamp_ms,
        }
    }

    /// The batch went into a stream, `bytes` long.
    pub(super) fn sent(&mut self, bytes: usize) {
        let Place { topic, partition } = &self.verdict.place;
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
        let place = &self.verdict.place;
        let error = error
            .at(&place.topic, place.partition)
            .with_outcome(outcome);
        self.resolve(Err(error));
    }

    fn is_resolved(&self) -> bool {
        self.verdict.result.get().is_some()
    }

    fn resolve(&mut self, result: Result<u64>) {
        if self.is_resolved() {
            return;
        }
        self.trace(&result);
        self.tally.count(&self.verdict.place, self.records, &result);
        let stats = &self.tally.stats;
        stats.resolved(self.records, &result, self.opened_at.elapsed());
        // The buffer's room first: who awaits the ticket may enqueue at once.
        self.room.give_back(std::mem::take(&mut self.bytes));
        stats.buffer_changed();
        self.tell_hooks(&result);
        // Set once: this is the only sender.
        let _ = self.verdict.result.set(result);
        let wakers = std::mem::take(&mut *self.verdict.wakers.lock());
        wakers.slots.into_iter().flatten().for_each(Waker::wake);
    }

    /// Each record's fate, as its ticket will give it.
    fn tell_hooks(&self, result: &Result<u64>) {
        let place = &self.verdict.place;
        for (number, &timestamp_ms) in (0..).zip(&self.timestamps_ms) {
            let fate = match result {
                Ok(base_offset) => Ok(place.written(*base_offset, number, timestamp_ms)),
                Err(error) => Err(error.clone()),
            };
            self.tally.hooks.after_send(&fate);
        }
    }
}

impl Drop for Fate {
    fn drop(&mut self) {
        if !self.is_resolved() {
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
}

impl Ticket {
    /// The partition that the record goes to.
    #[must_use]
    pub fn partition(&self) -> u32 {
        self.batch.verdict.place.partition
    }

    pub(super) fn into_batch(self) -> BatchFuture {
        self.batch
    }
}

impl Future for Ticket {
    type Output = Result<RecordMetadata>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let base_offset = match self.batch.poll_ref(cx) {
            Poll::Ready(Ok(base_offset)) => *base_offset,
            Poll::Ready(Err(error)) => return Poll::Ready(Err(error.clone())),
            Poll::Pending => return Poll::Pending,
        };
        let place = &self.batch.verdict.place;
        Poll::Ready(Ok(place.written(
            base_offset,
            self.number,
            self.timestamp_ms,
        )))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use tokio::time::Instant;

    use super::super::budget::Budget;
    use super::super::load::LoadCell;
    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn fate() -> Fate {
        let place = Place {
            topic: "t".into(),
            partition: 3,
        };
        let load = LoadCell::new(Instant::now());
        let room = Arc::new(Room::new(Budget::new(1000).share(), load));
        Fate::new(place, room, Arc::default(), Instant::now())
    }

    fn poll(ticket: &mut Ticket, count: &Arc<Count>) -> Poll<Result<RecordMetadata>> {
        let waker = Waker::from(Arc::clone(count));
        Pin::new(ticket).poll(&mut Context::from_waker(&waker))
    }

    #[test]
    fn tickets_of_a_batch_are_each_woken_once_and_get_their_offsets() {
        let mut fate = fate();
        let mut tickets: Vec<_> = (0..3).map(|number| fate.add(0, number)).collect();
        let counts: Vec<Arc<Count>> = (0..3).map(|_| Arc::default()).collect();
        for (ticket, count) in tickets.iter_mut().zip(&counts) {
            assert!(poll(ticket, count).is_pending());
            assert!(poll(ticket, count).is_pending());
        }
        drop(tickets.remove(1));
        fate.written(10);
        let woken: Vec<_> = counts.iter().map(|c| c.0.load(Ordering::Acquire)).collect();
        assert_eq!(woken, [1, 0, 1]);
        let Poll::Ready(Ok(written)) = poll(&mut tickets[1], &counts[2]) else {
            panic!("resolved");
        };
        assert_eq!((written.offset, written.partition), (12, 3));
    }

    #[test]
    fn futures_that_come_and_go_leave_nothing_in_the_batch() {
        let fate = fate();
        let count = Arc::new(Count::default());
        let waker = Waker::from(count);
        for _ in 0..100 {
            let mut future = fate.future();
            assert!(
                future
                    .poll_ref(&mut Context::from_waker(&waker))
                    .is_pending()
            );
        }
        assert_eq!(fate.verdict.wakers.lock().slots.len(), 1);
    }

    #[test]
    fn fate_dropped_resolves_by_what_was_sent() {
        for (sent, outcome) in [(false, Outcome::NotWritten), (true, Outcome::Unknown)] {
            let mut fate = fate();
            if sent {
                fate.sent(100);
            }
            let future = fate.future();
            drop(fate);
            let error = future.peek().unwrap().as_ref().unwrap_err();
            assert_eq!(error.outcome(), Some(outcome));
        }
    }
}
