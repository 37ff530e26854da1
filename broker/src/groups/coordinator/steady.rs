//! A monotonic clock that does not count the time in which nobody looked at it.
//!
//! A broker that was frozen, or that gets no processor, has not heard the heartbeats of that time: they
//! lie in its sockets. Deadlines measured by this clock move by as much as a tick was late, so that
//! whoever was on time before the pause is on time after it.

use std::time::{Duration, Instant};

/// How often it is looked at while a deadline is open.
pub const TICK: Duration = Duration::from_millis(100);
/// What one look moves it by, at most.
const STEP_MAX: Duration = Duration::from_millis(200);

/// A point of time on a [`Steady`] clock: since its start.
pub type Moment = Duration;

/// See the module.
#[derive(Debug)]
pub struct Steady {
    last: Instant,
    shown: Moment,
}

impl Steady {
    /// Begins at zero.
    pub fn new(now: Instant) -> Self {
        Self {
            last: now,
            shown: Moment::ZERO,
        }
    }

    /// The time that counts. Never falls.
    pub fn read(&mut self, now: Instant) -> Moment {
        let gap = now.saturating_duration_since(self.last);
        self.last = self.last.max(now);
        self.shown += gap.min(STEP_MAX);
        self.shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_after_a_pause_counts_a_step_only() {
        let start = Instant::now();
        let mut clock = Steady::new(start);
        assert_eq!(clock.read(start + TICK), TICK);
        let thawed = start + Duration::from_secs(60);
        assert_eq!(clock.read(thawed), TICK + STEP_MAX);
        assert_eq!(clock.read(thawed + TICK), 2 * TICK + STEP_MAX);
        // An observer that was overtaken.
        assert_eq!(clock.read(start), 2 * TICK + STEP_MAX);
    }
}
