//! Every public future, dropped after k polls for each k until it completes (promise 7): no record
//! that was acknowledged is lost, none comes twice, no sequence has a hole, no handle is stuck.
//!
//! Each call is made again and again, with one poll more each time before it is dropped, until it
//! is done before that. A poll happens when the future asks for it, so the drops hit every state
//! that the future waits in.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures::{SinkExt, StreamExt};
use qute_client::{
    Client, ConsumerEvent, ErrorKind, OffsetSpec, Position, Producer, ProducerConfig, Record,
    TopicSpec, Utf8Codec, partition_of,
};

use super::rig::{Rig, read_all};

const TOPIC: &str = "t";
/// No call takes more polls.
const POLLS_MAX: usize = 500;

/// Polls so often; `None`: dropped before it was done.
async fn polled<F: Future>(future: F, polls: usize) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Makes the call with 0, 1, 2... polls until it is done; gives what it came to. The call gets the
/// number of its attempt.
async fn dropped_at_each_poll<T>(
    what: &str,
    mut call: impl AsyncFnMut(usize) -> Result<T, qute_client::Error>,
) -> Result<T> {
    for polls in 0..POLLS_MAX {
        if let Some(done) = polled(call(polls), polls).await {
            return done.with_context(|| format!("{what} after {polls} polls"));
        }
    }
    bail!("{what} is not done after {POLLS_MAX} polls")
}

/// One broker with a topic of two partitions.
fn prepare() -> Result<(Rig, Client)> {
    let rig = Rig::start(1)?;
    rig.create_topic(TOPIC, 2)?;
    let client = rig.client()?;
    Ok((rig, client))
}

fn value(number: usize) -> Record {
    Record::to(TOPIC).partition(0).value(number.to_string())
}

/// The numbers in partition 0, which has no holes.
async fn numbers(client: &Client) -> Result<Vec<usize>> {
    let records = read_all(client, TOPIC).await?.into_iter();
    let of_first = records.filter(|record| record.partition == 0);
    let number = |record: qute_client::ConsumedRecord| {
        let value = record.value.context("no value")?;
        Ok(std::str::from_utf8(&value)?.parse()?)
    };
    of_first.map(number).collect()
}

#[test]
fn writes_dropped_at_each_poll_lose_and_double_nothing() -> Result<()> {
    let (rig, client) = prepare()?;
    rig.run(async {
        let new = || client.producer(ProducerConfig::default());
        let mut must = Vec::new();
        let mut next = 0;
        // Each way to write, on a producer that is not warm yet; then again on one that is.
        let producer = new()?;
        for _ in 0..2 {
            let base = next;
            let number = dropped_at_each_poll("send", async |attempt| {
                producer.send(value(base + attempt)).await?;
                Ok(base + attempt)
            })
            .await?;
            must.push(number);
            next = number + 1;
        }
        let producer = new()?;
        for _ in 0..2 {
            let base = next;
            let (number, ticket) = dropped_at_each_poll("enqueue", async |attempt| {
                Ok((
                    base + attempt,
                    producer.enqueue(value(base + attempt)).await?,
                ))
            })
            .await?;
            // A ticket that is dropped takes nothing back.
            drop(ticket);
            must.push(number);
            next = number + 1;
        }
        dropped_at_each_poll("flush", async |_| {
            producer.flush().await;
            Ok(())
        })
        .await?;
        let base = next;
        next = dropped_at_each_poll("reserve", async |attempt| {
            let mut room = producer.reserve(value(0).buffered_bytes() + 16).await?;
            room.enqueue(value(base + attempt)).map(|_| base + attempt)
        })
        .await?;
        must.push(next);
        let base = next + 1;
        next = dropped_at_each_poll("sink", async |attempt| {
            let mut sink = producer.sink();
            sink.send(value(base + attempt)).await?;
            Ok(base + attempt)
        })
        .await?;
        must.push(next);
        let mut sink = producer.sink();
        sink.feed(value(next + 1)).await?;
        dropped_at_each_poll("sink's flush", async |_| sink.flush().await).await?;
        must.push(next + 1);
        sink.feed(value(next + 2)).await?;
        dropped_at_each_poll("sink's close", async |_| sink.close().await).await?;
        must.push(next + 2);
        next += 2;
        // The typed ones are thin, but they are public, too.
        let typed = producer.typed::<String>(TOPIC, Utf8Codec).keys(Utf8Codec);
        let key = (0..).map(|n: u32| n.to_string());
        let key = key
            .into_iter()
            .find(|key| partition_of(key.as_bytes(), 2) == 0);
        let key = &key.context("no key")?;
        let base = next + 1;
        next = dropped_at_each_poll("typed send", async |attempt| {
            typed.send(key, &(base + attempt).to_string()).await?;
            Ok(base + attempt)
        })
        .await?;
        must.push(next);
        let base = next + 1;
        next = dropped_at_each_poll("typed enqueue", async |attempt| {
            drop(typed.enqueue(key, &(base + attempt).to_string()).await?);
            Ok(base + attempt)
        })
        .await?;
        must.push(next);
        let mut ticket = producer.enqueue(value(next + 1)).await?;
        must.push(next + 1);
        let written = dropped_at_each_poll("ticket", async |_| (&mut ticket).await).await?;
        ensure!(written.partition == 0);
        let partitions = dropped_at_each_poll("prepare", async |_| new()?.prepare(TOPIC).await);
        ensure!(partitions.await? == 2);

        // Everything that was taken in is there once, in order, and what was acknowledged is.
        producer.flush().await;
        let found = numbers(&client).await?;
        ensure!(found.is_sorted_by(|a, b| a < b), "{found:?}");
        for number in must {
            ensure!(found.contains(&number), "{number} is not in {found:?}");
        }
        // No sequence has a hole: the same producers go on.
        producer.send(value(next + 2)).await?;
        Ok(())
    })?;
    rig.stop()
}

