//! The replicas that are open on this broker.
//!
//! Opening is where the safety rules of a start are kept, before openraft sees anything: a listed
//! replica without its files is quarantined, not made anew (S6); a log that ends below its
//! checkpoint is quarantined (S1); a restarted leader takes a new term (S8).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use openraft::{SnapshotPolicy, StepDownPolicy};
use parking_lot::RwLock;
use qute_proto::ids::ReplicaId;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::contact::Contact;
use super::cut;
use super::group::{self, GroupHandle};
use super::inbound::{Inbound, Receiving};
use super::log_store::LogStore;
use super::machine::Machine;
use super::network::Network;
use super::peers::Peers;
use super::state_machine::StateMachine;
use super::types::{GroupId, Raft};
use crate::storage::{self, LogConfig, ReplicaKey, Store};

/// A replica that is told to stop and does not is left behind after this.
const CLOSE_DEADLINE: Duration = Duration::from_secs(10);

/// Timing of all groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupsConfig {
    /// A leader's heartbeat.
    pub heartbeat_ms: u64,
    /// A follower that has heard nothing waits at least this long before it stands for election
    /// (after the leader's lease, which is `election_ms_max`).
    pub election_ms_min: u64,
    /// And at most this long.
    pub election_ms_max: u64,
}

impl GroupsConfig {
    /// A follower that has heard no leader for this long is cut off: one that is not has a new
    /// leader by then. Elections begin after the leader's lease and one election timeout.
    fn leader_lost_after(&self) -> Duration {
        Duration::from_millis(self.election_ms_max.saturating_mul(2))
    }
}

impl Default for GroupsConfig {
    fn default() -> Self {
        Self {
            heartbeat_ms: 150,
            election_ms_min: 500,
            election_ms_max: 1000,
        }
    }
}

/// What the log of a group is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogUse {
    /// It is the data. It is cut at the state machine's log start, when [`GroupHandle::cut_log`] is
    /// called.
    Records,
    /// Commands that nobody reads once a checkpoint covers them (`__cluster`, `__groups`): it is cut
    /// by itself, see `cut.rs`.
    Commands,
}

/// What to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupSpec {
    /// The group.
    pub id: GroupId,
    /// This broker's replica of it, handed out once (S9).
    pub replica: ReplicaId,
    /// Segment size and durability.
    pub log: LogConfig,
    /// What its log is for.
    pub log_use: LogUse,
}

/// A replica that did not open.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A replica of the group is open here already.
    #[error("group {group} is open as replica {replica}")]
    AlreadyOpen {
        /// The group.
        group: GroupId,
        /// The replica that is open.
        replica: ReplicaId,
    },
    /// Its files contradict what was promised. It is kept, not served, and reported (S1, S6, S7).
    #[error("replica {replica} of group {group} is quarantined: {reason}")]
    Quarantined {
        /// The group.
        group: GroupId,
        /// The replica.
        replica: ReplicaId,
        /// What was found.
        reason: String,
    },
    /// Storage refused.
    #[error(transparent)]
    Storage(#[from] storage::Error),
    /// openraft did not start.
    #[error("group {group} did not start: {reason}")]
    Raft {
        /// The group.
        group: GroupId,
        /// What openraft said.
        reason: String,
    },
    /// The timing makes no sense.
    #[error("raft timing: {0}")]
    Config(String),
}

/// No such replica here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum FindError {
    #[error("group {0} is not open here")]
    NotOpen(GroupId),
    // S9: a request for one identity never reaches another.
    #[error("replica {asked} is not here: group {group} is open as replica {open}")]
    OtherReplica {
        group: GroupId,
        asked: ReplicaId,
        open: ReplicaId,
    },
}

/// A replica that is open.
#[derive(Clone)]
pub(super) struct Open {
    pub(super) handle: GroupHandle,
    pub(super) inbound: Arc<Inbound>,
    // Cancelled when openraft has let go of the log and the state machine.
    closed: CancellationToken,
}

struct Inner {
    store: Store,
    peers: Peers,
    config: GroupsConfig,
    // Short: look-ups and inserts. Never held across an await.
    open: RwLock<HashMap<GroupId, Open>>,
}

