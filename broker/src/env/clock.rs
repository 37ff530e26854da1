//! Time: the wall clock that stamps records and the monotonic clock that measures waits.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Where the broker reads time.
pub trait Clock: Send + Sync + 'static {
    /// Wall-clock time in Unix milliseconds. May jump, either way.
    fn wall_ms(&self) -> u64;

    /// Monotonic time.
    fn now(&self) -> Instant;
}

/// The clocks of the operating system.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn wall_ms(&self) -> u64 {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| {
                u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
            })
    }

    fn now(&self) -> Instant {
        Instant::now()
    }
}

/// A clock that moves only when told to.
#[derive(Debug)]
pub struct ManualClock {
    origin: Instant,
    elapsed_ms: AtomicU64,
    wall_start_ms: u64,
}

impl ManualClock {
    /// A clock that shows `wall_ms` until it is advanced.
    #[must_use]
    pub fn new(wall_ms: u64) -> Self {
        Self {
            origin: Instant::now(),
            elapsed_ms: AtomicU64::new(0),
            wall_start_ms: wall_ms,
        }
    }

    /// Moves both clocks forward.
    pub fn advance(&self, by: Duration) {
        let by_ms = u64::try_from(by.as_millis()).unwrap_or(u64::MAX);
        self.elapsed_ms.fetch_add(by_ms, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn wall_ms(&self) -> u64 {
        self.wall_start_ms + self.elapsed_ms.load(Ordering::SeqCst)
    }

    fn now(&self) -> Instant {
        self.origin + Duration::from_millis(self.elapsed_ms.load(Ordering::SeqCst))
    }
}
