//! The `__cluster` state machine and what acts on it.
//!
//! | file | holds |
//! | --- | --- |
//! | [`facade`] | [`Controller`]: all of it put together, start to shutdown |
//! | `running` | the tasks of a member, in the order in which they start |
//! | [`forming`] | how a broker comes to belong to a cluster (S21) |
//! | [`state`] | the pure state machine over `ClusterCommand` |
//! | [`view`] | the immutable picture that it publishes |
//! | [`settings`] | topic settings: keys, values, defaults |
//! | [`placement`] | where replicas go: pure functions |
//! | [`groups_topic`] | `__groups`, made when it is first needed |
//! | [`topics`] | creating, growing and deleting topics at the leader |
//! | [`proposer`] | commands on their way to the leader |
//! | [`duties`] | what falls to the leader, and to members at their start |
//! | [`reconciler`] | opens, closes and deletes replicas as decided |
//! | [`hosting`] | the reconciler's seam to the layers that keep replicas |
//! | [`leaders`] | who leads which group, as heard of |
//! | [`contact`] | finding each other again after ports have changed |
//! | [`book`] | where brokers were last heard to be |
//! | [`health`] | the broker's time, space and replicas, as it tells them to whoever looks after it |
//! | `deleted` | topics known to be gone for good |
//! | [`calls`] | unary calls to other brokers, with deadlines |

pub mod book;
pub mod calls;
pub mod contact;
mod deleted;
pub mod duties;
pub mod facade;
pub mod forming;
pub mod groups_topic;
pub mod health;
pub mod hosting;
pub mod leaders;
pub mod placement;
pub mod proposer;
pub mod reconciler;
mod running;
pub mod settings;
pub mod state;
pub mod topics;
pub mod view;

pub use facade::{Controller, ControllerConfig, Foundation, StartError};
