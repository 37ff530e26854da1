//! Sessions under simulated time: examples, then random schedules against what must always hold.

use proptest::prelude::*;

use super::*;
use crate::groups::coordinator::steady::TICK;

const TIMEOUT: Duration = Duration::from_secs(10);

/// A group `g` whose applied state and clock the test moves.
struct Bench {
    sessions: Sessions,
    start: Instant,
    now: Instant,
    picture: Picture,
}

fn name() -> Name {
    "g".into()
}

fn applicant(id: MemberId, epoch: u64, instance: &str) -> Applicant {
    Applicant {
        group: name(),
        id,
        epoch,
        instance: instance.into(),
    }
}

impl Bench {
    fn new() -> Self {
        let start = Instant::now();
        Self {
            sessions: Sessions::new(start),
            start,
            now: start,
            picture: Picture::default(),
        }
    }

    fn sync(&mut self) -> Synced {
        self.sessions.sync(self.now, &name(), Some(&self.picture))
    }

    /// As if the join had been applied.
    fn add(&mut self, id: MemberId, epoch: u64, instance: &str) -> Synced {
        let members = &mut self.picture.members;
        members.retain(|member| member.id != id);
        members.push(Standing {
            id,
            epoch,
            instance: instance.into(),
            timeout: TIMEOUT,
        });
        self.picture.generation += 1;
        self.sync()
    }

    fn remove(&mut self, id: MemberId) -> Synced {
        self.picture.members.retain(|member| member.id != id);
        self.picture.generation += 1;
        self.sync()
    }

    fn decide(&mut self, applicant: &Applicant) -> Decision {
        self.sessions.decide(self.now, applicant)
    }

    /// Joins from end to end.
    fn member(&mut self, instance: &str) -> (MemberId, SessionId) {
        let id = MemberId::random();
        let applicant = applicant(id, 1, instance);
        assert_eq!(
            self.decide(&applicant),
            Decision::Propose { replaces: None }
        );
        self.add(id, 1, instance);
        self.sessions.join_ended(self.now, &applicant, None);
        let (session, displaced) = self.sessions.attach(self.now, &applicant).unwrap();
        assert_eq!(displaced, None);
        (id, session)
    }

    /// Ticks on time for so long; what fell due.
    fn run(&mut self, time: Duration) -> Due {
        let end = self.now + time;
        let mut all = Due::default();
        while self.now < end {
            self.now += TICK;
            let due = self.sessions.tick(self.now);
            all.expired.extend(due.expired);
            all.turns.extend(due.turns);
            all.asked.extend(due.asked);
        }
        all
    }

    fn beat(&mut self, session: SessionId, sequence: u64) -> bool {
        self.sessions.heartbeat(self.now, session, sequence)
    }

    fn expired(&self, members: &[MemberId]) -> Vec<(Name, Vec<(MemberId, u64)>)> {
        vec![(name(), members.iter().map(|id| (*id, 1)).collect())]
    }
}

#[test]
fn silent_member_expires_after_its_timeout_and_a_beating_one_does_not() {
    let mut bench = Bench::new();
    let (silent, _) = bench.member("");
    let (_, beating) = bench.member("");
    for sequence in 1..=9 {
        assert!(bench.run(Duration::from_secs(1)).expired.is_empty());
        assert!(bench.beat(beating, sequence));
    }
    assert_eq!(
        bench.run(Duration::from_secs(2)).expired,
        bench.expired(&[silent])
    );
    assert!(bench.now >= bench.start + TIMEOUT);
    // Once only, until the proposal has come to its end.
    assert!(bench.run(Duration::from_secs(5)).expired.is_empty());
    bench
        .sessions
        .expiry_ended(bench.now, &name(), &[(silent, 1)]);
    assert_eq!(
        bench.run(Duration::from_secs(2)).expired,
        bench.expired(&[silent]),
        "it was not applied"
    );
    let synced = bench.remove(silent);
    assert_eq!(synced.ended.len(), 1, "its stream ends");
}

