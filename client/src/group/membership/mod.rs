//! What a member of a group is, and what it may do now. Pure: time is given, and what is to be done
//! comes out as [`Command`]s (for the session's task) and [`Told`] (for the program).
//!
//! ```text
//!            open            joined           first confirmed           deadline passed
//!  [apart] ------> [joining] ------> [joined] ---------------> [alive] ----------------> [apart]
//!     ^                                 '--- stream broken: resume, same id and epoch ---'  | epoch + 1
//!     '-------------------------------------------------------------------------------------'
//!
//!  claim:  Granted ----> Starting ----> Active ----> Revoking ----> Releasing ----> gone
//!          alive?  told  its offset     delivers     no target      all acked, or the deadline:
//!                                                    any more       Release with the offset
//! ```
//!
//! Invariants:
//! - S26: nothing is handed out, and nothing committed, once the send time of the last acknowledged
//!   heartbeat lies a session timeout back ([`Membership::advance`] comes first in every input).
//! - S27: a claim is given up by one request that carries its final offset, which is never below what was
//!   committed, and covers nothing that the program has not acknowledged.
//! - S28: updates of an older coordinator, or of a lower revision, change nothing.
//! - What is handed out belongs to the present attachment of the present epoch of a claim; whatever is
//!   acknowledged later than that claim lasts, counts for nothing.
//!
//! | file | holds |
//! | --- | --- |
//! | `mod.rs` | the membership: what it is, its streams, what the coordinator says |
//! | `clock.rs` | what is due: deadline, heartbeats, doubts, the processing limit |
//! | `program.rs` | what the program asks for, to the end |
//! | `claims.rs` | the claims: updates, grants, releases |
//! | `work.rs` | hand-out, acknowledgements, commits |
//! | `model.rs` | property tests |

mod claims;
mod clock;
#[cfg(test)]
mod model;
mod program;
#[cfg(test)]
mod tests;
mod work;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use qute_proto::ids::{MemberId, PartitionId};
use qute_proto::v1::session_request::Request;
use qute_proto::v1::session_response::Response;
use qute_proto::v1::{self, ErrorCode};
use tokio::time::Instant;

use crate::error::Error;
use claims::Claim;
pub(super) use work::{Attached, Held, Parting, Refusal};

/// How a member behaves.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) group: String,
    pub(super) instance: String,
    pub(super) rack: String,
    pub(super) client: String,
    pub(super) assignors: Vec<v1::AssignorVersion>,
    pub(super) session_timeout: Duration,
    pub(super) revoke_timeout: Duration,
    pub(super) processing_limit: Option<Duration>,
    /// What is acknowledged is committed only when the program says so.
    pub(super) by_hand: bool,
}

/// Why partitions were lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LostReason {
    /// The coordinator was out of reach for a session timeout, or has ended the session: others may
    /// have the partitions now.
    SessionExpired,
    /// The claim is held by another, or anew: an operator has reset the offsets by force, or the topic
    /// was deleted.
    Fenced,
    /// The program did not finish what it was handed within the revoke timeout.
    RevokeTimeout,
    /// The program neither asked for more nor acknowledged anything for the processing limit.
    ProcessingLimit,
}

/// What the program is told, in this order.
#[derive(Debug)]
pub(super) enum Told {
    Assigned(Vec<PartitionId>),
    Revoking {
        claims: Vec<(PartitionId, u64)>,
        deadline: Instant,
    },
    Lost {
        partitions: Vec<PartitionId>,
        reason: LostReason,
    },
    Failed(Error),
}

/// What the session's task does.
#[derive(Debug)]
pub(super) enum Command {
    /// On the present stream.
    Send(Request),
    /// Ends the present stream. With `doubt` the coordinator at its other end may be none any more.
    Close {
        doubt: bool,
    },
    /// Finds where the partition begins, and attaches it: [`Membership::attach`].
    Attach {
        place: PartitionId,
        epoch: u64,
        committed: Option<u64>,
    },
    Detach(PartitionId),
    /// Computes an assignment: [`Membership::publish`].
    Compute(v1::AssignTask),
    /// Wakes the program: if it waits for the next event, it asks again.
    Probe,
}

