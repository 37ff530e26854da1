//! A cluster of whole brokers for the tests beside this file.

use std::collections::{HashMap, HashSet};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::path::PathBuf;
use std::time::Duration;

use parking_lot::Mutex;
use qute_proto::v1::cluster_client::ClusterClient;
use qute_proto::v1::{CreateTopicRequest, MetadataRequest, TopicInfo};
use tempfile::TempDir;
use tonic::transport::{Channel, Endpoint};

use super::super::Broker;
use crate::config::Config;

/// A test that waits longer than this has failed.
pub(super) const LONG: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);

/// Below the ports that the kernel gives to outgoing connections, above those of `tests/kit/src/ports.rs`.
const PORTS: std::ops::Range<u16> = 31_000..32_700;

/// A port that is free for TCP and UDP and that no other test of this process was given.
fn free_port() -> u16 {
    static GIVEN: Mutex<Option<HashSet<u16>>> = Mutex::new(None);
    loop {
        let port = rand::random_range(PORTS);
        let is_free = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
            && UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
        if is_free && GIVEN.lock().get_or_insert_default().insert(port) {
            return port;
        }
    }
}

/// Waits until `check` holds.
pub(super) async fn until(what: &str, mut check: impl FnMut() -> bool) {
    found(what, async || check().then_some(())).await;
}

/// Waits until `look` finds something.
pub(super) async fn found<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let end = tokio::time::Instant::now() + LONG;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(
            tokio::time::Instant::now() < end,
            "waited in vain for: {what}"
        );
        tokio::time::sleep(POLL).await;
    }
}

/// A client's connection to an address.
pub(super) async fn connect(address: &str) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    tokio::time::timeout(LONG, async {
        loop {
            match endpoint.connect().await {
                Ok(channel) => return channel,
                Err(_) => tokio::time::sleep(POLL).await,
            }
        }
    })
    .await
    .unwrap()
}

/// The brokers of one cluster; `None` while one is stopped.
pub(super) struct Cluster {
    pub(super) brokers: Vec<Option<Broker>>,
    configs: Vec<Config>,
    _dir: TempDir,
}

impl Cluster {
    /// Three brokers, formed and ready. `adjust` changes the settings of each before it starts.
    pub(super) async fn start(adjust: impl Fn(usize, &mut Config)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let ports: Vec<u16> = (0..3).map(|_| free_port()).collect();
        let seeds: Vec<String> = ports
            .iter()
            .map(|port| format!("127.0.0.1:{port}"))
            .collect();
        let config = |(at, address): (usize, &String)| {
            let mut config = Config {
                name: format!("b{at}"),
                data_dir: data_dir(&dir, at),
                listen: address.clone(),
                http: String::new(),
                seeds: seeds.clone(),
                expect: 3,
                ..Config::default()
            };
            adjust(at, &mut config);
            config
        };
        let configs: Vec<Config> = seeds.iter().enumerate().map(config).collect();
        let starting = configs.iter().cloned().map(Broker::start);
        let started = futures::future::join_all(starting).await;
        let cluster = Self {
            brokers: started.into_iter().map(Result::ok).collect(),
            configs,
            _dir: dir,
        };
        cluster.ready().await;
        cluster
    }

    /// Until all that run are ready.
    pub(super) async fn ready(&self) {
        for broker in self.brokers.iter().flatten() {
            broker.ready(LONG).await.unwrap();
        }
    }

    pub(super) fn broker(&self, at: usize) -> &Broker {
        self.brokers[at].as_ref().unwrap()
    }

    /// Where a broker listens, whether or not it runs.
    pub(super) fn address(&self, at: usize) -> &str {
        &self.configs[at].listen
    }

    /// Administration through one broker.
    pub(super) async fn admin(&self, at: usize) -> ClusterClient<Channel> {
        ClusterClient::new(connect(self.address(at)).await)
    }

    /// The broker that leads `__cluster`, as `at` sees it.
    pub(super) fn controller_seen_by(&self, at: usize) -> Option<usize> {
        let leader = self.broker(at).controller.controller()?.broker_id;
        let is_leader = |broker: &Option<Broker>| {
            let broker = broker.as_ref();
            broker.is_some_and(|broker| broker.broker_id().0 == leader)
        };
        self.brokers.iter().position(is_leader)
    }

    /// A topic with three replicas, once all of its partitions have a leader in every view.
    pub(super) async fn create_topic(&self, name: &str, partitions: u32) -> TopicInfo {
        let end = tokio::time::Instant::now() + LONG;
        let index = loop {
            let leader = self.controller_seen_by(0).unwrap_or(0);
            let request = CreateTopicRequest {
                name: name.to_owned(),
                partitions,
                replicas: 3,
                config: HashMap::from([("segment_bytes".to_owned(), "65536".to_owned())]),
            };
            let answer = self.admin(leader).await.create_topic(request).await;
            let answer = answer.unwrap().into_inner();
            match answer.error {
                None => break answer.cluster_index,
                Some(error) => assert!(tokio::time::Instant::now() < end, "{error:?}"),
            }
        };
        let mut led = None;
        for at in 0..self.brokers.len() {
            led = Some(self.led_topic(at, name, index).await);
        }
        led.unwrap()
    }

    /// The topic as one broker sees it from that index on, once all partitions have leaders.
    pub(super) async fn led_topic(&self, at: usize, name: &str, index: u64) -> TopicInfo {
        let mut admin = self.admin(at).await;
        let end = tokio::time::Instant::now() + LONG;
        loop {
            let request = MetadataRequest {
                min_cluster_index: index,
                topics: vec![name.to_owned()],
                authoritative: false,
            };
            let view = admin.metadata(request).await.unwrap().into_inner();
            let topic = view.topics.into_iter().next();
            if let Some(topic) = topic
                && topic.partitions.iter().all(|one| one.leader != 0)
            {
                return topic;
            }
            assert!(tokio::time::Instant::now() < end, "no leaders");
            tokio::time::sleep(POLL).await;
        }
    }

    pub(super) async fn abort(&mut self, at: usize) {
        self.brokers[at].take().unwrap().abort().await;
    }

    /// Starts a stopped broker again, with the same settings.
    pub(super) async fn restart(&mut self, at: usize) {
        let broker = Broker::start(self.configs[at].clone()).await.unwrap();
        self.brokers[at] = Some(broker);
    }

    pub(super) async fn shutdown(self) {
        let running = self.brokers.into_iter().flatten();
        futures::future::join_all(running.map(Broker::shutdown)).await;
    }
}

fn data_dir(dir: &TempDir, at: usize) -> PathBuf {
    dir.path().join(at.to_string())
}
