//! Coordinators that die in the middle of commits, and clusters that go down as a whole.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use qute_tests::cluster::Cluster;
use qute_tests::wait;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::crew::{Crew, Member, Plan, claims_of};
use super::writer::Writer;
use crate::bins;

const TOPIC: &str = "t";
const PARTITIONS: u32 = 8;
const PACE: Duration = Duration::from_millis(10);

/// The place of the broker that coordinates the group.
pub(super) fn coordinator_of(crew: &Crew, cluster: &Cluster) -> Result<usize> {
    let coordinator = crew.describe()?.coordinator;
    cluster.place_of(&coordinator.to_string())
}

/// Waits until every member has confirmed another commit.
fn wait_commits(members: &[Member]) -> Result<()> {
    let commits: Vec<u64> = members
        .iter()
        .map(|m| m.seen(|seen| seen.commits))
        .collect();
    for (member, commits) in members.iter().zip(commits) {
        member.wait_seen("another commit", |seen| seen.commits > commits + 1)?;
    }
    Ok(())
}

/// S26, S27: no committed offset is lost or goes back, and the members go on as they were.
#[test]
fn coordinator_killed_twenty_times_mid_commit_loses_no_committed_offset() -> Result<()> {
    const KILLS: usize = 20;
    let mut cluster = Cluster::start(&bins(), 3)?;
    cluster.create_topic(TOPIC, PARTITIONS, 3)?;
    let mut crew = Crew::new(&cluster.bootstrap(), "g")?;
    crew.watch_offsets();
    let mut members = Vec::new();
    for i in 0..4 {
        // Longer than a few elections take on a busy machine: commits, which the kills wait for, go on
        // before sessions do.
        let plan = Plan::reads(TOPIC).commits_by_hand();
        let plan = plan.with(|builder| builder.session_timeout(Duration::from_secs(60)));
        members.push(crew.join(&format!("m{i}"), plan)?);
    }
    let before = crew.wait_stable(4, PARTITIONS as usize)?;
    let writer = Writer::start(&crew.runtime, &cluster.bootstrap(), TOPIC, PARTITIONS, PACE);
    for kill in 1..=KILLS {
        wait_commits(&members)?;
        let place = coordinator_of(&crew, &cluster)?;
        cluster.node(place)?.kill()?;
        wait_commits(&members)?;
        cluster.start_one(place)?;
        cluster.node(place)?.wait_ready()?;
        eprintln!("kill {kill} of {KILLS}");
    }
    let after = crew.wait_stable(4, PARTITIONS as usize)?;
    for member in &members {
        member.seen(|seen| {
            ensure!(
                seen.lost.is_empty(),
                "{} lost {:?}",
                member.name(),
                seen.lost
            );
            Ok(())
        })?;
    }
    ensure!(claims_of(&after) == claims_of(&before), "claims have moved");
    writer.stop(&crew.runtime)?;
    let written = crew.ends(TOPIC, PARTITIONS)?;
    crew.wait_handled(&written)?;
    let ends: BTreeMap<_, _> = written
        .iter()
        .map(|(place, it)| (place.clone(), it.end))
        .collect();
    wait::until_true("everything to be committed", wait::LONG, || {
        Ok(crew.offsets()? == ends)
    })?;
    for member in members {
        member.leave(&crew.runtime)?;
    }
    let story = crew.check(&written)?;
    ensure!(story.redelivered == 0, "{story:?}");
    cluster.stop()
}

