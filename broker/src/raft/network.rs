//! `RaftNetworkV2` over the lanes: one instance per group, target and purpose.
//!
//! `stream_append` is pipelined: appends leave as openraft hands them over, and answers are
//! yielded in the order of the appends. Three things that openraft expects of it:
//!
//! - it takes one append from its input *before* it can fail: the back-off after an error sleeps
//!   inside that input, and a stream that fails without it is made again at once, for ever;
//! - when its input ends, its output ends once all answers are in;
//! - after an answer that is not a plain success it ends.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt};
use openraft::base::{BoxFuture, BoxStream};
use openraft::errors::{NetworkError, RPCError, ReplicationClosed, StreamingError, Unreachable};
use openraft::network::{Backoff, RPCOption};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, StreamAppendResult,
    TransferLeaderRequest, TransferLeaderResponse, VoteRequest, VoteResponse,
};
use openraft::{OptionalSend, RPCTypes, RaftNetworkFactory, RaftNetworkV2};
use prost::Message;
use qute_proto::internal::{FrameKind, PeerFrame};
use rand::RngExt;
use tokio::time::Instant;

use super::codec::{self, AppendAnswer, DecodeError, SnapshotMessage};
use super::lane::{Lane, Link, LinkError, SNAPSHOT_BYTES_MAX, Ticket};
use super::machine::SnapshotData;
use super::peers::Peers;
use super::queue::Urgency;
use super::types::{GroupId, LogId, ReplicaNode, TypeConfig, Vote};
use crate::storage::Log;

/// A follower that has not answered an append for this long has lost it.
const APPEND_DEADLINE: Duration = Duration::from_secs(5);

/// Votes are lost after this; the election timer is the real limit.
const VOTE_DEADLINE: Duration = Duration::from_secs(1);

/// Snapshots are small: checkpoints of small state machines.
const SNAPSHOT_DEADLINE: Duration = Duration::from_secs(30);

/// Appends of one group that may be unanswered, so that one group does not fill the lane.
const IN_FLIGHT_MAX: usize = 64;
const IN_FLIGHT_BYTES_MAX: usize = 8 << 20;

type RpcError = RPCError<TypeConfig>;
type Snapshot = openraft::Snapshot<super::types::CommittedLeaderId, u64, ReplicaNode, SnapshotData>;

/// Makes the network clients of one replica.
pub struct Network {
    peers: Peers,
    group: GroupId,
    replica: u64,
    log: Weak<Log>,
}

impl Network {
    pub(super) fn new(peers: Peers, group: GroupId, replica: u64, log: Weak<Log>) -> Self {
        Self {
            peers,
            group,
            replica,
            log,
        }
    }

    fn client(&self, target: u64, node: &ReplicaNode, appends: Lane) -> Client {
        Client {
            peers: self.peers.clone(),
            group: self.group,
            replica: self.replica,
            log: Weak::clone(&self.log),
            target,
            node: *node,
            appends,
        }
    }
}

impl RaftNetworkFactory<TypeConfig> for Network {
    type Network = Client;

    async fn new_client(&mut self, target: u64, node: &ReplicaNode) -> Client {
        self.client(target, node, Lane::Data)
    }

    async fn new_heartbeat_client(&mut self, target: u64, node: &ReplicaNode) -> Client {
        self.client(target, node, Lane::Control)
    }
}

/// Sends to one replica of one group.
pub struct Client {
    peers: Peers,
    group: GroupId,
    replica: u64,
    log: Weak<Log>,
    target: u64,
    node: ReplicaNode,
    // Where appends go. Votes always take the control lane, snapshots the data lane.
    appends: Lane,
}

impl Client {
    fn frame(&self, kind: FrameKind, payload: Bytes) -> PeerFrame {
        PeerFrame {
            group: Some(self.group.to_wire()),
            target: self.target,
            kind: kind.into(),
            payload,
            ..Default::default()
        }
    }

    fn link(&self, lane: Lane) -> Arc<Link> {
        self.peers.link(self.node.broker, lane)
    }

    async fn call(
        &self,
        lane: Lane,
        kind: FrameKind,
        payload: Bytes,
        deadline: Duration,
    ) -> Result<Bytes, LinkError> {
        let deadline = Instant::now() + deadline;
        let frame = self.frame(kind, payload);
        let link = self.link(lane);
        let mut ticket = link.send(frame, Urgency::Now, deadline).await?;
        Ok(ticket.answer(deadline).await?.payload)
    }

