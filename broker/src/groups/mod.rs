//! Consumer groups: the `__groups` state machine, and the coordinators that lead its partitions.
//!
//! The broker keeps leases, clients do the thinking: an assignment is computed by a member. What is
//! replicated: members, generation, published assignment, claims, committed offsets. Sessions and
//! their deadlines are the coordinator's own (S26).

pub mod machine;
pub mod state;
