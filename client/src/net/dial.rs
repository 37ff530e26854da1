//! Making one connection: the name is resolved anew, every address that it has is tried, and a
//! connection counts only once the broker has answered `Hello` over it.
//!
//! Why not tonic's own connector: it does try all addresses of a name, but takes one that merely
//! accepts TCP for a connection (HTTP/2 lets a client speak first, so its handshake never waits for
//! the peer), and reconnects by itself, unseen, to whatever listens there by then. Here
//!
//! - each address is raced through all of TCP, HTTP/2 and `Hello`, the next one as soon as one fails
//!   or is slow, all within the connect timeout: a black hole costs a bounded time;
//! - `Hello` says which cluster answers: another than the one expected is refused (S28), for every
//!   connection, since none is ever replaced unseen ([`Socket`] is handed over once);
//! - a connection knows when its socket is gone ([`Connection::is_closed`]).

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures::future::BoxFuture;
use hyper_util::rt::TokioIo;
use qute_proto::ids::ClusterId;
use qute_proto::v1;
use qute_proto::v1::cluster_client::ClusterClient;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};
use tonic::transport::{Channel, Endpoint, Uri};

use super::race::{STAGGER, race};
use super::{Address, Failure};
use crate::config::ClientConfig;
use crate::error::{EndpointFailure, Error, ErrorKind, Result, cause_of};

const MAX_FRAME_BYTES: u32 = 256 * 1024;
const STREAM_WINDOW_BYTES: u32 = 8 * 1024 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 16 * 1024 * 1024;

/// From a name and a port to addresses.
pub(crate) type Resolver =
    dyn Fn(Address) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> + Send + Sync;

/// The system's resolver, asked anew each time.
pub(crate) fn system_resolver(address: Address) -> BoxFuture<'static, io::Result<Vec<SocketAddr>>> {
    Box::pin(async move { Ok(tokio::net::lookup_host(&*address).await?.collect()) })
}

/// One connection over one socket; it is never replaced unseen.
#[derive(Clone)]
pub(crate) struct Connection {
    channel: Channel,
    /// Set when the socket is gone.
    closed: Arc<AtomicBool>,
    /// The cluster that the broker belongs to; `None`: it has not joined one yet.
    pub(super) cluster: Option<ClusterId>,
    pub(super) limits: Option<v1::Limits>,
}

impl Connection {
    /// Over it calls are made; cheap.
    pub(crate) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// The same connection, not only one to the same place.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.closed, &other.closed)
    }
}

/// A failed attempt.
#[derive(Debug, Clone)]
pub(super) struct DialError {
    pub(super) error: Error,
    /// What it means for the breaker; `None`: the broker is alive, but not ours.
    pub(super) failure: Option<Failure>,
}

/// Makes connections.
pub(super) struct Dialer {
    pub(super) config: Arc<ClientConfig>,
    pub(super) resolver: Arc<Resolver>,
}

impl Dialer {
    /// Connects to any of the addresses that the name has, within the connect timeout.
    pub(super) async fn dial(
        &self,
        address: &Address,
        expected: Option<ClusterId>,
    ) -> Result<Connection, DialError> {
        let began = Instant::now();
        let deadline = began + self.config.connect_timeout;
        let sockets = self.resolve(address, deadline).await?;
        let count = u32::try_from(sockets.len()).unwrap_or(u32::MAX).max(1);
        // However many there are, each gets its turn.
        let stagger = STAGGER.min(self.config.connect_timeout / count / 2);
        let targets = sockets
            .into_iter()
            .map(|socket| Target {
                address: Arc::clone(address),
                socket,
            })
            .collect();
        let silent = AtomicBool::new(false);
        let ask = |target: Target| {
            let silent = &silent;
            async move {
                let tried = timeout_at(deadline, self.dial_one(&target, expected)).await;
                tried.unwrap_or_else(|_| {
                    silent.store(true, Ordering::Relaxed);
                    Err(Error::new(
                        ErrorKind::Timeout,
                        format!(
                            "no connection and no Hello within {:?}",
                            self.config.connect_timeout
                        ),
                    ))
                })
            }
        };
        race(targets, stagger, deadline + GRACE, ask)
            .await
            .map_err(|error| DialError {
                failure: match error.kind() {
                    ErrorKind::WrongCluster => None,
                    _ if silent.load(Ordering::Relaxed) => Some(Failure::Silence),
                    _ => Some(Failure::Told),
                },
                error,
            })
    }

