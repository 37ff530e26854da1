//! One group: who belongs to it, and how members come and go.
//!
//! ```text
//!            join                publish                release
//!   EMPTY ----------> REBALANCING ------> (claims change hands) ------> STABLE
//!     ^               ^ join, leave, expire, other subscription           |
//!     |               +---------------------------------------------------+
//!     +-- the last member goes; offsets stay until they are swept
//! ```
//!
//! Each change of who is there or what they read raises the generation. The assignment of an older
//! generation stays in force for those that are still there until the next one is published, so
//! that nobody pauses.

use qute_proto::internal::{ExpireMembers, GroupsReply, JoinMember, LeaveMember, MemberEpoch};
use qute_proto::internal::{ForgetTopics, SubscribeMember};
use qute_proto::v1::{AssignorVersion, ErrorCode};

use super::At;
use super::command::{Refusal, refuse};
use super::members::{Member, Members, Seat, member_id, subscriptions, topic_id};
use super::slots::Slots;

/// One group.
#[derive(Debug, Clone, Default)]
pub struct Group {
    pub(super) generation: u64,
    pub(super) assigned_generation: u64,
    pub(super) revision: u64,
    /// Broker time at which the last member went; 0 while there are members.
    pub(super) empty_since_ms: u64,
    pub(super) members: Members,
    pub(super) slots: Slots,
}

impl Group {
    pub(super) fn new(at: At) -> Self {
        Self {
            revision: at.index,
            empty_since_ms: at.time_ms,
            ..Self::default()
        }
    }

    /// Rises whenever a member comes, goes or reads other topics.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The generation that the published assignment was made for; 0: there is none yet.
    #[must_use]
    pub fn assigned_generation(&self) -> u64 {
        self.assigned_generation
    }

    /// Raft index of the last entry that changed anything but offsets: it never goes back, not even
    /// for a group that was gone in between.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Broker time at which the last member went, Unix milliseconds; `None` while there are members.
    #[must_use]
    pub fn empty_since_ms(&self) -> Option<u64> {
        self.members.is_empty().then_some(self.empty_since_ms)
    }

    /// In order of joining.
    #[must_use]
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// What is known of each partition.
    #[must_use]
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// The member that has a stable name.
    #[must_use]
    pub fn instance(&self, instance: &str) -> Option<&Member> {
        self.members.of_instance(instance).map(|(_, member)| member)
    }

    /// What all members can compute assignments with: the first such of the oldest member's list.
    #[must_use]
    pub fn assignor(&self) -> Option<&AssignorVersion> {
        common_assignor(&self.members.iter().collect::<Vec<_>>())
    }

