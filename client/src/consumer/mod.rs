//! Reads records: a stream over all or some partitions of a topic, in offset order per partition.
//!
//! | file | holds |
//! | --- | --- |
//! | `cursor.rs` | where one partition stands; never skips, never doubles (pure) |
//! | `reader.rs` | the task: subscriptions, following leaders, offsets out of range |
//! | `link.rs` | per broker, the fetch stream |
//! | `credit.rs` | byte credit, of all links together (pure) |
//!
//! Batches wait undecoded, bounded in bytes by the credit that brokers are given; they are
//! decoded as the program takes records.

mod credit;
mod cursor;
mod link;
mod reader;

use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures::Stream;
use qute_proto::batch::{BatchError, Records};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::admin::{ListedOffset, OffsetSpec, list_offsets, unknown_partition};
use crate::client::Shared;
use crate::config::capped;
use crate::error::{Error, ErrorKind, Result};
use crate::interceptor::{Hooks, Interceptor, Received};
use crate::metadata::Topic;
use crate::record::ConsumedRecord;
use crate::stats::Stats;
use cursor::Cursor;
use reader::{Item, Plan, Reader, Taken};

const PREFETCH_BYTES: usize = 16 * 1024 * 1024;
const STALL_TIMEOUT_UNTIL_END: Duration = Duration::from_secs(120);

/// Where reading begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Position {
    /// At the log start offset.
    Start,
    /// At the high watermark: only what is written from now on.
    End,
    /// At this offset.
    Offset(u64),
    /// This many records before the high watermark, per partition.
    Tail(u64),
    /// At the first batch with at least this broker time, Unix milliseconds.
    TimeMs(u64),
}

/// What to do when an offset is proven out of range. Either way the program sees the error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OutOfRange {
    /// The partition stops after the error.
    #[default]
    Stop,
    /// It goes on at the log start offset.
    ToStart,
    /// It goes on at the high watermark.
    ToEnd,
}

/// Prepares a [`Consumer`].
#[derive(Clone)]
#[must_use = "a consumer reads nothing until it is opened"]
pub struct ConsumerBuilder {
    shared: Arc<Shared>,
    topic: Arc<str>,
    partitions: Option<Vec<u32>>,
    start: Position,
    start_at: BTreeMap<u32, Position>,
    until_end: bool,
    prefetch_bytes: usize,
    out_of_range: OutOfRange,
    stall_timeout: Option<Duration>,
    open_timeout: Duration,
    hooks: Hooks,
}

impl ConsumerBuilder {
    pub(crate) fn new(shared: Arc<Shared>, topic: Arc<str>) -> Self {
        Self {
            open_timeout: shared.config.call_timeout,
            hooks: Hooks::default(),
            shared,
            topic,
            partitions: None,
            start: Position::Start,
            start_at: BTreeMap::new(),
            until_end: false,
            prefetch_bytes: PREFETCH_BYTES,
            out_of_range: OutOfRange::Stop,
            stall_timeout: None,
        }
    }

    /// Reads only these partitions. Default: all.
    pub fn partitions(mut self, partitions: impl IntoIterator<Item = u32>) -> Self {
        self.partitions = Some(partitions.into_iter().collect());
        self
    }

    /// Where reading begins. Default: [`Position::Start`].
    pub fn start(mut self, position: Position) -> Self {
        self.start = position;
        self
    }

    /// Where reading of one partition begins, whatever [`ConsumerBuilder::start`] says.
    pub fn start_at(mut self, partition: u32, position: Position) -> Self {
        self.start_at.insert(partition, position);
        self
    }

    /// Ends at the end offsets seen when it is opened, instead of never.
    pub fn until_end(mut self) -> Self {
        self.until_end = true;
        self
    }

    /// Bytes of batches fetched ahead of the program, over all brokers. Default 16 MiB.
    pub fn prefetch_bytes(mut self, bytes: usize) -> Self {
        self.prefetch_bytes = bytes;
        self
    }

    /// What to do when an offset is proven out of range. Default: [`OutOfRange::Stop`].
    pub fn out_of_range(mut self, policy: OutOfRange) -> Self {
        self.out_of_range = policy;
        self
    }

    /// A partition without a serving leader for this long ends with an error. Default: 120 s with
    /// [`ConsumerBuilder::until_end`], never without.
    pub fn stall_timeout(mut self, timeout: Duration) -> Self {
        self.stall_timeout = Some(capped(timeout));
        self
    }

    /// How long [`ConsumerBuilder::open`] may take. Default: the client's call timeout.
    pub fn open_timeout(mut self, timeout: Duration) -> Self {
        self.open_timeout = capped(timeout);
        self
    }

    /// Installs a hook for the records read, within those of the client; see [`Interceptor`] for
    /// the order.
    pub fn interceptor(mut self, hook: impl Interceptor) -> Self {
        self.hooks.install(hook);
        self
    }

