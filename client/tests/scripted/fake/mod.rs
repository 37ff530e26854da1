//! A stand-in for brokers, for the client's tests only: real gRPC on loopback, one shared state
//! behind all its endpoints, and a script that says what goes wrong.
//!
//! It keeps the rules that clients lean on: sequences are taken in order (S12: the last five
//! batches of a producer are known), a fetch sends only while credit is above zero, views carry
//! the cluster index.

#![allow(dead_code, reason = "each test file uses its part")]

mod cluster;
pub mod fetch;
pub mod groups;
pub mod proxy;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use parking_lot::Mutex;
use qute_client::{Client, ClientConfig};
use qute_proto::batch::BatchHeader;
use qute_proto::ids::{ClusterId, TopicId};
use qute_proto::v1::cluster_server::{Cluster, ClusterServer};
use qute_proto::v1::groups_server::GroupsServer;
use qute_proto::v1::log_server::{Log, LogServer};
use qute_proto::v1::offset_query::Position;
use qute_proto::v1::produce_response::Result as ProduceResult;
use qute_proto::v1::{self, ErrorCode};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};
use tonic::{Request, Response, Status, Streaming};

pub const TOPIC: &str = "t";

type Boxed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What to do with a produce request.
pub enum Produce {
    /// As a leader would.
    Serve,
    /// Write it, then end the stream without an answer.
    ServeThenCut,
    /// Refuse it.
    Refuse(v1::Error),
    /// Never answer.
    Swallow,
    /// Say that it was written before; write nothing.
    Duplicate,
    /// Never answer, and read nothing more from the stream.
    Freeze,
}

/// What the broker does about a request.
enum Reply {
    Answer(ProduceResult),
    Silence,
    Cut,
    Freeze,
}

type ProduceScript = Box<dyn FnMut(u64, &BatchHeader) -> Produce + Send>;

#[derive(Clone, Default)]
pub struct Table {
    epoch: u32,
    next_sequence: u64,
    last: VecDeque<(u64, u64)>,
}

#[derive(Clone, Default)]
pub struct Partition {
    /// Broker id and epoch.
    pub leader: (u64, u64),
    pub log_start: u64,
    pub next_offset: u64,
    pub batches: Vec<(u64, Bytes)>,
    /// Broker time by base offset; without an entry 1 ms.
    pub times: BTreeMap<u64, u64>,
    /// Brokers with a voting replica, besides the leader.
    pub followers: Vec<u64>,
    pub tables: HashMap<u64, Table>,
}

pub struct State {
    pub cluster_id: ClusterId,
    pub cluster_index: u64,
    pub addresses: BTreeMap<u64, String>,
    pub topics: BTreeMap<String, (TopicId, Vec<Partition>)>,
    pub controller: u64,
    pub produce: ProduceScript,
    /// Broker, producer epoch and base sequence of each request, in order of arrival.
    pub requests: Vec<(u64, u32, u64)>,
    /// Streams to be cut after so many more fetched batches.
    pub cut_fetch_after: Option<usize>,
    /// Greatest number of bytes sent beyond the credit given, over all fetch streams.
    pub fetch_overdraft: i64,
    /// Create calls: write the topic, then fail the call.
    pub cut_create: bool,
    /// Delete calls: delete the topic, somebody makes it again at once, and the call fails.
    pub recreate_after_delete: bool,
    /// The next delete call: this broker becomes the controller, and the call is never answered.
    pub deposed_on_delete: Option<u64>,
    /// How many create calls there were.
    pub creates: usize,
    /// Who leads created topics, and since which epoch.
    pub created_leader: (u64, u64),
    /// What brokers say of themselves.
    pub faults: BTreeMap<u64, Vec<String>>,
    /// What every broker says its wall clock shows; 0: nothing.
    pub told_ms: u64,
    /// The next call to add partitions: add them, then fail the call.
    pub cut_add: bool,
    /// Settings by topic.
    pub configs: HashMap<String, HashMap<String, String>>,
    /// The answer to the next alteration is lost.
    pub cut_alter: bool,
    /// So many partitions more, which somebody else adds right after that.
    pub added_elsewhere: usize,
    /// What brokers that are cut off from the others believe.
    pub old_views: BTreeMap<u64, v1::MetadataResponse>,
    pub flip_bit_in_fetch: bool,
    /// Bytes of batches sent, over all fetch streams.
    pub fetched_bytes: usize,
    /// Subscriptions that have been sent what there was and credit allowed.
    pub served_subscriptions: usize,
    /// Counted up to end all fetch streams.
    pub fetch_cuts: usize,
    /// What the brokers tell that they accept.
    pub limits: Option<v1::Limits>,
    pub metadata: MetadataCalls,
    pub fetch: fetch::Script,
    pub racks: BTreeMap<u64, String>,
    /// Of brokers that are not alive.
    pub states: BTreeMap<u64, v1::BrokerState>,
    /// Broker time of batches written from now on.
    pub clock_ms: u64,
    /// List-offsets calls refused by those that do not lead name nobody.
    pub hide_hints: bool,
    pub offset_calls: usize,
    pub groups: groups::Script,
}

