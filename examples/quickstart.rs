//! Three brokers in this process, a topic, keyed records, a leader stopped half way, and the proof
//! that nothing was lost, doubled or reordered.
//!
//! ```sh
//! cargo run --release --example quickstart
//! ```

use std::collections::HashMap;
use std::net::{TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use futures::future::join_all;
use qute_broker::broker::Broker;
use qute_broker::config::Config;
use qute_client::{Client, Position, Producer, ProducerConfig, Record, TopicSpec};

const TOPIC: &str = "orders";
const RECORDS: usize = 20_000;
const CUSTOMERS: usize = 500;
const PATIENCE: Duration = Duration::from_secs(30);

#[tokio::main]
async fn main() -> Result<()> {
    let dir = tempfile::tempdir().context("make a temporary directory")?;
    let mut brokers = start_brokers(dir.path()).await?;
    let bootstrap: Vec<&str> = brokers.iter().map(Broker::address).collect();
    let bootstrap = bootstrap.join(",");
    println!("three brokers are ready: {bootstrap}");

    let client = Client::connect(&bootstrap).await?;
    client
        .create_topic(TopicSpec::new(TOPIC).partitions(6).replicas(3))
        .await?;
    println!("topic {TOPIC}: 6 partitions, 3 replicas of each");

    let producer = client.producer(ProducerConfig::default())?;
    let start = Instant::now();
    write(&producer, 0..RECORDS / 2).await?;
    println!("{} records written in {:.0?}", RECORDS / 2, start.elapsed());

    let leader = busiest_leader(&client).await?;
    let place = brokers
        .iter()
        .position(|broker| broker.broker_id().0 == leader);
    let stopped = brokers.swap_remove(place.context("the leader is none of ours")?);
    println!(
        "stopping {}, which leads most partitions, while records flow",
        stopped.address()
    );
    let start = Instant::now();
    let (written, ()) = tokio::join!(write(&producer, RECORDS / 2..RECORDS), stopped.shutdown());
    written?;
    println!(
        "{} more written in {:.0?}, elections included",
        RECORDS / 2,
        start.elapsed()
    );
    producer.close(PATIENCE).await;

    let start = Instant::now();
    let summary = read_and_check(&client).await?;
    println!(
        "{RECORDS} records read in {:.0?}: {summary}",
        start.elapsed()
    );

    join_all(brokers.into_iter().map(Broker::shutdown)).await;
    println!("done: every record once, each customer's orders in their order");
    Ok(())
}

/// Three brokers on free ports, ready.
async fn start_brokers(dir: &std::path::Path) -> Result<Vec<Broker>> {
    let addresses = free_addresses(3)?;
    let config = |(number, address): (usize, &String)| Config {
        name: format!("broker-{number}"),
        data_dir: dir.join(format!("broker-{number}")),
        listen: address.clone(),
        http: String::new(),
        seeds: addresses.clone(),
        expect: 3,
        ..Config::default()
    };
    let starting = addresses.iter().enumerate().map(config).map(Broker::start);
    let brokers = join_all(starting)
        .await
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?;
    for broker in &brokers {
        let waits = broker.ready(PATIENCE).await.err().unwrap_or_default();
        ensure!(
            waits.is_empty(),
            "{} waits for {}",
            broker.address(),
            waits.join(", ")
        );
    }
    Ok(brokers)
}

/// Loopback addresses that nobody listens on, TCP and UDP.
fn free_addresses(count: usize) -> Result<Vec<String>> {
    let mut held = Vec::new();
    while held.len() < count {
        let tcp = TcpListener::bind("127.0.0.1:0")?;
        let address = tcp.local_addr()?;
        if let Ok(udp) = UdpSocket::bind(address) {
            held.push((address.to_string(), tcp, udp));
        }
    }
    Ok(held.into_iter().map(|(address, _, _)| address).collect())
}

/// Order `number` of the shop: the customer is its key, so a customer's orders keep their order.
fn order(number: usize) -> Record {
    let customer = number % CUSTOMERS;
    Record::to(TOPIC)
        .key(format!("customer-{customer}"))
        .value(number.to_string())
}

/// Writes these orders, as many in flight as the producer's buffer takes, and waits for every
/// acknowledgement.
async fn write(producer: &Producer, numbers: std::ops::Range<usize>) -> Result<()> {
    let mut tickets = Vec::with_capacity(numbers.len());
    for number in numbers {
        tickets.push(producer.enqueue(order(number)).await?);
    }
    for ticket in tickets {
        ticket.await?;
    }
    Ok(())
}

/// The id of the broker that leads most partitions.
async fn busiest_leader(client: &Client) -> Result<u64> {
    let mut counts = HashMap::<u64, usize>::new();
    for partition in client.describe_topic(TOPIC).await?.partitions {
        if let Some(leader) = partition.leader {
            *counts.entry(leader.0).or_default() += 1;
        }
    }
    let most = counts.into_iter().max_by_key(|(_, count)| *count);
    Ok(most.context("no partition has a leader")?.0)
}

/// Reads everything and holds it against what was written.
async fn read_and_check(client: &Client) -> Result<String> {
    let mut records = client
        .consumer(TOPIC)
        .start(Position::Start)
        .until_end()
        .open()
        .await?;
    let mut last_of_customer = HashMap::<usize, usize>::new();
    let mut per_partition = [0_usize; 6];
    while let Some(record) = records.next().await {
        let record = record?;
        let value = record.value.context("a record without a value")?;
        let number: usize = std::str::from_utf8(&value)?.parse()?;
        let (customer, before) = (number % CUSTOMERS, number.checked_sub(CUSTOMERS));
        let last = last_of_customer.insert(customer, number);
        ensure!(
            last == before,
            "customer {customer}: order {number} came after {last:?}"
        );
        let partition = usize::try_from(record.partition)?;
        *per_partition
            .get_mut(partition)
            .context("a seventh partition")? += 1;
    }
    let total: usize = per_partition.iter().sum();
    ensure!(total == RECORDS, "{total} records read of {RECORDS}");
    Ok(format!(
        "{per_partition:?} by partition, {} customers",
        last_of_customer.len()
    ))
}
