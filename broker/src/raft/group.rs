//! One replica of one group, as the layers above see it.

use std::collections::{BTreeMap, BTreeSet};
use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt;
use openraft::Instant as _;
use openraft::ReadPolicy;
use openraft::async_runtime::WatchReceiver;
use openraft::errors::{Fatal, InitializeError, LinearizableReadError, RaftError};
use openraft::metrics::RaftServerMetrics;
use openraft::raft::{AppendEntriesRequest, AppendEntriesResponse};
use openraft_rt_tokio::TokioWatchReceiver;
use qute_proto::ids::{BrokerId, Offset, ReplicaId};
use tokio::sync::{Semaphore, watch};

use super::contact::Contact;
use super::proposal::{self, Admission, Proposal, ProposalError, ProposeError};
use super::types::{
    Applied, CommittedLeaderId, GroupId, Metrics, Payload, Raft, ReplicaNode, Responder, Space,
    TypeConfig,
};
use crate::storage::Log;

/// Bytes of proposals that one group may have in flight, from admission to apply.
pub const IN_FLIGHT_BYTES_MAX: usize = 16 << 20;

/// Bytes of one entry, at most.
pub const ENTRY_BYTES_MAX: usize = 8 << 20;

/// How far a replica has applied its log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AppliedMark {
    /// Term of the last applied entry; 0 before the first.
    pub term: u64,
    /// One past the Raft index of the last applied entry; 0 before the first.
    pub next_index: u64,
    /// One past the last applied record: the high watermark.
    pub next_offset: Offset,
}

/// A leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leader {
    /// Its replica.
    pub replica: ReplicaId,
    /// The broker that hosts it.
    pub broker: BrokerId,
}

/// Who leads a group, as this replica knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leadership {
    /// This replica's term: the leader epoch of whoever leads in it.
    pub term: u64,
    /// The leader that a quorum has granted in that term, if this replica has heard of one.
    pub leader: Option<Leader>,
    /// This replica is that leader. It may serve once it has applied an entry of `term`
    /// ([`AppliedMark::term`]).
    pub is_local: bool,
}

impl Leadership {
    /// S4: a replica that has stopped leads no more, whatever it was last heard to be.
    fn of(metrics: &RaftServerMetrics<TypeConfig>, is_stopped: bool) -> Self {
        let known = metrics.current_leader;
        let known = known.filter(|id| !is_stopped || *id != metrics.id);
        let leader = known.and_then(|id| {
            let node = metrics.membership_config.get_node(&id)?;
            Some(Leader {
                replica: ReplicaId(id),
                broker: node.broker,
            })
        });
        Self {
            term: metrics.vote.leader_id.term,
            leader,
            is_local: metrics.state.is_leader() && !is_stopped,
        }
    }
}

/// Follows who leads a group. Costs no task.
#[derive(Clone)]
pub struct LeadershipWatch {
    metrics: TokioWatchReceiver<RaftServerMetrics<TypeConfig>>,
    all: TokioWatchReceiver<Metrics>,
    failed: watch::Receiver<bool>,
    seen: Leadership,
}

impl LeadershipWatch {
    /// Who leads now.
    #[must_use]
    pub fn current(&self) -> Leadership {
        // openraft does not take the lead back from a replica that it stopped.
        let is_stopped = *self.failed.borrow() || self.all.borrow_watched().running_state.is_err();
        Leadership::of(&self.metrics.borrow_watched(), is_stopped)
    }

    /// Waits until it differs from what was last returned here (or from what it was when the watch
    /// was made); `None` once the replica has stopped.
    ///
    /// # Cancel safety
    /// Safe: nothing is lost by dropping it.
    pub async fn changed(&mut self) -> Option<Leadership> {
        loop {
            // Marked as seen before they are looked at: a change in between wakes this up again.
            drop(self.metrics.borrow_and_update());
            drop(self.failed.borrow_and_update());
            let now = self.current();
            if now != self.seen {
                self.seen = now;
                return Some(now);
            }
            tokio::select! {
                changed = self.metrics.changed() => changed.ok()?,
                failed = self.failed.changed() => failed.ok()?,
            }
        }
    }
}

/// A leader that has proven, by a round to a quorum begun after the call, that it still leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confirmed {
    /// The term it leads in.
    pub term: u64,
    /// Everything committed before the call is at or below this index, and applied here.
    pub read_index: u64,
}

