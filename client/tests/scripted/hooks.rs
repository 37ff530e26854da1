//! Hooks around records: their order, what they may change and refuse, and that one record's
//! refusal costs no other.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "test code"
)]

use crate::fake;

use std::sync::Arc;
use std::time::Duration;

use fake::{Fake, Produce, TOPIC, error};
use futures::{SinkExt, StreamExt, TryStreamExt};
use parking_lot::Mutex;
use qute_client::{
    Client, ClientConfig, ConsumedRecord, ErrorKind, HookError, Interceptor, Outcome,
    ProducerConfig, Received, Record, RecordMetadata, Result,
};
use qute_proto::v1::ErrorCode;

type Log = Arc<Mutex<Vec<String>>>;

/// Writes down what it sees under its name, and marks values by it.
struct Marker {
    name: &'static str,
    log: Log,
}

impl Marker {
    fn new(name: &'static str, log: &Log) -> Self {
        let log = Arc::clone(log);
        Self { name, log }
    }
}

fn text(value: &Option<bytes::Bytes>) -> String {
    String::from_utf8(value.clone().unwrap_or_default().to_vec()).unwrap()
}

impl Interceptor for Marker {
    fn before_send(&self, record: &mut Record) -> std::result::Result<(), HookError> {
        let value = text(&record.value);
        if value.contains("unsendable") {
            return Err("not this one".into());
        }
        record.value = Some(format!("{value}<{}", self.name).into());
        Ok(())
    }

    fn after_send(&self, fate: &Result<RecordMetadata>) {
        let seen = match fate {
            Ok(written) => format!("{} wrote {}", self.name, written.offset),
            Err(error) => format!("{} failed {:?}", self.name, error.outcome()),
        };
        self.log.lock().push(seen);
    }

    fn after_receive(
        &self,
        record: &mut ConsumedRecord,
    ) -> std::result::Result<Received, HookError> {
        let value = text(&record.value);
        let mark = format!("<{}", self.name);
        let Some(value) = value.strip_suffix(&mark) else {
            return Err(format!("{value} lacks {mark}").into());
        };
        if value.contains("skip") {
            return Ok(Received::Skip);
        }
        record.value = Some(value.to_owned().into());
        Ok(Received::Deliver)
    }
}

async fn client_with(fake: &Fake, hooks: Vec<Marker>) -> Client {
    let mut config = ClientConfig::new(&fake.bootstrap()).unwrap();
    for hook in hooks {
        config = config.interceptor(hook);
    }
    Client::connect_with(config).await.unwrap()
}

fn record(value: &str) -> Record {
    Record::to(TOPIC).value(value.to_owned())
}

#[tokio::test]
async fn hooks_of_client_and_handles_run_in_order_and_in_reverse() {
    let fake = Fake::start(1, 1).await;
    let log = Log::default();
    let client = client_with(
        &fake,
        vec![Marker::new("c1", &log), Marker::new("c2", &log)],
    )
    .await;
    let config = ProducerConfig::default().interceptor(Marker::new("own", &log));
    let producer = client.producer(config).unwrap();
    producer.send(record("a")).await.unwrap();
    assert_eq!(fake.values(0), ["a<c1<c2<own"]);
    assert_eq!(*log.lock(), ["own wrote 0", "c2 wrote 0", "c1 wrote 0"]);

    let reading = client
        .consumer(TOPIC)
        .interceptor(Marker::new("own", &log))
        .until_end();
    let records: Vec<_> = reading.open().await.unwrap().try_collect().await.unwrap();
    assert_eq!(records.len(), 1);
    assert_eq!(text(&records[0].value), "a");
}

#[tokio::test]
async fn records_of_sinks_reservations_and_typed_producers_meet_each_hook_once() {
    let fake = Fake::start(1, 1).await;
    let log = Log::default();
    let client = client_with(&fake, vec![Marker::new("c", &log)]).await;
    let producer = client.producer(ProducerConfig::default()).unwrap();
    let mut sink = producer.sink();
    // The first waits for the topic's metadata, the second does not.
    sink.feed(record("a")).await.unwrap();
    sink.feed(record("b")).await.unwrap();
    let error = sink.feed(record("unsendable")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Intercepted);
    sink.flush().await.unwrap();
    let mut room = producer.reserve(1000).await.unwrap();
    let error = room.enqueue(record("unsendable")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Intercepted);
    room.enqueue(record("d")).unwrap().await.unwrap();
    let typed = producer.typed(TOPIC, qute_client::Utf8Codec);
    typed.send(None, &"e".to_owned()).await.unwrap();
    assert_eq!(fake.values(0), ["a<c", "b<c", "d<c", "e<c"]);
    assert_eq!(log.lock().len(), 4, "one fate for each taken in");
}

