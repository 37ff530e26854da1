//! Where reading of one partition stands. Pure.
//!
//! Invariant: every offset from the start up to `next` has been handed on exactly once; nothing at
//! or beyond `next` has.

/// What to do with a batch that the leader sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Arrival {
    /// All of it was handed on before.
    Old,
    /// Hand on what lies in this half-open range.
    Take { from: u64, until: u64 },
    /// Records between `next` and the batch are missing.
    Gap,
}

/// The place in one partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cursor {
    next: u64,
    /// Exclusive.
    end: Option<u64>,
}

impl Cursor {
    pub(super) fn new(next: u64, end: Option<u64>) -> Self {
        Self { next, end }
    }

    /// The next offset wanted.
    pub(super) fn next(self) -> u64 {
        self.next
    }

    /// Nothing more is wanted.
    pub(super) fn is_done(self) -> bool {
        self.end.is_some_and(|end| self.next >= end)
    }

    /// Judges a batch of `records` records at `base_offset`, and moves on past what is taken.
    pub(super) fn arrive(&mut self, base_offset: u64, records: u32) -> Arrival {
        let Some(batch_end) = base_offset.checked_add(u64::from(records)) else {
            return Arrival::Gap;
        };
        if batch_end <= self.next || self.is_done() {
            return Arrival::Old;
        }
        if base_offset > self.next {
            return Arrival::Gap;
        }
        let from = self.next;
        let until = self.end.map_or(batch_end, |end| end.min(batch_end));
        self.next = batch_end;
        Arrival::Take { from, until }
    }

    /// Nothing at or beyond this offset is wanted.
    pub(super) fn set_end(&mut self, end: u64) {
        self.end = Some(end);
    }

    /// Goes on elsewhere.
    pub(super) fn reset(&mut self, next: u64) {
        self.next = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn batch_around_the_wanted_offset_is_clipped() {
        let mut cursor = Cursor::new(5, Some(12));
        assert_eq!(cursor.arrive(0, 5), Arrival::Old);
        assert_eq!(cursor.arrive(3, 4), Arrival::Take { from: 5, until: 7 });
        assert_eq!(cursor.arrive(3, 4), Arrival::Old);
        assert_eq!(cursor.arrive(8, 1), Arrival::Gap);
        assert_eq!(cursor.arrive(u64::MAX, 1), Arrival::Gap);
        assert!(!cursor.is_done());
        assert_eq!(cursor.arrive(7, 10), Arrival::Take { from: 7, until: 12 });
        assert!(cursor.is_done());
        assert_eq!(cursor.arrive(17, 1), Arrival::Old);
    }

    proptest! {
        /// Batches arrive again, late and with holes, as after failovers: each offset is handed
        /// on once, in order.
        #[test]
        fn cursor_never_skips_or_doubles(
            sizes in proptest::collection::vec(1u32..5, 1..30),
            sends in proptest::collection::vec(0usize..30, 0..200),
            start in 0u64..20,
        ) {
            let mut batches = Vec::new();
            let mut base = 0u64;
            for size in sizes {
                batches.push((base, size));
                base += u64::from(size);
            }
            let mut cursor = Cursor::new(start, None);
            let mut expected = start;
            for send in sends.into_iter().chain(0..batches.len()) {
                let (base, size) = batches[send % batches.len()];
                if let Arrival::Take { from, until } = cursor.arrive(base, size) {
                    prop_assert_eq!(from, expected);
                    prop_assert!(from >= base && until == base + u64::from(size));
                    expected = until;
                }
            }
            prop_assert_eq!(cursor.next(), expected);
            prop_assert_eq!(expected, base.max(start));
        }
    }
}
