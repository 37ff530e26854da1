//! Many groups on one broker.

use anyhow::{Context, Result, ensure};
use qute_client::Client;
use qute_proto::v1::TopicSubscription;
use qute_tests::cluster::Cluster;
use qute_tests::fleet::{self, Fleet};
use qute_tests::member::Coordinators;
use tokio::runtime::Runtime;

use crate::bins;

const TOPIC: &str = "t";
const PARTITIONS: u32 = 10;

/// The full size is a bench: `qute-bench groups`.
#[test]
fn five_hundred_groups_of_ten_partitions_survive_a_kill_with_what_they_committed() -> Result<()> {
    const GROUPS: usize = 500;
    const COMMITS: u64 = 3;
    let mut cluster = Cluster::start(&bins(), 1)?;
    cluster.create_topic(TOPIC, PARTITIONS, 1)?;
    let runtime = Runtime::new()?;
    let address = cluster.nodes.first().context("no broker")?.address();
    let fleet = runtime.block_on(async {
        let client = Client::connect(&address).await?;
        let topic = client.describe_topic(TOPIC).await?;
        let topic = TopicSubscription {
            topic_id: topic.id.to_wire(),
            partitions: PARTITIONS,
        };
        let coordinators = Coordinators::connect(&address).await?;
        let fleet = Fleet::join(&coordinators, &topic, GROUPS, 60_000).await?;
        for offset in 1..=COMMITS {
            fleet.commit(&coordinators, offset).await?;
        }
        anyhow::Ok(fleet)
    })?;
    cluster.node(0)?.kill()?;
    cluster.start_all()?;
    runtime.block_on(async {
        let coordinators = Coordinators::connect(&address).await?;
        fleet::verify(&coordinators, GROUPS, PARTITIONS, COMMITS).await?;
        let client = Client::connect(&address).await?;
        let listed = client.groups().list().await?;
        ensure!(listed.len() == GROUPS, "{} groups", listed.len());
        let held =
            |it: &qute_client::group::GroupListing| it.members == 1 && it.offsets == PARTITIONS;
        ensure!(listed.iter().all(held), "{:?}", listed.first());
        anyhow::Ok(())
    })?;
    drop(fleet);
    cluster.stop()
}
