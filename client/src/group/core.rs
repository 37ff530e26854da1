//! What the session's task, the program's stream, its control handles and its acknowledgements share:
//! one membership behind one short lock, and who is woken when it changes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::task::Waker;

use parking_lot::Mutex;
use qute_proto::ids::{PartitionId, TopicId};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::commit::Commits;
use super::event::{GroupEvent, TopicPartition};
use super::membership::{Membership, Told};
use crate::client::Shared;
use crate::consumer::{OnDemand, Partitions};
use crate::error::{Error, Result};
use crate::metadata::Topic;

/// See the module header.
pub(super) struct Core {
    pub(super) shared: Arc<Shared>,
    pub(super) group: Arc<str>,
    /// A static member keeps its place when it goes.
    pub(super) is_static: bool,
    state: Mutex<State>,
    /// Wakes the session's task.
    pub(super) wake: Notify,
    /// Counts changes that somebody may wait for: joined, ended.
    changed: watch::Sender<u64>,
}

pub(super) struct State {
    pub(super) membership: Membership,
    /// What the program hears of topics, besides the membership's.
    pub(super) events: VecDeque<GroupEvent>,
    /// The topics that are read, or were.
    pub(super) topics: BTreeMap<TopicId, Reading>,
    /// Readers that the program's stream has not taken over yet.
    pub(super) opened: Vec<TopicEvents>,
    /// Those whose readers are of no use any more.
    pub(super) gone: Vec<TopicId>,
    /// Those of them that claims are held of, perhaps.
    fading: Vec<TopicId>,
    /// By the program.
    pub(super) paused: BTreeSet<PartitionId>,
    pub(super) commits: Commits,
    /// What last kept the member from its coordinator.
    pub(super) last_failure: Option<Error>,
    /// The program's stream waits.
    waker: Option<Waker>,
    /// Leaving must be done by then.
    pub(super) leave_by: Option<Instant>,
    /// The session's task has ended.
    pub(super) deserted: bool,
}

/// A topic that is read.
pub(super) struct Reading {
    pub(super) topic: Arc<Topic>,
    pub(super) partitions: Partitions,
}

/// What comes of a topic.
pub(super) struct TopicEvents {
    pub(super) topic: Arc<Topic>,
    pub(super) events: OnDemand,
}

/// What the program's stream finds.
pub(super) enum Next {
    Event(GroupEvent),
    /// Nothing but batches, perhaps; with readers that are new, and topics whose readers are of no use
    /// any more.
    Batches(Vec<TopicEvents>, Vec<TopicId>),
    Ended,
}

impl Core {
    pub(super) fn new(
        shared: Arc<Shared>,
        group: Arc<str>,
        is_static: bool,
        membership: Membership,
        commits: Commits,
    ) -> Self {
        Self {
            shared,
            group,
            is_static,
            state: Mutex::new(State {
                membership,
                events: VecDeque::new(),
                topics: BTreeMap::new(),
                opened: Vec::new(),
                gone: Vec::new(),
                fading: Vec::new(),
                paused: BTreeSet::new(),
                commits,
                last_failure: None,
                waker: None,
                leave_by: None,
                deserted: false,
            }),
            wake: Notify::new(),
            changed: watch::Sender::new(0),
        }
    }

