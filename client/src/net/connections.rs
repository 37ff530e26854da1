//! All connections of a client: one per broker address and lane, dialled when first used (by one
//! caller for all that wait), dialled anew once its socket is gone.
//!
//! Also what goes with an address: its breaker, its load, its limits. Does not know what travels.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use parking_lot::Mutex;
use qute_proto::ids::ClusterId;
use tokio::time::{Instant, timeout_at};
use tonic::transport::Channel;
use tonic::{Code, Response, Status};
use tracing::{Instrument, debug, debug_span, field};

use super::breaker::{Admission, Breaker, Failure};
use super::budget::Budget;
use super::dial::{Connection, DialError, Dialer, Resolver, check_cluster};
use super::limits::{BrokerLimits, KnownLimits};
use super::load::Load;
use super::{Address, Lane, call_error, never_sent};
use crate::config::ClientConfig;
use crate::error::{EndpointFailure, Error, ErrorKind, Result};
use crate::stats::Stats;
use crate::trace;

/// The connections. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Connections {
    pub(crate) stats: Arc<Stats>,
    inner: Arc<Inner>,
}

struct Inner {
    stats: Arc<Stats>,
    dialer: Dialer,
    /// The lock is never held across an await.
    slots: Mutex<HashMap<(Address, Lane), Slot>>,
    /// Held for a look-up.
    brokers: Mutex<HashMap<Address, Broker>>,
    /// S28: the cluster of the first view; every connection is checked against it.
    cluster: OnceLock<ClusterId>,
    limits: KnownLimits,
    budget: Budget,
}

type Dialling = Shared<BoxFuture<'static, Result<Connection>>>;

enum Slot {
    /// Under way, in a task of its own: who waits may be cancelled. Bounded by the connect timeout.
    Dialling(Dialling),
    Open(Connection),
}

/// What is known of an address besides its connections.
#[derive(Default)]
struct Broker {
    breaker: Breaker,
    load: Load,
    last_failure: Option<Arc<str>>,
}

/// A call that failed.
#[derive(Debug, Clone)]
pub(crate) struct CallError {
    pub(crate) error: Error,
    /// The request can't have reached the broker.
    pub(crate) unsent: bool,
}

impl From<CallError> for Error {
    fn from(failed: CallError) -> Self {
        failed.error
    }
}

impl Connections {
    #[cfg(test)]
    pub(crate) fn new(config: Arc<ClientConfig>, stats: Arc<Stats>) -> Self {
        Self::with_resolver(config, stats, Arc::new(super::system_resolver))
    }

    pub(crate) fn with_resolver(
        config: Arc<ClientConfig>,
        stats: Arc<Stats>,
        resolver: Arc<Resolver>,
    ) -> Self {
        Self {
            stats: Arc::clone(&stats),
            inner: Arc::new(Inner {
                stats,
                dialer: Dialer { config, resolver },
                slots: Mutex::default(),
                brokers: Mutex::default(),
                cluster: OnceLock::new(),
                limits: KnownLimits::default(),
                budget: Budget::new(Instant::now()),
            }),
        }
    }

    /// The open connection to `address`, made if need be, for calls that outlive this one (streams).
    ///
    /// # Errors
    /// No connection could be made within the connect timeout, or the breaker refuses: nothing was
    /// sent. [`ErrorKind::WrongCluster`] (S28).
    pub(crate) async fn ready(&self, address: &Address, lane: Lane) -> Result<Connection> {
        let found = self.find(address, lane)?;
        match found {
            Found::Open(connection) => Ok(connection),
            Found::Dialling(dialling) => dialling.await,
        }
    }

    /// Makes one call and reports what became of it to the breaker and to the load of the address.
    ///
    /// An answer that does not come in time is no failure for the breaker as long as the socket lives:
    /// the broker may wait for others, and a connection that is dead is found out by its keep-alive.
    /// The load hears of it, also if the call is dropped before.
    ///
    /// # Cancel safety
    /// Cancelled, the call may have been carried out.
    pub(crate) async fn call<R>(
        &self,
        address: &Address,
        lane: Lane,
        deadline: Instant,
        ask: impl AsyncFnOnce(Channel) -> Result<Response<R>, Status>,
    ) -> Result<R, CallError> {
        let silent = |unsent| CallError {
            error: Error::new(ErrorKind::Timeout, "no answer in time").with_endpoints(vec![
                EndpointFailure {
                    endpoint: address.to_string(),
                    cause: "no answer in time".to_owned(),
                },
            ]),
            unsent,
        };
        let unsent = |error| CallError {
            error,
            unsent: true,
        };
        let mut busy = Busy::begin(self, address);
        let connection = match timeout_at(deadline, self.ready(address, lane)).await {
            Ok(connection) => connection.map_err(|error| {
                busy.answered = true;
                unsent(error)
            })?,
            Err(_) => return Err(silent(true)),
        };
        let began = Instant::now();
        let asked = timeout_at(deadline, ask(connection.channel())).await;
        busy.answered = asked.is_ok();
        match asked {
            Ok(Ok(response)) => {
                self.inner.succeeded(address, Some(began));
                self.inner.budget.deposit();
                Ok(response.into_inner())
            }
            Ok(Err(status)) => {
                if is_of_the_connection(&status) {
                    self.discard(&connection);
                    let cause = crate::error::cause_of(&status);
                    self.inner.failed(address, Failure::Told, &cause);
                } else {
                    self.inner.succeeded(address, None);
                }
                Err(CallError {
                    unsent: never_sent(&status),
                    error: call_error(address, &status),
                })
            }
            Err(_) => {
                if connection.is_closed() {
                    self.inner
                        .failed(address, Failure::Told, "the connection was lost");
                }
                Err(silent(false))
            }
        }
    }

