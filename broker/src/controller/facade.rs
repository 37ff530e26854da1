//! The controller of one broker, put together.
//!
//! ```text
//!  start ──> forming ──────────> running ─────────────────────────────> shutdown
//!            Former::run         __cluster replica, gossip, contact,     tasks end, gossip says
//!            (peer service       registration, duties, reconciler,       good-bye
//!             answers)           leader hints
//! ```
//!
//! Everything runs in tasks of one set that ends with [`Controller::shutdown`]; a task that
//! panics makes the broker stop ([`Controller::watch_fatal`]).

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use qute_proto::ids::{BrokerId, PartitionId};
use qute_proto::internal::BrokerAddress;
use qute_proto::v1::{self, BrokerState};
use tokio::net::UdpSocket;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use super::book::AddressBook;
use super::calls::Calls;
use super::deleted::DeletedTopics;
use super::forming::driver::{FormError, Former, Records};
use super::groups_topic;
use super::hosting::Keeper;
use super::leaders::Leaders;
use super::proposer::{Proposer, error};
use super::reconciler::Progress;
use super::running;
use super::state::ClusterState;
use super::topics;
use super::view::{ClusterView, Topic};
use crate::env::Clock;
use crate::gossip::{Gossip, Liveness, Members};
use crate::partition::directory::{LeaderDirectory, LeaderHint, Presence};
use crate::raft::{GroupHandle, Groups, Peers};
use crate::storage::Store;

/// A broker that gossip has not heard of counts as dead after this.
const GOSSIP_GRACE: Duration = Duration::from_secs(5);
/// How long a metadata request waits for an index.
const INDEX_DEADLINE: Duration = Duration::from_secs(10);
/// Tasks that do not end are left behind after this.
const SHUTDOWN_DEADLINE: Duration = Duration::from_secs(3);
/// What making `__groups` may take beyond its deadline.
const ENSURE_MARGIN: Duration = Duration::from_millis(500);
/// Replicas of one kind that the reasons for not being ready name.
const REASONS_MAX: usize = 3;

/// Who this broker is and whom it looks for.
#[derive(Clone, Debug, Default)]
pub struct ControllerConfig {
    /// The name people see.
    pub name: String,
    /// Where clients reach this broker, `host:port`.
    pub client_address: String,
    /// Where brokers reach it over TCP.
    pub peer_address: String,
    /// Where gossip reaches it over UDP.
    pub gossip_address: String,
    /// Failure domain; may be empty.
    pub rack: String,
    /// TCP addresses of peers.
    pub seeds: Vec<String>,
    /// How many brokers found the cluster; 0: join only (with seeds).
    pub expect: u32,
}

/// What the controller stands on.
pub struct Foundation {
    /// The data directory.
    pub store: Store,
    /// The other brokers.
    pub peers: Peers,
    /// The Raft groups.
    pub groups: Groups,
    /// Keeps the replicas of records.
    pub records: Arc<dyn Keeper>,
    /// Keeps the replicas of `__groups`.
    pub group_replicas: Arc<dyn Keeper>,
    /// Bound already.
    pub gossip_socket: UdpSocket,
    /// Time.
    pub clock: Arc<dyn Clock>,
}

/// The controller could not start; the text says what to do.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct StartError(#[from] FormError);

pub(super) struct Inner {
    pub(super) me: BrokerAddress,
    pub(super) started: Instant,
    pub(super) peers: Peers,
    pub(super) groups: Groups,
    pub(super) store: Store,
    pub(super) records: Arc<dyn Keeper>,
    pub(super) group_replicas: Arc<dyn Keeper>,
    pub(super) book: Arc<AddressBook>,
    pub(super) calls: Arc<Calls>,
    pub(super) former: Arc<Former>,
    pub(super) proposer: Arc<Proposer>,
    pub(super) leaders: Arc<Leaders>,
    pub(super) deleted: DeletedTopics,
    // One call at a time makes `__groups`: a burst of first members must not make a burst of commands.
    pub(super) making_groups: tokio::sync::Mutex<()>,
    pub(super) seeds: Vec<String>,
    pub(super) view: watch::Receiver<Arc<ClusterView>>,
    pub(super) cluster: watch::Sender<Option<GroupHandle>>,
    pub(super) members: watch::Sender<Arc<Members>>,
    pub(super) progress: watch::Sender<Progress>,
    pub(super) fatal: watch::Sender<Option<String>>,
    // Taken once: by the task that opens the replica, and by shutdown.
    pub(super) machine: Mutex<Option<ClusterState>>,
    pub(super) gossip_socket: Mutex<Option<UdpSocket>>,
    pub(super) gossip: Mutex<Option<Gossip>>,
    pub(super) stop: CancellationToken,
    pub(super) tasks: TaskTracker,
}

