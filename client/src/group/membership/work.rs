//! What is handed out of the claims, acknowledged and committed.

use std::collections::BTreeMap;
use std::ops::Range;

use qute_proto::ids::{PartitionId, TopicId};
use qute_proto::v1;
use tokio::time::Instant;

use super::claims::{Claim, RELEASE, Reading, State};
use super::{Asked, Life, LostReason, Membership};
use crate::group::watermark::Watermark;

/// Why an offset can't be committed by hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::group) enum Refusal {
    NotHeld,
    /// The group has committed this.
    Behind(u64),
    /// Only what lies below this has been handed out.
    Ahead(u64),
}

/// Where a claim stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::group) struct Held {
    /// Below it everything has been handed out.
    pub(in crate::group) position: u64,
    /// Below it everything is acknowledged.
    pub(in crate::group) acknowledged: u64,
    pub(in crate::group) committed: Option<u64>,
}

/// How the end of a claim stands, with what was acknowledged of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::group) enum Parting {
    /// The coordinator has not answered.
    UnderWay,
    /// It is committed.
    Done,
    /// The claim went otherwise, or it is not known how.
    Failed,
}

/// What came of attaching.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::group) enum Attached {
    Yes,
    /// The reader does not know the partition yet.
    Later,
    /// The claim is not there any more.
    Gone,
}

impl Membership {
    /// Where a claim begins is known: attaches it by `attach`, which gives the attachment. With `pin`
    /// the offset is committed even before anything is acknowledged. False if the claim is not there
    /// any more.
    pub(in crate::group) fn attach(
        &mut self,
        place: PartitionId,
        epoch: u64,
        offset: u64,
        pin: bool,
        attach: impl FnOnce() -> Option<u64>,
    ) -> Attached {
        let Some(claim) = self
            .claims
            .get_mut(&place)
            .filter(|claim| claim.epoch == epoch && claim.state == State::Starting)
        else {
            return Attached::Gone;
        };
        let Some(attachment) = attach() else {
            return Attached::Later;
        };
        claim.state = State::Active;
        claim.reading = Some(Reading {
            attachment,
            marks: Watermark::new(offset),
            wanted: offset,
            settled: (!pin || claim.committed.is_some()).then_some(offset),
        });
        Attached::Yes
    }

    /// Whether the claim still waits for its beginning.
    pub(in crate::group) fn is_starting(&self, place: PartitionId, epoch: u64) -> bool {
        let claim = self.claims.get(&place);
        claim.is_some_and(|claim| claim.epoch == epoch && claim.state == State::Starting)
    }

    /// A claim of the topic is held, in whatever state.
    pub(in crate::group) fn holds_any_of(&self, topic: TopicId) -> bool {
        self.claims.keys().any(|place| place.topic == topic)
    }

    /// Records of these offsets are about to be handed out. Gives the epoch of the claim; `None` if they
    /// must not be.
    pub(in crate::group) fn deliver(
        &mut self,
        place: PartitionId,
        attachment: u64,
        offsets: Range<u64>,
        now: Instant,
    ) -> Option<u64> {
        self.advance(now);
        let alive = self.is_alive(now) && self.life == Life::Running;
        let (claim_epoch, reading) = self.reading_of(place, attachment).filter(|_| alive)?;
        reading.marks.hand_out(offsets);
        Some(claim_epoch)
    }

    /// What lay between was lost: reading goes on at `to`. False if the claim is not there any more.
    pub(in crate::group) fn moved(
        &mut self,
        place: PartitionId,
        attachment: u64,
        to: u64,
        now: Instant,
    ) -> bool {
        self.advance(now);
        let by_hand = self.settings.by_hand;
        let Some((_, reading)) = self.reading_of(place, attachment) else {
            return false;
        };
        if to >= reading.marks.end() {
            reading.marks.hand_out(to..to);
            if !by_hand {
                reading.wanted = reading.wanted.max(reading.marks.next());
            }
        } else {
            reading.marks = Watermark::new(to);
            reading.wanted = to;
            reading.settled = reading.settled.max(Some(to));
        }
        true
    }

