//! The byte budget of the tail caches.
//!
//! Every log keeps its newest frames in memory (in its own state); this is the one budget for all
//! of them. Frames leave in the order in which they came, whichever log they are of; frames that
//! are not stable yet (unsynced, S4: apply and replication read them) are pinned and stay.

use std::collections::VecDeque;
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::log_core::LogCore;

/// See the module's documentation.
pub(super) struct TailBudget {
    bytes_max: u64,
    used_bytes: AtomicU64,
    oldest: Mutex<VecDeque<(Weak<LogCore>, u64)>>,
}

impl TailBudget {
    pub(super) fn new(bytes_max: u64) -> Self {
        Self {
            bytes_max,
            used_bytes: AtomicU64::new(0),
            oldest: Mutex::new(VecDeque::new()),
        }
    }

    pub(super) fn used(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Frames up to `last_index` of a log came in. Called with that log's state locked.
    pub(super) fn added(&self, log: Weak<LogCore>, last_index: u64, bytes: u64) {
        self.used_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.oldest.lock().push_back((log, last_index));
    }

    /// Frames left a cache.
    pub(super) fn removed(&self, bytes: u64) {
        // Counted after it was added, always.
        self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Lets the oldest frames go until the budget is kept, or what is oldest is pinned.
    /// Called without any log's lock held.
    pub(super) fn trim(&self) {
        while self.used() > self.bytes_max {
            let Some((log, last_index)) = self.oldest.lock().pop_front() else {
                return;
            };
            let Some(core) = log.upgrade() else {
                continue;
            };
            if !core.evict(last_index) {
                self.oldest.lock().push_front((log, last_index));
                return;
            }
        }
    }
}
