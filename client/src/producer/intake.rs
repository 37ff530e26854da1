//! How a record is taken in: topic, partition, room, queue.
//!
//! ```text
//!  known topic, room, turn?  --yes-->  queue         (without waiting: most records)
//!         | no
//!  metadata, or create the topic  ->  partition  ->  wait for room  ->  queue
//!         ^                                              |
//!         '---- the incarnation is gone, another is there
//! ```
//!
//! All waiting ends with the record's deadline, which counts from the call, or with the producer.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use qute_proto::batch::{BatchError, RecordRef};
use qute_proto::ids::ProducerId;
use tokio::sync::watch;
use tokio::task::coop;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::budget::Budget;
use super::config::ProducerConfig;
use super::fate::Ticket;
use super::link::Links;
use super::queue::PartitionQueue;
use super::report::Tally;
use super::topics::{TopicQueues, Topics};
use crate::client::Shared;
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::metadata::Topic;
use crate::record::{Record, now_ms};
use crate::stats::Buffer;

/// What a record costs in the buffer besides its bytes.
pub(super) const RECORD_OVERHEAD_BYTES: usize = 64;
/// After so long in one partition's queue for room, a record that any would do for looks whether that
/// partition has stopped.
const PATIENCE: Duration = Duration::from_millis(50);
/// So many other partitions are tried for room at once.
const OTHERS_MAX: u32 = 3;

/// How the creation of a topic ended; `None` while it goes on.
pub(super) type Creation = watch::Receiver<Option<Result<()>>>;

/// What the handles of a producer share.
pub(super) struct Inner {
    pub(super) shared: Arc<Shared>,
    pub(super) config: ProducerConfig,
    pub(super) producer_id: ProducerId,
    pub(super) topics: Topics,
    /// Bytes of records without a fate, and reservations.
    pub(super) budget: Arc<Budget>,
    pub(super) links: Arc<Links>,
    pub(super) tally: Arc<Tally>,
    /// Creations under way, by topic name: one each.
    pub(super) creating: Mutex<HashMap<Arc<str>, Creation>>,
    pub(super) tasks: TaskTracker,
    closed: AtomicBool,
    closing: CancellationToken,
    pub(super) stop: CancellationToken,
}

/// How an attempt to take a record in without waiting ended.
pub(super) enum Attempt {
    Done(Result<Ticket>),
    /// There is something to wait for. The record has been through the hooks.
    Wait(Box<Record>),
}

impl Inner {
    pub(super) fn new(shared: Arc<Shared>, config: ProducerConfig) -> Self {
        let stop = CancellationToken::new();
        let budget = Budget::new(config.buffer_bytes);
        let watched = Arc::clone(&budget) as Arc<dyn Buffer>;
        shared.stats.watch_buffer(Arc::downgrade(&watched));
        let tally = Tally::new(config.hooks.clone(), Arc::clone(&shared.stats));
        Self {
            links: Arc::new(Links::new(&shared, stop.clone())),
            shared,
            // 0 stands for "no producer".
            producer_id: ProducerId(rand::random::<u64>().max(1)),
            topics: Topics::default(),
            budget,
            tally: Arc::new(tally),
            config,
            creating: Mutex::default(),
            tasks: TaskTracker::new(),
            closed: AtomicBool::new(false),
            closing: CancellationToken::new(),
            stop,
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Takes nothing in any more; who waits is told.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.closing.cancel();
        self.budget.close();
    }

    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.config.delivery_timeout
    }

    /// Runs the hooks, then takes the record in. Every error says where, and that nothing was
    /// written.
    pub(super) async fn enqueue(self: &Arc<Self>, mut record: Record) -> Result<Ticket> {
        // A program that only ever enqueues must let its runtime's other tasks run, too: those that
        // send, for one.
        coop::consume_budget().await;
        let taken_in = async {
            self.config.hooks.before_send(&mut record)?;
            match self.take_in_now(&record) {
                Some(taken_in) => taken_in,
                None => self.take_in(&record).await,
            }
        };
        taken_in.await.map_err(|error| refused(error, &record))
    }

    /// The same without waiting.
    pub(super) fn try_enqueue(self: &Arc<Self>, mut record: Record) -> Attempt {
        let taken_in = match self.config.hooks.before_send(&mut record) {
            Ok(()) => self.take_in_now(&record),
            Err(error) => Some(Err(error)),
        };
        match taken_in {
            Some(taken_in) => Attempt::Done(taken_in.map_err(|error| refused(error, &record))),
            None => Attempt::Wait(Box::new(record)),
        }
    }

