//! One rule each.

use super::clock::PROBE_GRACE;
use super::*;

use std::ops::Range;

use crate::error::ErrorKind;

use qute_proto::ids::TopicId;

pub(super) const SESSION: Duration = Duration::from_secs(9);
const REVOKE: Duration = Duration::from_secs(30);
const LIMIT: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);

pub(super) fn settings() -> Settings {
    Settings {
        group: "g".to_owned(),
        instance: String::new(),
        rack: String::new(),
        client: "test".to_owned(),
        assignors: Vec::new(),
        session_timeout: SESSION,
        revoke_timeout: REVOKE,
        processing_limit: Some(LIMIT),
        by_hand: false,
    }
}

pub(super) fn place(partition: u32) -> PartitionId {
    PartitionId {
        topic: TopicId(uuid::Uuid::from_u128(9)),
        partition,
    }
}

/// Partition, claim epoch, committed offset.
pub(super) type ClaimSketch = (u32, u64, Option<u64>);

pub(super) fn update(revision: u64, targets: &[u32], claims: &[ClaimSketch]) -> Response {
    let topic_id = place(0).topic.to_wire();
    Response::Update(v1::GroupUpdate {
        revision,
        generation: revision,
        assigned_generation: revision,
        targets: vec![v1::TopicPartitions {
            topic_id: topic_id.clone(),
            partitions: targets.to_vec(),
        }],
        claims: claims
            .iter()
            .map(|&(partition, claim_epoch, committed)| v1::Claim {
                topic_id: topic_id.clone(),
                partition,
                claim_epoch,
                committed: committed.map(|offset| v1::CommittedOffset {
                    offset,
                    ..Default::default()
                }),
            })
            .collect(),
        assign: None,
    })
}

pub(super) fn joined(coordinator_epoch: u64) -> Response {
    Response::Joined(v1::Joined {
        coordinator_epoch,
        session_timeout_ms: u32::try_from(SESSION.as_millis()).unwrap(),
    })
}

fn refused(code: ErrorCode) -> Response {
    Response::Error(v1::Error {
        code: code.into(),
        ..Default::default()
    })
}

fn done(correlation_id: u64, code: Option<ErrorCode>) -> Response {
    Response::Done(v1::Done {
        correlation_id,
        error: code.map(|code| v1::Error {
            code: code.into(),
            ..Default::default()
        }),
    })
}

/// The coordinator asks for an assignment.
fn asking(revision: u64, generation: u64) -> Response {
    match update(revision, &[], &[]) {
        Response::Update(update) => Response::Update(v1::GroupUpdate {
            generation,
            assign: Some(v1::AssignTask {
                generation,
                ..Default::default()
            }),
            ..update
        }),
        other => other,
    }
}

/// A member, its clock, and what it did.
struct Bench {
    membership: Membership,
    now: Instant,
    stream: u64,
    sent: Vec<Request>,
    attached: Vec<(u32, u64)>,
    attachments: u64,
    /// Generations that an assignment was computed for.
    computed: Vec<u64>,
}

impl Bench {
    fn new(settings: Settings) -> Self {
        let now = Instant::now();
        Self {
            membership: Membership::new(MemberId::random(), settings, Vec::new(), now),
            now,
            stream: 0,
            sent: Vec::new(),
            attached: Vec::new(),
            attachments: 0,
            computed: Vec::new(),
        }
    }

    /// Joined, with these claims, all of them targets, reading from where they say or 0.
    fn with_claims(claims: &[ClaimSketch]) -> Self {
        let mut bench = Self::new(settings());
        bench.open(1);
        let targets: Vec<u32> = claims.iter().map(|claim| claim.0).collect();
        bench.hear(update(1, &targets, claims));
        bench.told();
        bench
    }

