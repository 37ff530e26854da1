//! Brokers that freeze, fall silent, move, or are all gone.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use futures::StreamExt;
use futures::future::{join_all, try_join_all};
use qute_client::{
    Client, ClientConfig, Error, ErrorKind, Outcome, Position, Producer, ProducerConfig, Record,
    TopicSpec,
};
use qute_test::Proxy;
use qute_tests::cluster::{Cluster, Node};
use qute_tests::wait;
use tokio::runtime::Runtime;

use super::rig::{Rig, limited, read_all};
use crate::bins;

const TOPIC: &str = "t";
const PARTITIONS: u32 = 6;

async fn send_to(producer: &Producer, partition: u32, value: &'static str) -> Result<u64> {
    let record = Record::to(TOPIC).partition(partition).value(value);
    Ok(producer.send(record).await?.offset)
}

/// A write that failed says what became of the record.
fn is_failed_write(error: &Error) -> bool {
    matches!(
        error.outcome(),
        Some(Outcome::NotWritten | Outcome::Unknown)
    )
}

/// Promises 8 and 9: a frozen broker costs only its own partitions, and keyless records avoid it.
#[test]
fn broker_frozen_costs_only_its_own_partitions_and_keyless_records_avoid_it() -> Result<()> {
    // A replica each, so that nobody takes over: the partitions stay frozen, too.
    let mut cluster = Cluster::start(&bins(), 3)?;
    cluster.create_topic(TOPIC, PARTITIONS, 1)?;
    let frozen_id = cluster.busiest_leader(TOPIC)?;
    let place = cluster.place_of(&frozen_id)?;
    let leaders = cluster.leaders(TOPIC)?;
    let is_frozen = |partition: u32| {
        let leader = leaders.get(&u64::from(partition));
        leader.and_then(Option::as_deref) == Some(frozen_id.as_str())
    };
    let (frozen, others): (BTreeSet<u32>, BTreeSet<u32>) =
        (0..PARTITIONS).partition(|&partition| is_frozen(partition));
    ensure!(!frozen.is_empty() && !others.is_empty(), "{leaders:?}");

    let runtime = Runtime::new()?;
    let bootstrap = cluster.bootstrap();
    let (client, producer) = limited(&runtime, async {
        let client = Client::connect(&bootstrap).await?;
        let producer = client.producer(ProducerConfig::default().buffer_bytes(8 << 20))?;
        for partition in 0..PARTITIONS {
            send_to(&producer, partition, "before").await?;
        }
        Ok((client, producer))
    })?;
    cluster.node(place)?.pause()?;
    let stuck = limited(&runtime, async {
        // As much for the frozen ones as they take; the buffer is not theirs alone.
        let flood = {
            let producer = producer.clone();
            let frozen: Vec<u32> = frozen.iter().copied().collect();
            tokio::spawn(async move {
                let mut tickets = Vec::new();
                for &partition in frozen.iter().cycle().take(200) {
                    let record = Record::to(TOPIC).partition(partition);
                    tickets.push(producer.enqueue(record.value(vec![0; 64 << 10])).await?);
                }
                anyhow::Ok(tickets)
            })
        };
        for _ in 0..20 {
            for &partition in &others {
                send_to(&producer, partition, "meanwhile").await?;
            }
        }
        // Rounds of keyless records, until they have found out; then they stay away.
        let mut stuck = Vec::new();
        let mut clean_rounds = 0;
        while clean_rounds < 5 {
            let mut tickets = Vec::new();
            for _ in 0..50 {
                let record = Record::to(TOPIC).value("keyless");
                tickets.push(producer.enqueue(record).await?);
            }
            let (bad, good): (Vec<_>, Vec<_>) = tickets
                .into_iter()
                .partition(|t| frozen.contains(&t.partition()));
            try_join_all(good).await?;
            clean_rounds = if bad.is_empty() { clean_rounds + 1 } else { 0 };
            stuck.extend(bad);
        }
        Ok((stuck, flood))
    })?;
    cluster.node(place)?.resume()?;
    limited(&runtime, async {
        let (stuck, flood) = stuck;
        try_join_all(stuck).await?;
        try_join_all(flood.await??).await?;
        let records = read_all(&client, TOPIC).await?;
        let delivered = producer.report().delivered;
        ensure!(
            records.len() as u64 == delivered,
            "{} of {delivered}",
            records.len()
        );
        Ok(())
    })?;
    cluster.stop()
}

