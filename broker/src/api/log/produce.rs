//! One produce stream: batches in, acknowledgements out.
//!
//! One task per stream. Batches are submitted in the order in which they arrive, so the order
//! within a partition is kept; answers go out as they come, in order within a partition. A
//! refused batch costs its own answer and nothing else.
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

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use qute_proto::ids::PartitionId;
use qute_proto::v1;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tonic::{Status, Streaming};

use super::{Shared, wire};
use crate::partition::door::{Ack, Pending};
use crate::partition::error::Error;

/// Batches of one stream that may be unanswered.
const UNANSWERED_MAX: usize = 4096;
/// How long a batch waits for room before it is refused: the stream stands still meanwhile.
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
    let mut open = true;
    while open || unanswered.count > 0 {
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
            request = requests.next(), if open && unanswered.count < UNANSWERED_MAX => match request {
                Some(Ok(request)) => match submit(&shared, request).await {
                    Ok((partition, entry)) => unanswered.push(partition, entry),
                    Err(answer) => if !shared.send(&answers, Ok(answer)).await {
                        return;
                    },
                },
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

async fn submit(
    shared: &Shared,
    request: v1::ProduceRequest,
) -> Result<(PartitionId, Entry), v1::ProduceResponse> {
    let correlation_id = request.correlation_id;
    let partition = wire::partition_id(&request.topic_id, request.partition)
        .map_err(|error| refused(correlation_id, error))?;
    let mut entry = Entry {
        correlation_id,
        bytes: u64::try_from(request.batch.len()).unwrap_or(u64::MAX),
        fate: Fate::Refused(Error::Overloaded),
        _budget: None,
    };
    if let Some(budget) = admit(&shared.produce_budget, request.batch.len()).await {
        entry._budget = Some(budget);
        let submitted = match shared.replicas.serving(partition) {
            Ok(replica) => replica.append_within(request.batch, PATIENCE).await,
            Err(error) => Err(error),
        };
        entry.fate = match submitted {
            Ok(pending) => Fate::Pending(pending),
            Err(error) => Fate::Refused(error),
        };
    }
    Ok((partition, entry))
}

async fn admit(budget: &Arc<Semaphore>, bytes: usize) -> Option<OwnedSemaphorePermit> {
    let permits = u32::try_from(bytes.max(1)).ok()?;
    let admitted = Arc::clone(budget).acquire_many_owned(permits);
    tokio::time::timeout(PATIENCE, admitted).await.ok()?.ok()
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
