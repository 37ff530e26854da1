//! The task of one partition: moves batches from its queue through its flight to the leader, and
//! carries out what the flight (`flight.rs`) decides.
//!
//! ```text
//!            leader known              refusal, stream broken
//! [no route] ------------> [to leader] ----------------------> drain -> [waiting]
//!     ^                        |  ^                                        |
//!     |  back-off over         |  '--- newer leader epoch: at once --------|
//!     '------------------------'---------------------------------<---------'
//! ```
//!
//! A leader is left for another only on a newer epoch; otherwise the driver backs off, asks for
//! new metadata and goes to whoever is known then (promise 3 of the client).

use std::sync::Arc;
use std::time::Duration;

use qute_proto::batch::ProducerStamp;
use qute_proto::ids::ProducerId;
use qute_proto::v1::{self, ErrorCode};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::batch::{Batch, Body, fail};
use super::config::ProducerConfig;
use super::flight::{Flight, Key, Refusal};
use super::link::{Event, Link, Links, Permit};
use super::queue::PartitionQueue;
use crate::client::Shared;
use crate::error::{Error, ErrorKind, Outcome};
use crate::metadata::Topic;
use crate::net::{Address, Next, Retry, Route, until};
use crate::trace;

/// How long the answers still due are awaited after a refusal.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// A leader that takes batches and answers none for this long may be cut off from its peers: others
/// are asked whether it still leads. It is left only for a newer epoch.
const SILENCE_MAX: Duration = Duration::from_secs(1);
/// So often in a row the lowest batch may be told "out of order" before the sequence is given up:
/// a deposed leader that does not know it yet may lack what its successor acknowledged.
const OUT_OF_ORDER_MAX: u32 = 5;

pub(super) struct Driver {
    shared: Arc<Shared>,
    links: Arc<Links>,
    topic: Arc<Topic>,
    queue: Arc<PartitionQueue>,
    producer_id: ProducerId,
    delivery_timeout: Duration,
    flight: Flight<Batch>,
    route: Route<Arc<Link>>,
    out_of_order: u32,
    /// A request of this round may have left: if it failed, that is charged to the retry budget.
    asked: bool,
    drain_until: Option<Instant>,
    /// When the leader has been silent for too long; while there is something to answer.
    silent_until: Option<Instant>,
    confirming: bool,
    /// The lowest sequence of this round that was finally refused, and with what.
    final_error: Option<(u64, Error)>,
    /// Of the last failed attempt, for what a timeout reports.
    last_failure: Option<String>,
    sender: mpsc::UnboundedSender<Event>,
    /// Bounded by the window: each request sent gives one event.
    events: mpsc::UnboundedReceiver<Event>,
    views: watch::Receiver<u64>,
}

