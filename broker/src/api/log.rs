//! The `Log` service: produce, fetch, list offsets.
//!
//! Decodes, asks the partition, encodes. Owns no state but the tasks of open streams; an error
//! belongs to one item of a stream and leaves the stream open.

mod fetch;
mod produce;
mod wire;

#[cfg(test)]
mod tests;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, Stream, StreamExt};
use qute_proto::v1;
use qute_proto::v1::log_server::{Log, LogServer};
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status, Streaming};

use super::server::MESSAGE_BYTES_MAX;
use crate::partition::directory::LeaderDirectory;
use crate::partition::registry::Replicas;
use crate::partition::replica::{ListPosition, Listed};

/// Bytes of batches that all produce streams together may have unanswered.
const PRODUCE_BYTES_MAX: usize = 256 << 20;
/// Answers that wait for the client to read them.
const ACKS_QUEUED: usize = 1024;
const FETCHES_QUEUED: usize = 4;
const QUERIES_MAX: usize = 10_000;
const QUERIES_AT_ONCE: usize = 64;
/// How long a partition may take to confirm its leader (S18) before its query is refused. Shorter than
/// clients wait for an answer (the client's `admin/offsets.rs`, and 2 s where it describes a topic): a
/// partition without a quorum must not cost them the offsets of all others.
const LIST_WITHIN: Duration = Duration::from_millis(1500);

struct Shared {
    replicas: Replicas,
    directory: Arc<dyn LeaderDirectory>,
    produce_budget: Arc<Semaphore>,
    stop: CancellationToken,
}

impl Shared {
    /// Waits for room, unless the broker stops; `false`: nobody reads any more.
    async fn send<T>(
        &self,
        answers: &mpsc::Sender<Result<T, Status>>,
        answer: Result<T, Status>,
    ) -> bool {
        tokio::select! {
            () = self.stop.cancelled() => false,
            sent = answers.send(answer) => sent.is_ok(),
        }
    }
}

/// See the module. Cheap to clone.
#[derive(Clone)]
pub struct LogService {
    shared: Arc<Shared>,
    streams: TaskTracker,
}

impl LogService {
    /// A service over the replicas of this broker.
    #[must_use]
    pub fn new(replicas: Replicas, directory: Arc<dyn LeaderDirectory>) -> Self {
        Self {
            shared: Arc::new(Shared {
                replicas,
                directory,
                produce_budget: Arc::new(Semaphore::new(PRODUCE_BYTES_MAX)),
                stop: CancellationToken::new(),
            }),
            streams: TaskTracker::new(),
        }
    }

    /// The tonic server, with its limits set.
    #[must_use]
    pub fn server(&self) -> LogServer<Self> {
        LogServer::new(self.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }

    /// Ends all streams and waits for their tasks.
    pub async fn shutdown(&self) {
        self.shared.stop.cancel();
        self.streams.close();
        self.streams.wait().await;
    }

    async fn answer(&self, query: v1::OffsetQuery) -> v1::OffsetAnswer {
        let refused = |error| v1::OffsetAnswer {
            error: Some(error),
            ..v1::OffsetAnswer::default()
        };
        let partition = match wire::partition_id(&query.topic_id, query.partition) {
            Ok(partition) => partition,
            Err(error) => return refused(error),
        };
        let position = match query.position {
            Some(v1::offset_query::Position::Start(_)) => ListPosition::Start,
            Some(v1::offset_query::Position::End(_)) => ListPosition::End,
            Some(v1::offset_query::Position::TimeMs(time_ms)) => ListPosition::Time(time_ms),
            None => {
                let code = v1::ErrorCode::InvalidArgument;
                return refused(wire::plain(code, "a query needs start, end or a time"));
            }
        };
        let listed = match self.shared.replicas.serving(partition) {
            Ok(replica) => replica.list_offset(position, LIST_WITHIN).await,
            Err(error) => Err(error),
        };
        match listed {
            Ok(listed) => answered(listed),
            Err(error) => refused(wire::refusal(
                &error,
                partition,
                self.shared.directory.as_ref(),
            )),
        }
    }
}

fn answered(listed: Listed) -> v1::OffsetAnswer {
    v1::OffsetAnswer {
        offset: listed.offset.0,
        leader_epoch: listed.leader_epoch,
        error: None,
        bounds: Some(wire::bounds(listed.bounds)),
    }
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Log for LogService {
    type ProduceStream = Answers<v1::ProduceResponse>;
    type FetchStream = Answers<v1::FetchResponse>;

    async fn produce(
        &self,
        request: Request<Streaming<v1::ProduceRequest>>,
    ) -> Result<Response<Self::ProduceStream>, Status> {
        let (answers, outgoing) = mpsc::channel(ACKS_QUEUED);
        let run = produce::run(Arc::clone(&self.shared), request.into_inner(), answers);
        self.streams.spawn(run);
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing))))
    }

    async fn fetch(
        &self,
        request: Request<Streaming<v1::FetchRequest>>,
    ) -> Result<Response<Self::FetchStream>, Status> {
        let (answers, outgoing) = mpsc::channel(FETCHES_QUEUED);
        let run = fetch::run(Arc::clone(&self.shared), request.into_inner(), answers);
        self.streams.spawn(run);
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing))))
    }

    async fn list_offsets(
        &self,
        request: Request<v1::ListOffsetsRequest>,
    ) -> Result<Response<v1::ListOffsetsResponse>, Status> {
        let queries = request.into_inner().queries;
        if queries.len() > QUERIES_MAX {
            let message = format!("{} queries, {QUERIES_MAX} at most", queries.len());
            return Err(Status::invalid_argument(message));
        }
        let answers = stream::iter(queries)
            .map(|query| self.answer(query))
            .buffered(QUERIES_AT_ONCE)
            .collect()
            .await;
        Ok(Response::new(v1::ListOffsetsResponse { answers }))
    }
}
