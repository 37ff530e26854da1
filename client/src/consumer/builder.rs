//! What is to be read: topic or partitions, from where, up to where, and how.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::buffer::Buffer;
use super::credit::Pool;
use super::cursor::Cursor;
use super::reader::{Plan, Planned, Reader};
use super::stream::Consumer;
use crate::admin::{ListedOffset, OffsetSpec, list_offsets, unknown_partition};
use crate::client::Shared;
use crate::config::capped;
use crate::error::Result;
use crate::interceptor::{Hooks, Interceptor};
use crate::metadata::Topic;
use crate::record::now_ms;

pub(super) const PREFETCH_BYTES: usize = 16 * 1024 * 1024;
const STALL_TIMEOUT_BOUNDED: Duration = Duration::from_secs(120);

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

/// Where reading of a partition ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bound {
    /// At the high watermark seen when the consumer was opened. Partitions added later are not
    /// read.
    End,
    /// Before this offset, even if it is yet to be written.
    Offset(u64),
    /// Before the first batch with at least this broker time, Unix milliseconds. If none has it
    /// yet: once one has, or that moment has passed and what was written before is read.
    TimeMs(u64),
}

/// What to do when an offset is proven out of range: one to begin at that the log does not reach
/// (whatever the bound by [`Bound::End`]), or one whose records were deleted. Either way the program is
/// told.
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
    until: Option<Bound>,
    until_at: BTreeMap<u32, Bound>,
    prefetch_bytes: usize,
    out_of_range: OutOfRange,
    nearest_replica: bool,
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
            until: None,
            until_at: BTreeMap::new(),
            prefetch_bytes: PREFETCH_BYTES,
            out_of_range: OutOfRange::Stop,
            nearest_replica: false,
            stall_timeout: None,
        }
    }

    /// Reads only these partitions. Default: all, those included that are added later, which are
    /// read from their start.
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

    /// Where reading ends. Default: never.
    pub fn until(mut self, bound: Bound) -> Self {
        self.until = Some(bound);
        self
    }

    /// Where reading of one partition ends, whatever [`ConsumerBuilder::until`] says.
    pub fn until_at(mut self, partition: u32, bound: Bound) -> Self {
        self.until_at.insert(partition, bound);
        self
    }

    /// Ends at the end offsets seen when it is opened: [`Bound::End`].
    pub fn until_end(self) -> Self {
        self.until(Bound::End)
    }

    /// Bytes fetched ahead of the program, over all brokers, counted as they are once decompressed.
    /// Batches wait as they came in, and one at a time is decompressed when the program takes it,
    /// so the memory held is at most this, one batch, and 256 KiB and a message per broker. A batch
    /// larger than all of it is still read. Default 16 MiB.
    pub fn prefetch_bytes(mut self, bytes: usize) -> Self {
        self.prefetch_bytes = bytes;
        self
    }

    /// What to do when an offset is proven out of range. Default: [`OutOfRange::Stop`].
    pub fn out_of_range(mut self, policy: OutOfRange) -> Self {
        self.out_of_range = policy;
        self
    }

    /// Reads each partition from a replica in the client's own rack
    /// ([`crate::ClientConfig::rack`]), where a living one is known; from its leader where there is
    /// none, or where it does not serve. Followers serve what is committed, a little later than
    /// leaders do. Default: off.
    pub fn nearest_replica(mut self, nearest: bool) -> Self {
        self.nearest_replica = nearest;
        self
    }

    /// A partition that nobody serves for this long ends with an error. Default: 120 s with a
    /// bound, never without.
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
    ///
    /// # Cancel safety
    /// Safe: nothing runs before it has returned.
    pub async fn open(self) -> Result<Consumer> {
        let deadline = Instant::now() + self.open_timeout;
        let topic = self.shared.metadata.topic(&self.topic, deadline).await?;
        let chosen = self.chosen(&topic)?;
        let planned = self.planned(&topic, &chosen, deadline).await?;
        let bounded = self.until.is_some() || !self.until_at.is_empty();
        let prefetch_bytes = u64::try_from(self.prefetch_bytes).unwrap_or(u64::MAX);
        let plan = Plan {
            topic: Arc::clone(&topic),
            planned,
            whole: self.partitions.is_none().then_some(self.until),
            prefetch_bytes,
            out_of_range: self.out_of_range,
            rack: self
                .shared
                .config
                .rack
                .clone()
                .filter(|_| self.nearest_replica),
            stall_timeout: self
                .stall_timeout
                .or(bounded.then_some(STALL_TIMEOUT_BOUNDED)),
        };
        let hooks = self.shared.config.hooks.around(&self.hooks);
        let buffer = Arc::new(Buffer::new(Arc::new(Pool::new(prefetch_bytes))));
        let stop = CancellationToken::new();
        let reader = Reader::new(Arc::clone(&self.shared), plan, Arc::clone(&buffer));
        tokio::spawn(reader.run(stop.clone()));
        Ok(Consumer::new(self.shared, topic, buffer, hooks, stop))
    }

    fn chosen(&self, topic: &Topic) -> Result<Vec<u32>> {
        let mut chosen: Vec<u32> = match &self.partitions {
            Some(partitions) => partitions.clone(),
            None => (0..topic.partitions()).collect(),
        };
        chosen.sort_unstable();
        chosen.dedup();
        let named = chosen.iter().chain(self.start_at.keys());
        let mut named = named.chain(self.until_at.keys());
        match named.find(|&&partition| partition >= topic.partitions()) {
            Some(&partition) => Err(unknown_partition(topic, partition)),
            None => Ok(chosen),
        }
    }

    fn start_of(&self, partition: u32) -> Position {
        self.start_at.get(&partition).copied().unwrap_or(self.start)
    }

    fn bound_of(&self, partition: u32) -> Option<Bound> {
        self.until_at.get(&partition).copied().or(self.until)
    }

    async fn planned(
        &self,
        topic: &Topic,
        partitions: &[u32],
        deadline: Instant,
    ) -> Result<Vec<Planned>> {
        let mut queries = Vec::new();
        for &partition in partitions {
            let (start, bound) = (self.start_of(partition), self.bound_of(partition));
            let by_time = matches!(start, Position::TimeMs(_));
            let needs_bounds = !matches!(start, Position::Offset(_)) && !by_time
                || matches!(bound, Some(Bound::End));
            if needs_bounds {
                queries.push((partition, OffsetSpec::End));
            }
            if let Position::TimeMs(time_ms) = start {
                queries.push((partition, OffsetSpec::TimeMs(time_ms)));
            }
            if let Some(Bound::TimeMs(time_ms)) = bound {
                queries.push((partition, OffsetSpec::TimeMs(time_ms)));
            }
        }
        let listed = list_offsets(&self.shared, topic, &queries, deadline).await?;
        let mut found: BTreeMap<u32, Vec<(OffsetSpec, ListedOffset)>> = BTreeMap::new();
        for ((partition, spec), offset) in queries.into_iter().zip(listed) {
            found.entry(partition).or_default().push((spec, offset));
        }
        let plan = |&partition: &u32| {
            let found = found.get(&partition).map_or(&[][..], Vec::as_slice);
            let answer = |spec| {
                let answer = found.iter().find(|(asked, _)| *asked == spec);
                answer.map(|(_, offset)| offset)
            };
            let start = self.start_of(partition);
            let next = resolve(start, answer(spec_of(start)));
            let (end, end_ms) = match self.bound_of(partition) {
                None => (None, None),
                Some(Bound::Offset(end)) => (Some(end), None),
                Some(Bound::End) => {
                    let end = answer(OffsetSpec::End).map(|offset| offset.high_watermark);
                    (end, None)
                }
                Some(Bound::TimeMs(time_ms)) => {
                    let end = answer(OffsetSpec::TimeMs(time_ms))
                        .and_then(|offset| time_bound(time_ms, offset));
                    (end, end.is_none().then_some(time_ms))
                }
            };
            let high_watermark = found.iter().map(|(_, offset)| offset.high_watermark).max();
            let cursor = Cursor::new(next, end);
            // Not read, for having nothing to read: who named an offset that is not there is told.
            let beyond_end = cursor.is_done()
                && matches!(start, Position::Offset(_))
                && high_watermark.is_some_and(|high_watermark| next > high_watermark);
            Planned {
                partition,
                cursor,
                end_ms,
                high_watermark,
                beyond_end,
            }
        };
        Ok(partitions.iter().map(plan).collect())
    }
}

