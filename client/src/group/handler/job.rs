//! One batch in work: attempts, pauses, dead letters, acknowledgements.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::{HandlerError, RunPolicy, RunReport};
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::group::batch::{Acker, GroupBatch};
use crate::group::event::TopicPartition;
use crate::net::Backoff;
use crate::record::ConsumedRecord;
use crate::trace;

/// Calls the program's handler.
pub(super) type Handle =
    dyn Fn(&[ConsumedRecord]) -> BoxFuture<'static, Result<(), HandlerError>> + Send + Sync;

/// What a handler takes at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    Record,
    Batch,
}

pub(super) struct Job {
    pub(super) policy: Arc<RunPolicy>,
    pub(super) handle: Arc<Handle>,
    pub(super) unit: Unit,
    pub(super) partition: TopicPartition,
    /// Nothing more is to be begun.
    pub(super) stop: CancellationToken,
    pub(super) done: RunReport,
}

/// How a job ended.
pub(super) struct Done {
    pub(super) partition: TopicPartition,
    pub(super) report: RunReport,
    /// Ends the run.
    pub(super) failure: Option<Error>,
}

/// What became of a record, or of a batch.
enum Fate {
    Handled,
    SetAside,
    /// Left to whoever has the partition next.
    Left,
}

impl Job {
    pub(super) async fn run(mut self, batch: GroupBatch) -> Done {
        let result = self.work(batch).await;
        Done {
            partition: self.partition,
            report: self.done,
            failure: result.err(),
        }
    }

    async fn work(&mut self, batch: GroupBatch) -> Result<()> {
        let acker = batch.acker();
        let size = match self.unit {
            Unit::Record => 1,
            Unit::Batch => batch.records().len().max(1),
        };
        for records in batch.records().chunks(size) {
            if self.is_over(&acker) {
                return Ok(());
            }
            let count = u64::try_from(records.len()).unwrap_or(u64::MAX);
            match self.settle(records, &acker).await? {
                Fate::Handled => self.done.handled += count,
                Fate::SetAside => self.done.dead_lettered += count,
                Fate::Left => return Ok(()),
            }
            if let Some(last) = records.last() {
                acker.ack_through(last.offset);
            }
        }
        Ok(())
    }

    fn is_over(&self, acker: &Acker) -> bool {
        self.stop.is_cancelled() || !acker.is_held()
    }

    async fn settle(&mut self, records: &[ConsumedRecord], acker: &Acker) -> Result<Fate> {
        let mut backoff = Backoff::between(self.policy.backoff_min, self.policy.backoff_max);
        let mut attempt = 1;
        let error = loop {
            let Err(error) = self.attempt(records).await else {
                return Ok(Fate::Handled);
            };
            self.done.failed_attempts += 1;
            let offset = records.first().map(|record| record.offset);
            debug!(target: trace::GROUP, partition = %self.partition, offset, attempt, %error, "handler failed");
            if attempt >= self.policy.attempts {
                break error;
            }
            attempt += 1;
            if !self.pause(&mut backoff, acker).await {
                return Ok(Fate::Left);
            }
        };
        self.set_aside(records, error, acker).await
    }

    async fn attempt(&self, records: &[ConsumedRecord]) -> Result<(), HandlerError> {
        let limit = self.policy.attempt_timeout;
        // The call itself is inside as well: what it does before its first await may panic, too.
        let called = AssertUnwindSafe(async { (self.handle)(records).await });
        match timeout(limit, called.catch_unwind()).await {
            Ok(Ok(result)) => result,
            Ok(Err(panic)) => Err(format!("the handler panicked: {}", text_of(&*panic)).into()),
            Err(_) => Err(format!("the handler took longer than {limit:?}").into()),
        }
    }

    /// False: nothing more is to be done.
    async fn pause(&self, backoff: &mut Backoff, acker: &Acker) -> bool {
        tokio::select! {
            () = self.stop.cancelled() => false,
            () = tokio::time::sleep(backoff.step()) => !self.is_over(acker),
        }
    }

    async fn set_aside(
        &mut self,
        records: &[ConsumedRecord],
        error: HandlerError,
        acker: &Acker,
    ) -> Result<Fate> {
        let attempts = self.policy.attempts;
        let policy = Arc::clone(&self.policy);
        let Some((to, producer)) = &policy.dead_letters else {
            return Err(failed(records, error, attempts));
        };
        let mut backoff = Backoff::between(policy.backoff_min, policy.backoff_max);
        for record in records {
            // Whoever has the partition now tries the record itself.
            while acker.is_held() {
                let Err(refused) = producer.send(to.record(record, &error, attempts)).await else {
                    break;
                };
                let may_pass =
                    refused.is_retriable() || refused.outcome() == Some(Outcome::Unknown);
                if !may_pass {
                    return Err(refused);
                }
                debug!(target: trace::GROUP, partition = %self.partition, offset = record.offset, error = %refused, "dead letter not stored yet");
                if !self.pause(&mut backoff, acker).await {
                    return Ok(Fate::Left);
                }
            }
        }
        match acker.is_held() {
            true => Ok(Fate::SetAside),
            false => Ok(Fate::Left),
        }
    }
}

fn failed(records: &[ConsumedRecord], error: HandlerError, attempts: u32) -> Error {
    let message = format!("the handler failed {attempts} times; last: {error}");
    let failed = Error::new(ErrorKind::HandlerFailed, message).with_boxed_source(error);
    match records.first() {
        Some(record) => failed
            .at(&record.topic, record.partition)
            .with_offset(record.offset)
            .with_record(record.clone()),
        None => failed,
    }
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&'static str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no text")
}
