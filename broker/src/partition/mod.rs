//! One replica of one partition: what a Raft group means here.
//!
//! Owns: which batches may enter the log (idempotence, limits, order), what of it may be read
//! and when, the state that the log's prefix gives (producer table, log start). Does not own: how
//! the log is replicated ([`crate::raft`]) and stored ([`crate::storage`]), which replicas exist
//! (the controller says), and what travels to clients (the API).
//!
//! | module | holds |
//! | --- | --- |
//! | [`producers`] | the producer table, pure (S12) |
//! | [`machine`] | the records state machine: producer table, log start, checkpoint (S13) |
//! | [`intake`] | what a batch must be: header, checksum, limits; pure |
//! | [`ledger`] | the decisions of the door, pure (S11) |
//! | [`door`] | the one door for writes (S11); `door/keeper.rs` is its task, one per open replica |
//! | [`replica`] | [`replica::Replica`]: append, read, wait, list offsets (S18) |
//! | [`follower`] | the same of a replica that does not lead (S17, S18) |
//! | [`registry`] | [`registry::Replicas`]: what is open on this broker (S10, S22) |
//! | [`hosted`] | what the registries of all kinds of replicas have in common |
//! | [`directory`] | what this layer asks of the layers above |
//! | [`error`] | why a partition refused |

pub mod directory;
pub mod door;
pub mod error;
mod follower;
pub mod hosted;
pub mod intake;
pub mod ledger;
pub mod machine;
pub mod producers;
pub mod registry;
pub mod replica;
mod rounds;

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
