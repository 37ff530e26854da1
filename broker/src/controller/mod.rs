//! The `__cluster` state machine and what acts on it.
//!
//! | file | holds |
//! | --- | --- |
//! | [`reconciler`] | opens, closes and deletes replicas as decided |
//! | [`leaders`] | who leads which group, as heard of |
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
pub mod leaders;
pub mod placement;
pub mod reconciler;
pub mod settings;
pub mod state;
pub mod view;
