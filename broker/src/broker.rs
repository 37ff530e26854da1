//! The composition root: what a broker consists of, in which order it starts and stops.
//!
//! Start: settings, sockets (a port in use is said before anything is touched), data directory,
//! peers and groups, controller, then the listeners. Stop is the reverse: first leads are handed
//! over, then nothing new comes in, then replicas close with their checkpoints, then the last round of
//! the flusher. [`Broker::abort`] is the other way to stop: like a crash, for test kits.

mod severed;
mod sockets;
mod status;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use qute_proto::ids::BrokerId;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::TcpIncoming;

use crate::api::cluster::ClusterApi;
use crate::api::groups::GroupsApi;
use crate::api::log::LogService;
use crate::api::peer::PeerApi;
use crate::api::server;
use crate::config::{self, Config};
use crate::controller::{self, Controller, ControllerConfig, Foundation};
use crate::env::{Clock, SystemClock};
use crate::groups::{Coordinators, GroupReplicas, Limits};
use crate::http;
use crate::partition::registry::Replicas;
use crate::raft::{Groups, GroupsConfig, Identity, Peers};
use crate::storage::{self, Store, StoreConfig};

use severed::{Severable, severable};
use sockets::Sockets;
use status::Status;

/// Leads that nobody has taken over by then are left to an election.
const HAND_OVER_PATIENCE: Duration = Duration::from_secs(1);
/// Streams that clients keep open get this long to end by themselves at a shutdown.
const DRAIN_DEADLINE: Duration = Duration::from_secs(2);

