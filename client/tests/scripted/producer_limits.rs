//! The producer's limits: deadlines, the buffer, what brokers accept, its end.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    reason = "test code"
)]

use crate::fake;

use std::time::Duration;

use fake::proxy::Proxy;
use fake::{Fake, Produce, TOPIC};
use futures::StreamExt;
use futures::future::join_all;
use qute_client::{
    Client, ClientConfig, Error, ErrorKind, Outcome, Producer, ProducerConfig, Record, Ticket,
};
use qute_proto::v1;

fn record(value: impl std::fmt::Display) -> Record {
    Record::to(TOPIC).key("k").value(value.to_string())
}

async fn enqueue(producer: &Producer, values: std::ops::Range<u32>) -> Vec<Ticket> {
    let mut tickets = Vec::new();
    for value in values {
        tickets.push(producer.enqueue(record(value)).await.unwrap());
    }
    tickets
}

/// Small batches, so that several are in flight.
fn small_batches() -> ProducerConfig {
    ProducerConfig::default().batch_bytes(1024)
}

#[tokio::test]
async fn delivery_timeout_tells_not_written_from_unknown() {
    let fake = Fake::start(1, 2).await;
    fake.on_produce(|_, _| Produce::Swallow);
    fake.state.lock().partition(1).leader = (0, 0);
    let config = ProducerConfig::default().delivery_timeout(Duration::from_millis(300));
    let producer = fake.client().await.producer(config).unwrap();
    let sent = producer.enqueue(record("a").partition(0)).await.unwrap();
    let unsent = producer.enqueue(record("b").partition(1)).await.unwrap();
    let outcome = |error: Error| (error.kind(), error.outcome());
    assert_eq!(
        outcome(sent.await.unwrap_err()),
        (ErrorKind::Timeout, Some(Outcome::Unknown))
    );
    assert_eq!(
        outcome(unsent.await.unwrap_err()),
        (ErrorKind::Timeout, Some(Outcome::NotWritten))
    );
}

#[tokio::test]
async fn dropped_producer_resolves_every_ticket() {
    let fake = Fake::start(1, 2).await;
    fake.on_produce(|_, _| Produce::Swallow);
    let client = fake.client().await;
    let producer = client.producer(small_batches()).unwrap();
    let tickets = enqueue(&producer, 0..2000).await;
    fake.wait_for(|fake| !fake.requests().is_empty()).await;
    drop(producer);
    let mut outcomes = Vec::new();
    for ticket in tickets {
        let error = ticket.await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed);
        outcomes.push(error.outcome().unwrap());
    }
    assert_eq!(outcomes[0], Outcome::Unknown);
    assert_eq!(outcomes[1999], Outcome::NotWritten);
}

#[tokio::test]
async fn closed_producer_reports_and_takes_nothing_more() {
    let fake = Fake::start(1, 1).await;
    fake.on_produce(|_, header| {
        if header.producer.base_sequence == 0 {
            Produce::Serve
        } else {
            Produce::Swallow
        }
    });
    let producer = fake
        .client()
        .await
        .producer(ProducerConfig::default())
        .unwrap();
    producer.send(record("a")).await.unwrap();
    let ticket = producer.enqueue(record("b")).await.unwrap();
    let other = producer.clone();
    let report = producer.close(Duration::from_millis(200)).await;
    assert_eq!(
        (report.delivered, report.not_written, report.unknown),
        (1, 0, 1)
    );
    assert!(report.first_error.is_some());
    assert_eq!(ticket.await.unwrap_err().outcome(), Some(Outcome::Unknown));
    let refused = other.enqueue(record("c")).await.unwrap_err();
    assert_eq!(
        (refused.kind(), refused.outcome()),
        (ErrorKind::Closed, Some(Outcome::NotWritten))
    );
}

#[tokio::test]
async fn full_buffer_is_backpressure_and_a_stuck_partition_leaves_the_others_room() {
    let fake = Fake::start(2, 2).await;
    fake.state.lock().partition(1).leader = (2, 5);
    fake.on_produce(|broker, _| {
        if broker == 2 {
            Produce::Swallow
        } else {
            Produce::Serve
        }
    });
    let config = ProducerConfig::default()
        .buffer_bytes(8 * 1024 * 1024)
        .delivery_timeout(Duration::from_millis(500));
    let producer = fake.client().await.producer(config).unwrap();
    let big = || Record::to(TOPIC).value(vec![0u8; 900 * 1024]);
    // Its part of the buffer takes some; then it waits, and fails with the deadline at the latest.
    let mut tickets = Vec::new();
    while let Ok(ticket) = tokio::time::timeout(
        Duration::from_millis(50),
        producer.enqueue(big().partition(1)),
    )
    .await
    {
        tickets.push(ticket.unwrap());
        assert!(tickets.len() < 8, "full: it waits");
    }
    assert!(tickets.len() > 1);
    for _ in 0..20 {
        producer.send(big().partition(0)).await.unwrap();
    }
}