#[test]
fn s26_new_coordinator_expires_nobody_before_a_full_timeout() {
    let mut bench = Bench::new();
    let (there, gone) = (MemberId::random(), MemberId::random());
    for id in [there, gone] {
        bench.picture.members.push(Standing {
            id,
            epoch: 1,
            instance: "".into(),
            timeout: TIMEOUT,
        });
    }
    bench.sync();
    assert!(bench.run(TIMEOUT - TICK).expired.is_empty());
    assert_eq!(bench.decide(&applicant(there, 1, "")), Decision::Resume);
    assert_eq!(bench.run(TICK).expired, bench.expired(&[gone]));
    assert!(bench.run(TIMEOUT - 2 * TICK).expired.is_empty());
}

#[test]
fn late_tick_moves_all_deadlines_by_its_lateness() {
    let mut bench = Bench::new();
    let members: Vec<_> = (0..3).map(|_| bench.member("")).collect();
    bench.run(Duration::from_secs(4));
    // Frozen for far longer than a session lasts.
    bench.now += Duration::from_secs(60);
    assert!(bench.run(Duration::from_secs(5)).expired.is_empty());
    for (_, session) in &members[1..] {
        assert!(bench.beat(*session, 1));
    }
    let expired = bench.run(Duration::from_secs(2)).expired;
    assert_eq!(expired, bench.expired(&[members[0].0]));
}

#[test]
fn s26_heartbeats_leave_with_the_round_that_begins_after_them() {
    let mut bench = Bench::new();
    let (_, session) = bench.member("");
    let first = bench.sessions.begin_round();
    assert_eq!(first.joined, [session]);
    assert!(first.heartbeats.is_empty());
    assert!(bench.beat(session, 1) && bench.beat(session, 3) && bench.beat(session, 2));
    assert!(bench.sessions.wants_round());
    assert_eq!(bench.sessions.begin_round().heartbeats, [(session, 3)]);
    assert!(!bench.sessions.wants_round());
    bench.beat(session, 4);
    bench.sessions.detach(bench.now, session);
    assert_eq!(bench.sessions.begin_round(), Round::default());
    assert!(!bench.beat(session, 5));
}

#[test]
fn broken_stream_closes_no_session_and_another_stream_goes_on() {
    let mut bench = Bench::new();
    let (id, first) = bench.member("a");
    bench.sessions.detach(bench.now, first);
    bench.run(Duration::from_secs(9));
    let same = applicant(id, 1, "a");
    assert_eq!(bench.decide(&same), Decision::Resume);
    let (second, displaced) = bench.sessions.attach(bench.now, &same).unwrap();
    assert_eq!(displaced, None);
    let (_, displaced) = bench.sessions.attach(bench.now, &same).unwrap();
    assert_eq!(displaced, Some(second));
    // The one that was displaced goes late.
    bench.sessions.detach(bench.now, second);
    assert_eq!(bench.sessions.len(), 1);
    assert!(bench.run(Duration::from_secs(9)).expired.is_empty());
}

#[test]
fn newer_epoch_of_a_member_ends_the_session_of_the_older() {
    let mut bench = Bench::new();
    let (id, session) = bench.member("");
    assert_eq!(
        bench.decide(&applicant(id, 2, "")),
        Decision::Propose { replaces: None }
    );
    assert_eq!(bench.add(id, 2, "").ended, [session]);
    assert_eq!(bench.decide(&applicant(id, 1, "")), Decision::Stale);
    assert!(
        bench
            .sessions
            .attach(bench.now, &applicant(id, 1, ""))
            .is_none()
    );
    assert!(
        bench
            .sessions
            .attach(bench.now, &applicant(id, 2, ""))
            .is_some()
    );
}

