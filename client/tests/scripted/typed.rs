//! Typed handles: what they write and read, and records that do not encode or decode.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::cast_possible_truncation,
    reason = "test code"
)]

use crate::fake;

use std::time::Duration;

use bytes::Bytes;
use fake::{Fake, TOPIC};
use futures::{StreamExt, TryStreamExt};
use qute_client::{
    BytesCodec, Codec, CodecError, DeadLetter, ErrorKind, Outcome, ProducerConfig, Record,
    TraceContext, TraceContextLayer, TypedConsumer, TypedProducer, Utf8Codec,
};

/// Even numbers only, in decimal.
struct Even;

impl Codec<u32> for Even {
    fn encode(&self, value: &u32) -> Result<Bytes, CodecError> {
        if value % 2 == 1 {
            return Err("odd".into());
        }
        Ok(value.to_string().into())
    }

    fn decode(&self, bytes: &Bytes) -> Result<u32, CodecError> {
        Ok(std::str::from_utf8(bytes)?.parse()?)
    }
}

#[test]
fn typed_handles_are_send_and_sync_even_where_their_types_are_not() {
    fn holds<T: Send + Sync>() {}
    type Single = std::cell::Cell<u8>;
    holds::<TypedProducer<Single, Single>>();
    holds::<TypedConsumer<Single, Single>>();
}

#[tokio::test]
async fn typed_records_are_read_as_they_were_written() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let producer = client.producer(ProducerConfig::default()).unwrap();
    let numbers = producer.typed(TOPIC, Even).keys(Utf8Codec);
    let task = tokio::spawn({
        let numbers = numbers.clone();
        async move { numbers.send(&"a".to_owned(), &2).await }
    });
    task.await.unwrap().unwrap();
    numbers.send(None, &4).await.unwrap();
    let ticket = numbers.enqueue(&"a".to_owned(), None).await.unwrap();
    ticket.await.unwrap();
    let record = numbers.record(&"b".to_owned(), &6).unwrap();
    let with_header = record.header("h", "v");
    numbers.producer().send(with_header).await.unwrap();

    let consumer = client.consumer(TOPIC).until_end().open().await.unwrap();
    let typed = consumer.typed(Even).keys(Utf8Codec);
    let records: Vec<_> = typed.try_collect().await.unwrap();
    let seen: Vec<_> = records
        .iter()
        .map(|record| (record.key.as_deref(), record.value))
        .collect();
    let expected = [
        (Some("a"), Some(2)),
        (None, Some(4)),
        (Some("a"), None),
        (Some("b"), Some(6)),
    ];
    assert_eq!(seen, expected);
    assert_eq!(records[3].raw.offset, 3);
    assert_eq!(records[3].raw.headers[0].name, "h");
}

#[tokio::test]
async fn value_that_does_not_encode_is_not_written() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let producer = client.producer(ProducerConfig::default()).unwrap();
    let numbers = producer.typed(TOPIC, Even);
    let error = numbers.send(None, &3).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Serde);
    assert_eq!(error.outcome(), Some(Outcome::NotWritten));
    assert_eq!(error.topic(), Some(TOPIC));
    assert!(error.to_string().contains("odd"), "{error}");
    assert!(fake.values(0).is_empty());
}

#[tokio::test]
async fn record_that_does_not_decode_can_be_set_aside_and_reading_goes_on() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let config = ProducerConfig::default().linger(Duration::from_secs(60));
    let producer = client.producer(config).unwrap();
    for value in ["2", "two", "4"] {
        let record = Record::to(TOPIC).key("k").value(value);
        let _ticket = producer.enqueue(record).await.unwrap();
    }
    producer.flush().await;

    let consumer = client.consumer(TOPIC).until_end().open().await.unwrap();
    let mut typed = consumer.typed::<u32>(Even);
    assert_eq!(typed.next().await.unwrap().unwrap().value, Some(2));
    let error = typed.next().await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Serde);
    let place = (error.topic(), error.partition(), error.offset());
    assert_eq!(place, (Some(TOPIC), Some(0), Some(1)));
    let source = std::error::Error::source(&error).unwrap();
    assert!(source.is::<std::num::ParseIntError>());
    assert_eq!(typed.consumer().positions()[&0], 2);

    let letter = DeadLetter::to(TOPIC).record(error.record().unwrap(), &error, 1);
    let letters = client.producer(ProducerConfig::default()).unwrap();
    letters.send(letter).await.unwrap();
    assert_eq!(typed.next().await.unwrap().unwrap().value, Some(4));
    assert!(typed.next().await.is_none());

    let dead = client.consumer(TOPIC).start(qute_client::Position::Tail(1));
    let dead = dead.until_end().open().await.unwrap();
    let dead: Vec<_> = dead.typed::<Bytes>(BytesCodec).try_collect().await.unwrap();
    assert_eq!(dead[0].value.as_deref(), Some(&b"two"[..]));
    let origin = dead[0].raw.dead_letter_origin().unwrap();
    assert_eq!((origin.partition, origin.offset), (0, 1));
    assert!(origin.error.contains("does not decode"), "{}", origin.error);
}

#[tokio::test]
async fn trace_context_travels_from_producer_to_consumer() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let context = TraceContext::root(true).with_state("a=1").unwrap();
    let given = context.clone();
    let layer = TraceContextLayer::from_source(move || Some(given.clone()));
    let config = ProducerConfig::default().interceptor(layer);
    let producer = client.producer(config).unwrap();
    producer.send(Record::to(TOPIC).value("v")).await.unwrap();
    let mut consumer = client.consumer(TOPIC).open().await.unwrap();
    let record = consumer.next().await.unwrap().unwrap();
    assert_eq!(record.trace_context(), Some(context));
}

#[cfg(feature = "json")]
#[tokio::test]
async fn json_values_travel_as_json() {
    use qute_client::JsonCodec;

    #[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
    struct Flight {
        from: String,
        minutes: Option<i32>,
    }
    let flight = Flight {
        from: "SFO".to_owned(),
        minutes: None,
    };
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let producer = client.producer(ProducerConfig::default()).unwrap();
    let flights = producer.typed::<Flight>(TOPIC, JsonCodec);
    flights.send(&Bytes::from("UA"), &flight).await.unwrap();
    assert_eq!(fake.values(0), [r#"{"from":"SFO","minutes":null}"#]);
    let consumer = client.consumer(TOPIC).until_end().open().await.unwrap();
    let typed = consumer.typed::<Flight>(JsonCodec);
    let records: Vec<_> = typed.try_collect().await.unwrap();
    assert_eq!(records[0].value, Some(flight));
}
