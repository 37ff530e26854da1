//! Which brokers become a cluster, and which never do (S21).

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use qute_tests::cluster::Cluster;
use qute_tests::{http, wait};
use serde_json::Value;

use crate::bins;

/// The cluster id that one broker tells; `None` while it belongs to none.
fn cluster_id(cluster: &Cluster, place: usize) -> Result<Option<String>> {
    let address = cluster
        .nodes
        .get(place)
        .context("no such broker")?
        .address();
    let output = cluster
        .qute_at(&address, ["cluster", "info", "--output", "json"])
        .run()?;
    if output.code != Some(0) {
        return Ok(None);
    }
    Ok(output.json()?["cluster_id"].as_str().map(str::to_owned))
}

/// Waits until all brokers tell the same cluster id and list this many brokers.
fn wait_one_cluster(cluster: &Cluster, brokers: usize) -> Result<()> {
    wait::until_true("one cluster of all brokers", wait::LONG, || {
        let ids = (0..cluster.nodes.len())
            .map(|place| cluster_id(cluster, place))
            .collect::<Result<BTreeSet<_>>>()?;
        let alive = cluster
            .brokers()?
            .iter()
            .filter(|broker| broker["state"] == "alive")
            .count();
        Ok(ids.len() == 1 && !ids.contains(&None) && alive == brokers)
    })
}

#[test]
fn broker_without_seeds_is_a_cluster_of_one() -> Result<()> {
    let cluster = Cluster::start(&bins(), 1)?;
    let address = cluster.nodes[0].http();
    ensure!(http::get(&address, "/healthz")?.status == 200);
    ensure!(
        http::get(&address, "/metrics")?
            .body
            .contains("# TYPE qute_")
    );
    ensure!(http::get(&address, "/nowhere")?.status == 404);
    cluster.qute(["cluster", "info"]).run()?.ok()?;
    cluster.qute(["topic", "create", "t"]).run()?.ok()?;
    cluster
        .qute(["produce", "t"])
        .run_with(b"one\ntwo\n")?
        .ok()?;
    let output = cluster.qute(["consume", "t", "-e"]).run()?.ok()?;
    let lines: BTreeSet<String> = output.text().lines().map(str::to_owned).collect();
    ensure!(
        lines == BTreeSet::from(["one".into(), "two".into()]),
        "{lines:?}"
    );
    cluster.stop()
}

#[test]
fn three_brokers_form_one_cluster() -> Result<()> {
    let cluster = Cluster::start(&bins(), 3)?;
    wait_one_cluster(&cluster, 3)?;
    let names: Vec<Value> = cluster
        .brokers()?
        .iter()
        .map(|b| b["name"].clone())
        .collect();
    let names: BTreeSet<String> = names
        .iter()
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect();
    ensure!(
        names == BTreeSet::from(["b0".into(), "b1".into(), "b2".into()]),
        "{names:?}"
    );
    for broker in cluster.brokers()? {
        let (id, address) = (&broker["id"], &broker["address"]);
        ensure!(
            id.as_str()
                .is_some_and(|id| id.parse::<u64>().is_ok_and(|id| id != 0)),
            "{id}"
        );
        let known = cluster.nodes.iter().any(|node| *address == node.address());
        ensure!(known, "unknown address {address}");
    }
    cluster.stop()
}

#[test]
fn seed_unreachable_broker_waits_and_says_so() -> Result<()> {
    let mut cluster = Cluster::prepare(&bins(), 3)?;
    let missing = cluster.nodes[2].address();
    cluster.start_one(0)?;
    cluster.start_one(1)?;
    for place in [0, 1] {
        cluster.node(place)?.wait_says(&missing)?;
        ensure!(
            !cluster.node(place)?.is_ready()?,
            "ready without its cluster"
        );
        ensure!(http::get(&cluster.nodes[place].http(), "/healthz")?.status == 200);
        let address = cluster.nodes[place].address();
        cluster
            .qute_at(&address, ["cluster", "info"])
            .run()?
            .expect(1)?;
    }
    cluster.start_all()?;
    wait_one_cluster(&cluster, 3)?;
    cluster.stop()
}

#[test]
fn four_brokers_expecting_three_form_one_cluster() -> Result<()> {
    let mut cluster = Cluster::prepare(&bins(), 4)?;
    let all: Vec<String> = cluster.nodes.iter().map(|node| node.address()).collect();
    for node in &mut cluster.nodes {
        node.set_seeds(&all, Some(3));
    }
    cluster.start_all()?;
    wait_one_cluster(&cluster, 4)?;
    cluster.stop()
}

