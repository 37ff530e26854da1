//! The client's view of the cluster.
//!
//! | file | holds |
//! | --- | --- |
//! | `snapshot.rs` | [`Metadata`]: an immutable view, and the rules by which one replaces another |
//! | `cache.rs` | [`MetadataCache`]: the present view, single-flight refresh, the watch task |

mod cache;
mod snapshot;

#[allow(unused_imports, reason = "adopted by producer and consumer")]
pub(crate) use cache::Incarnation;
pub(crate) use cache::{ControllerRoute, MetadataCache, spawn_watch};
pub(crate) use snapshot::{Leader, Metadata, Topic};
