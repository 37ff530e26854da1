//! [`Proxy`]: a broker's address for clients, with faults.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::call::Call;
use crate::fault::{Fault, Injected, Script};
use crate::forward::{Body, forward};
use crate::gate::{Flow, Gate, Gated};
use crate::meter::Meters;
use crate::ports::Port;

/// Largest HTTP/2 frame, as brokers and clients have it.
const FRAME_BYTES_MAX: u32 = 256 * 1024;
/// What may wait inside the proxy per stream and per connection, each way.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 2 << 20;
/// Calls and streams at once on one connection of a client.
const STREAMS_MAX: u32 = 10_000;
/// A connection whose broker has gone has this long to pass on the broker's last words.
const LAST_WORDS: Duration = Duration::from_millis(200);
/// Between attempts to listen again on an address that others have for a moment.
const LISTEN_AGAIN: Duration = Duration::from_millis(20);

/// Stands between clients and one broker, and does what a test says.
///
/// Clients reach the broker through it if the broker advertises the proxy's address
/// (`--advertise`) and its own to the other brokers (`--advertise-peers`);
/// [`Cluster`](crate::Cluster) sets brokers up like that. Each connection of a client has one of its
/// own to the broker: when that breaks, so does this one.
///
/// Faults come on two levels:
///
/// * messages: [`Proxy::inject`] a [`Fault`], [`Proxy::cut_streams`];
/// * connections: [`Proxy::black_hole`], [`Proxy::pause`], [`Proxy::refuse_connections`],
///   [`Proxy::reset_connections`].
///
/// [`Proxy::count`] and [`Proxy::in_flight_max`] say what has passed. The proxy answers HTTP/2
/// keep-alive itself (while bytes flow), whatever its broker does. It ends when it is dropped.
#[derive(Debug)]
pub struct Proxy {
    port: Port,
    core: Arc<Core>,
    /// Whether to listen, and whom to tell once that is so.
    listen: mpsc::UnboundedSender<(bool, oneshot::Sender<()>)>,
    _stop: DropGuard,
}

/// What the tasks of a proxy share.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) script: Script,
    pub(crate) cuts: Cuts,
    meters: Meters,
    gate: Gate,
    upstream: Mutex<String>,
    accepted: AtomicU64,
}

impl Core {
    pub(crate) fn meters(&self) -> &Meters {
        &self.meters
    }
}

/// Cuts streams by call.
#[derive(Debug, Default)]
pub(crate) struct Cuts {
    tokens: Mutex<HashMap<Call, CancellationToken>>,
}

impl Cuts {
    /// A token of one stream, cancelled with all others of the call.
    pub(crate) fn token(&self, call: Call) -> CancellationToken {
        self.tokens.lock().entry(call).or_default().child_token()
    }

    fn cut(&self, call: Call) {
        if let Some(token) = self.tokens.lock().remove(&call) {
            token.cancel();
        }
    }
}

impl Proxy {
    /// A proxy on a port of its own for the broker that listens on `upstream` (`HOST:PORT`), now
    /// or later.
    ///
    /// # Errors
    /// No port is free.
    pub async fn start(upstream: impl Into<String>) -> io::Result<Self> {
        let port = Port::take()?;
        let listener = TcpListener::bind(port.address()).await?;
        let core = Arc::new(Core {
            script: Script::default(),
            cuts: Cuts::default(),
            meters: Meters::default(),
            gate: Gate::default(),
            upstream: Mutex::new(upstream.into()),
            accepted: AtomicU64::new(0),
        });
        let (listen, orders) = mpsc::unbounded_channel();
        let stop = CancellationToken::new();
        let task = Listening {
            address: port.address(),
            core: Arc::clone(&core),
            stop: stop.clone(),
        };
        tokio::spawn(task.run(listener, orders));
        Ok(Self {
            port,
            core,
            listen,
            _stop: stop.drop_guard(),
        })
    }

    /// The address for clients, `HOST:PORT`.
    #[must_use]
    pub fn address(&self) -> String {
        self.port.address()
    }

    /// Hands new connections on to another address: the broker has moved.
    pub fn set_upstream(&self, upstream: impl Into<String>) {
        *self.core.upstream.lock() = upstream.into();
    }

    /// Adds a fault to those that are there; it counts from the next message on.
    pub fn inject(&self, fault: Fault) -> Injected {
        self.core.script.add(fault)
    }

    /// Ends all faults that were injected.
    pub fn clear(&self) {
        self.core.script.clear();
    }

    /// Cuts the streams (or calls) of this kind that are under way. Their connections stay.
    pub fn cut_streams(&self, call: Call) {
        self.core.cuts.cut(call);
    }

    /// From now on nothing passes, in no direction, and nothing is said about it: connections are
    /// accepted, no byte is answered, none is reset. When it is over, new connections work; those
    /// that were caught stay silent for ever, as their bytes are lost.
    pub fn black_hole(&self, on: bool) {
        self.core
            .gate
            .set(if on { Flow::Lost } else { Flow::Flowing });
    }

