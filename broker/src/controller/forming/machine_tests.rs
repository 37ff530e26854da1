//! The sequences that S21 names, and random ones, over a model network: brokers are state
//! machines, a crash keeps what was stored, an address may answer or not.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

/// A broker at an address (its position). Wiping it changes its id.
struct Broker {
    id: u64,
    seeds: Vec<usize>,
    expect: u32,
    up: bool,
    forming: Forming,
}

struct World {
    brokers: Vec<Broker>,
    next_cluster: u128,
    next_id: u64,
    /// Every cluster that was ever founded: the founder stored `Formed`.
    founded: BTreeSet<ClusterId>,
    last: Vec<Option<Step>>,
}

fn address(id: u64, at: usize) -> BrokerAddress {
    BrokerAddress {
        broker_id: id,
        peer_address: format!("host{at}:7700"),
        boot: 1,
        process_id: id,
        ..BrokerAddress::default()
    }
}

impl World {
    fn new(config: &[(&[usize], u32)]) -> Self {
        let brokers: Vec<_> = config
            .iter()
            .enumerate()
            .map(|(at, (seeds, expect))| {
                let id = 10 + u64::try_from(at).unwrap();
                Broker {
                    id,
                    seeds: seeds.to_vec(),
                    expect: *expect,
                    up: true,
                    forming: Forming::new(
                        address(id, at),
                        !seeds.is_empty(),
                        *expect,
                        Durable::Empty,
                    ),
                }
            })
            .collect();
        Self {
            last: brokers.iter().map(|_| None).collect(),
            brokers,
            next_cluster: 1000,
            next_id: 100,
            founded: BTreeSet::new(),
        }
    }

    fn restart(&mut self, at: usize) {
        let broker = &mut self.brokers[at];
        broker.up = true;
        broker.forming = Forming::new(
            address(broker.id, at),
            !broker.seeds.is_empty(),
            broker.expect,
            broker.forming.durable().clone(),
        );
    }

    fn wipe(&mut self, at: usize) {
        self.next_id += 1;
        let broker = &mut self.brokers[at];
        broker.id = self.next_id;
        broker.forming = Forming::new(
            address(broker.id, at),
            !broker.seeds.is_empty(),
            broker.expect,
            Durable::Empty,
        );
    }

    /// What `at` would see of the world now.
    fn probe(&self, at: usize) -> Round {
        let me = &self.brokers[at];
        let mut round = Round {
            began: me.forming.promises_given(),
            ..Round::default()
        };
        let mut targets: BTreeSet<usize> = me.seeds.iter().copied().collect();
        if let Durable::Promised(set) = me.forming.durable() {
            for member in &set.brokers {
                targets.extend(
                    (0..self.brokers.len())
                        .filter(|n| format!("host{n}:7700") == member.peer_address),
                );
            }
        }
        for target in targets {
            let other = &self.brokers[target];
            if !other.up {
                if me.seeds.contains(&target) {
                    round.unreachable_seeds.push(format!("host{target}:7700"));
                }
                continue;
            }
            if other.id == me.id {
                continue;
            }
            let state = match other.forming.durable() {
                Durable::Empty => PeerState::Empty,
                Durable::Promised(set) => PeerState::Promised(set.clone()),
                Durable::Formed(formed) => PeerState::Formed(formed.cluster),
            };
            round.answers.insert(
                BrokerId(other.id),
                Answer {
                    broker: address(other.id, target),
                    expect: other.forming.expect(),
                    state,
                },
            );
        }
        round
    }

    fn store(&mut self, at: usize, durable: Durable) {
        self.brokers[at].forming.stored(durable);
    }

    fn decide(&mut self, at: usize, round: Round) {
        self.next_cluster += 1;
        let fresh = ClusterId(uuid::Uuid::from_u128(self.next_cluster));
        let step = self.brokers[at].forming.on_round(round, fresh);
        self.last[at] = Some(step.clone());
        self.carry_out(at, step);
    }

