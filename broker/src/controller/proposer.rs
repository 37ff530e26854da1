//! Commands on their way to the leader of `__cluster`.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use prost::Message as _;
use qute_proto::ids::BrokerId;
use qute_proto::internal::{
    ClusterCommand, CommandReply, ProposeRequest, cluster_command::Command,
};
use qute_proto::v1::{self, ErrorCode};
use tokio::sync::watch;
use tokio::time::Instant;

use super::book::AddressBook;
use super::calls::Calls;
use super::reconciler::Reports;
use crate::env::Clock;
use crate::raft::{CommandError, ConfirmError, GroupHandle, Leader, Peers, ProposalError};

/// One attempt to reach the leader.
const CALL_DEADLINE: Duration = Duration::from_secs(3);
/// How long a confirmation by a quorum may take.
const CONFIRM_DEADLINE: Duration = Duration::from_secs(2);
/// How long a report is tried for.
const REPORT_DEADLINE: Duration = Duration::from_secs(10);
/// Between two attempts.
const PAUSE: Duration = Duration::from_millis(200);

/// A typed refusal with nothing but a code and a text.
#[must_use]
pub fn error(code: ErrorCode, message: impl Into<String>) -> v1::Error {
    v1::Error {
        code: code.into(),
        message: message.into(),
        ..v1::Error::default()
    }
}

/// What became of a command.
#[derive(Clone, Debug, PartialEq)]
pub struct Decided {
    /// What the state machine answered.
    pub reply: CommandReply,
    /// The `__cluster` index of the command.
    pub index: u64,
}

impl Decided {
    /// The state machine's refusal, if it was one.
    #[must_use]
    pub fn refusal(&self) -> Option<v1::Error> {
        let code = ErrorCode::try_from(self.reply.code).unwrap_or(ErrorCode::Internal);
        (!self.reply.refused.is_empty()).then(|| error(code, self.reply.refused.clone()))
    }
}

/// Proposes commands, here if this broker leads `__cluster`, else at the broker that does.
pub struct Proposer {
    own: BrokerId,
    peers: Peers,
    calls: Arc<Calls>,
    book: Arc<AddressBook>,
    clock: Arc<dyn Clock>,
    cluster: watch::Receiver<Option<GroupHandle>>,
}

impl Proposer {
    /// `cluster` holds the `__cluster` replica once it is open.
    pub fn new(
        own: BrokerId,
        peers: Peers,
        calls: Arc<Calls>,
        book: Arc<AddressBook>,
        clock: Arc<dyn Clock>,
        cluster: watch::Receiver<Option<GroupHandle>>,
    ) -> Self {
        Self {
            own,
            peers,
            calls,
            book,
            clock,
            cluster,
        }
    }

    /// The `__cluster` replica of this broker.
    ///
    /// # Errors
    /// `NOT_READY` until it is open.
    pub fn handle(&self) -> Result<GroupHandle, v1::Error> {
        let handle = self.cluster.borrow().clone();
        handle.ok_or_else(|| {
            error(
                ErrorCode::NotReady,
                "this broker is not part of a cluster yet; try again",
            )
        })
    }

    /// Where the leader of `__cluster` is, as far as this broker knows.
    #[must_use]
    pub fn controller(&self) -> Option<v1::LeaderHint> {
        let handle = self.cluster.borrow().clone()?;
        let leadership = handle.leadership();
        leadership
            .leader
            .map(|leader| self.hint(leader.broker, leadership.term))
    }

    fn hint(&self, broker: BrokerId, term: u64) -> v1::LeaderHint {
        let known = self.book.get(broker);
        v1::LeaderHint {
            broker_id: broker.0,
            leader_epoch: term,
            address: known.map(|known| known.client_address).unwrap_or_default(),
        }
    }

    /// `NOT_LEADER`, with the hint that helps.
    #[must_use]
    pub fn not_leader(&self, leader: Option<Leader>) -> v1::Error {
        let handle = self.cluster.borrow().clone();
        let leadership = handle.map(|handle| handle.leadership()).unwrap_or_default();
        let leader = leader
            .or(leadership.leader)
            .filter(|l| l.broker != self.own);
        v1::Error {
            leader_hint: leader.map(|leader| self.hint(leader.broker, leadership.term)),
            ..error(
                ErrorCode::NotLeader,
                "this broker does not lead the controller (`__cluster`); ask the one that does",
            )
        }
    }

