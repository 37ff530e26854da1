//! What the program reads from: records, batches or events, decoded as they are taken.
//!
//! At most one batch is decompressed at a time; it is in the stream's hand. What is handed out next
//! is decided under the buffer's lock, record by record, so a seek or a pause takes effect at once.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::Stream;
use qute_proto::batch::{BatchError, Codec, Records};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::buffer::{Buffer, Entry, Handed, Leave, Moved, SlotId, Taken};
use super::control::ConsumerControl;
use super::event::{ConsumedBatch, ConsumerEvent};
use crate::client::Shared;
use crate::error::{Error, ErrorKind, Result};
use crate::interceptor::{Hooks, Received};
use crate::metadata::Topic;
use crate::record::ConsumedRecord;

/// A [`ConsumedBatch`] holds no more records than this; larger batches come in pieces, because
/// records that are mostly empty take far more memory decoded than encoded.
const BATCH_RECORDS_MAX: usize = 16 * 1024;

/// A stream of records, in offset order per partition. Follows leaders; never skips or doubles.
///
/// An error item concerns one partition (and offset, where it has one); the stream goes on with
/// the others, and ends when no partition is left. An offset that was proven out of range is such
/// an item, too, whether or not the policy lets the partition go on elsewhere
/// ([`crate::OutOfRange`]).
///
/// Dropping it stops its background task and never blocks.
///
/// Keys and values share the memory of what they came in, which for uncompressed batches is a message
/// of up to 1 MiB: copy what is kept for long.
///
/// ```no_run
/// use futures::StreamExt;
/// use qute_client::{Client, OutOfRange, Position};
///
/// # async fn example(client: Client) -> qute_client::Result<()> {
/// let mut records = client
///     .consumer("flights")
///     .start(Position::Tail(1000))
///     .out_of_range(OutOfRange::ToStart)
///     .open()
///     .await?;
/// while let Some(record) = records.next().await {
///     match record {
///         Ok(record) => println!("{}/{}: {:?}", record.partition, record.offset, record.value),
///         Err(error) => eprintln!("{error}"),
///     }
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Cancel safety
/// Polling loses nothing: a record that was not returned is returned by the next poll.
pub struct Consumer {
    shared: Arc<Shared>,
    topic: Arc<Topic>,
    buffer: Arc<Buffer>,
    hooks: Hooks,
    hand: Option<InHand>,
    held_error: Option<Error>,
    /// Of what came out of the buffer last, in its partition.
    epoch: u64,
    /// Ends the reader's task, and with it the fetch streams.
    stop: Option<DropGuard>,
}

/// The batch that is being handed out.
struct InHand {
    slot: SlotId,
    partition: u32,
    epoch: u64,
    /// Its credit goes back to the broker when this is dropped.
    taken: Taken,
    records: Records,
}

/// What comes next, but for records.
enum Step {
    /// A batch is in hand.
    Batch,
    Reset(u32, Moved),
    Added(Vec<u32>),
    Failed(Error),
    End(u32),
}

/// A stream of whole batches; see [`Consumer::into_batches`].
///
/// # Cancel safety
/// As that of [`Consumer`].
#[derive(Debug)]
pub struct BatchConsumer {
    consumer: Consumer,
}

/// A stream of everything that happens; see [`Consumer::into_events`].
///
/// # Cancel safety
/// As that of [`Consumer`].
#[derive(Debug)]
pub struct EventConsumer {
    consumer: Consumer,
}

impl Consumer {
    pub(super) fn new(
        shared: Arc<Shared>,
        topic: Arc<Topic>,
        buffer: Arc<Buffer>,
        hooks: Hooks,
        stop: CancellationToken,
    ) -> Self {
        Self {
            shared,
            topic,
            buffer,
            hooks,
            hand: None,
            held_error: None,
            epoch: 0,
            stop: Some(stop.drop_guard()),
        }
    }

    /// The next offset to be given to the program, per partition: where to go on later.
    #[must_use]
    pub fn positions(&self) -> BTreeMap<u32, u64> {
        self.buffer.positions()
    }

