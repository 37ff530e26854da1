//! The client's view of the cluster.
//!
//! | file | holds |
//! | --- | --- |
//! | `snapshot.rs` | [`Metadata`]: an immutable view, and the rules by which one replaces another |
//! | `cache.rs` | [`MetadataCache`]: the present view and its refresh |
//! | `single_flight.rs` | one refresh under way, however many ask |
//! | `upkeep.rs` | the tasks that keep it fresh: pushed views, refreshes on request and by age |
//! | `controller.rs` | [`ControllerRoute`]: the way to the leader of `__cluster` |

mod cache;
mod controller;
mod single_flight;
mod snapshot;
#[cfg(test)]
mod tests;
mod upkeep;

pub(crate) use cache::Incarnation;
pub(crate) use cache::MetadataCache;
pub(crate) use controller::ControllerRoute;
#[cfg(test)]
pub(crate) use snapshot::Broker;
pub(crate) use snapshot::{Leader, Metadata, Topic};
pub(crate) use upkeep::spawn_upkeep;
