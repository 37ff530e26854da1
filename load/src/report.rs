//! The figures of a run.

use serde_json::{Value, json};

use crate::latency::{Latencies, rounded};

/// What a run has measured.
#[derive(Debug)]
pub struct Report {
    /// Records written and acknowledged, or read, without those of the warm-up.
    pub records: u64,
    /// Bytes of their values.
    pub bytes: u64,
    /// Records that were refused or ran out of time.
    pub errors: u64,
    /// What the first of those said.
    pub first_error: Option<qute_client::Error>,
    /// From the first record's due time to the last acknowledgement, or over the reading.
    pub seconds: f64,
    /// Writing: until the acknowledgement. Writing and reading: until the record was read.
    /// Reading alone has none.
    pub latency: Option<Latencies>,
    /// Writing and reading: until the acknowledgement.
    pub acknowledged: Option<Latencies>,
}

impl Report {
    /// Records a second.
    #[must_use]
    #[allow(clippy::cast_precision_loss)]
    pub fn records_per_s(&self) -> f64 {
        per_second(self.records as f64, self.seconds)
    }

    /// Megabytes (10^6 bytes) of values a second.
    #[must_use]
    #[allow(clippy::cast_precision_loss)]
    pub fn mb_per_s(&self) -> f64 {
        per_second(self.bytes as f64 / 1e6, self.seconds)
    }

    /// As JSON: latencies in milliseconds, null where there are none.
    #[must_use]
    pub fn to_json(&self, bench: &str, settings: Value) -> Value {
        let quantiles = |latencies: &Option<Latencies>| latencies.as_ref().map(Latencies::to_json);
        json!({
            "bench": bench,
            "settings": settings,
            "records": self.records,
            "errors": self.errors,
            "seconds": rounded(self.seconds),
            "records_per_s": rounded(self.records_per_s()),
            "mb_per_s": rounded(self.mb_per_s()),
            "latency_ms": quantiles(&self.latency),
            "acknowledged_ms": quantiles(&self.acknowledged),
        })
    }
}

fn per_second(amount: f64, seconds: f64) -> f64 {
    if seconds > 0.0 { amount / seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_of_nothing_has_rates_of_zero() {
        let report = Report {
            records: 0,
            bytes: 0,
            errors: 0,
            first_error: None,
            seconds: 0.0,
            latency: None,
            acknowledged: None,
        };
        let json = report.to_json("produce", json!({}));
        assert_eq!(json["records_per_s"], 0.0);
        assert_eq!(json["mb_per_s"], 0.0);
        assert!(json["latency_ms"].is_null());
    }
}
