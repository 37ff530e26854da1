//! What a frozen broker costs the others.
//!
//! Three brokers, records at a fixed rate, two thirds with keys and one without. After a while the
//! broker that leads most partitions is stopped by SIGSTOP: its connections stay, and nothing comes
//! from it. The figures: latency of keyed records in the partitions that the *other* brokers lead,
//! before and meanwhile (promise: within twice), and how many keyless records go where. Latency
//! counts from when a record was due.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use qute_client::{Client, Producer, ProducerConfig, Record};
use qute_load::latency::{Latencies, rounded};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::target;

const TOPIC: &str = "bench-frozen";
/// Every third record has no key.
const KEYLESS: u64 = 3;
const KEYS: u64 = 10_000;

/// How to measure.
#[derive(Args, Clone, Debug)]
pub struct FrozenArgs {
    /// Partitions
    #[arg(long, default_value_t = 12)]
    pub partitions: u32,
    /// Replicas of each: with one, nobody takes a frozen partition over
    #[arg(long, default_value_t = 3)]
    pub replicas: u32,
    /// Bytes of each value
    #[arg(long, default_value_t = 1024)]
    pub record_bytes: usize,
    /// Records a second
    #[arg(long, default_value_t = 1500.0)]
    pub rate: f64,
    /// Before the freeze, after a warm-up of a fifth of it; and as long frozen
    #[arg(long, value_parser = humantime::parse_duration, default_value = "10s")]
    pub each: Duration,
}

/// One record that was written.
struct Written {
    due: Instant,
    latency: Duration,
    partition: u32,
    keyed: bool,
}

/// Freezes one broker of three under load.
///
/// # Errors
/// When the cluster misbehaves or a write fails.
pub fn measure(args: &FrozenArgs) -> Result<Value> {
    let mut cluster = target::own(3)?;
    cluster.create_topic(TOPIC, args.partitions, args.replicas)?;
    let runtime = tokio::runtime::Runtime::new()?;
    let (done, mut written) = mpsc::unbounded_channel();
    let begun = Instant::now();
    let freeze_at = begun + args.each / 5 + args.each;
    let writer = runtime.spawn(write(
        cluster.bootstrap(),
        args.clone(),
        freeze_at + args.each,
        done,
    ));
    let frozen = cluster.busiest_leader(TOPIC)?;
    let place = cluster.place_of(&frozen)?;
    qute_tests::wait::rest_until(freeze_at);
    let led: BTreeSet<u32> = cluster
        .leaders(TOPIC)?
        .into_iter()
        .filter(|(_, leader)| leader.as_deref() == Some(frozen.as_str()))
        .filter_map(|(partition, _)| u32::try_from(partition).ok())
        .collect();
    ensure!(!writer.is_finished(), "the writer has ended");
    let freeze_at = Instant::now();
    cluster.node(place)?.pause()?;
    eprintln!(
        "broker {place}, which leads {} partitions, is frozen",
        led.len()
    );
    qute_tests::wait::rest_until(freeze_at + args.each);
    cluster.node(place)?.resume()?;
    runtime.block_on(writer)??;
    let mut all = Vec::new();
    while let Some(record) = written.blocking_recv() {
        all.push(record);
    }
    cluster.stop()?;
    report(args, &all, &led, begun + args.each / 5, freeze_at)
}

/// Writes at the rate until `end`, and gives each record to `done`. Ends when all are written.
async fn write(
    bootstrap: String,
    args: FrozenArgs,
    end: Instant,
    done: mpsc::UnboundedSender<Written>,
) -> Result<()> {
    let client = Client::connect(&bootstrap).await?;
    let producer = client.producer(ProducerConfig::default())?;
    let value = bytes::Bytes::from(vec![b'x'; args.record_bytes]);
    let topic: Arc<str> = TOPIC.into();
    let start = Instant::now();
    let mut records = tokio::task::JoinSet::new();
    for number in 0_u64.. {
        #[allow(clippy::cast_precision_loss)]
        let due = start + Duration::from_secs_f64(number as f64 / args.rate);
        if due >= end {
            break;
        }
        tokio::time::sleep_until(due.into()).await;
        let mut record = Record::to(Arc::clone(&topic)).value(value.clone());
        let keyed = number % KEYLESS != 0;
        if keyed {
            record = record.key(format!("key{}", number % KEYS));
        }
        records.spawn(one(producer.clone(), record, due, keyed, done.clone()));
        while let Some(ended) = records.try_join_next() {
            ended??;
        }
    }
    while let Some(ended) = records.join_next().await {
        ended??;
    }
    Ok(())
}

async fn one(
    producer: Producer,
    record: Record,
    due: Instant,
    keyed: bool,
    done: mpsc::UnboundedSender<Written>,
) -> Result<()> {
    let place = producer.send(record).await?;
    let written = Written {
        due,
        latency: due.elapsed(),
        partition: place.partition,
        keyed,
    };
    done.send(written).ok().context("nobody counts")
}

fn report(
    args: &FrozenArgs,
    all: &[Written],
    frozen: &BTreeSet<u32>,
    warm_at: Instant,
    freeze_at: Instant,
) -> Result<Value> {
    let before = |record: &&Written| record.due >= warm_at && record.due < freeze_at;
    let during = |record: &&Written| record.due >= freeze_at && record.due < freeze_at + args.each;
    let keyed_elsewhere = |record: &&Written| record.keyed && !frozen.contains(&record.partition);
    let mut latencies = [Latencies::new()?, Latencies::new()?];
    for record in all.iter().filter(keyed_elsewhere) {
        if before(&record) {
            latencies[0].record(record.latency);
        } else if during(&record) {
            latencies[1].record(record.latency);
        }
    }
    let [was, is] = latencies.map(|of| (of.count(), of.to_json()));
    let p99 = |(_, json): &(u64, Value)| json["p99"].as_f64().unwrap_or(0.0);
    // The share of keyless records that the frozen broker's partitions got, second by second.
    let share = |records: &mut dyn Iterator<Item = &Written>| {
        let (mut count, mut caught) = (0_u32, 0_u32);
        for record in records.filter(|record| !record.keyed) {
            count += 1;
            caught += u32::from(frozen.contains(&record.partition));
        }
        rounded(f64::from(caught) / f64::from(count.max(1)))
    };
    let seconds: Vec<f64> = (0..args.each.as_secs())
        .map(|second| {
            let from = freeze_at + Duration::from_secs(second);
            let within = |record: &&Written| {
                record.due >= from && record.due < from + Duration::from_secs(1)
            };
            share(&mut all.iter().filter(within))
        })
        .collect();
    Ok(json!({
        "bench": "frozen",
        "settings": {
            "partitions": args.partitions,
            "replicas": args.replicas,
            "record_bytes": args.record_bytes,
            "rate": args.rate,
            "each_s": args.each.as_secs_f64(),
        },
        "records": all.len(),
        "frozen_partitions": frozen,
        "elsewhere_before": { "records": was.0, "latency_ms": was.1 },
        "elsewhere_during": { "records": is.0, "latency_ms": is.1 },
        "p99_ratio": rounded(p99(&is) / p99(&was).max(0.001)),
        "keyless_share_before": share(&mut all.iter().filter(before)),
        "keyless_share_by_second": seconds,
        "worst_ms": all.iter().map(|r| qute_load::latency::as_millis(r.latency)).fold(0.0, f64::max),
    }))
}
