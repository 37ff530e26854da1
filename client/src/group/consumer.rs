//! What the program reads a group from.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::Stream;
use qute_proto::ids::{MemberId, PartitionId};
use tokio::time::Instant;

use super::batch::GroupBatch;
use super::control::GroupControl;
use super::core::{Core, Next, TopicEvents};
use super::event::{GroupEvent, TopicPartition};
use crate::consumer::{ConsumedBatch, ConsumerEvent};
use crate::error::{ErrorKind, Result};

/// A member of a consumer group: a stream of batches to be acknowledged, and of what happens to the
/// member's partitions.
///
/// Each partition of the group's topics is read by one member at a time, from where the group has
/// committed. Records are handed out at least once: whatever is acknowledged and committed is not handed out
/// again; what is not is, by whoever has the partition then. Partitions that stay with a member flow on
/// while others move.
///
/// Dropping it never blocks: the member stops, and leaves in the background with what is acknowledged;
/// a static member keeps its place. [`GroupConsumer::leave`] waits for that.
///
/// ```no_run
/// use futures::StreamExt;
/// use qute_client::Client;
/// use qute_client::group::Event;
///
/// # async fn example(client: Client) -> qute_client::Result<()> {
/// let mut group = client.group("billing").topics(["orders", "refunds"]).join().await?;
/// while let Some(event) = group.next().await {
///     match event {
///         Event::Batch(batch) => {
///             for record in batch.records() {
///                 println!("{}/{}: {:?}", record.partition, record.offset, record.value);
///             }
///             batch.ack();
///         }
///         Event::Failed(error) => eprintln!("{error}"),
///         other => println!("{other:?}"),
///     }
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Cancel safety
/// Polling loses nothing: an event that was not returned is returned by the next poll.
pub struct GroupConsumer {
    core: Arc<Core>,
    readers: Vec<TopicEvents>,
    /// The reader whose turn it is.
    turn: usize,
    ended: bool,
}

impl GroupConsumer {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self {
            core,
            readers: Vec::new(),
            turn: 0,
            ended: false,
        }
    }

    pub(super) fn core(&self) -> Arc<Core> {
        Arc::clone(&self.core)
    }

    /// The group's name.
    #[must_use]
    pub fn group(&self) -> &str {
        &self.core.group
    }

    /// The member's id, drawn when it joined.
    #[must_use]
    pub fn member(&self) -> MemberId {
        self.core.with(|state| state.membership.id())
    }

    /// A handle to commit, pause, ask and leave, from anywhere.
    #[must_use]
    pub fn control(&self) -> GroupControl {
        GroupControl::new(Arc::clone(&self.core))
    }

    /// Commits what is acknowledged; see [`GroupControl::commit`].
    ///
    /// # Errors
    /// As [`GroupControl::commit`].
    ///
    /// # Cancel safety
    /// As that of [`GroupControl::commit`].
    pub async fn commit(&self) -> Result<()> {
        self.control().commit().await
    }

    /// Has what is acknowledged committed; see [`GroupControl::commit_in_background`].
    pub fn commit_in_background(&self) {
        self.control().commit_in_background();
    }

    /// Stops, commits what is acknowledged (with [`super::CommitMode::Manual`]: what was asked to be),
    /// and leaves; a static member keeps its place. Waits for nothing that is not acknowledged.
    ///
    /// # Errors
    /// As [`GroupControl::leave`].
    ///
    /// # Cancel safety
    /// Dropped, the member leaves in the background.
    pub async fn leave(self, deadline: Duration) -> Result<()> {
        self.control().leave(deadline).await
    }

    /// What comes of the readers.
    fn poll_readers(&mut self, cx: &mut Context<'_>) -> Poll<GroupEvent> {
        for _ in 0..self.readers.len() {
            let at = self.turn % self.readers.len();
            while let Some(reader) = self.readers.get_mut(at) {
                match reader.events.poll_event(cx) {
                    Poll::Pending => break,
                    Poll::Ready(None) => {
                        self.readers.swap_remove(at);
                        break;
                    }
                    Poll::Ready(Some((epoch, event))) => {
                        if let Some(event) = convert(&self.core, reader, epoch, event) {
                            // One event each.
                            self.turn = at + 1;
                            return Poll::Ready(event);
                        }
                    }
                }
            }
            if self.readers.is_empty() {
                break;
            }
            self.turn = at + 1;
        }
        Poll::Pending
    }
}

/// What the program gets of it; `None` if it does not concern the program.
fn convert(
    core: &Arc<Core>,
    reader: &TopicEvents,
    attachment: u64,
    event: ConsumerEvent,
) -> Option<GroupEvent> {
    let topic = &reader.topic;
    let place = |partition| PartitionId {
        topic: topic.id,
        partition,
    };
    let named = |partition| TopicPartition::new(Arc::clone(&topic.name), partition);
    let now = Instant::now();
    match event {
        ConsumerEvent::Batch(batch) => hand_out(core, reader, attachment, batch, now),
        ConsumerEvent::Reset {
            partition,
            from,
            to,
            error,
        } => {
            let place = place(partition);
            let moved = core.with(|state| {
                state.commits.acknowledged();
                state.membership.moved(place, attachment, to, now)
            });
            moved.then(|| GroupEvent::Reset {
                partition: named(partition),
                from,
                to,
                error,
            })
        }
        // Views tell it as well, once for all partitions.
        ConsumerEvent::Failed(error)
            if matches!(
                error.kind(),
                ErrorKind::UnknownTopic | ErrorKind::TopicRecreated
            ) =>
        {
            None
        }
        ConsumerEvent::Failed(error) => {
            let concerns = error.partition().is_none_or(|partition| {
                let place = place(partition);
                core.with(|state| state.membership.is_attached(place, attachment))
            });
            concerns.then_some(GroupEvent::Failed(error))
        }
        ConsumerEvent::PartitionsAdded { .. } | ConsumerEvent::End { .. } => None,
    }
}

/// S26, and the last moment to see that the claim is still held.
fn hand_out(
    core: &Arc<Core>,
    reader: &TopicEvents,
    attachment: u64,
    batch: ConsumedBatch,
    now: Instant,
) -> Option<GroupEvent> {
    let topic = &reader.topic;
    let place = PartitionId {
        topic: topic.id,
        partition: batch.partition,
    };
    let first = batch.records.first()?.offset;
    let last = batch.records.last()?.offset;
    let offsets = first..last.saturating_add(1);
    let handed = offsets.clone();
    let claim_epoch =
        core.with(|state| state.membership.deliver(place, attachment, handed, now))?;
    let batch = GroupBatch::new(core, &topic.name, place, claim_epoch, offsets, batch);
    Some(GroupEvent::Batch(batch))
}

impl Stream for GroupConsumer {
    type Item = GroupEvent;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<GroupEvent>> {
        let this = &mut *self;
        if this.ended {
            return Poll::Ready(None);
        }
        match this.core.next(cx.waker(), Instant::now()) {
            Next::Event(event) => return Poll::Ready(Some(event)),
            Next::Ended => {
                this.ended = true;
                this.readers.clear();
                return Poll::Ready(None);
            }
            Next::Batches(opened, gone) => {
                this.readers.extend(opened);
                this.readers
                    .retain(|reader| !gone.contains(&reader.topic.id));
            }
        }
        this.poll_readers(cx).map(Some)
    }
}

impl Drop for GroupConsumer {
    fn drop(&mut self) {
        self.control().leave_in_background();
    }
}

impl fmt::Debug for GroupConsumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupConsumer")
            .field("group", &self.core.group)
            .finish_non_exhaustive()
    }
}
