//! Brokers in one process, over real streams on loopback: everything of the raft layer, and a
//! state machine that keeps the numbers it is given.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use qute_proto::ids::{BrokerId, ClusterId, Offset, PartitionId, ReplicaId, TopicId};
use qute_proto::internal::peer_server::{Peer, PeerServer};
use qute_proto::internal::{
    FoundRequest, FoundResponse, JoinRequest, JoinResponse, PeerMessage, ProbeRequest,
    ProbeResponse, PromiseRequest, PromiseResponse, ProposeRequest, ProposeResponse,
};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use super::super::lane::{
    CONNECTION_WINDOW_BYTES, HTTP2_FRAME_BYTES, MESSAGE_BYTES_MAX, STREAM_WINDOW_BYTES,
};
use super::super::*;
use crate::env::Fs;
use crate::storage::{LogConfig, Store, StoreConfig};

/// Everything ends within this, or the test fails.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until `condition` holds.
pub async fn eventually<T>(what: &str, mut condition: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = condition().await {
            return value;
        }
        assert!(Instant::now() < deadline, "in vain: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Keeps the numbers of all batches, in order, and a log start that a command sets.
#[derive(Clone, Default)]
pub struct Numbers {
    state: Arc<Mutex<NumbersState>>,
}

#[derive(Default)]
struct NumbersState {
    log_start: u64,
    // Offset -> number; one record each.
    numbers: BTreeMap<u64, u64>,
}

impl Numbers {
    pub fn all(&self) -> Vec<u64> {
        self.state.lock().numbers.values().copied().collect()
    }

    pub fn offsets(&self) -> Vec<u64> {
        self.state.lock().numbers.keys().copied().collect()
    }
}

impl StateMachine for Numbers {
    fn apply(&mut self, entry: &AppliedEntry) -> Bytes {
        let mut state = self.state.lock();
        match entry.kind {
            EntryKind::Batch => {
                let number = number_of(&entry.payload);
                state.numbers.insert(entry.base_offset.0, number);
                Bytes::copy_from_slice(&number.to_le_bytes())
            }
            EntryKind::Command => {
                state.log_start = number_of(&entry.payload);
                Bytes::new()
            }
            EntryKind::Blank | EntryKind::Membership => Bytes::new(),
        }
    }

    fn checkpoint(&self) -> Bytes {
        let state = self.state.lock();
        let mut out = state.log_start.to_le_bytes().to_vec();
        for (offset, number) in &state.numbers {
            out.extend(offset.to_le_bytes());
            out.extend(number.to_le_bytes());
        }
        out.into()
    }

    fn restore(&mut self, checkpoint: &[u8]) -> Result<(), RestoreError> {
        let words: Vec<u64> = checkpoint.chunks(8).map(number_of).collect();
        let mut state = self.state.lock();
        *state = NumbersState::default();
        if let Some((log_start, rest)) = words.split_first() {
            state.log_start = *log_start;
            state.numbers = rest.chunks(2).map(|pair| (pair[0], pair[1])).collect();
        }
        Ok(())
    }

    fn log_start(&self) -> Offset {
        Offset(self.state.lock().log_start)
    }
}

fn number_of(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

/// A batch of one record that holds a number, padded to `size`.
pub fn batch(number: u64, size: usize) -> Payload {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(size.max(8), 0);
    Payload::batch(bytes.into(), 1, 1_700_000_000_000 + number)
}

/// The peer service with nothing but the stream.
struct StreamOnly(Groups);

#[tonic::async_trait]
impl Peer for StreamOnly {
    type StreamStream = PeerAnswers;

    async fn stream(
        &self,
        request: Request<Streaming<PeerMessage>>,
    ) -> Result<Response<PeerAnswers>, Status> {
        Ok(Response::new(self.0.serve_stream(request.into_inner())))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        Err(Status::unimplemented("probe"))
    }

    async fn promise(
        &self,
        _: Request<PromiseRequest>,
    ) -> Result<Response<PromiseResponse>, Status> {
        Err(Status::unimplemented("promise"))
    }

    async fn found(&self, _: Request<FoundRequest>) -> Result<Response<FoundResponse>, Status> {
        Err(Status::unimplemented("found"))
    }

    async fn join(&self, _: Request<JoinRequest>) -> Result<Response<JoinResponse>, Status> {
        Err(Status::unimplemented("join"))
    }

    async fn propose(
        &self,
        _: Request<ProposeRequest>,
    ) -> Result<Response<ProposeResponse>, Status> {
        Err(Status::unimplemented("propose"))
    }
}

/// One broker of the raft layer.
pub struct Broker {
    pub id: BrokerId,
    pub address: SocketAddr,
    pub store: Store,
    pub peers: Peers,
    pub groups: Groups,
    server: JoinHandle<()>,
}

impl Broker {
    /// Starts a broker over `dir`. Its process id is drawn anew.
    pub async fn start(dir: PathBuf, cluster: ClusterId) -> Self {
        Self::start_over(StoreConfig::new(dir), cluster).await
    }

    pub async fn start_over(config: StoreConfig, cluster: ClusterId) -> Self {
        let store = tokio::task::spawn_blocking(move || Store::open(config).unwrap())
            .await
            .unwrap();
        let identity = Identity {
            broker: store.identity(),
            boot: store.boot(),
            process: store.process(),
        };
        Self::start_as(identity, store, cluster).await
    }

    pub async fn start_as(identity: Identity, store: Store, cluster: ClusterId) -> Self {
        let peers = Peers::new(identity, store.earlier_processes());
        peers.set_cluster(cluster);
        let timing = GroupsConfig {
            heartbeat_ms: 60,
            election_ms_min: 250,
            election_ms_max: 500,
        };
        let groups = Groups::new(store.clone(), peers.clone(), timing);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = PeerServer::new(StreamOnly(groups.clone()))
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let server = tonic::transport::Server::builder()
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(HTTP2_FRAME_BYTES)
            .add_service(service)
            .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)));
        Self {
            id: identity.broker,
            address,
            store,
            peers,
            groups,
            server: tokio::spawn(async move { server.await.unwrap() }),
        }
    }

    /// Stops it, and frees its data directory.
    pub async fn stop(self) {
        self.server.abort();
        self.groups.close_all().await;
        self.peers.shutdown().await;
        self.store.shutdown().await;
    }
}

