//! `produce`, `consume` and `end-to-end`: the load of `qute-load`, on a topic made if it is missing.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use qute_client::{Client, ClientConfig, Compression, ErrorKind, TopicSpec};
use qute_load::{Control, Load};
use serde_json::{Value, json};

/// What to send and how.
#[derive(Args, Clone, Debug)]
pub struct LoadArgs {
    /// Topic; created if it is missing
    #[arg(long, default_value = "bench")]
    pub topic: String,
    /// Partitions of a created topic
    #[arg(long, default_value_t = 6)]
    pub partitions: u32,
    /// Replicas of a created topic [default: automatic]
    #[arg(long)]
    pub replicas: Option<u32>,
    /// Bytes of each value
    #[arg(long, default_value_t = 1024)]
    pub record_bytes: usize,
    /// How many records [default: 1,000,000 without a duration]
    #[arg(long)]
    pub records: Option<u64>,
    /// How long
    #[arg(long, value_parser = humantime::parse_duration)]
    pub duration: Option<Duration>,
    /// Records sent first and not counted
    #[arg(long, default_value_t = 0)]
    pub warmup: u64,
    /// Records a second, over all senders [default: as fast as possible]
    #[arg(long)]
    pub rate: Option<f64>,
    /// Records in flight at most
    #[arg(long, default_value_t = 4096)]
    pub concurrency: usize,
    /// How long a record may wait for company
    #[arg(long, value_parser = humantime::parse_duration, default_value = "0s")]
    pub linger: Duration,
    /// Bytes of a batch at most
    #[arg(long, default_value_t = 256 * 1024)]
    pub batch_bytes: usize,
    /// none, lz4 or zstd
    #[arg(long, default_value = "none")]
    pub compression: Compression,
    /// Different keys; 0: none
    #[arg(long, default_value_t = 0)]
    pub keys: u64,
}

impl LoadArgs {
    fn settings(&self) -> Value {
        json!({
            "topic": self.topic,
            "partitions": self.partitions,
            "replicas": self.replicas,
            "record_bytes": self.record_bytes,
            "rate": self.rate,
            "concurrency": self.concurrency,
            "linger_ms": self.linger.as_secs_f64() * 1000.0,
            "batch_bytes": self.batch_bytes,
            "keys": self.keys,
        })
    }

    fn load(&self) -> Load {
        Load {
            record_bytes: self.record_bytes,
            records: self.records,
            duration: self.duration,
            warmup: self.warmup,
            rate: self.rate,
            concurrency: self.concurrency,
            linger: self.linger,
            batch_bytes: self.batch_bytes,
            compression: self.compression,
            keys: self.keys,
            ..Load::new(&self.topic)
        }
    }
}

/// Connects and makes sure that the topic is there.
async fn open(bootstrap: &str, args: &LoadArgs) -> Result<Client> {
    let config = ClientConfig::new(bootstrap)?.client_name("qute-bench");
    let client = Client::connect_with(config.call_timeout(Duration::from_secs(60))).await?;
    let mut spec = TopicSpec::new(&args.topic).partitions(args.partitions);
    if let Some(replicas) = args.replicas {
        spec = spec.replicas(replicas);
    }
    match client.create_topic(spec).await {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::TopicExists => {}
        Err(error) => return Err(error.into()),
    }
    Ok(client)
}

/// Writes records and waits for their acknowledgements.
///
/// # Errors
/// When the cluster can't be reached; refused records are counted.
pub async fn produce(bootstrap: &str, args: &LoadArgs) -> Result<Value> {
    let client = open(bootstrap, args).await?;
    let report = qute_load::produce(&client, &args.load(), &Control::new()).await?;
    if let Some(error) = &report.first_error {
        eprintln!("{} records failed, the first: {error}", report.errors);
    }
    Ok(report.to_json("produce", args.settings()))
}

/// Reads a topic from its start to its end. An empty topic is filled first.
///
/// # Errors
/// When the topic can't be read.
pub async fn consume(bootstrap: &str, args: &LoadArgs) -> Result<Value> {
    let client = open(bootstrap, args).await?;
    let mut report = qute_load::consume(&client, &args.topic, None, &Control::new()).await?;
    if report.records == 0 {
        eprintln!("filling the topic");
        qute_load::produce(&client, &args.load(), &Control::new()).await?;
        report = qute_load::consume(&client, &args.topic, None, &Control::new()).await?;
    }
    Ok(report.to_json("consume", args.settings()))
}

/// Writes and reads at the same time; latency runs from a record's due time to its reading.
///
/// # Errors
/// When the topic can't be written or read.
pub async fn end_to_end(bootstrap: &str, args: &LoadArgs) -> Result<Value> {
    let client = open(bootstrap, args).await?;
    let report = qute_load::end_to_end(&client, &args.load(), &Control::new()).await?;
    if let Some(error) = &report.first_error {
        eprintln!("{} records failed, the first: {error}", report.errors);
    }
    Ok(report.to_json("end-to-end", args.settings()))
}
