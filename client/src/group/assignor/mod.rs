//! [`Assignor`]: who gets which partition. Pure.
//!
//! The coordinator asks one member to compute the assignment of a generation, by the best assignor that
//! all members have. Whichever member computes it must come to the same result, so an assignor sees
//! nothing but its input, and carries a version: members with another one can't share its group.
//!
//! | file | holds |
//! | --- | --- |
//! | `sticky.rs` | [`StickyAssignor`], the default |
//! | `board.rs` | who has what while it is computed |
//! | `balance.rs` | loads as even as can be |
//! | `near.rs` | partitions near their readers |
//! | `wire.rs` | tasks and assignments as they travel |

mod balance;
mod board;
mod near;
#[cfg(test)]
mod properties;
mod sticky;
pub(super) mod wire;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use qute_proto::ids::{MemberId, PartitionId, TopicId};

pub use sticky::StickyAssignor;

/// Computes the assignment of a group.
///
/// # Contract
/// - Pure: the result depends on nothing but the input (no clock, no dice).
/// - A partition has one owner at most, a member that reads it ([`AssignMember::reads`]); the broker
///   refuses anything else as a whole.
/// - Whatever changes the result for some input raises [`Assignor::version`].
///
/// ```
/// use std::sync::Arc;
/// use qute_client::group::{AssignInput, Assignment, Assignor};
///
/// /// Everything to the member that has been there the longest.
/// struct OneForAll;
///
/// impl Assignor for OneForAll {
///     fn name(&self) -> &str {
///         "one-for-all"
///     }
///
///     fn version(&self) -> u32 {
///         1
///     }
///
///     fn assign(&self, input: &AssignInput) -> Assignment {
///         let mut assignment = Assignment::default();
///         if let Some(member) = input.members.first() {
///             for partition in input.partitions().filter(|&partition| member.reads(partition)) {
///                 assignment.give(member.id, partition);
///             }
///         }
///         assignment
///     }
/// }
///
/// # fn main() {
/// let assignor: Arc<dyn Assignor> = Arc::new(OneForAll);
/// assert!(assignor.assign(&AssignInput::default()).owners.is_empty());
/// # }
/// ```
pub trait Assignor: Send + Sync + 'static {
    /// Its name: 1 to 249 bytes. Members agree on an assignor by name and version.
    fn name(&self) -> &str;

    /// Rises with every change of what it computes.
    fn version(&self) -> u32;

    /// Who gets what. Must not panic.
    fn assign(&self, input: &AssignInput) -> Assignment;
}

/// What an assignment is computed from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AssignInput {
    /// The members, in the order in which they joined.
    pub members: Vec<AssignMember>,
    /// Of each topic, by partition: the racks of the brokers that have a replica. May lack topics and
    /// partitions: nothing is known of those.
    pub racks: BTreeMap<TopicId, Vec<BTreeSet<String>>>,
}

/// A member of a group, as its assignor sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AssignMember {
    /// Its id.
    pub id: MemberId,
    /// Its stable name, if it is static.
    pub instance: Option<String>,
    /// Its rack; empty: unknown.
    pub rack: String,
    /// The topics that it reads, with the number of partitions that it knows of.
    pub topics: BTreeMap<TopicId, u32>,
    /// What the assignment in force gives to it.
    pub targets: Vec<PartitionId>,
    /// What it holds.
    pub claims: Vec<PartitionId>,
}

impl AssignInput {
    /// The members in the order in which they joined; nothing is known of racks.
    #[must_use]
    pub fn new(members: Vec<AssignMember>) -> Self {
        Self {
            members,
            racks: BTreeMap::new(),
        }
    }

    /// All partitions that a member reads, each once, in order.
    pub fn partitions(&self) -> impl Iterator<Item = PartitionId> {
        let mut counts = BTreeMap::<TopicId, u32>::new();
        for member in &self.members {
            for (&topic, &partitions) in &member.topics {
                let count = counts.entry(topic).or_default();
                *count = partitions.max(*count);
            }
        }
        counts.into_iter().flat_map(|(topic, partitions)| {
            (0..partitions).map(move |partition| PartitionId { topic, partition })
        })
    }
}

impl AssignMember {
    /// A member that reads nothing and has nothing.
    #[must_use]
    pub fn new(id: MemberId) -> Self {
        Self {
            id,
            instance: None,
            rack: String::new(),
            topics: BTreeMap::new(),
            targets: Vec::new(),
            claims: Vec::new(),
        }
    }

    /// Whether the partition may be given to it.
    #[must_use]
    pub fn reads(&self, partition: PartitionId) -> bool {
        let known = self.topics.get(&partition.topic);
        known.is_some_and(|&partitions| partition.partition < partitions)
    }
}

/// Who gets what.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Assignment {
    /// The owner of each partition.
    pub owners: BTreeMap<PartitionId, MemberId>,
}

impl Assignment {
    /// Gives a partition to a member, and takes it from whoever had it.
    pub fn give(&mut self, member: MemberId, partition: PartitionId) {
        self.owners.insert(partition, member);
    }

    /// What one member gets, in order.
    pub fn of(&self, member: MemberId) -> impl Iterator<Item = PartitionId> {
        let its = move |(&partition, &owner): (&PartitionId, &MemberId)| {
            (owner == member).then_some(partition)
        };
        self.owners.iter().filter_map(its)
    }
}

impl fmt::Debug for Assignment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut by_member = BTreeMap::<MemberId, Vec<PartitionId>>::new();
        for (&partition, &owner) in &self.owners {
            by_member.entry(owner).or_default().push(partition);
        }
        f.debug_map().entries(by_member).finish()
    }
}
