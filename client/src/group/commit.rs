//! Commits of what is acknowledged: one round under way at a time, which carries the latest of every
//! partition, at an interval and whenever the program asks.
//!
//! A round may be repeated until its deadline: committed offsets never go back, so whatever arrives late
//! or twice does no harm. What it does not bring about stays to be committed.

use std::sync::Arc;
use std::time::Duration;

use qute_proto::ids::{PartitionId, TopicId};
use qute_proto::v1::{self, ErrorCode};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::coordinator::{Wanted, ask_coordinator};
use super::core::{Core, State};
use super::event::GroupEvent;
use super::membership::Parting;
use crate::error::{Error, ErrorKind, Result};

/// When acknowledged records are committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CommitMode {
    /// By the consumer: at this interval, before a partition is given up, and when leaving. The default,
    /// every second.
    #[non_exhaustive]
    Auto {
        /// At least this long lies between two commits.
        interval: Duration,
    },
    /// By the program alone: [`super::GroupConsumer::commit`] and the like.
    Manual,
}

impl CommitMode {
    /// At this interval.
    #[must_use]
    pub fn every(interval: Duration) -> Self {
        Self::Auto { interval }
    }
}

impl Default for CommitMode {
    fn default() -> Self {
        Self::every(Duration::from_secs(1))
    }
}

/// A round that failed is repeated after this.
const AGAIN: Duration = Duration::from_millis(100);

/// Somebody waits for a round.
struct Waiter {
    until: Instant,
    told: oneshot::Sender<Result<()>>,
    /// Claims that are given up meanwhile: their offsets go with that.
    parting: Vec<(PartitionId, u64)>,
}

/// Who waits for what.
#[derive(Default)]
pub(super) struct Commits {
    /// By hand: only when asked.
    by_hand: bool,
    /// Something was acknowledged since the last round began.
    dirty: bool,
    /// A round is to begin as soon as none is under way.
    asked: bool,
    /// The last round failed, and what it was to bring about is still wanted.
    again: bool,
    under_way: bool,
    /// The clock for the next round is set.
    pub(super) scheduled: bool,
    /// For the next round.
    waiting: Vec<Waiter>,
    /// For the present one.
    in_round: Vec<Waiter>,
    /// Their round is over, but not the end of some claims.
    parting: Vec<Waiter>,
    /// The program was told of a failure, and no round has succeeded since.
    failure_told: bool,
}

impl Commits {
    pub(super) fn new(mode: CommitMode) -> Self {
        Self {
            by_hand: mode == CommitMode::Manual,
            ..Self::default()
        }
    }

    pub(super) fn acknowledged(&mut self) {
        self.dirty = true;
    }

    /// A round that begins from now on is wanted; nobody waits for it.
    pub(super) fn request(&mut self) {
        self.asked = true;
    }

    /// The same, and what comes of it.
    pub(super) fn wait(&mut self, until: Instant) -> oneshot::Receiver<Result<()>> {
        let (told, receiver) = oneshot::channel();
        self.waiting.push(Waiter {
            until,
            told,
            parting: Vec::new(),
        });
        self.asked = true;
        receiver
    }

    /// A round after a pause is wanted.
    pub(super) fn is_due(&self) -> bool {
        !self.under_way && (self.again || (self.dirty && !self.by_hand))
    }

    /// How long that pause is, where rounds have this interval.
    pub(super) fn pause(&self, interval: Option<Duration>) -> Duration {
        let interval = interval.filter(|interval| !self.again || *interval < AGAIN);
        interval.unwrap_or(AGAIN)
    }

    /// The task has to begin a round, or to set its clock.
    pub(super) fn has_work(&self) -> bool {
        self.is_asked() || (self.is_due() && !self.scheduled)
    }

    /// Nothing is under way, and nobody waits.
    fn is_idle(&self) -> bool {
        !self.under_way && self.waiting.is_empty() && self.parting.is_empty()
    }

    pub(super) fn is_asked(&self) -> bool {
        self.asked && !self.under_way
    }

    /// Nobody commits any more.
    pub(super) fn refuse(&mut self, error: &Error) {
        self.asked = false;
        self.under_way = false;
        let waiting = self.waiting.drain(..).chain(self.in_round.drain(..));
        for waiter in waiting.chain(self.parting.drain(..)) {
            // It may not wait any more.
            let _ = waiter.told.send(Err(error.clone()));
        }
    }
}

/// What one round carries.
pub(super) struct Round {
    request: v1::CommitOffsetsRequest,
    deadline: Instant,
}

/// What came of it.
pub(super) struct RoundDone {
    request: v1::CommitOffsetsRequest,
    result: Result<v1::CommitOffsetsResponse>,
}

impl State {
    /// Begins a round, if there is anything to commit.
    pub(super) fn begin_round(&mut self, core: &Core, now: Instant) -> Option<Round> {
        let offsets = self.membership.commits(now);
        let commits = &mut self.commits;
        commits.asked = false;
        commits.dirty = false;
        commits.again = false;
        commits.scheduled = false;
        let parting = self.membership.parting();
        for waiter in &mut commits.waiting {
            waiter.parting.extend(&parting);
        }
        commits.in_round.append(&mut commits.waiting);
        if offsets.is_empty() {
            if self.membership.is_alive(now) || !parting.is_empty() {
                commits.parting.append(&mut commits.in_round);
                self.end_partings(core);
            } else {
                for waiter in std::mem::take(&mut commits.in_round) {
                    let _ = waiter.told.send(Err(not_alive()));
                }
            }
            return None;
        }
        commits.under_way = true;
        // S26: nothing is sent past the deadline that is known now.
        let deadline = now + core.shared.config.call_timeout;
        Some(Round {
            deadline: self.membership.deadline().unwrap_or(now).min(deadline),
            request: v1::CommitOffsetsRequest {
                group: core.group.to_string(),
                member_id: self.membership.id().to_wire(),
                member_epoch: self.membership.epoch(),
                offsets,
            },
        })
    }

