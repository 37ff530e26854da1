//! One open replica of a `__groups` partition: commands in, the applied state to read.
//!
//! Owns the group's handle and the view of the applied state. Runs no task: whoever coordinates
//! groups follows [`super::registry::GroupReplicas`] and runs its own.
//!
//! S18: only a leader that has applied the first entry of its own term serves; only one that has
//! confirmed itself by ReadIndex speaks about what is committed, or acknowledges heartbeats (S26).

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use prost::Message as _;
use qute_proto::ids::{PartitionId, ReplicaId};
use qute_proto::internal::{GroupsCommand, GroupsReply, groups_command::Command};
use tokio_util::sync::CancellationToken;

use super::machine::GroupsState;
use crate::env::Clock;
use crate::partition::hosted::Member;
use crate::raft::lane::SNAPSHOT_BYTES_MAX;
use crate::raft::{
    CommandError, ConfirmError, GroupHandle, Leadership, ProposalError, ProposeError,
};

/// How long a command may take to be applied.
const COMMAND_WITHIN: Duration = Duration::from_secs(5);

/// A whole state travels to a replica that has fallen far behind in one message between brokers: it
/// must not outgrow it ([`SNAPSHOT_BYTES_MAX`]). Counted is what the groups of the partition take in
/// memory, which is more than their checkpoint has.
const STATE_BYTES_MAX: usize = 56 << 20;
/// What is new to the state is refused earlier, so that groups that are at work go on.
const STATE_BYTES_NEW_MAX: usize = 40 << 20;
const _: () =
    assert!(STATE_BYTES_NEW_MAX < STATE_BYTES_MAX && STATE_BYTES_MAX < SNAPSHOT_BYTES_MAX);

/// Up to which size of the state a command is taken; `None`: always, as it frees something or ends
/// a claim.
fn state_bytes_max(command: &Command) -> Option<usize> {
    match command {
        Command::Join(_) => Some(STATE_BYTES_NEW_MAX),
        Command::Commit(commit) => {
            let by_member = commit
                .request
                .as_ref()
                .is_some_and(|it| !it.member_id.is_empty());
            Some(if by_member {
                STATE_BYTES_MAX
            } else {
                STATE_BYTES_NEW_MAX
            })
        }
        Command::Subscribe(_) | Command::Publish(_) | Command::Reset(_) => Some(STATE_BYTES_MAX),
        Command::Leave(_)
        | Command::Expire(_)
        | Command::Release(_)
        | Command::Remove(_)
        | Command::Sweep(_)
        | Command::ForgetTopics(_) => None,
    }
}

/// Why a replica did not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Another replica leads, or none does. Nothing was written.
    #[error("this broker does not coordinate the group")]
    NotLeader,
    /// Elected, and has not applied its own term's first entry; or no quorum answers. Nothing was
    /// written.
    #[error("the coordinator is starting, or finds no majority of its replicas: retry")]
    NotReady,
    /// Too much is in flight. Nothing was written.
    #[error("too much is in flight for this `__groups` partition: retry")]
    Overloaded,
    /// No space that could be promised. Nothing was written.
    #[error("the disk is full: nothing was written; free space, then retry")]
    StorageFull,
    /// More than one entry may hold. Nothing was written, and a retry does not help.
    #[error("a command of {size} bytes, a broker takes {size_max}")]
    TooLarge {
        /// Its size.
        size: usize,
        /// The limit.
        size_max: usize,
    },
    /// The groups of the partition take as much as they may. Nothing was written.
    #[error(
        "the groups of this `__groups` partition take {bytes} bytes, of {bytes_max} at most: delete \
         groups that are no longer needed, or commit shorter metadata"
    )]
    StateFull {
        /// What they take.
        bytes: usize,
        /// The limit for this command.
        bytes_max: usize,
    },
    /// Submitted, fate unknown.
    #[error("the command was submitted and its fate is not known")]
    OutcomeUnknown,
    /// An answer that this version does not understand.
    #[error("the reply can't be read: {0}")]
    Malformed(String),
    /// The replica found damage and does not serve (S7).
    #[error("the replica is quarantined: {0}")]
    Quarantined(String),
    /// The partition is not (or no longer) open on this broker.
    #[error("partition {0} of `__groups` is not on this broker")]
    NotHere(u32),
}

/// See the module.
pub struct GroupReplica {
    group: GroupHandle,
    state: GroupsState,
    clock: Arc<dyn Clock>,
    closed: CancellationToken,
}

impl GroupReplica {
    pub(super) fn new(group: GroupHandle, state: GroupsState, clock: Arc<dyn Clock>) -> Self {
        Self {
            group,
            state,
            clock,
            closed: CancellationToken::new(),
        }
    }

    /// Of which partition of `__groups`.
    #[must_use]
    pub fn partition(&self) -> PartitionId {
        self.group.id().partition
    }

    /// Which replica of it (S9).
    #[must_use]
    pub fn id(&self) -> ReplicaId {
        self.group.replica()
    }

    /// The Raft group, for watches of leadership and of what is applied.
    #[must_use]
    pub fn group(&self) -> &GroupHandle {
        &self.group
    }

    /// The applied state.
    #[must_use]
    pub fn state(&self) -> &GroupsState {
        &self.state
    }

    /// Who leads, as this replica knows it.
    #[must_use]
    pub fn leadership(&self) -> Leadership {
        self.group.leadership()
    }

    /// The term in which this replica serves: it leads, and has applied the first entry of its own
    /// term.
    #[must_use]
    pub fn serving(&self) -> Option<u64> {
        self.group.serving()
    }

