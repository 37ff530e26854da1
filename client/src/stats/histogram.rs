//! A histogram of durations in atomics: 240 buckets, eight to each power of two of microseconds, so
//! that a quantile is at most an eighth too high. Never locks, never allocates.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Buckets to each power of two.
const STEPS: u64 = 8;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// What lasts longer (about 71 minutes) counts as this.
const MICROS_MAX: u64 = u32::MAX as u64;
const BUCKETS: usize = bucket_of(MICROS_MAX) + 1;

/// The bucket of a duration in microseconds.
#[allow(clippy::cast_possible_truncation, reason = "at most 240")]
const fn bucket_of(micros: u64) -> usize {
    if micros < STEPS {
        return micros as usize;
    }
    let exponent = micros.ilog2();
    let step = (micros >> (exponent - STEP_BITS)) & (STEPS - 1);
    ((exponent - STEP_BITS + 1) as u64 * STEPS + step) as usize
}

/// The greatest duration of a bucket, in microseconds.
const fn last_of(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < STEPS {
        return bucket;
    }
    let (power, step) = (bucket / STEPS - 1, bucket % STEPS);
    ((STEPS + step + 1) << power) - 1
}

/// How long something took, over the life of a client. Of single values only these are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LatencyStats {
    /// How many were measured.
    pub count: u64,
    /// All of them together: `sum / count` is the mean.
    pub sum: Duration,
    /// The longest.
    pub max: Duration,
    /// Half of them took at most this long (up to an eighth less, in fact).
    pub p50: Duration,
    /// 99 of 100 took at most this long (up to an eighth less, in fact).
    pub p99: Duration,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Histogram {
    counts: [AtomicU64; BUCKETS],
    sum_micros: AtomicU64,
    max_micros: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            counts: std::array::from_fn(|_| AtomicU64::new(0)),
            sum_micros: AtomicU64::new(0),
            max_micros: AtomicU64::new(0),
        }
    }
}

impl Histogram {
    pub(crate) fn record(&self, duration: Duration) {
        let micros = u64::try_from(duration.as_micros()).unwrap_or(MICROS_MAX);
        let micros = micros.min(MICROS_MAX);
        if let Some(count) = self.counts.get(bucket_of(micros)) {
            count.fetch_add(1, Relaxed);
        }
        self.sum_micros.fetch_add(micros, Relaxed);
        self.max_micros.fetch_max(micros, Relaxed);
    }

    pub(crate) fn stats(&self) -> LatencyStats {
        let counts = self.counts.each_ref().map(|count| count.load(Relaxed));
        let count: u64 = counts.iter().sum();
        let max_micros = self.max_micros.load(Relaxed);
        let quantile = |per_cent: u64| {
            // The smallest rank that has this share at or below it.
            let rank = (count * per_cent).div_ceil(100);
            let mut seen = 0;
            let bucket = counts.iter().position(|count| {
                seen += count;
                seen >= rank
            });
            let micros = bucket.map_or(max_micros, last_of);
            Duration::from_micros(micros.min(max_micros))
        };
        LatencyStats {
            count,
            sum: Duration::from_micros(self.sum_micros.load(Relaxed)),
            max: Duration::from_micros(max_micros),
            p50: quantile(50),
            p99: quantile(99),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn buckets_are_contiguous_and_narrow() {
        let mut next = 0;
        for bucket in 0..BUCKETS {
            let last = last_of(bucket);
            assert_eq!(bucket_of(next), bucket, "{next}");
            assert_eq!(bucket_of(last), bucket, "{last}");
            assert!(last - next <= next / STEPS, "{next}..={last}");
            next = last + 1;
        }
        assert_eq!(next, MICROS_MAX + 1);
    }

    #[test]
    fn empty_histogram_says_nothing() {
        assert_eq!(Histogram::default().stats(), LatencyStats::default());
    }

    proptest! {
        #[test]
        fn quantiles_are_at_most_an_eighth_too_high(
            mut micros in prop::collection::vec(0..10_000_000_u64, 1..200),
        ) {
            let histogram = Histogram::default();
            for &micros in &micros {
                histogram.record(Duration::from_micros(micros));
            }
            let stats = histogram.stats();
            micros.sort_unstable();
            prop_assert_eq!(stats.count, micros.len() as u64);
            prop_assert_eq!(stats.sum, Duration::from_micros(micros.iter().sum()));
            prop_assert_eq!(stats.max, Duration::from_micros(micros[micros.len() - 1]));
            for (told, per_cent) in [(stats.p50, 50), (stats.p99, 99)] {
                let exact = micros[(micros.len() * per_cent).div_ceil(100) - 1];
                let highest = Duration::from_micros(exact + exact / STEPS);
                prop_assert!((Duration::from_micros(exact)..=highest).contains(&told));
            }
        }
    }
}
