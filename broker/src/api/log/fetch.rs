//! One fetch stream: subscriptions and byte credit in, committed batches out.
//!
//! One task per stream, none per subscription:
//!
//! ```text
//!              confirmed, in bounds            nothing more below the high watermark
//!  starting -------------------------> ready ---------------------------------------> idle
//!     |                                  ^ |                                            |
//!     | refused                          | '--- leadership lost, out of range --> ended |
//!     '--> ended                         '----------- high watermark moved -------------'
//! ```
//!
//! Ready subscriptions take turns, one message each (about [`MESSAGE_BYTES`]); idle ones sleep on
//! watches. Memory is bounded: a message is read only when there is credit for it and room in the
//! stream.
//!
//! A subscription that could be sent something and has no credit is told the high watermark now and
//! then ([`TELL_PAUSE`]), so that its lag is known, and is ended when its replica stops serving. A
//! stream on which nothing waits for credit keeps no timer.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::future::{AbortHandle, Abortable, BoxFuture};
use futures::stream::FuturesUnordered;
use qute_proto::ids::{Offset, PartitionId};
use qute_proto::{FETCH_CREDIT_BYTES_MAX, v1};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::{Status, Streaming};

use super::{Shared, wire};
use crate::partition::error::Error;
use crate::partition::replica::{Bounds, Chunk, Replica};

/// Batches of one message together, unless a single one is larger.
const MESSAGE_BYTES: usize = 1 << 20;
/// Subscriptions of one stream.
const SUBSCRIPTIONS_MAX: usize = 10_000;
/// Control messages that wait for room; beyond it no request is read.
const OUTBOX_MAX: usize = 1024;
/// How long a subscription waits for its leader to get ready and confirm itself.
const START_WITHIN: Duration = Duration::from_secs(5);

/// Between two signs of the high watermark on a stream whose credit is used up, at least.
const TELL_PAUSE: Duration = Duration::from_secs(1);

type Answers = mpsc::Sender<Result<v1::FetchResponse, Status>>;

struct Subscription {
    id: u64,
    partition: PartitionId,
    next: Offset,
    /// Set once live.
    live: Option<Live>,
    /// The high watermark that the client knows.
    told: Offset,
    /// Ends its future in `events` when the subscription goes.
    abort: AbortHandle,
}

#[derive(Clone)]
struct Live {
    replica: Arc<Replica>,
    /// Of the leader that serves, or that the serving follower follows.
    leader_epoch: u64,
    follows: bool,
}

impl Live {
    async fn read(&self, from: Offset, bytes_max: usize) -> Result<Chunk, Error> {
        if self.follows {
            self.replica.read_following(from, bytes_max).await
        } else {
            self.replica.read(from, bytes_max, self.leader_epoch).await
        }
    }

    async fn wait_beyond(&self, offset: Offset) -> Result<(), Error> {
        if self.follows {
            self.replica.wait_beyond_following(offset).await
        } else {
            self.replica.wait_beyond(offset, self.leader_epoch).await
        }
    }

    /// The bounds, while the replica serves as it did when the subscription began.
    fn bounds(&self) -> Result<Bounds, Error> {
        if self.follows {
            self.replica.check_following()?;
        } else if self.replica.serving() != Some(self.leader_epoch) {
            return Err(Error::NotLeader);
        }
        Ok(self.replica.bounds())
    }
}

enum Event {
    Started(Result<(Live, Bounds), Error>),
    Woken(Result<(), Error>),
}

/// Which life of a subscription an event is for: ids may be used again.
type Generation = u64;

struct Fetcher {
    shared: Arc<Shared>,
    subscriptions: HashMap<Generation, Subscription>,
    by_id: HashMap<u64, Generation>,
    next_generation: Generation,
    events: FuturesUnordered<BoxFuture<'static, Option<(Generation, Event)>>>,
    ready: VecDeque<Generation>,
    outbox: VecDeque<v1::FetchResponse>,
    credit: i64,
    /// When subscriptions without credit may next be told their high watermark.
    tell_at: Instant,
}