#[test]
fn s27_join_under_a_stable_name_waits_until_the_session_is_closed() {
    let mut bench = Bench::new();
    let (old, session) = bench.member("a");
    let new = applicant(MemberId::random(), 1, "a");
    let Decision::Wait { waiter, .. } = bench.decide(&new) else {
        panic!("the name is taken");
    };
    // A broken stream is no close.
    bench.sessions.detach(bench.now, session);
    assert!(bench.run(Duration::from_secs(5)).turns.is_empty());
    let same = applicant(old, 1, "a");
    let (session, _) = bench.sessions.attach(bench.now, &same).unwrap();
    assert_eq!(bench.sessions.close(bench.now, session), Some(waiter));
    let takeover = Decision::Propose {
        replaces: Some((old, 1)),
    };
    assert_eq!(bench.decide(&new), takeover);
    // While it is under way nobody else gets the name, and the old one neither goes on nor expires.
    let third = applicant(MemberId::random(), 1, "a");
    assert_eq!(bench.decide(&third), Decision::Busy);
    assert_eq!(bench.decide(&same), Decision::Busy);
    assert!(bench.run(2 * TIMEOUT).expired.is_empty());
    bench.picture.members.clear();
    bench.add(new.id, 1, "a");
    bench.sessions.join_ended(bench.now, &new, Some((old, 1)));
    assert!(matches!(bench.decide(&third), Decision::Wait { .. }));
    assert!(matches!(bench.decide(&same), Decision::Wait { .. }));
}

#[test]
fn s27_join_under_a_stable_name_takes_over_when_the_session_has_run_out() {
    let mut bench = Bench::new();
    let (old, _) = bench.member("a");
    let first = applicant(MemberId::random(), 1, "a");
    let Decision::Wait { waiter: first, .. } = bench.decide(&first) else {
        panic!("the name is taken");
    };
    let new = applicant(MemberId::random(), 1, "a");
    let Decision::Wait { waiter, displaced } = bench.decide(&new) else {
        panic!("the name is taken");
    };
    assert_eq!(displaced, Some(first), "the newest waits");
    let due = bench.run(TIMEOUT);
    assert_eq!((due.turns, due.expired), (vec![waiter], vec![]));
    let takeover = Decision::Propose {
        replaces: Some((old, 1)),
    };
    assert_eq!(bench.decide(&new), takeover);
    // It fails: the old one expires after all.
    bench.sessions.join_ended(bench.now, &new, Some((old, 1)));
    let expired = bench.run(Duration::from_secs(2)).expired;
    assert_eq!(expired, bench.expired(&[old]));
}

#[test]
fn s27_join_under_a_stable_name_has_its_turn_when_the_holder_leaves_for_good() {
    let mut bench = Bench::new();
    let (held, session) = bench.member("a");
    bench.member("");
    let successor = applicant(MemberId::random(), 1, "a");
    let Decision::Wait { waiter, .. } = bench.decide(&successor) else {
        panic!("the name is taken");
    };
    let synced = bench.remove(held);
    assert_eq!((synced.ended, synced.turns), (vec![session], vec![waiter]));
    assert_eq!(
        bench.decide(&successor),
        Decision::Propose { replaces: None }
    );
}

#[test]
fn s27_join_under_a_stable_name_has_its_turn_when_all_others_have_gone() {
    let mut bench = Bench::new();
    let (held, _) = bench.member("a");
    let successor = applicant(MemberId::random(), 1, "a");
    let Decision::Wait { waiter, .. } = bench.decide(&successor) else {
        panic!("the name is taken");
    };
    assert_eq!(bench.remove(held).turns, [waiter]);
    assert!(bench.sessions.groups.is_empty() && bench.sessions.waiters.is_empty());
}