    /// The program goes on at `offset`: attaches it anew by `attach`. What lies between counts as done if
    /// it is skipped, and is handed out again if it is not. False if the partition is not read.
    pub(in crate::group) fn seek(
        &mut self,
        place: PartitionId,
        offset: u64,
        now: Instant,
        attach: impl FnOnce() -> Option<u64>,
    ) -> bool {
        self.advance(now);
        self.touch(now);
        let Some(claim) = self.claims.get_mut(&place) else {
            return false;
        };
        let (State::Active, Some(reading)) = (claim.state, &mut claim.reading) else {
            return false;
        };
        let Some(attachment) = attach() else {
            return false;
        };
        reading.attachment = attachment;
        if offset >= reading.marks.end() {
            reading.marks.hand_out(offset..offset);
        } else {
            reading.marks = Watermark::new(offset);
        }
        true
    }

    /// Whether an event of this attachment concerns the program.
    pub(in crate::group) fn is_attached(&mut self, place: PartitionId, attachment: u64) -> bool {
        self.reading_of(place, attachment).is_some()
    }

    fn reading_of(&mut self, place: PartitionId, attachment: u64) -> Option<(u64, &mut Reading)> {
        let claim = self.claims.get_mut(&place)?;
        let epoch = claim.epoch;
        let reading = claim.reading.as_mut()?;
        let present = claim.state == State::Active && reading.attachment == attachment;
        present.then_some((epoch, reading))
    }

    /// The program is done with these offsets. False if the claim is not held any more.
    pub(in crate::group) fn ack(
        &mut self,
        place: PartitionId,
        epoch: u64,
        offsets: Range<u64>,
        now: Instant,
    ) -> bool {
        // Once a record: what else is due has its own timer.
        if self.deadline.is_none_or(|deadline| deadline <= now) {
            self.advance(now);
        }
        self.touch(now);
        let by_hand = self.settings.by_hand;
        let Some(reading) = self.committable(place, epoch) else {
            return false;
        };
        let risen = reading.marks.ack(offsets);
        if !by_hand {
            reading.wanted = reading.wanted.max(reading.marks.next());
        }
        let revoking = |claim: &Claim| matches!(claim.state, State::Revoking { .. });
        if risen && self.claims.get(&place).is_some_and(revoking) {
            self.settle();
        }
        true
    }

    fn committable(&mut self, place: PartitionId, epoch: u64) -> Option<&mut Reading> {
        let claim = self.claims.get_mut(&place)?;
        let open = matches!(
            claim.state,
            State::Active | State::Revoking { .. } | State::Stopped
        );
        (open && claim.epoch == epoch).then_some(())?;
        claim.reading.as_mut()
    }

    /// The program wants nothing more of a claim that is being taken away: whatever is not acknowledged
    /// is read again by the next holder.
    pub(in crate::group) fn give_up(&mut self, place: PartitionId, now: Instant) {
        self.advance(now);
        self.touch(now);
        if let Some(claim) = self.claims.get_mut(&place)
            && matches!(claim.state, State::Revoking { .. })
        {
            claim.state = RELEASE;
        }
        self.settle();
    }

    // Commits.

    /// By hand: whatever is acknowledged by now is to be committed.
    pub(in crate::group) fn want_acknowledged(&mut self, now: Instant) {
        self.advance(now);
        self.touch(now);
        for claim in self.claims.values_mut() {
            if let Some(reading) = &mut claim.reading {
                reading.wanted = reading.wanted.max(reading.marks.next());
            }
        }
        self.settle();
    }

    /// By hand: this offset is to be committed, and everything below it counts as acknowledged.
    ///
    /// # Errors
    /// It is not held, or the offset is behind what is committed, or ahead of what was handed out.
    pub(in crate::group) fn want_offset(
        &mut self,
        place: PartitionId,
        offset: u64,
        now: Instant,
    ) -> Result<(), Refusal> {
        self.advance(now);
        self.touch(now);
        let Some(claim) = self.claims.get(&place) else {
            return Err(Refusal::NotHeld);
        };
        let (epoch, committed) = (claim.epoch, claim.committed);
        let Some(reading) = self.committable(place, epoch) else {
            return Err(Refusal::NotHeld);
        };
        if offset > reading.marks.end() {
            return Err(Refusal::Ahead(reading.marks.end()));
        }
        if let Some(committed) = committed.filter(|committed| offset < *committed) {
            return Err(Refusal::Behind(committed));
        }
        let acknowledged = reading.marks.next();
        if offset > acknowledged {
            reading.marks.ack(acknowledged..offset);
        }
        reading.wanted = reading.wanted.max(offset);
        self.settle();
        Ok(())
    }

