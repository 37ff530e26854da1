//! What the handle, the flusher and the background thread share of one log.
//!
//! ```text
//!  caller:  append -> State (readable at once) -> queue
//!  flusher:                 queue -> Writer -> segment file -> sync -> synced_end -> callback
//!  readers: State (cache, segments) -> pread
//! ```
//!
//! Lock order: `writer`, then `state`, then a segment's own lock, then the queue or the budget.
//! `state` is held for moments only and never across file access; `writer` is the flusher's.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use tokio::sync::watch;

use super::ahead::Ahead;
use super::error::Error;
use super::shared::Shared;
use super::state::{Cached, State, cost};
use super::types::{Durability, ReplicaKey};
use super::writer::Writer;

/// See the module's documentation.
pub(super) struct LogCore {
    pub key: ReplicaKey,
    pub dir: PathBuf,
    /// Unique in this process.
    pub slot: u64,
    pub shared: Arc<Shared>,
    pub durability: Durability,
    /// Size at which a segment is closed. May change while the log is in use.
    pub segment_bytes: AtomicU64,
    pub state: Mutex<State>,
    pub writer: Mutex<Writer>,
    pub ahead: Ahead,
    /// Index after the last synced frame (S1: marks and checkpoints stay below).
    pub synced_end: AtomicU64,
    /// Index after the last frame that may leave the cache.
    pub stable_end: AtomicU64,
    pub(super) failure: OnceLock<String>,
    failed: watch::Sender<bool>,
}

impl LogCore {
    pub(super) fn new(
        key: ReplicaKey,
        dir: PathBuf,
        shared: Arc<Shared>,
        config: super::types::LogConfig,
        state: State,
        writer: Writer,
        ahead: Ahead,
    ) -> Self {
        static SLOT: AtomicU64 = AtomicU64::new(1);
        let end = state.next_index;
        Self {
            key,
            dir,
            slot: SLOT.fetch_add(1, Ordering::Relaxed),
            shared,
            durability: config.durability,
            segment_bytes: AtomicU64::new(config.segment_bytes),
            state: Mutex::new(state),
            writer: Mutex::new(writer),
            ahead,
            synced_end: AtomicU64::new(end),
            stable_end: AtomicU64::new(end),
            failure: OnceLock::new(),
            failed: watch::Sender::new(false),
        }
    }

    pub(super) fn segment_bytes(&self) -> u64 {
        self.segment_bytes.load(Ordering::Relaxed)
    }

    /// S4: the first failure is final for this process.
    pub(super) fn fail(&self, reason: String) {
        if self.failure.set(reason.clone()).is_err() {
            return;
        }
        tracing::error!(
            replica = %self.key,
            dir = %self.dir.display(),
            reason,
            "a write or sync failed: this replica has stopped here for good"
        );
        metrics::counter!("qute_storage_failed_replicas_total").increment(1);
        self.shared.poisoned.lock().insert(self.key, reason);
        self.clear_cache();
        self.failed.send_replace(true);
    }

    /// The log is being deleted: every later operation is refused.
    pub(super) fn retire(&self) {
        // One that has failed already stays so.
        let _ = self.failure.set("it was removed from this broker".into());
        for segment in &self.state.lock().segments {
            segment.retire();
        }
        self.clear_cache();
        self.failed.send_replace(true);
    }

    pub(super) fn failed(&self) -> watch::Receiver<bool> {
        self.failed.subscribe()
    }

    pub(super) fn failure(&self) -> Option<Error> {
        self.failure.get().map(|reason| Error::Failed {
            replica: self.key,
            reason: reason.clone(),
        })
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        self.failure().map_or(Ok(()), Err)
    }

    fn clear_cache(&self) {
        let gone = std::mem::take(&mut self.state.lock().cache);
        self.uncount(&gone);
    }

    /// Subtracts frames that left the cache from the budget.
    pub(super) fn uncount<'a>(&self, frames: impl IntoIterator<Item = &'a Cached>) {
        let bytes = frames.into_iter().map(|cached| cost(&cached.frame)).sum();
        self.shared.budget.removed(bytes);
    }

    /// Whether a frame up to `last_index` is in memory.
    pub(super) fn has_cached(&self, last_index: u64) -> bool {
        let state = self.state.lock();
        state
            .cache
            .front()
            .is_some_and(|oldest| oldest.frame.index <= last_index)
    }

    /// Lets cached frames up to `last_index` go; `false` when some of them are pinned.
    pub(super) fn evict(&self, last_index: u64) -> bool {
        let stable_end = self.stable_end.load(Ordering::Acquire);
        let mut gone = Vec::new();
        let is_done = {
            let mut state = self.state.lock();
            loop {
                match state.cache.front() {
                    Some(oldest) if oldest.frame.index > last_index => break true,
                    Some(oldest) if oldest.frame.index >= stable_end => break false,
                    Some(_) => gone.extend(state.cache.pop_front()),
                    None => break true,
                }
            }
        };
        self.uncount(&gone);
        is_done
    }
}

impl Drop for LogCore {
    fn drop(&mut self) {
        let gone = std::mem::take(&mut self.state.get_mut().cache);
        self.uncount(&gone);
    }
}
