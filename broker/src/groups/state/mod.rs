//! The state of one partition of `__groups`: what its groups have agreed on.
//!
//! Pure and deterministic: a function of the log prefix alone (S13). Time is the broker time of the
//! entries, and nobody's session is known here: that members have expired is a command. Rules kept
//! here:
//!
//! - S26: a member is expired by id and epoch, so never one that has joined anew since.
//! - S27: a claim is given up together with its final offset; a successor under a stable name has
//!   the same claims under higher epochs, and only once the coordinator says whose place it takes;
//!   more partitions are another generation.
//! - A partition never has two holders, and claim epochs never fall while the group has members.
//! - A partition that the assignment gives to a member is held: by that member, or by the one that
//!   is still to give it up.
//! - Committed offsets go back by a reset only.
//!
//! A command is either carried out or refused whole; a commit, a release and a leave are judged item
//! by item. A refusal is a reply, not an error.
//!
//! | file | holds |
//! | --- | --- |
//! | [`group`] | one group: members come and go |
//! | [`members`] | members, and their seats |
//! | `assignment` | publishing, granting and releasing claims |
//! | `offsets` | commits, resets, sweeps |
//! | [`slots`] | what a group knows of a partition |
//! | [`command`] | commands and replies as they travel |
//! | `checkpoint` | the bytes of a checkpoint |
//! | `describe` | the messages that coordinators send |

mod assignment;
mod checkpoint;
pub mod command;
mod describe;
pub mod group;
pub mod members;
mod offsets;
pub mod slots;

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use qute_proto::group::check_name;
use qute_proto::internal::GroupsReply;
use qute_proto::internal::groups_command::Command;
use qute_proto::v1::ErrorCode;

use command::{Refusal, refuse};
pub use group::Group;
pub use members::{Member, Members, Subscription};
pub use slots::{Committed, Slot, Slots};

/// The entry that is being applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    /// Its Raft index.
    pub index: u64,
    /// Its broker time, Unix milliseconds.
    pub time_ms: u64,
}

/// What applying a command has led to.
#[derive(Debug, Default)]
pub struct Applied {
    /// For whoever proposed it.
    pub reply: GroupsReply,
    /// Groups whose revision has risen, or that have gone. A commit changes no revision.
    pub changed: Vec<Arc<str>>,
}

/// How much there is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Groups.
    pub groups: usize,
    /// Members of all groups.
    pub members: usize,
    /// Committed offsets of all groups.
    pub offsets: usize,
    /// Memory that they take, about.
    pub bytes: usize,
}

/// All groups of a partition, by name.
#[derive(Debug, Clone, Default)]
pub struct Groups {
    /// Boxed: nodes of the tree are half empty.
    groups: BTreeMap<Arc<str>, Box<Group>>,
    /// The greatest broker time applied.
    time_ms: u64,
    totals: Totals,
}

