//! Raft: openraft behind one module.
//!
//! | module | holds |
//! | --- | --- |
//! | [`types`] | the one type config of all groups, [`GroupId`], [`Payload`], [`Applied`] |
//! | [`codec`] | openraft messages <-> `qute_proto::internal` messages; never panics |
//! | [`state_machine`] | [`StateMachine`]: the pure trait that sits on a group |
//! | [`machine`] | `RaftStateMachine` over [`StateMachine`]: apply, checkpoints, snapshots |
//! | [`proposal`] | writing: admission, proposal, outcome |
//! | [`group`] | [`GroupHandle`]: propose, confirm, initialize, watch |

pub mod codec;
pub mod group;
pub mod machine;
pub mod proposal;
pub mod state_machine;
pub mod types;

pub use group::{
    AppliedMark, CommandError, ConfirmError, Confirmed, GroupHandle, Leader, Leadership,
    LeadershipWatch, MembersError,
};
pub use proposal::{Admission, Proposal, ProposalError, ProposeError};
pub use state_machine::{AppliedEntry, EntryKind, RestoreError, StateMachine};
pub use types::{Applied, GroupId, Metrics, Payload, PayloadKind, ReplicaNode};
