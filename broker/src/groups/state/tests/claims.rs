//! The assignment, and the claims that follow from it.

use qute_proto::v1::{ErrorCode, GroupState};

use super::fixture::*;

#[test]
fn published_assignment_grants_what_nobody_holds() {
    let log = Log::with_claims();
    let claims = [(0, (0, 1)), (1, (0, 1)), (2, (1, 1)), (3, (1, 1))];
    assert_eq!(log.claims(), claims.into());
    assert_eq!(log.group().state(), GroupState::Stable);
}

#[test]
fn second_assignment_of_a_generation_is_harmless() {
    let mut log = Log::with_claims();
    let again = publishes(1, 2, &[(1, &[0, 1, 2, 3])]);
    assert_eq!(log.refuses(again).0, ErrorCode::StaleGeneration);
    let same = publishes(0, 2, &[(0, &[0, 1]), (1, &[2, 3])]);
    assert_eq!(log.refuses(same).0, ErrorCode::StaleGeneration);
}

#[test]
fn assignment_of_another_generation_is_refused() {
    let mut log = Log::with_members(2);
    for generation in [0, 1, 3] {
        let publish = publishes(0, generation, &[(0, &[0])]);
        assert_eq!(log.refuses(publish).0, ErrorCode::StaleGeneration);
    }
}

#[test]
fn assignment_that_is_not_sound_is_refused_whole() {
    let mut log = Log::with_members(2);
    log.does(subscribes(1, &[(1, 4)]));
    let unsound: [&[(u8, &[u32])]; 5] = [
        // No member.
        &[(0, &[0]), (9, &[1])],
        // Beyond what anybody knows of.
        &[(0, &[0, 4])],
        // A topic that the member does not read.
        &[(0, &[0]), (1, &[1])],
        // Twice: for one, and in two lists.
        &[(0, &[0, 1, 0])],
        &[(0, &[0]), (0, &[0])],
    ];
    for assignment in unsound {
        let (code, _) = log.refuses(publishes(0, 3, assignment));
        assert_eq!(code, ErrorCode::InvalidArgument, "{assignment:?}");
    }
    log.does(publishes(0, 3, &[(0, &[0, 1, 2, 3])]));
}

#[test]
fn assignment_may_name_partitions_that_only_another_member_knows_of() {
    let mut log = Log::with_members(2);
    log.does(subscribes(0, &[(0, 6)]));
    log.does(publishes(0, 3, &[(0, &[0]), (1, &[5])]));
    assert_eq!(log.claims()[&5], (1, 1));
}

#[test]
fn partition_that_changes_hands_waits_for_its_holder() {
    let mut log = Log::with_claims();
    log.does(joins(join(2)));
    log.does(publishes(0, 3, &[(0, &[0]), (1, &[2, 3]), (2, &[1])]));
    assert_eq!(log.claims()[&1], (0, 1));
    assert_eq!(log.group().state(), GroupState::Rebalancing);
    let update = log.group().update_for(member(0)).unwrap();
    assert_eq!(update.targets[0].partitions, [0]);
    assert_eq!(update.claims.len(), 2);

    let before = log.index;
    log.does(releases(0, vec![claim(1, 1, Some(44))]));
    assert_eq!(log.claims()[&1], (2, 2));
    assert_eq!(log.group().state(), GroupState::Stable);
    // The successor begins at the final offset.
    let update = log.group().update_for(member(2)).unwrap();
    assert_eq!(update.claims[0].committed.as_ref().unwrap().offset, 44);
    // Nobody else is disturbed.
    let concerned: Vec<_> = log.group().concerned_since(before).collect();
    assert_eq!(concerned, [member(0), member(2)]);
}