    fn open(&mut self, coordinator_epoch: u64) -> v1::Join {
        assert!(self.membership.wants_stream());
        let (stream, request) = self.membership.open(self.now);
        self.stream = stream;
        self.hear(joined(coordinator_epoch));
        match request.request {
            Some(Request::Join(join)) => join,
            other => panic!("{other:?}"),
        }
    }

    fn hear(&mut self, response: Response) {
        self.membership.on_response(self.stream, response, self.now);
        self.run();
    }

    fn run(&mut self) {
        while let Some(command) = self.membership.take_command() {
            match command {
                Command::Send(request) => self.sent.push(request),
                Command::Compute(task) => self.computed.push(task.generation),
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
                        self.attached.push((place.partition, offset));
                    }
                }
                _ => {}
            }
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.membership.advance(self.now);
        self.run();
    }

    /// Acknowledges the last heartbeat.
    fn confirm(&mut self) {
        let heartbeats = self.sent.iter().rev();
        let mut sequences = heartbeats.filter_map(|request| match request {
            Request::Heartbeat(heartbeat) => Some(heartbeat.sequence),
            _ => None,
        });
        let sequence = sequences.next().unwrap();
        drop(sequences);
        self.hear(Response::Heartbeat(v1::HeartbeatAck { sequence }));
    }

    fn deliver(&mut self, partition: u32, offsets: Range<u64>) -> Option<u64> {
        let attachment = self.attachments;
        self.deliver_of(partition, attachment, offsets)
    }

    fn deliver_of(&mut self, partition: u32, attachment: u64, offsets: Range<u64>) -> Option<u64> {
        let place = place(partition);
        self.membership
            .deliver(place, attachment, offsets, self.now)
    }

    fn ack(&mut self, partition: u32, epoch: u64, offsets: Range<u64>) -> bool {
        let place = place(partition);
        let held = self.membership.ack(place, epoch, offsets, self.now);
        self.run();
        held
    }

    /// What the program is told, in short.
    fn told(&mut self) -> Vec<String> {
        let mut all = Vec::new();
        while let Some(told) = self.membership.take_told() {
            let numbers = |places: Vec<PartitionId>| {
                let numbers: Vec<u32> = places.iter().map(|place| place.partition).collect();
                format!("{numbers:?}")
            };
            all.push(match told {
                Told::Assigned(places) => format!("assigned {}", numbers(places)),
                Told::Revoking { claims, .. } => {
                    let places = claims.iter().map(|(place, _)| *place).collect();
                    format!("revoking {}", numbers(places))
                }
                Told::Lost { partitions, reason } => {
                    format!("lost {} {reason:?}", numbers(partitions))
                }
                Told::Failed(error) => format!("failed {:?}", error.kind()),
            });
        }
        all
    }

    /// Partition, claim epoch and offset of each released claim.
    fn released(&mut self) -> Vec<(u32, u64, Option<u64>)> {
        let mut released = Vec::new();
        for request in std::mem::take(&mut self.sent) {
            if let Request::Release(release) = request {
                let claims = release.claims.into_iter();
                released.extend(claims.map(|it| (it.partition, it.claim_epoch, it.offset)));
            }
        }
        released
    }

    fn left(&mut self) -> Option<v1::Leave> {
        let sent = std::mem::take(&mut self.sent);
        sent.into_iter().find_map(|request| match request {
            Request::Leave(leave) => Some(leave),
            _ => None,
        })
    }

    fn commits(&mut self) -> Vec<(u32, u64)> {
        let commits = self.membership.commits(self.now);
        commits.iter().map(|it| (it.partition, it.offset)).collect()
    }
}

