//! How far a run is, and ending it early, from outside.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use tokio::sync::Notify;

/// A handle on a run. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Control(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    done: AtomicU64,
    stopped: AtomicBool,
    news: Notify,
}

impl Control {
    /// A run that has yet to begin.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Records acknowledged or read until now.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.0.done.load(Relaxed)
    }

    /// Ends the run: what is in flight is waited for, and the figures are those until now.
    pub fn stop(&self) {
        self.0.stopped.store(true, Relaxed);
        self.0.news.notify_waiters();
    }

    pub(crate) fn count(&self, records: u64) {
        self.0.done.fetch_add(records, Relaxed);
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.0.stopped.load(Relaxed)
    }

    /// Resolves once the run is to end.
    pub(crate) async fn stopped(&self) {
        loop {
            let news = self.0.news.notified();
            let mut news = std::pin::pin!(news);
            // Counts from here: a stop between the look and the wait is not missed.
            news.as_mut().enable();
            if self.is_stopped() {
                return;
            }
            news.await;
        }
    }
}
