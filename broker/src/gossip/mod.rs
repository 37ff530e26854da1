//! Who is alive: foca (SWIM) over UDP. Hints only; nothing durable is decided here.
//!
//! One task ([`Gossip::start`]) owns the socket, foca and its timers. It publishes a
//! [`Members`] picture in a watch whenever something changed. The layer above tells it which
//! brokers exist and where ([`Introducer::introduce`]); it keeps announcing itself to those that it
//! does not know as alive.
//!
//! A killed broker is suspected within two probe periods and given up [`SUSPICION`] later: about
//! three to four seconds in all. A broker that leaves says so and is known as gone at once.

mod wire;

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};
use std::io;
use std::net::SocketAddr;
use std::num::{NonZeroU8, NonZeroUsize};
use std::sync::Arc;
use std::time::Duration;

use foca::{AccumulatingRuntime, Foca, PeriodicParams, PostcardCodec, State, Timer};
use qute_proto::ids::{BrokerId, ClusterId};
use rand::rngs::StdRng;
use tokio::net::UdpSocket;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

pub use wire::Identity;
use wire::{DATAGRAM_BYTES_MAX, PACKET_BYTES_MAX};

/// How often a member probes another.
const PROBE_PERIOD: Duration = Duration::from_millis(500);
/// How long a direct answer may take before others are asked to probe.
const PROBE_RTT: Duration = Duration::from_millis(200);
/// How long a suspect may take to object.
const SUSPICION: Duration = Duration::from_millis(2500);
/// How often a broker announces itself to those it should know and doesn't.
const ANNOUNCE_PERIOD: Duration = Duration::from_secs(1);
/// Unknown brokers announced to in one period, at most.
const ANNOUNCE_MAX: usize = 16;
/// Clean leaving is told this many times: datagrams get lost.
const LEAVE_ROUNDS: usize = 2;
/// Requests from the layer above that may wait.
const REQUESTS_MAX: usize = 16;

/// What gossip says of a broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// It answers.
    Alive,
    /// Somebody got no answer lately.
    Suspect,
    /// Given up, or gone by its own word.
    Dead,
}

/// A broker as gossip knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Whether it is there.
    pub liveness: Liveness,
    /// Which of its lives this is about.
    pub boot: u64,
    /// Where it receives gossip.
    pub address: SocketAddr,
}

/// All brokers that gossip has heard of, the local one not included.
pub type Members = BTreeMap<BrokerId, Member>;

/// A broker that gossip should get to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Which one.
    pub broker: BrokerId,
    /// Its last known start counter.
    pub boot: u64,
    /// Where it receives gossip.
    pub address: SocketAddr,
}

/// Who this broker is in gossip.
#[derive(Clone, Copy, Debug)]
pub struct Local {
    /// The cluster; datagrams of others are dropped.
    pub cluster: ClusterId,
    /// This broker.
    pub broker: BrokerId,
    /// Its start counter.
    pub boot: u64,
    /// Where others reach its gossip.
    pub address: SocketAddr,
}

#[derive(Debug)]
enum Request {
    Introduce(Vec<Peer>),
    Leave(oneshot::Sender<()>),
}

/// A running gossip task. Dropping it stops the task without a word to the others.
#[derive(Debug)]
pub struct Gossip {
    requests: mpsc::Sender<Request>,
    members: watch::Receiver<Arc<Members>>,
    task: JoinHandle<()>,
}

impl Gossip {
    /// Starts gossiping on a bound socket.
    #[must_use]
    pub fn start(socket: UdpSocket, local: Local) -> Self {
        let (requests, inbox) = mpsc::channel(REQUESTS_MAX);
        let (published, members) = watch::channel(Arc::default());
        let identity = Identity::new(local.broker, local.boot, local.address);
        let task = Task {
            foca: Foca::new(identity, settings(), rand::make_rng(), PostcardCodec),
            runtime: AccumulatingRuntime::new(),
            timers: BinaryHeap::new(),
            submitted: 0,
            peers: Vec::new(),
            socket,
            cluster: local.cluster,
            published,
        };
        Self {
            requests,
            members,
            task: tokio::spawn(task.run(inbox)),
        }
    }