#[test]
fn member_is_assigned_attached_delivers_and_commits_what_is_acknowledged() {
    let mut bench = Bench::new(settings());
    bench.open(1);
    bench.hear(update(1, &[0, 1], &[(0, 1, Some(7)), (1, 1, None)]));
    assert_eq!(bench.told(), ["assigned [0, 1]"]);
    assert_eq!(bench.attached, [(0, 7), (1, 0)]);
    let claim = bench.deliver_of(0, 1, 7..10).unwrap();
    bench.deliver_of(0, 1, 10..12).unwrap();
    assert_eq!(bench.commits(), []);
    assert!(bench.ack(0, claim, 10..12));
    assert_eq!(bench.commits(), [], "not contiguous");
    assert!(bench.ack(0, claim, 7..10));
    assert_eq!(bench.commits(), [(0, 12)]);
    bench.membership.committed(place(0), claim, 12);
    assert_eq!(bench.commits(), []);
}

#[test]
fn s26_deadline_is_the_send_time_of_the_last_acknowledged_heartbeat_plus_the_timeout() {
    let mut bench = Bench::with_claims(&[(0, 1, None)]);
    let start = bench.now;
    assert_eq!(bench.membership.deadline(), Some(start + SESSION));
    bench.pass(3 * SECOND);
    bench.pass(SECOND);
    // It was sent a second ago.
    bench.confirm();
    assert_eq!(
        bench.membership.deadline(),
        Some(start + 3 * SECOND + SESSION)
    );
    assert!(bench.deliver(0, 0..1).is_some());
}

#[test]
fn s26_nothing_is_delivered_or_committed_past_the_deadline_and_the_member_joins_with_a_new_epoch() {
    let mut bench = Bench::with_claims(&[(0, 1, None)]);
    let claim = bench.deliver(0, 0..5).unwrap();
    bench.now += SESSION - Duration::from_millis(1);
    assert!(bench.deliver(0, 5..6).is_some());
    bench.now += Duration::from_millis(1);
    assert_eq!(bench.deliver(0, 6..7), None);
    assert!(!bench.ack(0, claim, 0..5));
    assert_eq!(bench.commits(), []);
    assert_eq!(bench.told(), ["lost [0] SessionExpired"]);
    // An acknowledgement that comes too late does not bring it back.
    bench.confirm_late();
    assert_eq!(bench.deliver(0, 6..7), None);
    let join = bench.open(1);
    assert_eq!(join.member_epoch, 2);
}

impl Bench {
    fn confirm_late(&mut self) {
        self.hear(Response::Heartbeat(v1::HeartbeatAck { sequence: 1 }));
    }
}

#[test]
fn s26_join_that_may_have_been_sent_before_confirms_nothing_until_a_heartbeat_does() {
    let mut bench = Bench::new(settings());
    bench.membership.open(bench.now);
    bench.membership.on_down(bench.now);
    bench.open(1);
    bench.hear(update(1, &[0], &[(0, 1, None)]));
    assert_eq!(bench.told(), Vec::<String>::new());
    assert_eq!(bench.attached, []);
    bench.confirm();
    assert_eq!(bench.told(), ["assigned [0]"]);
    assert_eq!(bench.attached, [(0, 0)]);
}

#[test]
fn member_whose_stream_breaks_resumes_with_the_same_epoch_and_delivers_on() {
    let mut bench = Bench::with_claims(&[(0, 1, None)]);
    let claim = bench.deliver(0, 0..5).unwrap();
    bench.membership.on_down(bench.now);
    bench.pass(SECOND);
    assert!(bench.deliver(0, 5..6).is_some(), "until the deadline");
    let join = bench.open(2);
    assert_eq!(join.member_epoch, 1);
    bench.hear(update(2, &[0], &[(0, 1, None)]));
    assert_eq!(bench.told(), Vec::<String>::new());
    assert!(bench.ack(0, claim, 0..5));
    assert_eq!(bench.commits(), [(0, 5)]);
}

