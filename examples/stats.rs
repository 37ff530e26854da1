//! Writes and reads for some seconds and prints, once a second, what the client counts.
//!
//! ```sh
//! QUTE_BOOTSTRAP=127.0.0.1:7700 cargo run --release --example stats
//! ```
//!
//! `RUST_LOG=qute_client=debug` shows its spans and events as well.

use std::time::Duration;

use anyhow::Result;
use futures::StreamExt;
use qute_client::{Client, ErrorKind, Position, Producer, ProducerConfig, Record, TopicSpec};
use tracing_subscriber::EnvFilter;

const TOPIC: &str = "counted";
const SECONDS: u32 = 5;

#[tokio::main]
async fn main() -> Result<()> {
    let filter = EnvFilter::from_default_env();
    tracing_subscriber::fmt().with_env_filter(filter).init();
    let client = Client::from_env().await?;
    match client.create_topic(TopicSpec::new(TOPIC)).await {
        Err(error) if error.kind() != ErrorKind::TopicExists => return Err(error.into()),
        _ => {}
    }
    let mut records = client.consumer(TOPIC).start(Position::End).open().await?;
    let producer = client.producer(ProducerConfig::default())?;
    let writing = tokio::spawn(write(producer.clone()));
    let reading = tokio::spawn(async move { while records.next().await.is_some() {} });

    let mut before = client.stats();
    for _ in 0..SECONDS {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let now = client.stats();
        println!(
            "acknowledged {}/s in {} batches, read {}/s, buffer {} KiB, ack p50 {:?} p99 {:?}",
            now.records_acked - before.records_acked,
            now.batches_acked - before.batches_acked,
            now.records_fetched - before.records_fetched,
            now.buffer_bytes / 1024,
            now.ack_latency.p50,
            now.ack_latency.p99,
        );
        before = now;
    }
    writing.abort();
    reading.abort();
    let report = producer.close(Duration::from_secs(10)).await;
    println!("{} records stored\n{:#?}", report.delivered, client.stats());
    Ok(())
}

async fn write(producer: Producer) -> qute_client::Result<()> {
    for number in 0_u64.. {
        let record = Record::to(TOPIC)
            .key(number.to_string())
            .value(vec![0; 200]);
        // The ticket is dropped: the record is delivered all the same, and counted.
        let _ticket = producer.enqueue(record).await?;
    }
    Ok(())
}
