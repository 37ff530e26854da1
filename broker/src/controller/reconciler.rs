//! Makes what is open on this broker equal to what the cluster has decided.
//!
//! The only code that opens, closes and deletes replicas. One task ([`run`]); the decisions are a
//! pure function ([`plan`]) of the view and of what is open. Rules kept here:
//!
//! - S10: only replicas of a first placement initialize their group, with exactly that set, until
//!   the partition is reported born. The first of the set does it at once (so it leads first, and
//!   leaders are spread as placed); the others only if it does not come.
//! - S22: a replica is deleted for a tombstone of its id and for nothing else. The view is
//!   committed state and a tombstone is never taken back, so any view that holds it will do. A
//!   replica that the view does not know is kept and reported.
//! - An open replica follows its topic's settings.
//! - S6: a replica that is quarantined is reported and left alone.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt as _};
use qute_proto::ids::{BrokerId, PartitionId, ReplicaId};
use qute_proto::internal::{
    PartitionBorn, PartitionsBorn, ReplicaDeleted, ReplicasDeleted, cluster_command::Command,
};
use tokio::sync::watch;
use tokio::time::Instant;

use super::settings::TopicSettings;
use super::view::{ClusterView, Placement};

/// Replicas opened or deleted at the same time.
const WORKING_MAX: usize = 16;
/// While something is unfinished it is looked at this often.
const PACE: Duration = Duration::from_millis(100);
/// How much later each further replica of a first placement initializes the group.
const INITIALIZE_DELAY: Duration = Duration::from_secs(2);
/// A replica that did not open is tried again after this, doubled each time.
const RETRY_FIRST: Duration = Duration::from_millis(500);
const RETRY_MAX: Duration = Duration::from_secs(30);
/// A report that has not shown up in the view is sent again after this.
const REPORT_AGAIN: Duration = Duration::from_secs(3);
/// Replicas that the view does not know are spoken of after this: the view may be catching up.
const ORPHAN_AFTER: Duration = Duration::from_secs(30);

/// What the partition layer needs to know to open a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaSpec {
    /// The partition.
    pub partition: PartitionId,
    /// The replica of it that lives here.
    pub replica: ReplicaId,
    /// The name of its topic, for logs.
    pub topic: String,
    /// The topic's settings.
    pub settings: TopicSettings,
}

/// Why a replica could not be opened or deleted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// Damage below the synced mark, or a missing directory: left alone (S2, S6).
    #[error("quarantined: {0}")]
    Quarantined(String),
    /// It may work later.
    #[error("{0}")]
    Retry(String),
}

/// What opens, deletes and speaks for replicas: the partition layer.
pub trait Host: Send + Sync + 'static {
    /// Opens a replica, making it if it has never existed.
    fn open(&self, spec: ReplicaSpec) -> BoxFuture<'static, Result<(), HostError>>;
    /// Gives an open replica the settings that its topic has now.
    fn adjust(&self, spec: &ReplicaSpec);
    /// Closes a replica if it is open and deletes what is stored of it. No error if there is none.
    fn delete(
        &self,
        partition: PartitionId,
        replica: ReplicaId,
    ) -> BoxFuture<'static, Result<(), HostError>>;
    /// Initializes the group of an open replica; no error if that has happened.
    fn initialize(
        &self,
        partition: PartitionId,
        members: BTreeMap<ReplicaId, BrokerId>,
    ) -> BoxFuture<'static, Result<(), HostError>>;
    /// Whether the open replica leads and has applied an entry of its own term.
    fn leads(&self, partition: PartitionId) -> bool;
    /// What is stored here, whether open or not; `__cluster` not included.
    fn stored(&self) -> BTreeMap<ReplicaId, PartitionId>;
}

/// Carries reports to the leader of `__cluster`.
pub trait Reports: Send + Sync + 'static {
    /// Proposes a command; the outcome shows in the view.
    fn report(&self, command: Command) -> BoxFuture<'static, Result<(), String>>;
}

/// How far this broker is, for readiness and metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Replicas that should be open.
    pub desired: usize,
    /// Of these, how many are.
    pub open: usize,
    /// Replicas that are left alone, and why.
    pub quarantined: BTreeMap<ReplicaId, (PartitionId, String)>,
    /// Replicas that did not open and will be tried again.
    pub failed: BTreeMap<ReplicaId, (PartitionId, String)>,
    /// Replicas stored here that the cluster does not know: kept (S22).
    pub orphans: BTreeSet<ReplicaId>,
}

