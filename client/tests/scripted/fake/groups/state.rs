//! One group of the scripted broker: members, targets, claims, offsets, by the rules of the real one.

use super::*;

#[derive(Clone, Debug)]
pub struct Member {
    pub join: v1::Join,
}

/// A partition that the group has to do with.
#[derive(Clone, Debug, Default)]
pub struct Slot {
    pub target: Option<Bytes>,
    pub holder: Option<Bytes>,
    pub claim_epoch: u64,
    pub committed: Option<v1::CommittedOffset>,
}

#[derive(Clone, Debug, Default)]
pub struct Group {
    pub revision: u64,
    pub generation: u64,
    pub assigned_generation: u64,
    /// In the order in which they joined.
    pub members: Vec<Member>,
    /// By topic id and number.
    pub slots: BTreeMap<(Bytes, u32), Slot>,
}

fn refused(code: ErrorCode) -> Result<(), v1::Error> {
    Err(error(code))
}

impl Group {
    /// A member that holds these partitions of a topic.
    pub fn seat(&mut self, join: v1::Join, topic_id: &Bytes, partitions: std::ops::Range<u32>) {
        for partition in partitions {
            let slot = self.slots.entry((topic_id.clone(), partition)).or_default();
            slot.target = Some(join.member_id.clone());
        }
        self.generation += 1;
        self.assigned_generation = self.generation;
        self.members.push(Member { join });
        self.grant();
    }

    fn member(&self, id: &[u8]) -> Option<&Member> {
        self.members.iter().find(|it| it.join.member_id == id)
    }

    pub(super) fn join(&mut self, join: v1::Join) -> Result<(), v1::Error> {
        self.revision += 1;
        let id = join.member_id.clone();
        let named = |it: &Member| !join.instance.is_empty() && it.join.instance == join.instance;
        let mut members = self.members.iter_mut();
        let known = members.find(|it| it.join.member_id == id || named(it));
        let Some(member) = known else {
            self.generation += 1;
            self.members.push(Member { join });
            return Ok(());
        };
        if member.join.member_id == id && member.join.member_epoch > join.member_epoch {
            return refused(ErrorCode::UnknownMember);
        }
        let before = std::mem::replace(&mut member.join, join.clone());
        let is_resumed = before.member_id == id && before.member_epoch == join.member_epoch;
        for slot in self.slots.values_mut() {
            if slot.target.as_ref() == Some(&before.member_id) {
                slot.target = Some(id.clone());
            }
            if slot.holder.as_ref() == Some(&before.member_id) {
                slot.holder = Some(id.clone());
                // S27.
                slot.claim_epoch += u64::from(!is_resumed);
            }
        }
        if before.topics != join.topics {
            self.generation += 1;
        }
        Ok(())
    }

    pub(super) fn subscribe(
        &mut self,
        id: &[u8],
        topics: Vec<v1::TopicSubscription>,
    ) -> Result<(), v1::Error> {
        let mut members = self.members.iter_mut();
        let Some(member) = members.find(|it| it.join.member_id == id) else {
            return refused(ErrorCode::UnknownMember);
        };
        if member.join.topics != topics {
            member.join.topics = topics;
            self.generation += 1;
            self.revision += 1;
        }
        Ok(())
    }

    pub(super) fn publish(&mut self, publish: &v1::Publish) -> Result<(), v1::Error> {
        if publish.generation != self.generation || self.assigned_generation == self.generation {
            return refused(ErrorCode::StaleGeneration);
        }
        for slot in self.slots.values_mut() {
            slot.target = None;
        }
        for assigned in &publish.assignment {
            if self.member(&assigned.member_id).is_none() {
                return refused(ErrorCode::InvalidArgument);
            }
            for topic in &assigned.partitions {
                for &partition in &topic.partitions {
                    let slot = self.slots.entry((topic.topic_id.clone(), partition));
                    let slot = slot.or_default();
                    if slot.target.replace(assigned.member_id.clone()).is_some() {
                        return refused(ErrorCode::InvalidArgument);
                    }
                }
            }
        }
        self.assigned_generation = self.generation;
        self.grant();
        Ok(())
    }

    /// Claims that nobody holds go to whom they are assigned.
    fn grant(&mut self) {
        self.revision += 1;
        for slot in self.slots.values_mut() {
            if slot.holder.is_none() && slot.target.is_some() {
                slot.holder.clone_from(&slot.target);
                slot.claim_epoch += 1;
            }
        }
    }

