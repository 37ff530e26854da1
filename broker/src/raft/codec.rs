//! openraft messages <-> `qute_proto::internal` messages.
//!
//! Nothing read here panics or allocates more than the bytes justify: a message that makes no
//! sense is a [`DecodeError`]. Batches are shared, not copied (see [`own`]).

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, TransferLeaderError,
    TransferLeaderRequest, TransferLeaderResponse, VoteRequest, VoteResponse,
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

fn entry_to_wire(entry: &Entry) -> internal::LogEntry {
    let mut wire = internal::LogEntry {
        term: entry.log_id.leader_id.term,
        index: entry.log_id.index,
        kind: kind::BLANK,
        ..Default::default()
    };
    match &entry.payload {
        EntryPayload::Blank => {}
        EntryPayload::Normal(payload) => {
            wire.kind = match payload.kind {
                PayloadKind::Batch => kind::BATCH,
                PayloadKind::Command => kind::COMMAND,
            };
            wire.broker_time_ms = payload.broker_time_ms;
            wire.records = payload.records;
            wire.payload = payload.bytes.clone();
        }
        EntryPayload::Membership(membership) => {
            wire.kind = kind::MEMBERSHIP;
            wire.payload = encode_membership(membership);
        }
    }
    wire
}

fn entry_from_wire(wire: internal::LogEntry) -> Result<Entry, DecodeError> {
    if wire.payload.len() > ENTRY_BYTES_MAX {
        return Err(DecodeError::OutOfRange("entry.payload"));
    }
    let normal = |kind, wire: internal::LogEntry| {
        EntryPayload::Normal(Payload {
            kind,
            broker_time_ms: wire.broker_time_ms,
            records: wire.records,
            base_offset: 0,
            bytes: own(wire.payload),
            space: None,
        })
    };
    let log_id = log_id(wire.term, wire.index);
    let payload = match wire.kind {
        kind::BLANK => EntryPayload::Blank,
        kind::MEMBERSHIP => EntryPayload::Membership(decode_membership(&wire.payload)?),
        kind::BATCH if wire.records == 0 => return Err(DecodeError::OutOfRange("entry.records")),
        kind::BATCH => normal(PayloadKind::Batch, wire),
        kind::COMMAND if wire.records != 0 => return Err(DecodeError::OutOfRange("entry.records")),
        kind::COMMAND => normal(PayloadKind::Command, wire),
        _ => return Err(DecodeError::OutOfRange("entry.kind")),
    };
    Ok(Entry { log_id, payload })
}

/// The append that travels.
pub(super) fn append_request_to_wire(
    request: &AppendEntriesRequest<TypeConfig>,
) -> internal::AppendRequest {
    internal::AppendRequest {
        vote: Some(vote_to_wire(&request.vote)),
        prev_log_id: request.prev_log_id.map(log_id_to_wire),
        entries: request.entries.iter().map(entry_to_wire).collect(),
        leader_commit: request.leader_commit.map(log_id_to_wire),
    }
}

/// Reads an append. What openraft takes for granted is checked: a leader's vote, entries that
/// follow `prev_log_id` and each other, and terms that neither fall nor exceed the leader's.
pub(super) fn append_request_from_wire(
    wire: internal::AppendRequest,
) -> Result<AppendEntriesRequest<TypeConfig>, DecodeError> {
    let vote = leader_vote_from_wire(wire.vote)?;
    if wire.entries.len() > ENTRIES_MAX {
        return Err(DecodeError::OutOfRange("entries"));
    }
    let prev_log_id = wire.prev_log_id.map(log_id_from_wire);
    let mut next_index = prev_log_id.map_or(Some(0), |prev| prev.index.checked_add(1));
    let mut term = prev_log_id.map_or(0, |prev| prev.leader_id.term);
    let mut entries = Vec::with_capacity(wire.entries.len());
    for entry in wire.entries {
        let entry = entry_from_wire(entry)?;
        if next_index != Some(entry.log_id.index) {
            return Err(DecodeError::OutOfRange("entry.index"));
        }
        let entry_term = entry.log_id.leader_id.term;
        if entry_term < term || entry_term > vote.leader_id.term {
            return Err(DecodeError::OutOfRange("entry.term"));
        }
        term = entry_term;
        next_index = entry.log_id.index.checked_add(1);
        entries.push(entry);
    }
    Ok(AppendEntriesRequest {
        vote,
        prev_log_id,
        entries,
        leader_commit: wire.leader_commit.map(log_id_from_wire),
    })
}

