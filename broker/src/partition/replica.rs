//! One open replica: writes through the door, reads up to the high watermark.
//!
//! Owns the group's handle, the door and the view of the applied state. Runs no task of its own
//! (the door does). Reads of what is not in memory go to the blocking pool.
//!
//! Consumers see committed records only: the high watermark is the end of the applied log. Reads
//! from a replica that does not lead: [`super::follower`]. S18: only a leader that has applied the
//! first entry of its own term serves, and only one that has confirmed itself by ReadIndex speaks
//! about the end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use qute_proto::ids::{Offset, PartitionId, ReplicaId};
use tokio_util::sync::CancellationToken;

use super::door::{Door, Pending};
use super::error::Error;
use super::intake;
use super::machine::{Command, RecordsState};
use super::registry::ReplicaSettings;
use super::rounds::Rounds;
use crate::env::Clock;
use crate::raft::{
    CommandError, ConfirmError, GroupHandle, Leadership, ProposalError, ProposeError,
};
use crate::storage;

/// How long a reader waits on a leader that shows no sign of life.
const QUIET: Duration = Duration::from_secs(5);
const CONFIRM_WITHIN: Duration = Duration::from_secs(2);
/// How long a command of this layer may take to be applied.
const COMMAND_WITHIN: Duration = Duration::from_secs(5);

/// What may be read: `log_start..high_watermark`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// First readable offset (S17).
    pub log_start: Offset,
    /// One past the last committed record.
    pub high_watermark: Offset,
}

impl Bounds {
    /// The range `log_start..high_watermark`.
    #[must_use]
    pub fn new(log_start: Offset, high_watermark: Offset) -> Self {
        Self {
            log_start,
            high_watermark,
        }
    }
}

/// A committed batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Offset of its first record.
    pub base_offset: Offset,
    /// When the leader stamped it, Unix milliseconds.
    pub broker_time_ms: u64,
    /// As the producer encoded it.
    pub bytes: Bytes,
}

/// Committed batches in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// The first may begin below the offset asked for.
    pub batches: Vec<Batch>,
    /// Where to read on.
    pub next_offset: Offset,
    /// Bounds at the time of the read.
    pub bounds: Bounds,
}

/// A leader that has confirmed itself (S18).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConfirmedBounds {
    /// Its term.
    pub leader_epoch: u64,
    /// Everything committed before the call is within.
    pub bounds: Bounds,
}

/// What to look an offset up by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListPosition {
    /// The log start.
    Start,
    /// The high watermark.
    End,
    /// The first batch of at least this broker time, Unix milliseconds.
    Time(u64),
}

/// An offset that was looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listed {
    /// The answer.
    pub offset: Offset,
    /// Term of the leader that gives it.
    pub leader_epoch: u64,
    /// Bounds at the time of the answer.
    pub bounds: Bounds,
}

/// See the module.
pub struct Replica {
    partition: PartitionId,
    group: GroupHandle,
    log: Arc<storage::Log>,
    state: RecordsState,
    door: Door,
    clock: Arc<dyn Clock>,
    record_bytes_max: AtomicU64,
    /// What idle readers ask for.
    rounds: Rounds,
    closed: CancellationToken,
}

impl Replica {
    pub(super) fn new(
        group: GroupHandle,
        state: RecordsState,
        clock: Arc<dyn Clock>,
        record_bytes_max: u64,
    ) -> Self {
        Self {
            partition: group.id().partition,
            log: Arc::clone(group.log()),
            door: Door::new(group.clone(), state.clone(), Arc::clone(&clock)),
            group,
            state,
            clock,
            record_bytes_max: AtomicU64::new(record_bytes_max),
            rounds: Rounds::default(),
            closed: CancellationToken::new(),
        }
    }

    /// Of which partition.
    #[must_use]
    pub fn partition(&self) -> PartitionId {
        self.partition
    }

    /// Which replica of it (S9).
    #[must_use]
    pub fn id(&self) -> ReplicaId {
        self.group.replica()
    }

    /// The Raft group, for leadership watches and membership changes.
    #[must_use]
    pub fn group(&self) -> &GroupHandle {
        &self.group
    }

    /// Who leads, as this replica knows it.
    #[must_use]
    pub fn leadership(&self) -> Leadership {
        self.group.leadership()
    }

    /// Gives it its topic's settings, which count from the next record and the next segment on.
    pub fn adjust(&self, settings: ReplicaSettings) {
        self.record_bytes_max
            .store(settings.record_bytes_max, Ordering::Relaxed);
        self.log.set_segment_bytes(settings.segment_bytes);
    }

    /// The leader epoch in which this replica serves: it leads, and has applied the first entry
    /// of its own term.
    #[must_use]
    pub fn serving(&self) -> Option<u64> {
        self.group.serving()
    }

