//! Commits: by hand, repeated, fenced, out of range, cancelled.

use super::*;
use qute_client::group::CommitMode;

async fn by_hand(client: &Client, records: u32) -> (GroupConsumer, Vec<GroupBatch>) {
    fill(client, 1, 0..records).await;
    let builder = client.group(GROUP).topics([TOPIC]);
    let mut group = builder.commit(CommitMode::Manual).join().await.unwrap();
    let mut batches = Vec::new();
    let mut read = 0;
    while read < records as usize {
        let batch = next_batch(&mut group).await;
        read += batch.records().len();
        batches.push(batch);
    }
    (group, batches)
}

#[tokio::test]
async fn commit_by_hand_commits_what_is_acknowledged_and_nothing_before() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let (group, batches) = by_hand(&client, 10).await;
    for batch in &batches {
        batch.acker().ack_all();
    }
    assert!(fake.state.lock().groups.commits.is_empty());
    group.commit().await.unwrap();
    assert_eq!(fake.committed(GROUP, 0), Some(10));
    group.commit().await.unwrap();
    assert_eq!(
        fake.state.lock().groups.commits.len(),
        1,
        "there was nothing more"
    );
    write(&client, 0, 10).await;
    let mut group = group;
    next_batch(&mut group).await.ack();
    group.leave(LIMIT).await.unwrap();
    assert_eq!(fake.committed(GROUP, 0), Some(10), "it was not asked for");
}

#[tokio::test]
async fn commit_in_background_is_done_soon() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let (group, batches) = by_hand(&client, 10).await;
    for batch in batches {
        batch.ack();
    }
    group.commit_in_background();
    until("committed", || fake.committed(GROUP, 0) == Some(10)).await;
}

#[tokio::test]
async fn commit_whose_answer_is_lost_or_refused_for_now_is_repeated() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let (group, batches) = by_hand(&client, 10).await;
    for batch in batches {
        batch.ack();
    }
    fake.change(|state| {
        for code in [
            qute_proto::v1::ErrorCode::NotReady,
            qute_proto::v1::ErrorCode::OutcomeUnknown,
        ] {
            state.groups.refuse.push_back(fake::error(code));
        }
        state.groups.cut_calls = 1;
    });
    group.commit().await.unwrap();
    assert_eq!(fake.committed(GROUP, 0), Some(10));
}

#[tokio::test]
async fn commit_of_a_claim_that_is_another_s_is_fenced_with_its_place() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let (group, batches) = by_hand(&client, 10).await;
    for batch in batches {
        batch.ack();
    }
    {
        // Nobody is told.
        let mut state = fake.state.lock();
        let group = state.groups.groups.get_mut(GROUP).unwrap();
        group.slots.values_mut().next().unwrap().claim_epoch += 1;
    }
    let error = group.commit().await.unwrap_err();
    assert_eq!(
        (error.kind(), error.topic(), error.partition()),
        (ErrorKind::ClaimFenced, Some(TOPIC), Some(0))
    );
    assert_eq!(fake.committed(GROUP, 0), None);
}

#[tokio::test]
async fn offsets_by_hand_outside_of_the_log_or_of_what_was_handed_out_are_refused_with_bounds() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let (mut group, batches) = by_hand(&client, 10).await;
    let control = group.control();
    let at = TopicPartition::new(TOPIC, 0);
    let error = control.commit_offset(&at, 11).await.unwrap_err();
    let bounds = error.bounds().unwrap();
    assert_eq!(error.kind(), ErrorKind::OffsetOutOfRange);
    assert_eq!((bounds.log_start_offset, bounds.high_watermark), (0, 10));
    control.commit_offset(&at, 7).await.unwrap();
    assert_eq!(fake.committed(GROUP, 0), Some(7));
    let error = control.commit_offset(&at, 5).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.offset()),
        (ErrorKind::OffsetBehind, Some(5))
    );
    fake.change(|state| state.partition(0).log_start = 6);
    let error = control.commit_offset(&at, 5).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OffsetOutOfRange);
    // Written, but not handed out.
    write(&client, 0, 10).await;
    let error = control.commit_offset(&at, 11).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OffsetOutOfRange);
    assert_eq!(error.bounds().unwrap().high_watermark, 11);
    next_batch(&mut group).await.ack();
    drop(batches);
    control.commit_offset(&at, 11).await.unwrap();
    let other = TopicPartition::new("other", 0);
    let error = control.commit_offset(&other, 1).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ClaimFenced);
}

#[tokio::test]
async fn commits_that_are_dropped_half_way_hold_up_no_other() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let (group, batches) = by_hand(&client, 10).await;
    for batch in batches {
        batch.ack();
    }
    for polls in 0..20 {
        let commit = group.commit();
        tokio::pin!(commit);
        for _ in 0..polls {
            if futures::poll!(commit.as_mut()).is_ready() {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
    group.commit().await.unwrap();
    assert_eq!(fake.committed(GROUP, 0), Some(10));
}

#[tokio::test]
async fn handles_after_the_end_say_so() {
    let fake = Fake::start(1, 1).await;
    let client = fake.client().await;
    let group = join(&client).await;
    let control = group.control();
    drop(group);
    let error = control.commit().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed);
    control.leave(LIMIT).await.unwrap();
    assert!(control.positions().is_empty());
}

#[tokio::test]
async fn commit_of_a_partition_that_is_given_up_ends_with_the_answer_to_that() {
    for is_answered in [true, false] {
        let fake = Fake::start(1, 2).await;
        let client = fake.client().await;
        fill(&client, 2, 0..2).await;
        let builder = group(&client).commit(CommitMode::Manual);
        let mut first = builder.join().await.unwrap();
        let mut held = BTreeMap::new();
        while held.len() < 2 {
            let batch = next_batch(&mut first).await;
            held.insert(batch.partition(), batch);
        }
        let _second = join(&client).await;
        let going = loop {
            if let Event::Revoking(it) = next(&mut first).await {
                break it.partitions[0].partition;
            }
        };
        fake.change(|state| state.groups.mute_commits = !is_answered);
        assert!(held.remove(&going).unwrap().ack());
        let control = first.control();
        let commit = tokio::spawn(async move { control.commit().await });
        until("it is given up", || fake.committed(GROUP, going) == Some(1)).await;
        if is_answered {
            commit.await.unwrap().unwrap();
        } else {
            fake.cut_sessions();
            let error = commit.await.unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ClaimFenced);
            assert_eq!(error.partition(), Some(going));
        }
    }
}
