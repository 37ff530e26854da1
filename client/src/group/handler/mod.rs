//! Handlers: a layer over [`GroupConsumer`] that calls a function of the program for each record or batch,
//! tries again what fails, and sets aside what fails for good.
//!
//! ```text
//!  events --> lane of partition 0: batch, batch --> job: try, try again, dead letter, acknowledge
//!         '-> lane of partition 1: batch        --> job
//!              one job each: order is kept          at most so many at once
//! ```
//!
//! [`Run`] owns the consumer and takes its events; each job is a task that works one batch off
//! (`job.rs`). A lane whose job is behind is paused, so that what waits is bounded, and the others go on.
//! The session is kept by a task of its own (`session.rs`): handlers may take their time.
//!
//! Invariants:
//! - a record is acknowledged once its handler has succeeded, or its dead letter is stored;
//! - of a partition one record (or batch) is in work at a time, in order;
//! - what is revoked is given up as soon as the record in work is done, and what was not begun is left to
//!   the next owner.

mod job;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use super::batch::GroupBatch;
use super::consumer::GroupConsumer;
use super::control::GroupControl;
use super::event::{GroupEvent, TopicPartition};
use crate::dead_letter::DeadLetter;
use crate::error::{Error, ErrorKind, Result};
use crate::producer::Producer;
use crate::record::ConsumedRecord;
use job::{Done, Handle, Job, Unit};

/// Why a handler failed: an error of the program's own.
pub type HandlerError = Box<dyn std::error::Error + Send + Sync>;

/// Leaving takes this long at most.
const LEAVE_LIMIT: Duration = Duration::from_secs(10);

type Observer = dyn Fn(&GroupEvent) + Send + Sync;

/// How [`GroupConsumer::run`] calls handlers.
#[derive(Clone)]
pub struct RunPolicy {
    attempts: u32,
    backoff_min: Duration,
    backoff_max: Duration,
    attempt_timeout: Duration,
    partitions_at_once: usize,
    stop_timeout: Duration,
    dead_letters: Option<(DeadLetter, Producer)>,
    observer: Option<Arc<Observer>>,
}

impl Default for RunPolicy {
    /// 5 attempts, pauses of up to 100 ms to 10 s between them, 5 min for each, 16 partitions at once, 30 s to
    /// stop, no dead letters.
    fn default() -> Self {
        Self {
            attempts: 5,
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(10),
            attempt_timeout: Duration::from_secs(5 * 60),
            partitions_at_once: 16,
            stop_timeout: Duration::from_secs(30),
            dead_letters: None,
            observer: None,
        }
    }
}

impl RunPolicy {
    /// How often a record is tried, at least once.
    #[must_use]
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.attempts = attempts.max(1);
        self
    }

    /// How long to pause between attempts: each pause is drawn from zero up to a limit that doubles from
    /// `min` to `max`. The partition waits meanwhile, others go on.
    #[must_use]
    pub fn backoff(mut self, min: Duration, max: Duration) -> Self {
        (self.backoff_min, self.backoff_max) = (min, max);
        self
    }

    /// An attempt that takes longer has failed: its future is dropped.
    #[must_use]
    pub fn attempt_timeout(mut self, timeout: Duration) -> Self {
        self.attempt_timeout = timeout;
        self
    }

    /// How many partitions are worked on at the same time, at least one.
    #[must_use]
    pub fn partitions_at_once(mut self, partitions: usize) -> Self {
        self.partitions_at_once = partitions.max(1);
        self
    }

    /// How long handlers may go on with what they have begun once the run is to stop; then they are
    /// dropped, and the records are read again.
    #[must_use]
    pub fn stop_timeout(mut self, timeout: Duration) -> Self {
        self.stop_timeout = timeout;
        self
    }

    /// What has failed so many times is set aside: its dead letter is written with this producer, and the
    /// record counts as done once that is stored. A crash in between writes it twice, which its
    /// [`crate::DeadLetterOrigin`] tells. As long as it can't be stored the partition waits.
    ///
    /// Without this, a record that fails for good ends the run.
    #[must_use]
    pub fn dead_letters(mut self, to: DeadLetter, producer: Producer) -> Self {
        self.dead_letters = Some((to, producer));
        self
    }

    /// Sees each event of the group before it is acted on. Called in turn with everything else: it must not
    /// block.
    #[must_use]
    pub fn observer(mut self, observer: impl Fn(&GroupEvent) + Send + Sync + 'static) -> Self {
        self.observer = Some(Arc::new(observer));
        self
    }
}

