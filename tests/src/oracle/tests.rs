//! That each violation is caught, and nothing else is one.

use super::*;

fn place() -> Place {
    Place::new("t", 0)
}

fn granted(member: &str) -> Step {
    Step::Granted {
        member: member.into(),
        place: place(),
    }
}

fn gone(member: &str) -> Step {
    Step::Gone {
        member: member.into(),
        place: place(),
    }
}

fn delivered(member: &str, epoch: u64, offsets: Range<u64>) -> Step {
    Step::Delivered {
        member: member.into(),
        place: place(),
        epoch,
        offsets,
    }
}

fn acknowledged(epoch: u64, offsets: Range<u64>) -> Step {
    Step::Acknowledged {
        place: place(),
        epoch,
        offsets,
    }
}

fn committed(epoch: u64, offset: u64) -> Step {
    Step::Committed {
        place: place(),
        epoch,
        offset,
    }
}

fn seen(offset: u64, asked: usize) -> Step {
    Step::Seen {
        place: place(),
        offset,
        asked,
    }
}

/// With records 0 to 9 to be handled.
fn violations(steps: &[Step]) -> Vec<Violation> {
    check(steps, &BTreeMap::from([(place(), 0..10)])).1
}

/// A has done five of ten and committed three when it dies; B goes on.
fn handover() -> Vec<Step> {
    vec![
        granted("a"),
        delivered("a", 1, 0..6),
        acknowledged(1, 0..5),
        committed(1, 3),
        granted("b"),
        delivered("b", 2, 3..10),
        acknowledged(2, 3..10),
        committed(2, 10),
    ]
}

#[test]
fn handover_with_an_uncommitted_acknowledgement_is_no_violation() {
    let written = BTreeMap::from([(place(), 0..10)]);
    let (story, violations) = check(&handover(), &written);
    assert_eq!(violations, []);
    let expected = Story {
        delivered: 13,
        redelivered: 3,
        claims: 2,
    };
    assert_eq!(story, expected);
}

#[test]
fn record_that_nobody_acknowledged_is_a_violation() {
    let mut steps = handover();
    steps[6] = acknowledged(2, 3..9);
    steps[7] = committed(2, 9);
    let offsets = 9..10;
    let place = place();
    assert_eq!(
        violations(&steps),
        [Violation::NeverHandled { place, offsets }]
    );
}

#[test]
fn partition_that_nobody_read_is_a_violation() {
    let (offsets, place) = (0..10, place());
    assert_eq!(
        violations(&[]),
        [Violation::NeverHandled { place, offsets }]
    );
}

#[test]
fn delivery_without_an_assignment_is_a_violation() {
    let mut steps = handover();
    steps.remove(4);
    let found = violations(&steps);
    assert!(
        matches!(&found[..], [Violation::Unassigned { member, offset: 3, .. }] if &**member == "b"),
        "{found:?}"
    );
}

#[test]
fn delivery_after_a_loss_is_a_violation() {
    let mut steps = handover();
    steps.insert(6, gone("b"));
    steps.insert(7, delivered("b", 2, 10..11));
    let found = violations(&steps);
    assert!(
        matches!(found[..], [Violation::Unassigned { offset: 10, .. }]),
        "{found:?}"
    );
}

#[test]
fn two_members_under_one_epoch_are_a_violation() {
    let mut steps = handover();
    steps[5] = delivered("b", 1, 6..10);
    let found = violations(&steps);
    let of_epoch = |v: &Violation| matches!(v, Violation::TwoHolders { epoch: 1, .. });
    assert!(found.iter().any(of_epoch), "{found:?}");
}

#[test]
fn record_delivered_twice_under_one_epoch_is_a_violation() {
    let mut steps = handover();
    steps.insert(6, delivered("b", 2, 9..10));
    let found = violations(&steps);
    assert!(
        matches!(
            found[..],
            [Violation::Repeated {
                epoch: 2,
                expected: 10,
                offset: 9,
                ..
            }]
        ),
        "{found:?}"
    );
}

#[test]
fn hole_within_an_epoch_is_a_violation() {
    let mut steps = handover();
    steps[5] = delivered("b", 2, 3..5);
    steps.insert(6, delivered("b", 2, 6..10));
    let found = violations(&steps);
    assert!(
        matches!(
            found[..],
            [Violation::Skipped {
                epoch: 2,
                expected: 5,
                offset: 6,
                ..
            }]
        ),
        "{found:?}"
    );
}