/// Bytes of batches and commands in an append: what S4 reserves.
pub(super) fn data_bytes(request: &AppendEntriesRequest<TypeConfig>) -> usize {
    let data = |entry: &Entry| match &entry.payload {
        EntryPayload::Normal(payload) => payload.bytes.len(),
        EntryPayload::Blank | EntryPayload::Membership(_) => 0,
    };
    request.entries.iter().map(data).sum()
}

/// What a follower answers to an append.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AppendAnswer {
    /// It handled the append.
    Handled(AppendEntriesResponse<TypeConfig>),
    /// It cannot take it now (S4): retry later.
    Refused(String),
}

pub(super) fn append_answer_to_wire(answer: &AppendAnswer) -> internal::AppendResponse {
    use internal::append_response::Outcome;
    let mut wire = internal::AppendResponse::default();
    match answer {
        AppendAnswer::Refused(reason) => wire.refused.clone_from(reason),
        AppendAnswer::Handled(AppendEntriesResponse::Success) => {
            wire.set_outcome(Outcome::Success);
        }
        AppendAnswer::Handled(AppendEntriesResponse::PartialSuccess(upto)) => {
            wire.set_outcome(Outcome::PartialSuccess);
            wire.log_id = upto.map(log_id_to_wire);
        }
        AppendAnswer::Handled(AppendEntriesResponse::Conflict) => {
            wire.set_outcome(Outcome::Conflict);
        }
        AppendAnswer::Handled(AppendEntriesResponse::HigherVote(vote)) => {
            wire.set_outcome(Outcome::HigherVote);
            wire.vote = Some(vote_to_wire(vote));
        }
    }
    wire
}

pub(super) fn append_answer_from_wire(bytes: Bytes) -> Result<AppendAnswer, DecodeError> {
    use internal::append_response::Outcome;
    let wire = internal::AppendResponse::decode(bytes)?;
    if !wire.refused.is_empty() {
        return Ok(AppendAnswer::Refused(wire.refused));
    }
    let response = match wire.outcome() {
        Outcome::Success => AppendEntriesResponse::Success,
        Outcome::PartialSuccess => {
            AppendEntriesResponse::PartialSuccess(wire.log_id.map(log_id_from_wire))
        }
        Outcome::Conflict => AppendEntriesResponse::Conflict,
        Outcome::HigherVote => AppendEntriesResponse::HigherVote(vote_from_wire(wire.vote)?),
        Outcome::Unspecified => return Err(DecodeError::OutOfRange("outcome")),
    };
    Ok(AppendAnswer::Handled(response))
}

fn leader_vote_from_wire(wire: Option<internal::Vote>) -> Result<Vote, DecodeError> {
    let vote = vote_from_wire(wire)?;
    if !vote.committed {
        return Err(DecodeError::OutOfRange("vote.committed"));
    }
    Ok(vote)
}

pub(super) fn encode_vote_request(request: &VoteRequest<TypeConfig>) -> Bytes {
    let wire = internal::VoteRequest {
        vote: Some(vote_to_wire(&request.vote)),
        last_log_id: request.last_log_id.map(log_id_to_wire),
        leadership_transfer: request.leadership_transfer,
    };
    wire.encode_to_vec().into()
}

pub(super) fn decode_vote_request(bytes: Bytes) -> Result<VoteRequest<TypeConfig>, DecodeError> {
    let wire = internal::VoteRequest::decode(bytes)?;
    let vote = vote_from_wire(wire.vote)?;
    if vote.committed {
        return Err(DecodeError::OutOfRange("vote.committed"));
    }
    let mut request = VoteRequest::new(vote, wire.last_log_id.map(log_id_from_wire));
    request.leadership_transfer = wire.leadership_transfer;
    Ok(request)
}

pub(super) fn encode_vote_response(response: &VoteResponse<TypeConfig>) -> Bytes {
    let wire = internal::VoteResponse {
        vote: Some(vote_to_wire(&response.vote)),
        granted: response.vote_granted,
        last_log_id: response.last_log_id.map(log_id_to_wire),
    };
    wire.encode_to_vec().into()
}

pub(super) fn decode_vote_response(bytes: Bytes) -> Result<VoteResponse<TypeConfig>, DecodeError> {
    let wire = internal::VoteResponse::decode(bytes)?;
    Ok(VoteResponse {
        vote: vote_from_wire(wire.vote)?,
        vote_granted: wire.granted,
        last_log_id: wire.last_log_id.map(log_id_from_wire),
    })
}

/// A snapshot on its way: the leader's vote, what the snapshot covers, and its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SnapshotMessage {
    pub vote: Vote,
    pub last_log_id: Option<LogId>,
    pub membership: StoredMembership,
    pub data: Bytes,
}

