//! Coordinators move, streams break: nothing is lost by it.

use super::*;

/// Reads on; nothing but batches may come.
async fn reads_on(group: &mut GroupConsumer, client: &Client, value: u32) {
    write(client, 0, value).await;
    match next(group).await {
        Event::Batch(batch) => {
            assert_eq!(values(&batch), [value]);
            assert!(batch.ack());
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn member_follows_a_coordinator_that_moves_and_loses_nothing() {
    let fake = Fake::start(3, 1).await;
    let client = fake.client().await;
    let mut group = join(&client).await;
    next(&mut group).await;
    for turn in 1..6 {
        let joins = fake.state.lock().groups.joins.len();
        reads_on(&mut group, &client, turn).await;
        fake.set_coordinator(GROUP, u64::from(turn) % 3 + 1, 10 + u64::from(turn));
        until("the member resumes", || {
            fake.state.lock().groups.joins.len() > joins
        })
        .await;
        reads_on(&mut group, &client, 100 + turn).await;
        group.commit().await.unwrap();
        assert_eq!(fake.committed(GROUP, 0), Some(u64::from(turn) * 2));
    }
    let joins = fake.state.lock().groups.joins.clone();
    assert!(joins.iter().all(|join| join.member_epoch == 1));
    assert!(
        joins
            .iter()
            .all(|join| join.member_id == joins[0].member_id)
    );
    assert_eq!(fake.group(GROUP).generation, 1);
}

#[tokio::test]
async fn member_whose_streams_are_cut_resumes_and_loses_nothing() {
    let fake = Fake::start(2, 1).await;
    let client = fake.client().await;
    let mut group = join(&client).await;
    next(&mut group).await;
    for turn in 1..6 {
        let joins = fake.state.lock().groups.joins.len();
        fake.cut_sessions();
        reads_on(&mut group, &client, turn).await;
        until("the member resumes", || {
            fake.state.lock().groups.joins.len() > joins
        })
        .await;
    }
    let joins = fake.state.lock().groups.joins.clone();
    assert!(joins.iter().all(|join| join.member_epoch == 1));
    let commits = fake.state.lock().groups.commits.clone();
    assert!(commits.is_sorted(), "offsets never go back: {commits:?}");
}

#[tokio::test]
async fn coordinator_that_is_not_ready_is_asked_again() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fake.change(|state| {
        for code in [
            qute_proto::v1::ErrorCode::NotReady,
            qute_proto::v1::ErrorCode::NotLeader,
            qute_proto::v1::ErrorCode::OutcomeUnknown,
        ] {
            state.groups.refuse_join.push_back(fake::error(code));
        }
    });
    let mut group = join(&client).await;
    match next(&mut group).await {
        Event::Assigned(it) => assert_eq!(it.partitions, partitions([0])),
        other => panic!("{other:?}"),
    }
    assert_eq!(fake.state.lock().groups.joins.len(), 4);
}

#[tokio::test]
async fn join_that_no_coordinator_answers_ends_by_its_deadline_with_the_cause() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    fake.change(|state| {
        let refusal = || fake::error(qute_proto::v1::ErrorCode::NotReady);
        state
            .groups
            .refuse_join
            .extend((0..10_000).map(|_| refusal()));
    });
    let builder = group(&client).join_timeout(Duration::from_millis(300));
    let error = builder.join().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.message().contains("NOT_READY"), "{error}");
}

#[tokio::test]
async fn leave_is_carried_out_over_a_stream_that_breaks() {
    let fake = Fake::start(2, 1).await;
    let client = fake.client().await;
    fill(&client, 1, 0..3).await;
    let mut group = client.group(GROUP).topics([TOPIC]).join().await.unwrap();
    let mut read = 0;
    while read < 3 {
        let batch = next_batch(&mut group).await;
        read += batch.records().len();
        batch.ack();
    }
    fake.cut_sessions();
    group.leave(LIMIT).await.unwrap();
    assert_eq!(fake.committed(GROUP, 0), Some(3));
    assert!(fake.group(GROUP).members.is_empty());
}

#[tokio::test]
async fn leave_that_nobody_answers_ends_by_its_deadline() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let group = join(&client).await;
    fake.change(|state| {
        let refusal = || fake::error(qute_proto::v1::ErrorCode::NotReady);
        state
            .groups
            .refuse_join
            .extend((0..10_000).map(|_| refusal()));
    });
    fake.cut_sessions();
    until("the stream is gone", || {
        fake.state.lock().groups.joins.len() > 1
    })
    .await;
    let error = group.leave(Duration::from_millis(100)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
}
