//! Topics that get more partitions, go away, or are made again (promises 6 and 11).

use futures::StreamExt;
use qute_client::{Bound, ConsumerEvent, ErrorKind, Position, TopicId};

use qute_proto::batch::BatchHeader;

use super::fake::{Fake, Partition, TOPIC};
use super::{fill, next, value, write};

/// Lets the topic have that many partitions; `prepare` sees the new ones first.
fn grow(fake: &Fake, partitions: usize, mut prepare: impl FnMut(&mut Partition)) {
    fake.change(|state| {
        state.cluster_index += 1;
        let topic = &mut state.topics.get_mut(TOPIC).unwrap().1;
        while topic.len() < partitions {
            let mut partition = Partition {
                leader: (1, 5),
                ..Partition::default()
            };
            prepare(&mut partition);
            topic.push(partition);
        }
    });
}

#[tokio::test]
async fn added_partitions_are_read_from_their_start_and_told() {
    let fake = Fake::start(1, 4).await;
    let client = fake.client().await;
    fill(&client, 0..100).await;
    // From the end, which does not concern partitions that come later.
    let consumer = client.consumer(TOPIC).start(Position::End);
    let mut events = consumer.open().await.unwrap().into_events();
    // Their first records are there before the consumer hears of them.
    let batch = fake.state.lock().partition(0).batches[0].1.clone();
    let records: u64 = BatchHeader::verify(&batch).unwrap().record_count.into();
    grow(&fake, 8, |partition| partition.push(batch.clone()));
    let added = next(&mut events).await;
    let ConsumerEvent::PartitionsAdded { partitions, .. } = added else {
        panic!("{added:?}");
    };
    assert_eq!(partitions, [4, 5, 6, 7]);
    let mut read = std::collections::BTreeMap::new();
    while read.values().sum::<u64>() < 4 * records {
        let event = next(&mut events).await;
        let ConsumerEvent::Batch(batch) = event else {
            panic!("{event:?}");
        };
        for record in &batch.records {
            let next = read.entry(batch.partition).or_default();
            assert_eq!(record.offset, *next);
            *next += 1;
        }
    }
    assert!(read.keys().eq(&[4, 5, 6, 7]));
    // The old ones go on.
    write(&client, 2, 7).await;
    let ConsumerEvent::Batch(batch) = next(&mut events).await else {
        panic!("no batch");
    };
    assert_eq!((batch.partition, value(&batch.records[0])), (2, 7));
    assert_eq!(events.positions().len(), 8);
    let control = events.control();
    control.pause([7]).unwrap();
    assert_eq!(
        control.seek(6, Position::Tail(1)).await.unwrap(),
        records - 1
    );
}

#[tokio::test]
async fn start_of_an_added_partition_is_its_log_start_and_no_reset() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 0..600).await;
    let mut events = client.consumer(TOPIC).start(Position::End);
    events = events.out_of_range(qute_client::OutOfRange::Stop);
    let mut events = events.open().await.unwrap().into_events();
    let old = fake.state.lock().partition(0).clone();
    // Retention was faster than the consumer.
    grow(&fake, 2, |partition| {
        partition.batches = old.batches[1..].to_vec();
        partition.log_start = old.batches[1].0;
        partition.next_offset = old.next_offset;
    });
    let added = next(&mut events).await;
    assert!(matches!(added, ConsumerEvent::PartitionsAdded { .. }));
    let first = next(&mut events).await;
    let ConsumerEvent::Batch(first) = first else {
        panic!("{first:?}");
    };
    assert_eq!(
        (first.partition, first.records[0].offset),
        (1, old.batches[1].0)
    );
}

#[tokio::test]
async fn added_partitions_concern_neither_chosen_ones_nor_an_end_seen_before() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    fill(&client, 0..100).await;
    let chosen = client.consumer(TOPIC).partitions([0, 1]);
    let chosen = chosen.until(Bound::Offset(1)).open().await.unwrap();
    let ending = client.consumer(TOPIC).until_end().open().await.unwrap();
    let all = client.consumer(TOPIC).until(Bound::Offset(1));
    let all = all.open().await.unwrap();
    let control = all.control();
    control.pause([0]).unwrap();
    let batch = fake.state.lock().partition(0).batches[0].1.clone();
    grow(&fake, 4, |partition| partition.push(batch.clone()));
    let reading = async {
        while control.positions().len() < 4 {
            tokio::task::yield_now().await;
        }
        assert_eq!(chosen.count().await, 2);
        assert_eq!(ending.positions().len(), 2);
        assert_eq!(ending.count().await, 100);
        control.resume([0]).unwrap();
        assert_eq!(all.count().await, 4);
    };
    let read = tokio::time::timeout(super::LIMIT, reading);
    read.await.expect("all read");
}