/// Where a bound by time lies; `None` if that can't be said before the moment has passed.
pub(super) fn time_bound(time_ms: u64, listed: &ListedOffset) -> Option<u64> {
    let passed = u64::try_from(now_ms()).is_ok_and(|now| time_ms <= now);
    (passed || listed.offset < listed.high_watermark).then_some(listed.offset)
}

/// What the leader is asked to find a position.
fn spec_of(position: Position) -> OffsetSpec {
    match position {
        Position::TimeMs(time_ms) => OffsetSpec::TimeMs(time_ms),
        _ => OffsetSpec::End,
    }
}

fn resolve(position: Position, answer: Option<&ListedOffset>) -> u64 {
    let (log_start, high_watermark) = answer.map_or((0, 0), |answer| {
        (answer.log_start_offset, answer.high_watermark)
    });
    match position {
        Position::Start => log_start,
        Position::End => high_watermark,
        Position::Offset(offset) => offset,
        Position::Tail(count) => high_watermark.saturating_sub(count).max(log_start),
        Position::TimeMs(_) => answer.map_or(high_watermark, |answer| answer.offset),
    }
}

/// The offset of a position, now.
///
/// # Errors
/// As [`list_offsets`].
pub(super) async fn locate(
    shared: &Shared,
    topic: &Topic,
    partition: u32,
    position: Position,
    deadline: Instant,
) -> Result<u64> {
    if let Position::Offset(offset) = position {
        return Ok(offset);
    }
    let query = [(partition, spec_of(position))];
    let listed = list_offsets(shared, topic, &query, deadline).await?;
    Ok(resolve(position, listed.first()))
}

impl fmt::Debug for ConsumerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsumerBuilder")
            .field("topic", &self.topic)
            .finish_non_exhaustive()
    }
}