/// The controller of one broker. Cheap to clone; all clones are the same.
#[derive(Clone)]
pub struct Controller {
    inner: Arc<Inner>,
    // The tasks share `inner`, not this: they end with the last clone of the controller.
    _running: Arc<DropGuard>,
}

impl Controller {
    /// Reads what is stored about the cluster and starts forming, joining or running. Returns at
    /// once: the gRPC listener must serve the peer service for anything to come of it.
    ///
    /// # Errors
    /// The stored record can't be read.
    pub fn start(config: ControllerConfig, base: Foundation) -> Result<Self, StartError> {
        let identity = base.peers.identity();
        let me = BrokerAddress {
            broker_id: identity.broker.0,
            name: config.name,
            client_address: config.client_address,
            peer_address: config.peer_address,
            gossip_address: config.gossip_address,
            rack: config.rack,
            boot: identity.boot,
            process_id: identity.process,
        };
        let book = Arc::new(AddressBook::new(identity.broker));
        let calls = Arc::new(Calls::default());
        let former = Former::open(
            me.clone(),
            base.peers.hello(),
            config.seeds.clone(),
            config.expect,
            Arc::new(StoredRecords(base.store.clone())),
            Arc::clone(&calls),
            Arc::clone(&book),
        )?;
        let (machine, view) = ClusterState::new();
        let cluster = watch::Sender::new(None);
        let proposer = Proposer::new(
            identity.broker,
            base.peers.clone(),
            Arc::clone(&calls),
            Arc::clone(&book),
            base.clock,
            cluster.subscribe(),
        );
        let stop = CancellationToken::new();
        let controller = Self {
            _running: Arc::new(stop.clone().drop_guard()),
            inner: Arc::new(Inner {
                me,
                started: Instant::now(),
                leaders: Arc::new(Leaders::new(identity.broker)),
                deleted: DeletedTopics::default(),
                peers: base.peers,
                groups: base.groups,
                store: base.store,
                records: base.records,
                group_replicas: base.group_replicas,
                book,
                calls,
                former: Arc::new(former),
                proposer: Arc::new(proposer),
                making_groups: tokio::sync::Mutex::default(),
                seeds: config.seeds,
                view,
                cluster,
                members: watch::Sender::new(Arc::default()),
                progress: watch::Sender::new(Progress::default()),
                fatal: watch::Sender::new(None),
                machine: Mutex::new(Some(machine)),
                gossip_socket: Mutex::new(Some(base.gossip_socket)),
                gossip: Mutex::new(None),
                stop,
                tasks: TaskTracker::new(),
            }),
        };
        spawn(
            &controller.inner,
            running::run(Arc::clone(&controller.inner)),
        );
        Ok(controller)
    }

    /// Set when the broker can't go on, with what to tell the operator.
    #[must_use]
    pub fn watch_fatal(&self) -> watch::Receiver<Option<String>> {
        self.inner.fatal.subscribe()
    }

    /// Why the broker isn't ready; empty: it is.
    #[must_use]
    pub fn waits(&self) -> Vec<String> {
        let inner = &self.inner;
        if let Some(fatal) = &*inner.fatal.borrow() {
            return vec![fatal.clone()];
        }
        if inner.former.formed().borrow().is_none() {
            return vec![format!(
                "not part of a cluster yet: {}",
                inner.former.waiting()
            )];
        }
        let view = self.view();
        let mut waits = Vec::new();
        if self.controller().is_none() {
            waits.push("`__cluster` has no leader that this broker knows of".to_owned());
        }
        if !view.founders_registered() {
            waits.push("not every founding broker has registered itself yet".to_owned());
        }
        let registered = view
            .brokers
            .get(&inner.me_id())
            .is_some_and(|b| b.registered && b.boot == inner.me.boot);
        if !registered {
            waits.push("this broker has not registered itself yet".to_owned());
        }
        let progress = self.progress();
        if progress.open < progress.desired {
            waits.push(format!(
                "{} of {} replicas are open",
                progress.open, progress.desired
            ));
        }
        let named = |(partition, reason): &(PartitionId, String)| {
            format!("{}: {reason}", view.name_of(*partition))
        };
        waits.extend(progress.failed.values().take(REASONS_MAX).map(named));
        waits.extend(self.faults());
        waits
    }

