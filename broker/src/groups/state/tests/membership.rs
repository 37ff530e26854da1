//! Members come, go, come back and succeed each other.

use qute_proto::v1::{ErrorCode, GroupState, Join};

use super::fixture::*;
use crate::groups::state::Member;

#[test]
fn member_joins_and_the_group_waits_for_an_assignment() {
    let mut log = Log::default();
    log.does(joins(join(0)));
    let group = log.group();
    assert_eq!((group.generation(), group.assigned_generation()), (1, 0));
    assert_eq!(group.state(), GroupState::Rebalancing);
    assert!(group.wants_assignment());
    assert_eq!(group.revision(), log.index);
    assert_eq!(log.changed, [GROUP]);
    let task = group.assign_task().unwrap();
    assert_eq!(task.generation, 1);
    assert_eq!(task.assignor, Some(assignor("sticky", 1)));
    assert_eq!(task.members.len(), 1);
}

#[test]
fn each_join_raises_the_generation_and_keeps_the_order() {
    let mut log = Log::default();
    for number in [4, 2, 7] {
        log.does(joins(join(number)));
    }
    assert_eq!(log.group().generation(), 3);
    assert_eq!(log.members(), [4, 2, 7]);
    assert_eq!(log.groups.totals().members, 3);
}

#[test]
fn same_join_again_changes_nothing() {
    let mut log = Log::with_claims();
    let before = log.state();
    log.does(joins(join(1)));
    assert_eq!(before, log.state());
    assert!(log.changed.is_empty());
}

#[test]
fn join_with_malformed_parts_is_refused_and_makes_no_group() {
    let mut log = Log::default();
    let malformed: [(Join, ErrorCode); 6] = [
        (
            Join {
                member_id: vec![1; 15].into(),
                ..join(0)
            },
            ErrorCode::InvalidArgument,
        ),
        (
            Join {
                assignors: Vec::new(),
                ..join(0)
            },
            ErrorCode::InconsistentAssignor,
        ),
        (
            Join {
                topics: subscription(&[(0, 1), (1, 1), (0, 2)]),
                ..join(0)
            },
            ErrorCode::InvalidArgument,
        ),
        (
            Join {
                group: String::new(),
                ..join(0)
            },
            ErrorCode::InvalidGroupName,
        ),
        (
            Join {
                group: "a\nb".to_owned(),
                ..join(0)
            },
            ErrorCode::InvalidGroupName,
        ),
        (Join::default(), ErrorCode::InvalidGroupName),
    ];
    for (join, code) in malformed {
        assert_eq!(log.refuses(joins(join)).0, code);
    }
    assert!(log.groups.is_empty());
}

#[test]
fn group_has_the_oldest_members_first_common_assignor() {
    let mut log = Log::default();
    let offering = |number, versions: &[u32]| Join {
        assignors: versions.iter().map(|it| assignor("sticky", *it)).collect(),
        ..join(number)
    };
    log.does(joins(offering(0, &[3, 2, 1])));
    log.does(joins(offering(1, &[1, 2])));
    assert_eq!(log.group().assignor(), Some(&assignor("sticky", 2)));
    log.does(joins(offering(2, &[1])));
    assert_eq!(log.group().assignor(), Some(&assignor("sticky", 1)));
    log.does(leaves(2, Vec::new()));
    log.does(leaves(0, Vec::new()));
    assert_eq!(log.group().assignor(), Some(&assignor("sticky", 1)));
}

#[test]
fn join_without_a_common_assignor_is_refused_naming_both_sides() {
    let mut log = Log::with_claims();
    let newer = Join {
        assignors: vec![assignor("sticky", 2)],
        ..join(5)
    };
    let (code, message) = log.refuses(joins(newer));
    assert_eq!(code, ErrorCode::InconsistentAssignor);
    assert!(
        message.contains("`m5`") && message.contains("`m0`"),
        "{message}"
    );
    assert!(
        message.contains("`sticky` version 2") && message.contains("`sticky` version 1"),
        "{message}"
    );
}