/// A replica that could not prove that it leads.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfirmError {
    /// It does not lead.
    #[error("not the leader")]
    NotLeader {
        /// Who leads, if known.
        leader: Option<Leader>,
    },
    /// No quorum answered in time. Retriable.
    #[error("no quorum answered")]
    NoQuorum,
    /// The replica has stopped.
    #[error("the replica has stopped")]
    Stopped,
}

/// A change of members that was not made, or may not have been.
#[derive(Clone, Debug, thiserror::Error)]
pub enum MembersError {
    /// This replica does not lead.
    #[error("not the leader")]
    NotLeader {
        /// Who leads, if known.
        leader: Option<Leader>,
    },
    /// openraft refused it: another change is in progress, an unknown learner, no voters, ...
    #[error("membership change refused: {0}")]
    Refused(String),
    /// It was begun and did not end in time.
    #[error("membership change did not finish in time")]
    Timeout,
    /// The replica has stopped.
    #[error("the replica has stopped")]
    Stopped,
}

/// The voter that a leader hands over to: the one that has matched most, and of these the one
/// heard last.
fn heir(metrics: &Metrics) -> Option<u64> {
    let (matched, heard) = (metrics.replication.as_ref()?, metrics.heartbeat.as_ref());
    metrics
        .membership_config
        .voter_ids()
        .filter(|voter| *voter != metrics.id)
        .max_by_key(|voter| {
            let heard = heard.and_then(|heard| heard.get(voter).copied().flatten());
            (matched.get(voter).copied().flatten(), heard)
        })
}

pub(super) struct Inner {
    pub(super) id: GroupId,
    pub(super) replica: ReplicaId,
    pub(super) raft: Raft,
    pub(super) log: Arc<Log>,
    pub(super) applied: watch::Receiver<AppliedMark>,
    pub(super) contact: Arc<Contact>,
    pub(super) leader_lost_after: Duration,
    pub(super) in_flight: Arc<Semaphore>,
}

/// One replica of one group. Cheap to clone; all clones are the same replica.
#[derive(Clone)]
pub struct GroupHandle {
    pub(super) inner: Arc<Inner>,
}

impl std::fmt::Debug for GroupHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GroupHandle({} of {})", self.replica(), self.id())
    }
}

impl GroupHandle {
    /// The group.
    #[must_use]
    pub fn id(&self) -> GroupId {
        self.inner.id
    }

    /// This replica: its Raft node id.
    #[must_use]
    pub fn replica(&self) -> ReplicaId {
        self.inner.replica
    }

    /// Its log, to read from.
    #[must_use]
    pub fn log(&self) -> &Arc<Log> {
        &self.inner.log
    }

    /// openraft's handle, for what this one has no name for.
    #[must_use]
    pub fn raft(&self) -> &Raft {
        &self.inner.raft
    }

    /// Who leads now.
    #[must_use]
    pub fn leadership(&self) -> Leadership {
        let raft = &self.inner.raft;
        let is_stopped = self.inner.log.failure().is_some()
            || raft.metrics().borrow_watched().running_state.is_err();
        Leadership::of(&raft.server_metrics().borrow_watched(), is_stopped)
    }

    /// Follows who leads.
    #[must_use]
    pub fn watch_leadership(&self) -> LeadershipWatch {
        let mut watch = LeadershipWatch {
            metrics: self.inner.raft.server_metrics(),
            all: self.inner.raft.metrics(),
            failed: self.inner.log.failed(),
            seen: Leadership::default(),
        };
        watch.seen = watch.current();
        watch
    }

    /// Why this replica has stopped by itself, for good in this process (S4); `None` while it
    /// runs, and when it was told to stop.
    #[must_use]
    pub fn stopped(&self) -> Option<String> {
        if let Some(reason) = self.inner.log.failure() {
            return Some(reason);
        }
        match &self.inner.raft.metrics().borrow_watched().running_state {
            Ok(()) | Err(Fatal::Stopped) => None,
            Err(error) => Some(error.to_string()),
        }
    }

    /// How far this replica has applied: `next_offset` is the high watermark.
    #[must_use]
    pub fn applied(&self) -> AppliedMark {
        *self.inner.applied.borrow()
    }

    /// The term in which this replica serves: it leads, and has applied the first entry of its own
    /// term (S18).
    #[must_use]
    pub fn serving(&self) -> Option<u64> {
        let now = self.leadership();
        (now.is_local && self.applied().term == now.term).then_some(now.term)
    }

    /// Follows how far this replica has applied.
    #[must_use]
    pub fn watch_applied(&self) -> watch::Receiver<AppliedMark> {
        self.inner.applied.clone()
    }