/// Metadata calls, watches not included.
#[derive(Default)]
pub struct MetadataCalls {
    pub total: usize,
    pub under_way: usize,
    pub under_way_max: usize,
    /// How long each takes.
    pub delay: Duration,
    /// So many calls fail with this status first.
    pub fail: Option<(usize, tonic::Code)>,
    /// Nothing is pushed to those that watch.
    pub watch_is_dead: bool,
}

#[derive(Clone)]
pub struct Fake {
    pub state: Arc<Mutex<State>>,
    changed: watch::Sender<u64>,
}

#[derive(Clone)]
struct Endpoint {
    broker: u64,
    fake: Fake,
}

impl Fake {
    /// Brokers with ids from 1, and a topic whose partitions all are led by broker 1, epoch 5.
    pub async fn start(brokers: u64, partitions: usize) -> Self {
        let partition = Partition {
            leader: (1, 5),
            ..Partition::default()
        };
        let state = State {
            cluster_id: ClusterId::random(),
            cluster_index: 10,
            addresses: BTreeMap::new(),
            topics: BTreeMap::from([(
                TOPIC.to_owned(),
                (TopicId::random(), vec![partition; partitions]),
            )]),
            controller: 1,
            produce: Box::new(|_, _| Produce::Serve),
            requests: Vec::new(),
            cut_fetch_after: None,
            fetch_overdraft: 0,
            cut_create: false,
            recreate_after_delete: false,
            deposed_on_delete: None,
            creates: 0,
            created_leader: (1, 1),
            faults: BTreeMap::new(),
            told_ms: 0,
            cut_add: false,
            configs: HashMap::new(),
            cut_alter: false,
            added_elsewhere: 0,
            old_views: BTreeMap::new(),
            flip_bit_in_fetch: false,
            fetched_bytes: 0,
            served_subscriptions: 0,
            fetch_cuts: 0,
            limits: None,
            metadata: MetadataCalls::default(),
            fetch: fetch::Script::default(),
            racks: BTreeMap::new(),
            states: BTreeMap::new(),
            clock_ms: 1,
            hide_hints: false,
            offset_calls: 0,
            groups: groups::Script::default(),
        };
        let fake = Self {
            state: Arc::new(Mutex::new(state)),
            changed: watch::Sender::new(0),
        };
        for broker in 1..=brokers {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap().to_string();
            fake.state.lock().addresses.insert(broker, address);
            let endpoint = Endpoint {
                broker,
                fake: fake.clone(),
            };
            tokio::spawn(
                tonic::transport::Server::builder()
                    .add_service(ClusterServer::new(endpoint.clone()))
                    .add_service(LogServer::new(endpoint.clone()))
                    .add_service(GroupsServer::new(endpoint))
                    .serve_with_incoming(TcpListenerStream::new(listener)),
            );
        }
        fake
    }

