//! Subscriptions at brokers that do not lead, over the wire.

use bytes::Bytes;
use qute_proto::v1::fetch_request::Request;
use qute_proto::v1::fetch_response::Response;
use qute_proto::v1::log_client::LogClient;
use qute_proto::v1::{self, ErrorCode, TopicInfo};
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::cluster::{Cluster, LONG, connect};
use crate::partition::testing::batch;

struct Fetch {
    requests: mpsc::Sender<v1::FetchRequest>,
    answers: Streaming<v1::FetchResponse>,
}

impl Fetch {
    async fn open(cluster: &Cluster, at: usize) -> Self {
        let (requests, outgoing) = mpsc::channel(16);
        let mut client = LogClient::new(connect(cluster.address(at)).await);
        let answers = client.fetch(ReceiverStream::new(outgoing)).await.unwrap();
        let fetch = Self {
            requests,
            answers: answers.into_inner(),
        };
        fetch
            .send(Request::Credit(v1::Credit { bytes: 1 << 20 }))
            .await;
        fetch
    }

    async fn send(&self, request: Request) {
        let request = v1::FetchRequest {
            request: Some(request),
        };
        self.requests.send(request).await.unwrap();
    }

    async fn subscribe(&mut self, topic: &TopicInfo, offset: u64) -> v1::Subscribed {
        self.send(Request::Subscribe(v1::Subscribe {
            subscription_id: 1,
            topic_id: topic.topic_id.clone(),
            partition: 0,
            offset,
            follower: true,
        }))
        .await;
        match self.next().await {
            Response::Subscribed(subscribed) => subscribed,
            other => panic!("not subscribed: {other:?}"),
        }
    }

    async fn next(&mut self) -> Response {
        let next = tokio::time::timeout(LONG, self.answers.next()).await;
        next.unwrap().unwrap().unwrap().response.unwrap()
    }

    async fn batches(&mut self) -> v1::Batches {
        match self.next().await {
            Response::Batches(batches) => batches,
            other => panic!("no batches: {other:?}"),
        }
    }
}

/// Writes one batch at the leader.
async fn produce(cluster: &Cluster, leader: usize, topic: &TopicInfo, bytes: Bytes) -> u64 {
    let mut client = LogClient::new(connect(cluster.address(leader)).await);
    let request = v1::ProduceRequest {
        correlation_id: 1,
        topic_id: topic.topic_id.clone(),
        partition: 0,
        batch: bytes,
    };
    let answers = client.produce(tokio_stream::iter([request])).await.unwrap();
    let answer = answers.into_inner().next().await.unwrap().unwrap();
    match answer.result.unwrap() {
        v1::produce_response::Result::Ack(ack) => ack.base_offset,
        v1::produce_response::Result::Error(error) => panic!("{error:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn follower_serves_a_subscription_that_asks_for_it_until_it_is_isolated() {
    let cluster = Cluster::start(|_, _| {}).await;
    let topic = cluster.create_topic("t", 1).await;
    let (id, epoch) = (topic.partitions[0].leader, topic.partitions[0].leader_epoch);
    let leads = |at: &usize| cluster.broker(*at).broker_id().0 == id;
    let leader = (0..3).find(leads).unwrap();
    let follower = (leader + 1) % 3;
    produce(&cluster, leader, &topic, batch(7, 0, 3)).await;

    // The leader serves as one, whoever is asked for.
    let mut at_leader = Fetch::open(&cluster, leader).await;
    assert!(!at_leader.subscribe(&topic, 0).await.follower);
    let mut fetch = Fetch::open(&cluster, follower).await;
    let subscribed = fetch.subscribe(&topic, 0).await;
    assert!(subscribed.follower);
    assert_eq!(subscribed.leader_epoch, epoch);
    let batches = fetch.batches().await;
    assert_eq!(batches.batches[0].batch, batch(7, 0, 3));
    assert_eq!(batches.high_watermark, 3);
    produce(&cluster, leader, &topic, batch(7, 3, 2)).await;
    let batches = fetch.batches().await;
    assert_eq!(
        (batches.batches[0].base_offset, batches.high_watermark),
        (3, 5)
    );
    // S18: beyond its end it waits.
    let mut ahead = Fetch::open(&cluster, follower).await;
    assert!(ahead.subscribe(&topic, 7).await.follower);
    produce(&cluster, leader, &topic, batch(7, 5, 2)).await;
    produce(&cluster, leader, &topic, batch(7, 7, 1)).await;
    assert_eq!(ahead.batches().await.batches[0].base_offset, 7);
    for offset in [5, 7] {
        assert_eq!(fetch.batches().await.batches[0].base_offset, offset);
    }

    cluster.broker(follower).peers.cut();
    for fetch in [&mut fetch, &mut ahead] {
        match fetch.next().await {
            Response::Error(error) => {
                assert_eq!(error.code(), ErrorCode::NotReady, "{error:?}");
                assert_eq!(error.leader_hint.unwrap().broker_id, id);
            }
            other => panic!("{other:?}"),
        }
    }
    cluster.shutdown().await;
}
