//! How an empty broker comes to belong to a cluster: probing, storing, calling.
//!
//! One task ([`Former::run`]) makes rounds until the broker belongs to a cluster; the peer
//! service answers other brokers meanwhile ([`Former::promise`], [`Former::found`]). Both act
//! through one lock around the state machine, held while a transition is stored, so that nothing
//! is answered or acted upon before it is durable (S21).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt as _};
use prost::Message as _;
use qute_proto::ids::{BrokerId, ClusterId, ReplicaId};
use qute_proto::internal::{
    BrokerAddress, FormState, FormingRecord, FoundRequest, FoundResponse, FoundingSet, JoinRequest,
    PeerHello, ProbeRequest, ProbeResponse, PromiseRequest, PromiseResponse,
};
use qute_proto::v1::ErrorCode;
use tokio::sync::{Mutex, watch};
use tokio::time::Instant;

use super::machine::{Answer, Durable, Formed, Forming, PeerState, PromiseAnswer, Round, Step};
use crate::controller::book::AddressBook;
use crate::controller::calls::Calls;

/// Under which name the record is stored.
const RECORD: &str = "cluster";
/// A seed that has not answered by then did not answer.
const PROBE_DEADLINE: Duration = Duration::from_secs(2);
const PROMISE_DEADLINE: Duration = Duration::from_secs(5);
const JOIN_DEADLINE: Duration = Duration::from_secs(10);
const FOUND_DEADLINE: Duration = Duration::from_secs(2);
/// Between two rounds.
const ROUND_PAUSE: Duration = Duration::from_millis(250);
/// The same reason for waiting is logged this often.
const LOG_EVERY: Duration = Duration::from_secs(10);
/// How often a newcomer lets itself be sent on to the leader of `__cluster` in one round.
const JOIN_HOPS_MAX: usize = 8;

/// Where the record is kept: the broker's meta log.
pub trait Records: Send + Sync + 'static {
    /// The bytes stored last under `name`.
    ///
    /// # Errors
    /// What the store says.
    fn get(&self, name: &str) -> Result<Option<Bytes>, String>;
    /// Stores bytes; they are synced when it returns.
    fn put(&self, name: &'static str, bytes: Bytes) -> BoxFuture<'_, Result<(), String>>;
}

/// Why a broker can't come to belong to a cluster, ever.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormError {
    /// S23: another process has this broker's identity, or had it.
    #[error("{0}")]
    Copied(String),
    /// The data directory can't be read or written.
    #[error("the record of this broker's cluster can't be stored or read: {0}")]
    Storage(String),
}

/// Brings a broker into a cluster.
pub struct Former {
    me: BrokerAddress,
    process: PeerHello,
    seeds: Vec<String>,
    forming: Mutex<Forming>,
    formed: watch::Sender<Option<Formed>>,
    waiting: watch::Sender<String>,
    records: Arc<dyn Records>,
    calls: Arc<Calls>,
    book: Arc<AddressBook>,
}

impl Former {
    /// Reads what is stored. `hello` is this process's greeting outside any cluster.
    ///
    /// # Errors
    /// The record can't be read.
    pub fn open(
        me: BrokerAddress,
        hello: PeerHello,
        seeds: Vec<String>,
        expect: u32,
        records: Arc<dyn Records>,
        calls: Arc<Calls>,
        book: Arc<AddressBook>,
    ) -> Result<Self, FormError> {
        let durable = match records.get(RECORD).map_err(FormError::Storage)? {
            None => Durable::Empty,
            Some(bytes) => FormingRecord::decode(bytes)
                .map_err(|error| error.to_string())
                .and_then(|record| Durable::from_record(record).map_err(|error| error.to_string()))
                .map_err(FormError::Storage)?,
        };
        let formed = match &durable {
            Durable::Formed(formed) => Some(formed.clone()),
            _ => None,
        };
        Ok(Self {
            forming: Mutex::new(Forming::new(me.clone(), !seeds.is_empty(), expect, durable)),
            me,
            process: hello,
            seeds,
            formed: watch::Sender::new(formed),
            waiting: watch::Sender::new(String::from("starting")),
            records,
            calls,
            book,
        })
    }