    /// A client that has heard only of one broker.
    pub async fn client_by(&self, broker: u64) -> Client {
        let address = self.state.lock().addresses[&broker].clone();
        Client::connect(&address).await.unwrap()
    }

    pub fn bootstrap(&self) -> String {
        let state = self.state.lock();
        state
            .addresses
            .values()
            .cloned()
            .collect::<Vec<_>>()
            .join(",")
    }

    pub async fn client(&self) -> Client {
        let config = ClientConfig::new(&self.bootstrap()).unwrap();
        Client::connect_with(config.call_timeout(Duration::from_secs(5)))
            .await
            .unwrap()
    }

    /// Changes the state, and has the change pushed to watchers and fetchers.
    pub fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let result = change(&mut self.state.lock());
        self.changed.send_modify(|version| *version += 1);
        result
    }

    pub fn on_produce(&self, script: impl FnMut(u64, &BatchHeader) -> Produce + Send + 'static) {
        self.state.lock().produce = Box::new(script);
    }

    pub fn set_leader(&self, partition: usize, broker: u64, epoch: u64) {
        self.change(|state| state.partition(partition).leader = (broker, epoch));
    }

    /// Cuts a broker off from the others: it keeps its view, and believes the others dead.
    pub fn isolate(&self, broker: u64) {
        self.change(|state| {
            let mut view = state.view();
            for info in &mut view.brokers {
                if info.broker_id != broker {
                    info.state = v1::BrokerState::Dead.into();
                }
            }
            state.old_views.insert(broker, view);
        });
    }

    pub fn requests(&self) -> Vec<(u64, u32, u64)> {
        self.state.lock().requests.clone()
    }

    /// Values in the log of a partition, in order.
    pub fn values(&self, partition: usize) -> Vec<String> {
        self.values_of(TOPIC, partition)
    }

    pub fn values_of(&self, topic: &str, partition: usize) -> Vec<String> {
        let batches = self.state.lock().topics[topic].1[partition].batches.clone();
        let mut values = Vec::new();
        for (_, batch) in batches {
            let view = qute_proto::batch::BatchView::parse(batch).unwrap();
            for record in view.records().unwrap() {
                let value = record.unwrap().value.unwrap_or_default();
                values.push(String::from_utf8(value.to_vec()).unwrap());
            }
        }
        values
    }
}

impl State {
    pub fn partition(&mut self, partition: usize) -> &mut Partition {
        &mut self.topics.get_mut(TOPIC).unwrap().1[partition]
    }

    fn find(&mut self, topic_id: &[u8], partition: u32) -> Option<&mut Partition> {
        self.topics
            .values_mut()
            .find(|(id, _)| id.to_wire() == topic_id)
            .and_then(|(_, partitions)| partitions.get_mut(partition as usize))
    }

    /// What this broker tells.
    pub fn view_of(&self, broker: u64) -> v1::MetadataResponse {
        let old = self.old_views.get(&broker).cloned();
        old.unwrap_or_else(|| self.view())
    }

    fn view(&self) -> v1::MetadataResponse {
        v1::MetadataResponse {
            cluster_id: self.cluster_id.to_wire(),
            cluster_index: self.cluster_index,
            brokers: self
                .addresses
                .iter()
                .map(|(&broker_id, address)| v1::BrokerInfo {
                    broker_id,
                    address: address.clone(),
                    rack: self.racks.get(&broker_id).cloned().unwrap_or_default(),
                    state: self
                        .states
                        .get(&broker_id)
                        .copied()
                        .unwrap_or(v1::BrokerState::Alive)
                        .into(),
                    ..Default::default()
                })
                .collect(),
            topics: self
                .topics
                .iter()
                .map(|(name, topic)| v1::TopicInfo {
                    config: self.configs.get(name).cloned().unwrap_or_default(),
                    ..topic_info(name, topic)
                })
                .collect(),
            controller: Some(v1::LeaderHint {
                broker_id: self.controller,
                leader_epoch: 1,
                address: String::new(),
            }),
            authoritative: false,
            error: None,
        }
    }
}

