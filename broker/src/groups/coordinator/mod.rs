//! Coordinators: one for each partition of `__groups` that this broker leads.
//!
//! ```text
//!   streams and calls (api)                          applied state
//!        | join, heartbeat, commit ...                    | changed groups
//!        v                                                v
//!   Coordinator <---------------------------------- driver task -----> confirm rounds (S26)
//!        | commands, bound to the term                    | ticks
//!        v                                                v
//!   the replica's Raft group                        expiries, whom to ask for an assignment
//! ```
//!
//! | module | holds |
//! | --- | --- |
//! | [`sessions`] | who is alive: leases, deadlines, waiting joins; pure |
//! | [`assigner`] | who computes the assignment, and when; pure |
//! | [`steady`] | a clock that does not count pauses |
//! | [`lead`] | the coordinator of one partition in one term |
//! | [`member`] | joining, and what a member does on its session |
//! | [`mailbox`] | what a session's stream is to be told |

pub mod assigner;
mod driver;
pub mod lead;
pub mod mailbox;
pub mod member;
mod office;
mod offsets;
pub mod sessions;
pub mod steady;
mod upkeep;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use qute_proto::v1::{self, ErrorCode};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use lead::Coordinator;
pub use member::{Member, Seat};
pub use office::Limits;

use super::registry::{GroupReplicas, partition_id};
use super::replica::{self, GroupReplica};
use super::state::Totals;
use crate::controller::proposer::error;
use crate::controller::view::ClusterView;
use crate::env::Clock;
use crate::partition::directory::LeaderDirectory;
use crate::partition::hosted::Hosted;
use office::Office;

/// How long a call waits for a coordinator that has been elected to begin.
const START_WITHIN: Duration = Duration::from_secs(2);

const AFTER_A_TERM: Duration = Duration::from_millis(20);

/// The coordinators of one broker. Cheap to clone.
#[derive(Clone)]
pub struct Coordinators {
    replicas: GroupReplicas,
    office: Arc<Office>,
    view: watch::Receiver<Arc<ClusterView>>,
    stop: CancellationToken,
    tasks: TaskTracker,
    fatal: watch::Sender<Option<String>>,
}

impl Coordinators {
    /// Follows the replicas of `__groups` on this broker: wherever one leads, a coordinator runs.
    #[must_use]
    pub fn start(
        replicas: GroupReplicas,
        directory: Arc<dyn LeaderDirectory>,
        view: watch::Receiver<Arc<ClusterView>>,
        clock: Arc<dyn Clock>,
        limits: Limits,
    ) -> Self {
        let coordinators = Self {
            replicas,
            office: Arc::new(Office {
                limits,
                directory,
                clock,
                led: watch::Sender::new(BTreeMap::new()),
            }),
            view,
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
            fatal: watch::Sender::new(None),
        };
        let following = coordinators.clone();
        coordinators.spawn(async move { following.follow_all().await });
        coordinators
    }

