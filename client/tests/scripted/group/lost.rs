//! Sessions and claims that are lost, and programs that are slow.

use super::*;
use qute_client::group::LostReason;

/// The next loss, with the batches that came before it.
async fn next_lost(group: &mut GroupConsumer) -> (LostReason, Vec<TopicPartition>) {
    loop {
        if let Event::Lost(lost) = next(group).await {
            return (lost.reason, lost.partitions);
        }
    }
}

#[tokio::test]
async fn s26_member_without_confirmation_stops_delivering_and_joins_with_a_new_epoch() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 1, 0..2).await;
    let builder = group(&client).session_timeout(Duration::from_millis(400));
    let mut group = builder.join().await.unwrap();
    let batch = next_batch(&mut group).await;
    fake.change(|state| state.groups.mute_heartbeats = true);
    let (reason, lost) = next_lost(&mut group).await;
    assert_eq!(
        (reason, lost),
        (LostReason::SessionExpired, partitions([0]))
    );
    fake.change(|state| state.groups.mute_heartbeats = false);
    assert!(!batch.ack(), "the claim is another's, or anew");
    let again = next_batch(&mut group).await;
    assert_eq!(again.offsets().start, 0);
    assert!(again.claim_epoch() > 1);
    let joins = fake.state.lock().groups.joins.clone();
    assert!(joins.iter().any(|join| join.member_epoch > 1));
    assert!(again.ack());
    read_until(&mut group, "committed under the new claim", || {
        fake.committed(GROUP, 0) == Some(2)
    })
    .await;
}

#[tokio::test]
async fn member_that_was_expelled_loses_its_partitions_and_joins_anew() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    let mut group = join(&client).await;
    next(&mut group).await;
    let id = fake.group(GROUP).members[0].join.member_id.clone();
    fake.expire(GROUP, &id);
    let (reason, lost) = next_lost(&mut group).await;
    assert_eq!(reason, LostReason::SessionExpired);
    assert_eq!(lost, partitions(0..2));
    match next(&mut group).await {
        Event::Assigned(it) => assert_eq!(it.partitions, partitions(0..2)),
        other => panic!("{other:?}"),
    }
    assert_eq!(fake.group(GROUP).members[0].join.member_epoch, 2);
}

#[tokio::test]
async fn handler_that_is_slower_than_the_session_timeout_keeps_the_session() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 1, 0..1).await;
    let builder = group(&client).session_timeout(Duration::from_millis(300));
    let mut group = builder.join().await.unwrap();
    let batch = next_batch(&mut group).await;
    let heartbeats = fake.state.lock().groups.heartbeats;
    // More than a session timeout's worth of them.
    until("the session goes on", || {
        fake.state.lock().groups.heartbeats >= heartbeats + 6
    })
    .await;
    assert!(batch.ack());
    assert_eq!(fake.state.lock().groups.joins.len(), 1);
}

#[tokio::test]
async fn program_beyond_its_processing_limit_leaves_and_joins_again_when_it_asks() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 1, 0..1).await;
    let builder = group(&client).processing_limit(Duration::from_millis(50));
    let mut group = builder.join().await.unwrap();
    let batch = next_batch(&mut group).await;
    until("it has left", || fake.group(GROUP).members.is_empty()).await;
    assert!(!batch.ack());
    let (reason, _) = next_lost(&mut group).await;
    assert_eq!(reason, LostReason::ProcessingLimit);
    match next(&mut group).await {
        Event::Failed(error) => assert_eq!(error.kind(), ErrorKind::ProcessingLimit),
        other => panic!("{other:?}"),
    }
    assert!(next_batch(&mut group).await.ack());
    assert_eq!(fake.group(GROUP).members[0].join.member_epoch, 2);
}

#[tokio::test]
async fn program_that_waits_for_more_with_a_batch_in_hand_is_not_slow() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 1, 0..1).await;
    let builder = group(&client).processing_limit(Duration::from_millis(20));
    let mut group = builder
        .session_timeout(Duration::from_millis(300))
        .join()
        .await
        .unwrap();
    let batch = next_batch(&mut group).await;
    let heartbeats = fake.state.lock().groups.heartbeats;
    let waiting = async {
        let event = group.next().await;
        panic!("{event:?}");
    };
    let passing = until("time passes", || {
        fake.state.lock().groups.heartbeats >= heartbeats + 20
    });
    tokio::select! {
        () = waiting => {}
        () = passing => {}
    }
    assert!(batch.ack());
}

#[tokio::test]
async fn claim_reset_by_force_is_lost_and_read_from_where_it_was_set() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fill(&client, 1, 0..20).await;
    let mut group = join(&client).await;
    let mut held = Vec::new();
    while held
        .iter()
        .map(|it: &GroupBatch| it.records().len())
        .sum::<usize>()
        < 20
    {
        held.push(next_batch(&mut group).await);
    }
    fake.change(|state| {
        let group = state.groups.groups.get_mut(GROUP).unwrap();
        let ((topic_id, partition), slot) = group.slots.iter_mut().next().unwrap();
        slot.claim_epoch += 1;
        slot.committed = Some(qute_proto::v1::CommittedOffset {
            topic_id: topic_id.clone(),
            partition: *partition,
            offset: 15,
            ..Default::default()
        });
        group.revision += 1;
    });
    let (reason, lost) = next_lost(&mut group).await;
    assert_eq!((reason, lost), (LostReason::Fenced, partitions([0])));
    assert!(held.into_iter().all(|batch| !batch.ack()));
    assert_eq!(next_batch(&mut group).await.offsets().start, 15);
}
