//! How busy a broker is with the calls of this client: those under way, weighted by how long they
//! took lately. Pure.

use std::time::Duration;

/// How much a new measurement counts.
const WEIGHT: f64 = 0.2;

/// The load of one address.
#[derive(Debug, Clone, Default)]
pub(super) struct Load {
    under_way: u32,
    /// Moving average, seconds.
    latency_s: f64,
}

impl Load {
    pub(super) fn begin(&mut self) {
        self.under_way = self.under_way.saturating_add(1);
    }

    pub(super) fn end(&mut self) {
        self.under_way = self.under_way.saturating_sub(1);
    }

    /// A call was answered.
    pub(super) fn took(&mut self, time: Duration) {
        let time = time.as_secs_f64();
        // A peak counts at once, recovery has to be shown (as in Finagle's peak EWMA).
        self.latency_s = if time > self.latency_s {
            time
        } else {
            self.latency_s + (time - self.latency_s) * WEIGHT
        };
    }

    /// A call was given up after this time, its answer was not waited for: it takes so long at least.
    pub(super) fn gave_up(&mut self, time: Duration) {
        self.latency_s = self.latency_s.max(time.as_secs_f64());
    }

    /// What one more call would cost: the expected time in seconds with the queue in front of it.
    pub(super) fn cost(&self) -> f64 {
        f64::from(self.under_way + 1) * self.latency_s.max(1e-6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_rises_with_calls_under_way_and_with_their_time() {
        let mut load = Load::default();
        let idle = load.cost();
        load.begin();
        load.begin();
        assert!(load.cost() > idle);
        load.end();
        load.end();
        assert!((load.cost() - idle).abs() < 1e-12);
        load.took(Duration::from_millis(100));
        let slow = load.cost();
        assert!(slow > idle);
        for _ in 0..50 {
            load.took(Duration::from_millis(1));
        }
        assert!(load.cost() < slow / 10.0);
    }

    #[test]
    fn load_rises_with_a_call_that_was_given_up_and_never_falls_by_one() {
        let mut load = Load::default();
        load.took(Duration::from_millis(10));
        let answered = load.cost();
        load.gave_up(Duration::from_millis(1));
        assert!((load.cost() - answered).abs() < 1e-12);
        load.gave_up(Duration::from_millis(300));
        assert!(load.cost() > 10.0 * answered);
    }
}
