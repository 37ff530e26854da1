//! Offsets that expire, are reset and deleted, as people do it.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use qute_client::ErrorKind;
use qute_client::group::OffsetCommit;
use qute_tests::cluster::Cluster;
use qute_tests::oracle::Place;
use qute_tests::wait;

use super::crew::{Crew, Plan};
use super::writer::Writer;
use crate::bins;

const TOPIC: &str = "t";
const PARTITIONS: u32 = 3;
const PACE: std::time::Duration = std::time::Duration::from_millis(2);

fn write(crew: &Crew, cluster: &Cluster, rounds: u64) -> Result<()> {
    let writer = Writer::start(&crew.runtime, &cluster.bootstrap(), TOPIC, PARTITIONS, PACE);
    writer.wait_more(rounds)?;
    writer.stop(&crew.runtime)
}

fn all_at(offset: u64) -> BTreeMap<Place, u64> {
    (0..PARTITIONS)
        .map(|p| (Place::new(TOPIC, p), offset))
        .collect()
}

/// Commits without membership.
fn commit(crew: &Crew, offset: u64) -> Result<()> {
    let offsets = (0..PARTITIONS).map(|p| OffsetCommit::new(TOPIC, p, offset));
    let offsets: Vec<_> = offsets.collect();
    let groups = crew.client.groups();
    Ok(crew.runtime.block_on(groups.commit(&crew.group, offsets))?)
}

#[test]
fn offsets_of_a_group_without_members_expire_and_those_of_a_living_one_stay() -> Result<()> {
    let mut cluster = Cluster::prepare(&bins(), 1)?;
    let config = cluster.dir().join("retention.toml");
    std::fs::write(&config, "group_offsets_retention_ms = 2000\n")?;
    let config = format!("--config={}", config.display());
    cluster.node(0)?.set_extra(&[&config]);
    cluster.start_all()?;
    cluster.create_topic(TOPIC, PARTITIONS, 1)?;
    let (idle, living) = (
        Crew::new(&cluster.bootstrap(), "idle")?,
        Crew::new(&cluster.bootstrap(), "living")?,
    );
    write(&idle, &cluster, 10)?;
    let member = living.join("m", Plan::reads(TOPIC).commits_by_hand())?;
    let written = living.ends(TOPIC, PARTITIONS)?;
    living.wait_handled(&written)?;
    let offsets: BTreeMap<_, _> = written
        .into_iter()
        .map(|(place, it)| (place, it.end))
        .collect();
    wait::until_true("commits", wait::LONG, || Ok(living.offsets()? == offsets))?;

    commit(&idle, 5)?;
    ensure!(idle.offsets()? == all_at(5));
    wait::until_true("the offsets to expire", wait::LONG, || {
        Ok(idle.offsets()?.is_empty())
    })?;
    // Those of the living one are older.
    ensure!(living.offsets()? == offsets);
    member.leave(&living.runtime)?;
    wait::until_true("the group to expire", wait::LONG, || {
        let listed = living.runtime.block_on(living.client.groups().list())?;
        Ok(listed.is_empty())
    })?;
    cluster.stop()
}

#[test]
fn reset_by_command_line_moves_offsets_only_when_told_to_and_only_without_members() -> Result<()> {
    const RECORDS: u64 = 20;
    let cluster = Cluster::start(&bins(), 1)?;
    cluster.create_topic(TOPIC, PARTITIONS, 1)?;
    let crew = Crew::new(&cluster.bootstrap(), "g")?;
    write(&crew, &cluster, RECORDS)?;
    let ends = crew.ends(TOPIC, PARTITIONS)?;
    let ends: BTreeMap<_, _> = ends
        .into_iter()
        .map(|(place, it)| (place, it.end))
        .collect();
    commit(&crew, 10)?;
    let reset = |words: &[&str]| {
        let all = ["group", "reset", "g"].iter().chain(words);
        cluster.qute(all).run()
    };
    // Shown, not done.
    reset(&["--to", "start"])?.ok()?;
    ensure!(crew.offsets()? == all_at(10));
    reset(&["--to", "start", "--execute"])?.ok()?;
    ensure!(crew.offsets()? == all_at(0));
    reset(&["--to", "end", "--execute"])?.ok()?;
    ensure!(crew.offsets()? == ends);
    reset(&["--to", "7", "--execute"])?.ok()?;
    ensure!(crew.offsets()? == all_at(7));

    // From there a member goes on; while it is there, offsets are its own.
    let member = crew.join("m", Plan::reads(TOPIC).commits_by_hand())?;
    member.wait_seen("records", |seen| seen.began.len() == PARTITIONS as usize)?;
    member.seen(|seen| {
        let right = seen.began.values().all(|(_, start)| *start == 7);
        ensure!(right, "{:?}", seen.began);
        Ok(())
    })?;
    let written = ends
        .iter()
        .map(|(place, end)| (place.clone(), 7..*end))
        .collect();
    crew.wait_handled(&written)?;
    wait::until_true("commits", wait::LONG, || Ok(crew.offsets()? == ends))?;
    reset(&["--to", "start", "--execute"])?.expect(1)?;
    ensure!(crew.offsets()? == ends);
    // By force: its claims get new epochs, and it reads everything again.
    let records = member.seen(|seen| seen.records);
    let claims = crew.claims()?;
    reset(&["--to", "start", "--execute", "--force"])?.ok()?;
    let all: u64 = ends.values().sum();
    member.wait_seen("everything again", |seen| seen.records == records + all)?;
    for (place, (holder, epoch)) in crew.claims()? {
        let before = claims.get(&place).context("not held before")?;
        ensure!(holder == before.0 && epoch > before.1, "{place}: {epoch}");
    }
    member.leave(&crew.runtime)?;
    cluster.stop()
}

#[test]
fn delete_by_command_line_forgets_a_group_without_members_and_no_other() -> Result<()> {
    let cluster = Cluster::start(&bins(), 1)?;
    cluster.create_topic(TOPIC, PARTITIONS, 1)?;
    let crew = Crew::new(&cluster.bootstrap(), "g")?;
    write(&crew, &cluster, 10)?;
    let member = crew.join("m", Plan::reads(TOPIC))?;
    crew.wait_stable(1, PARTITIONS as usize)?;
    cluster.qute(["group", "delete", "g"]).run()?.expect(1)?;
    member.leave(&crew.runtime)?;
    ensure!(!crew.offsets()?.is_empty());
    cluster.qute(["group", "delete", "g"]).run()?.ok()?;
    ensure!(crew.offsets()?.is_empty());
    let groups = crew.client.groups();
    let gone = crew.runtime.block_on(groups.describe("g"));
    ensure!(gone.is_err_and(|error| error.kind() == ErrorKind::UnknownGroup));
    // It begins anew.
    let member = crew.join("again", Plan::reads(TOPIC))?;
    member.wait_seen("records", |seen| seen.began.len() == PARTITIONS as usize)?;
    member.seen(|seen| {
        let right = seen.began.values().all(|(_, start)| *start == 0);
        ensure!(right, "{:?}", seen.began);
        Ok(())
    })?;
    member.leave(&crew.runtime)?;
    cluster.stop()
}
