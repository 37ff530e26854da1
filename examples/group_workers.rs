//! Three workers share a topic of six partitions as one group. Half way through, one of them leaves, and
//! its partitions go to the others; every order is handled, and those of a customer in their order.
//!
//! ```sh
//! cargo run --example group_workers
//! ```
//!
//! With `QUTE_BOOTSTRAP` it uses that cluster, else a broker of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use qute_client::group::{CommitMode, Event, GroupControl, TopicPartition};
use qute_client::{Client, Producer, ProducerConfig, Record};
use qute_examples::{Playground, unused};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

const ORDERS: usize = 6_000;
const CUSTOMERS: usize = 100;
const PATIENCE: Duration = Duration::from_secs(60);

/// What a worker has handled: partition, offset, number of the order.
type Handled = (u32, u64, usize);

struct Worker {
    task: JoinHandle<Result<()>>,
    control: GroupControl,
}

#[tokio::main]
async fn main() -> Result<()> {
    let playground = Playground::open().await?;
    let client = &playground.client;
    let (topic, group) = (playground.topic("orders", 6).await?, unused("billing"));
    let (handled, told) = mpsc::channel(1024);
    let collected = tokio::spawn(collect(told));
    let (holders, mut held) = watch::channel(BTreeMap::new());
    let holders = Arc::new(holders);
    let mut workers = Vec::new();
    for name in ["Anna", "Bob", "Clara"] {
        let shared = (handled.clone(), Arc::clone(&holders));
        workers.push(start(client, &group, &topic, name, shared).await?);
    }
    let spread = |held: &BTreeMap<TopicPartition, &'static str>| {
        let names: BTreeSet<_> = held.values().collect();
        held.len() == 6 && names.len() == 3
    };
    tokio::time::timeout(PATIENCE, held.wait_for(spread)).await??;
    println!("all six partitions are with three workers");

    let producer = client.producer(ProducerConfig::default())?;
    write(&producer, &topic, 0..ORDERS / 2).await?;
    let leaver = workers.pop().context("there are three")?;
    leaver.control.leave(Duration::from_secs(10)).await?;
    leaver.task.await??;
    println!("Clara has left");
    write(&producer, &topic, ORDERS / 2..ORDERS).await?;

    let again = tokio::time::timeout(PATIENCE, collected).await???;
    println!("{ORDERS} orders handled, {again} of them twice");
    for worker in workers {
        worker.control.leave(Duration::from_secs(10)).await?;
        worker.task.await??;
    }
    client.groups().delete(&group).await?;
    playground.close().await;
    Ok(())
}

/// Waits for all orders: how many came twice. At least once: what was handled and not committed when
/// partitions changed hands comes again.
async fn collect(mut told: mpsc::Receiver<Handled>) -> Result<usize> {
    let (mut seen, mut again) = (BTreeMap::new(), 0);
    while seen.len() < ORDERS {
        let (partition, offset, order) = told.recv().await.context("all workers are gone")?;
        again += usize::from(seen.insert((partition, offset), order).is_some());
    }
    // Whoever handles the rest of what comes twice is not kept waiting.
    tokio::spawn(async move { while told.recv().await.is_some() {} });
    let mut last = BTreeMap::new();
    for order in seen.into_values() {
        let before = last.insert(order % CUSTOMERS, order);
        ensure!(before < Some(order), "a customer's orders keep their order");
    }
    Ok(again)
}

type Shared = (
    mpsc::Sender<Handled>,
    Arc<watch::Sender<BTreeMap<TopicPartition, &'static str>>>,
);

async fn start(
    client: &Client,
    group: &str,
    topic: &str,
    name: &'static str,
    (handled, holders): Shared,
) -> Result<Worker> {
    let mut group = client
        .group(group)
        .topics([topic])
        .commit(CommitMode::every(Duration::from_millis(200)))
        .join()
        .await?;
    let control = group.control();
    let task = tokio::spawn(async move {
        let show = |partitions: &[TopicPartition]| {
            let numbers = partitions.iter().map(|it| it.partition.to_string());
            numbers.collect::<Vec<_>>().join(", ")
        };
        while let Some(event) = group.next().await {
            match event {
                Event::Batch(batch) => {
                    for record in batch.records() {
                        let value = record.value.as_deref().unwrap_or_default();
                        let order = std::str::from_utf8(value)?.parse()?;
                        handled
                            .send((record.partition, record.offset, order))
                            .await?;
                    }
                    batch.ack();
                }
                Event::Assigned(assigned) => {
                    println!("{name} gets {}", show(&assigned.partitions));
                    let gets = assigned.partitions.into_iter().map(|it| (it, name));
                    holders.send_modify(|holders| holders.extend(gets));
                }
                Event::Revoking(revoking) => {
                    println!("{name} gives {} up", show(&revoking.partitions));
                }
                Event::Lost(lost) => println!("{name} lost {}", show(&lost.partitions)),
                Event::Failed(error) => return Err(error.into()),
                _ => {}
            }
        }
        Ok(())
    });
    Ok(Worker { task, control })
}

async fn write(producer: &Producer, topic: &str, orders: std::ops::Range<usize>) -> Result<()> {
    let mut tickets = Vec::with_capacity(orders.len());
    for order in orders {
        let customer = format!("customer-{}", order % CUSTOMERS);
        let record = Record::to(topic).key(customer).value(order.to_string());
        tickets.push(producer.enqueue(record).await?);
    }
    for ticket in tickets {
        ticket.await?;
    }
    Ok(())
}
