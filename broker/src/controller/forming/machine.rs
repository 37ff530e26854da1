//! How an empty broker comes to belong to a cluster (S21): the pure part.
//!
//! ```text
//!            Propose (lowest id)          all N promises, stored
//!   Empty ------------------------> Promised(S) --------------> Formed
//!     |  <------------------------    ^    |  <- Found(S), or a member of S is Formed in S
//!     |     founder abandoned S       |    |
//!     |  on_promise(S) ---------------+    |
//!     +------------------------------------+--> Join: a formed cluster was seen
//! ```
//!
//! The founder of a set is its lowest broker id. What makes one cluster, whatever crashes:
//!
//! - every transition is stored before it is acted upon or answered;
//! - a member promises one set at a time, and only a set that its own last round over *all* its
//!   seeds also shows (an unreachable seed blocks it);
//! - the founder stores `Formed` only with all N promises; it stores that it gave a set up before
//!   it proposes another, and never proposes a cluster id twice;
//! - a member takes its promise back only when the founder itself, asked after the promise was
//!   given, answers that it has given the set up.
//!
//! Nothing here does I/O: the driver probes, stores and calls.

use std::collections::BTreeMap;

use qute_proto::ids::{BrokerId, ClusterId, ReplicaId, TopicId};
use qute_proto::internal::{BrokerAddress, FormState, FormingRecord, FoundingSet};

/// Belonging to a cluster, for the life of the data directory.
#[derive(Clone, Debug, PartialEq)]
pub struct Formed {
    /// The cluster.
    pub cluster: ClusterId,
    /// This broker's replica id in `__cluster` (S9).
    pub replica: ReplicaId,
    /// The founding set, in a founder: it may initialize `__cluster` (S10).
    pub founding: Option<FoundingSet>,
}

/// What is stored about belonging.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Durable {
    /// Nothing yet.
    #[default]
    Empty,
    /// This broker will found a cluster with exactly this set, or with none.
    Promised(FoundingSet),
    /// It belongs to a cluster.
    Formed(Formed),
}

/// A stored record that makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the stored record of this broker's cluster is not readable: {0}")]
pub struct RecordError(&'static str);

impl Durable {
    /// The stored form.
    #[must_use]
    pub fn to_record(&self) -> FormingRecord {
        match self {
            Self::Empty => FormingRecord {
                state: FormState::Empty.into(),
                ..FormingRecord::default()
            },
            Self::Promised(set) => FormingRecord {
                state: FormState::Promised.into(),
                set: Some(set.clone()),
                ..FormingRecord::default()
            },
            Self::Formed(formed) => FormingRecord {
                state: FormState::Formed.into(),
                set: formed.founding.clone(),
                cluster_id: formed.cluster.to_wire(),
                cluster_replica_id: formed.replica.0,
            },
        }
    }

    /// Reads the stored form.
    ///
    /// # Errors
    /// A record that no version of this code has written.
    pub fn from_record(record: FormingRecord) -> Result<Self, RecordError> {
        match record.state() {
            FormState::Empty => Ok(Self::Empty),
            FormState::Promised => {
                let set = record.set.ok_or(RecordError("no set"))?;
                if cluster_of(&set).is_none() || set.brokers.is_empty() {
                    return Err(RecordError("malformed set"));
                }
                Ok(Self::Promised(set))
            }
            FormState::Formed => Ok(Self::Formed(Formed {
                cluster: ClusterId::from_wire(&record.cluster_id)
                    .ok_or(RecordError("malformed cluster id"))?,
                replica: ReplicaId(record.cluster_replica_id),
                founding: record.set,
            })),
            FormState::Unspecified => Err(RecordError("no state")),
        }
    }

    /// The state as it is told to others.
    #[must_use]
    pub fn state(&self) -> FormState {
        match self {
            Self::Empty => FormState::Empty,
            Self::Promised(_) => FormState::Promised,
            Self::Formed(_) => FormState::Formed,
        }
    }

    /// The cluster this broker belongs to.
    #[must_use]
    pub fn cluster(&self) -> Option<ClusterId> {
        match self {
            Self::Formed(formed) => Some(formed.cluster),
            _ => None,
        }
    }
}

/// What another broker answered about itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Who it is.
    pub broker: BrokerAddress,
    /// How many brokers it expects.
    pub expect: u32,
    /// What it has stored.
    pub state: PeerState,
}

/// The part of another broker's stored state that matters here.
#[derive(Clone, Debug, PartialEq)]
pub enum PeerState {
    /// Nothing.
    Empty,
    /// A promise.
    Promised(FoundingSet),
    /// Belongs to a cluster.
    Formed(ClusterId),
}