    fn append_frame(&self, request: &AppendEntriesRequest<TypeConfig>) -> PeerFrame {
        PeerFrame {
            append: Some(codec::append_request_to_wire(request)),
            in_order: self.appends == Lane::Data,
            ..self.frame(FrameKind::AppendRequest, Bytes::new())
        }
    }

    /// What the target lacks has been purged while it was waited for. openraft would go on asking
    /// the log for it and sending nothing, for ever; an error makes it look again, and send the
    /// snapshot.
    fn check_readable(&self, request: &AppendEntriesRequest<TypeConfig>) -> Result<(), RpcError> {
        let next = request.prev_log_id.map_or(0, |prev| prev.index + 1);
        let first = self.log.upgrade().map_or(0, |log| log.first_index());
        if next >= first || !request.entries.is_empty() {
            return Ok(());
        }
        let gone = std::io::Error::other(format!(
            "replica {} lacks index {next}, and the log begins at {first}",
            self.target
        ));
        Err(RPCError::Network(NetworkError::new(&gone)))
    }

    fn error(&self, action: RPCTypes, error: LinkError, deadline: Duration) -> RpcError {
        match error {
            LinkError::Timeout => RPCError::Timeout(openraft::errors::Timeout {
                action,
                id: self.replica,
                target: self.target,
                timeout: deadline,
            }),
            // Both back off: there is no use in asking again at once.
            LinkError::Down(_) | LinkError::Remote(_) => {
                RPCError::Unreachable(Unreachable::new(&error))
            }
        }
    }
}

fn malformed(error: &DecodeError) -> RpcError {
    RPCError::Network(NetworkError::new(error))
}

impl RaftNetworkV2<TypeConfig> for Client {
    type SnapshotData = SnapshotData;

    async fn append_entries(
        &mut self,
        request: AppendEntriesRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<AppendEntriesResponse<TypeConfig>, RpcError> {
        let deadline = Instant::now() + APPEND_DEADLINE;
        let sent = async {
            let link = self.link(self.appends);
            let frame = self.append_frame(&request);
            let mut ticket = link.send(frame, Urgency::Now, deadline).await?;
            ticket.answer(deadline).await
        };
        let answer = sent
            .await
            .map_err(|error| self.error(RPCTypes::AppendEntries, error, APPEND_DEADLINE))?;
        match codec::append_answer_from_wire(answer.payload) {
            Ok(AppendAnswer::Handled(response)) => Ok(response),
            Ok(AppendAnswer::Refused(reason)) => Err(refused(reason)),
            Err(error) => Err(malformed(&error)),
        }
    }

    fn stream_append<'s, S>(
        &'s mut self,
        input: S,
        _option: RPCOption,
    ) -> BoxFuture<
        's,
        Result<BoxStream<'s, Result<StreamAppendResult<TypeConfig>, RpcError>>, RpcError>,
    >
    where
        S: Stream<Item = AppendEntriesRequest<TypeConfig>> + OptionalSend + Unpin + 'static,
    {
        let session = Session {
            link: self.link(self.appends),
            client: self,
            input: Some(input),
            in_flight: VecDeque::new(),
            bytes: 0,
            ended: false,
        };
        let answers = futures::stream::unfold(session, |mut session| async move {
            let answer = session.next().await?;
            Some((answer, session))
        });
        let answers: BoxStream<'s, _> = Box::pin(answers);
        Box::pin(async move { Ok(answers) })
    }

    async fn vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RpcError> {
        let payload = codec::encode_vote_request(&request);
        let answer = self
            .call(
                Lane::Control,
                FrameKind::VoteRequest,
                payload,
                VOTE_DEADLINE,
            )
            .await
            .map_err(|error| self.error(RPCTypes::Vote, error, VOTE_DEADLINE))?;
        codec::decode_vote_response(answer).map_err(|error| malformed(&error))
    }

