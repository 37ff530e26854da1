//! Every public future of the producer, dropped after k polls for each k until it completes: what
//! was taken in is delivered once and in order, sequences have no hole, and the buffer is whole.
//! And the two ways of taking records in that are made of such futures: reservations and the sink.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    reason = "test code"
)]

use crate::fake;

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use fake::{Fake, Produce, TOPIC, error};
use futures::{Sink, SinkExt};
use qute_client::{
    Client, ClientConfig, ErrorKind, Outcome, Producer, ProducerConfig, Record, TopicSpec,
    TopicTemplate,
};
use qute_proto::v1::ErrorCode;

const BUFFER: usize = 8 << 20;

/// Polls a future at most so often; `None`: dropped before it was complete.
async fn polled<F: Future>(future: F, polls: usize) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

fn config() -> ProducerConfig {
    ProducerConfig::default()
        .buffer_bytes(BUFFER)
        .create_topics(TopicTemplate::default())
}

fn record(value: &str) -> Record {
    Record::to(TOPIC).key("k").value(value.to_owned())
}

/// A client that has not connected yet: its first call has everything to wait for.
fn unconnected(fake: &Fake) -> Client {
    Client::lazy(ClientConfig::new(&fake.bootstrap()).unwrap()).unwrap()
}

/// Nothing is lost, doubled, leaked or out of sequence. `certain` were taken in for sure.
async fn check(fake: &Fake, producer: &Producer, topic: &str, certain: &[&str]) {
    let last = Record::to(topic).key("k").value("last");
    producer.send(last).await.expect("no hole in the sequence");
    producer.flush().await;
    let values = fake.values_of(topic, 0);
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for value in &values {
        *counts.entry(value).or_default() += 1;
    }
    assert!(counts.values().all(|&count| count == 1), "{values:?}");
    for value in certain {
        assert!(counts.contains_key(value), "{value} is lost: {values:?}");
    }
    let epochs = fake.requests().iter().all(|&(_, epoch, _)| epoch == 0);
    assert!(epochs, "no sequence was given up");
    let report = producer.report();
    assert!(report.is_clean(), "{report:?}");
    assert_eq!(report.delivered, values.len() as u64);
    let whole = tokio::time::timeout(Duration::from_secs(5), producer.reserve(BUFFER));
    whole.await.expect("the buffer is whole").unwrap();
}

#[tokio::test]
async fn send_and_enqueue_dropped_after_any_poll_lose_nothing() {
    for send in [true, false] {
        for polls in 1.. {
            let fake = Fake::start(1, 1).await;
            let client = unconnected(&fake);
            let producer = client.producer(config()).unwrap();
            let done = if send {
                polled(producer.send(record("a")), polls).await.map(drop)
            } else {
                let enqueued = polled(producer.enqueue(record("a")), polls).await;
                enqueued.map(|ticket| drop(ticket.unwrap()))
            };
            let certain: &[&str] = if done.is_some() { &["a"] } else { &[] };
            check(&fake, &producer, TOPIC, certain).await;
            if done.is_some() {
                assert!(polls > 1, "it had something to wait for");
                break;
            }
        }
    }
}

#[tokio::test]
async fn enqueue_to_a_missing_topic_dropped_after_any_poll_creates_it_once() {
    for polls in 1.. {
        let fake = Fake::start(1, 1).await;
        let producer = unconnected(&fake).producer(config()).unwrap();
        let record = Record::to("new").key("k").value("a");
        let done = polled(producer.enqueue(record), polls).await;
        let certain: &[&str] = if done.is_some() { &["a"] } else { &[] };
        check(&fake, &producer, "new", certain).await;
        assert_eq!(fake.state.lock().creates, 1);
        if done.is_some() {
            break;
        }
    }
}

/// A producer whose partition has no room for another record of that size, nor a leader.
async fn full(fake: &Fake) -> (Producer, usize) {
    fake.set_leader(0, 0, 0);
    let producer = fake.client().await.producer(config()).unwrap();
    let mut taken = 0;
    while let Ok(ticket) =
        tokio::time::timeout(Duration::from_millis(20), producer.enqueue(big(taken))).await
    {
        drop(ticket.unwrap());
        taken += 1;
    }
    (producer, taken)
}

fn big(number: usize) -> Record {
    let mut value = format!("{number} ");
    value.extend(std::iter::repeat_n('x', 900 * 1024));
    Record::to(TOPIC).key("k").value(value)
}

#[tokio::test]
async fn enqueue_that_waits_for_room_dropped_after_any_poll_leaks_none() {
    for polls in 1..4 {
        let fake = Fake::start(1, 1).await;
        fake.change(|state| state.partition(0).leader = (0, 0));
        let (producer, taken) = full(&fake).await;
        assert!(
            polled(producer.enqueue(big(99)), polls.min(1))
                .await
                .is_none()
        );
        // One that has its turn, and goes away before it takes it.
        let mut granted = Box::pin(producer.enqueue(big(98)));
        assert!(polled(&mut granted, 1).await.is_none());
        fake.set_leader(0, 1, 6);
        producer.flush().await;
        if polls > 1 {
            drop(granted);
        } else {
            drop(granted.await.unwrap());
        }
        check(&fake, &producer, TOPIC, &[]).await;
        let stored = fake.values(0).len();
        assert_eq!(stored, taken + 1 + usize::from(polls == 1));
    }
}