#[test]
fn s28_updates_of_older_coordinators_and_revisions_are_ignored() {
    let mut bench = Bench::with_claims(&[(0, 1, None)]);
    bench.hear(update(5, &[0, 1], &[(0, 1, None), (1, 1, None)]));
    bench.hear(update(4, &[0], &[(0, 1, None)]));
    assert_eq!(bench.told(), ["assigned [1]"]);
    bench.membership.on_down(bench.now);
    bench.open(3);
    bench.hear(update(6, &[0, 1], &[(0, 1, None), (1, 1, None)]));
    bench.membership.on_down(bench.now);
    bench.open(2);
    assert!(bench.membership.wants_stream(), "left at once");
    bench.hear(update(9, &[], &[]));
    assert_eq!(bench.told(), Vec::<String>::new());
}

#[test]
fn s27_claim_that_is_no_target_is_released_with_its_final_offset_once_all_is_acknowledged() {
    let mut bench = Bench::with_claims(&[(0, 1, None), (1, 4, Some(3))]);
    let zero = bench.deliver_of(0, 1, 0..5).unwrap();
    let one = bench.deliver_of(1, 2, 3..8).unwrap();
    bench.hear(update(2, &[0], &[(0, 1, None), (1, 4, Some(3))]));
    assert_eq!(bench.told(), ["revoking [1]"]);
    assert_eq!(bench.deliver_of(1, 2, 8..9), None);
    assert!(bench.deliver_of(0, 1, 5..6).is_some(), "the others flow on");
    assert_eq!(bench.released(), []);
    assert!(bench.ack(1, one, 3..6));
    assert_eq!(bench.released(), []);
    assert!(bench.ack(1, one, 6..8));
    assert_eq!(bench.released(), [(1, 4, Some(8))]);
    assert!(!bench.ack(1, one, 3..8), "it has gone");
    bench.hear(update(3, &[0], &[(0, 1, None)]));
    assert!(bench.ack(0, zero, 0..5));
    assert_eq!(bench.told(), Vec::<String>::new());
    assert_eq!(bench.released(), []);
}

#[test]
fn revoked_claim_with_nothing_in_hand_goes_at_once() {
    let mut bench = Bench::with_claims(&[(0, 1, Some(7)), (1, 1, None)]);
    bench.hear(update(2, &[], &[(0, 1, Some(7)), (1, 1, None)]));
    assert_eq!(bench.told(), ["revoking [0, 1]"]);
    assert_eq!(bench.released(), [(0, 1, Some(7)), (1, 1, None)]);
}

#[test]
fn revoked_claim_that_is_not_finished_in_time_goes_with_what_is_acknowledged() {
    let mut bench = Bench::with_claims(&[(0, 1, None)]);
    let claim = bench.deliver(0, 0..5).unwrap();
    bench.hear(update(2, &[], &[(0, 1, None)]));
    bench.ack(0, claim, 0..2);
    let end = bench.now + REVOKE;
    while bench.now < end {
        assert_eq!(bench.released(), []);
        bench.pass(SECOND);
        if bench.now < end && !bench.sent.is_empty() {
            bench.confirm();
        }
    }
    assert_eq!(bench.released(), [(0, 1, Some(2))]);
    let told = bench.told();
    assert_eq!(told, ["revoking [0]", "lost [0] RevokeTimeout"]);
}

#[test]
fn revoked_claim_goes_when_the_program_gives_it_up() {
    let mut bench = Bench::with_claims(&[(0, 1, None)]);
    let claim = bench.deliver(0, 0..5).unwrap();
    bench.membership.give_up(place(0), bench.now);
    bench.run();
    assert_eq!(bench.released(), [], "it is not being revoked");
    bench.hear(update(2, &[], &[(0, 1, None)]));
    bench.ack(0, claim, 0..1);
    bench.membership.give_up(place(0), bench.now);
    bench.run();
    assert_eq!(bench.released(), [(0, 1, Some(1))]);
}

