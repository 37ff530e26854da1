//! The other brokers: where they are, whether they are who they say, and the lanes to them.
//!
//! Addresses and the cluster id are fed from above (gossip and `__cluster` know them) and may
//! change at any time. A lane is made when it is first needed and lives until shutdown; it connects
//! while its peer's address is known.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use prost::Message;
use qute_proto::ids::{BrokerId, ClusterId};
use qute_proto::internal::{FrameKind, GroupLeader, LeaderHints, PeerFrame, PeerHello};
use qute_proto::v1;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::identity::{Admitted, Identity, KnownPeers, PROTOCOL_VERSION, Refusal};
use super::lane::{self, Lane, Link};

/// Receives the leaders that a peer knows at first hand. Must not block.
pub type HintSink = Arc<dyn Fn(BrokerId, LeaderHints) + Send + Sync>;

/// What all lanes share.
pub(super) struct Context {
    pub(super) identity: Identity,
    earlier: Vec<u64>,
    pub(super) cluster: watch::Sender<Option<ClusterId>>,
    pub(super) addresses: watch::Sender<HashMap<BrokerId, String>>,
    pub(super) known: KnownPeers,
    pub(super) refused: watch::Sender<Option<String>>,
    pub(super) hints: OnceLock<HintSink>,
    pub(super) shutdown: CancellationToken,
}

impl Context {
    pub(super) fn address(&self, peer: BrokerId) -> Option<String> {
        self.addresses.borrow().get(&peer).cloned()
    }

    /// This broker's greeting, once it is part of a cluster.
    pub(super) fn hello(&self) -> Option<PeerHello> {
        let cluster = (*self.cluster.borrow())?;
        Some(hello(self.identity, &self.earlier, Some(cluster)))
    }

    pub(super) fn admit(&self, hello: &PeerHello) -> Result<Admitted, Refusal> {
        let cluster = *self.cluster.borrow();
        self.known.admit(self.identity, cluster, hello)
    }

    /// True if waiting does not help against this refusal.
    pub(super) fn is_final(&self, error: &v1::Error) -> bool {
        // Not WRONG_CLUSTER: an address that was heard of may belong to a stranger by now.
        error.code() == v1::ErrorCode::InvalidArgument
    }

    pub(super) fn report_refused(&self, reason: &str) {
        self.refused.send_replace(Some(reason.to_owned()));
    }
}

fn hello(identity: Identity, earlier: &[u64], cluster: Option<ClusterId>) -> PeerHello {
    PeerHello {
        cluster_id: cluster.map(ClusterId::to_wire).unwrap_or_default(),
        broker_id: identity.broker.0,
        boot: identity.boot,
        protocol_version: PROTOCOL_VERSION,
        process_id: identity.process,
        earlier_process_ids: earlier.to_vec(),
    }
}

type Links = HashMap<(BrokerId, Lane), Arc<Link>>;

/// The other brokers. Cheap to clone; all clones are the same.
#[derive(Clone)]
pub struct Peers {
    pub(super) context: Arc<Context>,
    // Short: look-ups and inserts. Never held across an await.
    links: Arc<Mutex<Links>>,
    tasks: TaskTracker,
}

impl Peers {
    /// Nobody is known yet, and this broker is part of no cluster. `earlier`: the processes of its
    /// boots before, the newest first (S23).
    #[must_use]
    pub fn new(identity: Identity, earlier: &[u64]) -> Self {
        Self {
            context: Arc::new(Context {
                identity,
                earlier: earlier.to_vec(),
                cluster: watch::Sender::new(None),
                addresses: watch::Sender::new(HashMap::new()),
                known: KnownPeers::default(),
                refused: watch::Sender::new(None),
                hints: OnceLock::new(),
                shutdown: CancellationToken::new(),
            }),
            links: Arc::default(),
            tasks: TaskTracker::new(),
        }
    }

    /// Who this process is.
    #[must_use]
    pub fn identity(&self) -> Identity {
        self.context.identity
    }

    /// This broker is part of `cluster`, for good: until this is set no stream is opened or let in.
    pub fn set_cluster(&self, cluster: ClusterId) {
        self.context.cluster.send_replace(Some(cluster));
    }

