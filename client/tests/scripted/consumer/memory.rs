//! Promise 5: a consumer's memory is bounded, however slow the program, however often streams break,
//! and however well batches are compressed.

use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use qute_client::{Buffered, Client, Compression, ProducerConfig, Record};
use qute_proto::batch::{BatchBuilder, ProducerStamp, RecordRef};
use qute_proto::ids::ProducerId;

use super::fake::{Fake, TOPIC};
use super::{next, until};

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

const DECOMPRESSED: usize = 4 * 1024 * 1024 - 4096;

/// A batch of almost 4 MiB that is about `compressed` bytes on the wire.
fn tight_batch(compressed: usize) -> Bytes {
    let mut builder = BatchBuilder::new(usize::MAX);
    let mut value = vec![0; DECOMPRESSED / 4];
    let mut state = 1u64;
    for byte in &mut value[..compressed] {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        *byte = (state >> 56) as u8;
    }
    for _ in 0..4 {
        let record = RecordRef {
            timestamp_ms: 1,
            key: None,
            value: Some(&value),
            headers: &[],
        };
        builder.push(&record).unwrap();
        value.fill(0);
    }
    let batch = builder.finish(Compression::Zstd).unwrap();
    let stamp = ProducerStamp {
        producer_id: ProducerId(0),
        epoch: 0,
        base_sequence: 0,
    };
    let batch = batch.seal(stamp);
    assert!(batch.len() < compressed + 4096, "{}", batch.len());
    batch
}

#[tokio::test]
async fn prefetch_counts_batches_as_they_will_be_once_decompressed() {
    const PARTITIONS: usize = 8;
    const BATCHES: usize = PARTITIONS * 8;
    let fake = Fake::start(1, PARTITIONS).await;
    let batch = tight_batch(16 * 1024);
    fake.change(|state| {
        for number in 0..BATCHES {
            state.partition(number % PARTITIONS).push(batch.clone());
        }
    });
    let client = fake.client().await;
    let prefetch = 2 * DECOMPRESSED;
    let consumer = client.consumer(TOPIC).prefetch_bytes(prefetch).until_end();
    let mut consumer = consumer.open().await.unwrap();
    let control = consumer.control();
    // What the first credit brings (256 KiB), before it is known how tight the batches are.
    let first = 256 * 1024 / batch.len() + 1;
    for records in 1..=BATCHES * 4 {
        next(&mut consumer).await.unwrap();
        // Whatever could come meanwhile has come.
        tokio::task::yield_now().await;
        let buffered = control.buffered();
        assert!(buffered.decompressed_bytes <= DECOMPRESSED + 4096);
        assert!(buffered.bytes <= first * batch.len());
        let taken = records.div_ceil(4);
        let fetched = fake.state.lock().fetched_bytes / batch.len();
        // The batch in hand counts as well.
        assert!(fetched <= first.max(taken + 3), "{fetched} at {taken}");
    }
    assert!(consumer.next().await.is_none());
    assert_eq!(control.buffered(), Buffered::default());
}

#[tokio::test]
async fn lag_is_told_without_credit_and_leaves_the_credit_as_it_was() {
    const PARTITIONS: usize = 8;
    let fake = Fake::start(1, PARTITIONS).await;
    let batch = tight_batch(16 * 1024);
    let write = |rounds: usize| {
        for _ in 0..rounds * PARTITIONS {
            fake.change(|state| {
                let fewest = |partition: &usize| state.topics[TOPIC].1[*partition].batches.len();
                let to = (0..PARTITIONS).min_by_key(fewest).unwrap();
                state.partition(to).push(batch.clone());
            });
        }
    };
    write(4);
    let client = fake.client().await;
    let consumer = client.consumer(TOPIC).prefetch_bytes(2 * DECOMPRESSED);
    let mut consumer = consumer.open().await.unwrap();
    let control = consumer.control();
    next(&mut consumer).await.unwrap();
    write(16);
    let all = PARTITIONS as u64 * 20 * 4;
    until(&fake, "the lag is known", |_| {
        control.lag().values().sum::<u64>() == all - 1
    })
    .await;
    let first = 256 * 1024 / batch.len() + 1;
    for records in 2..=all as usize {
        next(&mut consumer).await.unwrap();
        tokio::task::yield_now().await;
        let fetched = fake.state.lock().fetched_bytes / batch.len();
        let most = first.max(records.div_ceil(4) + 3);
        assert!(fetched <= most, "{fetched} at {records}");
    }
}

#[tokio::test]
async fn batch_larger_than_the_prefetch_is_read_all_the_same() {
    let fake = Fake::start(1, 2).await;
    let batch = tight_batch(0);
    fake.change(|state| {
        for partition in [0, 0, 0, 1] {
            state.partition(partition).push(batch.clone());
        }
    });
    let client = fake.client().await;
    let consumer = client.consumer(TOPIC).prefetch_bytes(1).until_end();
    let consumer = consumer.open().await.unwrap();
    assert_eq!(consumer.count().await, 16);
}

#[tokio::test]
async fn batch_of_very_many_records_comes_in_pieces() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let config = ProducerConfig::default()
        .batch_bytes(1024 * 1024)
        .linger(Duration::from_secs(5));
    let producer = client.producer(config).unwrap();
    for _ in 0..40_000 {
        drop(producer.enqueue(Record::to(TOPIC)).await.unwrap());
    }
    producer.flush().await;
    let batches = fake.state.lock().partition(0).batches.len();
    let consumer = client.consumer(TOPIC).until_end().open().await.unwrap();
    let pieces: Vec<_> = consumer.into_batches().collect().await;
    let sizes = pieces
        .iter()
        .map(|piece| piece.as_ref().unwrap().records.len());
    assert!(sizes.clone().all(|size| size <= 16 * 1024));
    assert_eq!(sizes.sum::<usize>(), 40_000);
    assert!(pieces.len() > batches);
}

#[tokio::test]
async fn dropped_consumer_leaves_no_stream_and_no_memory_behind() {
    let fake = Fake::start(2, 2).await;
    fake.set_leader(1, 2, 6);
    let client = fake.client().await;
    fill_with_big_records(&client).await;
    let mut consumer = client.consumer(TOPIC).open().await.unwrap();
    next(&mut consumer).await.unwrap();
    let control = consumer.control();
    until(&fake, "two streams", |state| state.fetch.sessions == 2).await;
    drop(consumer);
    until(&fake, "no stream", |state| state.fetch.sessions == 0).await;
    tokio::time::timeout(Duration::from_secs(10), async {
        while control.buffered() != Buffered::default() {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("nothing held");
}

#[tokio::test]
async fn consumer_at_its_end_leaves_no_stream_behind_while_it_is_kept() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill_with_big_records(&client).await;
    let mut consumer = client.consumer(TOPIC).until_end().open().await.unwrap();
    while let Some(record) = consumer.next().await {
        record.unwrap();
    }
    until(&fake, "no stream", |state| state.fetch.sessions == 0).await;
    assert!(consumer.next().await.is_none());
}