/// What the member is about.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Life {
    /// To be a member.
    Running,
    /// Not to be one until the program polls: it was too slow.
    Suspended,
    /// To leave in order.
    Leaving { keep_place: bool },
    /// Nothing comes after this.
    Ended,
}

#[derive(Debug)]
struct Stream {
    number: u64,
    opened_at: Instant,
    /// This very member epoch was asked for on no stream before.
    first: bool,
    /// Once the coordinator has answered.
    coordinator_epoch: Option<u64>,
    /// An update has come.
    updated: bool,
    last_sequence: u64,
    /// Not acknowledged yet, with the time of sending, in order.
    heartbeats: VecDeque<(u64, Instant)>,
    next_heartbeat: Instant,
    /// What is not answered yet.
    waiting: BTreeMap<u64, Asked>,
    /// The generation that an assignment is being computed for here.
    computing: Option<u64>,
}

#[derive(Debug)]
enum Asked {
    Release(Vec<(PartitionId, u64)>),
    Leave(Vec<(PartitionId, u64)>),
    /// An assignment for that generation.
    Publish(u64),
    Topics,
}

/// See the module header.
#[derive(Debug)]
pub(super) struct Membership {
    settings: Settings,
    id: MemberId,
    epoch: u64,
    /// A join with this epoch has been sent.
    epoch_sent: bool,
    life: Life,
    /// In force.
    session_timeout: Duration,
    /// S26. `None` before this epoch's session was confirmed.
    deadline: Option<Instant>,
    stream: Option<Stream>,
    last_stream: u64,
    last_correlation: u64,
    /// Coordinator epoch and revision of the last update taken in.
    floor: (u64, u64),
    /// Of that update.
    generation: u64,
    /// The program was told that there is no assignment for this generation.
    not_assigned: Option<u64>,
    topics: Vec<v1::TopicSubscription>,
    claims: BTreeMap<PartitionId, Claim>,
    /// Whose final offsets the coordinator has confirmed, with their epochs, as long as a commit may ask.
    parted: BTreeMap<PartitionId, u64>,
    /// Epochs and offsets of the last request to leave, on whichever stream.
    left_with: BTreeMap<PartitionId, (u64, Option<u64>)>,
    /// The last time that the program polled or acknowledged.
    active_at: Instant,
    /// The program has been probed since.
    probed_at: Option<Instant>,
    /// It has been a member.
    has_joined: bool,
    /// Why it has ended, if not by the program's will.
    failure: Option<Error>,
    commands: VecDeque<Command>,
    told: VecDeque<Told>,
}

impl Membership {
    pub(super) fn new(
        id: MemberId,
        settings: Settings,
        topics: Vec<v1::TopicSubscription>,
        now: Instant,
    ) -> Self {
        Self {
            session_timeout: settings.session_timeout,
            settings,
            id,
            epoch: 1,
            epoch_sent: false,
            life: Life::Running,
            deadline: None,
            stream: None,
            last_stream: 0,
            last_correlation: 0,
            floor: (0, 0),
            generation: 0,
            not_assigned: None,
            topics,
            claims: BTreeMap::new(),
            parted: BTreeMap::new(),
            left_with: BTreeMap::new(),
            active_at: now,
            probed_at: None,
            has_joined: false,
            failure: None,
            commands: VecDeque::new(),
            told: VecDeque::new(),
        }
    }

    // What is asked of it.

    pub(super) fn id(&self) -> MemberId {
        self.id
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation
    }

    /// It has been a member once.
    pub(super) fn has_joined(&self) -> bool {
        self.has_joined
    }

    /// Nothing comes after this.
    pub(super) fn has_ended(&self) -> bool {
        self.life == Life::Ended
    }

    pub(super) fn failure(&self) -> Option<&Error> {
        self.failure.as_ref()
    }

