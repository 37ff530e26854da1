//! What waits in one partition: the open batch, which records are encoded into as they come, and
//! full ones that the driver has not taken yet.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use qute_proto::batch::{BatchBuilder, Codec, Push, RecordRef, UnsealedBatch};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::config::ProducerConfig;
use super::fate::{BatchFuture, Fate, Ticket};
use super::report::{Place, Tally};
use super::room::Room;
use crate::error::{Error, Outcome, Result};
use crate::net::Connections;

/// A batch that may be sent.
#[derive(Debug)]
pub(super) struct ReadyBatch {
    pub(super) batch: UnsealedBatch,
    pub(super) fate: Fate,
    pub(super) expires_at: Instant,
}

/// The queue of one partition.
pub(super) struct PartitionQueue {
    pub(super) place: Place,
    pub(super) room: Arc<Room>,
    /// Told when there may be something to take.
    pub(super) wake: Notify,
    /// What brokers take, as far as they have told.
    connections: Arc<Connections>,
    batch_bytes: usize,
    linger: Duration,
    delivery_timeout: Duration,
    codec: Codec,
    tally: Arc<Tally>,
    /// A newer incarnation of the topic has been seen.
    retired: AtomicBool,
    state: Mutex<State>,
}

struct State {
    builder: BatchBuilder,
    /// Of the builder.
    batch_bytes_max: usize,
    open: Option<Open>,
    /// Oldest first; none expires after one behind it.
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
    due_at: Instant,
    /// The earliest deadline of its records.
    expires_at: Instant,
}

impl PartitionQueue {
    pub(super) fn new(
        place: Place,
        config: &ProducerConfig,
        connections: Arc<Connections>,
        room: Arc<Room>,
        tally: Arc<Tally>,
    ) -> Self {
        Self {
            place,
            room,
            wake: Notify::new(),
            connections,
            batch_bytes: config.batch_bytes,
            linger: config.linger,
            delivery_timeout: config.delivery_timeout,
            codec: config.compression,
            tally,
            retired: AtomicBool::new(false),
            state: Mutex::new(State {
                builder: BatchBuilder::new(config.batch_bytes),
                batch_bytes_max: config.batch_bytes,
                open: None,
                ready: VecDeque::new(),
                hurry: false,
                unresolved: VecDeque::new(),
                closed: None,
            }),
        }
    }

    /// Takes in a record for which `bytes` have been taken from [`Self::room`]; they are given back
    /// with its fate, or if this fails. `deadline`: by when it must have its fate, if the call that
    /// hands it over did not begin just now.
    pub(super) fn push(
        &self,
        record: &RecordRef<'_>,
        bytes: usize,
        deadline: Option<Instant>,
    ) -> Result<Ticket> {
        let taken_in = self.try_push(record, bytes, deadline);
        taken_in.inspect_err(|_| self.room.give_back(bytes))
    }

    /// The same with bytes of a reservation: if it fails, they are left to the caller.
    pub(super) fn push_reserved(
        &self,
        record: &RecordRef<'_>,
        bytes: usize,
        deadline: Instant,
    ) -> Result<Ticket> {
        self.try_push(record, bytes, Some(deadline))
    }

    fn try_push(
        &self,
        record: &RecordRef<'_>,
        bytes: usize,
        deadline: Option<Instant>,
    ) -> Result<Ticket> {
        let (mut wake, mut spoiled) = (false, None);
        let pushed = {
            let mut state = self.state.lock();
            self.add(&mut state, record, bytes, deadline, &mut wake, &mut spoiled)
        };
        Spoiled::resolve(spoiled);
        if wake {
            self.wake.notify_one();
        }
        pushed.map_err(|error| {
            error
                .at(&self.place.topic, self.place.partition)
                .with_outcome(Outcome::NotWritten)
        })
    }

    fn add(
        &self,
        state: &mut State,
        record: &RecordRef<'_>,
        bytes: usize,
        deadline: Option<Instant>,
        wake: &mut bool,
        spoiled: &mut Option<Spoiled>,
    ) -> Result<Ticket> {
        if let Some(error) = &state.closed {
            return Err(error.clone());
        }
        if state.open.is_none() {
            self.obey_limits(state);
        }
        let push = |state: &mut State| {
            let pushed = state.builder.push(record);
            pushed.map_err(|error| Error::batch(&error))
        };
        let mut pushed = push(state)?;
        if pushed == Push::Full {
            *spoiled = self.close_open(state);
            *wake = true;
            self.obey_limits(state);
            pushed = push(state)?;
        }
        debug_assert!(
            matches!(pushed, Push::Added(_)),
            "an empty batch takes any record"
        );
        if state.open.is_none() {
            *wake = true;
            self.open(state);
        }
        let Some(open) = state.open.as_mut() else {
            return Err(Error::closed("batch"));
        };
        if let Some(deadline) = deadline {
            open.expires_at = open.expires_at.min(deadline);
        }
        Ok(open.fate.add(bytes, record.timestamp_ms))
    }

    /// The next batch is as large as the strictest broker takes that is known by now.
    fn obey_limits(&self, state: &mut State) {
        let limits = self.connections.limits();
        let batch_bytes_max = self
            .batch_bytes
            .min(limits.batch_bytes_max)
            .min(limits.uncompressed_batch_bytes_max);
        if state.batch_bytes_max != batch_bytes_max {
            state.batch_bytes_max = batch_bytes_max;
            state.builder = BatchBuilder::new(batch_bytes_max);
        }
    }

