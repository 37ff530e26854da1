//! Writing to a group, in two steps, so that a refusal that leaves no trace is told from one that
//! may have left an entry in the log.
//!
//! ```text
//!   admit(bytes) ---> Admission ---> propose(..) ---> Proposal ---> Applied
//!   byte back-pressure               order of calls    its fate      committed and
//!   and disk space (S4)              = order of log                  applied
//! ```

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use openraft::errors::{ClientWriteError, ForwardReason, ForwardToLeader};
use openraft::raft::ClientWriteResult;
use qute_proto::ids::ReplicaId;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::group::Leader;
use super::types::{Applied, Space, TypeConfig};

/// Leave to propose: a share of the bytes in flight, and space on disk (S4).
///
/// Dropping it gives both back.
#[must_use = "an admission that is dropped admits nothing"]
pub struct Admission {
    pub(super) bytes: usize,
    pub(super) in_flight: OwnedSemaphorePermit,
    pub(super) space: Option<Space>,
}

/// Nothing was proposed, and nothing will be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// Too many bytes are in flight in this group. Retry when some have been applied.
    #[error("too many bytes in flight")]
    Busy,
    /// The data directory cannot promise the space (S4). Retry when there is room.
    #[error("no space on the data disk")]
    StorageFull,
    /// More bytes than one entry may have, or than the admission covers. Final.
    #[error("entry of {size} bytes where at most {size_max} are allowed")]
    TooLarge {
        /// Its size.
        size: usize,
        /// The limit.
        size_max: usize,
    },
    /// The replica has stopped, or its log has failed (S4).
    #[error("the replica has stopped")]
    Stopped,
}

/// What became of a proposal that was submitted and did not end well.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProposalError {
    /// This replica does not lead, or leads in another term than asked for. Nothing was written.
    #[error("not the leader")]
    NotLeader {
        /// Who leads, if known.
        leader: Option<Leader>,
    },
    /// The leader has not heard from a quorum lately. Nothing was written: confirm, then retry
    /// (S15).
    #[error("the leader's lease has run out")]
    LeaseExpired,
    /// The leader changed after the entry was appended. Whether it is committed is not known.
    #[error("the leader changed: the outcome is unknown")]
    Discarded,
    /// The replica stopped. Whether the entry is committed is not known.
    #[error("the replica has stopped: the outcome is unknown")]
    Stopped,
}

impl ProposalError {
    /// True if it is certain that no entry was appended anywhere.
    #[must_use]
    pub fn is_unwritten(&self) -> bool {
        matches!(self, Self::NotLeader { .. } | Self::LeaseExpired)
    }
}

/// The fate of a submitted entry.
///
/// # Cancel safety
/// Dropping it changes nothing: the entry takes its course.
#[must_use = "the entry may fail"]
pub struct Proposal {
    pub(super) answer: oneshot::Receiver<ClientWriteResult<TypeConfig>>,
}

impl Future for Proposal {
    type Output = Result<Applied, ProposalError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.answer)
            .poll(context)
            .map(|answer| match answer {
                Ok(Ok(response)) => Ok(response.data),
                Ok(Err(error)) => Err(refusal(error)),
                Err(_closed) => Err(ProposalError::Stopped),
            })
    }
}

pub(super) fn refusal(error: ClientWriteError<TypeConfig>) -> ProposalError {
    match error {
        ClientWriteError::ForwardToLeader(to) => match to.reason {
            ForwardReason::LeaseExpired => ProposalError::LeaseExpired,
            ForwardReason::NotLeader | ForwardReason::LeadershipTransfer => {
                ProposalError::NotLeader {
                    leader: leader(&to),
                }
            }
        },
        ClientWriteError::LogEntryDiscarded(_) => ProposalError::Discarded,
        // Neither can happen to a plain write; if it did, nothing is known about the entry.
        ClientWriteError::ChangeMembershipError(_) | ClientWriteError::PreconditionFailed(_) => {
            ProposalError::Discarded
        }
    }
}

pub(super) fn leader(to: &ForwardToLeader<TypeConfig>) -> Option<Leader> {
    Some(Leader {
        replica: ReplicaId(to.leader_id?),
        broker: to.leader_node?.broker,
    })
}