#[test]
fn close_dropped_at_each_poll_leaves_every_ticket_a_fate() -> Result<()> {
    let (rig, client) = prepare()?;
    rig.run(async {
        let mut next = 0;
        let mut written = Vec::new();
        for polls in 0..POLLS_MAX {
            let producer: Producer = client.producer(ProducerConfig::default())?;
            let mut tickets = Vec::new();
            for number in next..next + 3 {
                tickets.push((number, producer.enqueue(value(number)).await?));
            }
            next += 3;
            let report = polled(producer.close(Duration::from_secs(60)), polls).await;
            for (number, ticket) in tickets {
                match ticket.await {
                    Ok(_) => written.push(number),
                    Err(error) if report.is_none() && error.kind() == ErrorKind::Closed => {}
                    Err(error) => return Err(error.into()),
                }
            }
            if let Some(report) = report {
                ensure!(
                    report.delivered == 3 && report.undelivered.is_empty(),
                    "{report:?}"
                );
                let found = numbers(&client).await?;
                ensure!(written.iter().all(|number| found.contains(number)));
                ensure!(found.is_sorted_by(|a, b| a < b), "{found:?}");
                return Ok(());
            }
        }
        bail!("close is never done")
    })?;
    rig.stop()
}

#[test]
fn reads_dropped_at_each_poll_skip_and_double_nothing() -> Result<()> {
    const RECORDS: u64 = 50;
    let (rig, client) = prepare()?;
    rig.run(async {
        let producer = client.producer(ProducerConfig::default().batch_bytes(1024))?;
        let write = async |from: u64| {
            for number in from..from + RECORDS {
                producer
                    .send(Record::to(TOPIC).key(number.to_string()))
                    .await?;
            }
            anyhow::Ok(())
        };
        write(0).await?;
        let open = || client.consumer(TOPIC).start(Position::Start).open();
        let mut reader = dropped_at_each_poll("open", async |_| open().await).await?;
        let control = reader.control();

        let mut next: BTreeMap<u32, u64> = BTreeMap::new();
        let mut check = |partition: u32, offset: u64| {
            let wanted = next.entry(partition).or_default();
            ensure!(
                offset == *wanted,
                "{partition}: {offset} instead of {wanted}"
            );
            *wanted += 1;
            Ok(())
        };
        for _ in 0..RECORDS / 2 {
            let record =
                dropped_at_each_poll("next record", async |_| reader.next().await.transpose())
                    .await?;
            let record = record.context("the stream has ended")?;
            check(record.partition, record.offset)?;
        }
        let mut read = RECORDS / 2;
        let mut batches = reader.into_batches();
        while read < RECORDS {
            let batch =
                dropped_at_each_poll("next batch", async |_| batches.next().await.transpose())
                    .await?;
            for record in batch.context("the stream has ended")?.records {
                check(record.partition, record.offset)?;
                read += 1;
            }
        }
        let mut events = open().await?.into_events();
        let mut of_events: BTreeMap<u32, u64> = BTreeMap::new();
        while of_events.values().sum::<u64>() < RECORDS {
            let event =
                dropped_at_each_poll("next event", async |_| Ok(events.next().await)).await?;
            let event = event.context("the stream has ended")?;
            let ConsumerEvent::Batch(batch) = event else {
                bail!("{event:?}");
            };
            for record in batch.records {
                let wanted = of_events.entry(record.partition).or_default();
                ensure!(record.offset == *wanted, "{record:?} instead of {wanted}");
                *wanted += 1;
            }
        }
        let lag = dropped_at_each_poll("latest_lag", async |_| control.latest_lag().await).await?;
        ensure!(lag.values().all(|lag| *lag == 0), "{lag:?}");
        // Back to the start: dropped or not, each seek has taken place whole or not at all.
        for partition in [0, 1] {
            let seek = async |_| control.seek(partition, Position::Start).await;
            ensure!(dropped_at_each_poll("seek", seek).await? == 0);
        }
        let mut again: BTreeMap<u32, u64> = BTreeMap::new();
        while again.values().sum::<u64>() < RECORDS {
            let batch = batches.next().await.context("the stream has ended")??;
            for record in batch.records {
                let wanted = again.entry(record.partition).or_default();
                ensure!(record.offset == *wanted, "{record:?} instead of {wanted}");
                *wanted += 1;
            }
        }
        Ok(())
    })?;
    rig.stop()
}

