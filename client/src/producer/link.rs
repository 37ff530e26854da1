//! One produce stream to one broker. Requests go in through a bounded channel, in order; a task
//! hands each response to the partition that asked, and says "broken" to all that still wait when
//! the stream ends.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use qute_proto::ids::BrokerId;
use qute_proto::v1::{self, produce_response::Result as ProduceResult};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::debug;

use super::flight::Key;
use crate::client::Shared;
use crate::net::{Address, Connections, Lane, log_client, never_sent};
use crate::trace;

/// Requests between the partitions and the connection.
const QUEUED_REQUESTS: usize = 32;
/// How long a broker may take to accept the stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

/// The first offset of a batch is no higher: its records are counted in 32 bits.
const BASE_OFFSET_MAX: u64 = u64::MAX - u32::MAX as u64;

/// What a partition's driver hears.
#[derive(Debug)]
pub(super) enum Event {
    Acknowledged {
        key: Key,
        base_offset: u64,
        /// It was written before, by another attempt.
        duplicate: bool,
    },
    Refused {
        key: Key,
        error: v1::Error,
    },
    /// The stream ended without an answer. With `unsent`, the request never left.
    Broken {
        key: Key,
        unsent: bool,
        cause: Arc<str>,
    },
    /// Whether the topic still exists, by the word of the leader of `__cluster`.
    TopicConfirmed(bool),
}

/// Who waits for a response.
#[derive(Debug)]
struct Waiting {
    key: Key,
    events: mpsc::UnboundedSender<Event>,
}

#[derive(Debug, Default)]
struct Pending {
    next_id: u64,
    waiting: HashMap<u64, Waiting>,
    /// The broker has accepted the stream.
    accepted: bool,
    broken: bool,
}

/// A produce stream.
#[derive(Debug)]
pub(super) struct Link {
    address: Address,
    requests: mpsc::Sender<v1::ProduceRequest>,
    pending: Arc<Mutex<Pending>>,
    /// Tells the task that nobody sends any more.
    _unused: DropGuard,
}

/// Room for one request in the stream.
pub(super) type Permit = mpsc::OwnedPermit<v1::ProduceRequest>;

impl Link {
    fn open(connections: Arc<Connections>, address: Address, stop: CancellationToken) -> Self {
        let (requests, outbound) = mpsc::channel(QUEUED_REQUESTS);
        let pending = Arc::new(Mutex::new(Pending::default()));
        let unused = CancellationToken::new();
        let link = Self {
            address: Arc::clone(&address),
            requests,
            pending: Arc::clone(&pending),
            _unused: unused.clone().drop_guard(),
        };
        tokio::spawn(async move {
            let running = async {
                #[cfg(feature = "bench-internals")]
                if *address == *crate::bench_internals::ADDRESS {
                    return acknowledge(outbound, &pending).await;
                }
                run(&connections, &address, outbound, &pending, &unused).await
            };
            let (unsent, cause) = match stop.run_until_cancelled(running).await {
                Some(ended) => ended,
                None => (false, "the producer was closed".to_owned()),
            };
            debug!(target: trace::PRODUCE, %address, cause, "produce stream ended");
            let cause: Arc<str> = cause.into();
            let waiting = {
                let mut pending = pending.lock();
                pending.broken = true;
                std::mem::take(&mut pending.waiting)
            };
            for Waiting { key, events } in waiting.into_values() {
                let cause = Arc::clone(&cause);
                // The driver may be gone: then so are its tickets.
                let _ = events.send(Event::Broken { key, unsent, cause });
            }
        });
        link
    }

    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    pub(super) fn is_broken(&self) -> bool {
        self.pending.lock().broken || self.requests.is_closed()
    }

    /// The broker has accepted the stream, and it has not ended.
    fn is_alive(&self) -> bool {
        self.pending.lock().accepted && !self.is_broken()
    }

    /// Waits for room; `None` once the stream has ended.
    ///
    /// # Cancel safety
    /// Nothing is sent by this alone.
    pub(super) async fn reserve(&self) -> Option<Permit> {
        self.requests.clone().reserve_owned().await.ok()
    }

    /// Sends a batch, without waiting. The answer, or the end of the stream, comes as an event.
    /// False (and no event) if the stream had ended.
    pub(super) fn send(
        &self,
        permit: Permit,
        key: Key,
        events: &mpsc::UnboundedSender<Event>,
        mut request: v1::ProduceRequest,
    ) -> bool {
        let mut pending = self.pending.lock();
        if pending.broken {
            return false;
        }
        pending.next_id += 1;
        request.correlation_id = pending.next_id;
        let waiting = Waiting {
            key,
            events: events.clone(),
        };
        pending.waiting.insert(request.correlation_id, waiting);
        permit.send(request);
        true
    }
}