/// Runs one stream until the client ends it or is gone, or the broker stops.
pub(super) async fn run(
    shared: Arc<Shared>,
    mut requests: Streaming<v1::FetchRequest>,
    answers: Answers,
) {
    let stop = shared.stop.clone();
    let mut fetcher = Fetcher {
        shared,
        subscriptions: HashMap::new(),
        by_id: HashMap::new(),
        next_generation: 0,
        events: FuturesUnordered::new(),
        ready: VecDeque::new(),
        outbox: VecDeque::new(),
        credit: 0,
        tell_at: Instant::now(),
    };
    loop {
        tokio::select! {
            () = stop.cancelled() => {
                let _ = answers.try_send(Err(Status::unavailable("the broker is stopping")));
                return;
            }
            request = requests.next(), if fetcher.outbox.len() < OUTBOX_MAX => match request {
                Some(Ok(request)) => fetcher.request(request),
                Some(Err(status)) => {
                    fetcher.shared.send(&answers, Err(status)).await;
                    return;
                }
                None => return,
            },
            Some(event) = fetcher.events.next(), if !fetcher.events.is_empty() => {
                if let Some((generation, event)) = event {
                    fetcher.event(generation, event);
                }
            }
            room = answers.reserve(), if fetcher.has_work() => {
                let Ok(room) = room else { return };
                if let Some(message) = fetcher.next_message().await {
                    room.send(Ok(message));
                }
            }
            () = tokio::time::sleep_until(fetcher.tell_at), if fetcher.is_starved() => {
                fetcher.tell_high_watermarks();
            }
        }
    }
}

impl Fetcher {
    fn has_work(&self) -> bool {
        !self.outbox.is_empty() || (self.credit > 0 && !self.ready.is_empty())
    }

    /// Something could be sent, and there is no credit for it.
    fn is_starved(&self) -> bool {
        self.credit <= 0 && !self.ready.is_empty() && self.outbox.is_empty()
    }

    /// Tells those that wait for credit how far their high watermark has moved, and ends those whose
    /// replica does not serve any more.
    fn tell_high_watermarks(&mut self) {
        self.tell_at = Instant::now() + TELL_PAUSE;
        let mut ended = Vec::new();
        // Those that were told are passed over the next time: all get their turn.
        for generation in &self.ready {
            if self.outbox.len() + ended.len() >= OUTBOX_MAX {
                break;
            }
            let Some(subscription) = self.subscriptions.get_mut(generation) else {
                continue;
            };
            match subscription.live.as_ref().map(Live::bounds) {
                Some(Ok(bounds)) if bounds.high_watermark > subscription.told => {
                    subscription.told = bounds.high_watermark;
                    self.outbox
                        .push_back(message(subscription.id, Vec::new(), bounds));
                }
                Some(Err(error)) => ended.push((*generation, error)),
                Some(Ok(_)) | None => {}
            }
        }
        for (generation, error) in ended {
            self.end(generation, &error);
        }
        // Ended ones would look like work for ever.
        let subscriptions = &self.subscriptions;
        self.ready
            .retain(|generation| subscriptions.contains_key(generation));
    }

    fn request(&mut self, request: v1::FetchRequest) {
        match request.request {
            Some(v1::fetch_request::Request::Subscribe(subscribe)) => self.subscribe(&subscribe),
            Some(v1::fetch_request::Request::Unsubscribe(unsubscribe)) => {
                if let Some(&generation) = self.by_id.get(&unsubscribe.subscription_id) {
                    self.remove(generation);
                }
            }
            Some(v1::fetch_request::Request::Credit(credit)) => {
                let more = i64::try_from(credit.bytes).unwrap_or(i64::MAX);
                let most = i64::from(FETCH_CREDIT_BYTES_MAX);
                self.credit = self.credit.saturating_add(more).min(most);
            }
            // A kind of request that this broker does not know yet.
            None => {}
        }
    }