/// The replicas that are open on this broker. Cheap to clone; all clones are the same.
#[derive(Clone)]
pub struct Groups {
    inner: Arc<Inner>,
}

impl Groups {
    /// None is open yet.
    #[must_use]
    pub fn new(store: Store, peers: Peers, config: GroupsConfig) -> Self {
        Self {
            inner: Arc::new(Inner {
                store,
                peers,
                config,
                open: RwLock::default(),
            }),
        }
    }

    /// The other brokers.
    #[must_use]
    pub fn peers(&self) -> &Peers {
        &self.inner.peers
    }

    /// Where the logs are.
    #[must_use]
    pub fn store(&self) -> &Store {
        &self.inner.store
    }

    /// Opens a replica: makes its log if the store does not list it, else recovers it, rebuilds
    /// the state and starts openraft. Entries up to the saved commit mark are applied on return.
    ///
    /// # Errors
    /// [`OpenError`]; the replica is then not open.
    pub async fn open(
        &self,
        spec: GroupSpec,
        state: impl StateMachine,
    ) -> Result<GroupHandle, OpenError> {
        self.refuse_open(spec.id)?;
        let raft_config = Arc::new(self.raft_config(spec.id, spec.log_use)?);
        let key = ReplicaKey {
            partition: spec.id.partition,
            replica: spec.replica,
        };
        let store = self.inner.store.clone();
        // S6: listed means recovered or quarantined, never made anew.
        let opened = tokio::task::spawn_blocking(move || {
            if store.replicas().contains(&key) {
                store.open_log(key, spec.log)
            } else {
                store.create_log(key, spec.log)
            }
        });
        let quarantined = |reason: String| OpenError::Quarantined {
            group: spec.id,
            replica: spec.replica,
            reason,
        };
        let stopped = |reason: String| OpenError::Raft {
            group: spec.id,
            reason,
        };
        let log = match opened.await.map_err(|error| stopped(error.to_string()))? {
            Ok(log) => log,
            Err(storage::Error::Quarantined { reason, .. }) => return Err(quarantined(reason)),
            Err(error) => return Err(error.into()),
        };

        let closed = CancellationToken::new();
        let guard = Some(Arc::new(closed.clone().drop_guard()));
        let recovered = {
            let (log, guard) = (Arc::clone(&log), guard.clone());
            let recover = move || Machine::recover(Box::new(state), log, spec.log_use, guard);
            tokio::task::spawn_blocking(recover)
        };
        let (machine, watched) = recovered
            .await
            .map_err(|error| stopped(error.to_string()))?
            .map_err(|unusable| quarantined(unusable.to_string()))?;
        let readable = Arc::downgrade(&log);
        let network = Network::new(self.inner.peers.clone(), spec.id, spec.replica.0, readable);
        let log_store = LogStore::new(Arc::clone(&log), guard.clone());
        // Built, then registered, then run: requests find it before it can stand for election.
        let raft = Raft::build(spec.replica.0, raft_config, network, log_store, machine)
            .await
            .map_err(|error| stopped(error.to_string()))?;

        let receiving: Arc<dyn Receiving> = Arc::clone(&log) as _;
        let contact = Arc::new(Contact::new());
        let inbound = Inbound::new(raft.clone(), receiving, Arc::clone(&contact), guard.clone());
        let cut_log = Arc::clone(&log);
        let handle = GroupHandle {
            inner: Arc::new(group::Inner {
                id: spec.id,
                replica: spec.replica,
                raft: raft.clone(),
                log,
                applied: watched.applied,
                contact,
                leader_lost_after: self.inner.config.leader_lost_after(),
                in_flight: Arc::new(Semaphore::new(group::IN_FLIGHT_BYTES_MAX)),
            }),
        };
        let open = Open {
            handle: handle.clone(),
            inbound,
            closed,
        };
        {
            let mut all = self.inner.open.write();
            if let Some(other) = all.get(&spec.id) {
                // Opened twice at once: the reconciler is the only one that opens.
                return Err(OpenError::AlreadyOpen {
                    group: spec.id,
                    replica: other.handle.replica(),
                });
            }
            all.insert(spec.id, open);
        }
        raft.run();
        if spec.log_use == LogUse::Commands {
            tokio::spawn(cut::run(raft, cut_log, watched.saved, guard));
        }
        Ok(handle)
    }