/// One partition on a few brokers, that may be stopped and started again.
pub struct Cluster {
    pub cluster: ClusterId,
    pub group: GroupId,
    pub log: LogConfig,
    pub log_use: LogUse,
    dirs: Vec<TempDir>,
    pub brokers: Vec<Option<Broker>>,
    pub numbers: Vec<Numbers>,
}

impl Cluster {
    /// `count` brokers that know each other; no replica is open.
    pub async fn start(count: usize) -> Self {
        let mut cluster = Self {
            cluster: ClusterId::random(),
            group: GroupId::new(PartitionId {
                topic: TopicId::random(),
                partition: 0,
            }),
            log: LogConfig::default(),
            log_use: LogUse::Records,
            dirs: Vec::new(),
            brokers: Vec::new(),
            numbers: Vec::new(),
        };
        for _ in 0..count {
            cluster.add_broker().await;
        }
        cluster
    }

    /// `count` brokers with a replica each, which are the group's voters.
    pub async fn form(count: usize) -> Self {
        let cluster = Self::start(count).await;
        cluster.open_all().await;
        cluster.initialize(count).await;
        cluster
    }

    pub async fn initialize(&self, count: usize) {
        let members = (0..count)
            .map(|at| (Self::replica(at), self.broker(at).id))
            .collect();
        let handle = self.handle(0);
        assert!(handle.initialize(members).await.unwrap());
    }

    /// A broker whose disk is `fs`.
    pub async fn add_broker_on(&mut self, fs: Arc<dyn Fs>) -> usize {
        let mut config = StoreConfig::new("/data");
        config.fs = fs;
        let broker = Broker::start_over(config, self.cluster).await;
        self.dirs.push(tempfile::tempdir().unwrap());
        self.brokers.push(Some(broker));
        self.numbers.push(Numbers::default());
        self.introduce();
        self.brokers.len() - 1
    }