    /// There is none, and there is to be one.
    pub(super) fn wants_stream(&self) -> bool {
        self.stream.is_none() && matches!(self.life, Life::Running | Life::Leaving { .. })
    }

    /// S26: it may deliver and commit.
    pub(super) fn is_alive(&self, now: Instant) -> bool {
        self.deadline.is_some_and(|deadline| now < deadline)
    }

    /// When [`Self::advance`] has something to do.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let stream = self.stream.as_ref();
        let heartbeat = stream
            .filter(|stream| stream.coordinator_epoch.is_some())
            .map(|stream| stream.next_heartbeat);
        let doubt = stream.map(|stream| self.doubted_at(stream));
        let revoke = self.claims.values().filter_map(Claim::due).min();
        let limit = self.limited_at();
        let times = [self.deadline, heartbeat, doubt, revoke, limit];
        times.into_iter().flatten().min()
    }

    pub(super) fn take_command(&mut self) -> Option<Command> {
        self.commands.pop_front()
    }

    pub(super) fn take_told(&mut self) -> Option<Told> {
        self.told.pop_front()
    }

    pub(super) fn has_commands(&self) -> bool {
        !self.commands.is_empty()
    }

    /// S26: until then it may deliver and commit, by what is known now.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// It leaves, or has left, in order.
    pub(super) fn is_leaving(&self) -> bool {
        matches!(self.life, Life::Leaving { .. } | Life::Ended)
    }

    /// The program has something to hear.
    pub(super) fn has_told(&self) -> bool {
        !self.told.is_empty()
    }

    // Streams.

    /// A stream is being opened: what goes first on it, and its number.
    pub(super) fn open(&mut self, now: Instant) -> (u64, v1::SessionRequest) {
        self.advance(now);
        self.last_stream += 1;
        self.stream = Some(Stream {
            number: self.last_stream,
            opened_at: now,
            first: !self.epoch_sent,
            coordinator_epoch: None,
            updated: false,
            last_sequence: 0,
            heartbeats: VecDeque::new(),
            next_heartbeat: now,
            waiting: BTreeMap::new(),
            computing: None,
        });
        // Of an older stream.
        self.commands
            .retain(|command| !matches!(command, Command::Send(_) | Command::Close { .. }));
        self.epoch_sent = true;
        let join = v1::Join {
            group: self.settings.group.clone(),
            member_id: self.id.to_wire(),
            member_epoch: self.epoch,
            instance: self.settings.instance.clone(),
            rack: self.settings.rack.clone(),
            client: self.settings.client.clone(),
            assignors: self.settings.assignors.clone(),
            topics: self.topics.clone(),
            session_timeout_ms: u32::try_from(self.settings.session_timeout.as_millis())
                .unwrap_or(u32::MAX),
        };
        let request = v1::SessionRequest {
            request: Some(Request::Join(join)),
        };
        (self.last_stream, request)
    }

    /// The present stream, if any, has ended.
    pub(super) fn on_down(&mut self, now: Instant) {
        self.stream = None;
        self.commands
            .retain(|command| !matches!(command, Command::Send(_) | Command::Close { .. }));
        self.advance(now);
    }

    /// What came on the stream of that number.
    pub(super) fn on_response(&mut self, number: u64, response: Response, now: Instant) {
        self.advance(now);
        if self
            .stream
            .as_ref()
            .is_none_or(|stream| stream.number != number)
        {
            return;
        }
        match response {
            Response::Joined(joined) => self.on_joined(&joined, now),
            Response::Heartbeat(ack) => self.on_heartbeat(ack.sequence),
            Response::Update(update) => self.on_update(update, now),
            Response::Done(done) => self.on_done(&done, now),
            Response::Error(error) => self.on_error(&error),
        }
        self.settle();
    }

    fn on_joined(&mut self, joined: &v1::Joined, now: Instant) {
        if joined.coordinator_epoch < self.floor.0 {
            // S28: deposed, and does not know it yet.
            return self.close_in_doubt();
        }
        if joined.session_timeout_ms > 0 {
            self.session_timeout = Duration::from_millis(joined.session_timeout_ms.into());
        }
        let Some(stream) = &mut self.stream else {
            return;
        };
        stream.coordinator_epoch = Some(joined.coordinator_epoch);
        stream.next_heartbeat = now;
        let deadline = stream.opened_at + self.session_timeout;
        if stream.first && now < deadline {
            // The join was committed after it was sent: it confirms as a heartbeat does (S26). One that
            // may have been sent before says nothing, its coordinator may be deposed.
            self.deadline = Some(deadline);
        }
        self.has_joined = true;
        self.advance(now);
    }

    fn on_heartbeat(&mut self, sequence: u64) {
        let Some(stream) = &mut self.stream else {
            return;
        };
        while let Some(&(sent, at)) = stream.heartbeats.front()
            && sent <= sequence
        {
            stream.heartbeats.pop_front();
            // S26: from the moment of sending.
            self.deadline = self.deadline.max(Some(at + self.session_timeout));
        }
    }

    fn on_done(&mut self, done: &v1::Done, now: Instant) {
        let asked = self
            .stream
            .as_mut()
            .and_then(|stream| stream.waiting.remove(&done.correlation_id));
        let error = done.error.as_ref();
        if error.is_some_and(|error| error.code() == ErrorCode::UnknownMember) {
            return self.on_error(&done.error.clone().unwrap_or_default());
        }
        match asked {
            Some(Asked::Release(claims)) => self.on_released(&claims, error, now),
            // What may yet be done is done on another stream.
            Some(Asked::Leave(_))
                if error.is_some_and(|error| is_of_the_coordinator(error.code())) =>
            {
                self.close();
            }
            Some(Asked::Leave(claims)) => {
                match error {
                    Some(error) => self.failure = Some(Error::told(error)),
                    None => self.parted.extend(claims),
                }
                self.end_leaving();
            }
            Some(Asked::Publish(generation)) => match error {
                Some(error) if error.code() != ErrorCode::StaleGeneration => {
                    self.not_assigned(generation, Some(error.code()), Error::told(error));
                }
                _ => {}
            },
            Some(Asked::Topics) => {
                if let Some(error) = error {
                    self.not_subscribed(error);
                }
            }
            None => {}
        }
    }

    /// The coordinator has ended the session.
    fn on_error(&mut self, error: &v1::Error) {
        match error.code() {
            ErrorCode::UnknownMember => self.lose_session(),
            code if is_of_the_coordinator(code) => {}
            _ => self.fail(Error::told(error)),
        }
        self.close();
    }

    /// There is no way to be a member.
    pub(super) fn fail(&mut self, error: Error) {
        self.lose(|_, _| true, LostReason::SessionExpired);
        self.failure = Some(error.clone());
        self.told.push_back(Told::Failed(error));
        self.life = Life::Ended;
        self.deadline = None;
        self.close();
    }

    fn close(&mut self) {
        self.close_in(false);
    }

    /// What the coordinator does, or does not, makes no sense of one that serves.
    fn close_in_doubt(&mut self) {
        self.close_in(true);
    }

    fn close_in(&mut self, doubt: bool) {
        if self.stream.take().is_some() {
            self.commands.push_back(Command::Close { doubt });
        }
    }

    fn ask(&mut self, asked: Asked) -> u64 {
        self.last_correlation += 1;
        if let Some(stream) = &mut self.stream {
            stream.waiting.insert(self.last_correlation, asked);
        }
        self.last_correlation
    }

    fn send(&mut self, request: Request) {
        self.commands.push_back(Command::Send(request));
    }
}

/// Another coordinator, or this one a little later, may do it.
fn is_of_the_coordinator(code: ErrorCode) -> bool {
    matches!(
        code,
        ErrorCode::NotLeader
            | ErrorCode::NotReady
            | ErrorCode::OutcomeUnknown
            | ErrorCode::Overloaded
            | ErrorCode::StorageFull
            | ErrorCode::ReplicaQuarantined
            | ErrorCode::Internal
            | ErrorCode::Unspecified
    )
}
