//! Writes records: batches them per partition, keeps their order, retries without duplicates,
//! follows leaders.
//!
//! | file | holds |
//! | --- | --- |
//! | `config.rs` | settings |
//! | `queue.rs` | per partition, what waits: the open batch and full ones |
//! | `flight.rs` | per partition, what is under way: sequences, rounds, doubt (pure) |
//! | `driver.rs` | per partition, the task that moves batches from one through the other |
//! | `link.rs` | per broker, the produce stream |
//! | `sticky.rs` | where records without a key go |
//! | `fate.rs` | tickets, and what resolves them |
//!
//! The journey of a record: [`Producer::enqueue`] picks the partition, waits for room in the
//! buffer and encodes the record into the partition's open batch. The driver seals the batch with
//! producer id, epoch and sequence, sends it down the leader's stream (at most five in flight, in
//! order), and resolves the batch's tickets with the acknowledgement. After any failure it begins
//! again with the lowest unacknowledged batch, under the same sequences, so the broker answers
//! what it already has with the original offset (S11, S12).

mod config;
mod driver;
mod fate;
mod flight;
#[cfg(test)]
mod flight_model;
mod link;
mod queue;
mod sticky;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use qute_proto::ids::{ProducerId, TopicId};
use qute_proto::partition::partition_of;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admin::unknown_partition;
use crate::client::Shared;
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::metadata::Topic;
use crate::record::{Record, RecordMetadata, now_ms};
pub use config::ProducerConfig;
use driver::Driver;
use fate::{Place, Tally};
use link::Links;
use queue::PartitionQueue;
use sticky::Sticky;

pub use fate::Ticket;

/// What a record costs in the buffer besides its bytes.
const RECORD_OVERHEAD_BYTES: usize = 64;
/// How long stopped drivers may take to give the last tickets their fate (they never wait on
/// anything then).
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Writes records; see the crate's page for the promises. Cheap to clone; when the last clone is
/// dropped, what is not delivered yet is given up and its tickets resolve. Call
/// [`Producer::flush`] or [`Producer::close`] to have everything delivered first.
#[derive(Clone)]
pub struct Producer {
    inner: Arc<Inner>,
}

/// What became of the records of a producer, at its close.
#[derive(Debug, Clone, Default)]
pub struct CloseReport {
    /// Records that are stored, over the producer's life.
    pub delivered: u64,
    /// Records that were taken in and not written.
    pub not_written: u64,
    /// Records that may or may not be written.
    pub unknown: u64,
    /// The first failure of a record that was taken in.
    pub first_error: Option<Error>,
}

struct Inner {
    shared: Arc<Shared>,
    config: ProducerConfig,
    producer_id: ProducerId,
    /// By incarnation: a name may stand for two of them while views change, and each partition of
    /// each must have exactly one driver (S12: two would count the same sequences).
    topics: RwLock<HashMap<TopicId, Arc<TopicQueues>>>,
    /// Bytes of records without a fate.
    buffer: Arc<Semaphore>,
    links: Arc<Links>,
    tally: Arc<Tally>,
    drivers: TaskTracker,
    closed: AtomicBool,
    stop: CancellationToken,
}

/// The queues of one incarnation of a topic.
struct TopicQueues {
    topic: Arc<Topic>,
    /// By partition; made when first used.
    queues: Mutex<HashMap<u32, Arc<PartitionQueue>>>,
    sticky: Mutex<Sticky>,
}

impl Producer {
    pub(crate) fn new(shared: Arc<Shared>, config: ProducerConfig) -> Result<Self> {
        config.check()?;
        let mut config = config.capped();
        config.hooks = shared.config.hooks.around(&config.hooks);
        let stop = CancellationToken::new();
        // 0 stands for "no producer".
        let producer_id = ProducerId(rand::random::<u64>().max(1));
        let buffer = Arc::new(Semaphore::new(config.buffer_bytes));
        shared
            .stats
            .watch_buffer(Arc::downgrade(&buffer), config.buffer_bytes);
        Ok(Self {
            inner: Arc::new(Inner {
                links: Arc::new(Links::new(&shared, stop.clone())),
                producer_id,
                topics: RwLock::default(),
                buffer,
                tally: Arc::new(Tally::new(config.hooks.clone(), Arc::clone(&shared.stats))),
                config,
                shared,
                drivers: TaskTracker::new(),
                closed: AtomicBool::new(false),
                stop,
            }),
        })
    }

    /// Writes a record and waits for its acknowledgement.
    ///
    /// # Errors
    /// [`Error::outcome`] says whether the record was written, was not, or may have been.
    ///
    /// # Cancel safety
    /// Cancelled before the record is taken in, nothing happens; afterwards it is delivered all
    /// the same.
    pub async fn send(&self, record: Record) -> Result<RecordMetadata> {
        self.enqueue(record).await?.await
    }

