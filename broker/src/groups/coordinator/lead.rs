//! The coordinator of one `__groups` partition in one term of its leader.
//!
//! Shared by the task that drives it ([`super::driver`]) and the streams and calls that it serves. It
//! ends with the term: whoever asks after that is told `NOT_LEADER`, and its successor begins anew with
//! what is applied. Whatever is proposed is bound to the term.
//!
//! Locks: `live` is held for moments, never across an await; the applied state is read inside of it
//! where the two have to fit together, never the other way round.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use qute_proto::ids::{MemberId, PartitionId, TopicId};
use qute_proto::internal::GroupsReply;
use qute_proto::internal::groups_command::Command;
use qute_proto::v1::{self, ErrorCode};
use tokio::sync::{Notify, oneshot, watch};

use super::mailbox::Mailbox;
use super::office::Office;
use super::sessions::{
    Applicant, Decision, Due, Name, Picture, Round, SessionId, Sessions, Standing, Synced, WaiterId,
};
use crate::controller::proposer::error;
use crate::groups::replica::{self, GroupReplica};
use crate::groups::state::{Group, Groups};

/// Topics that the members of a group read, each counted for each member.
const SUBSCRIPTIONS_MAX: usize = 100_000;

/// That the turn of a waiting join has come, or that it waits no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Come,
    Displaced,
    NoQuorum,
}

/// Who waits for a round.
type Reader = oneshot::Sender<Result<(), v1::Error>>;

/// A round under way, and whom it answers.
pub(super) struct Pending {
    pub(super) round: Round,
    readers: Vec<Reader>,
}

struct Live {
    sessions: Sessions,
    mailboxes: HashMap<SessionId, Arc<Mailbox>>,
    waiters: HashMap<WaiterId, oneshot::Sender<Turn>>,
    readers: Vec<Reader>,
    /// Members in whose place others were proposed, and nobody knows what came of it.
    doubtful: Vec<(Name, (MemberId, u64))>,
    /// Why it coordinates no more.
    ended: Option<v1::Error>,
}

impl Live {
    fn wake(&mut self, waiter: WaiterId, turn: Turn) {
        if let Some(waiting) = self.waiters.remove(&waiter) {
            // It may have given up.
            let _ = waiting.send(turn);
        }
    }

    fn end(&mut self, session: SessionId, error: &v1::Error) {
        if let Some(mailbox) = self.mailboxes.remove(&session) {
            mailbox.end(error);
        }
    }

    /// Those whose membership is over.
    fn end_all(&mut self, ended: &[SessionId]) {
        for session in ended {
            let text = "the membership has ended: the member has expired, left, or joined anew";
            self.end(*session, &error(ErrorCode::UnknownMember, text));
        }
    }

    fn tell(&self, concerned: &[SessionId]) {
        for session in concerned {
            if let Some(mailbox) = self.mailboxes.get(session) {
                mailbox.put(|letters| letters.concerned = true);
            }
        }
    }
}

/// See the module.
pub struct Coordinator {
    pub(super) replica: Arc<GroupReplica>,
    pub(super) term: u64,
    pub(super) office: Arc<Office>,
    live: Mutex<Live>,
    /// There is something for the driver.
    pub(super) work: Notify,
    /// Moves when something that a join was told to wait for may have come to its end.
    moved: watch::Sender<()>,
}

/// Where an applicant stands.
pub(super) enum Place {
    Decided(Decision),
    /// Waits for its turn; the waiter is to be given up.
    Waiting(WaiterId, oneshot::Receiver<Turn>),
}

impl Coordinator {
    pub(super) fn new(replica: Arc<GroupReplica>, term: u64, office: Arc<Office>) -> Self {
        Self {
            replica,
            term,
            office,
            live: Mutex::new(Live {
                sessions: Sessions::new(Instant::now()),
                mailboxes: HashMap::new(),
                waiters: HashMap::new(),
                readers: Vec::new(),
                doubtful: Vec::new(),
                ended: None,
            }),
            work: Notify::new(),
            moved: watch::Sender::new(()),
        }
    }