    /// Set once this broker belongs to a cluster.
    #[must_use]
    pub fn formed(&self) -> watch::Receiver<Option<Formed>> {
        self.formed.subscribe()
    }

    /// What forming waits for, for people.
    #[must_use]
    pub fn waiting(&self) -> String {
        self.waiting.borrow().clone()
    }

    /// What others are told: state, promise, expectation.
    pub async fn facts(&self) -> (FormState, Option<FoundingSet>, u32) {
        let forming = self.forming.lock().await;
        let promised = match forming.durable() {
            Durable::Promised(set) => Some(set.clone()),
            _ => None,
        };
        (forming.durable().state(), promised, forming.expect())
    }

    /// Makes rounds until this broker belongs to a cluster.
    ///
    /// # Errors
    /// It never will.
    ///
    /// # Cancel safety
    /// Like a crash: what was stored stays.
    pub async fn run(&self) -> Result<Formed, FormError> {
        let mut formed = self.formed.subscribe();
        let mut log = WaitLog::default();
        loop {
            if let Some(formed) = self.formed.borrow().clone() {
                return Ok(formed);
            }
            self.round(&mut log).await?;
            tokio::select! {
                _ = formed.wait_for(Option::is_some) => {}
                () = tokio::time::sleep(ROUND_PAUSE) => {}
            }
        }
    }

    async fn round(&self, log: &mut WaitLog) -> Result<(), FormError> {
        let round = self.probe_all().await?;
        let mut forming = self.forming.lock().await;
        match forming.on_round(round, ClusterId::random()) {
            Step::Wait(reason) => {
                log.note(&reason);
                self.waiting.send_replace(reason);
            }
            Step::Propose(set) => {
                tracing::info!(brokers = set.brokers.len(), "proposing to found a cluster");
                self.store(&mut forming, Durable::Promised(set.clone()))
                    .await?;
                drop(forming);
                self.collect(set).await?;
            }
            Step::Collect(set) => {
                drop(forming);
                self.collect(set).await?;
            }
            Step::Release(reason) => {
                tracing::info!(%reason, "taking the promise to found a cluster back");
                self.store(&mut forming, Durable::Empty).await?;
            }
            Step::Join(members) => {
                // Meanwhile no promise is given: the last round shows a formed cluster.
                drop(forming);
                self.join(members, log).await?;
            }
            Step::Become(formed) => self.become_formed(&mut forming, formed).await?,
        }
        Ok(())
    }

    async fn store(&self, forming: &mut Forming, durable: Durable) -> Result<(), FormError> {
        let record = durable.to_record().encode_to_vec().into();
        self.records
            .put(RECORD, record)
            .await
            .map_err(FormError::Storage)?;
        if let Durable::Formed(formed) = &durable {
            tracing::info!(cluster = %formed.cluster, replica = %formed.replica, "part of a cluster");
            self.formed.send_replace(Some(formed.clone()));
        }
        forming.stored(durable);
        Ok(())
    }

    async fn become_formed(&self, forming: &mut Forming, formed: Formed) -> Result<(), FormError> {
        if matches!(forming.durable(), Durable::Formed(_)) {
            return Ok(());
        }
        self.store(forming, Durable::Formed(formed)).await
    }

    /// Asks every seed and everybody heard of.
    async fn probe_all(&self) -> Result<Round, FormError> {
        let (began, expect, promised) = {
            let forming = self.forming.lock().await;
            let promised = match forming.durable() {
                Durable::Promised(set) => set.brokers.clone(),
                _ => Vec::new(),
            };
            (forming.promises_given(), forming.expect(), promised)
        };
        let mut targets: BTreeSet<String> = self.seeds.iter().cloned().collect();
        targets.extend(promised.into_iter().map(|broker| broker.peer_address));
        targets.extend(
            self.book
                .all()
                .into_iter()
                .map(|broker| broker.peer_address),
        );
        targets.remove(&self.me.peer_address);
        let request = ProbeRequest {
            hello: Some(self.process.clone()),
            caller: Some(self.me.clone()),
            expect,
        };
        let mut probes: FuturesUnordered<_> = targets
            .into_iter()
            .map(|address| {
                let request = request.clone();
                async move {
                    let outcome = self.calls.probe(&address, request, PROBE_DEADLINE).await;
                    (address, outcome)
                }
            })
            .collect();
        let mut round = Round {
            began,
            ..Round::default()
        };
        while let Some((address, outcome)) = probes.next().await {
            match outcome {
                Ok(response) => self.note(&mut round, &address, response)?,
                Err(error) => {
                    tracing::debug!(%error, "a seed does not answer");
                    self.note_silence(&mut round, address);
                }
            }
        }
        round.unreachable_seeds.sort();
        Ok(round)
    }

