//! Consumer groups: several programs share the partitions of topics, and what they have done is kept as
//! committed offsets.
//!
//! | file | holds |
//! | --- | --- |
//! | `admin/` | [`GroupAdmin`]: groups from outside |
//! | `assignor/` | [`Assignor`]: who gets which partition (pure), and the default, [`StickyAssignor`] |
//! | `coordinator.rs` | the way to a group's coordinator |
//! | `builder.rs` | [`GroupBuilder`]: how a group is read |
//! | `consumer.rs`, `event.rs`, `batch.rs` | [`GroupConsumer`]: what the program reads from, what it is told, what it acknowledges |
//! | `control.rs` | [`GroupControl`]: the handle beside the stream |
//! | `membership/` | what a member is, and what it may do now (pure; S26-S28) |
//! | `core.rs` | the membership as the program and the session's task share it |
//! | `session.rs`, `line.rs` | the task that keeps the session; the stream to the coordinator |
//! | `topics.rs` | the topics of a member: where claims begin, their readers |
//! | `commit.rs` | [`CommitMode`]; commits, one round at a time |
//! | `handler/` | [`RunPolicy`]: a function of the program called for each record |
//! | `subscription.rs` | which topics a member reads, by the latest view (pure) |
//! | `watermark.rs` | what has been acknowledged of a claimed partition (pure) |

mod admin;
mod assignor;
mod batch;
mod builder;
mod commit;
mod consumer;
mod control;
mod coordinator;
mod core;
mod event;
mod handler;
mod line;
mod membership;
mod session;
mod subscription;
mod topics;
mod watermark;

pub use admin::{
    AssignorName, CommittedOffset, GroupAdmin, GroupDescription, GroupListing, GroupMember,
    GroupPartition, GroupState, HeldClaim, OffsetCommit, OffsetMove, PartitionLag, PlannedReset,
    ResetPlan, ResetTo, SubscribedTopic,
};
pub use assignor::{AssignInput, AssignMember, Assignment, Assignor, StickyAssignor};
pub use batch::{Acker, GroupBatch, GroupRecord, GroupRecords};
pub use builder::GroupBuilder;
pub use commit::CommitMode;
pub use consumer::GroupConsumer;
pub use control::{GroupControl, GroupPosition};
pub use event::{
    Assigned, GroupEvent, GroupEvent as Event, Lost, LostReason, Revoking, TopicPartition,
};
pub use handler::{HandlerError, RunPolicy, RunReport};
pub use qute_proto::ids::{MemberId, PartitionId};