#[test]
fn delivery_under_an_older_epoch_is_a_violation() {
    let mut steps = handover();
    steps.insert(6, delivered("a", 1, 6..7));
    let found = violations(&steps);
    assert!(
        matches!(
            found[..],
            [Violation::OldEpoch {
                epoch: 1,
                newest: 2,
                offset: 6,
                ..
            }]
        ),
        "{found:?}"
    );
}

#[test]
fn claim_that_begins_below_a_confirmed_commit_is_a_violation() {
    let mut steps = handover();
    // In whatever order it was heard of.
    steps.push(committed(1, 4));
    let found = violations(&steps);
    assert!(
        matches!(
            found[..],
            [Violation::StartsBelowCommit {
                epoch: 2,
                start: 3,
                committed: 4,
                ..
            }]
        ),
        "{found:?}"
    );
}

#[test]
fn claim_that_begins_above_what_was_acknowledged_is_a_violation() {
    let mut steps = handover();
    steps[2] = acknowledged(1, 0..1);
    steps.remove(3);
    let found = violations(&steps);
    let above = |v: &Violation| {
        matches!(
            v,
            Violation::StartsAboveAcknowledged {
                epoch: 2,
                start: 3,
                acknowledged: 1,
                ..
            }
        )
    };
    assert!(found.iter().any(above), "{found:?}");
}

#[test]
fn first_claim_that_leaves_records_out_is_a_violation() {
    let steps = [
        granted("a"),
        delivered("a", 1, 2..10),
        acknowledged(1, 2..10),
    ];
    let found = violations(&steps);
    assert_eq!(found.len(), 2, "{found:?}");
}

#[test]
fn commit_above_a_hole_in_the_acknowledgements_is_a_violation() {
    let mut steps = handover();
    steps[2] = acknowledged(1, 0..2);
    steps.insert(3, acknowledged(1, 3..5));
    let found = violations(&steps);
    let above = |v: &Violation| {
        matches!(
            v,
            Violation::CommitAboveAcknowledged {
                epoch: 1,
                committed: 3,
                acknowledged: 2,
                ..
            }
        )
    };
    assert!(found.iter().any(above), "{found:?}");
}

#[test]
fn committed_offset_seen_below_a_confirmed_one_is_a_violation() {
    let mut steps = handover();
    // Asked before the last commit was confirmed, told after.
    steps.push(seen(3, 7));
    assert_eq!(violations(&steps), []);
    steps.push(seen(3, 8));
    let (place, from, to) = (place(), 10, 3);
    assert_eq!(
        violations(&steps),
        [Violation::WentBack { place, from, to }]
    );
}

#[test]
fn committed_offset_seen_above_all_that_was_acknowledged_is_a_violation() {
    let mut steps = handover();
    steps.insert(4, seen(6, 4));
    let found = violations(&steps);
    let above =
        |v: &Violation| matches!(v, Violation::CommitAboveAcknowledged { committed: 6, .. });
    assert!(found.iter().any(above), "{found:?}");
}

#[test]
fn trace_names_its_violations() {
    let trace = Trace::default();
    trace.put(delivered("a", 1, 0..10));
    let written = BTreeMap::from([(place(), 0..10)]);
    let error = trace.check(&written).unwrap_err().to_string();
    assert!(error.contains("nobody handled 0..10"), "{error}");
    assert!(error.contains("did not have it"), "{error}");
}

#[test]
fn ranges_that_touch_become_one() {
    let mut ranges = Ranges::default();
    assert_eq!(ranges.insert(0..3), 3);
    assert_eq!(ranges.insert(5..8), 3);
    assert_eq!(ranges.end_of_run(0), 3);
    assert_eq!(ranges.end_of_run(3), 3);
    assert_eq!(ranges.holes(0..10).collect::<Vec<_>>(), [3..5, 8..10]);
    assert_eq!(ranges.insert(2..6), 2);
    assert_eq!(ranges.end_of_run(0), 8);
    assert_eq!(ranges.insert(4..4), 0);
    assert_eq!(ranges.insert(1..9), 1);
    assert_eq!(ranges, Ranges(BTreeMap::from([(0, 9)])));
    assert_eq!(ranges.holes(0..9).count(), 0);
}