impl Groups {
    /// A group.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Group> {
        self.groups.get(name).map(|group| &**group)
    }

    /// All groups with names behind this one, in the order of their names; behind the empty name:
    /// all there are.
    pub fn iter_after<'a>(&'a self, name: &str) -> impl Iterator<Item = (&'a Arc<str>, &'a Group)> {
        let behind = (Bound::Excluded(name), Bound::Unbounded);
        let groups = self.groups.range::<str, _>(behind);
        groups.map(|(name, group)| (name, &**group))
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// How much there is. Kept, not counted.
    #[must_use]
    pub fn totals(&self) -> Totals {
        Totals {
            groups: self.groups.len(),
            ..self.totals
        }
    }

    /// The greatest broker time applied, Unix milliseconds.
    #[must_use]
    pub fn time_ms(&self) -> u64 {
        self.time_ms
    }

    /// Notes the broker time of an entry.
    pub fn advance(&mut self, time_ms: u64) {
        // S19: never falls.
        self.time_ms = self.time_ms.max(time_ms);
    }

    /// Carries a command out.
    pub fn apply(&mut self, at: At, command: Command) -> Applied {
        self.advance(at.time_ms);
        let at = At {
            time_ms: self.time_ms,
            ..at
        };
        let mut changed = Vec::new();
        let result = self.execute(at, command, &mut changed);
        Applied {
            reply: result.unwrap_or_else(Refusal::into_reply),
            changed,
        }
    }

    fn execute(
        &mut self,
        at: At,
        command: Command,
        changed: &mut Vec<Arc<str>>,
    ) -> Result<GroupsReply, Refusal> {
        match command {
            Command::Join(join) => {
                let name = join.join.as_ref().map_or("", |join| &join.group);
                self.edit_or_make(name, at, changed, |group| group.join(&join, at))
            }
            Command::Leave(it) => self.edit(&it.group, changed, |group| group.leave(&it, at)),
            Command::Expire(it) => {
                let done = self.edit(&it.group, changed, |group| Ok(group.expire(&it, at)));
                // A group that has gone has nobody to expire.
                Ok(done.unwrap_or_default())
            }
            Command::Subscribe(it) => {
                self.edit(&it.group, changed, |group| group.subscribe(&it, at))
            }
            Command::Publish(it) => self.edit(&it.group, changed, |group| group.publish(&it, at)),
            Command::Release(it) => self.edit(&it.group, changed, |group| group.release(&it, at)),
            Command::Commit(it) => {
                let commit = it.request.unwrap_or_default();
                if commit.member_id.is_empty() {
                    self.edit_or_make(&commit.group, at, changed, |group| {
                        group.commit(&commit, at)
                    })
                } else {
                    self.edit(&commit.group, changed, |group| group.commit(&commit, at))
                }
            }
            Command::Reset(it) => {
                let reset = it.request.unwrap_or_default();
                self.known(&reset.group)?;
                self.edit(&reset.group, changed, |group| group.reset(&reset, at))
            }
            Command::Remove(it) => self.remove(&it.group, changed),
            Command::Sweep(it) => {
                self.sweep(it.retention_ms, at, changed);
                Ok(GroupsReply::default())
            }
            Command::ForgetTopics(it) => {
                self.edit_all(changed, |group| {
                    group.forget_topics(&it, at);
                    true
                });
                Ok(GroupsReply::default())
            }
        }
    }

    /// Changes a group that is there.
    fn edit(
        &mut self,
        name: &str,
        changed: &mut Vec<Arc<str>>,
        change: impl FnOnce(&mut Group) -> Result<GroupsReply, Refusal>,
    ) -> Result<GroupsReply, Refusal> {
        let Some(group) = self.groups.get_mut(name) else {
            return refuse(
                ErrorCode::UnknownMember,
                format!("there is no group `{name}`, so it has no such member: join anew"),
            );
        };
        let before = Weight::of(group);
        let result = change(group);
        let after = Weight::of(group);
        let has_changed = before.revision != after.revision;
        self.totals.replace(&before, &after);
        if has_changed && let Some((name, _)) = self.groups.get_key_value(name) {
            changed.push(Arc::clone(name));
        }
        result
    }

    /// Changes a group, which is made if it is not there. One that holds nothing is not kept.
    fn edit_or_make(
        &mut self,
        name: &str,
        at: At,
        changed: &mut Vec<Arc<str>>,
        change: impl FnOnce(&mut Group) -> Result<GroupsReply, Refusal>,
    ) -> Result<GroupsReply, Refusal> {
        if self.groups.contains_key(name) {
            return self.edit(name, changed, change);
        }
        check_name(name)
            .map_err(|error| Refusal::new(ErrorCode::InvalidGroupName, error.to_string()))?;
        let mut group = Group::new(at);
        let result = change(&mut group);
        if !group.is_idle() {
            let name: Arc<str> = name.into();
            self.totals.replace(&Weight::default(), &Weight::of(&group));
            self.groups.insert(Arc::clone(&name), Box::new(group));
            changed.push(name);
        }
        result
    }

    /// Changes every group; those for which `change` says `false` go.
    fn edit_all(
        &mut self,
        changed: &mut Vec<Arc<str>>,
        mut change: impl FnMut(&mut Group) -> bool,
    ) {
        let totals = &mut self.totals;
        self.groups.retain(|name, group| {
            let before = Weight::of(group);
            let is_kept = change(group);
            let after = if is_kept {
                Weight::of(group)
            } else {
                Weight::default()
            };
            totals.replace(&before, &after);
            if before.revision != after.revision {
                changed.push(Arc::clone(name));
            }
            is_kept
        });
    }

    fn known(&self, name: &str) -> Result<&Group, Refusal> {
        self.get(name).ok_or_else(|| {
            Refusal::new(
                ErrorCode::UnknownGroup,
                format!("there is no group `{name}`"),
            )
        })
    }

    fn remove(&mut self, name: &str, changed: &mut Vec<Arc<str>>) -> Result<GroupsReply, Refusal> {
        let group = self.known(name)?;
        if !group.members.is_empty() {
            return refuse(
                ErrorCode::GroupNotEmpty,
                format!(
                    "group `{name}` has {} members: stop them first",
                    group.members.len()
                ),
            );
        }
        if let Some((name, group)) = self.groups.remove_entry(name) {
            self.totals.replace(&Weight::of(&group), &Weight::default());
            changed.push(name);
        }
        Ok(GroupsReply::default())
    }

    fn sweep(&mut self, retention_ms: u64, at: At, changed: &mut Vec<Arc<str>>) {
        self.edit_all(changed, |group| {
            group.sweep(retention_ms, at);
            !group.is_idle()
        });
    }
}

/// What a group adds to the totals, and its revision.
#[derive(Debug, Default)]
struct Weight {
    revision: u64,
    members: usize,
    offsets: usize,
    bytes: usize,
}

impl Weight {
    fn of(group: &Group) -> Self {
        Self {
            revision: group.revision,
            members: group.members.len(),
            offsets: group.slots.committed(),
            bytes: group.bytes(),
        }
    }
}

impl Totals {
    fn replace(&mut self, before: &Weight, after: &Weight) {
        let put = |sum: &mut usize, before: usize, after: usize| {
            *sum = sum.saturating_sub(before).saturating_add(after);
        };
        put(&mut self.members, before.members, after.members);
        put(&mut self.offsets, before.offsets, after.offsets);
        put(&mut self.bytes, before.bytes, after.bytes);
    }
}

#[cfg(test)]
mod tests;