/// Runs the stream until it ends; gives whether no request can have left, and why it ended.
async fn run(
    connections: &Connections,
    address: &Address,
    outbound: mpsc::Receiver<v1::ProduceRequest>,
    pending: &Mutex<Pending>,
    unused: &CancellationToken,
) -> (bool, String) {
    let connection = match connections.ready(address, Lane::Produce).await {
        Ok(connection) => connection,
        Err(error) => return (true, error.to_string()),
    };
    let mut client = log_client(connection.channel());
    let opening = client.produce(ReceiverStream::new(outbound));
    let mut responses = match timeout(OPEN_TIMEOUT, opening).await {
        Ok(Ok(response)) => response.into_inner(),
        Ok(Err(status)) => {
            connections.broken(&connection, &status);
            return (never_sent(&status), crate::error::cause_of(&status));
        }
        Err(_) => {
            connections.discard(&connection);
            return (
                false,
                "the broker did not accept the stream in time".to_owned(),
            );
        }
    };
    pending.lock().accepted = true;
    connections.answered(address);
    loop {
        // Once nobody sends, nobody begins to wait.
        let idle = async {
            unused.cancelled().await;
            if !pending.lock().waiting.is_empty() {
                std::future::pending().await
            }
        };
        let response = tokio::select! {
            response = responses.message() => response,
            () = idle => return (false, "nobody uses the stream any more".to_owned()),
        };
        let response = match response {
            Ok(Some(response)) => response,
            Ok(None) => return (false, "the broker ended the stream".to_owned()),
            Err(status) => {
                connections.broken(&connection, &status);
                return (false, crate::error::cause_of(&status));
            }
        };
        connections.answered(address);
        let waiting = pending.lock().waiting.remove(&response.correlation_id);
        let Some(Waiting { key, events }) = waiting else {
            debug!(target: trace::PRODUCE, %address, id = response.correlation_id, "answer to nothing asked");
            continue;
        };
        let event = event_of(key, response.result);
        // The driver may be gone: then so are its tickets.
        let _ = events.send(event);
    }
}

fn event_of(key: Key, result: Option<ProduceResult>) -> Event {
    match result {
        // No offset of the batch may be beyond what there is.
        Some(ProduceResult::Ack(ack)) if ack.base_offset <= BASE_OFFSET_MAX => {
            Event::Acknowledged {
                key,
                base_offset: ack.base_offset,
                duplicate: ack.duplicate,
            }
        }
        Some(ProduceResult::Ack(ack)) => Event::Refused {
            key,
            error: v1::Error {
                code: v1::ErrorCode::Internal.into(),
                message: format!("acknowledged at {}, which is no offset", ack.base_offset),
                ..Default::default()
            },
        },
        Some(ProduceResult::Error(error)) => Event::Refused { key, error },
        None => Event::Refused {
            key,
            error: v1::Error::default(),
        },
    }
}

/// In place of a broker, for benches of what comes before it: acknowledges every batch at once.
#[cfg(feature = "bench-internals")]
async fn acknowledge(
    mut outbound: mpsc::Receiver<v1::ProduceRequest>,
    pending: &Mutex<Pending>,
) -> (bool, String) {
    let mut next_offsets: HashMap<u32, u64> = HashMap::new();
    while let Some(request) = outbound.recv().await {
        let Ok(header) = qute_proto::batch::BatchHeader::parse(&request.batch) else {
            break;
        };
        let next = next_offsets.entry(request.partition).or_default();
        let base_offset = *next;
        *next += u64::from(header.record_count);
        let waiting = pending.lock().waiting.remove(&request.correlation_id);
        if let Some(Waiting { key, events }) = waiting {
            let duplicate = false;
            // The driver may be gone: then so are its tickets.
            let _ = events.send(Event::Acknowledged {
                key,
                base_offset,
                duplicate,
            });
        }
    }
    (false, "the bench is over".to_owned())
}

/// The produce streams of a producer: one per broker.
#[derive(Debug)]
pub(super) struct Links {
    connections: Arc<Connections>,
    open: Mutex<HashMap<BrokerId, Arc<Link>>>,
    stop: CancellationToken,
}

impl Links {
    pub(super) fn new(shared: &Shared, stop: CancellationToken) -> Self {
        Self {
            connections: Arc::clone(&shared.connections),
            open: Mutex::default(),
            stop,
        }
    }

    /// A stream to there is alive.
    pub(super) fn is_alive(&self, address: &Address) -> bool {
        let open = self.open.lock();
        let mut links = open.values();
        links.any(|link| link.address() == address && link.is_alive())
    }

    /// The stream to a broker, opened anew if it has ended or the broker has moved.
    pub(super) fn get(&self, broker: BrokerId, address: &Address) -> Arc<Link> {
        let mut open = self.open.lock();
        if let Some(link) = open.get(&broker)
            && link.address() == address
            && !link.is_broken()
        {
            return Arc::clone(link);
        }
        let link = Arc::new(Link::open(
            Arc::clone(&self.connections),
            Arc::clone(address),
            self.stop.clone(),
        ));
        open.insert(broker, Arc::clone(&link));
        link
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_acknowledgement_beyond_all_offsets_is_no_acknowledgement() {
        let key = Key {
            round: 1,
            epoch: 0,
            sequence: 7,
        };
        let event = |base_offset| {
            let ack = v1::ProduceAck {
                base_offset,
                ..Default::default()
            };
            event_of(key, Some(ProduceResult::Ack(ack)))
        };
        assert!(matches!(event(BASE_OFFSET_MAX), Event::Acknowledged { .. }));
        for broken in [BASE_OFFSET_MAX + 1, u64::MAX] {
            assert!(matches!(event(broken), Event::Refused { .. }));
        }
    }
}
