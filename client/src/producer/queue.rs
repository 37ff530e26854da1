//! What waits to be sent to one partition: the open batch that records go into, and full ones.
//!
//! Shared by the enqueueing tasks and the partition's driver. The lock is held for one record's
//! encoding (and one batch's compression when it fills), never across an await.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use qute_proto::batch::{BatchBuilder, Codec, Push, UnsealedBatch};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::config::ProducerConfig;
use super::fate::{BatchFuture, Fate, Place, Tally, Ticket};
use crate::error::{Error, Outcome, Result};
use crate::record::{Record, now_ms};

/// A batch that may be sent.
#[derive(Debug)]
pub(super) struct ReadyBatch {
    pub(super) batch: UnsealedBatch,
    pub(super) fate: Fate,
    pub(super) opened_at: Instant,
}

/// The queue of one partition.
pub(super) struct PartitionQueue {
    pub(super) place: Place,
    /// Of the producer's buffer, what this partition may hold: a stuck one leaves the others room.
    pub(super) room: Arc<Semaphore>,
    /// Told when there may be something to take.
    pub(super) wake: Notify,
    linger: Duration,
    codec: Codec,
    tally: Arc<Tally>,
    state: Mutex<State>,
}

struct State {
    builder: BatchBuilder,
    open: Option<Open>,
    ready: VecDeque<ReadyBatch>,
    /// Send the open batch without lingering.
    hurry: bool,
    /// Batches without a fate yet, oldest first (pruned now and then).
    unresolved: VecDeque<BatchFuture>,
    /// Nothing is taken in any more, and why.
    closed: Option<Error>,
}

struct Open {
    fate: Fate,
    opened_at: Instant,
}

impl PartitionQueue {
    pub(super) fn new(place: Place, config: &ProducerConfig, tally: Arc<Tally>) -> Self {
        Self {
            place,
            room: Arc::new(Semaphore::new(config.buffer_bytes / 4)),
            wake: Notify::new(),
            linger: config.linger,
            codec: config.compression,
            tally,
            state: Mutex::new(State {
                builder: BatchBuilder::new(config.batch_bytes),
                open: None,
                ready: VecDeque::new(),
                hurry: false,
                unresolved: VecDeque::new(),
                closed: None,
            }),
        }
    }

    /// Takes a record in.
    pub(super) fn push(
        &self,
        record: &Record,
        permits: [OwnedSemaphorePermit; 2],
    ) -> Result<Ticket> {
        let not_written = |error: Error| {
            error
                .at(&self.place.topic, self.place.partition)
                .with_outcome(Outcome::NotWritten)
        };
        let now_ms = now_ms();
        let record = record.as_batch_record(now_ms);
        let mut state = self.state.lock();
        if let Some(error) = &state.closed {
            return Err(not_written(error.clone()));
        }
        let mut pushed = state
            .builder
            .push(&record)
            .map_err(|e| not_written(Error::batch(&e)))?;
        let mut wake = false;
        if pushed == Push::Full {
            self.close_open(&mut state);
            wake = true;
            pushed = state
                .builder
                .push(&record)
                .map_err(|e| not_written(Error::batch(&e)))?;
        }
        debug_assert!(
            matches!(pushed, Push::Added(_)),
            "an empty batch takes any record"
        );
        if state.open.is_none() {
            let fate = Fate::new(self.place.clone(), Arc::clone(&self.tally));
            while state.unresolved.front().is_some_and(|f| f.peek().is_some()) {
                state.unresolved.pop_front();
            }
            state.unresolved.push_back(fate.future());
            state.open = Some(Open {
                fate,
                opened_at: Instant::now(),
            });
            wake = true;
        }
        let Some(open) = state.open.as_mut() else {
            return Err(not_written(Error::closed("batch")));
        };
        let ticket = open.fate.add(permits, record.timestamp_ms);
        drop(state);
        if wake {
            self.wake.notify_one();
        }
        Ok(ticket)
    }

    /// The next batch that may be sent: a full one, or the open one if it has lingered enough.
    pub(super) fn take(&self) -> Option<ReadyBatch> {
        let mut state = self.state.lock();
        if state.ready.is_empty() {
            let due = state.hurry
                || state
                    .open
                    .as_ref()
                    .is_some_and(|open| open.opened_at.elapsed() >= self.linger);
            if due {
                self.close_open(&mut state);
                state.hurry = false;
            }
        }
        state.ready.pop_front()
    }

    /// When the open batch will have lingered enough; `None` if there is none.
    pub(super) fn due_at(&self) -> Option<Instant> {
        let state = self.state.lock();
        state.open.as_ref().map(|open| open.opened_at + self.linger)
    }

    /// Ends lingering; gives the fates of everything that is in.
    pub(super) fn flush(&self) -> Vec<BatchFuture> {
        let mut state = self.state.lock();
        state.hurry = state.open.is_some();
        let unresolved = state.unresolved.iter().cloned().collect();
        drop(state);
        self.wake.notify_one();
        unresolved
    }

    pub(super) fn is_closed(&self) -> bool {
        self.state.lock().closed.is_some()
    }

    /// Takes nothing in any more; gives up what waits.
    pub(super) fn close(&self, error: Error) {
        let (open, ready) = {
            let mut state = self.state.lock();
            state.closed.get_or_insert_with(|| error.clone());
            // The records in the builder go with their fate.
            let _ = state.builder.finish(Codec::None);
            (state.open.take(), std::mem::take(&mut state.ready))
        };
        self.room.close();
        let fates = ready.into_iter().map(|batch| batch.fate);
        for fate in fates.chain(open.map(|open| open.fate)) {
            fate.failed(error.clone(), Outcome::NotWritten);
        }
    }

    fn close_open(&self, state: &mut State) {
        let Some(open) = state.open.take() else {
            return;
        };
        let finished = match state.builder.finish(self.codec) {
            // A codec that fails costs compression, not the records.
            Err(_) => state.builder.finish(Codec::None),
            finished => finished,
        };
        match finished {
            Ok(batch) => state.ready.push_back(ReadyBatch {
                batch,
                fate: open.fate,
                opened_at: open.opened_at,
            }),
            Err(error) => open.fate.failed(Error::batch(&error), Outcome::NotWritten),
        }
    }
}

impl std::fmt::Debug for PartitionQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PartitionQueue")
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}
