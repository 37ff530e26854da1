//! What a group refuses, and how it says so.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use qute_client::group::{
    AssignInput, Assignment, Assignor, OffsetCommit, StickyAssignor, TopicPartition,
};
use qute_client::{Error, ErrorKind, ProducerConfig, Record};
use qute_tests::cluster::Cluster;

use super::crew::{Crew, Plan};
use crate::bins;

const TOPIC: &str = "t";
const RECORDS: u64 = 10;

/// The sticky one, under another version.
struct Versioned(u32);

impl Assignor for Versioned {
    fn name(&self) -> &str {
        "house"
    }

    fn version(&self) -> u32 {
        self.0
    }

    fn assign(&self, input: &AssignInput) -> Assignment {
        StickyAssignor.assign(input)
    }
}

/// During a rolling upgrade: members that know both versions share the group with either, and one that
/// has nothing in common with somebody is told so, by name.
#[test]
fn member_without_a_common_assignor_is_refused_with_both_sides_named() -> Result<()> {
    let cluster = Cluster::start(&bins(), 1)?;
    cluster.create_topic(TOPIC, 4, 1)?;
    let crew = Crew::new(&cluster.bootstrap(), "g")?;
    let plan = |versions: &'static [u32]| {
        let plan = Plan::reads(TOPIC);
        plan.with(|builder| {
            versions
                .iter()
                .fold(builder, |builder, &v| builder.assignor(Versioned(v)))
        })
    };
    let old = crew.join("old", plan(&[1]))?;
    let Err(error) = crew.join("new", plan(&[2])) else {
        bail!("members that can't agree share a group");
    };
    let refused: &Error = error.downcast_ref().context("another error")?;
    ensure!(
        refused.kind() == ErrorKind::InconsistentAssignor,
        "{refused}"
    );
    ensure!(!refused.is_retriable(), "{refused}");
    let text = refused.to_string();
    for named in ["house", "1", "2"] {
        ensure!(text.contains(named), "{named} is not named: {text}");
    }
    // Nothing has happened to who was there.
    let seen = crew.wait_stable(1, 4)?;
    let assignor = seen.listing.assignor.context("no assignor")?;
    ensure!((assignor.name.as_str(), assignor.version) == ("house", 1));

    let both = crew.join("both", plan(&[2, 1]))?;
    crew.wait_stable(2, 4)?;
    // With the old one gone, the new version is what both have.
    old.leave(&crew.runtime)?;
    let new = crew.join("new", plan(&[2]))?;
    let seen = crew.wait_stable(2, 4)?;
    let assignor = seen.listing.assignor.context("no assignor")?;
    ensure!((assignor.name.as_str(), assignor.version) == ("house", 2));
    for member in [both, new] {
        member.leave(&crew.runtime)?;
    }
    cluster.stop()
}

/// S18: the leader of the partition says where it ends.
fn ensure_out_of_range(result: qute_client::Result<()>, offset: u64) -> Result<()> {
    let Err(error) = result else {
        bail!("{offset} was committed");
    };
    ensure!(error.kind() == ErrorKind::OffsetOutOfRange, "{error}");
    let bounds = error.bounds().context("no bounds")?;
    ensure!(
        bounds.log_start_offset == 0 && bounds.high_watermark == RECORDS,
        "{bounds:?}"
    );
    ensure!(error.offset() == Some(offset), "{:?}", error.offset());
    ensure!(
        error.topic() == Some(TOPIC) && error.partition() == Some(0),
        "{error}"
    );
    ensure!(!error.is_retriable(), "{error}");
    Ok(())
}

#[test]
fn commit_beyond_the_end_is_a_typed_error_with_the_bounds() -> Result<()> {
    let cluster = Cluster::start(&bins(), 1)?;
    cluster.create_topic(TOPIC, 1, 1)?;
    let crew = Crew::new(&cluster.bootstrap(), "g")?;
    crew.runtime.block_on(async {
        let producer = crew.client.producer(ProducerConfig::default())?;
        for _ in 0..RECORDS {
            producer.send(Record::to(TOPIC).value("x")).await?;
        }
        anyhow::Ok(())
    })?;

    // By a member.
    let member = crew.join("m", Plan::reads(TOPIC).commits_by_hand())?;
    member.wait_seen("all records", |seen| seen.records == RECORDS)?;
    let partition = TopicPartition::new(TOPIC, 0);
    let commit = |offset| {
        crew.runtime
            .block_on(member.control.commit_offset(&partition, offset))
    };
    ensure_out_of_range(commit(RECORDS + 1), RECORDS + 1)?;
    ensure_out_of_range(commit(u64::MAX), u64::MAX)?;
    commit(RECORDS)?;
    let Err(error) = commit(RECORDS - 1) else {
        bail!("a commit went back");
    };
    ensure!(error.kind() == ErrorKind::OffsetBehind, "{error}");
    let other = TopicPartition::new(TOPIC, 7);
    let Err(error) = crew
        .runtime
        .block_on(member.control.commit_offset(&other, 0))
    else {
        bail!("committed for a partition that is not there");
    };
    ensure!(error.kind() == ErrorKind::ClaimFenced, "{error}");

    // By a program without membership: not while there are members, and never beyond the end.
    let alone = |offset: u64| {
        let groups = crew.client.groups();
        let commit = [OffsetCommit::new(TOPIC, 0, offset)];
        crew.runtime
            .block_on(async move { groups.commit("g", commit).await })
    };
    let Err(error) = alone(3) else {
        bail!("committed behind the members' backs");
    };
    ensure!(error.kind() == ErrorKind::GroupNotEmpty, "{error}");
    member.leave(&crew.runtime)?;
    ensure_out_of_range(alone(RECORDS + 1), RECORDS + 1)?;
    alone(RECORDS)?;
    ensure!(crew.offsets()?.into_values().collect::<Vec<_>>() == [RECORDS]);
    cluster.stop()
}

/// Quotas of the broker are typed errors, and what is there goes on.
#[test]
fn groups_and_members_beyond_their_limits_are_refused_by_name() -> Result<()> {
    let mut cluster = Cluster::prepare(&bins(), 1)?;
    let config = cluster.dir().join("limits.toml");
    std::fs::write(&config, "groups_max = 2\ngroup_members_max = 2\n")?;
    let config = format!("--config={}", config.display());
    cluster.node(0)?.set_extra(&[&config]);
    cluster.start_all()?;
    cluster.create_topic(TOPIC, 4, 1)?;
    let mut crews = BTreeMap::new();
    for group in ["a", "b", "c"] {
        crews.insert(group, Crew::new(&cluster.bootstrap(), group)?);
    }
    let crew = |group: &str| crews.get(group).context("no crew");
    let first = crew("a")?.join("a1", Plan::reads(TOPIC))?;
    let second = crew("b")?.join("b1", Plan::reads(TOPIC))?;
    let also = crew("a")?.join("a2", Plan::reads(TOPIC))?;
    for (group, name) in [("c", "c1"), ("a", "a3")] {
        let plan = Plan::reads(TOPIC).with(|it| it.join_timeout(Duration::from_secs(30)));
        let Err(error) = crew(group)?.join(name, plan) else {
            bail!("{name} joined beyond the limit");
        };
        let refused: &Error = error.downcast_ref().context("another error")?;
        ensure!(refused.kind() == ErrorKind::GroupLimit, "{refused}");
    }
    crew("a")?.wait_stable(2, 4)?;
    for (member, group) in [(first, "a"), (also, "a"), (second, "b")] {
        member.leave(&crew(group)?.runtime)?;
    }
    cluster.stop()
}