#[test]
fn calls_dropped_at_each_poll_can_be_made_again() -> Result<()> {
    let (rig, client) = prepare()?;
    let bootstrap = rig.bootstrap();
    rig.run(async {
        dropped_at_each_poll("connect", async |_| Client::connect(&bootstrap).await).await?;
        let client = &client;
        let topics = dropped_at_each_poll("list_topics", async |_| client.list_topics().await);
        ensure!(topics.await?.len() == 1);
        dropped_at_each_poll("describe_topic", async |_| {
            client.describe_topic(TOPIC).await
        })
        .await?;
        dropped_at_each_poll("cluster_info", async |_| client.cluster_info().await).await?;
        dropped_at_each_poll("brokers", async |_| client.brokers().await).await?;
        let listed = dropped_at_each_poll("list_offsets", async |_| {
            client.list_offsets(TOPIC, &[(0, OffsetSpec::End)]).await
        });
        ensure!(listed.await?.len() == 1);

        // What changes something: a dropped call may have gone through.
        dropped_at_each_poll("create_topic", async |_| {
            let created = client
                .create_topic(TopicSpec::new("made").partitions(1))
                .await;
            tolerate(created.map(drop), ErrorKind::TopicExists)
        })
        .await?;
        let other = rig.connect().await?;
        let index = client.cluster_index();
        dropped_at_each_poll("wait_for_index", async |_| {
            other.wait_for_index(index).await
        })
        .await?;
        ensure!(other.cluster_index() >= index);
        dropped_at_each_poll("add_partitions", async |_| {
            client.add_partitions("made", 2).await.map(drop)
        })
        .await?;
        ensure!(client.describe_topic("made").await?.partitions.len() == 2);
        dropped_at_each_poll("delete_topic", async |_| {
            tolerate(client.delete_topic("made").await, ErrorKind::UnknownTopic)
        })
        .await?;
        ensure!(client.list_topics().await?.len() == 1);
        Ok(())
    })?;
    rig.stop()
}

fn tolerate(
    outcome: Result<(), qute_client::Error>,
    kind: ErrorKind,
) -> Result<(), qute_client::Error> {
    match outcome {
        Err(error) if error.kind() == kind => Ok(()),
        outcome => outcome,
    }
}
