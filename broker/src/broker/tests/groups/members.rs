//! Members: joining, sharing partitions, dying, taking places over.

use bytes::Bytes;
use qute_proto::ids::MemberId;
use qute_proto::v1::session_request::Request;
use qute_proto::v1::{self, ErrorCode, GroupState};

use super::client::{
    FOREVER_MS, Member, assignor, code, committed, coordinator, describe, join, outcomes, start,
};

/// Is asked, and takes all four partitions.
async fn sole_owner(member: &mut Member) {
    let id = member.join.member_id.clone();
    loop {
        let task = member.asked().await;
        let published = member
            .publish(task.generation, &[(&id, &[0, 1, 2, 3])])
            .await;
        match code(published) {
            None => break,
            Some(ErrorCode::StaleGeneration) => member.update.assign = None,
            Some(refused) => panic!("{refused:?}"),
        }
    }
    member.until(|it| it.claims().len() == 4).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_members_share_partitions_commit_and_leave() {
    let cluster = start().await;
    let at = coordinator(&cluster, "g").await;
    let mut first = Member::start(&cluster, at, join("g", FOREVER_MS)).await;
    let joined = first.joined.unwrap();
    assert!(joined.coordinator_epoch > 0);
    assert_eq!(joined.session_timeout_ms, FOREVER_MS);
    sole_owner(&mut first).await;
    let epochs: Vec<(u32, u64)> = (0..4).map(|partition| (partition, 1)).collect();
    assert_eq!(first.claims(), epochs);
    assert_eq!(first.update.assigned_generation, first.update.generation);
    let answer = first
        .commit(&cluster, at, &[(0, 1, 10), (1, 1, 11), (2, 1, 12)])
        .await;
    assert_eq!(outcomes(&answer), [Ok(10), Ok(11), Ok(12)]);
    // A commit never goes back, and is answered with what is in force.
    let answer = first.commit(&cluster, at, &[(0, 1, 4), (3, 2, 1)]).await;
    assert_eq!(outcomes(&answer), [Ok(10), Err(ErrorCode::ClaimFenced)]);

    // Nobody pauses: the first keeps its claims until it gives them up.
    let mut second = Member::start(&cluster, at, join("g", FOREVER_MS)).await;
    let task = first.asked_about(2).await;
    assert_eq!(task.assignor, Some(assignor(1)));
    assert_eq!(first.claims(), epochs);
    let ids = (first.join.member_id.clone(), second.join.member_id.clone());
    let stale = first.publish(task.generation - 1, &[(&ids.0, &[0])]).await;
    assert_eq!(code(stale), Some(ErrorCode::StaleGeneration));
    let foreign = first
        .publish(task.generation, &[(&MemberId::random().to_wire(), &[0])])
        .await;
    assert_eq!(code(foreign), Some(ErrorCode::InvalidArgument));
    let shares: [(&Bytes, &[u32]); 2] = [(&ids.0, &[0, 1]), (&ids.1, &[2, 3])];
    assert_eq!(first.publish(task.generation, &shares).await, None);
    let again = first.publish(task.generation, &shares).await;
    assert_eq!(code(again), Some(ErrorCode::StaleGeneration));
    first
        .until(|it| it.update.targets[0].partitions == [0, 1])
        .await;
    assert_eq!(first.claims(), epochs);
    assert_eq!(second.claims(), []);
    let rebalancing = describe(&cluster, at, "g").await.group.unwrap();
    assert_eq!(rebalancing.state(), GroupState::Rebalancing);

    // S27: released with their final offsets, claimed under new epochs.
    assert_eq!(first.release(&[(2, 1, Some(20)), (3, 1, None)]).await, None);
    second.until_claims(&[(2, 2), (3, 2)]).await;
    let claim = &second.update.claims[0];
    assert_eq!(claim.committed.as_ref().unwrap().offset, 20);
    assert_eq!(second.update.claims[1].committed, None);
    let fenced = first.commit(&cluster, at, &[(2, 1, 21)]).await;
    assert_eq!(outcomes(&fenced), [Err(ErrorCode::ClaimFenced)]);
    let described = describe(&cluster, at, "g").await;
    assert_eq!(described.group.unwrap().state(), GroupState::Stable);
    assert_eq!(described.coordinator, cluster.broker(at).broker_id().0);
    assert_eq!(described.members.len(), 2);
    assert_eq!(described.claims.len(), 4);

    assert_eq!(
        first.leave(&[(0, 1, Some(100)), (1, 1, None)], false).await,
        None
    );
    second.asked_about(1).await;
    sole_owner(&mut second).await;
    let offsets = committed(&cluster, at, "g").await;
    assert_eq!((offsets[&0], offsets[&1], offsets[&2]), (100, 11, 20));
    assert_eq!(second.leave(&[], false).await, None);
    let described = describe(&cluster, at, "g").await;
    assert_eq!(described.group.unwrap().state(), GroupState::Empty);
    assert_eq!(described.offsets.len(), 3);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_member_expires_its_commits_are_fenced_and_the_other_goes_on() {
    let cluster = start().await;
    let at = coordinator(&cluster, "g").await;
    let mut silent = Member::start(&cluster, at, join("g", 1000)).await;
    sole_owner(&mut silent).await;
    let mut other = Member::start(&cluster, at, join("g", FOREVER_MS)).await;
    // Frozen: its stream is open, and nothing comes.
    let ended = silent.ended().await;
    assert_eq!(ended.code(), ErrorCode::UnknownMember);
    sole_owner(&mut other).await;
    assert_eq!(other.claims(), [(0, 2), (1, 2), (2, 2), (3, 2)]);
    let answer = silent.commit(&cluster, at, &[(0, 1, 99)]).await;
    assert_eq!(code(answer.error), Some(ErrorCode::UnknownMember));
    assert!(committed(&cluster, at, "g").await.is_empty());

    // It comes back under a higher epoch: a new member.
    let back = v1::Join {
        member_epoch: 2,
        ..silent.join.clone()
    };
    let back = Member::start(&cluster, at, back).await;
    assert_eq!(back.claims(), []);
    assert_eq!(describe(&cluster, at, "g").await.members.len(), 2);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn beating_member_outlives_its_timeout_many_times() {
    let cluster = start().await;
    let at = coordinator(&cluster, "g").await;
    let mut member = Member::start(&cluster, at, join("g", 1000)).await;
    let begun = tokio::time::Instant::now();
    let mut sequence = 0;
    while begun.elapsed() < std::time::Duration::from_secs(3) {
        sequence += 1;
        member.beat(sequence).await;
        member.until(|it| it.acked == sequence).await;
    }
    assert_eq!(member.error, None);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejoin_with_a_higher_epoch_keeps_claims_under_new_epochs_and_ends_the_old_stream() {
    let cluster = start().await;
    let at = coordinator(&cluster, "g").await;
    let mut old = Member::start(&cluster, at, join("g", FOREVER_MS)).await;
    sole_owner(&mut old).await;
    let generation = old.update.generation;
    // The same epoch: another stream of the same session.
    let mut resumed = Member::start(&cluster, at, old.join.clone()).await;
    assert_eq!(resumed.claims(), old.claims());
    assert_eq!(old.ended().await.code(), ErrorCode::UnknownMember);
    let lost = v1::Join {
        member_epoch: 2,
        ..resumed.join.clone()
    };
    let anew = Member::start(&cluster, at, lost).await;
    assert_eq!(anew.claims(), [(0, 2), (1, 2), (2, 2), (3, 2)]);
    assert_eq!(
        anew.update.generation, generation,
        "nobody else is concerned"
    );
    assert_eq!(resumed.ended().await.code(), ErrorCode::UnknownMember);
    let answer = resumed.commit(&cluster, at, &[(0, 1, 9)]).await;
    assert_eq!(code(answer.error), Some(ErrorCode::UnknownMember));
    let mut late = Member::open(&cluster, at, resumed.join.clone()).await;
    assert_eq!(late.ended().await.code(), ErrorCode::UnknownMember);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s27_stable_name_passes_on_when_its_session_is_closed_and_not_before() {
    let cluster = start().await;
    let at = coordinator(&cluster, "g").await;
    let named = |session_timeout_ms| v1::Join {
        instance: "worker-1".to_owned(),
        ..join("g", session_timeout_ms)
    };
    let mut first = Member::start(&cluster, at, named(FOREVER_MS)).await;
    sole_owner(&mut first).await;
    let generation = first.update.generation;
    let mut second = Member::open(&cluster, at, named(2000)).await;
    // The first is there to be seen, and goes on; a stream that breaks closes nothing.
    let first_join = first.join.clone();
    drop(first);
    let mut first = Member::start(&cluster, at, first_join).await;
    first.beat(1).await;
    first.until(|it| it.acked == 1).await;
    assert_eq!(second.joined, None);
    let finals: Vec<_> = (0..4).map(|partition| (partition, 1, Some(50))).collect();
    assert_eq!(first.leave(&finals, true).await, None);
    second.until(|it| it.updates > 0).await;
    assert_eq!(second.claims(), [(0, 2), (1, 2), (2, 2), (3, 2)]);
    assert_eq!(second.update.generation, generation, "nothing has moved");
    assert_eq!(
        second.update.claims[0].committed.as_ref().unwrap().offset,
        50
    );

    // It dies without a word: the third gets the place when its session has run out.
    let mut third = Member::open(&cluster, at, named(FOREVER_MS)).await;
    drop(second);
    third.until(|it| it.updates > 0).await;
    assert_eq!(third.claims(), [(0, 3), (1, 3), (2, 3), (3, 3)]);
    assert_eq!(third.update.generation, generation);
    assert_eq!(describe(&cluster, at, "g").await.members.len(), 1);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn s27_kept_place_is_given_up_when_nobody_comes() {
    let cluster = start().await;
    let at = coordinator(&cluster, "g").await;
    let named = v1::Join {
        instance: "worker-1".to_owned(),
        ..join("g", 1000)
    };
    let mut first = Member::start(&cluster, at, named).await;
    sole_owner(&mut first).await;
    let mut other = Member::start(&cluster, at, join("g", FOREVER_MS)).await;
    assert_eq!(first.leave(&[], true).await, None);
    assert_eq!(describe(&cluster, at, "g").await.members.len(), 2);
    sole_owner(&mut other).await;
    assert_eq!(describe(&cluster, at, "g").await.members.len(), 1);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn next_member_is_asked_when_the_first_publishes_nothing() {
    let cluster = start().await;
    let at = coordinator(&cluster, "g").await;
    let mut lazy = Member::start(&cluster, at, join("g", FOREVER_MS)).await;
    let mut keen = Member::start(&cluster, at, join("g", FOREVER_MS)).await;
    lazy.asked().await;
    let task = keen.asked_about(2).await;
    let id = keen.join.member_id.clone();
    assert_eq!(keen.publish(task.generation, &[(&id, &[0])]).await, None);
    keen.until_claims(&[(0, 1)]).await;
    // More partitions are another generation (S27).
    assert_eq!(keen.subscribe(8).await, None);
    keen.until(|it| it.update.generation > task.generation)
        .await;
    assert_eq!(keen.claims(), [(0, 1)]);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn member_without_a_common_assignor_is_refused_with_both_named() {
    let cluster = start().await;
    let at = coordinator(&cluster, "g").await;
    let _first = Member::start(&cluster, at, join("g", FOREVER_MS)).await;
    let newer = v1::Join {
        assignors: vec![assignor(2)],
        ..join("g", FOREVER_MS)
    };
    let mut refused = Member::open(&cluster, at, newer).await;
    let error = refused.ended().await;
    assert_eq!(error.code(), ErrorCode::InconsistentAssignor);
    assert!(error.message.contains("version 2") && error.message.contains("version 1"));
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_on_a_session_stream_is_refused_and_harms_nobody() {
    let cluster = start().await;
    let at = coordinator(&cluster, "g").await;
    let mut good = Member::start(&cluster, at, join("g", FOREVER_MS)).await;
    let spoilt: [fn(&mut v1::Join); 5] = [
        |it| it.group = String::new(),
        |it| it.group = "x".repeat(250),
        |it| it.member_id = Bytes::from_static(b"no id"),
        |it| it.session_timeout_ms = 1,
        |it| it.assignors.clear(),
    ];
    for spoil in spoilt {
        let mut bad = join("g", FOREVER_MS);
        spoil(&mut bad);
        let error = Member::open(&cluster, at, bad).await.ended().await;
        assert!(
            matches!(
                error.code(),
                ErrorCode::InvalidArgument
                    | ErrorCode::InvalidGroupName
                    | ErrorCode::InconsistentAssignor
            ),
            "{error:?}"
        );
    }
    // A second join, and commands that make no sense.
    let mut twice = Member::start(&cluster, at, join("g", FOREVER_MS)).await;
    let fenced = twice.release(&[(0, 7, Some(1)), (9, 1, None)]).await;
    assert_eq!(code(fenced), Some(ErrorCode::ClaimFenced));
    let beyond = twice.release(&[(u32::MAX, 1, None)]).await;
    assert_eq!(code(beyond), Some(ErrorCode::InvalidArgument));
    let stale = twice.publish(u64::MAX, &[]).await;
    assert_eq!(code(stale), Some(ErrorCode::StaleGeneration));
    twice.send(Request::Join(join("h", FOREVER_MS))).await;
    assert_eq!(twice.ended().await.code(), ErrorCode::InvalidArgument);
    good.beat(1).await;
    good.until(|it| it.acked == 1).await;
    assert_eq!(good.error, None);
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn burst_of_members_settles_on_one_assignment_that_all_are_told() {
    let cluster = start().await;
    let at = coordinator(&cluster, "g").await;
    let starting = (0..20).map(|_| Member::start(&cluster, at, join("g", FOREVER_MS)));
    let mut members = futures::future::join_all(starting).await;
    let ids: Vec<Bytes> = members.iter().map(|it| it.join.member_id.clone()).collect();
    // The oldest publishes, whoever that is.
    let oldest = describe(&cluster, at, "g").await.members[0]
        .member_id
        .clone();
    let publisher = ids.iter().position(|id| *id == oldest).unwrap();
    let task = members[publisher].asked_about(20).await;
    assert_eq!(task.generation, 20);
    let numbers: Vec<u32> = (0..4).collect();
    let shares: Vec<(&Bytes, &[u32])> = ids.iter().zip(numbers.chunks(1)).collect();
    let published = members[publisher].publish(task.generation, &shares).await;
    assert_eq!(published, None);
    for (nth, member) in members.iter_mut().enumerate() {
        member.until(|it| it.update.assigned_generation == 20).await;
        let claims = member.claims();
        match numbers.get(nth) {
            Some(partition) => assert_eq!(claims, [(*partition, 1)]),
            None => assert_eq!(claims, []),
        }
    }
    cluster.shutdown().await;
}
