//! The task behind a consumer: keeps each partition subscribed at its leader, hands batches on in
//! order, follows leaders, and says what is lost.
//!
//! ```text
//!   [no route] -- leader known --> [subscribed] -- error, stream broken --> [waiting]
//!       ^                               |   newer leader epoch: at once         |
//!       '---------- back-off over ------'---------------------------------------'
//! ```
//!
//! Every subscription has a number of its own and begins at the cursor's next offset; what still
//! arrives for an older number is dropped. So no failover skips or doubles a record.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use qute_proto::batch::BatchView;
use qute_proto::ids::BrokerId;
use qute_proto::v1::{self, ErrorCode};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, trace};

use super::OutOfRange;
use super::credit::{Credit, Pool};
use super::cursor::{Arrival, Cursor};
use super::link::{Arrived, Event, Link};
use crate::client::Shared;
use crate::error::{Error, ErrorKind, OffsetBounds};
use crate::metadata::{Leader, Topic};
use crate::net::{Backoff, until};
use crate::trace;

/// So often in a row a partition may send what can't be right before its reading stops.
const BAD_BATCHES_MAX: u32 = 3;

/// What the program's side receives.
pub(super) enum Item {
    Batch(Taken),
    Failed(Error),
}

/// A batch of which the records in `from..until` are wanted.
pub(super) struct Taken {
    pub(super) partition: u32,
    pub(super) base_offset: u64,
    pub(super) from: u64,
    pub(super) until: u64,
    pub(super) broker_time_ms: u64,
    pub(super) high_watermark: u64,
    pub(super) batch: BatchView,
    /// Held until the program has taken the records.
    pub(super) _credit: Credit,
}

/// What the reader needs to know of the consumer's settings.
pub(super) struct Plan {
    pub(super) topic: Arc<Topic>,
    pub(super) cursors: BTreeMap<u32, Cursor>,
    pub(super) prefetch_bytes: u64,
    pub(super) out_of_range: OutOfRange,
    pub(super) stall_timeout: Option<Duration>,
}

enum Route {
    None,
    To {
        link: Arc<Link>,
        subscription: u64,
        leader: Leader,
    },
    Waiting {
        until: Instant,
        leader: Option<Leader>,
    },
    Done,
}

struct Partition {
    cursor: Cursor,
    route: Route,
    backoff: Backoff,
    bad_batches: u32,
    /// Since when no leader has served it.
    stalled_since: Option<Instant>,
    last_failure: Option<String>,
}

pub(super) struct Reader {
    shared: Arc<Shared>,
    topic: Arc<Topic>,
    partitions: BTreeMap<u32, Partition>,
    out_of_range: OutOfRange,
    stall_timeout: Option<Duration>,
    prefetch_bytes: u64,
    credit: Arc<Pool>,
    links: HashMap<BrokerId, Arc<Link>>,
    /// Live subscriptions: number to partition.
    subscriptions: HashMap<u64, u32>,
    next_id: u64,
    confirming: Option<tokio::task::JoinHandle<bool>>,
    output: mpsc::UnboundedSender<Item>,
    sender: mpsc::UnboundedSender<Event>,
    /// Bounded by credit.
    events: mpsc::UnboundedReceiver<Event>,
    /// Partitions that the program's side gives up.
    stops: mpsc::UnboundedReceiver<u32>,
    views: watch::Receiver<u64>,
}

