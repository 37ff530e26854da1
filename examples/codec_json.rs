//! Values of a type of the program's own, written and read as JSON; one that is no JSON does not stop
//! the reader.
//!
//! ```sh
//! QUTE_BOOTSTRAP=127.0.0.1:7700 cargo run --example codec_json
//! ```

use std::time::Duration;

use anyhow::Result;
use futures::StreamExt;
use qute_client::{Client, ErrorKind, JsonCodec, ProducerConfig, Record, TopicSpec, Utf8Codec};
use serde::{Deserialize, Serialize};

const TOPIC: &str = "flights-json";

#[derive(Debug, Serialize, Deserialize)]
struct Flight {
    from: String,
    to: String,
    delay_minutes: Option<i32>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let client = Client::from_env().await?;
    match client.create_topic(TopicSpec::new(TOPIC)).await {
        Err(error) if error.kind() != ErrorKind::TopicExists => return Err(error.into()),
        _ => {}
    }

    let producer = client.producer(ProducerConfig::default())?;
    let flights = producer.typed::<Flight>(TOPIC, JsonCodec).keys(Utf8Codec);
    for (number, to) in ["SFO", "IAH"].into_iter().enumerate() {
        let flight = Flight {
            from: "EWR".to_owned(),
            to: to.to_owned(),
            delay_minutes: (number == 1).then_some(-4),
        };
        flights.send(&format!("UA{number}"), &flight).await?;
    }
    // The flight is off: a key without a value.
    flights.send(&"UA0".to_owned(), None).await?;
    // Somebody who does not keep to the format.
    let bad = Record::to(TOPIC).key("UA2").value("EWR,MIA");
    flights.producer().send(bad).await?;
    producer.close(Duration::from_secs(10)).await;

    let consumer = client.consumer(TOPIC).until_end().open().await?;
    let mut flights = consumer.typed::<Flight>(JsonCodec).keys(Utf8Codec);
    while let Some(flight) = flights.next().await {
        match flight {
            Ok(flight) => {
                let (key, at) = (flight.key.unwrap_or_default(), flight.raw.offset);
                match flight.value {
                    Some(flight) => println!("{at}: {key}: {flight:?}"),
                    None => println!("{at}: {key} is off"),
                }
            }
            Err(error) if error.kind() == ErrorKind::Serde => println!("skipped: {error}"),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
