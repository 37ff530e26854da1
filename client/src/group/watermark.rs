//! What has been acknowledged of a claimed partition, and from where it follows which offset to commit.
//! Pure.
//!
//! ```text
//!            watermark                         end
//!  ..acked.. | open | acked | open | gap | open | not handed out yet
//!            '----- ranges, not records --------'
//! ```
//!
//! Batches are handed out in the order of their offsets, and acknowledged in any order, whole or by the
//! record. The watermark is the next offset to commit: everything below it that was handed out has been
//! acknowledged. Offsets that no batch has carried (what compaction or retention took away) hold nothing
//! up. Acknowledging anything twice, or what was never handed out, changes nothing.
//!
//! A tracker belongs to one claim: what was handed out under an earlier one is acknowledged to that one's
//! tracker, and so moves nothing here.

use std::collections::BTreeMap;
use std::ops::Range;

/// See the module header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Watermark {
    /// Everything below is done.
    next: u64,
    /// Where the next batch begins, at the earliest.
    end: u64,
    /// Ranges in `next..end` that are done, by their start; they neither touch nor overlap, and none
    /// begins at `next`.
    done: BTreeMap<u64, u64>,
}

impl Watermark {
    /// Of a claim whose first batch begins at `position` or beyond.
    pub(super) fn new(position: u64) -> Self {
        Self {
            next: position,
            end: position,
            done: BTreeMap::new(),
        }
    }

    /// A batch with these offsets is handed out. What of it lies before the end of those before is ignored. An empty
    /// range tells that nothing lies below it.
    pub(super) fn hand_out(&mut self, offsets: Range<u64>) {
        let gap = self.end..offsets.start.min(offsets.end);
        self.end = self.end.max(offsets.end);
        self.ack(gap);
    }

    /// These offsets are done; true if the watermark has risen.
    pub(super) fn ack(&mut self, offsets: Range<u64>) -> bool {
        let (mut start, mut end) = (offsets.start.max(self.next), offsets.end.min(self.end));
        if start >= end {
            return false;
        }
        // Those that it touches become one with it.
        while let Some((&before, &before_end)) = self.done.range(..=end).next_back()
            && before_end >= start
        {
            self.done.remove(&before);
            start = start.min(before);
            end = end.max(before_end);
        }
        if start > self.next {
            self.done.insert(start, end);
            return false;
        }
        self.next = end;
        true
    }

    /// The next offset to commit.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// One past the last offset that was handed out.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Whether all that was handed out has been acknowledged.
    pub(super) fn is_clear(&self) -> bool {
        self.next == self.end
    }

    /// How many offsets are open.
    #[cfg(test)]
    fn open(&self) -> u64 {
        let done: u64 = self.done.iter().map(|(start, end)| end - start).sum();
        self.end - self.next - done
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn watermark_waits_for_the_first_open_record_and_jumps_over_what_is_done() {
        let mut watermark = Watermark::new(10);
        assert!(watermark.is_clear());
        watermark.hand_out(10..15);
        watermark.hand_out(15..20);
        assert!(!watermark.ack(15..20));
        assert!(!watermark.ack(11..12));
        assert_eq!((watermark.next(), watermark.open()), (10, 4));
        assert!(watermark.ack(10..11));
        assert_eq!(watermark.next(), 12);
        assert!(watermark.ack(12..15));
        assert_eq!((watermark.next(), watermark.is_clear()), (20, true));
    }

    #[test]
    fn watermark_of_batches_with_gaps_between_them_does_not_wait_for_what_is_not_there() {
        let mut watermark = Watermark::new(0);
        watermark.hand_out(5..6);
        assert_eq!(watermark.next(), 5, "nothing lies before the first batch");
        watermark.hand_out(9..10);
        assert!(!watermark.ack(9..10));
        assert!(watermark.ack(5..6));
        assert_eq!((watermark.next(), watermark.end()), (10, 10));
    }

    #[test]
    fn acknowledgement_twice_or_of_what_was_not_handed_out_changes_nothing() {
        let mut watermark = Watermark::new(10);
        watermark.hand_out(10..20);
        watermark.ack(12..14);
        let before = watermark.clone();
        for foreign in [0..5, 20..30, 12..14, 13..13, 25..u64::MAX] {
            assert!(!watermark.ack(foreign.clone()), "{foreign:?}");
            assert_eq!(watermark, before);
        }
        #[allow(clippy::reversed_empty_ranges, reason = "that is what is tried")]
        watermark.ack(18..3);
        watermark.hand_out(11..13);
        assert_eq!(watermark, before);
    }

    #[test]
    fn watermark_at_the_ends_of_the_numbers_does_not_overflow() {
        let mut watermark = Watermark::new(u64::MAX - 2);
        watermark.hand_out(u64::MAX - 1..u64::MAX);
        assert!(watermark.ack(0..u64::MAX));
        assert_eq!(watermark.next(), u64::MAX);
    }

    #[derive(Debug, Clone)]
    enum Step {
        HandOut { gap: u64, records: u64 },
        Ack { start: u64, records: u64 },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0_u64..3, 0_u64..8).prop_map(|(gap, records)| Step::HandOut { gap, records }),
            (0_u64..90, 0_u64..9).prop_map(|(start, records)| Step::Ack { start, records }),
            (0_u64..90).prop_map(|start| Step::Ack { start, records: 1 }),
        ]
    }

    proptest! {
        /// Against sets of records.
        #[test]
        fn watermark_is_the_first_open_record_of_a_set_whatever_is_acknowledged_when(
            position in 0_u64..20,
            steps in proptest::collection::vec(step(), 1..80),
        ) {
            let mut watermark = Watermark::new(position);
            let (mut open, mut end) = (BTreeSet::new(), position);
            for step in steps {
                let before = watermark.next();
                match step {
                    Step::HandOut { gap, records } => {
                        let start = end + gap;
                        watermark.hand_out(start..start + records);
                        open.extend(start..start + records);
                        end = start + records;
                    }
                    Step::Ack { start, records } => {
                        let rose = watermark.ack(start..start + records);
                        open.retain(|offset| !(start..start + records).contains(offset));
                        prop_assert_eq!(rose, watermark.next() > before);
                    }
                }
                prop_assert!(watermark.next() >= before, "it never goes back");
                prop_assert_eq!(watermark.next(), open.first().copied().unwrap_or(end));
                prop_assert_eq!(watermark.end(), end);
                prop_assert_eq!(watermark.open(), open.len() as u64);
                prop_assert_eq!(watermark.is_clear(), open.is_empty());
                // Ranges: no more of them than open records.
                prop_assert!(watermark.done.len() as u64 <= watermark.open());
            }
        }
    }
}
