//! `produce`, `consume` and `end-to-end`.
//!
//! With a rate, record i is due at start + i / rate, and its latency counts from when it was due:
//! a stall of the system under test is charged to every record that it held up, sent or not
//! (coordinated omission). Without a rate, `concurrency` records are always in flight and latency
//! counts from the call.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bytes::{BufMut, Bytes, BytesMut};
use clap::Args;
use futures::StreamExt;
use qute_client::{Client, ClientConfig, Position, Producer, ProducerConfig, Record, TopicSpec};
use qute_proto::batch::Codec;
use serde_json::{Value, json};

use crate::latency::{Latencies, rounded};

/// Bytes at the front of each value: when the record was due, in nanoseconds since the start.
const STAMP_BYTES: usize = 8;

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
    pub compression: Codec,
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

    fn records_max(&self) -> u64 {
        match (self.records, self.duration) {
            (Some(records), _) => records + self.warmup,
            (None, Some(_)) => u64::MAX,
            (None, None) => 1_000_000 + self.warmup,
        }
    }
}

/// Connects and makes sure that the topic is there.
///
/// # Errors
/// When no broker answers or the topic can't be created.
pub async fn open(bootstrap: &str, args: &LoadArgs) -> Result<Client> {
    ensure!(
        args.record_bytes >= STAMP_BYTES,
        "a record needs {STAMP_BYTES} bytes at least"
    );
    let config = ClientConfig::new(bootstrap)?.client_name("qute-bench");
    let client = Client::connect_with(config.call_timeout(Duration::from_secs(60))).await?;
    let mut spec = TopicSpec::new(&args.topic).partitions(args.partitions);
    if let Some(replicas) = args.replicas {
        spec = spec.replicas(replicas);
    }
    match client.create_topic(spec).await {
        Ok(_) => {}
        Err(error) if error.kind() == qute_client::ErrorKind::TopicExists => {}
        Err(error) => return Err(error.into()),
    }
    Ok(client)
}

/// Hands out record numbers with the times at which they are due.
struct Schedule {
    start: Instant,
    next: AtomicU64,
    records_max: u64,
    end: Option<Instant>,
    rate: Option<f64>,
}

impl Schedule {
    fn new(args: &LoadArgs) -> Self {
        let start = Instant::now();
        Self {
            start,
            next: AtomicU64::new(0),
            records_max: args.records_max(),
            end: args.duration.map(|duration| start + duration),
            rate: args.rate,
        }
    }

    /// The next record and when it is due; `None`: enough.
    async fn next(&self) -> Option<(u64, Instant)> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        if number >= self.records_max {
            return None;
        }
        let due = match self.rate {
            None => Instant::now(),
            #[allow(clippy::cast_precision_loss)]
            Some(rate) => self.start + Duration::from_secs_f64(number as f64 / rate),
        };
        // Before the rest, not after it: at one record a second that of the last sender is long.
        if self.end.is_some_and(|end| due >= end) {
            return None;
        }
        if self.rate.is_some() {
            tokio::time::sleep_until(due.into()).await;
        }
        Some((number, due))
    }

    fn stamp(&self, due: Instant) -> u64 {
        u64::try_from(due.duration_since(self.start).as_nanos()).unwrap_or(u64::MAX)
    }
}

/// What one sender saw.
struct Sent {
    latencies: Latencies,
    records: u64,
    errors: u64,
    first: Option<Instant>,
    last: Option<Instant>,
}

async fn send(
    producer: Producer,
    schedule: Arc<Schedule>,
    args: Arc<LoadArgs>,
    filler: Bytes,
) -> Result<Sent> {
    let topic: Arc<str> = args.topic.as_str().into();
    let mut sent = Sent {
        latencies: Latencies::new()?,
        records: 0,
        errors: 0,
        first: None,
        last: None,
    };
    while let Some((number, due)) = schedule.next().await {
        let mut value = BytesMut::with_capacity(args.record_bytes);
        value.put_u64_le(schedule.stamp(due));
        value.extend_from_slice(&filler);
        let mut record = Record::to(Arc::clone(&topic)).value(value.freeze());
        if let Some(key) = number.checked_rem(args.keys) {
            record = record.key(format!("key{key}"));
        }
        let counted = number >= args.warmup;
        match producer.send(record).await {
            Ok(_) if counted => {
                let now = Instant::now();
                sent.latencies.record(now.duration_since(due));
                sent.records += 1;
                sent.first.get_or_insert(due);
                sent.last = Some(now);
            }
            Ok(_) => {}
            Err(error) => {
                if sent.errors == 0 {
                    eprintln!("record {number}: {error}");
                }
                sent.errors += 1;
            }
        }
    }
    Ok(sent)
}

/// Bytes that don't compress well, the same for every record.
fn filler(length: usize) -> Bytes {
    let mut state = 1_u64;
    let byte = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        state.to_le_bytes()[7]
    };
    (0..length).map(byte).collect()
}