#[test]
fn rejoin_and_succession_are_refused_without_a_common_assignor() {
    let mut log = Log::with_members(1);
    log.does(joins(join_as(1, "w")));
    let newer = |join: Join| Join {
        assignors: vec![assignor("sticky", 2)],
        ..join
    };
    let rejoin = newer(Join {
        member_epoch: 2,
        ..join_as(1, "w")
    });
    assert_eq!(
        log.refuses(joins(rejoin)).0,
        ErrorCode::InconsistentAssignor
    );
    let successor = newer(join_as(2, "w"));
    let code = log.refuses(joins_for(successor, 1)).0;
    assert_eq!(code, ErrorCode::InconsistentAssignor);
    // Alone, it may change what it offers.
    log.does(leaves(0, Vec::new()));
    log.does(joins_for(newer(join_as(2, "w")), 1));
    assert_eq!(log.group().assignor(), Some(&assignor("sticky", 2)));
}

#[test]
fn rejoin_under_a_higher_epoch_fences_what_was_in_flight() {
    let mut log = Log::with_claims();
    let generation = log.group().generation();
    log.does(joins(Join {
        member_epoch: 2,
        ..join(0)
    }));
    assert_eq!(log.group().generation(), generation);
    let claims = [(0, (0, 2)), (1, (0, 2)), (2, (1, 1)), (3, (1, 1))];
    assert_eq!(log.claims(), claims.into());
    // The old membership commits no more.
    let (code, _) = log.refuses(commits(0, vec![commit(0, 1, 10)]));
    assert_eq!(code, ErrorCode::UnknownMember);
    // And does not come back.
    assert_eq!(log.refuses(joins(join(0))).0, ErrorCode::UnknownMember);
    // Only the member itself is concerned.
    let concerned: Vec<_> = log.group().concerned_since(log.index - 3).collect();
    assert_eq!(concerned, [member(0)]);
}

#[test]
fn rejoin_under_another_stable_name_is_refused() {
    let mut log = Log::default();
    log.does(joins(join_as(0, "w0")));
    let (code, _) = log.refuses(joins(Join {
        member_epoch: 2,
        ..join_as(0, "w1")
    }));
    assert_eq!(code, ErrorCode::InvalidArgument);
}

#[test]
fn rejoin_with_another_subscription_raises_the_generation() {
    let mut log = Log::with_claims();
    log.does(joins(Join {
        member_epoch: 2,
        topics: subscription(&[(0, 4), (1, 2)]),
        ..join(0)
    }));
    assert_eq!(log.group().generation(), 3);
    assert_eq!(log.group().assigned_generation(), 2);
}

// S27: a join under the stable name of another waits until that one's session has ended.
#[test]
fn s27_join_under_a_stable_name_that_is_held_is_told_who_holds_it() {
    let mut log = Log::default();
    log.does(joins(join_as(0, "w")));
    let reply = log.apply(joins(join_as(1, "w")));
    assert_eq!(reply.code(), ErrorCode::NotReady);
    let holder = reply.held_by.unwrap();
    assert_eq!(holder.member_id, member(0).to_wire());
    assert_eq!(holder.member_epoch, 1);
    // Nor may it replace somebody else.
    log.does(joins(join(2)));
    let (code, _) = log.refuses(joins_for(join_as(1, "w"), 2));
    assert_eq!(code, ErrorCode::NotReady);
    assert_eq!(log.members(), [0, 2]);
}

// S27: what the predecessor had in flight is fenced; nothing moves.
#[test]
fn s27_successor_has_place_and_claims_under_higher_epochs() {
    let mut log = Log::default();
    log.does(joins(join_as(0, "w")));
    log.does(joins(join(1)));
    log.does(publishes(1, 2, &[(0, &[0, 1]), (1, &[2, 3])]));
    log.does(joins_for(join_as(7, "w"), 0));
    assert_eq!(log.members(), [7, 1]);
    assert_eq!(log.group().generation(), 2);
    assert_eq!(log.group().state(), GroupState::Stable);
    let claims = [(0, (7, 2)), (1, (7, 2)), (2, (1, 1)), (3, (1, 1))];
    assert_eq!(log.claims(), claims.into());
    let (code, _) = log.refuses(commits(0, vec![commit(0, 1, 10)]));
    assert_eq!(code, ErrorCode::UnknownMember);
    log.does(commits(7, vec![commit(0, 2, 10)]));
    let update = log.group().update_for(member(7)).unwrap();
    assert_eq!(update.targets[0].partitions, [0, 1]);
}

