//! What a client has done so far: counters in atomics, one set for all handles of a client.
//!
//! [`crate::Client::stats`] reads them. With the feature `metrics`, each also counts in the recorder
//! of the `metrics` crate that is installed when the client is made; `docs/METRICS.md` lists the
//! names.

mod export;
mod histogram;

use std::fmt;
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::Mutex;

use crate::error::{Error, Outcome, Result};
use histogram::Histogram;
pub use histogram::LatencyStats;

/// Defines each counter once: field, name of the metric, meaning.
macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $field:ident = $name:literal,)+) => {
        /// The counters of one client. Relaxed: each is exact, they need not agree with each other.
        #[derive(Debug)]
        pub(crate) struct Stats {
            $(pub(crate) $field: Counter,)+
            ack_latency: Histogram,
            exported_ack_latency: export::Histogram,
            buffers: Buffers,
        }

        impl Default for Stats {
            fn default() -> Self {
                Self {
                    $($field: Counter::new($name, concat!($($doc),+)),)+
                    ack_latency: Histogram::default(),
                    exported_ack_latency: export::Histogram::new(
                        "qute_client_ack_seconds",
                        "From a batch's first record being taken in to its acknowledgement.",
                    ),
                    buffers: Buffers::new(export::Gauge::new(
                        "qute_client_buffer_bytes",
                        "Bytes of records that producers hold, for want of a fate.",
                    )),
                }
            }
        }

        /// What a client has done since it was made, all its producers and consumers together, and
        /// what its producers hold now. Read one after another: the figures need not agree with
        /// each other to the last record.
        #[derive(Debug, Clone, PartialEq, Eq, Default)]
        #[non_exhaustive]
        pub struct ClientStats {
            $($(#[doc = $doc])+ #[doc = concat!("\n\nMetric `", $name, "`.")] pub $field: u64,)+
            /// Bytes of records that producers hold now, for want of a fate (their buffers).
            ///
            /// Metric `qute_client_buffer_bytes`, a gauge.
            pub buffer_bytes: u64,
            /// From a batch's first record being taken in to the batch's acknowledgement.
            ///
            /// Metric `qute_client_ack_seconds`, a histogram.
            pub ack_latency: LatencyStats,
        }

        impl Stats {
            pub(crate) fn snapshot(&self) -> ClientStats {
                ClientStats {
                    $($field: self.$field.get(),)+
                    buffer_bytes: self.buffers.used(),
                    ack_latency: self.ack_latency.stats(),
                }
            }
        }
    };
}

counters! {
    /// Batches sent, repeats included.
    batches_sent = "qute_client_batches_sent_total",
    /// Records in the batches sent, repeats included.
    records_sent = "qute_client_records_sent_total",
    /// Bytes of the batches sent, as sent (compressed), repeats included.
    bytes_sent = "qute_client_bytes_sent_total",
    /// Of the batches sent, the repeats.
    batches_retried = "qute_client_batches_retried_total",
    /// Refusals of batches by brokers; most are followed by a repeat.
    batches_refused = "qute_client_batches_refused_total",
    /// Batches acknowledged.
    batches_acked = "qute_client_batches_acked_total",
    /// Records that are stored.
    records_acked = "qute_client_records_acked_total",
    /// Records that were taken in and not written.
    records_not_written = "qute_client_records_not_written_total",
    /// Records that may or may not be written.
    records_unknown = "qute_client_records_unknown_total",
    /// Batches received by consumers, those that arrive twice after a change of leader included.
    batches_fetched = "qute_client_batches_fetched_total",
    /// Records in the batches received.
    records_fetched = "qute_client_records_fetched_total",
    /// Bytes of the batches received, as received (compressed).
    bytes_fetched = "qute_client_bytes_fetched_total",
    /// Bytes of records decoded for programs, after decompression.
    bytes_decompressed = "qute_client_bytes_decompressed_total",
    /// Refreshes of the view of the cluster that were begun.
    metadata_refreshes = "qute_client_metadata_refreshes_total",
    /// Of those, the ones that no broker answered.
    metadata_refresh_failures = "qute_client_metadata_refresh_failures_total",
    /// Views of the cluster that were new and taken in, asked for or pushed.
    metadata_updates = "qute_client_metadata_updates_total",
    /// Leader hints obeyed, since their epoch was newer.
    hints_obeyed = "qute_client_hints_obeyed_total",
    /// Leader hints ignored, since their epoch was not newer, or their broker not known.
    hints_ignored = "qute_client_hints_ignored_total",
    /// Connections made.
    connections_opened = "qute_client_connections_opened_total",
    /// Attempts at a connection that failed.
    connections_failed = "qute_client_connections_failed_total",
    /// Connections given up because they may have been half dead.
    connections_discarded = "qute_client_connections_discarded_total",
    /// Times that a broker was left alone for a while after failures in a row.
    breaker_openings = "qute_client_breaker_openings_total",
}

/// A number that only grows.
#[derive(Debug)]
pub(crate) struct Counter {
    value: AtomicU64,
    exported: export::Counter,
}

impl Counter {
    fn new(name: &'static str, meaning: &'static str) -> Self {
        Self {
            value: AtomicU64::new(0),
            exported: export::Counter::new(name, meaning),
        }
    }

    pub(crate) fn add(&self, count: u64) {
        self.value.fetch_add(count, Relaxed);
        self.exported.add(count);
    }

    pub(crate) fn increment(&self) {
        self.add(1);
    }

    pub(crate) fn get(&self) -> u64 {
        self.value.load(Relaxed)
    }
}

impl Stats {
    /// A batch went into a stream.
    pub(crate) fn sent(&self, records: u32, bytes: usize, repeat: bool) {
        self.batches_sent.increment();
        self.records_sent.add(records.into());
        self.bytes_sent.add(count(bytes));
        if repeat {
            self.batches_retried.increment();
        }
    }

    /// The fate of a batch is decided, so long after its first record was taken in.
    pub(crate) fn resolved<T>(&self, records: u32, result: &Result<T>, after: Duration) {
        match result.as_ref().map_err(Error::outcome) {
            Ok(_) | Err(Some(Outcome::Ok)) => {
                self.batches_acked.increment();
                self.records_acked.add(records.into());
                self.ack_latency.record(after);
                self.exported_ack_latency.record(after);
            }
            Err(Some(Outcome::NotWritten)) => self.records_not_written.add(records.into()),
            Err(Some(Outcome::Unknown) | None) => self.records_unknown.add(records.into()),
        }
    }

    /// A batch arrived.
    pub(crate) fn fetched(&self, records: u32, bytes: usize) {
        self.batches_fetched.increment();
        self.records_fetched.add(records.into());
        self.bytes_fetched.add(count(bytes));
    }

    /// A leader hint was judged.
    pub(crate) fn hinted(&self, obeyed: bool) {
        if obeyed {
            self.hints_obeyed.increment();
        } else {
            self.hints_ignored.increment();
        }
    }

    /// A producer has come, with this buffer.
    pub(crate) fn watch_buffer(&self, buffer: Weak<dyn Buffer>) {
        self.buffers.watch(buffer);
    }

    /// Something came into a buffer or left it; told once a batch, not once a record.
    pub(crate) fn buffer_changed(&self) {
        self.buffers.exported.set(|| self.buffers.used());
    }
}

fn count(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// A producer's buffer.
pub(crate) trait Buffer: fmt::Debug + Send + Sync {
    /// Bytes that are in it now.
    fn held_bytes(&self) -> usize;
}

/// The buffers of a client's producers: looked at when somebody asks, so that no record pays.
#[derive(Debug)]
struct Buffers {
    /// Each gone with the producer and its last record.
    open: Mutex<Vec<Weak<dyn Buffer>>>,
    exported: export::Gauge,
}

impl Buffers {
    fn new(exported: export::Gauge) -> Self {
        Self {
            open: Mutex::default(),
            exported,
        }
    }

    fn watch(&self, buffer: Weak<dyn Buffer>) {
        let mut open = self.open.lock();
        open.retain(|buffer| buffer.strong_count() > 0);
        open.push(buffer);
    }

    fn used(&self) -> u64 {
        let used = |buffer: &Weak<dyn Buffer>| Some(count(buffer.upgrade()?.held_bytes()));
        self.open.lock().iter().filter_map(used).sum()
    }
}
