//! Where reading ends.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::{FutureExt, StreamExt};
use qute_client::{Bound, Position};

use super::fake::{Fake, TOPIC};
use super::{all, fill, next, read_all, write};

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    now.as_millis() as u64
}

#[tokio::test]
async fn bound_at_an_offset_waits_for_it_and_ends_before_it() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 0..100).await;
    let consumer = client.consumer(TOPIC).until(Bound::Offset(42));
    let values = read_all(consumer.open().await.unwrap()).await;
    assert_eq!(all(&values), (0..42).collect::<Vec<_>>());
    // Not written yet.
    let consumer = client.consumer(TOPIC).until(Bound::Offset(101));
    let mut consumer = consumer.open().await.unwrap();
    for _ in 0..100 {
        next(&mut consumer).await.unwrap();
    }
    assert!(consumer.next().now_or_never().is_none());
    fill(&client, 100..110).await;
    assert_eq!(next(&mut consumer).await.unwrap().offset, 100);
    assert!(consumer.next().await.is_none());
    // Before its start.
    let consumer = client.consumer(TOPIC).start(Position::Offset(50));
    let consumer = consumer.until(Bound::Offset(50)).open().await.unwrap();
    assert!(read_all(consumer).await.is_empty());
}

#[tokio::test]
async fn bounds_differ_by_partition() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    for value in 0..20 {
        write(&client, value % 2, value).await;
    }
    let consumer = client
        .consumer(TOPIC)
        .until_end()
        .until_at(1, Bound::Offset(3))
        .open()
        .await
        .unwrap();
    let values = read_all(consumer).await;
    assert_eq!((values[&0].len(), values[&1].len()), (10, 3));
}

#[tokio::test]
async fn bound_in_time_ends_before_the_first_batch_of_that_time() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    for time_ms in [1000, 2000, 3000] {
        fake.state.lock().clock_ms = time_ms;
        write(&client, 0, time_ms).await;
    }
    for (bound, expected) in [
        (Bound::TimeMs(0), &[][..]),
        (Bound::TimeMs(2000), &[1000]),
        (Bound::TimeMs(2001), &[1000, 2000]),
        // Passed, and nothing was written since.
        (Bound::TimeMs(4000), &[1000, 2000, 3000]),
    ] {
        let consumer = client.consumer(TOPIC).until(bound).open().await.unwrap();
        assert_eq!(all(&read_all(consumer).await), expected, "{bound:?}");
    }
    let consumer = client.consumer(TOPIC).start(Position::TimeMs(2000));
    let consumer = consumer.until(Bound::TimeMs(3000)).open().await.unwrap();
    assert_eq!(all(&read_all(consumer).await), [2000]);
}

#[tokio::test]
async fn bound_in_the_future_ends_with_the_first_later_batch() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let end_ms = now_ms() + 3_600_000;
    write(&client, 0, 1).await;
    let consumer = client.consumer(TOPIC).until(Bound::TimeMs(end_ms));
    let mut consumer = consumer.open().await.unwrap();
    next(&mut consumer).await.unwrap();
    fake.state.lock().clock_ms = end_ms - 1;
    write(&client, 0, 2).await;
    next(&mut consumer).await.unwrap();
    assert!(consumer.next().now_or_never().is_none());
    fake.state.lock().clock_ms = end_ms;
    write(&client, 0, 3).await;
    assert!(consumer.next().await.is_none());
    assert_eq!(consumer.positions()[&0], 2);
}

#[tokio::test]
async fn bound_in_the_future_ends_an_idle_partition_once_it_has_passed() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    write(&client, 0, 1).await;
    let consumer = client.consumer(TOPIC).until(Bound::TimeMs(now_ms() + 300));
    let consumer = consumer.open().await.unwrap();
    let read = tokio::time::timeout(Duration::from_secs(20), consumer.collect::<Vec<_>>());
    assert_eq!(read.await.expect("an end").len(), 1);
}
