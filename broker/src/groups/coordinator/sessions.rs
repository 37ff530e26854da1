//! The sessions of one `__groups` partition in one term of its leader: who is alive, who is to expire,
//! who is to compute an assignment.
//!
//! Pure: what is applied comes in by [`Sessions::sync`], time by arguments, and what is to be done goes
//! out as values. Leader-local: nothing of it is replicated, and it ends with the term.
//!
//! ```text
//!                    sync                       heartbeat, join: the deadline moves
//!   not a member ------------> lease, no session <----------------> lease with a session
//!         ^                      |        ^  stream breaks (no close!)   | leave, keeping its place
//!         |                      |        '-------------------------.    v
//!         |                      | deadline                          lease, closed
//!         | sync                 v                                       | somebody joins under its
//!         '------------------ ending <-----------------------------------' stable name, or deadline
//!              (expiry or takeover is proposed)
//! ```
//!
//! S26: each lease begins with a whole timeout, under a new coordinator too; heartbeats leave in the
//! round that begins after their receipt ([`Sessions::begin_round`]).
//! S27: a join under the stable name of another waits until that one's lease is closed or has run out.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use qute_proto::ids::MemberId;

use super::assigner::Asking;
use super::steady::{Moment, Steady};

/// A name that many hold: of a group, or a stable one of a member.
pub type Name = Arc<str>;

/// After an expiry or a takeover that did not come to pass, or a waiting join that did not act.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// One stream of one member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(u64);

/// One join that waits for its turn under a stable name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WaiterId(u64);

/// What is applied of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Picture {
    /// In force.
    pub generation: u64,
    /// That the published assignment was made for.
    pub assigned_generation: u64,
    /// In the order of joining.
    pub members: Vec<Standing>,
}

/// A member of a [`Picture`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Who.
    pub id: MemberId,
    /// Its epoch.
    pub epoch: u64,
    /// Stable name; empty: none.
    pub instance: Name,
    /// How long its session lasts.
    pub timeout: Duration,
}

/// Who asks to join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applicant {
    /// Of which group.
    pub group: Name,
    /// Who.
    pub id: MemberId,
    /// Its epoch.
    pub epoch: u64,
    /// Stable name; empty: none.
    pub instance: Name,
}

/// What becomes of a join.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It is a member: give it a session.
    Resume,
    /// A member of this id has a newer epoch.
    Stale,
    /// Propose it, in the place of another if one is named. [`Sessions::join_ended`] must follow.
    Propose {
        /// Whose lease is closed or has run out (S27), and its epoch.
        replaces: Option<(MemberId, u64)>,
    },
    /// The name is taken: wait for the turn.
    Wait {
        /// To be woken.
        waiter: WaiterId,
        /// One that waited for the same name before, and waits no more.
        displaced: Option<WaiterId>,
    },
    /// Something is under way for this member or name: ask again when it has ended.
    Busy,
}

/// What a look at the clock found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Due {
    /// Members to expire, by group. [`Sessions::expiry_ended`] must follow.
    pub expired: Vec<(Name, Vec<(MemberId, u64)>)>,
    /// Joins whose turn has come.
    pub turns: Vec<WaiterId>,
    /// Sessions that are to compute an assignment.
    pub asked: Vec<SessionId>,
}

/// What a new picture of a group means for its sessions.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Synced {
    /// Their membership is over.
    pub ended: Vec<SessionId>,
    /// Joins whose turn has come: the holder of the name has gone for good.
    pub turns: Vec<WaiterId>,
    /// They may have something to be told.
    pub concerned: Vec<SessionId>,
    /// The generation has risen.
    pub raised: bool,
}

/// What one confirm round answers.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// The highest heartbeat of each session that was received before the round.
    pub heartbeats: Vec<(SessionId, u64)>,
    /// Sessions that have joined before it.
    pub joined: Vec<SessionId>,
}

#[derive(Debug)]
struct Lease {
    epoch: u64,
    instance: Name,
    timeout: Duration,
    /// In the index of deadlines, unless `ending`.
    deadline: Moment,
    session: Option<SessionId>,
    /// Its holder has stopped delivering, or has been silent for too long: another may have its place.
    closed: bool,
    /// Its end is proposed.
    ending: bool,
}

#[derive(Debug, Default)]
struct Group {
    /// The last one seen.
    generation: u64,
    leases: HashMap<MemberId, Lease>,
    order: Vec<MemberId>,
    asking: Option<Asking>,
    /// By stable name.
    waiting: HashMap<Name, WaiterId>,
    /// Stable names whose join is proposed.
    joining: HashSet<Name>,
}