    /// Its term: updates of an older coordinator are stale.
    #[must_use]
    pub fn term(&self) -> u64 {
        self.term
    }

    /// Which partition of `__groups`.
    #[must_use]
    pub fn partition(&self) -> PartitionId {
        self.replica.partition()
    }

    /// Looks at what is applied. Applying waits meanwhile: be short.
    pub fn read<T>(&self, look: impl FnOnce(&Groups) -> T) -> T {
        self.replica.state().read(look)
    }

    /// How many members have a session here.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.live.lock().sessions.len()
    }

    /// Waits for a ReadIndex round begun after the call (S18): what is read afterwards holds all that
    /// was committed before it. Callers share rounds.
    ///
    /// # Errors
    /// `NOT_LEADER`, `NOT_READY`.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn confirm(&self) -> Result<(), v1::Error> {
        let (reader, answer) = oneshot::channel();
        {
            let mut live = self.live.lock();
            if let Some(ended) = &live.ended {
                return Err(ended.clone());
            }
            live.readers.push(reader);
        }
        self.work.notify_one();
        match answer.await {
            Ok(outcome) => outcome,
            Err(_dropped) => Err(self.ended()),
        }
    }

    /// Proposes a command and waits until it is applied.
    ///
    /// # Errors
    /// Typed: `OUTCOME_UNKNOWN` once it was submitted, else nothing was written. What the state machine
    /// refuses comes as such an error, too.
    ///
    /// # Cancel safety
    /// A dropped call may have submitted it.
    pub async fn command(&self, command: Command) -> Result<GroupsReply, v1::Error> {
        let outcome = self.replica.command_in(self.term, command).await;
        let (reply, _index) =
            outcome.map_err(|refused| self.office.refusal(&refused, self.partition()))?;
        if reply.code == 0 {
            return Ok(reply);
        }
        Err(v1::Error {
            code: reply.code,
            message: reply.message,
            ..v1::Error::default()
        })
    }

    /// Why it coordinates no more; `NOT_LEADER` if that has not been said.
    pub(super) fn ended(&self) -> v1::Error {
        let ended = self.live.lock().ended.clone();
        ended.unwrap_or_else(|| {
            self.office
                .refusal(&replica::Error::NotLeader, self.partition())
        })
    }

    /// Whether it coordinates still.
    pub(super) fn is_live(&self) -> bool {
        self.live.lock().ended.is_none()
    }

    /// Whether its replica serves in its term, as far as that replica knows.
    pub(super) fn is_serving(&self) -> bool {
        self.replica.serving() == Some(self.term)
    }

    // For the driver.

    /// Takes in all groups that have members: each member gets a whole session timeout (S26).
    pub(super) fn begin(&self) {
        // What changed before is in the picture.
        let _ = self.replica.state().take_changed();
        let names = self.with_members();
        for name in &names {
            self.take_in(name);
        }
    }

    /// Takes in what is applied of one group. Its members are not told yet: the driver does that, for
    /// many changes at once.
    pub(super) fn sync(&self, name: &Name) -> Synced {
        let synced = self.take_in(name);
        if synced.raised {
            metrics::counter!("qute_group_generations_total").increment(1);
        }
        synced
    }

    fn take_in(&self, name: &Name) -> Synced {
        let mut live = self.live.lock();
        // Inside of the lock, so that pictures come in order.
        let picture = self.read(|groups| groups.get(name).map(picture));
        let synced = live.sessions.sync(Instant::now(), name, picture.as_ref());
        live.end_all(&synced.ended);
        for waiter in &synced.turns {
            live.wake(*waiter, Turn::Come);
        }
        drop(live);
        self.moved.send_replace(());
        synced
    }

    /// Takes in what is applied of one group, and lets its members look. Returns how many may have
    /// something to be told.
    pub(super) fn refresh(&self, name: &Name) -> usize {
        let synced = self.sync(name);
        self.live.lock().tell(&synced.concerned);
        synced.concerned.len()
    }

    /// All groups that have members, and those that had.
    pub(super) fn groups(&self) -> Vec<Name> {
        let mut names = self.live.lock().sessions.groups();
        names.extend(self.with_members());
        names.sort_unstable();
        names.dedup();
        names
    }

    fn with_members(&self) -> Vec<Name> {
        self.read(|groups| {
            let groups = groups.iter_after("");
            let with_members = groups.filter(|(_, group)| !group.members().is_empty());
            with_members.map(|(name, _)| Arc::clone(name)).collect()
        })
    }

    /// S26: what the round that begins now is to answer; `None`: nobody. Heartbeats alone wait for a
    /// tick.
    pub(super) fn begin_round(&self, is_tick: bool) -> Option<Pending> {
        let mut live = self.live.lock();
        let is_wanted = !live.readers.is_empty()
            || live.sessions.wants_round_now()
            || (is_tick && live.sessions.wants_round());
        is_wanted.then(|| Pending {
            round: live.sessions.begin_round(),
            readers: std::mem::take(&mut live.readers),
        })
    }

    /// The round has confirmed this coordinator.
    pub(super) fn confirmed(&self, pending: Pending) {
        let live = self.live.lock();
        for (session, sequence) in pending.round.heartbeats {
            if let Some(mailbox) = live.mailboxes.get(&session) {
                mailbox.put(|letters| letters.heartbeat = Some(sequence));
            }
        }
        for session in pending.round.joined {
            if let Some(mailbox) = live.mailboxes.get(&session) {
                mailbox.put(|letters| (letters.joined, letters.concerned) = (true, true));
            }
        }
        drop(live);
        for reader in pending.readers {
            // It may have given up.
            let _ = reader.send(Ok(()));
        }
    }

    /// The round has found no quorum: members and joins look for another coordinator, readers try
    /// again. Leases run on.
    pub(super) fn unconfirmed(&self, pending: Pending, refused: &v1::Error) {
        for reader in pending.readers {
            let _ = reader.send(Err(refused.clone()));
        }
        let mut live = self.live.lock();
        let mailboxes = std::mem::take(&mut live.mailboxes);
        for (session, mailbox) in mailboxes {
            live.sessions.detach(Instant::now(), session);
            mailbox.end(refused);
        }
        for (waiter, turn) in std::mem::take(&mut live.waiters) {
            live.sessions.unwait(waiter);
            // It may have given up.
            let _ = turn.send(Turn::NoQuorum);
        }
    }

    pub(super) fn wants_ticks(&self) -> bool {
        self.live.lock().sessions.wants_ticks()
    }

    /// Looks at the clock: wakes whose turn has come and who is asked, and returns who has expired.
    pub(super) fn tick(&self) -> Vec<(Name, Vec<(MemberId, u64)>)> {
        let mut live = self.live.lock();
        let Due {
            expired,
            turns,
            asked,
        } = live.sessions.tick(Instant::now());
        for waiter in turns {
            live.wake(waiter, Turn::Come);
        }
        for session in asked {
            if let Some(mailbox) = live.mailboxes.get(&session) {
                mailbox.put(|letters| letters.concerned = true);
            }
        }
        expired
    }

    /// Members that are to be let alone until it is known what came of a takeover.
    pub(super) fn take_doubtful(&self) -> Vec<(Name, (MemberId, u64))> {
        std::mem::take(&mut self.live.lock().doubtful)
    }

    /// The proposal of an expiry has come to its end: the state says what came of it.
    pub(super) fn expiry_ended(&self, name: &Name, members: &[(MemberId, u64)]) {
        self.sync(name);
        let mut live = self.live.lock();
        live.sessions.expiry_ended(Instant::now(), name, members);
        drop(live);
        self.moved.send_replace(());
    }

    /// It coordinates no more: all sessions, readers and waiting joins are told so.
    pub(super) fn end(&self, refused: &v1::Error) {
        let mut live = self.live.lock();
        live.ended.get_or_insert_with(|| refused.clone());
        for mailbox in std::mem::take(&mut live.mailboxes).into_values() {
            mailbox.end(refused);
        }
        // Dropped senders say it.
        live.waiters.clear();
        live.readers.clear();
        drop(live);
        self.moved.send_replace(());
    }

    // For joins.

    pub(super) fn watch_moved(&self) -> watch::Receiver<()> {
        self.moved.subscribe()
    }

    pub(super) fn decide(&self, applicant: &Applicant) -> Result<Place, v1::Error> {
        let mut live = self.live.lock();
        if let Some(ended) = &live.ended {
            return Err(ended.clone());
        }
        let decision = live.sessions.decide(Instant::now(), applicant);
        let Decision::Wait { waiter, displaced } = decision else {
            return Ok(Place::Decided(decision));
        };
        if let Some(displaced) = displaced {
            live.wake(displaced, Turn::Displaced);
        }
        let (turn, come) = oneshot::channel();
        live.waiters.insert(waiter, turn);
        Ok(Place::Waiting(waiter, come))
    }

    pub(super) fn unwait(&self, waiter: WaiterId) {
        let mut live = self.live.lock();
        live.sessions.unwait(waiter);
        live.waiters.remove(&waiter);
    }

    /// The proposal of a join has come to its end; unless that is known, it may be applied later: whom
    /// it replaces gets no session before that has been settled.
    pub(super) fn join_ended(
        &self,
        applicant: &Applicant,
        replaces: Option<(MemberId, u64)>,
        is_known: bool,
    ) {
        self.sync(&applicant.group);
        let mut live = self.live.lock();
        let settled = replaces.filter(|_| is_known);
        live.sessions.join_ended(Instant::now(), applicant, settled);
        if let Some(replaced) = replaces.filter(|_| !is_known) {
            live.doubtful.push((applicant.group.clone(), replaced));
        }
        drop(live);
        self.work.notify_one();
        self.moved.send_replace(());
    }

    pub(super) fn attach(&self, applicant: &Applicant) -> Option<(SessionId, Arc<Mailbox>)> {
        let mut live = self.live.lock();
        if live.ended.is_some() {
            return None;
        }
        let (session, displaced) = live.sessions.attach(Instant::now(), applicant)?;
        if let Some(displaced) = displaced {
            let text = "another stream of the member goes on with the session";
            live.end(displaced, &error(ErrorCode::UnknownMember, text));
        }
        let mailbox = Arc::new(Mailbox::default());
        live.mailboxes.insert(session, Arc::clone(&mailbox));
        drop(live);
        self.work.notify_one();
        Some((session, mailbox))
    }

    // For sessions.

    pub(super) fn heartbeat(&self, session: SessionId, sequence: u64) {
        let mut live = self.live.lock();
        let had_none = !live.sessions.wants_round();
        live.sessions.heartbeat(Instant::now(), session, sequence);
        drop(live);
        if had_none {
            self.work.notify_one();
        }
    }

    pub(super) fn asked(&self, session: SessionId) -> Option<u64> {
        self.live.lock().sessions.asked(session)
    }

    pub(super) fn detach(&self, session: SessionId) {
        let mut live = self.live.lock();
        live.mailboxes.remove(&session);
        live.sessions.detach(Instant::now(), session);
    }

    /// S27: the session is closed, its place kept.
    pub(super) fn close(&self, session: SessionId) {
        let mut live = self.live.lock();
        live.mailboxes.remove(&session);
        if let Some(waiter) = live.sessions.close(Instant::now(), session) {
            live.wake(waiter, Turn::Come);
        }
    }

    /// Whether the group may keep these partitions' offsets, too.
    ///
    /// # Errors
    /// `GROUP_LIMIT`.
    pub(super) fn check_offsets<'a>(
        &self,
        name: &str,
        mut partitions: impl ExactSizeIterator<Item = (&'a [u8], u32)>,
    ) -> Result<(), v1::Error> {
        let most = self.office.limits.offsets_max;
        let more = partitions.len();
        let kept = self.read(|groups| {
            let Some(group) = groups.get(name) else {
                return more;
            };
            let kept = group.slots().committed();
            if kept + more <= most {
                return kept;
            }
            let is_new = |(topic, partition): (&[u8], u32)| {
                let slot =
                    TopicId::from_wire(topic).and_then(|topic| group.slots().get(topic, partition));
                usize::from(slot.is_none_or(|slot| slot.committed().is_none()))
            };
            kept + partitions.by_ref().map(is_new).sum::<usize>()
        });
        if kept <= most {
            return Ok(());
        }
        let text = format!(
            "group `{name}` would keep {kept} offsets, {most} are allowed (`group_offsets_max`)"
        );
        Err(error(ErrorCode::GroupLimit, text))
    }

    /// Whether a group may assign so many partitions: as many as it may keep offsets of, so that what
    /// is released can always be committed.
    ///
    /// # Errors
    /// `GROUP_LIMIT`.
    pub(super) fn check_assigned(&self, partitions: usize) -> Result<(), v1::Error> {
        let most = self.office.limits.offsets_max;
        if partitions <= most {
            return Ok(());
        }
        let text = format!(
            "an assignment of {partitions} partitions, {most} are allowed (`group_offsets_max`)"
        );
        Err(error(ErrorCode::GroupLimit, text))
    }

    /// Whether there may be a group of this name.
    ///
    /// # Errors
    /// `GROUP_LIMIT`.
    pub(super) fn check_group(&self, name: &str) -> Result<(), v1::Error> {
        if self.read(|groups| groups.get(name).is_some()) {
            return Ok(());
        }
        let most = self.office.limits.groups_max;
        if self.office.groups() < most {
            return Ok(());
        }
        let text =
            format!("this broker coordinates {most} groups, as many as it may (`groups_max`)");
        Err(error(ErrorCode::GroupLimit, text))
    }

    /// Whether the group may have another member.
    ///
    /// # Errors
    /// `GROUP_LIMIT`.
    pub(super) fn check_members(&self, name: &str, id: MemberId) -> Result<(), v1::Error> {
        self.check_group(name)?;
        let most = self.office.limits.members_max;
        let is_full = self.read(|groups| {
            let members = groups.get(name).map(Group::members);
            members.is_some_and(|it| it.len() >= most && it.get(id).is_none())
        });
        if !is_full {
            return Ok(());
        }
        let text =
            format!("group `{name}` has {most} members, as many as it may (`group_members_max`)");
        Err(error(ErrorCode::GroupLimit, text))
    }

    /// Whether a member may read so many topics: all members' subscriptions go to the one that computes
    /// the assignment, in one message.
    ///
    /// # Errors
    /// `GROUP_LIMIT`.
    pub(super) fn check_subscriptions(
        &self,
        name: &str,
        id: MemberId,
        topics: usize,
    ) -> Result<(), v1::Error> {
        let others = self.read(|groups| {
            let members = groups
                .get(name)
                .into_iter()
                .flat_map(|it| it.members().iter());
            let others = members.filter(|member| member.id != id);
            others.map(|member| member.topics.len()).sum::<usize>()
        });
        let all = others + topics;
        if all <= SUBSCRIPTIONS_MAX {
            return Ok(());
        }
        let text = format!(
            "the members of group `{name}` would read {all} topics, each counted for each member; \
             {SUBSCRIPTIONS_MAX} are allowed"
        );
        Err(error(ErrorCode::GroupLimit, text))
    }
}

fn picture(group: &Group) -> Picture {
    let members = group.members().iter().map(|member| Standing {
        id: member.id,
        epoch: member.epoch,
        instance: (&*member.instance).into(),
        timeout: Duration::from_millis(member.session_timeout_ms.into()),
    });
    Picture {
        generation: group.generation(),
        assigned_generation: group.assigned_generation(),
        members: members.collect(),
    }
}
