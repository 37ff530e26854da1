//! Consumer groups: the `__groups` state machine, and the coordinators that lead its partitions.
//!
//! The broker keeps leases, clients do the thinking: an assignment is computed by a member. What is
//! replicated: members, generation, published assignment, claims, committed offsets. Sessions and
//! their deadlines are the coordinator's own (S26).
//!
//! | module | holds |
//! | --- | --- |
//! | [`state`] | groups, members, claims and offsets: pure |
//! | [`machine`] | the state machine of one `__groups` partition, and the view of its state |
//! | [`registry`] | [`registry::GroupReplicas`]: the replicas of `__groups` on this broker |
//! | [`replica`] | [`replica::GroupReplica`]: one of them: commands, confirmation, applied state |
//! | [`coordinator`] | [`coordinator::Coordinators`]: sessions, deadlines, expiry, whom to ask for an assignment |

pub mod coordinator;
pub mod machine;
pub mod registry;
pub mod replica;
pub mod state;

pub use coordinator::{Coordinator, Coordinators, Limits, Member, Seat};
pub use registry::GroupReplicas;
pub use replica::GroupReplica;
