//! The claims of a member: what it was granted, where each stands, and how it is given up.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use qute_proto::ids::{PartitionId, TopicId};
use qute_proto::v1::session_request::Request;
use qute_proto::v1::{self, ErrorCode};
use tokio::time::Instant;

use super::{Asked, Command, Life, LostReason, Membership, RELEASE_AGAIN, Told};
use crate::group::watermark::Watermark;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not told yet: the session has to be confirmed first.
    Granted,
    /// Told; where it begins is being found out.
    Starting,
    Active,
    /// No target any more: what is handed out is finished.
    Revoking {
        deadline: Instant,
    },
    /// Given up: no more of it concerns the program.
    Releasing {
        /// The stream that the request went out on.
        sent_on: Option<u64>,
        /// Not before then.
        not_before: Option<Instant>,
        done: bool,
    },
    /// The member leaves: nothing is handed out, what is acknowledged yet counts.
    Stopped,
}

/// A claim that is held.
#[derive(Debug)]
pub(super) struct Claim {
    epoch: u64,
    state: State,
    /// The coordinator's.
    committed: Option<u64>,
    /// Once it is attached.
    reading: Option<Reading>,
}

#[derive(Debug)]
struct Reading {
    attachment: u64,
    marks: Watermark,
    /// What is to be committed.
    wanted: u64,
    /// Below it nothing has to be committed; `None`: where reading began is committed as well.
    settled: Option<u64>,
}

/// Why an offset can't be committed by hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::group) enum Refusal {
    NotHeld,
    /// The group has committed this.
    Behind(u64),
    /// Only what lies below this has been handed out.
    Ahead(u64),
}

impl Reading {
    /// The offset that a commit or a release carries.
    fn offset(&self) -> u64 {
        self.wanted
    }

    fn is_dirty(&self) -> bool {
        self.settled.is_none_or(|settled| settled < self.wanted)
    }

    /// Everything handed out is acknowledged, and is to be committed.
    fn is_finished(&self) -> bool {
        self.wanted >= self.marks.end()
    }
}

impl Claim {
    fn granted(epoch: u64, committed: Option<u64>) -> Self {
        Self {
            epoch,
            state: State::Granted,
            committed,
            reading: None,
        }
    }

    /// The program works on something of it.
    pub(super) fn is_busy(&self) -> bool {
        let works = matches!(self.state, State::Active | State::Revoking { .. });
        works
            && self
                .reading
                .as_ref()
                .is_some_and(|reading| !reading.marks.is_clear())
    }

    /// When its state has to change.
    pub(super) fn due(&self) -> Option<Instant> {
        match self.state {
            State::Revoking { deadline } => Some(deadline),
            State::Releasing {
                sent_on: None,
                not_before,
                done: false,
            } => not_before,
            _ => None,
        }
    }

    /// Hands out nothing more, for good. Whether it did until now.
    pub(super) fn stop(&mut self) -> bool {
        let active = matches!(self.state, State::Active);
        if !matches!(self.state, State::Releasing { .. }) {
            self.state = State::Stopped;
        }
        active
    }

    /// What goes with its end; `None` if it was given up before.
    pub(super) fn final_release(&self, place: PartitionId) -> Option<v1::ClaimRelease> {
        let done = matches!(self.state, State::Releasing { done: true, .. });
        (!done).then(|| self.release(place))
    }

    fn release(&self, place: PartitionId) -> v1::ClaimRelease {
        // S27: never below what was committed.
        let offset = match &self.reading {
            Some(reading) if reading.is_dirty() || self.committed.is_some() => {
                Some(reading.offset()).max(self.committed)
            }
            Some(_) => None,
            None => self.committed,
        };
        v1::ClaimRelease {
            topic_id: place.topic.to_wire(),
            partition: place.partition,
            claim_epoch: self.epoch,
            offset,
            leader_epoch: 0,
            metadata: String::new(),
        }
    }
}

impl Membership {
    // What the coordinator says.