    /// Ends when the replica is closed.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn closed(&self) {
        self.closed.cancelled().await;
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
                tokio::select! {
                    () = self.closed.cancelled() => return Err(self.gone()),
                    change = leadership.changed() => change.map(|_| ()).ok_or_else(|| self.gone())?,
                    moved = applied.changed() => moved.map_err(|_| self.gone())?,
                }
            }
        };
        tokio::time::timeout(patience, serving)
            .await
            .unwrap_or(Err(Error::NotReady))
    }

    /// A ReadIndex round begun after the call (S18, S26): this replica leads, and everything
    /// committed before the call is in [`state`](Self::state). Returns the term it leads in.
    ///
    /// # Errors
    /// [`Error::NotLeader`], [`Error::NotReady`] without a quorum in time, [`Error::NotHere`].
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn confirm(&self, patience: Duration) -> Result<u64, Error> {
        let serving = self.wait_serving(patience).await?;
        let confirmed = self.group.confirm(patience).await;
        let confirmed = confirmed.map_err(|error| match error {
            ConfirmError::NotLeader { .. } => Error::NotLeader,
            ConfirmError::NoQuorum => Error::NotReady,
            ConfirmError::Stopped => self.gone(),
        })?;
        if confirmed.term != serving {
            return Err(Error::NotLeader);
        }
        Ok(serving)
    }

    /// Proposes a command in the term that this replica serves in, and waits until it is applied.
    /// Returns the state machine's answer and the Raft index of the command. A refusal by the state
    /// machine is an answer.
    ///
    /// # Errors
    /// See [`Error`]: [`Error::OutcomeUnknown`] once submitted, else nothing was written.
    ///
    /// # Cancel safety
    /// A dropped call may have submitted the command.
    pub async fn command(&self, command: Command) -> Result<(GroupsReply, u64), Error> {
        let term = self.serving().ok_or(Error::NotLeader)?;
        self.command_in(term, command).await
    }

    /// The same in exactly the term `term`: not if another leader has been in between, of whose
    /// entries the caller does not know.
    ///
    /// # Errors
    /// As [`command`](Self::command).
    ///
    /// # Cancel safety
    /// A dropped call may have submitted the command.
    pub async fn command_in(
        &self,
        term: u64,
        command: Command,
    ) -> Result<(GroupsReply, u64), Error> {
        if let Some(bytes_max) = state_bytes_max(&command) {
            let bytes = self.state.read(|groups| groups.totals().bytes);
            if bytes > bytes_max {
                return Err(Error::StateFull { bytes, bytes_max });
            }
        }
        let command = GroupsCommand {
            command: Some(command),
        };
        // S19: time in the log never falls.
        let now_ms = self.clock.wall_ms().max(self.group.log().last_time_ms());
        let bytes = command.encode_to_vec().into();
        let applied = self
            .group
            .command(bytes, now_ms, Some(term), COMMAND_WITHIN)
            .await;
        let applied = applied.map_err(|error| self.refusal(error))?;
        let reply = GroupsReply::decode(applied.reply)
            .map_err(|error| Error::Malformed(error.to_string()))?;
        Ok((reply, applied.index))
    }

    fn refusal(&self, error: CommandError) -> Error {
        match error {
            CommandError::NotSubmitted(error) => match error {
                ProposeError::StorageFull => Error::StorageFull,
                ProposeError::Stopped => self.gone(),
                ProposeError::Busy => Error::Overloaded,
                ProposeError::TooLarge { size, size_max } => Error::TooLarge { size, size_max },
            },
            CommandError::Failed(error) => match error {
                ProposalError::NotLeader { .. } => Error::NotLeader,
                ProposalError::LeaseExpired => Error::NotReady,
                ProposalError::Discarded | ProposalError::Stopped => Error::OutcomeUnknown,
            },
            CommandError::Timeout => Error::OutcomeUnknown,
        }
    }

    fn gone(&self) -> Error {
        Error::NotHere(self.partition().partition)
    }
}

impl Member for GroupReplica {
    fn group(&self) -> &GroupHandle {
        &self.group
    }

    fn retire(&self) -> BoxFuture<'_, ()> {
        Box::pin(async { self.closed.cancel() })
    }
}

#[cfg(test)]
mod tests {
    use qute_proto::internal::{CommitClaims, JoinMember, LeaveMember, ReleaseClaims};
    use qute_proto::v1::CommitOffsetsRequest;

    use super::*;

    fn commit(member: &'static [u8]) -> Command {
        Command::Commit(CommitClaims {
            request: Some(CommitOffsetsRequest {
                member_id: member.into(),
                ..CommitOffsetsRequest::default()
            }),
        })
    }

    #[test]
    fn state_that_is_nearly_full_takes_nothing_new_and_always_what_ends_a_claim() {
        let join = Command::Join(JoinMember::default());
        assert_eq!(state_bytes_max(&join), Some(STATE_BYTES_NEW_MAX));
        assert_eq!(state_bytes_max(&commit(b"")), Some(STATE_BYTES_NEW_MAX));
        assert_eq!(state_bytes_max(&commit(b"member")), Some(STATE_BYTES_MAX));
        // S27: a claim ends with its final offset, whatever there is.
        let release = Command::Release(ReleaseClaims::default());
        assert_eq!(state_bytes_max(&release), None);
        assert_eq!(
            state_bytes_max(&Command::Leave(LeaveMember::default())),
            None
        );
    }
}