/// One round of asking every seed, and every broker heard of.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Round {
    /// [`Forming::promises_given`] when the round began.
    pub began: u64,
    /// Seeds that did not answer: each of them blocks forming.
    pub unreachable_seeds: Vec<String>,
    /// One per other broker, however many seeds lead to it.
    pub answers: BTreeMap<BrokerId, Answer>,
}

/// What the driver shall do next.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Nothing, for the reason given.
    Wait(String),
    /// Store the promise to this set, then collect.
    Propose(FoundingSet),
    /// Ask the others of the set for their promises; with all of them, [`Forming::complete`].
    Collect(FoundingSet),
    /// Store that the promise is void.
    Release(String),
    /// Ask one of these formed brokers to be let in.
    Join(Vec<BrokerAddress>),
    /// Store that this broker belongs to a cluster.
    Become(Formed),
}

/// The answer to a request for a promise.
#[derive(Clone, Debug, PartialEq)]
pub enum PromiseAnswer {
    /// It was given before; say so.
    Given,
    /// Store it, then [`Forming::stored`], then say that it is given.
    Store(FoundingSet),
    /// No. `conflict`: the founder should give this set up.
    Refused {
        /// Why, for people.
        reason: String,
        /// It won't change by itself.
        conflict: bool,
    },
}

/// The forming state machine of one broker.
#[derive(Clone, Debug)]
pub struct Forming {
    me: BrokerAddress,
    expect: u32,
    durable: Durable,
    promises_given: u64,
    last_round: Option<Round>,
    conflict: Option<String>,
}

impl Forming {
    /// From what was stored. `expect` 0: it only joins, unless it has no seeds.
    #[must_use]
    pub fn new(me: BrokerAddress, has_seeds: bool, expect: u32, durable: Durable) -> Self {
        Self {
            me,
            expect: if has_seeds { expect } else { expect.max(1) },
            durable,
            promises_given: 0,
            last_round: None,
            conflict: None,
        }
    }

    /// What is stored.
    #[must_use]
    pub fn durable(&self) -> &Durable {
        &self.durable
    }

    /// How many brokers this one expects.
    #[must_use]
    pub fn expect(&self) -> u32 {
        self.expect
    }

    /// Rises with each promise: a round begun before the last promise proves nothing about it.
    #[must_use]
    pub fn promises_given(&self) -> u64 {
        self.promises_given
    }

    /// Notes that `durable` has been stored.
    pub fn stored(&mut self, durable: Durable) {
        // A broker that belongs to a cluster does so for ever.
        if matches!(self.durable, Durable::Formed(_)) {
            return;
        }
        if matches!(durable, Durable::Promised(_)) {
            self.promises_given += 1;
        }
        self.conflict = None;
        self.durable = durable;
    }

    /// A member has refused the set for good: the next round gives it up.
    pub fn conflicted(&mut self, set: &FoundingSet, reason: String) {
        if matches!(&self.durable, Durable::Promised(mine) if same(mine, set)) {
            self.conflict = Some(reason);
        }
    }

    /// Decides after a round. `fresh` is a cluster id never used before.
    pub fn on_round(&mut self, round: Round, fresh: ClusterId) -> Step {
        let step = match &self.durable {
            Durable::Formed(formed) => Step::Become(formed.clone()),
            Durable::Empty => self.empty_round(&round, fresh),
            Durable::Promised(set) => self.promised_round(&round, set),
        };
        self.last_round = Some(round);
        step
    }

    fn empty_round(&self, round: &Round, fresh: ClusterId) -> Step {
        let mut clusters = BTreeMap::new();
        for answer in round.answers.values() {
            if let PeerState::Formed(cluster) = answer.state {
                clusters
                    .entry(cluster)
                    .or_insert_with(Vec::new)
                    .push(answer.broker.clone());
            }
        }
        if clusters.len() > 1 {
            let ids: Vec<_> = clusters.keys().map(ToString::to_string).collect();
            return Step::Wait(format!(
                "the seeds belong to different clusters ({}): name those of one only",
                ids.join(", ")
            ));
        }
        if let Some((_, members)) = clusters.pop_first() {
            return Step::Join(members);
        }
        if self.expect == 0 {
            return Step::Wait(format!(
                "no seed belongs to a cluster yet{}; without --expect this broker only joins",
                unreachable(round)
            ));
        }
        if !round.unreachable_seeds.is_empty() {
            return Step::Wait(format!(
                "a cluster is founded only when every seed answers{}",
                unreachable(round)
            ));
        }
        if let Some(answer) = round.answers.values().find(|a| promised(a).is_some()) {
            return Step::Wait(format!(
                "broker {} at {} has promised itself to a founding set",
                answer.broker.broker_id, answer.broker.peer_address
            ));
        }
        match self.choose(round, None) {
            Err(reason) => Step::Wait(reason),
            Ok(set)
                if set
                    .first()
                    .is_some_and(|b| b.broker_id == self.me.broker_id) =>
            {
                Step::Propose(FoundingSet {
                    cluster_id: fresh.to_wire(),
                    brokers: set,
                })
            }
            Ok(set) => Step::Wait(format!(
                "broker {} will found the cluster",
                set.first().map_or(0, |b| b.broker_id)
            )),
        }
    }