    /// Finds the topic and the offsets to begin and end at, from the leaders.
    ///
    /// # Errors
    /// Unknown topic or partition, or a leader did not answer within the open timeout.
    pub async fn open(self) -> Result<Consumer> {
        let deadline = Instant::now() + self.open_timeout;
        let topic = self.shared.metadata.topic(&self.topic, deadline).await?;
        let partitions = self.chosen(&topic)?;
        let cursors = self.cursors(&topic, &partitions, deadline).await?;
        let positions = cursors
            .iter()
            .map(|(&partition, cursor)| (partition, cursor.next()))
            .collect();
        let stall_timeout = self
            .stall_timeout
            .or(self.until_end.then_some(STALL_TIMEOUT_UNTIL_END));
        let (output, items) = mpsc::unbounded_channel();
        let (stops, stopped) = mpsc::unbounded_channel();
        let plan = Plan {
            topic: Arc::clone(&topic),
            cursors,
            prefetch_bytes: u64::try_from(self.prefetch_bytes).unwrap_or(u64::MAX),
            out_of_range: self.out_of_range,
            stall_timeout,
        };
        let hooks = self.shared.config.hooks.around(&self.hooks);
        let stats = Arc::clone(&self.shared.stats);
        let stop = CancellationToken::new();
        let reader = Reader::new(self.shared, plan, output, stopped);
        tokio::spawn(reader.run(stop.clone()));
        Ok(Consumer {
            topic: Arc::clone(&topic.name),
            items,
            stops,
            current: None,
            held_error: None,
            positions,
            hooks,
            stats,
            _stop: stop.drop_guard(),
        })
    }

    fn chosen(&self, topic: &Topic) -> Result<Vec<u32>> {
        let all = || (0..topic.partitions()).collect();
        let chosen: Vec<u32> = self.partitions.clone().unwrap_or_else(all);
        let named = chosen.iter().chain(self.start_at.keys());
        match named.into_iter().find(|&&p| p >= topic.partitions()) {
            Some(&partition) => Err(unknown_partition(topic, partition)),
            None => Ok(chosen),
        }
    }

    fn start_of(&self, partition: u32) -> Position {
        self.start_at.get(&partition).copied().unwrap_or(self.start)
    }

    async fn cursors(
        &self,
        topic: &Topic,
        partitions: &[u32],
        deadline: Instant,
    ) -> Result<BTreeMap<u32, Cursor>> {
        let mut queries = Vec::new();
        for &partition in partitions {
            let start = self.start_of(partition);
            if self.until_end || !matches!(start, Position::Offset(_) | Position::TimeMs(_)) {
                queries.push((partition, OffsetSpec::End));
            }
            if let Position::TimeMs(time_ms) = start {
                queries.push((partition, OffsetSpec::TimeMs(time_ms)));
            }
        }
        let listed = list_offsets(&self.shared, topic, &queries, deadline).await?;
        let mut bounds: BTreeMap<u32, ListedOffset> = BTreeMap::new();
        let mut by_time: BTreeMap<u32, u64> = BTreeMap::new();
        for ((partition, spec), offset) in queries.into_iter().zip(listed) {
            match spec {
                OffsetSpec::TimeMs(_) => {
                    by_time.insert(partition, offset.offset);
                }
                _ => {
                    bounds.insert(partition, offset);
                }
            }
        }
        let cursor = |&partition: &u32| {
            let bounds = bounds.get(&partition);
            let (log_start, end) =
                bounds.map_or((0, 0), |b| (b.log_start_offset, b.high_watermark));
            let next = match self.start_of(partition) {
                Position::Start => log_start,
                Position::End => end,
                Position::Offset(offset) => offset,
                Position::Tail(count) => end.saturating_sub(count).max(log_start),
                Position::TimeMs(_) => by_time.get(&partition).copied().unwrap_or(end),
            };
            (partition, Cursor::new(next, self.until_end.then_some(end)))
        };
        Ok(partitions.iter().map(cursor).collect())
    }
}

impl fmt::Debug for ConsumerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsumerBuilder")
            .field("topic", &self.topic)
            .finish_non_exhaustive()
    }
}

/// A stream of records, in offset order per partition. Follows leaders; never skips or doubles.
///
/// An error item concerns one partition (and offset, where it has one); the stream goes on with
/// the others, and ends when no partition is left.
///
/// # Cancel safety
/// Polling loses nothing: a record that was not returned is returned by the next poll.
pub struct Consumer {
    topic: Arc<str>,
    items: mpsc::UnboundedReceiver<Item>,
    stops: mpsc::UnboundedSender<u32>,
    current: Option<Current>,
    held_error: Option<Error>,
    positions: BTreeMap<u32, u64>,
    hooks: Hooks,
    stats: Arc<Stats>,
    _stop: DropGuard,
}

/// A batch that is being handed out.
struct Current {
    /// Its credit goes back to the broker when this is dropped.
    taken: Taken,
    records: Records,
}

/// The records of one batch, from one partition, in offset order.
#[derive(Debug, Clone)]
pub struct ConsumedBatch {
    /// The partition.
    pub partition: u32,
    /// The leader's high watermark when it sent the batch.
    pub high_watermark: u64,
    /// The records; those below the wanted offset are left out.
    pub records: Vec<ConsumedRecord>,
}

