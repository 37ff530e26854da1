//! When a replica last heard from a leader.
//!
//! openraft keeps this to itself, and goes on naming a leader that has long been silent. Whoever
//! serves reads as a follower has to know. Costs a store per answered append; wakes nobody.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use openraft::raft::AppendEntriesResponse;
use tokio::time::Instant;

use super::types::TypeConfig;

/// The last sign of life of a leader that this replica accepts.
pub(super) struct Contact {
    base: Instant,
    /// Milliseconds from `base`, plus one; 0: never.
    heard: AtomicU64,
}

impl Contact {
    pub(super) fn new() -> Self {
        Self {
            base: Instant::now(),
            heard: AtomicU64::new(0),
        }
    }

    /// An append or heartbeat was answered: it counts unless its sender was deposed.
    pub(super) fn answered(&self, response: &AppendEntriesResponse<TypeConfig>) {
        if !matches!(response, AppendEntriesResponse::HigherVote(_)) {
            self.heard();
        }
    }

    /// A leader was heard now.
    pub(super) fn heard(&self) {
        let now = u64::try_from(self.base.elapsed().as_millis()).unwrap_or(u64::MAX);
        // Statistics of time: no other memory hangs on it.
        self.heard
            .fetch_max(now.saturating_add(1), Ordering::Relaxed);
    }

    /// How long ago that was; `None` if never since this replica was opened.
    pub(super) fn silence(&self) -> Option<Duration> {
        let heard = self.heard.load(Ordering::Relaxed).checked_sub(1)?;
        Some(
            self.base
                .elapsed()
                .saturating_sub(Duration::from_millis(heard)),
        )
    }
}

#[cfg(test)]
mod tests {
    use openraft::Vote;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn silence_is_counted_from_the_last_accepted_append() {
        let contact = Contact::new();
        tokio::time::advance(Duration::from_millis(10)).await;
        assert_eq!(contact.silence(), None);
        contact.answered(&AppendEntriesResponse::Success);
        tokio::time::advance(Duration::from_millis(300)).await;
        assert_eq!(contact.silence(), Some(Duration::from_millis(300)));
        // A deposed leader is none.
        contact.answered(&AppendEntriesResponse::HigherVote(Vote::new(2, 1)));
        assert_eq!(contact.silence(), Some(Duration::from_millis(300)));
        contact.answered(&AppendEntriesResponse::Conflict);
        assert_eq!(contact.silence(), Some(Duration::ZERO));
    }
}
