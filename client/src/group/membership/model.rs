//! The membership against a model of a coordinator, with time, delays, cut streams, new coordinators and a
//! program that takes its time, in any order.
//!
//! - S26: a record is handed out only while the coordinator has the claim down for this member, under
//!   the epoch that the record is handed out with. (Whoever takes a claim away waits for a session timeout
//!   after the last sign of life, or for the release.)
//! - S27: what is committed, by a commit, a release or a leave, never goes back, and covers nothing that
//!   the program has not acknowledged.
//! - When all is calm again, the member reads what it is to read.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;

use super::tests::{SESSION, joined, place, settings, update};
use super::*;

const PARTITIONS: u32 = 3;

#[derive(Debug, Clone)]
enum Op {
    Pass(u64),
    Open,
    /// What the member has sent arrives.
    Hear,
    /// What the coordinator has sent arrives.
    Tell,
    Cut,
    /// Another coordinator takes over, with a fresh session.
    Move,
    /// The assignment changes: a bit for each partition.
    Target(u32),
    Deliver(u32),
    /// The program acknowledges the nth of what it has in hand.
    Ack(usize),
    Commit {
        answered: bool,
    },
    GiveUp(u32),
    Poll,
}

fn op() -> impl Strategy<Value = Op> {
    let partition = 0..PARTITIONS;
    prop_oneof![
        4 => (1u64..4000).prop_map(Op::Pass),
        3 => Just(Op::Open),
        10 => Just(Op::Hear),
        10 => Just(Op::Tell),
        1 => Just(Op::Cut),
        1 => Just(Op::Move),
        2 => (0u32..1 << PARTITIONS).prop_map(Op::Target),
        10 => partition.clone().prop_map(Op::Deliver),
        8 => (0usize..4).prop_map(Op::Ack),
        3 => any::<bool>().prop_map(|answered| Op::Commit { answered }),
        1 => partition.prop_map(Op::GiveUp),
        2 => Just(Op::Poll),
    ]
}

#[derive(Debug, Default, Clone)]
struct Slot {
    /// The epoch under which the member holds it; otherwise another does, if anybody.
    held: Option<u64>,
    epoch: u64,
    committed: Option<u64>,
}

struct Sim {
    now: Instant,
    membership: Membership,
    stream: Option<u64>,
    to_coordinator: VecDeque<Request>,
    to_member: VecDeque<Response>,
    // The coordinator.
    coordinator_epoch: u64,
    revision: u64,
    /// Member epoch, and when it expires.
    session: Option<(u64, Instant)>,
    targets: BTreeSet<u32>,
    slots: BTreeMap<u32, Slot>,
    // The program.
    attachments: u64,
    /// Attachment, and the next offset that its reader gives.
    readers: BTreeMap<u32, (u64, u64)>,
    in_hand: Vec<(u32, u64, std::ops::Range<u64>)>,
    acknowledged: BTreeMap<u32, BTreeSet<u64>>,
}