    async fn pre_vote(
        &mut self,
        request: VoteRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<VoteResponse<TypeConfig>, RpcError> {
        let payload = codec::encode_vote_request(&request);
        let answer = self
            .call(
                Lane::Control,
                FrameKind::PreVoteRequest,
                payload,
                VOTE_DEADLINE,
            )
            .await
            .map_err(|error| self.error(RPCTypes::Vote, error, VOTE_DEADLINE))?;
        codec::decode_vote_response(answer).map_err(|error| malformed(&error))
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<TypeConfig>, StreamingError<TypeConfig>> {
        let payload = codec::encode_snapshot_request(SnapshotMessage {
            vote,
            last_log_id: snapshot.meta.last_log_id,
            membership: snapshot.meta.last_membership,
            data: snapshot.snapshot,
        });
        if payload.len() > SNAPSHOT_BYTES_MAX {
            // It would break the stream, and with it the replication of all groups.
            let reason = format!(
                "a snapshot of {} bytes, one message carries {SNAPSHOT_BYTES_MAX}",
                payload.len()
            );
            return Err(refused(reason).into());
        }
        let call = self.call(
            Lane::Data,
            FrameKind::SnapshotRequest,
            payload,
            SNAPSHOT_DEADLINE,
        );
        let answer = tokio::select! {
            answer = call => answer,
            closed = cancel => return Err(closed.into()),
        };
        let answer = answer
            .map_err(|error| self.error(RPCTypes::InstallSnapshot, error, SNAPSHOT_DEADLINE))?;
        Ok(codec::decode_snapshot_response(answer).map_err(|error| malformed(&error))?)
    }

    async fn transfer_leader(
        &mut self,
        request: TransferLeaderRequest<TypeConfig>,
        _option: RPCOption,
    ) -> Result<TransferLeaderResponse<TypeConfig>, RpcError> {
        let payload = codec::encode_transfer_request(&request);
        let answer = self
            .call(
                Lane::Control,
                FrameKind::TransferRequest,
                payload,
                VOTE_DEADLINE,
            )
            .await
            .map_err(|error| self.error(RPCTypes::TransferLeader, error, VOTE_DEADLINE))?;
        codec::decode_transfer_response(answer).map_err(|error| malformed(&error))
    }

    fn backoff(&self) -> Option<Backoff> {
        // Jittered, so that the groups of a dead peer do not knock together.
        let delays = std::iter::successors(Some(50_u64), |delay| Some((delay * 2).min(500)));
        Some(Backoff::new(delays.map(|delay| {
            Duration::from_millis(delay).mul_f64(rand::rng().random_range(0.5..1.5))
        })))
    }
}

fn refused(reason: String) -> RpcError {
    // S4: retriable, after a pause.
    RPCError::Unreachable(Unreachable::new(&LinkError::Remote(reason)))
}

/// An append on its way.
struct InFlight {
    ticket: Ticket,
    deadline: Instant,
    bytes: usize,
    prev: Option<LogId>,
    last: Option<LogId>,
}

/// One run of `stream_append`.
struct Session<'s, S> {
    client: &'s Client,
    link: Arc<Link>,
    // None once it has ended.
    input: Option<S>,
    in_flight: VecDeque<InFlight>,
    bytes: usize,
    ended: bool,
}

enum Step {
    Answer(Result<PeerFrame, LinkError>),
    Input(Option<AppendEntriesRequest<TypeConfig>>),
}

type Answer = Result<StreamAppendResult<TypeConfig>, RpcError>;

impl<S> Session<'_, S>
where
    S: Stream<Item = AppendEntriesRequest<TypeConfig>> + Unpin,
{
    /// The next answer, in the order of the appends.
    async fn next(&mut self) -> Option<Answer> {
        if self.ended {
            return None;
        }
        loop {
            let step = match self.step().await {
                Some(step) => step,
                None => {
                    self.ended = true;
                    return None;
                }
            };
            match step {
                Step::Input(None) => self.input = None,
                Step::Input(Some(request)) => {
                    if let Err(error) = self.client.check_readable(&request) {
                        self.ended = true;
                        return Some(Err(error));
                    }
                    if let Err(error) = self.send(&request).await {
                        return Some(Err(self.fail(error)));
                    }
                }
                Step::Answer(answer) => return Some(self.answered(answer)),
            }
        }
    }

    /// Whichever comes first: the oldest answer, or another append while there is room.
    async fn step(&mut self) -> Option<Step> {
        let room = self.in_flight.len() < IN_FLIGHT_MAX && self.bytes < IN_FLIGHT_BYTES_MAX;
        match (self.in_flight.front_mut(), self.input.as_mut()) {
            (None, None) => None,
            (None, Some(input)) => Some(Step::Input(input.next().await)),
            (Some(oldest), Some(input)) if room => Some(tokio::select! {
                biased;
                answer = oldest.ticket.answer(oldest.deadline) => Step::Answer(answer),
                request = input.next() => Step::Input(request),
            }),
            (Some(oldest), _) => Some(Step::Answer(oldest.ticket.answer(oldest.deadline).await)),
        }
    }

    async fn send(&mut self, request: &AppendEntriesRequest<TypeConfig>) -> Result<(), LinkError> {
        let deadline = Instant::now() + APPEND_DEADLINE;
        let frame = self.client.append_frame(request);
        let bytes = frame.encoded_len();
        // A heartbeat may wait a moment for those of other groups; entries and commits do not.
        let urgency = match self.client.appends {
            Lane::Control => Urgency::Lazy,
            Lane::Data => Urgency::Now,
        };
        let ticket = self.link.send(frame, urgency, deadline).await?;
        self.bytes += bytes;
        self.in_flight.push_back(InFlight {
            ticket,
            deadline,
            bytes,
            prev: request.prev_log_id,
            last: request
                .entries
                .last()
                .map(|entry| entry.log_id)
                .or(request.prev_log_id),
        });
        Ok(())
    }

    fn answered(&mut self, answer: Result<PeerFrame, LinkError>) -> Answer {
        let Some(append) = self.in_flight.pop_front() else {
            return Err(self.fail(LinkError::Timeout));
        };
        self.bytes -= append.bytes;
        let answer = match answer {
            Ok(frame) => codec::append_answer_from_wire(frame.payload),
            Err(error) => return Err(self.fail(error)),
        };
        let response = match answer {
            Ok(AppendAnswer::Handled(response)) => response,
            Ok(AppendAnswer::Refused(reason)) => {
                self.ended = true;
                return Err(refused(reason));
            }
            Err(error) => {
                self.ended = true;
                return Err(malformed(&error));
            }
        };
        match &response {
            AppendEntriesResponse::Success => {}
            AppendEntriesResponse::PartialSuccess(upto) => self.ended = *upto != append.last,
            AppendEntriesResponse::HigherVote(_) => self.ended = true,
            AppendEntriesResponse::Conflict => {
                self.ended = true;
                if append.prev.is_none() {
                    // Nothing can conflict with the start of the log.
                    return Err(malformed(&DecodeError::OutOfRange("outcome")));
                }
            }
        }
        Ok(response.into_stream_result(append.prev, append.last))
    }

    fn fail(&mut self, error: LinkError) -> RpcError {
        self.ended = true;
        self.client
            .error(RPCTypes::AppendEntries, error, APPEND_DEADLINE)
    }
}

#[cfg(test)]
mod tests {
    use qute_proto::ids::{BrokerId, PartitionId, ReplicaId, TopicId};

