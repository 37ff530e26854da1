//! Where records without a key go: to one partition for the length of a batch, then to the one
//! that looks fastest.

use rand::RngExt;

/// The present run.
#[derive(Debug, Default)]
pub(super) struct Sticky {
    partition: u32,
    bytes_left: usize,
}

impl Sticky {
    /// The partition of a record of `cost` bytes. When a run of `batch_bytes` is over, two
    /// partitions are drawn and the better one (has a leader, then more room in its queue, that
    /// is less waiting) gets the next run: cheap, and it spreads.
    pub(super) fn pick<Q: Ord>(
        &mut self,
        partitions: u32,
        cost: usize,
        batch_bytes: usize,
        quality: impl Fn(u32) -> Q,
    ) -> u32 {
        if partitions == 0 {
            return 0;
        }
        if self.bytes_left == 0 || self.partition >= partitions {
            let mut rng = rand::rng();
            let (a, b) = (
                rng.random_range(0..partitions),
                rng.random_range(0..partitions),
            );
            self.partition = if quality(b) > quality(a) { b } else { a };
            self.bytes_left = batch_bytes;
        }
        self.bytes_left = self.bytes_left.saturating_sub(cost);
        self.partition
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keyless_records_go_in_batch_sized_runs() {
        let mut sticky = Sticky::default();
        let picks: Vec<u32> = (0..1000)
            .map(|_| sticky.pick(6, 100, 1000, |_| 0))
            .collect();
        for run in picks.chunks(10) {
            assert!(run.iter().all(|&p| p == run[0]), "{run:?}");
        }
        let used: std::collections::BTreeSet<_> = picks.into_iter().collect();
        assert_eq!(used, (0..6).collect());
    }

    #[test]
    fn keyless_records_avoid_what_looks_slow() {
        let mut sticky = Sticky::default();
        let slow = (0..2000)
            .filter(|_| sticky.pick(6, 100, 100, |p| p != 3) == 3)
            .count();
        // Only drawn twice in a row: 1 in 36.
        assert!(slow < 200, "{slow}");
    }

    #[test]
    fn keyless_run_ends_when_its_partition_is_not_there() {
        let mut sticky = Sticky {
            partition: 9,
            bytes_left: 50,
        };
        assert!(sticky.pick(3, 1, 10, |_| 0) < 3);
        assert_eq!(Sticky::default().pick(0, 1, 10, |_| 0), 0);
    }
}
