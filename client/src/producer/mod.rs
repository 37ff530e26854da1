//! Writes records: batches them per partition, keeps their order, retries without duplicates,
//! follows leaders.
//!
//! | file | holds |
//! | --- | --- |
//! | `config.rs` | settings |
//! | `intake.rs` | how a record is taken in: topic, partition, room, queue |
//! | `topics.rs` | per topic incarnation, its partitions' queues; `create.rs` makes missing topics |
//! | `partitioner.rs` | [`Partitioner`]; `adaptive.rs`: where records without a key go (pure) |
//! | `load.rs` | what a partition's traffic looks like: queue, latency, silence |
//! | `budget.rs` | the buffer, in bytes; `room.rs`: a partition's part; `reserve.rs`: [`Reservation`] |
//! | `sink.rs` | [`ProducerSink`] |
//! | `queue.rs` | per partition, what waits: the open batch and full ones |
//! | `flight.rs` | per partition, what is under way: sequences, rounds, doubt (pure) |
//! | `driver.rs` | per partition, the task that moves batches (`batch.rs`) from one through the other |
//! | `link.rs` | per broker, the produce stream |
//! | `fate.rs` | tickets, and what resolves them; `report.rs` counts them |
//!
//! The journey of a record: [`Producer::enqueue`] picks the partition, waits for room in the
//! buffer and encodes the record into the partition's open batch. The driver seals the batch with
//! producer id, epoch and sequence, sends it down the leader's stream (at most five in flight, in
//! order), and resolves the batch's tickets with the acknowledgement. After any failure it begins
//! again with the lowest unacknowledged batch, under the same sequences, so the broker answers
//! what it already has with the original offset (S11, S12).

mod adaptive;
mod batch;
mod budget;
mod config;
mod create;
mod driver;
mod fate;
mod flight;
#[cfg(test)]
mod flight_model;
mod intake;
mod link;
mod load;
mod partitioner;
mod queue;
mod report;
mod reserve;
mod room;
mod sink;
mod topics;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout, timeout_at};

use crate::client::Shared;
use crate::error::{Outcome, Result};
use crate::record::{Record, RecordMetadata};
pub use config::{ProducerConfig, TopicTemplate};
pub use fate::Ticket;
use intake::{Inner, RECORD_OVERHEAD_BYTES};
pub use load::PartitionLoad;
pub use partitioner::{Partitioner, TopicLoad};
pub use report::{CloseReport, Undelivered};
pub use reserve::Reservation;
pub use sink::ProducerSink;

/// How long before the limit of a close what is left is given up, at most: its tickets are to have
/// their fate by then.
const STOP_MARGIN: Duration = Duration::from_millis(200);
/// How long stopped tasks may take, if the runtime is that busy (they never wait on anything then): at
/// least, and at most, the limit of the close permitting.
const STOP_MIN: Duration = Duration::from_millis(100);
const STOP_MAX: Duration = Duration::from_secs(1);

/// Writes records; see the crate's page for the promises. Cheap to clone; when the last clone is
/// dropped, what is not delivered yet is given up and its tickets resolve. Call
/// [`Producer::flush`] or [`Producer::close`] to have everything delivered first.
#[derive(Clone)]
pub struct Producer {
    inner: Arc<Inner>,
}

impl Producer {
    pub(crate) fn new(shared: Arc<Shared>, config: ProducerConfig) -> Result<Self> {
        config.check()?;
        let mut config = config.capped();
        config.hooks = shared.config.hooks.around(&config.hooks);
        Ok(Self {
            inner: Arc::new(Inner::new(shared, config)),
        })
    }

    /// Writes a record and waits for its acknowledgement. To be polled inside a tokio runtime, as all of the
    /// client (see [`crate::Client`]): the first record for a partition begins a task there.
    ///
    /// # Errors
    /// [`crate::Error::outcome`] says whether the record was written, was not, or may have been.
    ///
    /// # Cancel safety
    /// Cancelled before the record is taken in, nothing happens; afterwards it is delivered all
    /// the same.
    pub async fn send(&self, record: Record) -> Result<RecordMetadata> {
        self.enqueue(record).await?.await
    }

    /// Takes a record in and gives a [`Ticket`] that resolves with its fate, by the delivery timeout
    /// counted from this call. Waits for the topic's metadata if it is the first record for it, and
    /// while the buffer is full. Records enqueued one after another keep their order per partition.
    ///
    /// A topic that does not exist is created if [`ProducerConfig::create_topics`] says so: with one
    /// call, however many records wait for it. That it exists already (somebody else was faster)
    /// is fine.
    ///
    /// # Errors
    /// The record was not taken in: unknown topic or partition, too large, buffer full until the
    /// delivery timeout, producer closed. The outcome is always not written.
    ///
    /// # Cancel safety
    /// Cancelled, the record is not taken in. A creation of its topic that has begun goes on.
    pub async fn enqueue(&self, record: Record) -> Result<Ticket> {
        self.inner.enqueue(record).await
    }

    /// Makes sure that a topic is known, so that [`Reservation::enqueue`] takes records for it;
    /// creates it like [`Producer::enqueue`]. Gives the number of its partitions.
    ///
    /// # Errors
    /// [`crate::ErrorKind::UnknownTopic`], [`crate::ErrorKind::Timeout`],
    /// [`crate::ErrorKind::Closed`]; what creating a topic gives ([`crate::Client::create_topic`]).
    ///
    /// # Cancel safety
    /// Loses nothing. A creation that has begun goes on.
    pub async fn prepare(&self, topic: impl Into<Arc<str>>) -> Result<u32> {
        let deadline = self.inner.deadline();
        let topic = self.inner.topic(&topic.into(), deadline).await?;
        Ok(topic.partitions())
    }