    /// How long no leader has been heard, from one that this replica follows; `None` if none was
    /// since it was opened. Says nothing on a leader.
    ///
    /// Leaders send heartbeats for as long as they live. A leader that is cut off from a majority
    /// together with this replica sends them, too.
    #[must_use]
    pub fn leader_silence(&self) -> Option<Duration> {
        self.inner.contact.silence()
    }

    /// A follower that has heard no leader for this long is cut off from its group.
    #[must_use]
    pub fn leader_lost_after(&self) -> Duration {
        self.inner.leader_lost_after
    }

    /// Takes what a leader sends.
    pub(crate) async fn append_entries(
        &self,
        request: AppendEntriesRequest<TypeConfig>,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RaftError<TypeConfig>> {
        let response = self.inner.raft.append_entries(request).await?;
        self.inner.contact.answered(&response);
        Ok(response)
    }

    /// A copy of openraft's metrics.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        self.inner.raft.metrics().borrow_watched().clone()
    }

    /// Whether this replica leads and one of its voters has not answered it for `silence`, or not at
    /// all yet.
    #[must_use]
    pub fn lacks_voter(&self, silence: Duration) -> bool {
        let metrics = self.metrics();
        let Some(heard) = &metrics.heartbeat else {
            return false;
        };
        let voters = metrics.membership_config.voter_ids();
        voters.filter(|voter| *voter != metrics.id).any(|voter| {
            let heard = heard.get(&voter).copied().flatten();
            heard.is_none_or(|heard| heard.elapsed() > silence)
        })
    }

    /// Leave to propose a batch of `bytes`, at once or not at all.
    ///
    /// # Errors
    /// [`ProposeError::Busy`], [`ProposeError::StorageFull`], [`ProposeError::TooLarge`],
    /// [`ProposeError::Stopped`].
    pub fn try_admit(&self, bytes: usize) -> Result<Admission, ProposeError> {
        let permits = permits(bytes)?;
        let in_flight = Arc::clone(&self.inner.in_flight)
            .try_acquire_many_owned(permits)
            .map_err(|_| ProposeError::Busy)?;
        Ok(Admission {
            bytes,
            in_flight,
            space: Some(self.reserve(bytes)?),
        })
    }

    /// Leave to propose a batch of `bytes`, after waiting for those in flight.
    ///
    /// The wait is as long as the group commits nothing: give it a deadline.
    ///
    /// # Errors
    /// As [`try_admit`](Self::try_admit), but for `Busy`.
    ///
    /// # Cancel safety
    /// Safe: a dropped wait gives its place in the queue back.
    pub async fn admit(&self, bytes: usize) -> Result<Admission, ProposeError> {
        let mut admission = self.admit_command(bytes).await?;
        admission.space = Some(self.reserve(bytes)?);
        Ok(admission)
    }

    /// Leave to propose a command of `bytes`. Commands are few and small, and freeing space takes
    /// some: they may go below the disk floor, so no space is promised.
    ///
    /// # Errors
    /// As [`admit`](Self::admit), but for `StorageFull`.
    ///
    /// # Cancel safety
    /// Safe: a dropped wait gives its place in the queue back.
    pub async fn admit_command(&self, bytes: usize) -> Result<Admission, ProposeError> {
        let permits = permits(bytes)?;
        let in_flight = Arc::clone(&self.inner.in_flight)
            .acquire_many_owned(permits)
            .await
            .map_err(|_| ProposeError::Stopped)?;
        Ok(Admission {
            bytes,
            in_flight,
            space: None,
        })
    }

    // S4: space is promised before a batch is proposed.
    fn reserve(&self, bytes: usize) -> Result<Space, ProposeError> {
        match self.inner.log.reserve(bytes as u64) {
            Ok(reservation) => Ok(Arc::new(reservation)),
            Err(_full) => Err(ProposeError::StorageFull),
        }
    }

    /// Submits an entry. The order of calls is the order in the log.
    ///
    /// With `term`, only if this replica leads in exactly that term (S11).
    ///
    /// # Errors
    /// Nothing was submitted: [`ProposeError`]. After submission errors come from the
    /// [`Proposal`].
    pub fn propose(
        &self,
        admission: Admission,
        mut payload: Payload,
        term: Option<u64>,
    ) -> Result<Proposal, ProposeError> {
        if payload.bytes.len() > admission.bytes {
            return Err(ProposeError::TooLarge {
                size: payload.bytes.len(),
                size_max: admission.bytes,
            });
        }
        payload.space = admission.space;
        let (responder, answer) = Responder::new(Some(admission.in_flight));
        let mut write = self.inner.raft.write(payload).responder(responder);
        if let Some(term) = term {
            write = write.with_leader(CommittedLeaderId::new(term));
        }
        // One poll sends it: the core's channel has room, or nothing was sent. Unconstrained, or
        // a task that has used up its budget would be told to wait.
        match tokio::task::unconstrained(write.into_future()).now_or_never() {
            Some(Ok(())) => Ok(Proposal { answer }),
            Some(Err(_fatal)) => Err(ProposeError::Stopped),
            None if self.inner.raft.server_metrics().borrow_watched().state
                == openraft::ServerState::Shutdown =>
            {
                Err(ProposeError::Stopped)
            }
            None => Err(ProposeError::Busy),
        }
    }