    fn open(&self, state: &mut State) {
        let now = Instant::now();
        let fate = Fate::new(
            self.place.clone(),
            Arc::clone(&self.room),
            Arc::clone(&self.tally),
            now,
        );
        while state.unresolved.front().is_some_and(|f| f.peek().is_some()) {
            state.unresolved.pop_front();
        }
        state.unresolved.push_back(fate.future());
        state.open = Some(Open {
            fate,
            due_at: now + self.linger,
            expires_at: now + self.delivery_timeout,
        });
    }

    /// The next batch that may be sent: a full one, or the open one if it has lingered enough.
    pub(super) fn take(&self) -> Option<ReadyBatch> {
        let mut spoiled = None;
        let taken = {
            let mut state = self.state.lock();
            if state.ready.is_empty() {
                let lingered = |open: &Open| self.linger.is_zero() || open.due_at <= Instant::now();
                if state.hurry || state.open.as_ref().is_some_and(lingered) {
                    spoiled = self.close_open(&mut state);
                    state.hurry = false;
                }
            }
            state.ready.pop_front()
        };
        Spoiled::resolve(spoiled);
        taken
    }

    /// When the open batch will have lingered enough; `None` if there is none.
    pub(super) fn due_at(&self) -> Option<Instant> {
        self.state.lock().open.as_ref().map(|open| open.due_at)
    }

    /// When the first batch expires that waits here.
    pub(super) fn expires_at(&self) -> Option<Instant> {
        let state = self.state.lock();
        let open = state.open.as_ref().map(|open| open.expires_at);
        let ready = state.ready.front().map(|ready| ready.expires_at);
        open.into_iter().chain(ready).min()
    }

    /// Takes out what has expired: it was never sent.
    pub(super) fn take_expired(&self, now: Instant) -> Vec<Fate> {
        let mut state = self.state.lock();
        let mut expired = Vec::new();
        while let Some(ready) = state.ready.pop_front_if(|ready| ready.expires_at <= now) {
            expired.push(ready.fate);
        }
        if let Some(open) = state.open.take_if(|open| open.expires_at <= now) {
            expired.push(open.fate);
            // The records in the builder go with their fate.
            let _ = state.builder.finish(Codec::None);
        }
        expired
    }

    /// Ends lingering.
    pub(super) fn hurry(&self) {
        let mut state = self.state.lock();
        state.hurry = state.open.is_some();
        if state.hurry {
            drop(state);
            self.wake.notify_one();
        }
    }

    /// Ends lingering; gives the fates of everything that is in.
    pub(super) fn flush(&self) -> Vec<BatchFuture> {
        self.hurry();
        let state = self.state.lock();
        let open = |fate: &&BatchFuture| fate.peek().is_none();
        state.unresolved.iter().filter(open).cloned().collect()
    }

    /// A newer incarnation of the topic has been seen: the driver shall find out whether this one is
    /// gone.
    pub(super) fn retire(&self) {
        self.retired.store(true, Ordering::Release);
        self.wake.notify_one();
    }

    /// Whether it was retired since this was asked last.
    pub(super) fn take_retired(&self) -> bool {
        self.retired.swap(false, Ordering::AcqRel)
    }

    /// Why nothing is taken in any more.
    pub(super) fn closed(&self) -> Option<Error> {
        self.state.lock().closed.clone()
    }

    /// Takes nothing in any more; gives up what waits.
    pub(super) fn close(&self, error: Error) {
        let (open, ready) = {
            let mut state = self.state.lock();
            state.closed.get_or_insert_with(|| error.clone());
            let _ = state.builder.finish(Codec::None);
            (state.open.take(), std::mem::take(&mut state.ready))
        };
        self.room.close();
        let fates = ready.into_iter().map(|batch| batch.fate);
        for fate in fates.chain(open.map(|open| open.fate)) {
            fate.failed(error.clone(), Outcome::NotWritten);
        }
    }

    #[must_use]
    fn close_open(&self, state: &mut State) -> Option<Spoiled> {
        let open = state.open.take()?;
        let finished = match state.builder.finish(self.codec) {
            // A codec that fails costs compression, not the records.
            Err(_) => state.builder.finish(Codec::None),
            finished => finished,
        };
        let batch = match finished {
            Ok(batch) => batch,
            Err(error) => {
                // What is left in the builder goes with its fate.
                state.builder = BatchBuilder::new(state.batch_bytes_max);
                return Some(Spoiled {
                    fate: open.fate,
                    error: Error::batch(&error),
                });
            }
        };
        // Deadlines may come out of order where calls have waited: those before go along.
        for earlier in state.ready.iter_mut().rev() {
            if earlier.expires_at <= open.expires_at {
                break;
            }
            earlier.expires_at = open.expires_at;
        }
        state.ready.push_back(ReadyBatch {
            batch,
            fate: open.fate,
            expires_at: open.expires_at,
        });
        None
    }
}

/// A batch that could not be finished. Its fate is told without the queue's lock: it runs wakers and
/// the program's hooks.
struct Spoiled {
    fate: Fate,
    error: Error,
}

impl Spoiled {
    fn resolve(spoiled: Option<Self>) {
        if let Some(Self { fate, error }) = spoiled {
            fate.failed(error, Outcome::NotWritten);
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
