//! Which topic, incarnation and partition a record goes to, while those change.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    reason = "test code"
)]

use crate::fake;

use std::collections::BTreeMap;
use std::time::Duration;

use fake::{Fake, Produce, TOPIC, error};
use futures::future::join_all;
use qute_client::{
    ErrorKind, Outcome, Partitioner, Producer, ProducerConfig, Record, TopicLoad, TopicSpec,
    TopicTemplate, partition_of,
};
use qute_proto::v1::ErrorCode;

fn small_batches() -> ProducerConfig {
    ProducerConfig::default().batch_bytes(1024)
}

#[tokio::test]
async fn partitions_added_while_producing_are_used_and_order_holds_in_each() {
    let fake = Fake::start(2, 4).await;
    let client = fake.client().await;
    let producer = client.producer(small_batches()).unwrap();
    let key = |value: u32| format!("k{}", value % 40);
    let mut tickets = Vec::new();
    for value in 0..2000u32 {
        if value == 1000 {
            client.add_partitions(TOPIC, 8).await.unwrap();
        }
        let record = Record::to(TOPIC).key(key(value)).value(value.to_string());
        let ticket = producer.enqueue(record).await.unwrap();
        let count = if value < 1000 { 4 } else { 8 };
        assert_eq!(
            ticket.partition(),
            partition_of(key(value).as_bytes(), count)
        );
        tickets.push(ticket);
    }
    for ticket in join_all(tickets).await {
        ticket.unwrap();
    }
    let mut total = 0;
    for partition in 0..8 {
        let values: Vec<u32> = fake
            .values(partition)
            .iter()
            .map(|value| value.parse().unwrap())
            .collect();
        assert!(values.is_sorted(), "partition {partition}: {values:?}");
        assert!(partition < 4 || values.iter().all(|&value| value >= 1000));
        total += values.len();
    }
    assert_eq!(total, 2000);
}

/// Deletes the topic and makes it again.
#[allow(clippy::field_reassign_with_default, reason = "it has private fields")]
fn recreate(fake: &Fake, partitions: usize) {
    fake.change(|state| {
        state.cluster_index += 2;
        let (id, old) = state.topics.get_mut(TOPIC).unwrap();
        *id = qute_proto::ids::TopicId::random();
        let mut partition = fake::Partition::default();
        partition.leader = (1, 1);
        *old = vec![partition; partitions];
    });
}

#[tokio::test]
async fn s28_topic_made_again_ends_what_was_taken_in_and_takes_what_comes() {
    let fake = Fake::start(1, 1).await;
    fake.on_produce(|_, _| Produce::Swallow);
    let producer = fake.client().await.producer(small_batches()).unwrap();
    let mut old = Vec::new();
    for value in 0..2000u32 {
        let record = Record::to(TOPIC).value(format!("old {value}"));
        old.push(producer.enqueue(record).await.unwrap());
    }
    fake.wait_for(|fake| !fake.requests().is_empty()).await;
    fake.on_produce(|_, _| Produce::Serve);
    recreate(&fake, 1);
    let mut outcomes: BTreeMap<_, usize> = BTreeMap::new();
    for ticket in old {
        let error = ticket.await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TopicRecreated, "{error}");
        *outcomes
            .entry(error.outcome() == Some(Outcome::Unknown))
            .or_default() += 1;
    }
    assert!(
        outcomes[&true] > 0 && outcomes[&false] > 0,
        "what was sent is in doubt, the rest is not: {outcomes:?}"
    );
    let written = producer.send(Record::to(TOPIC).value("new")).await.unwrap();
    assert_eq!(written.offset, 0);
    assert_eq!(fake.values(0), ["new"]);
    let report = producer.close(Duration::from_secs(5)).await;
    assert_eq!(
        (report.delivered, report.not_written + report.unknown),
        (1, 2000)
    );
    assert_eq!(report.undelivered.len(), 2);
}

#[tokio::test]
async fn s28_call_that_waits_for_room_goes_to_the_topic_made_again() {
    let fake = Fake::start(1, 1).await;
    fake.on_produce(|_, _| Produce::Swallow);
    let config = ProducerConfig::default().buffer_bytes(8 << 20);
    let producer = fake.client().await.producer(config).unwrap();
    let big = || Record::to(TOPIC).key("k").value(vec![0u8; 900 * 1024]);
    let mut old = Vec::new();
    let waiting = loop {
        let mut enqueueing = Box::pin(producer.enqueue(big()));
        match tokio::time::timeout(Duration::from_millis(50), &mut enqueueing).await {
            Ok(ticket) => old.push(ticket.unwrap()),
            Err(_) => break enqueueing,
        }
    };
    fake.on_produce(|_, _| Produce::Serve);
    recreate(&fake, 1);
    let ticket = waiting.await.expect("it was not taken in for the old one");
    assert_eq!(ticket.await.unwrap().offset, 0);
    for ticket in old {
        assert_eq!(ticket.await.unwrap_err().kind(), ErrorKind::TopicRecreated);
    }
}