/// Promise 2: silence ends calls by their deadlines, and reading and writing go on where brokers
/// speak.
#[test]
fn black_hole_before_a_leader_ends_its_calls_in_time_and_holds_up_no_other() -> Result<()> {
    let rig = Rig::start(3)?;
    rig.create_topic(TOPIC, PARTITIONS)?;
    let lost = rig.leader(TOPIC, 0)?;
    let mut silent = BTreeSet::new();
    for partition in 0..PARTITIONS {
        if rig.leader(TOPIC, partition)?.place == lost.place {
            silent.insert(partition);
        }
    }
    let others: Vec<u32> = (0..PARTITIONS).filter(|p| !silent.contains(p)).collect();
    let tick = Duration::from_millis(500);
    let config = ClientConfig::new(&rig.bootstrap())?.keep_alive(tick, tick);
    rig.run(async {
        let client = Client::connect_with(config).await?;
        let hasty = ProducerConfig::default().delivery_timeout(Duration::from_secs(3));
        let (hasty, patient) = (
            client.producer(hasty)?,
            client.producer(ProducerConfig::default())?,
        );
        for partition in 0..PARTITIONS {
            send_to(&hasty, partition, "0").await?;
            send_to(&patient, partition, "1").await?;
        }
        let reader = client.consumer(TOPIC).start(Position::End).open().await?;
        let mut batches = reader.into_batches();

        rig.proxies[lost.place].black_hole(true);
        let waiting = {
            let patient = patient.clone();
            tokio::spawn(async move { send_to(&patient, 0, "late").await })
        };
        let Err(error) = hasty.send(Record::to(TOPIC).partition(0).value("x")).await else {
            bail!("written through a black hole");
        };
        ensure!(
            error.kind() == ErrorKind::Timeout && is_failed_write(&error),
            "{error}"
        );
        for &partition in &others {
            send_to(&patient, partition, "meanwhile").await?;
        }
        let mut read = 0;
        while read < others.len() {
            let batch = batches.next().await.context("the stream has ended")??;
            ensure!(others.contains(&batch.partition));
            read += batch.records.len();
        }
        ensure!(client.list_topics().await?.len() == 1);
        ensure!(!waiting.is_finished());

        rig.proxies[lost.place].black_hole(false);
        waiting.await??;
        // What was given up may have been written after all, but only before what came later.
        let late = async {
            loop {
                let batch = batches.next().await.context("the stream has ended")??;
                for record in batch.records {
                    if record.value.as_deref() == Some(&b"late"[..]) {
                        return anyhow::Ok(batch.partition);
                    }
                }
            }
        };
        ensure!(late.await? == 0);
        Ok(())
    })?;
    rig.stop()
}

/// Promise 2: after total loss names are resolved anew; here the bootstrap address leads to brokers
/// none of which is where it was.
#[test]
fn all_brokers_moved_are_found_through_the_bootstrap_address() -> Result<()> {
    let runtime = Runtime::new()?;
    let mut cluster = Cluster::start(&bins(), 3)?;
    cluster.create_topic(TOPIC, PARTITIONS, 3)?;
    let door = runtime.block_on(Proxy::start(cluster.nodes[0].address()))?;
    let (client, producer, mut reader) = limited(&runtime, async {
        let client = Client::connect(&door.address()).await?;
        let producer = client.producer(ProducerConfig::default())?;
        for partition in 0..PARTITIONS {
            send_to(&producer, partition, "before").await?;
        }
        let reader = client.consumer(TOPIC).start(Position::End).open().await?;
        Ok((client, producer, reader))
    })?;
    for node in &mut cluster.nodes {
        node.kill()?;
        node.move_ports()?;
    }
    let seeds: Vec<String> = cluster.nodes.iter().map(Node::address).collect();
    for node in &mut cluster.nodes {
        node.set_seeds(&seeds, None);
    }
    door.set_upstream(seeds[0].as_str());
    cluster.start_all()?;
    limited(&runtime, async {
        for partition in 0..PARTITIONS {
            ensure!(send_to(&producer, partition, "after").await? == 1);
        }
        for _ in 0..PARTITIONS {
            let record = reader.next().await.context("the stream has ended")??;
            ensure!(record.value.as_deref() == Some(&b"after"[..]) && record.offset == 1);
        }
        ensure!(client.list_topics().await?.len() == 1);
        Ok(())
    })?;
    cluster.stop()
}