    /// Proposes a command and waits until it is applied: admit, propose, wait.
    ///
    /// S15: if the lease has run out in a quiet group, confirms and proposes once more.
    ///
    /// # Errors
    /// [`CommandError`].
    ///
    /// # Cancel safety
    /// A dropped call may have submitted the command.
    pub async fn command(
        &self,
        command: Bytes,
        broker_time_ms: u64,
        term: Option<u64>,
        deadline: Duration,
    ) -> Result<Applied, CommandError> {
        let attempt = || self.command_once(command.clone(), broker_time_ms, term);
        let decided = async {
            match attempt().await {
                Err(CommandError::Failed(ProposalError::LeaseExpired)) => {
                    // Its failure shows in the second attempt.
                    let _ = self.confirm(deadline / 2).await;
                    attempt().await
                }
                outcome => outcome,
            }
        };
        tokio::time::timeout(deadline, decided)
            .await
            .unwrap_or(Err(CommandError::Timeout))
    }

    async fn command_once(
        &self,
        command: Bytes,
        broker_time_ms: u64,
        term: Option<u64>,
    ) -> Result<Applied, CommandError> {
        let admission = self.admit_command(command.len()).await?;
        let proposal = self.propose(admission, Payload::command(command, broker_time_ms), term)?;
        Ok(proposal.await?)
    }

    /// ReadIndex: proves that this replica leads, and waits until it has applied everything
    /// committed before the call (S14: nothing reads by lease).
    ///
    /// # Errors
    /// [`ConfirmError`].
    pub async fn confirm(&self, deadline: Duration) -> Result<Confirmed, ConfirmError> {
        let round = self.inner.raft.ensure_linearizable(ReadPolicy::ReadIndex);
        match tokio::time::timeout(deadline, round).await {
            Err(_elapsed) => Err(ConfirmError::NoQuorum),
            Ok(Ok(read)) => Ok(Confirmed {
                term: read.committed_leader_id().term,
                read_index: read.index(),
            }),
            Ok(Err(RaftError::Fatal(_))) => Err(ConfirmError::Stopped),
            Ok(Err(RaftError::APIError(LinearizableReadError::ForwardToLeader(to)))) => {
                Err(ConfirmError::NotLeader {
                    leader: proposal::leader(&to),
                })
            }
            Ok(Err(RaftError::APIError(LinearizableReadError::QuorumNotEnough(_)))) => {
                Err(ConfirmError::NoQuorum)
            }
        }
    }

    /// Makes `members` the voters of an empty group. `false`: it already has a log or a vote.
    ///
    /// S10: only the replicas of a partition's first placement may call it, with exactly that set.
    ///
    /// # Errors
    /// [`MembersError::Refused`] if this replica is not among them, [`MembersError::Stopped`].
    pub async fn initialize(
        &self,
        members: BTreeMap<ReplicaId, BrokerId>,
    ) -> Result<bool, MembersError> {
        let nodes: BTreeMap<u64, ReplicaNode> = members
            .into_iter()
            .map(|(replica, broker)| (replica.0, ReplicaNode { broker }))
            .collect();
        match self.inner.raft.initialize(nodes).await {
            Ok(()) => Ok(true),
            Err(RaftError::APIError(InitializeError::NotAllowed(_))) => Ok(false),
            Err(RaftError::APIError(error @ InitializeError::NotInMembers(_))) => {
                Err(MembersError::Refused(error.to_string()))
            }
            Err(RaftError::Fatal(_)) => Err(MembersError::Stopped),
        }
    }

    /// Adds a learner, without waiting for it to catch up. Returns the index of the change.
    ///
    /// # Errors
    /// [`MembersError`].
    pub async fn add_learner(
        &self,
        replica: ReplicaId,
        broker: BrokerId,
        deadline: Duration,
    ) -> Result<u64, MembersError> {
        let change = self
            .inner
            .raft
            .add_learner(replica.0, ReplicaNode { broker }, false);
        member_change(deadline, change).await
    }

