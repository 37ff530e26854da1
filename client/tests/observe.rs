//! What a program can see of the client: spans and events under stable names, and counters.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    reason = "test code"
)]

#[path = "scripted/fake/mod.rs"]
mod fake;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use fake::{Fake, Produce, TOPIC, error, not_leader};
use futures::TryStreamExt;
use parking_lot::Mutex;
use qute_client::trace::{CONNECTION, FETCH, METADATA, PRODUCE};
use qute_client::{Client, ConsumedRecord, ProducerConfig, Record};
use qute_proto::v1::ErrorCode;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record as Values};
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Level, Metadata, Subscriber};

/// A span or an event, with what was recorded of it.
#[derive(Debug, Clone)]
struct Seen {
    target: String,
    /// Of an event: its message.
    name: String,
    level: Level,
    fields: BTreeMap<String, String>,
}

/// Keeps what the client tells `tracing` on this thread.
#[derive(Clone, Default)]
struct Recorder {
    next: Arc<AtomicU64>,
    seen: Arc<Mutex<Vec<(u64, Seen)>>>,
}

struct Fields<'a>(&'a mut BTreeMap<String, String>);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let text = format!("{value:?}").trim_matches('"').to_owned();
        self.0.insert(field.name().to_owned(), text);
    }
}

impl Recorder {
    fn add(&self, metadata: &Metadata<'_>, record: impl FnOnce(&mut Fields<'_>)) -> u64 {
        let id = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        let mut fields = BTreeMap::new();
        record(&mut Fields(&mut fields));
        let message = fields.remove("message");
        let seen = Seen {
            target: metadata.target().to_owned(),
            name: message.unwrap_or_else(|| metadata.name().to_owned()),
            level: *metadata.level(),
            fields,
        };
        self.seen.lock().push((id, seen));
        id
    }

    fn named(&self, target: &str, name: &str) -> Vec<Seen> {
        let seen = self.seen.lock();
        let of_name = seen.iter().map(|(_, seen)| seen);
        of_name
            .filter(|seen| seen.target == target && seen.name == name)
            .cloned()
            .collect()
    }
}

impl Subscriber for Recorder {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("qute_client")
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        Id::from_u64(self.add(span.metadata(), |fields| span.record(fields)))
    }

    fn record(&self, span: &Id, values: &Values<'_>) {
        let mut seen = self.seen.lock();
        if let Some((_, seen)) = seen.iter_mut().find(|(id, _)| *id == span.into_u64()) {
            values.record(&mut Fields(&mut seen.fields));
        }
    }

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        self.add(event.metadata(), |fields| event.record(fields));
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

/// Records on this thread.
fn record() -> (Recorder, DefaultGuard) {
    listen_on_every_thread();
    let recorder = Recorder::default();
    let recording = tracing::subscriber::set_default(recorder.clone());
    (recorder, recording)
}

/// `tracing` remembers of each span and event in the source whether anybody wants it. It may ask only
/// the subscriber of the thread that comes by first: without one there, it is lost to the other tests.
fn listen_on_every_thread() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing::subscriber::set_global_default(Recorder::default()).unwrap());
}

fn keys(seen: &Seen) -> Vec<&str> {
    seen.fields.keys().map(String::as_str).collect()
}

async fn read_all(client: &Client) -> Vec<ConsumedRecord> {
    let consumer = client.consumer(TOPIC).until_end().open().await.unwrap();
    consumer.try_collect().await.unwrap()
}

#[tokio::test]
async fn spans_and_events_have_the_documented_targets_names_and_fields() {
    let (recorder, _recording) = record();
    let fake = Fake::start(1, 1).await;
    let mut refusals = 1;
    fake.on_produce(move |_, _| {
        if refusals > 0 {
            refusals -= 1;
            return Produce::Refuse(error(ErrorCode::NotReady));
        }
        Produce::Serve
    });
    let client = fake.client().await;
    let producer = client.producer(ProducerConfig::default()).unwrap();
    producer.send(Record::to(TOPIC).value("a")).await.unwrap();
    read_all(&client).await;

    let batches = recorder.named(PRODUCE, "batch");
    assert_eq!(batches.len(), 1, "one span for all attempts");
    let fields = &batches[0].fields;
    for (name, value) in [
        ("topic", TOPIC),
        ("partition", "0"),
        ("records", "1"),
        ("attempt", "2"),
        ("offset", "0"),
        ("outcome", "ok"),
    ] {
        assert_eq!(fields[name], value, "{name}");
    }
    assert!(fields["bytes"].parse::<u64>().unwrap() > 64);
    assert_eq!(recorder.named(PRODUCE, "batch sent").len(), 2);
    let refused = &recorder.named(PRODUCE, "batch refused")[0];
    assert_eq!(refused.fields["code"], "ERROR_CODE_NOT_READY");

    let received = &recorder.named(FETCH, "batch received")[0];
    assert_eq!(
        keys(received),
        ["bytes", "offset", "partition", "records", "topic"]
    );
    let refresh = &recorder.named(METADATA, "refresh")[0];
    assert_eq!(keys(refresh), ["cluster_index"]);

    let connect = &recorder.named(CONNECTION, "connect")[0];
    assert_eq!(keys(connect), ["address", "lane"]);

    let seen = recorder.seen.lock();
    for (_, seen) in seen.iter() {
        let known = [PRODUCE, FETCH, METADATA, CONNECTION];
        assert!(known.contains(&seen.target.as_str()), "{seen:?}");
        assert!(seen.level >= Level::DEBUG, "{seen:?}");
    }
}

