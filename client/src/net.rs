//! Connections: one per broker address and lane, made when first used and remade when broken.
//!
//! Owns the HTTP/2 tuning (measured: frame size is the lever) and the
//! limits that keep a silent peer from holding a caller. Does not know what travels.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use parking_lot::Mutex;
use qute_proto::v1::cluster_client::ClusterClient;
use qute_proto::v1::log_client::LogClient;
use rand::RngExt;
use tokio::time::Instant;
use tonic::transport::{Channel, Endpoint};

use crate::config::ClientConfig;
use crate::error::{EndpointFailure, Error, ErrorKind, Result, cause_of};
use crate::stats::Stats;

const MAX_FRAME_BYTES: u32 = 256 * 1024;
const STREAM_WINDOW_BYTES: u32 = 8 * 1024 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 16 * 1024 * 1024;
/// The largest message taken from a broker.
const MESSAGE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// How long an endpoint may keep a race waiting before the next one is asked too.
const STAGGER: Duration = Duration::from_millis(300);

/// `host:port`.
pub(crate) type Address = Arc<str>;

/// What a connection is for: bulk traffic of one kind never queues behind that of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Lane {
    Control,
    Produce,
    Fetch,
}

/// All connections of a client.
pub(crate) struct Connections {
    config: Arc<ClientConfig>,
    pub(crate) stats: Arc<Stats>,
    /// Channels are cheap handles that reconnect by themselves; the lock is never held across
    /// an await.
    channels: Mutex<HashMap<(Address, Lane), Channel>>,
}

impl Connections {
    pub(crate) fn new(config: Arc<ClientConfig>, stats: Arc<Stats>) -> Self {
        Self {
            config,
            stats,
            channels: Mutex::default(),
        }
    }

    pub(crate) fn cluster(&self, address: &Address) -> Result<ClusterClient<Channel>> {
        let channel = self.channel(address, Lane::Control)?;
        Ok(ClusterClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX))
    }

    pub(crate) fn log(&self, address: &Address, lane: Lane) -> Result<LogClient<Channel>> {
        let channel = self.channel(address, lane)?;
        Ok(LogClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX))
    }

    /// Forgets a connection that may be half dead, so that the next use dials anew.
    pub(crate) fn discard(&self, address: &Address, lane: Lane) {
        let held = self.channels.lock().remove(&(Arc::clone(address), lane));
        if held.is_some() {
            self.stats.connections_discarded.increment();
        }
    }

    fn channel(&self, address: &Address, lane: Lane) -> Result<Channel> {
        let mut channels = self.channels.lock();
        let key = (Arc::clone(address), lane);
        if let Some(channel) = channels.get(&key) {
            return Ok(channel.clone());
        }
        let channel = self.endpoint(address)?.connect_lazy();
        channels.insert(key, channel.clone());
        Ok(channel)
    }

    fn endpoint(&self, address: &Address) -> Result<Endpoint> {
        let bad = |error: tonic::transport::Error| {
            Error::config(format!("{address} is not an address")).with_source(error)
        };
        Ok(Endpoint::from_shared(format!("http://{address}"))
            .map_err(bad)?
            .user_agent(self.config.client_name.clone())
            .map_err(bad)?
            .connect_timeout(self.config.connect_timeout)
            .tcp_nodelay(true)
            .tcp_keepalive(Some(Duration::from_secs(30)))
            .http2_keep_alive_interval(self.config.keep_alive_interval)
            .keep_alive_timeout(self.config.keep_alive_timeout)
            .keep_alive_while_idle(true)
            .http2_adaptive_window(false)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(MAX_FRAME_BYTES))
    }
}

impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connections").finish_non_exhaustive()
    }
}

/// The connection was never made, so the request can't have reached the broker.
pub(crate) fn never_sent(status: &tonic::Status) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = std::error::Error::source(status);
    while let Some(error) = cause {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Asks the endpoints one after another, the next one as soon as one fails or keeps us waiting,
/// and gives the first answer. All of them failing gives one error that names each cause.
pub(crate) async fn first_answer<T, F>(
    addresses: Vec<Address>,
    deadline: Instant,
    ask: impl Fn(Address) -> F,
) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let mut failures = Vec::new();
    let mut kind = ErrorKind::Unreachable;
    let mut waiting = addresses.into_iter();
    let mut asked = FuturesUnordered::new();
    loop {
        let next = waiting.next();
        let more = waiting.len() > 0;
        if let Some(address) = next {
            let answer = ask(Arc::clone(&address));
            asked.push(async move { (address, answer.await) });
        }
        if asked.is_empty() {
            return Err(unreachable(kind, failures));
        }
        let patience = if more {
            (Instant::now() + STAGGER).min(deadline)
        } else {
            deadline
        };
        match tokio::time::timeout_at(patience, asked.next()).await {
            Ok(Some((_, Ok(answer)))) => return Ok(answer),
            Ok(Some((address, Err(error)))) => {
                // A broker that is there but not ready says more than one that is not there.
                if kind == ErrorKind::Unreachable || error.kind() == ErrorKind::NotReady {
                    kind = error.kind();
                }
                failures.push(EndpointFailure {
                    endpoint: address.to_string(),
                    cause: error.message().to_owned(),
                });
            }
            Ok(None) => return Err(unreachable(kind, failures)),
            Err(_) if patience >= deadline => {
                failures.push(EndpointFailure {
                    endpoint: "others".to_owned(),
                    cause: "no answer in time".to_owned(),
                });
                return Err(unreachable(kind, failures));
            }
            Err(_) => {}
        }
    }
}

fn unreachable(kind: ErrorKind, failures: Vec<EndpointFailure>) -> Error {
    let message = match kind {
        ErrorKind::NotReady => "no broker is ready",
        ErrorKind::WrongCluster => "the brokers belong to another cluster",
        _ => "no broker could be reached",
    };
    Error::new(kind, message).with_endpoints(failures)
}

/// An error of a call to `address`.
pub(crate) fn call_error(address: &Address, status: &tonic::Status) -> Error {
    let cause = cause_of(status);
    Error::from(status.clone()).with_endpoints(vec![EndpointFailure {
        endpoint: address.to_string(),
        cause,
    }])
}

/// Exponential back-off with full jitter over its upper half.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    min: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    pub(crate) fn new(config: &ClientConfig) -> Self {
        Self {
            min: config.backoff_min,
            max: config.backoff_max,
            next: config.backoff_min,
        }
    }

    /// The next delay.
    pub(crate) fn step(&mut self) -> Duration {
        let base = self.next;
        self.next = (base * 2).min(self.max);
        base.mul_f64(rand::rng().random_range(0.5..1.0))
    }

    pub(crate) fn reset(&mut self) {
        self.next = self.min;
    }
}

/// Waits for a moment, if there is one.
pub(crate) async fn until(timer: Option<Instant>) {
    if let Some(timer) = timer {
        tokio::time::sleep_until(timer).await;
    }
}