    pub async fn add_broker(&mut self) -> usize {
        let dir = tempfile::tempdir().unwrap();
        let broker = Broker::start(dir.path().join("data"), self.cluster).await;
        self.dirs.push(dir);
        self.brokers.push(Some(broker));
        self.numbers.push(Numbers::default());
        self.introduce();
        self.brokers.len() - 1
    }

    pub fn dir(&self, at: usize) -> PathBuf {
        self.dirs[at].path().join("data")
    }

    /// Tells all brokers where the others are.
    pub fn introduce(&self) {
        let running = || self.brokers.iter().flatten();
        let addresses: HashMap<BrokerId, String> = running()
            .map(|broker| (broker.id, broker.address.to_string()))
            .collect();
        for broker in running() {
            broker.peers.set_addresses(addresses.clone());
        }
    }

    pub fn replica(at: usize) -> ReplicaId {
        ReplicaId(at as u64 + 1)
    }

    pub fn broker(&self, at: usize) -> &Broker {
        self.brokers[at].as_ref().unwrap()
    }

    pub fn spec(&self, at: usize) -> GroupSpec {
        GroupSpec {
            id: self.group,
            replica: Self::replica(at),
            log: self.log,
            log_use: self.log_use,
        }
    }

    pub async fn open(&self, at: usize) -> GroupHandle {
        let state = self.numbers[at].clone();
        let groups = self.broker(at).groups.clone();
        groups.open(self.spec(at), state).await.unwrap()
    }

    pub async fn open_all(&self) {
        for at in 0..self.brokers.len() {
            self.open(at).await;
        }
    }

    pub fn handle(&self, at: usize) -> GroupHandle {
        self.broker(at).groups.get(self.group).unwrap()
    }

    pub async fn stop(&mut self, at: usize) {
        self.brokers[at].take().unwrap().stop().await;
    }

    /// Starts a stopped broker over what it left, at another port.
    pub async fn restart(&mut self, at: usize) -> GroupHandle {
        let broker = Broker::start(self.dir(at), self.cluster).await;
        self.brokers[at] = Some(broker);
        self.introduce();
        self.open(at).await
    }

    pub async fn stop_all(&mut self) {
        for at in 0..self.brokers.len() {
            if self.brokers[at].is_some() {
                self.stop(at).await;
            }
        }
    }

    fn open_handles(&self) -> Vec<(usize, GroupHandle)> {
        let brokers = self.brokers.iter().enumerate();
        brokers
            .filter_map(|(at, broker)| Some((at, broker.as_ref()?.groups.get(self.group)?)))
            .collect()
    }

    /// The leader that may serve: it has applied an entry of its own term and confirmed itself.
    pub async fn leader(&self) -> (usize, GroupHandle) {
        eventually("a leader", async || {
            for (at, handle) in self.open_handles() {
                let leadership = handle.leadership();
                if leadership.is_local
                    && handle.applied().term == leadership.term
                    && handle.confirm(Duration::from_secs(1)).await.is_ok()
                {
                    return Some((at, handle));
                }
            }
            None
        })
        .await
    }

    /// Proposes numbers in order, all in flight at once, and waits for all.
    pub async fn propose(&self, leader: &GroupHandle, numbers: std::ops::Range<u64>, size: usize) {
        let mut proposals = Vec::new();
        for number in numbers {
            let admission = leader.admit(size.max(8)).await.unwrap();
            let proposal = leader.propose(admission, batch(number, size), None);
            proposals.push((number, proposal.unwrap()));
        }
        for (number, proposal) in proposals {
            let applied = tokio::time::timeout(PATIENCE, proposal).await.unwrap();
            assert_eq!(applied.unwrap().reply, number.to_le_bytes()[..]);
        }
    }

    /// Waits until every open replica has applied exactly these numbers.
    pub async fn converged(&self, numbers: &[u64]) {
        for (at, _) in self.open_handles() {
            eventually("convergence", async || {
                (self.numbers[at].all().len() >= numbers.len()).then_some(())
            })
            .await;
            assert_eq!(self.numbers[at].all(), numbers, "replica {at}");
        }
    }
}
