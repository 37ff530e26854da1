//! Groups whose topics change under them.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use qute_client::TopicSpec;
use qute_tests::cluster::Cluster;
use qute_tests::oracle::Place;
use qute_tests::wait;

use super::crew::{Crew, Plan};
use super::writer::Writer;
use crate::bins;

const TOPIC: &str = "t";
const PARTITIONS: u32 = 3;
const PACE: Duration = Duration::from_millis(5);

/// So many records to each partition.
fn write(crew: &Crew, cluster: &Cluster, rounds: u64) -> Result<()> {
    let writer = Writer::start(&crew.runtime, &cluster.bootstrap(), TOPIC, PARTITIONS, PACE);
    writer.wait_more(rounds)?;
    writer.stop(&crew.runtime)
}

fn make_anew(crew: &Crew) -> Result<()> {
    crew.runtime.block_on(async {
        crew.client.delete_topic(TOPIC).await?;
        let spec = TopicSpec::new(TOPIC).partitions(PARTITIONS);
        Ok(crew.client.create_topic(spec).await.map(drop)?)
    })
}

/// S28: offsets of a topic are offsets of one incarnation.
#[test]
fn topic_made_anew_is_an_event_and_is_read_from_its_start() -> Result<()> {
    let cluster = Cluster::start(&bins(), 1)?;
    cluster.create_topic(TOPIC, PARTITIONS, 1)?;
    let crew = Crew::new(&cluster.bootstrap(), "g")?;
    let member = crew.join("m", Plan::reads(TOPIC).commits_by_hand())?;
    write(&crew, &cluster, 50)?;
    let written = crew.ends(TOPIC, PARTITIONS)?;
    crew.wait_handled(&written)?;
    member.wait_seen("commits", |seen| seen.commits > 0)?;
    let old = crew.describe()?;
    let old_ids: Vec<_> = old.claims.iter().map(|it| it.partition.topic_id).collect();

    make_anew(&crew)?;
    member.wait_seen("the news", |seen| seen.recreated == [TOPIC])?;
    let before = member.seen(|seen| seen.records);
    write(&crew, &cluster, 5)?;
    let ends = crew.ends(TOPIC, PARTITIONS)?;
    let new: u64 = ends.values().map(|offsets| offsets.end).sum();
    // Everything from offset 0 on, though the group had committed far beyond in the old one.
    member.wait_seen("all of the new one", |seen| seen.records == before + new)?;
    let seen = crew.wait_stable(1, PARTITIONS as usize)?;
    for claim in &seen.claims {
        ensure!(!old_ids.contains(&claim.partition.topic_id), "{claim:?}");
    }
    // The old one's offsets are forgotten.
    let all: BTreeMap<_, _> = ends
        .into_iter()
        .map(|(place, it)| (place, it.end))
        .collect();
    wait::until_true("commits", wait::LONG, || Ok(crew.offsets()? == all))?;
    member.leave(&crew.runtime)?;

    // While nobody is there, too.
    make_anew(&crew)?;
    write(&crew, &cluster, 5)?;
    let ends = crew.ends(TOPIC, PARTITIONS)?;
    let late = crew.join("late", Plan::reads(TOPIC))?;
    let all: u64 = ends.values().map(|offsets| offsets.end).sum();
    late.wait_seen("all of the new one", |seen| seen.records == all)?;
    late.seen(|seen| {
        ensure!(
            seen.began.values().all(|(_, start)| *start == 0),
            "{:?}",
            seen.began
        );
        Ok(())
    })?;
    late.leave(&crew.runtime)?;
    cluster.stop()
}

/// S27: new partitions raise the generation, and are read from their start; nothing else pauses or moves.
#[test]
fn partitions_added_are_shared_out_and_read_from_their_start() -> Result<()> {
    let cluster = Cluster::start(&bins(), 1)?;
    cluster.create_topic(TOPIC, PARTITIONS, 1)?;
    let mut crew = Crew::new(&cluster.bootstrap(), "g")?;
    let members = [
        crew.join("a", Plan::reads(TOPIC))?,
        crew.join("b", Plan::reads(TOPIC))?,
    ];
    crew.wait_stable(2, PARTITIONS as usize)?;
    write(&crew, &cluster, 10)?;
    let more = PARTITIONS * 2;
    crew.runtime
        .block_on(async { crew.client.add_partitions(TOPIC, more).await })?;
    let writer = Writer::start(&crew.runtime, &cluster.bootstrap(), TOPIC, more, PACE);
    writer.wait_more(10)?;
    writer.stop(&crew.runtime)?;
    crew.wait_stable(2, more as usize)?;
    let written = crew.ends(TOPIC, more)?;
    crew.wait_handled(&written)?;
    for partition in PARTITIONS..more {
        let place = Place::new(TOPIC, partition);
        let began = members
            .iter()
            .find_map(|m| m.seen(|seen| seen.began.get(&place).copied()));
        ensure!(
            began.map(|(_, start)| start) == Some(0),
            "{place}: {began:?}"
        );
    }
    let story = crew.check(&written)?;
    ensure!(story.redelivered == 0, "{story:?}");
    for member in members {
        member.leave(&crew.runtime)?;
    }
    cluster.stop()
}
