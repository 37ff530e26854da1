//! The published assignment, and the claims that follow from it.
//!
//! A claim is granted in one place, [`Slot::grant`](super::Slot): when a partition is in the
//! assignment and nobody holds it. It is given up by its holder ([`Group::release`], leaving), or
//! taken with its holder's membership; in between it only changes its epoch.

use std::collections::BTreeMap;

use qute_proto::ids::TopicId;
use qute_proto::internal::{GroupsReply, PublishAssignment, ReleaseClaims};
use qute_proto::v1::{ClaimRelease, ErrorCode, OffsetCommitted};

use super::At;
use super::command::{Refusal, refuse};
use super::group::{Group, unknown_member};
use super::members::{Seat, member_id, topic_id};
use super::offsets::{advance, check_offset, fenced};
use super::slots::{Committed, Entry};

/// Partitions that a group knows, at most. Those that were ever assigned are kept while there are
/// members, for their epochs: this bounds what a member can make up.
const KNOWN_MAX: usize = 200_000;

impl Group {
    /// Compare-and-set: for the present generation, and only the first.
    pub(super) fn publish(
        &mut self,
        publish: &PublishAssignment,
        at: At,
    ) -> Result<GroupsReply, Refusal> {
        let publisher = member_id(&publish.member_id)?;
        if self.members.get(publisher).is_none() {
            return Err(unknown_member(&publisher.to_string()));
        }
        if publish.generation != self.generation {
            return refuse(
                ErrorCode::StaleGeneration,
                format!(
                    "the assignment is for generation {}, the group is at {}",
                    publish.generation, self.generation
                ),
            );
        }
        if self.assigned_generation == self.generation {
            return refuse(
                ErrorCode::StaleGeneration,
                format!("generation {} has its assignment", self.generation),
            );
        }
        let targets = self.check_assignment(publish)?;
        for (_, slot) in self.slots.iter_mut() {
            slot.target = None;
        }
        for (topic, partition, seat) in targets {
            if let Some(known) = self.slots.known(topic, partition) {
                known.slot.target = Some(seat);
            }
        }
        self.assigned_generation = self.generation;
        self.touch_all(at);
        self.grant_all(at);
        Ok(GroupsReply::default())
    }

    /// Members only, and partitions that they read, each once: else it is refused whole.
    fn check_assignment(
        &self,
        publish: &PublishAssignment,
    ) -> Result<Vec<(TopicId, u32, Seat)>, Refusal> {
        let counts = self.partition_counts();
        let mut targets = Vec::new();
        for one in &publish.assignment {
            let id = member_id(&one.member_id)?;
            let Some(seat) = self.members.seat_of(id) else {
                return refuse(
                    ErrorCode::InvalidArgument,
                    format!("the assignment names {id}, which is no member"),
                );
            };
            for partitions in &one.partitions {
                let topic = topic_id(&partitions.topic_id)?;
                if !self.members.get(id).is_some_and(|it| it.reads(topic)) {
                    return refuse(
                        ErrorCode::InvalidArgument,
                        format!("the assignment gives {id} topic {topic}, which it does not read"),
                    );
                }
                let count = counts.get(&topic).copied().unwrap_or(0);
                if let Some(beyond) = partitions.partitions.iter().find(|it| **it >= count) {
                    return refuse(
                        ErrorCode::InvalidArgument,
                        format!(
                            "the assignment gives {id} partition {beyond} of topic {topic}, and \
                             no member knows of more than {count}"
                        ),
                    );
                }
                let those = partitions.partitions.iter();
                targets.extend(those.map(|partition| (topic, *partition, seat)));
            }
        }
        targets.sort_unstable();
        let is_twice = |[a, b]: &&[(TopicId, u32, Seat); 2]| (a.0, a.1) == (b.0, b.1);
        if let Some([twice, _]) = targets.array_windows().find(is_twice) {
            return refuse(
                ErrorCode::InvalidArgument,
                format!(
                    "the assignment names partition {} of topic {} twice",
                    twice.1, twice.0
                ),
            );
        }
        let is_new = |it: &&(TopicId, u32, Seat)| self.slots.get(it.0, it.1).is_none();
        let known = self.slots.len() + targets.iter().filter(is_new).count();
        if known > KNOWN_MAX {
            return refuse(
                ErrorCode::GroupLimit,
                format!("the group would know {known} partitions, {KNOWN_MAX} are allowed"),
            );
        }
        Ok(targets)
    }

    /// As many as the best informed member knows of: whoever assigns may know more than the one
    /// that is assigned to.
    fn partition_counts(&self) -> BTreeMap<TopicId, u32> {
        let mut counts = BTreeMap::new();
        for one in self.members.iter().flat_map(|member| &member.topics) {
            let count = counts.entry(one.topic).or_insert(0);
            *count = one.partitions.max(*count);
        }
        counts
    }

    pub(super) fn release(
        &mut self,
        release: &ReleaseClaims,
        at: At,
    ) -> Result<GroupsReply, Refusal> {
        let seat = self.member(&release.member_id, release.member_epoch)?;
        let mut offsets = Vec::with_capacity(release.claims.len());
        for claim in &release.claims {
            let done = self.give_up(seat, claim, at);
            if done.is_ok() {
                self.grant(claim, at);
            }
            offsets.push(done.unwrap_or_else(Refusal::into_item));
        }
        Ok(GroupsReply {
            offsets,
            ..GroupsReply::default()
        })
    }

    /// S27: the final offset and the end of the claim are one step. Nobody has the claim then.
    pub(super) fn give_up(
        &mut self,
        seat: Seat,
        claim: &ClaimRelease,
        at: At,
    ) -> Result<OffsetCommitted, Refusal> {
        let topic = topic_id(&claim.topic_id)?;
        let held = self.held(seat, topic, claim.partition, claim.claim_epoch)?;
        let in_force = held.slot.committed().map_or(0, |it| it.offset);
        let offset = match claim.offset {
            Some(offset) => {
                check_offset(offset)?;
                held.slot.holder = None;
                advance(
                    held,
                    &Committed {
                        offset,
                        leader_epoch: claim.leader_epoch,
                        time_ms: at.time_ms,
                        metadata: &claim.metadata,
                    },
                )
            }
            None => {
                held.slot.holder = None;
                in_force
            }
        };
        self.touch(seat, at);
        Ok(OffsetCommitted {
            offset,
            error: None,
        })
    }

    /// What a member holds a claim of, at its present epoch.
    pub(super) fn held(
        &mut self,
        seat: Seat,
        topic: TopicId,
        partition: u32,
        epoch: u64,
    ) -> Result<Entry<'_>, Refusal> {
        match self.slots.entry(topic, partition) {
            Some(it) if it.slot.holder == Some(seat) && it.slot.claim_epoch == epoch => Ok(it),
            it => Err(fenced(topic, partition, epoch, it.map(|it| &*it.slot))),
        }
    }

    fn grant(&mut self, claim: &ClaimRelease, at: At) {
        let Ok(topic) = topic_id(&claim.topic_id) else {
            return;
        };
        let slot = self.slots.get_mut(topic, claim.partition);
        if let Some(seat) = slot.and_then(super::Slot::grant) {
            self.touch(seat, at);
        }
    }

    /// Whoever is to have what nobody holds gets it.
    pub(super) fn grant_all(&mut self, at: At) {
        let granted = self.slots.iter_mut().filter_map(|(_, slot)| slot.grant());
        let mut granted: Vec<Seat> = granted.collect();
        granted.sort_unstable();
        granted.dedup();
        for seat in granted {
            self.touch(seat, at);
        }
    }
}
