//! A topic of which partitions are read while they are attached: what consumer groups read from.
//!
//! Partitions are not read until they are attached, each at an offset; detached, nothing of them comes
//! any more. Every attachment has an epoch, rising per partition, and every event tells the one that it
//! belongs to: an event of an older epoch is void. Several topics share one [`Prefetch`].

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::buffer::{Buffer, Refused};
use super::builder::{OutOfRange, PREFETCH_BYTES, Position, locate};
use super::credit::Pool;
use super::cursor::Cursor;
use super::event::ConsumerEvent;
use super::reader::{Plan, Planned, Reader};
use super::stream::Consumer;
use crate::client::Shared;
use crate::error::Result;
use crate::interceptor::Hooks;
use crate::metadata::Topic;

/// Bytes fetched ahead, shared by topics.
#[derive(Clone)]
pub(crate) struct Prefetch {
    pool: Arc<Pool>,
    bytes: u64,
}

impl Prefetch {
    /// Of so many bytes, counted as [`super::ConsumerBuilder::prefetch_bytes`] does.
    pub(crate) fn new(bytes: Option<usize>) -> Self {
        let bytes = u64::try_from(bytes.unwrap_or(PREFETCH_BYTES)).unwrap_or(u64::MAX);
        Self {
            pool: Arc::new(Pool::new(bytes)),
            bytes,
        }
    }
}

/// How a topic is read.
#[derive(Clone)]
pub(crate) struct OnDemandPlan {
    pub(crate) prefetch: Prefetch,
    /// How many topics share the prefetch.
    pub(crate) topics: usize,
    pub(crate) out_of_range: OutOfRange,
    /// Read from replicas in this rack where there are any.
    pub(crate) rack: Option<String>,
    /// Those of the client included.
    pub(crate) hooks: Hooks,
}

/// What comes of the attached partitions.
pub(crate) struct OnDemand {
    consumer: Consumer,
}

/// Attaches and detaches.
#[derive(Clone)]
pub(crate) struct Partitions {
    shared: Arc<Shared>,
    topic: Arc<Topic>,
    buffer: Arc<Buffer>,
}

impl OnDemand {
    /// Begins a task that ends when the value is dropped. Must be called inside a runtime.
    pub(crate) fn open(
        shared: &Arc<Shared>,
        topic: &Arc<Topic>,
        plan: &OnDemandPlan,
    ) -> (Self, Partitions) {
        let buffer = Arc::new(Buffer::on_demand(Arc::clone(&plan.prefetch.pool)));
        let planned = |partition| Planned {
            partition,
            cursor: Cursor::new(0, None),
            end_ms: None,
            high_watermark: None,
            beyond_end: false,
        };
        let topics = u64::try_from(plan.topics.max(1)).unwrap_or(u64::MAX);
        let reader = Reader::new(
            Arc::clone(shared),
            Plan {
                topic: Arc::clone(topic),
                planned: (0..topic.partitions()).map(planned).collect(),
                whole: Some(None),
                prefetch_bytes: plan.prefetch.bytes / topics,
                out_of_range: plan.out_of_range,
                rack: plan.rack.clone(),
                stall_timeout: None,
            },
            Arc::clone(&buffer),
        );
        let stop = CancellationToken::new();
        tokio::spawn(reader.run(stop.clone()));
        let partitions = Partitions {
            shared: Arc::clone(shared),
            topic: Arc::clone(topic),
            buffer: Arc::clone(&buffer),
        };
        let hooks = plan.hooks.clone();
        let consumer = Consumer::new(Arc::clone(shared), Arc::clone(topic), buffer, hooks, stop);
        (Self { consumer }, partitions)
    }

    /// The next event, with the epoch of the attachment that it belongs to (those without a
    /// partition belong to none). `None` once the reader is gone.
    pub(crate) fn poll_event(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<(u64, ConsumerEvent)>> {
        let event = self.consumer.poll_event(cx);
        event.map(|event| event.map(|event| (self.consumer.epoch(), event)))
    }
}

impl Partitions {
    /// Reads the partition from `offset` on, and gives the epoch of the attachment; `None` if the
    /// partition is not known yet, or the reader is gone.
    pub(crate) fn attach(&self, partition: u32, offset: u64) -> Option<u64> {
        self.buffer.attach(partition, offset).ok()
    }

    /// Reads it no more.
    pub(crate) fn detach(&self, partition: u32) {
        match self.buffer.detach(partition) {
            // It isn't read.
            Ok(()) | Err(Refused::Unknown(_) | Refused::Closed) => {}
        }
    }

    /// Hands out nothing of the partition until it is resumed; its attachment stays.
    pub(crate) fn pause(&self, partition: u32) {
        // One that is not known is not read.
        let _ = self.buffer.pause(&[partition]);
    }

    /// Goes on with a partition that is attached.
    pub(crate) fn resume(&self, partition: u32) {
        let _ = self.buffer.resume(&[partition]);
    }

    /// The offset of a position, now.
    ///
    /// # Errors
    /// What kept the leader from answering by the deadline.
    pub(crate) async fn locate(
        &self,
        partition: u32,
        position: Position,
        deadline: Instant,
    ) -> Result<u64> {
        let view = self.shared.metadata.load();
        let present = view.topic_by_id(&self.topic.name, self.topic.id);
        let topic = Arc::clone(present.unwrap_or(&self.topic));
        locate(&self.shared, &topic, partition, position, deadline).await
    }

    /// The high watermark, where it is known.
    pub(crate) fn high_watermark(&self, partition: u32) -> Option<u64> {
        self.buffer.high_watermark(partition)
    }
}

impl fmt::Debug for Partitions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Partitions")
            .field("topic", &self.topic.name)
            .finish_non_exhaustive()
    }
}
