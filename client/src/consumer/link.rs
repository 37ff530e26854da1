//! One fetch stream to one broker: subscriptions and byte credit one way, batches the other.
//!
//! The broker sends as many bytes as it has credit (`credit.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use qute_proto::batch::{BatchError, BatchView, HEADER_BYTES};
use qute_proto::v1::{self, fetch_request::Request, fetch_response::Response};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::credit::{Credit, Pool};
use crate::net::{Address, Connections, Lane, log_client};
use crate::stats::Stats;
use crate::trace;

/// How long a broker may take to accept the stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(5);

/// What the reader hears from a link.
pub(super) enum Event {
    Subscribed {
        subscription: u64,
        log_start_offset: u64,
        high_watermark: u64,
    },
    Batches {
        subscription: u64,
        high_watermark: u64,
        batches: Vec<Arrived>,
    },
    Ended {
        subscription: u64,
        error: v1::Error,
    },
    Broken {
        link: u64,
        cause: String,
    },
}

/// A batch as it came in; the checksum has been verified.
pub(super) struct Arrived {
    pub(super) base_offset: u64,
    pub(super) broker_time_ms: u64,
    pub(super) batch: Result<BatchView, BatchError>,
    /// One for the whole message.
    pub(super) credit: Arc<Credit>,
}

/// What the stream's task shares with its owner.
struct Shared {
    id: u64,
    pool: Arc<Pool>,
    requests: mpsc::UnboundedSender<v1::FetchRequest>,
    broken: AtomicBool,
}

impl Shared {
    fn request(&self, request: Request) {
        // A broken link takes nothing; its subscriptions are told by its `Broken` event.
        let _ = self.requests.send(v1::FetchRequest {
            request: Some(request),
        });
    }
}

/// A fetch stream.
pub(super) struct Link {
    pub(super) id: u64,
    address: Address,
    shared: Arc<Shared>,
    _stop: tokio_util::sync::DropGuard,
}

impl Link {
    /// Opens a stream; what comes of it arrives as events. It ends when the link is dropped.
    pub(super) fn open(
        id: u64,
        connections: Arc<Connections>,
        address: Address,
        pool: &Arc<Pool>,
        share: u64,
        events: mpsc::UnboundedSender<Event>,
    ) -> Self {
        // Requests are small, and bounded by subscriptions and by credit in steps.
        let (requests, outbound) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            id,
            pool: Arc::clone(pool),
            requests: requests.clone(),
            broken: AtomicBool::new(false),
        });
        pool.open(id, share, requests);
        let stop = CancellationToken::new();
        let (task_stop, task_shared, task_address) =
            (stop.clone(), Arc::downgrade(&shared), Arc::clone(&address));
        tokio::spawn(async move {
            let running = run(&connections, &task_address, outbound, &task_shared, &events);
            let cause = task_stop.run_until_cancelled(running).await;
            if let Some(shared) = task_shared.upgrade() {
                shared.broken.store(true, Ordering::Release);
                shared.pool.close(id);
            }
            if let Some(cause) = cause {
                debug!(target: trace::FETCH, address = %task_address, cause, "fetch stream ended");
                // The reader may be gone.
                let _ = events.send(Event::Broken { link: id, cause });
            }
        });
        Self {
            id,
            address,
            shared,
            _stop: stop.drop_guard(),
        }
    }

    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    pub(super) fn is_broken(&self) -> bool {
        self.shared.broken.load(Ordering::Acquire)
    }

    pub(super) fn subscribe(&self, subscribe: v1::Subscribe) {
        self.shared.request(Request::Subscribe(subscribe));
    }

    pub(super) fn unsubscribe(&self, subscription_id: u64) {
        let unsubscribe = v1::Unsubscribe { subscription_id };
        self.shared.request(Request::Unsubscribe(unsubscribe));
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shared.pool.close(self.id);
    }
}

/// Runs the stream until it ends; gives why.
async fn run(
    connections: &Connections,
    address: &Address,
    outbound: mpsc::UnboundedReceiver<v1::FetchRequest>,
    shared: &std::sync::Weak<Shared>,
    events: &mpsc::UnboundedSender<Event>,
) -> String {
    let connection = match connections.ready(address, Lane::Fetch).await {
        Ok(connection) => connection,
        Err(error) => return error.to_string(),
    };
    let mut client = log_client(connection.channel());
    let opening = client.fetch(UnboundedReceiverStream::new(outbound));
    let mut responses = match timeout(OPEN_TIMEOUT, opening).await {
        Ok(Ok(response)) => response.into_inner(),
        Ok(Err(status)) => {
            connections.broken(&connection, &status);
            return crate::error::cause_of(&status);
        }
        Err(_) => {
            connections.discard(&connection);
            return "the broker did not accept the stream in time".to_owned();
        }
    };
    connections.answered(address);
    loop {
        let response = match responses.message().await {
            Ok(Some(response)) => response,
            Ok(None) => return "the broker ended the stream".to_owned(),
            Err(status) => {
                connections.broken(&connection, &status);
                return crate::error::cause_of(&status);
            }
        };
        connections.answered(address);
        let Some(shared) = shared.upgrade() else {
            return "nobody listens any more".to_owned();
        };
        let subscription = response.subscription_id;
        let event = match response.response {
            Some(Response::Subscribed(subscribed)) => Event::Subscribed {
                subscription,
                log_start_offset: subscribed.log_start_offset,
                high_watermark: subscribed.high_watermark,
            },
            Some(Response::Batches(batches)) => Event::Batches {
                subscription,
                high_watermark: batches.high_watermark,
                batches: arrived(&shared, &connections.stats, batches.batches),
            },
            Some(Response::Error(error)) => Event::Ended {
                subscription,
                error,
            },
            None => Event::Ended {
                subscription,
                error: v1::Error::default(),
            },
        };
        if events.send(event).is_err() {
            return "nobody listens any more".to_owned();
        }
    }
}

/// Checks the batches of a message, and takes what they will hold out of the credit: as long as one
/// of them is held, so is the memory of all. Those without credit are told of the high watermark in
/// messages that have none.
fn arrived(link: &Shared, stats: &Stats, fetched: Vec<v1::FetchedBatch>) -> Vec<Arrived> {
    if fetched.is_empty() {
        return Vec::new();
    }
    let (mut wire, mut charge) = (0, 0);
    let mut parsed = Vec::with_capacity(fetched.len());
    for one in fetched {
        let bytes = one.batch.len();
        let batch = BatchView::parse(one.batch);
        wire += bytes;
        charge += bytes;
        if let Ok(batch) = &batch {
            let header = batch.header();
            stats.fetched(header.record_count, bytes);
            let body = usize::try_from(header.uncompressed_bytes).unwrap_or(usize::MAX);
            charge += HEADER_BYTES.saturating_add(body).saturating_sub(bytes);
        }
        parsed.push((one.base_offset, one.broker_time_ms, batch));
    }
    let credit = Arc::new(link.pool.hold(link.id, wire, charge));
    let arrived = |(base_offset, broker_time_ms, batch)| Arrived {
        base_offset,
        broker_time_ms,
        batch,
        credit: Arc::clone(&credit),
    };
    parsed.into_iter().map(arrived).collect()
}
