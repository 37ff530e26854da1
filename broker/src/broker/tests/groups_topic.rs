//! `__groups` over whole brokers: made when first asked for, led, kept over restarts and losses, and
//! no business of programs.

use bytes::Bytes;
use qute_proto::ids::TopicId;
use qute_proto::internal::{RemoveGroup, groups_command::Command};
use qute_proto::topic::GROUPS_NAME;
use qute_proto::v1::log_client::LogClient;
use qute_proto::v1::{
    self, AddPartitionsRequest, BrokerState, CreateTopicRequest, DeleteTopicRequest,
    DescribeClusterRequest, ErrorCode, ListOffsetsRequest, MetadataRequest, OffsetQuery, TopicInfo,
};
use tokio_stream::StreamExt as _;

use super::cluster::{Cluster, LONG, connect, found, until};
use crate::partition::testing::batch;

const PARTITIONS: u32 = 16;

/// A command that changes nothing.
fn harmless() -> Command {
    Command::Remove(RemoveGroup {
        group: "never-was".to_owned(),
    })
}

async fn ensure(cluster: &Cluster, at: usize) -> u64 {
    let controller = &cluster.broker(at).controller;
    controller.ensure_groups_topic(LONG).await.unwrap()
}

/// Which broker serves each partition.
fn served(cluster: &Cluster) -> Vec<Option<usize>> {
    let serves = |at: usize, number: u32| {
        let broker = cluster.brokers[at].as_ref();
        broker
            .and_then(|broker| broker.group_replicas.get(number))
            .is_some_and(|replica| replica.serving().is_some())
    };
    (0..PARTITIONS)
        .map(|number| (0..cluster.brokers.len()).find(|at| serves(*at, number)))
        .collect()
}

async fn all_served(cluster: &Cluster) -> Vec<usize> {
    until("a leader of each partition of `__groups`", || {
        served(cluster).iter().all(Option::is_some)
    })
    .await;
    served(cluster).into_iter().flatten().collect()
}

/// Writes to each partition, wherever it is led. Gives the index that each command got.
async fn write_to_all(cluster: &Cluster) -> Vec<u64> {
    let mut indexes = Vec::new();
    for number in 0..PARTITIONS {
        let written = found("a command to be applied", async || {
            let leader = all_served(cluster).await[number as usize];
            let replica = cluster.broker(leader).group_replicas.get(number).unwrap();
            // A lead may be lost in between.
            let written = replica.command(harmless()).await;
            written.ok().map(|(_, index)| index)
        });
        indexes.push(written.await);
    }
    indexes
}

