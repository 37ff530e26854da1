//! Cutting logs of commands (`__cluster`, `__groups`): once checkpoints cover them, nobody needs the
//! entries but followers that lag a little.
//!
//! One task for each such replica, leader or not; it ends with the replica's state machine. Each
//! time a checkpoint has been saved:
//!
//! ```text
//!   purged                kept for followers that lag
//!   ======|-----------------------------------------|
//!         C1     | segment      C2    | segment     log end
//!         ^ gone up to here      ^ Raft snapshot, restart begins here
//! ```
//!
//! - The Raft snapshot is the newest checkpoint: what a follower gets that lags too far.
//! - The log goes up to the checkpoint *before* it: should the newest turn out to be damaged, the
//!   replica is still whole.
//! - The segment in use and the whole one before it stay, whatever checkpoints cover: a follower that
//!   was away for a moment needs no snapshot.
//!
//! S1: a checkpoint is saved only when what it covers is synced, and the log refuses to purge what no
//! saved checkpoint covers. Files go as whole segments, so the machine has a segment begun with each
//! checkpoint.

use std::sync::Arc;
use std::time::Duration;

use openraft::errors::Fatal;
use tokio::sync::watch;
use tokio_util::sync::DropGuard;

use super::types::{Metrics, Raft, TypeConfig};
use crate::storage::Log;

/// A snapshot that has not been taken note of by then is left to the next checkpoint.
const SNAPSHOT_WITHIN: Duration = Duration::from_secs(10);

/// Cuts the log whenever a checkpoint has been saved. Ends when `saved` is closed.
pub(super) async fn run(
    raft: Raft,
    log: Arc<Log>,
    mut saved: watch::Receiver<u64>,
    // Dropped last of all: the log may then be opened again.
    _closed: Option<Arc<DropGuard>>,
) {
    loop {
        saved.borrow_and_update();
        // An error: the replica stops, and so does its state machine.
        if cut(&raft, &log).await.is_err() || saved.changed().await.is_err() {
            return;
        }
    }
}

async fn cut(raft: &Raft, log: &Log) -> Result<(), Fatal<TypeConfig>> {
    let checkpoints = log.checkpoint_indexes();
    let Some(upto) = cut_at(&checkpoints, &log.segment_bases()) else {
        return Ok(());
    };
    if log.purged().is_some_and(|purged| purged.index >= upto) {
        return Ok(());
    }
    raft.trigger().snapshot().await?;
    let newest = checkpoints.last().copied();
    let wait = raft.wait(Some(SNAPSHOT_WITHIN));
    let is_taken = |metrics: &Metrics| metrics.snapshot.map(|last| last.index) >= newest;
    match wait
        .metrics(is_taken, "the newest checkpoint is the snapshot")
        .await
    {
        // Inclusive. Never beyond the snapshot: openraft sees to that, too.
        Ok(_) => raft.trigger().purge_log(upto).await,
        Err(error) => {
            tracing::debug!(replica = %log.key(), %error, "the log is not cut now");
            Ok(())
        }
    }
}

/// Up to which index, inclusive, the log may go.
fn cut_at(checkpoints: &[u64], segment_bases: &[u64]) -> Option<u64> {
    let [.., covered, _newest] = checkpoints else {
        return None;
    };
    let [.., kept, _in_use] = segment_bases else {
        return None;
    };
    Some(kept.checked_sub(1)?.min(*covered))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_goes_up_to_the_checkpoint_before_the_newest_and_keeps_a_whole_segment() {
        assert_eq!(cut_at(&[], &[0]), None);
        assert_eq!(cut_at(&[9], &[0, 10, 20]), None, "nothing to fall back on");
        assert_eq!(cut_at(&[9, 19], &[0]), None, "in use");
        assert_eq!(
            cut_at(&[9, 19], &[0, 20]),
            None,
            "no whole segment would stay"
        );
        assert_eq!(cut_at(&[9, 19], &[0, 12, 22]), Some(9));
        assert_eq!(cut_at(&[9, 19, 29], &[0, 12, 22, 32]), Some(19));
        // Checkpoints run ahead of segments that are long.
        assert_eq!(cut_at(&[9, 19, 29], &[0, 12, 35]), Some(11));
    }
}