#[tokio::test]
async fn record_refused_before_sending_is_not_written() {
    let fake = Fake::start(1, 1).await;
    let log = Log::default();
    let client = client_with(&fake, vec![Marker::new("c", &log)]).await;
    let producer = client.producer(ProducerConfig::default()).unwrap();
    let error = producer.enqueue(record("unsendable")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Intercepted);
    assert_eq!(error.outcome(), Some(Outcome::NotWritten));
    assert_eq!(error.topic(), Some(TOPIC));
    let source = std::error::Error::source(&error).unwrap();
    assert_eq!(source.to_string(), "not this one");
    producer.send(record("b")).await.unwrap();
    assert_eq!(fake.values(0), ["b<c"]);
}

#[tokio::test]
async fn fate_of_each_record_reaches_hooks_before_its_ticket() {
    let fake = Fake::start(1, 1).await;
    fake.on_produce(|_, _| Produce::Refuse(error(ErrorCode::InvalidArgument)));
    let log = Log::default();
    let client = client_with(&fake, vec![Marker::new("c", &log)]).await;
    let producer = client
        .producer(ProducerConfig::default().linger(Duration::from_secs(60)))
        .unwrap();
    let first = producer.enqueue(record("a")).await.unwrap();
    let second = producer.enqueue(record("b")).await.unwrap();
    producer.flush().await;
    assert_eq!(log.lock().len(), 2, "whether or not a ticket is awaited");
    drop(second);
    first.await.unwrap_err();
    assert_eq!(*log.lock(), ["c failed Some(NotWritten)"; 2]);
}

#[tokio::test]
async fn panic_in_a_hook_after_sending_leaves_fates_alone() {
    struct Panics;
    impl Interceptor for Panics {
        fn after_send(&self, _fate: &Result<RecordMetadata>) {
            panic!("on purpose");
        }
    }
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let config = ProducerConfig::default().interceptor(Panics);
    let producer = client.producer(config).unwrap();
    for number in 0..2 {
        let written = producer.send(record("a")).await.unwrap();
        assert_eq!(written.offset, number);
    }
}

/// Records 0 to 4 in one batch: fine, lacking the mark, to be skipped, lacking it, fine.
async fn mixed_batch(fake: &Fake) -> Client {
    let plain = fake.client().await;
    let config = ProducerConfig::default().linger(Duration::from_secs(60));
    let producer = plain.producer(config).unwrap();
    for value in ["a<c", "bad", "skip<c", "bad", "b<c"] {
        let _ticket = producer.enqueue(record(value)).await.unwrap();
    }
    producer.flush().await;
    assert_eq!(fake.requests().len(), 1);
    client_with(fake, vec![Marker::new("c", &Log::default())]).await
}

#[tokio::test]
async fn record_refused_or_skipped_after_receiving_costs_no_other() {
    let fake = Fake::start(1, 1).await;
    let client = mixed_batch(&fake).await;
    let consumer = client.consumer(TOPIC).until_end().open().await.unwrap();
    let items: Vec<_> = consumer.collect().await;
    let seen: Vec<_> = items
        .iter()
        .map(|item| match item {
            Ok(record) => (text(&record.value), Some(record.offset)),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Intercepted);
                assert_eq!(error.partition(), Some(0));
                (text(&error.record().unwrap().value), error.offset())
            }
        })
        .collect();
    let expected = [("a", 0), ("bad", 1), ("bad", 3), ("b", 4)];
    assert_eq!(seen, expected.map(|(v, o)| (v.to_owned(), Some(o))));
}

#[tokio::test]
async fn record_refused_within_a_batch_is_told_between_its_neighbours() {
    let fake = Fake::start(1, 1).await;
    let client = mixed_batch(&fake).await;
    let consumer = client.consumer(TOPIC).until_end().open().await.unwrap();
    let mut batches = consumer.into_batches();
    let mut seen = Vec::new();
    while let Some(item) = batches.next().await {
        match item {
            Ok(batch) => seen.extend(batch.records.iter().map(|record| Ok(record.offset))),
            Err(error) => seen.push(Err(error.offset().unwrap())),
        }
    }
    assert_eq!(seen, [Ok(0), Err(1), Err(3), Ok(4)]);
    assert_eq!(batches.positions()[&0], 5);
}
