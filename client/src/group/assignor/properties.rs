//! What holds of every assignment of [`StickyAssignor`], whatever the input.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use qute_proto::ids::{MemberId, PartitionId, TopicId};

use super::{AssignInput, AssignMember, Assignment, Assignor, StickyAssignor};

fn member_id(n: u128) -> MemberId {
    MemberId(uuid::Uuid::from_u128(n))
}

fn topic_id(n: u128) -> TopicId {
    TopicId(uuid::Uuid::from_u128(n))
}

fn partition(topic: u128, partition: u32) -> PartitionId {
    PartitionId {
        topic: topic_id(topic),
        partition,
    }
}

fn assign(input: &AssignInput) -> Assignment {
    StickyAssignor.assign(input)
}

/// Members that read the same topics, with nothing held.
fn members(count: u128, topics: &[(u128, u32)]) -> AssignInput {
    let member = |n| {
        let mut member = AssignMember::new(member_id(n));
        member.topics = topics.iter().map(|&(n, it)| (topic_id(n), it)).collect();
        member
    };
    AssignInput::new((1..=count).map(member).collect())
}

/// The same group, once everybody holds what the assignment gives.
fn settled(mut input: AssignInput, assignment: &Assignment) -> AssignInput {
    for member in &mut input.members {
        member.targets = assignment.of(member.id).collect();
        member.claims = member.targets.clone();
    }
    input
}

fn load(assignment: &Assignment, member: &AssignMember) -> usize {
    assignment.of(member.id).count()
}

/// How many of the partitions that members hold stay with them.
fn kept(input: &AssignInput, assignment: &Assignment) -> usize {
    let holders = holders(input);
    let stays = |(place, holder): &(&PartitionId, &MemberId)| {
        assignment.owners.get(*place) == Some(*holder)
    };
    holders.iter().filter(stays).count()
}

/// Who holds what, where claims make sense.
fn holders(input: &AssignInput) -> BTreeMap<PartitionId, MemberId> {
    let by_id: BTreeMap<_, _> = input.members.iter().map(|it| (it.id, it)).collect();
    let mut holders = BTreeMap::new();
    for member in by_id.values() {
        for &place in member.claims.iter().filter(|&&place| member.reads(place)) {
            holders.entry(place).or_insert(member.id);
        }
    }
    holders
}

/// The most that can stay where it is if all read the same and loads are even.
fn most_kept(input: &AssignInput) -> usize {
    let partitions = input.partitions().count();
    let mut held: Vec<usize> = input
        .members
        .iter()
        .map(|member| {
            holders(input)
                .values()
                .filter(|it| **it == member.id)
                .count()
        })
        .collect();
    held.sort_unstable();
    held.reverse();
    let (floor, more) = (partitions / held.len(), partitions % held.len());
    let quota = |n: usize| floor + usize::from(n < more);
    held.iter()
        .enumerate()
        .map(|(n, &held)| held.min(quota(n)))
        .sum()
}

#[derive(Debug, Clone, Copy)]
enum Reading {
    Alike,
    Differently,
}

#[derive(Debug, Clone, Copy)]
enum Promised {
    /// What is held.
    Held,
    /// Anything.
    Anything,
}

fn some_partition() -> impl Strategy<Value = PartitionId> {
    (1_u128..4, 0_u32..9).prop_map(|(topic, number)| partition(topic, number))
}

prop_compose! {
    fn some_member(racks: bool)(
        id in 1_u128..9,
        instance in proptest::option::weighted(0.3, Just("i".to_owned())),
        rack in if racks { "[abc]?" } else { "" },
        topics in proptest::collection::btree_map(1_u128..4, 0_u32..9, 0..4),
        targets in proptest::collection::vec(some_partition(), 0..12),
        claims in proptest::collection::vec(some_partition(), 0..12),
    ) -> AssignMember {
        let mut member = AssignMember::new(member_id(id));
        member.instance = instance;
        member.rack = rack;
        member.topics = topics.into_iter().map(|(n, it)| (topic_id(n), it)).collect();
        member.targets = targets;
        member.claims = claims;
        member
    }
}

