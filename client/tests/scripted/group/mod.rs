//! Consumers of groups against a scripted coordinator, by theme; here what they do anyway: join, read from
//! where the group has committed, commit, leave.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "test code"
)]

use crate::fake;

mod commit;
mod coordinator;
mod lost;
mod rebalance;
mod topics;

use std::collections::BTreeMap;
use std::time::Duration;

use fake::{Fake, TOPIC};
use futures::StreamExt;
use qute_client::group::{Event, GroupBatch, GroupBuilder, GroupConsumer, TopicPartition};
use qute_client::{Client, ErrorKind, Position, ProducerConfig, Record};

const LIMIT: Duration = Duration::from_secs(20);
const GROUP: &str = "g";

/// Settings with which things happen soon.
fn group(client: &Client) -> GroupBuilder {
    client
        .group(GROUP)
        .topics([TOPIC])
        .commit(qute_client::group::CommitMode::every(
            Duration::from_millis(10),
        ))
}

async fn join(client: &Client) -> GroupConsumer {
    group(client).join().await.unwrap()
}

/// The next event, which has to come.
async fn next(group: &mut GroupConsumer) -> Event {
    let next = tokio::time::timeout(LIMIT, group.next()).await;
    next.expect("an event in time").expect("an event")
}

/// The next batch; whatever else comes before is none of the test's business, but failures are.
async fn next_batch(group: &mut GroupConsumer) -> GroupBatch {
    loop {
        match next(group).await {
            Event::Batch(batch) => return batch,
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
}

/// Waits until the condition holds.
async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let waited = tokio::time::timeout(LIMIT, waiting).await;
    waited.unwrap_or_else(|_| panic!("in vain: {what}"));
}

/// Reads on, acknowledging everything, until the condition holds.
async fn read_until(group: &mut GroupConsumer, what: &str, mut holds: impl FnMut() -> bool) {
    let reading = async {
        loop {
            if holds() {
                return;
            }
            let soon = tokio::time::timeout(Duration::from_millis(5), group.next()).await;
            if let Ok(Some(Event::Batch(batch))) = soon {
                batch.ack();
            }
        }
    };
    let read = tokio::time::timeout(LIMIT, reading).await;
    read.unwrap_or_else(|_| panic!("in vain: {what}"));
}

/// Writes a record to a partition.
async fn write(client: &Client, partition: u32, value: impl ToString) {
    let producer = client.producer(ProducerConfig::default()).unwrap();
    let record = Record::to(TOPIC).partition(partition);
    producer
        .send(record.value(value.to_string()))
        .await
        .unwrap();
}

/// Writes values in turn over all partitions, each record a batch of its own.
async fn fill(client: &Client, partitions: u32, values: std::ops::Range<u32>) {
    let producer = client.producer(ProducerConfig::default()).unwrap();
    for value in values {
        let record = Record::to(TOPIC).partition(value % partitions);
        producer
            .send(record.value(value.to_string()))
            .await
            .unwrap();
    }
}

fn values(batch: &GroupBatch) -> Vec<u32> {
    let value = |record: &qute_client::ConsumedRecord| {
        let value = record.value.as_deref().unwrap();
        std::str::from_utf8(value).unwrap().parse().unwrap()
    };
    batch.records().iter().map(value).collect()
}

fn partitions(numbers: impl IntoIterator<Item = u32>) -> Vec<TopicPartition> {
    let named = |number| TopicPartition::new(TOPIC, number);
    numbers.into_iter().map(named).collect()
}

#[tokio::test]
async fn group_reads_everything_once_and_goes_on_where_it_has_committed() {
    let fake = Fake::start(3, 4).await;
    let client = fake.client().await;
    fill(&client, 4, 0..400).await;
    let mut seen: Vec<u32> = Vec::new();
    let mut next_offset: BTreeMap<u32, u64> = BTreeMap::new();
    for part in [150, 400] {
        let mut group = join(&client).await;
        match next(&mut group).await {
            Event::Assigned(assigned) => assert_eq!(assigned.partitions, partitions(0..4)),
            other => panic!("{other:?}"),
        }
        while seen.len() < part {
            let batch = next_batch(&mut group).await;
            let expected = next_offset.entry(batch.partition()).or_default();
            assert_eq!(batch.offsets().start, *expected);
            *expected = batch.offsets().end;
            seen.extend(values(&batch));
            assert!(batch.ack());
        }
        group.leave(LIMIT).await.unwrap();
        assert!(fake.group(GROUP).members.is_empty());
        for (&partition, &offset) in &next_offset {
            assert_eq!(fake.committed(GROUP, partition), Some(offset));
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..400).collect::<Vec<_>>());
}

#[tokio::test]
async fn group_starts_where_it_is_told_and_commits_that_it_did() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 1, 0..100).await;
    let builder = group(&client).start(Position::End);
    let mut first = builder.clone().join().await.unwrap();
    next(&mut first).await;
    until("its beginning is committed", || {
        fake.committed(GROUP, 0) == Some(100)
    })
    .await;
    drop(first);
    until("it has left", || fake.group(GROUP).members.is_empty()).await;
    fill(&client, 1, 100..110).await;
    let mut second = builder.join().await.unwrap();
    assert_eq!(next_batch(&mut second).await.offsets().start, 100);
}