// S26: the takeover may be applied yet, and would end the new session.
#[test]
fn s26_member_gets_no_session_while_the_fate_of_its_takeover_is_unknown() {
    let mut bench = Bench::new();
    let (held, session) = bench.member("a");
    bench.sessions.close(bench.now, session);
    let (holder, successor) = (
        applicant(held, 1, "a"),
        applicant(MemberId::random(), 1, "a"),
    );
    let replaces = Some((held, 1));
    assert_eq!(bench.decide(&successor), Decision::Propose { replaces });
    bench.sessions.join_ended(bench.now, &successor, None);
    assert_eq!(bench.decide(&holder), Decision::Busy);
    assert_eq!(bench.decide(&successor), Decision::Busy);
    assert_eq!(bench.sessions.attach(bench.now, &holder), None);
    assert!(bench.run(2 * TIMEOUT).expired.is_empty());

    bench
        .sessions
        .expiry_ended(bench.now, &name(), &[(held, 1)]);
    assert_eq!(bench.decide(&holder), Decision::Resume);
}

#[test]
fn waiting_join_that_goes_away_leaves_the_name_to_its_holder() {
    let mut bench = Bench::new();
    let (old, _) = bench.member("a");
    let Decision::Wait { waiter, .. } = bench.decide(&applicant(MemberId::random(), 1, "a")) else {
        panic!("the name is taken");
    };
    bench.sessions.unwait(waiter);
    let due = bench.run(TIMEOUT);
    assert!(due.turns.is_empty());
    assert_eq!(due.expired, bench.expired(&[old]));
}

#[test]
fn assignment_is_asked_of_the_oldest_member_with_a_session_and_then_of_the_next() {
    let mut bench = Bench::new();
    let (_, first) = bench.member("");
    let (_, second) = bench.member("");
    let (_, third) = bench.member("");
    bench.sessions.detach(bench.now, first);
    let due = bench.run(Duration::from_millis(1300));
    assert_eq!(due.asked, [second, third]);
    assert_eq!(bench.sessions.asked(third), Some(2));
    assert_eq!(bench.sessions.asked(second), None);
    bench.picture.assigned_generation = bench.picture.generation;
    bench.sync();
    assert_eq!(bench.sessions.asked(third), None);
    assert!(bench.run(Duration::from_secs(5)).asked.is_empty());
}

#[test]
fn group_that_has_gone_leaves_nothing_behind() {
    let mut bench = Bench::new();
    let (_, a) = bench.member("a");
    let (_, b) = bench.member("");
    bench.beat(a, 1);
    let mut ended = bench.sessions.sync(bench.now, &name(), None).ended;
    ended.sort();
    assert_eq!(ended, [a, b]);
    assert!(!bench.sessions.wants_ticks());
    assert!(bench.sessions.groups.is_empty() && bench.sessions.is_empty());
    // Nor does one that is only asked for.
    bench.decide(&applicant(MemberId::random(), 1, ""));
    assert!(bench.sessions.groups.is_empty());
}

#[derive(Debug, Clone)]
enum Step {
    Join(usize, bool),
    Beat(usize),
    Detach(usize),
    Close(usize),
    Leave(usize),
    Publish,
    /// The outcome of the oldest proposal: applied or lost.
    Decided(bool),
    Tick,
    Freeze(u64),
    Round,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let who = 0..4_usize;
    let step = prop_oneof![
        3 => (who.clone(), any::<bool>()).prop_map(|(at, named)| Step::Join(at, named)),
        3 => who.clone().prop_map(Step::Beat),
        1 => who.clone().prop_map(Step::Detach),
        1 => who.clone().prop_map(Step::Close),
        1 => who.prop_map(Step::Leave),
        1 => Just(Step::Publish),
        3 => any::<bool>().prop_map(Step::Decided),
        12 => Just(Step::Tick),
        1 => (1..100_u64).prop_map(Step::Freeze),
        2 => Just(Step::Round),
    ];
    proptest::collection::vec(step, 1..300)
}

/// What the test knows of one program.
struct Program {
    id: MemberId,
    epoch: u64,
    session: Option<SessionId>,
    /// Time that counted when it was last heard; `None`: it is not a member.
    heard: Option<Moment>,
    beats: Vec<u64>,
    sequence: u64,
}