    /// A handle to pause, resume and seek, and to ask for positions and lag, from anywhere.
    ///
    /// ```no_run
    /// # use qute_client::{Client, Position, Result};
    /// # async fn example(client: Client) -> Result<()> {
    /// let records = client.consumer("flights").open().await?;
    /// let control = records.control();
    /// control.pause([0])?;
    /// control.seek(1, Position::End).await?;
    /// println!("behind by {:?}", control.lag());
    /// control.resume([0])?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn control(&self) -> ConsumerControl {
        ConsumerControl::new(
            Arc::clone(&self.shared),
            Arc::clone(&self.topic),
            Arc::clone(&self.buffer),
        )
    }

    /// The same records, batch by batch.
    #[must_use]
    pub fn into_batches(self) -> BatchConsumer {
        BatchConsumer { consumer: self }
    }

    /// The same batches, and beside them what else happens: offsets reset, partitions added,
    /// partitions read to their end, errors.
    ///
    /// ```no_run
    /// # use futures::StreamExt;
    /// # use qute_client::{Client, ConsumerEvent, Result};
    /// # async fn example(client: Client) -> Result<()> {
    /// let mut events = client.consumer("flights").until_end().open().await?.into_events();
    /// while let Some(event) = events.next().await {
    ///     match event {
    ///         ConsumerEvent::Batch(batch) => println!("{} records", batch.records.len()),
    ///         ConsumerEvent::Reset { partition, from, to, .. } => {
    ///             eprintln!("{partition}: lost the records from {from} to {to}");
    ///         }
    ///         ConsumerEvent::End { partition, .. } => println!("{partition} is read"),
    ///         ConsumerEvent::Failed(error) => return Err(error),
    ///         _ => {}
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn into_events(self) -> EventConsumer {
        EventConsumer { consumer: self }
    }

    /// Takes the next thing from the buffer.
    fn poll_step(&mut self, cx: &mut Context<'_>) -> Poll<Option<Step>> {
        let coop = ready!(tokio::task::coop::poll_proceed(cx));
        let handed = ready!(self.buffer.poll_next(cx));
        coop.made_progress();
        if handed.is_none() {
            self.stop = None;
        }
        Poll::Ready(handed.map(|handed| self.step(handed)))
    }

    fn step(&mut self, handed: Handed) -> Step {
        let (slot, partition, epoch, entry) = match handed {
            Handed::Added(partitions) => return Step::Added(partitions),
            Handed::Deserted(reason) => {
                return Step::Failed(reason.with_topic(&self.topic.name));
            }
            Handed::Entry {
                slot,
                partition,
                epoch,
                entry,
            } => (slot, partition, epoch, entry),
        };
        self.epoch = epoch;
        match entry {
            Entry::End => Step::End(partition),
            Entry::Failed(error) => Step::Failed(self.as_known_now(error, partition)),
            Entry::Moved(moved) => Step::Reset(partition, moved),
            Entry::Batch(taken) => match taken.batch.records() {
                Ok(records) => {
                    let header = taken.batch.header();
                    let bytes = header.uncompressed_bytes;
                    self.shared.stats.bytes_decompressed.add(bytes.into());
                    self.buffer.set_decompressed(match header.codec {
                        Codec::None => 0,
                        _ => usize::try_from(bytes).unwrap_or(usize::MAX),
                    });
                    self.hand = Some(InHand {
                        slot,
                        partition,
                        epoch,
                        taken,
                        records,
                    });
                    Step::Batch
                }
                Err(error) => {
                    self.buffer.give_up(slot, epoch);
                    Step::Failed(self.undecodable(partition, taken.from, &error))
                }
            },
        }
    }

    /// A deletion is often seen a moment before the topic is made again: what counts is what is known
    /// when the program hears of it.
    fn as_known_now(&self, error: Error, partition: u32) -> Error {
        if error.kind() != ErrorKind::UnknownTopic {
            return error;
        }
        let known = self.shared.metadata.incarnation(&self.topic);
        match known.error(&self.topic) {
            Some(recreated) if recreated.kind() == ErrorKind::TopicRecreated => {
                recreated.at(&self.topic.name, partition)
            }
            _ => error,
        }
    }

    /// Lets go of the batch in hand; gives its credit back.
    fn let_go(&mut self) -> Option<InHand> {
        self.buffer.set_decompressed(0);
        self.hand.take()
    }

    /// The next wanted record of the batch in hand, which is let go of at its end.
    fn next_in_hand(&mut self) -> Option<Result<ConsumedRecord>> {
        loop {
            let hand = self.hand.as_mut()?;
            let taken = &hand.taken;
            let record = match hand.records.next() {
                None => {
                    self.let_go();
                    return None;
                }
                Some(Err(error)) => {
                    let (slot, partition, epoch) = (hand.slot, hand.partition, hand.epoch);
                    self.let_go();
                    if !self.buffer.is_valid(slot, epoch) {
                        return None;
                    }
                    self.buffer.give_up(slot, epoch);
                    let position = self.buffer.positions().get(&partition).copied();
                    let offset = position.unwrap_or_default();
                    return Some(Err(self.undecodable(partition, offset, &error)));
                }
                Some(Ok(record)) => record,
            };
            let offset = taken.base_offset + u64::from(record.offset_delta);
            if !(taken.from..taken.until).contains(&offset) {
                continue;
            }
            match self.buffer.leave(hand.slot, hand.epoch, offset) {
                Leave::Granted => {}
                Leave::Void => {
                    self.let_go();
                    return None;
                }
                Leave::Paused => {
                    if let Some(hand) = self.let_go() {
                        self.buffer.put_back(hand.slot, hand.epoch, hand.taken);
                    }
                    return None;
                }
            }
            let mut record = ConsumedRecord {
                topic: Arc::clone(&self.topic.name),
                partition: hand.partition,
                offset,
                timestamp_ms: record.timestamp_ms,
                broker_time_ms: taken.broker_time_ms,
                key: record.key,
                value: record.value,
                headers: record.headers,
            };
            // Here a record goes out to the program.
            match self.hooks.after_receive(&mut record) {
                Ok(Received::Deliver) => return Some(Ok(record)),
                Ok(Received::Skip) => {}
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// The records of the batch in hand, up to the first error; `None` if there are none.
    fn rest_of_hand(&mut self) -> Option<ConsumedBatch> {
        let hand = self.hand.as_ref()?;
        let (slot, epoch) = (hand.slot, hand.epoch);
        let mut batch = ConsumedBatch {
            partition: hand.partition,
            high_watermark: hand.taken.high_watermark,
            records: Vec::new(),
        };
        while batch.records.len() < BATCH_RECORDS_MAX {
            match self.next_in_hand() {
                Some(Ok(record)) => batch.records.push(record),
                Some(Err(error)) => {
                    // After the records before it, and before those behind it.
                    self.held_error = Some(error);
                    break;
                }
                None => break,
            }
        }
        if !self.buffer.is_valid(slot, epoch) {
            // A seek in the middle takes back what was on its way out.
            self.held_error = None;
            return None;
        }
        (!batch.records.is_empty()).then_some(batch)
    }

    /// The epoch of the last event, in its partition: what [`Buffer::attach`] gave.
    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(super) fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Option<ConsumerEvent>> {
        loop {
            if let Some(error) = self.held_error.take() {
                return Poll::Ready(Some(ConsumerEvent::Failed(error)));
            }
            if self.hand.is_some() {
                if let Some(batch) = self.rest_of_hand() {
                    return Poll::Ready(Some(ConsumerEvent::Batch(batch)));
                }
                continue;
            }
            let Some(step) = ready!(self.poll_step(cx)) else {
                return Poll::Ready(None);
            };
            return Poll::Ready(Some(match step {
                Step::Batch => continue,
                Step::Reset(partition, moved) => ConsumerEvent::Reset {
                    partition,
                    from: moved.from,
                    to: moved.to,
                    error: moved.error,
                },
                Step::Added(partitions) => ConsumerEvent::PartitionsAdded { partitions },
                Step::Failed(error) => ConsumerEvent::Failed(error),
                Step::End(partition) => ConsumerEvent::End { partition },
            }));
        }
    }

    /// The checksum held, but a record makes no sense: its producer wrote it so. The partition
    /// ends there.
    fn undecodable(&self, partition: u32, offset: u64, error: &BatchError) -> Error {
        Error::new(ErrorKind::CorruptBatch, error.to_string())
            .with_cause(error)
            .at(&self.topic.name, partition)
            .with_offset(offset)
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.buffer.set_decompressed(0);
        self.buffer.close();
    }
}

impl Stream for Consumer {
    type Item = Result<ConsumedRecord>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(record) = self.next_in_hand() {
                return Poll::Ready(Some(record));
            }
            match ready!(self.poll_step(cx)) {
                None => return Poll::Ready(None),
                Some(Step::Failed(error) | Step::Reset(_, Moved { error, .. })) => {
                    return Poll::Ready(Some(Err(error)));
                }
                Some(Step::Batch | Step::Added(_) | Step::End(_)) => {}
            }
        }
    }
}

