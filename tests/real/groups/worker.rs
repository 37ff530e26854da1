//! The life of a member under test: a thread with a runtime and a client of its own.
//!
//! So it can go as a process goes: killed (its connections close, nothing is said), frozen (its
//! connections stay, nothing moves), or in order. What it is handed it puts down under the trace's lock,
//! so the order of the trace is the order of the deliveries.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::task::{Poll, ready};
use std::time::Duration;

use anyhow::Result;
use futures::StreamExt;
use futures::future::poll_fn;
use qute_client::ErrorKind;
use qute_client::group::{
    Acker, Event, GroupBatch, GroupConsumer, GroupControl, MemberId, TopicPartition,
};
use qute_tests::oracle::{Place, Step, Trace};
use tokio::sync::{mpsc, oneshot};

use super::crew::connect;
use super::member::{Order, Plan, Shared, lock};

/// How often it looks at what is confirmed to be committed.
const LOOK: Duration = Duration::from_millis(50);
const LEAVE: Duration = Duration::from_secs(30);

fn place(partition: &TopicPartition) -> Place {
    Place::new(Arc::clone(&partition.topic), partition.partition)
}

/// A member's life.
pub(super) async fn work(
    bootstrap: String,
    group: String,
    plan: Plan,
    shared: Arc<Shared>,
    mut orders: mpsc::UnboundedReceiver<Order>,
    joined: oneshot::Sender<(GroupControl, MemberId)>,
) -> Result<()> {
    let client = connect(&bootstrap).await?;
    let consumer = (plan.build)(client.group(group)).join().await?;
    let control = consumer.control();
    let _ = joined.send((control.clone(), consumer.member()));
    let mut worker = Worker {
        shared,
        control,
        latest: Arc::default(),
        held_back: None,
    };
    if plan.by_hand {
        tokio::spawn(worker.committer());
    }
    let mut consumer = Some(consumer);
    let mut look = tokio::time::interval(LOOK);
    loop {
        tokio::select! {
            biased;
            order = orders.recv() => match order {
                Some(Order::Hold(true)) => {
                    worker.held_back.get_or_insert_default();
                }
                Some(Order::Hold(false)) => {
                    for batch in worker.held_back.take().into_iter().flatten() {
                        worker.handle(batch);
                    }
                }
                Some(Order::Freeze(ice)) => ice.freeze(),
                Some(Order::Leave(told)) => {
                    let left = match consumer.take() {
                        Some(consumer) => consumer.leave(LEAVE).await.map_err(Into::into),
                        None => Ok(()),
                    };
                    let _ = told.send(left);
                    return Ok(());
                }
                Some(Order::Die) | None => {
                    // Dropped, it would leave in order.
                    std::mem::forget(consumer);
                    return Ok(());
                }
            },
            event = worker.next(consumer.as_mut()) => match event {
                Some(event) => worker.take(event),
                None => {
                    lock(&worker.shared.seen).ended = true;
                    consumer = None;
                }
            },
            _ = look.tick() => worker.look(),
        }
    }
}

type Latest = Arc<Mutex<BTreeMap<Place, (u64, Acker, TopicPartition, Option<u64>)>>>;

struct Worker {
    shared: Arc<Shared>,
    control: GroupControl,
    /// By place: epoch of the last batch, what says whether it is held, and the last confirmed commit.
    latest: Latest,
    /// Batches that are not to be acknowledged yet.
    held_back: Option<Vec<GroupBatch>>,
}

impl Worker {
    /// The next event, put down before anybody else is given one.
    async fn next(&self, consumer: Option<&mut GroupConsumer>) -> Option<Event> {
        let Some(consumer) = consumer else {
            return std::future::pending().await;
        };
        poll_fn(|cx| {
            let mut steps = self.shared.spot.trace.lock();
            let event = ready!(consumer.poll_next_unpin(cx));
            if let Some(event) = &event {
                self.put(&mut steps, event);
            }
            Poll::Ready(event)
        })
        .await
    }