impl Sim {
    fn new() -> Self {
        let now = Instant::now();
        let settings = Settings {
            revoke_timeout: Duration::from_secs(5),
            processing_limit: Some(Duration::from_secs(20)),
            ..settings()
        };
        Self {
            now,
            membership: Membership::new(MemberId::random(), settings, Vec::new(), now),
            stream: None,
            to_coordinator: VecDeque::new(),
            to_member: VecDeque::new(),
            coordinator_epoch: 1,
            revision: 0,
            session: None,
            targets: (0..PARTITIONS).collect(),
            slots: (0..PARTITIONS).map(|it| (it, Slot::default())).collect(),
            attachments: 0,
            readers: BTreeMap::new(),
            in_hand: Vec::new(),
            acknowledged: BTreeMap::new(),
        }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Pass(ms) => {
                self.now += Duration::from_millis(ms);
                self.membership.advance(self.now);
                self.expire();
            }
            Op::Open if self.membership.wants_stream() => {
                let (stream, request) = self.membership.open(self.now);
                self.stream = Some(stream);
                self.to_coordinator = request.request.into_iter().collect();
                self.to_member.clear();
            }
            Op::Open => {}
            Op::Hear => {
                if let Some(request) = self.to_coordinator.pop_front() {
                    self.serve(request);
                }
            }
            Op::Tell => {
                if let (Some(response), Some(stream)) = (self.to_member.pop_front(), self.stream) {
                    self.membership.on_response(stream, response, self.now);
                }
            }
            Op::Cut => self.cut(),
            Op::Move => {
                self.cut();
                self.coordinator_epoch += 1;
                if let Some((_, expires)) = &mut self.session {
                    *expires = self.now + SESSION;
                }
            }
            Op::Target(bits) => {
                self.targets = (0..PARTITIONS).filter(|it| bits & 1 << it != 0).collect();
                self.tell_update();
            }
            Op::Deliver(partition) => self.deliver(partition),
            Op::Ack(nth) => {
                if nth < self.in_hand.len() {
                    let (partition, epoch, offsets) = self.in_hand.remove(nth);
                    let done = self.acknowledged.entry(partition).or_default();
                    done.extend(offsets.clone());
                    let place = place(partition);
                    self.membership.ack(place, epoch, offsets, self.now);
                }
            }
            Op::Commit { answered } => self.commit(answered),
            Op::GiveUp(partition) => self.membership.give_up(place(partition), self.now),
            Op::Poll => self.membership.polled(self.now),
        }
        self.run_commands();
    }

    fn cut(&mut self) {
        self.stream = None;
        self.to_coordinator.clear();
        self.to_member.clear();
        self.membership.on_down(self.now);
    }

    fn run_commands(&mut self) {
        while let Some(command) = self.membership.take_command() {
            match command {
                Command::Send(request) => self.to_coordinator.push_back(request),
                Command::Close { .. } => {
                    self.stream = None;
                    self.to_coordinator.clear();
                    self.to_member.clear();
                }
                Command::Attach {
                    place,
                    epoch,
                    committed,
                } => {
                    self.attachments += 1;
                    let attachment = self.attachments;
                    let offset = committed.unwrap_or(0);
                    let attach = || Some(attachment);
                    let done = self.membership.attach(place, epoch, offset, false, attach);
                    if done == Attached::Yes {
                        self.readers.insert(place.partition, (attachment, offset));
                    }
                }
                // A reader that is detached too late must do no harm.
                Command::Detach(_) | Command::Compute(_) | Command::Probe => {}
            }
        }
        while self.membership.take_told().is_some() {}
    }

    fn deliver(&mut self, partition: u32) {
        let Some((attachment, next)) = self.readers.get_mut(&partition) else {
            return;
        };
        let offsets = *next..*next + 2;
        let place = place(partition);
        let delivered = self
            .membership
            .deliver(place, *attachment, offsets.clone(), self.now);
        if let Some(epoch) = delivered {
            *next = offsets.end;
            let held = self.slots[&partition].held;
            assert_eq!(held, Some(epoch), "S26: partition {partition}");
            self.in_hand.push((partition, epoch, offsets));
        }
    }

    // The coordinator.

    fn expire(&mut self) {
        if self.session.is_some_and(|(_, expires)| expires <= self.now) {
            self.session = None;
            self.drop_claims();
        }
    }

    fn drop_claims(&mut self) {
        for slot in self.slots.values_mut() {
            if slot.held.take().is_some() {
                // Another has it now.
                slot.epoch += 1;
            }
        }
    }

    /// Targets that the member does not hold are granted: another has released them.
    fn grant(&mut self) {
        for (partition, slot) in &mut self.slots {
            if slot.held.is_none() && self.targets.contains(partition) {
                slot.epoch += 1;
                slot.held = Some(slot.epoch);
            }
        }
    }

    fn tell_update(&mut self) {
        if self.session.is_none() {
            return;
        }
        self.grant();
        self.revision += 1;
        let targets: Vec<u32> = self.targets.iter().copied().collect();
        let held = self.slots.iter();
        let claims: Vec<_> = held
            .filter_map(|(partition, slot)| Some((*partition, slot.held?, slot.committed)))
            .collect();
        if self.stream.is_some() {
            let update = update(self.revision, &targets, &claims);
            self.to_member.push_back(update);
        }
    }

    fn serve(&mut self, request: Request) {
        let expires = self.now + SESSION;
        match request {
            Request::Join(join) => {
                let known = self.session.map(|(epoch, _)| epoch);
                if known.is_some_and(|known| known < join.member_epoch) {
                    // Granted anew.
                    self.drop_claims();
                }
                self.session = Some((join.member_epoch, expires));
                self.to_member.push_back(joined(self.coordinator_epoch));
                self.tell_update();
            }
            Request::Heartbeat(v1::Heartbeat { sequence }) => {
                if let Some((_, until)) = &mut self.session {
                    *until = expires;
                    let ack = v1::HeartbeatAck { sequence };
                    self.to_member.push_back(Response::Heartbeat(ack));
                } else {
                    self.refuse();
                }
            }
            Request::Release(release) => {
                if self.session.is_none() {
                    return self.refuse();
                }
                self.release(&release.claims);
                let done = v1::Done {
                    correlation_id: release.correlation_id,
                    error: None,
                };
                self.to_member.push_back(Response::Done(done));
                self.tell_update();
            }
            Request::Leave(leave) => {
                if self.session.take().is_none() {
                    return self.refuse();
                }
                self.release(&leave.claims);
                self.drop_claims();
                let done = v1::Done {
                    correlation_id: leave.correlation_id,
                    error: None,
                };
                self.to_member.push_back(Response::Done(done));
            }
            Request::Topics(_) | Request::Publish(_) => {}
        }
    }

    fn refuse(&mut self) {
        self.to_member.push_back(Response::Error(v1::Error {
            code: ErrorCode::UnknownMember.into(),
            ..Default::default()
        }));
    }

    fn release(&mut self, claims: &[v1::ClaimRelease]) {
        for claim in claims {
            if self.slots[&claim.partition].held == Some(claim.claim_epoch) {
                if let Some(offset) = claim.offset {
                    let committed = self.slots[&claim.partition].committed;
                    assert!(committed <= Some(offset), "S27: {committed:?}, {claim:?}");
                    self.take_commit(claim.partition, offset);
                }
                let slot = self.slots.get_mut(&claim.partition).unwrap();
                slot.held = None;
            }
        }
    }

    fn take_commit(&mut self, partition: u32, offset: u64) {
        let done = self.acknowledged.entry(partition).or_default();
        let open = (0..offset).find(|offset| !done.contains(offset));
        assert_eq!(open, None, "S27: {partition} committed up to {offset}");
        let slot = self.slots.get_mut(&partition).unwrap();
        slot.committed = slot.committed.max(Some(offset));
    }

    fn commit(&mut self, answered: bool) {
        for commit in self.membership.commits(self.now) {
            let at = place(commit.partition);
            if self.slots[&commit.partition].held == Some(commit.claim_epoch) {
                self.take_commit(commit.partition, commit.offset);
                if answered {
                    let committed = self.slots[&commit.partition].committed.unwrap();
                    self.membership.committed(at, commit.claim_epoch, committed);
                }
            } else if answered {
                self.membership.fenced(at, commit.claim_epoch);
            }
        }
    }

    /// Everything arrives at once, and the program does its work.
    fn calm_down(&mut self) {
        for _ in 0..200 {
            self.apply(&Op::Poll);
            while !self.in_hand.is_empty() {
                self.apply(&Op::Ack(0));
            }
            self.apply(&Op::Open);
            while !self.to_coordinator.is_empty() || !self.to_member.is_empty() {
                self.apply(&Op::Hear);
                self.apply(&Op::Tell);
            }
            self.apply(&Op::Pass(100));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn membership_keeps_s26_and_s27_whatever_happens_and_reads_on_afterwards(
        ops in proptest::collection::vec(op(), 0..300),
    ) {
        let mut sim = Sim::new();
        for op in &ops {
            sim.apply(op);
        }
        sim.calm_down();
        let targets = sim.targets.clone();
        for partition in 0..PARTITIONS {
            let before = sim.in_hand.len();
            sim.deliver(partition);
            let delivered = sim.in_hand.len() > before;
            prop_assert_eq!(delivered, targets.contains(&partition), "partition {}", partition);
            let held = sim.slots[&partition].held.is_some();
            prop_assert_eq!(held, targets.contains(&partition), "partition {}", partition);
        }
    }
}
