//! Topics that change under a program: partitions added, a topic deleted and made again.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use anyhow::{Context, Result, bail, ensure};
use futures::StreamExt;
use futures::future::try_join_all;
use qute_client::{
    ConsumerEvent, ErrorKind, Outcome, Position, ProducerConfig, Record, partition_of,
};
use qute_proto::v1::cluster_client::ClusterClient;
use qute_proto::v1::{CreateTopicRequest, DeleteTopicRequest, ErrorCode};
use qute_test::{Call, Fault, Refusal};

use super::rig::{Rig, numbered, read_all};

const TOPIC: &str = "t";

/// Promise 4: order per key within each number of partitions; nothing lost, nothing twice.
#[test]
fn partitions_added_while_producing_keep_the_order_of_each_key_on_either_side() -> Result<()> {
    const KEYS: u64 = 100;
    const BEFORE: u64 = 5000;
    const AFTER: u64 = 5000;
    let rig = Rig::start(3)?;
    rig.create_topic(TOPIC, 4)?;
    let (client, other) = (rig.client()?, rig.client()?);
    let producer = client.producer(ProducerConfig::default().batch_bytes(4096))?;
    let written = rig.run(async {
        let mut tickets = Vec::new();
        let (mut number, mut left, mut adding) = (0, None, None);
        while left != Some(0) {
            let (key, value) = numbered(number, KEYS);
            let record = Record::to(TOPIC).key(key).value(value);
            let ticket = producer.enqueue(record).await?;
            // The first record beyond the old count: the producer has learned of it.
            if left.is_none() && ticket.partition() >= 4 {
                left = Some(AFTER);
            }
            left = left.map(|left: u64| left - 1);
            tickets.push(ticket);
            number += 1;
            if number == BEFORE {
                let other = other.clone();
                adding = Some(tokio::spawn(
                    async move { other.add_partitions(TOPIC, 8).await },
                ));
            }
        }
        ensure!(adding.context("too few records")?.await??.partitions.len() == 8);
        Ok(try_join_all(tickets).await?)
    })?;
    let records = rig.run(read_all(&client, TOPIC))?;
    ensure!(records.len() == written.len(), "{} records", records.len());
    // By key and partition: the values, in order.
    let mut runs: HashMap<_, BTreeMap<u32, Vec<u64>>> = HashMap::new();
    for record in &records {
        let (key, value) = (record.key.clone(), record.value.clone());
        let key = key.context("no key")?;
        let value: u64 = std::str::from_utf8(&value.context("no value")?)?.parse()?;
        let of_key = runs.entry(key).or_default();
        of_key.entry(record.partition).or_default().push(value);
    }
    ensure!(runs.len() as u64 == KEYS);
    for (key, mut of_key) in runs {
        let (old, new) = (partition_of(&key, 4), partition_of(&key, 8));
        let mut values = of_key.remove(&old).unwrap_or_default();
        if new != old {
            values.extend(of_key.remove(&new).unwrap_or_default());
        }
        ensure!(of_key.is_empty(), "{key:?} is elsewhere, too: {of_key:?}");
        let count = values.len() as u64;
        ensure!(
            values == (0..count).collect::<Vec<_>>(),
            "{key:?}: {values:?}"
        );
    }
    rig.stop()
}

