//! The producer against brokers that fail in the ways that lose, double or reorder records.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    reason = "test code"
)]

use crate::fake;

use std::time::Duration;

use fake::{Fake, Produce, TOPIC, error, not_leader};
use futures::future::join_all;
use qute_client::{ErrorKind, Outcome, Producer, ProducerConfig, Record, Ticket};
use qute_proto::v1::ErrorCode;

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

fn expected(values: std::ops::Range<u32>) -> Vec<String> {
    values.map(|value| value.to_string()).collect()
}

/// Small batches, so that several are in flight.
fn small_batches() -> ProducerConfig {
    ProducerConfig::default().batch_bytes(1024)
}

#[tokio::test]
async fn producer_reply_cut_after_commit_gets_the_original_offset() {
    let fake = Fake::start(1, 1).await;
    let mut cuts = 1;
    fake.on_produce(move |_, _| {
        if cuts > 0 {
            cuts -= 1;
            return Produce::ServeThenCut;
        }
        Produce::Serve
    });
    let producer = fake
        .client()
        .await
        .producer(ProducerConfig::default())
        .unwrap();
    let written = producer.send(record("a")).await.unwrap();
    assert_eq!(written.offset, 0);
    assert_eq!(fake.values(0), ["a"]);
    // The same sequence twice: the retry was recognized, not written again.
    assert_eq!(fake.requests(), [(1, 0, 0), (1, 0, 0)]);
}

#[tokio::test]
async fn producer_streams_cut_again_and_again_keep_order_without_loss_or_doubles() {
    let fake = Fake::start(1, 1).await;
    let mut count = 0;
    fake.on_produce(move |_, _| {
        count += 1;
        match count % 7 {
            3 => Produce::ServeThenCut,
            5 => Produce::Refuse(error(ErrorCode::NotReady)),
            _ => Produce::Serve,
        }
    });
    let producer = fake.client().await.producer(small_batches()).unwrap();
    let tickets = enqueue(&producer, 0..1500).await;
    for (number, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(ticket.await.unwrap().offset, number as u64);
    }
    assert_eq!(fake.values(0), expected(0..1500));
    let report = producer.close(Duration::from_secs(5)).await;
    assert_eq!(
        (report.delivered, report.not_written, report.unknown),
        (1500, 0, 0)
    );
}

#[tokio::test]
async fn not_leader_hint_of_the_same_epoch_does_not_ping_pong() {
    let fake = Fake::start(2, 1).await;
    let mut refusals = 6;
    // Each names the other, at the epoch that is known already.
    fake.on_produce(move |broker, _| {
        if refusals > 0 {
            refusals -= 1;
            return Produce::Refuse(not_leader(3 - broker, 5));
        }
        Produce::Serve
    });
    let producer = fake
        .client()
        .await
        .producer(ProducerConfig::default())
        .unwrap();
    producer.send(record("a")).await.unwrap();
    let asked: Vec<u64> = fake.requests().iter().map(|request| request.0).collect();
    assert_eq!(asked, [1; 7], "only the leader of the known epoch is asked");
}

#[tokio::test]
async fn not_leader_hint_of_a_newer_epoch_is_followed_at_once() {
    let fake = Fake::start(2, 1).await;
    fake.on_produce(|broker, _| match broker {
        1 => Produce::Refuse(not_leader(2, 6)),
        _ => Produce::Serve,
    });
    // Not told to the watchers: the hint alone has to do.
    let client = fake.client().await;
    fake.state.lock().partition(0).leader = (2, 6);
    let producer = client.producer(ProducerConfig::default()).unwrap();
    assert_eq!(producer.send(record("a")).await.unwrap().offset, 0);
    let asked: Vec<u64> = fake.requests().iter().map(|request| request.0).collect();
    assert_eq!(asked, [1, 2]);
}

#[tokio::test]
async fn frozen_leader_is_left_as_soon_as_a_newer_epoch_is_known() {
    let fake = Fake::start(2, 1).await;
    fake.on_produce(|broker, _| match broker {
        1 => Produce::Swallow,
        _ => Produce::Serve,
    });
    let producer = fake.client().await.producer(small_batches()).unwrap();
    let tickets = enqueue(&producer, 0..200).await;
    fake.wait_for(|fake| !fake.requests().is_empty()).await;
    fake.set_leader(0, 2, 6);
    for ticket in tickets {
        ticket.await.unwrap();
    }
    assert_eq!(fake.values(0), expected(0..200));
}

#[tokio::test]
async fn leader_cut_off_from_its_peers_is_left_though_all_views_come_from_it() {
    let fake = Fake::start(3, 1).await;
    fake.isolate(1);
    fake.on_produce(|broker, _| match broker {
        1 => Produce::Swallow,
        _ => Produce::Serve,
    });
    // The metadata watch goes to the one broker that is known.
    let producer = fake.client_by(1).await.producer(small_batches()).unwrap();
    let tickets = enqueue(&producer, 0..200).await;
    fake.wait_for(|fake| !fake.requests().is_empty()).await;
    fake.set_leader(0, 2, 6);
    let written = tokio::time::timeout(Duration::from_secs(20), join_all(tickets));
    for ticket in written.await.expect("long before the delivery timeout") {
        ticket.unwrap();
    }
    assert_eq!(fake.values(0), expected(0..200));
}

#[tokio::test]
async fn leader_changes_under_load_keep_order_without_loss_or_doubles() {
    let fake = Fake::start(3, 1).await;
    let mut count = 0;
    fake.on_produce(move |_, _| {
        count += 1;
        if count % 11 == 0 {
            Produce::ServeThenCut
        } else {
            Produce::Serve
        }
    });
    let producer = fake.client().await.producer(small_batches()).unwrap();
    let mut tickets = Vec::new();
    for round in 0..10 {
        tickets.extend(enqueue(&producer, round * 100..(round + 1) * 100).await);
        let round = u64::from(round);
        fake.set_leader(0, round % 3 + 1, 6 + round);
    }
    for ticket in join_all(tickets).await {
        ticket.unwrap();
    }
    assert_eq!(fake.values(0), expected(0..1000));
}

