//! Consumer groups: several programs share the partitions of topics, and what they have done is kept as
//! committed offsets.
//!
//! | file | holds |
//! | --- | --- |
//! | `admin/` | [`GroupAdmin`]: groups from outside |
//! | `assignor/` | [`Assignor`]: who gets which partition (pure), and the default, [`StickyAssignor`] |
//! | `coordinator.rs` | the way to a group's coordinator |
//! | `subscription.rs` | which topics a member reads, by the latest view (pure) |
//! | `watermark.rs` | what has been acknowledged of a claimed partition (pure) |

mod admin;
mod assignor;
#[allow(dead_code, reason = "used by the parts to come")]
mod coordinator;
#[allow(dead_code, reason = "used by the parts to come")]
mod subscription;
#[allow(dead_code, reason = "used by the parts to come")]
mod watermark;

pub use admin::{
    AssignorName, CommittedOffset, GroupAdmin, GroupDescription, GroupListing, GroupMember,
    GroupPartition, GroupState, HeldClaim, OffsetCommit, OffsetMove, PartitionLag, PlannedReset,
    ResetPlan, ResetTo, SubscribedTopic,
};
pub use assignor::{AssignInput, AssignMember, Assignment, Assignor, StickyAssignor};
pub use qute_proto::ids::{MemberId, PartitionId};
