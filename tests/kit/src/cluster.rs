//! [`Cluster`]: brokers inside the test's own process, each behind a [`Proxy`].

use std::time::Duration;

use futures::future::{join_all, try_join_all};
use qute_broker::broker::Broker;
use qute_broker::config::Config;
use qute_client::{BrokerId, Client, ClientConfig, TopicSpec};
use qute_proto::v1::MetadataRequest;
use qute_proto::v1::cluster_client::ClusterClient;
use tempfile::TempDir;
use tokio::time::Instant;

use crate::call::Call;
use crate::error::Error;
use crate::fault::{Fault, Injected};
use crate::ports::Port;
use crate::proxy::Proxy;

/// Long enough for a machine that runs other tests at the same time.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// A cluster of real brokers inside the test's process, with data in temporary directories.
///
/// Clients reach each broker through its [`Proxy`], so every fault can be injected anywhere.
/// Brokers are named by their place, from 0. Needs a tokio runtime of several threads
/// (`#[tokio::test(flavor = "multi_thread")]`): a broker on the only thread of a runtime stands
/// still whenever the test does.
///
/// Dropping it ends the brokers abruptly; [`Cluster::stop`] in order. The data is removed either
/// way.
#[derive(Debug)]
pub struct Cluster {
    members: Vec<Member>,
    /// Removed when the cluster is dropped.
    _dir: TempDir,
}

struct Member {
    config: Config,
    proxy: Proxy,
    broker: Option<Broker>,
    /// Its own port, held while it is down.
    _port: Port,
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Member")
            .field("name", &self.config.name)
            .field("running", &self.broker.is_some())
            .finish_non_exhaustive()
    }
}

impl Cluster {
    /// Starts `brokers` brokers and waits until they are one cluster.
    ///
    /// # Errors
    /// A broker does not start, or the cluster does not form within a minute.
    pub async fn start(brokers: usize) -> Result<Self, Error> {
        Self::start_with(brokers, |_, _| {}).await
    }

    /// The same, with settings changed by `edit`, which gets each broker's place: racks, segment
    /// sizes, election timeouts. Addresses, seeds and the data directory are the kit's.
    ///
    /// # Errors
    /// As [`Cluster::start`].
    pub async fn start_with(
        brokers: usize,
        edit: impl Fn(usize, &mut Config),
    ) -> Result<Self, Error> {
        let dir = tempfile::Builder::new()
            .prefix("qute-test-")
            .tempdir()
            .map_err(Error::io("make a temporary directory"))?;
        let ports = (0..brokers)
            .map(|_| Port::take())
            .collect::<Result<Vec<_>, _>>()
            .map_err(Error::io("take a port"))?;
        let seeds: Vec<String> = ports.iter().map(Port::address).collect();
        let mut members = Vec::new();
        for (place, port) in ports.into_iter().enumerate() {
            let proxy = Proxy::start(port.address())
                .await
                .map_err(Error::io("start a proxy"))?;
            let mut config = Config::default();
            edit(place, &mut config);
            config.name = format!("broker-{place}");
            config.data_dir = dir.path().join(&config.name);
            config.listen = port.address();
            config.gossip = port.address();
            config.advertise = proxy.address();
            config.advertise_peers = port.address();
            config.http = String::new();
            // A broker without seeds is a cluster of one.
            if brokers > 1 {
                config.seeds.clone_from(&seeds);
                config.expect = u32::try_from(brokers).unwrap_or(u32::MAX);
            }
            members.push(Member {
                config,
                proxy,
                broker: None,
                _port: port,
            });
        }
        let starts = members.iter().enumerate().map(start);
        let started = try_join_all(starts).await?;
        for (member, broker) in members.iter_mut().zip(started) {
            member.broker = Some(broker);
        }
        let cluster = Self { members, _dir: dir };
        try_join_all((0..brokers).map(|place| cluster.wait_ready(place))).await?;
        Ok(cluster)
    }

    /// How many brokers there are, running or not.
    #[must_use]
    pub fn brokers(&self) -> usize {
        self.members.len()
    }

    /// The bootstrap list: the proxies' addresses.
    #[must_use]
    pub fn bootstrap(&self) -> String {
        let all: Vec<_> = self.members.iter().map(|m| m.proxy.address()).collect();
        all.join(",")
    }

    /// A client with default settings.
    ///
    /// # Errors
    /// No broker answers.
    pub async fn client(&self) -> Result<Client, Error> {
        let config = ClientConfig::new(&self.bootstrap())?;
        Ok(Client::connect_with(config).await?)
    }

    /// Creates a topic; replicas: three if there are three brokers, else one. Returns when every
    /// partition has a leader.
    ///
    /// # Errors
    /// The brokers refuse or don't answer.
    pub async fn create_topic(&self, name: &str, partitions: u32) -> Result<(), Error> {
        let spec = TopicSpec::new(name).partitions(partitions);
        self.client().await?.create_topic(spec).await?;
        Ok(())
    }

    /// The proxy of broker `place`: its faults and counts.
    ///
    /// # Errors
    /// There is no such broker.
    pub fn proxy(&self, place: usize) -> Result<&Proxy, Error> {
        Ok(&self.member(place)?.proxy)
    }

    /// All proxies, by place.
    pub fn proxies(&self) -> impl Iterator<Item = &Proxy> {
        self.members.iter().map(|member| &member.proxy)
    }

