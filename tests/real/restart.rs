//! Stops, kills, freezes, changed ports.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use qute_tests::cluster::{Cluster, Node};
use rustix::process::Signal;

use crate::bins;

const TOPIC: &str = "t";

/// Writes `count` numbered lines; they are the values from `first` on.
fn produce(cluster: &Cluster, first: usize, count: usize) -> Result<()> {
    let lines: String = (first..first + count).map(|i| format!("{i}\n")).collect();
    cluster
        .qute(["produce", TOPIC])
        .run_with(lines.as_bytes())?
        .ok()?;
    Ok(())
}

/// Wants exactly the values 0..count, each once.
fn verify(cluster: &Cluster, count: usize) -> Result<()> {
    let output = cluster
        .qute(["consume", TOPIC, "-o", "start", "-e"])
        .run()?
        .ok()?;
    let values: Vec<usize> = output
        .text()
        .lines()
        .map(str::parse)
        .collect::<Result<_, _>>()?;
    let unique: BTreeSet<usize> = values.iter().copied().collect();
    ensure!(values.len() == count, "{} records of {count}", values.len());
    ensure!(
        unique == (0..count).collect(),
        "other records than were written"
    );
    Ok(())
}

fn three_with_topic() -> Result<Cluster> {
    let cluster = Cluster::start(&bins(), 3)?;
    cluster.create_topic(TOPIC, 4, 3)?;
    produce(&cluster, 0, 1000)?;
    Ok(cluster)
}

#[test]
fn single_broker_killed_keeps_what_it_acknowledged() -> Result<()> {
    let mut cluster = Cluster::start(&bins(), 1)?;
    cluster.create_topic(TOPIC, 4, 1)?;
    for round in 0..3 {
        produce(&cluster, round * 1000, 1000)?;
        cluster.node(0)?.kill()?;
        cluster.start_all()?;
        verify(&cluster, (round + 1) * 1000)?;
    }
    cluster.stop()
}

#[test]
fn broker_stops_cleanly_on_both_signals() -> Result<()> {
    let mut cluster = three_with_topic()?;
    for (place, signal) in [(0, Signal::TERM), (1, Signal::INT)] {
        cluster.node(place)?.stop_by(signal)?;
        cluster.start_all()?;
        verify(&cluster, 1000)?;
    }
    cluster.stop()
}

#[test]
fn broker_waiting_for_its_seeds_stops_cleanly() -> Result<()> {
    let mut cluster = Cluster::prepare(&bins(), 3)?;
    cluster.start_one(0)?;
    let missing = cluster.nodes[1].address();
    cluster.node(0)?.wait_says(&missing)?;
    cluster.node(0)?.terminate()?;
    cluster.stop()
}

#[test]
fn all_brokers_restarted_serve_the_same_records() -> Result<()> {
    let mut cluster = three_with_topic()?;
    for node in &mut cluster.nodes {
        node.terminate()?;
    }
    cluster.start_all()?;
    verify(&cluster, 1000)?;
    produce(&cluster, 1000, 500)?;
    verify(&cluster, 1500)?;
    cluster.stop()
}

#[test]
fn broker_with_changed_ports_is_found_again() -> Result<()> {
    let mut cluster = three_with_topic()?;
    cluster.node(1)?.terminate()?;
    cluster.node(1)?.move_ports()?;
    cluster.start_all()?;
    produce(&cluster, 1000, 500)?;
    // Now it is needed for a majority.
    cluster.node(0)?.kill()?;
    produce(&cluster, 1500, 500)?;
    cluster.start_all()?;
    verify(&cluster, 2000)?;
    cluster.stop()
}

#[test]
fn all_brokers_with_changed_ports_find_each_other_through_seeds() -> Result<()> {
    let mut cluster = three_with_topic()?;
    for node in &mut cluster.nodes {
        node.terminate()?;
        node.move_ports()?;
    }
    let seeds: Vec<String> = cluster.nodes.iter().map(Node::address).collect();
    for node in &mut cluster.nodes {
        node.set_seeds(&seeds, None);
    }
    cluster.start_all()?;
    produce(&cluster, 1000, 500)?;
    verify(&cluster, 1500)?;
    cluster.stop()
}

#[test]
fn leader_frozen_is_replaced_and_follows_when_it_wakes() -> Result<()> {
    let mut cluster = three_with_topic()?;
    let leader = cluster.busiest_leader(TOPIC)?;
    let place = cluster.place_of(&leader)?;
    cluster.node(place)?.pause()?;
    cluster.wait_led(TOPIC, Some(&leader))?;
    produce(&cluster, 1000, 500)?;
    cluster.node(place)?.resume()?;
    cluster.node(place)?.wait_ready()?;
    produce(&cluster, 1500, 500)?;
    verify(&cluster, 2000)?;
    cluster.stop()
}

#[test]
fn deleted_topic_is_gone_and_its_name_starts_afresh() -> Result<()> {
    let mut cluster = three_with_topic()?;
    cluster.qute(["topic", "delete", TOPIC]).run()?.ok()?;
    cluster
        .qute(["topic", "describe", TOPIC])
        .run()?
        .expect(1)?;
    cluster
        .qute(["produce", TOPIC])
        .run_with(b"x\n")?
        .expect(1)?;
    cluster.create_topic(TOPIC, 2, 3)?;
    produce(&cluster, 0, 10)?;
    verify(&cluster, 10)?;
    // A replica that missed the deletion doesn't bring anything back.
    cluster.node(0)?.kill()?;
    cluster.qute(["topic", "delete", TOPIC]).run()?.ok()?;
    cluster
        .create_topic(TOPIC, 2, 3)
        .or_else(|_| cluster.create_topic(TOPIC, 2, 1))?;
    cluster.start_all()?;
    produce(&cluster, 0, 20)?;
    verify(&cluster, 20)?;
    cluster.stop()
}
