//! The consumer against streams that break, leaders that move, and offsets that are gone.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    reason = "test code"
)]

mod fake;

use std::collections::BTreeMap;
use std::time::Duration;

use fake::{Fake, TOPIC};
use futures::StreamExt;
use qute_client::{
    Client, Consumer, ErrorKind, OffsetBounds, OutOfRange, Position, ProducerConfig, Record,
};

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

/// Writes 400 records of 10 kB in batches of 64 KiB.
async fn fill_with_big_records(client: &Client) {
    let producer = client
        .producer(ProducerConfig::default().batch_bytes(64 * 1024))
        .unwrap();
    for _ in 0..400 {
        drop(
            producer
                .enqueue(Record::to(TOPIC).value(vec![1u8; 10_000]))
                .await
                .unwrap(),
        );
    }
    producer.flush().await;
}

#[tokio::test]
async fn consumer_that_takes_nothing_holds_no_more_however_often_streams_break() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill_with_big_records(&client).await;
    let consumer = client.consumer(TOPIC).prefetch_bytes(300_000).until_end();
    let consumer = consumer.open().await.unwrap();
    for cuts in 1..=5 {
        let served = async {
            while fake.state.lock().served_subscriptions < cuts {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), served)
            .await
            .expect("subscribed again");
        fake.change(|state| state.fetch_cuts += 1);
    }
    let held = fake.state.lock().fetched_bytes;
    assert!(held < 300_000 + 2 * 64 * 1024, "{held}");
    assert_eq!(consumer.collect::<Vec<_>>().await.len(), 400);
}

#[tokio::test]
async fn consumer_memory_is_bounded_by_credit() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    fill_with_big_records(&client).await;
    let consumer = client
        .consumer(TOPIC)
        .prefetch_bytes(300_000)
        .until_end()
        .open()
        .await
        .unwrap();
    let mut batches = consumer.into_batches();
    let mut records = 0;
    while let Some(batch) = batches.next().await {
        records += batch.unwrap().records.len();
    }
    assert_eq!(records, 400);
    let overdraft = fake.state.lock().fetch_overdraft;
    assert!(overdraft < 64 * 1024, "one batch at most: {overdraft}");
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
async fn s18_offset_below_the_log_start_is_told_and_the_policy_decides() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 0..50).await;
    fill(&client, 50..100).await;
    fake.change(|state| {
        let partition = state.partition(0);
        let (base, _) = partition.batches[1];
        partition.log_start = base;
        partition.batches.remove(0);
    });
    let log_start = fake.state.lock().partition(0).log_start;
    for (policy, rest) in [
        (OutOfRange::Stop, 0),
        (OutOfRange::ToStart, 100 - log_start),
    ] {
        let consumer = client
            .consumer(TOPIC)
            .start(Position::Offset(0))
            .until_end();
        let mut consumer = consumer.out_of_range(policy).open().await.unwrap();
        let told = consumer.next().await.unwrap().unwrap_err();
        assert_eq!(
            (told.kind(), told.offset()),
            (ErrorKind::OffsetOutOfRange, Some(0))
        );
        let bounds = OffsetBounds {
            log_start_offset: log_start,
            high_watermark: 100,
        };
        assert_eq!(told.bounds(), Some(bounds));
        let records: Vec<_> = consumer.collect().await;
        assert_eq!(records.len() as u64, rest);
        if let Some(first) = records.first() {
            assert_eq!(first.as_ref().unwrap().offset, log_start);
        }
    }
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