/// Promises 1, 2 and 5: every ticket resolves by its deadline, no more than the buffer is taken in.
#[test]
fn all_brokers_down_fails_at_the_deadline_within_the_buffer() -> Result<()> {
    const VALUE_BYTES: usize = 16 << 10;
    const BUFFER_BYTES: usize = 8 << 20;
    const DEADLINE: Duration = Duration::from_secs(2);
    /// For a machine that is busy.
    const SLACK: Duration = Duration::from_secs(10);
    let mut rig = Rig::start(1)?;
    rig.create_topic(TOPIC, 4)?;
    let config = ClientConfig::new(&rig.bootstrap())?.call_timeout(DEADLINE);
    let (client, producer) = rig.run(async {
        let client = Client::connect_with(config.clone()).await?;
        let settings = ProducerConfig::default()
            .buffer_bytes(BUFFER_BYTES)
            .delivery_timeout(DEADLINE);
        let producer = client.producer(settings)?;
        send_to(&producer, 0, "before").await?;
        Ok((client, producer))
    })?;
    rig.cluster.node(0)?.kill()?;
    rig.run(async {
        let begun = Instant::now();
        // Three times the buffer, from many tasks at once.
        // Taken in before the first has its fate: then room is made, and more comes in.
        let held = Arc::new(AtomicUsize::new(0));
        let fated = Arc::new(AtomicBool::new(false));
        let sends = (0..3 * BUFFER_BYTES / VALUE_BYTES).map(|number| {
            let (producer, held, fated) = (producer.clone(), Arc::clone(&held), Arc::clone(&fated));
            tokio::spawn(async move {
                let record = Record::to(TOPIC).key(number.to_string());
                let ticket = producer.enqueue(record.value(vec![0; VALUE_BYTES])).await?;
                if !fated.load(Ordering::SeqCst) {
                    held.fetch_add(VALUE_BYTES, Ordering::SeqCst);
                }
                let fate = ticket.await;
                fated.store(true, Ordering::SeqCst);
                fate
            })
        });
        let sends: Vec<_> = sends.collect();
        for sent in join_all(sends).await {
            let Err(error) = sent? else {
                bail!("written without a broker");
            };
            // What was on its way behind a batch that ran out of time falls with it, a little early.
            let kind = error.kind();
            let expired = matches!(kind, ErrorKind::Timeout | ErrorKind::ProducerReset);
            ensure!(is_failed_write(&error) && expired, "{error}");
        }
        let held = held.load(Ordering::SeqCst);
        ensure!(held <= BUFFER_BYTES, "{held} bytes held");
        ensure!(held >= BUFFER_BYTES / 8, "only {held} bytes held");
        // Calls, too, and a client that has yet to begin: with each endpoint's cause.
        let Err(error) = client.list_topics().await else {
            bail!("a list without a broker");
        };
        ensure!(error.is_retriable(), "{error}");
        let Err(error) = Client::connect_with(config).await else {
            bail!("a connection without a broker");
        };
        ensure!(
            error.kind() == ErrorKind::Unreachable && error.endpoints().len() == 1,
            "{error}"
        );
        let spec = TopicSpec::new("other");
        ensure!(client.create_topic(spec).await.is_err());
        // Twice for a record (room, then delivery), and three calls.
        let took = begun.elapsed();
        ensure!(took <= 5 * DEADLINE + SLACK, "{took:?}");
        Ok(())
    })?;
    rig.stop()
}

/// Promise 7: `close` returns by its deadline and lists what is left.
#[test]
fn close_with_the_cluster_down_returns_in_time_and_lists_what_is_left() -> Result<()> {
    const LIMIT: Duration = Duration::from_secs(1);
    const SLACK: Duration = Duration::from_secs(10);
    let mut rig = Rig::start(1)?;
    rig.create_topic(TOPIC, 2)?;
    let client = rig.client()?;
    let producer = rig.run(async {
        let producer = client.producer(ProducerConfig::default())?;
        send_to(&producer, 0, "before").await?;
        Ok(producer)
    })?;
    rig.cluster.node(0)?.kill()?;
    rig.run(async {
        let mut tickets = Vec::new();
        for number in 0..30 {
            let record = Record::to(TOPIC).partition(u32::from(number % 3 == 0));
            tickets.push(producer.enqueue(record.value("x")).await?);
        }
        let begun = Instant::now();
        let report = producer.close(LIMIT).await;
        let took = begun.elapsed();
        ensure!(took <= LIMIT + SLACK, "{took:?}");
        ensure!(report.delivered == 1, "{report:?}");
        let left = |partition: u32| -> u64 {
            let of = report
                .undelivered
                .iter()
                .filter(|left| left.partition == partition);
            of.map(|left| left.records).sum()
        };
        ensure!((left(0), left(1)) == (20, 10), "{report:?}");
        ensure!(report.undelivered.iter().all(|left| &*left.topic == TOPIC));
        for ticket in tickets {
            ensure!(ticket.await.is_err_and(|error| is_failed_write(&error)));
        }
        Ok(())
    })?;
    // Nothing of it comes later.
    rig.cluster.start_all()?;
    wait::until_true("the topic to be served", wait::LONG, || {
        let records = rig.run(read_all(&client, TOPIC))?;
        Ok(records.len() == 1)
    })?;
    rig.stop()
}