    /// Takes in what came of a round.
    pub(super) fn end_round(&mut self, core: &Core, done: RoundDone, now: Instant) {
        self.commits.under_way = false;
        let result = done.result.and_then(|response| {
            if response.results.len() == done.request.offsets.len() {
                Ok(response.results)
            } else {
                Err(Error::new(
                    ErrorKind::Protocol,
                    "the coordinator left commits unanswered",
                ))
            }
        });
        let member_epoch = done.request.member_epoch;
        let mut failures = Vec::new();
        match result {
            Ok(results) => {
                for (commit, result) in done.request.offsets.iter().zip(results) {
                    failures.extend(self.end_commit(core, member_epoch, commit, &result, now));
                }
            }
            Err(error) => {
                if error.kind() == ErrorKind::UnknownMember {
                    self.membership.expelled(member_epoch, now);
                }
                failures.push(error);
            }
        }
        self.tell_round(failures, now);
        self.end_partings(core);
    }

    /// Tells those whose round is over how the claims that they wait for have ended.
    pub(super) fn end_partings(&mut self, core: &Core) {
        for mut waiter in std::mem::take(&mut self.commits.parting) {
            let failed = |(place, epoch): &&(PartitionId, u64)| {
                self.membership.parting_of(*place, *epoch) == Parting::Failed
            };
            if let Some((place, _)) = waiter.parting.iter().find(failed) {
                let named = core.name(self, *place);
                let message = "the partition went to another before it was confirmed that what is acknowledged is committed";
                let error = Error::new(ErrorKind::ClaimFenced, message);
                let error = error.at(&named.topic, place.partition);
                let _ = waiter.told.send(Err(error));
                continue;
            }
            waiter.parting.retain(|(place, epoch)| {
                self.membership.parting_of(*place, *epoch) == Parting::UnderWay
            });
            if waiter.parting.is_empty() {
                let _ = waiter.told.send(Ok(()));
            } else if !waiter.told.is_closed() {
                self.commits.parting.push(waiter);
            }
        }
        if self.commits.is_idle() {
            self.membership.forget_parted();
        }
    }

    fn end_commit(
        &mut self,
        core: &Core,
        member_epoch: u64,
        commit: &v1::OffsetCommit,
        result: &v1::OffsetCommitted,
        now: Instant,
    ) -> Option<Error> {
        let place = PartitionId {
            topic: TopicId::from_wire(&commit.topic_id)?,
            partition: commit.partition,
        };
        let Some(error) = &result.error else {
            let offset = commit.offset.max(result.offset);
            self.membership.committed(place, commit.claim_epoch, offset);
            return None;
        };
        let parting = self.membership.parting_of(place, commit.claim_epoch);
        match error.code() {
            // It was given up meanwhile, and the offset went with that.
            ErrorCode::ClaimFenced if parting != Parting::Failed => {
                for waiter in &mut self.commits.in_round {
                    waiter.parting.push((place, commit.claim_epoch));
                }
                return None;
            }
            ErrorCode::ClaimFenced => self.membership.fenced(place, commit.claim_epoch),
            ErrorCode::UnknownMember => self.membership.expelled(member_epoch, now),
            _ => {}
        }
        let named = core.name(self, place);
        let error = Error::told(error).at(&named.topic, place.partition);
        Some(error.with_offset(commit.offset))
    }

    fn tell_round(&mut self, failures: Vec<Error>, now: Instant) {
        let commits = &mut self.commits;
        if !failures.is_empty() {
            // Whatever it was: it is to be committed still, unless it was lost.
            commits.dirty = true;
        }
        let passes = |error: &Error| error.is_retriable() || error.kind() == ErrorKind::Internal;
        let again = failures.iter().any(passes);
        commits.again |= again;
        let nobody_waits = commits.in_round.is_empty();
        for waiter in std::mem::take(&mut commits.in_round) {
            if again && now < waiter.until {
                commits.waiting.push(waiter);
                continue;
            }
            match failures.first() {
                Some(error) => {
                    let _ = waiter.told.send(Err(error.clone()));
                }
                None => commits.parting.push(waiter),
            }
        }
        if failures.is_empty() {
            commits.failure_told = false;
        }
        // What was lost is told as such.
        let is_news = |error: &Error| {
            let told_otherwise = matches!(
                error.kind(),
                ErrorKind::ClaimFenced | ErrorKind::UnknownMember
            );
            !passes(error) && !told_otherwise
        };
        if nobody_waits
            && !commits.failure_told
            && let Some(error) = failures.into_iter().find(is_news)
        {
            commits.failure_told = true;
            self.events.push_back(GroupEvent::Failed(error));
        }
    }
}

/// Carries a round out.
pub(super) async fn run_round(core: Arc<Core>, round: Round) -> RoundDone {
    let Round { request, deadline } = round;
    let wanted = Wanted::Group(Arc::clone(&core.group));
    let result = ask_coordinator(&core.shared, wanted, deadline, &request).await;
    RoundDone {
        request,
        result: result.map_err(Error::from),
    }
}

pub(super) fn not_alive() -> Error {
    Error::new(
        ErrorKind::UnknownMember,
        "the session is not confirmed: what was acknowledged may be another's by now",
    )
}
