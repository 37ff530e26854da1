//! Topics appear, grow, are deleted and made again; offsets are out of range.

use super::*;
use fake::Partition;
use qute_client::OutOfRange;
use qute_proto::ids::TopicId;

fn make_topic(fake: &Fake, name: &str, partitions: usize) {
    let partition = Partition {
        leader: (1, 5),
        ..Partition::default()
    };
    fake.change(|state| {
        state.cluster_index += 1;
        let topic = (TopicId::random(), vec![partition; partitions]);
        state.topics.insert(name.to_owned(), topic);
    });
}

#[tokio::test]
async fn topic_made_again_is_told_and_read_from_its_start_and_no_old_offset_counts() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 1, 0..10).await;
    let mut group = group(&client).start(Position::End).join().await.unwrap();
    next(&mut group).await;
    write(&client, 0, 10).await;
    next_batch(&mut group).await.ack();
    read_until(&mut group, "committed", || {
        fake.committed(GROUP, 0) == Some(11)
    })
    .await;
    make_topic(&fake, TOPIC, 1);
    let (mut told, mut first) = (false, None);
    let producer = fake.client().await;
    write(&producer, 0, 77).await;
    while first.is_none() {
        match next(&mut group).await {
            Event::TopicRecreated { topic, .. } => {
                assert_eq!(&*topic, TOPIC);
                told = true;
            }
            Event::Batch(batch) => first = Some((batch.offsets().start, values(&batch))),
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    assert!(told);
    assert_eq!(first, Some((0, vec![77])));
}

#[tokio::test]
async fn deleted_topic_is_told_once_and_the_others_go_on() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    make_topic(&fake, "other", 3);
    let names = [TOPIC, "other"];
    client.wait_for_index(11).await.unwrap();
    let mut group = group(&client).topics(names).join().await.unwrap();
    next(&mut group).await;
    fake.change(|state| {
        state.cluster_index += 1;
        state.topics.remove("other");
    });
    let mut errors = Vec::new();
    let mut batches = 0;
    write(&client, 0, 1).await;
    while errors.is_empty() || batches < 2 {
        match next(&mut group).await {
            Event::Failed(error) => errors.push((error.kind(), error.topic().map(str::to_owned))),
            Event::Batch(batch) => {
                assert_eq!(batch.topic(), TOPIC);
                assert!(batch.ack());
                batches += 1;
                write(&client, 1, 2).await;
            }
            _ => {}
        }
    }
    assert_eq!(
        errors,
        [(ErrorKind::UnknownTopic, Some("other".to_owned()))]
    );
}

#[tokio::test]
async fn topics_by_pattern_are_joined_as_they_appear_and_read_from_their_start() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let builder = client.group(GROUP).topics_matching("^t-").unwrap();
    let mut group = builder.start(Position::End).join().await.unwrap();
    make_topic(&fake, "t-1", 1);
    make_topic(&fake, "u-1", 1);
    let producer = client.producer(ProducerConfig::default()).unwrap();
    for topic in ["t-1", "u-1"] {
        producer.send(Record::to(topic).value("5")).await.unwrap();
    }
    let batch = next_batch(&mut group).await;
    assert_eq!((batch.topic(), batch.offsets()), ("t-1", 0..1));
}

#[tokio::test]
async fn added_partitions_are_read_from_their_start() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let mut group = group(&client).start(Position::End).join().await.unwrap();
    next(&mut group).await;
    fake.change(|state| {
        state.cluster_index += 1;
        let partition = Partition {
            leader: (1, 5),
            ..Partition::default()
        };
        state.topics.get_mut(TOPIC).unwrap().1.push(partition);
    });
    let writer = fake.client().await;
    write(&writer, 1, 9).await;
    let batch = next_batch(&mut group).await;
    assert_eq!((batch.partition(), batch.offsets().start), (1, 0));
}

#[tokio::test]
async fn committed_offset_out_of_range_is_an_event_and_by_policy_a_reset() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 1, 0..100).await;
    let mut first = join(&client).await;
    next_batch(&mut first).await.ack();
    first.leave(LIMIT).await.unwrap();
    let committed = fake.committed(GROUP, 0).unwrap();
    fake.change(|state| state.partition(0).log_start = 90);
    let mut stopping = join(&client).await;
    next(&mut stopping).await;
    match next(&mut stopping).await {
        Event::Failed(error) => assert_eq!(
            (error.kind(), error.offset(), error.partition()),
            (ErrorKind::OffsetOutOfRange, Some(committed), Some(0))
        ),
        other => panic!("{other:?}"),
    }
    stopping.leave(LIMIT).await.unwrap();
    let builder = group(&client).out_of_range(OutOfRange::ToStart);
    let mut resetting = builder.join().await.unwrap();
    next(&mut resetting).await;
    match next(&mut resetting).await {
        Event::Reset { from, to, .. } => assert_eq!((from, to), (committed, 90)),
        other => panic!("{other:?}"),
    }
    read_until(&mut resetting, "the rest is committed", || {
        fake.committed(GROUP, 0) == Some(100)
    })
    .await;
}
