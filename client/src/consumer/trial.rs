//! A follower on trial: the partition is subscribed there too, and its leader serves on until the
//! follower has answered. So a follower that does not serve, however it fails, costs the partition
//! nothing.
//!
//! ```text
//!   [leader] -- a follower is near --> [leader, follower on trial] -- answered --> [follower]
//!       ^                                   |
//!       '--- refused, broken, silent -------'   tried again later
//! ```
//!
//! The follower sends from where the cursor stood when it was asked; what the leader has sent since
//! arrives a second time and is dropped as old.

use std::sync::Arc;

use qute_proto::ids::BrokerId;
use tokio::time::Instant;
use tracing::debug;

use super::buffer::SlotId;
use super::link::Link;
use super::reader::Reader;
use super::routing::Route;
use crate::metadata::Leader;
use crate::trace;

/// A follower that was asked beside a leader that serves.
pub(super) struct Trial {
    link: Arc<Link>,
    subscription: u64,
    broker: BrokerId,
    /// The leader known when it was asked.
    leader: Option<Leader>,
    /// It has to answer by then.
    pub(super) answer_by: Instant,
}

impl Reader {
    /// Asks the nearest follower, if there is one and the partition is served by its leader. False if
    /// that is not so.
    pub(super) fn try_follower(&mut self, slot: SlotId) -> bool {
        let view = self.shared.metadata.load();
        let Some(topic) = view.topic_by_id(&self.topic.name, self.topic.id) else {
            return false;
        };
        let Some(partition) = self.partitions.get(slot) else {
            return false;
        };
        let Route::To {
            follower: false,
            leader: served_by,
            ..
        } = &partition.route
        else {
            return false;
        };
        if partition.trial.is_some() || self.newer_leader(partition.number, *served_by) {
            return false;
        }
        let leader = topic.leader(partition.number);
        let server = self.choose(&view, topic, partition);
        let Some(server) = server.filter(|server| server.follower) else {
            return false;
        };
        let Some(address) = view.address(server.broker) else {
            return false;
        };
        // From now on the leader serves, unless the follower answers.
        let again = self.follower_again();
        if let Some(partition) = self.partitions.get_mut(slot) {
            partition.leader_until = Some(again);
        }
        self.arm(again);
        let connections = &self.shared.connections;
        if self.live_link(server.broker, address).is_none()
            && connections.refused_until(address).is_some()
        {
            return true;
        }
        let link = self.link(server.broker, address, view.brokers.len());
        if let Some((subscription, answer_by)) = self.subscribe(slot, &link, true)
            && let Some(partition) = self.partitions.get_mut(slot)
        {
            partition.trial = Some(Trial {
                link,
                subscription,
                broker: server.broker,
                leader,
                answer_by,
            });
        }
        true
    }

    pub(super) fn is_on_trial(&self, slot: SlotId, subscription: u64) -> bool {
        let partition = self.partitions.get(slot);
        let trial = partition.and_then(|partition| partition.trial.as_ref());
        trial.is_some_and(|trial| trial.subscription == subscription)
    }

    /// The follower has answered: it takes over from the leader.
    pub(super) fn pass_trial(&mut self, slot: SlotId) {
        let partition = self.partitions.get_mut(slot);
        let Some(trial) = partition.and_then(|partition| partition.trial.take()) else {
            return;
        };
        self.leave(slot);
        if let Some(partition) = self.partitions.get_mut(slot) {
            partition.leader_until = None;
            partition.quiet = false;
            partition.behind = None;
            partition.route = Route::To {
                link: trial.link,
                subscription: trial.subscription,
                broker: trial.broker,
                follower: true,
                leader: trial.leader,
                answer_by: None,
            };
        }
        self.arm_follower_check();
    }

    /// The follower is not asked any more; the leader is not touched.
    pub(super) fn end_trial(&mut self, slot: SlotId) {
        let partition = self.partitions.get_mut(slot);
        if let Some(trial) = partition.and_then(|partition| partition.trial.take()) {
            self.subscriptions.remove(&trial.subscription);
            trial.link.unsubscribe(trial.subscription);
        }
    }

    pub(super) fn fail_trial(&mut self, slot: SlotId, cause: &str) {
        if let Some(partition) = self.partitions.get(slot) {
            debug!(target: trace::FETCH, topic = %self.topic.name, partition = partition.number, cause, "a follower still does not serve");
        }
        self.end_trial(slot);
    }

    pub(super) fn end_trials_on(&mut self, link: u64) {
        let on_link = |trial: &Trial| trial.link.id == link;
        for slot in 0..self.partitions.len() {
            let partition = self.partitions.get(slot);
            if partition.is_some_and(|partition| partition.trial.as_ref().is_some_and(on_link)) {
                self.fail_trial(slot, "the stream broke");
            }
        }
    }

    pub(super) fn on_trial_timer(&mut self, slot: SlotId, now: Instant) {
        let partition = self.partitions.get(slot);
        let trial = partition.and_then(|partition| partition.trial.as_ref());
        if trial.is_some_and(|trial| trial.answer_by <= now) {
            self.fail_trial(slot, "no answer in time");
        }
    }
}
