//! What a member of a cluster runs: the tasks behind [`super::Controller`], in the order in which
//! they start.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;

use qute_proto::ids::BrokerId;
use qute_proto::internal::GroupLeader;
use tokio::sync::mpsc;

use super::book::AddressBook;
use super::contact::Contact;
use super::duties;
use super::facade::{Inner, spawn};
use super::forming::machine::Formed;
use super::hosting::LocalReplicas;
use super::leaders::{self, HintLink};
use super::proposer::Reporter;
use super::reconciler;
use crate::gossip::{self, Gossip};
use crate::raft::{GroupHandle, GroupId, GroupSpec, LogUse, Peers};
use crate::storage::{Durability, LogConfig};

/// Segments of internal topics.
const CLUSTER_SEGMENT_BYTES: u64 = 16 << 20;
/// Replicas opened at once that may wait to be followed.
const OPENED_MAX: usize = 64;

/// Forming, then everything that a member does.
pub(super) async fn run(inner: Arc<Inner>) {
    let formed = match inner.former.run().await {
        Ok(formed) => formed,
        Err(error) => {
            inner.fatal.send_replace(Some(error.to_string()));
            return;
        }
    };
    inner.peers.set_cluster(formed.cluster);
    let Some(machine) = inner.machine.lock().take() else {
        return;
    };
    let (opened, following) = mpsc::channel(OPENED_MAX);
    let link = PeerLink {
        peers: inner.peers.clone(),
        book: Arc::clone(&inner.book),
    };
    let table = Arc::clone(&inner.leaders);
    inner
        .peers
        .on_hints(Arc::new(move |_from, hints| table.learn_hints(&hints)));
    spawn(
        &inner,
        leaders::run(Arc::clone(&inner.leaders), link, following),
    );

    let spec = GroupSpec {
        id: GroupId::CLUSTER,
        replica: formed.replica,
        log: LogConfig {
            segment_bytes: CLUSTER_SEGMENT_BYTES,
            durability: Durability::Disk,
        },
        log_use: LogUse::Commands,
    };
    // What was known before the restart, for the first addresses.
    if let Some(set) = &formed.founding {
        set.brokers
            .iter()
            .for_each(|broker| inner.book.learn(broker));
    }
    let handle = match inner.groups.open(spec, machine).await {
        Ok(handle) => handle,
        Err(error) => {
            let text = format!("the controller's replica does not open: {error}");
            inner.fatal.send_replace(Some(text));
            return;
        }
    };
    duties::elect_if_alone(&handle).await;
    spawn(&inner, keep_addresses(Arc::clone(&inner)));
    let _ = opened.send(handle.clone()).await;
    inner.cluster.send_replace(Some(handle.clone()));
    start_gossip(&inner, &formed).await;
    start_duties(&inner, &handle, &formed);
    start_reconciler(&inner, opened);
}

fn start_duties(inner: &Arc<Inner>, handle: &GroupHandle, formed: &Formed) {
    if let Some(set) = formed.founding.clone() {
        let founded = inner.view.borrow().cluster_id.is_some();
        spawn(inner, duties::initialize(handle.clone(), set, founded));
    }
    let lead = duties::lead(
        handle.clone(),
        formed.founding.clone(),
        Arc::clone(&inner.proposer),
        inner.view.clone(),
    );
    spawn(inner, lead);
    let contact = Contact {
        me: inner.me.clone(),
        seeds: inner.seeds.clone(),
        peers: inner.peers.clone(),
        calls: Arc::clone(&inner.calls),
        book: Arc::clone(&inner.book),
        view: inner.view.clone(),
        fatal: inner.fatal.clone(),
    };
    spawn(inner, contact.run());
    let register = duties::register(
        inner.me.clone(),
        Arc::clone(&inner.proposer),
        inner.view.clone(),
    );
    let fatal = inner.fatal.clone();
    spawn(inner, async move {
        let reason = register.await;
        fatal.send_replace(Some(reason));
    });
    let mut refused = inner.peers.watch_refused();
    let fatal = inner.fatal.clone();
    spawn(inner, async move {
        // S23: a peer that has seen another process under this identity.
        let reason = refused
            .wait_for(Option::is_some)
            .await
            .map(|reason| reason.clone());
        if let Ok(reason) = reason {
            fatal.send_replace(reason);
        }
    });
}

