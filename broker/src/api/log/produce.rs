//! One produce stream: batches in, acknowledgements out.
//!
//! One task per stream. Batches are submitted in the order in which they arrive, so the order
//! within a partition is kept; answers go out as they come, in order within a partition. A
//! refused batch costs its own answer and nothing else, and so does one for a partition that has
//! no room: it is refused at once.
//!
//! ```text
//!  stream --> budget (bytes, broker-wide) --> Replica::append --> Pending --.
//!    ^                                                                      v
//!    '-- not read while too much is unanswered          per partition: oldest first --> answers
//! ```

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::{Fuse, FusedFuture};
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use qute_proto::ids::PartitionId;
use qute_proto::v1;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tonic::{Status, Streaming};

use super::{Shared, wire};
use crate::partition::door::{Ack, Pending};
use crate::partition::error::Error;

/// Batches of one stream that may be unanswered.
const UNANSWERED_MAX: usize = 4096;
/// How long a batch waits for its share of the budget before it is refused: the stream is not
/// read meanwhile.
const PATIENCE: Duration = Duration::from_millis(250);

/// An unanswered batch.
struct Entry {
    correlation_id: u64,
    bytes: u64,
    fate: Fate,
    _budget: Option<OwnedSemaphorePermit>,
}

enum Fate {
    Pending(Pending),
    Refused(Error),
}

/// The oldest unanswered batch of a partition.
struct Head {
    partition: PartitionId,
    entry: Entry,
}

impl Future for Head {
    type Output = Answered;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let result = match &mut self.entry.fate {
            Fate::Refused(error) => Err(error.clone()),
            Fate::Pending(pending) => match Pin::new(pending).poll(context) {
                Poll::Ready(result) => result,
                Poll::Pending => return Poll::Pending,
            },
        };
        Poll::Ready(Answered {
            partition: self.partition,
            correlation_id: self.entry.correlation_id,
            bytes: self.entry.bytes,
            result,
        })
    }
}

struct Answered {
    partition: PartitionId,
    correlation_id: u64,
    bytes: u64,
    result: Result<Ack, Error>,
}

/// Unanswered batches, in order within each partition.
#[derive(Default)]
struct Unanswered {
    heads: FuturesUnordered<Head>,
    /// What waits behind a head. An entry exists while there is a head.
    behind: HashMap<PartitionId, VecDeque<Entry>>,
    count: usize,
}

impl Unanswered {
    fn push(&mut self, partition: PartitionId, entry: Entry) {
        self.count += 1;
        match self.behind.get_mut(&partition) {
            Some(queue) => queue.push_back(entry),
            None => {
                self.behind.insert(partition, VecDeque::new());
                self.heads.push(Head { partition, entry });
            }
        }
    }

    async fn next(&mut self) -> Option<Answered> {
        let answered = self.heads.next().await?;
        self.count -= 1;
        let partition = answered.partition;
        match self
            .behind
            .get_mut(&partition)
            .and_then(VecDeque::pop_front)
        {
            Some(entry) => self.heads.push(Head { partition, entry }),
            None => drop(self.behind.remove(&partition)),
        }
        Some(answered)
    }
}

/// Runs one stream until the client has ended it and everything is answered, the client is gone,
/// or the broker stops.
pub(super) async fn run(
    shared: Arc<Shared>,
    mut requests: Streaming<v1::ProduceRequest>,
    answers: mpsc::Sender<Result<v1::ProduceResponse, Status>>,
) {
    let mut unanswered = Unanswered::default();
    // The batch that waits for its share of the budget; meanwhile none is read behind it.
    let admitting = Fuse::terminated();
    tokio::pin!(admitting);
    let mut open = true;
    while open || unanswered.count > 0 || !admitting.is_terminated() {
        let may_read = open && unanswered.count < UNANSWERED_MAX && admitting.is_terminated();
        tokio::select! {
            biased;
            () = shared.stop.cancelled() => {
                let _ = answers.try_send(Err(Status::unavailable("the broker is stopping")));
                return;
            }
            () = answers.closed() => return,
            Some(answered) = unanswered.next() => {
                let answer = response(&shared, answered);
                if !shared.send(&answers, Ok(answer)).await {
                    return;
                }
            }
            (request, budget) = &mut admitting, if !admitting.is_terminated() => {
                match submit(&shared, request, budget) {
                    Ok((partition, entry)) => unanswered.push(partition, entry),
                    Err(answer) => if !shared.send(&answers, Ok(answer)).await {
                        return;
                    },
                }
            }
            request = requests.next(), if may_read => match request {
                Some(Ok(request)) => admitting.set(admit(&shared.produce_budget, request).fuse()),
                // A message that is no message: nothing after it can be read.
                Some(Err(status)) => {
                    shared.send(&answers, Err(status)).await;
                    return;
                }
                None => open = false,
            },
        }
    }
}

/// Does not wait: a partition that has no room must not hold up the others of the stream.
fn submit(
    shared: &Shared,
    request: v1::ProduceRequest,
    budget: Option<OwnedSemaphorePermit>,
) -> Result<(PartitionId, Entry), v1::ProduceResponse> {
    let correlation_id = request.correlation_id;
    let partition = wire::partition_id(&request.topic_id, request.partition)
        .map_err(|error| refused(correlation_id, error))?;
    let bytes = u64::try_from(request.batch.len()).unwrap_or(u64::MAX);
    let submitted = match &budget {
        Some(_) => shared
            .replicas
            .serving(partition)
            .and_then(|replica| replica.append(request.batch)),
        None => Err(Error::Overloaded),
    };
    let entry = Entry {
        correlation_id,
        bytes,
        fate: match submitted {
            Ok(pending) => Fate::Pending(pending),
            Err(error) => Fate::Refused(error),
        },
        _budget: budget,
    };
    Ok((partition, entry))
}

/// Waits for the batch's share of the budget; `None`: there was none in time.
async fn admit(
    budget: &Arc<Semaphore>,
    request: v1::ProduceRequest,
) -> (v1::ProduceRequest, Option<OwnedSemaphorePermit>) {
    let Ok(permits) = u32::try_from(request.batch.len().max(1)) else {
        return (request, None);
    };
    let admitted = Arc::clone(budget).acquire_many_owned(permits);
    let admitted = tokio::time::timeout(PATIENCE, admitted).await;
    (request, admitted.ok().and_then(Result::ok))
}

fn response(shared: &Shared, answered: Answered) -> v1::ProduceResponse {
    let correlation_id = answered.correlation_id;
    match answered.result {
        Ok(ack) => {
            if !ack.duplicate {
                metrics::counter!("qute_produce_batches_total").increment(1);
                metrics::counter!("qute_produce_bytes_total").increment(answered.bytes);
            }
            v1::ProduceResponse {
                correlation_id,
                result: Some(v1::produce_response::Result::Ack(v1::ProduceAck {
                    base_offset: ack.base_offset.0,
                    leader_epoch: ack.leader_epoch,
                    duplicate: ack.duplicate,
                })),
            }
        }
        Err(error) => {
            let directory = shared.directory.as_ref();
            let error = wire::refusal(&error, answered.partition, directory);
            let code = error.code().as_str_name();
            metrics::counter!("qute_produce_refused_total", "code" => code).increment(1);
            refused(correlation_id, error)
        }
    }
}

fn refused(correlation_id: u64, error: v1::Error) -> v1::ProduceResponse {
    v1::ProduceResponse {
        correlation_id,
        result: Some(v1::produce_response::Result::Error(error)),
    }
}