    /// Whether the group is worth keeping.
    pub(super) fn is_idle(&self) -> bool {
        self.members.is_empty() && self.slots.committed() == 0
    }

    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>() + self.members.bytes() + self.slots.bytes()
    }

    // Changes.

    pub(super) fn join(&mut self, join: &JoinMember, at: At) -> Result<GroupsReply, Refusal> {
        let wire = join.join.as_ref();
        let member = Member::from_join(wire.unwrap_or(&Default::default()))?;
        if let Some(seat) = self.members.seat_of(member.id) {
            return self.rejoin(seat, member, at);
        }
        let holder = self.members.of_instance(&member.instance);
        let predecessor = match holder {
            Some((seat, holder)) => {
                // S27: the coordinator names whom it may replace, once that session has ended.
                let epoch = join.replaces_epoch.unwrap_or(holder.epoch);
                if *join.replaces != *holder.id.0.as_bytes() || epoch != holder.epoch {
                    return Err(held(holder));
                }
                Some(seat)
            }
            None => None,
        };
        self.check_assignors(&member, predecessor)?;
        match predecessor {
            Some(seat) => self.sit_down(seat, member, at),
            None => {
                if self.members.add(member).is_none() {
                    return refuse(ErrorCode::GroupLimit, "the group has no place left");
                }
                self.empty_since_ms = 0;
                self.raise_generation(at);
            }
        }
        Ok(GroupsReply::default())
    }

    /// A member that is known: under a higher epoch all of its claims get new ones, so that what it
    /// had in flight is fenced. Under the same it is the same join again.
    fn rejoin(&mut self, seat: Seat, member: Member, at: At) -> Result<GroupsReply, Refusal> {
        let Some(known) = self.members.at(seat) else {
            return Ok(GroupsReply::default());
        };
        if member.epoch < known.epoch {
            return Err(superseded(known));
        }
        if member.instance != known.instance {
            return refuse(
                ErrorCode::InvalidArgument,
                format!(
                    "{} can't change its stable name to `{}`",
                    known.described(),
                    member.instance
                ),
            );
        }
        self.check_assignors(&member, Some(seat))?;
        if !member.says_the_same_as(known) {
            self.sit_down(seat, member, at);
        }
        Ok(GroupsReply::default())
    }

    /// Takes the seat of the member that is there, or takes it anew.
    fn sit_down(&mut self, seat: Seat, member: Member, at: At) {
        let Some(before) = self.members.at(seat) else {
            return;
        };
        let is_same = (before.id, before.epoch) == (member.id, member.epoch);
        let reads_the_same = before.topics == member.topics;
        self.members.replace(seat, member);
        if !is_same {
            // S27: what was in flight under the old epochs is fenced from here on.
            let held = |slot: &super::Slot| slot.holder == Some(seat);
            for (_, slot) in self.slots.iter_mut().filter(|(_, slot)| held(slot)) {
                slot.raise_epoch();
            }
        }
        self.touch(seat, at);
        if !reads_the_same {
            self.subscription_changed(seat, at);
        }
    }

    /// Each of the members must be able to compute what each other one computes.
    fn check_assignors(&self, joining: &Member, replaced: Option<Seat>) -> Result<(), Refusal> {
        // In the place of the one replaced, since the oldest one's list decides.
        let mut others: Vec<&Member> = Vec::with_capacity(self.members.len() + 1);
        let mut is_placed = false;
        for (seat, member) in self.members.seated() {
            let is_replaced = Some(seat) == replaced;
            is_placed |= is_replaced;
            others.push(if is_replaced { joining } else { member });
        }
        if !is_placed {
            others.push(joining);
        }
        if common_assignor(&others).is_some() {
            return Ok(());
        }
        others.retain(|member| member.id != joining.id);
        let present = match common_assignor(&others) {
            Some(one) => described([one]),
            None => "nothing in common".to_owned(),
        };
        let lacking = others.iter().find(|other| {
            let mut offered = other.assignors.iter();
            !offered.any(|one| joining.assignors.contains(one))
        });
        let whom = match lacking {
            Some(other) => format!(
                "{} offers {}",
                other.described(),
                described(&other.assignors)
            ),
            None => format!("the {} members have {present} in common", others.len()),
        };
        refuse(
            ErrorCode::InconsistentAssignor,
            format!(
                "no assignor in common: {} offers {}, {whom}; give all members of the group a \
                 version of one assignor that they share",
                joining.described(),
                described(&joining.assignors),
            ),
        )
    }

    pub(super) fn leave(&mut self, leave: &LeaveMember, at: At) -> Result<GroupsReply, Refusal> {
        let seat = self.member(&leave.member_id, leave.member_epoch)?;
        let claims = leave.claims.iter();
        let offsets = claims
            .map(|claim| self.give_up(seat, claim, at))
            .map(|done| done.unwrap_or_else(Refusal::into_item))
            .collect();
        self.remove_members(&[seat], at);
        Ok(GroupsReply {
            offsets,
            ..GroupsReply::default()
        })
    }

    /// S26: by id and epoch, so that it never hits a member that has joined anew since.
    pub(super) fn expire(&mut self, expire: &ExpireMembers, at: At) -> GroupsReply {
        let expired = |it: &MemberEpoch| self.member(&it.member_id, it.member_epoch).ok();
        let mut seats: Vec<Seat> = expire.members.iter().filter_map(expired).collect();
        seats.sort_unstable();
        seats.dedup();
        self.remove_members(&seats, at);
        GroupsReply::default()
    }

    /// In the order of their seats.
    fn remove_members(&mut self, seats: &[Seat], at: At) {
        if seats.is_empty() {
            return;
        }
        let is_gone = |seat: Option<Seat>| seat.is_some_and(|it| seats.binary_search(&it).is_ok());
        for (_, slot) in self.slots.iter_mut() {
            if is_gone(slot.holder) {
                slot.holder = None;
            }
            if is_gone(slot.target) {
                slot.target = None;
            }
        }
        for seat in seats {
            self.members.remove(*seat);
        }
        if self.members.is_empty() {
            self.empty_since_ms = at.time_ms;
        }
        self.raise_generation(at);
        self.grant_all(at);
    }

    pub(super) fn subscribe(
        &mut self,
        subscribe: &SubscribeMember,
        at: At,
    ) -> Result<GroupsReply, Refusal> {
        let seat = self.member(&subscribe.member_id, subscribe.member_epoch)?;
        let topics = subscriptions(&subscribe.topics)?;
        if self.members.set_topics(seat, topics) {
            self.subscription_changed(seat, at);
        }
        Ok(GroupsReply::default())
    }

    /// What a member no longer reads is no target of it any more: it gives those claims up. S27:
    /// more partitions are another subscription, too.
    fn subscription_changed(&mut self, seat: Seat, at: At) {
        let Some(member) = self.members.at(seat) else {
            return;
        };
        for (topic, slot) in self.slots.iter_mut() {
            if slot.target == Some(seat) && !member.reads(topic) {
                slot.target = None;
            }
        }
        self.raise_generation(at);
    }

    /// Topics that are gone: whoever assigns next must not bring them back.
    pub(super) fn forget_topics(&mut self, forget: &ForgetTopics, at: At) {
        let gone = forget.topic_ids.iter();
        let gone: Vec<_> = gone.filter_map(|id| topic_id(id).ok()).collect();
        let is_read = self.members.retain_topics(|one| !gone.contains(&one.topic));
        let is_known = gone.iter().any(|topic| self.slots.has_topic(*topic));
        if is_known {
            self.slots.retain(|topic, _| !gone.contains(&topic));
        }
        if is_read {
            self.raise_generation(at);
        } else if is_known {
            self.touch_all(at);
        }
    }

    /// The seat of a member of that very epoch.
    pub(super) fn member(&self, id: &[u8], epoch: u64) -> Result<Seat, Refusal> {
        let id = member_id(id)?;
        let Some(seat) = self.members.seat_of(id) else {
            return Err(unknown_member(&id.to_string()));
        };
        match self.members.at(seat) {
            Some(member) if member.epoch == epoch => Ok(seat),
            Some(member) if member.epoch > epoch => Err(superseded(member)),
            _ => Err(unknown_member(&format!("{id} at epoch {epoch}"))),
        }
    }

    fn raise_generation(&mut self, at: At) {
        self.generation = self.generation.saturating_add(1);
        self.touch_all(at);
    }

    /// Notes a change that concerns one member.
    pub(super) fn touch(&mut self, seat: Seat, at: At) {
        self.revision = at.index;
        self.members.touch(seat, at.index);
    }

    /// Notes a change that concerns all.
    pub(super) fn touch_all(&mut self, at: At) {
        self.revision = at.index;
        self.members.touch_all(at.index);
    }
}

