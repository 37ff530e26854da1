//! Work that many want done, done once: one run at a time, and callers that come while one is under
//! way share the next, which has begun after they asked.

use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Mutex;

use crate::error::Result;

#[derive(Debug, Default)]
pub(super) struct SingleFlight {
    /// How many runs have begun.
    begun: AtomicU64,
    /// Held while one is under way.
    last: Mutex<Completed>,
}

/// The last run that completed.
#[derive(Debug, Default)]
struct Completed {
    number: u64,
    result: Option<Result<()>>,
}

impl SingleFlight {
    /// The result of a run that has begun after this call. `work` runs only if nobody else's does.
    ///
    /// # Cancel safety
    /// A cancelled caller leaves the work to the next one.
    pub(super) async fn run(&self, work: impl Future<Output = Result<()>>) -> Result<()> {
        let seen = self.begun.load(Ordering::Acquire);
        let mut last = self.last.lock().await;
        if last.number > seen
            && let Some(result) = &last.result
        {
            return result.clone();
        }
        let number = self.begun.fetch_add(1, Ordering::AcqRel) + 1;
        let result = work.await;
        *last = Completed {
            number,
            result: Some(result.clone()),
        };
        result
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn single_flight_of_a_thousand_callers_runs_one_at_a_time_and_twice_at_most() {
        let flight = Arc::new(SingleFlight::default());
        let (runs, running) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let caller = || {
            let (flight, runs, running) =
                (Arc::clone(&flight), Arc::clone(&runs), Arc::clone(&running));
            tokio::spawn(async move {
                let work = async {
                    runs.fetch_add(1, Ordering::Relaxed);
                    assert_eq!(running.fetch_add(1, Ordering::Relaxed), 0);
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    running.fetch_sub(1, Ordering::Relaxed);
                    Ok(())
                };
                flight.run(work).await
            })
        };
        let callers: Vec<_> = (0..1000).map(|_| caller()).collect();
        for caller in callers {
            caller.await.unwrap().unwrap();
        }
        let runs = runs.load(Ordering::Relaxed);
        assert!((1..=2).contains(&runs), "{runs}");
    }

    #[tokio::test(start_paused = true)]
    async fn single_flight_whose_runner_is_cancelled_is_taken_over() {
        let flight = SingleFlight::default();
        let stuck = flight.run(std::future::pending());
        assert!(
            tokio::time::timeout(Duration::from_secs(1), stuck)
                .await
                .is_err()
        );
        flight.run(async { Ok(()) }).await.unwrap();
    }
}