    fn carry_out(&mut self, at: usize, step: Step) {
        match step {
            Step::Wait(_) => {}
            Step::Propose(set) => self.store(at, Durable::Promised(set)),
            Step::Collect(set) => {
                if self.collect(at, &set, usize::MAX) {
                    let done = self.brokers[at].forming.complete(&set);
                    self.founded.insert(cluster_of(&set).unwrap());
                    self.carry_out(at, done);
                }
            }
            Step::Release(_) => self.store(at, Durable::Empty),
            Step::Join(members) => {
                let cluster = self
                    .brokers
                    .iter()
                    .find(|b| b.id == members[0].broker_id)
                    .and_then(|b| b.forming.durable().cluster())
                    .unwrap();
                self.store(
                    at,
                    Durable::Formed(Formed {
                        cluster,
                        replica: ReplicaId(99),
                        founding: None,
                    }),
                );
            }
            Step::Become(formed) => self.store(at, Durable::Formed(formed)),
        }
    }

    /// Asks for promises, of at most `limit` members (a crash of the founder in between).
    fn collect(&mut self, at: usize, set: &FoundingSet, limit: usize) -> bool {
        let me = self.brokers[at].id;
        let mut given = 1;
        for member in set.brokers.iter().filter(|b| b.broker_id != me).take(limit) {
            let Some(target) =
                (0..self.brokers.len()).find(|n| self.brokers[*n].id == member.broker_id)
            else {
                continue;
            };
            if !self.brokers[target].up {
                continue;
            }
            match self.brokers[target].forming.on_promise(set) {
                PromiseAnswer::Given => given += 1,
                PromiseAnswer::Store(set) => {
                    self.store(target, Durable::Promised(set));
                    given += 1;
                }
                PromiseAnswer::Refused { reason, conflict } => {
                    if conflict {
                        self.brokers[at].forming.conflicted(set, reason);
                    }
                }
            }
        }
        given == set.brokers.len()
    }

    fn round(&mut self, at: usize) {
        if self.brokers[at].up {
            let round = self.probe(at);
            self.decide(at, round);
        }
    }

    fn rounds(&mut self, n: usize) {
        for _ in 0..n {
            for at in 0..self.brokers.len() {
                self.round(at);
            }
        }
    }

    fn cluster(&self, at: usize) -> Option<ClusterId> {
        self.brokers[at].forming.durable().cluster()
    }

    fn assert_one_cluster_of_all(&self) {
        let clusters: BTreeSet<_> = (0..self.brokers.len()).map(|at| self.cluster(at)).collect();
        assert_eq!(clusters.len(), 1, "{clusters:?} {:?}", self.last);
        assert!(!clusters.contains(&None), "{:?}", self.last);
        assert_eq!(self.founded.len(), 1);
    }

    fn assert_none_formed(&self) {
        assert!((0..self.brokers.len()).all(|at| self.cluster(at).is_none()));
    }
}

fn three() -> World {
    World::new(&[(&[0, 1, 2], 3), (&[0, 1, 2], 3), (&[0, 1, 2], 3)])
}

#[test]
fn broker_without_seeds_is_a_cluster_of_one() {
    let mut world = World::new(&[(&[], 0)]);
    world.rounds(3);
    let Durable::Formed(formed) = world.brokers[0].forming.durable() else {
        panic!("{:?}", world.last);
    };
    assert_eq!(formed.replica, ReplicaId(1));
    assert_eq!(formed.founding.as_ref().unwrap().brokers.len(), 1);
}

#[test]
fn three_with_expect_three_form_one_cluster_with_ranks() {
    let mut world = three();
    world.rounds(5);
    world.assert_one_cluster_of_all();
    for (at, rank) in [(0, 1), (1, 2), (2, 3)] {
        let Durable::Formed(formed) = world.brokers[at].forming.durable() else {
            panic!()
        };
        assert_eq!(formed.replica, ReplicaId(rank));
    }
}

#[test]
fn s21_four_with_expect_three_make_one_cluster() {
    let all: &[usize] = &[0, 1, 2, 3];
    let mut world = World::new(&[(all, 3), (all, 3), (all, 3), (all, 3)]);
    world.rounds(6);
    world.assert_one_cluster_of_all();
}

