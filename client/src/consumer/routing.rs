//! Where a partition is read, and when it goes elsewhere.
//!
//! A partition is read from its leader. With a rack, it is read from a follower there, as long as
//! that one serves: whatever goes wrong with a follower costs a walk to the leader, nothing else,
//! and the follower is tried again later. While it is on trial the leader serves on: a follower that
//! does not answer costs nothing then (`trial.rs`).
//!
//! The producer's partitions have `net/route.rs`, which knows leaders only.
//!
//! | what happens | a leader's partition | a follower's |
//! | --- | --- | --- |
//! | a view names a newer leader | goes there at once | stays |
//! | the broker refuses, its stream breaks, it keeps silent | back-off, or a newer leader at once | leader at once |
//! | the view calls the broker dead or suspect | stays | leader at once |

use std::sync::Arc;
use std::time::Duration;

use qute_proto::ids::BrokerId;
use qute_proto::v1;
use tokio::time::Instant;
use tracing::debug;

use super::buffer::SlotId;
use super::builder::Bound;
use super::cursor::Cursor;
use super::link::Link;
use super::reader::{Partition, Planned, Reader};
use crate::error::{Error, ErrorKind};
use crate::metadata::{Leader, Metadata, Topic};
use crate::net::Address;
use crate::trace;

/// A leader may take this many times the patience with a silent connection to answer a
/// subscription: it has to confirm itself first.
const LEADER_ANSWER_PATIENCE: u32 = 3;
/// A follower that failed is tried again after this many times that patience.
const FOLLOWER_AGAIN_PATIENCE: u32 = 6;

pub(super) enum Route {
    None,
    To {
        link: Arc<Link>,
        subscription: u64,
        broker: BrokerId,
        follower: bool,
        /// The leader known when it was taken.
        leader: Option<Leader>,
        /// The subscription must be answered by then; `None` once it is.
        answer_by: Option<Instant>,
    },
    Waiting {
        until: Instant,
        leader: Option<Leader>,
    },
    /// Paused, ended or failed.
    Off,
}

impl Route {
    pub(super) fn is_follower(&self) -> bool {
        matches!(self, Self::To { follower: true, .. })
    }

    fn broker(&self) -> Option<BrokerId> {
        match self {
            Self::To { broker, .. } => Some(*broker),
            _ => None,
        }
    }
}

/// Who is to serve a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Server {
    pub(super) broker: BrokerId,
    pub(super) follower: bool,
}

/// The broker to read from: a follower in `rack`, unless the leader is there or none is alive;
/// among several the present one, else by the partition's number.
fn choose(
    view: &Metadata,
    topic: &Topic,
    partition: u32,
    rack: Option<&str>,
    present: Option<BrokerId>,
) -> Option<Server> {
    let leader = topic.leader(partition).map(|leader| leader.broker);
    let near = |broker: &BrokerId| {
        view.brokers.get(broker).is_some_and(|broker| {
            Some(broker.rack.as_str()) == rack && broker.state == v1::BrokerState::Alive
        })
    };
    let from_leader = leader.map(|broker| Server {
        broker,
        follower: false,
    });
    if rack.is_none() || leader.is_some_and(|leader| near(&leader)) {
        return from_leader;
    }
    let voters = topic.voters(partition).iter().copied();
    let followers: Vec<BrokerId> = voters
        .filter(|broker| Some(*broker) != leader && near(broker))
        .collect();
    let at = usize::try_from(partition).unwrap_or(0) % followers.len().max(1);
    let follower = present
        .filter(|present| followers.contains(present))
        .or_else(|| followers.get(at).copied());
    let from_follower = follower.map(|broker| Server {
        broker,
        follower: true,
    });
    from_follower.or(from_leader)
}

impl Reader {
    /// How long a connection may be silent: what the client's keep-alive allows.
    pub(super) fn patience(&self) -> Duration {
        self.shared.config.keep_alive_interval + self.shared.config.keep_alive_timeout
    }

    pub(super) fn choose(
        &self,
        view: &Metadata,
        topic: &Topic,
        partition: &Partition,
    ) -> Option<Server> {
        let by_leader = partition.leader_until.is_some();
        let rack = self.rack.as_deref().filter(|_| !by_leader);
        let present = partition.route.broker();
        choose(view, topic, partition.number, rack, present)
    }

