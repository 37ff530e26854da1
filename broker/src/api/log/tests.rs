//! The `Log` service over loopback TCP, above a broker of one with the real store and Raft.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use qute_proto::batch::{BATCH_BYTES_MAX, Codec, HEADER_BYTES, ProducerStamp};
use qute_proto::ids::{PartitionId, ProducerId, TopicId};
use qute_proto::v1;
use qute_proto::v1::log_client::LogClient;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tonic::transport::Channel;

use super::LogService;
use crate::partition::testing::{
    PATIENCE, START_MS, TestBroker, TestDirectory, batch, partition, records,
};

struct Served {
    broker: TestBroker,
    service: LogService,
    address: SocketAddr,
    stop: CancellationToken,
    server: tokio::task::JoinHandle<()>,
}

impl Served {
    async fn start() -> Self {
        Self::over(TestBroker::start().await).await
    }

    async fn over(broker: TestBroker) -> Self {
        let service = LogService::new(broker.replicas.clone(), std::sync::Arc::new(TestDirectory));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let serving = super::super::server::builder()
            .add_service(service.server())
            .serve_with_incoming_shutdown(
                TcpListenerStream::new(listener),
                stop.clone().cancelled_owned(),
            );
        let server = tokio::spawn(async move { serving.await.unwrap() });
        Self {
            broker,
            service,
            address,
            stop,
            server,
        }
    }

    async fn client(&self) -> LogClient<Channel> {
        LogClient::connect(format!("http://{}", self.address))
            .await
            .unwrap()
            .max_decoding_message_size(16 << 20)
            .max_encoding_message_size(256 << 20)
    }

    async fn stop(self) {
        self.service.shutdown().await;
        self.stop.cancel();
        self.server.await.unwrap();
        self.broker.stop().await;
    }
}

struct Produce {
    requests: mpsc::Sender<v1::ProduceRequest>,
    answers: Streaming<v1::ProduceResponse>,
    next: u64,
}

impl Produce {
    async fn open(client: &mut LogClient<Channel>) -> Self {
        let (requests, outgoing) = mpsc::channel(64);
        let answers = client
            .produce(ReceiverStream::new(outgoing))
            .await
            .unwrap()
            .into_inner();
        Self {
            requests,
            answers,
            next: 0,
        }
    }

    async fn send(&mut self, to: PartitionId, batch: Bytes) -> u64 {
        self.next += 1;
        let request = v1::ProduceRequest {
            correlation_id: self.next,
            topic_id: to.topic.to_wire(),
            partition: to.partition,
            batch,
        };
        self.requests.send(request).await.unwrap();
        self.next
    }

    async fn answer(&mut self) -> (u64, Result<v1::ProduceAck, v1::Error>) {
        let answer = within(self.answers.message()).await.unwrap().unwrap();
        let result = match answer.result.unwrap() {
            v1::produce_response::Result::Ack(ack) => Ok(ack),
            v1::produce_response::Result::Error(error) => Err(error),
        };
        (answer.correlation_id, result)
    }

    async fn call(&mut self, to: PartitionId, batch: Bytes) -> Result<v1::ProduceAck, v1::Error> {
        let sent = self.send(to, batch).await;
        let (answered, result) = self.answer().await;
        assert_eq!(sent, answered);
        result
    }
}

struct Fetch {
    requests: mpsc::Sender<v1::FetchRequest>,
    answers: Streaming<v1::FetchResponse>,
}

impl Fetch {
    async fn open(client: &mut LogClient<Channel>) -> Self {
        let (requests, outgoing) = mpsc::channel(64);
        let answers = client
            .fetch(ReceiverStream::new(outgoing))
            .await
            .unwrap()
            .into_inner();
        Self { requests, answers }
    }

    async fn send(&self, request: v1::fetch_request::Request) {
        let request = v1::FetchRequest {
            request: Some(request),
        };
        self.requests.send(request).await.unwrap();
    }

    async fn subscribe(&self, subscription_id: u64, to: PartitionId, offset: u64) {
        self.send(v1::fetch_request::Request::Subscribe(v1::Subscribe {
            subscription_id,
            topic_id: to.topic.to_wire(),
            partition: to.partition,
            offset,
            follower: false,
        }))
        .await;
    }