#[test]
fn s21_four_that_disagree_on_the_seeds_never_make_two_clusters() {
    let mut world = World::new(&[
        (&[0, 1, 2], 3),
        (&[0, 1, 2], 3),
        (&[1, 2, 3], 3),
        (&[1, 2, 3], 3),
    ]);
    world.rounds(10);
    assert!(world.founded.len() <= 1, "{:?}", world.founded);
}

#[test]
fn s21_three_wiped_ones_do_not_form_beside_an_unreachable_old_one() {
    let all: &[usize] = &[0, 1, 2, 3];
    let mut world = World::new(&[(all, 3), (all, 3), (all, 3), (all, 3)]);
    world.rounds(6);
    let old = world.cluster(3).unwrap();
    for at in 0..3 {
        world.wipe(at);
    }
    world.brokers[3].up = false;
    world.rounds(10);
    assert!((0..3).all(|at| world.cluster(at).is_none()));
    let Some(Step::Wait(reason)) = &world.last[0] else {
        panic!("{:?}", world.last)
    };
    assert!(reason.contains("host3:7700"), "{reason}");
    // It comes back: they join it.
    world.restart(3);
    world.rounds(2);
    assert!((0..3).all(|at| world.cluster(at) == Some(old)));
    assert_eq!(world.founded.len(), 1);
}

#[test]
fn s21_unreachable_seed_of_a_member_blocks_the_founder_too() {
    // Only broker 2 knows that there is an old broker 3.
    let mut world = World::new(&[
        (&[0, 1, 2], 3),
        (&[0, 1, 2], 3),
        (&[0, 1, 2, 3], 3),
        (&[3], 3),
    ]);
    world.brokers[3].up = false;
    world.rounds(10);
    world.assert_none_formed();
}

#[test]
fn s21_founder_crash_between_promise_and_found_resumes_the_same_set() {
    let mut world = three();
    // Probes of all, then the founder proposes and gets one promise of two, then crashes.
    world.rounds(1);
    let Durable::Promised(set) = world.brokers[0].forming.durable().clone() else {
        panic!("{:?}", world.last)
    };
    assert!(!world.collect(0, &set, 1));
    world.brokers[0].up = false;
    world.rounds(5);
    world.assert_none_formed();
    world.restart(0);
    world.rounds(5);
    world.assert_one_cluster_of_all();
    assert!(world.founded.contains(&cluster_of(&set).unwrap()));
}

#[test]
fn s21_member_crash_after_its_promise_keeps_it() {
    let mut world = three();
    world.rounds(1);
    let Durable::Promised(set) = world.brokers[0].forming.durable().clone() else {
        panic!()
    };
    assert!(!world.collect(0, &set, 1));
    world.restart(1);
    assert_eq!(
        world.brokers[1].forming.on_promise(&set),
        PromiseAnswer::Given
    );
    let other = FoundingSet {
        cluster_id: ClusterId(uuid::Uuid::from_u128(5)).to_wire(),
        ..set
    };
    assert!(matches!(
        world.brokers[1].forming.on_promise(&other),
        PromiseAnswer::Refused { conflict: true, .. }
    ));
}

#[test]
fn s21_founder_crash_before_telling_anyone_is_found_out_by_probing() {
    let mut world = three();
    world.rounds(1);
    let Durable::Promised(set) = world.brokers[0].forming.durable().clone() else {
        panic!()
    };
    assert!(world.collect(0, &set, usize::MAX));
    // It stores that it is formed, and dies before any Found.
    let done = world.brokers[0].forming.complete(&set);
    world.founded.insert(cluster_of(&set).unwrap());
    world.carry_out(0, done);
    world.brokers[0].up = false;
    world.rounds(5);
    assert!(world.cluster(1).is_none() && world.cluster(2).is_none());
    world.restart(0);
    world.rounds(2);
    world.assert_one_cluster_of_all();
}

#[test]
fn s21_wiped_founder_does_not_free_its_members() {
    let mut world = three();
    world.rounds(1);
    let Durable::Promised(set) = world.brokers[0].forming.durable().clone() else {
        panic!()
    };
    assert!(world.collect(0, &set, usize::MAX));
    world.wipe(0);
    world.rounds(5);
    // It might have founded the cluster before: nobody may found another.
    world.assert_none_formed();
    let Some(Step::Wait(reason)) = &world.last[1] else {
        panic!()
    };
    assert!(reason.contains("empty this data directory"), "{reason}");
    // The operator does so.
    world.wipe(1);
    world.wipe(2);
    world.rounds(6);
    world.assert_one_cluster_of_all();
}

