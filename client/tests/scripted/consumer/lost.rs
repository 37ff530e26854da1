//! Promise 6: offsets are reset only when the leader proves them out of range (S18), and the program
//! is told.

use futures::StreamExt;
use qute_client::{Bound, ConsumerEvent, ErrorKind, OffsetBounds, OutOfRange, Position};

use super::fake::{Fake, TOPIC};
use super::{fill, next, until, value, write};

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
async fn s18_reset_is_an_event_with_both_offsets() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    fill(&client, 0..200).await;
    let (log_start, end) = fake.change(|state| {
        let partition = state.partition(0);
        let (base, _) = partition.batches[1];
        partition.log_start = base;
        partition.batches.remove(0);
        (base, partition.next_offset)
    });
    let consumer = client
        .consumer(TOPIC)
        .start(Position::Offset(0))
        .out_of_range(OutOfRange::ToStart)
        .until_end();
    let mut events = consumer.open().await.unwrap().into_events();
    let mut resets = Vec::new();
    let mut first = None;
    while let Some(event) = events.next().await {
        match event {
            ConsumerEvent::Reset {
                partition,
                from,
                to,
                error,
                ..
            } => {
                assert_eq!(error.bounds().unwrap().high_watermark, end);
                resets.push((partition, from, to));
            }
            ConsumerEvent::Batch(batch) if batch.partition == 0 => {
                first.get_or_insert(batch.records[0].offset);
            }
            ConsumerEvent::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    assert_eq!(resets, [(0, 0, log_start)]);
    assert_eq!(first, Some(log_start));
}

#[tokio::test]
async fn leader_that_refuses_the_offset_it_named_is_asked_until_it_makes_sense() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    // What it says is below its log start, and its log start beyond its end.
    fake.change(|state| state.partition(0).log_start = 10);
    let consumer = client
        .consumer(TOPIC)
        .start(Position::Offset(0))
        .out_of_range(OutOfRange::ToStart);
    let mut consumer = consumer.open().await.unwrap();
    until(&fake, "asked again", |state| {
        state.fetch.of_partition(0).len() >= 4
    })
    .await;
    // Told once, whatever else is asked meanwhile.
    assert!(next(&mut consumer).await.is_err());
    fake.change(|state| {
        let partition = state.partition(0);
        partition.next_offset = 10;
    });
    write(&client, 0, 7).await;
    let record = loop {
        if let Ok(record) = next(&mut consumer).await {
            break record;
        }
    };
    assert_eq!((record.offset, value(&record)), (10, 7));
}

#[tokio::test]
async fn s18_offset_beyond_the_end_goes_to_the_end_by_policy() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 0..10).await;
    let consumer = client
        .consumer(TOPIC)
        .start(Position::Offset(1000))
        .out_of_range(OutOfRange::ToEnd);
    let mut consumer = consumer.open().await.unwrap();
    let told = next(&mut consumer).await.unwrap_err();
    assert_eq!(
        (told.kind(), told.offset()),
        (ErrorKind::OffsetOutOfRange, Some(1000))
    );
    assert_eq!(consumer.positions()[&0], 10);
    write(&client, 0, 10).await;
    assert_eq!(value(&next(&mut consumer).await.unwrap()), 10);
}

#[tokio::test]
async fn s18_start_beyond_the_end_with_the_end_as_bound_is_told_and_the_policy_decides() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 0..10).await;
    let bounds = [Bound::End, Bound::TimeMs(1)];
    let policies = [
        (OutOfRange::Stop, 0),
        (OutOfRange::ToStart, 10),
        (OutOfRange::ToEnd, 0),
    ];
    for (policy, read) in policies {
        for start in [11, 1000, u64::MAX] {
            let consumer = client
                .consumer(TOPIC)
                .start(Position::Offset(start))
                .until_end();
            let mut consumer = consumer.out_of_range(policy).open().await.unwrap();
            let told = next(&mut consumer).await.unwrap_err();
            assert_eq!(
                (told.kind(), told.offset()),
                (ErrorKind::OffsetOutOfRange, Some(start))
            );
            assert_eq!(told.bounds().unwrap().high_watermark, 10);
            let rest: Vec<_> = consumer.collect().await;
            assert_eq!(rest.len(), read, "{policy:?} from {start}");
        }
    }
    // A bound by time lies at or before the end.
    for bound in bounds {
        let consumer = client.consumer(TOPIC).start(Position::Offset(1000));
        let mut consumer = consumer.until(bound).open().await.unwrap();
        let told = next(&mut consumer).await.unwrap_err();
        assert_eq!(told.kind(), ErrorKind::OffsetOutOfRange);
        assert!(consumer.next().await.is_none());
    }
}

#[tokio::test]
async fn s18_start_beyond_an_end_that_the_log_has_reached_since_is_no_loss() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 0..10).await;
    for (start, events) in [(10, 1), (11, 1)] {
        let consumer = client.consumer(TOPIC).start(Position::Offset(start));
        let consumer = consumer.until_end().open().await.unwrap();
        // The reader's task has not run yet.
        fake.change(|state| state.partition(0).next_offset = 20);
        let read: Vec<_> = consumer.into_events().collect().await;
        assert_eq!(read.len(), events, "{read:?}");
        assert!(matches!(read[0], ConsumerEvent::End { .. }), "{read:?}");
        fake.change(|state| state.partition(0).next_offset = 10);
    }
}