    fn note_silence(&self, round: &mut Round, address: String) {
        if self.seeds.contains(&address) {
            round.unreachable_seeds.push(address);
        }
    }

    fn note(
        &self,
        round: &mut Round,
        address: &str,
        response: ProbeResponse,
    ) -> Result<(), FormError> {
        let hello = response.hello.clone().unwrap_or_default();
        if hello.broker_id == self.me.broker_id {
            if hello.process_id != self.me.process_id {
                return Err(FormError::Copied(copied(&self.me, address)));
            }
            // A seed that leads back here, under whatever name.
            return Ok(());
        }
        let state = match response.state() {
            FormState::Empty => Some(PeerState::Empty),
            FormState::Promised => response.promised.clone().map(PeerState::Promised),
            FormState::Formed => ClusterId::from_wire(&hello.cluster_id).map(PeerState::Formed),
            FormState::Unspecified => None,
        };
        let (Some(state), Some(broker)) = (state, response.broker) else {
            self.note_silence(round, address.to_owned());
            return Ok(());
        };
        for known in response.known.iter().chain([&broker]) {
            self.book.learn(known);
        }
        round.answers.insert(
            BrokerId(broker.broker_id),
            Answer {
                broker,
                expect: response.expect,
                state,
            },
        );
        Ok(())
    }

    /// S21: the cluster is founded only with the promise of every member.
    async fn collect(&self, set: FoundingSet) -> Result<(), FormError> {
        let others = set
            .brokers
            .iter()
            .filter(|b| b.broker_id != self.me.broker_id);
        let mut asked: FuturesUnordered<_> = others
            .map(|member| {
                let request = PromiseRequest {
                    hello: Some(self.process.clone()),
                    set: Some(set.clone()),
                };
                let address = &member.peer_address;
                async move {
                    (
                        address,
                        self.calls.promise(address, request, PROMISE_DEADLINE).await,
                    )
                }
            })
            .collect();
        let mut refusal = None;
        let mut conflict = None;
        while let Some((address, outcome)) = asked.next().await {
            match outcome {
                Ok(answer) if answer.promised => {}
                Ok(answer) => {
                    let reason = format!("{address}: {}", answer.reason);
                    if answer.conflict {
                        conflict = Some(reason.clone());
                    }
                    refusal = Some(reason);
                }
                Err(error) => refusal = Some(error.to_string()),
            }
        }
        drop(asked);
        let mut forming = self.forming.lock().await;
        if let Some(reason) = conflict {
            forming.conflicted(&set, reason);
        }
        if let Some(reason) = refusal {
            tracing::debug!(%reason, "not every promise was given");
            self.waiting
                .send_replace(format!("waiting for promises: {reason}"));
            return Ok(());
        }
        let step = forming.complete(&set);
        let Step::Become(formed) = step else {
            return Ok(());
        };
        self.become_formed(&mut forming, formed).await?;
        drop(forming);
        self.tell(&set).await;
        Ok(())
    }

    /// Those that don't hear it find out by probing.
    async fn tell(&self, set: &FoundingSet) {
        let others = set
            .brokers
            .iter()
            .filter(|b| b.broker_id != self.me.broker_id);
        let calls = others.map(|member| {
            let request = FoundRequest {
                hello: Some(self.process.clone()),
                set: Some(set.clone()),
            };
            self.calls
                .found(&member.peer_address, request, FOUND_DEADLINE)
        });
        futures::future::join_all(calls).await;
    }