/// What a run has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunReport {
    /// Records whose handler succeeded.
    pub handled: u64,
    /// Attempts that failed.
    pub failed_attempts: u64,
    /// Records set aside.
    pub dead_lettered: u64,
}

impl GroupConsumer {
    /// Calls the handler for each record, until the program stops it or the group can't be read any
    /// more. The records of a partition are handled one after the other, in order, partitions side by
    /// side. A record whose handler fails (returns an error, panics, or takes too long) is tried again, and
    /// then set aside or the end of the run: see [`RunPolicy`].
    ///
    /// Acknowledged records are committed as the builder says ([`super::CommitMode`]); with
    /// [`super::CommitMode::Manual`] nothing is committed but by the program.
    ///
    /// It ends well once `stop` resolves: what is in work is finished, what was acknowledged committed, and
    /// the group left. Also when the group is left through a [`GroupControl`].
    ///
    /// ```no_run
    /// use qute_client::group::RunPolicy;
    /// use qute_client::{Client, ConsumedRecord, DeadLetter, ProducerConfig};
    ///
    /// async fn charge(order: ConsumedRecord) -> std::io::Result<()> {
    ///     println!("{:?}", order.value);
    ///     Ok(())
    /// }
    ///
    /// # async fn example(client: Client) -> qute_client::Result<()> {
    /// let producer = client.producer(ProducerConfig::default())?;
    /// let policy = RunPolicy::default().dead_letters(DeadLetter::to("orders-failed"), producer);
    /// let group = client.group("billing").topics(["orders"]).join().await?;
    /// let stop = async { tokio::signal::ctrl_c().await.unwrap_or_default() };
    /// let report = group.run(policy, charge, stop).await?;
    /// println!("{} orders charged, {} set aside", report.handled, report.dead_lettered);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::HandlerFailed`] with the record and the place, if there are no dead letters; an error of
    /// writing a dead letter that no retry helps; a partition that can't be read any more
    /// ([`GroupEvent::Failed`]); what keeps the group from being read, or from being left in time. What was
    /// acknowledged before is committed.
    ///
    /// # Cancel safety
    /// Dropped, handlers are dropped where they wait, and the member leaves in the background. What is not
    /// acknowledged is read again.
    pub async fn run<H, F, E>(
        self,
        policy: RunPolicy,
        handler: H,
        stop: impl Future<Output = ()>,
    ) -> Result<RunReport>
    where
        H: Fn(ConsumedRecord) -> F + Send + Sync + 'static,
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<HandlerError>,
    {
        let handle: Arc<Handle> = Arc::new(move |records: &[ConsumedRecord]| {
            let called = records.first().map(|record| handler(record.clone()));
            Box::pin(async move {
                match called {
                    Some(called) => called.await.map_err(Into::into),
                    None => Ok(()),
                }
            })
        });
        Run::new(self, policy, handle, Unit::Record)
            .until(stop)
            .await
    }

