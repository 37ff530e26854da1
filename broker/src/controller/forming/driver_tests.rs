//! Forming over real sockets: a gRPC server per broker that answers as the peer service does.

use std::collections::BTreeMap;

use parking_lot::Mutex as SyncMutex;
use qute_proto::internal::peer_server::{Peer, PeerServer};
use qute_proto::internal::{JoinResponse, PeerMessage, ProposeRequest, ProposeResponse};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, Streaming};

use super::*;

#[derive(Default)]
struct Memory {
    blobs: SyncMutex<BTreeMap<String, Bytes>>,
}

impl Records for Memory {
    fn get(&self, name: &str) -> Result<Option<Bytes>, String> {
        Ok(self.blobs.lock().get(name).cloned())
    }

    fn put(&self, name: &'static str, bytes: Bytes) -> BoxFuture<'_, Result<(), String>> {
        self.blobs.lock().insert(name.to_owned(), bytes);
        Box::pin(std::future::ready(Ok(())))
    }
}

struct Service {
    former: Arc<Former>,
}

#[tonic::async_trait]
impl Peer for Service {
    type StreamStream = tokio_stream::Empty<Result<PeerMessage, Status>>;

    async fn stream(
        &self,
        _: Request<Streaming<PeerMessage>>,
    ) -> Result<Response<Self::StreamStream>, Status> {
        Err(Status::unimplemented(""))
    }

    async fn probe(
        &self,
        request: Request<ProbeRequest>,
    ) -> Result<Response<ProbeResponse>, Status> {
        let caller = request.into_inner().caller.unwrap();
        self.former.book.learn(&caller);
        let (state, promised, expect) = self.former.facts().await;
        let mut hello = self.former.process.clone();
        let formed = self.former.formed.borrow().clone();
        hello.cluster_id = formed.map(|f| f.cluster.to_wire()).unwrap_or_default();
        Ok(Response::new(ProbeResponse {
            hello: Some(hello),
            state: state.into(),
            broker: Some(self.former.me.clone()),
            promised,
            expect,
            known: self.former.book.all(),
            ..ProbeResponse::default()
        }))
    }

    async fn promise(
        &self,
        request: Request<PromiseRequest>,
    ) -> Result<Response<PromiseResponse>, Status> {
        let set = request.into_inner().set.unwrap();
        Ok(Response::new(self.former.promise(&set).await.unwrap()))
    }

    async fn found(
        &self,
        request: Request<FoundRequest>,
    ) -> Result<Response<FoundResponse>, Status> {
        let set = request.into_inner().set.unwrap();
        Ok(Response::new(self.former.found(&set).await.unwrap()))
    }

    async fn join(&self, _: Request<JoinRequest>) -> Result<Response<JoinResponse>, Status> {
        let formed = self.former.formed.borrow().clone().unwrap();
        Ok(Response::new(JoinResponse {
            cluster_id: formed.cluster.to_wire(),
            cluster_replica_id: 9,
            ..JoinResponse::default()
        }))
    }

    async fn propose(
        &self,
        _: Request<ProposeRequest>,
    ) -> Result<Response<ProposeResponse>, Status> {
        Err(Status::unimplemented(""))
    }
}

struct Host {
    listener: Option<std::net::TcpListener>,
    address: String,
    records: Arc<Memory>,
}

impl Host {
    fn new() -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        Self {
            address: listener.local_addr().unwrap().to_string(),
            listener: Some(listener),
            records: Arc::default(),
        }
    }

    fn start(&mut self, id: u64, process: u64, seeds: &[&str], expect: u32) -> Arc<Former> {
        let me = BrokerAddress {
            broker_id: id,
            peer_address: self.address.clone(),
            boot: 1,
            process_id: process,
            ..BrokerAddress::default()
        };
        let hello = PeerHello {
            broker_id: id,
            boot: 1,
            process_id: process,
            protocol_version: 1,
            ..PeerHello::default()
        };
        let former = Former::open(
            me,
            hello,
            seeds.iter().map(|s| (*s).to_owned()).collect(),
            expect,
            Arc::clone(&self.records) as Arc<dyn Records>,
            Arc::default(),
            Arc::new(AddressBook::new(BrokerId(id))),
        )
        .unwrap();
        let former = Arc::new(former);
        if let Some(listener) = self.listener.take() {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            let service = PeerServer::new(Service {
                former: Arc::clone(&former),
            });
            tokio::spawn(
                tonic::transport::Server::builder()
                    .add_service(service)
                    .serve_with_incoming(TcpListenerStream::new(listener)),
            );
        }
        former
    }
}

async fn run(former: &Former) -> Result<Formed, FormError> {
    tokio::time::timeout(Duration::from_secs(60), former.run())
        .await
        .unwrap_or_else(|_| panic!("still waiting: {}", former.waiting()))
}

#[tokio::test]
async fn three_brokers_with_one_seed_found_one_cluster() {
    let mut hosts = [Host::new(), Host::new(), Host::new()];
    let seed = hosts[1].address.clone();
    let formers: Vec<_> = (1..)
        .zip(hosts.iter_mut())
        .map(|(id, host)| host.start(id, id, &[&seed], 3))
        .collect();
    let formed = futures::future::join_all(formers.iter().map(|f| run(f))).await;
    let clusters: BTreeSet<_> = formed.iter().map(|f| f.as_ref().unwrap().cluster).collect();
    assert_eq!(clusters.len(), 1);
    let ranks: Vec<_> = formed
        .iter()
        .map(|f| f.as_ref().unwrap().replica.0)
        .collect();
    assert_eq!(ranks, [1, 2, 3]);
    // A fourth one, told the same, joins.
    let mut host = Host::new();
    let fourth = host.start(4, 4, &[&seed], 3);
    assert_eq!(run(&fourth).await.unwrap().replica, ReplicaId(9));
    // And all remember after a restart, without asking anybody.
    let again = host.start(4, 5, &[&seed], 3);
    assert_eq!(run(&again).await.unwrap().replica, ReplicaId(9));
}

#[tokio::test]
async fn unreachable_seed_blocks_founding_and_is_named() {
    let mut host = Host::new();
    let gone = Host::new().address;
    let own = host.address.clone();
    let former = host.start(1, 1, &[&own, &gone], 1);
    let mut log = WaitLog::default();
    former.round(&mut log).await.unwrap();
    assert!(former.waiting().contains(&gone), "{}", former.waiting());
    assert!(former.formed.borrow().is_none());
}

#[tokio::test]
async fn s23_two_processes_with_one_identity_are_told_apart() {
    let mut original = Host::new();
    let own = original.address.clone();
    let _running = original.start(1, 1, &[&own], 3);
    let mut copy = Host::new();
    let former = copy.start(1, 2, &[&own], 3);
    let error = run(&former).await.unwrap_err();
    assert!(
        matches!(&error, FormError::Copied(text) if text.contains(&own)),
        "{error}"
    );
}

#[tokio::test]
async fn broker_without_seeds_needs_nobody() {
    let mut host = Host::new();
    let former = host.start(1, 1, &[], 0);
    let formed = run(&former).await.unwrap();
    assert_eq!(formed.replica, ReplicaId(1));
    assert!(host.records.blobs.lock().contains_key("cluster"));
}
