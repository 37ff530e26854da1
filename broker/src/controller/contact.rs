//! Keeps the brokers of a formed cluster in touch while they can't reach each other.
//!
//! Whoever is not connected is probed at the last address heard of, and so are the seeds: that is
//! how brokers find each other again after they were restarted on other ports. A probe tells both
//! sides where the other is, and what others it has heard of. In a healthy cluster this is quiet.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt as _};
use qute_proto::ids::BrokerId;
use qute_proto::internal::{BrokerAddress, ProbeRequest, ProbeResponse};
use qute_proto::v1::ErrorCode;
use tokio::sync::watch;
use tokio::time::Instant;

use super::book::AddressBook;
use super::calls::Calls;
use super::view::ClusterView;
use crate::raft::Peers;

const PROBE_DEADLINE: Duration = Duration::from_secs(2);
/// Between rounds just after the start.
const PAUSE_FIRST: Duration = Duration::from_millis(250);
/// Between looks while everybody is connected.
const PAUSE_QUIET: Duration = Duration::from_secs(1);
/// Between rounds while somebody has been unreachable for long.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// The same trouble is logged this often.
const LOG_EVERY: Duration = Duration::from_secs(30);

/// The task that keeps in touch.
pub struct Contact {
    /// This broker.
    pub me: BrokerAddress,
    /// As configured.
    pub seeds: Vec<String>,
    /// Connections and identity.
    pub peers: Peers,
    /// Makes the probes.
    pub calls: Arc<Calls>,
    /// Where the answers go.
    pub book: Arc<AddressBook>,
    /// Who should be there.
    pub view: watch::Receiver<Arc<ClusterView>>,
    /// Set when this process is refused for good.
    pub fatal: watch::Sender<Option<String>>,
}

impl Contact {
    /// Runs for ever.
    pub async fn run(mut self) {
        let mut changes = self.book.changes();
        let mut pause = PAUSE_FIRST;
        let mut logged: Option<Instant> = None;
        let mut first = true;
        loop {
            let missing = self.missing();
            // The seeds once in any case: one of them may have moved, or have our identity.
            if first || !missing.is_empty() {
                let troubles = self.round(&missing).await;
                first = false;
                let due = logged.is_none_or(|at| at.elapsed() >= LOG_EVERY);
                if !troubles.is_empty() && due {
                    logged = Some(Instant::now());
                    tracing::info!(troubles = troubles.join("; "), "brokers out of reach");
                }
                pause = (pause * 2).min(PAUSE_MAX);
            } else {
                pause = PAUSE_FIRST;
            }
            let wait = if missing.is_empty() {
                PAUSE_QUIET
            } else {
                pause
            };
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                Ok(()) = changes.changed() => tokio::time::sleep(PAUSE_FIRST).await,
                Ok(()) = self.view.changed() => tokio::time::sleep(PAUSE_FIRST).await,
            }
        }
    }

    /// Members that this broker is not connected to.
    fn missing(&self) -> BTreeSet<BrokerId> {
        let view = self.view.borrow();
        if view.brokers.is_empty() {
            // The view is empty until the first entries have come.
            return self
                .book
                .all()
                .iter()
                .map(|b| BrokerId(b.broker_id))
                .collect();
        }
        let own = BrokerId(self.me.broker_id);
        view.brokers
            .keys()
            .filter(|id| **id != own && !self.peers.is_connected(**id))
            .copied()
            .collect()
    }

    async fn round(&self, missing: &BTreeSet<BrokerId>) -> Vec<String> {
        for broker in missing {
            // Nothing to tell, but it makes the connection be tried.
            self.peers.send_hints(*broker, Vec::new());
        }
        let mut targets: BTreeSet<String> = self.seeds.iter().cloned().collect();
        targets.extend(
            missing
                .iter()
                .filter_map(|id| self.book.get(*id))
                .map(|broker| broker.peer_address),
        );
        targets.remove(&self.me.peer_address);
        let request = ProbeRequest {
            hello: Some(self.peers.hello()),
            caller: Some(self.me.clone()),
            expect: 0,
        };
        let mut probes: FuturesUnordered<_> = targets
            .into_iter()
            .map(|address| {
                let request = request.clone();
                async move {
                    let outcome = self.calls.probe(&address, request, PROBE_DEADLINE).await;
                    (address, outcome)
                }
            })
            .collect();
        let mut troubles = Vec::new();
        while let Some((address, outcome)) = probes.next().await {
            match outcome {
                Ok(response) => troubles.extend(self.note(&address, response)),
                Err(error) => troubles.push(error.to_string()),
            }
        }
        troubles
    }

    fn note(&self, address: &str, response: ProbeResponse) -> Option<String> {
        if let Some(error) = response.error {
            if error.code() == ErrorCode::InvalidArgument {
                // S23: this process has a copy of somebody's data directory.
                self.fatal.send_replace(Some(error.message.clone()));
            }
            return Some(format!("{address} refuses this broker: {}", error.message));
        }
        let hello = response.hello.unwrap_or_default();
        if hello.broker_id == self.me.broker_id {
            return None;
        }
        let ours = self
            .peers
            .cluster()
            .map(qute_proto::ids::ClusterId::to_wire);
        if Some(&hello.cluster_id) != ours.as_ref() {
            let theirs = qute_proto::ids::ClusterId::from_wire(&hello.cluster_id);
            return Some(match theirs {
                Some(theirs) => format!("{address} belongs to another cluster ({theirs})"),
                None => format!("{address} belongs to no cluster yet"),
            });
        }
        for broker in response.known.iter().chain(&response.broker) {
            self.book.learn(broker);
        }
        None
    }
}