    /// ReadIndex on `__cluster`: this broker leads it and its view holds everything committed
    /// before the call.
    ///
    /// # Errors
    /// `NOT_LEADER`, `NOT_READY`.
    pub async fn confirm(&self) -> Result<(), v1::Error> {
        let handle = self.handle()?;
        if !handle.leadership().is_local {
            return Err(self.not_leader(None));
        }
        match handle.confirm(CONFIRM_DEADLINE).await {
            Ok(_) => Ok(()),
            Err(ConfirmError::NotLeader { leader }) => Err(self.not_leader(leader)),
            Err(ConfirmError::NoQuorum) => Err(error(
                ErrorCode::NotReady,
                "no majority of the controller's brokers answers; try again",
            )),
            Err(ConfirmError::Stopped) => Err(error(
                ErrorCode::NotReady,
                "the controller's replica on this broker has stopped",
            )),
        }
    }

    /// Proposes here, as the leader.
    ///
    /// # Errors
    /// Typed; a refusal by the state machine is no error of this kind.
    ///
    /// # Cancel safety
    /// A dropped call may have submitted the command.
    pub async fn propose_here(
        &self,
        command: Bytes,
        deadline: Duration,
    ) -> Result<Decided, v1::Error> {
        let handle = self.handle()?;
        if !handle.leadership().is_local {
            return Err(self.not_leader(None));
        }
        let now_ms = self.clock.wall_ms();
        match handle.command(command, now_ms, None, deadline).await {
            Ok(applied) => {
                let reply = CommandReply::decode(applied.reply)
                    .map_err(|problem| error(ErrorCode::Internal, problem.to_string()))?;
                Ok(Decided {
                    reply,
                    index: applied.index,
                })
            }
            Err(problem) => Err(self.explain(problem)),
        }
    }

    fn explain(&self, problem: CommandError) -> v1::Error {
        match problem {
            CommandError::Failed(ProposalError::NotLeader { leader }) => self.not_leader(leader),
            CommandError::Failed(problem) if !problem.is_unwritten() => {
                error(ErrorCode::OutcomeUnknown, problem.to_string())
            }
            CommandError::NotSubmitted(crate::raft::ProposeError::StorageFull) => {
                error(ErrorCode::StorageFull, "the controller's disk is full")
            }
            CommandError::Timeout => error(
                ErrorCode::OutcomeUnknown,
                "the controller did not decide in time; it may still do so",
            ),
            problem => error(ErrorCode::NotReady, problem.to_string()),
        }
    }

    /// Proposes wherever the leader is, trying until `deadline`.
    ///
    /// # Errors
    /// The last error; final ones (`INVALID_ARGUMENT`) at once.
    pub async fn propose(
        &self,
        command: Command,
        deadline: Duration,
    ) -> Result<Decided, v1::Error> {
        let command: Bytes = ClusterCommand {
            command: Some(command),
        }
        .encode_to_vec()
        .into();
        let end = Instant::now() + deadline;
        let mut hint = None;
        loop {
            let failure = match self.attempt(&command, &mut hint, end).await {
                Ok(decided) => return Ok(decided),
                Err(failure) => failure,
            };
            let is_final = failure.code() == ErrorCode::InvalidArgument;
            if is_final || Instant::now() + PAUSE >= end {
                return Err(failure);
            }
            if hint.is_none() {
                tokio::time::sleep(PAUSE).await;
            }
        }
    }

    /// Hands a command to the leader of `__cluster` elsewhere, once, within `deadline`: `refusal` is
    /// what this broker says to it. The leader makes of it what it takes from members.
    ///
    /// # Errors
    /// The leader's, or why none was reached.
    ///
    /// # Cancel safety
    /// A dropped call may have submitted the command.
    pub async fn hand_in(
        &self,
        command: Command,
        refusal: v1::Error,
        deadline: Duration,
    ) -> Result<Decided, v1::Error> {
        let bytes: Bytes = ClusterCommand {
            command: Some(command),
        }
        .encode_to_vec()
        .into();
        let end = Instant::now() + deadline;
        self.elsewhere(&bytes, refusal, &mut None, end).await
    }

