//! The consumer against a scripted broker, by theme; here what it does anyway: read everything, once,
//! in order, whatever breaks.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "test code"
)]

use crate::fake;

mod bounds;
mod cancel;
mod control;
mod lost;
mod memory;
mod replicas;
mod topic;

use std::collections::BTreeMap;
use std::time::Duration;

use fake::{Fake, TOPIC};
use futures::StreamExt;
use qute_client::{Client, Consumer, ErrorKind, Position, ProducerConfig, Record};

const LIMIT: Duration = Duration::from_secs(20);

/// Waits until the state is as it should be.
async fn until(fake: &Fake, what: &str, mut holds: impl FnMut(&mut fake::State) -> bool) {
    let waiting = async {
        while !holds(&mut fake.state.lock()) {
            tokio::task::yield_now().await;
        }
    };
    let waited = tokio::time::timeout(LIMIT, waiting).await;
    waited.unwrap_or_else(|_| panic!("in vain: {what}"));
}

/// The next item, which has to come.
async fn next<S: futures::Stream + Unpin>(stream: &mut S) -> S::Item {
    let next = tokio::time::timeout(LIMIT, stream.next()).await;
    next.expect("an item in time").expect("an item")
}

/// Writes one record to a partition.
async fn write(client: &Client, partition: u32, value: impl ToString) {
    let producer = client.producer(ProducerConfig::default()).unwrap();
    let record = Record::to(TOPIC).partition(partition);
    producer
        .send(record.value(value.to_string()))
        .await
        .unwrap();
}

fn value(record: &qute_client::ConsumedRecord) -> u32 {
    let value = record.value.as_deref().unwrap();
    std::str::from_utf8(value).unwrap().parse().unwrap()
}

/// Writes values 0.. in small batches, by key over all partitions.
async fn fill(client: &Client, values: std::ops::Range<u32>) {
    let producer = client
        .producer(ProducerConfig::default().batch_bytes(1024))
        .unwrap();
    let mut tickets = Vec::new();
    for value in values {
        let record = Record::to(TOPIC)
            .key(format!("k{}", value % 10))
            .value(value.to_string());
        tickets.push(producer.enqueue(record).await.unwrap());
    }
    for ticket in tickets {
        ticket.await.unwrap();
    }
}

/// Reads to the end: values per partition, offsets checked to be without holes.
async fn read_all(mut consumer: Consumer) -> BTreeMap<u32, Vec<u32>> {
    let mut next = consumer.positions();
    let mut values: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    while let Some(record) = consumer.next().await {
        let record = record.unwrap();
        let expected = next.get_mut(&record.partition).unwrap();
        assert_eq!(record.offset, *expected, "partition {}", record.partition);
        *expected += 1;
        let value = std::str::from_utf8(record.value.as_deref().unwrap()).unwrap();
        values
            .entry(record.partition)
            .or_default()
            .push(value.parse().unwrap());
    }
    assert_eq!(consumer.positions(), next);
    values
}

fn all(values: &BTreeMap<u32, Vec<u32>>) -> Vec<u32> {
    let mut all: Vec<u32> = values.values().flatten().copied().collect();
    all.sort_unstable();
    all
}

#[tokio::test]
async fn consumer_reads_everything_once_and_ends_at_the_end_seen_at_its_start() {
    let fake = Fake::start(1, 4).await;
    let client = fake.client().await;
    fill(&client, 0..1000).await;
    let consumer = client.consumer(TOPIC).until_end().open().await.unwrap();
    // Behind the end that it has seen.
    fill(&client, 1000..1100).await;
    let values = read_all(consumer).await;
    assert_eq!(all(&values), (0..1000).collect::<Vec<_>>());
    for of_partition in values.values() {
        for key in 0..10 {
            let of_key: Vec<_> = of_partition.iter().filter(|v| **v % 10 == key).collect();
            assert!(of_key.is_sorted());
        }
    }
}

#[tokio::test]
async fn consumer_of_empty_partitions_ends_at_once() {
    let fake = Fake::start(1, 4).await;
    let client = fake.client().await;
    let consumer = client.consumer(TOPIC).until_end().open().await.unwrap();
    assert!(read_all(consumer).await.is_empty());
}