    /// Takes in a record that has been through the hooks.
    pub(super) async fn enqueue_hooked(self: &Arc<Self>, record: Record) -> Result<Ticket> {
        let taken_in = self.take_in(&record).await;
        taken_in.map_err(|error| refused(error, &record))
    }

    fn take_in_now(&self, record: &Record) -> Option<Result<Ticket>> {
        if self.is_closed() {
            return Some(Err(Error::closed("producer")));
        }
        let topic = self.shared.metadata.known_topic(&record.topic)?;
        let taken_in = || {
            let (encoded, bytes) = self.measure(record)?;
            let queues = self.queues_of(&topic);
            let target = queues.target(self, &topic, record, bytes)?;
            let mut queue = queues.queue(self, target.partition)?;
            let mut room = queue.room.try_take(bytes);
            for _ in 0..OTHERS_MAX {
                if room || !target.free {
                    break;
                }
                queue = queues.queue(self, queues.other_target(self, &topic))?;
                room = queue.room.try_take(bytes);
            }
            if !room {
                return Ok(None);
            }
            match queue.push(&encoded, bytes, None) {
                // Closed meanwhile: another incarnation may be there.
                Err(_) if queue.closed().is_some() && !self.is_closed() => Ok(None),
                pushed => pushed.map(Some),
            }
        };
        taken_in().transpose()
    }

    async fn take_in(self: &Arc<Self>, record: &Record) -> Result<Ticket> {
        let deadline = self.deadline();
        let (encoded, bytes) = self.measure(record)?;
        let mut gone: Option<Arc<Topic>> = None;
        loop {
            let topic = self.topic(&record.topic, deadline).await?;
            let queues = self.queues_of(&topic);
            let queue = self.room(&queues, &topic, record, bytes, deadline).await?;
            let Some(queue) = queue else {
                // Its driver found the topic gone. Its successor, if there is one, is new to it.
                if gone.is_some_and(|gone| gone.id == topic.id) {
                    return Err(Error::new(
                        ErrorKind::UnknownTopic,
                        "the topic does not exist any more",
                    ));
                }
                gone = Some(topic);
                continue;
            };
            match queue.push(&encoded, bytes, Some(deadline)) {
                Err(_) if queue.closed().is_some() && !self.is_closed() && gone.is_none() => {
                    gone = Some(topic);
                }
                pushed => return pushed,
            }
        }
    }

    /// Waits for room; gives the queue that has it. `None`: the queue is closed, for the topic is gone.
    async fn room(
        &self,
        queues: &TopicQueues,
        topic: &Topic,
        record: &Record,
        bytes: usize,
        deadline: Instant,
    ) -> Result<Option<Arc<PartitionQueue>>> {
        let target = queues.target(self, topic, record, bytes)?;
        let mut partition = target.partition;
        loop {
            let queue = queues.queue(self, partition)?;
            self.hurry(&queue, bytes);
            let taken = {
                let mut taking = pin!(queue.room.take(bytes));
                loop {
                    let until = match target.free {
                        true => deadline.min(Instant::now() + PATIENCE),
                        false => deadline,
                    };
                    if let Ok(taken) = timeout_at(until, &mut taking).await {
                        break Some(taken);
                    }
                    if until >= deadline {
                        return Err(self
                            .buffer_full()
                            .at(&queue.place.topic, queue.place.partition));
                    }
                    // Only what has stopped is left: elsewhere the wait begins anew, behind those
                    // that are bound to their partition and keep their turn.
                    if let Some(other) = queues.refuge(self, topic, partition) {
                        partition = other;
                        break None;
                    }
                }
            };
            match taken {
                Some(Ok(())) => return Ok(Some(queue)),
                Some(Err(_)) if self.is_closed() => return Err(Error::closed("producer")),
                // Its driver has ended, though the topic is there.
                Some(Err(_)) => match queue.closed() {
                    Some(error) if error.kind() == ErrorKind::Closed => return Err(error),
                    _ => return Ok(None),
                },
                None => {}
            }
        }
    }

    pub(super) fn buffer_full(&self) -> Error {
        let limit = self.config.delivery_timeout;
        Error::new(
            ErrorKind::Timeout,
            format!("the buffer stayed full for {limit:?}"),
        )
    }

