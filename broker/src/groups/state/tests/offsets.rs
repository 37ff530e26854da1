//! Commits, resets and sweeps.

use qute_proto::v1::ErrorCode;

use super::fixture::*;

#[test]
fn commit_of_a_holder_is_taken() {
    let mut log = Log::with_claims();
    let reply = log.apply(commits(0, vec![commit(0, 1, 10), commit(1, 1, 20)]));
    assert_eq!(reply.code, 0);
    let offsets: Vec<_> = reply.offsets.iter().map(|it| it.offset).collect();
    assert_eq!(offsets, [10, 20]);
    assert_eq!(log.offsets(), [(0, 10), (1, 20)].into());
    // Nobody needs to be told.
    assert!(log.changed.is_empty());
    assert_eq!(log.groups.totals().offsets, 2);
}

#[test]
fn commit_without_the_claim_changes_nothing() {
    let mut log = Log::with_claims();
    log.does(commits(0, vec![commit(0, 1, 10)]));
    let before = log.state();
    let fenced = vec![
        // Another epoch, another's, nobody's.
        commit(0, 0, 99),
        commit(0, 2, 99),
        commit(2, 1, 99),
        commit(9, 0, 99),
    ];
    let reply = log.apply(commits(0, fenced));
    assert_eq!(reply.code, 0);
    for one in &reply.offsets {
        assert_eq!(one.error.as_ref().unwrap().code(), ErrorCode::ClaimFenced);
    }
    assert_eq!(reply.offsets.len(), 4);
    assert_eq!(before, log.state());
}

#[test]
fn items_of_a_commit_are_judged_one_by_one() {
    let mut log = Log::with_claims();
    let reply = log.apply(commits(
        0,
        vec![
            commit(0, 1, 10),
            commit(2, 1, 10),
            commit(1, 1, u64::MAX),
            commit(1, 1, 5),
        ],
    ));
    let codes: Vec<_> = reply
        .offsets
        .iter()
        .map(|it| it.error.as_ref().map(|error| error.code()))
        .collect();
    let expected = [
        None,
        Some(ErrorCode::ClaimFenced),
        Some(ErrorCode::InvalidArgument),
        None,
    ];
    assert_eq!(codes, expected);
    assert_eq!(log.offsets(), [(0, 10), (1, 5)].into());
}

#[test]
fn committed_offset_never_goes_back_by_a_commit() {
    let mut log = Log::with_claims();
    let mut high = commit(0, 1, 10);
    high.metadata = "ten".to_owned();
    log.does(commits(0, vec![high]));
    let reply = log.apply(commits(0, vec![commit(0, 1, 4)]));
    assert_eq!(reply.offsets[0].offset, 10);
    assert_eq!(reply.offsets[0].error, None);
    let in_force = log.group().offset(topic(0), 0).unwrap();
    assert_eq!((in_force.offset, &*in_force.metadata), (10, "ten"));
    // Nor by a release.
    let reply = log.apply(releases(0, vec![claim(0, 1, Some(3))]));
    assert_eq!(reply.offsets[0].offset, 10);
    assert_eq!(log.offsets()[&0], 10);
}

#[test]
fn commit_of_the_same_offset_renews_it() {
    let mut log = Log::with_claims();
    log.does(commits(0, vec![commit(0, 1, 10)]));
    let mut again = commit(0, 1, 10);
    (again.metadata, again.leader_epoch) = ("x".to_owned(), 4);
    log.does(commits(0, vec![again]));
    let in_force = log.group().offset(topic(0), 0).unwrap();
    assert_eq!(in_force.time_ms, log.time_ms);
    assert_eq!((in_force.leader_epoch, &*in_force.metadata), (4, "x"));
}

#[test]
fn program_without_membership_commits_only_where_there_are_no_members() {
    let mut log = Log::default();
    log.does(commits_alone(vec![commit(0, 0, 10)]));
    assert_eq!(log.offsets(), [(0, 10)].into());
    log.does(joins(join(0)));
    let (code, _) = log.refuses(commits_alone(vec![commit(0, 0, 11)]));
    assert_eq!(code, ErrorCode::GroupNotEmpty);
    log.does(leaves(0, Vec::new()));
    log.does(commits_alone(vec![commit(0, 0, 12), commit(1, 0, 1)]));
    assert_eq!(log.offsets(), [(0, 12), (1, 1)].into());
}

#[test]
fn commit_of_nothing_makes_no_group() {
    let mut log = Log::default();
    log.does(commits_alone(Vec::new()));
    log.apply(commits_alone(vec![commit(0, 0, u64::MAX)]));
    assert!(log.groups.is_empty());
}

#[test]
fn member_begins_where_an_earlier_one_has_stopped() {
    let mut log = Log::with_claims();
    log.does(commits(0, vec![commit(0, 1, 10)]));
    log.does(expires(&[(0, 1), (1, 1)]));
    log.does(joins(join(5)));
    log.does(publishes(5, 4, &[(5, &[0, 1])]));
    let update = log.group().update_for(member(5)).unwrap();
    let begins = |at: usize| update.claims[at].committed.as_ref().map(|it| it.offset);
    assert_eq!((begins(0), begins(1)), (Some(10), None));
    // The group's last epoch goes on, too.
    assert_eq!(update.claims[0].claim_epoch, 2);
}