#[tokio::test]
async fn reserve_dropped_after_any_poll_leaks_nothing() {
    let fake = Fake::start(1, 1).await;
    let (producer, _) = full(&fake).await;
    let all = BUFFER;
    assert!(polled(producer.reserve(all), 1).await.is_none());
    let mut granted = Box::pin(producer.reserve(all));
    assert!(polled(&mut granted, 1).await.is_none());
    fake.set_leader(0, 1, 6);
    producer.flush().await;
    // Its turn has come, and it goes away.
    drop(granted);
    let reserved = polled(producer.reserve(all), 1).await;
    drop(reserved.expect("free at once").unwrap());
    check(&fake, &producer, TOPIC, &[]).await;
}

#[tokio::test]
async fn flush_and_prepare_dropped_after_any_poll_lose_nothing() {
    for flush in [true, false] {
        for polls in 1.. {
            let fake = Fake::start(1, 1).await;
            let client = unconnected(&fake);
            let lingering = config().linger(Duration::from_secs(60));
            let producer = client.producer(lingering).unwrap();
            let done = if flush {
                drop(producer.enqueue(record("a")).await.unwrap());
                drop(producer.enqueue(record("b")).await.unwrap());
                polled(producer.flush(), polls).await
            } else {
                polled(producer.prepare(TOPIC), polls).await.map(drop)
            };
            if flush && done.is_some() {
                assert_eq!(fake.values(0), ["a", "b"]);
            }
            let certain: &[&str] = if flush { &["a", "b"] } else { &[] };
            tokio::join!(check(&fake, &producer, TOPIC, certain), async {
                // What `check` sends lingers, too.
                fake.wait_for(|_| client.stats().buffer_bytes > 0).await;
                producer.flush().await;
            });
            if done.is_some() {
                break;
            }
        }
    }
}

#[tokio::test]
async fn close_dropped_after_any_poll_still_delivers_what_is_in() {
    for polls in 1.. {
        let fake = Fake::start(1, 1).await;
        let producer = fake.client().await.producer(config()).unwrap();
        let tickets = [
            producer.enqueue(record("a")).await.unwrap(),
            producer.enqueue(record("b")).await.unwrap(),
        ];
        let other = producer.clone();
        let done = polled(producer.close(Duration::from_secs(30)), polls).await;
        let refused = other.enqueue(record("c")).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Closed);
        for ticket in tickets {
            ticket.await.unwrap();
        }
        assert_eq!(fake.values(0), ["a", "b"]);
        if let Some(report) = done {
            assert_eq!(report.delivered, 2);
            break;
        }
    }
}

#[tokio::test]
async fn sink_futures_dropped_after_any_poll_lose_nothing_it_was_given() {
    for polls in 1.. {
        let fake = Fake::start(1, 1).await;
        let producer = unconnected(&fake).producer(config()).unwrap();
        let mut sink = producer.sink();
        let sent = polled(sink.send(record("a")), polls).await;
        let fed = polled(sink.feed(record("b")), polls).await;
        let flushed = polled(sink.flush(), polls).await;
        let closed = polled(SinkExt::<Record>::close(&mut sink), polls).await;
        sink.flush().await.unwrap();
        let mut certain = Vec::new();
        if sent.is_some() {
            certain.push("a");
        }
        if fed.is_some() {
            certain.push("b");
        }
        check(&fake, &producer, TOPIC, &certain).await;
        if sent.is_some() && fed.is_some() && flushed.is_some() && closed.is_some() {
            break;
        }
    }
}

#[tokio::test]
async fn sink_full_buffer_is_backpressure_and_flush_waits_for_fates() {
    let fake = Fake::start(1, 1).await;
    fake.change(|state| state.partition(0).leader = (0, 0));
    let producer = fake.client().await.producer(config()).unwrap();
    let mut sink = producer.sink();
    let mut given = 0;
    let limit = Duration::from_millis(20);
    while let Ok(fed) = tokio::time::timeout(limit, sink.feed(big(given))).await {
        fed.unwrap();
        given += 1;
        assert!(given < 9, "no more than the buffer");
    }
    let mut ready = pin!(poll_fn(|cx| std::pin::Pin::new(&mut sink).poll_ready(cx)));
    assert!(polled(&mut ready, 1).await.is_none());
    fake.set_leader(0, 1, 6);
    ready.await.unwrap();
    sink.close().await.unwrap();
    let closed = sink.feed(record("late")).await.unwrap_err();
    assert_eq!(closed.kind(), ErrorKind::Closed);
    assert_eq!(fake.values(0).len(), given);
    check(&fake, &producer, TOPIC, &[]).await;
}