#[tokio::test]
async fn record_over_its_limit_is_refused_before_it_is_taken_in() {
    let fake = Fake::start(1, 1).await;
    let producer = fake
        .client()
        .await
        .producer(ProducerConfig::default())
        .unwrap();
    let over = Record::to(TOPIC).value(vec![0u8; 1024 * 1024 + 1]);
    let refused = producer.send(over).await.unwrap_err();
    assert_eq!(
        (refused.kind(), refused.outcome()),
        (ErrorKind::RecordTooLarge, Some(Outcome::NotWritten))
    );
    assert!(fake.requests().is_empty());
}

#[tokio::test]
async fn limits_that_mean_for_ever_are_taken() {
    let fake = Fake::start(1, 1).await;
    let mut config = ClientConfig::new(&fake.bootstrap()).unwrap();
    config.backoff_min = Duration::MAX;
    config.backoff_max = Duration::MAX;
    let config = config
        .call_timeout(Duration::MAX)
        .connect_timeout(Duration::MAX);
    let client = Client::connect_with(config).await.unwrap();
    let config = ProducerConfig::default()
        .linger(Duration::MAX)
        .delivery_timeout(Duration::MAX);
    let producer = client.producer(config).unwrap();
    let ticket = producer.enqueue(record("a")).await.unwrap();
    producer.flush().await;
    assert_eq!(ticket.await.unwrap().offset, 0);
    let mut consumer = client
        .consumer(TOPIC)
        .open_timeout(Duration::MAX)
        .stall_timeout(Duration::MAX)
        .open()
        .await
        .unwrap();
    assert_eq!(consumer.next().await.unwrap().unwrap().offset, 0);
    let report = producer.close(Duration::MAX).await;
    assert_eq!(report.delivered, 1);
}

#[tokio::test]
async fn flush_waits_for_everything_taken_in_before() {
    let fake = Fake::start(1, 3).await;
    let config = ProducerConfig::default().linger(Duration::from_secs(60));
    let producer = fake.client().await.producer(config).unwrap();
    for value in 0..300u32 {
        let ticket = producer
            .enqueue(Record::to(TOPIC).key(value.to_string()).value("x"))
            .await;
        drop(ticket.unwrap());
    }
    assert!(fake.requests().is_empty(), "they linger");
    producer.flush().await;
    let stored: usize = (0..3).map(|partition| fake.values(partition).len()).sum();
    assert_eq!(stored, 300);
    assert_eq!(producer.report().delivered, 300);
}

/// A client that knows the topic, and whose brokers then all are gone.
async fn all_down(config: ProducerConfig) -> (Client, Producer) {
    let fake = Fake::start(1, 2).await;
    let address = fake.bootstrap();
    let proxy = Proxy::start(Some(&address)).await;
    let through = proxy.address.to_string();
    fake.change(|state| *state.addresses.get_mut(&1).unwrap() = through.clone());
    let client = Client::connect(&through).await.unwrap();
    let producer = client.producer(config).unwrap();
    producer.send(record("before")).await.unwrap();
    proxy.cut();
    (client, producer)
}