impl Group {
    fn is_idle(&self) -> bool {
        self.leases.is_empty() && self.waiting.is_empty() && self.joining.is_empty()
    }
}

/// See the module.
#[derive(Debug)]
pub struct Sessions {
    clock: Steady,
    groups: HashMap<Name, Group>,
    sessions: HashMap<SessionId, (Name, MemberId)>,
    waiters: HashMap<WaiterId, (Name, Name)>,
    deadlines: BTreeSet<(Moment, Name, MemberId)>,
    asks: BTreeSet<(Moment, Name)>,
    /// For the next round.
    heartbeats: HashMap<SessionId, u64>,
    joined: Vec<SessionId>,
    next_id: u64,
}

impl Sessions {
    /// A coordinator begins to serve.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self {
            clock: Steady::new(now),
            groups: HashMap::new(),
            sessions: HashMap::new(),
            waiters: HashMap::new(),
            deadlines: BTreeSet::new(),
            asks: BTreeSet::new(),
            heartbeats: HashMap::new(),
            joined: Vec::new(),
            next_id: 0,
        }
    }

    /// Takes in what is applied of a group; `None`: there is none.
    pub fn sync(&mut self, now: Instant, name: &Name, picture: Option<&Picture>) -> Synced {
        let now = self.clock.read(now);
        let Some(picture) = picture.filter(|picture| !picture.members.is_empty()) else {
            return self.dissolve(now, name);
        };
        let mut synced = Synced::default();
        let group = self.groups.entry(name.clone()).or_default();
        group.order = picture.members.iter().map(|member| member.id).collect();
        let present: HashSet<MemberId> = group.order.iter().copied().collect();
        let gone: Vec<MemberId> = group.leases.keys().copied().collect();
        for member in gone.into_iter().filter(|member| !present.contains(member)) {
            self.end_lease(now, name, member, &mut synced);
        }
        for member in &picture.members {
            synced.ended.extend(self.take_in(now, name, member));
        }
        self.await_assignment(now, name, picture);
        if let Some(group) = self.groups.get_mut(name) {
            synced.raised = group.generation < picture.generation;
            group.generation = picture.generation;
            let leases = group.leases.values();
            synced.concerned = leases.filter_map(|lease| lease.session).collect();
        }
        synced
    }

    /// The group has no members any more.
    fn dissolve(&mut self, now: Moment, name: &Name) -> Synced {
        let mut synced = Synced::default();
        let Some(group) = self.groups.get_mut(name) else {
            return synced;
        };
        group.order.clear();
        let members: Vec<MemberId> = group.leases.keys().copied().collect();
        if let Some(due) = group.asking.take().and_then(|asking| asking.due()) {
            self.asks.remove(&(due, name.clone()));
        }
        for member in members {
            self.end_lease(now, name, member, &mut synced);
        }
        self.drop_if_idle(name);
        synced
    }

    /// A member that is there: new, or with a newer epoch, or as before. Returns a session of an older
    /// epoch.
    fn take_in(&mut self, now: Moment, name: &Name, member: &Standing) -> Option<SessionId> {
        let group = self.groups.get_mut(name)?;
        let mut ended = None;
        match group.leases.get_mut(&member.id) {
            Some(lease) if lease.epoch == member.epoch => {
                lease.timeout = member.timeout;
                lease.instance = member.instance.clone();
                return None;
            }
            Some(lease) => {
                if !lease.ending {
                    let old = (lease.deadline, name.clone(), member.id);
                    self.deadlines.remove(&old);
                }
                ended = lease.session.take();
            }
            None => {}
        }
        // S26: a whole timeout for everybody, under a new coordinator too.
        let deadline = now + member.timeout;
        let lease = Lease {
            epoch: member.epoch,
            instance: member.instance.clone(),
            timeout: member.timeout,
            deadline,
            session: None,
            closed: false,
            ending: false,
        };
        group.leases.insert(member.id, lease);
        self.deadlines.insert((deadline, name.clone(), member.id));
        if let Some(session) = ended {
            self.forget_session(session);
        }
        ended
    }

    fn await_assignment(&mut self, now: Moment, name: &Name, picture: &Picture) {
        let Some(group) = self.groups.get_mut(name) else {
            return;
        };
        let before = group.asking.as_ref().and_then(Asking::due);
        if picture.assigned_generation == picture.generation {
            group.asking = None;
        } else {
            match &mut group.asking {
                Some(asking) => asking.at(picture.generation, now),
                None => group.asking = Some(Asking::new(picture.generation, now)),
            }
        }
        let after = group.asking.as_ref().and_then(Asking::due);
        self.reindex_ask(name, before, after);
    }

    fn reindex_ask(&mut self, name: &Name, before: Option<Moment>, after: Option<Moment>) {
        if before == after {
            return;
        }
        if let Some(before) = before {
            self.asks.remove(&(before, name.clone()));
        }
        if let Some(after) = after {
            self.asks.insert((after, name.clone()));
        }
    }

    /// What is to become of a join, now that it has been received.
    pub fn decide(&mut self, now: Instant, applicant: &Applicant) -> Decision {
        let now = self.clock.read(now);
        let name = &applicant.group;
        let group = self.groups.entry(name.clone()).or_default();
        if let Some(lease) = group.leases.get(&applicant.id) {
            if lease.ending {
                return Decision::Busy;
            }
            if lease.epoch > applicant.epoch {
                return Decision::Stale;
            }
            let is_resumed = lease.epoch == applicant.epoch;
            self.extend(now, name, applicant.id);
            return match is_resumed {
                true => Decision::Resume,
                false => Decision::Propose { replaces: None },
            };
        }
        let instance = &applicant.instance;
        if instance.is_empty() {
            // A group that has only been asked for is no group yet.
            self.drop_if_idle(name);
            return Decision::Propose { replaces: None };
        }
        if group.joining.contains(instance) {
            return Decision::Busy;
        }
        let mut leases = group.leases.iter();
        let holder = leases
            .find(|(_, lease)| lease.instance == *instance)
            .map(|(holder, lease)| (*holder, lease.epoch, lease.closed, lease.ending));
        match holder {
            None => {
                group.joining.insert(instance.clone());
                Decision::Propose { replaces: None }
            }
            Some((_, _, _, true)) => Decision::Busy,
            // S27
            Some((holder, epoch, true, false)) => {
                group.joining.insert(instance.clone());
                self.begin_ending(name, holder);
                Decision::Propose {
                    replaces: Some((holder, epoch)),
                }
            }
            Some((_, _, false, false)) => self.wait(name, instance),
        }
    }

    fn wait(&mut self, name: &Name, instance: &Name) -> Decision {
        self.next_id += 1;
        let waiter = WaiterId(self.next_id);
        self.waiters
            .insert(waiter, (name.clone(), instance.clone()));
        let group = self.groups.entry(name.clone()).or_default();
        let displaced = group.waiting.insert(instance.clone(), waiter);
        if let Some(displaced) = displaced {
            self.waiters.remove(&displaced);
        }
        Decision::Wait { waiter, displaced }
    }

    /// A waiting join has given up. Nothing happens if it waits no more.
    pub fn unwait(&mut self, waiter: WaiterId) {
        let Some((name, instance)) = self.waiters.remove(&waiter) else {
            return;
        };
        if let Some(group) = self.groups.get_mut(&name) {
            group.waiting.remove(&instance);
        }
        self.drop_if_idle(&name);
    }

    /// The proposal of a join has come to its end, whatever that was, and what came of it has been
    /// taken in. While that is not known, the one that it `replaces` is left out:
    /// [`expiry_ended`](Self::expiry_ended) must follow for it.
    pub fn join_ended(
        &mut self,
        now: Instant,
        applicant: &Applicant,
        replaces: Option<(MemberId, u64)>,
    ) {
        if let Some(group) = self.groups.get_mut(&applicant.group) {
            group.joining.remove(&applicant.instance);
        }
        self.expiry_ended(now, &applicant.group, replaces.as_slice());
        self.drop_if_idle(&applicant.group);
    }

    /// The proposal of an expiry has come to its end, whatever that was, and what came of it has been
    /// taken in.
    pub fn expiry_ended(&mut self, now: Instant, name: &Name, members: &[(MemberId, u64)]) {
        let now = self.clock.read(now);
        for (member, epoch) in members {
            let leases = self.groups.get(name).map(|group| &group.leases);
            let lease = leases.and_then(|leases| leases.get(member));
            if lease.is_some_and(|lease| lease.epoch == *epoch) {
                self.undo_ending(now, name, *member);
            }
        }
    }

    fn begin_ending(&mut self, name: &Name, member: MemberId) {
        let group = self.groups.get_mut(name);
        let lease = group.and_then(|group| group.leases.get_mut(&member));
        if let Some(lease) = lease
            && !lease.ending
        {
            lease.ending = true;
            self.deadlines
                .remove(&(lease.deadline, name.clone(), member));
        }
    }

    fn undo_ending(&mut self, now: Moment, name: &Name, member: MemberId) {
        let group = self.groups.get_mut(name);
        let lease = group.and_then(|group| group.leases.get_mut(&member));
        if let Some(lease) = lease
            && lease.ending
        {
            lease.ending = false;
            lease.deadline = lease.deadline.max(now + AGAIN_AFTER);
            self.deadlines
                .insert((lease.deadline, name.clone(), member));
        }
    }

    /// Gives a member a session; it is told so by the next round. `None`: it is not a member, or its
    /// end is under way. Besides the session: the one that it had before.
    pub fn attach(
        &mut self,
        now: Instant,
        applicant: &Applicant,
    ) -> Option<(SessionId, Option<SessionId>)> {
        let now = self.clock.read(now);
        let name = &applicant.group;
        let group = self.groups.get_mut(name)?;
        let lease = group.leases.get_mut(&applicant.id)?;
        if lease.ending || lease.epoch != applicant.epoch {
            return None;
        }
        self.next_id += 1;
        let session = SessionId(self.next_id);
        let displaced = lease.session.replace(session);
        lease.closed = false;
        let before = group.asking.as_ref().and_then(Asking::due);
        if let Some(asking) = &mut group.asking {
            asking.attached(now);
        }
        let after = group.asking.as_ref().and_then(Asking::due);
        self.reindex_ask(name, before, after);
        if let Some(displaced) = displaced {
            self.forget_session(displaced);
        }
        self.sessions.insert(session, (name.clone(), applicant.id));
        self.joined.push(session);
        self.extend(now, name, applicant.id);
        Some((session, displaced))
    }

    /// A heartbeat has been received; `false`: the session is over.
    pub fn heartbeat(&mut self, now: Instant, session: SessionId, sequence: u64) -> bool {
        let now = self.clock.read(now);
        let Some((name, member)) = self.sessions.get(&session).cloned() else {
            return false;
        };
        if self.is_ending(&name, member) {
            return false;
        }
        self.extend(now, &name, member);
        let highest = self.heartbeats.entry(session).or_insert(sequence);
        *highest = sequence.max(*highest);
        true
    }

    fn is_ending(&self, name: &Name, member: MemberId) -> bool {
        let group = self.groups.get(name);
        let lease = group.and_then(|group| group.leases.get(&member));
        lease.is_none_or(|lease| lease.ending)
    }

    /// A stream has broken. S27: that closes no session.
    pub fn detach(&mut self, now: Instant, session: SessionId) {
        let now = self.clock.read(now);
        let Some((name, member)) = self.forget_session(session) else {
            return;
        };
        let Some(group) = self.groups.get_mut(&name) else {
            return;
        };
        let Some(lease) = group.leases.get_mut(&member) else {
            return;
        };
        if lease.session != Some(session) {
            return;
        }
        lease.session = None;
        self.without_session(now, &name, member);
    }

    /// If the member has been asked for an assignment, another is to be.
    fn without_session(&mut self, now: Moment, name: &Name, member: MemberId) {
        let group = self.groups.get_mut(name);
        let Some(asking) = group.and_then(|group| group.asking.as_mut()) else {
            return;
        };
        let before = asking.due();
        asking.detached(member, now);
        let after = asking.due();
        self.reindex_ask(name, before, after);
    }

    /// The member leaves and keeps its place for a session timeout, for whoever joins under its stable
    /// name. Returns the join that waits for it.
    pub fn close(&mut self, now: Instant, session: SessionId) -> Option<WaiterId> {
        let (name, member) = self.sessions.get(&session).cloned()?;
        self.detach(now, session);
        let now = self.clock.read(now);
        self.extend(now, &name, member);
        let group = self.groups.get_mut(&name)?;
        let lease = group.leases.get_mut(&member)?;
        lease.closed = true;
        let waiter = group.waiting.remove(&lease.instance.clone())?;
        self.waiters.remove(&waiter);
        Some(waiter)
    }

    /// The deadline is a timeout from now on, at least.
    fn extend(&mut self, now: Moment, name: &Name, member: MemberId) {
        let group = self.groups.get_mut(name);
        let Some(lease) = group.and_then(|group| group.leases.get_mut(&member)) else {
            return;
        };
        let deadline = now + lease.timeout;
        if lease.ending || deadline <= lease.deadline {
            return;
        }
        self.deadlines
            .remove(&(lease.deadline, name.clone(), member));
        lease.deadline = deadline;
        self.deadlines.insert((deadline, name.clone(), member));
    }

    /// Whether a round would answer anybody.
    #[must_use]
    pub fn wants_round(&self) -> bool {
        !self.heartbeats.is_empty() || self.wants_round_now()
    }

    /// Whether somebody waits for a round to begin its session.
    #[must_use]
    pub fn wants_round_now(&self) -> bool {
        !self.joined.is_empty()
    }

    /// S26: what has been received so far, for the round that begins now.
    pub fn begin_round(&mut self) -> Round {
        Round {
            heartbeats: self.heartbeats.drain().collect(),
            joined: std::mem::take(&mut self.joined),
        }
    }

    /// Whether the clock has to be looked at, each [`super::steady::TICK`].
    #[must_use]
    pub fn wants_ticks(&self) -> bool {
        !self.deadlines.is_empty() || !self.asks.is_empty() || self.wants_round()
    }

    /// Looks at the clock.
    pub fn tick(&mut self, now: Instant) -> Due {
        let now = self.clock.read(now);
        let mut due = Due::default();
        let mut expired: HashMap<Name, Vec<(MemberId, u64)>> = HashMap::new();
        while let Some((deadline, _, _)) = self.deadlines.first()
            && *deadline <= now
            && let Some((_, name, member)) = self.deadlines.pop_first()
        {
            match self.run_out(now, &name, member) {
                RunOut::Turn(waiter) => due.turns.push(waiter),
                RunOut::Expired(epoch) => expired.entry(name).or_default().push((member, epoch)),
                RunOut::Gone => {}
            }
        }
        due.expired = expired.into_iter().collect();
        while let Some((moment, _)) = self.asks.first()
            && *moment <= now
            && let Some((_, name)) = self.asks.pop_first()
        {
            due.asked.extend(self.ask(now, &name));
        }
        due
    }

    /// A deadline has passed and is out of the index.
    fn run_out(&mut self, now: Moment, name: &Name, member: MemberId) -> RunOut {
        let Some(group) = self.groups.get_mut(name) else {
            return RunOut::Gone;
        };
        let Some(lease) = group.leases.get_mut(&member) else {
            return RunOut::Gone;
        };
        // S27: its successor takes its place, and its claims stay where they are.
        if let Some(waiter) = group.waiting.remove(&lease.instance) {
            self.waiters.remove(&waiter);
            lease.closed = true;
            lease.deadline = now + AGAIN_AFTER;
            self.deadlines
                .insert((lease.deadline, name.clone(), member));
            return RunOut::Turn(waiter);
        }
        lease.ending = true;
        RunOut::Expired(lease.epoch)
    }

    fn ask(&mut self, now: Moment, name: &Name) -> Option<SessionId> {
        let group = self.groups.get_mut(name)?;
        let asking = group.asking.as_mut()?;
        let leases = &group.leases;
        let has_session = |member: &MemberId| {
            leases
                .get(member)
                .is_some_and(|lease| lease.session.is_some() && !lease.ending)
        };
        let chosen = asking.ask(&group.order, has_session, now);
        let due = asking.due();
        let session = chosen.and_then(|member| leases.get(&member)?.session);
        self.reindex_ask(name, None, due);
        session
    }

    /// Whether this session is to compute the group's assignment; the number tells one question from
    /// the next.
    #[must_use]
    pub fn asked(&self, session: SessionId) -> Option<u64> {
        let (name, member) = self.sessions.get(&session)?;
        let (asked, times) = self.groups.get(name)?.asking.as_ref()?.asked()?;
        (asked == *member).then_some(times)
    }

    /// All groups that are known here.
    #[must_use]
    pub fn groups(&self) -> Vec<Name> {
        self.groups.keys().cloned().collect()
    }

    /// How many members have a session.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Whether nobody has a session.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    /// The member has gone, however that came: whoever waits for its stable name looks again.
    fn end_lease(&mut self, now: Moment, name: &Name, member: MemberId, synced: &mut Synced) {
        let Some(group) = self.groups.get_mut(name) else {
            return;
        };
        let Some(lease) = group.leases.remove(&member) else {
            return;
        };
        if let Some(waiter) = group.waiting.remove(&lease.instance) {
            self.waiters.remove(&waiter);
            synced.turns.push(waiter);
        }
        self.without_session(now, name, member);
        self.deadlines
            .remove(&(lease.deadline, name.clone(), member));
        if let Some(session) = lease.session {
            self.forget_session(session);
            synced.ended.push(session);
        }
    }

    fn forget_session(&mut self, session: SessionId) -> Option<(Name, MemberId)> {
        self.heartbeats.remove(&session);
        self.joined.retain(|joined| *joined != session);
        self.sessions.remove(&session)
    }

    fn drop_if_idle(&mut self, name: &Name) {
        if self.groups.get(name).is_some_and(Group::is_idle) {
            self.groups.remove(name);
        }
    }
}

enum RunOut {
    Turn(WaiterId),
    Expired(u64),
    Gone,
}

#[cfg(test)]
mod tests;