    fn put(&self, steps: &mut Vec<Step>, event: &Event) {
        let member = &self.shared.spot.name;
        let gone = |partition: &TopicPartition| Step::Gone {
            member: Arc::clone(member),
            place: place(partition),
        };
        match event {
            Event::Assigned(assigned) => {
                steps.extend(assigned.partitions.iter().map(|partition| Step::Granted {
                    member: Arc::clone(member),
                    place: place(partition),
                }));
            }
            Event::Revoking(revoking) => steps.extend(revoking.partitions.iter().map(gone)),
            Event::Lost(lost) => steps.extend(lost.partitions.iter().map(gone)),
            Event::Batch(batch) => steps.push(Step::Delivered {
                member: Arc::clone(member),
                place: place(&batch.topic_partition()),
                epoch: batch.claim_epoch(),
                offsets: batch.offsets(),
            }),
            _ => {}
        }
    }

    fn take(&mut self, event: Event) {
        let mut seen = lock(&self.shared.seen);
        match event {
            Event::Assigned(assigned) => {
                seen.assigned.extend(assigned.partitions.iter().map(place));
            }
            Event::Revoking(revoking) => {
                for place in revoking.partitions.iter().map(place) {
                    seen.assigned.remove(&place);
                    seen.revoked.push(place);
                }
            }
            Event::Lost(lost) => {
                for place in lost.partitions.iter().map(place) {
                    seen.assigned.remove(&place);
                    seen.lost.push((place, lost.reason));
                }
            }
            Event::TopicRecreated { topic, .. } => seen.recreated.push(topic.to_string()),
            Event::Failed(error) => seen.failed.push(error),
            Event::Batch(batch) => {
                let (partition, epoch) = (batch.topic_partition(), batch.claim_epoch());
                let (place, offsets) = (place(&partition), batch.offsets());
                seen.records += offsets.end - offsets.start;
                if seen
                    .began
                    .get(&place)
                    .is_none_or(|(known, _)| *known < epoch)
                {
                    seen.began.insert(place.clone(), (epoch, offsets.start));
                }
                drop(seen);
                let mut latest = lock(&self.latest);
                if latest.get(&place).is_none_or(|known| known.0 < epoch) {
                    latest.insert(place, (epoch, batch.acker(), partition, None));
                }
                drop(latest);
                match &mut self.held_back {
                    Some(held_back) => held_back.push(batch),
                    None => self.handle(batch),
                }
            }
            _ => {}
        }
    }

    /// Is done with a batch.
    fn handle(&self, batch: GroupBatch) {
        let (place, offsets) = (place(&batch.topic_partition()), batch.offsets());
        self.shared.spot.trace.put(Step::Acknowledged {
            place: place.clone(),
            epoch: batch.claim_epoch(),
            offsets: offsets.clone(),
        });
        lock(&self.shared.spot.handled)
            .entry(place)
            .or_default()
            .insert(offsets);
        batch.ack();
    }

    /// Puts down what is confirmed to be committed.
    fn look(&self) {
        look(&self.shared.spot.trace, &self.control, &self.latest);
    }

    /// Commits again and again, and counts.
    fn committer(&self) -> impl Future<Output = ()> + Send + 'static {
        let (shared, control) = (Arc::clone(&self.shared), self.control.clone());
        let latest = Arc::clone(&self.latest);
        async move {
            loop {
                let result = control.commit().await;
                look(&shared.spot.trace, &control, &latest);
                match result {
                    Ok(()) => lock(&shared.seen).commits += 1,
                    Err(error) if error.kind() == ErrorKind::Closed => return,
                    Err(error) => lock(&shared.seen).commit_errors.push(error),
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }
}

/// A claim that is held before and after has not changed in between: what the member knows to be committed
/// is of that claim.
fn look(trace: &Trace, control: &GroupControl, latest: &Latest) {
    let mut latest = lock(latest);
    latest.retain(|_, (_, acker, ..)| acker.is_held());
    let positions = control.positions();
    for (place, (epoch, acker, partition, last)) in &mut *latest {
        let committed = positions
            .get(partition)
            .and_then(|position| position.committed);
        if let Some(offset) = committed
            && *last < Some(offset)
            && acker.is_held()
        {
            *last = Some(offset);
            trace.put(Step::Committed {
                place: place.clone(),
                epoch: *epoch,
                offset,
            });
        }
    }
}