    /// The id of broker `place`.
    ///
    /// # Errors
    /// It does not run.
    pub fn broker_id(&self, place: usize) -> Result<BrokerId, Error> {
        Ok(self.running(place)?.broker_id())
    }

    /// The place of the broker that leads a partition, once there is one that runs. Asks the
    /// brokers themselves, so it works whatever the proxies do and is not counted.
    ///
    /// # Errors
    /// There is none within a minute.
    pub async fn leader_of(&self, topic: &str, partition: u32) -> Result<usize, Error> {
        let end = Instant::now() + PATIENCE;
        loop {
            for member in self.members.iter().filter(|m| m.broker.is_some()) {
                if let Some(leader) = leader_as_told(&member.config.listen, topic, partition).await
                    && let Some(place) = self.place_of(leader)
                {
                    return Ok(place);
                }
            }
            if Instant::now() >= end {
                return Err(in_vain(format!(
                    "a leader of {topic} partition {partition}"
                )));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Ends broker `place` as a crash does: connections break, its port is refused, nothing is
    /// handed over. What it acknowledged stays in its data directory.
    ///
    /// # Errors
    /// It does not run.
    pub async fn kill(&mut self, place: usize) -> Result<(), Error> {
        let member = self.member_mut(place)?;
        let broker = member.broker.take().ok_or(Error::NoBroker {
            broker: place,
            problem: "does not run",
        })?;
        let (_, ()) = tokio::join!(member.proxy.refuse_connections(true), broker.abort());
        member.proxy.reset_connections();
        Ok(())
    }

    /// Starts broker `place` again after [`Cluster::kill`], with the data that it had, and waits
    /// until it is ready.
    ///
    /// # Errors
    /// It runs, does not start, or is not ready within a minute (too few of the others run).
    pub async fn restart(&mut self, place: usize) -> Result<(), Error> {
        self.start_again(place).await?;
        self.wait_ready(place).await
    }

    /// The same without waiting: for one of several that are down.
    ///
    /// # Errors
    /// It runs or does not start.
    pub async fn start_again(&mut self, place: usize) -> Result<(), Error> {
        let member = self.member_mut(place)?;
        if member.broker.is_some() {
            return Err(Error::NoBroker {
                broker: place,
                problem: "runs already",
            });
        }
        member.broker = Some(start((place, member)).await?);
        member.proxy.refuse_connections(false).await;
        Ok(())
    }

    /// Waits until broker `place` serves.
    ///
    /// # Errors
    /// It does not run, or does not serve within a minute.
    pub async fn wait_ready(&self, place: usize) -> Result<(), Error> {
        let ready = self.running(place)?.ready(PATIENCE).await;
        ready.map_err(|waits| in_vain(format!("broker {place}, which waits: {}", waits.join("; "))))
    }

    /// Holds back each answer of whoever leads the partition now: acknowledgements and batches of
    /// this partition alone.
    ///
    /// # Errors
    /// The partition has no leader within a minute.
    pub async fn delay_leader(
        &self,
        topic: &str,
        partition: u32,
        by: Duration,
    ) -> Result<[Injected; 2], Error> {
        let id = self.client().await?.describe_topic(topic).await?.id;
        let place = self.leader_of(topic, partition).await?;
        let proxy = self.proxy(place)?;
        Ok([Call::Produce, Call::Fetch]
            .map(|call| proxy.inject(Fault::delay(call, by).topic(id).partition(partition))))
    }

    /// Stops all brokers in order.
    pub async fn stop(mut self) {
        let brokers = self.members.iter_mut().filter_map(|m| m.broker.take());
        join_all(brokers.map(Broker::shutdown)).await;
    }

    fn place_of(&self, id: u64) -> Option<usize> {
        let is = |member: &Member| {
            let broker = member.broker.as_ref();
            broker.is_some_and(|broker| broker.broker_id().0 == id)
        };
        self.members.iter().position(is)
    }

    fn member(&self, place: usize) -> Result<&Member, Error> {
        self.members.get(place).ok_or_else(|| unknown(place))
    }

    fn member_mut(&mut self, place: usize) -> Result<&mut Member, Error> {
        self.members.get_mut(place).ok_or_else(|| unknown(place))
    }

    fn running(&self, place: usize) -> Result<&Broker, Error> {
        let broker = self.member(place)?.broker.as_ref();
        broker.ok_or(Error::NoBroker {
            broker: place,
            problem: "does not run",
        })
    }
}

fn unknown(place: usize) -> Error {
    Error::NoBroker {
        broker: place,
        problem: "does not exist",
    }
}

fn in_vain(what: String) -> Error {
    Error::Timeout {
        what,
        waited_ms: PATIENCE.as_millis(),
    }
}

async fn start((place, member): (usize, &Member)) -> Result<Broker, Error> {
    let started = Broker::start(member.config.clone()).await;
    started.map_err(|source| Error::Start {
        broker: place,
        source,
    })
}

/// The id of the leader, if the broker there knows one.
async fn leader_as_told(address: &str, topic: &str, partition: u32) -> Option<u64> {
    let mut client = ClusterClient::connect(format!("http://{address}"))
        .await
        .ok()?;
    let request = MetadataRequest {
        topics: vec![topic.to_owned()],
        ..MetadataRequest::default()
    };
    let view = client.metadata(request).await.ok()?.into_inner();
    let topic = view.topics.iter().find(|known| known.name == topic)?;
    let info = topic.partitions.iter().find(|p| p.partition == partition)?;
    (info.leader != 0).then_some(info.leader)
}
