//! The incoming side of a peer stream.
//!
//! One task reads a stream and never waits for a group: appends with entries go into their
//! replica's queue ([`super::inbound`]), everything else of one message is handled together in a
//! task of its own. Answers are packed by the same queue as requests on the other side.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{FuturesUnordered, StreamExt};
use futures::{Stream, TryStream};
use prost::Message;
use qute_proto::ids::{BrokerId, ReplicaId};
use qute_proto::internal::{FrameKind, LeaderHints, PeerFrame, PeerMessage};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::codec::{self, AppendAnswer, DecodeError};
use super::groups::{Groups, Open};
use super::identity::{Admitted, Refusal};
use super::machine::SnapshotMeta;
use super::queue::{FrameQueue, Urgency};
use super::types::GroupId;

/// The first message must come within this time.
const HELLO_DEADLINE: Duration = Duration::from_secs(5);

/// A request that openraft has not answered for this long is given up; its sender has done so long
/// before.
const HANDLE_DEADLINE: Duration = Duration::from_secs(30);

/// Messages of one stream being handled at once, beside the queued appends.
const HANDLING_MAX: usize = 256;

/// Answers waiting for a peer that does not read them, at most.
const ANSWERS_BYTES_MAX: usize = 64 << 20;

/// What a peer stream sends back.
pub type PeerAnswers = Pin<Box<dyn Stream<Item = Result<PeerMessage, tonic::Status>> + Send>>;

/// Answers one request.
pub(super) struct Reply {
    queue: Arc<FrameQueue>,
    correlation_id: u64,
    kind: FrameKind,
    urgency: Urgency,
}

impl Reply {
    pub(super) fn append(self, answer: &AppendAnswer) {
        let payload = codec::append_answer_to_wire(answer).encode_to_vec();
        self.send(payload.into(), String::new());
    }

    pub(super) fn fail(self, reason: &dyn std::fmt::Display) {
        let reason = reason.to_string();
        self.send(Bytes::new(), reason);
    }

    fn send(self, payload: Bytes, failure: String) {
        let frame = PeerFrame {
            kind: self.kind.into(),
            correlation_id: self.correlation_id,
            payload,
            failure,
            ..Default::default()
        };
        // If the stream is gone, so is whoever asked.
        self.queue.push(frame, self.urgency);
    }
}

fn answer_kind(kind: FrameKind) -> FrameKind {
    match kind {
        FrameKind::AppendRequest => FrameKind::AppendResponse,
        FrameKind::VoteRequest => FrameKind::VoteResponse,
        FrameKind::PreVoteRequest => FrameKind::PreVoteResponse,
        FrameKind::SnapshotRequest => FrameKind::SnapshotResponse,
        FrameKind::TransferRequest => FrameKind::TransferResponse,
        _ => FrameKind::Unspecified,
    }
}

impl Groups {
    /// Serves one incoming peer stream until it ends: greeting, then requests and answers.
    ///
    /// The stream's own task lives in the set that [`super::Peers::shutdown`] waits for.
    pub fn serve_stream<S>(&self, inbound: S) -> PeerAnswers
    where
        S: Stream<Item = Result<PeerMessage, tonic::Status>> + Send + Unpin + 'static,
    {
        let queue = Arc::new(FrameQueue::new());
        let (first, greeting) = tokio::sync::oneshot::channel();
        let peers = self.peers().clone();
        let serving = serve(self.clone(), inbound, Arc::clone(&queue), first);
        peers.spawn(serving);
        let last_sent = Instant::now();
        let greeting = async move { greeting.await.ok().map(Ok) };
        let answers = futures::stream::unfold((queue, last_sent), |(queue, mut last)| async move {
            let message = queue.next(&mut last).await?;
            Some((Ok(message), (queue, last)))
        });
        let greeting = futures::stream::once(greeting).filter_map(std::future::ready);
        Box::pin(greeting.chain(answers))
    }
}

