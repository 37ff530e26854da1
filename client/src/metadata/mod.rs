//! The client's view of the cluster.
//!
//! | file | holds |
//! | --- | --- |
//! | `snapshot.rs` | [`Metadata`]: an immutable view, and the rules by which one replaces another |
//! | `cache.rs` | [`MetadataCache`]: the present view, single-flight refresh, the watch task |

mod cache;
mod snapshot;

pub(crate) use cache::{ControllerRoute, MetadataCache, spawn_watch};
pub(crate) use snapshot::{Leader, Topic};