/// Why a broker did not start. Each text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A setting can't be used.
    #[error(transparent)]
    Config(#[from] config::Error),
    /// A socket could not be bound.
    #[error("cannot listen on {address} for {purpose}: {source}; {}", bind_advice(.source, .setting))]
    Bind {
        /// What the socket is for.
        purpose: &'static str,
        /// The setting that names it.
        setting: &'static str,
        /// The address asked for.
        address: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The data directory can't be used.
    #[error("data directory: {0}")]
    Storage(#[from] storage::Error),
    /// What is stored about the cluster can't be read.
    #[error(transparent)]
    Controller(#[from] controller::StartError),
    /// gRPC reflection could not be set up.
    #[error("gRPC reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

fn bind_advice(error: &std::io::Error, setting: &str) -> String {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            format!("another process has this port: stop it or choose another with --{setting}")
        }
        std::io::ErrorKind::AddrNotAvailable => {
            format!("this host has no such address: give one of its own with --{setting}")
        }
        std::io::ErrorKind::PermissionDenied => {
            format!("ports below 1024 need privileges: choose a higher one with --{setting}")
        }
        _ => format!("choose another address with --{setting}"),
    }
}

/// A running broker. Dropping it without [`shutdown`](Self::shutdown) stops it abruptly: what has
/// been acknowledged is safe, as after a crash.
pub struct Broker {
    advertise: String,
    advertise_peers: String,
    http_address: Option<SocketAddr>,
    store: Store,
    peers: Peers,
    groups: Groups,
    replicas: Replicas,
    group_replicas: GroupReplicas,
    controller: Controller,
    log_service: LogService,
    groups_api: GroupsApi,
    watches: CancellationToken,
    /// Cuts the connections off, for an abrupt stop.
    severed: CancellationToken,
    grpc: Listener,
    http: Option<Listener>,
    upkeep: JoinHandle<()>,
}

/// A listener's task, and how it is told to stop.
struct Listener {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Listener {
    /// Lets it end by itself for `patience`, then ends it.
    async fn stop(mut self, patience: Duration) {
        // It may have ended already.
        let _ = self.stop.send(());
        if tokio::time::timeout(patience, &mut self.task)
            .await
            .is_err()
        {
            self.task.abort();
        }
    }

    /// Ends it now; the socket it accepts from is closed on return.
    async fn abort(self) {
        self.task.abort();
        // It was told to end.
        let _ = self.task.await;
    }
}

impl Broker {
    /// Starts a broker and returns once it listens; the cluster may still be forming
    /// ([`ready`](Self::ready)).
    ///
    /// # Errors
    /// [`StartError`], with everything released again.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        config.check()?;
        let sockets = Sockets::bind(&config).await?;
        let store = open_store(&config).await?;
        report_leftovers(&store);
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let identity = Identity {
            broker: store.identity(),
            boot: store.boot(),
            process: store.process(),
        };
        let peers = Peers::new(identity, store.earlier_processes());
        let timing = GroupsConfig {
            heartbeat_ms: config.raft_heartbeat_ms,
            election_ms_min: config.raft_election_min_ms,
            election_ms_max: config.raft_election_max_ms,
        };
        let groups = Groups::new(store.clone(), peers.clone(), timing);
        let replicas = Replicas::new(groups.clone(), Arc::clone(&clock));
        let group_replicas = GroupReplicas::new(groups.clone(), Arc::clone(&clock));
        let controller = Controller::start(
            ControllerConfig {
                name: config.name.clone(),
                client_address: sockets.advertise.clone(),
                peer_address: sockets.advertise_peers.clone(),
                gossip_address: sockets.advertise_gossip.clone(),
                rack: config.rack.clone(),
                seeds: config.seeds.clone(),
                expect: config.expect,
            },
            Foundation {
                store: store.clone(),
                peers: peers.clone(),
                groups: groups.clone(),
                records: Arc::new(replicas.clone()),
                group_replicas: Arc::new(group_replicas.clone()),
                gossip_socket: sockets.gossip,
                clock: Arc::clone(&clock),
            },
        )?;
        let log_service = LogService::new(replicas.clone(), controller.directory());
        let coordinators = Coordinators::start(
            group_replicas.clone(),
            controller.directory(),
            controller.watch_view(),
            clock,
            group_limits(&config),
        );
        let groups_api = GroupsApi::new(controller.clone(), coordinators.clone());
        let watches = CancellationToken::new();
        let severed = CancellationToken::new();
        let incoming = severable(
            TcpIncoming::from(sockets.grpc).with_nodelay(Some(true)),
            severed.clone(),
        );
        let grpc = serve_grpc(
            incoming,
            &controller,
            &log_service,
            &groups_api,
            watches.clone(),
        )
        .await?;
        let status = Arc::new(Status {
            store: store.clone(),
            replicas: replicas.clone(),
            group_replicas: group_replicas.clone(),
            coordinators,
            controller: controller.clone(),
        });
        let http = sockets.http.map(|listener| serve_http(listener, status));
        tracing::info!(
            broker = %identity.broker, boot = identity.boot, name = config.name,
            address = sockets.advertise, peer_address = sockets.advertise_peers, data_dir = %config.data_dir.display(), "listening"
        );
        Ok(Self {
            advertise: sockets.advertise,
            advertise_peers: sockets.advertise_peers,
            http_address: sockets.http_address,
            upkeep: tokio::spawn(announce_readiness(controller.clone())),
            store,
            peers,
            groups,
            replicas,
            group_replicas,
            controller,
            log_service,
            groups_api,
            watches,
            severed,
            grpc,
            http,
        })
    }

    /// The broker's id: random, kept in its data directory.
    #[must_use]
    pub fn broker_id(&self) -> BrokerId {
        self.store.identity()
    }

    /// The address that clients are told, `HOST:PORT`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.advertise
    }

    /// The address that other brokers are told, `HOST:PORT`.
    #[must_use]
    pub fn peer_address(&self) -> &str {
        &self.advertise_peers
    }

    /// Where HTTP is served, if it is.
    #[must_use]
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http_address
    }

    /// Why the broker isn't ready; empty: it is.
    #[must_use]
    pub fn waits(&self) -> Vec<String> {
        self.controller.waits()
    }

    /// Waits until the broker is ready: the cluster is formed, `__cluster` has a leader, the
    /// founding brokers are registered, and all replicas of this broker are open.
    ///
    /// # Errors
    /// After `deadline`: what it still waits for.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn ready(&self, deadline: Duration) -> Result<(), Vec<String>> {
        let end = tokio::time::Instant::now() + deadline;
        loop {
            let waits = self.waits();
            if waits.is_empty() {
                return Ok(());
            }
            if tokio::time::Instant::now() >= end {
                return Err(waits);
            }
            tokio::time::sleep(READY_POLL).await;
        }
    }

    /// Resolves when the broker can't go on, with the reason.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn fatal(&self) -> String {
        let mut controller = self.controller.watch_fatal();
        let mut refused = self.peers.watch_refused();
        let mut groups = self.groups_api.coordinators().watch_fatal();
        tokio::select! {
            reason = some(&mut controller) => reason,
            reason = some(&mut refused) => reason,
            reason = some(&mut groups) => reason,
        }
    }

    /// Stops the broker in order; ends within about 20 seconds whatever its peers do.
    pub async fn shutdown(self) {
        tracing::info!("stopping");
        self.upkeep.abort();
        let (records, groups) = tokio::join!(
            self.replicas.hand_over(HAND_OVER_PATIENCE),
            self.group_replicas.hand_over(HAND_OVER_PATIENCE),
        );
        tracing::info!(leads = records + groups, "handed over");
        self.watches.cancel();
        let streams =
            futures::future::join(self.log_service.shutdown(), self.groups_api.shutdown());
        if tokio::time::timeout(DRAIN_DEADLINE, streams).await.is_err() {
            tracing::warn!("some client streams did not end in time");
        }
        self.controller.shutdown().await;
        tokio::join!(self.replicas.shutdown(), self.group_replicas.shutdown());
        self.groups.close_all().await;
        self.peers.shutdown().await;
        self.grpc.stop(DRAIN_DEADLINE).await;
        self.store.shutdown().await;
        if let Some(http) = self.http {
            http.stop(Duration::ZERO).await;
        }
        tracing::info!("stopped");
    }

    /// Stops like a crash, as far as others can see: listeners and connections are gone at once, no
    /// lead is handed over, nobody is told by gossip. On return all tasks have ended and the data
    /// directory and the ports are free, so that [`start`](Self::start) with the same settings
    /// brings the broker back, in this process, too.
    ///
    /// For test kits: it makes the others elect, suspect and reconnect as they would after a kill.
    /// What it is not is a power cut: what was appended still reaches the disk.
    pub async fn abort(self) {
        tracing::warn!("stopping abruptly");
        self.upkeep.abort();
        // First of all, so that nobody learns of anything that happens below.
        self.severed.cancel();
        self.peers.cut();
        self.grpc.abort().await;
        if let Some(http) = self.http {
            http.abort().await;
        }
        self.watches.cancel();
        let streams =
            futures::future::join(self.log_service.shutdown(), self.groups_api.shutdown());
        if tokio::time::timeout(DRAIN_DEADLINE, streams).await.is_err() {
            tracing::warn!("some client streams did not end in time");
        }
        self.controller.abort().await;
        tokio::join!(self.replicas.shutdown(), self.group_replicas.shutdown());
        self.groups.close_all().await;
        self.peers.shutdown().await;
        self.store.shutdown().await;
    }
}

