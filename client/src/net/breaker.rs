//! One circuit breaker per broker address: after some failures in a row calls fail at once, until a
//! probe succeeds.
//!
//! ```text
//!            failures in a row                      time is over
//!  [closed] -------------------> [open until T] ------------------> [half-open]
//!     ^ ^                              ^                              |   |
//!     | '---- any success              '--- the probe failed: longer -'   |
//!     '------------------------------------- the probe succeeded ---------'
//! ```
//!
//! A failure is one of the connection (refused, reset, silent while being made), never a typed
//! refusal: a broker that refuses is alive; nor an answer that is late over a connection that lives,
//! which stays in use whatever the breaker says. A silence costs its caller seconds, so one is enough to open. While half-open,
//! one caller probes and the others are refused; they look again after a moment, since the probe may
//! have closed it long before its time is over. A probe that nobody ever reports on gives its place
//! up after a time.
//!
//! Pure: time and the draw are given.

use std::time::Duration;

use tokio::time::Instant;

/// So many failures in a row open it.
const FAILURES_MAX: u32 = 3;
/// The first time for which it stays open.
const OPEN_MIN: Duration = Duration::from_millis(100);
/// The longest: what a broker that has come back may wait for its first caller.
const OPEN_MAX: Duration = Duration::from_secs(1);

/// How a call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// It was told so: refused, reset.
    Told,
    /// Nothing came in time.
    Silence,
}

/// Whether a call may be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Yes.
    Go,
    /// Yes, and its result decides: it must be reported.
    Probe,
    /// No, not before then.
    Refused(Instant),
}

/// The breaker of one address.
#[derive(Debug, Clone, Default)]
pub(crate) struct Breaker {
    state: State,
    /// How often in a row it was opened.
    opened: u32,
}

#[derive(Debug, Clone)]
enum State {
    Closed {
        failures: u32,
    },
    Open {
        until: Instant,
    },
    /// A probe is under way; if it is not reported on by then, another may be made.
    HalfOpen {
        probe_until: Instant,
    },
}

impl Default for State {
    fn default() -> Self {
        Self::Closed { failures: 0 }
    }
}

impl Breaker {
    /// Whether a call may be made now; a probe takes `probe_limit` at most.
    pub(crate) fn admit(&mut self, now: Instant, probe_limit: Duration) -> Admission {
        match self.state {
            State::Closed { .. } => Admission::Go,
            State::Open { until } if now < until => Admission::Refused(until),
            State::HalfOpen { probe_until } if now < probe_until => {
                Admission::Refused(look_again(now, probe_until))
            }
            State::Open { .. } | State::HalfOpen { .. } => {
                self.state = State::HalfOpen {
                    probe_until: now + probe_limit,
                };
                Admission::Probe
            }
        }
    }

    /// A call succeeded.
    pub(crate) fn succeeded(&mut self) {
        *self = Self::default();
    }

    /// A call failed; true if that opened it. The draw is from `0.0..=1.0`.
    pub(crate) fn failed(&mut self, failure: Failure, now: Instant, draw: f64) -> bool {
        match &mut self.state {
            State::Closed { failures } => {
                *failures = match failure {
                    Failure::Told => *failures + 1,
                    Failure::Silence => FAILURES_MAX,
                };
                if *failures < FAILURES_MAX {
                    return false;
                }
            }
            // Of a call that began before it was opened.
            State::Open { .. } => return false,
            State::HalfOpen { .. } => {}
        }
        let longest = OPEN_MIN
            .saturating_mul(2_u32.saturating_pow(self.opened))
            .min(OPEN_MAX);
        self.opened = self.opened.saturating_add(1);
        self.state = State::Open {
            until: now + longest.mul_f64(0.5 + draw.clamp(0.0, 1.0) / 2.0),
        };
        true
    }

    /// Until when calls are refused at present; while a probe is under way, when to look again.
    pub(crate) fn refused_until(&self, now: Instant) -> Option<Instant> {
        let until = match self.state {
            State::Closed { .. } => return None,
            State::Open { until } => until,
            State::HalfOpen { probe_until } => look_again(now, probe_until),
        };
        (now < until).then_some(until)
    }
}