    /// Follows who is alive.
    #[must_use]
    pub fn members(&self) -> watch::Receiver<Arc<Members>> {
        self.members.clone()
    }

    /// What tells this task of other brokers.
    #[must_use]
    pub fn introducer(&self) -> Introducer {
        Introducer {
            requests: self.requests.clone().downgrade(),
        }
    }

    /// Tells the others that this broker goes, and stops. The socket is closed on return.
    pub async fn leave(self) {
        let (done, told) = oneshot::channel();
        if self.requests.send(Request::Leave(done)).await.is_ok() {
            let _ = told.await;
        }
        // A panic was printed when it happened.
        let _ = self.task.await;
    }

    /// Stops without a word to the others. The socket is closed on return.
    pub async fn abort(self) {
        self.task.abort();
        // It was told to end.
        let _ = self.task.await;
    }
}

/// Tells a gossip task which brokers exist. Does not keep it running.
#[derive(Clone, Debug)]
pub struct Introducer {
    requests: mpsc::WeakSender<Request>,
}

impl Introducer {
    /// Replaces the list of brokers that ought to be known.
    ///
    /// # Cancel safety
    /// A dropped call may not have been heard.
    pub async fn introduce(&self, peers: Vec<Peer>) {
        // A stopped task has nobody to introduce anybody to.
        if let Some(requests) = self.requests.upgrade() {
            let _ = requests.send(Request::Introduce(peers)).await;
        }
    }
}

fn settings() -> foca::Config {
    let periodic = |frequency, members| {
        Some(PeriodicParams {
            frequency,
            num_members: NonZeroUsize::new(members).unwrap_or(NonZeroUsize::MIN),
        })
    };
    foca::Config {
        probe_period: PROBE_PERIOD,
        probe_rtt: PROBE_RTT,
        suspect_to_down_after: SUSPICION,
        max_transmissions: NonZeroU8::new(8).unwrap_or(NonZeroU8::MIN),
        max_packet_size: NonZeroUsize::new(PACKET_BYTES_MAX).unwrap_or(NonZeroUsize::MIN),
        notify_down_members: true,
        periodic_announce: periodic(Duration::from_secs(10), 1),
        periodic_announce_to_down_members: periodic(Duration::from_secs(5), 2),
        periodic_gossip: periodic(Duration::from_millis(200), 3),
        ..foca::Config::simple()
    }
}

/// A foca timer in the heap: earliest first, then in foca's own order, then first submitted.
struct Due {
    at: Instant,
    submitted: u64,
    timer: Timer<Identity>,
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        // Reversed: the heap gives its greatest.
        other
            .at
            .cmp(&self.at)
            .then_with(|| other.timer.cmp(&self.timer))
            .then_with(|| other.submitted.cmp(&self.submitted))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Due {}

struct Task {
    foca: Foca<Identity, PostcardCodec, StdRng, foca::NoCustomBroadcast>,
    runtime: AccumulatingRuntime<Identity>,
    timers: BinaryHeap<Due>,
    submitted: u64,
    peers: Vec<Peer>,
    socket: UdpSocket,
    cluster: ClusterId,
    published: watch::Sender<Arc<Members>>,
}

impl Task {
    async fn run(mut self, mut inbox: mpsc::Receiver<Request>) {
        let mut datagram = [0; DATAGRAM_BYTES_MAX + 1];
        let mut announce = tokio::time::interval(ANNOUNCE_PERIOD);
        announce.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let due = self.timers.peek().map(|due| due.at);
            let alarm = async {
                match due {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                request = inbox.recv() => match request {
                    Some(Request::Introduce(peers)) => {
                        self.peers = peers;
                        self.announce();
                    }
                    Some(Request::Leave(done)) => {
                        self.leave().await;
                        let _ = done.send(());
                        return;
                    }
                    None => return,
                },
                received = self.socket.recv_from(&mut datagram) => match received {
                    Ok((length, _from)) => {
                        self.receive(datagram.get(..length).unwrap_or_default());
                    }
                    // An ICMP error of an earlier datagram, most likely: the peer is down, which
                    // the probes will find out.
                    Err(error) => self.receive_failed(&error).await,
                },
                () = alarm => self.fire(),
                _ = announce.tick() => self.announce(),
            }
            self.settle().await;
        }
    }