fn start_reconciler(inner: &Arc<Inner>, opened: mpsc::Sender<GroupHandle>) {
    let host = LocalReplicas {
        records: Arc::clone(&inner.records),
        groups: Arc::clone(&inner.group_replicas),
        store: inner.store.clone(),
        opened,
    };
    let reconciler = reconciler::run(
        inner.me_id(),
        host,
        Reporter(Arc::clone(&inner.proposer)),
        inner.view.clone(),
        inner.leaders.changes(),
        inner.progress.clone(),
    );
    spawn(inner, reconciler);
}

async fn start_gossip(inner: &Arc<Inner>, formed: &Formed) {
    let Some(socket) = inner.gossip_socket.lock().take() else {
        return;
    };
    let address = match resolve(&inner.me.gossip_address).await {
        Some(address) => address,
        None => match socket.local_addr() {
            Ok(address) => address,
            Err(error) => {
                tracing::error!(%error, "gossip does not run");
                return;
            }
        },
    };
    let local = gossip::Local {
        cluster: formed.cluster,
        broker: inner.me_id(),
        boot: inner.me.boot,
        address,
    };
    let running = Gossip::start(socket, local);
    let mut heard = running.members();
    *inner.gossip.lock() = Some(running);
    let members = inner.members.clone();
    spawn(inner, async move {
        loop {
            let now = Arc::clone(&heard.borrow_and_update());
            members.send_replace(now);
            if heard.changed().await.is_err() {
                return;
            }
        }
    });
    spawn(inner, introduce(Arc::clone(inner)));
}

/// Tells gossip where brokers are.
async fn introduce(inner: Arc<Inner>) {
    let mut changes = inner.book.changes();
    loop {
        changes.borrow_and_update();
        let mut peers = Vec::new();
        for broker in inner.book.all() {
            if let Some(address) = resolve(&broker.gossip_address).await {
                peers.push(gossip::Peer {
                    broker: BrokerId(broker.broker_id),
                    boot: broker.boot,
                    address,
                });
            }
        }
        let told = inner
            .gossip
            .lock()
            .as_ref()
            .map(|gossip| gossip.introducer());
        if let Some(introducer) = told {
            introducer.introduce(peers).await;
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}

async fn resolve(address: &str) -> Option<SocketAddr> {
    tokio::net::lookup_host(address).await.ok()?.next()
}

/// Keeps the address book and the peers' addresses up to date with the view.
async fn keep_addresses(inner: Arc<Inner>) {
    let mut view = inner.view.clone();
    let mut changes = inner.book.changes();
    loop {
        let now = Arc::clone(&view.borrow_and_update());
        changes.borrow_and_update();
        inner.book.learn_members(&now);
        if now.cluster_id.is_some() {
            inner.leaders.keep_existing(&now);
            inner.deleted.learn(&now);
        }
        for broker in now
            .brokers
            .values()
            .filter(|broker| broker.id != inner.me_id())
        {
            // S23: the cluster's own record of starts.
            inner
                .peers
                .remember_boot(broker.id, broker.boot, broker.process_id);
        }
        // Whoever was heard of while forming and is no member is not to be connected to.
        let is_member = |id: &BrokerId| now.cluster_id.is_none() || now.brokers.contains_key(id);
        let addresses: HashMap<BrokerId, String> = inner
            .book
            .all()
            .into_iter()
            .map(|broker| (BrokerId(broker.broker_id), broker.peer_address))
            .filter(|(id, _)| is_member(id))
            .collect();
        inner.peers.set_addresses(addresses);
        tokio::select! {
            changed = view.changed() => {
                if changed.is_err() {
                    return;
                }
            }
            Ok(()) = changes.changed() => {}
        }
    }
}

struct PeerLink {
    peers: Peers,
    book: Arc<AddressBook>,
}

impl HintLink for PeerLink {
    fn send(&self, broker: BrokerId, leaders: Vec<GroupLeader>) -> bool {
        self.peers.send_hints(broker, leaders)
    }

    fn broadcast(&self, leaders: Vec<GroupLeader>) {
        self.peers.broadcast_hints(leaders);
    }

    fn connected(&self) -> BTreeSet<BrokerId> {
        let all = self.book.all();
        let ids = all.iter().map(|broker| BrokerId(broker.broker_id));
        ids.filter(|id| self.peers.is_connected(*id)).collect()
    }
}