    pub(super) fn route(&mut self, slot: SlotId) {
        let view = self.shared.metadata.load();
        let Some(partition) = self.partitions.get(slot) else {
            return;
        };
        let Some(topic) = view.topic_by_id(&self.topic.name, self.topic.id) else {
            self.wait_unasked(slot, None, "the topic is not known");
            return self.confirm_topic();
        };
        let leader = topic.leader(partition.number);
        let server = self.choose(&view, topic, partition);
        let found = server.and_then(|server| Some((server, view.address(server.broker)?)));
        let Some((server, address)) = found else {
            return self.wait_unasked(slot, leader, "no leader is known");
        };
        // A stream that is there says more than failures of other calls.
        if self.live_link(server.broker, address).is_none()
            && let Some(allowed) = self.shared.connections.refused_until(address)
        {
            if server.follower {
                return self.leave_follower(slot, "the broker has failed again and again");
            }
            self.wait_unasked(slot, leader, "the leader has failed again and again");
            return self.wait_until(slot, allowed);
        }
        let link = self.link(server.broker, address, view.brokers.len());
        let Some((subscription, answer_by)) = self.subscribe(slot, &link, server.follower) else {
            return;
        };
        let Some(partition) = self.partitions.get_mut(slot) else {
            return;
        };
        partition.quiet = false;
        partition.behind = None;
        partition.route = Route::To {
            link,
            subscription,
            broker: server.broker,
            follower: server.follower,
            leader,
            answer_by: Some(answer_by),
        };
        if server.follower {
            self.arm_follower_check();
        }
    }

    /// Subscribes at the cursor; gives the subscription, and when it has to be answered.
    pub(super) fn subscribe(
        &mut self,
        slot: SlotId,
        link: &Link,
        follower: bool,
    ) -> Option<(u64, Instant)> {
        let patience = self.patience();
        let answer_by = Instant::now()
            + match follower {
                true => patience,
                false => patience * LEADER_ANSWER_PATIENCE,
            };
        let partition = self.partitions.get(slot)?;
        self.next_id += 1;
        let subscription = self.next_id;
        link.subscribe(v1::Subscribe {
            subscription_id: subscription,
            topic_id: self.topic.id.to_wire(),
            partition: partition.number,
            offset: partition.cursor.next(),
            follower,
        });
        self.subscriptions.insert(subscription, slot);
        self.arm(answer_by);
        Some((subscription, answer_by))
    }

    pub(super) fn live_link(&self, broker: BrokerId, address: &Address) -> Option<&Arc<Link>> {
        let link = self.links.get(&broker)?;
        (link.address() == address && !link.is_broken()).then_some(link)
    }

    pub(super) fn link(
        &mut self,
        broker: BrokerId,
        address: &Address,
        brokers: usize,
    ) -> Arc<Link> {
        if let Some(link) = self.live_link(broker, address) {
            return Arc::clone(link);
        }
        let link = Arc::new(Link::open(
            self.buffer.pool.new_link(),
            Arc::clone(&self.shared.connections),
            Arc::clone(address),
            &self.buffer.pool,
            self.prefetch_bytes / u64::try_from(brokers.max(1)).unwrap_or(1),
            self.sender.clone(),
        ));
        self.links.insert(broker, Arc::clone(&link));
        link
    }

    /// Those that no partition uses keep credit from the others.
    pub(super) fn drop_unused_links(&mut self) {
        self.links.retain(|_, link| Arc::strong_count(link) > 1);
    }

    /// Leaves the present route, if any, and gives the leader known when it was taken.
    pub(super) fn leave(&mut self, slot: SlotId) -> Option<Leader> {
        self.end_trial(slot);
        let partition = self.partitions.get_mut(slot)?;
        match std::mem::replace(&mut partition.route, Route::None) {
            Route::To {
                link,
                subscription,
                leader,
                ..
            } => {
                self.subscriptions.remove(&subscription);
                link.unsubscribe(subscription);
                let since = *partition.stalled_since.get_or_insert_with(Instant::now);
                if let Some(limit) = self.stall_timeout {
                    self.arm(since + limit);
                }
                leader
            }
            Route::Waiting { leader, .. } => leader,
            Route::None => None,
            Route::Off => {
                partition.route = Route::Off;
                None
            }
        }
    }

    /// The route failed: from a follower to the leader, from a leader to a newer one at once, else
    /// after a back-off.
    pub(super) fn fail(&mut self, slot: SlotId, cause: &str) {
        let Some(partition) = self.partitions.get_mut(slot) else {
            return;
        };
        if partition.route.is_follower() {
            return self.leave_follower(slot, cause);
        }
        let number = partition.number;
        let leader = self.leave(slot);
        if self.newer_leader(number, leader) {
            self.route(slot);
        } else {
            self.wait(slot, leader, cause);
        }
    }