    /// What of this broker needs a human: replicas that are quarantined (S7) or have stopped (S4),
    /// a few of each, why, and what to do.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let view = self.view();
        let progress = self.inner.progress.borrow();
        let quarantined = progress.quarantined.values().take(REASONS_MAX);
        let mut faults: Vec<String> = quarantined
            .map(|(partition, reason)| {
                format!(
                    "{}: {reason}; keep the directory, the partition's other replicas serve",
                    view.name_of(*partition)
                )
            })
            .collect();
        drop(progress);
        faults.extend(self.stopped().into_iter().take(REASONS_MAX));
        faults
    }

    /// Replicas that have stopped for good in this process (S4), why, and what to do.
    #[must_use]
    pub fn stopped(&self) -> Vec<String> {
        let view = self.view();
        let all = self.inner.groups.all();
        let stopped = all.values().filter_map(|handle| {
            let reason = handle.stopped()?;
            Some(format!(
                "replica {} of {} has stopped: {reason}; free space or replace the disk, \
                 then restart this broker",
                handle.replica(),
                view.name_of(handle.id().partition),
            ))
        });
        stopped.collect()
    }

    /// How far the replicas of this broker are.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let mut progress = self.inner.progress.borrow().clone();
        // S4: one that has stopped is not open, though nobody closed it.
        let stopped = self.inner.groups.all().into_values().filter(|handle| {
            handle.id().partition != PartitionId::CLUSTER && handle.stopped().is_some()
        });
        progress.open = progress.open.saturating_sub(stopped.count());
        progress
    }

    /// The present view of the cluster.
    #[must_use]
    pub fn view(&self) -> Arc<ClusterView> {
        Arc::clone(&self.inner.view.borrow())
    }

    /// Follows the view.
    #[must_use]
    pub fn watch_view(&self) -> watch::Receiver<Arc<ClusterView>> {
        self.inner.view.clone()
    }

    /// Follows gossip.
    #[must_use]
    pub fn watch_members(&self) -> watch::Receiver<Arc<Members>> {
        self.inner.members.subscribe()
    }

    /// Who leads what.
    #[must_use]
    pub fn leaders(&self) -> &Arc<Leaders> {
        &self.inner.leaders
    }

    /// Addresses heard of.
    #[must_use]
    pub fn book(&self) -> &Arc<AddressBook> {
        &self.inner.book
    }

    /// This broker as it announces itself.
    #[must_use]
    pub fn me(&self) -> &BrokerAddress {
        &self.inner.me
    }

    /// Forming and joining.
    #[must_use]
    pub fn former(&self) -> &Arc<Former> {
        &self.inner.former
    }

    /// Commands to `__cluster`.
    #[must_use]
    pub fn proposer(&self) -> &Arc<Proposer> {
        &self.inner.proposer
    }

    /// The other brokers.
    #[must_use]
    pub fn peers(&self) -> &Peers {
        &self.inner.peers
    }

    /// The Raft groups.
    #[must_use]
    pub fn groups(&self) -> &Groups {
        &self.inner.groups
    }

    /// The leader of `__cluster`, unless it is known to be dead.
    #[must_use]
    pub fn controller(&self) -> Option<v1::LeaderHint> {
        let mut hint = self.inner.proposer.controller()?;
        if hint.broker_id == self.inner.me.broker_id {
            hint.address.clone_from(&self.inner.me.client_address);
        }
        let dead = self.state(BrokerId(hint.broker_id)) == BrokerState::Dead;
        (!dead).then_some(hint)
    }

    /// Whether a broker is there.
    #[must_use]
    pub fn state(&self, broker: BrokerId) -> BrokerState {
        self.inner.state(broker)
    }

    /// Waits until this broker has applied a `__cluster` index; `false` after a while.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn wait_index(&self, index: u64) -> bool {
        let mut view = self.watch_view();
        let reached = view.wait_for(|view| view.index >= index);
        matches!(
            tokio::time::timeout(INDEX_DEADLINE, reached).await,
            Ok(Ok(_))
        )
    }

    /// Creates a topic. See [`topics::create`].
    ///
    /// # Errors
    /// Typed.
    pub async fn create_topic(
        &self,
        request: v1::CreateTopicRequest,
    ) -> Result<(Arc<Topic>, u64), v1::Error> {
        let (proposer, view) = (&self.inner.proposer, self.watch_view());
        topics::create(request, proposer, view, self.alive()).await
    }

    /// Raises the number of a topic's partitions. See [`topics::add_partitions`].
    ///
    /// # Errors
    /// Typed.
    pub async fn add_partitions(
        &self,
        request: v1::AddPartitionsRequest,
    ) -> Result<(Arc<Topic>, u64), v1::Error> {
        let (proposer, view) = (&self.inner.proposer, self.watch_view());
        topics::add_partitions(request, proposer, view, self.alive()).await
    }

    /// Changes a topic's settings. See [`topics::alter`].
    ///
    /// # Errors
    /// Typed.
    pub async fn alter_topic(
        &self,
        request: v1::AlterTopicRequest,
    ) -> Result<(Arc<Topic>, u64), v1::Error> {
        topics::alter(request, &self.inner.proposer, self.watch_view()).await
    }

    /// Makes `__groups` if there has never been a group, through the leader of `__cluster` wherever
    /// it is; it is in this broker's view on return. Gives the `__cluster` index at which it is known
    /// to exist.
    ///
    /// # Errors
    /// `NOT_READY` after `deadline`, or what kept it from being made.
    ///
    /// # Cancel safety
    /// A dropped call may have made it.
    pub async fn ensure_groups_topic(&self, deadline: Duration) -> Result<u64, v1::Error> {
        let end = Instant::now() + deadline;
        let inner = &self.inner;
        let making = async {
            let _one = inner.making_groups.lock().await;
            let left = end.saturating_duration_since(Instant::now());
            groups_topic::ensure(&inner.proposer, self.watch_view(), self.alive(), left).await
        };
        // A margin for the answer that says why it was not made.
        let given_up = end + ENSURE_MARGIN;
        let made = tokio::time::timeout_at(given_up, making).await;
        made.unwrap_or_else(|_| {
            let text = "`__groups` could not be made in time; try again";
            Err(error(v1::ErrorCode::NotReady, text))
        })
    }

    /// Makes `__groups` as the leader of `__cluster`. See [`groups_topic::create_here`].
    ///
    /// # Errors
    /// Typed.
    pub async fn create_groups_topic(&self) -> Result<u64, v1::Error> {
        let mut view = self.watch_view();
        groups_topic::create_here(&self.inner.proposer, &mut view, self.alive()).await
    }

    fn alive(&self) -> impl Fn(BrokerId) -> bool + '_ {
        |broker| self.state(broker) != BrokerState::Dead
    }

    /// Deletes a topic. See [`topics::delete`].
    ///
    /// # Errors
    /// Typed.
    pub async fn delete_topic(&self, request: v1::DeleteTopicRequest) -> Result<u64, v1::Error> {
        topics::delete(request, &self.inner.proposer, self.watch_view()).await
    }

    /// Who leads partitions elsewhere, for the partition layer's services.
    #[must_use]
    pub fn directory(&self) -> Arc<dyn LeaderDirectory> {
        Arc::new(Directory(self.clone()))
    }

    /// Ends everything that opens or changes anything, and tells the others by gossip that this
    /// broker goes. To be called after the listeners have stopped and before the replicas, the
    /// groups, the peers and the store are shut down, in this order.
    pub async fn shutdown(&self) {
        // A copy that was refused must not say goodbye in the name of its original (S23); a fault
        // is noticed soon enough without a word.
        let says_goodbye = self.inner.fatal.borrow().is_none();
        self.end(says_goodbye).await;
    }

    /// As [`shutdown`](Self::shutdown), without a word to the others.
    pub async fn abort(&self) {
        self.end(false).await;
    }

    async fn end(&self, says_goodbye: bool) {
        let inner = &self.inner;
        inner.stop.cancel();
        inner.tasks.close();
        let gossip = inner.gossip.lock().take();
        let ended = async {
            match gossip {
                Some(gossip) if says_goodbye => gossip.leave().await,
                Some(gossip) => gossip.abort().await,
                None => {}
            }
            inner.tasks.wait().await;
            // One that was about to be started.
            drop(inner.gossip.lock().take());
            drop(inner.gossip_socket.lock().take());
        };
        if tokio::time::timeout(SHUTDOWN_DEADLINE, ended)
            .await
            .is_err()
        {
            tracing::warn!("the controller's tasks did not end in time");
        }
    }
}

