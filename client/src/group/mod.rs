//! Consumer groups: several programs share the partitions of topics, and what they have done is kept as
//! committed offsets.
//!
//! | file | holds |
//! | --- | --- |
//! | `assignor/` | [`Assignor`]: who gets which partition (pure) |

mod assignor;

pub use assignor::{AssignInput, AssignMember, Assignment, Assignor};
pub use qute_proto::ids::{MemberId, PartitionId};