    /// Stops and resumes the flow of bytes: nothing is lost, it only waits.
    pub fn pause(&self, on: bool) {
        self.core
            .gate
            .set(if on { Flow::Paused } else { Flow::Flowing });
    }

    /// Closes the port, so that new connections are refused, or opens it again. Connections that
    /// are open stay. Returns once it is so.
    pub async fn refuse_connections(&self, on: bool) {
        let (done, is_so) = oneshot::channel();
        if self.listen.send((!on, done)).is_ok() {
            // A task that has gone with its runtime listens no more.
            let _ = is_so.await;
        }
    }

    /// Resets (RST) the connections that are open.
    pub fn reset_connections(&self) {
        self.core.gate.reset();
    }

    /// How many requests of this kind have come in: calls; of [`Call::Produce`] batches, of
    /// [`Call::Fetch`] subscriptions. Those that a fault refuses or drops count, too.
    #[must_use]
    pub fn count(&self, call: Call) -> u64 {
        self.core.meters.count(call)
    }

    /// How many of them are unanswered now: calls and streams not ended, batches without a reply,
    /// open subscriptions.
    #[must_use]
    pub fn in_flight(&self, call: Call) -> u64 {
        self.core.meters.in_flight(call)
    }

    /// How many of them were unanswered at one time, at most.
    #[must_use]
    pub fn in_flight_max(&self, call: Call) -> u64 {
        self.core.meters.in_flight_max(call)
    }

    /// Begins to count anew.
    pub fn restart_counts(&self) {
        self.core.meters.restart();
        self.core.accepted.store(0, Ordering::Release);
    }

    /// How many connections have been accepted.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.core.accepted.load(Ordering::Acquire)
    }

    /// How many connections are open.
    #[must_use]
    pub fn open_connections(&self) -> usize {
        self.core.gate.open()
    }
}

/// The task that accepts connections.
struct Listening {
    address: String,
    core: Arc<Core>,
    stop: CancellationToken,
}

impl Listening {
    async fn run(
        self,
        listener: TcpListener,
        mut orders: mpsc::UnboundedReceiver<(bool, oneshot::Sender<()>)>,
    ) {
        let mut listener = Some(listener);
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return,
                order = orders.recv() => {
                    let Some((open, done)) = order else { return };
                    listener = match (open, listener) {
                        (false, _) => None,
                        (true, Some(listener)) => Some(listener),
                        (true, None) => Some(self.bind().await),
                    };
                    // Whoever gave the order may not wait for it.
                    let _ = done.send(());
                }
                accepted = accept(listener.as_ref()) => match accepted {
                    Ok(stream) => self.spawn(stream),
                    // The client has gone already, or files are short for a moment.
                    Err(error) => tracing::debug!(%error, "not accepted"),
                },
            }
        }
    }

    async fn bind(&self) -> TcpListener {
        loop {
            match TcpListener::bind(&self.address).await {
                Ok(listener) => return listener,
                Err(error) => tracing::debug!(%error, address = self.address, "not listening yet"),
            }
            tokio::time::sleep(LISTEN_AGAIN).await;
        }
    }

    fn spawn(&self, stream: TcpStream) {
        // A latency of the proxy's own would only blur the figures.
        let _ = stream.set_nodelay(true);
        let gated = self.core.gate.admit(stream);
        self.core.accepted.fetch_add(1, Ordering::AcqRel);
        let core = Arc::clone(&self.core);
        let stop = self.stop.clone();
        tokio::spawn(async move { stop.run_until_cancelled(serve(gated, core)).await });
    }
}

async fn accept(listener: Option<&TcpListener>) -> io::Result<TcpStream> {
    match listener {
        Some(listener) => listener.accept().await.map(|(stream, _)| stream),
        None => std::future::pending().await,
    }
}

/// One connection, from its start to its end.
async fn serve(client: Gated, core: Arc<Core>) {
    let switch = client.switch();
    let address = core.upstream.lock().clone();
    let upstream = tokio::select! {
        () = switch.is_reset() => return client.end_by_reset(),
        upstream = TcpStream::connect(&address) => upstream,
    };
    let Ok(upstream) = upstream else {
        return client.end_by_reset();
    };
    let _ = upstream.set_nodelay(true);
    let handshake = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .max_frame_size(FRAME_BYTES_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .handshake::<_, Body>(TokioIo::new(upstream))
        .await;
    let Ok((requests, broker)) = handshake else {
        return client.end_by_reset();
    };
    let service = service_fn(move |request| forward(Arc::clone(&core), requests.clone(), request));
    let served = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .max_concurrent_streams(STREAMS_MAX)
        .max_frame_size(FRAME_BYTES_MAX)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .serve_connection(TokioIo::new(client), service);
    let mut served = std::pin::pin!(served);
    tokio::select! {
        // Either way the connection is over; what it ended with is the client's business.
        _ = &mut served => {}
        () = switch.is_reset() => {
            // The next look at the connection finds the reset, and ends it so.
            let _ = tokio::time::timeout(LAST_WORDS, served).await;
        }
        _ = broker => {
            served.as_mut().graceful_shutdown();
            let _ = tokio::time::timeout(LAST_WORDS, served).await;
        }
    }
}