    /// Somebody is about to wait for room: what lingers goes now.
    fn hurry(&self, queue: &PartitionQueue, bytes: usize) {
        if self.config.linger.is_zero() {
            return;
        }
        queue.hurry();
        if self.budget.free() < bytes {
            self.hurry_all();
        }
    }

    pub(super) fn hurry_all(&self) {
        for queue in self.topics.all_queues() {
            queue.hurry();
        }
    }

    /// The topic's newest view, created if it is missing and the settings say so.
    pub(super) async fn topic(
        self: &Arc<Self>,
        name: &Arc<str>,
        deadline: Instant,
    ) -> Result<Arc<Topic>> {
        if let Some(topic) = self.shared.metadata.known_topic(name) {
            return Ok(topic);
        }
        let wait = async {
            match self.shared.metadata.topic(name, deadline).await {
                Err(error) if error.kind() == ErrorKind::UnknownTopic => {
                    self.create(name, deadline, error).await
                }
                found => found,
            }
        };
        match self.closing.run_until_cancelled(wait).await {
            Some(found) => found,
            None => Err(Error::closed("producer")),
        }
    }

    pub(super) fn queues_of(&self, topic: &Arc<Topic>) -> Arc<TopicQueues> {
        self.topics.of(topic, self.config.batch_bytes)
    }
}

impl Inner {
    /// The record as it is encoded, and what it costs in the buffer; refused if it is larger than
    /// what the format or a broker known so far takes.
    pub(super) fn measure<'a>(&self, record: &'a Record) -> Result<(RecordRef<'a>, usize)> {
        let encoded = record.as_batch_record(now_ms());
        encoded.check().map_err(|error| Error::batch(&error))?;
        let size = encoded.size_bytes();
        let max = self.shared.connections.limits().record_bytes_max;
        if size > max {
            return Err(Error::batch(&BatchError::RecordTooLarge { size, max }));
        }
        Ok((encoded, size + RECORD_OVERHEAD_BYTES))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// An error of a record that was not taken in.
pub(super) fn refused(error: Error, record: &Record) -> Error {
    let error = match error.topic() {
        None => error.with_topic(&record.topic),
        Some(_) => error,
    };
    error.with_outcome(Outcome::NotWritten)
}

#[cfg(test)]
mod tests {
    use qute_proto::ids::{BrokerId, TopicId};

    use super::*;
    use crate::Client;
    use crate::config::ClientConfig;
    use crate::metadata::Leader;

    #[tokio::test(start_paused = true)]
    async fn keyless_record_that_waits_for_room_keeps_its_turn_before_keyed_ones() {
        let client = Client::lazy(ClientConfig::new("127.0.0.1:1").unwrap()).unwrap();
        let producer = client.producer(ProducerConfig::default()).unwrap();
        let inner = &producer.inner;
        let leader = Leader {
            broker: BrokerId(1),
            epoch: 1,
        };
        let topic = Arc::new(Topic {
            name: "t".into(),
            id: TopicId(uuid::Uuid::from_u128(1)),
            internal: false,
            leaders: vec![Some(leader)],
            voters: Vec::new(),
        });
        let queues = inner.queues_of(&topic);
        let full = inner.budget.take(inner.budget.size()).await.unwrap();
        let deadline = Instant::now() + PATIENCE * 1000;
        let (keyless, keyed) = (Record::to("t").value("x"), Record::to("t").key("k"));
        let room = |record| inner.room(&queues, &topic, record, 100, deadline);
        let (mut first, mut second) = (pin!(room(&keyless)), pin!(room(&keyed)));
        // Both wait, for many times the patience.
        for _ in 0..10 {
            let waited = PATIENCE * 2;
            timeout_at(Instant::now() + waited, &mut first)
                .await
                .unwrap_err();
            timeout_at(Instant::now(), &mut second).await.unwrap_err();
        }
        // Room for one of them.
        let mut full = full;
        let other = inner.budget.share();
        assert!(full.move_to(&other, 150));
        other.give_back(150);
        let taken = timeout_at(Instant::now(), &mut first).await;
        assert!(matches!(taken, Ok(Ok(Some(_)))), "it was there first");
        timeout_at(Instant::now(), &mut second).await.unwrap_err();
    }
}
