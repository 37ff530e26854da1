//! The handle beside the stream: pause, resume, seek, positions, lag; and events.

use std::collections::BTreeMap;

use futures::{FutureExt, StreamExt};
use qute_client::{ConsumerEvent, ErrorKind, Position, ProducerConfig, Record};

use super::fake::{Fake, TOPIC};
use super::{all, fill, next, read_all, until, value, write};

/// Writes `count` records to each partition, each in a batch of its own: values 0.. .
async fn fill_each(client: &qute_client::Client, partitions: u32, count: u32) {
    let producer = client
        .producer(ProducerConfig::default().batch_bytes(1024))
        .unwrap();
    for value in 0..count {
        for partition in 0..partitions {
            let record = Record::to(TOPIC).partition(partition);
            let record = record.value(value.to_string());
            let record = record.header("large", vec![0; 1024]);
            drop(producer.enqueue(record).await.unwrap());
        }
    }
    producer.flush().await;
}

#[tokio::test]
async fn paused_partition_holds_its_position_and_blocks_no_other() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    fill_each(&client, 2, 200).await;
    let consumer = client.consumer(TOPIC).until_end().prefetch_bytes(1);
    let mut consumer = consumer.open().await.unwrap();
    let control = consumer.control();
    let mut read: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let mut take = |record: qute_client::ConsumedRecord| {
        let of_partition = read.entry(record.partition).or_default();
        of_partition.push(value(&record));
        (record.partition, of_partition.len())
    };
    // In the middle of what is fetched of it.
    while take(next(&mut consumer).await.unwrap()) != (0, 10) {}
    control.pause([0]).unwrap();
    assert_eq!(control.paused(), [0]);
    let held = control.positions()[&0];
    while control.positions()[&1] < 200 {
        let (partition, _) = take(next(&mut consumer).await.unwrap());
        assert_eq!(partition, 1);
    }
    // The stream waits for it, and does not end.
    assert!(consumer.next().now_or_never().is_none());
    assert_eq!(control.positions()[&0], held);
    control.resume([0]).unwrap();
    while let Some(record) = consumer.next().await {
        take(record.unwrap());
    }
    let whole: Vec<u32> = (0..200).collect();
    assert_eq!(read, BTreeMap::from([(0, whole.clone()), (1, whole)]));
}

#[tokio::test]
async fn pause_takes_effect_within_a_batch() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 0..100).await;
    let mut consumer = client.consumer(TOPIC).until_end().open().await.unwrap();
    let control = consumer.control();
    for expected in 0..95 {
        assert_eq!(next(&mut consumer).await.unwrap().offset, expected);
        control.pause([0]).unwrap();
        assert!(consumer.next().now_or_never().is_none());
        control.resume([0]).unwrap();
    }
    assert_eq!(consumer.count().await, 5);
}

#[tokio::test]
async fn paused_partition_keeps_a_bounded_part_of_what_was_fetched() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let config = ProducerConfig::default().batch_bytes(64 * 1024);
    let producer = client.producer(config).unwrap();
    for _ in 0..64 {
        let record = Record::to(TOPIC).value(vec![7; 64 * 1024]);
        drop(producer.enqueue(record).await.unwrap());
    }
    producer.flush().await;
    let prefetch = 2 * 1024 * 1024;
    let consumer = client.consumer(TOPIC).prefetch_bytes(prefetch).until_end();
    let mut consumer = consumer.open().await.unwrap();
    next(&mut consumer).await.unwrap();
    let control = consumer.control();
    until(&fake, "the prefetch is full", |_| {
        control.buffered().bytes > prefetch - 128 * 1024
    })
    .await;
    control.pause([0]).unwrap();
    assert!(consumer.next().now_or_never().is_none());
    until(&fake, "what paused partitions may keep", |_| {
        control.buffered().bytes <= prefetch / 4
    })
    .await;
    control.resume([0]).unwrap();
    assert_eq!(consumer.count().await, 63);
}

#[tokio::test]
async fn seek_drops_what_was_fetched_and_gives_no_stale_record() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    fill_each(&client, 2, 100).await;
    let mut consumer = client.consumer(TOPIC).open().await.unwrap();
    let control = consumer.control();
    // Each time in the middle of what is fetched, and of a batch.
    for to in [80, 3, 50, 0, 42] {
        for _ in 0..7 {
            next(&mut consumer).await.unwrap();
        }
        assert_eq!(control.seek(0, Position::Offset(to)).await.unwrap(), to);
        assert_eq!(control.positions()[&0], to);
        let other = control.positions()[&1];
        let mut expected = to;
        let mut of_other = other;
        while expected < to + 5 {
            let record = next(&mut consumer).await.unwrap();
            let wanted = match record.partition {
                0 => &mut expected,
                _ => &mut of_other,
            };
            assert_eq!(record.offset, *wanted, "partition {}", record.partition);
            *wanted += 1;
        }
    }
    for (to, offset) in [
        (Position::Start, 0),
        (Position::End, 100),
        (Position::Tail(3), 97),
        (Position::TimeMs(0), 0),
    ] {
        assert_eq!(control.seek(0, to).await.unwrap(), offset, "{to:?}");
    }
    let refused = control.seek(7, Position::Start).await.unwrap_err();
    assert_eq!(
        (refused.kind(), refused.partition()),
        (ErrorKind::UnknownPartition, Some(7))
    );
    assert_eq!(
        control.pause([0, 7]).unwrap_err().kind(),
        ErrorKind::UnknownPartition
    );
    assert!(control.paused().is_empty(), "all or none");
}

