//! The Qute broker: hosts Raft-replicated partition logs and gossips metadata.
//!
//! Each layer may use only those listed before it:
//!
//! | layer | holds |
//! | --- | --- |
//! | [`env`] | clock, randomness, file system: the outside world, one seam each |
//! | [`storage`] | segment files, index, recovery, flusher, tail cache; knows no Raft |
//! | [`raft`] | openraft adapters: log store, network, registry of groups |
//! | [`partition`] | one replica: append, read, state machine, producer state |
//! | [`gossip`] | foca over UDP: who is alive |
//! | [`controller`] | the `__cluster` state machine: topics, brokers, placement, reconciler |
//! | [`groups`] | consumer groups: the `__groups` state machine, sessions, coordinators |
//! | [`api`] | one file per gRPC service |
//! | [`http`] | `/metrics`, `/healthz`, `/readyz` |

pub mod api;
pub mod broker;
pub mod config;
pub mod controller;
pub mod env;
pub mod gossip;
pub mod groups;
pub mod http;
pub mod partition;
pub mod raft;
pub mod storage;
