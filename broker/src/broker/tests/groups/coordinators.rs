//! Coordinators that go: nothing committed is lost, nobody expires early.

use std::time::Duration;

use bytes::Bytes;
use qute_proto::v1::{self, ErrorCode};

use super::client::{
    FOREVER_MS, Member, commit, committed, coordinator, describe, groups, join, outcomes, start,
};
use crate::broker::tests::cluster::LONG;

#[tokio::test(flavor = "multi_thread")]
async fn s26_members_go_on_under_a_new_coordinator_and_nobody_expires_before_a_full_timeout() {
    let mut cluster = start().await;
    let at = coordinator(&cluster, "g").await;
    let mut member = Member::start(&cluster, at, join("g", FOREVER_MS)).await;
    let lost = Member::start(&cluster, at, join("g", 5000)).await;
    let task = member.asked_about(2).await;
    let id = member.join.member_id.clone();
    assert_eq!(
        member
            .publish(task.generation, &[(&id, &[0, 1, 2, 3])])
            .await,
        None
    );
    member.until(|it| it.claims().len() == 4).await;
    let answer = member.commit(&cluster, at, &[(0, 1, 42)]).await;
    assert_eq!(outcomes(&answer), [Ok(42)]);
    let (claims, generation) = (member.claims(), member.update.generation);
    let epoch = member.joined.unwrap().coordinator_epoch;

    let killed = tokio::time::Instant::now();
    cluster.abort(at).await;
    while !member.is_over {
        member.next().await;
    }
    let next = coordinator(&cluster, "g").await;
    assert_ne!(next, at);
    // The session goes on: no new generation, the same claims, the commit kept.
    let mut resumed = Member::start(&cluster, next, member.join.clone()).await;
    assert!(resumed.joined.unwrap().coordinator_epoch > epoch);
    assert_eq!(resumed.claims(), claims);
    assert_eq!(resumed.update.generation, generation);
    assert_eq!(committed(&cluster, next, "g").await, [(0, 42)].into());
    let answer = resumed.commit(&cluster, next, &[(0, 1, 43)]).await;
    assert_eq!(outcomes(&answer), [Ok(43)]);
    // The one that does not come back gets a whole timeout of its own.
    resumed.until(|it| it.update.generation > generation).await;
    assert!(killed.elapsed() >= Duration::from_secs(5));
    let members = describe(&cluster, next, "g").await.members;
    assert!(members.iter().all(|it| it.member_id != lost.join.member_id));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn coordinator_that_is_shut_down_sends_its_members_to_the_next_one() {
    let mut cluster = start().await;
    let at = coordinator(&cluster, "g").await;
    let mut member = Member::start(&cluster, at, join("g", FOREVER_MS)).await;
    let broker = cluster.brokers[at].take().unwrap();
    let stopping = tokio::spawn(broker.shutdown());
    let error = member.ended().await;
    assert!(
        matches!(error.code(), ErrorCode::NotLeader | ErrorCode::NotReady),
        "{error:?}"
    );
    stopping.await.unwrap();
    let next = coordinator(&cluster, "g").await;
    let resumed = Member::start(&cluster, next, member.join.clone()).await;
    assert_eq!(resumed.update.generation, member.update.generation);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn coordinator_without_a_quorum_acknowledges_no_heartbeat_and_sends_its_members_away() {
    let cluster = start().await;
    let at = coordinator(&cluster, "g").await;
    let mut member = Member::start(&cluster, at, join("g", FOREVER_MS)).await;
    member.beat(1).await;
    member.until(|it| it.acked == 1).await;
    cluster.broker(at).peers.cut();
    member.beat(2).await;
    // S26: it may believe that it leads, and can't prove it.
    let error = member.ended().await;
    assert!(
        matches!(error.code(), ErrorCode::NotLeader | ErrorCode::NotReady),
        "{error:?}"
    );
    assert_eq!(member.acked, 1);
    let refused = describe(&cluster, at, "g").await.error.unwrap();
    assert!(matches!(
        refused.code(),
        ErrorCode::NotLeader | ErrorCode::NotReady
    ));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn commits_survive_coordinators_that_are_killed_one_after_the_other() {
    let mut cluster = start().await;
    let mut acknowledged = 0;
    for _ in 0..3 {
        let at = coordinator(&cluster, "g").await;
        let mut client = groups(&cluster, at).await;
        let (committing, committed_so_far) = tokio::sync::watch::channel(0_u64);
        let killing = async {
            for offset in acknowledged + 1.. {
                let request = v1::CommitOffsetsRequest {
                    group: "g".to_owned(),
                    offsets: vec![v1::OffsetCommit {
                        topic_id: super::client::topic().to_wire(),
                        offset,
                        ..v1::OffsetCommit::default()
                    }],
                    ..v1::CommitOffsetsRequest::default()
                };
                match client.commit_offsets(request).await {
                    Ok(answer) if answer.get_ref().error.is_none() => {
                        assert_eq!(outcomes(answer.get_ref()), [Ok(offset)]);
                        acknowledged = offset;
                        committing.send_modify(|count| *count += 1);
                    }
                    _ => return,
                }
            }
        };
        let broker = cluster.brokers[at].take().unwrap();
        let aborting = async {
            let mut committed = committed_so_far;
            committed.wait_for(|count| *count >= 20).await.unwrap();
            broker.abort().await;
        };
        tokio::time::timeout(LONG, async { tokio::join!(killing, aborting) })
            .await
            .unwrap();
        let next = coordinator(&cluster, "g").await;
        let offsets = committed(&cluster, next, "g").await;
        // One may have been committed without an answer.
        assert!((acknowledged..=acknowledged + 1).contains(&offsets[&0]));
        acknowledged = offsets[&0];
        cluster.restart(at).await;
        cluster.ready().await;
    }
    let at = coordinator(&cluster, "g").await;
    let behind = commit(&cluster, at, "g", (Bytes::new(), 0), &[(0, 0, 1)]).await;
    assert_eq!(outcomes(&behind), [Ok(acknowledged)]);
    cluster.shutdown().await;
}