impl Reader {
    pub(super) fn new(
        shared: Arc<Shared>,
        plan: Plan,
        output: mpsc::UnboundedSender<Item>,
        stops: mpsc::UnboundedReceiver<u32>,
    ) -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        let partition = |cursor: Cursor| Partition {
            cursor,
            route: if cursor.is_done() {
                Route::Done
            } else {
                Route::None
            },
            backoff: Backoff::new(&shared.config),
            bad_batches: 0,
            stalled_since: Some(Instant::now()),
            last_failure: None,
        };
        Self {
            partitions: plan
                .cursors
                .into_iter()
                .map(|(number, cursor)| (number, partition(cursor)))
                .collect(),
            views: shared.metadata.subscribe(),
            shared,
            topic: plan.topic,
            out_of_range: plan.out_of_range,
            stall_timeout: plan.stall_timeout,
            prefetch_bytes: plan.prefetch_bytes,
            credit: Arc::new(Pool::new(plan.prefetch_bytes)),
            links: HashMap::new(),
            subscriptions: HashMap::new(),
            next_id: 0,
            confirming: None,
            output,
            sender,
            events,
            stops,
        }
    }

    /// Runs until every partition is done or the consumer is dropped.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        self.route_all();
        while self
            .partitions
            .values()
            .any(|p| !matches!(p.route, Route::Done))
        {
            let timer = self.next_timer();
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                // The sender is ours: never closed.
                Some(event) = self.events.recv() => self.on_event(event),
                Some(partition) = self.stops.recv() => self.finish(partition, None),
                exists = confirmed(&mut self.confirming) => self.on_confirmed(exists),
                Ok(()) = self.views.changed() => self.on_view(),
                () = until(timer), if timer.is_some() => self.on_timer(),
            }
        }
    }

    fn next_timer(&self) -> Option<Instant> {
        let of = |partition: &Partition| {
            let waiting = match partition.route {
                Route::Waiting { until, .. } => Some(until),
                Route::Done => return None,
                _ => None,
            };
            let stalled = self.stall_deadline(partition);
            waiting.into_iter().chain(stalled).min()
        };
        self.partitions.values().filter_map(of).min()
    }

    fn stall_deadline(&self, partition: &Partition) -> Option<Instant> {
        Some(partition.stalled_since? + self.stall_timeout?)
    }

    /// Subscribes every partition that has no route.
    fn route_all(&mut self) {
        let without: Vec<u32> = self
            .partitions
            .iter()
            .filter(|(_, partition)| matches!(partition.route, Route::None))
            .map(|(&number, _)| number)
            .collect();
        for number in without {
            self.route(number);
        }
    }

    fn route(&mut self, number: u32) {
        let view = self.shared.metadata.load();
        let present = view.topic_by_id(&self.topic.name, self.topic.id);
        if present.is_none() {
            self.confirm_topic();
        }
        let leader = present.and_then(|topic| topic.leader(number));
        let Some((leader, address)) =
            leader.and_then(|leader| Some((leader, view.address(leader.broker)?)))
        else {
            return self.wait(number, leader, "no leader is known");
        };
        let link = match self.links.get(&leader.broker) {
            Some(link) if link.address() == address && !link.is_broken() => Arc::clone(link),
            _ => {
                // Those that no partition uses keep credit from the others.
                self.links.retain(|_, link| Arc::strong_count(link) > 1);
                self.next_id += 1;
                let link = Arc::new(Link::open(
                    self.next_id,
                    Arc::clone(&self.shared.connections),
                    Arc::clone(address),
                    &self.credit,
                    self.link_share(view.brokers.len()),
                    self.sender.clone(),
                ));
                self.links.insert(leader.broker, Arc::clone(&link));
                link
            }
        };
        let Some(partition) = self.partitions.get_mut(&number) else {
            return;
        };
        self.next_id += 1;
        let subscription = self.next_id;
        link.subscribe(v1::Subscribe {
            subscription_id: subscription,
            topic_id: self.topic.id.to_wire(),
            partition: number,
            offset: partition.cursor.next(),
            follower: false,
        });
        self.subscriptions.insert(subscription, number);
        partition.route = Route::To {
            link,
            subscription,
            leader,
        };
    }

    fn link_share(&self, brokers: usize) -> u64 {
        self.prefetch_bytes / u64::try_from(brokers.max(1)).unwrap_or(1)
    }

    /// Leaves the present route, if any, and gives the leader that it led to.
    fn leave(&mut self, number: u32) -> Option<Leader> {
        let partition = self.partitions.get_mut(&number)?;
        match std::mem::replace(&mut partition.route, Route::None) {
            Route::To {
                link,
                subscription,
                leader,
            } => {
                self.subscriptions.remove(&subscription);
                link.unsubscribe(subscription);
                partition.stalled_since.get_or_insert_with(Instant::now);
                Some(leader)
            }
            Route::Waiting { leader, .. } => leader,
            Route::None => None,
            Route::Done => {
                partition.route = Route::Done;
                None
            }
        }
    }

    /// The route failed: to a newer leader at once, else after a back-off.
    fn fail(&mut self, number: u32, cause: &str) {
        let leader = self.leave(number);
        if self.newer_leader(number, leader) {
            self.route(number);
        } else {
            self.wait(number, leader, cause);
        }
    }

    fn wait(&mut self, number: u32, leader: Option<Leader>, cause: &str) {
        self.shared.metadata.request_refresh();
        if let Some(partition) = self.partitions.get_mut(&number)
            && !matches!(partition.route, Route::Done)
        {
            partition.last_failure = Some(cause.to_owned());
            partition.route = Route::Waiting {
                until: Instant::now() + partition.backoff.step(),
                leader,
            };
        }
    }

    fn newer_leader(&self, number: u32, than: Option<Leader>) -> bool {
        self.shared.metadata.newer_leader(&self.topic, number, than)
    }

    /// The partition is read to its end, or given up with an error.
    fn finish(&mut self, number: u32, error: Option<Error>) {
        self.leave(number);
        if let Some(partition) = self.partitions.get_mut(&number) {
            partition.route = Route::Done;
        }
        if let Some(error) = error {
            self.tell(error.at(&self.topic.name, number));
        }
    }

    fn tell(&self, error: Error) {
        // The consumer may be dropped at any time; `stop` follows.
        let _ = self.output.send(Item::Failed(error));
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Subscribed { subscription } => {
                if let Some(partition) = self.partition_of(subscription) {
                    partition.stalled_since = None;
                    partition.backoff.reset();
                }
            }
            Event::Batches {
                subscription,
                high_watermark,
                batches,
            } => {
                for batch in batches {
                    // Looked up for each: a bad batch ends the subscription.
                    if let Some(&number) = self.subscriptions.get(&subscription) {
                        self.on_batch(number, high_watermark, batch);
                    }
                }
            }
            Event::Ended {
                subscription,
                error,
            } => {
                if let Some(&number) = self.subscriptions.get(&subscription) {
                    self.on_ended(number, &error);
                }
            }
            Event::Broken { link, cause } => {
                self.links.retain(|_, open| open.id != link);
                let hit: Vec<u32> = self
                    .partitions
                    .iter()
                    .filter(
                        |(_, p)| matches!(&p.route, Route::To { link: on, .. } if on.id == link),
                    )
                    .map(|(&number, _)| number)
                    .collect();
                for number in hit {
                    self.fail(number, &cause);
                }
            }
        }
    }

    fn partition_of(&mut self, subscription: u64) -> Option<&mut Partition> {
        let number = self.subscriptions.get(&subscription)?;
        self.partitions.get_mut(number)
    }

    fn on_batch(&mut self, number: u32, high_watermark: u64, arrived: Arrived) {
        let Some(partition) = self.partitions.get_mut(&number) else {
            return;
        };
        partition.stalled_since = None;
        let wanted = partition.cursor.next();
        let batch = match arrived.batch {
            Ok(batch) => batch,
            Err(error) => return self.on_bad_batch(number, Error::batch(&error)),
        };
        let records = batch.header().record_count;
        match partition.cursor.arrive(arrived.base_offset, records) {
            Arrival::Old => {}
            Arrival::Gap => {
                let error = Error::new(
                    ErrorKind::Protocol,
                    format!(
                        "the leader sent offset {} where {wanted} is next",
                        arrived.base_offset
                    ),
                );
                self.on_bad_batch(number, error);
            }
            Arrival::Take { from, until } => {
                trace!(
                    target: trace::FETCH,
                    topic = %self.topic.name,
                    partition = number,
                    offset = from,
                    records,
                    bytes = batch.as_bytes().len(),
                    "batch received"
                );
                partition.bad_batches = 0;
                partition.backoff.reset();
                let done = partition.cursor.is_done();
                // The consumer may be dropped at any time; `stop` follows.
                let _ = self.output.send(Item::Batch(Taken {
                    partition: number,
                    base_offset: arrived.base_offset,
                    from,
                    until,
                    broker_time_ms: arrived.broker_time_ms,
                    high_watermark,
                    batch,
                    _credit: arrived.credit,
                }));
                if done {
                    self.finish(number, None);
                }
            }
        }
    }

    /// What came can't be right: asked for again, from the leader that is known by then; given up
    /// after some attempts.
    fn on_bad_batch(&mut self, number: u32, error: Error) {
        let Some(partition) = self.partitions.get_mut(&number) else {
            return;
        };
        partition.bad_batches += 1;
        debug!(target: trace::FETCH, topic = %self.topic.name, partition = number, %error, "bad batch");
        if partition.bad_batches >= BAD_BATCHES_MAX {
            let offset = partition.cursor.next();
            self.finish(number, Some(error.with_offset(offset)));
        } else {
            let leader = self.leave(number);
            self.wait(number, leader, error.message());
        }
    }

    fn on_ended(&mut self, number: u32, error: &v1::Error) {
        let told = Error::told(error);
        debug!(target: trace::FETCH, topic = %self.topic.name, partition = number, error = %told, "subscription ended");
        match error.code() {
            ErrorCode::NotLeader => {
                self.shared
                    .metadata
                    .learn(&self.topic, number, error.leader_hint.as_ref());
            }
            ErrorCode::UnknownTopic if error.authoritative => {
                return self.finish(number, Some(told));
            }
            ErrorCode::UnknownTopic | ErrorCode::UnknownPartition => self.confirm_topic(),
            ErrorCode::OffsetOutOfRange => {
                if let Some(bounds) = told.bounds() {
                    return self.on_out_of_range(number, told, bounds);
                }
            }
            ErrorCode::InvalidArgument | ErrorCode::WrongCluster => {
                return self.finish(number, Some(told));
            }
            _ => {}
        }
        self.fail(number, told.message());
    }

    /// S18: only a leader that has confirmed itself says so; offsets are reset only then, and the
    /// program sees it (promise 6).
    fn on_out_of_range(&mut self, number: u32, told: Error, bounds: OffsetBounds) {
        let Some(partition) = self.partitions.get_mut(&number) else {
            return;
        };
        let offset = partition.cursor.next();
        if (bounds.log_start_offset..=bounds.high_watermark).contains(&offset) {
            return self.fail(number, "the leader contradicts itself about its offsets");
        }
        let error = told.with_offset(offset);
        let next = match self.out_of_range {
            OutOfRange::Stop => return self.finish(number, Some(error)),
            OutOfRange::ToStart => bounds.log_start_offset,
            OutOfRange::ToEnd => bounds.high_watermark,
        };
        partition.cursor.reset(next);
        let done = partition.cursor.is_done();
        self.leave(number);
        self.tell(error.at(&self.topic.name, number));
        if done {
            self.finish(number, None);
        } else {
            self.route(number);
        }
    }

    fn on_view(&mut self) {
        let moved: Vec<u32> = self
            .partitions
            .iter()
            .filter(|(number, partition)| match &partition.route {
                Route::To { leader, .. } => self.newer_leader(**number, Some(*leader)),
                Route::Waiting { leader, .. } => self.newer_leader(**number, *leader),
                Route::None | Route::Done => false,
            })
            .map(|(&number, _)| number)
            .collect();
        for number in moved {
            self.leave(number);
            self.route(number);
        }
    }

    fn on_timer(&mut self) {
        let now = Instant::now();
        let mut due = Vec::new();
        let mut stalled = Vec::new();
        for (&number, partition) in &self.partitions {
            if matches!(partition.route, Route::Done) {
                continue;
            }
            if self
                .stall_deadline(partition)
                .is_some_and(|deadline| deadline <= now)
            {
                stalled.push(number);
            } else if matches!(partition.route, Route::Waiting { until, .. } if until <= now) {
                due.push(number);
            }
        }
        for number in stalled {
            let partition = self.partitions.get(&number);
            let cause = partition.and_then(|p| p.last_failure.clone());
            let error = Error::new(
                ErrorKind::Timeout,
                format!(
                    "no leader served the partition in time{}",
                    cause
                        .map(|cause| format!("; last: {cause}"))
                        .unwrap_or_default()
                ),
            );
            self.finish(number, Some(error));
        }
        for number in due {
            self.leave(number);
            self.route(number);
        }
    }

    fn confirm_topic(&mut self) {
        if self.confirming.is_some() {
            return;
        }
        let (shared, topic) = (Arc::clone(&self.shared), Arc::clone(&self.topic));
        self.confirming = Some(tokio::spawn(async move {
            shared.metadata.may_exist(&topic).await
        }));
    }

    fn on_confirmed(&mut self, exists: bool) {
        if exists {
            return;
        }
        let numbers: Vec<u32> = self.partitions.keys().copied().collect();
        for number in numbers {
            let partition = self.partitions.get(&number);
            if partition.is_some_and(|p| !matches!(p.route, Route::Done)) {
                let gone = Error::new(ErrorKind::UnknownTopic, "the topic does not exist any more");
                self.finish(number, Some(gone));
            }
        }
    }
}

/// Waits for the check under way; forever if there is none.
async fn confirmed(task: &mut Option<tokio::task::JoinHandle<bool>>) -> bool {
    match task.as_mut() {
        Some(running) => {
            let exists = running.await.unwrap_or(true);
            *task = None;
            exists
        }
        None => std::future::pending().await,
    }
}