/// Promise 6: partitions that come later are read from their start, however late they are found.
#[test]
fn partitions_added_under_a_reader_are_read_from_their_start() -> Result<()> {
    const EACH: u64 = 20;
    let rig = Rig::start(1)?;
    rig.create_topic(TOPIC, 4)?;
    let (client, other) = (rig.client()?, rig.client()?);
    rig.run(async {
        let producer = other.producer(ProducerConfig::default())?;
        let write = |partition: u32| {
            let producer = &producer;
            async move {
                for value in 0..EACH {
                    let record = Record::to(TOPIC)
                        .partition(partition)
                        .value(value.to_string());
                    producer.send(record).await?;
                }
                anyhow::Ok(())
            }
        };
        // Whatever was there before is none of this reader's business.
        write(0).await?;
        let reader = client.consumer(TOPIC).start(Position::End).open().await?;
        let mut events = reader.into_events();
        // Written before this client can have heard of them.
        other.add_partitions(TOPIC, 8).await?;
        for partition in 0..8 {
            write(partition).await?;
        }
        let mut read: BTreeMap<u32, u64> = BTreeMap::new();
        let mut added = BTreeSet::new();
        while read.values().sum::<u64>() < 8 * EACH {
            match events.next().await.context("the stream has ended")? {
                ConsumerEvent::Batch(batch) => {
                    let first = if batch.partition == 0 { EACH } else { 0 };
                    for record in batch.records {
                        let next = read.entry(batch.partition).or_default();
                        ensure!(record.offset == first + *next, "{record:?}");
                        *next += 1;
                    }
                }
                ConsumerEvent::PartitionsAdded { partitions, .. } => added.extend(partitions),
                other => bail!("{other:?}"),
            }
        }
        ensure!(read == (0..8).map(|partition| (partition, EACH)).collect());
        ensure!(added == (4..8).collect(), "{added:?}");
        Ok(())
    })?;
    rig.stop()
}

/// Promise 11: incarnations of a topic are never mixed up.
#[test]
fn topic_made_again_gives_typed_errors_and_mixes_nothing() -> Result<()> {
    let rig = Rig::start(1)?;
    rig.create_topic(TOPIC, 1)?;
    let client = rig.client()?;
    rig.run(async {
        let producer = client.producer(ProducerConfig::default())?;
        let record = |value: &'static str| Record::to(TOPIC).value(value);
        producer.send(record("old")).await?;
        let mut reader = client.consumer(TOPIC).start(Position::Start).open().await?;
        let old = reader.next().await.context("the stream has ended")??;
        ensure!(old.value.as_deref() == Some(&b"old"[..]));

        // Taken in for the old one, and held up until there is a new one: for this client it is gone
        // and back in one moment.
        let not_ready = Refusal::new(ErrorCode::NotReady);
        let held = rig.proxies[0].inject(Fault::refuse(Call::Produce, not_ready));
        let mut tickets = Vec::new();
        for _ in 0..10 {
            tickets.push(producer.enqueue(record("late")).await?);
        }
        super::rig::until("a refusal", || held.hits() > 0).await?;
        rig.proxies[0].pause(true);
        make_again(&rig).await?;
        held.stop();
        rig.proxies[0].pause(false);
        for ticket in tickets {
            let Err(error) = ticket.await else {
                bail!("a record of the old topic was written");
            };
            ensure!(error.kind() == ErrorKind::TopicRecreated, "{error}");
            let outcome = error.outcome();
            ensure!(
                matches!(outcome, Some(Outcome::NotWritten | Outcome::Unknown)),
                "{error}"
            );
        }
        // What comes now is for the new one.
        for (offset, value) in [(0, "new 0"), (1, "new 1")] {
            let written = producer.send(record(value)).await?;
            ensure!(written.offset == offset, "{written:?}");
        }
        // The reader says so, and ends without a record of the new one.
        let Some(Err(error)) = reader.next().await else {
            bail!("the reader went on");
        };
        ensure!(error.kind() == ErrorKind::TopicRecreated, "{error}");
        ensure!(reader.next().await.is_none());
        let values: Vec<_> = read_all(&client, TOPIC).await?;
        let values: Vec<_> = values.into_iter().filter_map(|r| r.value).collect();
        ensure!(values == ["new 0", "new 1"], "{values:?}");
        Ok(())
    })?;
    rig.stop()
}

/// Deletes the topic and makes it again, behind the proxy's back.
async fn make_again(rig: &Rig) -> Result<()> {
    let address = format!("http://{}", rig.cluster.nodes[0].address());
    let mut direct = ClusterClient::connect(address).await?;
    let name = TOPIC.to_owned();
    let delete = DeleteTopicRequest {
        name: name.clone(),
        ..Default::default()
    };
    let deleted = direct.delete_topic(delete).await?.into_inner();
    ensure!(deleted.error.is_none(), "{deleted:?}");
    let create = CreateTopicRequest {
        name,
        partitions: 1,
        ..CreateTopicRequest::default()
    };
    let created = direct.create_topic(create).await?.into_inner();
    ensure!(created.error.is_none(), "{created:?}");
    Ok(())
}
