//! Three brokers in one process, joined by links that can be cut: what the door promises while
//! leaders lose their lease, are deposed, and come back (S11, S12).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use qute_proto::batch::{BatchView, Codec, ProducerStamp};
use qute_proto::ids::{BrokerId, ClusterId, Offset, ProducerId, ReplicaId};
use qute_proto::internal::peer_server::{Peer, PeerServer};
use qute_proto::internal::{
    FoundRequest, FoundResponse, JoinRequest, JoinResponse, PeerMessage, ProbeRequest,
    ProbeResponse, PromiseRequest, PromiseResponse, ProposeRequest, ProposeResponse,
};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, Streaming};

use crate::partition::error::Error;
use crate::partition::registry::PartitionSpec;
use crate::partition::replica::Replica;
use crate::partition::testing::{PATIENCE, TestBroker, partition, records, spec};
use crate::raft::{Groups, GroupsConfig, PeerAnswers};

/// Streams of the groups; nothing else of a broker.
struct Streams(Groups);

#[tonic::async_trait]
impl Peer for Streams {
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

/// A TCP link that passes bytes while it is whole.
async fn link(to: std::net::SocketAddr, whole: watch::Receiver<bool>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((mut inbound, _)) = listener.accept().await {
            let mut whole = whole.clone();
            tokio::spawn(async move {
                if !*whole.borrow_and_update() {
                    return;
                }
                if let Ok(mut outbound) = TcpStream::connect(to).await {
                    tokio::select! {
                        _ = copy_bidirectional(&mut inbound, &mut outbound) => {}
                        _ = whole.wait_for(|whole| !whole) => {}
                    }
                }
            });
        }
    });
    address
}

pub(super) struct Cluster {
    brokers: Vec<TestBroker>,
    pub(super) replicas: Vec<Arc<Replica>>,
    /// Per broker: whether its links are whole.
    pub(super) cuts: Vec<watch::Sender<bool>>,
}

impl Cluster {
    pub(super) async fn start() -> Self {
        let cluster = ClusterId::random();
        let mut brokers = Vec::new();
        let mut listeners = Vec::new();
        for number in 1..=3 {
            let dir = tempfile::tempdir().unwrap();
            brokers.push(TestBroker::start_as(dir, BrokerId(number)).await);
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            listeners.push((listener.local_addr().unwrap(), listener));
        }
        let cuts: Vec<_> = brokers.iter().map(|_| watch::Sender::new(true)).collect();
        for (from, broker) in brokers.iter().enumerate() {
            let mut addresses = HashMap::new();
            for (to, (address, _)) in listeners.iter().enumerate() {
                // Through two links: either side's cut breaks it.
                let near = link(*address, cuts[to].subscribe()).await;
                let far = link(near.parse().unwrap(), cuts[from].subscribe()).await;
                addresses.insert(BrokerId(u64::try_from(to).unwrap() + 1), far);
            }
            broker.groups.peers().set_cluster(cluster);
            broker.groups.peers().set_addresses(addresses);
        }
        for (broker, (_, listener)) in brokers.iter().zip(listeners) {
            let service = PeerServer::new(Streams(broker.groups.clone()));
            let serving = tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(TcpListenerStream::new(listener));
            tokio::spawn(serving);
        }
        let members: BTreeMap<ReplicaId, BrokerId> =
            (1..=3).map(|n| (ReplicaId(n), BrokerId(n))).collect();
        let mut replicas = Vec::new();
        for (broker, replica) in brokers.iter().zip(members.keys()) {
            let spec = PartitionSpec {
                replica: *replica,
                ..spec(0)
            };
            let replica = broker.replicas.open(spec).await.unwrap();
            replica.group().initialize(members.clone()).await.unwrap();
            replicas.push(replica);
        }
        Self {
            brokers,
            replicas,
            cuts,
        }
    }

    fn leader(&self) -> Option<usize> {
        let serving = |replica: &Arc<Replica>| replica.serving();
        let (number, _) = self
            .replicas
            .iter()
            .enumerate()
            .filter_map(|(number, replica)| Some((number, serving(replica)?)))
            .max_by_key(|(_, epoch)| *epoch)?;
        Some(number)
    }

