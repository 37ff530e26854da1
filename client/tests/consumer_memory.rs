//! Promise 5 by what the system counts: a slow program over many highly compressed partitions, in a
//! process of its own.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    reason = "test code"
)]
#![cfg(target_os = "linux")]

#[path = "scripted/fake/mod.rs"]
mod fake;

use fake::{Fake, TOPIC};
use futures::StreamExt;
use qute_proto::batch::{BatchBuilder, Codec, ProducerStamp, RecordRef};
use qute_proto::ids::ProducerId;

const PARTITIONS: usize = 64;
const BATCHES: usize = 8;
const MIB: u64 = 1024 * 1024;

/// The most memory that this process has had, in bytes.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kib = line.unwrap().split_whitespace().nth(1).unwrap();
    kib.parse::<u64>().unwrap() * 1024
}

#[tokio::test]
async fn slow_consumer_over_64_highly_compressed_partitions_keeps_its_memory_bound() {
    let fake = Fake::start(1, PARTITIONS).await;
    let mut builder = BatchBuilder::new(usize::MAX);
    let value = vec![0; 1024 * 1024 - 64];
    for _ in 0..3 {
        let record = RecordRef {
            timestamp_ms: 1,
            key: None,
            value: Some(&value),
            headers: &[],
        };
        builder.push(&record).unwrap();
    }
    let batch = builder.finish(Codec::Zstd).unwrap().seal(ProducerStamp {
        producer_id: ProducerId(0),
        epoch: 0,
        base_sequence: 0,
    });
    fake.change(|state| {
        for partition in 0..PARTITIONS {
            for _ in 0..BATCHES {
                state.partition(partition).push(batch.clone());
            }
        }
    });
    let client = fake.client().await;
    let prefetch_bytes = 8 * 1024 * 1024;
    let consumer = client
        .consumer(TOPIC)
        .prefetch_bytes(prefetch_bytes)
        .until_end();
    let mut consumer = consumer.open().await.unwrap();
    let before = peak_bytes();
    let mut records = 0;
    while let Some(record) = consumer.next().await {
        record.unwrap();
        records += 1;
        // Slow: whatever could come meanwhile has come.
        tokio::task::yield_now().await;
    }
    assert_eq!(records, PARTITIONS * BATCHES * 3);
    let grown = peak_bytes() - before;
    // All of it decompressed is 1.5 GiB.
    assert!(grown < 40 * MIB, "{} MiB", grown / MIB);
}