#[test]
fn release_that_was_not_answered_is_sent_again_on_the_next_stream_if_the_claim_is_still_held() {
    let mut bench = Bench::with_claims(&[(0, 1, Some(4)), (1, 1, None)]);
    bench.hear(update(2, &[], &[(0, 1, Some(4)), (1, 1, None)]));
    assert_eq!(bench.released().len(), 2);
    bench.membership.on_down(bench.now);
    bench.open(2);
    assert_eq!(bench.released(), [], "it may be gone");
    bench.hear(update(3, &[], &[(0, 1, Some(4))]));
    assert_eq!(bench.released(), [(0, 1, Some(4))]);
}

#[test]
fn release_that_was_refused_for_now_is_sent_again() {
    let mut bench = Bench::with_claims(&[(0, 1, Some(4))]);
    bench.hear(update(2, &[], &[(0, 1, Some(4))]));
    let correlation_id = bench
        .sent
        .iter()
        .find_map(|request| match request {
            Request::Release(release) => Some(release.correlation_id),
            _ => None,
        })
        .unwrap();
    bench.released();
    bench.hear(Response::Done(v1::Done {
        correlation_id,
        error: Some(v1::Error {
            code: ErrorCode::OutcomeUnknown.into(),
            ..Default::default()
        }),
    }));
    assert_eq!(bench.released(), []);
    bench.pass(SECOND);
    assert_eq!(bench.released(), [(0, 1, Some(4))]);
}

#[test]
fn claim_under_a_new_epoch_is_lost_and_assigned_anew() {
    let mut bench = Bench::with_claims(&[(0, 1, None)]);
    let old = bench.deliver(0, 0..5).unwrap();
    // An operator has reset the offsets by force.
    bench.hear(update(2, &[0], &[(0, 2, Some(100))]));
    assert_eq!(bench.told(), ["lost [0] Fenced", "assigned [0]"]);
    assert!(!bench.ack(0, old, 0..5));
    assert_eq!(bench.deliver_of(0, 1, 5..6), None, "of the old attachment");
    assert!(bench.deliver(0, 100..101).is_some());
    assert_eq!(bench.attached, [(0, 0), (0, 100)]);
}

#[test]
fn claim_that_the_coordinator_does_not_know_is_lost() {
    let mut bench = Bench::with_claims(&[(0, 1, None), (1, 1, None)]);
    bench.hear(update(2, &[1], &[(1, 1, None)]));
    assert_eq!(bench.told(), ["lost [0] Fenced"]);
    bench.membership.fenced(place(1), 1);
    assert_eq!(bench.told(), ["lost [1] Fenced"]);
}

#[test]
fn coordinator_that_knows_no_such_member_ends_the_session_and_the_member_joins_anew() {
    let mut bench = Bench::with_claims(&[(0, 1, None)]);
    bench.hear(refused(ErrorCode::UnknownMember));
    assert_eq!(bench.told(), ["lost [0] SessionExpired"]);
    assert_eq!(bench.open(1).member_epoch, 2);
    // The same by a commit, of this epoch only.
    bench.membership.expelled(1, bench.now);
    assert!(!bench.membership.wants_stream());
    bench.membership.expelled(2, bench.now);
    assert_eq!(bench.open(1).member_epoch, 3);
}

#[test]
fn final_refusal_ends_the_membership_with_its_error() {
    let mut bench = Bench::new(settings());
    let (stream, _) = bench.membership.open(bench.now);
    bench.stream = stream;
    bench.hear(refused(ErrorCode::InconsistentAssignor));
    assert!(bench.membership.has_ended());
    assert!(!bench.membership.wants_stream());
    assert_eq!(bench.told(), ["failed InconsistentAssignor"]);
}

#[test]
fn coordinator_that_acknowledges_nothing_is_left_before_the_deadline() {
    let mut bench = Bench::with_claims(&[(0, 1, None)]);
    bench.pass(SESSION / 2);
    assert!(bench.membership.wants_stream());
    assert!(bench.deliver(0, 0..1).is_some());
}