    pub(super) async fn wait_leader(&self) -> usize {
        let elected = async {
            loop {
                if let Some(leader) = self.leader() {
                    return leader;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, elected).await.unwrap()
    }

    pub(super) async fn stop(self) {
        drop(self.replicas);
        futures::future::join_all(self.brokers.into_iter().map(TestBroker::stop)).await;
    }
}

pub(super) fn numbered(sequence: u64) -> Bytes {
    let stamp = ProducerStamp {
        producer_id: ProducerId(7),
        epoch: 0,
        base_sequence: sequence,
    };
    records(stamp, &[sequence.to_string().as_bytes()], Codec::None)
}

/// Sends batch after batch, five at a time, and after any refusal begins again at the first that
/// was not acknowledged: what a client does. Adds where each batch is.
pub(super) async fn produce(cluster: &Cluster, acknowledged: &mut Vec<Offset>, count: u64) {
    while u64::try_from(acknowledged.len()).unwrap() < count {
        let leader = &cluster.replicas[cluster.wait_leader().await];
        let first = u64::try_from(acknowledged.len()).unwrap();
        let window: Vec<_> = (first..count.min(first + 5))
            .map(|sequence| leader.append(numbered(sequence)))
            .collect();
        for submitted in window {
            let result = match submitted {
                Ok(pending) => tokio::time::timeout(Duration::from_secs(2), pending)
                    .await
                    .unwrap_or(Err(Error::OutcomeUnknown)),
                Err(error) => Err(error),
            };
            match result {
                Ok(ack) => acknowledged.push(ack.base_offset),
                Err(
                    Error::UnknownProducer | Error::DuplicateUnknownOffset | Error::Overlapping,
                ) => {
                    panic!("the table forgot batch {}", acknowledged.len())
                }
                Err(_) => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    break;
                }
            }
        }
    }
}

/// Everything that is committed, from a confirmed leader.
async fn committed(cluster: &Cluster) -> Vec<(u64, String)> {
    let (leader, confirmed) = loop {
        let leader = &cluster.replicas[cluster.wait_leader().await];
        match leader.confirm(Duration::from_secs(2)).await {
            Ok(confirmed) => break (leader, confirmed),
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    let mut all = Vec::new();
    let mut from = Offset(0);
    while from < confirmed.bounds.high_watermark {
        let read = leader.read(from, 1 << 20, confirmed.leader_epoch);
        let chunk = read.await.unwrap();
        for one in chunk.batches {
            let view = BatchView::parse(one.bytes).unwrap();
            for record in view.records().unwrap() {
                let value = record.unwrap().value.unwrap();
                all.push((
                    one.base_offset.0,
                    String::from_utf8(value.to_vec()).unwrap(),
                ));
            }
        }
        from = chunk.next_offset;
    }
    all
}

// S11, S12: pipelined batches, leaders cut off for shorter and longer than their lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_leaders_lose_double_and_reorder_nothing() {
    let cluster = Arc::new(Cluster::start().await);
    cluster.wait_leader().await;
    let cutter = {
        let cluster = Arc::clone(&cluster);
        tokio::spawn(async move {
            for cut_ms in [300, 1100, 2500, 1000, 700].into_iter().cycle() {
                let leader = cluster.wait_leader().await;
                cluster.cuts[leader].send_replace(false);
                tokio::time::sleep(Duration::from_millis(cut_ms)).await;
                cluster.cuts[leader].send_replace(true);
                tokio::time::sleep(Duration::from_millis(300)).await;
            }
        })
    };
    let started = std::time::Instant::now();
    let mut count = 0;
    let mut acknowledged = Vec::new();
    // Until the cutter has gone round.
    while started.elapsed() < Duration::from_secs(8) || count == 0 {
        count += 500;
        produce(&cluster, &mut acknowledged, count).await;
    }
    cutter.abort();
    let _ = cutter.await;
    for cut in &cluster.cuts {
        cut.send_replace(true);
    }
    let all = committed(&cluster).await;
    let expected: Vec<(u64, String)> = (0..count).map(|n| (n, n.to_string())).collect();
    assert_eq!(all.len(), expected.len());
    assert_eq!(all, expected);
    let offsets: Vec<u64> = acknowledged.iter().map(|offset| offset.0).collect();
    assert_eq!(offsets, (0..count).collect::<Vec<_>>());
    assert_eq!(cluster.replicas[0].partition(), partition(0));
    Arc::into_inner(cluster).unwrap().stop().await;
}

// S11, S15: what Raft refuses for want of a lease leaves nothing in the log, and knocks again in
// its order once a quorum answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_refused_by_lease_knock_again_in_their_order() {
    let cluster = Cluster::start().await;
    let mut acknowledged = Vec::new();
    produce(&cluster, &mut acknowledged, 10).await;
    let leader = &cluster.replicas[cluster.wait_leader().await];
    // Nobody hears anybody: nobody can be elected, and the lease runs out.
    for cut in &cluster.cuts {
        cut.send_replace(false);
    }
    let lease = Duration::from_millis(GroupsConfig::default().election_ms_max);
    tokio::time::sleep(lease + Duration::from_millis(200)).await;
    let end = leader.log_end();
    let knocking: Vec<_> = (10..15)
        .map(|sequence| leader.append(numbered(sequence)).unwrap())
        .collect();
    let mut first = futures::future::join_all(knocking);
    let early = tokio::time::timeout(Duration::from_millis(300), &mut first).await;
    assert!(early.is_err(), "answered without a quorum: {early:?}");
    assert_eq!(leader.log_end(), end, "in the log without a lease");
    for cut in &cluster.cuts {
        cut.send_replace(true);
    }
    let answers = tokio::time::timeout(PATIENCE, first).await.unwrap();
    // In order: once one is refused (the leader was deposed after all), none after it is written.
    let written = answers.iter().take_while(|answer| answer.is_ok()).count();
    assert!(answers[written..].iter().all(Result::is_err), "{answers:?}");
    produce(&cluster, &mut acknowledged, 20).await;
    let all = committed(&cluster).await;
    let expected: Vec<(u64, String)> = (0..20).map(|n| (n, n.to_string())).collect();
    assert_eq!(all, expected);
    cluster.stop().await;
}

// S11: a leader without its peers keeps its lead, and does not keep its producers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_off_leader_answers_what_it_can_not_commit() {
    let cluster = Cluster::start().await;
    let mut acknowledged = Vec::new();
    produce(&cluster, &mut acknowledged, 10).await;
    let leader = &cluster.replicas[cluster.wait_leader().await];
    // Nobody hears anybody: nobody can be elected.
    for cut in &cluster.cuts {
        cut.send_replace(false);
    }
    let append = |sequence| leader.append(numbered(sequence)).unwrap();
    let in_log: Vec<_> = (10..13).map(append).collect();
    let lease = Duration::from_millis(GroupsConfig::default().election_ms_max);
    tokio::time::sleep(lease + Duration::from_millis(200)).await;
    assert_eq!(
        leader.log_end(),
        Offset(13),
        "not in flight: the cut came too late"
    );
    let late: Vec<_> = (13..15).map(append).collect();
    let retried = append(10);