    /// The same for whole batches, as they come from one partition each: less to call and to commit, and one
    /// record that fails takes its batch with it. All of it is tried again, and set aside together.
    ///
    /// # Errors
    /// As [`Self::run`].
    ///
    /// # Cancel safety
    /// As [`Self::run`].
    pub async fn run_batches<H, F, E>(
        self,
        policy: RunPolicy,
        handler: H,
        stop: impl Future<Output = ()>,
    ) -> Result<RunReport>
    where
        H: Fn(Vec<ConsumedRecord>) -> F + Send + Sync + 'static,
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<HandlerError>,
    {
        let handle: Arc<Handle> = Arc::new(move |records: &[ConsumedRecord]| {
            let called = handler(records.to_vec());
            Box::pin(async move { called.await.map_err(Into::into) })
        });
        Run::new(self, policy, handle, Unit::Batch)
            .until(stop)
            .await
    }
}

/// The batches of one partition, of which one is in work.
#[derive(Default)]
struct Lane {
    waiting: VecDeque<GroupBatch>,
    /// Of the job under way.
    stop: Option<CancellationToken>,
    paused: bool,
    /// To be given up once the job has ended.
    revoked: bool,
}

struct Run {
    consumer: GroupConsumer,
    control: GroupControl,
    policy: Arc<RunPolicy>,
    handle: Arc<Handle>,
    unit: Unit,
    lanes: BTreeMap<TopicPartition, Lane>,
    /// Partitions with a batch and no job, in turn.
    ready: VecDeque<TopicPartition>,
    jobs: JoinSet<Done>,
    report: RunReport,
    failure: Option<Error>,
}

impl Run {
    fn new(consumer: GroupConsumer, policy: RunPolicy, handle: Arc<Handle>, unit: Unit) -> Self {
        Self {
            control: consumer.control(),
            consumer,
            policy: Arc::new(policy),
            handle,
            unit,
            lanes: BTreeMap::new(),
            ready: VecDeque::new(),
            jobs: JoinSet::new(),
            report: RunReport::default(),
            failure: None,
        }
    }

    async fn until(mut self, stop: impl Future<Output = ()>) -> Result<RunReport> {
        let mut stop = std::pin::pin!(stop);
        let mut has_ended = false;
        while self.failure.is_none() {
            self.start();
            tokio::select! {
                () = &mut stop => break,
                Some(done) = self.jobs.join_next(), if !self.jobs.is_empty() => self.done(done),
                event = self.consumer.next() => match event {
                    Some(event) => self.take(event),
                    None => {
                        has_ended = true;
                        break;
                    }
                },
            }
        }
        self.drain().await;
        let left = match has_ended {
            true => Ok(()),
            false => self.consumer.leave(LEAVE_LIMIT).await,
        };
        match self.failure {
            Some(failure) => Err(failure),
            None => left.map(|()| self.report),
        }
    }

    fn take(&mut self, event: GroupEvent) {
        if let Some(observer) = &self.policy.observer {
            observer(&event);
        }
        match event {
            GroupEvent::Batch(batch) => self.queue(batch),
            GroupEvent::Assigned(_) => {}
            GroupEvent::Revoking(revoking) => {
                for partition in revoking.partitions {
                    self.revoke(partition);
                }
            }
            GroupEvent::Lost(lost) => {
                for partition in &lost.partitions {
                    self.forget(partition);
                }
            }
            GroupEvent::Reset { .. } | GroupEvent::TopicRecreated { .. } => {}
            GroupEvent::Failed(error) => self.fail(error),
        }
    }

    fn queue(&mut self, batch: GroupBatch) {
        let partition = batch.topic_partition();
        let lane = self.lanes.entry(partition.clone()).or_default();
        let is_busy = lane.stop.is_some() || !lane.waiting.is_empty();
        lane.waiting.push_back(batch);
        if !is_busy {
            self.ready.push_back(partition);
        } else if !lane.paused {
            lane.paused = true;
            self.control.pause([&partition]);
        }
    }