    fn subscribe(&mut self, subscribe: &v1::Subscribe) {
        let id = subscribe.subscription_id;
        let partition = match wire::partition_id(&subscribe.topic_id, subscribe.partition) {
            Ok(partition) => partition,
            Err(error) => return self.send_error(id, error),
        };
        if self.by_id.contains_key(&id) {
            let message = format!("subscription {id} is in use on this stream");
            return self.send_error(id, wire::plain(v1::ErrorCode::InvalidArgument, message));
        }
        if self.subscriptions.len() >= SUBSCRIPTIONS_MAX {
            let message = format!("a stream takes {SUBSCRIPTIONS_MAX} subscriptions");
            return self.send_error(id, wire::plain(v1::ErrorCode::Overloaded, message));
        }
        let next = Offset(subscribe.offset);
        let replica = self.shared.replicas.serving(partition);
        let follower = subscribe.follower;
        let started = async move { Event::Started(start(replica, next, follower).await) };
        let generation = self.next_generation;
        self.next_generation += 1;
        let abort = self.await_event(generation, started);
        let subscription = Subscription {
            id,
            partition,
            next,
            live: None,
            told: Offset(0),
            abort,
        };
        self.subscriptions.insert(generation, subscription);
        self.by_id.insert(id, generation);
    }

    fn await_event(
        &self,
        generation: Generation,
        event: impl Future<Output = Event> + Send + 'static,
    ) -> AbortHandle {
        let (abort, registration) = AbortHandle::new_pair();
        let event = Abortable::new(event, registration);
        self.events.push(Box::pin(async move {
            event.await.ok().map(|event| (generation, event))
        }));
        abort
    }

    fn event(&mut self, generation: Generation, event: Event) {
        let Some(subscription) = self.subscriptions.get_mut(&generation) else {
            return;
        };
        match event {
            Event::Started(Ok((live, bounds))) => {
                let subscribed = v1::Subscribed {
                    log_start_offset: bounds.log_start.0,
                    high_watermark: bounds.high_watermark.0,
                    leader_epoch: live.leader_epoch,
                    follower: live.follows,
                };
                subscription.live = Some(live);
                subscription.told = bounds.high_watermark;
                self.outbox.push_back(v1::FetchResponse {
                    subscription_id: subscription.id,
                    response: Some(v1::fetch_response::Response::Subscribed(subscribed)),
                });
                self.ready.push_back(generation);
            }
            Event::Woken(Ok(())) => self.ready.push_back(generation),
            Event::Started(Err(error)) | Event::Woken(Err(error)) => self.end(generation, &error),
        }
    }

    /// The next message, if the work that was there has not gone away.
    async fn next_message(&mut self) -> Option<v1::FetchResponse> {
        if let Some(control) = self.outbox.pop_front() {
            return Some(control);
        }
        // One subscription, one message, then the next: fair.
        while let Some(generation) = self.ready.pop_front() {
            let Some(subscription) = self.subscriptions.get(&generation) else {
                continue;
            };
            let Some(live) = subscription.live.clone() else {
                continue;
            };
            // What is left of the credit, or one batch that is larger.
            let room = usize::try_from(self.credit).map_or(1, |credit| credit.min(MESSAGE_BYTES));
            match live.read(subscription.next, room).await {
                Ok(chunk) if chunk.batches.is_empty() => self.sleep(generation, live),
                Ok(chunk) => return Some(self.batches(generation, live, chunk)),
                Err(error) => {
                    self.end(generation, &error);
                    return self.outbox.pop_front();
                }
            }
        }
        None
    }

    fn batches(&mut self, generation: Generation, live: Live, chunk: Chunk) -> v1::FetchResponse {
        let mut id = 0;
        if let Some(subscription) = self.subscriptions.get_mut(&generation) {
            subscription.next = chunk.next_offset;
            subscription.told = chunk.bounds.high_watermark;
            id = subscription.id;
        }
        let bytes: usize = chunk.batches.iter().map(|one| one.bytes.len()).sum();
        self.credit = self
            .credit
            .saturating_sub(i64::try_from(bytes).unwrap_or(i64::MAX));
        metrics::counter!("qute_fetch_messages_total").increment(1);
        metrics::counter!("qute_fetch_bytes_total")
            .increment(u64::try_from(bytes).unwrap_or(u64::MAX));
        if chunk.next_offset < chunk.bounds.high_watermark {
            self.ready.push_back(generation);
        } else {
            self.sleep(generation, live);
        }
        let batches = chunk.batches.into_iter().map(|one| v1::FetchedBatch {
            base_offset: one.base_offset.0,
            broker_time_ms: one.broker_time_ms,
            batch: one.bytes,
        });
        message(id, batches.collect(), chunk.bounds)
    }