    let answered = async {
        let in_log = futures::future::join_all(in_log).await;
        assert_eq!(in_log, vec![Err(Error::OutcomeUnknown); 3]);
        let late = futures::future::join_all(late).await;
        assert_eq!(late, vec![Err(Error::NotReady); 2]);
        assert!(retried.await.is_err());
    };
    tokio::time::timeout(PATIENCE, answered).await.unwrap();
    assert!(leader.leadership().is_local);

    for cut in &cluster.cuts {
        cut.send_replace(true);
    }
    produce(&cluster, &mut acknowledged, 20).await;
    let all = committed(&cluster).await;
    let expected: Vec<(u64, String)> = (0..20).map(|n| (n, n.to_string())).collect();
    assert_eq!(all, expected);
    cluster.stop().await;
}

// S15: a command meets an expired lease as a batch does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn command_without_a_quorum_ends_in_time_and_is_no_change_of_leader() {
    let cluster = Cluster::start().await;
    let leader = &cluster.replicas[cluster.wait_leader().await];
    for cut in &cluster.cuts {
        cut.send_replace(false);
    }
    let lease = Duration::from_millis(GroupsConfig::default().election_ms_max);
    tokio::time::sleep(lease + Duration::from_millis(200)).await;
    let moved = tokio::time::timeout(PATIENCE, leader.set_log_start(Offset(0)));
    assert_eq!(moved.await.unwrap(), Err(Error::NotReady));
    cluster.stop().await;
}
