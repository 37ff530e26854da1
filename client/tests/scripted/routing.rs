//! Who is asked for what, when brokers say things that are old or wrong.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    reason = "test code"
)]

use crate::fake;

use std::time::Duration;

use fake::{Fake, Produce, TOPIC, error, not_leader};
use futures::future::join_all;
use qute_client::{
    Client, ClientConfig, ErrorKind, OffsetSpec, Outcome, Producer, ProducerConfig, Record,
};
use qute_proto::v1::ErrorCode;

fn record() -> Record {
    Record::to(TOPIC).key("k").value("x")
}

async fn producer(fake: &Fake) -> Producer {
    fake.client()
        .await
        .producer(ProducerConfig::default())
        .unwrap()
}

fn asked(fake: &Fake) -> Vec<u64> {
    fake.requests().iter().map(|request| request.0).collect()
}

#[tokio::test]
async fn stale_routes_of_a_thousand_partitions_share_one_metadata_call() {
    // One endpoint: a second one is asked, too, when the first keeps silent.
    let fake = Fake::start(1, 1000).await;
    let client = fake.client().await;
    let lead_all = |leader| {
        let mut state = fake.state.lock();
        for partition in 0..1000 {
            state.partition(partition).leader = leader;
        }
    };
    lead_all((2, 6));
    let before = {
        let mut state = fake.state.lock();
        // Nobody is told, and refusals name nobody.
        state.metadata.watch_is_dead = true;
        state.hide_hints = true;
        state.metadata.delay = Duration::from_millis(100);
        state.metadata.total
    };
    let calls = (0..1000).map(|partition| {
        let client = client.clone();
        async move {
            let query = [(partition, OffsetSpec::End)];
            client.list_offsets(TOPIC, &query).await
        }
    });
    let back = async {
        while fake.state.lock().metadata.total == before {
            tokio::task::yield_now().await;
        }
        // What that call will tell.
        lead_all((1, 7));
    };
    let (listed, ()) = tokio::join!(join_all(calls), back);
    for listed in listed {
        assert_eq!(listed.unwrap()[0].leader_epoch, 7);
    }
    let state = fake.state.lock();
    assert_eq!(state.metadata.under_way_max, 1, "one call in flight");
    let total = state.metadata.total - before;
    assert!(total <= 3, "{total} calls");
}

#[tokio::test]
async fn hint_to_an_unknown_broker_without_an_address_is_not_obeyed() {
    let fake = Fake::start(2, 1).await;
    let mut refusals = 4;
    fake.on_produce(move |_, _| {
        if refusals > 0 {
            refusals -= 1;
            return Produce::Refuse(not_leader(77, 6));
        }
        Produce::Serve
    });
    let producer = producer(&fake).await;
    producer.send(record()).await.unwrap();
    assert_eq!(
        asked(&fake),
        [1; 5],
        "only the leader that is known is asked"
    );
}

#[tokio::test]
async fn hint_to_an_unknown_broker_with_its_address_is_obeyed() {
    let fake = Fake::start(2, 1).await;
    // It has joined a moment ago: no view tells of it.
    let address = fake.state.lock().addresses.remove(&2).unwrap();
    fake.isolate(1);
    fake.state.lock().partition(0).leader = (2, 6);
    fake.on_produce(move |broker, _| {
        if broker == 1 {
            let mut refusal = not_leader(2, 6);
            refusal.leader_hint.as_mut().unwrap().address = address.clone();
            return Produce::Refuse(refusal);
        }
        Produce::Serve
    });
    let producer = producer(&fake).await;
    producer.send(record()).await.unwrap();
    assert!(asked(&fake).starts_with(&[1]) && asked(&fake).ends_with(&[2]));
}

#[tokio::test]
async fn leader_that_is_cut_off_and_calls_all_others_dead_is_left_though_it_answers() {
    let fake = Fake::start(2, 1).await;
    fake.isolate(1);
    fake.state.lock().partition(0).leader = (2, 6);
    fake.on_produce(|broker, _| match broker {
        1 => Produce::Refuse(error(ErrorCode::NotReady)),
        _ => Produce::Serve,
    });
    // By its word everybody else is dead.
    let client = fake.client_by(1).await;
    let producer = client.producer(ProducerConfig::default()).unwrap();
    producer.send(record()).await.unwrap();
    assert_eq!(asked(&fake).last(), Some(&2));
}

#[tokio::test]
async fn partition_without_a_leader_is_written_as_soon_as_it_has_one() {
    let fake = Fake::start(2, 1).await;
    fake.set_leader(0, 0, 0);
    let producer = producer(&fake).await;
    let ticket = producer.enqueue(record()).await.unwrap();
    // Nobody can be asked, so nobody is.
    assert_eq!(asked(&fake), [0_u64; 0]);
    fake.set_leader(0, 2, 9);
    ticket.await.unwrap();
    assert_eq!(asked(&fake), [2]);
}