    async fn join(&self, members: Vec<BrokerAddress>, log: &mut WaitLog) -> Result<(), FormError> {
        let mut next: Vec<String> = members.into_iter().map(|b| b.peer_address).collect();
        let mut reason = String::from("no member of the cluster answers");
        for _ in 0..JOIN_HOPS_MAX {
            let Some(address) = next.pop() else { break };
            let request = JoinRequest {
                hello: Some(self.process.clone()),
                broker: Some(self.me.clone()),
            };
            let response = match self.calls.join(&address, request, JOIN_DEADLINE).await {
                Ok(response) => response,
                Err(error) => {
                    reason = error.to_string();
                    continue;
                }
            };
            for broker in &response.brokers {
                self.book.learn(broker);
            }
            if let Some(error) = response.error {
                if error.code() == ErrorCode::InvalidArgument {
                    // S23: refused for good.
                    return Err(FormError::Copied(error.message));
                }
                let leader = error.leader_hint.map(|hint| BrokerId(hint.broker_id));
                next.extend(
                    leader
                        .and_then(|id| self.book.get(id))
                        .map(|b| b.peer_address),
                );
                reason = format!("{address}: {}", error.message);
                continue;
            }
            let Some(cluster) = ClusterId::from_wire(&response.cluster_id) else {
                continue;
            };
            let mut forming = self.forming.lock().await;
            let joined = Durable::Formed(Formed {
                cluster,
                replica: ReplicaId(response.cluster_replica_id),
                founding: None,
            });
            if matches!(forming.durable(), Durable::Empty) {
                self.store(&mut forming, joined).await?;
            }
            return Ok(());
        }
        log.note(&format!("can't join the cluster yet: {reason}"));
        self.waiting.send_replace(format!("joining: {reason}"));
        Ok(())
    }

    /// Answers another broker that asks for a promise.
    ///
    /// # Errors
    /// The promise can't be stored.
    pub async fn promise(&self, set: &FoundingSet) -> Result<PromiseResponse, FormError> {
        let mut forming = self.forming.lock().await;
        match forming.on_promise(set) {
            PromiseAnswer::Given => {}
            PromiseAnswer::Store(set) => {
                tracing::info!(
                    founder = set.brokers.first().map_or(0, |b| b.broker_id),
                    brokers = set.brokers.len(),
                    "promised to found a cluster"
                );
                self.store(&mut forming, Durable::Promised(set)).await?;
            }
            PromiseAnswer::Refused { reason, conflict } => {
                return Ok(PromiseResponse {
                    promised: false,
                    reason,
                    conflict,
                });
            }
        }
        Ok(PromiseResponse {
            promised: true,
            ..PromiseResponse::default()
        })
    }

    /// Answers the founder that tells that the set is complete.
    ///
    /// # Errors
    /// The fact can't be stored.
    pub async fn found(&self, set: &FoundingSet) -> Result<FoundResponse, FormError> {
        let mut forming = self.forming.lock().await;
        match forming.on_found(set) {
            Ok(formed) => {
                self.become_formed(&mut forming, formed).await?;
                Ok(FoundResponse {
                    accepted: true,
                    reason: String::new(),
                })
            }
            Err(reason) => Ok(FoundResponse {
                accepted: false,
                reason,
            }),
        }
    }
}

/// S23: what to tell the operator of a process whose identity another one has.
#[must_use]
pub fn copied(me: &BrokerAddress, address: &str) -> String {
    format!(
        "the broker at {address} has this broker's identity ({}): one of the two data directories \
         is a copy of the other; start this broker with an empty one",
        me.broker_id
    )
}

/// Logs why forming waits: when the reason changes, and now and then.
#[derive(Debug, Default)]
struct WaitLog {
    last: Option<(String, Instant)>,
}

impl WaitLog {
    fn note(&mut self, reason: &str) {
        let due = self
            .last
            .as_ref()
            .is_none_or(|(said, at)| said != reason || at.elapsed() >= LOG_EVERY);
        if due {
            tracing::info!(%reason, "not part of a cluster yet");
            self.last = Some((reason.to_owned(), Instant::now()));
        }
    }
}

#[cfg(test)]
#[path = "driver_tests.rs"]
mod tests;