const READY_POLL: Duration = Duration::from_millis(20);

/// The first value that is there; for ever, if the sender goes without one.
async fn some(watched: &mut watch::Receiver<Option<String>>) -> String {
    loop {
        if let Some(reason) = watched.borrow_and_update().clone() {
            return reason;
        }
        if watched.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

async fn open_store(config: &Config) -> Result<Store, StartError> {
    let mut store = StoreConfig::new(&config.data_dir);
    store.tail_cache_bytes = config.tail_cache_bytes;
    store.open_files_max = usize::try_from(config.open_files_max).unwrap_or(usize::MAX);
    if config.disk_floor_bytes > 0 {
        store.disk_floor_bytes = config.disk_floor_bytes;
    }
    match tokio::task::spawn_blocking(move || Store::open(store)).await {
        Ok(opened) => Ok(opened?),
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

fn group_limits(config: &Config) -> Limits {
    let count = |setting: u64| usize::try_from(setting).unwrap_or(usize::MAX);
    Limits {
        groups_max: count(config.groups_max),
        members_max: count(config.group_members_max),
        offsets_max: count(config.group_offsets_max),
        offsets_retention: Duration::from_millis(config.group_offsets_retention_ms),
        session_timeout_min: Duration::from_millis(config.group_session_timeout_min_ms),
    }
}

/// S22: what is not known is kept and said.
fn report_leftovers(store: &Store) {
    for path in store.unknown_dirs() {
        tracing::warn!(path = %path.display(), "not a replica of this broker: left as it is");
    }
}

async fn serve_grpc(
    incoming: impl Stream<Item = std::io::Result<Severable>> + Send + 'static,
    controller: &Controller,
    log: &LogService,
    groups: &GroupsApi,
    watches: CancellationToken,
) -> Result<Listener, StartError> {
    let (health, health_service) = tonic_health::server::health_reporter();
    health
        .set_service_status("", tonic_health::ServingStatus::Serving)
        .await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(qute_proto::DESCRIPTORS)
        .build_v1()?;
    let router = server::builder()
        .add_service(health_service)
        .add_service(reflection)
        .add_service(ClusterApi::new(controller.clone(), watches).server())
        .add_service(PeerApi::new(controller.clone()).server())
        .add_service(log.server())
        .add_service(groups.server());
    let (stop, stopped) = oneshot::channel::<()>();
    let task = tokio::spawn(async move {
        let served = router
            .serve_with_incoming_shutdown(incoming, async {
                // A dropped sender is an abrupt stop.
                let _ = stopped.await;
            })
            .await;
        if let Err(error) = served {
            tracing::error!(%error, "the gRPC listener has failed");
        }
    });
    Ok(Listener { stop, task })
}

fn serve_http(listener: TcpListener, status: Arc<Status>) -> Listener {
    let metrics = match http::recorder() {
        Ok(handle) => Some(handle),
        Err(error) => {
            tracing::warn!(error, "/metrics is not served");
            None
        }
    };
    let (stop, stopped) = oneshot::channel::<()>();
    let task = tokio::spawn(http::serve(listener, status, metrics, async {
        // A dropped sender is an abrupt stop.
        let _ = stopped.await;
    }));
    Listener { stop, task }
}

/// Says once when the broker has become ready, and what it waits for while it hasn't.
async fn announce_readiness(controller: Controller) {
    let mut said = Vec::new();
    loop {
        let waits = controller.waits();
        if waits.is_empty() {
            tracing::info!("ready");
            return;
        }
        if waits != said {
            tracing::info!(waits = waits.join("; "), "not ready yet");
            said = waits;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

#[cfg(test)]
mod tests;