fn topic_info(name: &str, (id, partitions): &(TopicId, Vec<Partition>)) -> v1::TopicInfo {
    v1::TopicInfo {
        name: name.to_owned(),
        topic_id: id.to_wire(),
        partitions: (0..)
            .zip(partitions)
            .map(|(partition, state)| v1::PartitionInfo {
                partition,
                leader: state.leader.0,
                leader_epoch: state.leader.1,
                replicas: std::iter::once(state.leader.0)
                    .chain(state.followers.iter().copied())
                    .map(|broker_id| v1::ReplicaInfo {
                        broker_id,
                        replica_id: broker_id,
                        role: v1::ReplicaRole::Voter.into(),
                    })
                    .collect(),
            })
            .collect(),
        config: HashMap::new(),
        internal: name.starts_with("__"),
    }
}

pub fn error(code: ErrorCode) -> v1::Error {
    v1::Error {
        code: code.into(),
        message: code.as_str_name().to_owned(),
        ..Default::default()
    }
}

pub fn not_leader(broker_id: u64, leader_epoch: u64) -> v1::Error {
    v1::Error {
        leader_hint: Some(v1::LeaderHint {
            broker_id,
            leader_epoch,
            address: String::new(),
        }),
        ..error(ErrorCode::NotLeader)
    }
}

impl Endpoint {
    fn produce_one(&self, request: &v1::ProduceRequest) -> Reply {
        let header = BatchHeader::verify(&request.batch).unwrap();
        let stamp = header.producer;
        self.fake.change(|state| {
            state
                .requests
                .push((self.broker, stamp.epoch, stamp.base_sequence));
            let decision = (state.produce)(self.broker, &header);
            match decision {
                Produce::Refuse(error) => return Reply::Answer(ProduceResult::Error(error)),
                Produce::Swallow => return Reply::Silence,
                Produce::Freeze => return Reply::Freeze,
                Produce::Duplicate => {
                    return Reply::Answer(ProduceResult::Ack(v1::ProduceAck {
                        duplicate: true,
                        ..Default::default()
                    }));
                }
                Produce::Serve | Produce::ServeThenCut => {}
            }
            let time_ms = state.clock_ms;
            let result = match state.find(&request.topic_id, request.partition) {
                None => ProduceResult::Error(error(ErrorCode::UnknownTopic)),
                Some(partition) if partition.leader.0 != self.broker => {
                    ProduceResult::Error(not_leader(partition.leader.0, partition.leader.1))
                }
                Some(partition) => partition.append(&header, &request.batch, time_ms),
            };
            match decision {
                Produce::ServeThenCut => Reply::Cut,
                _ => Reply::Answer(result),
            }
        })
    }
}

impl Partition {
    pub fn time_of(&self, base_offset: u64) -> u64 {
        self.times.get(&base_offset).copied().unwrap_or(1)
    }

    fn first_since(&self, time_ms: u64) -> u64 {
        let mut bases = self.batches.iter().map(|(base, _)| *base);
        bases
            .find(|base| self.time_of(*base) >= time_ms)
            .unwrap_or(self.next_offset)
    }

    /// Writes a batch as it is.
    pub fn push(&mut self, batch: Bytes) {
        let header = BatchHeader::verify(&batch).unwrap();
        self.batches.push((self.next_offset, batch));
        self.next_offset += u64::from(header.record_count);
    }