    async fn resolve(
        &self,
        address: &Address,
        deadline: Instant,
    ) -> Result<Vec<SocketAddr>, DialError> {
        if let Ok(literal) = address.parse::<SocketAddr>() {
            return Ok(vec![literal]);
        }
        let failed = |cause: String, failure: Failure| DialError {
            error: Error::new(ErrorKind::Unreachable, cause.clone()).with_endpoints(vec![
                EndpointFailure {
                    endpoint: address.to_string(),
                    cause,
                },
            ]),
            failure: Some(failure),
        };
        match timeout_at(deadline, (self.resolver)(Arc::clone(address))).await {
            Ok(Ok(sockets)) if sockets.is_empty() => {
                Err(failed("the name has no address".to_owned(), Failure::Told))
            }
            Ok(Ok(mut sockets)) => {
                let mut seen = std::collections::HashSet::new();
                sockets.retain(|socket| seen.insert(*socket));
                Ok(sockets)
            }
            Ok(Err(error)) => Err(failed(
                format!("the name can't be resolved: {error}"),
                Failure::Told,
            )),
            Err(_) => Err(failed(
                "the name was not resolved in time".to_owned(),
                Failure::Silence,
            )),
        }
    }

    async fn dial_one(&self, target: &Target, expected: Option<ClusterId>) -> Result<Connection> {
        let gone = |error: &dyn std::error::Error| {
            Error::new(ErrorKind::Unreachable, innermost(error)).with_cause(error)
        };
        let stream = TcpStream::connect(target.socket)
            .await
            .map_err(|error| gone(&error))?;
        stream.set_nodelay(true).map_err(|error| gone(&error))?;
        let closed = Arc::new(AtomicBool::new(false));
        let mut socket = Some(TokioIo::new(Socket {
            stream,
            closed: Arc::clone(&closed),
        }));
        let hand_over = tower::service_fn(move |_: Uri| {
            let socket = socket.take();
            async move {
                socket.ok_or_else(|| io::Error::new(io::ErrorKind::NotConnected, "connection lost"))
            }
        });
        let channel = self
            .endpoint(&target.address)?
            .connect_with_connector(hand_over)
            .await
            .map_err(|error| gone(&error))?;
        let hello = v1::HelloRequest {
            client: format!(
                "{} (qute-client {})",
                self.config.client_name,
                env!("CARGO_PKG_VERSION")
            ),
            cluster_id: expected.map(ClusterId::to_wire).unwrap_or_default(),
        };
        let answer = ClusterClient::new(channel.clone())
            .hello(hello)
            .await
            .map_err(|status| {
                Error::new(Error::status(&status).kind(), cause_of(&status)).with_cause(&status)
            })?
            .into_inner();
        let cluster = ClusterId::from_wire(&answer.cluster_id);
        check_cluster(expected, cluster)?;
        Ok(Connection {
            channel,
            closed,
            cluster,
            limits: answer.limits,
        })
    }

    fn endpoint(&self, address: &Address) -> Result<Endpoint> {
        let bad = |error: tonic::transport::Error| {
            Error::config(format!("{address} is not an address")).with_cause(&error)
        };
        Ok(Endpoint::from_shared(format!("http://{address}"))
            .map_err(bad)?
            .user_agent(self.config.client_name.clone())
            .map_err(bad)?
            .http2_keep_alive_interval(self.config.keep_alive_interval)
            .keep_alive_timeout(self.config.keep_alive_timeout)
            .keep_alive_while_idle(true)
            .http2_adaptive_window(false)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(MAX_FRAME_BYTES))
    }
}

/// Each attempt ends by the deadline itself; the race only must not end before.
const GRACE: Duration = Duration::from_millis(100);

/// S28: a broker of another cluster is not spoken to.
pub(super) fn check_cluster(expected: Option<ClusterId>, told: Option<ClusterId>) -> Result<()> {
    match (expected, told) {
        (Some(expected), Some(told)) if expected != told => Err(Error::new(
            ErrorKind::WrongCluster,
            format!("the broker belongs to cluster {told}, not {expected}"),
        )),
        _ => Ok(()),
    }
}

fn innermost(error: &dyn std::error::Error) -> String {
    let mut innermost = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        innermost = error.to_string();
        next = error.source();
    }
    innermost
}

/// One address of a name.
#[derive(Debug, Clone)]
struct Target {
    address: Address,
    socket: SocketAddr,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.address)?;
        if self.address.parse() != Ok(self.socket) {
            write!(f, " ({})", self.socket)?;
        }
        Ok(())
    }
}

/// A TCP stream that tells when it is dropped: hyper drops it when the connection ends, by keep-alive
/// too.
struct Socket {
    stream: TcpStream,
    closed: Arc<AtomicBool>,
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.closed.store(true, Ordering::Release);
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }
}