#[tokio::test]
async fn deleted_topic_ends_with_unknown_topic_after_what_was_fetched() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    fill(&client, 0..100).await;
    let mut consumer = client.consumer(TOPIC).open().await.unwrap();
    for _ in 0..100 {
        next(&mut consumer).await.unwrap();
    }
    client.delete_topic(TOPIC).await.unwrap();
    for _ in 0..2 {
        let error = next(&mut consumer).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnknownTopic);
        assert!(error.partition().is_some());
    }
    assert!(consumer.next().await.is_none());
}

#[tokio::test]
async fn topic_deleted_for_certain_while_no_controller_answers_ends_all_the_same() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    write(&client, 0, 0).await;
    let mut consumer = client.consumer(TOPIC).open().await.unwrap();
    next(&mut consumer).await.unwrap();
    fake.change(|state| {
        state.controller = 9;
        state.fetch.topic_gone = true;
    });
    let error = next(&mut consumer).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownTopic);
    assert!(consumer.next().await.is_none());
}

#[tokio::test]
async fn s28_recreated_topic_ends_with_its_own_error_and_is_never_mixed_in() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    fill(&client, 0..100).await;
    let mut consumer = client.consumer(TOPIC).open().await.unwrap();
    let control = consumer.control();
    for _ in 0..100 {
        next(&mut consumer).await.unwrap();
    }
    control.pause([1]).unwrap();
    // In one view: deleted, made again, and longer than before.
    fake.change(|state| {
        state.cluster_index += 2;
        let topic = state.topics.get_mut(TOPIC).unwrap();
        topic.0 = TopicId::random();
        let batches = topic.1[0].batches.clone();
        for (_, batch) in batches.iter().chain(&batches).chain(&batches) {
            topic.1[0].push(batch.clone());
        }
    });
    let error = next(&mut consumer).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.partition()),
        (ErrorKind::TopicRecreated, Some(0))
    );
    // The paused one hears of it when it goes on.
    control.resume([1]).unwrap();
    let error = next(&mut consumer).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.partition()),
        (ErrorKind::TopicRecreated, Some(1))
    );
    assert!(consumer.next().await.is_none());
}

#[tokio::test]
async fn topic_made_again_after_its_deletion_was_seen_is_told_as_recreated() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    write(&client, 0, 0).await;
    let mut consumer = client.consumer(TOPIC).open().await.unwrap();
    next(&mut consumer).await.unwrap();
    // The deletion alone is known for certain when the first of the partitions ends.
    let (_, partitions) = fake.change(|state| {
        state.cluster_index += 1;
        state.topics.remove(TOPIC).unwrap()
    });
    let error = next(&mut consumer).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownTopic);
    // The other one has ended, too, but the program hears of it when there is a new topic.
    fake.change(|state| {
        state.cluster_index += 1;
        let again = (TopicId::random(), partitions);
        state.topics.insert(TOPIC.to_owned(), again);
    });
    let index = fake.state.lock().cluster_index;
    client.wait_for_index(index).await.unwrap();
    let error = next(&mut consumer).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TopicRecreated);
    assert!(error.partition().is_some() && error.topic() == Some(TOPIC));
    assert!(consumer.next().await.is_none());
}

#[tokio::test]
async fn topic_that_only_a_broker_cut_off_does_not_know_is_read_on() {
    let fake = Fake::start(2, 1).await;
    let client = fake.client().await;
    write(&client, 0, 0).await;
    let mut consumer = client.consumer(TOPIC).open().await.unwrap();
    next(&mut consumer).await.unwrap();
    // A newer view without the topic; the leader of `__cluster` knows better.
    fake.change(|state| {
        let (id, partitions) = state.topics.remove(TOPIC).unwrap();
        let mut view = state.view_of(2);
        view.cluster_index += 1;
        state.old_views.insert(2, view);
        state.topics.insert(TOPIC.to_owned(), (id, partitions));
        state.cluster_index += 2;
    });
    write(&client, 0, 1).await;
    assert_eq!(next(&mut consumer).await.unwrap().offset, 1);
}