    /// When a follower that is left now is tried again.
    pub(super) fn follower_again(&self) -> Instant {
        Instant::now() + self.patience() * FOLLOWER_AGAIN_PATIENCE
    }

    /// To the leader, for a while.
    fn leave_follower(&mut self, slot: SlotId, cause: &str) {
        let until = self.follower_again();
        self.leave(slot);
        let Some(partition) = self.partitions.get_mut(slot) else {
            return;
        };
        debug!(target: trace::FETCH, topic = %self.topic.name, partition = partition.number, cause, "a follower does not serve: on to the leader");
        partition.last_failure = Some(cause.to_owned());
        partition.leader_until = Some(until);
        self.arm(until);
        self.route(slot);
    }

    /// Backs off: there is nobody to ask. No request has failed, so the retry budget is not charged.
    fn wait_unasked(&mut self, slot: SlotId, leader: Option<Leader>, cause: &str) {
        if let Some(partition) = self.partitions.get_mut(slot) {
            let pause = partition.backoff.step();
            self.wait_for(slot, leader, cause, pause);
        }
    }

    /// Backs off after a request that failed, at the expense of the client's retry budget.
    pub(super) fn wait(&mut self, slot: SlotId, leader: Option<Leader>, cause: &str) {
        let budget = self.shared.connections.budget();
        let now = Instant::now();
        let Some(partition) = self.partitions.get_mut(slot) else {
            return;
        };
        let pause = partition.backoff.step_within(budget, now);
        self.wait_for(slot, leader, cause, pause);
    }

    fn wait_for(&mut self, slot: SlotId, leader: Option<Leader>, cause: &str, pause: Duration) {
        self.shared.metadata.request_refresh();
        let Some(partition) = self.partitions.get_mut(slot) else {
            return;
        };
        if matches!(partition.route, Route::Off) {
            return;
        }
        partition.last_failure = Some(cause.to_owned());
        let until = Instant::now() + pause;
        partition.route = Route::Waiting { until, leader };
        self.arm(until);
    }

    /// Waits longer, if it waits.
    fn wait_until(&mut self, slot: SlotId, at_least: Instant) {
        let partition = self.partitions.get_mut(slot);
        if let Some(Route::Waiting { until, .. }) = partition.map(|p| &mut p.route) {
            *until = at_least.max(*until);
        }
    }

    pub(super) fn newer_leader(&self, number: u32, than: Option<Leader>) -> bool {
        self.shared.metadata.newer_leader(&self.topic, number, than)
    }

    pub(super) fn on_broken(&mut self, link: u64, cause: &str) {
        let on_link = |route: &Route| matches!(route, Route::To { link: on, .. } if on.id == link);
        let broken: Vec<SlotId> = (0..)
            .zip(&self.partitions)
            .filter(|(_, partition)| on_link(&partition.route))
            .map(|(slot, _)| slot)
            .collect();
        let broker = self.links.iter().find(|(_, open)| open.id == link);
        if let Some((&broker, _)) = broker {
            self.links.remove(&broker);
            // It may be cut off from the others, and its view old.
            self.shared.metadata.request_refresh_elsewhere(broker);
        }
        self.end_trials_on(link);
        // One stream, one retry to pay for, however many partitions it served.
        let mut paid: Option<Duration> = None;
        for slot in broken {
            let Some(partition) = self.partitions.get_mut(slot) else {
                continue;
            };
            let number = partition.number;
            if partition.route.is_follower() {
                self.leave_follower(slot, cause);
                continue;
            }
            let leader = self.leave(slot);
            if self.newer_leader(number, leader) {
                self.route(slot);
                continue;
            }
            let budget = self.shared.connections.budget();
            let Some(partition) = self.partitions.get_mut(slot) else {
                continue;
            };
            let pause = match paid {
                Some(pause) => pause.max(partition.backoff.step()),
                None => partition.backoff.step_within(budget, Instant::now()),
            };
            paid.get_or_insert(pause);
            self.wait_for(slot, leader, cause, pause);
        }
    }