#[tokio::test]
async fn group_of_no_such_topic_or_bad_settings_is_refused() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let kind = async |builder: GroupBuilder| builder.join().await.unwrap_err().kind();
    assert_eq!(
        kind(client.group(GROUP).topics(["nope"])).await,
        ErrorKind::UnknownTopic
    );
    assert_eq!(kind(client.group(GROUP)).await, ErrorKind::Config);
    assert_eq!(
        kind(client.group("").topics([TOPIC])).await,
        ErrorKind::InvalidGroupName
    );
    assert_eq!(
        kind(client.group(GROUP).topics(["a/b"])).await,
        ErrorKind::InvalidTopicName
    );
    assert_eq!(
        kind(group(&client).session_timeout(Duration::ZERO)).await,
        ErrorKind::Config
    );
    assert!(client.group(GROUP).topics_matching("(").is_err());
    let handles = fake.group(GROUP);
    assert!(handles.members.is_empty());
}

#[tokio::test]
async fn group_without_an_assignor_in_common_is_refused_with_the_coordinators_words() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fake.change(|state| {
        let mut refusal = fake::error(qute_proto::v1::ErrorCode::InconsistentAssignor);
        refusal.message = "the group uses sticky 1, the member has sticky 2".to_owned();
        state.groups.refuse_join.push_back(refusal);
    });
    let error = group(&client).join().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InconsistentAssignor);
    assert!(error.message().contains("sticky 2"));
}

#[tokio::test]
async fn join_that_is_dropped_leaves_no_member_behind() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    for polls in 0..30 {
        let joining = group(&client).join();
        tokio::pin!(joining);
        for _ in 0..polls {
            if futures::poll!(joining.as_mut()).is_ready() {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
    until("all have left", || {
        let state = fake.state.lock();
        let members = state
            .groups
            .groups
            .get(GROUP)
            .map_or(0, |it| it.members.len());
        members == 0 && state.groups.sessions == 0
    })
    .await;
}

#[tokio::test]
async fn dropped_consumer_leaves_in_the_background_with_what_is_acknowledged() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 1, 0..10).await;
    let builder = client.group(GROUP).topics([TOPIC]);
    let mut group = builder.join().await.unwrap();
    let mut last = None;
    for _ in 0..4 {
        let batch = next_batch(&mut group).await;
        last = Some(batch.acker());
        if batch.offsets().start < 3 {
            assert!(batch.ack());
        }
    }
    let acker = last.unwrap();
    drop(group);
    until("it has left", || {
        !fake.state.lock().groups.leaves.is_empty()
    })
    .await;
    assert_eq!(fake.committed(GROUP, 0), Some(3));
    assert!(!acker.ack_all(), "too late");
    assert!(!fake.state.lock().groups.leaves[0].keep_place);
}

#[tokio::test]
async fn static_member_keeps_its_place_and_its_successor_has_it_at_once() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    fill(&client, 2, 0..20).await;
    let first = group(&client).instance("one").join().await.unwrap();
    let generation = fake.group(GROUP).generation;
    first.leave(LIMIT).await.unwrap();
    assert!(fake.state.lock().groups.leaves[0].keep_place);
    let mut second = group(&client).instance("one").join().await.unwrap();
    match next(&mut second).await {
        Event::Assigned(assigned) => assert_eq!(assigned.partitions, partitions(0..2)),
        other => panic!("{other:?}"),
    }
    assert_eq!(fake.group(GROUP).generation, generation);
    second.control().leave_for_good(LIMIT).await.unwrap();
    assert!(!fake.state.lock().groups.leaves[1].keep_place);
    assert!(next_end(&mut second).await);
}