fn some_input(
    reading: Reading,
    promised: Promised,
    racks: bool,
) -> impl Strategy<Value = AssignInput> {
    let members = proptest::collection::vec(some_member(racks), 1..8);
    let rack = proptest::collection::btree_set("[abcd]", 0..3);
    let topic = proptest::collection::vec(rack, 0..9);
    let known = proptest::collection::btree_map(1_u128..4, topic, 0..4);
    (members, known).prop_map(move |(mut members, known)| {
        let mut ids = BTreeSet::new();
        members.retain(|member| ids.insert(member.id));
        let read = members[0].topics.clone();
        for member in &mut members {
            if matches!(reading, Reading::Alike) {
                member.topics.clone_from(&read);
            }
        }
        let mut input = AssignInput::new(members);
        let holders = holders(&input);
        for member in &mut input.members {
            if matches!(promised, Promised::Held) {
                let held = holders.iter().filter(|(_, holder)| **holder == member.id);
                member.claims = held.map(|(place, _)| *place).collect();
                member.targets = member.claims.clone();
            }
        }
        input.racks = known.into_iter().map(|(n, it)| (topic_id(n), it)).collect();
        input
    })
}

/// Nobody owns what it does not read, and all that is read has an owner.
fn check_owners(input: &AssignInput, assignment: &Assignment) -> Result<(), TestCaseError> {
    for place in input.partitions() {
        prop_assert!(
            assignment.owners.contains_key(&place),
            "{place:?} has no owner"
        );
    }
    for (place, owner) in &assignment.owners {
        let owner = input.members.iter().find(|member| member.id == *owner);
        prop_assert!(owner.is_some_and(|owner| owner.reads(*place)), "{place:?}");
    }
    Ok(())
}

