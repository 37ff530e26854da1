//! Reads from a replica that does not lead.
//!
//! A follower (voter or learner) serves committed batches up to *its own* high watermark: the end of
//! what it has applied, and only committed entries are applied. What is in its log beyond that may
//! still be cut away by the next leader, and is never shown.
//!
//! - S18: it does not know where the log ends, so an offset at or beyond its high watermark waits.
//! - S17: its log start is replicated state, which never goes back: below it an offset is out of
//!   range here as it is at the leader. Between the log start and the first record that is here (a
//!   replica that began with a snapshot and has not caught up) only others can tell.
//! - Once it has heard no leader for longer than an election takes it says so and stops serving:
//!   its high watermark would never move. Once it leads it stops, too: its readers come back to it
//!   as to a leader.
//!
//! A follower that is cut off together with a leader goes on following it. Nothing wrong is served;
//! that the partition has gone on elsewhere, readers learn from the metadata of other brokers.

use std::time::Duration;

use qute_proto::ids::Offset;

use super::error::Error;
use super::replica::{Chunk, Replica};

impl Replica {
    /// Whether this replica follows a leader; for how much longer it does if that is not heard
    /// again.
    ///
    /// # Errors
    /// [`Error::NotLeader`] if it leads (as a follower it serves nobody then);
    /// [`Error::LeaderLost`]; [`Error::Failed`] once it has stopped (S4).
    fn follows(&self) -> Result<Duration, Error> {
        if let Some(reason) = self.group().stopped() {
            return Err(Error::Failed(reason));
        }
        if self.leadership().is_local {
            return Err(Error::NotLeader);
        }
        let silence = self.group().leader_silence().ok_or(Error::LeaderLost)?;
        let left = self.group().leader_lost_after().checked_sub(silence);
        left.filter(|left| !left.is_zero()).ok_or(Error::LeaderLost)
    }

    /// Whether this replica can serve as a follower now.
    ///
    /// # Errors
    /// [`Error::NotLeader`] if it leads; [`Error::LeaderLost`]; [`Error::Failed`].
    pub fn check_following(&self) -> Result<(), Error> {
        self.follows().map(|_left| ())
    }

    /// Waits until this replica follows a leader; returns the leader's term. One that leads is
    /// refused at once.
    ///
    /// # Errors
    /// [`Error::NotLeader`] if it leads; [`Error::LeaderLost`] after `patience`;
    /// [`Error::NotHere`], [`Error::Failed`].
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn wait_following(&self, patience: Duration) -> Result<u64, Error> {
        let following = async {
            let mut leadership = self.group().watch_leadership();
            let mut applied = self.group().watch_applied();
            loop {
                let now = leadership.current();
                match self.follows() {
                    Ok(_) if now.leader.is_some() => return Ok(now.term),
                    Ok(_) | Err(Error::LeaderLost) => {}
                    Err(error) => return Err(error),
                }
                tokio::select! {
                    changed = self.either_changed(&mut leadership, &mut applied) => changed?,
                    // A first heartbeat need not change either.
                    () = tokio::time::sleep(HEARING) => {}
                }
            }
        };
        tokio::time::timeout(patience, following)
            .await
            .unwrap_or(Err(Error::LeaderLost))
    }

    /// Committed batches from `from` on, as [`Replica::read`] gives them: empty at this replica's
    /// high watermark and ahead of it.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] below the log start (S17); [`Error::NotLeader`] if this replica leads,
    /// or where only others have the records; [`Error::LeaderLost`]; [`Error::Quarantined`],
    /// [`Error::Failed`].
    pub async fn read_following(&self, from: Offset, bytes_max: usize) -> Result<Chunk, Error> {
        self.follows()?;
        let chunk = self.read_committed(from, bytes_max).await?;
        let holds = |chunk: &Chunk| {
            let first = chunk.batches.first();
            first.is_none_or(|first| first.base_offset <= from)
        };
        match chunk {
            Some(chunk) if holds(&chunk) => Ok(chunk),
            // The log start may have moved while files were read.
            _ if from < self.bounds().log_start => Err(self.out_of_range(from)),
            _ => Err(Error::NotLeader),
        }
    }

    /// Waits until this replica's high watermark lies above `offset`.
    ///
    /// # Errors
    /// [`Error::NotLeader`] once it leads; [`Error::LeaderLost`]; [`Error::NotHere`] once it is
    /// closed; [`Error::Failed`].
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn wait_beyond_following(&self, offset: Offset) -> Result<(), Error> {
        let mut leadership = self.group().watch_leadership();
        let mut applied = self.group().watch_applied();
        loop {
            let left = self.follows()?;
            if applied.borrow_and_update().next_offset > offset {
                return Ok(());
            }
            tokio::select! {
                changed = self.either_changed(&mut leadership, &mut applied) => changed?,
                () = tokio::time::sleep(left) => {}
            }
        }
    }
}

/// How often a replica that waits for a leader looks whether it has heard of one.
const HEARING: Duration = Duration::from_millis(50);