    fn append(&mut self, header: &BatchHeader, batch: &Bytes, time_ms: u64) -> ProduceResult {
        let stamp = header.producer;
        let table = self.tables.entry(stamp.producer_id.0).or_default();
        if stamp.epoch > table.epoch {
            *table = Table {
                epoch: stamp.epoch,
                ..Table::default()
            };
        }
        let known = table
            .last
            .iter()
            .find(|(sequence, _)| *sequence == stamp.base_sequence);
        if let Some(&(_, base_offset)) = known {
            return ProduceResult::Ack(v1::ProduceAck {
                base_offset,
                leader_epoch: self.leader.1,
                duplicate: true,
            });
        }
        if stamp.base_sequence != table.next_sequence || stamp.epoch < table.epoch {
            return ProduceResult::Error(error(ErrorCode::OutOfOrderSequence));
        }
        let base_offset = self.next_offset;
        table.next_sequence += u64::from(header.record_count);
        table.last.push_back((stamp.base_sequence, base_offset));
        if table.last.len() > 5 {
            table.last.pop_front();
        }
        self.next_offset += u64::from(header.record_count);
        self.batches.push((base_offset, batch.clone()));
        self.times.insert(base_offset, time_ms);
        ProduceResult::Ack(v1::ProduceAck {
            base_offset,
            leader_epoch: self.leader.1,
            duplicate: false,
        })
    }
}

#[tonic::async_trait]
impl Log for Endpoint {
    type ProduceStream = Boxed<v1::ProduceResponse>;
    type FetchStream = Boxed<v1::FetchResponse>;

    async fn produce(
        &self,
        request: Request<Streaming<v1::ProduceRequest>>,
    ) -> Result<Response<Self::ProduceStream>, Status> {
        let mut requests = request.into_inner();
        let endpoint = self.clone();
        let (answers, stream) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Some(Ok(request)) = requests.next().await {
                match endpoint.produce_one(&request) {
                    Reply::Cut => {
                        let _ = answers.send(Err(Status::unavailable("cut")));
                        return;
                    }
                    Reply::Silence => {}
                    Reply::Freeze => std::future::pending().await,
                    Reply::Answer(result) => {
                        let _ = answers.send(Ok(v1::ProduceResponse {
                            correlation_id: request.correlation_id,
                            result: Some(result),
                        }));
                    }
                }
            }
        });
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(
            stream,
        ))))
    }

    async fn fetch(
        &self,
        request: Request<Streaming<v1::FetchRequest>>,
    ) -> Result<Response<Self::FetchStream>, Status> {
        let (answers, stream) = mpsc::unbounded_channel();
        let session = fetch::Session::new(self.clone(), answers);
        tokio::spawn(session.run(request.into_inner()));
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(
            stream,
        ))))
    }

    async fn list_offsets(
        &self,
        request: Request<v1::ListOffsetsRequest>,
    ) -> Result<Response<v1::ListOffsetsResponse>, Status> {
        let mut state = self.fake.state.lock();
        state.offset_calls += 1;
        let hide_hints = state.hide_hints;
        let mut answer = |query: &v1::OffsetQuery| {
            let Some(partition) = state.find(&query.topic_id, query.partition) else {
                return v1::OffsetAnswer {
                    error: Some(error(ErrorCode::UnknownTopic)),
                    ..Default::default()
                };
            };
            if partition.leader.0 != self.broker {
                return v1::OffsetAnswer {
                    error: Some(if hide_hints {
                        error(ErrorCode::NotLeader)
                    } else {
                        not_leader(partition.leader.0, partition.leader.1)
                    }),
                    ..Default::default()
                };
            }
            v1::OffsetAnswer {
                offset: match query.position {
                    Some(Position::Start(_)) => partition.log_start,
                    Some(Position::TimeMs(time_ms)) => partition.first_since(time_ms),
                    _ => partition.next_offset,
                },
                leader_epoch: partition.leader.1,
                error: None,
                bounds: Some(v1::OffsetBounds {
                    log_start_offset: partition.log_start,
                    high_watermark: partition.next_offset,
                }),
            }
        };
        let answers = request
            .into_inner()
            .queries
            .iter()
            .map(&mut answer)
            .collect();
        Ok(Response::new(v1::ListOffsetsResponse { answers }))
    }
}

impl Fake {
    /// Waits until it is so.
    pub async fn wait_for(&self, condition: impl Fn(&Self) -> bool) {
        let waiting = async {
            while !condition(self) {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), waiting)
            .await
            .unwrap();
    }
}