#[test]
fn four_brokers_with_different_seeds_never_make_two_clusters() -> Result<()> {
    let mut cluster = Cluster::prepare(&bins(), 4)?;
    let all: Vec<String> = cluster.nodes.iter().map(|node| node.address()).collect();
    for (place, seeds) in [(0, &all[..3]), (1, &all[..]), (2, &all[..]), (3, &all[1..])] {
        cluster.node(place)?.set_seeds(seeds, Some(3));
        cluster.start_one(place)?;
    }
    // Who is to found it can't be agreed upon with such lists; what must not happen is that
    // three agree here and three there.
    for place in 0..4 {
        cluster.node(place)?.wait_says("part of a cluster")?;
    }
    let ids: BTreeSet<String> = (0..4)
        .map(|place| cluster_id(&cluster, place))
        .filter_map(Result::transpose)
        .collect::<Result<_>>()?;
    ensure!(ids.len() <= 1, "two clusters: {ids:?}");

    // The operator mends the lists: whatever was promised before, one cluster comes of it.
    for node in &mut cluster.nodes {
        node.kill()?;
        node.set_seeds(&all, Some(3));
    }
    cluster.start_all()?;
    wait_one_cluster(&cluster, 4)?;
    cluster.stop()
}

#[test]
fn empty_brokers_beside_an_unreachable_old_one_never_form() -> Result<()> {
    // The old one: a cluster of its own with a topic, then out of reach.
    let mut cluster = Cluster::prepare(&bins(), 4)?;
    let all: Vec<String> = cluster.nodes.iter().map(|node| node.address()).collect();
    cluster.node(3)?.set_seeds(&[], None);
    cluster.start_one(3)?;
    cluster.node(3)?.wait_ready()?;
    let old = cluster_id(&cluster, 3)?.context("the old one formed no cluster")?;
    let words = ["topic", "create", "old", "--replicas", "1"];
    cluster.qute_at(&all[3], words).run()?.ok()?;
    cluster.node(3)?.kill()?;

    for place in 0..3 {
        cluster.node(place)?.set_seeds(&all, Some(3));
        cluster.start_one(place)?;
    }
    for place in 0..3 {
        cluster.node(place)?.wait_says(&all[3])?;
        ensure!(
            !cluster.node(place)?.is_ready()?,
            "formed beside an old one"
        );
        ensure!(cluster_id(&cluster, place)?.is_none());
    }

    // Back again, it is what they join.
    cluster.start_all()?;
    wait_one_cluster(&cluster, 4)?;
    ensure!(
        cluster_id(&cluster, 0)? == Some(old),
        "the empty brokers formed another cluster"
    );
    let output = cluster.qute(["topic", "list"]).run()?.ok()?;
    ensure!(
        output.text().contains("old"),
        "the old topic is gone: {}",
        output.text()
    );
    cluster.stop()
}

#[test]
fn broker_with_seeds_joins_a_formed_cluster() -> Result<()> {
    let mut cluster = Cluster::start(&bins(), 1)?;
    cluster.create_topic("before", 2, 1)?;
    let place = cluster.add(None)?;
    cluster.start_one(place)?;
    cluster.node(place)?.wait_ready()?;
    wait_one_cluster(&cluster, 2)?;

    // Every broker answers metadata, and serves what it leads.
    let address = cluster.nodes[place].address();
    let output = cluster.qute_at(&address, ["topic", "list"]).run()?.ok()?;
    ensure!(output.text().contains("before"), "{}", output.text());
    cluster.stop()
}

#[test]
fn topic_created_through_one_broker_is_writable_through_another() -> Result<()> {
    let cluster = Cluster::start(&bins(), 3)?;
    for round in 0..10 {
        let (a, b) = (round % 3, (round + 1) % 3);
        let (a, b) = (cluster.nodes[a].address(), cluster.nodes[b].address());
        let topic = format!("t{round}");
        cluster
            .qute_at(&a, ["topic", "create", &topic, "--partitions", "3"])
            .run()?
            .ok()?;
        cluster
            .qute_at(&b, ["produce", &topic])
            .run_with(b"x\n")?
            .ok()?;
    }
    cluster.stop()
}
