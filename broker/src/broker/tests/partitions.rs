//! Partitions added to a topic that is in use.

use qute_proto::ids::TopicId;
use qute_proto::v1::log_client::LogClient;
use qute_proto::v1::{
    self, AddPartitionsRequest, DeleteTopicRequest, ErrorCode, MetadataRequest, TopicInfo,
    WatchMetadataRequest,
};
use tokio_stream::StreamExt as _;

use super::cluster::{Cluster, LONG, connect};
use crate::partition::testing::batch;

fn request(name: &str, partitions: u32) -> AddPartitionsRequest {
    AddPartitionsRequest {
        name: name.to_owned(),
        partitions,
        topic_id: bytes::Bytes::new(),
    }
}

fn is_led(topic: &TopicInfo, partitions: usize) -> bool {
    topic.partitions.len() == partitions && topic.partitions.iter().all(|one| one.leader != 0)
}

#[tokio::test(flavor = "multi_thread")]
async fn added_partitions_are_pushed_led_by_all_and_survive_a_restart() {
    let mut cluster = Cluster::start(|_, _| {}).await;
    let topic = cluster.create_topic("t", 3).await;
    let mut watches = Vec::new();
    for at in 0..3 {
        let mut admin = cluster.admin(at).await;
        let watch = admin.watch_metadata(WatchMetadataRequest {}).await;
        watches.push(watch.unwrap().into_inner());
    }
    let leader = cluster.controller_seen_by(0).unwrap();
    let follower = (leader + 1) % 3;
    let mut admin = cluster.admin(follower).await;
    let asked = admin.add_partitions(request("t", 6)).await;
    let refusal = asked.unwrap().into_inner().error.unwrap();
    assert_eq!(refusal.code(), ErrorCode::NotLeader);
    assert_eq!(
        refusal.leader_hint.unwrap().broker_id,
        cluster.broker(leader).broker_id().0
    );

    let mut admin = cluster.admin(leader).await;
    let asked = admin.add_partitions(request("t", 6)).await.unwrap();
    let answer = asked.into_inner();
    let grown = answer.topic.unwrap();
    assert_eq!(grown.topic_id, topic.topic_id);
    assert_eq!(grown.partitions.len(), 6);
    assert!(grown.partitions.iter().all(|one| one.replicas.len() == 3));
    // Those that were there stay where they were.
    for (now, then) in grown.partitions.iter().zip(&topic.partitions) {
        assert_eq!(now.replicas, then.replicas);
    }
    for watch in &mut watches {
        let led = async {
            loop {
                let push = watch.next().await.unwrap().unwrap();
                if push.cluster_index >= answer.cluster_index && is_led(&push.topics[0], 6) {
                    return push;
                }
            }
        };
        let push = tokio::time::timeout(LONG, led).await.unwrap();
        let added = &push.topics[0].partitions[3..];
        let mut leaders: Vec<u64> = added.iter().map(|one| one.leader).collect();
        leaders.sort_unstable();
        leaders.dedup();
        assert_eq!(leaders.len(), 3, "the new ones are not spread");
    }
    // Asked again: nothing is done.
    let again = admin
        .add_partitions(request("t", 6))
        .await
        .unwrap()
        .into_inner();
    assert!(again.error.is_none());
    assert!(is_led(&again.topic.unwrap(), 6));

    cluster.abort(leader).await;
    cluster.restart(leader).await;
    cluster.ready().await;
    let asked = MetadataRequest {
        min_cluster_index: answer.cluster_index,
        ..MetadataRequest::default()
    };
    let view = cluster.admin(leader).await.metadata(asked).await.unwrap();
    assert_eq!(view.into_inner().topics[0].partitions.len(), 6);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_that_can_not_be_added_are_refused_finally() {
    let cluster = Cluster::start(|_, _| {}).await;
    cluster.create_topic("t", 3).await;
    let leader = cluster.controller_seen_by(0).unwrap();
    let mut admin = cluster.admin(leader).await;
    let other_id = AddPartitionsRequest {
        topic_id: TopicId::random().to_wire(),
        ..request("t", 4)
    };
    let short_id = AddPartitionsRequest {
        topic_id: bytes::Bytes::from_static(b"short"),
        ..request("t", 4)
    };
    for (request, code, says) in [
        (request("t", 2), ErrorCode::InvalidArgument, "never lowered"),
        (request("t", 0), ErrorCode::InvalidArgument, "1 to 1024"),
        (request("t", 1025), ErrorCode::InvalidArgument, "1 to 1024"),
        (request("u", 4), ErrorCode::UnknownTopic, "does not exist"),
        (request("../t", 4), ErrorCode::InvalidTopicName, "name"),
        (other_id, ErrorCode::UnknownTopic, "made again"),
        (short_id, ErrorCode::InvalidArgument, "16 bytes"),
    ] {
        let answer = admin.add_partitions(request).await.unwrap().into_inner();
        let error = answer.error.unwrap();
        assert_eq!(error.code(), code, "{error:?}");
        assert!(error.message.contains(says), "{error:?}");
        assert_eq!(error.authoritative, code == ErrorCode::UnknownTopic);
    }
    cluster.shutdown().await;
}

/// Writes one batch to partition 0 of a topic id.
async fn produce(cluster: &Cluster, at: usize, topic_id: &bytes::Bytes) -> v1::Error {
    let mut client = LogClient::new(connect(cluster.address(at)).await);
    let request = v1::ProduceRequest {
        correlation_id: 1,
        topic_id: topic_id.clone(),
        partition: 0,
        batch: batch(7, 0, 1),
    };
    let answers = client.produce(tokio_stream::iter([request])).await.unwrap();
    let answer = answers.into_inner().next().await.unwrap().unwrap();
    match answer.result.unwrap() {
        v1::produce_response::Result::Error(error) => error,
        v1::produce_response::Result::Ack(ack) => panic!("{ack:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn writes_to_a_topic_made_again_are_told_so_finally_by_every_broker() {
    let cluster = Cluster::start(|_, _| {}).await;
    let old = cluster.create_topic("t", 1).await.topic_id;
    let leader = cluster.controller_seen_by(0).unwrap();
    let request = DeleteTopicRequest {
        name: "t".to_owned(),
        ..Default::default()
    };
    let mut admin = cluster.admin(leader).await;
    let deleted = admin.delete_topic(request).await.unwrap().into_inner();
    assert!(deleted.error.is_none());
    assert_ne!(cluster.create_topic("t", 1).await.topic_id, old);
    // S28: a delete made again means the one that is gone.
    let request = DeleteTopicRequest {
        name: "t".to_owned(),
        topic_id: old.clone(),
    };
    let refused = admin
        .delete_topic(request)
        .await
        .unwrap()
        .into_inner()
        .error;
    let refused = refused.unwrap();
    assert_eq!(refused.code(), ErrorCode::UnknownTopic);
    assert!(refused.authoritative && refused.message.contains("made again"));
    for at in 0..3 {
        // Until its replica is gone a broker may say that it does not lead, or does not serve.
        let end = tokio::time::Instant::now() + LONG;
        let error = loop {
            let error = produce(&cluster, at, &old).await;
            if error.code() == ErrorCode::UnknownTopic {
                break error;
            }
            assert!(tokio::time::Instant::now() < end, "{error:?}");
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        };
        assert!(error.authoritative, "{error:?}");
        assert!(error.message.contains("has been made since"), "{error:?}");
        // An id that never was is not.
        let stranger = produce(&cluster, at, &TopicId::random().to_wire()).await;
        assert_eq!(stranger.code(), ErrorCode::UnknownTopic);
        assert!(!stranger.authoritative);
    }
    cluster.shutdown().await;
}
