//! The oracle of consumer groups: what members saw, held against what they were promised.
//!
//! Members put down in one shared [`Trace`] what happens to them, in the order in which it happens; a
//! delivery has to be put down before anybody else can be given anything (take the trace's lock around
//! the poll: [`Trace::lock`]), else the order says nothing. Then [`check`] holds the steps against these
//! rules:
//!
//! | violation | the rule that it breaks |
//! | --- | --- |
//! | [`Violation::NeverHandled`] | at least once: every offset is acknowledged by somebody |
//! | [`Violation::Unassigned`] | nothing is delivered before the partition was assigned, or after it was revoked or lost |
//! | [`Violation::TwoHolders`] | one epoch of a claim has one holder |
//! | [`Violation::Repeated`] | within one epoch each offset at most once, in order ... |
//! | [`Violation::Skipped`] | ... and without a hole |
//! | [`Violation::OldEpoch`] | once something was delivered under an epoch, nothing is under an older one |
//! | [`Violation::StartsBelowCommit`] | a claim begins at or above every commit confirmed under an earlier one: only what was not committed is handled twice, and only where a claim changed hands |
//! | [`Violation::StartsAboveAcknowledged`] | ... and at or below what earlier holders acknowledged: nothing is left out |
//! | [`Violation::CommitAboveAcknowledged`] | nothing is committed that was not acknowledged |
//! | [`Violation::WentBack`] | whoever asks, a committed offset is never below one confirmed or seen before |
//!
//! Pure, and knows nothing of the client: tests translate.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Result, bail};

/// How many violations are named.
const SHOWN: usize = 10;

/// A partition of a topic.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The topic's name.
    pub topic: Arc<str>,
    /// The partition's number.
    pub partition: u32,
}

impl Place {
    /// Of that topic, the partition of that number.
    pub fn new(topic: impl Into<Arc<str>>, partition: u32) -> Self {
        Self {
            topic: topic.into(),
            partition,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.topic, self.partition)
    }
}