#[test]
fn slow_program_keeps_its_session_until_the_processing_limit_and_joins_again_when_it_polls() {
    let mut bench = Bench::with_claims(&[(0, 1, None), (1, 1, None)]);
    bench.membership.polled(bench.now);
    let claim = bench.deliver_of(0, 1, 0..5).unwrap();
    bench.ack(0, claim, 0..2);
    let limit = bench.now + LIMIT + PROBE_GRACE;
    while bench.now < limit - SECOND {
        bench.pass(SECOND);
        bench.confirm();
        assert_eq!(bench.told(), Vec::<String>::new());
    }
    bench.sent.clear();
    bench.pass(SECOND);
    let leave = bench.left().unwrap();
    assert_eq!(leave.claims[0].offset, Some(2));
    assert!(!leave.keep_place);
    let told = bench.told();
    assert_eq!(
        told,
        ["lost [0, 1] ProcessingLimit", "failed ProcessingLimit"]
    );
    bench.hear(Response::Done(v1::Done {
        correlation_id: leave.correlation_id,
        error: None,
    }));
    assert!(!bench.membership.wants_stream());
    assert!(!bench.ack(0, claim, 2..5));
    bench.membership.polled(bench.now);
    assert_eq!(bench.open(1).member_epoch, 2);
}

#[test]
fn program_that_waits_for_the_next_event_is_not_slow() {
    let mut bench = Bench::with_claims(&[(0, 1, None)]);
    bench.membership.polled(bench.now);
    bench.deliver(0, 0..5).unwrap();
    for _ in 0..200 {
        bench.now += SECOND;
        bench.membership.advance(bench.now);
        while let Some(command) = bench.membership.take_command() {
            match command {
                // It was waiting, and asks again.
                Command::Probe => bench.membership.polled(bench.now),
                Command::Send(request) => bench.sent.push(request),
                _ => {}
            }
        }
        bench.confirm();
    }
    assert_eq!(bench.told(), Vec::<String>::new());
}

#[test]
fn leave_carries_what_is_acknowledged_and_ends_the_membership() {
    let mut bench = Bench::with_claims(&[(0, 1, None), (1, 1, Some(9))]);
    let claim = bench.deliver_of(0, 1, 0..5).unwrap();
    bench.ack(0, claim, 0..3);
    bench.membership.leave(true, bench.now);
    bench.run();
    assert_eq!(bench.deliver_of(0, 1, 5..6), None);
    let leave = bench.left().unwrap();
    assert!(leave.keep_place);
    let offsets: Vec<_> = leave.claims.iter().map(|claim| claim.offset).collect();
    assert_eq!(offsets, [Some(3), Some(9)]);
    assert!(!bench.membership.has_ended());
    bench.hear(Response::Done(v1::Done {
        correlation_id: leave.correlation_id,
        error: None,
    }));
    assert!(bench.membership.has_ended());
    assert!(bench.membership.failure().is_none());
}

#[test]
fn leave_on_a_broken_stream_goes_out_on_the_next() {
    let mut bench = Bench::with_claims(&[(0, 1, None)]);
    let claim = bench.deliver(0, 0..5).unwrap();
    bench.membership.leave(false, bench.now);
    bench.run();
    bench.left().unwrap();
    bench.membership.on_down(bench.now);
    // What is acknowledged meanwhile counts.
    assert!(bench.ack(0, claim, 0..5));
    assert_eq!(bench.open(2).member_epoch, 1);
    assert!(bench.left().is_none(), "it may have been carried out");
    bench.hear(update(1, &[0], &[(0, 1, None)]));
    let leave = bench.left().unwrap();
    assert_eq!(leave.claims[0].offset, Some(5));
}