    /// Waits until an elected leader serves; an other replica is refused at once.
    ///
    /// # Errors
    /// [`Error::NotLeader`]; [`Error::NotReady`] after `patience`; [`Error::NotHere`].
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn wait_serving(&self, patience: Duration) -> Result<u64, Error> {
        let mut leadership = self.group.watch_leadership();
        let mut applied = self.group.watch_applied();
        let serving = async {
            loop {
                let now = leadership.current();
                if !now.is_local {
                    return Err(Error::NotLeader);
                }
                if applied.borrow_and_update().term == now.term {
                    return Ok(now.term);
                }
                self.either_changed(&mut leadership, &mut applied).await?;
            }
        };
        tokio::time::timeout(patience, serving)
            .await
            .unwrap_or(Err(Error::NotReady))
    }

    pub(super) async fn either_changed(
        &self,
        leadership: &mut crate::raft::LeadershipWatch,
        applied: &mut tokio::sync::watch::Receiver<crate::raft::AppliedMark>,
    ) -> Result<(), Error> {
        let gone = || Error::NotHere(self.partition);
        tokio::select! {
            () = self.closed.cancelled() => Err(gone()),
            change = leadership.changed() => change.map(|_| ()).ok_or_else(gone),
            moved = applied.changed() => moved.map_err(|_| gone()),
        }
    }

    /// What may be read here now.
    #[must_use]
    pub fn bounds(&self) -> Bounds {
        let log_start = self.state.log_start();
        // The state moves before the watch, and the log start may be all that has.
        Bounds::new(log_start, self.group.applied().next_offset.max(log_start))
    }

    /// One past the last record in the log, committed or not.
    #[must_use]
    pub fn log_end(&self) -> Offset {
        Offset(self.log.next_offset())
    }

    /// Verifies a batch and puts it in front of the door. The order of calls is the order of
    /// appends. CPU: one checksum of the batch.
    ///
    /// # Errors
    /// Nothing was submitted. See [`intake::verify`] and [`Door::submit`].
    pub fn append(&self, batch: Bytes) -> Result<Pending, Error> {
        let intake = intake::verify(batch, self.record_bytes_max.load(Ordering::Relaxed))?;
        self.door.submit(intake)
    }

    /// Committed batches from `from` on: at least one if there is any, then as many as fit
    /// `bytes_max`. Empty at the high watermark and ahead of it.
    ///
    /// # Errors
    /// [`Error::NotLeader`] unless this replica serves in `leader_epoch`; [`Error::OutOfRange`]
    /// below the log start; [`Error::Quarantined`], [`Error::Failed`].
    pub async fn read(
        &self,
        from: Offset,
        bytes_max: usize,
        leader_epoch: u64,
    ) -> Result<Chunk, Error> {
        if self.serving() != Some(leader_epoch) {
            return Err(Error::NotLeader);
        }
        let chunk = self.read_committed(from, bytes_max).await?;
        chunk.ok_or_else(|| {
            let missing = format!("offset {from} is below the high watermark and can't be read");
            Error::Failed(missing)
        })
    }

    /// What is in the log here from `from` on, up to this replica's high watermark; `None` if a
    /// committed record ought to be there and is not.
    ///
    /// # Errors
    /// As [`Replica::read`], whoever leads.
    pub(super) async fn read_committed(
        &self,
        from: Offset,
        bytes_max: usize,
    ) -> Result<Option<Chunk>, Error> {
        let bounds = self.bounds();
        if from < bounds.log_start {
            return Err(self.out_of_range(from));
        }
        if from >= bounds.high_watermark {
            return Ok(Some(Chunk {
                batches: Vec::new(),
                next_offset: from,
                bounds,
            }));
        }
        let end = bounds.high_watermark.0;
        // Hot reads come from memory; others must not block the runtime.
        let frames = if self.log.is_cached(from.0) {
            self.log
                .read_offsets(from.0, end, bytes_max)
                .map_err(|error| read_failed(&error))?
        } else {
            self.blocking(move |log| log.read_offsets(from.0, end, bytes_max))
                .await?
        };
        let Some(last) = frames.last() else {
            return Ok(None);
        };
        Ok(Some(Chunk {
            next_offset: Offset(last.end_offset()),
            batches: frames
                .into_iter()
                .map(|frame| Batch {
                    base_offset: Offset(frame.base_offset),
                    broker_time_ms: frame.broker_time_ms,
                    bytes: frame.payload,
                })
                .collect(),
            bounds,
        }))
    }

    /// An offset that can't be read here, with what can.
    pub(super) fn out_of_range(&self, offset: Offset) -> Error {
        let bounds = self.bounds();
        Error::OutOfRange {
            offset,
            log_start: bounds.log_start,
            high_watermark: bounds.high_watermark,
        }
    }