#[test]
fn reset_sets_offsets_back_and_forgets_them() {
    let mut log = Log::default();
    log.does(commits_alone(vec![commit(0, 0, 10), commit(1, 0, 20)]));
    log.does(resets(&[(0, Some(3)), (1, None), (2, Some(5))], false));
    assert_eq!(log.offsets(), [(0, 3), (2, 5)].into());
    assert_eq!(log.groups.totals().offsets, 2);
}

#[test]
fn reset_of_claimed_partitions_is_refused_whole_unless_forced() {
    let mut log = Log::with_claims();
    log.does(commits(0, vec![commit(0, 1, 10)]));
    let (code, message) = log.refuses(resets(&[(9, Some(1)), (0, Some(3))], false));
    assert_eq!(code, ErrorCode::GroupNotEmpty);
    assert!(message.contains("partition 0"), "{message}");

    let before = log.index;
    log.does(resets(&[(0, Some(3)), (2, None)], true));
    assert_eq!(log.offsets(), [(0, 3)].into());
    let claims = [(0, (0, 2)), (1, (0, 1)), (2, (1, 2)), (3, (1, 1))];
    assert_eq!(log.claims(), claims.into());
    assert!(log.group().revision() > before);
    // What the holder had in flight is fenced.
    let reply = log.apply(commits(0, vec![commit(0, 1, 11)]));
    let error = reply.offsets[0].error.as_ref().unwrap();
    assert_eq!(error.code(), ErrorCode::ClaimFenced);
    log.does(commits(0, vec![commit(0, 2, 4)]));
}

#[test]
fn reset_of_an_unknown_group_is_refused() {
    let mut log = Log::default();
    let (code, _) = log.refuses(resets(&[(0, Some(1))], true));
    assert_eq!(code, ErrorCode::UnknownGroup);
}

#[test]
fn malformed_reset_is_refused_whole() {
    let mut log = Log::default();
    log.does(commits_alone(vec![commit(0, 0, 10)]));
    let (code, _) = log.refuses(resets(&[(0, Some(1)), (1, Some(u64::MAX))], true));
    assert_eq!(code, ErrorCode::InvalidArgument);
}

#[test]
fn sweep_forgets_old_offsets_of_groups_without_members() {
    let mut log = Log::default();
    log.does(commits_alone(vec![commit(0, 0, 10)]));
    log.time_ms = 500;
    log.does(commits_alone(vec![commit(1, 0, 10)]));
    log.time_ms = 1100;
    log.does(sweeps(1000));
    assert_eq!(log.offsets(), [(1, 10)].into());
    log.time_ms = 1500;
    log.does(sweeps(1000));
    assert!(log.groups.is_empty());
    assert_eq!(log.groups.totals(), Default::default());
    assert_eq!(log.changed, [GROUP]);
}

#[test]
fn sweep_counts_from_when_the_last_member_went() {
    let mut log = Log::with_claims();
    log.does(commits(0, vec![commit(0, 1, 10)]));
    log.time_ms = 5000;
    log.does(sweeps(1000));
    assert_eq!(log.offsets().len(), 1);
    log.does(expires(&[(0, 1), (1, 1)]));
    log.time_ms = 5500;
    log.does(sweeps(1000));
    assert_eq!(log.offsets().len(), 1);
    log.time_ms = 6100;
    log.does(sweeps(1000));
    assert!(log.groups.is_empty());
}

#[test]
fn sweep_takes_groups_that_hold_nothing_at_once() {
    let mut log = Log::with_claims();
    log.does(sweeps(1_000_000));
    assert_eq!(log.members().len(), 2);
    log.does(expires(&[(0, 1), (1, 1)]));
    log.does(sweeps(1_000_000));
    assert!(log.groups.is_empty());
}

// S19: an entry with an earlier time than one before it does not turn the clock back.
#[test]
fn s19_time_never_falls() {
    let mut log = Log {
        time_ms: 1000,
        ..Log::default()
    };
    log.does(commits_alone(vec![commit(0, 0, 10)]));
    log.time_ms = 5;
    log.does(commits_alone(vec![commit(1, 0, 10)]));
    assert_eq!(log.group().offset(topic(0), 1).unwrap().time_ms, 1001);
    assert_eq!(log.groups.time_ms(), 1001);
}

#[test]
fn groups_are_walked_in_the_order_of_their_names() {
    let mut log = Log::default();
    for name in ["b", "a", "c"] {
        let mut join = join(0);
        join.group = name.to_owned();
        log.does(joins(join));
    }
    let after = |name: &str| {
        let walked = log.groups.iter_after(name);
        walked.map(|(name, _)| name.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(after(""), ["a", "b", "c"]);
    assert_eq!(after("a"), ["b", "c"]);
    assert_eq!(after("c"), [""; 0]);
    assert_eq!(log.groups.len(), 3);
}
