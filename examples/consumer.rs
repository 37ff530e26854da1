//! Reads a topic from its start and goes on with what arrives, until Ctrl-C.
//!
//! ```sh
//! cargo run --example consumer -- --bootstrap 127.0.0.1:7700 --topic greetings
//! ```

use anyhow::Result;
use clap::Parser;
use futures::StreamExt;
use qute_client::{Client, Position};

#[derive(Parser)]
struct Args {
    /// Brokers to ask first
    #[arg(short, long, env = "QUTE_BOOTSTRAP", default_value = "127.0.0.1:7700")]
    bootstrap: String,
    /// Topic to read
    #[arg(long, default_value = "greetings")]
    topic: String,
    /// End at the end offsets of now
    #[arg(long)]
    until_end: bool,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let client = Client::connect(&args.bootstrap).await?;
    let mut consumer = client.consumer(args.topic.as_str()).start(Position::Start);
    if args.until_end {
        consumer = consumer.until_end();
    }
    let mut records = consumer.open().await?;
    loop {
        let record = tokio::select! {
            record = records.next() => record,
            _ = tokio::signal::ctrl_c() => None,
        };
        let Some(record) = record else { return Ok(()) };
        let record = record?;
        let text = |bytes: Option<bytes::Bytes>| match bytes {
            Some(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            None => "(absent)".to_owned(),
        };
        println!(
            "{}/{}: {} = {}",
            record.partition,
            record.offset,
            text(record.key),
            text(record.value)
        );
    }
}
