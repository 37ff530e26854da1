//! Offsets and groups from outside of sessions.

use bytes::Bytes;
use qute_proto::ids::TopicId;
use qute_proto::v1::{self, ErrorCode, GroupState};

use super::client::{
    FOREVER_MS, Member, code, commit, committed, coordinator, describe, groups, join, outcomes,
    start, topic,
};
use crate::broker::tests::cluster::{Cluster, found};

fn nobody() -> (Bytes, u64) {
    (Bytes::new(), 0)
}

fn resets(offsets: &[(u32, Option<u64>)], force: bool) -> v1::ResetOffsetsRequest {
    let reset = |(partition, offset): &(u32, Option<u64>)| v1::OffsetReset {
        topic_id: topic().to_wire(),
        partition: *partition,
        offset: *offset,
    };
    v1::ResetOffsetsRequest {
        group: "g".to_owned(),
        offsets: offsets.iter().map(reset).collect(),
        force,
    }
}

async fn reset(
    cluster: &Cluster,
    at: usize,
    request: v1::ResetOffsetsRequest,
) -> Option<v1::Error> {
    let answer = groups(cluster, at).await.reset_offsets(request).await;
    answer.unwrap().into_inner().error
}

async fn delete(cluster: &Cluster, at: usize, group: &str) -> Option<v1::Error> {
    let request = v1::DeleteGroupRequest {
        group: group.to_owned(),
    };
    let answer = groups(cluster, at).await.delete_group(request).await;
    answer.unwrap().into_inner().error
}

async fn list(
    cluster: &Cluster,
    at: usize,
    request: v1::ListGroupsRequest,
) -> v1::ListGroupsResponse {
    let answer = groups(cluster, at).await.list_groups(request).await;
    answer.unwrap().into_inner()
}