/// A member's name, within the test.
pub type Name = Arc<str>;

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The member was told that it reads the partition from now on.
    Granted {
        /// Who.
        member: Name,
        /// What.
        place: Place,
    },
    /// The member was told that it reads the partition no more: revoked or lost.
    Gone {
        /// Who.
        member: Name,
        /// What.
        place: Place,
    },
    /// Records were handed to the member.
    Delivered {
        /// To whom.
        member: Name,
        /// Of which partition.
        place: Place,
        /// Under which epoch of its claim.
        epoch: u64,
        /// Their offsets.
        offsets: Range<u64>,
    },
    /// The member is done with records; put down before it says so to the client.
    Acknowledged {
        /// Of which partition.
        place: Place,
        /// Under which epoch of its claim they were delivered.
        epoch: u64,
        /// Their offsets.
        offsets: Range<u64>,
    },
    /// A commit was confirmed to a member: at least this offset is committed.
    Committed {
        /// Of which partition.
        place: Place,
        /// Under which epoch of its claim.
        epoch: u64,
        /// The next one to read.
        offset: u64,
    },
    /// Somebody asked for the committed offset, and was told.
    Seen {
        /// Of which partition.
        place: Place,
        /// The answer.
        offset: u64,
        /// How many steps there were when the question was asked ([`Trace::len`]).
        asked: usize,
    },
}

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are what their names say")]
pub enum Violation {
    NeverHandled {
        place: Place,
        offsets: Range<u64>,
    },
    Unassigned {
        member: Name,
        place: Place,
        offset: u64,
    },
    TwoHolders {
        place: Place,
        epoch: u64,
        members: [Name; 2],
    },
    Repeated {
        place: Place,
        epoch: u64,
        expected: u64,
        offset: u64,
    },
    Skipped {
        place: Place,
        epoch: u64,
        expected: u64,
        offset: u64,
    },
    OldEpoch {
        member: Name,
        place: Place,
        epoch: u64,
        newest: u64,
        offset: u64,
    },
    StartsBelowCommit {
        place: Place,
        epoch: u64,
        start: u64,
        committed: u64,
    },
    StartsAboveAcknowledged {
        place: Place,
        epoch: u64,
        start: u64,
        acknowledged: u64,
    },
    CommitAboveAcknowledged {
        place: Place,
        epoch: u64,
        committed: u64,
        acknowledged: u64,
    },
    WentBack {
        place: Place,
        from: u64,
        to: u64,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NeverHandled { place, offsets } => {
                write!(f, "{place}: nobody handled {offsets:?}")
            }
            Self::Unassigned {
                member,
                place,
                offset,
            } => write!(
                f,
                "{place}: {offset} delivered to {member}, which did not have it"
            ),
            Self::TwoHolders {
                place,
                epoch,
                members: [first, second],
            } => write!(f, "{place}: {first} and {second} under one epoch, {epoch}"),
            Self::Repeated {
                place,
                epoch,
                expected,
                offset,
            } => write!(
                f,
                "{place}: {offset} delivered twice under epoch {epoch} (next: {expected})"
            ),
            Self::Skipped {
                place,
                epoch,
                expected,
                offset,
            } => write!(
                f,
                "{place}: {offset} delivered after {expected} was to come, epoch {epoch}"
            ),
            Self::OldEpoch {
                member,
                place,
                epoch,
                newest,
                offset,
            } => write!(
                f,
                "{place}: {offset} delivered to {member} under epoch {epoch}, after {newest} had begun"
            ),
            Self::StartsBelowCommit {
                place,
                epoch,
                start,
                committed,
            } => write!(
                f,
                "{place}: epoch {epoch} began at {start}, {committed} was committed before"
            ),
            Self::StartsAboveAcknowledged {
                place,
                epoch,
                start,
                acknowledged,
            } => write!(
                f,
                "{place}: epoch {epoch} began at {start}, only {acknowledged} was acknowledged"
            ),
            Self::CommitAboveAcknowledged {
                place,
                epoch,
                committed,
                acknowledged,
            } => write!(
                f,
                "{place}: {committed} committed (epoch {epoch}), only {acknowledged} was acknowledged"
            ),
            Self::WentBack { place, from, to } => {
                write!(f, "{place}: the committed offset went from {from} to {to}")
            }
        }
    }
}

/// What happened, in order. Cheap to clone; all clones are one.
#[derive(Clone, Debug, Default)]
pub struct Trace(Arc<Mutex<Vec<Step>>>);

impl Trace {
    /// The steps, for as long as the guard is kept.
    pub fn lock(&self) -> MutexGuard<'_, Vec<Step>> {
        // A test that panicked elsewhere; the steps are whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a step down.
    pub fn put(&self, step: Step) {
        self.lock().push(step);
    }

    /// How many steps there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether nothing has happened.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// [`check`] of all that has happened until now.
    ///
    /// # Errors
    /// The violations.
    pub fn check(&self, written: &BTreeMap<Place, Range<u64>>) -> Result<Story> {
        let (story, violations) = check(&self.lock(), written);
        if violations.is_empty() {
            return Ok(story);
        }
        let shown: Vec<String> = violations
            .iter()
            .take(SHOWN)
            .map(|v| v.to_string())
            .collect();
        bail!("{} violations:\n{}", violations.len(), shown.join("\n"))
    }
}

/// What happened, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Story {
    /// Records delivered, each as often as it was.
    pub delivered: u64,
    /// Records delivered again, under a later epoch.
    pub redelivered: u64,
    /// Claims under which anything was delivered.
    pub claims: u64,
}

/// Holds the steps against the rules. `written`: the offsets that had to be handled, from where the
/// group was to begin.
#[must_use]
pub fn check(steps: &[Step], written: &BTreeMap<Place, Range<u64>>) -> (Story, Vec<Violation>) {
    let mut check = Check::default();
    for (at, step) in steps.iter().enumerate() {
        check.take(at, step);
    }
    check.close(written)
}

/// One epoch of a claim.
#[derive(Debug)]
struct Claim {
    member: Name,
    start: u64,
    /// After the last one delivered.
    next: u64,
    acknowledged: Ranges,
    /// The highest commit confirmed.
    committed: Option<u64>,
}