enum Proposal {
    Join(usize, Applicant, Option<(MemberId, u64)>),
    Expire(Vec<(MemberId, u64)>),
}

struct Schedule {
    bench: Bench,
    programs: Vec<Program>,
    proposals: Vec<Proposal>,
    counted: Moment,
    looked: Instant,
}

impl Schedule {
    fn new() -> Self {
        let bench = Bench::new();
        let program = |_| Program {
            id: MemberId::random(),
            epoch: 1,
            session: None,
            heard: None,
            beats: Vec::new(),
            sequence: 0,
        };
        Self {
            looked: bench.start,
            bench,
            programs: (0..4).map(program).collect(),
            proposals: Vec::new(),
            counted: Moment::ZERO,
        }
    }

    /// The same rule as the clock's, on its own.
    fn look(&mut self) {
        let gap = self.bench.now.duration_since(self.looked);
        self.counted += gap.min(Duration::from_millis(200));
        self.looked = self.bench.now;
    }

    fn end(&mut self, ended: &[SessionId]) {
        for program in &mut self.programs {
            program.session = program.session.filter(|one| !ended.contains(one));
        }
    }

    fn step(&mut self, step: Step) {
        self.bench.now += Duration::from_millis(10);
        self.look();
        match step {
            Step::Join(at, named) => self.join(at, named),
            Step::Beat(at) => self.beat(at),
            Step::Detach(at) => {
                if let Some(session) = self.programs[at].session.take() {
                    self.bench.sessions.detach(self.bench.now, session);
                }
            }
            Step::Close(at) => {
                if let Some(session) = self.programs[at].session.take() {
                    self.bench.sessions.close(self.bench.now, session);
                }
            }
            Step::Leave(at) => {
                let synced = self.bench.remove(self.programs[at].id);
                self.programs[at].heard = None;
                self.end(&synced.ended);
                assert_eq!(self.programs[at].session, None);
            }
            Step::Publish => {
                self.bench.picture.assigned_generation = self.bench.picture.generation;
                self.bench.sync();
            }
            Step::Decided(applied) => self.decided(applied),
            Step::Tick => {
                self.bench.now += TICK;
                self.look();
                self.tick();
            }
            Step::Freeze(seconds) => {
                self.bench.now += Duration::from_secs(seconds);
                self.look();
                self.tick();
            }
            Step::Round => self.round(),
        }
        self.check();
    }

    fn join(&mut self, at: usize, named: bool) {
        let program = &self.programs[at];
        let instance = if named { "shared" } else { "" };
        let applicant = applicant(program.id, program.epoch, instance);
        match self.bench.decide(&applicant) {
            Decision::Resume => {
                let attached = self.bench.sessions.attach(self.bench.now, &applicant);
                let (session, displaced) = attached.unwrap();
                assert_eq!(displaced, self.programs[at].session);
                self.programs[at].session = Some(session);
                self.programs[at].heard = Some(self.counted);
                self.programs[at].beats.clear();
            }
            Decision::Propose { replaces } => {
                self.proposals.push(Proposal::Join(at, applicant, replaces));
            }
            Decision::Stale => panic!("nobody has a newer epoch"),
            Decision::Wait { .. } | Decision::Busy => {}
        }
    }

    fn beat(&mut self, at: usize) {
        let program = &mut self.programs[at];
        if let Some(session) = program.session {
            program.sequence += 1;
            let sequence = program.sequence;
            if self.bench.beat(session, sequence) {
                self.programs[at].beats.push(sequence);
                self.programs[at].heard = Some(self.counted);
            }
        }
    }

