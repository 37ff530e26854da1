//! Promise 7: futures and polls dropped at any point lose nothing and leave nothing behind.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use futures::StreamExt;
use qute_client::{Position, Result};

use super::fake::{Fake, TOPIC};
use super::{fill, next, until};

/// Polls a future `polls` times, letting others run in between, then drops it. Gives what it gave.
async fn poll_times<F: Future>(future: F, polls: usize) -> Option<F::Output> {
    let mut future = pin!(future);
    for _ in 0..polls {
        let mut context = Context::from_waker(Waker::noop());
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Some(output);
        }
        tokio::task::yield_now().await;
    }
    None
}

#[tokio::test]
async fn polls_dropped_after_any_number_lose_no_record() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 0..600).await;
    let consumer = client.consumer(TOPIC).until_end().prefetch_bytes(1);
    let mut consumer = consumer.open().await.unwrap();
    let mut expected = 0;
    for polls in (0..5).cycle() {
        if polls == 3 && expected % 7 == 0 {
            fake.change(|state| state.fetch_cuts += 1);
        }
        match poll_times(consumer.next(), polls).await {
            None => tokio::task::yield_now().await,
            Some(None) => break,
            Some(Some(record)) => {
                assert_eq!(record.unwrap().offset, expected);
                expected += 1;
            }
        }
    }
    assert_eq!(expected, 600);
}

#[tokio::test]
async fn batches_and_events_dropped_after_any_number_of_polls_lose_no_record() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    fill(&client, 0..600).await;
    let consumer = client.consumer(TOPIC).until_end().prefetch_bytes(1);
    let mut events = consumer.open().await.unwrap().into_events();
    let mut records = 0;
    for polls in (0..4).cycle() {
        match poll_times(events.next(), polls).await {
            None => tokio::task::yield_now().await,
            Some(None) => break,
            Some(Some(qute_client::ConsumerEvent::Batch(batch))) => records += batch.records.len(),
            Some(Some(_)) => {}
        }
    }
    assert_eq!(records, 600);
}

#[tokio::test]
async fn open_dropped_after_any_number_of_polls_leaves_nothing_behind() {
    let fake = Fake::start(1, 4).await;
    let client = fake.client().await;
    fill(&client, 0..10).await;
    for polls in 0.. {
        let opening = client.consumer(TOPIC).until_end().open();
        let opened = poll_times(opening, polls).await;
        let sessions = fake.state.lock().fetch.sessions;
        match opened {
            None => assert_eq!(sessions, 0, "after {polls} polls"),
            Some(consumer) => {
                assert_eq!(consumer.unwrap().count().await, 10);
                break;
            }
        }
    }
    until(&fake, "no stream", |state| state.fetch.sessions == 0).await;
}

#[tokio::test]
async fn seek_dropped_after_any_number_of_polls_has_taken_place_or_not() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 0..100).await;
    for polls in 0.. {
        let mut consumer = client.consumer(TOPIC).until_end().open().await.unwrap();
        let control = consumer.control();
        for expected in 0..10 {
            assert_eq!(next(&mut consumer).await.unwrap().offset, expected);
        }
        let sought: Option<Result<u64>> =
            poll_times(control.seek(0, Position::Tail(5)), polls).await;
        let first = next(&mut consumer).await.unwrap().offset;
        if sought.is_some() {
            assert_eq!(first, 95);
            assert_eq!(consumer.count().await, 4);
            break;
        }
        assert_eq!(first, 10, "after {polls} polls");
        assert_eq!(consumer.count().await, 89);
    }
}

#[tokio::test]
async fn latest_lag_dropped_after_any_number_of_polls_changes_nothing() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 0..10).await;
    let consumer = client.consumer(TOPIC).open().await.unwrap();
    let control = consumer.control();
    for polls in 0.. {
        let Some(lag) = poll_times(control.latest_lag(), polls).await else {
            assert_eq!(control.positions()[&0], 0);
            continue;
        };
        assert_eq!(lag.unwrap()[&0], 10);
        return;
    }
}

#[test]
fn consumer_whose_runtime_is_gone_says_so_and_ends() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let mut consumer = runtime.block_on(async {
        let fake = Fake::start(1, 1).await;
        let client = fake.client().await;
        fill(&client, 0..10).await;
        client.consumer(TOPIC).open().await.unwrap()
    });
    drop(runtime);
    futures::executor::block_on(async move {
        let mut last = None;
        while let Some(item) = consumer.next().await {
            last = Some(item);
        }
        let error = last.unwrap().unwrap_err();
        assert_eq!(error.kind(), qute_client::ErrorKind::Closed);
        assert!(error.message().contains("runtime"), "{error}");
    });
}

#[test]
fn handles_go_where_the_program_wants_them() {
    fn checked<T: Send + Sync + 'static>() {}
    checked::<qute_client::Consumer>();
    checked::<qute_client::BatchConsumer>();
    checked::<qute_client::EventConsumer>();
    checked::<qute_client::ConsumerControl>();
    checked::<qute_client::ConsumerBuilder>();
    checked::<qute_client::ConsumerEvent>();
    fn cheap<T: Clone>() {}
    cheap::<qute_client::ConsumerControl>();
}
