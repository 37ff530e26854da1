//! Steers a reader from beside: pauses a partition, goes on, goes back, and asks how far behind it is.
//!
//! ```sh
//! QUTE_BOOTSTRAP=127.0.0.1:7700 cargo run --example control
//! ```

use std::time::Duration;

use anyhow::Result;
use futures::StreamExt;
use qute_client::{Client, Consumer, ErrorKind, Position, ProducerConfig, Record, TopicSpec};

const TOPIC: &str = "steered";

#[tokio::main]
async fn main() -> Result<()> {
    let client = Client::from_env().await?;
    match client
        .create_topic(TopicSpec::new(TOPIC).partitions(2))
        .await
    {
        Err(error) if error.kind() != ErrorKind::TopicExists => return Err(error.into()),
        _ => {}
    }
    let consumer = client.consumer(TOPIC).start(Position::End);
    let mut records = consumer.open().await?;
    let control = records.control();

    let producer = client.producer(ProducerConfig::default())?;
    for number in 0..6 {
        let record = Record::to(TOPIC).partition(number % 2);
        producer.send(record.value(format!("n{number}"))).await?;
    }
    producer.close(Duration::from_secs(10)).await;
    println!("lag by partition: {:?}", control.latest_lag().await?);

    control.pause([1])?;
    println!("partition 1 is paused:");
    take(&mut records, 3).await?;
    println!("lag by partition: {:?}", control.latest_lag().await?);

    control.resume([1])?;
    println!("and goes on:");
    take(&mut records, 3).await?;

    let again = control.seek(0, Position::Tail(2)).await?;
    println!("partition 0 goes back to offset {again}:");
    take(&mut records, 2).await?;
    println!("next offsets: {:?}", control.positions());
    Ok(())
}

async fn take(records: &mut Consumer, count: usize) -> Result<()> {
    for _ in 0..count {
        let Some(record) = records.next().await else {
            break;
        };
        let record = record?;
        let (partition, offset, value) = (record.partition, record.offset, record.value);
        println!("  {partition}/{offset}: {:?}", value.unwrap_or_default());
    }
    Ok(())
}
