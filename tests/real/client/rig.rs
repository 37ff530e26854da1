//! Brokers behind proxies, and what the tests check.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use futures::StreamExt;
use qute_client::{Client, ClientConfig, ConsumedRecord, Position, TopicSpec};
use qute_proto::v1::cluster_client::ClusterClient;
use qute_proto::v1::{MetadataRequest, MetadataResponse};
use qute_test::{Call, Proxy};
use qute_tests::cluster::Cluster;
use qute_tests::wait;
use tokio::runtime::Runtime;
use tokio::time::Instant;

use crate::bins;

/// A test that takes longer has failed.
const LIMIT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(20);

/// A cluster whose brokers clients reach through proxies.
pub(super) struct Rig {
    pub(super) cluster: Cluster,
    /// By the broker's place.
    pub(super) proxies: Vec<Proxy>,
    pub(super) runtime: Runtime,
}

/// Who leads a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Leader {
    pub(super) place: usize,
    pub(super) id: u64,
    pub(super) epoch: u64,
}

impl Rig {
    pub(super) fn start(brokers: usize) -> Result<Self> {
        let runtime = Runtime::new()?;
        let mut cluster = Cluster::prepare(&bins(), brokers)?;
        let mut proxies = Vec::new();
        for node in &mut cluster.nodes {
            let own = node.address();
            let proxy = runtime.block_on(Proxy::start(own.as_str()))?;
            node.set_extra(&[
                &format!("--advertise={}", proxy.address()),
                &format!("--advertise-peers={own}"),
            ]);
            proxies.push(proxy);
        }
        cluster.start_all()?;
        Ok(Self {
            cluster,
            proxies,
            runtime,
        })
    }

    pub(super) fn bootstrap(&self) -> String {
        let all: Vec<String> = self.proxies.iter().map(Proxy::address).collect();
        all.join(",")
    }

    /// Runs the test's own part, against a limit.
    pub(super) fn run<T>(&self, test: impl Future<Output = Result<T>>) -> Result<T> {
        limited(&self.runtime, test)
    }

    pub(super) fn client(&self) -> Result<Client> {
        self.run(self.connect())
    }

    pub(super) async fn connect(&self) -> Result<Client> {
        let config = ClientConfig::new(&self.bootstrap())?.call_timeout(Duration::from_secs(60));
        Ok(Client::connect_with(config).await?)
    }

    pub(super) fn create_topic(&self, name: &str, partitions: u32) -> Result<()> {
        let client = self.client()?;
        let spec = TopicSpec::new(name).partitions(partitions);
        self.run(async { Ok(client.create_topic(spec).await.map(drop)?) })
    }

    /// The view of broker `place`, asked behind its proxy's back.
    pub(super) fn view(&self, place: usize) -> Result<MetadataResponse> {
        let node = self.cluster.nodes.get(place).context("no such broker")?;
        let address = format!("http://{}", node.address());
        self.runtime.block_on(async {
            let asked = async {
                let mut client = ClusterClient::connect(address).await?;
                let view = client.metadata(MetadataRequest::default()).await?;
                Ok(view.into_inner())
            };
            tokio::time::timeout(Duration::from_secs(1), asked).await?
        })
    }

    /// Waits until broker `asked` knows a leader of the partition other than the one at `not`.
    pub(super) fn leader_as_seen_by(
        &self,
        asked: usize,
        topic: &str,
        partition: u32,
        not: Option<usize>,
    ) -> Result<Leader> {
        let what = format!("a leader of {topic} partition {partition}");
        wait::until(&what, wait::LONG, || {
            let found = leader_in(&self.view(asked)?, topic, partition);
            Ok(found.filter(|leader| Some(leader.place) != not))
        })
    }

    pub(super) fn leader(&self, topic: &str, partition: u32) -> Result<Leader> {
        self.leader_as_seen_by(0, topic, partition, None)
    }

    /// The brokers' ids, by place.
    pub(super) fn broker_ids(&self) -> Result<Vec<u64>> {
        let view = self.view(0)?;
        let names = self.cluster.nodes.iter().map(|node| node.name());
        let id_of = |name: &str| {
            let broker = view.brokers.iter().find(|broker| broker.name == name);
            broker.map(|broker| broker.broker_id)
        };
        names
            .map(|name| id_of(name).context("a broker that is not registered"))
            .collect()
    }

    /// Over all proxies.
    pub(super) fn count(&self, call: Call) -> u64 {
        self.proxies.iter().map(|proxy| proxy.count(call)).sum()
    }

    pub(super) fn restart_counts(&self) {
        for proxy in &self.proxies {
            proxy.restart_counts();
        }
    }

    pub(super) fn stop(self) -> Result<()> {
        self.cluster.stop()
    }
}

pub(super) fn limited<T>(runtime: &Runtime, test: impl Future<Output = Result<T>>) -> Result<T> {
    runtime.block_on(async {
        let limited = tokio::time::timeout(LIMIT, test).await;
        limited.context("the test takes for ever")?
    })
}

fn leader_in(view: &MetadataResponse, topic: &str, partition: u32) -> Option<Leader> {
    let topic = view.topics.iter().find(|known| known.name == topic)?;
    let info = topic.partitions.iter().find(|p| p.partition == partition)?;
    let broker = view.brokers.iter().find(|b| b.broker_id == info.leader)?;
    Some(Leader {
        place: broker.name.strip_prefix('b')?.parse().ok()?,
        id: info.leader,
        epoch: info.leader_epoch,
    })
}

/// Waits for a condition.
pub(super) async fn until(what: &str, mut check: impl FnMut() -> bool) -> Result<()> {
    let end = Instant::now() + wait::LONG;
    while !check() {
        if Instant::now() >= end {
            bail!("waited in vain for: {what}");
        }
        tokio::time::sleep(POLL).await;
    }
    Ok(())
}

/// Reads a topic from start to end; offsets must be without holes in each partition.
pub(super) async fn read_all(client: &Client, topic: &str) -> Result<Vec<ConsumedRecord>> {
    let consumer = client.consumer(topic).start(Position::Start).until_end();
    let mut stream = consumer.open().await?;
    let mut next: BTreeMap<u32, u64> = BTreeMap::new();
    let mut records = Vec::new();
    while let Some(record) = stream.next().await {
        let record = record?;
        let wanted = next.entry(record.partition).or_default();
        ensure!(
            record.offset == *wanted,
            "partition {}: offset {} instead of {wanted}",
            record.partition,
            record.offset
        );
        *wanted += 1;
        records.push(record);
    }
    Ok(records)
}

/// Values that count up per key: record `number` of `keys` keys.
pub(super) fn numbered(number: u64, keys: u64) -> (Bytes, Bytes) {
    let (key, value) = (number % keys, number / keys);
    (format!("k{key}").into(), value.to_string().into())
}

/// Wants each of `count` [`numbered`] records once, and in order per key.
pub(super) fn check_numbered(records: &[ConsumedRecord], count: u64, keys: u64) -> Result<()> {
    ensure!(
        records.len() as u64 == count,
        "{} records instead of {count}",
        records.len()
    );
    let mut next: HashMap<&Bytes, u64> = HashMap::new();
    for record in records {
        let (Some(key), Some(value)) = (&record.key, &record.value) else {
            bail!("a record without key or value");
        };
        let value: u64 = std::str::from_utf8(value)?.parse()?;
        let wanted = next.entry(key).or_default();
        ensure!(value == *wanted, "{key:?}: {value} instead of {wanted}");
        *wanted += 1;
    }
    ensure!(next.len() as u64 == keys.min(count), "{} keys", next.len());
    Ok(())
}