#[tokio::test]
async fn missing_topic_is_created_with_one_call_and_all_that_waits_is_delivered() {
    let fake = Fake::start(2, 1).await;
    fake.state.lock().controller = 2;
    let template = TopicTemplate::default().partitions(3);
    let config = ProducerConfig::default().create_topics(template);
    let producer = fake.client().await.producer(config).unwrap();
    let sends = (0..100u32).map(|value| {
        let record = Record::to("new")
            .key(value.to_string())
            .value(value.to_string());
        producer.send(record)
    });
    for written in join_all(sends).await {
        written.unwrap();
    }
    assert_eq!(fake.state.lock().creates, 1);
    let stored: usize = (0..3).map(|p| fake.values_of("new", p).len()).sum();
    assert_eq!(stored, 100);
}

#[tokio::test]
async fn missing_topic_that_another_made_first_is_fine() {
    let fake = Fake::start(1, 1).await;
    let config = ProducerConfig::default().create_topics(TopicTemplate::default());
    let client = fake.client().await;
    let producers: Vec<Producer> = (0..8)
        .map(|_| client.producer(config.clone()).unwrap())
        .collect();
    let sends = producers
        .iter()
        .map(|producer| producer.send(Record::to("new").value("x")));
    for written in join_all(sends).await {
        written.unwrap();
    }
    assert_eq!(fake.values_of("new", 0).len(), 8);
}

#[tokio::test]
async fn missing_topic_is_not_created_unless_asked_for() {
    let fake = Fake::start(1, 1).await;
    let producer = fake
        .client()
        .await
        .producer(ProducerConfig::default())
        .unwrap();
    let refused = producer.prepare("new").await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::UnknownTopic);
    assert_eq!(fake.state.lock().creates, 0);
}

#[tokio::test]
async fn created_topic_without_leaders_is_waited_for_until_the_deadline() {
    let fake = Fake::start(1, 1).await;
    fake.state.lock().created_leader = (0, 0);
    let config = ProducerConfig::default()
        .create_topics(TopicTemplate::default())
        .delivery_timeout(Duration::from_millis(400));
    let producer = fake.client().await.producer(config.clone()).unwrap();
    let refused = producer
        .send(Record::to("new").value("x"))
        .await
        .unwrap_err();
    assert_eq!(
        (refused.kind(), refused.outcome(), refused.topic()),
        (ErrorKind::Timeout, Some(Outcome::NotWritten), Some("new"))
    );
}

#[tokio::test]
async fn created_topic_whose_leaders_come_late_takes_what_has_waited() {
    let fake = Fake::start(1, 1).await;
    fake.state.lock().created_leader = (0, 0);
    let config = ProducerConfig::default().create_topics(TopicTemplate::default());
    let producer = fake.client().await.producer(config).unwrap();
    let sending = producer.send(Record::to("new").value("x"));
    let leading = async {
        fake.wait_for(|fake| fake.state.lock().topics.contains_key("new"))
            .await;
        fake.change(|state| state.topics.get_mut("new").unwrap().1[0].leader = (1, 1));
    };
    let (written, ()) = tokio::join!(sending, leading);
    assert_eq!(written.unwrap().offset, 0);
}

#[tokio::test]
async fn created_topic_with_a_leader_for_one_partition_takes_what_is_for_that_one() {
    let fake = Fake::start(1, 1).await;
    fake.state.lock().created_leader = (0, 0);
    let config = ProducerConfig::default()
        .create_topics(TopicTemplate::default().partitions(2))
        .delivery_timeout(Duration::from_secs(30));
    let producer = fake.client().await.producer(config).unwrap();
    let sending = producer.send(Record::to("new").partition(1).value("x"));
    let leading = async {
        fake.wait_for(|fake| fake.state.lock().topics.contains_key("new"))
            .await;
        fake.change(|state| state.topics.get_mut("new").unwrap().1[1].leader = (1, 1));
    };
    let (written, ()) = tokio::join!(sending, leading);
    assert_eq!(written.unwrap().offset, 0);
}

/// Sends keys that name a partition there, and leaves the rest to the default.
struct ByName;

impl Partitioner for ByName {
    fn partition(&self, record: &Record, topic: &TopicLoad<'_>) -> Option<u32> {
        assert_eq!(topic.partitions(), 3);
        assert!(topic.load(0).available && !topic.load(7).available);
        let key = std::str::from_utf8(record.key.as_deref()?).ok()?;
        key.strip_prefix("to ")?.parse().ok()
    }
}