    async fn credit(&self, bytes: u64) {
        self.send(v1::fetch_request::Request::Credit(v1::Credit { bytes }))
            .await;
    }

    async fn next(&mut self) -> (u64, v1::fetch_response::Response) {
        let answer = within(self.answers.message()).await.unwrap().unwrap();
        (answer.subscription_id, answer.response.unwrap())
    }

    async fn subscribed(&mut self) -> (u64, v1::Subscribed) {
        match self.next().await {
            (id, v1::fetch_response::Response::Subscribed(subscribed)) => (id, subscribed),
            other => panic!("not subscribed: {other:?}"),
        }
    }

    async fn batches(&mut self) -> (u64, v1::Batches) {
        match self.next().await {
            (id, v1::fetch_response::Response::Batches(batches)) => (id, batches),
            other => panic!("no batches: {other:?}"),
        }
    }

    async fn error(&mut self) -> (u64, v1::Error) {
        match self.next().await {
            (id, v1::fetch_response::Response::Error(error)) => (id, error),
            other => panic!("no error: {other:?}"),
        }
    }
}

async fn within<T>(wait: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, wait).await.unwrap()
}

fn code(result: Result<v1::ProduceAck, v1::Error>) -> v1::ErrorCode {
    result.unwrap_err().code()
}

fn elsewhere() -> PartitionId {
    PartitionId {
        topic: TopicId(uuid::Uuid::from_u128(404)),
        partition: 0,
    }
}