/// A stream of whole batches; see [`Consumer::into_batches`].
#[derive(Debug)]
pub struct BatchConsumer {
    consumer: Consumer,
}

impl Consumer {
    /// The next offset to be given to the program, per partition: where to go on later.
    #[must_use]
    pub fn positions(&self) -> BTreeMap<u32, u64> {
        self.positions.clone()
    }

    /// The same records, batch by batch.
    #[must_use]
    pub fn into_batches(self) -> BatchConsumer {
        BatchConsumer { consumer: self }
    }

    /// Makes the next batch current. `Ready(Err)` for an error item.
    fn poll_batch(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<()>>> {
        loop {
            let taken = match ready!(self.items.poll_recv(cx)) {
                None => return Poll::Ready(None),
                Some(Item::Failed(error)) => return Poll::Ready(Some(Err(error))),
                Some(Item::Batch(taken)) => taken,
            };
            if !self.positions.contains_key(&taken.partition) {
                // Given up after a record that does not decode.
                continue;
            }
            return Poll::Ready(Some(match taken.batch.records() {
                Ok(records) => {
                    let bytes = taken.batch.header().uncompressed_bytes;
                    self.stats.bytes_decompressed.add(bytes.into());
                    self.current = Some(Current { taken, records });
                    Ok(())
                }
                Err(error) => Err(self.undecodable(taken.partition, taken.from, error)),
            }));
        }
    }

    /// The next wanted record of the current batch.
    fn next_in_batch(&mut self) -> Option<Result<ConsumedRecord>> {
        loop {
            let current = self.current.as_mut()?;
            let taken = &current.taken;
            let (partition, base) = (taken.partition, taken.base_offset);
            match current.records.next() {
                None => {
                    // Gives the credit back.
                    self.current = None;
                    return None;
                }
                Some(Err(error)) => {
                    let offset = self.positions.get(&partition).copied().unwrap_or(base);
                    self.current = None;
                    return Some(Err(self.undecodable(partition, offset, error)));
                }
                Some(Ok(record)) => {
                    let offset = base + u64::from(record.offset_delta);
                    if !(taken.from..taken.until).contains(&offset) {
                        continue;
                    }
                    self.positions.insert(partition, offset + 1);
                    let mut record = ConsumedRecord {
                        topic: Arc::clone(&self.topic),
                        partition,
                        offset,
                        timestamp_ms: record.timestamp_ms,
                        broker_time_ms: taken.broker_time_ms,
                        key: record.key,
                        value: record.value,
                        headers: record.headers,
                    };
                    match self.hooks.after_receive(&mut record) {
                        Ok(Received::Deliver) => return Some(Ok(record)),
                        Ok(Received::Skip) => {}
                        Err(error) => return Some(Err(error)),
                    }
                }
            }
        }
    }

    /// The checksum held, but a record makes no sense: its producer wrote it so. The partition
    /// ends there.
    fn undecodable(&mut self, partition: u32, offset: u64, error: BatchError) -> Error {
        self.positions.remove(&partition);
        // The reader may have ended: then the partition has, too.
        let _ = self.stops.send(partition);
        Error::new(ErrorKind::CorruptBatch, error.to_string())
            .with_cause(&error)
            .at(&self.topic, partition)
            .with_offset(offset)
    }
}

impl Stream for Consumer {
    type Item = Result<ConsumedRecord>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(record) = self.next_in_batch() {
                return Poll::Ready(Some(record));
            }
            match ready!(self.poll_batch(cx)) {
                None => return Poll::Ready(None),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                Some(Ok(())) => {}
            }
        }
    }
}

impl Stream for BatchConsumer {
    type Item = Result<ConsumedBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let consumer = &mut self.consumer;
        loop {
            if let Some(error) = consumer.held_error.take() {
                return Poll::Ready(Some(Err(error)));
            }
            if let Some(current) = &consumer.current {
                let (partition, high_watermark) =
                    (current.taken.partition, current.taken.high_watermark);
                let mut records = Vec::new();
                while let Some(record) = consumer.next_in_batch() {
                    match record {
                        Ok(record) => records.push(record),
                        // After the records before it, and before those behind it.
                        Err(error) => {
                            consumer.held_error = Some(error);
                            break;
                        }
                    }
                }
                if !records.is_empty() {
                    return Poll::Ready(Some(Ok(ConsumedBatch {
                        partition,
                        high_watermark,
                        records,
                    })));
                }
                continue;
            }
            match ready!(consumer.poll_batch(cx)) {
                None => return Poll::Ready(None),
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                Some(Ok(())) => {}
            }
        }
    }
}

impl BatchConsumer {
    /// The next offset to be given to the program, per partition.
    #[must_use]
    pub fn positions(&self) -> BTreeMap<u32, u64> {
        self.consumer.positions()
    }
}

impl fmt::Debug for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("topic", &self.topic)
            .field("positions", &self.positions)
            .finish_non_exhaustive()
    }
}