impl Inner {
    pub(super) fn me_id(&self) -> BrokerId {
        BrokerId(self.me.broker_id)
    }

    fn state(&self, broker: BrokerId) -> BrokerState {
        if broker == self.me_id() {
            return BrokerState::Alive;
        }
        let gossip = self
            .members
            .borrow()
            .get(&broker)
            .map(|member| member.liveness);
        let is_new_here = self.started.elapsed() < GOSSIP_GRACE;
        judge(gossip, self.peers.is_connected(broker), is_new_here)
    }
}

/// What gossip says of a broker, held against the connection to it: lost datagrams alone do not
/// make a broker dead that still answers over TCP.
fn judge(gossip: Option<Liveness>, is_connected: bool, is_new_here: bool) -> BrokerState {
    match gossip {
        Some(Liveness::Alive) => BrokerState::Alive,
        Some(Liveness::Suspect) => BrokerState::Suspect,
        Some(Liveness::Dead) if is_connected => BrokerState::Suspect,
        Some(Liveness::Dead) => BrokerState::Dead,
        None if is_connected => BrokerState::Alive,
        None if is_new_here => BrokerState::Suspect,
        None => BrokerState::Dead,
    }
}

pub(super) fn spawn(inner: &Arc<Inner>, work: impl Future<Output = ()> + Send + 'static) {
    let stop = inner.stop.clone();
    let guarded = Arc::downgrade(inner);
    let task = tokio::spawn(async move {
        tokio::select! {
            () = work => {}
            () = stop.cancelled() => {}
        }
    });
    // A task that panics surfaces.
    inner.tasks.spawn(async move {
        if let Err(error) = task.await
            && error.is_panic()
            && let Some(inner) = guarded.upgrade()
        {
            let text = format!("a task of the controller has panicked: {error}");
            inner.fatal.send_replace(Some(text));
        }
    });
}

