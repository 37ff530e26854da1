//! What has passed through a proxy: how many requests, and how many at once.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::call::Call;

#[derive(Clone, Copy, Debug, Default)]
struct Meter {
    count: u64,
    in_flight: u64,
    in_flight_max: u64,
}

/// Counts by call.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meters {
    by_call: Arc<Mutex<HashMap<Call, Meter>>>,
}

/// A request under way, until it is dropped.
#[derive(Debug)]
pub(crate) struct UnderWay {
    meters: Meters,
    call: Call,
}

impl Meters {
    pub(crate) fn begin(&self, call: Call) -> UnderWay {
        let mut by_call = self.by_call.lock();
        let meter = by_call.entry(call).or_default();
        meter.count += 1;
        meter.in_flight += 1;
        meter.in_flight_max = meter.in_flight_max.max(meter.in_flight);
        UnderWay {
            meters: self.clone(),
            call,
        }
    }

    fn of(&self, call: Call) -> Meter {
        self.by_call.lock().get(&call).copied().unwrap_or_default()
    }

    pub(crate) fn count(&self, call: Call) -> u64 {
        self.of(call).count
    }

    pub(crate) fn in_flight(&self, call: Call) -> u64 {
        self.of(call).in_flight
    }

    pub(crate) fn in_flight_max(&self, call: Call) -> u64 {
        self.of(call).in_flight_max
    }

    /// Begins to count anew; what is under way now counts as in flight.
    pub(crate) fn restart(&self) {
        for meter in self.by_call.lock().values_mut() {
            meter.count = 0;
            meter.in_flight_max = meter.in_flight;
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if let Some(meter) = self.meters.by_call.lock().get_mut(&self.call) {
            meter.in_flight = meter.in_flight.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meters_know_the_most_at_once() {
        let meters = Meters::default();
        let first = meters.begin(Call::Metadata);
        drop(meters.begin(Call::Metadata));
        drop(first);
        let third = meters.begin(Call::Metadata);
        assert_eq!(meters.count(Call::Metadata), 3);
        assert_eq!(meters.in_flight_max(Call::Metadata), 2);
        meters.restart();
        assert_eq!(meters.count(Call::Metadata), 0);
        assert_eq!(meters.in_flight_max(Call::Metadata), 1);
        drop(third);
        assert_eq!(meters.in_flight(Call::Metadata), 0);
    }
}
