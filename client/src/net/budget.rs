//! The retry budget of a client, as in Finagle: retries are paid for by successes, so that an
//! outage does not multiply traffic.
//!
//! A token bucket. Each success puts in a fifth of a token, time puts in ten tokens a second (so
//! that a client with little traffic can retry at all), and it holds a hundred. Each retry takes
//! one. Who finds it empty does not give up: it waits longer ([`super::Backoff::step_within`]).
//! Not charged: following a newer leader epoch (bounded by the number of elections), dialling
//! (bounded by the breakers), and waiting without asking anybody.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// A retry, in the units that the bucket counts.
const RETRY: u64 = 1000;
/// Put in per success: a fifth of a retry.
const PER_SUCCESS: u64 = RETRY / 5;
/// Put in per second whatever succeeds, by the millisecond: ten retries.
const PER_MILLISECOND: u64 = 10 * RETRY / 1000;
/// Saved up at most.
const SAVED_MAX: u64 = 100 * RETRY;

/// The retries that a client may still make.
#[derive(Debug)]
pub(crate) struct Budget {
    /// Two numbers, held for an addition.
    bucket: Mutex<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    saved: u64,
    filled_at: Instant,
}

impl Budget {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            bucket: Mutex::new(Bucket {
                saved: SAVED_MAX,
                filled_at: now,
            }),
        }
    }

    /// A request succeeded.
    pub(crate) fn deposit(&self) {
        let mut bucket = self.bucket.lock();
        bucket.saved = (bucket.saved + PER_SUCCESS).min(SAVED_MAX);
    }

    /// Takes a retry; false if there is none.
    pub(crate) fn withdraw(&self, now: Instant) -> bool {
        let mut bucket = self.bucket.lock();
        let elapsed = now.saturating_duration_since(bucket.filled_at).as_millis();
        let elapsed_ms = u64::try_from(elapsed).unwrap_or(u64::MAX);
        // Whole milliseconds only: the rest counts next time.
        bucket.filled_at += Duration::from_millis(elapsed_ms);
        let gained = elapsed_ms.saturating_mul(PER_MILLISECOND);
        bucket.saved = bucket.saved.saturating_add(gained).min(SAVED_MAX);
        if bucket.saved < RETRY {
            return false;
        }
        bucket.saved -= RETRY;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(budget: &Budget, now: Instant) -> usize {
        (0..1000).take_while(|_| budget.withdraw(now)).count()
    }

    #[test]
    fn budget_used_up_refills_by_time_and_by_success() {
        let start = Instant::now();
        let budget = Budget::new(start);
        assert_eq!(drain(&budget, start), 100);
        assert_eq!(drain(&budget, start + Duration::from_millis(500)), 5);
        for _ in 0..50 {
            budget.deposit();
        }
        assert_eq!(drain(&budget, start + Duration::from_millis(500)), 10);
    }

    #[test]
    fn budget_saves_no_more_than_its_cap_and_time_that_goes_back_gives_nothing() {
        let start = Instant::now();
        let budget = Budget::new(start);
        let later = start + Duration::from_secs(3600);
        assert_eq!(drain(&budget, later), 100);
        assert_eq!(drain(&budget, start), 0);
        assert_eq!(drain(&budget, later), 0);
    }

    #[test]
    fn budget_bounds_the_retries_of_an_outage_of_a_thousand_partitions() {
        // Each wants to retry every 250 ms for 60 s: 240,000 attempts without a budget.
        let start = Instant::now();
        let budget = Budget::new(start);
        let mut granted = 0;
        for tick in 0..240_u32 {
            let now = start + Duration::from_millis(250) * tick;
            granted += (0..1000).filter(|_| budget.withdraw(now)).count();
        }
        assert!(granted <= 100 + 600, "{granted}");
    }
}
