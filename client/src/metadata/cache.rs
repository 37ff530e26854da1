//! The present view, and its refresh: one in flight, however many callers fail.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use qute_proto::ids::{BrokerId, ClusterId};
use qute_proto::v1;
use rand::seq::SliceRandom;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout_at};
use tracing::{Instrument, debug_span, field};

use super::controller::ControllerRoute;
use super::single_flight::SingleFlight;
use super::snapshot::{Leader, Metadata, Topic};
use crate::config::ClientConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::net::{Address, Connections, Lane, Patience, Question, ask_any, cluster_client};
use crate::trace;

/// Limit of one refresh over all endpoints.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit of one endpoint's answer.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// Limit of asking the leader of `__cluster` whether a topic is gone.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(5);

/// The present view of the cluster.
pub(crate) struct MetadataCache {
    pub(super) config: Arc<ClientConfig>,
    pub(super) connections: Arc<Connections>,
    view: ArcSwap<Metadata>,
    /// Counts views; notifies of each.
    version: watch::Sender<u64>,
    /// Held while a view is replaced, so that of two writers neither is lost.
    replacing: Mutex<()>,
    first: SingleFlight,
    refreshing: SingleFlight,
    confirming: SingleFlight,
    /// Wakes the task that refreshes for those who do not wait themselves.
    pub(super) refresh_wanted: Notify,
    /// Wakes the task that watches, to go on elsewhere.
    pub(super) watch_doubted: Notify,
    /// The broker that pushes.
    watched: Mutex<Option<Address>>,
    heard_at: Mutex<Instant>,
    /// Whether the next refresh believes what the view says of brokers' health.
    hearsay: AtomicBool,
    /// Brokers that the next refresh asks last.
    doubted: Mutex<BTreeSet<BrokerId>>,
}

/// What a view knows of one incarnation of a topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Incarnation {
    /// It is there; as it is now (partitions may have been added).
    Present(Arc<Topic>),
    /// It was deleted, and this one made in its place.
    Recreated(Arc<Topic>),
    /// There is no topic of that name.
    Missing,
}

impl Incarnation {
    /// What to report once [`MetadataCache::confirm`] has said so; `None`: it is there.
    pub(crate) fn error(&self, topic: &Topic) -> Option<Error> {
        let (kind, message) = match self {
            Self::Present(_) => return None,
            Self::Recreated(_) => (
                ErrorKind::TopicRecreated,
                "the topic was deleted and made again",
            ),
            Self::Missing => (ErrorKind::UnknownTopic, "the topic does not exist any more"),
        };
        Some(Error::new(kind, message).with_topic(&topic.name))
    }
}

impl MetadataCache {
    pub(crate) fn new(config: Arc<ClientConfig>, connections: Arc<Connections>) -> Self {
        Self {
            config,
            connections,
            view: ArcSwap::default(),
            version: watch::Sender::new(0),
            replacing: Mutex::new(()),
            first: SingleFlight::default(),
            refreshing: SingleFlight::default(),
            confirming: SingleFlight::default(),
            refresh_wanted: Notify::new(),
            watch_doubted: Notify::new(),
            watched: Mutex::default(),
            heard_at: Mutex::new(Instant::now()),
            hearsay: AtomicBool::new(true),
            doubted: Mutex::default(),
        }
    }

    /// The present view.
    pub(crate) fn load(&self) -> Arc<Metadata> {
        self.view.load_full()
    }

    /// Notified of each new view.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// The topic in the present view, without waiting.
    pub(crate) fn known_topic(&self, name: &str) -> Option<Arc<Topic>> {
        self.view.load().topic(name).cloned()
    }

    /// Whether a leader of a newer epoch, and where it is, is known for a partition of this incarnation.
    pub(crate) fn newer_leader(&self, topic: &Topic, partition: u32, than: Option<Leader>) -> bool {
        self.view.load().has_newer(topic, partition, than)
    }

    /// Takes in a broker's full answer.
    pub(crate) fn offer(&self, response: &v1::MetadataResponse) -> Result<()> {
        if let Some(error) = &response.error {
            return Err(Error::told(error));
        }
        let _replacing = self.replacing.lock();
        let next = self.view.load().merged(response)?;
        if let Some(cluster) = ClusterId::from_wire(&response.cluster_id) {
            // S28: it is the one that the views are pinned to.
            self.connections.expect_cluster(cluster);
        }
        *self.heard_at.lock() = Instant::now();
        if let Some(next) = next {
            self.connections.stats.metadata_updates.increment();
            self.replace(next);
        }
        Ok(())
    }

