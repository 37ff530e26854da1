//! A group in the words of the wire: updates for members, descriptions for people.

use qute_proto::ids::{MemberId, TopicId};
use qute_proto::v1::{
    AssignTask, Claim, CommittedOffset, DescribeGroupResponse, GroupListing, GroupMember,
    GroupState, GroupUpdate, HeldClaim, TopicPartitions, TopicSubscription,
};

use super::group::Group;
use super::members::{Member, Seat};
use super::slots::Slot;

impl Group {
    /// What concerns a member, `assign` left out; `None`: it is no member. Looks at each partition
    /// of the group.
    #[must_use]
    pub fn update_for(&self, member: MemberId) -> Option<GroupUpdate> {
        let seat = self.members.seat_of(member)?;
        let mut targets = Vec::new();
        let mut claims = Vec::new();
        for (topic, slot) in self.slots.iter() {
            if slot.target == Some(seat) {
                push(&mut targets, topic, slot.partition());
            }
            if slot.holder == Some(seat) {
                claims.push(Claim {
                    topic_id: topic.to_wire(),
                    partition: slot.partition(),
                    claim_epoch: slot.claim_epoch,
                    committed: committed_to_wire(topic, slot),
                });
            }
        }
        Some(GroupUpdate {
            revision: self.revision,
            generation: self.generation,
            assigned_generation: self.assigned_generation,
            targets,
            claims,
            assign: None,
        })
    }

    /// Members that are concerned by what has changed after a revision, in order of joining.
    pub fn concerned_since(&self, revision: u64) -> impl Iterator<Item = MemberId> {
        let members = self.members.iter();
        members
            .filter(move |member| member.revision > revision)
            .map(|member| member.id)
    }

    /// Whether the present generation still wants an assignment.
    #[must_use]
    pub fn wants_assignment(&self) -> bool {
        !self.members.is_empty() && self.assigned_generation != self.generation
    }

    /// What computing the assignment of the present generation takes; `None` without members.
    #[must_use]
    pub fn assign_task(&self) -> Option<AssignTask> {
        Some(AssignTask {
            generation: self.generation,
            assignor: Some(self.assignor()?.clone()),
            members: self.members_to_wire(),
        })
    }

    /// Where the group stands. Looks at each partition.
    #[must_use]
    pub fn state(&self) -> GroupState {
        let is_moving = |slot: &Slot| slot.holder.is_some() && slot.holder != slot.target;
        if self.members.is_empty() {
            GroupState::Empty
        } else if self.wants_assignment() || self.slots.iter().any(|(_, slot)| is_moving(slot)) {
            GroupState::Rebalancing
        } else {
            GroupState::Stable
        }
    }

    /// A line of a list.
    #[must_use]
    pub fn listing(&self, name: &str) -> GroupListing {
        GroupListing {
            group: name.to_owned(),
            state: self.state().into(),
            members: count(self.members.len()),
            offsets: count(self.slots.committed()),
            generation: self.generation,
            assignor: self.assignor().cloned(),
        }
    }

    /// All there is; the coordinator adds who it is.
    #[must_use]
    pub fn describe(&self, name: &str) -> DescribeGroupResponse {
        let held = |(topic, slot): (TopicId, &Slot)| {
            let holder = self.members.at(slot.holder?)?;
            Some(HeldClaim {
                topic_id: topic.to_wire(),
                partition: slot.partition(),
                claim_epoch: slot.claim_epoch,
                member_id: holder.id.to_wire(),
            })
        };
        DescribeGroupResponse {
            group: Some(self.listing(name)),
            members: self.members_to_wire(),
            claims: self.slots.iter().filter_map(held).collect(),
            offsets: self.offsets().collect(),
            ..DescribeGroupResponse::default()
        }
    }

    /// All committed offsets, by topic id and partition.
    pub fn offsets(&self) -> impl Iterator<Item = CommittedOffset> {
        let slots = self.slots.iter();
        slots.filter_map(|(topic, slot)| committed_to_wire(topic, slot))
    }

    /// The committed offset of one partition.
    #[must_use]
    pub fn offset(&self, topic: TopicId, partition: u32) -> Option<CommittedOffset> {
        committed_to_wire(topic, self.slots.get(topic, partition)?)
    }

    fn members_to_wire(&self) -> Vec<GroupMember> {
        let mut targets = self.by_seat(|slot| slot.target);
        let mut claims = self.by_seat(|slot| slot.holder);
        let mut take = |seat: Seat| {
            let taken = |lists: &mut Vec<Vec<TopicPartitions>>| {
                let list = lists.get_mut(seat.index());
                list.map(std::mem::take).unwrap_or_default()
            };
            (taken(&mut targets), taken(&mut claims))
        };
        let members = self.members.seated();
        members
            .map(|(seat, member)| {
                let (targets, claims) = take(seat);
                GroupMember {
                    targets,
                    claims,
                    ..member_to_wire(member)
                }
            })
            .collect()
    }

    /// Partitions, by the index of the seat that `of` says.
    fn by_seat(&self, of: impl Fn(&Slot) -> Option<Seat>) -> Vec<Vec<TopicPartitions>> {
        let mut lists = vec![Vec::new(); self.members.seats()];
        for (topic, slot) in self.slots.iter() {
            if let Some(list) = of(slot).and_then(|seat| lists.get_mut(seat.index())) {
                push(list, topic, slot.partition());
            }
        }
        lists
    }
}

fn push(list: &mut Vec<TopicPartitions>, topic: TopicId, partition: u32) {
    match list.last_mut() {
        Some(last) if *last.topic_id == *topic.0.as_bytes() => last.partitions.push(partition),
        _ => list.push(TopicPartitions {
            topic_id: topic.to_wire(),
            partitions: vec![partition],
        }),
    }
}

fn member_to_wire(member: &Member) -> GroupMember {
    let subscription = |one: &super::Subscription| TopicSubscription {
        topic_id: one.topic.to_wire(),
        partitions: one.partitions,
    };
    GroupMember {
        member_id: member.id.to_wire(),
        instance: member.instance.to_string(),
        rack: member.rack.to_string(),
        client: member.client.to_string(),
        assignors: member.assignors.clone(),
        topics: member.topics.iter().map(subscription).collect(),
        session_timeout_ms: member.session_timeout_ms,
        targets: Vec::new(),
        claims: Vec::new(),
    }
}

fn committed_to_wire(topic: TopicId, slot: &Slot) -> Option<CommittedOffset> {
    let committed = slot.committed()?;
    Some(CommittedOffset {
        topic_id: topic.to_wire(),
        partition: slot.partition(),
        offset: committed.offset,
        leader_epoch: committed.leader_epoch,
        metadata: committed.metadata.to_owned(),
        time_ms: committed.time_ms,
    })
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
