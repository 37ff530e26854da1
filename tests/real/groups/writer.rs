//! Records written to every partition of a topic, until the test says stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use futures::future::try_join_all;
use qute_client::{ProducerConfig, Record};
use qute_tests::wait;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use super::crew::connect;

/// Rounds of one record to each partition.
pub(super) struct Writer {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    task: JoinHandle<Result<()>>,
}

impl Writer {
    /// Begins; each round begins `pace` after the last has been acknowledged.
    pub(super) fn start(
        runtime: &Runtime,
        bootstrap: &str,
        topic: &str,
        partitions: u32,
        pace: Duration,
    ) -> Self {
        let (stop, rounds) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicU64::new(0)),
        );
        let (bootstrap, topic) = (bootstrap.to_owned(), topic.to_owned());
        let (stopping, counted) = (Arc::clone(&stop), Arc::clone(&rounds));
        let task = runtime.spawn(async move {
            let client = connect(&bootstrap).await?;
            let producer = client.producer(ProducerConfig::default())?;
            while !stopping.load(Ordering::Acquire) {
                let round = counted.load(Ordering::Acquire);
                let writes = (0..partitions).map(|partition| {
                    let record = Record::to(topic.as_str()).partition(partition);
                    producer.send(record.value(round.to_string()))
                });
                try_join_all(writes).await?;
                counted.fetch_add(1, Ordering::AcqRel);
                tokio::time::sleep(pace).await;
            }
            Ok(())
        });
        Self { stop, rounds, task }
    }

    /// Waits until as many more rounds have been written.
    pub(super) fn wait_more(&self, rounds: u64) -> Result<()> {
        let wanted = self.rounds.load(Ordering::Acquire) + rounds;
        wait::until_true("records to be written", wait::LONG, || {
            Ok(self.rounds.load(Ordering::Acquire) >= wanted)
        })
    }

    /// Ends, with everything acknowledged.
    pub(super) fn stop(self, runtime: &Runtime) -> Result<()> {
        self.stop.store(true, Ordering::Release);
        let limited = async { tokio::time::timeout(wait::LONG, self.task).await };
        runtime.block_on(limited).context("a write is stuck")??
    }
}