    /// Reserves room in the buffer, waiting for it, so that records of so many
    /// [`Record::buffered_bytes`] in sum can be taken in without waiting.
    ///
    /// Whoever comes later waits behind a reservation that waits, unless it is for more than a
    /// quarter of the buffer.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] if that is more than the buffer;
    /// [`crate::ErrorKind::Timeout`] if there was no room until the delivery timeout;
    /// [`crate::ErrorKind::Closed`].
    ///
    /// # Cancel safety
    /// Cancelled, nothing is reserved.
    pub async fn reserve(&self, bytes: usize) -> Result<Reservation> {
        Reservation::make(&self.inner, bytes)
            .await
            .map_err(|error| error.with_outcome(Outcome::NotWritten))
    }

    /// A sink that writes through this producer; see [`ProducerSink`].
    #[must_use]
    pub fn sink(&self) -> ProducerSink {
        ProducerSink::new(Arc::clone(&self.inner))
    }

    /// Sends what lingers and waits until every record taken in before has its fate, which its ticket
    /// tells: in all cases by the delivery timeout.
    ///
    /// # Cancel safety
    /// Loses nothing; the records are still delivered.
    pub async fn flush(&self) {
        let queues = self.inner.topics.all_queues();
        // All of them first: none lingers until another is done.
        let fates: Vec<_> = queues.iter().flat_map(|queue| queue.flush()).collect();
        for fate in fates {
            // Whatever it is, it is its ticket's business.
            let _ = fate.await;
        }
    }

    /// Takes no more records (of any clone), delivers those that are in, and reports: by `limit`,
    /// whatever the state of the cluster. What is not delivered by then resolves as not written or
    /// unknown, and is listed in the report.
    ///
    /// The last fifth of the limit, and no more than 200 ms, is kept for that. On a runtime that is
    /// too busy to end tasks, it may take 100 ms in all cases.
    ///
    /// # Cancel safety
    /// Cancelled, nothing more is taken in; what is not delivered yet is given up as if the producer
    /// had been dropped, if this was its last handle, and else delivered.
    pub async fn close(self, limit: Duration) -> CloseReport {
        let end = Instant::now().checked_add(limit);
        let margin = STOP_MARGIN.min(limit / 5);
        let inner = &self.inner;
        inner.close();
        let _ = timeout(limit.saturating_sub(margin), self.flush()).await;
        inner.stop.cancel();
        inner.tasks.close();
        let now = Instant::now();
        let stopped_by = end.map_or(now + STOP_MAX, |end| {
            end.clamp(now + STOP_MIN, now + STOP_MAX)
        });
        let _ = timeout_at(stopped_by, inner.tasks.wait()).await;
        inner.tally.report()
    }

    /// What has become of the records so far.
    #[must_use]
    pub fn report(&self) -> CloseReport {
        self.inner.tally.report()
    }
}

impl Record {
    /// What it takes of a producer's buffer, in bytes: key, value, headers, and 64.
    #[must_use]
    pub fn buffered_bytes(&self) -> usize {
        self.as_batch_record(0).size_bytes() + RECORD_OVERHEAD_BYTES
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
    use qute_proto::ids::TopicId;

    use super::*;
    use crate::Client;
    use crate::config::ClientConfig;
    use crate::error::{Error, ErrorKind};
    use crate::metadata::Topic;

    fn incarnation(id: u128) -> Arc<Topic> {
        Arc::new(Topic {
            name: "t".into(),
            id: TopicId(uuid::Uuid::from_u128(id)),
            internal: false,
            leaders: vec![None],
            voters: Vec::new(),
        })
    }

    fn producer() -> Producer {
        let client = Client::lazy(ClientConfig::new("127.0.0.1:1").unwrap()).unwrap();
        client.producer(ProducerConfig::default()).unwrap()
    }

    /// Compiles only if it is so.
    #[allow(dead_code, reason = "not to be run")]
    fn handles_and_futures_are_send(producer: Producer, record: Record) {
        fn send(_: impl Send) {}
        fn shared(_: impl Send + Sync + 'static) {}
        send(producer.send(record.clone()));
        send(producer.enqueue(record));
        send(producer.prepare("t"));
        send(producer.reserve(1));
        send(producer.flush());
        send(producer.clone().close(Duration::ZERO));
        send(producer.sink());
        shared(producer);
        let shared_types = |ticket: Ticket, reservation: Reservation, report: CloseReport| {
            shared(ticket);
            shared(reservation);
            shared(report);
        };
        send(shared_types);
    }

    #[tokio::test(start_paused = true)]
    async fn close_with_a_task_that_does_not_end_returns_by_its_limit() {
        let producer = producer();
        producer.inner.tasks.spawn(std::future::pending::<()>());
        let (began, limit) = (Instant::now(), Duration::from_secs(2));
        // One whose flush takes all there is.
        let queue = producer
            .inner
            .queues_of(&incarnation(1))
            .queue(&producer.inner, 0);
        let record = Record::to("t").value("x");
        let (encoded, bytes) = producer.inner.measure(&record).unwrap();
        let queue = queue.unwrap();
        assert!(queue.room.try_take(bytes));
        let ticket = queue.push(&encoded, bytes, None).unwrap();
        producer.close(limit).await;
        // Timers count in milliseconds.
        assert!(began.elapsed() <= limit + Duration::from_millis(2));
        ticket.await.unwrap_err();
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
        assert_eq!(inner.tasks.len(), 2);
        assert_eq!(inner.topics.all_queues().len(), 2, "a flush awaits both");
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
        assert_eq!(inner.topics.ids(), [1, 3, 4]);
    }
}