impl Progress {
    /// Whether every replica that can be open is.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.open + self.quarantined.len() >= self.desired
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Working,
    Open {
        since: Instant,
        initialized: bool,
        settings: TopicSettings,
    },
    Failed {
        until: Instant,
    },
    Quarantined,
    Deleted,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Action {
    Open(ReplicaSpec),
    Adjust(ReplicaSpec),
    Delete(PartitionId, ReplicaId),
    Initialize(PartitionId, ReplicaId, BTreeMap<ReplicaId, BrokerId>),
}

/// What is to be done now, in the order of replica ids.
fn plan(
    own: BrokerId,
    view: &ClusterView,
    states: &BTreeMap<ReplicaId, State>,
    now: Instant,
) -> Vec<Action> {
    let mut actions = Vec::new();
    for (partition, spec_of, placement) in placements(view) {
        for (rank, assignment) in (0u32..).zip(&placement.replicas) {
            if assignment.broker != own {
                continue;
            }
            let replica = assignment.replica;
            match states.get(&replica) {
                None => actions.push(Action::Open(spec_of(replica))),
                Some(State::Failed { until }) if *until <= now => {
                    actions.push(Action::Open(spec_of(replica)));
                }
                Some(State::Open {
                    since,
                    initialized: false,
                    ..
                }) if !placement.born
                    && now >= *since + INITIALIZE_DELAY * rank
                    // S10: the first placement, whole, and only from within it.
                    && placement.first.iter().any(|first| first.replica == replica) =>
                {
                    let members = placement
                        .first
                        .iter()
                        .map(|a| (a.replica, a.broker))
                        .collect();
                    actions.push(Action::Initialize(partition, replica, members));
                }
                _ => {}
            }
            let settings = match states.get(&replica) {
                Some(State::Open { settings, .. }) => settings,
                _ => continue,
            };
            let spec = spec_of(replica);
            if spec.settings != *settings {
                actions.push(Action::Adjust(spec));
            }
        }
    }
    // S22: tombstones of replicas that live here, and nothing else.
    for tombstone in view.tombstones.values().filter(|t| t.broker == own) {
        let due = match states.get(&tombstone.replica) {
            Some(State::Working | State::Deleted) => false,
            Some(State::Failed { until }) => *until <= now,
            Some(State::Open { .. } | State::Quarantined) | None => true,
        };
        if due {
            actions.push(Action::Delete(tombstone.partition, tombstone.replica));
        }
    }
    actions
}

fn placements(
    view: &ClusterView,
) -> impl Iterator<Item = (PartitionId, impl Fn(ReplicaId) -> ReplicaSpec, &Placement)> {
    view.topics_by_id.values().flat_map(|topic| {
        (0u32..)
            .zip(&topic.partitions)
            .map(move |(number, placement)| {
                let partition = PartitionId {
                    topic: topic.id,
                    partition: number,
                };
                let spec_of = move |replica| ReplicaSpec {
                    partition,
                    replica,
                    topic: topic.name.clone(),
                    settings: topic.settings.clone(),
                };
                (partition, spec_of, placement)
            })
    })
}

type Outcome = (Action, Result<(), HostError>);

struct Reconciler<H, R> {
    own: BrokerId,
    host: H,
    reports: R,
    states: BTreeMap<ReplicaId, State>,
    partitions: BTreeMap<ReplicaId, PartitionId>,
    errors: BTreeMap<ReplicaId, String>,
    pauses: BTreeMap<ReplicaId, Duration>,
    working: FuturesUnordered<BoxFuture<'static, Outcome>>,
    reporting: FuturesUnordered<BoxFuture<'static, Result<(), String>>>,
    reported: BTreeMap<ReplicaId, Instant>,
    orphans: BTreeMap<ReplicaId, Instant>,
    progress: watch::Sender<Progress>,
}

/// Runs until `view` closes. `poke` wakes it up when leadership may have changed.
pub async fn run<H: Host, R: Reports>(
    own: BrokerId,
    host: H,
    reports: R,
    mut view: watch::Receiver<Arc<ClusterView>>,
    mut poke: watch::Receiver<u64>,
    progress: watch::Sender<Progress>,
) {
    let mut reconciler = Reconciler {
        own,
        host,
        reports,
        states: BTreeMap::new(),
        partitions: BTreeMap::new(),
        errors: BTreeMap::new(),
        pauses: BTreeMap::new(),
        working: FuturesUnordered::new(),
        reporting: FuturesUnordered::new(),
        reported: BTreeMap::new(),
        orphans: BTreeMap::new(),
        progress,
    };
    loop {
        let now = Arc::clone(&view.borrow_and_update());
        let unfinished = reconciler.step(&now);
        let pace = async {
            if unfinished {
                tokio::time::sleep(PACE).await;
            } else {
                std::future::pending().await
            }
        };
        tokio::select! {
            changed = view.changed() => {
                if changed.is_err() {
                    return;
                }
            }
            Ok(()) = poke.changed() => {}
            Some((action, outcome)) = reconciler.working.next() => {
                reconciler.finished(&action, outcome);
            }
            Some(outcome) = reconciler.reporting.next() => {
                if let Err(error) = outcome {
                    tracing::debug!(%error, "a report to the controller failed");
                }
            }
            () = pace => {}
        }
    }
}

impl<H: Host, R: Reports> Reconciler<H, R> {
    /// Starts what is due; `true` if something is unfinished.
    fn step(&mut self, view: &ClusterView) -> bool {
        if view.cluster_id.is_none() {
            return false;
        }
        let now = Instant::now();
        self.forget(view);
        let actions = plan(self.own, view, &self.states, now);
        let room = WORKING_MAX.saturating_sub(self.working.len());
        let waiting = actions.len() > room;
        for action in actions.into_iter().take(room) {
            self.start(action);
        }
        let unreported = self.report(view, now);
        let orphaned = self.look_for_orphans(view, now);
        let settled = self.publish(view);
        waiting || unreported || orphaned || !settled || self.is_retrying()
    }