fn common_assignor<'a>(members: &[&'a Member]) -> Option<&'a AssignorVersion> {
    let (oldest, others) = members.split_first()?;
    let by_all = |one: &&AssignorVersion| others.iter().all(|it| it.assignors.contains(one));
    oldest.assignors.iter().find(by_all)
}

fn described<'a>(assignors: impl IntoIterator<Item = &'a AssignorVersion>) -> String {
    let one = |it: &AssignorVersion| format!("`{}` version {}", it.name, it.version);
    let all: Vec<_> = assignors.into_iter().map(one).collect();
    all.join(", ")
}

pub(super) fn unknown_member(who: &str) -> Refusal {
    Refusal::new(
        ErrorCode::UnknownMember,
        format!("the group has no member {who}: it has expired or left; join anew"),
    )
}

fn superseded(known: &Member) -> Refusal {
    Refusal::new(
        ErrorCode::UnknownMember,
        format!(
            "{} has joined anew at epoch {}: this membership is over",
            known.described(),
            known.epoch
        ),
    )
}

fn held(holder: &Member) -> Refusal {
    let refusal = Refusal::new(
        ErrorCode::NotReady,
        format!(
            "the stable name is that of {}, whose session has not ended",
            holder.described()
        ),
    );
    refusal.held_by(MemberEpoch {
        member_id: holder.id.to_wire(),
        member_epoch: holder.epoch,
    })
}