    /// A stream brought an answer from there: the broker lives.
    pub(crate) fn answered(&self, address: &Address) {
        self.inner.succeeded(address, None);
    }

    /// Forgets this very connection, which may be half dead, so that the next use dials anew.
    pub(crate) fn discard(&self, connection: &Connection) {
        let is_it = |slot: &Slot| matches!(slot, Slot::Open(open) if open.is(connection));
        let mut slots = self.inner.slots.lock();
        let before = slots.len();
        slots.retain(|_, slot| !is_it(slot));
        if slots.len() < before {
            self.stats.connections_discarded.increment();
        }
    }

    /// A stream over this connection ended so: a broker that ends it in its own words keeps the
    /// connection.
    pub(crate) fn broken(&self, connection: &Connection, status: &Status) {
        if is_of_the_connection(status) {
            self.discard(connection);
        }
    }

    /// S28: from now on every connection has to lead to this cluster.
    pub(crate) fn expect_cluster(&self, cluster: ClusterId) {
        // The first one stays; views of another are refused before they come here.
        let _ = self.inner.cluster.set(cluster);
    }

    /// What every broker accepts, as far as they have told.
    pub(crate) fn limits(&self) -> BrokerLimits {
        self.inner.limits.common()
    }

    /// The retries that this client may still make.
    pub(crate) fn budget(&self) -> &Budget {
        &self.inner.budget
    }

    /// Forgets what belongs to addresses that have no broker any more.
    pub(crate) fn retain(&self, keep: impl Fn(&Address) -> bool) {
        self.inner.limits.retain(&keep);
        self.inner.brokers.lock().retain(|address, _| keep(address));
        self.inner.slots.lock().retain(|(address, _), slot| {
            keep(address) || !matches!(slot, Slot::Open(open) if open.is_closed())
        });
    }

    /// When the breaker of the address lets the next call through; `None`: at once.
    pub(crate) fn refused_until(&self, address: &Address) -> Option<Instant> {
        let brokers = self.inner.brokers.lock();
        brokers.get(address)?.breaker.refused_until(Instant::now())
    }

    /// How busy the address is; among several the one with the least is asked.
    pub(crate) fn load(&self, address: &Address) -> f64 {
        let brokers = self.inner.brokers.lock();
        brokers
            .get(address)
            .map_or(0.0, |broker| broker.load.cost())
    }

    /// The open connection, or a dial that is under way, begun if need be.
    fn find(&self, address: &Address, lane: Lane) -> Result<Found> {
        let expected = self.inner.cluster.get().copied();
        let key = (Arc::clone(address), lane);
        let mut slots = self.inner.slots.lock();
        match slots.get(&key) {
            Some(Slot::Dialling(dialling)) if dialling.peek().is_none() => {
                return Ok(Found::Dialling(dialling.clone()));
            }
            Some(Slot::Open(open)) if !open.is_closed() => {
                // Made before the cluster was known.
                if let Err(error) = check_cluster(expected, open.cluster) {
                    slots.remove(&key);
                    return Err(error);
                }
                // Whatever dials of other lanes met with: this one is there.
                return Ok(Found::Open(open.clone()));
            }
            _ => {}
        }
        self.inner.admit(address)?;
        let dialling = self.inner.dial(address, lane, expected);
        slots.insert(key, Slot::Dialling(dialling.clone()));
        Ok(Found::Dialling(dialling))
    }
}

enum Found {
    Open(Connection),
    Dialling(Dialling),
}

