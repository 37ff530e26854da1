//! What a partition's traffic looks like from here: written by its driver, read by whoever chooses a
//! partition, without locks.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// The share of the newest acknowledgement in the smoothed latency: one in so many.
const SMOOTHING: u64 = 4;

/// Without anything under way for longer than this, a latency halves each [`FADE`]: how slow a partition
/// was says less and less about how slow it is.
const FADE_AFTER: Duration = Duration::from_millis(250);
const FADE: Duration = Duration::from_millis(500);

/// What a partitioner may know about a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PartitionLoad {
    /// A leader is known and the producer is not backing off from it.
    pub available: bool,
    /// Bytes taken in for it and not acknowledged yet.
    pub queued_bytes: usize,
    /// Smoothed time from sending a batch to its acknowledgement; `None` before the first.
    pub ack_latency: Option<Duration>,
    /// How long ago the last acknowledgement came; `None` before the first.
    pub last_ack: Option<Duration>,
    /// How long the oldest batch that was sent has been waiting for its acknowledgement; `None` if
    /// none is waiting.
    pub oldest_unacknowledged: Option<Duration>,
}

/// The figures of one partition. Each is exact; together they are a sketch.
#[derive(Debug)]
pub(super) struct LoadCell {
    /// Where times count from.
    base: Instant,
    queued_bytes: AtomicUsize,
    /// Microseconds; 0: none yet.
    latency_us: AtomicU64,
    /// Microseconds since `base`, plus one; 0: none.
    acked_at: AtomicU64,
    oldest_at: AtomicU64,
    backing_off: AtomicBool,
}

impl LoadCell {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            base: now,
            queued_bytes: AtomicUsize::new(0),
            latency_us: AtomicU64::new(0),
            acked_at: AtomicU64::new(0),
            oldest_at: AtomicU64::new(0),
            backing_off: AtomicBool::new(false),
        }
    }

    pub(super) fn add_bytes(&self, bytes: usize) {
        self.queued_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn remove_bytes(&self, bytes: usize) {
        self.queued_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// A batch was acknowledged so long after it was sent first.
    pub(super) fn acknowledged(&self, latency: Duration, now: Instant) {
        let (sample, now) = (micros(latency), self.mark(now));
        let smoothed = match self.latency_us.load(Ordering::Relaxed) {
            0 => sample,
            known => {
                let acked_at = self.acked_at.load(Ordering::Relaxed);
                let idle = now.saturating_sub(sample).saturating_sub(acked_at);
                let known = Duration::from_micros(known);
                let known = micros(faded(known, Duration::from_micros(idle)));
                (known * (SMOOTHING - 1) + sample) / SMOOTHING
            }
        };
        self.latency_us.store(smoothed.max(1), Ordering::Relaxed);
        self.acked_at.store(now, Ordering::Relaxed);
    }

    /// When the oldest batch without an answer was sent.
    pub(super) fn set_oldest(&self, sent_at: Option<Instant>) {
        let mark = sent_at.map_or(0, |at| self.mark(at));
        self.oldest_at.store(mark, Ordering::Relaxed);
    }

    pub(super) fn set_backing_off(&self, backing_off: bool) {
        self.backing_off.store(backing_off, Ordering::Relaxed);
    }

    pub(super) fn read(&self, has_leader: bool, now: Instant) -> PartitionLoad {
        let now = self.mark(now);
        let age = |mark: &AtomicU64| match mark.load(Ordering::Relaxed) {
            0 => None,
            mark => Some(Duration::from_micros(now.saturating_sub(mark))),
        };
        let latency_us = self.latency_us.load(Ordering::Relaxed);
        PartitionLoad {
            available: has_leader && !self.backing_off.load(Ordering::Relaxed),
            queued_bytes: self.queued_bytes.load(Ordering::Relaxed),
            ack_latency: (latency_us > 0).then(|| Duration::from_micros(latency_us)),
            last_ack: age(&self.acked_at),
            oldest_unacknowledged: age(&self.oldest_at),
        }
    }

    fn mark(&self, at: Instant) -> u64 {
        micros(at.saturating_duration_since(self.base)).saturating_add(1)
    }
}

impl PartitionLoad {
    /// Of a partition that nothing was sent to yet.
    pub(super) fn untried(has_leader: bool) -> Self {
        Self {
            available: has_leader,
            queued_bytes: 0,
            ack_latency: None,
            last_ack: None,
            oldest_unacknowledged: None,
        }
    }
}

/// What a latency still says after so long without anything under way.
pub(super) fn faded(latency: Duration, idle: Duration) -> Duration {
    let idle = idle.saturating_sub(FADE_AFTER);
    latency.mul_f64(0.5f64.powf(idle.div_duration_f64(FADE)))
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_latency_follows_the_acknowledgements() {
        let base = Instant::now();
        let cell = LoadCell::new(base);
        assert_eq!(cell.read(true, base), PartitionLoad::untried(true));
        let ms = Duration::from_millis;
        cell.acknowledged(ms(8), base + ms(10));
        assert_eq!(cell.read(true, base).ack_latency, Some(ms(8)));
        for _ in 0..50 {
            cell.acknowledged(ms(80), base + ms(10));
        }
        let load = cell.read(true, base + ms(15));
        assert!(load.ack_latency > Some(ms(79)), "{load:?}");
        assert_eq!(load.last_ack, Some(ms(5)));
        cell.set_oldest(Some(base + ms(11)));
        cell.set_backing_off(true);
        let load = cell.read(true, base + ms(15));
        assert_eq!(load.oldest_unacknowledged, Some(ms(4)));
        assert!(!load.available);
    }
}