    pub(super) fn on_update(&mut self, update: v1::GroupUpdate, now: Instant) {
        let Some(stream) = &mut self.stream else {
            return;
        };
        let Some(coordinator_epoch) = stream.coordinator_epoch else {
            return;
        };
        // S28.
        if (coordinator_epoch, update.revision) < self.floor {
            return;
        }
        self.floor = (coordinator_epoch, update.revision);
        stream.updated = true;
        self.generation = update.generation;
        if let Some(task) = update.assign
            && stream.computing != Some(task.generation)
            && self.life == Life::Running
        {
            stream.computing = Some(task.generation);
            self.commands.push_back(Command::Compute(task));
        }
        if self.life == Life::Suspended {
            return;
        }
        let targets = read_targets(&update.targets);
        let listed = read_claims(&update.claims);
        self.drop_unlisted(&listed);
        for (place, (epoch, committed)) in listed {
            let claim = self
                .claims
                .entry(place)
                .or_insert_with(|| Claim::granted(epoch, committed));
            claim.committed = claim.committed.max(committed);
            if matches!(self.life, Life::Leaving { .. }) {
                claim.stop();
            }
        }
        self.revoke_others(&targets, now);
    }

    /// Claims that the coordinator does not know any more, or that were granted anew.
    fn drop_unlisted(&mut self, listed: &BTreeMap<PartitionId, (u64, Option<u64>)>) {
        let is_listed = |place: &PartitionId, claim: &Claim| {
            let listed = listed.get(place);
            listed.is_some_and(|(epoch, _)| *epoch == claim.epoch)
        };
        self.lose(|place, claim| !is_listed(place, claim), LostReason::Fenced);
    }

    fn revoke_others(&mut self, targets: &BTreeSet<PartitionId>, now: Instant) {
        let deadline = now + self.settings.revoke_timeout;
        let mut told = Vec::new();
        for (&place, claim) in &mut self.claims {
            if targets.contains(&place) {
                continue;
            }
            match claim.state {
                // Nothing of it has been handed out.
                State::Granted => claim.state = RELEASE,
                State::Starting | State::Active => {
                    claim.state = State::Revoking { deadline };
                    self.commands.push_back(Command::Detach(place));
                    told.push((place, claim.epoch));
                }
                State::Revoking { .. } | State::Releasing { .. } | State::Stopped => {}
            }
        }
        if !told.is_empty() {
            let claims = told;
            self.told.push_back(Told::Revoking { claims, deadline });
        }
    }

    pub(super) fn on_released(
        &mut self,
        released: &[(PartitionId, u64)],
        error: Option<&v1::Error>,
        now: Instant,
    ) {
        let final_word = error.is_none_or(|error| error.code() == ErrorCode::ClaimFenced);
        for (place, epoch) in released {
            if let Some(claim) = self.claims.get_mut(place)
                && claim.epoch == *epoch
                && matches!(claim.state, State::Releasing { .. })
            {
                // It goes with the update that does not list it any more.
                claim.state = State::Releasing {
                    sent_on: None,
                    not_before: Some(now + RELEASE_AGAIN),
                    done: final_word,
                };
            }
        }
    }

    /// Gives up, without a word to the coordinator, what it has taken.
    pub(super) fn lose(
        &mut self,
        is_lost: impl Fn(&PartitionId, &Claim) -> bool,
        reason: LostReason,
    ) {
        let mut partitions = Vec::new();
        self.claims.retain(|place, claim| {
            if !is_lost(place, claim) {
                return true;
            }
            match claim.state {
                State::Granted | State::Releasing { .. } | State::Stopped => {}
                State::Starting | State::Active => {
                    self.commands.push_back(Command::Detach(*place));
                    partitions.push(*place);
                }
                State::Revoking { .. } => partitions.push(*place),
            }
            false
        });
        if !partitions.is_empty() {
            self.told.push_back(Told::Lost { partitions, reason });
        }
    }

    // What follows from it.