    use super::super::identity::Identity;
    use super::super::types::log_id;
    use super::*;
    use crate::storage::{
        FrameKind, LogConfig, NewFrame, Position, ReplicaKey, Store, StoreConfig,
    };

    /// A log of ten entries that begins at index 6.
    async fn purged_log(store: &Store, partition: PartitionId) -> Arc<Log> {
        let key = ReplicaKey {
            partition,
            replica: ReplicaId(1),
        };
        let log = store.create_log(key, LogConfig::default()).unwrap();
        let frames = (0..10).map(|index| NewFrame {
            term: 1,
            index,
            kind: FrameKind::Blank,
            broker_time_ms: 0,
            records: 0,
            payload: Bytes::new(),
        });
        log.append(frames.collect(), |appended| appended.unwrap())
            .unwrap();
        log.sync().await.unwrap();
        log.save_checkpoint(9, b"state").unwrap();
        let upto = Position { term: 1, index: 5 };
        log.purge(upto).await.unwrap();
        log
    }

    #[tokio::test]
    async fn stream_to_a_target_whose_next_entry_is_purged_ends_with_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(StoreConfig::new(dir.path().join("data"))).unwrap();
        let group = GroupId::new(PartitionId {
            topic: TopicId::random(),
            partition: 0,
        });
        let log = purged_log(&store, group.partition).await;
        let identity = Identity {
            broker: store.identity(),
            boot: store.boot(),
            process: store.process(),
        };
        let peers = Peers::new(identity, &[]);
        let mut network = Network::new(peers.clone(), group, 1, Arc::downgrade(&log));
        let node = ReplicaNode {
            broker: BrokerId(2),
        };
        for (prev, is_gone) in [(3, true), (4, true), (5, false), (9, false)] {
            let mut client = network.new_client(2, &node).await;
            let request = AppendEntriesRequest {
                vote: codec::vote(1, 1, true),
                prev_log_id: Some(log_id(1, prev)),
                entries: Vec::new(),
                leader_commit: None,
            };
            let input = futures::stream::iter([request]).chain(futures::stream::pending());
            let option = RPCOption::new(Duration::from_secs(1));
            let mut answers = client.stream_append(Box::pin(input), option).await.unwrap();
            let first = answers.next().await.unwrap().unwrap_err();
            // Nobody is there to answer the others.
            assert_eq!(
                matches!(first, RPCError::Network(_)),
                is_gone,
                "{prev}: {first}"
            );
            assert!(answers.next().await.is_none());
        }
        peers.shutdown().await;
        drop(log);
        store.shutdown().await;
    }
}