    /// What is to be committed now, each with its claim's epoch. S26: nothing past the deadline.
    pub(in crate::group) fn commits(&mut self, now: Instant) -> Vec<v1::OffsetCommit> {
        self.advance(now);
        if !self.is_alive(now) {
            return Vec::new();
        }
        let commit = |(place, claim): (&PartitionId, &Claim)| {
            let reading = claim
                .reading
                .as_ref()
                .filter(|reading| reading.is_dirty())?;
            // What is being released carries its offset.
            let open = matches!(claim.state, State::Active | State::Revoking { .. });
            open.then(|| v1::OffsetCommit {
                topic_id: place.topic.to_wire(),
                partition: place.partition,
                claim_epoch: claim.epoch,
                offset: reading.offset(),
                leader_epoch: 0,
                metadata: String::new(),
            })
        };
        self.claims.iter().filter_map(commit).collect()
    }

    /// The claims whose last acknowledgements are committed by giving them up, each with its epoch.
    pub(in crate::group) fn parting(&self) -> Vec<(PartitionId, u64)> {
        let parting = self.claims.iter().filter(|(_, claim)| claim.is_parting());
        parting
            .map(|(place, claim)| (*place, claim.epoch))
            .collect()
    }

    /// How the end of that claim stands.
    pub(in crate::group) fn parting_of(&self, place: PartitionId, epoch: u64) -> Parting {
        let parted = self.parted.get(&place);
        if parted.is_some_and(|parted| *parted == epoch) {
            return Parting::Done;
        }
        let claim = self.claims.get(&place).filter(|claim| claim.epoch == epoch);
        let is_asked = |asked: &Asked| match asked {
            Asked::Release(claims) | Asked::Leave(claims) => claims.contains(&(place, epoch)),
            Asked::Publish(_) | Asked::Topics => false,
        };
        let mut streams = self.stream.iter();
        // The update that does not list it may come before the answer.
        if streams.any(|stream| stream.waiting.values().any(is_asked)) {
            return Parting::UnderWay;
        }
        match claim.map(|claim| claim.state) {
            Some(State::Releasing { done: false, .. } | State::Stopped) => Parting::UnderWay,
            _ => Parting::Failed,
        }
    }

    /// Nobody asks any more.
    pub(in crate::group) fn forget_parted(&mut self) {
        self.parted.clear();
    }

    /// The committed offset in force is this.
    pub(in crate::group) fn committed(&mut self, place: PartitionId, epoch: u64, offset: u64) {
        if let Some(claim) = self.claims.get_mut(&place)
            && claim.epoch == epoch
        {
            claim.committed = claim.committed.max(Some(offset));
            if let Some(reading) = &mut claim.reading {
                reading.settled = reading.settled.max(Some(offset));
            }
        }
    }

    /// The coordinator says that the claim is not held under this epoch.
    pub(in crate::group) fn fenced(&mut self, place: PartitionId, epoch: u64) {
        self.lose(
            |other, claim| *other == place && claim.epoch == epoch,
            LostReason::Fenced,
        );
    }

    /// The coordinator says that the member is none.
    pub(in crate::group) fn expelled(&mut self, member_epoch: u64, now: Instant) {
        self.advance(now);
        if self.epoch == member_epoch && self.deadline.is_some() {
            self.lose_session();
            self.close();
        }
    }

    /// The claim is held under this epoch, and what is acknowledged of it counts.
    pub(in crate::group) fn holds(&mut self, place: PartitionId, epoch: u64, now: Instant) -> bool {
        self.advance(now);
        self.committable(place, epoch).is_some()
    }

    /// What is read: the claim's epoch, and up to where everything is acknowledged.
    pub(in crate::group) fn held(&self) -> BTreeMap<PartitionId, Held> {
        let held = |(place, claim): (&PartitionId, &Claim)| {
            let open = matches!(claim.state, State::Active | State::Revoking { .. });
            let reading = claim.reading.as_ref().filter(|_| open)?;
            let held = Held {
                position: reading.marks.end(),
                acknowledged: reading.marks.next(),
                committed: claim.committed,
            };
            Some((*place, held))
        };
        self.claims.iter().filter_map(held).collect()
    }
}