    /// Stops a replica and waits until openraft has let go of its log; it can be opened again once
    /// its handles are dropped too. `false` if it was not open.
    pub async fn close(&self, id: GroupId) -> bool {
        let Some(open) = self.inner.open.write().remove(&id) else {
            return false;
        };
        stop(id, open).await;
        true
    }

    /// Stops all replicas.
    pub async fn close_all(&self) {
        let all: Vec<(GroupId, Open)> = self.inner.open.write().drain().collect();
        futures::future::join_all(all.into_iter().map(|(id, open)| stop(id, open))).await;
    }

    /// An open replica.
    #[must_use]
    pub fn get(&self, id: GroupId) -> Option<GroupHandle> {
        self.inner.open.read().get(&id).map(|it| it.handle.clone())
    }

    /// All open replicas, by group.
    #[must_use]
    pub fn all(&self) -> BTreeMap<GroupId, GroupHandle> {
        let open = self.inner.open.read();
        open.iter()
            .map(|(id, open)| (*id, open.handle.clone()))
            .collect()
    }

    /// Who a request for `replica` of `id` is for (S9).
    pub(super) fn find(&self, id: GroupId, replica: ReplicaId) -> Result<Open, FindError> {
        let all = self.inner.open.read();
        let open = all.get(&id).ok_or(FindError::NotOpen(id))?;
        if open.handle.replica() != replica {
            return Err(FindError::OtherReplica {
                group: id,
                asked: replica,
                open: open.handle.replica(),
            });
        }
        Ok(open.clone())
    }

    fn refuse_open(&self, id: GroupId) -> Result<(), OpenError> {
        match self.inner.open.read().get(&id) {
            None => Ok(()),
            Some(open) => Err(OpenError::AlreadyOpen {
                group: id,
                replica: open.handle.replica(),
            }),
        }
    }

    fn raft_config(&self, id: GroupId, log_use: LogUse) -> Result<openraft::Config, OpenError> {
        let timing = self.inner.config;
        let config = openraft::Config {
            cluster_name: id.to_string(),
            heartbeat_interval: timing.heartbeat_ms,
            election_timeout_min: timing.election_ms_min,
            election_timeout_max: timing.election_ms_max,
            // A follower that answers appends needs no heartbeats.
            heartbeat_min_interval: Some(timing.heartbeat_ms),
            enable_pre_vote: Some(true),
            // S8: what it sent before the restart may not be synced here.
            enable_leader_restore: Some(false),
            max_payload_entries: 64,
            replication_lag_threshold: 16,
            // Snapshots are checkpoints: taken into account when we say so, never by count.
            snapshot_policy: SnapshotPolicy::Never,
            max_in_snapshot_log_to_keep: match log_use {
                // A snapshot sits at the log start, and everything in front of it goes.
                LogUse::Records => 0,
                // Nothing goes with a snapshot: `cut.rs` says what does.
                LogUse::Commands => u64::MAX,
            },
            purge_batch_size: 1,
            install_snapshot_timeout: 30_000,
            // Saves a task per replica; GroupHandle::set_voters steps down by itself.
            removed_leader_step_down: StepDownPolicy::Never,
            ..Default::default()
        };
        debug_assert_eq!(config.enable_leader_restore, Some(false), "S8");
        config
            .validate()
            .map_err(|error| OpenError::Config(error.to_string()))
    }
}

async fn stop(id: GroupId, open: Open) {
    let Open {
        handle,
        inbound,
        closed,
    } = open;
    let stopped = async {
        // The core task's own panic, if any, was logged by openraft.
        let _ = handle.raft().shutdown().await;
        drop(inbound);
        drop(handle);
        closed.cancelled().await;
    };
    if tokio::time::timeout(CLOSE_DEADLINE, stopped).await.is_err() {
        tracing::error!(group = %id, "replica did not stop in time");
    }
}