/// No chain of moves would make it more even: what can be reached by giving partitions away never has two
/// fewer.
fn check_even(input: &AssignInput, assignment: &Assignment) -> Result<(), TestCaseError> {
    let members = &input.members;
    let gives = |from: &AssignMember, to: &AssignMember| {
        assignment.of(from.id).any(|place| to.reads(place))
    };
    for start in members {
        let mut reached = vec![start];
        let mut at = 0;
        while at < reached.len() {
            let from = reached[at];
            at += 1;
            for to in members {
                if gives(from, to) && reached.iter().all(|it| it.id != to.id) {
                    reached.push(to);
                }
            }
        }
        for end in reached {
            prop_assert!(load(assignment, start) < load(assignment, end) + 2);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn assignment_of_any_input_is_whole_even_and_the_same_in_any_order(
        input in some_input(Reading::Differently, Promised::Anything, true),
        turn in 0_usize..8,
    ) {
        let assignment = assign(&input);
        check_owners(&input, &assignment)?;
        check_even(&input, &assignment)?;
        let mut turned = input.clone();
        turned.members.rotate_left(turn % input.members.len());
        prop_assert_eq!(&assign(&turned), &assignment);
        turned.members.reverse();
        for member in &mut turned.members {
            member.claims.reverse();
            member.targets.reverse();
        }
        prop_assert_eq!(&assign(&turned), &assignment);
    }

    #[test]
    fn assignment_computed_again_moves_nothing_whatever_hands_claims_are_in(
        input in some_input(Reading::Differently, Promised::Anything, true),
    ) {
        let assignment = assign(&input);
        let mut again = input.clone();
        for member in &mut again.members {
            member.targets = assignment.of(member.id).collect();
        }
        prop_assert_eq!(&assign(&again), &assignment);
        prop_assert_eq!(&assign(&settled(input, &assignment)), &assignment);
    }

    #[test]
    fn members_that_read_the_same_have_at_most_one_more_and_as_little_moves_as_can(
        input in some_input(Reading::Alike, Promised::Held, true),
    ) {
        let assignment = assign(&input);
        let loads: Vec<usize> = input.members.iter().map(|it| load(&assignment, it)).collect();
        let (least, most) = (loads.iter().min().unwrap(), loads.iter().max().unwrap());
        prop_assert!(most - least <= 1, "{loads:?}");
        prop_assert_eq!(kept(&input, &assignment), most_kept(&input));
    }

    #[test]
    fn member_that_joins_or_leaves_moves_no_more_than_it_must(
        count in 1_u128..9,
        topics in proptest::collection::btree_map(1_u128..4, 0_u32..12, 1..4),
        leaves in 0_usize..9,
    ) {
        let topics: Vec<(u128, u32)> = topics.into_iter().collect();
        let mut input = members(count, &topics);
        let all = input.partitions().count();
        let before = assign(&input);
        input = settled(input, &before);
        let mut joined = input.clone();
        joined.members.extend(members(count + 1, &topics).members.pop());
        let after = assign(&joined);
        let share = load(&after, &joined.members[usize::try_from(count).unwrap()]);
        prop_assert_eq!(kept(&joined, &after), all - share, "only what the new one gets");
        prop_assert!(share <= all / joined.members.len() + 1);
        let gone = input.members.remove(leaves % input.members.len());
        if !input.members.is_empty() {
            let after = assign(&input);
            prop_assert_eq!(kept(&input, &after), all - gone.claims.len(), "only what it had");
        }
    }

    #[test]
    fn racks_change_neither_what_stays_nor_how_even_it_is(
        input in some_input(Reading::Differently, Promised::Anything, true),
    ) {
        let assignment = assign(&input);
        let mut blind = input.clone();
        blind.racks.clear();
        let without = assign(&blind);
        let loads = |assignment: &Assignment| {
            let mut loads: Vec<_> = input.members.iter().map(|it| load(assignment, it)).collect();
            loads.sort_unstable();
            loads
        };
        prop_assert_eq!(loads(&assignment), loads(&without));
    }

    #[test]
    fn racks_cost_no_move_where_members_read_the_same(
        input in some_input(Reading::Alike, Promised::Held, true),
    ) {
        let near = |assignment: &Assignment| {
            let is_near = |(place, owner): &(&PartitionId, &MemberId)| {
                let owner = input.members.iter().find(|member| member.id == **owner).unwrap();
                let racks = input.racks.get(&place.topic);
                let racks = racks.and_then(|it| it.get(usize::try_from(place.partition).unwrap()));
                racks.is_some_and(|racks| racks.contains(&owner.rack))
            };
            assignment.owners.iter().filter(is_near).count()
        };
        let assignment = assign(&input);
        prop_assert_eq!(kept(&input, &assignment), most_kept(&input));
        let mut blind = input.clone();
        blind.racks.clear();
        // Without bonds there is nothing that racks could have to stand back for.
        for member in &mut blind.members {
            member.claims.clear();
            member.targets.clear();
        }
        let mut free = blind.clone();
        free.racks.clone_from(&input.racks);
        prop_assert!(near(&assign(&free)) >= near(&assign(&blind)));
    }

    #[test]
    fn static_member_gives_only_where_no_other_has_more(
        input in some_input(Reading::Alike, Promised::Held, false),
    ) {
        let assignment = assign(&input);
        for member in input.members.iter().filter(|member| member.instance.is_some()) {
            let loses = member.claims.iter().any(|it| assignment.owners.get(it) != Some(&member.id));
            let has = load(&assignment, member);
            let more = |it: &&AssignMember| it.instance.is_none() && load(&assignment, it) > has;
            prop_assert!(!loses || !input.members.iter().any(|it| more(&it)));
        }
    }
}

#[test]
fn partitions_go_to_members_near_them_where_loads_allow() {
    let mut input = members(3, &[(1, 6)]);
    for (member, rack) in input.members.iter_mut().zip(["a", "b", "c"]) {
        member.rack = rack.to_owned();
    }
    let racks = ["c", "c", "b", "a", "b", "a"];
    let racks = racks.map(|rack| BTreeSet::from([rack.to_owned()]));
    input.racks.insert(topic_id(1), racks.to_vec());
    let assignment = assign(&input);
    let of = |n| -> Vec<u32> { assignment.of(member_id(n)).map(|it| it.partition).collect() };
    assert_eq!((of(1), of(2), of(3)), (vec![3, 5], vec![2, 4], vec![0, 1]));
}

#[test]
fn rack_takes_nothing_from_who_has_it() {
    let mut input = members(2, &[(1, 4)]);
    let before = assign(&input);
    input = settled(input, &before);
    for (member, rack) in input.members.iter_mut().zip(["a", "b"]) {
        member.rack = rack.to_owned();
    }
    // Each has what lies near the other.
    let racks = input.partitions().map(|place| {
        let other = if before.owners[&place] == member_id(1) {
            "b"
        } else {
            "a"
        };
        BTreeSet::from([other.to_owned()])
    });
    input.racks = [(topic_id(1), racks.collect())].into();
    assert_eq!(assign(&input), before);
}

#[test]
fn group_that_is_on_its_way_to_an_assignment_takes_another_member_in_without_turning_back() {
    // 1 still holds all, 2 is to get half of it, 3 joins.
    let mut input = members(3, &[(1, 6)]);
    input.members[0].claims = (0..6).map(|n| partition(1, n)).collect();
    input.members[0].targets = (0..3).map(|n| partition(1, n)).collect();
    input.members[1].targets = (3..6).map(|n| partition(1, n)).collect();
    let assignment = assign(&input);
    let first: Vec<_> = assignment.of(member_id(1)).collect();
    let second: Vec<_> = assignment.of(member_id(2)).collect();
    assert!(
        first.iter().all(|it| input.members[0].targets.contains(it)),
        "{assignment:?}"
    );
    assert!(
        second
            .iter()
            .all(|it| input.members[1].targets.contains(it)),
        "{assignment:?}"
    );
}

#[test]
fn members_that_read_different_topics_are_as_even_as_can_be() {
    // 1 reads both, 2 only the small one: a chain through 3.
    let mut input = members(3, &[]);
    let read = [&[(1, 4), (2, 2)][..], &[(2, 2)], &[(1, 4)]];
    for (member, topics) in input.members.iter_mut().zip(read) {
        member.topics = topics.iter().map(|&(n, it)| (topic_id(n), it)).collect();
    }
    let assignment = assign(&input);
    let loads: Vec<_> = input
        .members
        .iter()
        .map(|it| load(&assignment, it))
        .collect();
    assert_eq!(loads, [2, 2, 2]);
}

#[test]
fn member_that_does_not_know_of_new_partitions_yet_does_not_get_them() {
    let mut input = members(2, &[(1, 6)]);
    input.members[0].topics.insert(topic_id(1), 2);
    let assignment = assign(&input);
    assert_eq!(
        assignment.of(member_id(1)).collect::<Vec<_>>(),
        [partition(1, 0), partition(1, 1)]
    );
    assert_eq!(assignment.of(member_id(2)).count(), 4);
}

#[test]
fn group_of_nobody_and_members_that_read_nothing_get_nothing() {
    assert!(assign(&AssignInput::default()).owners.is_empty());
    assert!(assign(&members(3, &[])).owners.is_empty());
    assert!(assign(&members(3, &[(1, 0)])).owners.is_empty());
}

#[test]
fn topic_that_a_member_calls_endless_is_cut() {
    let mut input = members(1, &[(1, u32::MAX), (2, 5)]);
    input.members[0].claims = vec![partition(1, u32::MAX - 1), partition(2, 4)];
    let table = super::board::Table::new(&input);
    assert!(table.places() <= 1_000_000);
}
