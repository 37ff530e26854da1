//! Wiped, copied, foreign and newer data directories.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use qute_tests::cluster::Cluster;
use qute_tests::wait;
use serde_json::Value;

use crate::bins;

/// The id of the live broker with this name.
fn id_of(cluster: &Cluster, name: &str) -> Result<String> {
    wait::until("the broker to be listed alive", wait::LONG, || {
        let brokers = cluster.brokers()?;
        let broker = brokers
            .iter()
            .find(|b| b["name"] == name && b["state"] == "alive");
        Ok(broker.and_then(|b| b["id"].as_str()).map(str::to_owned))
    })
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), &target)?;
        }
    }
    Ok(())
}

/// Starts broker 0 on a directory made by `make`, wants exit code 1 and this text in its log.
fn refused(make: impl FnOnce(&Path) -> Result<()>, text: &str) -> Result<()> {
    let mut cluster = Cluster::prepare(&bins(), 1)?;
    make(cluster.nodes[0].dir())?;
    cluster.start_one(0)?;
    let code = cluster.node(0)?.wait_end(wait::LONG)?;
    ensure!(code == Some(1), "ended with {code:?}");
    let log = cluster.nodes[0].log()?;
    ensure!(
        log.to_lowercase().contains(text),
        "doesn't say {text:?}: {log}"
    );
    cluster.stop()
}

#[test]
fn wiped_data_directory_is_a_new_broker() -> Result<()> {
    let mut cluster = Cluster::start(&bins(), 3)?;
    cluster.create_topic("t", 3, 3)?;
    cluster
        .qute(["produce", "t"])
        .run_with(b"a\nb\nc\n")?
        .ok()?;
    let before = id_of(&cluster, "b2")?;
    cluster.node(2)?.kill()?;
    std::fs::remove_dir_all(cluster.nodes[2].dir())?;
    cluster.start_one(2)?;
    cluster.node(2)?.wait_ready()?;
    // For a moment the lost one is believed alive as well.
    wait::until("another broker of the name", wait::LONG, || {
        let new = |b: &Value| b["name"] == "b2" && b["state"] == "alive" && b["id"] != before;
        Ok(cluster.brokers()?.iter().any(new).then_some(()))
    })?;
    let ids: Vec<_> = cluster.brokers()?.iter().map(|b| b["id"].clone()).collect();
    ensure!(
        ids.iter().any(|id| *id == before),
        "the lost broker was forgotten: {ids:?}"
    );

    // What was acknowledged is still there, on the other two.
    let output = cluster.qute(["consume", "t", "-e"]).run()?.ok()?;
    ensure!(output.text().lines().count() == 3, "{}", output.text());
    cluster.stop()
}

#[test]
fn copied_data_directory_is_refused() -> Result<()> {
    let mut cluster = Cluster::start(&bins(), 3)?;
    let original = id_of(&cluster, "b2")?;
    cluster.node(2)?.terminate()?;
    let place = cluster.add(None)?;
    let target = cluster.nodes[place].dir().to_path_buf();
    copy(cluster.nodes[2].dir(), &target).context("copy the data directory")?;
    cluster.start_one(2)?;
    cluster.node(2)?.wait_ready()?;

    cluster.start_one(place)?;
    let code = cluster.node(place)?.wait_end(wait::LONG)?;
    ensure!(code == Some(1), "the copy ended with {code:?}");
    let log = cluster.nodes[place].log()?;
    ensure!(
        log.contains(&original),
        "the copy doesn't name the broker it copies: {log}"
    );

    ensure!(
        cluster.node(2)?.is_ready()?,
        "the original suffers from its copy"
    );
    ensure!(id_of(&cluster, "b2")? == original);
    // Gossip may have believed in the copy for a moment.
    wait::until_true("three live brokers", wait::LONG, || {
        Ok(cluster
            .brokers()?
            .iter()
            .filter(|broker| broker["state"] == "alive")
            .count()
            == 3)
    })?;
    cluster.create_topic("t", 3, 3)?;
    cluster.qute(["produce", "t"]).run_with(b"a\n")?.ok()?;
    cluster.stop()
}

#[test]
fn foreign_directory_is_refused_and_left_alone() -> Result<()> {
    let make = |dir: &Path| {
        std::fs::create_dir_all(dir)?;
        Ok(std::fs::write(dir.join("thesis.txt"), "precious")?)
    };
    refused(make, "not a qute data directory")
}

#[test]
fn data_directory_of_a_newer_format_is_refused() -> Result<()> {
    let mut cluster = Cluster::start(&bins(), 1)?;
    cluster.node(0)?.terminate()?;
    let version = cluster.nodes[0].dir().join("VERSION");
    let text = std::fs::read_to_string(&version)?;
    let number: String = text.chars().filter(char::is_ascii_digit).collect();
    std::fs::write(&version, text.replace(&number, "999"))?;

    cluster.start_one(0)?;
    let code = cluster.node(0)?.wait_end(wait::LONG)?;
    ensure!(code == Some(1), "ended with {code:?}");
    let log = cluster.nodes[0].log()?;
    ensure!(log.contains("999"), "doesn't name the version: {log}");

    // Nothing was changed by the refusal.
    std::fs::write(&version, text)?;
    cluster.start_all()?;
    cluster.stop()
}

#[test]
fn data_directory_in_use_is_refused() -> Result<()> {
    let mut cluster = Cluster::start(&bins(), 1)?;
    let dir = cluster.nodes[0].dir().to_path_buf();
    let place = cluster.add(None)?;
    cluster.node(place)?.set_dir(&dir);
    cluster.start_one(place)?;
    let code = cluster.node(place)?.wait_end(wait::LONG)?;
    ensure!(code == Some(1), "ended with {code:?}");
    let log = cluster.nodes[place].log()?;
    ensure!(
        log.contains("in use") || log.contains("another"),
        "no clear line: {log}"
    );
    ensure!(cluster.node(0)?.is_ready()?, "the first broker suffers");
    cluster.stop()
}