pub(super) fn encode_snapshot_request(message: SnapshotMessage) -> Bytes {
    let wire = internal::SnapshotRequest {
        vote: Some(vote_to_wire(&message.vote)),
        last_log_id: message.last_log_id.map(log_id_to_wire),
        membership: Some(stored_membership_to_wire(&message.membership)),
        snapshot_id: String::new(),
        data: message.data,
    };
    wire.encode_to_vec().into()
}

/// Reads a snapshot. What openraft takes for granted is checked: a leader's vote, and a membership
/// that is part of what the snapshot covers.
pub(super) fn decode_snapshot_request(bytes: Bytes) -> Result<SnapshotMessage, DecodeError> {
    let wire = internal::SnapshotRequest::decode(bytes)?;
    let vote = leader_vote_from_wire(wire.vote)?;
    let last_log_id = wire.last_log_id.map(log_id_from_wire);
    let membership = wire.membership.ok_or(DecodeError::Missing("membership"))?;
    let membership = stored_membership_from_wire(&membership)?;
    if *membership.log_id() > last_log_id {
        return Err(DecodeError::OutOfRange("membership.log_id"));
    }
    if last_log_id.is_some_and(|last| last.leader_id.term > vote.leader_id.term) {
        return Err(DecodeError::OutOfRange("last_log_id"));
    }
    Ok(SnapshotMessage {
        vote,
        last_log_id,
        membership,
        data: wire.data,
    })
}

pub(super) fn encode_snapshot_response(response: &SnapshotResponse<TypeConfig>) -> Bytes {
    let wire = internal::SnapshotResponse {
        vote: Some(vote_to_wire(&response.vote)),
    };
    wire.encode_to_vec().into()
}

pub(super) fn decode_snapshot_response(
    bytes: Bytes,
) -> Result<SnapshotResponse<TypeConfig>, DecodeError> {
    let wire = internal::SnapshotResponse::decode(bytes)?;
    Ok(SnapshotResponse::new(vote_from_wire(wire.vote)?))
}

pub(super) fn encode_transfer_request(request: &TransferLeaderRequest<TypeConfig>) -> Bytes {
    let wire = internal::TransferRequest {
        from_leader: Some(vote_to_wire(request.from_leader())),
        to: *request.to_node_id(),
        last_log_id: request.last_log_id().copied().map(log_id_to_wire),
        has_last_log_id: request.last_log_id().is_some(),
    };
    wire.encode_to_vec().into()
}

pub(super) fn decode_transfer_request(
    bytes: Bytes,
) -> Result<TransferLeaderRequest<TypeConfig>, DecodeError> {
    let wire = internal::TransferRequest::decode(bytes)?;
    Ok(TransferLeaderRequest::new(
        vote_from_wire(wire.from_leader)?,
        wire.to,
        wire.last_log_id.map(log_id_from_wire),
    ))
}

pub(super) fn encode_transfer_response(response: &TransferLeaderResponse<TypeConfig>) -> Bytes {
    use internal::transfer_response::Outcome;
    let mut wire = internal::TransferResponse::default();
    match response {
        Ok(()) => wire.set_outcome(Outcome::Accepted),
        Err(TransferLeaderError::VoteChanged { expected, actual }) => {
            wire.set_outcome(Outcome::VoteChanged);
            wire.expected_vote = Some(vote_to_wire(expected));
            wire.actual_vote = Some(vote_to_wire(actual));
        }
        Err(TransferLeaderError::LogNotFlushed { expected, actual }) => {
            wire.set_outcome(Outcome::LogNotFlushed);
            wire.expected_log_id = expected.map(log_id_to_wire);
            wire.actual_log_id = actual.map(log_id_to_wire);
        }
    }
    wire.encode_to_vec().into()
}

pub(super) fn decode_transfer_response(
    bytes: Bytes,
) -> Result<TransferLeaderResponse<TypeConfig>, DecodeError> {
    use internal::transfer_response::Outcome;
    let wire = internal::TransferResponse::decode(bytes)?;
    Ok(match wire.outcome() {
        Outcome::Accepted => Ok(()),
        Outcome::VoteChanged => Err(TransferLeaderError::VoteChanged {
            expected: vote_from_wire(wire.expected_vote)?,
            actual: vote_from_wire(wire.actual_vote)?,
        }),
        Outcome::LogNotFlushed => Err(TransferLeaderError::LogNotFlushed {
            expected: wire.expected_log_id.map(log_id_from_wire),
            actual: wire.actual_log_id.map(log_id_from_wire),
        }),
        Outcome::Unspecified => return Err(DecodeError::OutOfRange("outcome")),
    })
}

#[cfg(test)]
mod tests;
