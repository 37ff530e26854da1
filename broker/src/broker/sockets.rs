//! The sockets of a broker, bound before anything else happens: a port in use is said before the data
//! directory is touched.

use std::net::SocketAddr;

use tokio::net::{TcpListener, UdpSocket};

use super::StartError;
use crate::config::{self, Config};

/// The sockets of a broker, bound before anything else happens.
pub(crate) struct Sockets {
    pub(crate) grpc: TcpListener,
    pub(crate) gossip: UdpSocket,
    pub(crate) http: Option<TcpListener>,
    /// What clients are told.
    pub(crate) advertise: String,
    /// What other brokers are told.
    pub(crate) advertise_peers: String,
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
        let advertise_peers = if config.advertise_peers.is_empty() {
            advertise.clone()
        } else {
            config.advertise_peers.clone()
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
            format!("{}:{gossip_port}", host_of(&advertise_peers))
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
            advertise_peers,
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