#[tokio::test]
async fn connection_and_refresh_that_fail_say_so_in_their_spans() {
    let (recorder, _recording) = record();
    // Nobody listens there, and nobody else can come to.
    let unheard = tokio::net::TcpSocket::new_v4().unwrap();
    unheard.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = unheard.local_addr().unwrap().to_string();
    Client::connect(&address).await.unwrap_err();
    let connect = &recorder.named(CONNECTION, "connect")[0];
    assert_eq!(connect.fields["address"], address);
    assert!(connect.fields["error"].contains("refused"), "{connect:?}");
    let refresh = &recorder.named(METADATA, "refresh")[0];
    assert!(refresh.fields["error"].contains(&address), "{refresh:?}");
}

#[tokio::test]
async fn batch_that_fails_ends_its_span_with_the_outcome() {
    let (recorder, _recording) = record();
    let fake = Fake::start(1, 1).await;
    fake.on_produce(|_, _| Produce::Refuse(error(ErrorCode::InvalidArgument)));
    let client = fake.client().await;
    let producer = client.producer(ProducerConfig::default()).unwrap();
    let failed = producer.send(Record::to(TOPIC).value("a")).await;
    failed.unwrap_err();
    let batch = &recorder.named(PRODUCE, "batch")[0];
    assert_eq!(batch.fields["outcome"], "not_written");
    assert!(!batch.fields.contains_key("offset"));
}

#[tokio::test]
async fn stats_count_what_all_handles_of_a_client_did() {
    listen_on_every_thread();
    let fake = Fake::start(2, 1).await;
    let mut count = 0;
    fake.on_produce(move |broker, header| {
        count += 1;
        match (count, broker) {
            (1, _) => Produce::Refuse(not_leader(2, 5)),
            (2, _) => Produce::ServeThenCut,
            _ if header.record_count == 3 => Produce::Refuse(error(ErrorCode::RecordTooLarge)),
            _ => Produce::Serve,
        }
    });
    let client = fake.client().await;
    assert_eq!(client.stats().batches_sent, 0);
    let config = ProducerConfig::default().linger(Duration::from_secs(60));
    let producer = client.producer(config).unwrap();
    for records in [2, 3] {
        for _ in 0..records {
            let record = Record::to(TOPIC).value(vec![7; 100]);
            let _ticket = producer.enqueue(record).await.unwrap();
        }
        assert!(client.stats().buffer_bytes >= records * 100);
        producer.flush().await;
    }
    let clone = client.clone();
    assert_eq!(read_all(&clone).await.len(), 2);

    let stats = client.stats();
    assert_eq!(
        stats.batches_sent, 4,
        "refused, cut, repeated; and one refused"
    );
    assert_eq!(stats.batches_retried, 2);
    assert_eq!(stats.records_sent, 2 * 3 + 3);
    assert!(stats.bytes_sent > 900);
    assert_eq!(stats.batches_refused, 2);
    assert_eq!(
        (stats.batches_acked, stats.records_acked),
        (1, 2),
        "{stats:?}"
    );
    assert_eq!((stats.records_not_written, stats.records_unknown), (3, 0));
    assert_eq!(stats.hints_ignored, 1);
    assert_eq!(stats.buffer_bytes, 0);
    assert_eq!(stats.ack_latency.count, 1);
    assert!(stats.ack_latency.max >= stats.ack_latency.p50);
    assert_eq!((stats.batches_fetched, stats.records_fetched), (1, 2));
    assert!(stats.bytes_fetched > 200 && stats.bytes_decompressed > 200);
    assert!(stats.metadata_refreshes > 0 && stats.metadata_updates > 0);
    assert!(stats.connections_discarded > 0 && stats.connections_opened > 1);
    assert_eq!(stats, clone.stats());
}
