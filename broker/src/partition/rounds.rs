//! ReadIndex rounds that many share: idle readers of one replica need no round each.
//!
//! A round serves whoever asks while it runs, and whoever asks soon after a good one. That shows
//! a reader that its leader is alive; it is no proof that a read needs (S18), which a round begun
//! after the request gives.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

use super::error::Error;

/// A round that has ended.
struct Round {
    began: Instant,
    ended: Instant,
    /// The leader epoch it confirmed.
    outcome: Result<u64, Error>,
}

/// The rounds of one replica.
#[derive(Default)]
pub(super) struct Rounds {
    /// Locked while a round runs: whoever waits for it shares it.
    last: Mutex<Option<Round>>,
}

impl Rounds {
    /// Runs `round`, or takes the outcome of one that began at most `recent` ago and confirmed
    /// `leader_epoch`, or that has failed since the call.
    ///
    /// # Errors
    /// The round's.
    ///
    /// # Cancel safety
    /// Safe: the next one that waits runs a round of its own.
    pub(super) async fn share(
        &self,
        leader_epoch: u64,
        recent: Duration,
        round: impl Future<Output = Result<u64, Error>>,
    ) -> Result<(), Error> {
        let asked = Instant::now();
        let mut last = self.last.lock().await;
        let shared = last.as_ref().filter(|last| match last.outcome {
            Ok(confirmed) => confirmed == leader_epoch && last.began.elapsed() < recent,
            Err(_) => last.ended >= asked,
        });
        let outcome = match shared {
            Some(shared) => shared.outcome.clone(),
            None => {
                let began = Instant::now();
                let outcome = round.await;
                *last = Some(Round {
                    began,
                    ended: Instant::now(),
                    outcome: outcome.clone(),
                });
                outcome
            }
        };
        outcome.map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use futures::future::join_all;

    use super::*;

    const RECENT: Duration = Duration::from_secs(5);

    /// A round of two seconds that counts itself.
    async fn round(count: &Cell<u32>, outcome: Result<u64, Error>) -> Result<u64, Error> {
        count.set(count.get() + 1);
        tokio::time::sleep(Duration::from_secs(2)).await;
        outcome
    }

    #[tokio::test(start_paused = true)]
    async fn readers_of_one_replica_share_a_round_until_it_is_old() {
        let (rounds, count) = (Rounds::default(), Cell::new(0));
        let ask = |epoch| rounds.share(epoch, RECENT, round(&count, Ok(epoch)));
        for outcome in join_all((0..50).map(|_| ask(4))).await {
            assert_eq!(outcome, Ok(()));
        }
        assert_eq!(count.get(), 1);
        ask(4).await.unwrap();
        assert_eq!(count.get(), 1);
        ask(5).await.unwrap();
        assert_eq!(count.get(), 2, "another leader epoch");
        tokio::time::advance(RECENT).await;
        ask(5).await.unwrap();
        assert_eq!(count.get(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn failed_round_ends_all_that_wait_for_it_and_no_later_ones() {
        let (rounds, count) = (Rounds::default(), Cell::new(0));
        let ask = |outcome| rounds.share(4, RECENT, round(&count, outcome));
        for outcome in join_all((0..50).map(|_| ask(Err(Error::NotReady)))).await {
            assert_eq!(outcome, Err(Error::NotReady));
        }
        assert_eq!(count.get(), 1);
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(ask(Ok(4)).await, Ok(()));
        assert_eq!(count.get(), 2);
    }
}
