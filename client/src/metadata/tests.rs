//! The cache and its tasks against brokers.

use std::time::Duration;

use futures::future::join_all;
use qute_proto::ids::BrokerId;

use super::*;
use crate::error::ErrorKind;
use crate::fake::{Fake, TOPIC};
use crate::{Client, ClientConfig};

fn cache(client: &Client) -> &MetadataCache {
    &client.shared.metadata
}

fn leader(client: &Client) -> Option<(u64, u64)> {
    let topic = cache(client).known_topic(TOPIC)?;
    topic.leader(0).map(|l| (l.broker.0, l.epoch))
}

/// Waits until the client's view says so.
async fn until_leader(client: &Client, wanted: (u64, u64)) {
    let mut views = cache(client).subscribe();
    while leader(client) != Some(wanted) {
        views.changed().await.unwrap();
    }
}

#[tokio::test]
async fn refreshes_wanted_by_a_thousand_are_one_call_in_flight() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fake.state.lock().metadata.delay = Duration::from_millis(100);
    let before = fake.state.lock().metadata.total;
    let refreshed = join_all((0..1000).map(|_| cache(&client).refresh())).await;
    assert!(refreshed.iter().all(Result::is_ok));
    let calls = fake.state.lock();
    assert_eq!(calls.metadata.under_way_max, 1);
    let total = calls.metadata.total - before;
    assert!((1..=2).contains(&total), "{total} calls");
}

#[tokio::test]
async fn unknown_topic_looked_up_by_a_thousand_asks_the_controller_once_at_a_time() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fake.state.lock().metadata.delay = Duration::from_millis(50);
    let before = fake.state.lock().metadata.total;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    let found = join_all((0..1000).map(|_| cache(&client).topic("none", deadline))).await;
    for topic in found {
        assert_eq!(topic.unwrap_err().kind(), ErrorKind::UnknownTopic);
    }
    let calls = fake.state.lock();
    // A refresh and a search may be under way together.
    assert!(calls.metadata.under_way_max <= 2);
    let total = calls.metadata.total - before;
    assert!(total <= 8, "{total} calls");
}

#[tokio::test]
async fn view_that_nobody_pushes_is_refreshed_by_its_age() {
    let fake = Fake::start(1, 1).await;
    fake.state.lock().metadata.watch_is_dead = true;
    let config = ClientConfig::new(&fake.bootstrap()).unwrap();
    let config = config.metadata_max_age(Duration::from_millis(50));
    let client = Client::connect_with(config).await.unwrap();
    until_leader(&client, (1, 5)).await;
    fake.set_leader(0, 1, 6);
    until_leader(&client, (1, 6)).await;
}

#[tokio::test]
async fn view_of_a_silent_broker_is_refreshed_elsewhere() {
    let fake = Fake::start(2, 1).await;
    let client = fake.client().await;
    fake.isolate(1);
    fake.state.lock().partition(0).leader = (2, 6);
    // Whoever pushes, and however often the old view is told.
    cache(&client).request_refresh_elsewhere(BrokerId(1));
    until_leader(&client, (2, 6)).await;
}

#[tokio::test]
async fn topic_gone_recreated_or_there_is_told_apart() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let old = cache(&client).known_topic(TOPIC).unwrap();
    assert!(matches!(
        cache(&client).confirm(&old).await,
        Some(Incarnation::Present(_))
    ));
    let topic = fake.change(|state| {
        state.cluster_index += 1;
        state.topics.remove(TOPIC).unwrap()
    });
    let gone = cache(&client).confirm(&old).await.unwrap();
    assert_eq!(gone, Incarnation::Missing);
    assert_eq!(gone.error(&old).unwrap().kind(), ErrorKind::UnknownTopic);
    fake.change(|state| {
        state.cluster_index += 1;
        let anew = (qute_proto::ids::TopicId::random(), topic.1);
        state.topics.insert(TOPIC.to_owned(), anew);
    });
    let anew = cache(&client).confirm(&old).await.unwrap();
    assert!(matches!(&anew, Incarnation::Recreated(topic) if topic.id != old.id));
    assert_eq!(anew.error(&old).unwrap().kind(), ErrorKind::TopicRecreated);
    assert_eq!(cache(&client).incarnation(&old), anew, "S28: now for good");
}

#[tokio::test]
async fn topic_that_nobody_can_vouch_for_is_not_called_gone() {
    let fake = Fake::start(1, 1).await;
    let config = ClientConfig::new(&fake.bootstrap()).unwrap();
    let client = Client::connect_with(config.call_timeout(Duration::from_millis(200)))
        .await
        .unwrap();
    let topic = cache(&client).known_topic(TOPIC).unwrap();
    // Its brokers know no leader of `__cluster`.
    fake.state.lock().controller = 9;
    let mut missing = Topic::clone(&topic);
    missing.name = "other".into();
    assert_eq!(cache(&client).confirm(&missing).await, None);
    assert!(cache(&client).may_exist(&missing).await);
}
