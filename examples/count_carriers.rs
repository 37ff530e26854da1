//! Counts the flights that left New York in 2013 by carrier, in a group of three workers that crash half way
//! and are started again: the result is the published table, to the flight.
//!
//! ```sh
//! cargo run --release --example count_carriers
//! ```
//!
//! With `QUTE_BOOTSTRAP` it uses that cluster, else a broker of its own.
//!
//! Why nothing is counted twice, although a group reads at least once: a worker stores its counts of a
//! partition *together with the offset that they reach to*, as one record. Whoever gets the partition next
//! loads the counts that reach farthest and leaves out what comes again from before there. The committed
//! offset only says from where to read, and may lag. Even a worker that was cut off and goes on counting for
//! a while does no harm: what it stores is what it counted, up to the offset that it says, and so is
//! anybody else's.

use std::collections::BTreeMap;
use std::io::BufReader;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use futures::StreamExt;
use futures::future::try_join_all;
use qute_client::group::{CommitMode, Event, GroupBatch, GroupControl};
use qute_client::{Client, Producer, ProducerConfig, Record};
use qute_examples::{Playground, unused};
use serde::{Deserialize, Serialize};

#[derive(Parser)]
struct Args {
    /// The flights: key, tab, columns as CSV; packed with xz
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/flights.tsv.xz"))]
    file: PathBuf,
}

const PARTITIONS: u32 = 6;
const WORKERS: usize = 3;
const PATIENCE: Duration = Duration::from_secs(120);

/// As published.
const CARRIERS: [(&str, u64); 16] = [
    ("9E", 18_460),
    ("AA", 32_729),
    ("AS", 714),
    ("B6", 54_635),
    ("DL", 48_110),
    ("EV", 54_173),
    ("F9", 685),
    ("FL", 3_260),
    ("HA", 342),
    ("MQ", 26_397),
    ("OO", 32),
    ("UA", 58_665),
    ("US", 20_536),
    ("VX", 5_162),
    ("WN", 12_275),
    ("YV", 601),
];

/// The flights of one partition, up to, not including, an offset.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Counts {
    partition: u32,
    next: u64,
    carriers: BTreeMap<String, u64>,
}

/// What all workers share.
struct Pipeline {
    client: Client,
    producer: Producer,
    group: String,
    flights: String,
    counts: String,
    counted: AtomicUsize,
    came_again: AtomicUsize,
    /// Crash once so many flights are counted.
    crash_at: usize,
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let flights = unpack(&args.file)?;
    let playground = Playground::open().await?;
    let client = playground.client.clone();
    let topic = playground.topic("flights", PARTITIONS).await?;
    let began = Instant::now();
    let lines = write(&client, &topic, &flights).await?;
    println!("{lines} flights written in {:.1?}", began.elapsed());

    let pipeline = |counts: &str, group: &str, crash_at| -> Result<Arc<Pipeline>> {
        Ok(Arc::new(Pipeline {
            producer: client.producer(ProducerConfig::default())?,
            client: client.clone(),
            group: group.to_owned(),
            flights: topic.clone(),
            counts: counts.to_owned(),
            counted: AtomicUsize::new(0),
            came_again: AtomicUsize::new(0),
            crash_at,
        }))
    };
    let (counts, group) = (playground.topic("counts", 1).await?, unused("carriers"));
    let first = pipeline(&counts, &group, lines / 2)?;
    let crashed = run(&first).await?;
    println!(
        "{crashed} of {WORKERS} workers crashed with {} flights counted",
        first.counted.load(Ordering::Relaxed)
    );

    let second = pipeline(&counts, &group, usize::MAX)?;
    run(&second).await?;
    println!(
        "after the restart {} flights were counted, and {} came again and were left out",
        second.counted.load(Ordering::Relaxed),
        second.came_again.load(Ordering::Relaxed)
    );

    let table = table(&client, &counts).await?;
    for (carrier, flights) in &table {
        println!("{carrier} {flights:>6}");
    }
    let published = CARRIERS.map(|(carrier, flights)| (carrier.to_owned(), flights));
    ensure!(
        table == published.into(),
        "the table is not the published one"
    );
    println!("as published");
    client.groups().delete(&group).await?;
    playground.close().await;
    Ok(())
}