#[test]
fn s21_wiped_member_makes_the_founder_propose_anew() {
    let mut world = three();
    world.rounds(1);
    let Durable::Promised(set) = world.brokers[0].forming.durable().clone() else {
        panic!()
    };
    assert!(!world.collect(0, &set, 1));
    world.wipe(2);
    world.rounds(8);
    world.assert_one_cluster_of_all();
    assert!(!world.founded.contains(&cluster_of(&set).unwrap()));
}

#[test]
fn s21_founder_gives_up_a_set_that_mended_seeds_no_longer_show() {
    let all: &[usize] = &[0, 1, 2, 3];
    // Broker 1 has the lowest id that broker 0's list lacks.
    let mut world = World::new(&[(&[0, 2, 3], 3), (all, 3), (all, 3), (all, 3)]);
    world.rounds(10);
    world.assert_none_formed();
    assert!(matches!(
        world.brokers[0].forming.durable(),
        Durable::Promised(_)
    ));
    for at in 0..4 {
        world.brokers[at].seeds = all.to_vec();
        world.restart(at);
    }
    world.rounds(10);
    world.assert_one_cluster_of_all();
}

#[test]
fn s21_two_founders_with_a_set_each_leave_one_when_they_see_each_other() {
    let all: &[usize] = &[0, 1, 2, 3];
    let mut world = World::new(&[(&[0, 2, 3], 3), (&[1, 2, 3], 3), (all, 3), (all, 3)]);
    world.rounds(10);
    world.assert_none_formed();
    for founder in 0..2 {
        let durable = world.brokers[founder].forming.durable();
        assert!(matches!(durable, Durable::Promised(_)), "{durable:?}");
    }
    for at in 0..4 {
        world.brokers[at].seeds = all.to_vec();
        world.restart(at);
    }
    world.rounds(10);
    world.assert_one_cluster_of_all();
}

#[test]
fn stale_probe_does_not_release_a_promise() {
    let mut world = three();
    world.brokers[0].forming.last_round = None;
    // Broker 1 asks everybody while the founder is still empty...
    let stale = world.probe(1);
    world.rounds(1);
    let Durable::Promised(set) = world.brokers[0].forming.durable().clone() else {
        panic!()
    };
    world.collect(0, &set, usize::MAX);
    assert!(matches!(
        world.brokers[1].forming.durable(),
        Durable::Promised(_)
    ));
    // ...and reads the answers after it has promised.
    world.decide(1, stale);
    assert!(matches!(
        world.brokers[1].forming.durable(),
        Durable::Promised(_)
    ));
}

#[test]
fn seeds_with_self_and_duplicates_count_each_broker_once() {
    let mut world = World::new(&[(&[0, 0, 1, 2, 1], 3), (&[2, 2, 0], 3), (&[1, 0, 2, 2], 3)]);
    world.rounds(5);
    world.assert_one_cluster_of_all();
}

#[test]
fn broker_without_expect_only_joins() {
    let all: &[usize] = &[0, 1, 2];
    let mut world = World::new(&[(all, 2), (all, 2), (all, 0)]);
    world.rounds(1);
    assert!(world.cluster(2).is_none());
    world.rounds(5);
    world.assert_one_cluster_of_all();
    let Durable::Formed(formed) = world.brokers[2].forming.durable() else {
        panic!()
    };
    assert!(formed.founding.is_none());
}

#[test]
fn different_expectations_wait_for_the_operator() {
    let all: &[usize] = &[0, 1, 2];
    let mut world = World::new(&[(all, 3), (all, 3), (all, 5)]);
    world.rounds(8);
    world.assert_none_formed();
}

