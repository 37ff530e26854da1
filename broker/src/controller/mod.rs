//! The `__cluster` state machine and what acts on it.
//!
//! | file | holds |
//! | --- | --- |
//! | [`state`] | the pure state machine over `ClusterCommand` |
//! | [`view`] | the immutable picture that it publishes |
//! | [`settings`] | topic settings: keys, values, defaults |
//! | [`calls`] | unary calls to other brokers, with deadlines |
//! | [`book`] | where brokers were last heard to be |
//! | [`forming`] | how a broker comes to belong to a cluster (S21)
//! | [`placement`] | where replicas go: pure functions |

pub mod book;
pub mod calls;
pub mod forming;
pub mod placement;
pub mod settings;
pub mod state;
pub mod view;