impl Inner {
    /// Dials in a task, which puts the connection into its slot.
    fn dial(
        self: &Arc<Self>,
        address: &Address,
        lane: Lane,
        expected: Option<ClusterId>,
    ) -> Dialling {
        let (inner, address) = (Arc::clone(self), Arc::clone(address));
        let task = tokio::spawn(async move {
            let span = debug_span!(
                target: trace::CONNECTION,
                "connect",
                %address,
                ?lane,
                error = field::Empty,
            );
            let dialling = inner.dialer.dial(&address, expected);
            let dialled = dialling.instrument(span.clone()).await;
            if let Err(DialError { error, .. }) = &dialled {
                span.record("error", field::display(error));
            }
            inner.dialled(&address, lane, dialled)
        });
        task.map(|ended| {
            ended.unwrap_or_else(|_| Err(Error::new(ErrorKind::Unreachable, "dialling was ended")))
        })
        .boxed()
        .shared()
    }

    fn dialled(
        &self,
        address: &Address,
        lane: Lane,
        dialled: Result<Connection, DialError>,
    ) -> Result<Connection> {
        let key = (Arc::clone(address), lane);
        match dialled {
            Ok(connection) => {
                self.stats.connections_opened.increment();
                self.succeeded(address, None);
                self.limits.learn(address, connection.limits.as_ref());
                let mut slots = self.slots.lock();
                if connection.cluster.is_some() {
                    slots.insert(key, Slot::Open(connection.clone()));
                } else {
                    // It may join another cluster than ours: asked again at the next use.
                    slots.remove(&key);
                }
                Ok(connection)
            }
            Err(DialError { error, failure }) => {
                self.stats.connections_failed.increment();
                debug!(target: trace::CONNECTION, %address, ?lane, %error, "no connection");
                match failure {
                    Some(failure) => self.failed(address, failure, &causes(&error)),
                    None => self.succeeded(address, None),
                }
                self.slots.lock().remove(&key);
                Err(error)
            }
        }
    }

    /// Asks the breaker for leave to dial.
    fn admit(&self, address: &Address) -> Result<()> {
        let now = Instant::now();
        let mut brokers = self.brokers.lock();
        let broker = brokers.entry(Arc::clone(address)).or_default();
        let probe_limit = self.dialer.config.connect_timeout * 2;
        match broker.breaker.admit(now, probe_limit) {
            Admission::Go | Admission::Probe => Ok(()),
            Admission::Refused(until) => Err(Error::new(
                ErrorKind::Unreachable,
                format!(
                    "not asked: the last attempts failed ({}); next attempt in {:?}",
                    broker.last_failure.as_deref().unwrap_or("no answer"),
                    until.saturating_duration_since(now)
                ),
            )
            .with_endpoints(vec![EndpointFailure {
                endpoint: address.to_string(),
                cause: format!(
                    "not asked again yet; last: {}",
                    broker.last_failure.as_deref().unwrap_or("no answer")
                ),
            }])),
        }
    }

    fn succeeded(&self, address: &Address, began: Option<Instant>) {
        let mut brokers = self.brokers.lock();
        let broker = brokers.entry(Arc::clone(address)).or_default();
        broker.breaker.succeeded();
        if let Some(began) = began {
            broker.load.took(began.elapsed());
        }
    }

    fn failed(&self, address: &Address, failure: Failure, cause: &str) {
        let mut brokers = self.brokers.lock();
        let broker = brokers.entry(Arc::clone(address)).or_default();
        broker.last_failure = Some(cause.into());
        let opened = broker
            .breaker
            .failed(failure, Instant::now(), rand::random());
        if opened {
            self.stats.breaker_openings.increment();
            debug!(target: trace::CONNECTION, %address, cause, "calls to this broker fail at once for a while");
        }
    }
}

/// Why each address of a name failed.
fn causes(error: &Error) -> String {
    let causes: Vec<_> = error
        .endpoints()
        .iter()
        .map(|failure| failure.cause.as_str())
        .collect();
    if causes.is_empty() {
        error.message().to_owned()
    } else {
        causes.join("; ")
    }
}

/// Counts a call among those under way at an address.
struct Busy<'a> {
    connections: &'a Connections,
    address: &'a Address,
    began: Instant,
    /// Else it was given up.
    answered: bool,
}

impl<'a> Busy<'a> {
    fn begin(connections: &'a Connections, address: &'a Address) -> Self {
        let mut brokers = connections.inner.brokers.lock();
        brokers.entry(Arc::clone(address)).or_default().load.begin();
        Self {
            connections,
            address,
            began: Instant::now(),
            answered: false,
        }
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let mut brokers = self.connections.inner.brokers.lock();
        if let Some(broker) = brokers.get_mut(self.address) {
            broker.load.end();
            if !self.answered {
                broker.load.gave_up(self.began.elapsed());
            }
        }
    }
}

/// The connection failed rather than the broker refused. `Unknown` and `Cancelled` can mean one that
/// is half dead.
fn is_of_the_connection(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Unavailable | Code::Unknown | Code::Cancelled
    )
}

impl fmt::Debug for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connections").finish_non_exhaustive()
    }
}