#[test]
fn s27_member_that_has_joined_anew_is_not_replaced() {
    let mut log = Log::default();
    log.does(joins(join_as(0, "w")));
    log.does(joins(Join {
        member_epoch: 2,
        ..join_as(0, "w")
    }));
    // Decided when it was at epoch 1.
    let (code, _) = log.refuses(joins_for(join_as(1, "w"), 0));
    assert_eq!(code, ErrorCode::NotReady);
}

#[test]
fn successor_of_a_member_that_has_gone_joins_as_a_new_one() {
    let mut log = Log::with_members(1);
    log.does(joins(join_as(1, "w")));
    log.does(expires(&[(1, 1)]));
    log.does(joins_for(join_as(2, "w"), 1));
    assert_eq!(log.members(), [0, 2]);
    assert_eq!(log.group().generation(), 4);
}

#[test]
fn successor_that_reads_other_topics_gives_up_what_it_does_not_read() {
    let mut log = Log::default();
    log.does(joins(join_as(0, "w")));
    log.does(publishes(0, 1, &[(0, &[0, 1])]));
    let successor = Join {
        topics: subscription(&[(1, 1)]),
        ..join_as(1, "w")
    };
    log.does(joins_for(successor, 0));
    assert_eq!(log.group().generation(), 2);
    let update = log.group().update_for(member(1)).unwrap();
    assert_eq!(update.targets, []);
    assert_eq!(update.claims.len(), 2);
}

#[test]
fn leaving_commits_final_offsets_and_hands_claims_on() {
    let mut log = Log::with_claims();
    log.does(joins(join(2)));
    log.does(publishes(0, 3, &[(1, &[2, 3]), (2, &[0, 1])]));
    // 0 holds what 2 is to have, until it goes.
    assert_eq!(log.claims()[&0], (0, 1));
    let finals = vec![claim(0, 1, Some(17)), claim(1, 1, None)];
    log.does(leaves(0, finals));
    assert_eq!(log.offsets(), [(0, 17)].into());
    let claims = [(0, (2, 2)), (1, (2, 2)), (2, (1, 1)), (3, (1, 1))];
    assert_eq!(log.claims(), claims.into());
    assert_eq!(log.group().generation(), 4);
    let (code, _) = log.refuses(leaves(0, Vec::new()));
    assert_eq!(code, ErrorCode::UnknownMember);
}

#[test]
fn leaving_with_a_fenced_claim_commits_nothing_for_it() {
    let mut log = Log::with_claims();
    let reply = log.apply(leaves(
        0,
        vec![claim(0, 9, Some(17)), claim(2, 1, Some(17))],
    ));
    let code = |at: usize| reply.offsets[at].error.as_ref().unwrap().code();
    assert_eq!(reply.code, 0);
    assert_eq!(
        (code(0), code(1)),
        (ErrorCode::ClaimFenced, ErrorCode::ClaimFenced)
    );
    assert!(log.offsets().is_empty());
    assert_eq!(log.members(), [1]);
}

#[test]
fn others_keep_what_they_have_when_members_come_and_go() {
    let mut log = Log::with_claims();
    log.does(joins(join(2)));
    log.does(expires(&[(1, 1)]));
    assert_eq!(log.claims(), [(0, (0, 1)), (1, (0, 1))].into());
    let update = log.group().update_for(member(0)).unwrap();
    assert_eq!(update.targets[0].partitions, [0, 1]);
    assert_eq!((update.generation, update.assigned_generation), (4, 2));
}

// S26: decided for one session, an expiry must not hit the next one.
#[test]
fn s26_expiry_spares_a_member_that_has_joined_anew() {
    let mut log = Log::with_claims();
    log.does(joins(Join {
        member_epoch: 2,
        ..join(0)
    }));
    let before = log.state();
    log.does(expires(&[(0, 1), (9, 1)]));
    assert_eq!(before, log.state());
    log.does(expires(&[(0, 2), (1, 1)]));
    assert!(log.group().members().is_empty());
    assert_eq!(log.group().empty_since_ms(), Some(log.time_ms));
    assert_eq!(log.group().generation(), 3);
    assert!(log.claims().is_empty());
}

#[test]
fn expiry_in_a_group_that_has_gone_is_no_error() {
    let mut log = Log::default();
    log.does(expires(&[(0, 1)]));
    assert!(log.groups.is_empty());
}