    /// Takes in a leader hint; true if it was newer than what was known.
    pub(crate) fn learn(
        &self,
        topic: &Topic,
        partition: u32,
        hint: Option<&v1::LeaderHint>,
    ) -> bool {
        let Some(hint) = hint else { return false };
        let _replacing = self.replacing.lock();
        let next = self
            .view
            .load()
            .with_hint(&topic.name, topic.id, partition, hint);
        let obeyed = next.map(|next| self.replace(next)).is_some();
        self.connections.stats.hinted(obeyed);
        obeyed
    }

    fn replace(&self, next: Metadata) {
        if self.view.load().brokers != next.brokers {
            let bootstrap = self.config.bootstrap.addresses();
            self.connections.retain(|address| {
                let mut brokers = next.brokers.values();
                brokers.any(|broker| broker.address == *address)
                    || bootstrap.iter().any(|known| **known == **address)
            });
        }
        self.view.store(Arc::new(next));
        self.version.send_modify(|version| *version += 1);
    }

    /// All addresses worth asking, in an order that changes: a broker that is cut off from the
    /// others answers with an old view, so none is asked first for ever. Brokers believed dead
    /// and the bootstrap list come last.
    pub(crate) fn endpoints(&self) -> Vec<Address> {
        let mut classes = self.classes(&BTreeSet::new(), true);
        for class in &mut classes {
            class.shuffle(&mut rand::rng());
        }
        classes.concat()
    }

    /// The addresses for what any broker can answer, by preference.
    pub(crate) fn endpoint_classes(&self) -> Vec<Vec<Address>> {
        self.classes(&BTreeSet::new(), true)
    }

    /// The addresses by preference: brokers that seem well, those believed dead or that have failed
    /// again and again, the doubted ones (whose word it is that others are dead, nobody knows), and
    /// the bootstrap list, whose names are resolved anew and lead on when all brokers have moved.
    /// Without `hearsay` those believed dead count as well: a broker that is cut off from the others
    /// calls them dead, and would be the only one that is ever asked.
    fn classes(&self, doubted: &BTreeSet<BrokerId>, hearsay: bool) -> Vec<Vec<Address>> {
        let view = self.view.load();
        let mut classes = vec![Vec::new(); 4];
        let mut add = |class: usize, address: Address| {
            if !classes.iter().any(|class| class.contains(&address))
                && let Some(class) = classes.get_mut(class)
            {
                class.push(address);
            }
        };
        for broker in view.brokers.values() {
            if broker.address.is_empty() {
                continue;
            }
            let ill = hearsay
                && matches!(
                    broker.state,
                    v1::BrokerState::Dead | v1::BrokerState::Suspect
                );
            let class = if doubted.contains(&broker.id) {
                2
            } else {
                usize::from(ill || self.connections.refused_until(&broker.address).is_some())
            };
            add(class, Arc::clone(&broker.address));
        }
        for address in self.config.bootstrap.addresses() {
            add(3, address.as_str().into());
        }
        classes
    }

    /// Makes sure that there is a view at all: told at once when nobody is there, retried until the
    /// deadline while the cluster is forming.
    pub(crate) async fn first_view(&self, deadline: Instant) -> Result<()> {
        if self.view.load().cluster_id.is_some() {
            return Ok(());
        }
        loop {
            let ours = AtomicBool::new(false);
            let first = async {
                ours.store(true, Ordering::Relaxed);
                if self.view.load().cluster_id.is_some() {
                    return Ok(());
                }
                self.take_any(BTreeSet::new(), true, 0, deadline, Patience::Forming)
                    .await
            };
            match timeout_at(deadline, self.first.run(first)).await {
                // Somebody else's question, with an earlier deadline: there is time for another.
                Ok(Err(error))
                    if error.kind() == ErrorKind::NotReady
                        && !ours.load(Ordering::Relaxed)
                        && Instant::now() < deadline => {}
                Ok(result) => return result,
                Err(_) => return Err(Error::new(ErrorKind::Timeout, "connecting took too long")),
            }
        }
    }

    /// Fetches a new view. One refresh is in flight at most: callers that come while one runs
    /// share the next one, which has begun after they asked.
    ///
    /// # Cancel safety
    /// A cancelled caller leaves the refresh to the next one.
    pub(crate) async fn refresh(&self) -> Result<()> {
        self.refreshing.run(self.refresh_now()).await
    }

