//! What the reader asks beside its streams: whether the topic still exists, where a bound by time
//! lies, and whether followers that send nothing have nothing to send.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinError;
use tokio::time::Instant;
use tracing::debug;

use super::buffer::SlotId;
use super::builder::time_bound;
use super::reader::Reader;
use super::routing::Route;
use crate::admin::{ListedOffset, OffsetSpec, list_each_offset, list_offsets};
use crate::error::Result;
use crate::metadata::Incarnation;
use crate::record::now_ms;
use crate::trace;

/// What came of a check.
pub(super) enum Checked {
    /// `None`: nobody could say.
    Topic(Option<Incarnation>),
    TimeBound {
        slot: SlotId,
        time_ms: u64,
        listed: Result<Vec<ListedOffset>>,
    },
    /// What the leaders said, those that said anything.
    Followers(Vec<ListedOffset>),
}

impl Reader {
    pub(super) fn on_checked(&mut self, checked: Result<Checked, JoinError>) {
        match checked {
            Ok(Checked::Topic(incarnation)) => {
                self.confirming_topic = false;
                match incarnation {
                    // Deleted for certain; whether it was made again, nobody could say.
                    None | Some(Incarnation::Present(_)) if self.topic_deleted => {
                        self.topic_is_gone(&Incarnation::Missing);
                    }
                    Some(incarnation) => self.topic_is_gone(&incarnation),
                    None => {}
                }
            }
            Ok(Checked::TimeBound {
                slot,
                time_ms,
                listed,
            }) => self.on_time_bound(slot, time_ms, listed),
            Ok(Checked::Followers(listed)) => self.on_leaders_told(&listed),
            Err(error) => {
                debug!(target: trace::FETCH, %error, "a check of the consumer's failed");
                self.confirming_topic = false;
            }
        }
    }

    /// The present view lacks this incarnation of the topic. That its name belongs to another one
    /// is proof enough; otherwise the leader of `__cluster` is asked.
    pub(super) fn confirm_topic(&mut self) {
        let known = self.shared.metadata.incarnation(&self.topic);
        if matches!(known, Incarnation::Recreated(_)) {
            return self.topic_is_gone(&known);
        }
        if self.confirming_topic
            || self
                .partitions
                .iter()
                .all(|p| matches!(p.route, Route::Off))
        {
            return;
        }
        self.confirming_topic = true;
        let (shared, topic) = (Arc::clone(&self.shared), Arc::clone(&self.topic));
        self.checks
            .spawn(async move { Checked::Topic(shared.metadata.confirm(&topic).await) });
    }

    /// Promise 11: what is left of a topic that was deleted ends; a new one of its name is never
    /// read in its place.
    pub(super) fn topic_is_gone(&mut self, incarnation: &Incarnation) {
        let Some(error) = incarnation.error(&self.topic) else {
            return;
        };
        for slot in 0..self.partitions.len() {
            let partition = self.partitions.get(slot);
            if partition.is_some_and(|partition| !matches!(partition.route, Route::Off)) {
                self.finish(slot, Some(error.clone()));
            }
        }
    }

    /// If the partition ends at a moment that has yet to come: has that looked up then.
    pub(super) fn arm_bound(&mut self, slot: SlotId) {
        let Some(partition) = self.partitions.get_mut(slot) else {
            return;
        };
        let Some(time_ms) = partition.end_ms else {
            return;
        };
        if partition.looking_up_bound || matches!(partition.route, Route::Off) {
            return;
        }
        partition.looking_up_bound = true;
        let left_ms = time_ms.saturating_sub(u64::try_from(now_ms()).unwrap_or(0));
        let pause = partition.backoff.step();
        let number = partition.number;
        let (shared, topic) = (Arc::clone(&self.shared), Arc::clone(&self.topic));
        self.checks.spawn(async move {
            // Clocks and time limits have an end.
            let wait = Duration::from_millis(left_ms).saturating_add(pause);
            tokio::time::sleep(crate::config::capped(wait)).await;
            let deadline = Instant::now() + shared.config.call_timeout;
            let query = [(number, OffsetSpec::TimeMs(time_ms))];
            let view = shared.metadata.load();
            let present = view.topic_by_id(&topic.name, topic.id).unwrap_or(&topic);
            let listed = list_offsets(&shared, present, &query, deadline).await;
            Checked::TimeBound {
                slot,
                time_ms,
                listed,
            }
        });
    }