async fn serve<S>(
    groups: Groups,
    mut inbound: S,
    queue: Arc<FrameQueue>,
    first: tokio::sync::oneshot::Sender<PeerMessage>,
) where
    S: Stream<Item = Result<PeerMessage, tonic::Status>> + Send + Unpin + 'static,
{
    let context = Arc::clone(&groups.peers().context);
    let served = async {
        let peer = match greet(&groups, &mut inbound).await {
            Ok((peer, answer)) => {
                if first.send(answer).is_err() {
                    return;
                }
                peer
            }
            Err(refusal) => {
                tracing::warn!(%refusal, "a peer is refused");
                let _ = first.send(PeerMessage {
                    refused: Some(refusal.to_wire()),
                    ..Default::default()
                });
                return;
            }
        };
        groups.peers().kick(peer.broker);
        tokio::select! {
            () = read(&groups, &mut inbound, &queue, &peer) => {}
            () = peer.superseded.cancelled() => {
                tracing::warn!(peer = %peer.broker, "another process has taken over a peer's identity");
            }
        }
        context.known.lost(&peer);
    };
    tokio::select! {
        () = served => {}
        () = context.shutdown.cancelled() => {}
    }
    queue.close();
}

async fn greet<S>(groups: &Groups, inbound: &mut S) -> Result<(Admitted, PeerMessage), Refusal>
where
    S: TryStream<Ok = PeerMessage, Error = tonic::Status>
        + Stream<Item = Result<PeerMessage, tonic::Status>>
        + Unpin,
{
    let context = &groups.peers().context;
    let message = tokio::time::timeout(HELLO_DEADLINE, inbound.next())
        .await
        .map_err(|_| Refusal::Malformed("no hello in time"))?;
    let Some(Ok(message)) = message else {
        return Err(Refusal::Malformed("the stream ended before the hello"));
    };
    let hello = message
        .hello
        .ok_or(Refusal::Malformed("the first message holds no hello"))?;
    let peer = context.admit(&hello)?;
    let own = context.hello().ok_or(Refusal::NotFormed)?;
    let answer = PeerMessage {
        hello: Some(own),
        ..Default::default()
    };
    Ok((peer, answer))
}

async fn read<S>(groups: &Groups, inbound: &mut S, queue: &Arc<FrameQueue>, peer: &Admitted)
where
    S: Stream<Item = Result<PeerMessage, tonic::Status>> + Unpin,
{
    let handling = Arc::new(Semaphore::new(HANDLING_MAX));
    loop {
        let message = match inbound.next().await {
            Some(Ok(message)) => message,
            None => return,
            Some(Err(status)) => {
                tracing::debug!(peer = %peer.broker, status = status.message(), "peer stream broke");
                return;
            }
        };
        groups.peers().context.known.heard(peer);
        if queue.bytes() > ANSWERS_BYTES_MAX {
            tracing::warn!(peer = %peer.broker, "a peer does not read its answers");
            return;
        }
        let mut requests = Vec::new();
        for frame in message.frames {
            if let Some(request) = accept(groups, frame, queue, peer.broker) {
                requests.push(request);
            }
        }
        if requests.is_empty() {
            continue;
        }
        match Arc::clone(&handling).try_acquire_owned() {
            Ok(permit) => {
                let shutdown = groups.peers().context.shutdown.clone();
                groups.peers().spawn(async move {
                    let mut work: FuturesUnordered<_> = requests
                        .into_iter()
                        .map(|(open, request, reply)| handle(open, request, reply))
                        .collect();
                    let all = async { while work.next().await.is_some() {} };
                    tokio::select! {
                        () = all => {}
                        () = shutdown.cancelled() => {}
                    }
                    drop(permit);
                });
            }
            Err(_) => {
                for (_, _, reply) in requests {
                    reply.fail(&"too many requests at once");
                }
            }
        }
    }
}

/// A request that is handled in a task.
enum Request {
    Heartbeat(openraft::raft::AppendEntriesRequest<super::types::TypeConfig>),
    Vote(Bytes),
    PreVote(Bytes),
    Snapshot(Bytes),
    Transfer(Bytes),
}

