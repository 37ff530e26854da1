//! How long to wait before the next attempt: exponential, with full jitter (uniform over `0..=cap`),
//! so that clients that failed together do not come back together. A floor keeps an unlucky draw
//! from spinning.
//!
//! Pure: the draw can be given.

use std::time::Duration;

use tokio::time::Instant;

use super::Budget;
use crate::config::ClientConfig;

/// The floor is this part of the shortest back-off.
const FLOOR_DIVISOR: u32 = 4;
/// Once the retry budget is used up, pauses are between one and this many longest back-offs.
const EXHAUSTED_FACTOR: u32 = 4;

/// The pauses of one sequence of attempts.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    min: Duration,
    max: Duration,
    cap: Duration,
}

impl Backoff {
    pub(crate) fn new(config: &ClientConfig) -> Self {
        Self::between(config.backoff_min, config.backoff_max)
    }

    /// The first pause is drawn from `0..=min`, the longest from `0..=max`.
    pub(crate) fn between(min: Duration, max: Duration) -> Self {
        let max = max.max(min);
        Self { min, max, cap: min }
    }

    /// The next pause.
    pub(crate) fn step(&mut self) -> Duration {
        self.step_drawn(rand::random())
    }

    /// The next pause before a retry that the budget is charged for.
    pub(crate) fn step_within(&mut self, budget: &Budget, now: Instant) -> Duration {
        self.step_within_drawn(budget, now, rand::random())
    }

    /// The same, by a draw from `0.0..=1.0`.
    pub(crate) fn step_within_drawn(
        &mut self,
        budget: &Budget,
        now: Instant,
        draw: f64,
    ) -> Duration {
        if budget.withdraw(now) {
            self.step_drawn(draw)
        } else {
            self.exhausted_drawn(draw)
        }
    }

    /// The next pause, by a draw from `0.0..=1.0`.
    pub(crate) fn step_drawn(&mut self, draw: f64) -> Duration {
        let cap = self.cap;
        self.cap = cap.saturating_mul(2).min(self.max);
        cap.mul_f64(draw.clamp(0.0, 1.0))
            .max(self.min / FLOOR_DIVISOR)
    }

    /// The next pause when no retry is left in the budget ([`Budget`]): long, so that an
    /// outage does not multiply traffic.
    fn exhausted_drawn(&mut self, draw: f64) -> Duration {
        self.cap = self.max;
        let spread = self.max.saturating_mul(EXHAUSTED_FACTOR - 1);
        self.max
            .saturating_add(spread.mul_f64(draw.clamp(0.0, 1.0)))
    }

    pub(crate) fn reset(&mut self) {
        self.cap = self.min;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn backoff_doubles_to_its_cap_with_full_jitter_above_a_floor() {
        let mut backoff = Backoff::between(ms(20), ms(500));
        let highest: Vec<_> = (0..7).map(|_| backoff.step_drawn(1.0)).collect();
        assert_eq!(
            highest,
            [20, 40, 80, 160, 320, 500, 500].map(ms),
            "the upper ends"
        );
        assert_eq!(backoff.step_drawn(0.5), ms(250), "uniform from zero");
        assert_eq!(backoff.step_drawn(0.0), ms(5), "never a spin");
        backoff.reset();
        assert_eq!(backoff.step_drawn(1.0), ms(20));
    }

    #[test]
    fn backoff_without_budget_is_longer_than_any_with() {
        let mut backoff = Backoff::between(ms(20), ms(500));
        assert_eq!(backoff.exhausted_drawn(0.0), ms(500));
        assert_eq!(backoff.exhausted_drawn(1.0), ms(2000));
    }

    #[test]
    fn backoff_limits_that_mean_for_ever_or_make_no_sense_do_not_panic() {
        let year = Duration::from_secs(365 * 24 * 3600);
        let mut backoff = Backoff::between(year, ms(1));
        for _ in 0..100 {
            assert!(backoff.step_drawn(2.0) <= year);
        }
        assert!(backoff.exhausted_drawn(f64::NAN.max(0.0)) >= year);
    }
}
