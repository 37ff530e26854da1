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
    /// `batch_bytes_max`: of what brokers take.
    pub(super) fn new(
        place: Place,
        config: &ProducerConfig,
        batch_bytes_max: usize,
        room: Arc<Room>,
        tally: Arc<Tally>,
    ) -> Self {
        Self {
            place,
            room,
            wake: Notify::new(),
            linger: config.linger,
            delivery_timeout: config.delivery_timeout,
            codec: config.compression,
            tally,
            retired: AtomicBool::new(false),
            state: Mutex::new(State {
                builder: BatchBuilder::new(config.batch_bytes.min(batch_bytes_max)),
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
        match taken_in {
            Ok((ticket, wake)) => {
                if wake {
                    self.wake.notify_one();
                }
                Ok(ticket)
            }
            Err(error) => {
                self.room.give_back(bytes);
                Err(error
                    .at(&self.place.topic, self.place.partition)
                    .with_outcome(Outcome::NotWritten))
            }
        }
    }

    fn try_push(
        &self,
        record: &RecordRef<'_>,
        bytes: usize,
        deadline: Option<Instant>,
    ) -> Result<(Ticket, bool)> {
        let mut state = self.state.lock();
        if let Some(error) = &state.closed {
            return Err(error.clone());
        }
        let mut wake = false;
        let push = |state: &mut State| {
            let pushed = state.builder.push(record);
            pushed.map_err(|error| Error::batch(&error))
        };
        let mut pushed = push(&mut state)?;
        if pushed == Push::Full {
            self.close_open(&mut state);
            wake = true;
            pushed = push(&mut state)?;
        }
        debug_assert!(
            matches!(pushed, Push::Added(_)),
            "an empty batch takes any record"
        );
        wake |= state.open.is_none();
        if state.open.is_none() {
            self.open(&mut state);
        }
        let Some(open) = state.open.as_mut() else {
            return Err(Error::closed("batch"));
        };
        if let Some(deadline) = deadline {
            open.expires_at = open.expires_at.min(deadline);
        }
        Ok((open.fate.add(bytes, record.timestamp_ms), wake))
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
        let mut state = self.state.lock();
        if state.ready.is_empty() {
            let lingered = |open: &Open| self.linger.is_zero() || open.due_at <= Instant::now();
            if state.hurry || state.open.as_ref().is_some_and(lingered) {
                self.close_open(&mut state);
                state.hurry = false;
            }
        }
        state.ready.pop_front()
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

    fn close_open(&self, state: &mut State) {
        let Some(open) = state.open.take() else {
            return;
        };
        let finished = match state.builder.finish(self.codec) {
            // A codec that fails costs compression, not the records.
            Err(_) => state.builder.finish(Codec::None),
            finished => finished,
        };
        let batch = match finished {
            Ok(batch) => batch,
            Err(error) => return open.fate.failed(Error::batch(&error), Outcome::NotWritten),
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
    }
}

impl std::fmt::Debug for PartitionQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PartitionQueue")
            .field("place", &self.place)
            .finish_non_exhaustive()
    }
}