/// Takes one frame: queues an append, delivers hints, or returns what is to be handled.
fn accept(
    groups: &Groups,
    frame: PeerFrame,
    queue: &Arc<FrameQueue>,
    from: BrokerId,
) -> Option<(Open, Request, Reply)> {
    let kind = frame.kind();
    if kind == FrameKind::LeaderHints {
        match (
            LeaderHints::decode(frame.payload),
            groups.peers().context.hints.get(),
        ) {
            (Ok(hints), Some(sink)) => sink(from, hints),
            (Ok(_), None) => {}
            (Err(error), _) => tracing::warn!(peer = %from, %error, "malformed leader hints"),
        }
        return None;
    }
    let is_heartbeat = kind == FrameKind::AppendRequest && !frame.in_order;
    let reply = Reply {
        queue: Arc::clone(queue),
        correlation_id: frame.correlation_id,
        kind: answer_kind(kind),
        urgency: if is_heartbeat {
            Urgency::Lazy
        } else {
            Urgency::Now
        },
    };
    let Some(id) = frame.group.as_ref().and_then(GroupId::from_wire) else {
        reply.fail(&"no group id");
        return None;
    };
    // S9: a request reaches exactly the identity that it was meant for.
    let open = match groups.find(id, ReplicaId(frame.target)) {
        Ok(open) => open,
        Err(error) => {
            reply.fail(&error);
            return None;
        }
    };
    let request = match kind {
        FrameKind::AppendRequest => {
            let append = frame.append.ok_or(DecodeError::Missing("append"));
            match append.and_then(codec::append_request_from_wire) {
                Err(error) => {
                    reply.fail(&error);
                    return None;
                }
                Ok(request) if frame.in_order || !request.entries.is_empty() => {
                    open.inbound.push(request, reply);
                    return None;
                }
                Ok(request) => Request::Heartbeat(request),
            }
        }
        FrameKind::VoteRequest => Request::Vote(frame.payload),
        FrameKind::PreVoteRequest => Request::PreVote(frame.payload),
        FrameKind::SnapshotRequest => Request::Snapshot(frame.payload),
        FrameKind::TransferRequest => Request::Transfer(frame.payload),
        _ => {
            reply.fail(&"not a request");
            return None;
        }
    };
    Some((open, request, reply))
}

async fn handle(open: Open, request: Request, reply: Reply) {
    let answered = tokio::time::timeout(HANDLE_DEADLINE, answer(&open, request)).await;
    match answered {
        Ok(Ok(payload)) => reply.send(payload, String::new()),
        Ok(Err(reason)) => reply.fail(&reason),
        Err(_elapsed) => reply.fail(&"the replica did not answer in time"),
    }
}

async fn answer(open: &Open, request: Request) -> Result<Bytes, String> {
    let raft = open.handle.raft();
    match request {
        Request::Heartbeat(request) => {
            let response = open.handle.append_entries(request).await.map_err(text)?;
            let answer = AppendAnswer::Handled(response);
            Ok(codec::append_answer_to_wire(&answer).encode_to_vec().into())
        }
        Request::Vote(payload) => {
            let request = codec::decode_vote_request(payload).map_err(text)?;
            let response = raft.vote(request).await.map_err(text)?;
            Ok(codec::encode_vote_response(&response))
        }
        Request::PreVote(payload) => {
            let request = codec::decode_vote_request(payload).map_err(text)?;
            let response = raft.pre_vote(request).await.map_err(text)?;
            Ok(codec::encode_vote_response(&response))
        }
        Request::Snapshot(payload) => {
            let message = codec::decode_snapshot_request(payload).map_err(text)?;
            super::checkpoint::check(&message).map_err(text)?;
            let snapshot = openraft::Snapshot {
                meta: SnapshotMeta {
                    last_log_id: message.last_log_id,
                    last_membership: message.membership,
                },
                snapshot: message.data,
            };
            let response = raft.install_full_snapshot(message.vote, snapshot).await;
            Ok(codec::encode_snapshot_response(&response.map_err(text)?))
        }
        Request::Transfer(payload) => {
            let request = codec::decode_transfer_request(payload).map_err(text)?;
            let response = raft.handle_transfer_leader(request).await.map_err(text)?;
            Ok(codec::encode_transfer_response(&response))
        }
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