#[test]
fn leave_that_was_carried_out_and_not_answered_is_no_failure_the_second_time() {
    for acknowledged_later in [false, true] {
        let mut bench = Bench::with_claims(&[(0, 1, None)]);
        let claim = bench.deliver(0, 0..5).unwrap();
        bench.ack(0, claim, 0..3);
        bench.membership.leave(false, bench.now);
        bench.run();
        let leave = bench.left().unwrap();
        bench.hear(done(leave.correlation_id, Some(ErrorCode::OutcomeUnknown)));
        if acknowledged_later {
            bench.ack(0, claim, 3..5);
        }
        bench.open(1);
        bench.hear(update(2, &[], &[]));
        let leave = bench.left().unwrap();
        assert_eq!(leave.claims, []);
        bench.hear(done(leave.correlation_id, None));
        assert!(bench.membership.has_ended());
        let failure = bench.membership.failure().map(Error::kind);
        // Of that nobody knows.
        let expected = acknowledged_later.then_some(ErrorKind::ClaimFenced);
        assert_eq!(failure, expected);
    }
}

#[test]
fn claims_that_are_finished_one_by_one_wait_for_the_release_under_way_and_go_together() {
    let mut bench = Bench::with_claims(&[(0, 1, None), (1, 1, None), (2, 1, None)]);
    for partition in 0..3 {
        let attachment = u64::from(partition) + 1;
        bench.deliver_of(partition, attachment, 0..5).unwrap();
    }
    bench.hear(update(2, &[], &[(0, 1, None), (1, 1, None), (2, 1, None)]));
    for partition in 0..3 {
        bench.ack(partition, 1, 0..5);
    }
    let correlation_id = bench.sent.iter().find_map(|request| match request {
        Request::Release(release) => Some(release.correlation_id),
        _ => None,
    });
    assert_eq!(bench.released(), [(0, 1, Some(5))]);
    bench.hear(done(correlation_id.unwrap(), None));
    assert_eq!(bench.released(), [(1, 1, Some(5)), (2, 1, Some(5))]);
}

#[test]
fn leave_after_the_session_was_lost_says_so() {
    let mut bench = Bench::with_claims(&[(0, 1, None)]);
    bench.membership.on_down(bench.now);
    bench.membership.leave(false, bench.now);
    bench.pass(SESSION);
    assert!(bench.membership.has_ended());
    let failure = bench.membership.failure().unwrap();
    assert_eq!(failure.kind(), ErrorKind::UnknownMember);
}

#[test]
fn commits_by_hand_wait_for_the_program_and_so_do_releases() {
    let mut bench = Bench::new(Settings {
        by_hand: true,
        ..settings()
    });
    bench.open(1);
    bench.hear(update(1, &[0], &[(0, 1, None)]));
    let claim = bench.deliver(0, 0..5).unwrap();
    bench.ack(0, claim, 0..5);
    assert_eq!(bench.commits(), []);
    bench.hear(update(2, &[], &[(0, 1, None)]));
    assert_eq!(bench.released(), []);
    bench.membership.want_acknowledged(bench.now);
    bench.run();
    assert_eq!(bench.released(), [(0, 1, Some(5))]);
}

#[test]
fn offset_by_hand_is_refused_ahead_of_what_was_handed_out_and_behind_what_is_committed() {
    let mut bench = Bench::with_claims(&[(0, 1, Some(10))]);
    bench.deliver(0, 10..20).unwrap();
    let mut want = |offset| bench.membership.want_offset(place(0), offset, bench.now);
    assert_eq!(want(21), Err(Refusal::Ahead(20)));
    assert_eq!(want(9), Err(Refusal::Behind(10)));
    assert_eq!(want(15), Ok(()));
    assert_eq!(bench.commits(), [(0, 15)]);
    let elsewhere = bench.membership.want_offset(place(7), 1, bench.now);
    assert_eq!(elsewhere, Err(Refusal::NotHeld));
}

#[test]
fn pinned_beginning_is_committed_before_anything_is_acknowledged() {
    let mut bench = Bench::new(settings());
    bench.open(1);
    bench
        .membership
        .on_response(bench.stream, update(1, &[0], &[(0, 1, None)]), bench.now);
    let attached = bench.membership.attach(place(0), 1, 40, true, || Some(1));
    assert_eq!(attached, Attached::Yes);
    assert_eq!(bench.commits(), [(0, 40)]);
    bench.membership.committed(place(0), 1, 40);
    assert_eq!(bench.commits(), []);
}

