//! HDR histograms and their JSON.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde_json::{Value, json};

use crate::Error;

/// Latencies from one microsecond to an hour, to three digits.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

const MICROS_MAX: u64 = 3_600_000_000;

impl Latencies {
    /// No values yet.
    ///
    /// # Errors
    /// Never with these bounds.
    pub fn new() -> Result<Self, Error> {
        let made = Histogram::new_with_bounds(1, MICROS_MAX, 3);
        made.map(Self)
            .map_err(|error| Error::Measuring(error.to_string()))
    }

    /// Adds one value; what exceeds an hour counts as an hour.
    pub fn record(&mut self, latency: Duration) {
        let micros = u64::try_from(latency.as_micros()).unwrap_or(MICROS_MAX);
        self.0.saturating_record(micros.clamp(1, MICROS_MAX));
    }

    /// Adds all values of another.
    ///
    /// # Errors
    /// Never with equal bounds.
    pub fn add(&mut self, other: &Self) -> Result<(), Error> {
        self.0
            .add(&other.0)
            .map_err(|error| Error::Measuring(error.to_string()))
    }

    /// How many values there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// Quantiles in milliseconds, by name: 0 where there are no values.
    #[must_use]
    pub fn quantiles(&self) -> [(&'static str, f64); 5] {
        let at = |quantile| millis(self.0.value_at_quantile(quantile));
        [
            ("p50", at(0.5)),
            ("p90", at(0.9)),
            ("p99", at(0.99)),
            ("p99_9", at(0.999)),
            ("max", millis(self.0.max())),
        ]
    }

    /// The quantiles as JSON, in milliseconds.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let pairs = self.quantiles();
        Value::Object(
            pairs
                .map(|(name, value)| (name.to_owned(), json!(value)))
                .into_iter()
                .collect(),
        )
    }
}

#[allow(clippy::cast_precision_loss)]
fn millis(micros: u64) -> f64 {
    micros as f64 / 1000.0
}

/// Milliseconds with three digits behind the point.
#[must_use]
pub fn as_millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).round() / 1e3
}

/// Two digits behind the point.
#[must_use]
pub fn rounded(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// The median and the worst of some durations, as JSON in milliseconds, with all of them.
#[must_use]
pub fn summary(durations: &[Duration]) -> Value {
    let mut sorted = durations.to_vec();
    sorted.sort_unstable();
    json!({
        "median_ms": sorted.get(sorted.len() / 2).copied().map(as_millis),
        "worst_ms": sorted.last().copied().map(as_millis),
        "all_ms": durations.iter().copied().map(as_millis).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_quantiles_are_in_milliseconds() {
        let mut latencies = Latencies::new().unwrap();
        for millis in 1..=100 {
            latencies.record(Duration::from_millis(millis));
        }
        let json = latencies.to_json();
        assert!((json["p50"].as_f64().unwrap() - 50.0).abs() < 0.1, "{json}");
        assert!(
            (json["max"].as_f64().unwrap() - 100.0).abs() < 0.1,
            "{json}"
        );
    }

    #[test]
    fn summary_of_durations_names_median_and_worst() {
        let summary = summary(&[3, 1, 2].map(Duration::from_millis));
        assert_eq!(
            (summary["median_ms"].as_f64(), summary["worst_ms"].as_f64()),
            (Some(2.0), Some(3.0))
        );
    }
}
