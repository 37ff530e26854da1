//! Writes the lines of its standard input through a sink: the input is read as fast as the cluster
//! takes records, and no faster.
//!
//! ```sh
//! seq 100000 | QUTE_BOOTSTRAP=127.0.0.1:7700 cargo run --release --example sink
//! ```

use std::time::Duration;

use anyhow::{Result, ensure};
use futures::SinkExt;
use qute_client::{Client, ProducerConfig, Record, TopicTemplate};
use tokio::io::{AsyncBufReadExt, BufReader, stdin};

const TOPIC: &str = "lines";

#[tokio::main]
async fn main() -> Result<()> {
    let client = Client::from_env().await?;
    let config = ProducerConfig::default()
        .create_topics(Some(TopicTemplate::default().partitions(4)))
        .linger(Duration::from_millis(5));
    let producer = client.producer(config)?;

    let mut sink = producer.sink();
    let mut lines = BufReader::new(stdin()).lines();
    while let Some(line) = lines.next_line().await? {
        // Waits while the buffer is full.
        sink.feed(Record::to(TOPIC).value(line)).await?;
    }
    // Waits until all of them have their fate.
    sink.close().await?;

    let report = producer.close(Duration::from_secs(30)).await;
    println!("{} lines stored", report.delivered);
    ensure!(report.is_clean(), "not stored: {:#?}", report.undelivered);
    Ok(())
}
