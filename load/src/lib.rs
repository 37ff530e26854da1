//! Load on a cluster through the client, and what it measures: the one place for it, behind both
//! `qute bench` (for users) and `qute-bench` (with brokers of its own).
//!
//! | module | holds |
//! | --- | --- |
//! | [`write`] | records to a topic; latency until the acknowledgement |
//! | [`read`] | a topic from start to end; and reading what is being written |
//! | [`schedule`] | which record is due when |
//! | [`control`] | how far a run is, and ending it early |
//! | [`latency`] | HDR histograms and their JSON |
//! | [`report`] | the figures of a run |
//!
//! With a rate, record i is due at start + i / rate, and its latency counts from when it was due:
//! a stall of the system under test is charged to every record that it held up, sent or not
//! (coordinated omission). Without a rate, [`Load::concurrency`] records are always in flight and
//! latency counts from the call.
//!
//! Nothing here prints, starts brokers or creates topics.

pub mod control;
pub mod latency;
pub mod read;
pub mod report;
pub mod schedule;
pub mod write;

use std::time::Duration;

use qute_client::Compression;

pub use control::Control;
pub use latency::Latencies;
pub use read::{consume, end_to_end};
pub use report::Report;
pub use write::produce;

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The client said so.
    #[error(transparent)]
    Client(#[from] qute_client::Error),
    /// The load makes no sense.
    #[error("{0}")]
    Load(String),
    /// Records that were acknowledged were not read.
    #[error("only {read} of {acknowledged} acknowledged records arrived within {}s", waited.as_secs())]
    Missing {
        /// How many came.
        read: u64,
        /// How many should have.
        acknowledged: u64,
        /// After the last acknowledgement.
        waited: Duration,
    },
    /// The histogram or a task failed: a fault of this program.
    #[error("measuring failed: {0}")]
    Measuring(String),
}

/// What to send and how.
#[derive(Clone, Debug)]
pub struct Load {
    /// Name of the topic; it has to exist.
    pub topic: String,
    /// Bytes of each value, [`schedule::STAMP_BYTES`] at least.
    pub record_bytes: usize,
    /// How many records; `None`: a million, or without end if there is a duration.
    pub records: Option<u64>,
    /// How long.
    pub duration: Option<Duration>,
    /// Records sent first and not counted.
    pub warmup: u64,
    /// Records a second over all senders; `None`: as fast as possible.
    pub rate: Option<f64>,
    /// Records in flight at most.
    pub concurrency: usize,
    /// How long a record may wait for company.
    pub linger: Duration,
    /// Bytes of a batch at most.
    pub batch_bytes: usize,
    /// How batches are compressed.
    pub compression: Compression,
    /// Different keys; 0: none.
    pub keys: u64,
    /// Limit of each record's delivery.
    pub delivery_timeout: Duration,
}

impl Load {
    /// Uncompressed kilobytes without keys, as fast as possible.
    #[must_use]
    pub fn new(topic: impl Into<String>) -> Self {
        Self {
            topic: topic.into(),
            record_bytes: 1024,
            records: None,
            duration: None,
            warmup: 0,
            rate: None,
            concurrency: 4096,
            linger: Duration::ZERO,
            batch_bytes: 256 * 1024,
            compression: Compression::None,
            keys: 0,
            delivery_timeout: Duration::from_secs(120),
        }
    }

    /// Records at most, those of the warm-up included.
    #[must_use]
    pub fn records_max(&self) -> u64 {
        match (self.records, self.duration) {
            (Some(records), _) => records.saturating_add(self.warmup),
            (None, Some(_)) => u64::MAX,
            (None, None) => self.warmup.saturating_add(1_000_000),
        }
    }

    fn check(&self) -> Result<(), Error> {
        if self.record_bytes < schedule::STAMP_BYTES {
            let least = schedule::STAMP_BYTES;
            return Err(Error::Load(format!(
                "a record needs {least} bytes at least"
            )));
        }
        match self.rate {
            Some(rate) if !(rate.is_finite() && rate > 0.0) => Err(Error::Load(
                "a rate is a number of records a second above 0".to_owned(),
            )),
            _ => Ok(()),
        }
    }
}
