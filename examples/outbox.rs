//! An outbox: what a program has put into its own store is written to a topic, once, however often the
//! relay that does so is stopped and started.
//!
//! ```sh
//! cargo run --example outbox
//! ```
//!
//! With `QUTE_BOOTSTRAP` it uses that cluster, else a broker of its own.
//!
//! The store (here a file; in a shop the table that the order's own transaction writes to) numbers its
//! entries. The relay writes each entry with its number in a header, an entry's partition by its key, the
//! next one of a partition only after the one before is acknowledged. So the numbers of a partition rise, and
//! the last one *is* the relay's position: it keeps none of its own, and a relay that starts reads it back
//! from the topic. Nothing is written twice, as long as one relay runs at a time.
//!
//! What remains: a write whose fate is unknown when the relay dies may land after its successor has looked.
//! A reader that leaves out numbers at or below the last it has seen of the partition
//! ([`read`]) sees every entry exactly once even then.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use futures::future::try_join_all;
use qute_client::{
    Client, ConsumedRecord, Position, Producer, ProducerConfig, Record, partition_of,
};
use qute_examples::Playground;

const PARTITIONS: u32 = 4;
const ENTRIES: u64 = 2_000;
const NUMBER: &str = "outbox-number";

/// An entry of the store: its number, and whose it is.
struct Entry {
    number: u64,
    customer: String,
}

#[tokio::main]
async fn main() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let store: PathBuf = dir.path().join("outbox");
    let playground = Playground::open().await?;
    let client = &playground.client;
    let topic = playground.topic("outbox", PARTITIONS).await?;

    put(&store, 1..=ENTRIES / 2)?;
    // Dies in the middle of it, three times.
    for lives in [100, 250, 400] {
        let written = relay(client, &topic, &store, lives).await?;
        println!("a relay wrote {written} entries and died");
    }
    put(&store, ENTRIES / 2 + 1..=ENTRIES)?;
    let written = relay(client, &topic, &store, usize::MAX).await?;
    println!("the last one wrote {written} entries");

    let numbers = read(client, &topic).await?;
    let distinct: std::collections::BTreeSet<_> = numbers.iter().collect();
    ensure!(numbers.len() == distinct.len(), "an entry came twice");
    ensure!(
        distinct.into_iter().copied().eq(1..=ENTRIES),
        "an entry is missing"
    );
    println!("{} entries, each exactly once", numbers.len());
    playground.close().await;
    Ok(())
}

/// Adds entries, durably: that is the store's affair.
fn put(store: &Path, numbers: std::ops::RangeInclusive<u64>) -> Result<()> {
    let mut file = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(store)?;
    for number in numbers {
        writeln!(file, "{number} customer-{}", number % 37)?;
    }
    file.sync_all()?;
    Ok(())
}

fn entries(store: &Path) -> Result<Vec<Entry>> {
    let text = std::fs::read_to_string(store)?;
    let parse = |line: &str| {
        let (number, customer) = line.split_once(' ').context("a line of two words")?;
        Ok(Entry {
            number: number.parse()?,
            customer: customer.to_owned(),
        })
    };
    text.lines().map(parse).collect()
}

/// Writes what the topic does not have yet, in order per partition and partitions side by side; dies after
/// so many entries of each.
async fn relay(client: &Client, topic: &str, store: &Path, lives: usize) -> Result<usize> {
    let positions = positions(client, topic).await?;
    let mut rest = BTreeMap::<u32, Vec<Entry>>::new();
    for entry in entries(store)? {
        let partition = partition_of(entry.customer.as_bytes(), PARTITIONS);
        if entry.number > positions.get(&partition).copied().unwrap_or(0) {
            rest.entry(partition).or_default().push(entry);
        }
    }
    let producer = client.producer(ProducerConfig::default())?;
    let written = rest.into_iter().map(async |(partition, entries)| {
        let mut written = 0;
        for entry in entries.iter().take(lives) {
            write(&producer, topic, partition, entry).await?;
            written += 1;
        }
        anyhow::Ok(written)
    });
    let written: Vec<usize> = try_join_all(written).await?;
    Ok(written.into_iter().sum())
}

/// An error ends the relay: the next one looks what has become of the entry.
async fn write(producer: &Producer, topic: &str, partition: u32, entry: &Entry) -> Result<()> {
    let record = Record::to(topic).partition(partition);
    let record = record.key(entry.customer.clone());
    let record = record.value(format!("order of {}", entry.customer));
    producer
        .send(record.header(NUMBER, entry.number.to_string()))
        .await?;
    Ok(())
}

fn number(record: &ConsumedRecord) -> Result<u64> {
    let header = record.headers.iter().find(|header| header.name == NUMBER);
    let value = header.and_then(|header| header.value.as_deref());
    let value = value.context("a record that is none of the outbox")?;
    Ok(std::str::from_utf8(value)?.parse()?)
}

/// The number of the last entry of each partition.
async fn positions(client: &Client, topic: &str) -> Result<BTreeMap<u32, u64>> {
    let mut positions = BTreeMap::new();
    let last = client.consumer(topic).start(Position::Tail(1)).until_end();
    let mut records = last.open().await?;
    while let Some(record) = records.next().await {
        let record = record?;
        positions.insert(record.partition, number(&record)?);
    }
    Ok(positions)
}

/// All entries, each once.
async fn read(client: &Client, topic: &str) -> Result<Vec<u64>> {
    let mut last = BTreeMap::<u32, u64>::new();
    let mut numbers = Vec::new();
    let mut records = client.consumer(topic).until_end().open().await?;
    while let Some(record) = records.next().await {
        let record = record?;
        let number = number(&record)?;
        let seen = last.entry(record.partition).or_default();
        if number > *seen {
            *seen = number;
            numbers.push(number);
        }
    }
    Ok(numbers)
}