impl Claim {
    /// Everything below is acknowledged, from the start on.
    fn watermark(&self) -> u64 {
        self.acknowledged.end_of_run(self.start)
    }
}

#[derive(Debug, Default)]
struct Progress {
    /// By epoch.
    claims: BTreeMap<u64, Claim>,
    newest: Option<u64>,
    handled: Ranges,
    delivered: Ranges,
    /// Lower bounds of the committed offset: at which step they were known.
    known: Vec<(usize, u64)>,
}

#[derive(Debug, Default)]
struct Check {
    places: BTreeMap<Place, Progress>,
    held: BTreeSet<(Name, Place)>,
    story: Story,
    violations: Vec<Violation>,
}

impl Check {
    fn take(&mut self, at: usize, step: &Step) {
        match step {
            Step::Granted { member, place } => {
                self.held.insert((Arc::clone(member), place.clone()));
            }
            Step::Gone { member, place } => {
                self.held.remove(&(Arc::clone(member), place.clone()));
            }
            Step::Delivered {
                member,
                place,
                epoch,
                offsets,
            } => self.deliver(member, place, *epoch, offsets),
            Step::Acknowledged {
                place,
                epoch,
                offsets,
            } => {
                let progress = self.places.entry(place.clone()).or_default();
                progress.handled.insert(offsets.clone());
                if let Some(claim) = progress.claims.get_mut(epoch) {
                    claim.acknowledged.insert(offsets.clone());
                }
            }
            Step::Committed {
                place,
                epoch,
                offset,
            } => self.commit(at, place, *epoch, *offset),
            Step::Seen {
                place,
                offset,
                asked,
            } => self.see(at, place, *offset, *asked),
        }
    }

    fn deliver(&mut self, member: &Name, place: &Place, epoch: u64, offsets: &Range<u64>) {
        let offset = offsets.start;
        if !self.held.contains(&(Arc::clone(member), place.clone())) {
            self.violations.push(Violation::Unassigned {
                member: Arc::clone(member),
                place: place.clone(),
                offset,
            });
        }
        let progress = self.places.entry(place.clone()).or_default();
        if let Some(newest) = progress.newest.filter(|newest| epoch < *newest) {
            self.violations.push(Violation::OldEpoch {
                member: Arc::clone(member),
                place: place.clone(),
                epoch,
                newest,
                offset,
            });
        }
        progress.newest = progress.newest.max(Some(epoch));
        let claim = progress.claims.entry(epoch).or_insert_with(|| Claim {
            member: Arc::clone(member),
            start: offset,
            next: offset,
            acknowledged: Ranges::default(),
            committed: None,
        });
        if claim.member != *member {
            self.violations.push(Violation::TwoHolders {
                place: place.clone(),
                epoch,
                members: [Arc::clone(&claim.member), Arc::clone(member)],
            });
        }
        let (place, expected) = (place.clone(), claim.next);
        if offset < expected {
            self.violations.push(Violation::Repeated {
                place,
                epoch,
                expected,
                offset,
            });
        } else if offset > expected {
            self.violations.push(Violation::Skipped {
                place,
                epoch,
                expected,
                offset,
            });
        }
        claim.next = claim.next.max(offsets.end);
        let new = progress.delivered.insert(offsets.clone());
        let all = offsets.end.saturating_sub(offsets.start);
        self.story.delivered += all;
        self.story.redelivered += all - new;
    }

    fn commit(&mut self, at: usize, place: &Place, epoch: u64, offset: u64) {
        let progress = self.places.entry(place.clone()).or_default();
        progress.known.push((at, offset));
        if let Some(claim) = progress.claims.get_mut(&epoch) {
            claim.committed = claim.committed.max(Some(offset));
            let acknowledged = claim.watermark();
            if offset > acknowledged {
                self.violations.push(Violation::CommitAboveAcknowledged {
                    place: place.clone(),
                    epoch,
                    committed: offset,
                    acknowledged,
                });
            }
        }
    }

