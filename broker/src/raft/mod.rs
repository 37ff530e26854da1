//! Raft: openraft behind one module.
//!
//! | module | holds |
//! | --- | --- |
//! | [`types`] | the one type config of all groups, [`GroupId`], [`Payload`], [`Applied`] |
//! | [`state_machine`] | [`StateMachine`]: the pure trait that sits on a group |
//! | [`groups`] | [`Groups`]: opens, closes and finds the replicas of this broker |
//! | [`group`] | [`GroupHandle`]: who leads, how far applied, confirm, members |
//! | [`proposal`] | writing: admission, proposal, outcome |
//! | [`log_store`] | `RaftLogStorage` over [`crate::storage::Log`]: one write per byte |
//! | [`machine`] | `RaftStateMachine` over [`StateMachine`]: apply, checkpoints, snapshots |
//! | `checkpoint` | the envelope around a state machine's checkpoint |
//! | `cut` | cuts the logs that nobody reads once a checkpoint covers them |
//! | [`network`] | `RaftNetworkV2` over the lanes |
//! | [`peers`] | the other brokers and the lanes to them |
//! | [`identity`] | whether a peer is who it says it is (S23) |
//! | [`lane`] | one outgoing peer stream: hello, pipelining, reconnect |
//! | `queue` | frames waiting for a stream, packed into messages |
//! | [`server`] | the incoming side of a peer stream |
//! | `inbound` | one replica's queue of appends from its leader |
//! | `codec` | openraft messages <-> `qute_proto::internal` messages; never panics |
//!
//! The journey of a record: `partition` admits and proposes a batch ([`proposal`]), openraft
//! appends it through [`log_store`] and hands it to [`network`], which sends it down the data
//! [`lane`] of each follower; there [`server`] puts it into the replica's `inbound` queue, whose
//! task reserves space (S4) and hands it to that replica's openraft, and so to its [`log_store`].
//! The answer comes back when the follower has synced. A quorum of syncs commits it, [`machine`]
//! applies it, the applied watch moves, and the proposal resolves.

mod checkpoint;
mod codec;
mod contact;
mod cut;
pub mod group;
pub mod groups;
pub mod identity;
mod inbound;
pub mod lane;
pub mod log_store;
pub mod machine;
pub mod network;
pub mod peers;
pub mod proposal;
mod queue;
pub mod server;
pub mod state_machine;
pub mod types;

pub use group::{
    AppliedMark, CommandError, ConfirmError, Confirmed, GroupHandle, Leader, Leadership,
    LeadershipWatch, MembersError,
};
pub use groups::{GroupSpec, Groups, GroupsConfig, LogUse, OpenError};
pub use identity::{Identity, Refusal};
pub use peers::{HintSink, Peers};
pub use proposal::{Admission, Proposal, ProposalError, ProposeError};
pub use server::PeerAnswers;
pub use state_machine::{AppliedEntry, EntryKind, RestoreError, StateMachine};
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

pub use types::{Applied, GroupId, Metrics, Payload, PayloadKind, ReplicaNode};