    fn receive(&mut self, datagram: &[u8]) {
        let Some(packet) = wire::open(self.cluster, datagram) else {
            metrics::counter!("qute_gossip_datagrams_dropped_total").increment(1);
            return;
        };
        if let Err(error) = self.foca.handle_data(packet, &mut self.runtime) {
            tracing::debug!(%error, "a gossip packet was not understood");
        }
    }

    async fn receive_failed(&self, error: &io::Error) {
        if error.kind() != io::ErrorKind::ConnectionRefused {
            tracing::warn!(%error, "receiving gossip failed");
            // Whatever it is, it may well be there again at once.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    fn fire(&mut self) {
        let now = Instant::now();
        while self.timers.peek().is_some_and(|due| due.at <= now) {
            let Some(due) = self.timers.pop() else { break };
            if let Err(error) = self.foca.handle_timer(due.timer, &mut self.runtime) {
                tracing::debug!(%error, "a gossip timer was late");
            }
        }
    }

    /// Announces this broker to those it should know as alive and doesn't.
    fn announce(&mut self) {
        let known = Arc::clone(&self.published.borrow());
        let unknown = self.peers.iter().filter(|peer| {
            known
                .get(&peer.broker)
                .is_none_or(|member| member.liveness == Liveness::Dead)
        });
        for peer in unknown.take(ANNOUNCE_MAX) {
            let to = Identity::new(peer.broker, peer.boot, peer.address);
            if let Err(error) = self.foca.announce(to, &mut self.runtime) {
                tracing::debug!(%error, "could not announce this broker");
            }
        }
    }

    async fn leave(&mut self) {
        if let Err(error) = self.foca.leave_cluster(&mut self.runtime) {
            tracing::debug!(%error, "could not leave the gossip");
        }
        for _ in 0..LEAVE_ROUNDS {
            let _ = self.foca.gossip(&mut self.runtime);
        }
        self.settle().await;
    }

    /// Carries out what foca wants done, and publishes what has changed.
    async fn settle(&mut self) {
        while let Some((to, packet)) = self.runtime.to_send() {
            let datagram = wire::seal(self.cluster, &packet);
            // A lost datagram is what the protocol is made for.
            if let Err(error) = self.socket.send_to(&datagram, to.address()).await {
                tracing::trace!(%error, to = %to.address(), "a gossip datagram was not sent");
            }
        }
        let now = Instant::now();
        while let Some((after, timer)) = self.runtime.to_schedule() {
            self.submitted += 1;
            self.timers.push(Due {
                at: now + after,
                submitted: self.submitted,
                timer,
            });
        }
        let mut changed = false;
        while self.runtime.to_notify().is_some() {
            changed = true;
        }
        // Suspicion comes without a notification, so the picture is compared, not only notified.
        let members = self.picture();
        if changed || **self.published.borrow() != members {
            self.published.send_if_modified(|published| {
                let differs = **published != members;
                if differs {
                    log_changes(published, &members);
                    *published = Arc::new(members);
                }
                differs
            });
        }
    }

    fn picture(&self) -> Members {
        self.foca
            .iter_membership_state()
            .map(|member| {
                let id = member.id();
                let liveness = match member.state() {
                    State::Alive => Liveness::Alive,
                    State::Suspect => Liveness::Suspect,
                    State::Down => Liveness::Dead,
                };
                let member = Member {
                    liveness,
                    boot: id.boot(),
                    address: id.address(),
                };
                (id.broker(), member)
            })
            .filter(|(broker, _)| *broker != self.foca.identity().broker())
            .collect()
    }
}

fn log_changes(before: &Members, after: &Members) {
    for (broker, member) in after {
        let was = before.get(broker).map(|member| member.liveness);
        if was == Some(member.liveness) {
            continue;
        }
        match member.liveness {
            Liveness::Alive if was == Some(Liveness::Suspect) => {
                tracing::debug!(%broker, "gossip: no longer suspected");
            }
            Liveness::Alive => tracing::info!(%broker, address = %member.address, "gossip: alive"),
            Liveness::Suspect => tracing::debug!(%broker, "gossip: suspected"),
            Liveness::Dead => tracing::warn!(%broker, "gossip: dead or gone"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn start(cluster: u128, broker: u64, boot: u64) -> (Gossip, Peer) {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let local = Local {
            cluster: ClusterId(uuid::Uuid::from_u128(cluster)),
            broker: BrokerId(broker),
            boot,
            address,
        };
        let peer = Peer {
            broker: BrokerId(broker),
            boot,
            address,
        };
        (Gossip::start(socket, local), peer)
    }

    async fn sees(gossip: &Gossip, broker: u64, liveness: Liveness, boot: u64) {
        let mut members = gossip.members();
        let wanted = |members: &Arc<Members>| {
            members
                .get(&BrokerId(broker))
                .is_some_and(|m| m.liveness == liveness && m.boot == boot)
        };
        tokio::time::timeout(Duration::from_secs(30), members.wait_for(wanted))
            .await
            .unwrap_or_else(|_| panic!("{:?}", gossip.members().borrow()))
            .unwrap();
    }

    #[tokio::test]
    async fn three_brokers_find_each_other_through_one() {
        let (a, peer_a) = start(1, 1, 1).await;
        let (b, _) = start(1, 2, 1).await;
        let (c, _) = start(1, 3, 1).await;
        b.introducer().introduce(vec![peer_a]).await;
        c.introducer().introduce(vec![peer_a]).await;
        sees(&a, 2, Liveness::Alive, 1).await;
        sees(&b, 3, Liveness::Alive, 1).await;
        sees(&c, 2, Liveness::Alive, 1).await;
    }

    #[tokio::test]
    async fn broker_that_leaves_is_dead_at_once_and_alive_after_its_restart() {
        let (a, peer_a) = start(1, 1, 1).await;
        let (b, peer_b) = start(1, 2, 1).await;
        a.introducer().introduce(vec![peer_b]).await;
        sees(&a, 2, Liveness::Alive, 1).await;
        sees(&b, 1, Liveness::Alive, 1).await;
        b.leave().await;
        sees(&a, 2, Liveness::Dead, 1).await;
        let (b, _) = start(1, 2, 2).await;
        b.introducer().introduce(vec![peer_a]).await;
        sees(&a, 2, Liveness::Alive, 2).await;
        sees(&b, 1, Liveness::Alive, 1).await;
    }

    #[tokio::test]
    async fn killed_broker_is_found_dead_within_seconds() {
        let (a, _) = start(1, 1, 1).await;
        let (b, peer_b) = start(1, 2, 1).await;
        a.introducer().introduce(vec![peer_b]).await;
        sees(&a, 2, Liveness::Alive, 1).await;
        drop(b);
        a.introducer().introduce(vec![]).await;
        let killed = Instant::now();
        sees(&a, 2, Liveness::Dead, 1).await;
        let took = killed.elapsed();
        assert!(took < Duration::from_secs(10), "{took:?}");
    }

    #[tokio::test]
    async fn strangers_and_noise_are_dropped_and_gossip_goes_on() {
        let (a, peer_a) = start(1, 1, 1).await;
        let (stranger, _) = start(2, 9, 1).await;
        stranger.introducer().introduce(vec![peer_a]).await;
        let noise = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        for length in [0, 1, 23, 24, 25, 1304, 1305, 4000] {
            noise
                .send_to(&vec![0xa5; length], peer_a.address)
                .await
                .unwrap();
        }
        let (b, _) = start(1, 2, 1).await;
        b.introducer().introduce(vec![peer_a]).await;
        sees(&a, 2, Liveness::Alive, 1).await;
        assert!(!a.members().borrow().contains_key(&BrokerId(9)));
        assert!(stranger.members().borrow().is_empty());
    }
}
