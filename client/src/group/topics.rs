//! The topics that a member reads: what views change, where claims begin, their readers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use qute_proto::ids::{PartitionId, TopicId};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::debug;

use super::core::{Core, Reading, TopicEvents};
use super::event::GroupEvent;
use super::membership::Attached;
use super::session::Work;
use super::subscription::{Change, Subscription};
use crate::consumer::{OnDemand, OnDemandPlan, Position};
use crate::error::{Error, ErrorKind, Result};
use crate::trace;

/// A claim whose beginning could not be found is looked at again after this.
const AGAIN: Duration = Duration::from_millis(500);

/// A claim that waits for its beginning.
#[derive(Debug, Clone, Copy)]
pub(super) struct Starting {
    place: PartitionId,
    epoch: u64,
    committed: Option<u64>,
}

/// See the module header.
pub(super) struct Topics {
    core: Arc<Core>,
    subscription: Subscription,
    plan: OnDemandPlan,
    /// Where nothing is committed.
    start: Position,
    /// How many partitions a topic had when the member joined: those that came later, and topics that
    /// did, are read from their start.
    born: BTreeMap<TopicId, u32>,
    /// Topics that are gone: should they be made again, the program is told so.
    deleted: BTreeSet<Arc<str>>,
    later: Vec<Starting>,
    again_at: Option<Instant>,
}

impl Topics {
    /// With a subscription that has seen a view.
    pub(super) fn new(
        core: &Arc<Core>,
        subscription: Subscription,
        plan: OnDemandPlan,
        start: Position,
    ) -> Self {
        let topics = subscription.topics();
        Self {
            core: Arc::clone(core),
            born: topics
                .iter()
                .map(|(&id, topic)| (id, topic.partitions))
                .collect(),
            subscription,
            plan,
            start,
            deleted: BTreeSet::new(),
            later: Vec::new(),
            again_at: None,
        }
    }

    /// When [`Self::try_again`] has something to do.
    pub(super) fn due(&self) -> Option<Instant> {
        self.again_at
    }

    /// Takes in the present view.
    pub(super) fn on_view(&mut self, work: &mut JoinSet<Work>) {
        let view = self.core.shared.metadata.load();
        let changes = self.subscription.update(&view);
        let (mut events, mut gone) = (Vec::new(), Vec::new());
        for change in &changes {
            debug!(target: trace::GROUP, group = %self.core.group, ?change, "subscribed topics changed");
            match change {
                Change::Grew { .. } => {}
                // Deleted in one view and made again in another.
                Change::Appeared { name, .. } if self.deleted.remove(name) => {
                    let topic = Arc::clone(name);
                    events.push(GroupEvent::TopicRecreated { topic });
                }
                Change::Appeared { .. } => {}
                Change::Deleted { id, name } => {
                    self.born.remove(id);
                    self.deleted.insert(Arc::clone(name));
                    gone.push(*id);
                    let error = Error::new(ErrorKind::UnknownTopic, "the topic was deleted");
                    events.push(GroupEvent::Failed(error.with_topic(name)));
                }
                Change::Recreated { name, old, .. } => {
                    self.born.remove(old);
                    gone.push(*old);
                    let topic = Arc::clone(name);
                    events.push(GroupEvent::TopicRecreated { topic });
                }
            }
        }
        if !changes.is_empty() {
            let topics = self.subscription.to_wire();
            self.core.with(|state| {
                state.events.extend(events);
                state.gone.extend(gone);
                state.membership.subscribe(topics, Instant::now());
            });
        }
        self.try_again(work);
    }

    /// Looks again at the claims that could not begin.
    pub(super) fn try_again(&mut self, work: &mut JoinSet<Work>) {
        self.again_at = None;
        for starting in std::mem::take(&mut self.later) {
            self.start(starting, work);
        }
    }

    /// A claim was granted.
    pub(super) fn granted(
        &mut self,
        place: PartitionId,
        epoch: u64,
        committed: Option<u64>,
        work: &mut JoinSet<Work>,
    ) {
        let starting = Starting {
            place,
            epoch,
            committed,
        };
        self.start(starting, work);
    }

    fn start(&mut self, starting: Starting, work: &mut JoinSet<Work>) {
        let Starting { place, epoch, .. } = starting;
        let wanted = |core: &Core| core.with(|state| state.membership.is_starting(place, epoch));
        if !wanted(&self.core) {
            return;
        }
        if !self.open(place.topic) {
            return self.look_later(starting);
        }
        if let Some(offset) = starting.committed {
            return self.attach(starting, offset, false);
        }
        let reading = |core: &Core| {
            core.with(|state| {
                let reading = state.topics.get(&place.topic);
                reading.map(|reading| reading.partitions.clone())
            })
        };
        let Some(partitions) = reading(&self.core) else {
            return;
        };
        let at_birth = self.born.get(&place.topic);
        let position = match at_birth.is_some_and(|&count| place.partition < count) {
            true => self.start,
            false => Position::Start,
        };
        let deadline = Instant::now() + self.core.shared.config.call_timeout;
        work.spawn(async move {
            let found = partitions.locate(place.partition, position, deadline).await;
            // Nothing before the start is ever missed, however late it is looked up.
            let pin = position != Position::Start;
            Work::Located(starting, pin, found)
        });
    }

    pub(super) fn located(&mut self, starting: Starting, pin: bool, found: Result<u64>) {
        match found {
            Ok(offset) => self.attach(starting, offset, pin),
            Err(error) => {
                let Starting { place, .. } = starting;
                debug!(target: trace::GROUP, group = %self.core.group, %place, %error, "not known where to begin");
                self.look_later(starting);
            }
        }
    }

    fn attach(&mut self, starting: Starting, offset: u64, pin: bool) {
        let Starting { place, epoch, .. } = starting;
        let attached = self.core.with(|state| {
            let reading = state.topics.get(&place.topic);
            let partitions = reading.map(|reading| reading.partitions.clone());
            // Under the lock: what is handed out under the attachment finds it known.
            let attach = || partitions.as_ref()?.attach(place.partition, offset);
            let attached = state.membership.attach(place, epoch, offset, pin, attach);
            if attached == Attached::Yes {
                if pin {
                    state.commits.acknowledged();
                }
                if let Some(partitions) = &partitions
                    && state.paused.contains(&place)
                {
                    partitions.pause(place.partition);
                }
            }
            attached
        });
        if attached == Attached::Later {
            self.look_later(starting);
        }
    }

    fn look_later(&mut self, starting: Starting) {
        self.later.push(starting);
        self.again_at.get_or_insert(Instant::now() + AGAIN);
    }

    pub(super) fn detach(&self, place: PartitionId) {
        self.core.with(|state| {
            if let Some(reading) = state.topics.get(&place.topic) {
                reading.partitions.detach(place.partition);
            }
        });
    }

    /// Makes sure that the topic has a reader; false if it is not known.
    fn open(&self, id: TopicId) -> bool {
        if self.core.with(|state| state.topics.contains_key(&id)) {
            return true;
        }
        let view = self.core.shared.metadata.load();
        let Some(topic) = view.topics.values().find(|topic| topic.id == id) else {
            return false;
        };
        let topics = self.subscription.topics().len().max(1);
        let plan = OnDemandPlan {
            topics,
            ..self.plan.clone()
        };
        let (events, partitions) = OnDemand::open(&self.core.shared, topic, &plan);
        self.core.with(|state| {
            let reading = Reading {
                topic: Arc::clone(topic),
                partitions,
            };
            state.topics.insert(id, reading);
            state.opened.push(TopicEvents {
                topic: Arc::clone(topic),
                events,
            });
        });
        true
    }
}
