//! Whole brokers without their client side, over real stores and sockets: forming, joining,
//! topics, restarts with other ports, copies.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::time::Duration;

use qute_proto::ids::BrokerId;
use qute_proto::internal::peer_client::PeerClient;
use qute_proto::internal::{BrokerAddress, PeerHello, ProbeRequest};
use qute_proto::v1::TopicInfo;
use qute_proto::v1::cluster_client::ClusterClient;
use tokio::net::UdpSocket;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::Channel;

use super::super::peer::PeerApi;
use super::*;
use crate::controller::{ControllerConfig, Foundation};
use crate::env::{Clock as _, Fault, FaultOp, SimFs, SystemClock};
use crate::groups::GroupReplicas;
use crate::partition::registry::{Hosted, Replicas};
use crate::raft::{Groups, GroupsConfig, Identity, Payload, Peers};
use crate::storage::{Store, StoreConfig};

const LONG: Duration = Duration::from_secs(60);

struct Node {
    controller: Controller,
    replicas: Replicas,
    groups: Groups,
    peers: Peers,
    store: Store,
    api: ClusterApi,
    stop: CancellationToken,
    server: tokio::task::JoinHandle<()>,
}

/// Listening, but not started: so that all addresses are known first.
struct Seat {
    listener: std::net::TcpListener,
    address: String,
}

fn seat() -> Seat {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    Seat { listener, address }
}

async fn start(dir: &Path, seat: Seat, seeds: &[String], expect: u32) -> Node {
    start_over(StoreConfig::new(dir), seat, seeds, expect).await
}

async fn start_over(store: StoreConfig, seat: Seat, seeds: &[String], expect: u32) -> Node {
    let store = tokio::task::spawn_blocking(move || Store::open(store))
        .await
        .unwrap()
        .unwrap();
    let peers = Peers::new(
        Identity {
            broker: store.identity(),
            boot: store.boot(),
            process: store.process(),
        },
        store.earlier_processes(),
    );
    let groups = Groups::new(store.clone(), peers.clone(), GroupsConfig::default());
    let clock: Arc<dyn crate::env::Clock> = Arc::new(SystemClock);
    let replicas = Replicas::new(groups.clone(), Arc::clone(&clock));
    let gossip_socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let config = ControllerConfig {
        name: seat.address.clone(),
        client_address: seat.address.clone(),
        peer_address: seat.address.clone(),
        gossip_address: gossip_socket.local_addr().unwrap().to_string(),
        rack: String::new(),
        seeds: seeds.to_vec(),
        expect,
    };
    let base = Foundation {
        store: store.clone(),
        peers: peers.clone(),
        groups: groups.clone(),
        records: Arc::new(replicas.clone()),
        group_replicas: Arc::new(GroupReplicas::new(groups.clone(), Arc::clone(&clock))),
        gossip_socket,
        clock,
    };
    let controller = Controller::start(config, base).unwrap();
    let stop = CancellationToken::new();
    let listener = tokio::net::TcpListener::from_std(seat.listener).unwrap();
    let api = ClusterApi::new(controller.clone(), stop.clone());
    let services = tonic::transport::Server::builder()
        .add_service(PeerApi::new(controller.clone()).server())
        .add_service(api.server());
    let stopped = stop.clone();
    let server = tokio::spawn(async move {
        // Streams of a dead test node must not hold it up: dropped, not drained.
        tokio::select! {
            _ = services.serve_with_incoming(TcpListenerStream::new(listener)) => {}
            () = stopped.cancelled() => {}
        }
    });
    Node {
        controller,
        replicas,
        groups,
        peers,
        store,
        api,
        stop,
        server,
    }
}