    async fn refresh_now(&self) -> Result<()> {
        let deadline = Instant::now() + REFRESH_TIMEOUT;
        let doubted = std::mem::take(&mut *self.doubted.lock());
        // Every other time.
        let hearsay = self.hearsay.fetch_not(Ordering::Relaxed);
        self.take_any(doubted, hearsay, 0, deadline, Patience::None)
            .await
    }

    /// Has the view refreshed in the background; whoever asks sees it by [`Self::subscribe`].
    pub(crate) fn request_refresh(&self) {
        self.refresh_wanted.notify_one();
    }

    /// The same, when `broker` keeps silent: it may be cut off from the others, and its view old.
    pub(crate) fn request_refresh_elsewhere(&self, broker: BrokerId) {
        let watched = self.watched.lock().clone();
        if watched.is_some() && self.view.load().address(broker) == watched.as_ref() {
            self.move_watch();
        }
        self.doubted.lock().insert(broker);
        self.request_refresh();
    }

    /// Has the watch go on with another broker.
    pub(super) fn move_watch(&self) {
        self.watch_doubted.notify_one();
    }

    pub(super) fn watching(&self, address: Option<&Address>) {
        *self.watched.lock() = address.cloned();
    }

    /// When a broker last told its view, whether it was new or not.
    pub(super) fn heard_at(&self) -> Instant {
        *self.heard_at.lock()
    }

    /// Counts views.
    pub(super) fn version(&self) -> u64 {
        *self.version.borrow()
    }

    /// Fetches a view at or beyond `cluster_index` from any broker (S28), retrying until the deadline
    /// once there has been a view.
    pub(crate) async fn refresh_to(&self, cluster_index: u64, deadline: Instant) -> Result<()> {
        self.first_view(deadline).await?;
        if self.load().cluster_index >= cluster_index {
            return Ok(());
        }
        let none = BTreeSet::new();
        self.take_any(none, true, cluster_index, deadline, Patience::Outage)
            .await
            .map_err(|error| {
                if !error.is_retriable() {
                    return error;
                }
                Error::new(
                    ErrorKind::Timeout,
                    format!("no broker reached index {cluster_index} of __cluster in time"),
                )
                .with_endpoints(error.endpoints().to_vec())
            })
    }