/// While a probe is under way: nobody is woken by its success, so nobody waits for its whole limit.
fn look_again(now: Instant, probe_until: Instant) -> Instant {
    probe_until.min(now + OPEN_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROBE: Duration = Duration::from_secs(3);

    fn opened(now: Instant) -> Breaker {
        let mut breaker = Breaker::default();
        assert!(breaker.failed(Failure::Silence, now, 1.0));
        breaker
    }

    #[test]
    fn breaker_opens_after_failures_in_a_row_only() {
        let now = Instant::now();
        let mut breaker = Breaker::default();
        for _ in 0..10 {
            assert!(!breaker.failed(Failure::Told, now, 1.0));
            assert!(!breaker.failed(Failure::Told, now, 1.0));
            breaker.succeeded();
        }
        assert_eq!(breaker.admit(now, PROBE), Admission::Go);
        let opened: Vec<_> = (0..4)
            .map(|_| breaker.failed(Failure::Told, now, 1.0))
            .collect();
        assert_eq!(opened, [false, false, true, false]);
        assert_eq!(
            breaker.admit(now, PROBE),
            Admission::Refused(now + OPEN_MIN)
        );
    }

    #[test]
    fn breaker_half_open_lets_one_probe_through_and_its_success_closes() {
        let now = Instant::now();
        let mut breaker = opened(now);
        let then = now + OPEN_MIN;
        assert_eq!(breaker.admit(then, PROBE), Admission::Probe);
        let refused: Vec<_> = (0..9).map(|_| breaker.admit(then, PROBE)).collect();
        assert_eq!(refused, [Admission::Refused(then + OPEN_MIN); 9]);
        breaker.succeeded();
        assert_eq!(breaker.admit(then, PROBE), Admission::Go);
        assert!(!breaker.failed(Failure::Told, then, 1.0), "counts anew");
    }

    #[test]
    fn breaker_stays_open_longer_with_each_failed_probe_up_to_its_cap() {
        let mut now = Instant::now();
        let mut breaker = opened(now);
        let mut waits = Vec::new();
        for _ in 0..6 {
            let Admission::Refused(until) = breaker.admit(now, PROBE) else {
                panic!("it is open");
            };
            waits.push((until - now).as_millis());
            now = until;
            assert_eq!(breaker.admit(now, PROBE), Admission::Probe);
            assert!(breaker.failed(Failure::Told, now, 1.0));
        }
        assert_eq!(waits, [100, 200, 400, 800, 1000, 1000]);
    }

    #[test]
    fn breaker_whose_probe_is_never_reported_probes_again() {
        let now = Instant::now();
        let mut breaker = opened(now);
        assert_eq!(breaker.admit(now + OPEN_MIN, PROBE), Admission::Probe);
        let later = now + OPEN_MIN + PROBE;
        assert_eq!(breaker.admit(later, PROBE), Admission::Probe);
    }

    #[test]
    fn breaker_half_open_is_looked_at_again_soon_and_lets_go_once_the_probe_has_succeeded() {
        let now = Instant::now();
        let mut breaker = opened(now);
        let then = now + OPEN_MIN;
        assert_eq!(breaker.admit(then, PROBE), Admission::Probe);
        assert_eq!(breaker.refused_until(then), Some(then + OPEN_MIN));
        // Never beyond the time at which the probe's place is free.
        let late = then + PROBE - Duration::from_millis(1);
        assert_eq!(breaker.refused_until(late), Some(then + PROBE));
        assert_eq!(breaker.admit(late, PROBE), Admission::Refused(then + PROBE));
        breaker.succeeded();
        assert_eq!(breaker.refused_until(then + OPEN_MIN), None);
    }

    #[test]
    fn breaker_jitters_the_time_it_stays_open() {
        let now = Instant::now();
        let mut breaker = Breaker::default();
        assert!(breaker.failed(Failure::Silence, now, 0.0));
        let half = Admission::Refused(now + OPEN_MIN / 2);
        assert_eq!(breaker.admit(now, PROBE), half);
    }
}