#[tokio::test]
async fn consumer_over_cut_streams_and_moving_leaders_neither_skips_nor_doubles() {
    let fake = Fake::start(3, 2).await;
    let client = fake.client().await;
    fill(&client, 0..2000).await;
    // Little credit: the streams stay busy while things happen.
    let consumer = client.consumer(TOPIC).prefetch_bytes(1).until_end();
    let mut batches = consumer.open().await.unwrap().into_batches();
    let mut next: BTreeMap<u32, u64> = batches.positions();
    let mut count = 0;
    let mut seen = 0u64;
    while let Some(batch) = batches.next().await {
        let batch = batch.unwrap();
        for record in &batch.records {
            assert_eq!(record.offset, next[&batch.partition]);
            next.insert(batch.partition, record.offset + 1);
            count += 1;
        }
        seen += 1;
        match seen % 6 {
            2 => fake.change(|state| state.cut_fetch_after = Some(1)),
            4 => fake.set_leader(0, seen % 3 + 1, 5 + seen),
            5 => fake.set_leader(1, (seen + 1) % 3 + 1, 5 + seen),
            _ => {}
        }
    }
    assert_eq!(count, 2000);
}

#[tokio::test]
async fn consumer_starts_where_it_is_told() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 0..100).await;
    for (position, first) in [
        (Position::Start, 0),
        (Position::Offset(42), 42),
        (Position::Tail(10), 90),
        (Position::Tail(1000), 0),
        (Position::End, 100),
    ] {
        let consumer = client
            .consumer(TOPIC)
            .start(position)
            .until_end()
            .open()
            .await
            .unwrap();
        let values = all(&read_all(consumer).await);
        assert_eq!(values, (first..100).collect::<Vec<_>>(), "{position:?}");
    }
    // Unbounded from the end: only what comes.
    let mut consumer = client
        .consumer(TOPIC)
        .start(Position::End)
        .open()
        .await
        .unwrap();
    fill(&client, 100..101).await;
    let record = consumer.next().await.unwrap().unwrap();
    assert_eq!(record.offset, 100);
}

#[tokio::test]
async fn consumer_of_chosen_partitions_reads_only_those() {
    let fake = Fake::start(1, 4).await;
    let client = fake.client().await;
    fill(&client, 0..200).await;
    let consumer = client
        .consumer(TOPIC)
        .partitions([1, 3])
        .until_end()
        .open()
        .await
        .unwrap();
    let values = read_all(consumer).await;
    assert!(values.keys().all(|partition| [1, 3].contains(partition)));
    let refused = client
        .consumer(TOPIC)
        .partitions([4])
        .open()
        .await
        .unwrap_err();
    assert_eq!(
        (refused.kind(), refused.partition()),
        (ErrorKind::UnknownPartition, Some(4))
    );
    let refused = client.consumer("nope").open().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::UnknownTopic);
}

#[tokio::test]
async fn corrupt_batch_is_never_handed_on() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 0..10).await;
    fake.change(|state| state.flip_bit_in_fetch = true);
    let mut consumer = client.consumer(TOPIC).until_end().open().await.unwrap();
    let told = consumer.next().await.unwrap().unwrap_err();
    assert_eq!(
        (told.kind(), told.partition(), told.offset()),
        (ErrorKind::CorruptBatch, Some(0), Some(0))
    );
    assert!(consumer.next().await.is_none());
}

#[tokio::test]
async fn partition_without_a_leader_ends_with_a_timeout_and_costs_the_others_nothing() {
    let fake = Fake::start(2, 2).await;
    fake.state.lock().partition(1).leader = (2, 5);
    let client = fake.client().await;
    fill(&client, 0..100).await;
    let stored = fake.values(0).len();
    let consumer = client
        .consumer(TOPIC)
        .until_end()
        .stall_timeout(Duration::from_millis(300));
    let consumer = consumer.open().await.unwrap();
    fake.set_leader(1, 9, 6);
    let (records, errors): (Vec<_>, Vec<_>) = consumer
        .collect::<Vec<_>>()
        .await
        .into_iter()
        .partition(Result::is_ok);
    assert!(records.len() >= stored);
    let error = errors.into_iter().find_map(Result::err);
    // Either everything was read before the leader went, or the rest is told as missing.
    if records.len() < 100 {
        let error = error.unwrap();
        assert_eq!(
            (error.kind(), error.partition()),
            (ErrorKind::Timeout, Some(1))
        );
    }
}
