//! openraft messages <-> `qute_proto::internal` messages.
//!
//! Nothing read here panics or allocates more than the bytes justify: a message that makes no
//! sense is a [`DecodeError`]. Batches are shared, not copied (see [`own`]).

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderRequest,
    VoteRequest, VoteResponse,
};
use prost::Message;
use qute_proto::ids::BrokerId;
use qute_proto::internal;

use super::group::ENTRY_BYTES_MAX;
use super::types::{
    Entry, EntryPayload, LogId, Membership, Payload, PayloadKind, ReplicaNode, StoredMembership,
    TypeConfig, Vote, log_id,
};

/// Voters and learners of one group, at most.
const MEMBERS_MAX: usize = 1024;

/// Entries of one append, at most.
const ENTRIES_MAX: usize = 4096;

/// Payloads shorter than this are copied out of the message they came in, so that a small entry
/// in the tail cache does not keep a message of a megabyte alive.
const SHARED_BYTES_MIN: usize = 16 << 10;

/// Bytes that are not the message they should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Not protobuf, or cut short.
    #[error("not an encoded message: {0}")]
    Malformed(#[from] prost::DecodeError),
    /// A field that must be there is not.
    #[error("{0} is missing")]
    Missing(&'static str),
    /// A field holds what it may not.
    #[error("{0} is out of range")]
    OutOfRange(&'static str),
}

/// The kinds of log entries, as numbered on disk and on the wire.
pub(super) mod kind {
    pub const BATCH: u32 = 1;
    pub const BLANK: u32 = 2;
    pub const MEMBERSHIP: u32 = 3;
    pub const COMMAND: u32 = 4;
}

fn own(bytes: Bytes) -> Bytes {
    if bytes.len() < SHARED_BYTES_MIN {
        Bytes::copy_from_slice(&bytes)
    } else {
        bytes
    }
}

pub(super) fn log_id_to_wire(id: LogId) -> internal::LogId {
    internal::LogId {
        term: id.leader_id.term,
        index: id.index,
    }
}

pub(super) fn log_id_from_wire(wire: internal::LogId) -> LogId {
    log_id(wire.term, wire.index)
}

pub(super) fn vote_to_wire(vote: &Vote) -> internal::Vote {
    internal::Vote {
        term: vote.leader_id.term,
        voted_for: vote.leader_id.voted_for,
        has_voted_for: true,
        committed: vote.committed,
    }
}

pub(super) fn vote_from_wire(wire: Option<internal::Vote>) -> Result<Vote, DecodeError> {
    let wire = wire.ok_or(DecodeError::Missing("vote"))?;
    if !wire.has_voted_for {
        return Err(DecodeError::Missing("vote.voted_for"));
    }
    Ok(vote(wire.term, wire.voted_for, wire.committed))
}

/// A vote for `voted_for` in `term`.
pub(super) fn vote(term: u64, voted_for: u64, committed: bool) -> Vote {
    Vote {
        leader_id: openraft::impls::leader_id_std::LeaderId { term, voted_for },
        committed,
    }
}

fn membership_to_wire(membership: &Membership) -> internal::Membership {
    internal::Membership {
        configs: membership
            .get_joint_config()
            .iter()
            .map(|voters| internal::VoterSet {
                replica_ids: voters.iter().copied().collect(),
            })
            .collect(),
        nodes: membership
            .nodes()
            .map(|(replica_id, node)| internal::MemberNode {
                replica_id: *replica_id,
                broker_id: node.broker.0,
            })
            .collect(),
    }
}

fn membership_from_wire(wire: &internal::Membership) -> Result<Membership, DecodeError> {
    if wire.configs.len() > 2 || wire.nodes.len() > MEMBERS_MAX {
        return Err(DecodeError::OutOfRange("membership"));
    }
    let configs: Vec<BTreeSet<u64>> = wire
        .configs
        .iter()
        .map(|voters| voters.replica_ids.iter().copied().collect())
        .collect();
    let nodes: BTreeMap<u64, ReplicaNode> = wire
        .nodes
        .iter()
        .map(|node| {
            let broker = BrokerId(node.broker_id);
            (node.replica_id, ReplicaNode { broker })
        })
        .collect();
    // Refuses empty sets of voters and voters without a node.
    Membership::new(configs, nodes).map_err(|_| DecodeError::OutOfRange("membership"))
}

/// The payload of a membership entry.
pub(super) fn encode_membership(membership: &Membership) -> Bytes {
    membership_to_wire(membership).encode_to_vec().into()
}

/// Reads the payload of a membership entry. An entry always has voters.
pub(super) fn decode_membership(bytes: &[u8]) -> Result<Membership, DecodeError> {
    let membership = membership_from_wire(&internal::Membership::decode(bytes)?)?;
    if membership.get_joint_config().is_empty() {
        return Err(DecodeError::Missing("membership.configs"));
    }
    Ok(membership)
}

pub(super) fn stored_membership_to_wire(stored: &StoredMembership) -> internal::StoredMembership {
    internal::StoredMembership {
        log_id: stored.log_id().map(log_id_to_wire),
        membership: Some(membership_to_wire(stored.membership())),
    }
}

pub(super) fn stored_membership_from_wire(
    wire: &internal::StoredMembership,
) -> Result<StoredMembership, DecodeError> {
    let membership = match &wire.membership {
        Some(membership) => membership_from_wire(membership)?,
        None => Membership::default(),
    };
    Ok(StoredMembership::new(
        wire.log_id.map(log_id_from_wire),
        membership,
    ))
}