#[test]
fn found_without_promise_is_refused() {
    let world = three();
    let set = FoundingSet {
        cluster_id: ClusterId(uuid::Uuid::from_u128(5)).to_wire(),
        brokers: vec![address(10, 0)],
    };
    assert!(world.brokers[1].forming.on_found(&set).is_err());
    // And a promise to a set without this broker, or before it has asked its seeds, as well.
    assert!(matches!(
        world.brokers[1].forming.on_promise(&set),
        PromiseAnswer::Refused {
            conflict: false,
            ..
        }
    ));
}

#[test]
fn record_round_trips_and_nonsense_is_refused() {
    let set = FoundingSet {
        cluster_id: ClusterId(uuid::Uuid::from_u128(5)).to_wire(),
        brokers: vec![address(10, 0)],
    };
    for durable in [
        Durable::Empty,
        Durable::Promised(set.clone()),
        Durable::Formed(Formed {
            cluster: cluster_of(&set).unwrap(),
            replica: ReplicaId(4),
            founding: None,
        }),
    ] {
        assert_eq!(Durable::from_record(durable.to_record()), Ok(durable));
    }
    assert!(Durable::from_record(FormingRecord::default()).is_err());
    assert!(
        Durable::from_record(FormingRecord {
            state: FormState::Promised.into(),
            ..FormingRecord::default()
        })
        .is_err()
    );
}

#[derive(Clone, Debug)]
enum Event {
    Round(usize),
    /// A round whose answers are read only after the other events in between.
    Slow(usize),
    Late,
    Crash(usize),
    Restart(usize),
    Found(usize),
}

fn event(n: usize) -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (0..n).prop_map(Event::Round),
        2 => (0..n).prop_map(Event::Slow),
        2 => Just(Event::Late),
        1 => (0..n).prop_map(Event::Crash),
        2 => (0..n).prop_map(Event::Restart),
        1 => (0..n).prop_map(Event::Found),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// S21: whatever crashes, is late or disagrees, at most one cluster is ever founded.
    #[test]
    fn at_most_one_cluster_is_founded(
        seeds in proptest::collection::vec(proptest::collection::btree_set(0..4usize, 1..5), 4),
        expect in proptest::collection::vec(prop_oneof![4 => Just(3u32), 1 => Just(2), 1 => Just(0)], 4),
        events in proptest::collection::vec(event(4), 1..120),
    ) {
        // Sets that have a broker in common never both come about; sets without one can, if the
        // operator wrote two clusters' worth of seeds. Expecting three or two of four that all
        // know each other leaves no such pair when every list names everybody.
        let everybody: Vec<usize> = (0..4).collect();
        let lists: Vec<Vec<usize>> = seeds
            .iter()
            .enumerate()
            .map(|(at, list)| if expect[at] == 2 { everybody.clone() } else { list.iter().copied().collect() })
            .collect();
        let config: Vec<(&[usize], u32)> =
            lists.iter().map(Vec::as_slice).zip(expect.iter().copied()).collect();
        let mut world = World::new(&config);
        let mut late: Option<(usize, Round, u64)> = None;
        for event in events {
            match event {
                Event::Round(at) => world.round(at),
                Event::Slow(at) if world.brokers[at].up => {
                    late = Some((at, world.probe(at), world.brokers[at].id));
                }
                Event::Late => {
                    if let Some((at, round, _)) = late.take()
                        && world.brokers[at].up
                    {
                        world.decide(at, round);
                    }
                }
                // Pending answers die with the process.
                Event::Crash(at) => {
                    world.brokers[at].up = false;
                    late = late.filter(|(of, ..)| *of != at);
                }
                Event::Restart(at) => {
                    world.restart(at);
                    late = late.filter(|(of, ..)| *of != at);
                }
                Event::Found(at) if world.brokers[at].up => {
                    let sets: Vec<FoundingSet> = world
                        .brokers
                        .iter()
                        .filter_map(|b| match b.forming.durable() {
                            Durable::Formed(formed) => formed.founding.clone(),
                            _ => None,
                        })
                        .collect();
                    for set in sets {
                        if let Ok(formed) = world.brokers[at].forming.on_found(&set) {
                            world.store(at, Durable::Formed(formed));
                        }
                    }
                }
                Event::Slow(_) | Event::Found(_) => {}
            }
            prop_assert!(world.founded.len() <= 1, "{:?}", world.founded);
        }
    }
}