    /// Looks at the state, or changes it; who has to hear of it is woken once the lock is free.
    pub(super) fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let (result, waker, work) = {
            let mut state = self.state.lock();
            let before = (state.membership.has_joined(), state.membership.has_ended());
            let result = change(&mut state);
            state.end_partings(self);
            let after = (state.membership.has_joined(), state.membership.has_ended());
            if before != after {
                self.changed.send_modify(|count| *count += 1);
            }
            let news = state.has_news();
            let waker = if news { state.waker.take() } else { None };
            (result, waker, state.has_work())
        };
        if work {
            self.wake.notify_one();
        }
        if let Some(waker) = waker {
            waker.wake();
        }
        result
    }

    /// Has the program's stream ask again.
    pub(super) fn probe(&self) {
        let waker = self.state.lock().waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// What comes next for the program, which asks now. Without an event, `waker` is woken by the next.
    pub(super) fn next(&self, waker: &Waker, now: Instant) -> Next {
        self.with(|state| {
            state.membership.polled(now);
            if let Some(event) = self.take_event(state) {
                return Next::Event(event);
            }
            if state.membership.has_ended() || state.deserted {
                return Next::Ended;
            }
            if !state
                .waker
                .as_ref()
                .is_some_and(|known| known.will_wake(waker))
            {
                state.waker = Some(waker.clone());
            }
            let gone = std::mem::take(&mut state.gone);
            state.forget_topics(&gone);
            Next::Batches(std::mem::take(&mut state.opened), gone)
        })
    }

    fn take_event(&self, state: &mut State) -> Option<GroupEvent> {
        if let Some(event) = state.events.pop_front() {
            return Some(event);
        }
        let told = state.membership.take_told()?;
        match &told {
            Told::Revoking { claims, .. } => state.unpause(claims.iter().map(|(place, _)| *place)),
            Told::Lost { partitions, .. } => state.unpause(partitions.iter().copied()),
            Told::Assigned(_) | Told::Failed(_) => {}
        }
        let named = |places: Vec<PartitionId>| {
            let name = |place| self.name(state, place);
            places.into_iter().map(name).collect::<Vec<_>>()
        };
        Some(GroupEvent::told(told, named))
    }

    /// The partition as programs name it.
    pub(super) fn name(&self, state: &State, place: PartitionId) -> TopicPartition {
        let read = state.topics.get(&place.topic);
        let topic = read.map(|reading| Arc::clone(&reading.topic.name));
        TopicPartition {
            topic: topic.unwrap_or_else(|| {
                let view = self.shared.metadata.load();
                let known = view.topics.values().find(|topic| topic.id == place.topic);
                // Gone before it was ever read.
                known.map_or_else(
                    || place.topic.to_string().into(),
                    |topic| Arc::clone(&topic.name),
                )
            }),
            partition: place.partition,
        }
    }

    /// Waits until the member has joined.
    ///
    /// # Errors
    /// Why it never will.
    pub(super) async fn joined(&self) -> Result<()> {
        self.until(|state| {
            let membership = &state.membership;
            if let Some(error) = membership.failure() {
                return Some(Err(error.clone()));
            }
            if membership.has_joined() {
                return Some(Ok(()));
            }
            let over = state.deserted || membership.has_ended();
            over.then(|| Err(Error::task_ended("group consumer")))
        })
        .await
    }

    /// Waits until the member has left.
    ///
    /// # Errors
    /// What kept it from leaving in order.
    pub(super) async fn ended(&self) -> Result<()> {
        self.until(|state| {
            if !(state.membership.has_ended() || state.deserted) {
                return None;
            }
            Some(state.membership.failure().cloned().map_or(Ok(()), Err))
        })
        .await
    }

    async fn until<T>(&self, found: impl Fn(&State) -> Option<T>) -> T {
        let mut changed = self.changed.subscribe();
        loop {
            changed.mark_unchanged();
            let present = found(&self.state.lock());
            if let Some(present) = present {
                return present;
            }
            // The sender is here.
            let _ = changed.changed().await;
        }
    }

    /// The session's task is gone.
    pub(super) fn desert(&self) {
        self.with(|state| {
            state.deserted = true;
            if !state.membership.has_ended() {
                let error = Error::task_ended("group consumer");
                state.membership.fail(error);
            }
            state.commits.refuse(&Error::closed("group consumer"));
        });
        self.changed.send_modify(|count| *count += 1);
        self.probe();
    }
}

impl State {
    /// What the program has paused of a claim ends with it, as far as the program knows: by now the
    /// partition may have come back, and been attached as a paused one.
    fn unpause(&mut self, places: impl Iterator<Item = PartitionId>) {
        for place in places {
            if self.paused.remove(&place)
                && let Some(reading) = self.topics.get(&place.topic)
            {
                reading.partitions.resume(place.partition);
            }
        }
    }

    /// The program has heard all there is: topics that are gone, and of which nothing is held, are not
    /// spoken of any more.
    fn forget_topics(&mut self, gone: &[TopicId]) {
        self.fading.extend(gone);
        for topic in std::mem::take(&mut self.fading) {
            if self.membership.holds_any_of(topic) {
                self.fading.push(topic);
                continue;
            }
            self.topics.remove(&topic);
            self.paused.retain(|place| place.topic != topic);
        }
    }

    fn has_news(&self) -> bool {
        !self.events.is_empty()
            || !self.opened.is_empty()
            || self.membership.has_told()
            || self.membership.has_ended()
            || self.deserted
    }

    fn has_work(&self) -> bool {
        self.membership.has_commands() || self.membership.has_ended() || self.commits.has_work()
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("group", &self.group)
            .finish_non_exhaustive()
    }
}

impl GroupEvent {
    fn told(told: Told, named: impl Fn(Vec<PartitionId>) -> Vec<TopicPartition>) -> Self {
        use super::event::{Assigned, Lost, Revoking};
        match told {
            Told::Assigned(places) => Self::Assigned(Assigned {
                partitions: named(places),
            }),
            Told::Revoking { claims, deadline } => {
                let places = claims.iter().map(|(place, _)| *place).collect();
                Self::Revoking(Revoking {
                    partitions: named(places),
                    deadline: deadline.into_std(),
                })
            }
            Told::Lost { partitions, reason } => Self::Lost(Lost {
                partitions: named(partitions),
                reason,
            }),
            Told::Failed(error) => Self::Failed(error),
        }
    }
}