    /// Until the high watermark passes its next offset, or the leadership ends.
    fn sleep(&mut self, generation: Generation, live: Live) {
        let Some(next) = self.subscriptions.get(&generation).map(|s| s.next) else {
            return;
        };
        let woken = async move { Event::Woken(live.wait_beyond(next).await) };
        let abort = self.await_event(generation, woken);
        if let Some(subscription) = self.subscriptions.get_mut(&generation) {
            subscription.abort = abort;
        }
    }

    fn end(&mut self, generation: Generation, error: &Error) {
        if let Some(ended) = self.remove(generation) {
            let directory = self.shared.directory.as_ref();
            let error = wire::refusal(error, ended.partition, directory);
            self.send_error(ended.id, error);
        }
    }

    fn remove(&mut self, generation: Generation) -> Option<Subscription> {
        let gone = self.subscriptions.remove(&generation)?;
        gone.abort.abort();
        self.by_id.remove(&gone.id);
        Some(gone)
    }

    fn send_error(&mut self, subscription_id: u64, error: v1::Error) {
        self.outbox.push_back(v1::FetchResponse {
            subscription_id,
            response: Some(v1::fetch_response::Response::Error(error)),
        });
    }
}

fn message(
    subscription_id: u64,
    batches: Vec<v1::FetchedBatch>,
    bounds: Bounds,
) -> v1::FetchResponse {
    v1::FetchResponse {
        subscription_id,
        response: Some(v1::fetch_response::Response::Batches(v1::Batches {
            batches,
            high_watermark: bounds.high_watermark.0,
            log_start_offset: bounds.log_start.0,
        })),
    }
}

async fn start(
    replica: Result<Arc<Replica>, Error>,
    next: Offset,
    follower: bool,
) -> Result<(Live, Bounds), Error> {
    let replica = replica?;
    if follower && !replica.leadership().is_local {
        match start_following(&replica, next).await {
            // It has been elected meanwhile.
            Err(Error::NotLeader) if replica.leadership().is_local => {}
            started => return started,
        }
    }
    start_leading(replica, next).await
}

/// S18: an offset ahead of the high watermark waits; only a leader that has confirmed itself says
/// "beyond the end".
async fn start_leading(replica: Arc<Replica>, next: Offset) -> Result<(Live, Bounds), Error> {
    let leader_epoch = replica.wait_serving(START_WITHIN).await?;
    let mut bounds = replica.bounds();
    if next < bounds.log_start || next > bounds.high_watermark {
        let confirmed = replica.confirm(START_WITHIN).await?;
        if confirmed.leader_epoch != leader_epoch {
            return Err(Error::NotLeader);
        }
        bounds = confirmed.bounds;
        if next < bounds.log_start || next > bounds.high_watermark.max(replica.log_end()) {
            return Err(wire::out_of_range(next, bounds));
        }
    }
    let live = Live {
        replica,
        leader_epoch,
        follows: false,
    };
    Ok((live, bounds))
}

/// S17, S18: a follower knows its log start, and nothing of the end.
async fn start_following(replica: &Arc<Replica>, next: Offset) -> Result<(Live, Bounds), Error> {
    let leader_epoch = replica.wait_following(START_WITHIN).await?;
    let bounds = replica.bounds();
    if next < bounds.log_start {
        return Err(wire::out_of_range(next, bounds));
    }
    let live = Live {
        replica: Arc::clone(replica),
        leader_epoch,
        follows: true,
    };
    Ok((live, bounds))
}
