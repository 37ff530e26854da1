//! Two coordinators believed: the old one is cut off from the other brokers, but not from a member.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use qute_client::TopicSpec;
use qute_client::group::LostReason;
use qute_test::{Call, Fault, Proxy};
use qute_tests::cluster::Cluster;
use qute_tests::member::Coordinators;
use qute_tests::peernet::PeerNet;
use qute_tests::ports::Port;
use qute_tests::wait;
use tokio::runtime::Runtime;

use super::crew::{Crew, Plan};
use super::writer::Writer;
use crate::bins;

const TOPIC: &str = "t";
const GROUP: &str = "g";
const PARTITIONS: u32 = 6;
const PACE: Duration = Duration::from_millis(10);

/// S26: what it does not confirm keeps no session alive, so the member stops by itself before the new
/// coordinator gives its partitions away.
#[test]
fn member_of_a_deposed_coordinator_stops_before_others_have_its_partitions() -> Result<()> {
    let runtime = Runtime::new()?;
    let mut cluster = Cluster::prepare(&bins(), 3)?;
    let addresses: Vec<String> = cluster.nodes.iter().map(|node| node.address()).collect();
    let net = runtime.block_on(PeerNet::before(&mut cluster, &addresses))?;
    for place in 0..3 {
        cluster.start_one(place)?;
    }
    net.brokers_run(&mut cluster)?;
    cluster.start_all()?;
    // One replica: whoever leads a partition leads it, cut off or not.
    cluster.create_topic(TOPIC, PARTITIONS, 1)?;
    let any = addresses.first().context("no broker")?;
    let coordinator = runtime.block_on(async {
        let coordinators = Coordinators::connect(any).await?;
        coordinators.address_of(GROUP).await
    })?;
    let old = addresses.iter().position(|it| *it == coordinator);
    let old = old.context("an unknown coordinator")?;
    let others: Vec<String> = addresses
        .iter()
        .filter(|it| **it != coordinator)
        .cloned()
        .collect();

    // For this member there is no other broker.
    let (own, nowhere) = (
        runtime.block_on(Proxy::start(coordinator.as_str()))?,
        Port::take()?,
    );
    let mut lies = Vec::new();
    for call in [Call::Metadata, Call::WatchMetadata] {
        let (own_address, known) = (own.address(), coordinator.clone());
        let nowhere = nowhere.address();
        let lie = Fault::edit_metadata(call, move |view| {
            for broker in &mut view.brokers {
                let is_known = broker.address == known;
                let shown = if is_known { &own_address } else { &nowhere };
                broker.address.clone_from(shown);
            }
        });
        lies.push(own.inject(lie));
    }
    let mut crew = Crew::new(&others.join(","), GROUP)?;
    let lonely = crew.begin_at(&own.address(), "lonely", Plan::reads(TOPIC));
    let lonely = lonely.wait(&crew.runtime)?;
    crew.wait_stable(1, PARTITIONS as usize)?;
    let writer = Writer::start(&crew.runtime, &others.join(","), TOPIC, PARTITIONS, PACE);
    lonely.wait_seen("records", |seen| !seen.began.is_empty())?;

    net.cut_off(old);
    let heir = crew.join("heir", Plan::reads(TOPIC))?;
    heir.wait_seen("all partitions", |seen| {
        seen.assigned.len() == PARTITIONS as usize
    })?;
    let news = crew.describe()?.coordinator.to_string();
    ensure!(
        cluster_place(&cluster, &others, &news)? != old,
        "nobody has taken over"
    );
    heir.wait_seen("records of each", |seen| {
        seen.began.len() == PARTITIONS as usize
    })?;
    // It is connected to the old one as before, and has stopped.
    lonely.seen(|seen| {
        ensure!(
            seen.lost.len() == PARTITIONS as usize,
            "lost {:?}",
            seen.lost
        );
        let expired = seen
            .lost
            .iter()
            .all(|(_, why)| *why == LostReason::SessionExpired);
        ensure!(expired, "{:?}", seen.lost);
        ensure!(seen.assigned.is_empty(), "has {:?}", seen.assigned);
        Ok(())
    })?;
    let records = lonely.seen(|seen| seen.records);
    writer.wait_more(10)?;
    ensure!(lonely.seen(|seen| seen.records) == records, "it reads on");

    // It learns that there are others, from the next view, and is a member again.
    for lie in lies {
        lie.stop();
    }
    net.heal();
    crew.runtime
        .block_on(async { crew.client.create_topic(TopicSpec::new("news")).await })?;
    crew.wait_stable(2, PARTITIONS as usize)?;
    lonely.wait_seen("what it has now", |seen| seen.assigned.len() == 3)?;
    writer.wait_more(10)?;
    writer.stop(&crew.runtime)?;
    let written = crew.ends(TOPIC, PARTITIONS)?;
    crew.wait_handled(&written)?;
    crew.check(&written)?;
    for member in [lonely, heir] {
        member.leave(&crew.runtime)?;
    }
    cluster.stop()
}

/// The place of the broker of this id, as the reachable ones know it.
fn cluster_place(cluster: &Cluster, reachable: &[String], id: &str) -> Result<usize> {
    let place = wait::until("the brokers", wait::LONG, || {
        let words = ["cluster", "brokers", "--output", "json"];
        let output = cluster.qute_at(&reachable.join(","), words).run()?.ok()?;
        let brokers = output.json()?;
        let brokers = brokers.as_array().context("no array")?.clone();
        let name = brokers.into_iter().find(|broker| broker["id"] == id);
        let name = name.context("no such broker")?["name"].clone();
        Ok(cluster.nodes.iter().position(|node| name == node.name()))
    });
    place.context("the coordinator is no broker of the cluster")
}