    fn claim(&mut self, id: &[u8], topic: &Bytes, partition: u32, epoch: u64) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(&(topic.clone(), partition))?;
        let holds = slot.holder.as_deref() == Some(id) && slot.claim_epoch == epoch;
        holds.then_some(slot)
    }

    pub(super) fn release(
        &mut self,
        id: &[u8],
        claims: &[v1::ClaimRelease],
        commits: &mut Vec<(u32, u64)>,
    ) -> Result<(), v1::Error> {
        for release in claims {
            let (topic, partition) = (&release.topic_id, release.partition);
            if let Some(slot) = self.claim(id, topic, partition, release.claim_epoch) {
                slot.holder = None;
                if let Some(offset) = release.offset {
                    slot.commit(topic, partition, offset, &release.metadata);
                    commits.push((partition, offset));
                }
            }
        }
        self.grant();
        Ok(())
    }

    pub(super) fn leave(
        &mut self,
        id: &[u8],
        leave: &v1::Leave,
        commits: &mut Vec<(u32, u64)>,
    ) -> Result<(), v1::Error> {
        if leave.keep_place {
            for claim in &leave.claims {
                let (topic, partition) = (&claim.topic_id, claim.partition);
                let slot = self.claim(id, topic, partition, claim.claim_epoch);
                if let (Some(slot), Some(offset)) = (slot, claim.offset) {
                    slot.commit(topic, partition, offset, &claim.metadata);
                    commits.push((partition, offset));
                }
            }
            return Ok(());
        }
        self.release(id, &leave.claims, commits)?;
        self.remove(id);
        Ok(())
    }

    pub(super) fn remove(&mut self, id: &[u8]) {
        self.members.retain(|it| it.join.member_id != id);
        self.generation += 1;
        for slot in self.slots.values_mut() {
            if slot.target.as_deref() == Some(id) {
                slot.target = None;
            }
            if slot.holder.as_deref() == Some(id) {
                slot.holder = None;
            }
        }
        self.grant();
    }

    pub(super) fn commit(
        &mut self,
        request: &v1::CommitOffsetsRequest,
    ) -> Result<Vec<v1::OffsetCommitted>, v1::Error> {
        let member = (!request.member_id.is_empty()).then_some(&request.member_id);
        match member.map(|id| self.member(id)) {
            None if !self.members.is_empty() => return Err(error(ErrorCode::GroupNotEmpty)),
            Some(None) => return Err(error(ErrorCode::UnknownMember)),
            Some(Some(member)) if member.join.member_epoch != request.member_epoch => {
                return Err(error(ErrorCode::UnknownMember));
            }
            _ => {}
        }
        let offsets = request.offsets.iter();
        let done = offsets.map(|offset| {
            let (topic, partition) = (&offset.topic_id, offset.partition);
            let slot = match member {
                Some(id) => self.claim(id, topic, partition, offset.claim_epoch),
                None => Some(self.slots.entry((topic.clone(), partition)).or_default()),
            };
            match slot {
                None => v1::OffsetCommitted {
                    offset: 0,
                    error: Some(error(ErrorCode::ClaimFenced)),
                },
                Some(slot) => v1::OffsetCommitted {
                    offset: slot.commit(topic, partition, offset.offset, &offset.metadata),
                    error: None,
                },
            }
        });
        Ok(done.collect())
    }

    pub(super) fn reset(&mut self, request: &v1::ResetOffsetsRequest) -> Result<(), v1::Error> {
        let held = |it: &v1::OffsetReset| {
            let slot = self.slots.get(&(it.topic_id.clone(), it.partition));
            slot.is_some_and(|slot| slot.holder.is_some())
        };
        if !request.force && request.offsets.iter().any(held) {
            return refused(ErrorCode::GroupNotEmpty);
        }
        for reset in &request.offsets {
            let (topic, partition) = (&reset.topic_id, reset.partition);
            let slot = self.slots.entry((topic.clone(), partition)).or_default();
            slot.committed = None;
            if let Some(offset) = reset.offset {
                slot.commit(topic, partition, offset, "");
            }
            slot.claim_epoch += u64::from(slot.holder.is_some());
        }
        self.revision += 1;
        Ok(())
    }

    pub(super) fn offsets(&self) -> Vec<v1::CommittedOffset> {
        let committed = self.slots.values().filter_map(|it| it.committed.clone());
        committed.collect()
    }

    pub(super) fn listing(&self, name: &str) -> v1::GroupListing {
        let moving = |slot: &Slot| slot.holder.is_some() && slot.holder != slot.target;
        let state = if self.members.is_empty() {
            v1::GroupState::Empty
        } else if self.generation != self.assigned_generation || self.slots.values().any(moving) {
            v1::GroupState::Rebalancing
        } else {
            v1::GroupState::Stable
        };
        v1::GroupListing {
            group: name.to_owned(),
            state: state.into(),
            members: u32::try_from(self.members.len()).unwrap(),
            offsets: u32::try_from(self.offsets().len()).unwrap(),
            generation: self.generation,
            assignor: self.assignor(),
        }
    }

    fn assignor(&self) -> Option<v1::AssignorVersion> {
        self.members.first()?.join.assignors.first().cloned()
    }

    /// The partitions of which this is the owner.
    fn partitions_of(
        &self,
        id: &[u8],
        owner: impl Fn(&Slot) -> &Option<Bytes>,
    ) -> Vec<v1::TopicPartitions> {
        let mut topics = BTreeMap::<Bytes, Vec<u32>>::new();
        for ((topic, partition), slot) in &self.slots {
            if owner(slot).as_deref() == Some(id) {
                topics.entry(topic.clone()).or_default().push(*partition);
            }
        }
        let tell = |(topic_id, partitions)| v1::TopicPartitions {
            topic_id,
            partitions,
        };
        topics.into_iter().map(tell).collect()
    }

    fn members_told(&self) -> Vec<v1::GroupMember> {
        let tell = |Member { join }: &Member| v1::GroupMember {
            member_id: join.member_id.clone(),
            instance: join.instance.clone(),
            rack: join.rack.clone(),
            client: join.client.clone(),
            assignors: join.assignors.clone(),
            topics: join.topics.clone(),
            session_timeout_ms: join.session_timeout_ms,
            targets: self.partitions_of(&join.member_id, |slot| &slot.target),
            claims: self.partitions_of(&join.member_id, |slot| &slot.holder),
        };
        self.members.iter().map(tell).collect()
    }

    pub(super) fn describe(&self, name: &str) -> v1::DescribeGroupResponse {
        let held = |((topic_id, partition), slot): (&(Bytes, u32), &Slot)| {
            Some(v1::HeldClaim {
                topic_id: topic_id.clone(),
                partition: *partition,
                claim_epoch: slot.claim_epoch,
                member_id: slot.holder.clone()?,
            })
        };
        v1::DescribeGroupResponse {
            group: Some(self.listing(name)),
            members: self.members_told(),
            claims: self.slots.iter().filter_map(held).collect(),
            offsets: self.offsets(),
            ..Default::default()
        }
    }

    /// What concerns a member; the oldest one computes.
    pub(super) fn update_for(&self, id: &[u8]) -> Option<v1::GroupUpdate> {
        self.member(id)?;
        let is_oldest = self
            .members
            .first()
            .is_some_and(|it| it.join.member_id == id);
        let is_wanted = is_oldest && self.assigned_generation != self.generation;
        let held = self.slots.iter();
        let held = held.filter(|(_, slot)| slot.holder.as_deref() == Some(id));
        let claims = held.map(|((topic_id, partition), slot)| v1::Claim {
            topic_id: topic_id.clone(),
            partition: *partition,
            claim_epoch: slot.claim_epoch,
            committed: slot.committed.clone(),
        });
        Some(v1::GroupUpdate {
            revision: self.revision,
            generation: self.generation,
            assigned_generation: self.assigned_generation,
            targets: self.partitions_of(id, |slot| &slot.target),
            claims: claims.collect(),
            assign: is_wanted.then(|| v1::AssignTask {
                generation: self.generation,
                assignor: self.assignor(),
                members: self.members_told(),
            }),
        })
    }
}

impl Slot {
    /// What is in force then.
    fn commit(&mut self, topic: &Bytes, partition: u32, offset: u64, metadata: &str) -> u64 {
        let before = self.committed.as_ref().map(|it| it.offset);
        if let Some(before) = before.filter(|before| *before > offset) {
            return before;
        }
        self.committed = Some(v1::CommittedOffset {
            topic_id: topic.clone(),
            partition,
            offset,
            leader_epoch: 0,
            metadata: metadata.to_owned(),
            time_ms: 1,
        });
        offset
    }
}