    fn on_time_bound(&mut self, slot: SlotId, time_ms: u64, listed: Result<Vec<ListedOffset>>) {
        let Some(partition) = self.partitions.get_mut(slot) else {
            return;
        };
        partition.looking_up_bound = false;
        if partition.end_ms != Some(time_ms) {
            return;
        }
        let listed = listed.ok();
        let listed = listed.as_ref().and_then(|listed| listed.first());
        match listed.and_then(|listed| time_bound(time_ms, listed)) {
            Some(end) => {
                partition.end_ms = None;
                partition.cursor.set_end(end);
                if partition.cursor.is_done() && !matches!(partition.route, Route::Off) {
                    self.finish(slot, None);
                }
            }
            // No leader, or the clock went back.
            None => self.arm_bound(slot),
        }
    }

    pub(super) fn arm_follower_check(&mut self) {
        if self.next_follower_check.is_none() {
            let at = Instant::now() + self.patience();
            self.next_follower_check = Some(at);
            self.arm(at);
        }
    }

    /// A follower that is cut off, or far behind, sends nothing and does not say so. Those that have
    /// been behind their leaders since the last check, with credit and without sending anything, are
    /// left; the leaders of those that were quiet are asked how far they are.
    pub(super) fn check_followers(&mut self) {
        self.next_follower_check = None;
        let mut queries = Vec::new();
        let mut silent = Vec::new();
        for (slot, partition) in self.partitions.iter_mut().enumerate() {
            let Route::To {
                link,
                follower: true,
                ..
            } = &partition.route
            else {
                continue;
            };
            let could_send = self.buffer.is_drained(slot) && self.buffer.pool.has_credit(link.id);
            let behind = partition.behind.take();
            if behind.is_some_and(|end| partition.cursor.next() < end) && could_send {
                silent.push(slot);
            } else if partition.quiet && could_send {
                queries.push((partition.number, OffsetSpec::End));
            }
            partition.quiet = true;
        }
        for slot in silent {
            self.fail(slot, "a follower is behind its leader and sends nothing");
        }
        if self.partitions.iter().any(|p| p.route.is_follower()) {
            self.arm_follower_check();
        }
        if queries.is_empty() {
            return;
        }
        let (shared, topic, patience) = (
            Arc::clone(&self.shared),
            Arc::clone(&self.topic),
            self.patience(),
        );
        self.checks.spawn(async move {
            let view = shared.metadata.load();
            let present = view.topic_by_id(&topic.name, topic.id).unwrap_or(&topic);
            let deadline = Instant::now() + patience;
            let listed = list_each_offset(&shared, present, &queries, deadline).await;
            let told = listed.into_iter().filter_map(|one| match one {
                Ok(offset) => Some(offset),
                Err(error) => {
                    debug!(target: trace::FETCH, topic = %topic.name, %error, "a leader does not say how far it is");
                    None
                }
            });
            Checked::Followers(told.collect())
        });
    }

    fn on_leaders_told(&mut self, listed: &[ListedOffset]) {
        let ends: HashMap<u32, u64> = listed
            .iter()
            .map(|offset| (offset.partition, offset.high_watermark))
            .collect();
        for (slot, partition) in self.partitions.iter_mut().enumerate() {
            if let Some(&end) = ends.get(&partition.number) {
                self.buffer.saw(slot, end);
                if partition.quiet && partition.route.is_follower() {
                    partition.behind = Some(end);
                }
            }
        }
    }
}