impl Node {
    async fn ready(&self) {
        let deadline = tokio::time::Instant::now() + LONG;
        loop {
            let waits = self.controller.waits();
            if waits.is_empty() {
                return;
            }
            assert!(tokio::time::Instant::now() < deadline, "{waits:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn stop(self) {
        self.stop.cancel();
        self.server.await.unwrap();
        self.controller.shutdown().await;
        self.replicas.shutdown().await;
        self.groups.close_all().await;
        self.peers.shutdown().await;
        self.store.shutdown().await;
    }

    /// Waits until `other` is registered in the view of this broker.
    async fn knows(&self, other: &Self) {
        let mut view = self.controller.watch_view();
        let registered = view.wait_for(|view| view.is_registered(BrokerId(other.id())));
        drop(
            tokio::time::timeout(LONG, registered)
                .await
                .unwrap()
                .unwrap(),
        );
    }

    fn id(&self) -> u64 {
        self.controller.me().broker_id
    }

    async fn client(&self) -> ClusterClient<Channel> {
        let address = &self.controller.me().client_address;
        ClusterClient::connect(format!("http://{address}"))
            .await
            .unwrap()
    }

    async fn described(&self) -> DescribeClusterResponse {
        let mut client = self.client().await;
        let described = client.describe_cluster(DescribeClusterRequest {}).await;
        described.unwrap().into_inner()
    }

    /// What it says of itself.
    async fn faults(&self) -> Vec<String> {
        self.described().await.faults
    }

    async fn metadata(&self, request: MetadataRequest) -> MetadataResponse {
        self.client()
            .await
            .metadata(request)
            .await
            .unwrap()
            .into_inner()
    }

    /// Waits until every partition of the topic has a leader, as this broker sees it.
    async fn leaders(&self, topic: &str) -> Vec<u64> {
        let deadline = tokio::time::Instant::now() + LONG;
        loop {
            let metadata = self.metadata(MetadataRequest::default()).await;
            let found = metadata.topics.iter().find(|t| t.name == topic);
            let leaders: Vec<u64> = found
                .map(|t| t.partitions.iter().map(|p| p.leader).collect())
                .unwrap_or_default();
            if !leaders.is_empty() && leaders.iter().all(|leader| *leader != 0) {
                return leaders;
            }
            assert!(tokio::time::Instant::now() < deadline, "{metadata:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

struct Trio {
    dirs: Vec<tempfile::TempDir>,
    nodes: Vec<Node>,
}

async fn three() -> Trio {
    let dirs: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
    let mut trio = Trio {
        dirs,
        nodes: Vec::new(),
    };
    trio.start_all(3).await;
    trio
}

impl Trio {
    /// Starts all on new ports; seeds name the new ones.
    async fn start_all(&mut self, expect: u32) {
        let seats: Vec<_> = self.dirs.iter().map(|_| seat()).collect();
        let seeds: Vec<_> = seats.iter().map(|seat| seat.address.clone()).collect();
        for (dir, seat) in self.dirs.iter().zip(seats) {
            self.nodes
                .push(start(dir.path(), seat, &seeds, expect).await);
        }
        for node in &self.nodes {
            node.ready().await;
        }
    }

    fn seeds(&self) -> Vec<String> {
        self.nodes
            .iter()
            .map(|n| n.controller.me().peer_address.clone())
            .collect()
    }

    async fn stop_all(&mut self) {
        let nodes = std::mem::take(&mut self.nodes);
        futures::future::join_all(nodes.into_iter().map(Node::stop)).await;
    }

    /// At whichever broker leads the controller.
    async fn at_leader<T>(
        &self,
        call: impl AsyncFn(ClusterClient<Channel>) -> Result<T, v1::Error>,
    ) -> T {
        let deadline = tokio::time::Instant::now() + LONG;
        loop {
            for node in &self.nodes {
                match call(node.client().await).await {
                    Ok(done) => return done,
                    Err(error) => assert!(
                        matches!(error.code(), ErrorCode::NotLeader | ErrorCode::NotReady),
                        "{error:?}"
                    ),
                }
            }
            assert!(tokio::time::Instant::now() < deadline);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn create(&self, request: &CreateTopicRequest) -> (TopicInfo, u64) {
        self.at_leader(async |mut client| {
            let response = client
                .create_topic(request.clone())
                .await
                .unwrap()
                .into_inner();
            match response.error {
                Some(error) => Err(error),
                None => Ok((response.topic.unwrap(), response.cluster_index)),
            }
        })
        .await
    }
}

fn topic(name: &str, partitions: u32, replicas: u32) -> CreateTopicRequest {
    CreateTopicRequest {
        name: name.to_owned(),
        partitions,
        replicas,
        config: HashMap::new(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn three_brokers_form_create_restart_with_other_ports_and_delete() {
    let mut trio = three().await;
    let ids: BTreeSet<_> = trio.nodes.iter().map(Node::id).collect();
    assert_eq!(ids.len(), 3);
    let (info, index) = trio.create(&topic("t", 6, 0)).await;
    assert_eq!(info.partitions.len(), 6);
    assert!(info.partitions.iter().all(|p| p.replicas.len() == 3));
    let mut leaders = BTreeSet::new();
    for node in &trio.nodes {
        // S28: whoever is asked has caught up with the creation.
        let request = MetadataRequest {
            min_cluster_index: index,
            ..MetadataRequest::default()
        };
        let metadata = node.metadata(request).await;
        assert!(metadata.error.is_none() && metadata.cluster_index >= index);
        assert_eq!(metadata.brokers.len(), 3);
        leaders.extend(node.leaders("t").await);
    }
    // Spread: the first replicas of the placement lead.
    assert_eq!(leaders, ids);

    // All of them with other ports.
    trio.stop_all().await;
    trio.start_all(3).await;
    for node in &trio.nodes {
        node.leaders("t").await;
    }
    // One of them with another port, while the others stay and their seeds name the old one.
    let moved = trio.nodes.remove(1);
    let id = moved.id();
    moved.stop().await;
    let seeds = trio.seeds();
    let moved = start(trio.dirs[1].path(), seat(), &seeds, 3).await;
    moved.ready().await;
    assert_eq!(moved.id(), id);
    let address = moved.controller.me().client_address.clone();
    trio.nodes.insert(1, moved);
    for node in &trio.nodes {
        let metadata = node.metadata(MetadataRequest::default()).await;
        let info = metadata.brokers.iter().find(|b| b.broker_id == id).unwrap();
        assert_eq!(info.address, address);
        node.leaders("t").await;
    }

    trio.at_leader(async |mut client| {
        let request = DeleteTopicRequest {
            name: "t".to_owned(),
            ..Default::default()
        };
        match client
            .delete_topic(request)
            .await
            .unwrap()
            .into_inner()
            .error
        {
            Some(error) => Err(error),
            None => Ok(()),
        }
    })
    .await;
    // The files go, and the tombstones once each broker has reported it (S22).
    let deadline = tokio::time::Instant::now() + LONG;
    for node in &trio.nodes {
        while node.store.replicas().len() > 1 || !node.controller.view().tombstones.is_empty() {
            assert!(
                tokio::time::Instant::now() < deadline,
                "{:?}",
                node.controller.view()
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn newcomer_joins_and_a_copy_of_it_is_refused() {
    let mut trio = three().await;
    let dir = tempfile::tempdir().unwrap();
    let seeds = trio.seeds();
    let fourth = start(dir.path(), seat(), &seeds, 3).await;
    fourth.ready().await;
    let id = fourth.id();
    assert_eq!(fourth.controller.view().brokers.len(), 4);
    fourth.stop().await;

    let copy = tempfile::tempdir().unwrap();
    copy_dir(dir.path(), copy.path());
    let original = start(dir.path(), seat(), &seeds, 3).await;
    original.ready().await;
    assert_eq!(original.id(), id);
    // S23
    let copied = start(copy.path(), seat(), &seeds, 3).await;
    let mut fatal = copied.controller.watch_fatal();
    let reason = tokio::time::timeout(LONG, fatal.wait_for(Option::is_some)).await;
    let reason = reason.unwrap().unwrap().clone().unwrap();
    assert!(reason.contains(&id.to_string()), "{reason}");
    assert!(original.controller.watch_fatal().borrow().is_none());
    copied.stop().await;
    original.stop().await;
    trio.stop_all().await;
}

// S23
#[tokio::test(flavor = "multi_thread")]
async fn caller_of_no_cluster_does_not_get_the_place_of_a_member() {
    let mut trio = three().await;
    let (host, member) = (&trio.nodes[0], &trio.nodes[1]);
    host.knows(member).await;
    let address = host.controller.me().peer_address.clone();
    let mut client = PeerClient::connect(format!("http://{address}"))
        .await
        .unwrap();
    let mut claim = async |broker_id| {
        let caller = BrokerAddress {
            broker_id,
            boot: 1_000,
            peer_address: "127.0.0.1:9".to_owned(),
            ..member.controller.me().clone()
        };
        let hello = PeerHello {
            cluster_id: Vec::new().into(),
            broker_id,
            boot: caller.boot,
            ..member.peers.hello()
        };
        let request = ProbeRequest {
            hello: Some(hello),
            caller: Some(caller),
            expect: 0,
        };
        let response = client.probe(request).await.unwrap().into_inner();
        assert_eq!(response.error, None);
        let known = host.controller.book().get(BrokerId(broker_id));
        known.map(|known| known.peer_address)
    };
    assert_eq!(
        claim(member.id()).await.as_ref(),
        Some(&member.controller.me().peer_address)
    );
    // A stranger may ask for its place: it may be about to join.
    assert_eq!(claim(77).await.as_deref(), Some("127.0.0.1:9"));
    trio.stop_all().await;
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), &target).unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn cluster_of_one_answers_typed_errors_and_pushes_changes() {
    let dir = tempfile::tempdir().unwrap();
    let node = start(dir.path(), seat(), &[], 0).await;
    node.ready().await;
    let mut client = node.client().await;
    let mut pushed = client
        .watch_metadata(WatchMetadataRequest {})
        .await
        .unwrap()
        .into_inner();
    let first = pushed.next().await.unwrap().unwrap();
    assert!(first.topics.is_empty() && first.error.is_none());

    let mut create = async |request: CreateTopicRequest| -> Option<ErrorCode> {
        let response = client.create_topic(request).await.unwrap().into_inner();
        response.error.map(|error| error.code())
    };
    for name in [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "__groups",
        "caf\u{e9}",
        &"x".repeat(250),
    ] {
        assert_eq!(
            create(topic(name, 1, 1)).await,
            Some(ErrorCode::InvalidTopicName),
            "{name}"
        );
    }
    assert_eq!(
        create(topic("t", 1, 2)).await,
        Some(ErrorCode::InvalidArgument)
    );
    assert_eq!(
        create(topic("t", 5000, 1)).await,
        Some(ErrorCode::InvalidArgument)
    );
    assert_eq!(
        create(topic("t", 1, 3)).await,
        Some(ErrorCode::NotEnoughBrokers)
    );
    let mut unknown = topic("t", 1, 1);
    unknown
        .config
        .insert("retention".to_owned(), "1".to_owned());
    assert_eq!(create(unknown).await, Some(ErrorCode::InvalidArgument));
    assert_eq!(create(topic("t", 0, 0)).await, None);
    assert_eq!(create(topic("t", 0, 0)).await, Some(ErrorCode::TopicExists));
    assert_eq!(node.leaders("t").await.len(), 6);

    // Pushed until all leaders are known.
    let complete = async {
        loop {
            let push = pushed.next().await.unwrap().unwrap();
            if push
                .topics
                .iter()
                .any(|t| t.partitions.iter().all(|p| p.leader != 0))
            {
                return;
            }
        }
    };
    tokio::time::timeout(LONG, complete).await.unwrap();

    let request = MetadataRequest {
        authoritative: true,
        topics: vec!["t".to_owned(), "unknown".to_owned()],
        ..MetadataRequest::default()
    };
    let metadata = node.metadata(request).await;
    assert!(metadata.authoritative && metadata.topics.len() == 1);
    let mut client = node.client().await;
    let request = DeleteTopicRequest {
        name: "unknown".to_owned(),
        ..Default::default()
    };
    let error = client
        .delete_topic(request)
        .await
        .unwrap()
        .into_inner()
        .error
        .unwrap();
    assert!(error.code() == ErrorCode::UnknownTopic && error.authoritative);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn broker_waiting_for_its_seeds_answers_not_ready() {
    let dir = tempfile::tempdir().unwrap();
    let gone = seat().address;
    let node = start(dir.path(), seat(), std::slice::from_ref(&gone), 2).await;
    let metadata = node.metadata(MetadataRequest::default()).await;
    assert_eq!(metadata.error.unwrap().code(), ErrorCode::NotReady);
    let mut client = node.client().await;
    let described = client
        .describe_cluster(DescribeClusterRequest {})
        .await
        .unwrap()
        .into_inner();
    assert!(!described.formed);
    let hello = client
        .hello(HelloRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert!(hello.cluster_id.is_empty() && hello.broker_id == node.id());
    let error = client
        .create_topic(topic("t", 1, 1))
        .await
        .unwrap()
        .into_inner()
        .error;
    assert_eq!(error.unwrap().code(), ErrorCode::NotReady);
    // The reason names the seed.
    let deadline = tokio::time::Instant::now() + LONG;
    while !node
        .controller
        .waits()
        .iter()
        .any(|wait| wait.contains(&gone))
    {
        assert!(
            tokio::time::Instant::now() < deadline,
            "{:?}",
            node.controller.waits()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    node.stop().await;
}

/// A topic `t` of one partition, led by the only broker.
async fn create_alone(node: &Node) {
    node.ready().await;
    let created = node.client().await.create_topic(topic("t", 1, 1)).await;
    assert_eq!(created.unwrap().into_inner().error, None);
    node.leaders("t").await;
    node.ready().await;
}

async fn waits_for(node: &Node, said: impl Fn(&str) -> bool) -> String {
    let deadline = tokio::time::Instant::now() + LONG;
    loop {
        let waits = node.controller.waits();
        if let Some(found) = waits.iter().find(|wait| said(wait)) {
            return found.clone();
        }
        assert!(tokio::time::Instant::now() < deadline, "{waits:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn s4_replica_whose_disk_failed_is_not_open_and_is_named() {
    let disk = SimFs::new(1);
    let mut config = StoreConfig::new("/data");
    config.fs = Arc::new(disk.clone());
    let node = start_over(config, seat(), &[], 1).await;
    create_alone(&node).await;
    assert_eq!(node.controller.progress().open, 1);
    assert_eq!(node.controller.stopped(), Vec::<String>::new());
    let (partition, hosted) = node.replicas.list().pop_first().unwrap();
    let Hosted::Open(replica) = hosted else {
        panic!("{partition} is quarantined")
    };
    disk.inject(Fault {
        op: FaultOp::Sync,
        path_contains: partition.topic.to_string(),
        skip: 0,
        times: u64::MAX,
        errno: 5,
    });
    let admission = replica.group().admit(10).await.unwrap();
    let doomed = Payload::batch(vec![0; 10].into(), 1, 0);
    let doomed = replica.group().propose(admission, doomed, None).unwrap();
    assert!(doomed.await.is_err());
    let wait = waits_for(&node, |wait| wait.contains("has stopped")).await;
    assert!(
        wait.contains(" of t/0 ") && wait.contains("restart"),
        "{wait}"
    );
    assert_eq!(node.controller.stopped(), [wait.as_str()]);
    assert_eq!(node.faults().await, [wait]);
    let progress = node.controller.progress();
    assert_eq!((progress.open, progress.desired), (0, 1));
    assert_eq!(replica.serving(), None);
    drop(replica);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s7_quarantined_replica_keeps_its_broker_from_being_ready() {
    let dir = tempfile::tempdir().unwrap();
    let node = start(dir.path(), seat(), &[], 1).await;
    create_alone(&node).await;
    let (partition, _) = node.replicas.list().pop_first().unwrap();
    node.stop().await;
    let topic_dir = dir.path().join("topics").join(partition.topic.to_string());
    std::fs::remove_dir_all(topic_dir).unwrap();

    let node = start(dir.path(), seat(), &[], 1).await;
    let wait = waits_for(&node, |wait| wait.contains("quarantined")).await;
    assert!(wait.starts_with("t/0: "), "{wait}");
    assert_eq!(node.faults().await, [wait]);
    // It stopped nothing: a restart would not help.
    assert_eq!(node.controller.stopped(), Vec::<String>::new());
    node.stop().await;
}

/// Partitions led, and of those the ones that lack a voter, of all these brokers.
async fn led_and_lacking(nodes: &[Node]) -> (u32, u32) {
    let mut sums = (0, 0);
    for node in nodes {
        let replicas = node.described().await.replicas.unwrap();
        sums.0 += replicas.leading;
        sums.1 += replicas.under_replicated;
    }
    sums
}

async fn until_led_and_lacking(nodes: &[Node], wanted: (u32, u32)) {
    let deadline = tokio::time::Instant::now() + LONG;
    loop {
        let sums = led_and_lacking(nodes).await;
        if sums == wanted {
            return;
        }
        assert!(tokio::time::Instant::now() < deadline, "{sums:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn broker_tells_its_time_its_space_and_whose_voters_are_missing() {
    let mut trio = three().await;
    trio.create(&topic("t", 2, 3)).await;
    until_led_and_lacking(&trio.nodes, (2, 0)).await;

    let before = SystemClock.wall_ms();
    let described = trio.nodes[0].described().await;
    let after = SystemClock.wall_ms();
    assert!((before..=after).contains(&described.time_ms));
    let storage = described.storage.unwrap();
    assert!(storage.available_bytes <= storage.total_bytes && storage.available_bytes > 0);
    assert!(storage.floor_bytes < storage.total_bytes);
    let replicas = described.replicas.unwrap();
    assert_eq!((replicas.desired, replicas.open), (2, 2));
    assert_eq!((replicas.quarantined, replicas.orphaned), (0, 0));

    trio.nodes.pop().unwrap().stop().await;
    until_led_and_lacking(&trio.nodes, (2, 2)).await;
    trio.stop_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_watchers_share_the_pictures_and_all_see_every_change() {
    let dir = tempfile::tempdir().unwrap();
    let node = start(dir.path(), seat(), &[], 0).await;
    node.ready().await;
    let made_before = node.api.pictures.made();
    let mut watches = Vec::new();
    for _ in 0..10 {
        let mut client = node.client().await;
        for _ in 0..100 {
            let watch = client.watch_metadata(WatchMetadataRequest {}).await;
            watches.push(watch.unwrap().into_inner());
        }
    }
    let mut seeing = tokio::task::JoinSet::new();
    for mut watch in watches {
        seeing.spawn(async move {
            let (mut index, mut epochs, mut pushes) = (0, BTreeMap::new(), 0);
            loop {
                let push = watch.next().await.unwrap().unwrap();
                pushes += 1;
                // S28: nothing goes back.
                assert!(push.cluster_index >= index);
                index = push.cluster_index;
                let topic = push.topics.first();
                for one in topic.iter().flat_map(|topic| &topic.partitions) {
                    let known = epochs.entry(one.partition).or_insert(0);
                    assert!(one.leader_epoch >= *known);
                    *known = one.leader_epoch;
                }
                let is_led = |topic: &TopicInfo| {
                    topic.partitions.len() == 12 && topic.partitions.iter().all(|p| p.leader != 0)
                };
                if topic.is_some_and(is_led) {
                    return pushes;
                }
            }
        });
    }
    let mut client = node.client().await;
    let created = client.create_topic(topic("t", 6, 1)).await.unwrap();
    assert!(created.into_inner().error.is_none());
    let add = AddPartitionsRequest {
        name: "t".to_owned(),
        partitions: 12,
        topic_id: bytes::Bytes::new(),
    };
    let added = client.add_partitions(add).await.unwrap();
    assert!(added.into_inner().error.is_none());
    let mut pushes = 0;
    let all = async {
        while let Some(seen) = seeing.join_next().await {
            pushes += seen.unwrap();
        }
    };
    tokio::time::timeout(LONG, all).await.unwrap();
    let made = node.api.pictures.made() - made_before;
    assert!(made * 5 < pushes, "{made} pictures for {pushes} pushes");
    node.stop().await;
}
