//! Consumer groups over real brokers: members come and go, coordinators and leaders die.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use qute_client::group::{CommitMode, Event, GroupConsumer};
use qute_client::{Client, ProducerConfig, Record, partition_of};
use qute_test::Cluster;

type Outcome = Result<(), Box<dyn std::error::Error>>;

const TOPIC: &str = "orders";
const GROUP: &str = "billing";
const PARTITIONS: u32 = 6;
const LIMIT: Duration = Duration::from_secs(60);

/// What all members have handled: how often each value.
type Handled = Arc<Mutex<BTreeMap<u32, u32>>>;

async fn join(client: &Client) -> qute_client::Result<GroupConsumer> {
    let builder = client.group(GROUP).topics([TOPIC]);
    let builder = builder.session_timeout(Duration::from_secs(6));
    let builder = builder.commit(CommitMode::every(Duration::from_millis(50)));
    builder.join_timeout(Duration::from_secs(30)).join().await
}

/// Reads and acknowledges until it is told to stop, then leaves.
fn work(
    mut group: GroupConsumer,
    handled: Handled,
) -> (
    tokio::sync::oneshot::Sender<()>,
    tokio::task::JoinHandle<qute_client::Result<()>>,
) {
    let (stop, mut stopped) = tokio::sync::oneshot::channel();
    let task = tokio::spawn(async move {
        loop {
            let event = tokio::select! {
                event = group.next() => event,
                _ = &mut stopped => return group.leave(LIMIT).await,
            };
            match event {
                Some(Event::Batch(batch)) => {
                    for record in batch.records() {
                        let value = String::from_utf8_lossy(record.value.as_deref().unwrap_or(b""));
                        if let (Ok(value), Ok(mut handled)) = (value.parse(), handled.lock()) {
                            *handled.entry(value).or_default() += 1;
                        }
                    }
                    batch.ack();
                }
                Some(Event::Failed(error)) => return Err(error),
                Some(_) => {}
                None => return Ok(()),
            }
        }
    });
    (stop, task)
}

async fn produce(client: &Client, values: std::ops::Range<u32>) -> Outcome {
    let producer = client.producer(ProducerConfig::default())?;
    let mut tickets = Vec::new();
    for value in values {
        let record = Record::to(TOPIC).partition(value % PARTITIONS);
        tickets.push(producer.enqueue(record.value(value.to_string())).await?);
    }
    for ticket in tickets {
        ticket.await?;
    }
    Ok(())
}

fn count(handled: &Handled) -> usize {
    handled.lock().map_or(0, |handled| handled.len())
}

async fn until_handled(handled: &Handled, all: usize) -> Outcome {
    let waiting = async {
        while count(handled) < all {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = tokio::time::timeout(LIMIT, waiting).await;
    waited.map_err(|_| format!("{} of {all} handled", count(handled)))?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn group_hands_every_record_out_over_members_that_come_and_go() -> Outcome {
    let cluster = Cluster::start(1).await?;
    cluster.create_topic(TOPIC, PARTITIONS).await?;
    let client = cluster.client().await?;
    let handled = Handled::default();
    produce(&client, 0..300).await?;
    let (stop_a, a) = work(join(&client).await?, Arc::clone(&handled));
    until_handled(&handled, 300).await?;
    let (stop_b, b) = work(join(&client).await?, Arc::clone(&handled));
    produce(&client, 300..600).await?;
    until_handled(&handled, 600).await?;
    let _ = stop_a.send(());
    a.await??;
    produce(&client, 600..900).await?;
    until_handled(&handled, 900).await?;
    let _ = stop_b.send(());
    b.await??;
    // Everything was acknowledged before it changed hands.
    let twice = handled
        .lock()
        .map_or(0, |it| it.values().filter(|it| **it > 1).count());
    assert_eq!(twice, 0);
    // Everything is committed: a third member has nothing to do.
    let mut third = join(&client).await?;
    assert!(matches!(third.next().await, Some(Event::Assigned(_))));
    produce(&client, 900..901).await?;
    match third.next().await {
        Some(Event::Batch(batch)) => assert_eq!(batch.records().len(), 1),
        other => return Err(format!("{other:?}").into()),
    }
    third.leave(LIMIT).await?;
    cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn group_goes_on_when_its_coordinator_dies() -> Outcome {
    let mut cluster = Cluster::start(3).await?;
    cluster.create_topic(TOPIC, PARTITIONS).await?;
    let client = cluster.client().await?;
    let handled = Handled::default();
    produce(&client, 0..120).await?;
    let (stop_a, a) = work(join(&client).await?, Arc::clone(&handled));
    let (stop_b, b) = work(join(&client).await?, Arc::clone(&handled));
    until_handled(&handled, 120).await?;
    for round in 1..3u32 {
        let coordinator = cluster
            .leader_of("__groups", partition_of(GROUP.as_bytes(), 16))
            .await?;
        cluster.kill(coordinator).await?;
        produce(&client, round * 120..(round + 1) * 120).await?;
        let all = usize::try_from((round + 1) * 120)?;
        until_handled(&handled, all).await?;
        cluster.restart(coordinator).await?;
    }
    for (stop, task) in [(stop_a, a), (stop_b, b)] {
        let _ = stop.send(());
        task.await??;
    }
    cluster.stop().await;
    Ok(())
}
