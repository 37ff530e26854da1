//! The task behind a consumer: keeps each partition subscribed at a replica, puts batches into the
//! buffer in order, follows leaders, and says what is lost.
//!
//! ```text
//!           [off] <----- paused, ended, failed; back by resume, seek
//!             v
//!   [no route] -- replica known --> [subscribed] -- error, stream broken --> [waiting]
//!       ^                               |   newer leader epoch: at once          |
//!       '---------- back-off over ------'----------------------------------------'
//! ```
//!
//! Every subscription has a number of its own and begins at the cursor's next offset; what still
//! arrives for an older number is dropped. So no failover skips or doubles a record.
//!
//! `routing.rs` says where a partition is read and when it goes elsewhere, `checks.rs` what is
//! asked beside the streams.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use qute_proto::ids::BrokerId;
use qute_proto::v1::{self, ErrorCode};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, trace};

use super::buffer::{Buffer, Entry, Moved, SlotId, Taken};
use super::builder::{Bound, OutOfRange};
use super::checks::Checked;
use super::cursor::{Arrival, Cursor};
use super::link::{Arrived, Event, Link};
use super::routing::Route;
use super::trial::Trial;
use crate::client::Shared;
use crate::error::{Error, ErrorKind, OffsetBounds};
use crate::metadata::Topic;
use crate::net::{Backoff, until};
use crate::trace;

/// So often in a row a partition may send what can't be right before its reading stops.
const BAD_BATCHES_MAX: u32 = 3;

/// Tells the stream when the reader's task ends, however it does (even before it began): who waits
/// for it must not wait for ever.
struct Deserting(Arc<Buffer>);

impl Drop for Deserting {
    fn drop(&mut self) {
        self.0.desert(Error::task_ended("consumer"));
    }
}

/// What the reader needs to know of the consumer's settings.
pub(super) struct Plan {
    pub(super) topic: Arc<Topic>,
    pub(super) planned: Vec<Planned>,
    /// Set if the topic is read as a whole: the bound of partitions that are added.
    pub(super) whole: Option<Option<Bound>>,
    pub(super) prefetch_bytes: u64,
    pub(super) out_of_range: OutOfRange,
    /// Read from replicas in this rack where there are any.
    pub(super) rack: Option<String>,
    pub(super) stall_timeout: Option<Duration>,
}

/// One partition of the plan.
pub(super) struct Planned {
    pub(super) partition: u32,
    pub(super) cursor: Cursor,
    /// Its bound by time, Unix milliseconds, while it is not known where that lies.
    pub(super) end_ms: Option<u64>,
    /// If it is known.
    pub(super) high_watermark: Option<u64>,
    /// It begins beyond its end: the leader is asked whether that is out of range.
    pub(super) beyond_end: bool,
}

pub(super) struct Partition {
    pub(super) number: u32,
    pub(super) cursor: Cursor,
    /// The buffer's round that `cursor` belongs to.
    pub(super) round: u64,
    pub(super) end_ms: Option<u64>,
    pub(super) looking_up_bound: bool,
    /// It begins beyond its end, and the leader has not said yet whether that is out of range.
    pub(super) beyond_end: bool,
    /// Added while the topic was read: begins wherever its log does.
    pub(super) fresh: bool,
    pub(super) route: Route,
    pub(super) backoff: Backoff,
    bad_batches: u32,
    /// How often in a row its offset was out of range.
    resets: u32,
    /// Since when nobody has served it.
    pub(super) stalled_since: Option<Instant>,
    pub(super) last_failure: Option<String>,
    /// Until then no follower is tried again.
    pub(super) leader_until: Option<Instant>,
    /// A follower that was asked while the leader serves.
    pub(super) trial: Option<Trial>,
    /// Nothing has come since the last check of followers.
    pub(super) quiet: bool,
    /// The leader had this high watermark at the last check of followers.
    pub(super) behind: Option<u64>,
}

pub(super) struct Reader {
    pub(super) shared: Arc<Shared>,
    pub(super) topic: Arc<Topic>,
    /// By slot.
    pub(super) partitions: Vec<Partition>,
    pub(super) whole: Option<Option<Bound>>,
    out_of_range: OutOfRange,
    pub(super) rack: Option<String>,
    pub(super) stall_timeout: Option<Duration>,
    pub(super) prefetch_bytes: u64,
    pub(super) buffer: Arc<Buffer>,
    pub(super) links: HashMap<BrokerId, Arc<Link>>,
    /// Live subscriptions.
    pub(super) subscriptions: HashMap<u64, SlotId>,
    pub(super) next_id: u64,
    /// No timer is due before; what is due is found by looking.
    pub(super) timer: Option<Instant>,
    pub(super) next_follower_check: Option<Instant>,
    pub(super) checks: JoinSet<Checked>,
    pub(super) confirming_topic: bool,
    /// Who knows for certain has said so.
    pub(super) topic_deleted: bool,
    pub(super) sender: mpsc::UnboundedSender<Event>,
    /// Bounded by credit.
    events: mpsc::UnboundedReceiver<Event>,
    views: watch::Receiver<u64>,
    _deserting: Deserting,
}