    /// Takes a record in and gives a [`Ticket`] that resolves with its fate. Waits while the
    /// buffer is full. Records enqueued one after another keep their order per partition.
    ///
    /// # Errors
    /// The record was not taken in: unknown topic or partition, too large, buffer full until the
    /// delivery timeout, producer closed. The outcome is always not written.
    ///
    /// # Cancel safety
    /// Cancelled, the record is not taken in.
    pub async fn enqueue(&self, mut record: Record) -> Result<Ticket> {
        let taken_in = match self.inner.config.hooks.before_send(&mut record) {
            Ok(()) => self.inner.enqueue(&record).await,
            Err(error) => Err(error),
        };
        taken_in.map_err(|error| {
            let error = match error.topic() {
                None => error.with_topic(&record.topic),
                Some(_) => error,
            };
            error.with_outcome(Outcome::NotWritten)
        })
    }

    /// Sends what lingers and waits until every record taken in before has its fate.
    ///
    /// # Cancel safety
    /// Loses nothing; the records are still delivered.
    pub async fn flush(&self) {
        for queue in self.inner.all_queues() {
            for fate in queue.flush() {
                // Whatever it is, it is its ticket's business.
                let _ = fate.await;
            }
        }
    }

    /// Takes no more records (of any clone), delivers those that are in until `limit` has
    /// passed, and reports. What is not delivered by then resolves as not written or unknown.
    pub async fn close(self, limit: Duration) -> CloseReport {
        let inner = &self.inner;
        inner.closed.store(true, Ordering::Release);
        inner.buffer.close();
        let _ = timeout(limit, self.flush()).await;
        inner.stop.cancel();
        inner.drivers.close();
        let _ = timeout(STOP_TIMEOUT, inner.drivers.wait()).await;
        inner.tally.report()
    }

    /// What has become of the records so far.
    #[must_use]
    pub fn report(&self) -> CloseReport {
        self.inner.tally.report()
    }
}

impl Inner {
    async fn enqueue(self: &Arc<Self>, record: &Record) -> Result<Ticket> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::closed("producer"));
        }
        let batch_record = record.as_batch_record(now_ms());
        batch_record.check().map_err(|error| Error::batch(&error))?;
        let cost = batch_record.size_bytes() + RECORD_OVERHEAD_BYTES;
        let deadline = Instant::now() + self.config.delivery_timeout;
        let topic = match self.shared.metadata.known_topic(&record.topic) {
            Some(topic) => topic,
            None => self.shared.metadata.topic(&record.topic, deadline).await?,
        };
        let queues = self.queues_of(&topic);
        let partition = match (record.partition, &record.key) {
            (Some(partition), _) if partition < topic.partitions() => partition,
            (Some(partition), _) => return Err(unknown_partition(&topic, partition)),
            (None, Some(key)) => partition_of(key, topic.partitions()),
            (None, None) => queues.pick(&topic, cost, self.config.batch_bytes),
        };
        let queue = queues.queue(self, partition)?;
        let permits = self.permits(&queue, cost, deadline).await?;
        queue.push(record, permits)
    }

    /// The record's share of the buffer: of the partition's part, then of the whole.
    async fn permits(
        &self,
        queue: &PartitionQueue,
        cost: usize,
        deadline: Instant,
    ) -> Result<[OwnedSemaphorePermit; 2]> {
        let permits = u32::try_from(cost).unwrap_or(u32::MAX);
        let wait = async {
            let part = Arc::clone(&queue.room).acquire_many_owned(permits).await;
            let whole = Arc::clone(&self.buffer).acquire_many_owned(permits).await;
            // Closed semaphores: the producer, or the topic, is gone.
            let gone = |_| Error::closed("producer");
            Ok([part.map_err(gone)?, whole.map_err(gone)?])
        };
        match timeout_at(deadline, wait).await {
            Ok(permits) => permits,
            Err(_) => Err(Error::new(
                ErrorKind::Timeout,
                format!(
                    "the buffer stayed full for {:?}",
                    self.config.delivery_timeout
                ),
            )
            .at(&queue.place.topic, queue.place.partition)),
        }
    }

    /// The queues of this incarnation. Those of an older one are left to their drivers, which find
    /// out that it is gone, and are dropped once nothing can come from them any more.
    fn queues_of(&self, topic: &Arc<Topic>) -> Arc<TopicQueues> {
        if let Some(queues) = self.topics.read().get(&topic.id) {
            return Arc::clone(queues);
        }
        let mut topics = self.topics.write();
        if let Some(queues) = topics.get(&topic.id) {
            return Arc::clone(queues);
        }
        // Held by the map alone, nobody can be about to use it.
        topics.retain(|_, queues| Arc::strong_count(queues) > 1 || !queues.are_closed());
        let queues = Arc::new(TopicQueues {
            topic: Arc::clone(topic),
            queues: Mutex::default(),
            sticky: Mutex::default(),
        });
        topics.insert(topic.id, Arc::clone(&queues));
        queues
    }

    fn all_queues(&self) -> Vec<Arc<PartitionQueue>> {
        let topics: Vec<_> = self.topics.read().values().cloned().collect();
        topics
            .iter()
            .flat_map(|topic| topic.queues.lock().values().cloned().collect::<Vec<_>>())
            .collect()
    }
}

