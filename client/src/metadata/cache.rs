//! The present view, its refresh (one in flight, however many callers fail), and the watch task
//! that has it pushed.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use qute_proto::ids::{BrokerId, ClusterId};
use qute_proto::v1;
use rand::seq::SliceRandom;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, debug, debug_span, field};

use super::snapshot::{Leader, Metadata, Topic};
use crate::config::ClientConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::net::{Address, Backoff, Connections, Lane, STAGGER, call_error, cluster_client, race};
use crate::trace;

/// Limit of one refresh over all endpoints.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit of one endpoint's answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// Limit of asking the leader of `__cluster` whether a topic is gone.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(5);

/// The present view of the cluster.
pub(crate) struct MetadataCache {
    config: Arc<ClientConfig>,
    connections: Arc<Connections>,
    view: ArcSwap<Metadata>,
    /// Counts views; notifies of each.
    version: watch::Sender<u64>,
    /// Held while a view is replaced, so that of two writers neither is lost.
    replacing: Mutex<()>,
    refreshing: tokio::sync::Mutex<Refreshed>,
    /// How many refreshes have begun.
    begun: std::sync::atomic::AtomicU64,
    /// Wakes the task that refreshes for those who do not wait themselves.
    refresh_wanted: Notify,
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

#[allow(dead_code, reason = "adopted by producer and consumer")]
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

/// The last refresh that completed.
#[derive(Default)]
struct Refreshed {
    number: u64,
    result: Option<Result<()>>,
}

impl MetadataCache {
    pub(crate) fn new(config: Arc<ClientConfig>, connections: Arc<Connections>) -> Self {
        Self {
            config,
            connections,
            view: ArcSwap::default(),
            version: watch::Sender::new(0),
            replacing: Mutex::new(()),
            refreshing: tokio::sync::Mutex::default(),
            begun: std::sync::atomic::AtomicU64::new(0),
            refresh_wanted: Notify::new(),
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

    /// Whether a leader of a newer epoch is known for a partition of this incarnation.
    pub(crate) fn newer_leader(&self, topic: &Topic, partition: u32, than: Option<Leader>) -> bool {
        let view = self.view.load();
        view.topic_by_id(&topic.name, topic.id)
            .and_then(|topic| topic.leader(partition))
            .is_some_and(|known| than.is_none_or(|than| known.epoch > than.epoch))
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
        self.view.store(Arc::new(next));
        self.version.send_modify(|version| *version += 1);
    }

    /// All addresses worth asking, in an order that changes: a broker that is cut off from the
    /// others answers with an old view, so none is asked first for ever. Brokers believed dead
    /// and the bootstrap list come last.
    pub(crate) fn endpoints(&self) -> Vec<Address> {
        self.endpoints_but(&BTreeSet::new())
    }

    /// The same, with the doubted brokers behind even those believed dead: whose word the latter
    /// is, nobody knows.
    fn endpoints_but(&self, doubted: &BTreeSet<BrokerId>) -> Vec<Address> {
        let view = self.view.load();
        let mut brokers: Vec<_> = view
            .brokers
            .values()
            .filter(|broker| !broker.address.is_empty())
            .collect();
        brokers.shuffle(&mut rand::rng());
        brokers.sort_by_key(|broker| {
            let dead = matches!(
                broker.state,
                v1::BrokerState::Dead | v1::BrokerState::Suspect
            );
            (doubted.contains(&broker.id), dead)
        });
        let brokers = brokers
            .into_iter()
            .map(|broker| Arc::clone(&broker.address));
        let bootstrap = self.config.bootstrap.addresses();
        let bootstrap = bootstrap.iter().map(|address| address.as_str().into());
        let mut endpoints: Vec<Address> = Vec::new();
        for address in brokers.chain(bootstrap) {
            if !endpoints.contains(&address) {
                endpoints.push(address);
            }
        }
        endpoints
    }

    /// Makes sure that there is a view at all, retrying until the deadline.
    pub(crate) async fn first_view(&self, deadline: Instant) -> Result<()> {
        let mut backoff = Backoff::new(&self.config);
        while self.view.load().cluster_id.is_none() {
            let error = match timeout_at(deadline, self.refresh()).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => error,
                Err(_) => return Err(Error::new(ErrorKind::Timeout, "connecting took too long")),
            };
            let pause = backoff.step();
            // Nobody there, or strangers: told at once. A cluster that is forming: worth waiting.
            if error.kind() != ErrorKind::NotReady || Instant::now() + pause >= deadline {
                return Err(error);
            }
            tokio::time::sleep(pause).await;
        }
        Ok(())
    }

    /// Fetches a new view. One refresh is in flight at most: callers that come while one runs
    /// share the next one, which has begun after they asked.
    ///
    /// # Cancel safety
    /// A cancelled caller leaves the refresh to the next one.
    pub(crate) async fn refresh(&self) -> Result<()> {
        use std::sync::atomic::Ordering;
        let seen = self.begun.load(Ordering::Acquire);
        let mut refreshed = self.refreshing.lock().await;
        if refreshed.number > seen
            && let Some(result) = &refreshed.result
        {
            return result.clone();
        }
        let number = self.begun.fetch_add(1, Ordering::AcqRel) + 1;
        let deadline = Instant::now() + REFRESH_TIMEOUT;
        let doubted = std::mem::take(&mut *self.doubted.lock());
        let stats = &self.connections.stats;
        stats.metadata_refreshes.increment();
        let span = debug_span!(
            target: trace::METADATA,
            "refresh",
            cluster_index = field::Empty,
            error = field::Empty,
        );
        let result = self
            .ask_any(self.endpoints_but(&doubted), 0, deadline)
            .instrument(span.clone())
            .await;
        span.record("cluster_index", self.view.load().cluster_index);
        if let Err(error) = &result {
            span.record("error", field::display(error));
            stats.metadata_refresh_failures.increment();
        }
        *refreshed = Refreshed {
            number,
            result: Some(result.clone()),
        };
        result
    }

    /// Has the view refreshed in the background; whoever asks sees it by [`Self::subscribe`].
    pub(crate) fn request_refresh(&self) {
        self.refresh_wanted.notify_one();
    }

    /// The same, when `broker` keeps silent: it may be cut off from the others, and its view old.
    pub(crate) fn request_refresh_elsewhere(&self, broker: BrokerId) {
        self.doubted.lock().insert(broker);
        self.request_refresh();
    }

    /// Fetches a view at or beyond `cluster_index` from any broker (S28).
    pub(crate) async fn refresh_to(&self, cluster_index: u64, deadline: Instant) -> Result<()> {
        if self.view.load().cluster_index >= cluster_index {
            return Ok(());
        }
        self.ask_any(self.endpoints(), cluster_index, deadline)
            .await
    }

    async fn ask_any(
        &self,
        endpoints: Vec<Address>,
        min_cluster_index: u64,
        deadline: Instant,
    ) -> Result<()> {
        let ask = |address: Address| async move {
            let request = v1::MetadataRequest {
                min_cluster_index,
                ..Default::default()
            };
            self.ask(&address, request).await.map(drop)
        };
        race(endpoints, STAGGER, deadline, ask).await
    }

    /// Asks one broker and takes its answer in.
    pub(crate) async fn ask(
        &self,
        address: &Address,
        request: v1::MetadataRequest,
    ) -> Result<v1::MetadataResponse> {
        let limit = Instant::now() + ANSWER_TIMEOUT;
        let response = self.metadata_of(address, request, limit).await?;
        self.offer(&response)?;
        Ok(response)
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
    /// [`Incarnation::Missing`] then means deleted. `None`: nobody could say (5 s at most).
    pub(crate) async fn confirm(&self, topic: &Topic) -> Option<Incarnation> {
        if let recreated @ Incarnation::Recreated(_) = self.incarnation(topic) {
            return Some(recreated);
        }
        let deadline = Instant::now() + CONFIRM_TIMEOUT;
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
    pub(crate) async fn ask_controller(&self, deadline: Instant) -> Result<()> {
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

/// Finds the leader of `__cluster`: first the known one, then by hints, else one endpoint after
/// the other.
pub(crate) struct ControllerRoute<'a> {
    cache: &'a MetadataCache,
    hinted: Option<Address>,
    /// Hints obeyed in a row: each must carry a newer epoch.
    known: Option<Leader>,
    rest: Vec<Address>,
    backoff: Backoff,
    failure: Option<Error>,
    pause: bool,
    /// Every other attempt goes to the known leader, the rest around.
    turn: bool,
}

impl<'a> ControllerRoute<'a> {
    pub(crate) fn new(cache: &'a MetadataCache) -> Self {
        let view = cache.load();
        let hinted = view
            .controller
            .and_then(|leader| view.address(leader.broker).cloned());
        Self {
            cache,
            hinted,
            known: view.controller,
            rest: Vec::new(),
            backoff: Backoff::new(&cache.config),
            failure: None,
            pause: false,
            turn: true,
        }
    }

    /// Where to ask next.
    pub(crate) fn next(&mut self) -> Address {
        if let Some(address) = self.hinted.take() {
            return address;
        }
        self.turn = !self.turn;
        if self.turn
            && let Some(known) = self.known
            && let Some(address) = self.cache.load().address(known.broker)
        {
            return Arc::clone(address);
        }
        if self.rest.is_empty() {
            self.rest = self.cache.endpoints();
            self.rest.shuffle(&mut rand::rng());
        }
        // The bootstrap list is never empty.
        self.rest.pop().unwrap_or_else(|| Arc::from(""))
    }

    /// The endpoint failed or does not lead; its hint is obeyed if it is newer.
    pub(crate) fn refused(
        &mut self,
        address: &Address,
        error: Error,
        hint: Option<&v1::LeaderHint>,
    ) {
        debug!(target: trace::METADATA, %address, %error, "not answered by the leader of __cluster");
        let leader = hint.and_then(super::snapshot::leader_of_hint);
        let newer =
            leader.filter(|leader| self.known.is_none_or(|known| known.epoch < leader.epoch));
        self.pause = newer.is_none();
        if hint.is_some() {
            self.cache.connections.stats.hinted(newer.is_some());
        }
        if let (Some(leader), Some(hint)) = (newer, hint) {
            self.known = Some(leader);
            let view = self.cache.load();
            self.hinted = view
                .address(leader.broker)
                .cloned()
                .or_else(|| (!hint.address.is_empty()).then(|| hint.address.as_str().into()));
        }
        self.failure = Some(error);
    }

    /// Backs off unless a newer hint is to be followed at once.
    ///
    /// # Errors
    /// The last failure, once the deadline has passed.
    pub(crate) async fn pause(&mut self, deadline: Instant) -> Result<()> {
        if !self.pause {
            return Ok(());
        }
        let until = Instant::now() + self.backoff.step();
        if until >= deadline {
            return Err(self.timed_out());
        }
        tokio::time::sleep_until(until).await;
        Ok(())
    }

    /// What to report when the deadline has passed.
    pub(crate) fn timed_out(&self) -> Error {
        let cause = self
            .failure
            .as_ref()
            .map(|failure| format!("; last: {failure}"));
        Error::new(
            ErrorKind::Timeout,
            format!(
                "the leader of __cluster did not answer in time{}",
                cause.unwrap_or_default()
            ),
        )
    }
}

/// Has new views pushed, from whichever broker serves; failed calls refresh by themselves, so
/// this only makes things faster. Ends with the token.
pub(crate) fn spawn_watch(cache: Arc<MetadataCache>, stop: CancellationToken) {
    tokio::spawn(async move {
        let tasks = async { tokio::join!(watch(&cache), refresh_on_request(&cache)) };
        stop.run_until_cancelled(tasks).await;
    });
}

async fn refresh_on_request(cache: &MetadataCache) {
    loop {
        cache.refresh_wanted.notified().await;
        if let Err(error) = cache.refresh().await {
            debug!(target: trace::METADATA, %error, "metadata refresh failed");
        }
        tokio::time::sleep(cache.config.backoff_min).await;
    }
}

async fn watch(cache: &MetadataCache) {
    let mut backoff = Backoff::new(&cache.config);
    loop {
        for address in cache.endpoints() {
            match watch_one(cache, &address).await {
                Ok(views) if views > 0 => backoff.reset(),
                Ok(_) => {}
                Err(error) => {
                    debug!(target: trace::METADATA, %address, %error, "metadata watch ended")
                }
            }
            tokio::time::sleep(backoff.step()).await;
        }
    }
}

/// Follows one broker until its stream ends; gives how many views it sent.
async fn watch_one(cache: &MetadataCache, address: &Address) -> Result<u64> {
    let channel = cache.connections.channel(address, Lane::Control).await?;
    let mut client = cluster_client(channel);
    let opening = client.watch_metadata(v1::WatchMetadataRequest {});
    let mut stream = timeout(ANSWER_TIMEOUT, opening)
        .await
        .map_err(|_| Error::new(ErrorKind::Timeout, "no answer in time"))?
        .map_err(|status| call_error(address, &status))?
        .into_inner();
    let mut views = 0;
    while let Some(response) = stream
        .message()
        .await
        .map_err(|status| call_error(address, &status))?
    {
        cache.offer(&response)?;
        views += 1;
    }
    Ok(views)
}