    fn is_retrying(&self) -> bool {
        self.states
            .values()
            .any(|state| matches!(state, State::Failed { .. }))
    }

    /// Forgets replicas whose deletion the cluster has noted.
    fn forget(&mut self, view: &ClusterView) {
        self.states.retain(|replica, state| {
            *state != State::Deleted || view.tombstones.contains_key(replica)
        });
    }

    fn start(&mut self, action: Action) {
        let work = match &action {
            Action::Adjust(spec) => {
                self.host.adjust(spec);
                if let Some(State::Open { settings, .. }) = self.states.get_mut(&spec.replica) {
                    *settings = spec.settings.clone();
                }
                return;
            }
            Action::Open(spec) => {
                self.partitions.insert(spec.replica, spec.partition);
                self.states.insert(spec.replica, State::Working);
                self.host.open(spec.clone())
            }
            Action::Delete(partition, replica) => {
                self.partitions.insert(*replica, *partition);
                self.states.insert(*replica, State::Working);
                self.host.delete(*partition, *replica)
            }
            Action::Initialize(partition, replica, members) => {
                if let Some(State::Open { initialized, .. }) = self.states.get_mut(replica) {
                    *initialized = true;
                }
                self.host.initialize(*partition, members.clone())
            }
        };
        self.working.push(Box::pin(async move {
            let outcome = work.await;
            (action, outcome)
        }));
    }

    fn finished(&mut self, action: &Action, outcome: Result<(), HostError>) {
        let (replica, done) = match action {
            Action::Open(spec) => {
                let opened = State::Open {
                    since: Instant::now(),
                    initialized: false,
                    settings: spec.settings.clone(),
                };
                (spec.replica, opened)
            }
            // Done when it was started.
            Action::Adjust(_) => return,
            Action::Delete(_, replica) => (*replica, State::Deleted),
            Action::Initialize(partition, replica, _) => {
                if let Err(error) = outcome {
                    tracing::warn!(%partition, %replica, %error, "a group was not initialized");
                    if let Some(State::Open {
                        initialized, since, ..
                    }) = self.states.get_mut(replica)
                    {
                        *initialized = false;
                        *since = Instant::now() + RETRY_FIRST;
                    }
                }
                return;
            }
        };
        let state = match outcome {
            Ok(()) => {
                self.errors.remove(&replica);
                self.pauses.remove(&replica);
                done
            }
            Err(error) => self.failed(action, replica, error),
        };
        self.states.insert(replica, state);
    }

    fn failed(&mut self, action: &Action, replica: ReplicaId, error: HostError) -> State {
        let partition = self.partitions.get(&replica).copied();
        let known = self.errors.insert(replica, error.to_string());
        let label = partition.map(|p| p.to_string()).unwrap_or_default();
        match error {
            HostError::Quarantined(reason) => {
                tracing::error!(
                    partition = label, %replica, %reason,
                    "a replica is quarantined: it holds damage and does not serve"
                );
                State::Quarantined
            }
            HostError::Retry(reason) => {
                if known.as_ref() != Some(&reason) {
                    tracing::warn!(partition = label, %replica, %reason, ?action, "will be tried again");
                }
                let pause = self.pauses.entry(replica).or_insert(RETRY_FIRST);
                let until = Instant::now() + *pause;
                *pause = (*pause * 2).min(RETRY_MAX);
                State::Failed { until }
            }
        }
    }