#[tokio::test]
async fn sink_tells_the_first_failure_and_goes_on() {
    let fake = Fake::start(1, 1).await;
    fake.on_produce(|_, header| match header.producer.base_sequence {
        1 if header.producer.epoch == 0 => Produce::Refuse(error(ErrorCode::RecordTooLarge)),
        _ => Produce::Serve,
    });
    let producer = fake.client().await.producer(config()).unwrap();
    let mut sink = producer.sink();
    sink.send(record("a")).await.unwrap();
    let refused = sink.send(record("b")).await.unwrap_err();
    assert_eq!(
        (refused.kind(), refused.outcome(), refused.topic()),
        (
            ErrorKind::RecordTooLarge,
            Some(Outcome::NotWritten),
            Some(TOPIC)
        )
    );
    sink.send(record("c")).await.unwrap();
    let nowhere = sink.send(Record::to(TOPIC).partition(9).value("x")).await;
    assert_eq!(nowhere.unwrap_err().kind(), ErrorKind::UnknownPartition);
    sink.close().await.unwrap();
    assert_eq!(fake.values(0), ["a", "c"]);
}

#[tokio::test]
async fn reservation_takes_records_without_waiting_and_gives_the_rest_back() {
    let fake = Fake::start(1, 1).await;
    let producer = unconnected(&fake).producer(config()).unwrap();
    let records: Vec<Record> = (0..10).map(|n| record(&n.to_string())).collect();
    let bytes: usize = records.iter().map(Record::buffered_bytes).sum();
    let mut reserved = producer.reserve(bytes + 10).await.unwrap();
    let unknown = reserved.enqueue(record("x")).unwrap_err();
    assert_eq!(
        (unknown.kind(), unknown.outcome()),
        (ErrorKind::NotReady, Some(Outcome::NotWritten))
    );
    assert_eq!(producer.prepare(TOPIC).await.unwrap(), 1);
    let tickets: Vec<_> = records
        .into_iter()
        .map(|record| reserved.enqueue(record).unwrap())
        .collect();
    assert_eq!(reserved.bytes(), 10);
    let over = reserved.enqueue(record("x")).unwrap_err();
    assert_eq!(over.kind(), ErrorKind::InvalidArgument);
    drop(reserved);
    for (offset, ticket) in (0..).zip(tickets) {
        assert_eq!(ticket.await.unwrap().offset, offset);
    }
    let huge = producer.reserve(BUFFER + 1).await.unwrap_err();
    assert_eq!(huge.kind(), ErrorKind::InvalidArgument);
    check(&fake, &producer, TOPIC, &["0", "9"]).await;
}

#[tokio::test]
async fn reservation_may_overdraw_a_full_partition() {
    let fake = Fake::start(1, 1).await;
    fake.change(|state| state.partition(0).leader = (0, 0));
    let (producer, taken) = full(&fake).await;
    let big = big(50);
    let mut reserved = producer.reserve(big.buffered_bytes()).await.unwrap();
    drop(reserved.enqueue(big).unwrap());
    fake.set_leader(0, 1, 6);
    check(&fake, &producer, TOPIC, &[]).await;
    assert_eq!(fake.values(0).len(), taken + 2);
}

#[tokio::test]
async fn reserve_that_finds_no_room_ends_by_the_deadline() {
    let fake = Fake::start(1, 1).await;
    fake.change(|state| state.partition(0).leader = (0, 0));
    let config = config().delivery_timeout(Duration::from_millis(300));
    let producer = fake.client().await.producer(config).unwrap();
    let held = producer.reserve(BUFFER).await.unwrap();
    let error = producer.reserve(1).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    let error = producer.enqueue(record("a")).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.outcome()),
        (ErrorKind::Timeout, Some(Outcome::NotWritten))
    );
    drop(held);
    producer
        .enqueue(record("b"))
        .await
        .unwrap()
        .await
        .unwrap_err();
}

#[test]
fn s12_producer_whose_runtime_is_gone_says_so_and_sends_nothing_anew() {
    let runtime = || tokio::runtime::Runtime::new().unwrap();
    let (main, first) = (runtime(), runtime());
    let fake = main.block_on(Fake::start(1, 2));
    let to = |topic: &str| Record::to(topic).partition(0).value("x");
    let (client, producer) = first.block_on(async {
        let client = fake.client().await;
        let producer = client.producer(ProducerConfig::default()).unwrap();
        producer.send(to(TOPIC)).await.unwrap();
        (client, producer)
    });
    drop(first);
    main.block_on(async {
        let refused = async || {
            let error = producer.send(to(TOPIC)).await.unwrap_err();
            assert_eq!(
                (error.kind(), error.outcome()),
                (ErrorKind::Closed, Some(Outcome::NotWritten))
            );
            assert!(error.message().contains("runtime"), "{error}");
        };
        refused().await;
        // Queues of topics that are gone are forgotten now, but not these.
        let other = TopicSpec::new("other").partitions(1);
        client.create_topic(other).await.unwrap();
        producer.send(to("other")).await.unwrap();
        refused().await;
        let mut reserved = producer.reserve(1000).await.unwrap();
        let error = reserved.enqueue(to(TOPIC)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
    });
    assert_eq!(fake.values(0), ["x"]);
}