    /// Makes exactly `voters` the voters, in one joint change; with `retain`, former voters stay
    /// as learners. A leader that is not among them steps down afterwards. Returns the index of the
    /// final change.
    ///
    /// # Errors
    /// [`MembersError`].
    pub async fn set_voters(
        &self,
        voters: BTreeSet<ReplicaId>,
        retain: bool,
        deadline: Duration,
    ) -> Result<u64, MembersError> {
        let voters: BTreeSet<u64> = voters.into_iter().map(|replica| replica.0).collect();
        let stays = voters.contains(&self.inner.replica.0);
        let change = self.inner.raft.change_membership(voters, retain);
        let index = member_change(deadline, change).await?;
        if !stays {
            let trigger = self.inner.raft.trigger();
            let stepped_down = trigger.refresh_server_state(None, None).await;
            stepped_down.map_err(|_| MembersError::Stopped)?;
        }
        Ok(index)
    }

    /// Cuts the log below the state machine's log start, where a checkpoint allows it: takes the
    /// checkpoint there as the Raft snapshot and purges what it covers. Returns before it is done.
    ///
    /// # Errors
    /// [`ProposeError::Stopped`].
    pub async fn cut_log(&self) -> Result<(), ProposeError> {
        let trigger = self.inner.raft.trigger();
        trigger.snapshot().await.map_err(|_| ProposeError::Stopped)
    }

    /// Gives the lead to the voter that has most of the log. `false`: this replica does not lead,
    /// has nobody to give it to, or still leads after `patience`.
    ///
    /// For a replica about to close only: openraft never ends a transfer to a voter that has just
    /// died, and the leader takes no writes meanwhile (S15).
    ///
    /// # Cancel safety
    /// A dropped call may have begun the transfer.
    pub async fn hand_over(&self, patience: Duration) -> bool {
        // The metrics may lag behind: who leads is asked first.
        let heir = match self.leadership().is_local {
            true => heir(&self.metrics()),
            false => None,
        };
        let Some(heir) = heir else {
            return false;
        };
        let mut leadership = self.watch_leadership();
        if self
            .inner
            .raft
            .trigger()
            .transfer_leader(heir)
            .await
            .is_err()
        {
            return false;
        }
        let given = async {
            while leadership.current().is_local {
                if leadership.changed().await.is_none() {
                    return;
                }
            }
        };
        tokio::time::timeout(patience, given).await.is_ok()
    }

    /// Asks this replica to stand for election now, with pre-vote.
    ///
    /// # Errors
    /// [`ProposeError::Stopped`].
    pub async fn elect(&self) -> Result<(), ProposeError> {
        self.inner
            .raft
            .trigger()
            .elect(true)
            .await
            .map_err(|_| ProposeError::Stopped)
    }
}

/// A command that was not applied, or may not have been.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// It was not submitted.
    #[error(transparent)]
    NotSubmitted(#[from] ProposeError),
    /// It was submitted; [`ProposalError::is_unwritten`] says more.
    #[error(transparent)]
    Failed(#[from] ProposalError),
    /// Nothing was decided in time. It may have been submitted, and may still be applied.
    #[error("not decided in time: the outcome is unknown")]
    Timeout,
}

fn permits(bytes: usize) -> Result<u32, ProposeError> {
    if bytes > ENTRY_BYTES_MAX {
        return Err(ProposeError::TooLarge {
            size: bytes,
            size_max: ENTRY_BYTES_MAX,
        });
    }
    // At least one, so that empty entries are bounded too.
    u32::try_from(bytes.max(1)).map_err(|_| ProposeError::Busy)
}

async fn member_change(
    deadline: Duration,
    change: impl Future<
        Output = Result<
            openraft::raft::ClientWriteResponse<TypeConfig>,
            RaftError<TypeConfig, openraft::errors::ClientWriteError<TypeConfig>>,
        >,
    >,
) -> Result<u64, MembersError> {
    use openraft::errors::ClientWriteError;
    match tokio::time::timeout(deadline, change).await {
        Err(_elapsed) => Err(MembersError::Timeout),
        Ok(Ok(response)) => Ok(response.log_id.index),
        Ok(Err(RaftError::Fatal(_))) => Err(MembersError::Stopped),
        Ok(Err(RaftError::APIError(ClientWriteError::ForwardToLeader(to)))) => {
            Err(MembersError::NotLeader {
                leader: proposal::leader(&to),
            })
        }
        Ok(Err(RaftError::APIError(error))) => Err(MembersError::Refused(error.to_string())),
    }
}