    /// What every input ends with: grants are told, and finished claims released.
    pub(super) fn settle(&mut self) {
        self.tell_granted();
        let finished = self.claims.values_mut().filter(|claim| {
            let revoking = matches!(claim.state, State::Revoking { .. });
            let reading = claim.reading.as_ref();
            revoking && reading.is_none_or(Reading::is_finished)
        });
        for claim in finished {
            claim.state = RELEASE;
        }
        self.send_releases();
    }

    /// S26: only while the session is known to live.
    fn tell_granted(&mut self) {
        if self.deadline.is_none() || self.life != Life::Running {
            return;
        }
        let mut told = Vec::new();
        for (&place, claim) in &mut self.claims {
            if claim.state == State::Granted {
                claim.state = State::Starting;
                told.push(place);
                self.commands.push_back(Command::Attach {
                    place,
                    epoch: claim.epoch,
                    committed: claim.committed,
                });
            }
        }
        if !told.is_empty() {
            self.told.push_back(Told::Assigned(told));
        }
    }

    /// Once the coordinator has told on this stream that the claims are still held.
    fn send_releases(&mut self) {
        let Some(stream) = self.stream.as_ref().filter(|stream| stream.updated) else {
            return;
        };
        if self.life != Life::Running {
            return;
        }
        let number = stream.number;
        let mut claims = Vec::new();
        let mut asked = Vec::new();
        for (&place, claim) in &mut self.claims {
            let State::Releasing {
                sent_on,
                not_before: None,
                done: false,
            } = claim.state
            else {
                continue;
            };
            if sent_on == Some(number) {
                continue;
            }
            claim.state = State::Releasing {
                sent_on: Some(number),
                not_before: None,
                done: false,
            };
            claims.push(claim.release(place));
            asked.push((place, claim.epoch));
        }
        if claims.is_empty() {
            return;
        }
        let correlation_id = self.ask(Asked::Release(asked));
        self.send(Request::Release(v1::Release {
            correlation_id,
            claims,
        }));
    }

    /// Claims whose time to be finished is over, and releases that may be sent again.
    pub(super) fn expire_revokes(&mut self, now: Instant) {
        let mut partitions = Vec::new();
        for (&place, claim) in &mut self.claims {
            if claim.due().is_none_or(|due| now < due) {
                continue;
            }
            if matches!(claim.state, State::Revoking { .. }) {
                partitions.push(place);
            }
            claim.state = RELEASE;
        }
        if !partitions.is_empty() {
            self.told.push_back(Told::Lost {
                partitions,
                reason: LostReason::RevokeTimeout,
            });
        }
    }

    // Hand-out.

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

/// Where a claim stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::group) struct Held {
    /// Below it everything has been handed out.
    pub(in crate::group) position: u64,
    /// Below it everything is acknowledged.
    pub(in crate::group) acknowledged: u64,
    pub(in crate::group) committed: Option<u64>,
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

const RELEASE: State = State::Releasing {
    sent_on: None,
    not_before: None,
    done: false,
};

fn read_targets(targets: &[v1::TopicPartitions]) -> BTreeSet<PartitionId> {
    let of_topic = |listed: &v1::TopicPartitions| {
        let topic = TopicId::from_wire(&listed.topic_id)?;
        let place = move |&partition: &u32| PartitionId { topic, partition };
        Some(listed.partitions.iter().map(place).collect::<Vec<_>>())
    };
    targets.iter().filter_map(of_topic).flatten().collect()
}

fn read_claims(claims: &[v1::Claim]) -> BTreeMap<PartitionId, (u64, Option<u64>)> {
    let read = |claim: &v1::Claim| {
        let place = PartitionId {
            topic: TopicId::from_wire(&claim.topic_id)?,
            partition: claim.partition,
        };
        let committed = claim.committed.as_ref().map(|committed| committed.offset);
        Some((place, (claim.claim_epoch, committed)))
    };
    claims.iter().filter_map(read).collect()
}