/// Sends everything; the totals over all senders, and the time from the first record's due time to
/// the last acknowledgement.
async fn send_all(client: &Client, args: &LoadArgs, schedule: Arc<Schedule>) -> Result<Value> {
    let config = ProducerConfig::default()
        .linger(args.linger)
        .batch_bytes(args.batch_bytes)
        .compression(args.compression);
    let producer = client.producer(config)?;
    let filler = filler(args.record_bytes - STAMP_BYTES);
    let shared = Arc::new(args.clone());
    let mut senders = tokio::task::JoinSet::new();
    for _ in 0..args.concurrency.max(1) {
        let (schedule, shared) = (Arc::clone(&schedule), Arc::clone(&shared));
        senders.spawn(send(producer.clone(), schedule, shared, filler.clone()));
    }
    let (mut latencies, mut records, mut errors) = (Latencies::new()?, 0, 0);
    let (mut first, mut last) = (None::<Instant>, None::<Instant>);
    while let Some(sent) = senders.join_next().await {
        let sent = sent??;
        latencies.add(&sent.latencies)?;
        records += sent.records;
        errors += sent.errors;
        first = first.into_iter().chain(sent.first).min();
        last = last.into_iter().chain(sent.last).max();
    }
    producer.close(Duration::from_secs(30)).await;
    let seconds = first
        .zip(last)
        .map_or(0.0, |(first, last)| (last - first).as_secs_f64());
    Ok(report(
        "produce",
        args,
        records,
        errors,
        seconds,
        Some(&latencies),
    ))
}

#[allow(clippy::cast_precision_loss)]
fn report(
    bench: &str,
    args: &LoadArgs,
    records: u64,
    errors: u64,
    seconds: f64,
    latencies: Option<&Latencies>,
) -> Value {
    let per_second = if seconds > 0.0 {
        records as f64 / seconds
    } else {
        0.0
    };
    json!({
        "bench": bench,
        "settings": args.settings(),
        "records": records,
        "errors": errors,
        "seconds": rounded(seconds),
        "records_per_s": rounded(per_second),
        "mb_per_s": rounded(per_second * args.record_bytes as f64 / 1e6),
        "latency_ms": latencies.map(Latencies::to_json),
    })
}

/// Writes records and waits for their acknowledgements.
///
/// # Errors
/// When the cluster can't be reached; refused records are counted.
pub async fn produce(bootstrap: &str, args: &LoadArgs) -> Result<Value> {
    let client = open(bootstrap, args).await?;
    send_all(&client, args, Arc::new(Schedule::new(args))).await
}

/// Reads a topic from its start to its end. An empty topic is filled first.
///
/// # Errors
/// When the topic can't be read.
pub async fn consume(bootstrap: &str, args: &LoadArgs) -> Result<Value> {
    let client = open(bootstrap, args).await?;
    let read = |client: Client| async move {
        let start = Instant::now();
        let consumer = client
            .consumer(args.topic.as_str())
            .start(Position::Start)
            .until_end();
        let mut stream = consumer.open().await?;
        let (mut records, mut bytes) = (0_u64, 0_usize);
        while let Some(record) = stream.next().await {
            records += 1;
            bytes += record?.value.map_or(0, |value| value.len());
        }
        anyhow::Ok((records, bytes, start.elapsed().as_secs_f64()))
    };
    let (mut records, mut bytes, mut seconds) = read(client.clone()).await?;
    if records == 0 {
        eprintln!("filling the topic");
        send_all(&client, args, Arc::new(Schedule::new(args))).await?;
        (records, bytes, seconds) = read(client).await?;
    }
    #[allow(clippy::cast_precision_loss)]
    Ok(json!({
        "bench": "consume",
        "settings": args.settings(),
        "records": records,
        "seconds": rounded(seconds),
        "records_per_s": rounded(records as f64 / seconds),
        "mb_per_s": rounded(bytes as f64 / seconds / 1e6),
    }))
}

/// Writes and reads at the same time; latency runs from a record's due time to its reading.
///
/// # Errors
/// When the topic can't be written or read.
pub async fn end_to_end(bootstrap: &str, args: &LoadArgs) -> Result<Value> {
    let client = open(bootstrap, args).await?;
    let consumer = client.consumer(args.topic.as_str()).start(Position::End);
    let mut stream = consumer.open().await?;
    let schedule = Arc::new(Schedule::new(args));
    let reading = Arc::clone(&schedule);
    let (stop, mut stopped) = tokio::sync::oneshot::channel::<u64>();
    let warmup = args.warmup;
    let reader = tokio::spawn(async move {
        let (mut latencies, mut read, mut wanted) = (Latencies::new()?, 0_u64, None);
        while wanted.is_none_or(|wanted| read < wanted) {
            let record = tokio::select! {
                record = stream.next() => record.context("the stream has ended")??,
                total = &mut stopped, if wanted.is_none() => {
                    wanted = Some(total?);
                    continue;
                }
            };
            let value = record.value.unwrap_or_default();
            let (stamp, _) = value
                .split_first_chunk::<STAMP_BYTES>()
                .context("no stamp")?;
            let due = reading.start + Duration::from_nanos(u64::from_le_bytes(*stamp));
            read += 1;
            if read > warmup {
                latencies.record(due.elapsed());
            }
        }
        anyhow::Ok(latencies)
    });
    let produced = send_all(&client, args, schedule).await?;
    let records = produced["records"].as_u64().unwrap_or(0);
    // Whoever reads may have failed already: its own error says more.
    let _ = stop.send(records + warmup);
    let latencies = tokio::time::timeout(Duration::from_secs(60), reader)
        .await
        .context("records that were acknowledged didn't arrive within a minute")???;
    Ok(json!({
        "bench": "end-to-end",
        "settings": args.settings(),
        "records": latencies.count(),
        "mb_per_s": produced["mb_per_s"],
        "records_per_s": produced["records_per_s"],
        "latency_ms": latencies.to_json(),
        "acknowledged_ms": produced["latency_ms"],
    }))
}