    fn promised_round(&self, round: &Round, set: &FoundingSet) -> Step {
        let cluster = cluster_of(set);
        let formed = |answer: &Answer| match answer.state {
            PeerState::Formed(id) => Some(id),
            _ => None,
        };
        if round.answers.values().any(|a| formed(a) == cluster) {
            return self.complete(set);
        }
        let Some(founder) = set.brokers.first() else {
            return Step::Release("the founding set is empty".to_owned());
        };
        if founder.broker_id == self.me.broker_id {
            return self.founder_round(round, set);
        }
        let founder_id = BrokerId(founder.broker_id);
        match round.answers.get(&founder_id) {
            None => Step::Wait(format!(
                "promised to the founding set of broker {founder_id} at {}, which does not \
                 answer; if that broker is gone for good, empty this data directory (it holds \
                 no records yet)",
                founder.peer_address
            )),
            Some(answer) if promised(answer).is_some_and(|theirs| same(theirs, set)) => {
                Step::Wait(format!("broker {founder_id} is collecting promises"))
            }
            // S21: asked after the promise was given, or the answer proves nothing.
            Some(_) if round.began == self.promises_given => {
                Step::Release(format!("broker {founder_id} has given its founding set up"))
            }
            Some(_) => Step::Wait("promised just now".to_owned()),
        }
    }

    fn founder_round(&self, round: &Round, set: &FoundingSet) -> Step {
        if let Some(reason) = &self.conflict {
            return Step::Release(format!("the founding set was refused: {reason}"));
        }
        if round
            .answers
            .values()
            .any(|a| matches!(a.state, PeerState::Formed(_)))
        {
            return Step::Release("a formed cluster has appeared".to_owned());
        }
        // Two founders whose members refuse both sets: the higher id yields, so that one is left.
        let rival = round
            .answers
            .values()
            .filter_map(|a| {
                promised(a)
                    .filter(|theirs| !same(theirs, set))?
                    .brokers
                    .first()
            })
            .find(|founder| founder.broker_id < self.me.broker_id);
        if let Some(rival) = rival {
            return Step::Release(format!("broker {} founds another set", rival.broker_id));
        }
        let missing = set.brokers.iter().find(|member| {
            member.broker_id != self.me.broker_id
                && !round.answers.contains_key(&BrokerId(member.broker_id))
        });
        match missing {
            // Every seed answers, and none of them is that broker: it was replaced.
            Some(member) if round.unreachable_seeds.is_empty() => Step::Release(format!(
                "broker {} of the founding set is not there any more",
                member.broker_id
            )),
            Some(_) => Step::Wait(format!(
                "waiting for the founding set{}",
                unreachable(round)
            )),
            // Seed lists were mended meanwhile, or a broker with a lower id has come: the members
            // would go on refusing this set. Giving it up is the founder's right (module header).
            None if self
                .choose(round, Some(set))
                .is_ok_and(|now| !same_brokers(&now, set)) =>
            {
                Step::Release("the seeds show another founding set now".to_owned())
            }
            None => Step::Collect(set.clone()),
        }
    }

    /// The founding set that this round shows, lowest ids first.
    fn choose(
        &self,
        round: &Round,
        offered: Option<&FoundingSet>,
    ) -> Result<Vec<BrokerAddress>, String> {
        let mut candidates = BTreeMap::from([(self.me.broker_id, self.me.clone())]);
        for answer in round.answers.values() {
            let free = match &answer.state {
                PeerState::Empty => true,
                PeerState::Promised(theirs) => offered.is_some_and(|set| same(theirs, set)),
                PeerState::Formed(_) => false,
            };
            if free && answer.expect == self.expect {
                candidates.insert(answer.broker.broker_id, answer.broker.clone());
            }
        }
        let wanted = usize::try_from(self.expect).unwrap_or(usize::MAX);
        if candidates.len() < wanted {
            return Err(format!(
                "{} of {wanted} expected brokers are here (each must be started with --expect \
                 {wanted})",
                candidates.len()
            ));
        }
        let chosen: Vec<_> = candidates.into_values().take(wanted).collect();
        if chosen.iter().any(|b| b.broker_id == self.me.broker_id) {
            Ok(chosen)
        } else {
            Err(format!("{wanted} other brokers will found the cluster"))
        }
    }