impl Reader {
    pub(super) fn new(shared: Arc<Shared>, plan: Plan, buffer: Arc<Buffer>) -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        let mut reader = Self {
            views: shared.metadata.subscribe(),
            shared,
            topic: plan.topic,
            partitions: Vec::new(),
            whole: plan.whole,
            out_of_range: plan.out_of_range,
            rack: plan.rack,
            stall_timeout: plan.stall_timeout,
            prefetch_bytes: plan.prefetch_bytes,
            _deserting: Deserting(Arc::clone(&buffer)),
            buffer,
            links: HashMap::new(),
            subscriptions: HashMap::new(),
            next_id: 0,
            timer: None,
            next_follower_check: None,
            checks: JoinSet::new(),
            confirming_topic: false,
            topic_deleted: false,
            sender,
            events,
        };
        for planned in plan.planned {
            reader.add(planned, false);
        }
        reader
    }

    pub(super) fn add(&mut self, planned: Planned, fresh: bool) -> SlotId {
        let slot = self.buffer.add(planned.partition, planned.cursor.next());
        debug_assert_eq!(slot, self.partitions.len());
        if let Some(high_watermark) = planned.high_watermark {
            self.buffer.saw(slot, high_watermark);
        }
        // Followers can't tell what is out of range (S18).
        let leader_until = planned.beyond_end.then(|| self.follower_again());
        if let Some(until) = leader_until {
            self.arm(until);
        }
        self.partitions.push(Partition {
            number: planned.partition,
            cursor: planned.cursor,
            round: 0,
            end_ms: planned.end_ms,
            looking_up_bound: false,
            beyond_end: planned.beyond_end,
            fresh,
            route: Route::None,
            backoff: Backoff::new(&self.shared.config),
            bad_batches: 0,
            resets: 0,
            stalled_since: Some(Instant::now()),
            last_failure: None,
            leader_until,
            trial: None,
            quiet: false,
            behind: None,
        });
        slot
    }

    /// Runs until the consumer is dropped, or its stream has ended.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        for slot in 0..self.partitions.len() {
            self.start_wanted(slot);
        }
        // Views that came before were not looked at.
        self.on_view();
        let buffer = Arc::clone(&self.buffer);
        loop {
            let timer = self.timer;
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                changed = buffer.changed() => {
                    for slot in changed {
                        self.restart(slot);
                    }
                }
                Some(checked) = self.checks.join_next(), if !self.checks.is_empty() => {
                    self.on_checked(checked);
                }
                Ok(()) = self.views.changed() => self.on_view(),
                () = until(timer), if timer.is_some() => self.on_timer(),
                // Last: there is always more. The sender is ours: never closed.
                Some(event) = self.events.recv() => self.on_event(event),
            }
            self.drop_unused_links();
        }
    }

    /// A timer is wanted at that moment.
    pub(super) fn arm(&mut self, at: Instant) {
        self.timer = Some(self.timer.map_or(at, |timer| timer.min(at)));
    }

    /// Begins to read a partition that is new here, if it is wanted from the start.
    pub(super) fn start_wanted(&mut self, slot: SlotId) {
        if self.buffer.begin(slot).is_some_and(|begin| begin.wanted) {
            self.start(slot);
        } else if let Some(partition) = self.partitions.get_mut(slot) {
            partition.route = Route::Off;
            partition.stalled_since = None;
        }
    }

    /// Begins to read a partition, unless there is nothing to read.
    pub(super) fn start(&mut self, slot: SlotId) {
        let Some(partition) = self.partitions.get_mut(slot) else {
            return;
        };
        if partition.cursor.is_done() && !partition.beyond_end {
            self.finish(slot, None);
            return;
        }
        let since = *partition.stalled_since.get_or_insert_with(Instant::now);
        if let Some(limit) = self.stall_timeout {
            self.arm(since + limit);
        }
        self.arm_bound(slot);
        self.route(slot);
    }

    /// The program has changed something: begins anew where it says.
    fn restart(&mut self, slot: SlotId) {
        let Some(begin) = self.buffer.begin(slot) else {
            return;
        };
        self.leave(slot);
        let Some(partition) = self.partitions.get_mut(slot) else {
            return;
        };
        partition.round = begin.round;
        if partition.cursor.next() != begin.next {
            partition.cursor.reset(begin.next);
            partition.fresh = false;
            partition.beyond_end = false;
        }
        partition.bad_batches = 0;
        partition.resets = 0;
        partition.backoff.reset();
        partition.stalled_since = None;
        partition.route = if begin.wanted {
            Route::None
        } else {
            Route::Off
        };
        if begin.wanted {
            self.start(slot);
        }
    }

    /// The partition is read to its end, or given up with an error.
    pub(super) fn finish(&mut self, slot: SlotId, error: Option<Error>) {
        self.leave(slot);
        let Some(partition) = self.partitions.get_mut(slot) else {
            return;
        };
        partition.route = Route::Off;
        partition.stalled_since = None;
        let entry = match error {
            Some(error) => Entry::Failed(error.at(&self.topic.name, partition.number)),
            None => Entry::End,
        };
        let (round, tail) = (partition.round, partition.cursor.next());
        self.buffer.push(slot, round, entry, tail);
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Subscribed {
                subscription,
                log_start_offset,
                high_watermark,
            } => {
                if let Some(&slot) = self.subscriptions.get(&subscription) {
                    if self.is_on_trial(slot, subscription) {
                        self.pass_trial(slot);
                    }
                    self.on_subscribed(slot, log_start_offset, high_watermark);
                }
            }
            Event::Batches {
                subscription,
                high_watermark,
                batches,
            } => {
                // There may be no batch: it is told so for want of credit.
                if let Some(&slot) = self.subscriptions.get(&subscription) {
                    self.buffer.saw(slot, high_watermark);
                }
                for batch in batches {
                    // Looked up for each: a bad batch ends the subscription.
                    if let Some(&slot) = self.subscriptions.get(&subscription) {
                        self.on_batch(slot, high_watermark, batch);
                    }
                }
            }
            Event::Ended {
                subscription,
                error,
            } => match self.subscriptions.get(&subscription) {
                Some(&slot) if self.is_on_trial(slot, subscription) => {
                    self.fail_trial(slot, Error::told(&error).message());
                }
                Some(&slot) => self.on_ended(slot, &error),
                None => {}
            },
            Event::Broken { link, cause } => self.on_broken(link, &cause),
        }
    }

    fn on_subscribed(&mut self, slot: SlotId, log_start_offset: u64, high_watermark: u64) {
        let Some(partition) = self.partitions.get_mut(slot) else {
            return;
        };
        if let Route::To { answer_by, .. } = &mut partition.route {
            *answer_by = None;
        }
        partition.stalled_since = None;
        partition.last_failure = None;
        partition.backoff.reset();
        self.shared.connections.budget().deposit();
        if log_start_offset <= partition.cursor.next() {
            partition.fresh = false;
        }
        let read = partition.cursor.is_done();
        partition.beyond_end = false;
        self.buffer.saw(slot, high_watermark);
        if read {
            // It began beyond its end, and the log has grown so far since.
            self.finish(slot, None);
        }
    }

    fn on_batch(&mut self, slot: SlotId, high_watermark: u64, arrived: Arrived) {
        let Some(partition) = self.partitions.get_mut(slot) else {
            return;
        };
        partition.stalled_since = None;
        partition.quiet = false;
        partition.behind = None;
        let wanted = partition.cursor.next();
        let batch = match arrived.batch {
            Ok(batch) => batch,
            Err(error) => return self.on_bad_batch(slot, Error::batch(&error)),
        };
        if let Some(end_ms) = partition.end_ms
            && arrived.broker_time_ms >= end_ms
        {
            partition.end_ms = None;
            partition.cursor.set_end(arrived.base_offset);
            if partition.cursor.is_done() {
                return self.finish(slot, None);
            }
        }
        let records = batch.header().record_count;
        match partition.cursor.arrive(arrived.base_offset, records) {
            Arrival::Old => {}
            Arrival::Gap => {
                let error = Error::new(
                    ErrorKind::Protocol,
                    format!(
                        "the broker sent offset {} where {wanted} is next",
                        arrived.base_offset
                    ),
                );
                self.on_bad_batch(slot, error);
            }
            Arrival::Take { from, until } => {
                trace!(
                    target: trace::FETCH,
                    topic = %self.topic.name,
                    partition = partition.number,
                    offset = from,
                    records,
                    bytes = batch.as_bytes().len(),
                    "batch received"
                );
                partition.fresh = false;
                partition.bad_batches = 0;
                partition.resets = 0;
                partition.backoff.reset();
                let taken = Taken {
                    base_offset: arrived.base_offset,
                    from,
                    until,
                    broker_time_ms: arrived.broker_time_ms,
                    high_watermark,
                    batch,
                    credit: arrived.credit,
                };
                let (round, tail) = (partition.round, partition.cursor.next());
                let done = partition.cursor.is_done();
                // If the round is over, `restart` follows.
                self.buffer.push(slot, round, Entry::Batch(taken), tail);
                if done {
                    self.finish(slot, None);
                }
            }
        }
    }

    /// What came can't be right: asked for again, from the leader that is known by then; given up
    /// after some attempts.
    fn on_bad_batch(&mut self, slot: SlotId, error: Error) {
        let Some(partition) = self.partitions.get_mut(slot) else {
            return;
        };
        debug!(target: trace::FETCH, topic = %self.topic.name, partition = partition.number, %error, "bad batch");
        if partition.route.is_follower() {
            return self.fail(slot, error.message());
        }
        partition.bad_batches += 1;
        if partition.bad_batches >= BAD_BATCHES_MAX {
            let offset = partition.cursor.next();
            self.finish(slot, Some(error.with_offset(offset)));
        } else {
            let leader = self.leave(slot);
            self.wait(slot, leader, error.message());
        }
    }

    fn on_ended(&mut self, slot: SlotId, error: &v1::Error) {
        let Some(partition) = self.partitions.get(slot) else {
            return;
        };
        let number = partition.number;
        let follower = partition.route.is_follower();
        let told = Error::told(error);
        debug!(target: trace::FETCH, topic = %self.topic.name, partition = number, follower, error = %told, "subscription ended");
        match error.code() {
            ErrorCode::NotLeader => {
                let hint = error.leader_hint.as_ref();
                self.shared.metadata.learn(&self.topic, number, hint);
            }
            ErrorCode::UnknownTopic | ErrorCode::UnknownPartition => {
                self.topic_deleted |= error.authoritative;
                self.confirm_topic();
            }
            // S18: a follower does not know; the leader is asked.
            ErrorCode::OffsetOutOfRange if !follower => {
                if let Some(bounds) = told.bounds() {
                    return self.on_out_of_range(slot, told, bounds);
                }
            }
            ErrorCode::InvalidArgument | ErrorCode::WrongCluster if !follower => {
                return self.finish(slot, Some(told));
            }
            _ => {}
        }
        self.fail(slot, told.message());
    }

    /// S18: only a leader that has confirmed itself says so; offsets are reset only then, and the
    /// program sees it (promise 6).
    fn on_out_of_range(&mut self, slot: SlotId, told: Error, bounds: OffsetBounds) {
        let Some(partition) = self.partitions.get_mut(slot) else {
            return;
        };
        let from = partition.cursor.next();
        if (bounds.log_start_offset..=bounds.high_watermark).contains(&from) {
            return self.fail(slot, "the leader contradicts itself about its offsets");
        }
        partition.beyond_end = false;
        self.buffer.correct(slot, bounds.high_watermark);
        if partition.fresh && from < bounds.log_start_offset {
            // Its start is wanted, wherever that is: nothing is lost.
            let (round, to) = (partition.round, bounds.log_start_offset);
            partition.cursor.reset(to);
            self.buffer.begin_at(slot, round, to);
            return self.start_after_reset(slot);
        }
        let error = told.with_offset(from);
        let to = match self.out_of_range {
            OutOfRange::Stop => return self.finish(slot, Some(error)),
            OutOfRange::ToStart => bounds.log_start_offset,
            OutOfRange::ToEnd => bounds.high_watermark,
        };
        partition.cursor.reset(to);
        let error = error.at(&self.topic.name, partition.number);
        let moved = Entry::Moved(Moved { from, to, error });
        self.buffer.push(slot, partition.round, moved, to);
        self.start_after_reset(slot);
    }

    /// A broker that refuses the very offset it named is not asked again and again without a pause.
    fn start_after_reset(&mut self, slot: SlotId) {
        let leader = self.leave(slot);
        let Some(partition) = self.partitions.get_mut(slot) else {
            return;
        };
        partition.resets = partition.resets.saturating_add(1);
        if partition.resets > 1 && !partition.cursor.is_done() {
            self.wait(
                slot,
                leader,
                "the offset that the leader named is out of range",
            );
        } else {
            self.start(slot);
        }
    }
}
