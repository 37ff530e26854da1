//! The one door for writes to a partition (S11).
//!
//! ```text
//!  submit ---> queue ---> Keeper: check against applied table + ledger ---> Raft ---> applied
//!  (any task)  (bytes     (one task; the only one that proposes batches)              |
//!               bounded)        ^                                                     v
//!                               '------------------ fate ------------------ answer, in order
//! ```
//!
//! Owns the order of a partition's batches: the order of [`Door::submit`] calls is the order of
//! appends. One task per open replica runs the [`Keeper`]; it sleeps on watches and channels.
//! The decisions themselves are pure and live in [`super::ledger`].
//!
//! Invariants (S11):
//! - Every proposal carries the term it was checked in; Raft refuses it in any other.
//! - A producer's next batch is proposed only once the one before it is known to be in the
//!   leader's log, because Raft may refuse one proposal (lease) and take the next.
//! - A refusal that left nothing in the log closes the door until nothing is in flight; the
//!   refused batches then knock again, in their order, after a ReadIndex round (S15).
//! - Whatever was submitted and may be in some log ends as [`Error::OutcomeUnknown`].
//! - A leader that finds no quorum for long refuses what waits and tells what is in flight that
//!   its outcome is unknown; the retry of a batch in flight waits for its fate like any duplicate.
//! - The door opens once the first entry of the own term is applied: by then the fate of
//!   everything proposed in earlier terms shows in the applied table.

mod keeper;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use qute_proto::ids::Offset;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::error::Error;
use super::intake::Intake;
use super::machine::RecordsState;
use crate::env::Clock;
use crate::raft::{GroupHandle, ProposeError};
use keeper::{Item, Keeper};

/// Batches waiting in front of the door; their bytes are bounded by the group's admission.
const QUEUE_BATCHES_MAX: usize = 8192;

/// A batch is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack {
    /// Offset of its first record.
    pub base_offset: Offset,
    /// Term of the leader that answers.
    pub leader_epoch: u64,
    /// It had been written before: `base_offset` is its original offset.
    pub duplicate: bool,
}

/// The fate of a submitted batch.
///
/// # Cancel safety
/// Dropping it changes nothing: the batch takes its course.
#[derive(Debug)]
#[must_use = "the batch may be refused"]
pub struct Pending(oneshot::Receiver<Result<Ack, Error>>);

impl Future for Pending {
    type Output = Result<Ack, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // A keeper that is gone may have proposed it.
        Pin::new(&mut self.0)
            .poll(context)
            .map(|answer| answer.unwrap_or(Err(Error::OutcomeUnknown)))
    }
}

/// See the module.
pub struct Door {
    group: GroupHandle,
    queue: mpsc::Sender<Item>,
    stop: CancellationToken,
    keeper: parking_lot::Mutex<Option<JoinHandle<()>>>,
}

impl Door {
    /// Puts a door in front of `group`, whose state machine shows `state`.
    pub fn new(group: GroupHandle, state: RecordsState, clock: Arc<dyn Clock>) -> Self {
        let (queue, items) = mpsc::channel(QUEUE_BATCHES_MAX);
        let stop = CancellationToken::new();
        let keeper = Keeper::new(group.clone(), state, clock, items);
        let keeper = tokio::spawn(keeper.run(stop.clone()));
        Self {
            group,
            queue,
            stop,
            keeper: parking_lot::Mutex::new(Some(keeper)),
        }
    }

    /// Puts a verified batch into the queue. The order of calls is the order of appends.
    ///
    /// # Errors
    /// Nothing was submitted: [`Error::NotLeader`], [`Error::Overloaded`], [`Error::StorageFull`],
    /// [`Error::BatchTooLarge`], [`Error::Failed`].
    pub fn submit(&self, intake: Intake) -> Result<Pending, Error> {
        if !self.group.leadership().is_local {
            return Err(Error::NotLeader);
        }
        let admission = self
            .group
            .try_admit(intake.batch.len())
            .map_err(|error| not_proposed(&error))?;
        let (answer, pending) = oneshot::channel();
        let item = Item::new(intake, admission, answer);
        self.queue.try_send(item).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Error::Overloaded,
            mpsc::error::TrySendError::Closed(_) => Error::NotReady,
        })?;
        Ok(Pending(pending))
    }

    /// Stops the keeper: what waits is refused, what is in flight ends as unknown.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        let keeper = self.keeper.lock().take();
        if let Some(keeper) = keeper
            && let Err(error) = keeper.await
        {
            tracing::error!(partition = %self.group.id(), %error, "the door's task failed");
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn not_proposed(error: &ProposeError) -> Error {
    match error {
        ProposeError::Busy => Error::Overloaded,
        ProposeError::StorageFull => Error::StorageFull,
        ProposeError::TooLarge { size, size_max } => Error::BatchTooLarge {
            size_bytes: u64::try_from(*size).unwrap_or(u64::MAX),
            max_bytes: u64::try_from(*size_max).unwrap_or(u64::MAX),
        },
        ProposeError::Stopped => Error::Failed("its log does not take writes any more".into()),
    }
}