/// Runs workers until they crash, or nothing is left to count. How many crashed.
async fn run(pipeline: &Arc<Pipeline>) -> Result<usize> {
    let (mut tasks, mut controls) = (Vec::new(), Vec::<GroupControl>::new());
    for _ in 0..WORKERS {
        let group = pipeline.client.group(pipeline.group.as_str());
        let group = group.topics([&pipeline.flights]);
        let group = group.commit(CommitMode::every(Duration::from_millis(200)));
        let group = group.join().await?;
        controls.push(group.control());
        tasks.push(tokio::spawn(work(Arc::clone(pipeline), group)));
    }
    let deadline = Instant::now() + PATIENCE;
    while tasks.iter().all(|task| !task.is_finished()) {
        let partitions = pipeline.client.groups().lag(&pipeline.group).await?;
        let done = partitions.iter().all(|it| it.lag == Some(0));
        if done && partitions.len() == PARTITIONS as usize {
            let limit = Duration::from_secs(10);
            try_join_all(controls.iter().map(|it| it.leave(limit))).await?;
            break;
        }
        ensure!(
            Instant::now() < deadline,
            "the flights are not counted in time"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let mut crashed = 0;
    for task in tasks {
        crashed += usize::from(task.await?? == Ended::Crashed);
    }
    Ok(crashed)
}

#[derive(Debug, PartialEq, Eq)]
enum Ended {
    Done,
    Crashed,
}

async fn work(
    pipeline: Arc<Pipeline>,
    mut group: qute_client::group::GroupConsumer,
) -> Result<Ended> {
    let mut states = BTreeMap::<u32, Counts>::new();
    while let Some(event) = group.next().await {
        match event {
            Event::Assigned(assigned) => {
                for it in assigned.partitions {
                    states.insert(it.partition, pipeline.load(it.partition).await?);
                }
            }
            Event::Batch(batch) => {
                let Some(state) = states.get_mut(&batch.partition()) else {
                    bail!("a batch of a partition that was not assigned");
                };
                pipeline.count(state, &batch)?;
                pipeline.store(state).await?;
                if pipeline.counted.load(Ordering::Relaxed) >= pipeline.crash_at {
                    // Stored and not acknowledged: it comes again.
                    return Ok(Ended::Crashed);
                }
                batch.ack();
            }
            Event::Failed(error) => return Err(error.into()),
            // What was counted of partitions that are gone is stored; others load it.
            _ => {}
        }
    }
    Ok(Ended::Done)
}

impl Pipeline {
    fn count(&self, state: &mut Counts, batch: &GroupBatch) -> Result<()> {
        for record in batch.records() {
            if record.offset < state.next {
                self.came_again.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            let value = record.value.as_deref().unwrap_or_default();
            let columns = std::str::from_utf8(value)?;
            let carrier = columns
                .split(',')
                .nth(9)
                .context("a flight without a carrier")?;
            *state.carriers.entry(carrier.to_owned()).or_default() += 1;
            state.next = record.offset + 1;
            self.counted.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    async fn store(&self, state: &Counts) -> Result<()> {
        let record = Record::to(self.counts.as_str()).key(state.partition.to_string());
        let record = record.value(serde_json::to_vec(state)?);
        self.producer.send(record).await?;
        Ok(())
    }

    /// The counts of a partition that reach farthest.
    async fn load(&self, partition: u32) -> Result<Counts> {
        let mut states = farthest(&self.client, &self.counts).await?;
        Ok(states.remove(&partition).unwrap_or(Counts {
            partition,
            ..Counts::default()
        }))
    }
}

async fn farthest(client: &Client, counts: &str) -> Result<BTreeMap<u32, Counts>> {
    let mut farthest = BTreeMap::<u32, Counts>::new();
    let mut records = client.consumer(counts).until_end().open().await?;
    while let Some(record) = records.next().await {
        let state: Counts = serde_json::from_slice(&record?.value.unwrap_or_default())?;
        let known = farthest.entry(state.partition).or_default();
        if state.next >= known.next {
            *known = state;
        }
    }
    Ok(farthest)
}

async fn table(client: &Client, counts: &str) -> Result<BTreeMap<String, u64>> {
    let mut table = BTreeMap::new();
    for state in farthest(client, counts).await?.into_values() {
        for (carrier, flights) in state.carriers {
            *table.entry(carrier).or_default() += flights;
        }
    }
    Ok(table)
}

fn unpack(file: &PathBuf) -> Result<String> {
    let name = || file.display().to_string();
    let packed = std::fs::File::open(file).with_context(name)?;
    let mut text = Vec::new();
    lzma_rs::xz_decompress(&mut BufReader::new(packed), &mut text)?;
    Ok(String::from_utf8(text)?)
}

async fn write(client: &Client, topic: &str, flights: &str) -> Result<usize> {
    let producer = client.producer(ProducerConfig::default().linger(Duration::from_millis(5)))?;
    let mut tickets = Vec::new();
    for line in flights.lines() {
        let (key, value) = line.split_once('\t').context("a line without a key")?;
        let record = Record::to(topic)
            .key(key.to_owned())
            .value(value.to_owned());
        tickets.push(producer.enqueue(record).await?);
    }
    let lines = tickets.len();
    for ticket in tickets {
        ticket.await?;
    }
    Ok(lines)
}