    /// Takes in any broker's view.
    async fn take_any(
        &self,
        doubted: BTreeSet<BrokerId>,
        hearsay: bool,
        min_cluster_index: u64,
        deadline: Instant,
        patience: Patience,
    ) -> Result<()> {
        let endpoints = || self.classes(&doubted, hearsay);
        let ask = |address: Address| -> BoxFuture<'_, Result<()>> {
            let request = v1::MetadataRequest {
                min_cluster_index,
                ..Default::default()
            };
            Box::pin(async move { self.ask(&address, request).await })
        };
        let question = Question {
            endpoints: &endpoints,
            ask: &ask,
            deadline,
            patience,
        };
        let stats = &self.connections.stats;
        stats.metadata_refreshes.increment();
        let span = debug_span!(
            target: trace::METADATA,
            "refresh",
            cluster_index = field::Empty,
            error = field::Empty,
        );
        let result = ask_any(&self.config, &self.connections, question)
            .instrument(span.clone())
            .await;
        span.record("cluster_index", self.view.load().cluster_index);
        if let Err(error) = &result {
            span.record("error", field::display(error));
            stats.metadata_refresh_failures.increment();
        }
        result
    }

    /// What any broker whose view is not older than ours tells of these topics; not taken in.
    pub(crate) async fn view_of_any(
        &self,
        topics: Vec<String>,
        deadline: Instant,
    ) -> Result<v1::MetadataResponse> {
        self.first_view(deadline).await?;
        let request = v1::MetadataRequest {
            min_cluster_index: self.load().cluster_index,
            topics,
            authoritative: false,
        };
        let endpoints = || self.endpoint_classes();
        let ask = |address: Address| -> BoxFuture<'_, Result<v1::MetadataResponse>> {
            let request = request.clone();
            Box::pin(async move {
                let limit = deadline.min(Instant::now() + ANSWER_TIMEOUT);
                let response = self.metadata_of(&address, request, limit).await?;
                match &response.error {
                    Some(error) => Err(Error::told(error)),
                    None => Ok(response),
                }
            })
        };
        let question = Question {
            endpoints: &endpoints,
            ask: &ask,
            deadline,
            patience: Patience::Outage,
        };
        ask_any(&self.config, &self.connections, question).await
    }

    /// Asks one broker and takes its answer in.
    async fn ask(&self, address: &Address, request: v1::MetadataRequest) -> Result<()> {
        let limit = Instant::now() + ANSWER_TIMEOUT;
        let wanted = request.min_cluster_index;
        let response = self.metadata_of(address, request, limit).await?;
        self.offer(&response)?;
        if response.cluster_index < wanted {
            let behind = format!("it is at index {} of __cluster", response.cluster_index);
            return Err(Error::new(ErrorKind::NotReady, behind));
        }
        Ok(())
    }

    /// One broker's answer, not taken in.
    pub(crate) async fn metadata_of(
        &self,
        address: &Address,
        request: v1::MetadataRequest,
        deadline: Instant,
    ) -> Result<v1::MetadataResponse> {
        let ask = async |channel| cluster_client(channel).metadata(request).await;
        let asked = self.connections.call(address, Lane::Control, deadline, ask);
        Ok(asked.await?)
    }

    /// The topic, looked up with the leader of `__cluster` if the present view lacks it:
    /// "unknown" is final only when that one says so.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownTopic`], or what kept the leader of `__cluster` from answering.
    pub(crate) async fn topic(&self, name: &str, deadline: Instant) -> Result<Arc<Topic>> {
        if let Some(topic) = self.known_topic(name) {
            return Ok(topic);
        }
        // Cheap first: any broker may know it.
        let _ = timeout_at(deadline, self.refresh()).await;
        if let Some(topic) = self.known_topic(name) {
            return Ok(topic);
        }
        self.ask_controller(deadline).await?;
        self.known_topic(name).ok_or_else(|| {
            Error::new(ErrorKind::UnknownTopic, "the topic does not exist").with_topic(&name.into())
        })
    }

    /// What the present view knows of this incarnation of the topic. [`Incarnation::Recreated`] is
    /// final, since views never go back (S28); [`Incarnation::Missing`] is not: [`Self::confirm`].
    pub(crate) fn incarnation(&self, topic: &Topic) -> Incarnation {
        match self.known_topic(&topic.name) {
            Some(present) if present.id == topic.id => Incarnation::Present(present),
            Some(other) => Incarnation::Recreated(other),
            None => Incarnation::Missing,
        }
    }

    /// What became of this incarnation of the topic, by the word of the leader of `__cluster`:
    /// [`Incarnation::Missing`] then means deleted. `None`: nobody could say (5 s at most, or the call timeout).
    pub(crate) async fn confirm(&self, topic: &Topic) -> Option<Incarnation> {
        if let recreated @ Incarnation::Recreated(_) = self.incarnation(topic) {
            return Some(recreated);
        }
        let deadline = Instant::now() + CONFIRM_TIMEOUT.min(self.config.call_timeout);
        self.ask_controller(deadline).await.ok()?;
        Some(self.incarnation(topic))
    }

    /// Whether this incarnation of the topic exists, by the word of the leader of `__cluster`; no
    /// answer proves nothing.
    pub(crate) async fn may_exist(&self, topic: &Topic) -> bool {
        matches!(
            self.confirm(topic).await,
            None | Some(Incarnation::Present(_))
        )
    }

    /// Takes in the view of the confirmed leader of `__cluster`, found by its hints, retrying
    /// until the deadline.
    /// One search is under way at most, however many ask.
    pub(crate) async fn ask_controller(&self, deadline: Instant) -> Result<()> {
        loop {
            // From when it begins: callers that wait for a search before it lose none of it.
            let search = async {
                let limit = Instant::now() + CONFIRM_TIMEOUT;
                self.search_controller(limit).await
            };
            let Ok(found) = timeout_at(deadline, self.confirming.run(search)).await else {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    "the leader of __cluster did not answer in time",
                ));
            };
            match found {
                // One search was given up; there is time for another.
                Err(error) if error.kind() == ErrorKind::Timeout && Instant::now() < deadline => {}
                found => return found,
            }
        }
    }

    async fn search_controller(&self, deadline: Instant) -> Result<()> {
        let mut route = ControllerRoute::new(self);
        loop {
            let address = route.next();
            let request = v1::MetadataRequest {
                authoritative: true,
                ..Default::default()
            };
            let limit = deadline.min(Instant::now() + ANSWER_TIMEOUT);
            let answer = self.metadata_of(&address, request, limit).await;
            if Instant::now() >= deadline && answer.is_err() {
                return Err(route.timed_out());
            }
            match answer {
                Ok(response) => match &response.error {
                    None => return self.offer(&response),
                    Some(error) => {
                        route.refused(&address, Error::told(error), error.leader_hint.as_ref())
                    }
                },
                Err(error) => route.refused(&address, error, None),
            }
            route.pause(deadline).await?;
        }
    }
}