#[tokio::test]
async fn s12_unknown_producer_goes_on_under_a_new_epoch() {
    let fake = Fake::start(1, 1).await;
    let mut forgotten = false;
    fake.on_produce(move |_, header| {
        if header.producer.base_sequence == 1 && !forgotten {
            forgotten = true;
            return Produce::Refuse(error(ErrorCode::UnknownProducer));
        }
        Produce::Serve
    });
    let producer = fake
        .client()
        .await
        .producer(ProducerConfig::default())
        .unwrap();
    producer.send(record("a")).await.unwrap();
    // Refused at its first attempt: certainly not written, so it may go under the new epoch.
    assert_eq!(producer.send(record("b")).await.unwrap().offset, 1);
    assert_eq!(fake.requests(), [(1, 0, 0), (1, 0, 1), (1, 1, 0)]);
    assert_eq!(fake.values(0), ["a", "b"]);
}

#[tokio::test]
async fn s12_unknown_producer_in_doubt_ends_unknown_and_the_client_goes_on() {
    let fake = Fake::start(1, 1).await;
    let mut seen = 0;
    fake.on_produce(move |_, header| {
        if header.producer.base_sequence != 1 || header.producer.epoch != 0 {
            return Produce::Serve;
        }
        seen += 1;
        match seen {
            1 => Produce::Refuse(error(ErrorCode::OutcomeUnknown)),
            _ => Produce::Refuse(error(ErrorCode::UnknownProducer)),
        }
    });
    let producer = fake
        .client()
        .await
        .producer(ProducerConfig::default())
        .unwrap();
    producer.send(record("a")).await.unwrap();
    let lost = producer.send(record("b")).await.unwrap_err();
    assert_eq!(
        (lost.kind(), lost.outcome()),
        (ErrorKind::ProducerReset, Some(Outcome::Unknown))
    );
    producer.send(record("c")).await.unwrap();
    assert_eq!(fake.values(0), ["a", "c"]);
}

#[tokio::test]
async fn final_refusal_ends_its_batch_alone() {
    let fake = Fake::start(1, 1).await;
    fake.on_produce(|_, header| {
        if header.producer.epoch == 0 && header.producer.base_sequence == 1 {
            return Produce::Refuse(error(ErrorCode::RecordTooLarge));
        }
        Produce::Serve
    });
    let producer = fake
        .client()
        .await
        .producer(ProducerConfig::default())
        .unwrap();
    producer.send(record("a")).await.unwrap();
    let refused = producer.send(record("b")).await.unwrap_err();
    assert_eq!(
        (refused.kind(), refused.outcome(), refused.partition()),
        (
            ErrorKind::RecordTooLarge,
            Some(Outcome::NotWritten),
            Some(0)
        )
    );
    producer.send(record("c")).await.unwrap();
    assert_eq!(fake.values(0), ["a", "c"]);
}

#[tokio::test]
async fn unknown_topic_and_partition_are_refused_by_the_word_of_the_controller() {
    let fake = Fake::start(2, 1).await;
    fake.state.lock().controller = 2;
    let producer = fake
        .client()
        .await
        .producer(ProducerConfig::default())
        .unwrap();
    let refused = producer
        .send(Record::to("nope").value("x"))
        .await
        .unwrap_err();
    assert_eq!(
        (refused.kind(), refused.topic(), refused.outcome()),
        (
            ErrorKind::UnknownTopic,
            Some("nope"),
            Some(Outcome::NotWritten)
        )
    );
    let refused = producer.send(record("x").partition(9)).await.unwrap_err();
    assert_eq!(
        (refused.kind(), refused.partition()),
        (ErrorKind::UnknownPartition, Some(9))
    );
}

#[tokio::test]
async fn duplicate_beyond_the_table_is_told_as_stored() {
    let fake = Fake::start(1, 1).await;
    let mut attempts = 0;
    fake.on_produce(move |_, _| {
        attempts += 1;
        Produce::Refuse(error(match attempts {
            1 => ErrorCode::OutcomeUnknown,
            _ => ErrorCode::DuplicateSequence,
        }))
    });
    let producer = fake
        .client()
        .await
        .producer(ProducerConfig::default())
        .unwrap();
    let told = producer.send(record("a")).await.unwrap_err();
    assert_eq!(
        (told.kind(), told.outcome()),
        (ErrorKind::OffsetUnknown, Some(Outcome::Ok))
    );
}

#[tokio::test]
async fn s12_duplicate_of_what_was_sent_once_is_not_believed() {
    for code in [None, Some(ErrorCode::DuplicateSequence)] {
        let fake = Fake::start(1, 1).await;
        fake.on_produce(move |_, header| {
            if header.producer.epoch == 0 && header.producer.base_sequence == 1 {
                return code.map_or(Produce::Duplicate, |code| Produce::Refuse(error(code)));
            }
            Produce::Serve
        });
        let producer = fake
            .client()
            .await
            .producer(ProducerConfig::default())
            .unwrap();
        producer.send(record("a")).await.unwrap();
        let lost = producer.send(record("b")).await.unwrap_err();
        assert_eq!(
            (lost.kind(), lost.outcome()),
            (ErrorKind::ProducerReset, Some(Outcome::Unknown))
        );
        producer.send(record("c")).await.unwrap();
        assert_eq!(fake.values(0), ["a", "c"]);
    }
}