#[tokio::test]
async fn s28_broker_of_another_cluster_is_never_written_to() {
    let (fake, stranger) = (Fake::start(2, 1).await, Fake::start(1, 1).await);
    // The address of broker 2 has been given to somebody else.
    let theirs = stranger.state.lock().addresses[&1].clone();
    fake.change(|state| {
        state.addresses.insert(2, theirs);
        state.partition(0).leader = (2, 6);
        state.cluster_index += 1;
    });
    let client = fake.client_by(1).await;
    let producer = client.producer(ProducerConfig::default()).unwrap();
    let ticket = producer.enqueue(record()).await.unwrap();
    let closed = producer.close(Duration::from_secs(1)).await;
    assert_eq!(closed.not_written, 1, "{closed:?}");
    let error = ticket.await.unwrap_err();
    assert_eq!(error.outcome(), Some(Outcome::NotWritten), "{error}");
    assert_eq!(asked(&stranger), [0_u64; 0]);
}

#[tokio::test]
async fn connect_to_two_clusters_at_once_keeps_to_one() {
    let (one, other) = (Fake::start(1, 1).await, Fake::start(1, 1).await);
    let both = format!("{},{}", one.bootstrap(), other.bootstrap());
    let client = Client::connect(&both).await.unwrap();
    let id = client.cluster_info().await.unwrap().cluster_id;
    for _ in 0..20 {
        client.list_topics().await.unwrap();
        assert_eq!(client.cluster_info().await.unwrap().cluster_id, id);
    }
}

#[tokio::test]
async fn create_topic_through_one_client_is_seen_by_another_that_waits_for_its_index() {
    let fake = Fake::start(2, 1).await;
    let (one, other) = (fake.client_by(1).await, fake.client_by(2).await);
    fake.state.lock().metadata.watch_is_dead = true;
    one.create_topic(qute_client::TopicSpec::new("new"))
        .await
        .unwrap();
    other.wait_for_index(one.cluster_index()).await.unwrap();
    assert!(other.cluster_index() >= one.cluster_index());
    let producer = other.producer(ProducerConfig::default()).unwrap();
    producer.send(Record::to("new").value("x")).await.unwrap();
}

#[tokio::test]
async fn index_that_no_broker_reaches_is_waited_for_until_the_deadline() {
    let fake = Fake::start(1, 1).await;
    let config = ClientConfig::new(&fake.bootstrap()).unwrap();
    let client = Client::connect_with(config.call_timeout(Duration::from_millis(300)))
        .await
        .unwrap();
    let late = client.wait_for_index(1_000_000).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Timeout);
}

#[tokio::test]
async fn calls_during_an_outage_of_all_brokers_are_served_when_one_is_back() {
    let fake = Fake::start(1, 1).await;
    let proxy = fake::proxy::Proxy::start(Some(&fake.bootstrap())).await;
    let address = proxy.address.to_string();
    fake.change(|state| state.addresses.insert(1, address.clone()));
    let config = ClientConfig::new(&address).unwrap();
    let client = Client::connect_with(config.call_timeout(Duration::from_secs(60)))
        .await
        .unwrap();
    let refused = proxy.accepted() + 3;
    proxy.shut();
    let back = async {
        while proxy.accepted() < refused {
            tokio::task::yield_now().await;
        }
        proxy.open();
    };
    let offsets = [(0, OffsetSpec::End)];
    let (topics, topic, offsets, index, ()) = tokio::join!(
        client.list_topics(),
        client.describe_topic(TOPIC),
        client.list_offsets(TOPIC, &offsets),
        client.wait_for_index(client.cluster_index() + 1),
        async {
            back.await;
            fake.change(|state| state.cluster_index += 1);
        },
    );
    assert_eq!(topics.unwrap().len(), 1);
    assert_eq!(topic.unwrap().partitions.len(), 1);
    assert_eq!(offsets.unwrap().len(), 1);
    index.unwrap();
}

#[tokio::test]
async fn calls_of_a_lazy_client_without_anybody_there_are_told_at_once() {
    let gone = fake::proxy::Proxy::start(None).await;
    gone.shut();
    let config = ClientConfig::new(&gone.address.to_string()).unwrap();
    // Longer than any test may take.
    let client = Client::lazy(config.call_timeout(Duration::from_secs(3600))).unwrap();
    let offsets = [(0, OffsetSpec::End)];
    let errors = [
        client.list_topics().await.unwrap_err(),
        client.describe_topic("t").await.unwrap_err(),
        client.list_offsets("t", &offsets).await.unwrap_err(),
        client.wait_for_index(1).await.unwrap_err(),
        client.delete_topic("t").await.unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::Unreachable, "{error}");
    }
}
