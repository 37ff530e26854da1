//! Hooks: each record is masked on its way and unmasked on its way back, belongs to a trace, and goes
//! to a dead-letter topic if it can't be unmasked.
//!
//! ```sh
//! QUTE_BOOTSTRAP=127.0.0.1:7700 cargo run --example interceptors
//! ```

use anyhow::Result;
use futures::StreamExt;
use qute_client::{
    Client, ConsumedRecord, DeadLetter, ErrorKind, HookError, Interceptor, ProducerConfig,
    Received, Record, TopicSpec, TraceContextLayer,
};

const TOPIC: &str = "masked";
const DEAD: &str = "masked-dead";

/// Turns each value's bits over, behind a mark: it stands for encryption, and is none.
struct Mask;

const MARK: u8 = b'#';

impl Interceptor for Mask {
    fn before_send(&self, record: &mut Record) -> Result<(), HookError> {
        if let Some(value) = &mut record.value {
            let masked = std::iter::once(MARK).chain(value.iter().map(|byte| !byte));
            *value = masked.collect();
        }
        Ok(())
    }

    fn after_receive(&self, record: &mut ConsumedRecord) -> Result<Received, HookError> {
        if let Some(value) = &mut record.value {
            let Some((&MARK, masked)) = value.split_first() else {
                return Err("the value is not masked".into());
            };
            *value = masked.iter().map(|byte| !byte).collect();
        }
        Ok(Received::Deliver)
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let client = Client::from_env().await?;
    for topic in [TOPIC, DEAD] {
        match client
            .create_topic(TopicSpec::new(topic).partitions(1))
            .await
        {
            Err(error) if error.kind() != ErrorKind::TopicExists => return Err(error.into()),
            _ => {}
        }
    }
    let plain = client.producer(ProducerConfig::default())?;
    let layers = ProducerConfig::default().interceptor(TraceContextLayer::new());
    let masking = client.producer(layers.interceptor(Mask))?;
    masking.send(Record::to(TOPIC).value("secret")).await?;
    plain.send(Record::to(TOPIC).value("forgotten")).await?;

    let dead_letter = DeadLetter::to(DEAD);
    let consumer = client.consumer(TOPIC).interceptor(Mask).until_end();
    let mut records = consumer.open().await?;
    while let Some(record) = records.next().await {
        match record {
            Ok(record) => {
                let trace = record.trace_context().map(|context| context.traceparent());
                println!("{}: {:?} in trace {trace:?}", record.offset, record.value);
            }
            Err(error) => match error.record() {
                Some(record) => {
                    let letter = dead_letter.record(record, &error, 1);
                    let written = plain.send(letter).await?;
                    println!("set aside at {DEAD}/{}: {error}", written.offset);
                }
                None => return Err(error.into()),
            },
        }
    }
    Ok(())
}