    /// What they allow.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.office.limits
    }

    /// The coordinator of a partition of `__groups`.
    ///
    /// # Errors
    /// `NOT_LEADER` with a hint; `NOT_READY` while it is starting; `REPLICA_QUARANTINED`.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn get(&self, partition: u32) -> Result<Arc<Coordinator>, v1::Error> {
        if let Some(found) = self.led(partition) {
            return Ok(found);
        }
        let refused = |refused| Err(self.office.refusal(&refused, partition_id(partition)));
        let replica = match self.replicas.serving(partition) {
            Ok(replica) => replica,
            Err(error) => return refused(error),
        };
        if let Err(error) = replica.wait_serving(START_WITHIN).await {
            return refused(error);
        }
        let mut led = self.office.led.subscribe();
        let started = led.wait_for(|led| led.get(&partition).is_some_and(|it| it.is_serving()));
        let started = tokio::time::timeout(START_WITHIN, started).await;
        match started
            .ok()
            .and_then(Result::ok)
            .and_then(|led| led.get(&partition).cloned())
        {
            Some(found) => Ok(found),
            None => refused(replica::Error::NotReady),
        }
    }

    fn led(&self, partition: u32) -> Option<Arc<Coordinator>> {
        let led = self.office.led.borrow();
        led.get(&partition).filter(|it| it.is_serving()).cloned()
    }

    /// Who leads a partition of `__groups`, if that is known.
    #[must_use]
    pub fn hint(&self, partition: u32) -> Option<v1::LeaderHint> {
        self.office.hint(partition_id(partition))
    }

    /// How much is coordinated here.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.office.totals()
    }

    /// How many members have a session here.
    #[must_use]
    pub fn sessions(&self) -> usize {
        let led = self.office.led.borrow();
        led.values().map(|it| it.sessions()).sum()
    }

    /// Set when the broker can't go on, with what to tell the operator.
    #[must_use]
    pub fn watch_fatal(&self) -> watch::Receiver<Option<String>> {
        self.fatal.subscribe()
    }

    /// Ends all of them: members are told to look elsewhere.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        let task = tokio::spawn(async move {
            tokio::select! {
                () = work => {}
                () = stop.cancelled() => {}
            }
        });
        // A task that panics surfaces.
        let fatal = self.fatal.clone();
        self.tasks.spawn(async move {
            if let Err(error) = task.await
                && error.is_panic()
            {
                let text = format!("a task that coordinates groups has panicked: {error}");
                fatal.send_replace(Some(text));
            }
        });
    }

    /// One task for each replica that is open.
    async fn follow_all(&self) {
        let mut changes = self.replicas.watch();
        let mut followed: HashMap<u32, Arc<GroupReplica>> = HashMap::new();
        loop {
            changes.borrow_and_update();
            let open = self.open_replicas();
            for (number, replica) in &open {
                let is_followed = followed
                    .get(number)
                    .is_some_and(|it| Arc::ptr_eq(it, replica));
                if !is_followed {
                    let (following, replica) = (self.clone(), Arc::clone(replica));
                    self.spawn(async move { following.follow(replica).await });
                }
            }
            followed = open;
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    fn open_replicas(&self) -> HashMap<u32, Arc<GroupReplica>> {
        let all = self.replicas.list().into_iter();
        let open = all.filter_map(|(number, hosted)| match hosted {
            Hosted::Open(replica) => Some((number, replica)),
            Hosted::Quarantined { .. } => None,
        });
        open.collect()
    }

    /// Coordinates whenever the replica leads, until it is closed.
    async fn follow(&self, replica: Arc<GroupReplica>) {
        let number = replica.partition().partition;
        let mut leadership = replica.group().watch_leadership();
        let mut applied = replica.group().watch_applied();
        loop {
            applied.borrow_and_update();
            if let Some(term) = replica.serving() {
                self.coordinate(number, &replica, term).await;
                // Raft may say a moment later that it leads no more; or it has been elected anew.
                tokio::time::sleep(AFTER_A_TERM).await;
                continue;
            }
            tokio::select! {
                () = replica.closed() => return,
                changed = leadership.changed() => if changed.is_none() {
                    return;
                },
                // Only an elected leader waits for what it has to apply.
                moved = applied.changed(), if leadership.current().is_local => if moved.is_err() {
                    return;
                },
            }
        }
    }

    async fn coordinate(&self, number: u32, replica: &Arc<GroupReplica>, term: u64) {
        let office = Arc::clone(&self.office);
        let coordinator = Arc::new(Coordinator::new(Arc::clone(replica), term, office));
        let reign = Reign {
            office: &self.office,
            number,
            coordinator: &coordinator,
        };
        tracing::info!(partition = number, term, "coordinating groups");
        let driving = async {
            tokio::select! {
                ended = driver::drive(&coordinator, || reign.begin()) => ended,
                () = upkeep::run(&coordinator, self.view.clone()) => coordinator.ended(),
            }
        };
        let ended = driving.await;
        coordinator.end(&ended);
        tracing::info!(partition = number, term, "coordinating groups no more");
    }
}

/// A coordinator that is to be found, for as long as this lives.
struct Reign<'a> {
    office: &'a Office,
    number: u32,
    coordinator: &'a Arc<Coordinator>,
}

impl Reign<'_> {
    fn begin(&self) {
        self.office.led.send_modify(|led| {
            led.insert(self.number, Arc::clone(self.coordinator));
        });
    }
}

impl Drop for Reign<'_> {
    fn drop(&mut self) {
        self.office.led.send_modify(|led| {
            let is_this = |it: &Arc<Coordinator>| Arc::ptr_eq(it, self.coordinator);
            if led.get(&self.number).is_some_and(is_this) {
                led.remove(&self.number);
            }
        });
        // The broker stops: nothing else has ended it.
        let text = "this broker is stopping: look for the coordinator anew";
        self.coordinator.end(&error(ErrorCode::NotReady, text));
    }
}