#[test]
fn offsets_that_were_lost_are_jumped_over_and_do_not_hide_what_is_open() {
    let mut bench = Bench::with_claims(&[(0, 1, None)]);
    let claim = bench.deliver(0, 0..5).unwrap();
    assert!(bench.membership.moved(place(0), 1, 50, bench.now));
    assert_eq!(bench.commits(), []);
    bench.ack(0, claim, 0..5);
    assert_eq!(bench.commits(), [(0, 50)]);
    assert!(!bench.membership.moved(place(0), 7, 90, bench.now));
}

impl Bench {
    /// Publishes an assignment, and hears this of it.
    fn publish(&mut self, generation: u64, answer: Option<ErrorCode>) {
        self.membership.publish(generation, Vec::new(), self.now);
        self.run();
        let published = self.sent.iter().rev().find_map(|request| match request {
            Request::Publish(publish) => Some(publish.correlation_id),
            _ => None,
        });
        self.hear(done(published.unwrap(), answer));
    }
}

#[test]
fn assignment_that_is_refused_is_computed_again_when_asked_for_and_told_once() {
    let mut bench = Bench::new(settings());
    bench.open(1);
    bench.hear(asking(1, 5));
    bench.hear(asking(2, 5));
    assert_eq!(bench.computed, [5], "under way");
    bench.publish(5, Some(ErrorCode::NotReady));
    assert_eq!(bench.told(), [""; 0], "it passes");
    bench.hear(asking(3, 5));
    bench.publish(5, Some(ErrorCode::GroupLimit));
    assert_eq!(bench.told(), ["failed NotAssigned"]);
    bench.hear(asking(4, 5));
    bench.publish(5, Some(ErrorCode::GroupLimit));
    assert_eq!(bench.told(), [""; 0], "once");
    bench.hear(asking(5, 6));
    bench.publish(6, None);
    assert_eq!(bench.computed, [5, 5, 5, 6]);
    assert_eq!(bench.told(), [""; 0]);
}

#[test]
fn assignment_that_could_not_be_computed_is_computed_again_when_asked_for_and_told() {
    let mut bench = Bench::new(settings());
    bench.open(1);
    bench.hear(asking(1, 5));
    let failed = Error::new(ErrorKind::NotAssigned, "it panicked");
    bench.membership.not_computed(5, failed);
    assert_eq!(bench.told(), ["failed NotAssigned"]);
    bench.hear(asking(2, 5));
    assert_eq!(bench.computed, [5, 5]);
}

#[test]
fn subscription_that_is_refused_for_now_goes_with_the_next_join_and_for_good_is_told() {
    let mut bench = Bench::with_claims(&[(0, 1, None)]);
    let topics = |partitions| {
        vec![v1::TopicSubscription {
            topic_id: place(0).topic.to_wire(),
            partitions,
        }]
    };
    let subscribe = |bench: &mut Bench, partitions, code| {
        let now = bench.now;
        bench.membership.subscribe(topics(partitions), now);
        bench.run();
        let subscribed = bench.sent.iter().rev().find_map(|request| match request {
            Request::Topics(topics) => Some(topics.correlation_id),
            _ => None,
        });
        bench.hear(done(subscribed.unwrap(), Some(code)));
    };
    subscribe(&mut bench, 2, ErrorCode::OutcomeUnknown);
    assert_eq!(bench.told(), [""; 0]);
    assert_eq!(bench.open(1).topics, topics(2));
    subscribe(&mut bench, 3, ErrorCode::GroupLimit);
    assert_eq!(bench.told(), ["failed NotAssigned"]);
    assert!(!bench.membership.wants_stream());
    assert!(bench.deliver(0, 0..1).is_some(), "what it has flows on");
}
