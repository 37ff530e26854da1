//! [`Client`]: the connected handle that everything starts from.

use std::fmt;
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::config::ClientConfig;
use crate::consumer::ConsumerBuilder;
use crate::error::{Error, Result};
use crate::metadata::MetadataCache;
use crate::net::{Connections, Resolver, system_resolver};
use crate::producer::{Producer, ProducerConfig};
use crate::stats::{ClientStats, Stats};

/// A client of one cluster. Cheap to clone; producers and consumers made from it keep it alive.
///
/// A client belongs to the tokio runtime that it was made in: the tasks that follow the cluster, and
/// those of its producers and consumers, end with the runtime that they were begun in. From then on the
/// client learns of new leaders and partitions only when a call of its own fails or asks, a producer or a
/// consumer whose task is gone says [`crate::ErrorKind::Closed`]; make a new client. [`Client::connect`],
/// [`Client::lazy`], [`ConsumerBuilder::open`] and the first record for a partition ([`Producer::send`]
/// and the like) begin tasks: they must be called, and polled, inside a tokio runtime with its I/O and time
/// drivers enabled.
#[derive(Clone)]
pub struct Client {
    pub(crate) shared: Arc<Shared>,
}

/// What the parts of a client share.
pub(crate) struct Shared {
    pub(crate) config: Arc<ClientConfig>,
    pub(crate) connections: Arc<Connections>,
    pub(crate) metadata: Arc<MetadataCache>,
    pub(crate) stats: Arc<Stats>,
    /// Stops the metadata watch when the last handle goes.
    _stop: DropGuard,
}

impl Client {
    /// Connects to the cluster that `bootstrap` (`host:port,host:port` or `qute://host,host`)
    /// leads to, with default settings.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Config`], [`crate::ErrorKind::Unreachable`] (with the cause for each
    /// address), [`crate::ErrorKind::NotReady`] if the cluster did not form within the call timeout.
    ///
    /// # Cancel safety
    /// Nothing is left behind.
    pub async fn connect(bootstrap: &str) -> Result<Self> {
        Self::connect_with(ClientConfig::new(bootstrap)?).await
    }

    /// Connects with the settings that the environment gives: see [`ClientConfig::from_env`].
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub async fn from_env() -> Result<Self> {
        Self::connect_with(ClientConfig::from_env()?).await
    }

    /// Connects with the given settings: tries all addresses and returns once one of them has
    /// given its view of the cluster. A cluster that is forming is waited for until the call timeout;
    /// nobody listening at any address is told at once: use [`Client::lazy`] or a loop to wait for a
    /// cluster.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub async fn connect_with(config: ClientConfig) -> Result<Self> {
        let client = Self::lazy(config)?;
        let deadline = Instant::now() + client.config().call_timeout;
        client.shared.metadata.first_view(deadline).await?;
        Ok(client)
    }

    /// A client that has not connected yet. Its producers and consumers wait for the cluster until
    /// their own deadlines; its other calls connect first, as [`Client::connect_with`] does. Must be
    /// called inside a tokio runtime, the one that the client's tasks run in from then on.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Config`], also outside of a runtime.
    pub fn lazy(config: ClientConfig) -> Result<Self> {
        Self::resolving(config, Arc::new(system_resolver))
    }

    /// The same with a resolver of names.
    pub(crate) fn resolving(config: ClientConfig, resolver: Arc<Resolver>) -> Result<Self> {
        let config = Arc::new(config.checked()?);
        if Handle::try_current().is_err() {
            return Err(Error::config(
                "a client is made inside a tokio runtime, which its tasks run in",
            ));
        }
        let stats = Arc::new(Stats::default());
        let connections = Arc::new(Connections::with_resolver(
            Arc::clone(&config),
            Arc::clone(&stats),
            resolver,
        ));
        let metadata = Arc::new(MetadataCache::new(
            Arc::clone(&config),
            Arc::clone(&connections),
        ));
        let stop = CancellationToken::new();
        crate::metadata::spawn_upkeep(Arc::clone(&metadata), stop.clone());
        Ok(Self {
            shared: Arc::new(Shared {
                config,
                connections,
                metadata,
                stats,
                _stop: stop.drop_guard(),
            }),
        })
    }

    /// The settings.
    #[must_use]
    pub fn config(&self) -> &ClientConfig {
        &self.shared.config
    }

    /// What the client has done so far: its producers, consumers, view and connections together.
    #[must_use]
    pub fn stats(&self) -> ClientStats {
        self.shared.stats.snapshot()
    }

    /// The `__cluster` index of the client's present view; 0 before it has one. Whatever this client
    /// has created or deleted lies at or below it.
    #[must_use]
    pub fn cluster_index(&self) -> u64 {
        self.shared.metadata.load().cluster_index
    }

    /// Waits until this client's view is at `index` or beyond, so that it knows what another client
    /// has done: create a topic through one, give its [`Client::cluster_index`] to another, and the
    /// other can write to it (S28).
    ///
    /// # Errors
    /// [`crate::ErrorKind::Timeout`] once the client's call timeout has passed and no broker is that
    /// far; [`crate::ErrorKind::Unreachable`] at once, if the client has never reached its cluster.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn wait_for_index(&self, index: u64) -> Result<()> {
        let deadline = Instant::now() + self.config().call_timeout;
        self.shared.metadata.refresh_to(index, deadline).await
    }

    /// A producer with settings and an identity of its own.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Config`].
    pub fn producer(&self, config: ProducerConfig) -> Result<Producer> {
        Producer::new(Arc::clone(&self.shared), config)
    }

    /// Prepares a consumer of `topic`; see [`ConsumerBuilder`].
    pub fn consumer(&self, topic: impl Into<Arc<str>>) -> ConsumerBuilder {
        ConsumerBuilder::new(Arc::clone(&self.shared), topic.into())
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("bootstrap", &self.shared.config.bootstrap)
            .finish_non_exhaustive()
    }
}