/// The stream ends.
async fn next_end(group: &mut GroupConsumer) -> bool {
    let ending = async { while group.next().await.is_some() {} };
    tokio::time::timeout(LIMIT, ending).await.is_ok()
}

#[tokio::test]
async fn records_are_acknowledged_one_by_one_in_any_order() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 1, 0..5).await;
    let mut group = join(&client).await;
    let mut records = Vec::new();
    while records.len() < 5 {
        records.extend(next_batch(&mut group).await);
    }
    let last = records.pop().unwrap();
    assert_eq!(last.offset, 4);
    for record in records.into_iter().rev() {
        assert!(record.ack());
    }
    until("the first four are committed", || {
        fake.committed(GROUP, 0) == Some(4)
    })
    .await;
    last.ack();
    until("all are committed", || fake.committed(GROUP, 0) == Some(5)).await;
}

#[tokio::test]
async fn positions_and_lag_tell_where_the_member_stands() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    fill(&client, 1, 0..10).await;
    let mut group = client.group(GROUP).topics([TOPIC]).join().await.unwrap();
    let control = group.control();
    let mut batches = Vec::new();
    while batches
        .iter()
        .map(|it: &GroupBatch| it.records().len())
        .sum::<usize>()
        < 10
    {
        batches.push(next_batch(&mut group).await);
    }
    batches.remove(0).ack();
    let acknowledged = batches[0].offsets().start;
    let position = control.positions()[&TopicPartition::new(TOPIC, 0)];
    assert_eq!(position.position, 10);
    assert_eq!(position.acknowledged, acknowledged);
    assert_eq!(position.lag, Some(10 - acknowledged));
    assert_eq!(
        control.lag()[&TopicPartition::new(TOPIC, 0)],
        10 - acknowledged
    );
    control.commit().await.unwrap();
    let position = control.positions()[&TopicPartition::new(TOPIC, 0)];
    assert_eq!(position.committed, Some(acknowledged));
    assert!(control.generation() > 0);
}

#[tokio::test]
async fn paused_partitions_hand_out_nothing_until_they_are_resumed() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    let mut group = join(&client).await;
    let control = group.control();
    next(&mut group).await;
    until("both are read", || control.positions().len() == 2).await;
    let zero = partitions([0]);
    control.pause(&zero);
    write(&client, 0, 1).await;
    write(&client, 1, 2).await;
    assert_eq!(values(&next_batch(&mut group).await), [2]);
    assert!(futures::poll!(group.next()).is_pending());
    control.resume(&zero);
    assert_eq!(values(&next_batch(&mut group).await), [1]);
}

#[tokio::test]
async fn seek_goes_back_and_ahead_and_skipped_records_count_as_done() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 1, 0..10).await;
    let mut group = join(&client).await;
    let control = group.control();
    for _ in 0..4 {
        next_batch(&mut group).await.ack();
    }
    let at = TopicPartition::new(TOPIC, 0);
    assert_eq!(control.seek(&at, Position::Offset(2)).await.unwrap(), 2);
    let batch = next_batch(&mut group).await;
    assert_eq!(batch.offsets().start, 2);
    assert_eq!(control.seek(&at, Position::Tail(1)).await.unwrap(), 9);
    assert_eq!(next_batch(&mut group).await.offsets(), 9..10);
    batch.ack();
    read_until(&mut group, "all before the last is committed", || {
        fake.committed(GROUP, 0) == Some(9)
    })
    .await;
    let other = TopicPartition::new(TOPIC, 7);
    let error = control.seek(&other, Position::Offset(0)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ClaimFenced);
}

#[test]
fn handles_of_groups_are_send_and_sync() {
    fn check<T: Send + Sync>() {}
    check::<GroupBuilder>();
    check::<GroupConsumer>();
    check::<GroupBatch>();
    check::<qute_client::group::GroupControl>();
    check::<qute_client::group::Acker>();
    check::<qute_client::group::GroupRecord>();
    check::<Event>();
}