#[tokio::test]
async fn seek_back_revives_a_partition_that_was_read_to_its_end() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    fill_each(&client, 2, 10).await;
    let mut events = client
        .consumer(TOPIC)
        .until_end()
        .open()
        .await
        .unwrap()
        .into_events();
    let control = events.control();
    control.pause([1]).unwrap();
    let mut records = 0;
    loop {
        match next(&mut events).await {
            ConsumerEvent::Batch(batch) => records += batch.records.len(),
            ConsumerEvent::End { partition: 0, .. } => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(records, 10);
    control.seek(0, Position::Offset(8)).await.unwrap();
    control.resume([1]).unwrap();
    let mut ends = Vec::new();
    while let Some(event) = events.next().await {
        match event {
            ConsumerEvent::Batch(batch) => records += batch.records.len(),
            ConsumerEvent::End { partition, .. } => ends.push(partition),
            other => panic!("{other:?}"),
        }
    }
    ends.sort_unstable();
    assert_eq!((records, ends), (22, vec![0, 1]));
    let closed = control.seek(0, Position::Start).await.unwrap_err();
    assert_eq!(closed.kind(), ErrorKind::Closed);
    assert_eq!(control.pause([0]).unwrap_err().kind(), ErrorKind::Closed);
}

#[tokio::test]
async fn seek_past_a_batch_that_does_not_decode_goes_on() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill_each(&client, 1, 3).await;
    fake.change(|state| {
        // A body whose checksum holds, and that is no record.
        let (base, batch) = state.partition(0).batches[1].clone();
        let mut bytes = batch.to_vec();
        *bytes.last_mut().unwrap() ^= 0xff;
        bytes[64] ^= 0xff;
        let crc = crc32c_of(&bytes[8..]);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        state.partition(0).batches[1] = (base, bytes.into());
    });
    let mut consumer = client.consumer(TOPIC).until_end().open().await.unwrap();
    let control = consumer.control();
    assert_eq!(next(&mut consumer).await.unwrap().offset, 0);
    let error = next(&mut consumer).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.offset()),
        (ErrorKind::CorruptBatch, Some(1))
    );
    control.seek(0, Position::Offset(2)).await.unwrap();
    assert_eq!(next(&mut consumer).await.unwrap().offset, 2);
    assert!(consumer.next().await.is_none());
}

/// CRC32C, bit by bit.
fn crc32c_of(bytes: &[u8]) -> u32 {
    let mut crc = !0u32;
    for byte in bytes {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
        }
    }
    !crc
}

#[tokio::test]
async fn lag_follows_every_fetch_and_can_be_asked_for() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    fill_each(&client, 2, 50).await;
    let mut consumer = client.consumer(TOPIC).open().await.unwrap();
    let control = consumer.control();
    // Known from the start, because the start was looked up.
    assert_eq!(control.lag(), BTreeMap::from([(0, 50), (1, 50)]));
    for left in (0..100).rev() {
        next(&mut consumer).await.unwrap();
        assert_eq!(control.lag().values().sum::<u64>(), left);
    }
    write(&client, 1, 50).await;
    next(&mut consumer).await.unwrap();
    assert_eq!(control.lag(), BTreeMap::from([(0, 0), (1, 0)]));
    control.pause([0]).unwrap();
    write(&client, 0, 50).await;
    assert_eq!(control.lag()[&0], 0, "a paused partition hears nothing");
    let latest = control.latest_lag().await.unwrap();
    assert_eq!(latest, BTreeMap::from([(0, 1), (1, 0)]));
    assert_eq!(control.lag(), latest);
}

#[tokio::test]
async fn control_serves_other_tasks_while_the_stream_is_read() {
    let fake = Fake::start(1, 4).await;
    let client = fake.client().await;
    fill(&client, 0..2000).await;
    let consumer = client.consumer(TOPIC).until_end().prefetch_bytes(1);
    let consumer = consumer.open().await.unwrap();
    let control = consumer.control();
    let steering = tokio::spawn(async move {
        for round in 0u32.. {
            let partition = round % 4;
            let paused = control.pause([partition]);
            tokio::task::yield_now().await;
            let position = control.positions()[&partition];
            // To where it stands: nothing skipped, nothing doubled.
            let sought = control.seek(partition, Position::Offset(position)).await;
            tokio::task::yield_now().await;
            if paused
                .and(sought.map(drop))
                .and(control.resume([partition]))
                .is_err()
            {
                return;
            }
        }
    });
    let values = read_all(consumer).await;
    assert_eq!(all(&values), (0..2000).collect::<Vec<_>>());
    steering.await.unwrap();
}
