//! Writes keyed records and prints where each one went.
//!
//! ```sh
//! cargo run --example producer -- --bootstrap 127.0.0.1:7700 --topic greetings --count 10
//! ```

use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use qute_client::{Client, ErrorKind, ProducerConfig, Record, TopicSpec};

#[derive(Parser)]
struct Args {
    /// Brokers to ask first
    #[arg(short, long, env = "QUTE_BOOTSTRAP", default_value = "127.0.0.1:7700")]
    bootstrap: String,
    /// Topic; created if it is missing
    #[arg(long, default_value = "greetings")]
    topic: String,
    /// How many records
    #[arg(long, default_value_t = 10)]
    count: u32,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let client = Client::connect(&args.bootstrap).await?;
    match client.create_topic(TopicSpec::new(&args.topic)).await {
        Err(error) if error.kind() != ErrorKind::TopicExists => return Err(error.into()),
        _ => {}
    }
    let producer = client.producer(ProducerConfig::default())?;
    for number in 0..args.count {
        let record = Record::to(args.topic.as_str())
            .key(format!("name-{}", number % 3))
            .value(format!("hello {number}"));
        let written = producer.send(record).await?;
        println!(
            "hello {number}: partition {} offset {}",
            written.partition, written.offset
        );
    }
    producer.close(Duration::from_secs(10)).await;
    Ok(())
}