struct StoredRecords(Store);

impl Records for StoredRecords {
    fn get(&self, name: &str) -> Result<Option<Bytes>, String> {
        Ok(self.0.get_blob(name))
    }

    fn put(&self, name: &'static str, bytes: Bytes) -> BoxFuture<'_, Result<(), String>> {
        let store = self.0.clone();
        Box::pin(async move {
            // It syncs.
            tokio::task::spawn_blocking(move || store.put_blob(name, bytes))
                .await
                .map_err(|error| error.to_string())?
                .map_err(|error| error.to_string())
        })
    }
}

/// What the partition layer asks about partitions that are led elsewhere.
struct Directory(Controller);

impl LeaderDirectory for Directory {
    fn leader(&self, partition: PartitionId) -> Option<LeaderHint> {
        let known = self.0.inner.leaders.get(partition)?;
        let broker = known.broker?;
        let address = if broker == self.0.inner.me_id() {
            self.0.inner.me.client_address.clone()
        } else {
            self.0
                .inner
                .book
                .get(broker)
                .map(|b| b.client_address)
                .unwrap_or_default()
        };
        Some(LeaderHint {
            broker,
            leader_epoch: known.term,
            address,
        })
    }

    fn presence(&self, partition: PartitionId) -> Presence {
        let view = self.0.inner.view.borrow();
        match view.topics_by_id.get(&partition.topic) {
            None => match self.0.inner.deleted.get(partition.topic) {
                Some(name) => Presence::Deleted {
                    made_again: name
                        .as_ref()
                        .is_some_and(|name| view.topics.contains_key(name)),
                    name,
                },
                // A view may be behind: only the confirmed leader of `__cluster` has the last
                // word, and clients ask it for metadata.
                None => Presence::UnknownTopic {
                    authoritative: false,
                },
            },
            Some(_) if view.placement(partition).is_some() => Presence::Exists,
            Some(_) => Presence::UnknownPartition,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connected_broker_is_not_dead_because_gossip_says_so() {
        assert_eq!(
            judge(Some(Liveness::Dead), true, false),
            BrokerState::Suspect
        );
        assert_eq!(judge(Some(Liveness::Dead), false, true), BrokerState::Dead);
        assert_eq!(judge(None, true, false), BrokerState::Alive);
        assert_eq!(judge(None, false, true), BrokerState::Suspect);
        assert_eq!(judge(None, false, false), BrokerState::Dead);
    }
}
