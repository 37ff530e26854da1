//! The claims of a member: what it was granted, where each stands, and how it is given up.

use qute_proto::ids::{PartitionId, TopicId};
use qute_proto::v1::session_request::Request;
use qute_proto::v1::{self, ErrorCode};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::time::Instant;

use super::{Asked, Command, Life, LostReason, Membership, Told};
use crate::error::{Error, ErrorKind};
use crate::group::watermark::Watermark;

/// A release that was refused is tried again after this.
const RELEASE_AGAIN: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
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
    pub(super) epoch: u64,
    pub(super) state: State,
    /// The coordinator's.
    pub(super) committed: Option<u64>,
    /// Once it is attached.
    pub(super) reading: Option<Reading>,
}

#[derive(Debug)]
pub(super) struct Reading {
    pub(super) attachment: u64,
    pub(super) marks: Watermark,
    /// What is to be committed.
    pub(super) wanted: u64,
    /// Below it nothing has to be committed; `None`: where reading began is committed as well.
    pub(super) settled: Option<u64>,
}

impl Reading {
    /// The offset that a commit or a release carries.
    pub(super) fn offset(&self) -> u64 {
        self.wanted
    }

    pub(super) fn is_dirty(&self) -> bool {
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

    /// It is being given up, and what is acknowledged goes with that.
    pub(super) fn is_parting(&self) -> bool {
        let parting = matches!(
            self.state,
            State::Releasing { done: false, .. } | State::Stopped
        );
        parting && self.reading.as_ref().is_some_and(Reading::is_dirty)
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
        self.note_unleft(&listed);
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
        self.leave_again();
    }

    /// While the member leaves: what was acknowledged of claims that are gone is not committed, unless
    /// by a request to leave that was not answered.
    fn note_unleft(&mut self, listed: &BTreeMap<PartitionId, (u64, Option<u64>)>) {
        if !matches!(self.life, Life::Leaving { .. }) {
            return;
        }
        let is_lost = |(place, claim): (&PartitionId, &Claim)| {
            let epoch = listed.get(place).map(|(epoch, _)| *epoch);
            let release = claim.release(*place);
            let left_with = self.left_with.get(place);
            claim.is_parting()
                && epoch != Some(claim.epoch)
                && left_with != Some(&(release.claim_epoch, release.offset))
        };
        if self.claims.iter().any(is_lost) {
            self.failure = Some(Error::new(
                ErrorKind::ClaimFenced,
                "a partition went to another before the member had left: what was not committed of it is read again",
            ));
        }
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
        if error.is_none() {
            self.parted.extend(released.iter().copied());
        }
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
        // The next one carries all that is due by then.
        let is_release = |asked: &Asked| matches!(asked, Asked::Release(_));
        if self.life != Life::Running || stream.waiting.values().any(is_release) {
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
}

/// To be released.
pub(super) const RELEASE: State = State::Releasing {
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