    pub(super) fn on_view(&mut self) {
        let view = self.shared.metadata.load();
        let Some(topic) = view.topic_by_id(&self.topic.name, self.topic.id) else {
            return self.confirm_topic();
        };
        self.add_partitions(topic.partitions());
        let goes = |partition: &Partition| match &partition.route {
            Route::To {
                broker,
                follower,
                leader,
                ..
            } => match self.choose(&view, topic, partition) {
                Some(server) if server.follower || *follower => {
                    server.broker != *broker || server.follower != *follower
                }
                _ => self.newer_leader(partition.number, *leader),
            },
            Route::Waiting { leader, .. } => self.newer_leader(partition.number, *leader),
            Route::None | Route::Off => false,
        };
        let moved: Vec<SlotId> = (0..)
            .zip(&self.partitions)
            .filter(|(_, partition)| goes(partition))
            .map(|(slot, _)| slot)
            .collect();
        for slot in moved {
            // From a leader that serves to a follower: once that has answered.
            if !self.try_follower(slot) {
                self.leave(slot);
                self.route(slot);
            }
        }
    }

    /// Promise 6: partitions added to a topic that is read as a whole are read from their start.
    fn add_partitions(&mut self, count: u32) {
        let Some(bound) = self.whole else { return };
        let known = u32::try_from(self.partitions.len()).unwrap_or(u32::MAX);
        // What was the end when the consumer was opened does not include them.
        if count <= known || matches!(bound, Some(Bound::End)) {
            return;
        }
        let (end, end_ms) = match bound {
            Some(Bound::Offset(end)) => (Some(end), None),
            Some(Bound::TimeMs(time_ms)) => (None, Some(time_ms)),
            Some(Bound::End) | None => (None, None),
        };
        let added: Vec<u32> = (known..count).collect();
        let slots: Vec<SlotId> = added
            .iter()
            .map(|&partition| {
                let planned = Planned {
                    partition,
                    cursor: Cursor::new(0, end),
                    end_ms,
                    high_watermark: None,
                    beyond_end: false,
                };
                self.add(planned, true)
            })
            .collect();
        self.buffer.announce(added);
        for slot in slots {
            self.start_wanted(slot);
        }
    }

    pub(super) fn on_timer(&mut self) {
        let now = Instant::now();
        self.timer = None;
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        for slot in 0..self.partitions.len() {
            let Some(partition) = self.partitions.get_mut(slot) else {
                continue;
            };
            if due(partition.leader_until) {
                partition.leader_until = None;
                self.try_follower(slot);
            }
            self.on_trial_timer(slot, now);
            let Some(partition) = self.partitions.get(slot) else {
                continue;
            };
            let stalled_at = partition.stalled_since.zip(self.stall_timeout);
            if due(stalled_at.map(|(since, limit)| since + limit)) {
                self.on_stalled(slot);
                continue;
            }
            match &partition.route {
                Route::Waiting { until, .. } if *until <= now => {
                    self.leave(slot);
                    self.route(slot);
                }
                Route::To {
                    answer_by, broker, ..
                } if due(*answer_by) => {
                    self.shared.metadata.request_refresh_elsewhere(*broker);
                    self.fail(slot, "the broker did not answer the subscription in time");
                }
                _ => {}
            }
            self.arm_bound(slot);
        }
        if due(self.next_follower_check) {
            self.check_followers();
        }
        self.arm_all();
    }

    /// Finds the next timer among all.
    fn arm_all(&mut self) {
        let of = |partition: &Partition| {
            let stalled = partition.stalled_since.zip(self.stall_timeout);
            let stalled = stalled.map(|(since, limit)| since + limit);
            let route = match &partition.route {
                Route::Waiting { until, .. } => Some(*until),
                Route::To { answer_by, .. } => *answer_by,
                Route::None | Route::Off => None,
            };
            let trial = partition.trial.as_ref().map(|trial| trial.answer_by);
            let times = [stalled, route, partition.leader_until, trial];
            times.into_iter().flatten().min()
        };
        let timers = self.partitions.iter().filter_map(of);
        let timers = timers.chain(self.next_follower_check);
        if let Some(next) = timers.min() {
            self.arm(next);
        }
    }

    fn on_stalled(&mut self, slot: SlotId) {
        let cause = self
            .partitions
            .get(slot)
            .and_then(|partition| partition.last_failure.as_ref())
            .map(|cause| format!("; last: {cause}"));
        let error = Error::new(
            ErrorKind::Timeout,
            format!(
                "no replica served the partition in time{}",
                cause.unwrap_or_default()
            ),
        );
        self.finish(slot, Some(error));
    }
}