    /// Whether this broker promises itself to `set`.
    #[must_use]
    pub fn on_promise(&self, set: &FoundingSet) -> PromiseAnswer {
        let no = |conflict: bool, reason: String| PromiseAnswer::Refused { reason, conflict };
        match &self.durable {
            Durable::Formed(formed) if Some(formed.cluster) == cluster_of(set) => {
                PromiseAnswer::Given
            }
            Durable::Formed(formed) => {
                no(true, format!("it belongs to cluster {}", formed.cluster))
            }
            Durable::Promised(mine) if same(mine, set) => PromiseAnswer::Given,
            Durable::Promised(_) => no(true, "it is promised to another set".to_owned()),
            Durable::Empty => match self.agrees(set) {
                Ok(()) => PromiseAnswer::Store(set.clone()),
                Err(reason) => no(false, reason),
            },
        }
    }

    /// S21: a member agrees only with a set that its own seeds show too.
    fn agrees(&self, set: &FoundingSet) -> Result<(), String> {
        if cluster_of(set).is_none_or(|id| id.0 == TopicId::CLUSTER.0) {
            return Err("the set has no cluster id".to_owned());
        }
        if self.expect == 0 {
            return Err("it was started without --expect and only joins".to_owned());
        }
        if usize::try_from(self.expect) != Ok(set.brokers.len()) {
            return Err(format!(
                "it expects {} brokers, the set has {}",
                self.expect,
                set.brokers.len()
            ));
        }
        let Some(round) = &self.last_round else {
            return Err("it has not asked its seeds yet".to_owned());
        };
        if !round.unreachable_seeds.is_empty() {
            return Err(format!("not every seed answers it{}", unreachable(round)));
        }
        if let Some(other) = round.answers.values().find(|a| match &a.state {
            PeerState::Empty => false,
            PeerState::Promised(theirs) => !same(theirs, set),
            PeerState::Formed(_) => true,
        }) {
            return Err(format!(
                "it sees broker {} elsewhere",
                other.broker.broker_id
            ));
        }
        let chosen = self.choose(round, Some(set))?;
        let ids = |brokers: &[BrokerAddress]| -> Vec<u64> {
            brokers.iter().map(|b| b.broker_id).collect()
        };
        if ids(&chosen) == ids(&set.brokers) {
            Ok(())
        } else {
            Err(format!("it sees the set {:?}", ids(&chosen)))
        }
    }

    /// The founder tells that the set is complete.
    ///
    /// # Errors
    /// This broker has not promised itself to it.
    pub fn on_found(&self, set: &FoundingSet) -> Result<Formed, String> {
        match &self.durable {
            Durable::Formed(formed) if Some(formed.cluster) == cluster_of(set) => {
                Ok(formed.clone())
            }
            Durable::Promised(mine) if same(mine, set) => match self.complete(mine) {
                Step::Become(formed) => Ok(formed),
                _ => Err("it is not a member of that set".to_owned()),
            },
            Durable::Formed(formed) => Err(format!("it belongs to cluster {}", formed.cluster)),
            _ => Err("it has not promised itself to that set".to_owned()),
        }
    }

    /// The set is complete: every member has promised (or one is known to be formed).
    #[must_use]
    pub fn complete(&self, set: &FoundingSet) -> Step {
        let rank = (1..)
            .zip(&set.brokers)
            .find(|(_, b)| b.broker_id == self.me.broker_id);
        match (cluster_of(set), rank) {
            (Some(cluster), Some((rank, _))) => Step::Become(Formed {
                cluster,
                replica: ReplicaId(rank),
                founding: Some(set.clone()),
            }),
            _ => Step::Release("this broker is not in the set it promised itself to".to_owned()),
        }
    }
}

/// The cluster id that a set proposes.
#[must_use]
pub fn cluster_of(set: &FoundingSet) -> Option<ClusterId> {
    ClusterId::from_wire(&set.cluster_id)
}

/// A cluster id is proposed once, so it names the set.
fn same(a: &FoundingSet, b: &FoundingSet) -> bool {
    a.cluster_id == b.cluster_id
}

/// Addresses may have changed since.
fn same_brokers(now: &[BrokerAddress], set: &FoundingSet) -> bool {
    let ids = |brokers: &[BrokerAddress]| brokers.iter().map(|b| b.broker_id).collect::<Vec<_>>();
    ids(now) == ids(&set.brokers)
}

fn promised(answer: &Answer) -> Option<&FoundingSet> {
    match &answer.state {
        PeerState::Promised(set) => Some(set),
        _ => None,
    }
}

fn unreachable(round: &Round) -> String {
    if round.unreachable_seeds.is_empty() {
        String::new()
    } else {
        format!(" (no answer from {})", round.unreachable_seeds.join(", "))
    }
}

#[cfg(test)]
#[path = "machine_tests.rs"]
mod tests;
