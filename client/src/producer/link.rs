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
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::flight::Key;
use crate::client::Shared;
use crate::net::{Address, Connections, Lane, never_sent};
use crate::trace;

/// Requests between the partitions and the connection.
const QUEUED_REQUESTS: usize = 32;
/// How long a broker may take to accept the stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

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
    broken: bool,
}

/// A produce stream.
#[derive(Debug)]
pub(super) struct Link {
    address: Address,
    requests: mpsc::Sender<v1::ProduceRequest>,
    pending: Arc<Mutex<Pending>>,
}

/// Room for one request in the stream.
pub(super) type Permit = mpsc::OwnedPermit<v1::ProduceRequest>;

impl Link {
    fn open(connections: Arc<Connections>, address: Address, stop: CancellationToken) -> Self {
        let (requests, outbound) = mpsc::channel(QUEUED_REQUESTS);
        let pending = Arc::new(Mutex::new(Pending::default()));
        let link = Self {
            address: Arc::clone(&address),
            requests,
            pending: Arc::clone(&pending),
        };
        tokio::spawn(async move {
            let running = async {
                #[cfg(feature = "bench-internals")]
                if *address == *crate::bench_internals::ADDRESS {
                    return acknowledge(outbound, &pending).await;
                }
                run(&connections, &address, outbound, &pending).await
            };
            let (unsent, cause) = match stop.run_until_cancelled(running).await {
                Some(ended) => ended,
                None => (false, "the producer was closed".to_owned()),
            };
            debug!(target: trace::PRODUCE, %address, cause, "produce stream ended");
            connections.discard(&address, Lane::Produce);
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
) -> (bool, String) {
    let mut client = match connections.log(address, Lane::Produce).await {
        Ok(client) => client,
        Err(error) => return (true, error.to_string()),
    };
    let opening = client.produce(ReceiverStream::new(outbound));
    let mut responses = match timeout(OPEN_TIMEOUT, opening).await {
        Ok(Ok(response)) => response.into_inner(),
        Ok(Err(status)) => return (never_sent(&status), crate::error::cause_of(&status)),
        Err(_) => {
            return (
                false,
                "the broker did not accept the stream in time".to_owned(),
            );
        }
    };
    loop {
        let response = match responses.message().await {
            Ok(Some(response)) => response,
            Ok(None) => return (false, "the broker ended the stream".to_owned()),
            Err(status) => return (false, crate::error::cause_of(&status)),
        };
        let waiting = pending.lock().waiting.remove(&response.correlation_id);
        let Some(Waiting { key, events }) = waiting else {
            debug!(target: trace::PRODUCE, %address, id = response.correlation_id, "answer to nothing asked");
            continue;
        };
        let event = match response.result {
            Some(ProduceResult::Ack(ack)) => Event::Acknowledged {
                key,
                base_offset: ack.base_offset,
                duplicate: ack.duplicate,
            },
            Some(ProduceResult::Error(error)) => Event::Refused { key, error },
            None => Event::Refused {
                key,
                error: v1::Error::default(),
            },
        };
        // The driver may be gone: then so are its tickets.
        let _ = events.send(event);
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
