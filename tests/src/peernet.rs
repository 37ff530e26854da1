//! The network between brokers, with cuts: brokers reach each other through plain TCP proxies that know
//! who calls whom.
//!
//! All is loopback, so the caller is found by its process: the port that a connection comes from has an
//! inode (`/proc/net/tcp`), and one of the brokers has that inode open (`/proc/<pid>/fd`). Between two
//! brokers that are cut off from each other nothing flows in either direction, and nothing is said about
//! it, as on a network that drops packets; once the cut is over, what was sent arrives.
//!
//! Gossip goes past it: it decides nothing.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::cluster::Cluster;

const CHUNK_BYTES: usize = 64 * 1024;

/// The proxies before the brokers of a cluster; gone when its runtime is.
#[derive(Debug)]
pub struct PeerNet {
    /// Process ids, by the broker's place.
    pids: Arc<Mutex<Vec<u32>>>,
    cut: watch::Sender<BTreeSet<usize>>,
}

impl PeerNet {
    /// Puts a proxy before each broker of a cluster that has not been started; `advertise` are the
    /// addresses that clients are told. Call [`PeerNet::brokers_run`] after each start.
    ///
    /// # Errors
    /// When there are no ports.
    pub async fn before(cluster: &mut Cluster, advertise: &[String]) -> Result<Self> {
        let net = Self {
            pids: Arc::default(),
            cut: watch::Sender::default(),
        };
        let expect = cluster.nodes.len();
        let mut listeners = Vec::new();
        for node in &mut cluster.nodes {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            listeners.push((listener, node.address()));
        }
        let addresses = listeners.iter().map(|(listener, _)| listener.local_addr());
        let addresses: Vec<SocketAddr> = addresses.collect::<std::io::Result<_>>()?;
        let seeds: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
        for ((node, peers), clients) in cluster.nodes.iter_mut().zip(&seeds).zip(advertise) {
            node.set_seeds(&seeds, Some(expect));
            node.set_extra(&[
                &format!("--advertise={clients}"),
                &format!("--advertise-peers={peers}"),
            ]);
        }
        for (place, (listener, upstream)) in listeners.into_iter().enumerate() {
            let (pids, cut) = (Arc::clone(&net.pids), net.cut.subscribe());
            tokio::spawn(async move {
                while let Ok((stream, from)) = listener.accept().await {
                    let (pids, upstream) = (Arc::clone(&pids), upstream.clone());
                    let cut = cut.clone();
                    tokio::spawn(async move {
                        // Before the brokers' ids are known, nobody is cut off.
                        let pids = pids.lock().unwrap_or_else(PoisonError::into_inner).clone();
                        let caller = pids.iter().position(|&pid| owns(pid, from.port()));
                        let pair = Pair { caller, place, cut };
                        // Either end may go at any time.
                        let _ = pair.join(stream, &upstream).await;
                    });
                }
            });
        }
        Ok(net)
    }

    /// The brokers have been started: their connections from now on are known by whom they are of.
    ///
    /// # Errors
    /// When one doesn't run.
    pub fn brokers_run(&self, cluster: &mut Cluster) -> Result<()> {
        let nodes = cluster.nodes.iter_mut();
        let pids = nodes.map(|node| Ok(node.process()?.pid()));
        let pids = pids.collect::<Result<Vec<u32>>>()?;
        *self.pids.lock().unwrap_or_else(PoisonError::into_inner) = pids;
        Ok(())
    }

    /// Cuts this broker off from all others.
    pub fn cut_off(&self, place: usize) {
        self.cut.send_modify(|cut| {
            cut.insert(place);
        });
    }

    /// Everybody reaches everybody again.
    pub fn heal(&self) {
        self.cut.send_modify(BTreeSet::clear);
    }
}

/// One connection: from whom, if that is known, and to whom.
#[derive(Clone)]
struct Pair {
    caller: Option<usize>,
    place: usize,
    cut: watch::Receiver<BTreeSet<usize>>,
}

impl Pair {
    async fn join(self, caller: TcpStream, upstream: &str) -> Result<()> {
        let broker = TcpStream::connect(upstream).await?;
        caller.set_nodelay(true)?;
        broker.set_nodelay(true)?;
        let (from_caller, to_caller) = caller.into_split();
        let (from_broker, to_broker) = broker.into_split();
        let there = self.clone().pump(from_caller, to_broker);
        let back = self.pump(from_broker, to_caller);
        tokio::select! {
            there = there => there,
            back = back => back,
        }
    }

    async fn pump(mut self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) -> Result<()> {
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let count = from.read(&mut chunk).await?;
            let (caller, place) = (self.caller, self.place);
            let is_whole = |cut: &BTreeSet<usize>| {
                !cut.contains(&place) && caller.is_none_or(|it| !cut.contains(&it))
            };
            self.cut.wait_for(is_whole).await?;
            if count == 0 {
                return Ok(());
            }
            to.write_all(chunk.get(..count).context("a long read")?)
                .await?;
        }
    }
}

/// Whether the process has the connection whose own end is this port of loopback.
fn owns(pid: u32, port: u16) -> bool {
    let Ok(table) = std::fs::read_to_string("/proc/net/tcp") else {
        return false;
    };
    let local = format!("0100007F:{port:04X}");
    let of_port = table.lines().find_map(|line| {
        let mut fields = line.split_whitespace();
        (fields.nth(1)? == local).then_some(())?;
        fields.nth(7).map(str::to_owned)
    });
    let Some(inode) = of_port else { return false };
    let wanted = format!("socket:[{inode}]");
    let open = std::fs::read_dir(format!("/proc/{pid}/fd"));
    open.into_iter()
        .flatten()
        .flatten()
        .any(|entry| std::fs::read_link(entry.path()).is_ok_and(|link| link == Path::new(&wanted)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_is_owned_by_the_process_that_made_it() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let own = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let port = own.local_addr().unwrap().port();
        assert!(owns(std::process::id(), port));
        assert!(!owns(1, port));
        drop(own);
    }
}
