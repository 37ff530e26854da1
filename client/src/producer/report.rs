//! What has become of a producer's records, in numbers: [`CloseReport`].

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::error::{Error, Outcome, Result};
use crate::interceptor::Hooks;
use crate::stats::Stats;

/// Lines of [`CloseReport::undelivered`]; what goes beyond is counted in the line of its outcome.
const UNDELIVERED_MAX: usize = 10_000;

/// What became of the records that a producer took in, over its life.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct CloseReport {
    /// Records that are stored.
    pub delivered: u64,
    /// Records that were not written.
    pub not_written: u64,
    /// Records that may or may not be written.
    pub unknown: u64,
    /// The first failure of a record that was taken in.
    pub first_error: Option<Error>,
    /// The records that are not delivered, by topic, partition, outcome and kind of error.
    pub undelivered: Vec<Undelivered>,
}

impl CloseReport {
    /// Everything that was taken in is stored.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.not_written == 0 && self.unknown == 0
    }
}

/// Records of one partition that were taken in and are not known to be stored.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Undelivered {
    /// The topic's name.
    pub topic: Arc<str>,
    /// The partition.
    pub partition: u32,
    /// How many records.
    pub records: u64,
    /// [`Outcome::NotWritten`] or [`Outcome::Unknown`].
    pub outcome: Outcome,
    /// Why: the first error of those records.
    pub error: Error,
}

/// Which partition of which topic, for errors.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) topic: Arc<str>,
    pub(super) partition: u32,
}

/// Topic, partition, whether the outcome is unknown, and the kind of error.
type Line = (Arc<str>, u32, bool, u32);

/// Counts fates over a producer's life.
#[derive(Debug, Default)]
pub(super) struct Tally {
    delivered: AtomicU64,
    not_written: AtomicU64,
    unknown: AtomicU64,
    failures: Mutex<Failures>,
    pub(super) hooks: Hooks,
    pub(super) stats: Arc<Stats>,
}

#[derive(Debug, Default)]
struct Failures {
    first: Option<Error>,
    lines: BTreeMap<Line, Undelivered>,
}

impl Tally {
    pub(super) fn new(hooks: Hooks, stats: Arc<Stats>) -> Self {
        Self {
            hooks,
            stats,
            ..Self::default()
        }
    }

    pub(super) fn report(&self) -> CloseReport {
        let failures = self.failures.lock();
        CloseReport {
            delivered: self.delivered.load(Ordering::Acquire),
            not_written: self.not_written.load(Ordering::Acquire),
            unknown: self.unknown.load(Ordering::Acquire),
            first_error: failures.first.clone(),
            undelivered: failures.lines.values().cloned().collect(),
        }
    }

    pub(super) fn count(&self, place: &Place, records: u32, result: &Result<u64>) {
        let records = u64::from(records);
        let error = result.as_ref().err();
        let outcome = error.map_or(Outcome::Ok, |error| {
            error.outcome().unwrap_or(Outcome::Unknown)
        });
        let counter = match outcome {
            Outcome::Ok => &self.delivered,
            Outcome::NotWritten => &self.not_written,
            Outcome::Unknown => &self.unknown,
        };
        if let Some(error) = error {
            let mut failures = self.failures.lock();
            failures.first.get_or_insert_with(|| error.clone());
            if outcome != Outcome::Ok {
                failures.count(place, records, outcome, error);
            }
        }
        counter.fetch_add(records, Ordering::AcqRel);
    }
}

impl Failures {
    fn count(&mut self, place: &Place, records: u64, outcome: Outcome, error: &Error) {
        let unknown = outcome == Outcome::Unknown;
        let mut line = (
            Arc::clone(&place.topic),
            place.partition,
            unknown,
            error.kind() as u32,
        );
        if self.lines.len() >= UNDELIVERED_MAX
            && !self.lines.contains_key(&line)
            && let Some(other) = self.lines.keys().rev().find(|other| other.2 == unknown)
        {
            line = other.clone();
        }
        let undelivered = self.lines.entry(line).or_insert_with(|| Undelivered {
            topic: Arc::clone(&place.topic),
            partition: place.partition,
            records: 0,
            outcome,
            error: error.clone(),
        });
        undelivered.records += records;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn report_lists_the_undelivered_by_place_outcome_and_kind() {
        let tally = Tally::default();
        let place = |partition| Place {
            topic: "t".into(),
            partition,
        };
        let failed = |kind, outcome| Err(Error::new(kind, "x").with_outcome(outcome));
        tally.count(&place(0), 5, &Ok(17));
        tally.count(&place(1), 2, &failed(ErrorKind::Timeout, Outcome::Unknown));
        tally.count(&place(1), 3, &failed(ErrorKind::Timeout, Outcome::Unknown));
        tally.count(
            &place(1),
            4,
            &failed(ErrorKind::Timeout, Outcome::NotWritten),
        );
        tally.count(&place(0), 1, &failed(ErrorKind::OffsetUnknown, Outcome::Ok));
        let report = tally.report();
        assert_eq!(
            (report.delivered, report.not_written, report.unknown),
            (6, 4, 5)
        );
        let lines: Vec<_> = report
            .undelivered
            .iter()
            .map(|line| (line.partition, line.records, line.outcome))
            .collect();
        assert_eq!(
            lines,
            [(1, 4, Outcome::NotWritten), (1, 5, Outcome::Unknown)]
        );
        assert_eq!(
            report.first_error.map(|e| e.kind()),
            Some(ErrorKind::Timeout)
        );
    }

    #[test]
    fn report_of_ever_new_places_stays_bounded() {
        let tally = Tally::default();
        for partition in 0..20_000 {
            let place = Place {
                topic: "t".into(),
                partition,
            };
            let lost = Error::closed("x").with_outcome(Outcome::NotWritten);
            tally.count(&place, 1, &Err(lost));
        }
        let report = tally.report();
        assert_eq!(report.undelivered.len(), UNDELIVERED_MAX);
        assert_eq!(report.not_written, 20_000);
        let listed: u64 = report.undelivered.iter().map(|line| line.records).sum();
        assert_eq!(listed, 20_000);
    }
}