#[test]
fn commands_of_strangers_are_refused() {
    let mut log = Log::with_claims();
    let strange = [
        leaves(9, Vec::new()),
        subscribes(9, &[(0, 4)]),
        publishes(9, 2, &[]),
        releases(9, vec![claim(0, 1, None)]),
        commits(9, vec![commit(0, 1, 1)]),
    ];
    for command in strange.clone() {
        assert_eq!(log.refuses(command).0, ErrorCode::UnknownMember);
    }
    let mut log = Log::default();
    for command in strange {
        assert_eq!(log.refuses(command).0, ErrorCode::UnknownMember);
    }
}

// S27: new partitions raise the generation.
#[test]
fn s27_more_partitions_raise_the_generation_and_move_nothing() {
    let mut log = Log::with_claims();
    let claims = log.claims();
    log.does(subscribes(0, &[(0, 8)]));
    assert_eq!(log.group().generation(), 3);
    assert_eq!(log.claims(), claims);
    log.does(subscribes(0, &[(0, 8)]));
    assert_eq!(log.group().generation(), 3);
    assert!(log.changed.is_empty());
}

#[test]
fn topic_no_longer_read_is_no_target_and_its_claims_are_given_up() {
    let mut log = Log::with_claims();
    log.does(subscribes(0, &[(1, 4)]));
    let update = log.group().update_for(member(0)).unwrap();
    assert_eq!(update.targets, []);
    assert_eq!(update.claims.len(), 2);
    let update = log.group().update_for(member(1)).unwrap();
    assert_eq!(update.targets[0].partitions, [2, 3]);
}

#[test]
fn forgotten_topic_takes_claims_targets_offsets_and_subscriptions() {
    let mut log = Log::with_claims();
    log.does(commits(0, vec![commit(0, 1, 10)]));
    log.does(forgets(1));
    assert!(log.changed.is_empty());
    log.does(forgets(0));
    assert_eq!(log.changed, [GROUP]);
    assert!(log.claims().is_empty());
    assert!(log.offsets().is_empty());
    assert_eq!(log.group().generation(), 3);
    // Whoever had not heard of it assigns it no more.
    let (code, _) = log.refuses(publishes(0, 3, &[(0, &[0])]));
    assert_eq!(code, ErrorCode::InvalidArgument);
    log.does(publishes(0, 3, &[]));
    assert_eq!(log.group().state(), GroupState::Stable);
}

#[test]
fn group_is_removed_only_without_members() {
    let mut log = Log::default();
    assert_eq!(log.refuses(removes()).0, ErrorCode::UnknownGroup);
    log.does(joins(join(0)));
    assert_eq!(log.refuses(removes()).0, ErrorCode::GroupNotEmpty);
    log.does(leaves(0, Vec::new()));
    log.does(removes());
    assert!(log.groups.is_empty());
    assert_eq!(log.groups.totals(), Default::default());
}

#[test]
fn revision_of_a_group_made_again_is_higher() {
    let mut log = Log::with_claims();
    let before = log.group().revision();
    log.does(expires(&[(0, 1), (1, 1)]));
    log.does(removes());
    log.does(joins(join(0)));
    assert_eq!(log.group().generation(), 1);
    assert!(log.group().revision() > before);
}

#[test]
fn join_says_the_same_in_whatever_order_its_topics_come() {
    let said = |topics: &[(u8, u32)]| Join {
        topics: subscription(topics),
        ..join_as(0, "a")
    };
    let is_same = |one: &Join, other: &Join| {
        let one = Member::from_join(one).unwrap();
        one.says_the_same_as(&Member::from_join(other).unwrap())
    };
    let known = said(&[(0, 4), (1, 2)]);
    assert!(is_same(&known, &said(&[(1, 2), (0, 4)])));
    assert!(!is_same(&known, &said(&[(0, 4), (1, 3)])));
    assert!(!is_same(&known, &said(&[(0, 4)])));
    let others = [
        Join {
            member_epoch: 2,
            ..known.clone()
        },
        Join {
            rack: "r".to_owned(),
            ..known.clone()
        },
        Join {
            client: "other".to_owned(),
            ..known.clone()
        },
        Join {
            session_timeout_ms: 1,
            ..known.clone()
        },
    ];
    assert!(others.iter().all(|other| !is_same(&known, other)));
    // The state machine refuses it: it is not the same as anything.
    assert!(Member::from_join(&said(&[(0, 4), (0, 4)])).is_err());
}