/// With all members, whose sessions begin anew; and without any.
#[test]
fn all_brokers_killed_at_once_keep_offsets_members_and_claims() -> Result<()> {
    let mut cluster = Cluster::start(&bins(), 3)?;
    cluster.create_topic(TOPIC, PARTITIONS, 3)?;
    let mut crew = Crew::new(&cluster.bootstrap(), "g")?;
    crew.watch_offsets();
    let mut members = Vec::new();
    for i in 0..2 {
        members.push(crew.join(&format!("m{i}"), Plan::reads(TOPIC).commits_by_hand())?);
    }
    crew.wait_stable(2, PARTITIONS as usize)?;
    let writer = Writer::start(&crew.runtime, &cluster.bootstrap(), TOPIC, PARTITIONS, PACE);
    wait_commits(&members)?;
    for node in &mut cluster.nodes {
        node.kill()?;
    }
    cluster.start_all()?;
    crew.wait_stable(2, PARTITIONS as usize)?;
    wait_commits(&members)?;
    writer.stop(&crew.runtime)?;
    let written = crew.ends(TOPIC, PARTITIONS)?;
    crew.wait_handled(&written)?;
    let offsets: BTreeMap<_, _> = written
        .iter()
        .map(|(place, it)| (place.clone(), it.end))
        .collect();
    wait::until_true("everything to be committed", wait::LONG, || {
        Ok(crew.offsets()? == offsets)
    })?;
    for member in members {
        member.leave(&crew.runtime)?;
    }
    crew.check(&written)?;

    for node in &mut cluster.nodes {
        node.kill()?;
    }
    cluster.start_all()?;
    // Connections of before are found broken first.
    let kept = wait::until("an answer", wait::LONG, || Ok(Some(crew.offsets()?)))?;
    ensure!(kept == offsets, "{kept:?} instead of {offsets:?}");
    // Whoever comes goes on from there: there is nothing to read.
    let late = crew.join("late", Plan::reads(TOPIC))?;
    crew.wait_stable(1, PARTITIONS as usize)?;
    let writer = Writer::start(&crew.runtime, &cluster.bootstrap(), TOPIC, PARTITIONS, PACE);
    late.wait_seen("the next records", |seen| {
        seen.began.len() == PARTITIONS as usize
    })?;
    late.seen(|seen| {
        for (place, (_, start)) in &seen.began {
            ensure!(offsets.get(place) == Some(start), "{place} from {start}");
        }
        Ok(())
    })?;
    writer.stop(&crew.runtime)?;
    late.leave(&crew.runtime)?;
    cluster.stop()
}

/// A short spell of chaos: members and brokers killed, frozen and brought back at random.
#[test]
fn members_and_brokers_killed_at_random_handle_everything_at_least_once() -> Result<()> {
    const ROUNDS: usize = 12;
    let seed = std::env::var("QUTE_TEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(rand::random);
    eprintln!("QUTE_TEST_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let mut cluster = Cluster::start(&bins(), 3)?;
    cluster.create_topic(TOPIC, PARTITIONS, 3)?;
    let mut crew = Crew::new(&cluster.bootstrap(), "g")?;
    crew.watch_offsets();
    let mut members = Vec::new();
    let mut born = 0;
    let mut next = |crew: &Crew| {
        born += 1;
        let plan = match born % 2 {
            0 => Plan::reads(TOPIC),
            _ => Plan::reads(TOPIC).commits_by_hand(),
        };
        crew.join(&format!("m{born}"), plan)
    };
    for _ in 0..4 {
        members.push(next(&crew)?);
    }
    crew.wait_stable(4, PARTITIONS as usize)?;
    let writer = Writer::start(&crew.runtime, &cluster.bootstrap(), TOPIC, PARTITIONS, PACE);
    let mut ice = Vec::new();
    for round in 1..=ROUNDS {
        writer.wait_more(rng.random_range(1..20))?;
        let deed = rng.random_range(0..10);
        eprintln!("round {round} of {ROUNDS}: {deed}");
        match deed {
            0..=2 if members.len() > 1 => {
                let victim = rng.random_range(0..members.len());
                members.swap_remove(victim).kill()?;
            }
            3 | 4 if members.len() > 1 => {
                let sleeper = rng.random_range(0..members.len());
                let sleeper = members.swap_remove(sleeper);
                ice.push((sleeper.freeze(), sleeper));
            }
            5 if members.len() > 1 => {
                let leaver = rng.random_range(0..members.len());
                members.swap_remove(leaver).leave(&crew.runtime)?;
            }
            6 | 7 => {
                let place = rng.random_range(0..cluster.nodes.len());
                cluster.node(place)?.kill()?;
                cluster.start_one(place)?;
                cluster.node(place)?.wait_ready()?;
            }
            8 => {
                let place = coordinator_of(&crew, &cluster)?;
                cluster.node(place)?.kill()?;
                cluster.start_one(place)?;
                cluster.node(place)?.wait_ready()?;
            }
            _ => members.extend(ice.pop().map(|(ice, member)| {
                drop(ice);
                member
            })),
        }
        if members.len() < 3 {
            members.push(next(&crew)?);
        }
    }
    for (ice, member) in ice {
        drop(ice);
        members.push(member);
    }
    crew.wait_stable(members.len(), PARTITIONS as usize)?;
    writer.stop(&crew.runtime)?;
    let written = crew.ends(TOPIC, PARTITIONS)?;
    crew.wait_handled(&written)?;
    let story = crew.check(&written)?;
    eprintln!("{story:?}");
    for member in members {
        member.leave(&crew.runtime)?;
    }
    cluster.stop()
}
