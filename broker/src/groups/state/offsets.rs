//! Committed offsets: commits, resets, and the sweep of idle groups.
//!
//! They never go back but by a reset. A commit looks at the partitions that it names and at nothing
//! else of the group.

use qute_proto::ids::TopicId;
use qute_proto::internal::GroupsReply;
use qute_proto::v1::ResetOffsetsRequest;
use qute_proto::v1::{CommitOffsetsRequest, ErrorCode, OffsetCommit, OffsetCommitted, OffsetReset};

use super::At;
use super::command::{Refusal, refuse};
use super::group::Group;
use super::members::{Seat, topic_id};
use super::slots::{Committed, Entry, Slot};

impl Group {
    pub(super) fn commit(
        &mut self,
        commit: &CommitOffsetsRequest,
        at: At,
    ) -> Result<GroupsReply, Refusal> {
        let seat = if commit.member_id.is_empty() {
            if !self.members.is_empty() {
                return refuse(
                    ErrorCode::GroupNotEmpty,
                    format!(
                        "the group has {} members: only they commit, until they have left",
                        self.members.len()
                    ),
                );
            }
            None
        } else {
            Some(self.member(&commit.member_id, commit.member_epoch)?)
        };
        let mut offsets = Vec::with_capacity(commit.offsets.len());
        for one in &commit.offsets {
            let done = self.commit_one(seat, one, at);
            offsets.push(done.unwrap_or_else(Refusal::into_item));
        }
        Ok(GroupsReply {
            offsets,
            ..GroupsReply::default()
        })
    }

    fn commit_one(
        &mut self,
        seat: Option<Seat>,
        one: &OffsetCommit,
        at: At,
    ) -> Result<OffsetCommitted, Refusal> {
        let topic = topic_id(&one.topic_id)?;
        check_offset(one.offset)?;
        let entry = match seat {
            Some(seat) => Some(self.held(seat, topic, one.partition, one.claim_epoch)?),
            None => self.slots.known(topic, one.partition),
        };
        let committed = Committed {
            offset: one.offset,
            leader_epoch: one.leader_epoch,
            time_ms: at.time_ms,
            metadata: &one.metadata,
        };
        let offset = entry.map_or(0, |entry| advance(entry, &committed));
        Ok(OffsetCommitted {
            offset,
            error: None,
        })
    }

    /// Whole or not at all. Where a member holds the claim it begins anew under a new epoch, and
    /// what it had in flight is fenced.
    pub(super) fn reset(
        &mut self,
        reset: &ResetOffsetsRequest,
        at: At,
    ) -> Result<GroupsReply, Refusal> {
        let mut resets = Vec::with_capacity(reset.offsets.len());
        for one in &reset.offsets {
            resets.push((self.check_reset(one, reset.force)?, one));
        }
        for (topic, one) in resets {
            match one.offset {
                Some(offset) => {
                    let committed = Committed {
                        offset,
                        leader_epoch: 0,
                        time_ms: at.time_ms,
                        metadata: "",
                    };
                    if let Some(entry) = self.slots.known(topic, one.partition) {
                        entry.commit(&committed);
                    }
                }
                None => {
                    if let Some(entry) = self.slots.entry(topic, one.partition) {
                        entry.forget();
                    }
                }
            }
            let slot = self.slots.get_mut(topic, one.partition);
            if let Some(slot) = slot
                && let Some(holder) = slot.holder
            {
                slot.raise_epoch();
                self.touch(holder, at);
            }
        }
        Ok(GroupsReply::default())
    }

    fn check_reset(&self, one: &OffsetReset, force: bool) -> Result<TopicId, Refusal> {
        let topic = topic_id(&one.topic_id)?;
        one.offset.map_or(Ok(()), check_offset)?;
        let holder = self
            .slots
            .get(topic, one.partition)
            .and_then(|it| it.holder);
        match holder.and_then(|seat| self.members.at(seat)) {
            Some(holder) if !force => refuse(
                ErrorCode::GroupNotEmpty,
                format!(
                    "partition {} of topic {topic} is claimed by {}: stop the members of the \
                     group, or force it",
                    one.partition,
                    holder.described()
                ),
            ),
            _ => Ok(topic),
        }
    }

    /// Forgets what a group without members has had for longer than it is to be kept.
    pub(super) fn sweep(&mut self, retention_ms: u64, at: At) {
        let is_over = |since_ms: u64| at.time_ms.saturating_sub(since_ms) >= retention_ms;
        if !self.members.is_empty() || !is_over(self.empty_since_ms) {
            return;
        }
        let kept = |slot: &Slot| slot.committed().is_some_and(|it| !is_over(it.time_ms));
        if self.slots.iter().any(|(_, slot)| !kept(slot)) {
            self.slots.retain(|_, slot| kept(slot));
        }
    }
}

pub(super) fn check_offset(offset: u64) -> Result<(), Refusal> {
    if Committed::can_be(offset) {
        return Ok(());
    }
    let message = format!("{offset} is no offset");
    refuse(ErrorCode::InvalidArgument, message)
}

/// Moves the committed offset forwards; it stays where it is ahead already. What is in force then.
pub(super) fn advance(entry: Entry<'_>, committed: &Committed<'_>) -> u64 {
    match entry.slot.committed() {
        Some(before) if before.offset > committed.offset => before.offset,
        _ => {
            entry.commit(committed);
            committed.offset
        }
    }
}

pub(super) fn fenced(topic: TopicId, partition: u32, epoch: u64, slot: Option<&Slot>) -> Refusal {
    let now = match slot {
        Some(slot) if slot.is_held() => format!("it is claimed at epoch {}", slot.claim_epoch),
        _ => "nobody has a claim on it".to_owned(),
    };
    Refusal::new(
        ErrorCode::ClaimFenced,
        format!(
            "the claim of partition {partition} of topic {topic} at epoch {epoch} is over: {now}"
        ),
    )
}