#[tokio::test(flavor = "multi_thread")]
async fn program_without_membership_commits_while_there_are_no_members() {
    let cluster = start().await;
    let at = coordinator(&cluster, "g").await;
    let answer = commit(&cluster, at, "g", nobody(), &[(0, 0, 5), (1, 0, 6)]).await;
    assert_eq!(outcomes(&answer), [Ok(5), Ok(6)]);
    let listing = describe(&cluster, at, "g").await.group.unwrap();
    assert_eq!((listing.state(), listing.offsets), (GroupState::Empty, 2));

    // Only those asked for, and none of an unknown group.
    let mut client = groups(&cluster, at).await;
    let partitions = vec![v1::TopicPartitions {
        topic_id: topic().to_wire(),
        partitions: vec![1, 3],
    }];
    let request = v1::FetchOffsetsRequest {
        group: "g".to_owned(),
        partitions,
    };
    let answer = client.fetch_offsets(request).await.unwrap().into_inner();
    assert_eq!(answer.offsets.len(), 1);
    assert_eq!(answer.offsets[0].offset, 6);
    assert!(answer.offsets[0].time_ms > 0);
    let elsewhere = coordinator(&cluster, "nobody").await;
    assert!(committed(&cluster, elsewhere, "nobody").await.is_empty());

    let mut member = Member::start(&cluster, at, join("g", FOREVER_MS)).await;
    let refused = commit(&cluster, at, "g", nobody(), &[(0, 0, 7)]).await;
    assert_eq!(code(refused.error), Some(ErrorCode::GroupNotEmpty));
    assert_eq!(
        code(delete(&cluster, at, "g").await),
        Some(ErrorCode::GroupNotEmpty)
    );
    let task = member.asked().await;
    let id = member.join.member_id.clone();
    assert_eq!(member.publish(task.generation, &[(&id, &[0])]).await, None);
    member.until_claims(&[(0, 1)]).await;
    assert_eq!(
        member.update.claims[0].committed.as_ref().unwrap().offset,
        5
    );

    // Reset: not under a live claim, unless by force; then its holder begins anew.
    let refused = reset(&cluster, at, resets(&[(0, Some(1)), (1, None)], false)).await;
    assert_eq!(code(refused), Some(ErrorCode::GroupNotEmpty));
    assert_eq!(
        committed(&cluster, at, "g").await[&1],
        6,
        "whole or not at all"
    );
    assert_eq!(
        reset(&cluster, at, resets(&[(0, Some(1)), (1, None)], true)).await,
        None
    );
    member.until_claims(&[(0, 2)]).await;
    assert_eq!(
        member.update.claims[0].committed.as_ref().unwrap().offset,
        1
    );
    let fenced = member.commit(&cluster, at, &[(0, 1, 9)]).await;
    assert_eq!(outcomes(&fenced), [Err(ErrorCode::ClaimFenced)]);
    assert_eq!(committed(&cluster, at, "g").await, [(0, 1)].into());

    assert_eq!(member.leave(&[], false).await, None);
    assert_eq!(delete(&cluster, at, "g").await, None);
    assert_eq!(
        code(delete(&cluster, at, "g").await),
        Some(ErrorCode::UnknownGroup)
    );
    assert_eq!(
        code(describe(&cluster, at, "g").await.error),
        Some(ErrorCode::UnknownGroup)
    );
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_are_listed_in_order_and_in_pages_by_their_coordinator_alone() {
    let cluster = start().await;
    let at = coordinator(&cluster, "g").await;
    let found = groups(&cluster, at)
        .await
        .find_coordinator(v1::FindCoordinatorRequest {
            group: "g".to_owned(),
        })
        .await;
    let found = found.unwrap().into_inner();
    let lives_there = |name: &String| {
        qute_proto::partition::partition_of(name.as_bytes(), found.partitions) == found.partition
    };
    let mut names: Vec<String> = (0..)
        .map(|n| format!("g-{n}"))
        .filter(lives_there)
        .take(5)
        .collect();
    for name in &names {
        let answer = commit(&cluster, at, name, nobody(), &[(0, 0, 1)]).await;
        assert_eq!(outcomes(&answer), [Ok(1)]);
    }
    names.sort();
    let request = |after: &str, limit| v1::ListGroupsRequest {
        partition: found.partition,
        after: after.to_owned(),
        limit,
    };
    let all = list(&cluster, at, request("", 0)).await;
    let listed: Vec<String> = all.groups.iter().map(|it| it.group.clone()).collect();
    assert_eq!((listed, all.more), (names.clone(), false));
    let page = list(&cluster, at, request(&names[1], 2)).await;
    let listed: Vec<&str> = page.groups.iter().map(|it| &*it.group).collect();
    assert_eq!(listed, [&names[2], &names[3]]);
    assert!(page.more);

    let elsewhere = (at + 1) % 3;
    let refused = list(&cluster, elsewhere, request("", 0))
        .await
        .error
        .unwrap();
    assert_eq!(refused.code(), ErrorCode::NotLeader);
    assert_eq!(
        refused.leader_hint.unwrap().broker_id,
        cluster.broker(at).broker_id().0
    );
    let refused = commit(&cluster, elsewhere, "g", nobody(), &[(0, 0, 1)]).await;
    assert_eq!(code(refused.error), Some(ErrorCode::NotLeader));
    let beyond = v1::ListGroupsRequest {
        partition: found.partitions,
        ..v1::ListGroupsRequest::default()
    };
    assert_eq!(
        code(list(&cluster, at, beyond).await.error),
        Some(ErrorCode::UnknownPartition)
    );
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quotas_refuse_what_goes_beyond_them_and_nothing_else() {
    let cluster = Cluster::start(|_, config| {
        config.groups_max = 1;
        config.group_members_max = 2;
        config.group_offsets_max = 2;
    })
    .await;
    let at = coordinator(&cluster, "g").await;
    let answer = commit(&cluster, at, "g", nobody(), &[(0, 0, 1), (1, 0, 1)]).await;
    assert_eq!(outcomes(&answer), [Ok(1), Ok(1)]);
    let refused = commit(&cluster, at, "g", nobody(), &[(0, 0, 2), (2, 0, 1)]).await;
    assert_eq!(code(refused.error), Some(ErrorCode::GroupLimit));
    let answer = commit(&cluster, at, "g", nobody(), &[(0, 0, 2), (1, 0, 2)]).await;
    assert_eq!(outcomes(&answer), [Ok(2), Ok(2)], "those that it has");
    let refused = reset(&cluster, at, resets(&[(3, Some(1))], false)).await;
    assert_eq!(code(refused), Some(ErrorCode::GroupLimit));

    let first = Member::start(&cluster, at, join("g", FOREVER_MS)).await;
    let _second = Member::start(&cluster, at, join("g", FOREVER_MS)).await;
    let mut third = Member::open(&cluster, at, join("g", FOREVER_MS)).await;
    assert_eq!(third.ended().await.code(), ErrorCode::GroupLimit);
    // A member that goes on is no other one.
    Member::start(&cluster, at, first.join.clone()).await;
    let (mut other, mut at_other) = (String::new(), usize::MAX);
    for n in 0.. {
        if at_other == at {
            break;
        }
        other = format!("other-{n}");
        at_other = coordinator(&cluster, &other).await;
    }
    let refused = commit(&cluster, at, &other, nobody(), &[(0, 0, 1)]).await;
    assert_eq!(code(refused.error), Some(ErrorCode::GroupLimit));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn offsets_of_a_group_without_members_go_after_their_retention() {
    let cluster = Cluster::start(|_, config| config.group_offsets_retention_ms = 1500).await;
    let at = coordinator(&cluster, "g").await;
    let mut kept = Member::start(&cluster, at, join("g", FOREVER_MS)).await;
    let task = kept.asked().await;
    let id = kept.join.member_id.clone();
    assert_eq!(kept.publish(task.generation, &[(&id, &[0])]).await, None);
    kept.until_claims(&[(0, 1)]).await;
    assert_eq!(
        outcomes(&kept.commit(&cluster, at, &[(0, 1, 5)]).await),
        [Ok(5)]
    );
    let idle = coordinator(&cluster, "idle").await;
    let answer = commit(&cluster, idle, "idle", nobody(), &[(0, 0, 1)]).await;
    assert_eq!(outcomes(&answer), [Ok(1)]);
    found("the idle group to go", async || {
        describe(&cluster, idle, "idle").await.error
    })
    .await;
    assert_eq!(committed(&cluster, at, "g").await, [(0, 5)].into());
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_topic_is_forgotten_by_its_groups_and_an_unknown_one_is_not() {
    let cluster = start().await;
    let deleted = cluster.create_topic("t", 1).await;
    let at = coordinator(&cluster, "g").await;
    let mut member = Member::start(
        &cluster,
        at,
        v1::Join {
            topics: vec![v1::TopicSubscription {
                topic_id: deleted.topic_id.clone(),
                partitions: 1,
            }],
            ..join("g", FOREVER_MS)
        },
    )
    .await;
    let generation = member.update.generation;
    let on = |topic_id: Bytes| v1::OffsetCommit {
        topic_id,
        offset: 3,
        ..v1::OffsetCommit::default()
    };
    let unknown = TopicId::random();
    // S22: a topic that nobody has heard of may only be unknown here.
    let request = v1::CommitOffsetsRequest {
        group: "h".to_owned(),
        offsets: vec![on(deleted.topic_id.clone()), on(unknown.to_wire())],
        ..v1::CommitOffsetsRequest::default()
    };
    let at_h = coordinator(&cluster, "h").await;
    let answer = groups(&cluster, at_h).await.commit_offsets(request).await;
    assert_eq!(outcomes(&answer.unwrap().into_inner()), [Ok(3), Ok(3)]);

    let leader = cluster.controller_seen_by(0).unwrap();
    let request = v1::DeleteTopicRequest {
        name: "t".to_owned(),
        ..v1::DeleteTopicRequest::default()
    };
    let answer = cluster.admin(leader).await.delete_topic(request).await;
    assert_eq!(answer.unwrap().into_inner().error, None);
    member.until(|it| it.update.generation > generation).await;
    let left = found("one offset to be left", async || {
        let left = describe(&cluster, at_h, "h").await.offsets;
        (left.len() == 1).then_some(left)
    })
    .await;
    assert_eq!(left[0].topic_id, unknown.to_wire());
    cluster.shutdown().await;
}
