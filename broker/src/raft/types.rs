//! The one type config of all groups, and what is proposed to them.
//!
//! The Raft node id is the *replica id* that the controller hands out once per placement (S9);
//! the Raft node is the broker that hosts it, so addresses can change without a membership
//! change. `leader_id_std` makes the term the leader epoch: at most one leader a term.

use std::fmt;

use bytes::Bytes;
use openraft::RaftTypeConfig;
use qute_proto::ids::{BrokerId, Offset, PartitionId, TopicId};
use qute_proto::internal;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::machine::Machine;

/// A Raft group: a partition, and how often it was recovered by force (S24).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId {
    /// The partition whose log the group replicates.
    pub partition: PartitionId,
    /// Rises with a forced recovery; 0 otherwise.
    pub incarnation: u32,
}

impl GroupId {
    /// The group of `__cluster`.
    pub const CLUSTER: Self = Self::new(PartitionId::CLUSTER);

    /// The first incarnation of a partition's group.
    #[must_use]
    pub const fn new(partition: PartitionId) -> Self {
        Self {
            partition,
            incarnation: 0,
        }
    }

    /// Reads a group id; `None` if the topic id is not 16 bytes.
    #[must_use]
    pub fn from_wire(wire: &internal::GroupId) -> Option<Self> {
        Some(Self {
            partition: PartitionId {
                topic: TopicId::from_wire(&wire.topic_id)?,
                partition: wire.partition,
            },
            incarnation: wire.incarnation,
        })
    }

    /// The message that travels.
    #[must_use]
    pub fn to_wire(self) -> internal::GroupId {
        internal::GroupId {
            topic_id: self.partition.topic.to_wire(),
            partition: self.partition.partition,
            incarnation: self.incarnation,
        }
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.partition)?;
        if self.incarnation > 0 {
            write!(f, "+{}", self.incarnation)?;
        }
        Ok(())
    }
}

impl fmt::Debug for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GroupId({self})")
    }
}

/// Where a replica lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaNode {
    /// The broker that hosts the replica.
    pub broker: BrokerId,
}

impl fmt::Display for ReplicaNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "broker {}", self.broker)
    }
}

/// What a proposal carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadKind {
    /// An encoded record batch: consumes offsets.
    Batch,
    /// A command to the state machine: consumes no offset.
    Command,
}

/// S4: space on disk promised to an entry; freed when the last holder is dropped.
pub(super) type Space = std::sync::Arc<dyn std::any::Any + Send + Sync>;

/// What is proposed to a group, and what its log gives back.
///
/// `bytes` is shared, never copied: the producer's batch goes into the segment as it is.
#[derive(Clone)]
pub struct Payload {
    /// Batch or command.
    pub kind: PayloadKind,
    /// The leader's clock when it proposed, Unix milliseconds (S19).
    pub broker_time_ms: u64,
    /// Offsets the payload consumes; 0 for a command.
    pub records: u32,
    /// First offset. Assigned by the log at append, so it means nothing in a proposal.
    pub base_offset: u64,
    /// The encoded batch or command.
    pub bytes: Bytes,
    /// S4: space on disk promised before the entry was accepted; freed by the append.
    pub(super) space: Option<Space>,
}

impl Payload {
    /// A record batch of `records` records.
    #[must_use]
    pub fn batch(bytes: Bytes, records: u32, broker_time_ms: u64) -> Self {
        Self {
            kind: PayloadKind::Batch,
            broker_time_ms,
            records,
            base_offset: 0,
            bytes,
            space: None,
        }
    }

    /// A command to the state machine.
    #[must_use]
    pub fn command(bytes: Bytes, broker_time_ms: u64) -> Self {
        Self {
            kind: PayloadKind::Command,
            broker_time_ms,
            records: 0,
            base_offset: 0,
            bytes,
            space: None,
        }
    }
}

impl PartialEq for Payload {
    fn eq(&self, other: &Self) -> bool {
        // The base offset is the log's, not the proposal's.
        self.kind == other.kind
            && self.broker_time_ms == other.broker_time_ms
            && self.records == other.records
            && self.bytes == other.bytes
    }
}

impl Eq for Payload {}

impl fmt::Display for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {} bytes", self.kind, self.bytes.len())
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What became of a committed proposal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Raft index of the entry.
    pub index: u64,
    /// First offset of the batch; `None` for a command.
    pub base_offset: Option<Offset>,
    /// What the state machine answered.
    pub reply: Bytes,
}

/// The type config of every group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct TypeConfig;

impl RaftTypeConfig for TypeConfig {
    type D = Payload;
    type R = Applied;
    type NodeId = u64;
    type Node = ReplicaNode;
    type Term = u64;
    type LeaderId = openraft::impls::leader_id_std::LeaderId<u64, u64>;
    type Vote = openraft::impls::Vote<Self::LeaderId>;
    type Payload = openraft::EntryPayload<Payload, u64, ReplicaNode>;
    type Entry = openraft::Entry<CommittedLeaderId, Self::Payload>;
    type AsyncRuntime = openraft_rt_tokio::TokioRuntime;
    type Responder<T>
        = Responder<T>
    where
        T: openraft::OptionalSend + 'static;
    type Batch<T>
        = openraft::impls::InlineBatch<T>
    where
        T: openraft::OptionalSend + 'static;
    type ErrorSource = openraft::impls::BoxedErrorSource;
}

/// A leader that a quorum has granted: its term.
pub type CommittedLeaderId =
    <openraft::impls::leader_id_std::LeaderId<u64, u64> as openraft::vote::RaftLeaderId>::Committed;
/// Term and index of a log entry.
pub type LogId = openraft::LogId<CommittedLeaderId>;
/// A vote, possibly granted by a quorum.
pub type Vote = <TypeConfig as RaftTypeConfig>::Vote;
/// A log entry.
pub type Entry = <TypeConfig as RaftTypeConfig>::Entry;
/// What a log entry carries: blank, [`Payload`] or membership.
pub type EntryPayload = <TypeConfig as RaftTypeConfig>::Payload;
/// Voters and learners.
pub type Membership = openraft::Membership<u64, ReplicaNode>;
/// A membership and the entry that made it.
pub type StoredMembership = openraft::StoredMembership<CommittedLeaderId, u64, ReplicaNode>;
/// What openraft says about one group.
pub type Metrics = openraft::RaftMetrics<TypeConfig>;
/// One replica of one group.
pub type Raft = openraft::Raft<TypeConfig, Machine>;

/// The log id of `index` in `term`.
#[must_use]
pub fn log_id(term: u64, index: u64) -> LogId {
    LogId::new_term_index(term, index)
}

/// Answers one proposal through a one-shot channel, and gives its bytes back to the budget of
/// proposals in flight.
///
/// Unlike openraft's own it says nothing when nobody waits: a caller may drop its ticket.
pub struct Responder<T> {
    answer: oneshot::Sender<T>,
    _in_flight: Option<OwnedSemaphorePermit>,
}

impl<T> Responder<T> {
    pub(super) fn new(in_flight: Option<OwnedSemaphorePermit>) -> (Self, oneshot::Receiver<T>) {
        let (answer, ticket) = oneshot::channel();
        (
            Self {
                answer,
                _in_flight: in_flight,
            },
            ticket,
        )
    }
}

impl<T> openraft::raft::responder::Responder<TypeConfig, T> for Responder<T>
where
    T: openraft::OptionalSend + 'static,
{
    fn on_complete(self, result: T) {
        // The receiver may be gone: the caller stopped waiting.
        let _ = self.answer.send(result);
    }
}