impl Stream for BatchConsumer {
    type Item = Result<ConsumedBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Some(event) = ready!(self.consumer.poll_event(cx)) else {
                return Poll::Ready(None);
            };
            match event {
                ConsumerEvent::Batch(batch) => return Poll::Ready(Some(Ok(batch))),
                ConsumerEvent::Failed(error) | ConsumerEvent::Reset { error, .. } => {
                    return Poll::Ready(Some(Err(error)));
                }
                ConsumerEvent::PartitionsAdded { .. } | ConsumerEvent::End { .. } => {}
            }
        }
    }
}

impl Stream for EventConsumer {
    type Item = ConsumerEvent;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.consumer.poll_event(cx)
    }
}

impl BatchConsumer {
    /// The next offset to be given to the program, per partition.
    #[must_use]
    pub fn positions(&self) -> BTreeMap<u32, u64> {
        self.consumer.positions()
    }

    /// See [`Consumer::control`].
    #[must_use]
    pub fn control(&self) -> ConsumerControl {
        self.consumer.control()
    }
}

impl EventConsumer {
    /// The next offset to be given to the program, per partition.
    #[must_use]
    pub fn positions(&self) -> BTreeMap<u32, u64> {
        self.consumer.positions()
    }

    /// See [`Consumer::control`].
    #[must_use]
    pub fn control(&self) -> ConsumerControl {
        self.consumer.control()
    }
}

impl fmt::Debug for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("topic", &self.topic.name)
            .field("positions", &self.positions())
            .finish_non_exhaustive()
    }
}