    fn decided(&mut self, applied: bool) {
        if self.proposals.is_empty() {
            return;
        }
        match self.proposals.remove(0) {
            Proposal::Join(at, applicant, replaces) => {
                if applied {
                    if let Some((replaced, _)) = replaces {
                        let ended = self.bench.remove(replaced).ended;
                        self.end(&ended);
                        let gone = self.programs.iter_mut().find(|one| one.id == replaced);
                        gone.unwrap().heard = None;
                    }
                    let is_new = self.programs[at].heard.is_none();
                    if is_new {
                        self.bench
                            .add(applicant.id, applicant.epoch, &applicant.instance);
                        self.programs[at].heard = Some(self.counted);
                    }
                }
                let now = self.bench.now;
                self.bench.sessions.join_ended(now, &applicant, replaces);
            }
            Proposal::Expire(members) => {
                for (id, epoch) in members.iter().filter(|_| applied) {
                    let at = self.programs.iter().position(|one| one.id == *id).unwrap();
                    if self.programs[at].epoch == *epoch {
                        let ended = self.bench.remove(*id).ended;
                        self.end(&ended);
                        self.programs[at].heard = None;
                    }
                }
                let now = self.bench.now;
                self.bench.sessions.expiry_ended(now, &name(), &members);
            }
        }
    }

    fn tick(&mut self) {
        let due = self.bench.sessions.tick(self.bench.now);
        for (_, members) in due.expired {
            for (id, _) in &members {
                let program = self.programs.iter().find(|one| one.id == *id).unwrap();
                // S26: nobody before a whole timeout that counts.
                let heard = program.heard.expect("only members expire");
                assert!(self.counted >= heard + TIMEOUT);
            }
            self.proposals.push(Proposal::Expire(members));
        }
        for session in due.asked {
            assert!(self.programs.iter().any(|one| one.session == Some(session)));
        }
    }

    fn round(&mut self) {
        for (session, sequence) in self.bench.sessions.begin_round().heartbeats {
            let program = self.programs.iter_mut();
            let mut owner = program.filter(|one| one.session == Some(session));
            let beats = &mut owner.next().expect("only live sessions").beats;
            assert_eq!(beats.last(), Some(&sequence));
            beats.clear();
        }
    }

    fn check(&self) {
        let sessions = &self.bench.sessions;
        let leases = sessions.groups.values().flat_map(|group| &group.leases);
        let open = leases.filter(|(_, lease)| !lease.ending);
        let indexed: BTreeSet<_> = open.map(|(id, one)| (one.deadline, name(), *id)).collect();
        assert_eq!(indexed, sessions.deadlines);
        // S27: whoever waits for a name waits for somebody.
        for group in sessions.groups.values() {
            let open = group.leases.values().filter(|it| !it.ending && !it.closed);
            let held: HashSet<&Name> = open.map(|lease| &lease.instance).collect();
            assert!(group.waiting.keys().all(|waited| held.contains(waited)));
        }
        let members = self.bench.picture.members.len();
        let leases = sessions.groups.values().map(|group| group.leases.len());
        assert_eq!(leases.sum::<usize>(), members);
        let asking = sessions.groups.values().filter_map(|group| {
            let due = group.asking.as_ref()?.due()?;
            Some((due, name()))
        });
        assert_eq!(asking.collect::<BTreeSet<_>>(), sessions.asks);
        assert_eq!(
            sessions.sessions.len(),
            self.programs
                .iter()
                .filter(|one| one.session.is_some())
                .count()
        );
    }
}

proptest! {
    #[test]
    fn any_schedule_expires_nobody_early_and_keeps_its_books(steps in steps()) {
        let mut schedule = Schedule::new();
        for step in steps {
            schedule.step(step);
        }
        // Silence: in the end nobody is left.
        for _ in 0..200 {
            schedule.bench.now += TICK;
            schedule.look();
            schedule.tick();
            while !schedule.proposals.is_empty() {
                let is_expiry = matches!(schedule.proposals[0], Proposal::Expire(_));
                schedule.decided(is_expiry);
            }
            schedule.check();
        }
        assert_eq!(schedule.bench.picture.members, []);
        assert!(!schedule.bench.sessions.wants_ticks());
    }
}