#[tokio::test]
async fn all_brokers_down_fails_at_the_deadline_within_the_memory_bound() {
    let config = ProducerConfig::default()
        .buffer_bytes(8 << 20)
        .delivery_timeout(Duration::from_millis(700));
    let (client, producer) = all_down(config).await;
    let enqueues = (0..100u32).map(|number| {
        let record = Record::to(TOPIC)
            .partition(number % 2)
            .value(vec![0; 512 * 1024]);
        let producer = producer.clone();
        async move { producer.enqueue(record).await?.await }
    });
    let watched = async {
        let mut most = 0;
        loop {
            most = client.stats().buffer_bytes.max(most);
            assert!(most <= 8 << 20, "{most}");
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        results = join_all(enqueues) => {
            for result in results {
                let error = result.unwrap_err();
                // What was in doubt behind a batch that timed out goes with it.
                let known = [ErrorKind::Timeout, ErrorKind::ProducerReset];
                assert!(known.contains(&error.kind()), "{error}");
            }
        }
        () = watched => {}
    }
    assert_eq!(client.stats().buffer_bytes, 0);
}

#[tokio::test]
async fn cluster_never_there_fails_at_the_deadline_whatever_is_missing() {
    // Nobody listens; somebody listens and keeps silent.
    let silent = Proxy::start(None).await;
    let nobody = {
        let gone = Proxy::start(None).await;
        gone.address
    };
    for address in [silent.address, nobody] {
        let config = ClientConfig::new(&address.to_string()).unwrap();
        let client = Client::lazy(config).unwrap();
        let config = ProducerConfig::default().delivery_timeout(Duration::from_millis(300));
        let producer = client.producer(config).unwrap();
        let limit = Duration::from_secs(3);
        let sending = tokio::time::timeout(limit, producer.send(record("a")));
        let error = sending.await.expect("by its deadline").unwrap_err();
        assert_eq!(error.outcome(), Some(Outcome::NotWritten), "{error}");
        assert!(error.is_retriable(), "{error}");
    }
}

#[tokio::test]
async fn close_with_the_cluster_down_lists_what_is_left() {
    let (_client, producer) = all_down(small_batches()).await;
    let mut tickets = Vec::new();
    for number in 0..301 {
        let record = record(number).partition(u32::from(number == 0));
        tickets.push(producer.enqueue(record).await.unwrap());
    }
    // Waits for a topic that nobody can tell it about.
    let waiting = producer.clone();
    let waiting = tokio::spawn(async move { waiting.send(Record::to("u").value("x")).await });
    let closing = producer.close(Duration::from_millis(400));
    let report = tokio::time::timeout(Duration::from_secs(5), closing)
        .await
        .expect("it returns");
    assert_eq!(report.delivered, 1);
    assert_eq!(report.not_written + report.unknown, 301, "{report:?}");
    for partition in [0, 1] {
        let of_partition = report
            .undelivered
            .iter()
            .filter(|line| line.partition == partition);
        let records: u64 = of_partition.map(|line| line.records).sum();
        assert!(records > 0, "{report:?}");
    }
    for line in &report.undelivered {
        assert_eq!(&*line.topic, TOPIC);
        assert_eq!(line.error.kind(), ErrorKind::Closed);
        assert_eq!(line.error.outcome(), Some(line.outcome));
    }
    for ticket in tickets {
        ticket.await.unwrap_err();
    }
    let ended = waiting.await.unwrap().unwrap_err();
    assert_eq!(ended.outcome(), Some(Outcome::NotWritten));
}

#[tokio::test]
async fn linger_ends_early_when_the_buffer_is_full() {
    let fake = Fake::start(1, 1).await;
    let config = ProducerConfig::default()
        .linger(Duration::from_secs(3600))
        .batch_bytes(4 << 20)
        .buffer_bytes(8 << 20)
        .delivery_timeout(Duration::from_secs(7200));
    let producer = fake.client().await.producer(config).unwrap();
    for _ in 0..20 {
        let big = Record::to(TOPIC).key("k").value(vec![0; 900 * 1024]);
        drop(producer.enqueue(big).await.unwrap());
    }
    producer.flush().await;
    assert_eq!(producer.report().delivered, 20);
}

#[tokio::test]
async fn batches_are_no_larger_than_the_brokers_accept() {
    let fake = Fake::start(1, 1).await;
    fake.state.lock().limits = Some(v1::Limits {
        batch_bytes_max: 2048,
        ..Default::default()
    });
    let config = ProducerConfig::default().linger(Duration::from_secs(60));
    let producer = fake.client().await.producer(config).unwrap();
    let tickets = enqueue(&producer, 0..1000).await;
    producer.flush().await;
    for ticket in tickets {
        ticket.await.unwrap();
    }
    let mut state = fake.state.lock();
    let batches = &state.partition(0).batches;
    assert!(batches.len() > 1);
    assert!(batches.iter().all(|(_, batch)| batch.len() <= 2048));
}

#[tokio::test]
async fn batches_obey_a_stricter_broker_that_is_met_later() {
    let fake = Fake::start(2, 2).await;
    fake.set_leader(0, 1, 6);
    fake.set_leader(1, 2, 6);
    let config = ProducerConfig::default().linger(Duration::from_secs(60));
    let producer = fake.client().await.producer(config).unwrap();
    let ticket = producer.enqueue(record("first").partition(0)).await;
    producer.flush().await;
    ticket.unwrap().await.unwrap();
    fake.state.lock().limits = Some(v1::Limits {
        batch_bytes_max: 2048,
        record_bytes_max: 1000,
        ..Default::default()
    });
    // Its produce stream is opened only now.
    let ticket = producer.enqueue(record("other").partition(1)).await;
    producer.flush().await;
    ticket.unwrap().await.unwrap();
    let mut tickets = Vec::new();
    for value in 0..1000 {
        tickets.push(producer.enqueue(record(value).partition(0)).await.unwrap());
    }
    producer.flush().await;
    join_all(tickets).await;
    {
        let mut state = fake.state.lock();
        let batches = &state.partition(0).batches;
        assert!(batches.len() > 2);
        assert!(batches.iter().all(|(_, batch)| batch.len() <= 2048));
    }
    let over = Record::to(TOPIC).partition(0).value(vec![0; 1001]);
    let refused = producer.send(over).await.unwrap_err();
    assert_eq!(
        (refused.kind(), refused.outcome()),
        (ErrorKind::RecordTooLarge, Some(Outcome::NotWritten))
    );
}

#[tokio::test]
async fn buffer_counts_keys_values_headers_and_overhead() {
    let fake = Fake::start(1, 1).await;
    fake.change(|state| state.partition(0).leader = (0, 0));
    let client = fake.client().await;
    let producer = client.producer(ProducerConfig::default()).unwrap();
    let record = record("value").header("name", "header");
    assert_eq!(record.buffered_bytes(), 1 + 5 + 4 + 6 + 64);
    let ticket = producer.enqueue(record.clone()).await.unwrap();
    assert_eq!(client.stats().buffer_bytes, record.buffered_bytes() as u64);
    drop(producer);
    ticket.await.unwrap_err();
    assert_eq!(client.stats().buffer_bytes, 0);
}