    /// Begins what may be begun.
    fn start(&mut self) {
        while self.jobs.len() < self.policy.partitions_at_once {
            let Some(partition) = self.ready.pop_front() else {
                return;
            };
            // It is in turn again once the job under way has ended.
            let idle = |lane: &&mut Lane| lane.stop.is_none();
            let Some(lane) = self.lanes.get_mut(&partition).filter(idle) else {
                continue;
            };
            let Some(batch) = lane.waiting.pop_front() else {
                continue;
            };
            if lane.waiting.is_empty() && std::mem::take(&mut lane.paused) {
                self.control.resume([&partition]);
            }
            let stop = CancellationToken::new();
            lane.stop = Some(stop.clone());
            let job = Job {
                policy: Arc::clone(&self.policy),
                handle: Arc::clone(&self.handle),
                unit: self.unit,
                partition,
                stop,
                done: RunReport::default(),
            };
            self.jobs.spawn(job.run(batch));
        }
    }

    fn done(&mut self, done: Result<Done, tokio::task::JoinError>) {
        let done = match done {
            Ok(done) => done,
            // Handlers' panics are caught: this is the runtime's end.
            Err(error) => {
                let ended = Error::closed("handlers' runtime").with_cause(&error);
                self.failure.get_or_insert(ended);
                return;
            }
        };
        self.report.handled += done.report.handled;
        self.report.failed_attempts += done.report.failed_attempts;
        self.report.dead_lettered += done.report.dead_lettered;
        if let Some(error) = done.failure {
            self.failure.get_or_insert(error);
        }
        let Some(lane) = self.lanes.get_mut(&done.partition) else {
            return;
        };
        lane.stop = None;
        if std::mem::take(&mut lane.revoked) {
            self.control.give_up([&done.partition]);
        }
        if !lane.waiting.is_empty() {
            self.ready.push_back(done.partition);
        }
    }

    /// What was not begun is left to the next owner, what was begun comes to its end.
    fn revoke(&mut self, partition: TopicPartition) {
        self.forget(&partition);
        match self.lanes.get_mut(&partition) {
            Some(lane) if lane.stop.is_some() => lane.revoked = true,
            _ => self.control.give_up([&partition]),
        }
    }

    fn forget(&mut self, partition: &TopicPartition) {
        self.ready.retain(|ready| ready != partition);
        if let Some(lane) = self.lanes.get_mut(partition) {
            lane.waiting.clear();
            lane.paused = false;
            lane.revoked = false;
            if let Some(stop) = &lane.stop {
                stop.cancel();
            }
        }
    }

    /// Ends the run if what failed does not come back by itself.
    fn fail(&mut self, error: Error) {
        let goes_on = matches!(
            error.kind(),
            ErrorKind::Intercepted | ErrorKind::ProcessingLimit | ErrorKind::NotAssigned
        );
        // A topic that was deleted is no partition that stands still.
        let is_deleted = error.topic().is_some() && error.partition().is_none();
        if !goes_on && !is_deleted {
            self.failure.get_or_insert(error);
        }
    }

    /// Waits for what is in work.
    async fn drain(&mut self) {
        let deadline = Instant::now() + self.policy.stop_timeout;
        for lane in self.lanes.values_mut() {
            lane.waiting.clear();
            if let Some(stop) = &lane.stop {
                stop.cancel();
            }
        }
        while !self.jobs.is_empty() {
            match timeout_at(deadline, self.jobs.join_next()).await {
                Ok(Some(done)) => self.done(done),
                Ok(None) => return,
                Err(_) => {
                    self.jobs.abort_all();
                    return;
                }
            }
        }
    }
}

impl fmt::Debug for RunPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunPolicy")
            .field("attempts", &self.attempts)
            .field("backoff_min", &self.backoff_min)
            .field("backoff_max", &self.backoff_max)
            .field("attempt_timeout", &self.attempt_timeout)
            .field("partitions_at_once", &self.partitions_at_once)
            .field("stop_timeout", &self.stop_timeout)
            .field(
                "dead_letters",
                &self.dead_letters.as_ref().map(|(to, _)| to),
            )
            .finish_non_exhaustive()
    }
}