#[tokio::test]
async fn partitioner_of_the_program_decides_what_it_wants_to() {
    let fake = Fake::start(1, 3).await;
    let config = ProducerConfig::default().partitioner(ByName);
    let producer = fake.client().await.producer(config).unwrap();
    let send = |record: Record| producer.send(record.value("x"));
    let to = || Record::to(TOPIC);
    assert_eq!(send(to().key("to 2")).await.unwrap().partition, 2);
    let by_key = send(to().key("k1")).await.unwrap();
    assert_eq!(by_key.partition, partition_of(b"k1", 3));
    let named = send(to().key("to 2").partition(1)).await.unwrap();
    assert_eq!(named.partition, 1, "the record's own comes first");
    send(to()).await.unwrap();
    let refused = send(to().key("to 3")).await.unwrap_err();
    assert_eq!(
        (refused.kind(), refused.outcome(), refused.partition()),
        (
            ErrorKind::UnknownPartition,
            Some(Outcome::NotWritten),
            Some(3)
        )
    );
}

#[tokio::test]
async fn keyless_traffic_leaves_a_frozen_leader_and_comes_back() {
    let fake = Fake::start(2, 2).await;
    fake.state.lock().partition(1).leader = (2, 5);
    fake.on_produce(|broker, _| match broker {
        2 => Produce::Freeze,
        _ => Produce::Serve,
    });
    let client = fake.client().await;
    let producer = client.producer(small_batches()).unwrap();
    let enqueue = || producer.enqueue(Record::to(TOPIC).value(vec![b'x'; 100]));
    // Until it goes elsewhere for a long time.
    let moved = async {
        let mut elsewhere = 0;
        while elsewhere < 2000 {
            let ticket = enqueue().await.unwrap();
            elsewhere = if ticket.partition() == 0 {
                elsewhere + 1
            } else {
                0
            };
        }
    };
    tokio::time::timeout(Duration::from_secs(10), moved)
        .await
        .expect("traffic moves away");
    let frozen = fake.requests().iter().any(|&(broker, ..)| broker == 2);
    assert!(frozen, "it was tried");
    fake.on_produce(|_, _| Produce::Serve);
    fake.set_leader(1, 1, 6);
    let back = async {
        while enqueue().await.unwrap().partition() == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), back)
        .await
        .expect("traffic comes back");
    producer.flush().await;
    assert!(producer.report().is_clean());
}

#[tokio::test]
async fn full_stream_of_a_frozen_broker_holds_up_no_other_broker() {
    let fake = Fake::start(2, 64).await;
    fake.change(|state| {
        for partition in 1..64 {
            state.partition(partition).leader = (2, 5);
        }
    });
    fake.on_produce(|broker, _| match broker {
        2 => Produce::Freeze,
        _ => Produce::Serve,
    });
    let config = ProducerConfig::default().buffer_bytes(8 << 20);
    let client = fake.client().await;
    let producer = client.producer(config).unwrap();
    // More than its stream holds, and as much of the buffer as its partitions get.
    let mut stuck = Vec::new();
    for partition in 1..64 {
        let record = || {
            Record::to(TOPIC)
                .partition(partition)
                .value(vec![0; 16 * 1024])
        };
        for _ in 0..100 {
            let enqueueing = producer.enqueue(record());
            let limit = Duration::from_millis(1);
            match tokio::time::timeout(limit, enqueueing).await {
                Ok(ticket) => stuck.push(ticket.unwrap()),
                Err(_) => break,
            }
        }
    }
    assert!(stuck.len() > 100, "{}", stuck.len());
    for value in 0..200u32 {
        let record = Record::to(TOPIC).partition(0).value(value.to_string());
        assert_eq!(
            producer.send(record).await.unwrap().offset,
            u64::from(value)
        );
    }
    assert!(client.stats().buffer_bytes <= 8 << 20);
    drop(producer);
    for ticket in stuck {
        ticket.await.unwrap_err();
    }
}

#[tokio::test]
async fn topic_deleted_under_way_ends_its_tickets_and_its_successor_starts_afresh() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let producer = client.producer(ProducerConfig::default()).unwrap();
    let record = |value: &str| Record::to(TOPIC).key("k").value(value.to_owned());
    producer.send(record("a")).await.unwrap();
    fake.on_produce(|_, _| Produce::Refuse(error(ErrorCode::UnknownTopic)));
    fake.change(|state| {
        state.topics.remove(TOPIC);
        state.cluster_index += 1;
    });
    let gone = producer.send(record("b")).await.unwrap_err();
    assert_eq!(
        (gone.kind(), gone.outcome()),
        (ErrorKind::UnknownTopic, Some(Outcome::NotWritten))
    );
    fake.on_produce(|_, _| Produce::Serve);
    client
        .create_topic(TopicSpec::new(TOPIC).partitions(1))
        .await
        .unwrap();
    assert_eq!(producer.send(record("c")).await.unwrap().offset, 0);
}