/// Overwrites header bytes and repairs the checksum, as a hostile producer would.
fn forge(batch: &Bytes, at: usize, with: &[u8]) -> Bytes {
    let mut forged = batch.to_vec();
    forged[at..at + with.len()].copy_from_slice(with);
    let crc = crc32c::crc32c(&forged[8..]);
    forged[4..8].copy_from_slice(&crc.to_le_bytes());
    Bytes::from(forged)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn produced_batches_are_fetched_untouched() {
    let served = Served::start().await;
    served.broker.open(0).await;
    let mut client = served.client().await;
    let mut produce = Produce::open(&mut client).await;
    let mut sent = Vec::new();
    for n in 0..20 {
        let bytes = batch(7, n * 2, 2);
        produce.send(partition(0), bytes.clone()).await;
        sent.push((n * 2, bytes));
    }
    for n in 0..20 {
        let (id, ack) = produce.answer().await;
        assert_eq!((id, ack.unwrap().base_offset), (n + 1, n * 2));
    }
    let mut fetch = Fetch::open(&mut client).await;
    fetch.credit(1 << 20).await;
    fetch.subscribe(3, partition(0), 0).await;
    let (id, subscribed) = fetch.subscribed().await;
    assert_eq!((id, subscribed.high_watermark), (3, 40));
    let mut got = Vec::new();
    while got.len() < sent.len() {
        let (id, batches) = fetch.batches().await;
        assert_eq!(id, 3);
        got.extend(
            batches
                .batches
                .into_iter()
                .map(|b| (b.base_offset, b.batch)),
        );
    }
    assert_eq!(got, sent);
    served.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_batches_get_typed_errors_and_the_stream_goes_on() {
    let served = Served::start().await;
    served.broker.open(0).await;
    let mut client = served.client().await;
    let mut produce = Produce::open(&mut client).await;
    let sound = batch(7, 0, 3);
    let zeros = vec![0; 100_000];
    let stamp = ProducerStamp {
        producer_id: ProducerId(8),
        epoch: 0,
        base_sequence: 0,
    };
    let compressed = records(stamp, &[&zeros], Codec::Zstd);
    let mut flipped = sound.to_vec();
    flipped[HEADER_BYTES] ^= 0x10;
    let mut wrong_crc = sound.to_vec();
    wrong_crc[4] ^= 1;
    let corrupt = [
        ("zero-length", Bytes::new()),
        ("truncated", sound.slice(..sound.len() - 1)),
        ("truncated header", sound.slice(..10)),
        ("bit-flipped", flipped.into()),
        ("wrong checksum", wrong_crc.into()),
        ("four billion records", forge(&sound, 12, &[0xff; 4])),
        ("no record", forge(&sound, 12, &[0; 4])),
        ("unknown codec", forge(&sound, 8, &[77])),
        ("newer format", forge(&sound, 3, &[200])),
    ];
    for (what, bytes) in corrupt {
        let refused = code(produce.call(partition(0), bytes).await);
        assert_eq!(refused, v1::ErrorCode::CorruptBatch, "{what}");
    }
    let too_large = [
        (
            "zip bomb",
            forge(&compressed, 20, &(1u32 << 31).to_le_bytes()),
        ),
        (
            "five megabytes",
            Bytes::from(vec![1; BATCH_BYTES_MAX + (1 << 20)]),
        ),
    ];
    for (what, bytes) in too_large {
        let refused = code(produce.call(partition(0), bytes).await);
        assert_eq!(refused, v1::ErrorCode::BatchTooLarge, "{what}");
    }
    let large = vec![1; 2 << 20];
    let stamp = ProducerStamp::NONE;
    let refused = produce
        .call(partition(0), records_unchecked(stamp, &large))
        .await;
    assert_eq!(code(refused), v1::ErrorCode::RecordTooLarge);
    let ack = produce.call(partition(0), sound).await.unwrap();
    assert_eq!(ack.base_offset, 0);
    served.stop().await;
}

/// A batch of one record that is larger than a builder would take, forged from a small one.
fn records_unchecked(stamp: ProducerStamp, value: &[u8]) -> Bytes {
    let small = records(stamp, &[b""], Codec::None);
    let mut forged = small[..HEADER_BYTES].to_vec();
    forged.extend_from_slice(value);
    let length = u32::try_from(value.len()).unwrap().to_le_bytes();
    forged[16..20].copy_from_slice(&length);
    forged[20..24].copy_from_slice(&length);
    forge(&Bytes::from(forged), 9, &[0])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn message_of_100_megabytes_costs_its_own_stream_only() {
    let served = Served::start().await;
    served.broker.open(0).await;
    let mut client = served.client().await;
    let mut other = served.client().await;
    let mut serving = Produce::open(&mut other).await;
    serving.call(partition(0), batch(7, 0, 1)).await.unwrap();
    let mut produce = Produce::open(&mut client).await;
    produce
        .send(partition(0), Bytes::from(vec![0; 100 << 20]))
        .await;
    assert!(within(produce.answers.message()).await.is_err());
    let ack = serving.call(partition(0), batch(7, 1, 1)).await.unwrap();
    assert_eq!(ack.base_offset, 1);
    served.stop().await;
}

/// A produce request of a newer client: it has a field that this broker does not know.
#[derive(Clone, PartialEq, prost::Message)]
struct NewerRequest {
    #[prost(uint64, tag = "1")]
    correlation_id: u64,
    #[prost(bytes = "bytes", tag = "2")]
    topic_id: Bytes,
    #[prost(bytes = "bytes", tag = "4")]
    batch: Bytes,
    #[prost(string, tag = "900")]
    unknown: String,
}

#[test]
fn unknown_fields_of_a_request_are_ignored() {
    use prost::Message;
    let newer = NewerRequest {
        correlation_id: 5,
        topic_id: partition(0).topic.to_wire(),
        batch: batch(7, 0, 1),
        unknown: "what a later release says".into(),
    };
    let read = v1::ProduceRequest::decode(Bytes::from(newer.encode_to_vec())).unwrap();
    assert_eq!(read.correlation_id, 5);
    assert_eq!(read.batch, newer.batch);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_that_are_not_here_are_told_apart() {
    let served = Served::start().await;
    served.broker.open(0).await;
    let mut client = served.client().await;
    let mut produce = Produce::open(&mut client).await;
    let not_here = produce
        .call(partition(1), batch(7, 0, 1))
        .await
        .unwrap_err();
    assert_eq!(not_here.code(), v1::ErrorCode::NotLeader);
    let hint = not_here.leader_hint.unwrap();
    assert_eq!((hint.broker_id, hint.leader_epoch), (9, 5));
    assert_eq!(hint.address, "elsewhere:7700");
    let refused = produce.call(partition(99), batch(7, 0, 1)).await;
    assert_eq!(code(refused), v1::ErrorCode::UnknownPartition);
    let unknown = produce.call(elsewhere(), batch(7, 0, 1)).await.unwrap_err();
    assert_eq!(unknown.code(), v1::ErrorCode::UnknownTopic);
    assert!(!unknown.authoritative);
    let request = v1::ProduceRequest {
        correlation_id: 1000,
        topic_id: Bytes::from_static(b"short"),
        ..v1::ProduceRequest::default()
    };
    produce.requests.send(request).await.unwrap();
    let (id, refused) = produce.answer().await;
    assert_eq!((id, code(refused)), (1000, v1::ErrorCode::InvalidArgument));
    assert!(produce.call(partition(0), batch(7, 0, 1)).await.is_ok());
    served.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_keep_their_order_within_a_partition() {
    let served = Served::start().await;
    served.broker.open(0).await;
    let mut client = served.client().await;
    let mut produce = Produce::open(&mut client).await;
    // Refused at once, between batches that have to wait for the disk.
    produce.send(partition(0), batch(7, 0, 1)).await;
    produce.send(partition(0), Bytes::new()).await;
    produce.send(partition(0), batch(7, 5, 1)).await;
    produce.send(partition(0), batch(7, 1, 1)).await;
    let answers = [
        produce.answer().await,
        produce.answer().await,
        produce.answer().await,
        produce.answer().await,
    ];
    let ids: Vec<u64> = answers.iter().map(|(id, _)| *id).collect();
    assert_eq!(ids, [1, 2, 3, 4]);
    let codes: Vec<_> = answers
        .into_iter()
        .map(|(_, result)| result.err().map(|error| error.code()))
        .collect();
    assert_eq!(
        codes,
        [
            None,
            Some(v1::ErrorCode::CorruptBatch),
            Some(v1::ErrorCode::OutOfOrderSequence),
            None
        ]
    );
    served.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_partition_does_not_hold_up_the_others() {
    let served = Served::start().await;
    let full = served.broker.open(0).await;
    served.broker.open(1).await;
    let mut taken = Vec::new();
    while let Ok(admission) = full.group().try_admit(8 << 20) {
        taken.push(admission);
    }
    let mut client = served.client().await;
    let mut produce = Produce::open(&mut client).await;
    let started = std::time::Instant::now();
    for sequence in 0..40 {
        produce.send(partition(0), batch(7, sequence, 1)).await;
    }
    let other = produce.send(partition(1), batch(7, 0, 1)).await;
    for _ in 0..=40 {
        let (id, result) = produce.answer().await;
        match id == other {
            true => assert!(result.is_ok(), "{result:?}"),
            false => assert_eq!(code(result), v1::ErrorCode::Overloaded),
        }
    }
    let took = started.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    drop(taken);
    assert!(produce.call(partition(0), batch(7, 0, 1)).await.is_ok());
    served.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acks_go_out_while_a_batch_waits_for_the_budget() {
    let served = Served::start().await;
    served.broker.open(0).await;
    let budget = &served.service.shared.produce_budget;
    let (first, second) = (batch(7, 0, 1), batch(7, 1, 1));
    // Room for one of them.
    let left = first.len().max(second.len());
    let rest = u32::try_from(budget.available_permits() - left).unwrap();
    let rest = budget.acquire_many(rest).await.unwrap();
    let mut client = served.client().await;
    let mut produce = Produce::open(&mut client).await;
    produce.send(partition(0), first).await;
    produce.send(partition(0), second).await;
    let (first, second) = (produce.answer().await, produce.answer().await);
    assert!(first.1.is_ok() && second.1.is_ok(), "{first:?} {second:?}");
    drop(rest);
    served.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_flow_only_against_credit() {
    let served = Served::start().await;
    let replica = served.broker.open(0).await;
    for n in 0..4 {
        let stamp = ProducerStamp {
            producer_id: ProducerId(7),
            epoch: 0,
            base_sequence: n,
        };
        let bytes = records(stamp, &[&vec![b'x'; 700_000]], Codec::None);
        replica.append(bytes).unwrap().await.unwrap();
    }
    let mut client = served.client().await;
    let mut fetch = Fetch::open(&mut client).await;
    fetch.subscribe(1, partition(0), 0).await;
    fetch.subscribed().await;
    let quiet = tokio::time::timeout(Duration::from_millis(50), fetch.next()).await;
    assert!(quiet.is_err(), "sent without credit: {quiet:?}");
    // One byte buys one message, and leaves a debt.
    fetch.credit(1).await;
    let (_, first) = fetch.batches().await;
    assert_eq!(first.batches.len(), 1);
    fetch.credit(700_000).await;
    let quiet = tokio::time::timeout(Duration::from_millis(50), fetch.next()).await;
    assert!(quiet.is_err(), "sent in debt: {quiet:?}");
    fetch.credit(1 << 30).await;
    for n in 1..4 {
        let (_, batches) = fetch.batches().await;
        assert_eq!(batches.batches[0].base_offset, n);
    }
    served.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscription_at_the_end_is_pushed_what_commits() {
    let served = Served::start().await;
    let replica = served.broker.open(0).await;
    served.broker.open(1).await;
    let mut client = served.client().await;
    let mut fetch = Fetch::open(&mut client).await;
    fetch.credit(1 << 20).await;
    fetch.subscribe(1, partition(0), 0).await;
    fetch.subscribe(2, partition(1), 0).await;
    fetch.subscribed().await;
    fetch.subscribed().await;
    for n in 0..5 {
        replica.append(batch(7, n, 1)).unwrap().await.unwrap();
        let (id, batches) = fetch.batches().await;
        assert_eq!((id, batches.batches[0].base_offset), (1, n));
        assert_eq!(batches.high_watermark, n + 1);
    }
    served.stop().await;
}

// S18
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn offset_beyond_the_end_is_out_of_range_with_bounds() {
    let served = Served::start().await;
    let replica = served.broker.open(0).await;
    replica.append(batch(7, 0, 5)).unwrap().await.unwrap();
    replica
        .set_log_start(qute_proto::ids::Offset(2))
        .await
        .unwrap();
    let mut client = served.client().await;
    let mut fetch = Fetch::open(&mut client).await;
    for offset in [1, 6, u64::MAX] {
        fetch.subscribe(1, partition(0), offset).await;
        let (_, error) = fetch.error().await;
        assert_eq!(error.code(), v1::ErrorCode::OffsetOutOfRange);
        let bounds = error.bounds.unwrap();
        assert_eq!((bounds.log_start_offset, bounds.high_watermark), (2, 5));
    }
    // The id is free again, and the end itself is in range.
    fetch.subscribe(1, partition(0), 5).await;
    assert_eq!(fetch.subscribed().await.1.high_watermark, 5);
    served.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscriptions_take_turns_and_end_one_by_one() {
    let served = Served::start().await;
    let mut client = served.client().await;
    for number in 0..2 {
        let replica = served.broker.open(number).await;
        for n in 0..4 {
            let stamp = ProducerStamp {
                producer_id: ProducerId(7),
                epoch: 0,
                base_sequence: n,
            };
            let bytes = records(stamp, &[&vec![b'x'; 900_000]], Codec::None);
            replica.append(bytes).unwrap().await.unwrap();
        }
    }
    let mut fetch = Fetch::open(&mut client).await;
    fetch.subscribe(10, partition(0), 0).await;
    fetch.subscribe(11, partition(1), 0).await;
    fetch.subscribed().await;
    fetch.subscribed().await;
    fetch.subscribe(10, partition(0), 0).await;
    let (_, in_use) = fetch.error().await;
    assert_eq!(in_use.code(), v1::ErrorCode::InvalidArgument);
    fetch.credit(1 << 30).await;
    let mut order = Vec::new();
    for _ in 0..8 {
        order.push(fetch.batches().await.0);
    }
    assert_eq!(order[..4].iter().filter(|id| **id == 10).count(), 2);
    // One partition goes away; the other subscription lives on.
    served.broker.replicas.close(partition(0)).await;
    let (id, error) = fetch.error().await;
    assert_eq!((id, error.code()), (10, v1::ErrorCode::NotLeader));
    fetch
        .send(v1::fetch_request::Request::Unsubscribe(v1::Unsubscribe {
            subscription_id: 11,
        }))
        .await;
    fetch.subscribe(11, partition(1), 3).await;
    fetch.subscribed().await;
    assert_eq!(fetch.batches().await.1.batches[0].base_offset, 3);
    served.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn offsets_are_listed_in_the_order_of_the_queries() {
    let served = Served::start().await;
    let replica = served.broker.open(0).await;
    replica.append(batch(7, 0, 5)).unwrap().await.unwrap();
    let query = |to: PartitionId, position| v1::OffsetQuery {
        topic_id: to.topic.to_wire(),
        partition: to.partition,
        position,
    };
    let queries = vec![
        query(partition(0), Some(v1::offset_query::Position::End(true))),
        query(partition(0), Some(v1::offset_query::Position::Start(true))),
        query(elsewhere(), Some(v1::offset_query::Position::End(true))),
        query(
            partition(0),
            Some(v1::offset_query::Position::TimeMs(START_MS + 1)),
        ),
        query(partition(0), None),
    ];
    let mut client = served.client().await;
    let answers = client
        .list_offsets(v1::ListOffsetsRequest { queries })
        .await
        .unwrap()
        .into_inner()
        .answers;
    let short: Vec<_> = answers
        .iter()
        .map(|one| one.error.as_ref().map(v1::Error::code).ok_or(one.offset))
        .collect();
    assert_eq!(
        short,
        [
            Err(5),
            Err(0),
            Ok(v1::ErrorCode::UnknownTopic),
            Err(5),
            Ok(v1::ErrorCode::InvalidArgument)
        ]
    );
    served.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_goes_away_leaves_no_stream_behind() {
    let served = Served::start().await;
    served.broker.open(0).await;
    let mut client = served.client().await;
    let mut fetch = Fetch::open(&mut client).await;
    fetch.subscribe(1, partition(0), 0).await;
    fetch.subscribed().await;
    let produce = Produce::open(&mut client).await;
    drop((fetch, produce, client));
    served.service.streams.close();
    within(served.service.streams.wait()).await;
    served.stop().await;
}

/// The next message must be this: no batch, and the high watermark.
async fn told(fetch: &mut Fetch, high_watermark: u64) {
    let (id, batches) = fetch.batches().await;
    assert!(batches.batches.is_empty(), "{batches:?}");
    assert_eq!((id, batches.high_watermark), (1, high_watermark));
}

#[tokio::test]
async fn subscription_without_credit_is_told_how_far_it_lags() {
    let served = Served::start().await;
    served.broker.open(0).await;
    let mut client = served.client().await;
    let mut produce = Produce::open(&mut client).await;
    let mut fetch = Fetch::open(&mut client).await;
    fetch.subscribe(1, partition(0), 0).await;
    assert_eq!(fetch.subscribed().await.1.high_watermark, 0);
    produce.call(partition(0), batch(7, 0, 3)).await.unwrap();
    told(&mut fetch, 3).await;
    produce.call(partition(0), batch(7, 3, 2)).await.unwrap();
    told(&mut fetch, 5).await;
    // Once it has not moved nothing is told; what comes next are the records, for no less credit.
    fetch.credit(1).await;
    let (_, batches) = fetch.batches().await;
    assert_eq!((batches.batches.len(), batches.high_watermark), (1, 5));
    served.stop().await;
}

#[tokio::test]
async fn subscription_without_credit_ends_with_its_replica() {
    let served = Served::start().await;
    let replica = served.broker.open(0).await;
    let mut client = served.client().await;
    let mut produce = Produce::open(&mut client).await;
    let mut fetch = Fetch::open(&mut client).await;
    fetch.subscribe(1, partition(0), 0).await;
    fetch.subscribed().await;
    produce.call(partition(0), batch(7, 0, 3)).await.unwrap();
    told(&mut fetch, 3).await;
    let id = replica.id();
    drop(replica);
    served
        .broker
        .replicas
        .delete(partition(0), id)
        .await
        .unwrap();
    assert_eq!(fetch.error().await.0, 1);
    served.stop().await;
}