impl TopicQueues {
    /// The partition's queue, with its driver running.
    fn queue(&self, producer: &Inner, partition: u32) -> Result<Arc<PartitionQueue>> {
        let mut queues = self.queues.lock();
        if let Some(queue) = queues.get(&partition) {
            return Ok(Arc::clone(queue));
        }
        if producer.closed.load(Ordering::Acquire) {
            return Err(Error::closed("producer"));
        }
        let place = Place {
            topic: Arc::clone(&self.topic.name),
            partition,
        };
        let tally = Arc::clone(&producer.tally);
        let queue = Arc::new(PartitionQueue::new(place, &producer.config, tally));
        let driver = Driver::new(
            Arc::clone(&producer.shared),
            Arc::clone(&producer.links),
            Arc::clone(&self.topic),
            Arc::clone(&queue),
            producer.producer_id,
            &producer.config,
        );
        producer.drivers.spawn(driver.run(producer.stop.clone()));
        queues.insert(partition, Arc::clone(&queue));
        Ok(queue)
    }

    /// The drivers have ended, since the topic is gone.
    fn are_closed(&self) -> bool {
        let queues = self.queues.lock();
        queues.values().all(|queue| queue.is_closed())
    }

    /// Where a record without a key goes: see `sticky.rs`.
    fn pick(&self, topic: &Topic, cost: usize, batch_bytes: usize) -> u32 {
        let mut sticky = self.sticky.lock();
        sticky.pick(topic.partitions(), cost, batch_bytes, |partition| {
            let queues = self.queues.lock();
            let room = queues
                .get(&partition)
                .map_or(usize::MAX, |queue| queue.room.available_permits());
            (topic.leader(partition).is_some(), room)
        })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl fmt::Debug for Producer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer")
            .field("producer_id", &self.inner.producer_id)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Client;
    use crate::config::ClientConfig;

    fn incarnation(id: u128) -> Arc<Topic> {
        Arc::new(Topic {
            name: "t".into(),
            id: TopicId(uuid::Uuid::from_u128(id)),
            leaders: vec![None],
            voters: Vec::new(),
        })
    }

    fn producer() -> Producer {
        let client = Client::lazy(ClientConfig::new("127.0.0.1:1").unwrap()).unwrap();
        client.producer(ProducerConfig::default()).unwrap()
    }

    #[tokio::test]
    async fn s12_topic_seen_old_and_new_in_turn_has_one_driver_per_incarnation() {
        let producer = producer();
        let inner = &producer.inner;
        let (old, new) = (incarnation(1), incarnation(2));
        let queue_of = |topic| inner.queues_of(topic).queue(inner, 0).unwrap();
        let of_old = queue_of(&old);
        let of_new = queue_of(&new);
        // A task that looked before the topic was made again comes late.
        assert!(Arc::ptr_eq(&of_old, &queue_of(&old)));
        assert!(Arc::ptr_eq(&of_new, &queue_of(&new)));
        assert_eq!(inner.drivers.len(), 2);
        assert_eq!(inner.all_queues().len(), 2, "a flush awaits both");
    }

    #[tokio::test]
    async fn queues_of_a_topic_that_is_gone_are_dropped_unless_in_use() {
        let producer = producer();
        let inner = &producer.inner;
        let in_use = inner.queues_of(&incarnation(1));
        for topic in [&in_use, &inner.queues_of(&incarnation(2))] {
            let gone = Error::new(ErrorKind::UnknownTopic, "gone");
            topic.queue(inner, 0).unwrap().close(gone);
        }
        let open = incarnation(3);
        inner.queues_of(&open).queue(inner, 0).unwrap();
        inner.queues_of(&incarnation(4));
        let mut left: Vec<u128> = inner
            .topics
            .read()
            .keys()
            .map(|id| id.0.as_u128())
            .collect();
        left.sort_unstable();
        assert_eq!(left, [1, 3, 4]);
    }
}