async fn listed(cluster: &Cluster, at: usize, index: u64) -> TopicInfo {
    let request = MetadataRequest {
        min_cluster_index: index,
        ..MetadataRequest::default()
    };
    let answer = cluster.admin(at).await.metadata(request).await.unwrap();
    let topics = answer.into_inner().topics;
    topics
        .into_iter()
        .find(|topic| topic.name == GROUPS_NAME)
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_topic_asked_for_anywhere_is_made_once_led_and_kept() {
    let mut cluster = Cluster::start(|_, _| {}).await;
    let leader = cluster.controller_seen_by(0).unwrap();
    let is_known = |at: usize| {
        let view = cluster.broker(at).controller.view();
        view.topics_by_id.contains_key(&TopicId::GROUPS)
    };
    assert!(!(0..3).any(is_known));
    let other = (leader + 1) % 3;
    let index = ensure(&cluster, other).await;
    assert!(is_known(other));
    // Everywhere at once, and again.
    let (a, b, c) = tokio::join!(
        ensure(&cluster, 0),
        ensure(&cluster, 1),
        ensure(&cluster, 2)
    );
    assert!(a > 0 && b > 0 && c > 0);

    for at in 0..3 {
        let topic = listed(&cluster, at, index).await;
        assert!(topic.internal);
        assert_eq!(topic.topic_id, TopicId::GROUPS.to_wire());
        assert_eq!(topic.partitions.len(), PARTITIONS as usize);
        assert!(topic.partitions.iter().all(|one| one.replicas.len() == 3));
        assert_eq!(topic.config["segment_bytes"], "16777216");
        let described = cluster.admin(at).await;
        let described = described
            .clone()
            .describe_cluster(DescribeClusterRequest {})
            .await
            .unwrap()
            .into_inner();
        assert_eq!((described.topics, described.partitions), (0, 0));
        // Nothing of it is kept as records.
        assert!(cluster.broker(at).replicas.list().is_empty());
    }
    let mut leaders = all_served(&cluster).await;
    leaders.sort_unstable();
    leaders.dedup();
    assert_eq!(leaders, [0, 1, 2], "leaders are not spread");
    let before = write_to_all(&cluster).await;

    // Clients are routed to its leaders, and the reconcilers have nothing left to do.
    let led = cluster.led_topic(other, GROUPS_NAME, index).await;
    assert!(led.partitions.iter().all(|one| one.leader_epoch > 0));
    cluster.ready().await;

    // Killed: the others go on.
    cluster.abort(other).await;
    let between = write_to_all(&cluster).await;
    assert!(before.iter().zip(&between).all(|(then, now)| now > then));
    cluster.restart(other).await;
    cluster.ready().await;
    until("all replicas of the broker that came back", || {
        cluster.broker(other).group_replicas.list().len() == PARTITIONS as usize
    })
    .await;
    let after = write_to_all(&cluster).await;
    assert!(between.iter().zip(&after).all(|(then, now)| now > then));

    // All at once.
    for at in 0..3 {
        cluster.abort(at).await;
    }
    for at in 0..3 {
        cluster.restart(at).await;
    }
    cluster.ready().await;
    let at_last = write_to_all(&cluster).await;
    assert!(after.iter().zip(&at_last).all(|(then, now)| now > then));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_topic_is_made_while_a_broker_is_down_and_it_takes_its_part_later() {
    let mut cluster = Cluster::start(|_, _| {}).await;
    let leader = cluster.controller_seen_by(0).unwrap();
    let (down, other) = ((leader + 1) % 3, (leader + 2) % 3);
    let id = cluster.broker(down).broker_id();
    cluster.abort(down).await;
    until("the leader notices the loss", || {
        cluster.broker(leader).controller.state(id) == BrokerState::Dead
    })
    .await;
    let index = ensure(&cluster, other).await;
    let topic = listed(&cluster, other, index).await;
    assert!(topic.partitions.iter().all(|one| one.replicas.len() == 3));
    let leaders = all_served(&cluster).await;
    assert!(!leaders.contains(&down));
    let indexes = write_to_all(&cluster).await;

    cluster.restart(down).await;
    cluster.ready().await;
    until("the broker that came back has caught up", || {
        let replicas = &cluster.broker(down).group_replicas;
        (0..PARTITIONS).zip(&indexes).all(|(number, index)| {
            let replica = replicas.get(number);
            replica.is_some_and(|replica| replica.group().applied().next_index > *index)
        })
    })
    .await;
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leads_of_groups_are_handed_over_by_a_broker_that_stops() {
    let mut cluster = Cluster::start(|_, _| {}).await;
    ensure(&cluster, 0).await;
    let leaders = all_served(&cluster).await;
    write_to_all(&cluster).await;
    let stops = leaders[0];
    cluster.brokers[stops].take().unwrap().shutdown().await;
    // The leads are elsewhere by the time it has stopped, unless an heir was a moment too slow.
    let after = all_served(&cluster).await;
    assert!(!after.contains(&stops));
    write_to_all(&cluster).await;
    cluster.shutdown().await;
}

async fn refused_by_log(cluster: &Cluster, topic_id: &Bytes) {
    let mut client = LogClient::new(connect(cluster.address(0)).await);
    let produce = v1::ProduceRequest {
        correlation_id: 1,
        topic_id: topic_id.clone(),
        partition: 0,
        batch: batch(7, 0, 1),
    };
    let answers = client.produce(tokio_stream::iter([produce])).await.unwrap();
    let answer = answers.into_inner().next().await.unwrap().unwrap();
    let Some(v1::produce_response::Result::Error(refusal)) = answer.result else {
        panic!("{answer:?}")
    };
    assert_eq!(refusal.code(), ErrorCode::InvalidArgument, "{refusal:?}");
    assert!(refusal.message.contains("belongs to the cluster"));

    let subscribe = v1::FetchRequest {
        request: Some(v1::fetch_request::Request::Subscribe(v1::Subscribe {
            subscription_id: 1,
            topic_id: topic_id.clone(),
            ..v1::Subscribe::default()
        })),
    };
    // The stream stays open as long as the client's side does.
    let requests = tokio_stream::iter([subscribe]).chain(tokio_stream::pending());
    let answers = client.fetch(requests).await.unwrap();
    let answer = answers.into_inner().next().await.unwrap().unwrap();
    assert!(
        format!("{answer:?}").contains("belongs to the cluster"),
        "{answer:?}"
    );

    let query = OffsetQuery {
        topic_id: topic_id.clone(),
        position: Some(v1::offset_query::Position::End(true)),
        ..OffsetQuery::default()
    };
    let request = ListOffsetsRequest {
        queries: vec![query],
    };
    let answers = client.list_offsets(request).await.unwrap().into_inner();
    let refusal = answers.answers[0].error.clone().unwrap();
    assert_eq!(refusal.code(), ErrorCode::InvalidArgument, "{refusal:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_topic_is_not_for_programs_to_write_read_or_change() {
    let cluster = Cluster::start(|_, _| {}).await;
    ensure(&cluster, 0).await;
    all_served(&cluster).await;
    refused_by_log(&cluster, &TopicId::GROUPS.to_wire()).await;
    refused_by_log(&cluster, &TopicId::CLUSTER.to_wire()).await;

    let leader = cluster.controller_seen_by(0).unwrap();
    let mut admin = cluster.admin(leader).await;
    let add = AddPartitionsRequest {
        name: GROUPS_NAME.to_owned(),
        partitions: 32,
        ..AddPartitionsRequest::default()
    };
    let delete = DeleteTopicRequest {
        name: GROUPS_NAME.to_owned(),
        topic_id: TopicId::GROUPS.to_wire(),
    };
    let create = CreateTopicRequest {
        name: GROUPS_NAME.to_owned(),
        ..CreateTopicRequest::default()
    };
    let add = admin.add_partitions(add).await.unwrap().into_inner().error;
    let delete = admin.delete_topic(delete).await.unwrap().into_inner().error;
    let create = admin.create_topic(create).await.unwrap().into_inner().error;
    for (refusal, code) in [
        (add, ErrorCode::InvalidArgument),
        (delete, ErrorCode::InvalidArgument),
        (create, ErrorCode::InvalidTopicName),
    ] {
        let refusal = refusal.unwrap();
        assert_eq!(refusal.code(), code, "{refusal:?}");
        assert!(refusal.message.contains("cluster itself"), "{refusal:?}");
    }
    let view = cluster.broker(leader).controller.view();
    let topic = &view.topics_by_id[&TopicId::GROUPS];
    assert_eq!(topic.partitions.len(), PARTITIONS as usize);
    cluster.shutdown().await;
}