    /// Reports births and deletions; `true` if some don't show in the view yet.
    fn report(&mut self, view: &ClusterView, now: Instant) -> bool {
        self.reported.retain(|_, at| now < *at + REPORT_AGAIN);
        let mut unborn = false;
        let mut born = Vec::new();
        for (partition, _, placement) in placements(view).filter(|(.., p)| !p.born) {
            let here = placement.replicas.iter().find(|a| a.broker == self.own);
            let Some(assignment) = here else { continue };
            if !matches!(
                self.states.get(&assignment.replica),
                Some(State::Open { .. })
            ) {
                continue;
            }
            unborn = true;
            if self.host.leads(partition) && !self.reported.contains_key(&assignment.replica) {
                self.reported.insert(assignment.replica, now);
                born.push(PartitionBorn {
                    topic_id: partition.topic.to_wire(),
                    partition: partition.partition,
                });
            }
        }
        let mut deleted = Vec::new();
        let mut unreported = false;
        for tombstone in view.tombstones.values() {
            if self.states.get(&tombstone.replica) != Some(&State::Deleted) {
                continue;
            }
            unreported = true;
            if let Entry::Vacant(unsaid) = self.reported.entry(tombstone.replica) {
                unsaid.insert(now);
                deleted.push(ReplicaDeleted {
                    topic_id: tombstone.partition.topic.to_wire(),
                    partition: tombstone.partition.partition,
                    replica_id: tombstone.replica.0,
                });
            }
        }
        if !born.is_empty() {
            let command = Command::PartitionsBorn(PartitionsBorn { partitions: born });
            self.reporting.push(self.reports.report(command));
        }
        if !deleted.is_empty() {
            let command = Command::ReplicasDeleted(ReplicasDeleted { replicas: deleted });
            self.reporting.push(self.reports.report(command));
        }
        unborn || unreported
    }

    /// S22: what the cluster does not know is kept, and said; `true` while it is too early to say.
    fn look_for_orphans(&mut self, view: &ClusterView, now: Instant) -> bool {
        let mut stored = self.host.stored();
        for (_, _, placement) in placements(view) {
            for assignment in placement.replicas.iter().filter(|a| a.broker == self.own) {
                stored.remove(&assignment.replica);
            }
        }
        stored.retain(|replica, _| !view.tombstones.contains_key(replica));
        stored.retain(|replica, _| !self.states.contains_key(replica));
        self.orphans
            .retain(|replica, _| stored.contains_key(replica));
        let mut early = false;
        for (replica, partition) in stored {
            let first_seen = *self.orphans.entry(replica).or_insert(now);
            if now < first_seen + ORPHAN_AFTER {
                early = true;
            } else if !self.progress.borrow().orphans.contains(&replica) {
                tracing::warn!(
                    %partition, %replica,
                    "the cluster does not know this replica; its files are kept"
                );
            }
        }
        early
    }

    /// Publishes how far this broker is; `true` if it is settled.
    fn publish(&self, view: &ClusterView) -> bool {
        let mut progress = Progress::default();
        for (partition, _, placement) in placements(view) {
            for assignment in placement.replicas.iter().filter(|a| a.broker == self.own) {
                progress.desired += 1;
                let replica = assignment.replica;
                let error = || {
                    let text = self.errors.get(&replica).cloned().unwrap_or_default();
                    (partition, text)
                };
                match self.states.get(&replica) {
                    Some(State::Open { .. }) => progress.open += 1,
                    Some(State::Quarantined) => {
                        progress.quarantined.insert(replica, error());
                    }
                    Some(State::Failed { .. }) => {
                        progress.failed.insert(replica, error());
                    }
                    _ => {}
                }
            }
        }
        let now = Instant::now();
        progress.orphans = self
            .orphans
            .iter()
            .filter(|(_, since)| now >= **since + ORPHAN_AFTER)
            .map(|(replica, _)| *replica)
            .collect();
        let settled = progress.is_settled();
        self.progress.send_if_modified(|published| {
            let differs = *published != progress;
            *published = progress;
            differs
        });
        settled
    }
}

#[cfg(test)]
#[path = "reconciler_tests.rs"]
mod tests;