    /// Here, then where the last answer pointed, then wherever somebody may know; until `end`.
    async fn attempt(
        &self,
        command: &Bytes,
        hint: &mut Option<BrokerId>,
        end: Instant,
    ) -> Result<Decided, v1::Error> {
        let left = || CALL_DEADLINE.min(end.saturating_duration_since(Instant::now()));
        let here = self.propose_here(command.clone(), left()).await;
        match here {
            Err(failure)
                if matches!(failure.code(), ErrorCode::NotLeader | ErrorCode::NotReady) =>
            {
                self.elsewhere(command, failure, hint, end).await
            }
            decided => decided,
        }
    }

    /// Where this broker's refusal or the last answer pointed, or wherever somebody may know; until
    /// `end`.
    async fn elsewhere(
        &self,
        command: &Bytes,
        mut failure: v1::Error,
        hint: &mut Option<BrokerId>,
        end: Instant,
    ) -> Result<Decided, v1::Error> {
        let left = || CALL_DEADLINE.min(end.saturating_duration_since(Instant::now()));
        let known = failure
            .leader_hint
            .as_ref()
            .map(|hint| BrokerId(hint.broker_id));
        let mut targets: Vec<BrokerId> = hint.take().into_iter().chain(known).collect();
        if targets.is_empty() {
            targets = self
                .book
                .all()
                .iter()
                .map(|b| BrokerId(b.broker_id))
                .collect();
        }
        let mut asked = BTreeSet::new();
        for target in targets {
            let Some(broker) = self.book.get(target).filter(|_| asked.insert(target)) else {
                continue;
            };
            if left().is_zero() {
                break;
            }
            let request = ProposeRequest {
                hello: Some(self.peers.hello()),
                command: command.clone(),
            };
            match self
                .calls
                .propose(&broker.peer_address, request, left())
                .await
            {
                Ok(response) => match response.error {
                    None => {
                        let reply = CommandReply::decode(response.reply)
                            .map_err(|problem| error(ErrorCode::Internal, problem.to_string()))?;
                        return Ok(Decided {
                            reply,
                            index: response.cluster_index,
                        });
                    }
                    Some(refused) => {
                        *hint = refused
                            .leader_hint
                            .as_ref()
                            .map(|hint| BrokerId(hint.broker_id))
                            .filter(|id| !asked.contains(id));
                        failure = refused;
                        if hint.is_some() {
                            break;
                        }
                    }
                },
                Err(problem) => failure = error(ErrorCode::NotReady, problem.to_string()),
            }
        }
        Err(failure)
    }
}

/// Reports go their way; what was refused shows in the view as not done.
#[derive(Clone)]
pub struct Reporter(pub Arc<Proposer>);

impl Reports for Reporter {
    fn report(&self, command: Command) -> BoxFuture<'static, Result<(), String>> {
        let proposer = Arc::clone(&self.0);
        Box::pin(async move {
            let outcome = proposer.propose(command, REPORT_DEADLINE).await;
            outcome.map(|_| ()).map_err(|failure| failure.message)
        })
    }
}

#[cfg(test)]
mod tests {
    use qute_proto::internal::{BrokerAddress, PartitionsBorn};

    use super::*;
    use crate::env::SystemClock;
    use crate::raft::Identity;

    #[tokio::test]
    async fn silent_brokers_do_not_stretch_the_deadline() {
        let own = BrokerId(1);
        let book = Arc::new(AddressBook::new(own));
        let mut silent = Vec::new();
        for broker_id in 2..6 {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            book.learn(&BrokerAddress {
                broker_id,
                peer_address: listener.local_addr().unwrap().to_string(),
                ..BrokerAddress::default()
            });
            silent.push(listener);
        }
        let peers = Peers::new(
            Identity {
                broker: own,
                boot: 1,
                process: 1,
            },
            &[],
        );
        let proposer = Proposer::new(
            own,
            peers,
            Arc::default(),
            book,
            Arc::new(SystemClock),
            watch::channel(None).1,
        );
        let started = Instant::now();
        let command = Command::PartitionsBorn(PartitionsBorn::default());
        let refused = proposer.propose(command, Duration::from_millis(300)).await;
        assert_eq!(refused.unwrap_err().code(), ErrorCode::NotReady);
        let took = started.elapsed();
        assert!(took < CALL_DEADLINE, "{took:?}");
    }
}
