//! The way of the counters into the `metrics` facade, with the feature of that name; without it,
//! types of no size that do nothing.
//!
//! Handles are taken once, when a client is made: counting then costs what the recorder's own
//! counter costs, and a recorder that is installed later sees nothing of that client.

#[cfg(feature = "metrics")]
pub(super) use facade::{Counter, Gauge, Histogram};
#[cfg(not(feature = "metrics"))]
pub(super) use nothing::{Counter, Gauge, Histogram};

#[cfg(feature = "metrics")]
mod facade {
    use std::time::Duration;

    use parking_lot::Mutex;

    #[derive(Debug)]
    pub(in crate::stats) struct Counter(metrics::Counter);

    impl Counter {
        pub(in crate::stats) fn new(name: &'static str, meaning: &'static str) -> Self {
            metrics::describe_counter!(name, meaning.trim_start());
            Self(metrics::counter!(name))
        }

        pub(in crate::stats) fn add(&self, count: u64) {
            self.0.increment(count);
        }
    }

    #[derive(Debug)]
    pub(in crate::stats) struct Gauge {
        gauge: metrics::Gauge,
        last: Mutex<u64>,
    }

    impl Gauge {
        pub(in crate::stats) fn new(name: &'static str, meaning: &'static str) -> Self {
            metrics::describe_gauge!(name, metrics::Unit::Bytes, meaning.trim_start());
            Self {
                gauge: metrics::gauge!(name),
                last: Mutex::new(0),
            }
        }

        /// Sets this client's part: by difference, since the gauge is that of all clients of the
        /// program.
        pub(in crate::stats) fn set(&self, part: impl FnOnce() -> u64) {
            let mut last = self.last.lock();
            let part = part();
            if part >= *last {
                self.gauge.increment(as_f64(part - *last));
            } else {
                self.gauge.decrement(as_f64(*last - part));
            }
            *last = part;
        }
    }

    #[allow(clippy::cast_precision_loss, reason = "far below 2^53")]
    fn as_f64(value: u64) -> f64 {
        value as f64
    }

    #[derive(Debug)]
    pub(in crate::stats) struct Histogram(metrics::Histogram);

    impl Histogram {
        pub(in crate::stats) fn new(name: &'static str, meaning: &'static str) -> Self {
            metrics::describe_histogram!(name, metrics::Unit::Seconds, meaning.trim_start());
            Self(metrics::histogram!(name))
        }

        pub(in crate::stats) fn record(&self, duration: Duration) {
            self.0.record(duration);
        }
    }
}

#[cfg(not(feature = "metrics"))]
#[allow(
    clippy::unused_self,
    reason = "the same signatures as with the feature"
)]
mod nothing {
    use std::time::Duration;

    #[derive(Debug)]
    pub(in crate::stats) struct Counter;

    impl Counter {
        pub(in crate::stats) fn new(_name: &'static str, _meaning: &'static str) -> Self {
            Self
        }

        pub(in crate::stats) fn add(&self, _count: u64) {}
    }

    #[derive(Debug)]
    pub(in crate::stats) struct Gauge;

    impl Gauge {
        pub(in crate::stats) fn new(_name: &'static str, _meaning: &'static str) -> Self {
            Self
        }

        pub(in crate::stats) fn set(&self, _part: impl FnOnce() -> u64) {}
    }

    #[derive(Debug)]
    pub(in crate::stats) struct Histogram;

    impl Histogram {
        pub(in crate::stats) fn new(_name: &'static str, _meaning: &'static str) -> Self {
            Self
        }

        pub(in crate::stats) fn record(&self, _duration: Duration) {}
    }
}