    fn see(&mut self, at: usize, place: &Place, offset: u64, asked: usize) {
        let progress = self.places.entry(place.clone()).or_default();
        let before = progress.known.iter().filter(|(known, _)| *known < asked);
        let from = before.map(|(_, offset)| *offset).max();
        if let Some(from) = from.filter(|from| offset < *from) {
            self.violations.push(Violation::WentBack {
                place: place.clone(),
                from,
                to: offset,
            });
        }
        progress.known.push((at, offset));
        let watermarks = progress
            .claims
            .iter()
            .map(|(epoch, c)| (c.watermark(), *epoch));
        // With no claim the group has begun nowhere: what is committed, others have set.
        if let Some((acknowledged, epoch)) = watermarks.max()
            && offset > acknowledged
        {
            self.violations.push(Violation::CommitAboveAcknowledged {
                place: place.clone(),
                epoch,
                committed: offset,
                acknowledged,
            });
        }
    }

    /// What can be said only at the end.
    fn close(mut self, written: &BTreeMap<Place, Range<u64>>) -> (Story, Vec<Violation>) {
        for (place, offsets) in written {
            let none = Ranges::default();
            let handled = self.places.get(place).map_or(&none, |known| &known.handled);
            for offsets in handled.holes(offsets.clone()) {
                self.violations.push(Violation::NeverHandled {
                    place: place.clone(),
                    offsets,
                });
            }
        }
        for (place, progress) in &self.places {
            self.story.claims += progress.claims.len() as u64;
            // Whatever a claim is told to begin at, was in the log when it was granted; so is every
            // commit of an earlier epoch, in whatever order they were heard of here.
            let mut committed = 0;
            let mut acknowledged = written.get(place).map_or(0, |offsets| offsets.start);
            for (&epoch, claim) in &progress.claims {
                let (place, start) = (place.clone(), claim.start);
                if start < committed {
                    self.violations.push(Violation::StartsBelowCommit {
                        place,
                        epoch,
                        start,
                        committed,
                    });
                } else if start > acknowledged {
                    self.violations.push(Violation::StartsAboveAcknowledged {
                        place,
                        epoch,
                        start,
                        acknowledged,
                    });
                }
                committed = committed.max(claim.committed.unwrap_or(0));
                acknowledged = acknowledged.max(claim.watermark());
            }
        }
        (self.story, self.violations)
    }
}

/// A set of offsets, as disjoint ranges that don't touch: start to end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds offsets; says how many of them are new.
    pub fn insert(&mut self, mut offsets: Range<u64>) -> u64 {
        if offsets.is_empty() {
            return 0;
        }
        let new = self
            .holes(offsets.clone())
            .map(|hole| hole.end - hole.start)
            .sum();
        if let Some((&start, &end)) = self.0.range(..offsets.start).next_back()
            && end >= offsets.start
        {
            offsets = start..offsets.end.max(end);
        }
        let swallowed: Vec<u64> = self
            .0
            .range(offsets.start..=offsets.end)
            .map(|(s, _)| *s)
            .collect();
        for start in swallowed {
            if let Some(end) = self.0.remove(&start) {
                offsets.end = offsets.end.max(end);
            }
        }
        self.0.insert(offsets.start, offsets.end);
        new
    }

    /// Where the run of offsets that are there ends, from `start` on; `start` if it isn't there itself.
    #[must_use]
    pub fn end_of_run(&self, start: u64) -> u64 {
        let run = self.0.range(..=start).next_back();
        run.map_or(start, |(_, &end)| end.max(start))
    }

    /// What of `offsets` is not there.
    pub fn holes(&self, offsets: Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let mut holes = Vec::new();
        let mut next = self.end_of_run(offsets.start);
        for (&start, &end) in self.0.range(offsets.start..offsets.end.max(offsets.start)) {
            if start > next {
                holes.push(next..start);
            }
            next = next.max(end);
        }
        if next < offsets.end {
            holes.push(next..offsets.end);
        }
        holes.into_iter()
    }
}

#[cfg(test)]
mod tests;
