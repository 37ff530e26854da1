//! A producer as a [`futures::Sink`].

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::Sink;
use parking_lot::Mutex;
use tokio::task::coop;

use super::fate::{BatchFuture, Ticket};
use super::intake::{Attempt, Inner};
use crate::error::{Error, ErrorKind, Result};
use crate::record::Record;

/// How many batches it remembers before it first looks which have their fate.
const BATCHES_MIN: usize = 64;

type Enqueueing = Pin<Box<dyn Future<Output = Result<Ticket>> + Send>>;

/// A producer as a [`Sink`] of records, made by [`crate::Producer::sink`].
///
/// - Ready means that the record before has been taken in: while the buffer is full, the sink is not
///   ready.
/// - Flushing ends lingering and waits until every record of this sink has its fate.
/// - Closing flushes and takes nothing more; the producer stays open.
///
/// An error says which record it is about, and concerns that one alone: the sink goes on. The first
/// failure since the last one that was told comes out of whichever method is called next.
///
/// # Cancel safety
/// Dropping the sink, a record that it has not taken in yet (there is at most one, while it is not
/// ready) is dropped with it; all others are delivered. Dropping the future of
/// `SinkExt::send`, `flush` or `close` loses nothing that the sink has been given.
pub struct ProducerSink {
    inner: Arc<Inner>,
    /// The last record, if there was no room for it at once.
    ///
    /// Never locked: it makes the sink `Sync`, which the future is not.
    enqueueing: Mutex<Option<Enqueueing>>,
    /// Of the records since the last flush, the batches that may not have their fate yet.
    batches: VecDeque<BatchFuture>,
    prune_at: usize,
    /// Lingering has been ended for what is in.
    hurried: bool,
    failure: Option<Error>,
    closed: bool,
}

impl ProducerSink {
    pub(super) fn new(inner: Arc<Inner>) -> Self {
        Self {
            inner,
            enqueueing: Mutex::new(None),
            batches: VecDeque::new(),
            prune_at: BATCHES_MIN,
            hurried: true,
            failure: None,
            closed: false,
        }
    }

    fn remember(&mut self, ticket: Ticket) {
        self.hurried = false;
        let batch = ticket.into_batch();
        if self.batches.back().is_some_and(|last| last.is_same(&batch)) {
            return;
        }
        if self.batches.len() >= self.prune_at {
            let failure = &mut self.failure;
            self.batches.retain(|batch| match batch.peek() {
                None => true,
                Some(result) => {
                    note(failure, result);
                    false
                }
            });
            self.prune_at = (2 * self.batches.len()).max(BATCHES_MIN);
        }
        self.batches.push_back(batch);
    }

    /// Waits until the last record has been taken in.
    fn poll_enqueueing(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let waiting = self.enqueueing.get_mut();
        if let Some(enqueueing) = waiting {
            let taken_in = ready!(enqueueing.as_mut().poll(cx));
            *waiting = None;
            match taken_in {
                Ok(ticket) => self.remember(ticket),
                Err(error) => {
                    self.failure.get_or_insert(error);
                }
            }
        }
        Poll::Ready(())
    }

    fn told(&mut self) -> Result<()> {
        self.failure.take().map_or(Ok(()), Err)
    }
}

fn note(failure: &mut Option<Error>, result: &Result<u64>) {
    if let Err(error) = result
        && failure.is_none()
    {
        *failure = Some(error.clone());
    }
}

impl Sink<Record> for ProducerSink {
    type Error = Error;

    fn poll_ready(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        // As in `Producer::enqueue`: the runtime's other tasks get their turn.
        let turn = ready!(coop::poll_proceed(cx));
        ready!(self.poll_enqueueing(cx));
        turn.made_progress();
        Poll::Ready(self.told())
    }

    fn start_send(mut self: Pin<&mut Self>, record: Record) -> Result<()> {
        if self.closed {
            return Err(Error::closed("sink").with_topic(&record.topic));
        }
        if self.enqueueing.get_mut().is_some() {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "the sink was given a record before it was ready",
            )
            .with_topic(&record.topic));
        }
        match self.inner.try_enqueue(record) {
            Attempt::Done(Ok(ticket)) => {
                self.remember(ticket);
                Ok(())
            }
            Attempt::Done(Err(error)) => Err(error),
            Attempt::Wait(record) => {
                let inner = Arc::clone(&self.inner);
                *self.enqueueing.get_mut() =
                    Some(Box::pin(async move { inner.enqueue_hooked(*record).await }));
                Ok(())
            }
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        ready!(self.poll_enqueueing(cx));
        if !self.hurried {
            self.inner.hurry_all();
            self.hurried = true;
        }
        let this = &mut *self;
        // The oldest first: of several failures, the first one is told.
        while let Some(batch) = this.batches.front_mut() {
            note(&mut this.failure, ready!(batch.poll_ref(cx)));
            this.batches.pop_front();
        }
        Poll::Ready(self.told())
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        self.closed = true;
        self.poll_flush(cx)
    }
}

impl fmt::Debug for ProducerSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProducerSink")
            .field("batches", &self.batches.len())
            .finish_non_exhaustive()
    }
}