    /// Waits until a record at `offset` is committed (the high watermark lies above it).
    ///
    /// A leader that is cut off from its peers does not know that it was deposed: in the quiet it
    /// is asked to confirm itself now and then, once for all of its readers, so that none waits on
    /// it for ever.
    ///
    /// # Errors
    /// [`Error::NotLeader`] once this replica does not lead in `leader_epoch`;
    /// [`Error::NotReady`] once it finds no quorum; [`Error::NotHere`] once it is closed.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn wait_beyond(&self, offset: Offset, leader_epoch: u64) -> Result<(), Error> {
        let mut leadership = self.group.watch_leadership();
        let mut applied = self.group.watch_applied();
        loop {
            let now = leadership.current();
            if !now.is_local || now.term != leader_epoch {
                return Err(Error::NotLeader);
            }
            if applied.borrow_and_update().next_offset > offset {
                return Ok(());
            }
            tokio::select! {
                changed = self.either_changed(&mut leadership, &mut applied) => changed?,
                () = tokio::time::sleep(QUIET) => {
                    let round = async {
                        let confirmed = self.confirm(CONFIRM_WITHIN).await?;
                        Ok(confirmed.leader_epoch)
                    };
                    self.rounds.share(leader_epoch, QUIET, round).await?;
                }
            }
        }
    }

    /// S18: a ReadIndex round, and the bounds after it.
    ///
    /// # Errors
    /// [`Error::NotLeader`], [`Error::NotReady`] without a quorum in time, [`Error::Failed`].
    pub async fn confirm(&self, patience: Duration) -> Result<ConfirmedBounds, Error> {
        let serving = self.wait_serving(patience).await?;
        let confirmed = self
            .group
            .confirm(patience)
            .await
            .map_err(|error| match error {
                ConfirmError::NotLeader { .. } => Error::NotLeader,
                ConfirmError::NoQuorum => Error::NotReady,
                ConfirmError::Stopped => Error::NotHere(self.partition),
            })?;
        if confirmed.term != serving {
            return Err(Error::NotLeader);
        }
        Ok(ConfirmedBounds {
            leader_epoch: confirmed.term,
            bounds: self.bounds(),
        })
    }

    /// Looks an offset up, answered only by a leader that has confirmed itself (S18).
    ///
    /// # Errors
    /// As [`Replica::confirm`] and [`Replica::read`].
    pub async fn list_offset(
        &self,
        position: ListPosition,
        patience: Duration,
    ) -> Result<Listed, Error> {
        let confirmed = self.confirm(patience).await?;
        let bounds = confirmed.bounds;
        let end = bounds.high_watermark;
        let offset = match position {
            ListPosition::Start => bounds.log_start,
            ListPosition::End => end,
            ListPosition::Time(time_ms) => self
                .blocking(move |log| log.offset_at_time(time_ms, end.0))
                .await?
                .map_or(end, |found| Offset(found).max(bounds.log_start)),
        };
        Ok(Listed {
            offset,
            leader_epoch: confirmed.leader_epoch,
            bounds,
        })
    }

    /// Moves the log start, replicated (S17). Returns the log start in force, which never goes
    /// back and never passes the end.
    ///
    /// # Errors
    /// [`Error::NotLeader`], [`Error::StorageFull`], [`Error::Overloaded`]; [`Error::NotReady`]
    /// without a quorum; [`Error::OutcomeUnknown`] once submitted.
    pub async fn set_log_start(&self, offset: Offset) -> Result<Offset, Error> {
        let term = self.serving().ok_or(Error::NotLeader)?;
        let now_ms = self.clock.wall_ms().max(self.state.last_time_ms());
        let command = Command::LogStart(offset).encode();
        let applied = self
            .group
            .command(command, now_ms, Some(term), COMMAND_WITHIN)
            .await;
        match applied {
            Ok(_applied) => Ok(self.state.log_start()),
            Err(CommandError::NotSubmitted(error)) => Err(match error {
                ProposeError::StorageFull => Error::StorageFull,
                ProposeError::Stopped => Error::NotHere(self.partition),
                ProposeError::Busy | ProposeError::TooLarge { .. } => Error::Overloaded,
            }),
            Err(CommandError::Failed(error)) => Err(match error {
                ProposalError::NotLeader { .. } => Error::NotLeader,
                ProposalError::LeaseExpired => Error::NotReady,
                ProposalError::Discarded | ProposalError::Stopped => Error::OutcomeUnknown,
            }),
            Err(CommandError::Timeout) => Err(Error::OutcomeUnknown),
        }
    }

    async fn blocking<T: Send + 'static>(
        &self,
        read: impl FnOnce(&storage::Log) -> Result<T, storage::Error> + Send + 'static,
    ) -> Result<T, Error> {
        let log = Arc::clone(&self.log);
        match tokio::task::spawn_blocking(move || read(&log)).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(read_failed(&error)),
            Err(join) => Err(Error::Failed(join.to_string())),
        }
    }

    /// Refuses what waits, ends subscriptions and stops the door. The group itself is closed by
    /// the registry.
    pub(super) async fn shutdown(&self) {
        self.closed.cancel();
        self.door.shutdown().await;
    }
}

fn read_failed(error: &storage::Error) -> Error {
    match error {
        storage::Error::Quarantined { reason, .. } | storage::Error::Damaged { reason, .. } => {
            Error::Quarantined(reason.clone())
        }
        other => Error::Failed(other.to_string()),
    }
}