// S27: one command, so no commit of the old holder can come after it.
#[test]
fn s27_release_is_the_last_word_of_its_holder() {
    let mut log = Log::with_claims();
    log.does(joins(join(2)));
    log.does(publishes(0, 3, &[(2, &[0, 1])]));
    log.does(releases(0, vec![claim(0, 1, Some(44))]));
    let reply = log.apply(commits(0, vec![commit(0, 1, 50)]));
    let error = reply.offsets[0].error.as_ref().unwrap();
    assert_eq!(error.code(), ErrorCode::ClaimFenced);
    assert_eq!(log.offsets(), [(0, 44)].into());
    // The same release again finds nothing to release.
    let reply = log.apply(releases(0, vec![claim(0, 1, Some(60))]));
    let error = reply.offsets[0].error.as_ref().unwrap();
    assert_eq!(error.code(), ErrorCode::ClaimFenced);
    assert_eq!(log.claims()[&0], (2, 2));
}

#[test]
fn released_claim_without_a_successor_is_nobodys() {
    let mut log = Log::with_claims();
    log.does(subscribes(0, &[(1, 1)]));
    log.does(releases(0, vec![claim(0, 1, None), claim(1, 1, None)]));
    assert_eq!(log.claims(), [(2, (1, 1)), (3, (1, 1))].into());
}

#[test]
fn release_of_what_is_assigned_comes_back_under_a_new_epoch() {
    let mut log = Log::with_claims();
    log.does(releases(0, vec![claim(0, 1, Some(3))]));
    assert_eq!(log.claims()[&0], (0, 2));
}

#[test]
fn claim_epochs_outlive_release_and_absence() {
    let mut log = Log::with_claims();
    log.does(subscribes(0, &[(1, 1)]));
    log.does(releases(0, vec![claim(0, 1, None)]));
    log.does(publishes(1, 3, &[(1, &[2, 3])]));
    log.does(subscribes(0, &[(0, 4)]));
    log.does(publishes(1, 4, &[(0, &[0]), (1, &[2, 3])]));
    assert_eq!(log.claims()[&0], (0, 2));
}

#[test]
fn expired_members_claims_go_to_whom_they_are_assigned() {
    let mut log = Log::with_claims();
    log.does(joins(join(2)));
    log.does(publishes(0, 3, &[(1, &[2, 3]), (2, &[0, 1])]));
    log.does(expires(&[(0, 1)]));
    let claims = [(0, (2, 2)), (1, (2, 2)), (2, (1, 1)), (3, (1, 1))];
    assert_eq!(log.claims(), claims.into());
}

#[test]
fn assign_task_says_who_has_what() {
    let mut log = Log::with_claims();
    log.does(joins(join(2)));
    let task = log.group().assign_task().unwrap();
    let of = |at: usize| {
        let member = &task.members[at];
        let partitions = |lists: &[qute_proto::v1::TopicPartitions]| {
            lists
                .first()
                .map_or(Vec::new(), |one| one.partitions.clone())
        };
        (partitions(&member.targets), partitions(&member.claims))
    };
    assert_eq!(of(0), (vec![0, 1], vec![0, 1]));
    assert_eq!(of(1), (vec![2, 3], vec![2, 3]));
    assert_eq!(of(2), (vec![], vec![]));
    assert_eq!(task.members[2].topics, subscription(&[(0, 4)]));
}

#[test]
fn description_tells_members_claims_and_offsets() {
    let mut log = Log::with_claims();
    log.does(commits(1, vec![commit(2, 1, 7)]));
    let described = log.group().describe(GROUP);
    let listing = described.group.unwrap();
    assert_eq!(listing, log.group().listing(GROUP));
    assert_eq!((listing.members, listing.offsets), (2, 1));
    assert_eq!(listing.state(), GroupState::Stable);
    assert_eq!(described.members.len(), 2);
    assert_eq!(described.claims.len(), 4);
    assert_eq!(described.offsets[0].offset, 7);
    assert_eq!(described.offsets[0].time_ms, log.time_ms);
}

#[test]
fn assignment_of_more_partitions_than_a_group_may_know_is_refused() {
    let mut log = Log::with_members(1);
    log.does(subscribes(0, &[(0, 1_000_000)]));
    let made_up: Vec<u32> = (0..200_001).collect();
    let (code, _) = log.refuses(publishes(0, 2, &[(0, &made_up)]));
    assert_eq!(code, ErrorCode::GroupLimit);
    log.does(publishes(0, 2, &[(0, &made_up[1..])]));
    assert_eq!(log.claims().len(), 200_000);
}