    /// The cluster, once it is known.
    #[must_use]
    pub fn cluster(&self) -> Option<ClusterId> {
        *self.context.cluster.borrow()
    }

    /// Where the peers are (`host:port` of their peer listener): replaces what was known.
    pub fn set_addresses(&self, addresses: HashMap<BrokerId, String>) {
        self.context.addresses.send_if_modified(|known| {
            let changed = *known != addresses;
            *known = addresses;
            changed
        });
    }

    /// Where a peer is, as far as known.
    #[must_use]
    pub fn address(&self, broker: BrokerId) -> Option<String> {
        self.context.address(broker)
    }

    /// The boot and process that the cluster's own records show for a broker (S23).
    pub fn remember_boot(&self, broker: BrokerId, boot: u64, process: u64) {
        self.context.known.remember(broker, boot, process);
    }

    /// This broker's greeting, for unary calls. The cluster id is empty before forming.
    #[must_use]
    pub fn hello(&self) -> PeerHello {
        hello(self.context.identity, &self.context.earlier, self.cluster())
    }

    /// Checks the greeting of a unary call between members of the cluster (S23).
    ///
    /// # Errors
    /// [`Refusal`]; [`Refusal::NotFormed`] if either side is of no cluster yet.
    pub fn check_hello(&self, hello: &PeerHello) -> Result<BrokerId, Refusal> {
        Ok(self.context.admit(hello)?.broker)
    }

    /// Set once a peer has refused this process for good (S23: its data directory was copied or
    /// rolled back). The broker should stop.
    #[must_use]
    pub fn watch_refused(&self) -> watch::Receiver<Option<String>> {
        self.context.refused.subscribe()
    }

    /// Whether a connection for control messages to the peer is up now.
    #[must_use]
    pub fn is_connected(&self, broker: BrokerId) -> bool {
        let links = self.links.lock();
        links
            .get(&(broker, Lane::Control))
            .is_some_and(|link| link.is_up())
    }

    /// Who receives the leader hints of peers. The first call counts.
    pub fn on_hints(&self, sink: HintSink) {
        let _ = self.context.hints.set(sink);
    }

    /// Tells one peer what this broker knows at first hand; `false` if it is not connected.
    pub fn send_hints(&self, broker: BrokerId, leaders: Vec<GroupLeader>) -> bool {
        self.link(broker, Lane::Control).tell(hints_frame(leaders))
    }

    /// Tells every connected peer what this broker knows at first hand.
    pub fn broadcast_hints(&self, leaders: Vec<GroupLeader>) {
        let frame = hints_frame(leaders);
        let own = self.context.identity.broker;
        let known: Vec<BrokerId> = self.context.addresses.borrow().keys().copied().collect();
        for broker in known.into_iter().filter(|broker| *broker != own) {
            self.link(broker, Lane::Control).tell(frame.clone());
        }
    }

    pub(super) fn link(&self, peer: BrokerId, lane: Lane) -> Arc<Link> {
        let mut links = self.links.lock();
        if let Some(link) = links.get(&(peer, lane)) {
            return Arc::clone(link);
        }
        let link = Link::new(peer, lane);
        links.insert((peer, lane), Arc::clone(&link));
        drop(links);
        self.tasks
            .spawn(lane::run(Arc::clone(&link), Arc::clone(&self.context)));
        link
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// The peer opened a stream to this broker: it is there, so connect to it now.
    pub(super) fn kick(&self, peer: BrokerId) {
        let links = self.links.lock();
        for lane in [Lane::Control, Lane::Data] {
            if let Some(link) = links.get(&(peer, lane)) {
                link.kick();
            }
        }
    }

    /// Ends all lanes and streams and waits for nothing: from now on nobody hears from this broker.
    pub fn cut(&self) {
        self.context.shutdown.cancel();
    }

    /// Ends all streams, outgoing and incoming.
    pub async fn shutdown(&self) {
        self.cut();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

fn hints_frame(leaders: Vec<GroupLeader>) -> PeerFrame {
    PeerFrame {
        kind: FrameKind::LeaderHints.into(),
        payload: LeaderHints { leaders }.encode_to_vec().into(),
        ..Default::default()
    }
}
