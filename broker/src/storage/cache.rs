//! The byte budget of the tail caches.
//!
//! Every log keeps its newest frames in memory (in its own state); this is the one budget for all
//! of them. Frames leave in the order in which they came, whichever log they are of; frames that
//! are not stable yet (unsynced, S4: apply and replication read them) are pinned and stay. Where
//! purges and truncations keep the caches small, entries without frames are swept out now and then.

use std::collections::VecDeque;
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::log_core::LogCore;

/// See the module's documentation.
pub(super) struct TailBudget {
    bytes_max: u64,
    used_bytes: AtomicU64,
    ages: Mutex<Ages>,
}

/// Of a log, the frames up to an index, all that came in with one append.
type Age = (Weak<LogCore>, u64);

struct Ages {
    oldest: VecDeque<Age>,
    /// Swept when there are so many: twice what the last sweep left.
    sweep_at: usize,
}

const SWEEP_AT_MIN: usize = 1024;

impl TailBudget {
    pub(super) fn new(bytes_max: u64) -> Self {
        Self {
            bytes_max,
            used_bytes: AtomicU64::new(0),
            ages: Mutex::new(Ages {
                oldest: VecDeque::new(),
                sweep_at: SWEEP_AT_MIN,
            }),
        }
    }

    pub(super) fn used(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Frames up to `last_index` of a log came in. Called with that log's state locked.
    pub(super) fn added(&self, log: Weak<LogCore>, last_index: u64, bytes: u64) {
        self.used_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.ages.lock().oldest.push_back((log, last_index));
    }

    /// Frames left a cache.
    pub(super) fn removed(&self, bytes: u64) {
        // Counted after it was added, always.
        self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Lets the oldest frames go until the budget is kept, or what is oldest is pinned.
    /// Called without any log's lock held.
    pub(super) fn trim(&self) {
        self.sweep();
        while self.used() > self.bytes_max {
            let Some((log, last_index)) = self.ages.lock().oldest.pop_front() else {
                return;
            };
            let Some(core) = log.upgrade() else {
                continue;
            };
            if !core.evict(last_index) {
                self.ages.lock().oldest.push_front((log, last_index));
                return;
            }
        }
    }

    /// Forgets appends of which nothing is cached any more, so that what is kept here is bounded by
    /// what is cached.
    fn sweep(&self) {
        let mut oldest = {
            let mut ages = self.ages.lock();
            if ages.oldest.len() < ages.sweep_at {
                return;
            }
            std::mem::take(&mut ages.oldest)
        };
        // Not under the lock: an append takes it with its log's state locked.
        oldest.retain(|(log, last_index)| {
            log.upgrade()
                .is_some_and(|core| core.has_cached(*last_index))
        });
        let mut ages = self.ages.lock();
        ages.sweep_at = SWEEP_AT_MIN.max(oldest.len() * 2);
        oldest.append(&mut ages.oldest);
        ages.oldest = oldest;
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.ages.lock().oldest.len()
    }
}