impl Driver {
    pub(super) fn new(
        shared: Arc<Shared>,
        links: Arc<Links>,
        topic: Arc<Topic>,
        queue: Arc<PartitionQueue>,
        producer_id: ProducerId,
        config: &ProducerConfig,
    ) -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        Self {
            route: Route::new(&shared.config),
            views: shared.metadata.subscribe(),
            shared,
            links,
            topic,
            queue,
            producer_id,
            delivery_timeout: config.delivery_timeout,
            flight: Flight::new(config.in_flight_max),
            out_of_order: 0,
            asked: false,
            drain_until: None,
            silent_until: None,
            confirming: false,
            final_error: None,
            last_failure: None,
            sender,
            events,
        }
    }

    /// Runs until stopped, or until the topic is gone; every batch then has its fate.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        let queue = Arc::clone(&self.queue);
        loop {
            self.fill();
            self.find_route();
            self.publish_load();
            self.watch_silence();
            let sends = self.flight.wants_send();
            let link = self.route.target().filter(|_| sends).map(Arc::clone);
            let timer = self.next_timer();
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                // The sender is ours: never closed.
                Some(event) = self.events.recv() => {
                    if !self.on_event(event) {
                        return;
                    }
                }
                permit = reserve(link.as_deref()), if link.is_some() => self.send(permit),
                () = queue.wake.notified(), if self.flight.has_room() => {}
                Ok(()) = self.views.changed(), if !self.flight.is_empty() => self.on_view(),
                () = until(timer), if timer.is_some() => self.on_timer(),
            }
        }
        self.give_up_all(&Error::closed("producer"));
    }

    /// Moves batches from the queue into the window.
    fn fill(&mut self) {
        while self.flight.has_room()
            && let Some(ready) = self.queue.take()
        {
            let records = ready.batch.record_count();
            let batch = Batch {
                body: Body::Unsealed(ready.batch),
                fate: ready.fate,
                expires_at: ready.expires_at,
                sent_at: None,
            };
            self.flight.admit(batch, records);
        }
    }

    fn next_timer(&self) -> Option<Instant> {
        let expiry = self.flight.batches().map(|batch| batch.expires_at).min();
        let due = self
            .flight
            .has_room()
            .then(|| self.queue.due_at())
            .flatten();
        let waiting = self.route.due().filter(|_| !self.flight.is_empty());
        let timers = [
            expiry,
            self.queue.expires_at(),
            due,
            waiting,
            self.drain_until,
            self.silent_until,
        ];
        timers.into_iter().flatten().min()
    }

    /// For whoever chooses partitions.
    fn publish_load(&self) {
        let load = &self.queue.room.load;
        load.set_backing_off(self.route.due().is_some() && !self.flight.is_empty());
        load.set_oldest(self.flight.front().and_then(|batch| batch.sent_at));
    }

    /// The leader, if one is known, and its stream; else waits for new metadata.
    fn find_route(&mut self) {
        if self.route.target().is_some_and(|link| link.is_broken())
            && self.flight.is_drained()
            && !self.flight.is_draining()
        {
            // It broke while nothing was under way.
            self.flight.rewind();
            self.route.leave();
        }
        if self.queue.take_retired() {
            self.confirm_topic();
        }
        if !self.route.is_idle() || !self.flight.wants_send() {
            return;
        }
        let view = self.shared.metadata.load();
        let partition = self.queue.place.partition;
        let connections = &self.shared.connections;
        // Where a stream is alive, the broker is, whatever became of other calls.
        let refused_until = |address: &Address| match self.links.is_alive(address) {
            true => None,
            false => connections.refused_until(address),
        };
        let next = self
            .route
            .find(&view, &self.topic, partition, refused_until);
        match next {
            Next::To { leader, address } => {
                let link = self.links.get(leader.broker, &address);
                self.silent_until = None;
                self.asked = false;
                self.route.open(link, leader);
            }
            Next::Wait { until, why } => {
                self.last_failure.get_or_insert_with(|| why.to_owned());
                self.wait(until);
            }
            Next::TopicMissing => {
                self.confirm_topic();
                self.wait(None);
            }
        }
    }

    fn watch_silence(&mut self) {
        if self.route.target().is_some() && !self.flight.is_empty() {
            self.silent_until
                .get_or_insert_with(|| Instant::now() + SILENCE_MAX);
        } else {
            self.silent_until = None;
        }
    }

    /// Pauses where nobody can be asked, and has metadata refreshed meanwhile.
    fn wait(&mut self, until: Option<Instant>) {
        self.shared.metadata.request_refresh();
        self.route.wait(until, Retry::free());
    }

    fn send(&mut self, permit: Option<Permit>) {
        let Some(link) = self.route.target().map(Arc::clone) else {
            return;
        };
        let (topic_id, partition) = (self.topic.id.to_wire(), self.queue.place.partition);
        let producer_id = self.producer_id;
        let Some((key, batch)) = self.flight.next_unsent() else {
            return;
        };
        let stamp = ProducerStamp {
            producer_id,
            epoch: key.epoch,
            base_sequence: key.sequence,
        };
        let request = batch.body.sealed(stamp).map(|batch| v1::ProduceRequest {
            correlation_id: 0,
            topic_id,
            partition,
            batch,
        });
        let Some(request) = request else {
            // Our own batch does not read back: a fault of ours, told to its tickets.
            let error = Error::new(ErrorKind::CorruptBatch, "the batch can't be sealed again");
            return self.give_up(1, &error);
        };
        let bytes = request.batch.len();
        let sent = permit.is_some_and(|permit| link.send(permit, key, &self.sender, request));
        if sent {
            batch.fate.sent(bytes);
            batch.sent_at.get_or_insert_with(Instant::now);
            self.flight.mark_sent();
        } else {
            // The stream had ended before: nothing of this attempt left.
            self.end_round();
        }
    }

    /// False once the topic is gone and everything has its fate.
    fn on_event(&mut self, event: Event) -> bool {
        if !matches!(event, Event::TopicConfirmed(_)) {
            self.silent_until = None;
        }
        match event {
            Event::Acknowledged {
                key,
                duplicate: true,
                ..
            } if !self.flight.may_be_duplicate(key) => self.on_usurped(key),
            Event::Acknowledged {
                key, base_offset, ..
            } => {
                if let Some(batch) = self.flight.acknowledge(key) {
                    self.route.succeeded(self.shared.connections.budget());
                    self.out_of_order = 0;
                    if let Some(sent_at) = batch.sent_at {
                        let now = Instant::now();
                        let latency = now.saturating_duration_since(sent_at);
                        self.queue.room.load.acknowledged(latency, now);
                    }
                    batch.fate.written(base_offset);
                }
            }
            Event::Refused { key, error } if error.code() == ErrorCode::DuplicateSequence => {
                if !self.flight.may_be_duplicate(key) {
                    self.on_usurped(key);
                } else if let Some(batch) = self.flight.acknowledge(key) {
                    batch.fate.failed(Error::told(&error), Outcome::Ok);
                }
            }
            Event::Refused { key, error } => self.on_refused(key, &error),
            Event::Broken { key, unsent, cause } => {
                self.last_failure = Some(cause.to_string());
                self.asked |= !unsent;
                let refusal = if unsent {
                    Refusal::Retriable
                } else {
                    Refusal::Unclear
                };
                self.flight.refuse(key, refusal);
            }
            Event::TopicConfirmed(true) => self.confirming = false,
            Event::TopicConfirmed(false) => {
                self.give_up_all(&self.gone());
                return false;
            }
        }
        if self.flight.is_draining() {
            if self.flight.is_drained() {
                self.after_drain();
            } else if self.drain_until.is_none() {
                self.drain_until = Some(Instant::now() + DRAIN_TIMEOUT);
            }
        }
        true
    }

    /// Why the topic takes nothing any more.
    fn gone(&self) -> Error {
        match self.shared.metadata.known_topic(&self.topic.name) {
            Some(topic) if topic.id != self.topic.id => Error::new(
                ErrorKind::TopicRecreated,
                "the topic was deleted and made again; this was taken in for the one that is gone",
            ),
            _ => Error::new(ErrorKind::UnknownTopic, "the topic does not exist any more"),
        }
    }

    fn on_refused(&mut self, key: Key, error: &v1::Error) {
        debug!(
            target: trace::PRODUCE,
            topic = %self.queue.place.topic,
            partition = self.queue.place.partition,
            ?key,
            code = error.code().as_str_name(),
            cause = error.message,
            "batch refused"
        );
        let refusal = match error.code() {
            ErrorCode::RecordTooLarge
            | ErrorCode::BatchTooLarge
            | ErrorCode::CorruptBatch
            | ErrorCode::InvalidArgument
            | ErrorCode::WrongCluster => Refusal::Final,
            ErrorCode::OutcomeUnknown | ErrorCode::Internal | ErrorCode::Unspecified => {
                Refusal::Unclear
            }
            ErrorCode::OutOfOrderSequence => Refusal::OutOfOrder,
            ErrorCode::UnknownProducer | ErrorCode::ProducerFenced => Refusal::UnknownProducer,
            _ => Refusal::Retriable,
        };
        self.shared.stats.batches_refused.increment();
        self.asked = true;
        let told = Error::told(error);
        self.last_failure = Some(told.message().to_owned());
        if !self.flight.refuse(key, refusal) {
            return;
        }
        match error.code() {
            ErrorCode::NotLeader => {
                let partition = self.queue.place.partition;
                // S28, promise 3: taken in only if it is newer than what is known.
                self.shared
                    .metadata
                    .learn(&self.topic, partition, error.leader_hint.as_ref());
            }
            ErrorCode::UnknownTopic | ErrorCode::UnknownPartition => self.confirm_topic(),
            _ => {}
        }
        let lower = |(sequence, _): &(u64, Error)| *sequence > key.sequence;
        if refusal == Refusal::Final && self.final_error.as_ref().is_none_or(lower) {
            // For the tickets of exactly this batch, once the round is drained.
            self.final_error = Some((key.sequence, told));
        }
    }

    /// The broker has the sequence of a batch that was sent only once: what it has is not ours, and
    /// to believe it would lose the batch.
    fn on_usurped(&mut self, key: Key) {
        warn!(target: trace::PRODUCE, place = ?self.queue.place, ?key, "a batch sent once is told as a duplicate");
        self.flight.refuse(key, Refusal::Usurped);
    }

    /// All answers of the round are in: the lowest batch's verdict decides.
    fn after_drain(&mut self) {
        match self.flight.verdict() {
            Some(Refusal::Final) => {
                let error = match self.final_error.take() {
                    Some((_, error)) => error,
                    None => Error::new(ErrorKind::InvalidArgument, "the broker refused the batch"),
                };
                self.give_up(1, &error);
            }
            Some(Refusal::UnknownProducer | Refusal::Usurped) => self.new_epoch(),
            Some(Refusal::OutOfOrder) if self.out_of_order >= OUT_OF_ORDER_MAX => self.new_epoch(),
            Some(Refusal::OutOfOrder) => {
                self.out_of_order += 1;
                self.end_round();
            }
            _ => self.end_round(),
        }
    }

    /// S12: the sequence is lost to the broker. What may be written ends unknown, the rest goes on
    /// under a new epoch.
    fn new_epoch(&mut self) {
        self.out_of_order = 0;
        self.drain_until = None;
        let lost = self.flight.restart_epoch();
        warn!(
            target: trace::PRODUCE,
            topic = %self.queue.place.topic,
            partition = self.queue.place.partition,
            epoch = self.flight.epoch(),
            batches_unknown = lost.len(),
            "the partition does not know this producer's sequence any more; going on under a new epoch"
        );
        let error = Error::new(
            ErrorKind::ProducerReset,
            "the partition does not know this producer's sequence any more",
        );
        fail(lost, &error);
    }

    /// The next round begins at the lowest batch: at once with a newer leader, else after a
    /// back-off.
    fn end_round(&mut self) {
        self.drain_until = None;
        self.final_error = None;
        self.flight.rewind();
        let view = self.shared.metadata.load();
        let partition = self.queue.place.partition;
        let retry = match std::mem::take(&mut self.asked) {
            true => Retry::charged(self.shared.connections.budget()),
            false => Retry::free(),
        };
        self.route.fail(&view, &self.topic, partition, retry);
        if !self.route.is_idle() {
            self.shared.metadata.request_refresh();
        }
    }

    /// Metadata changed: a newer leader is followed at once, without waiting for the old one.
    fn on_view(&mut self) {
        let view = self.shared.metadata.load();
        if view.topic_by_id(&self.topic.name, self.topic.id).is_none() {
            self.confirm_topic();
        }
        let partition = self.queue.place.partition;
        if self.route.on_view(&view, &self.topic, partition).0 {
            self.drain_until = None;
            self.flight.rewind();
        }
    }

    fn on_timer(&mut self) {
        let now = Instant::now();
        if self.drain_until.is_some_and(|until| until <= now) {
            self.asked = true;
            self.end_round();
        }
        if self.silent_until.is_some_and(|until| until <= now)
            && let Some(leader) = self.route.leader()
        {
            self.silent_until = None;
            self.last_failure = Some("the leader does not answer".to_owned());
            self.shared
                .metadata
                .request_refresh_elsewhere(leader.broker);
        }
        self.route.on_time(now);
        self.expire(now);
    }

    fn expire(&mut self, now: Instant) {
        let mut expired = 0;
        for (count, batch) in (1..).zip(self.flight.batches()) {
            if batch.expires_at <= now {
                // With those before it: they are older but for calls that waited side by side.
                expired = count;
            }
        }
        let unsent = self.queue.take_expired(now);
        if expired == 0 && unsent.is_empty() {
            return;
        }
        let last = self
            .last_failure
            .as_ref()
            .map(|cause| format!("; last: {cause}"));
        let error = Error::new(
            ErrorKind::Timeout,
            format!(
                "not acknowledged within {:?}{}",
                self.delivery_timeout,
                last.unwrap_or_default()
            ),
        );
        if expired > 0 {
            self.give_up(expired, &error);
        }
        for fate in unsent {
            fate.failed(error.clone(), Outcome::NotWritten);
        }
    }

    /// Gives up the first batches and goes on with the rest from a new round.
    fn give_up(&mut self, count: usize, error: &Error) {
        let mut lost = self.flight.give_up(count).into_iter();
        fail(lost.by_ref().take(count), error);
        let wake = Error::new(
            ErrorKind::ProducerReset,
            format!(
                "an earlier batch of the partition failed ({})",
                error.message()
            ),
        );
        fail(lost, &wake);
        self.drain_until = None;
    }

    fn give_up_all(&mut self, error: &Error) {
        self.queue.close(error.clone());
        fail(self.flight.drain(), error);
    }

    /// Asks the leader of `__cluster`, once at a time, whether the topic still exists.
    fn confirm_topic(&mut self) {
        if std::mem::replace(&mut self.confirming, true) {
            return;
        }
        let (shared, topic, sender) = (
            Arc::clone(&self.shared),
            Arc::clone(&self.topic),
            self.sender.clone(),
        );
        tokio::spawn(async move {
            let exists = shared.metadata.may_exist(&topic).await;
            // The driver may be gone.
            let _ = sender.send(Event::TopicConfirmed(exists));
        });
    }
}

impl Drop for Driver {
    /// However the task ends, what waits behind it has its fate. (`run` closes first, with the
    /// reason; a second close changes nothing.)
    fn drop(&mut self) {
        self.queue.close(Error::task_ended("producer"));
    }
}

async fn reserve(link: Option<&Link>) -> Option<Permit> {
    link?.reserve().await
}
