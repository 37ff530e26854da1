//! Members and coordinators that stand still and wake up.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use qute_client::ErrorKind;
use qute_proto::v1::{CommitOffsetsRequest, ErrorCode, OffsetCommit};
use qute_tests::cluster::Cluster;
use qute_tests::member::Coordinators;

use super::crew::{Crew, Plan, claims_of};
use super::writer::Writer;
use crate::bins;

const TOPIC: &str = "t";
const PACE: Duration = Duration::from_millis(20);

/// It wakes up with records in its hands, with acknowledgements that it has not committed, and with more
/// on the way to it.
#[test]
fn member_frozen_past_its_session_commits_and_delivers_nothing_of_what_others_have() -> Result<()> {
    const PARTITIONS: u32 = 4;
    let cluster = Cluster::start(&bins(), 1)?;
    cluster.create_topic(TOPIC, PARTITIONS, 1)?;
    let mut crew = Crew::new(&cluster.bootstrap(), "g")?;
    crew.watch_offsets();
    let sleeper = crew.join("sleeper", Plan::reads(TOPIC).commits_by_hand())?;
    crew.wait_stable(1, PARTITIONS as usize)?;
    let writer = Writer::start(&crew.runtime, &cluster.bootstrap(), TOPIC, PARTITIONS, PACE);
    sleeper.wait_seen("commits", |seen| seen.commits > 3 && seen.began.len() == 4)?;
    sleeper.hold(true);
    let records = sleeper.seen(|seen| seen.records);
    sleeper.wait_seen("records that it holds", |seen| seen.records > records + 20)?;
    let theirs = claims_of(&crew.describe()?);
    let ice = sleeper.freeze();

    let heir = crew.join("heir", Plan::reads(TOPIC))?;
    let claims = claims_of(&crew.wait_stable(1, PARTITIONS as usize)?);
    for (place, (holder, epoch)) in &claims {
        let before = theirs.get(place).context("was not held")?;
        ensure!(*holder == heir.id && *epoch > before.1, "{place}: {epoch}");
    }
    heir.wait_seen("records", |seen| seen.began.len() == 4)?;
    writer.wait_more(20)?;

    // On the wire: the old claims are nobody's.
    let committed = crew.offsets()?;
    let request = CommitOffsetsRequest {
        group: crew.group.clone(),
        member_id: sleeper.id.to_wire(),
        member_epoch: 1,
        offsets: crew
            .describe()?
            .claims
            .iter()
            .map(|claim| OffsetCommit {
                topic_id: claim.partition.topic_id.to_wire(),
                partition: claim.partition.partition,
                claim_epoch: claim.claim_epoch - 1,
                offset: 1 << 40,
                ..OffsetCommit::default()
            })
            .collect(),
    };
    let address = cluster.nodes.first().context("no broker")?.address();
    let answer = crew.runtime.block_on(async {
        let coordinators = Coordinators::connect(&address).await?;
        let mut coordinator = coordinators.of(&request.group).await?;
        anyhow::Ok(coordinator.commit_offsets(request).await?.into_inner())
    })?;
    let is_fenced =
        |code: ErrorCode| matches!(code, ErrorCode::ClaimFenced | ErrorCode::UnknownMember);
    let refused_whole = answer
        .error
        .as_ref()
        .is_some_and(|error| is_fenced(error.code()));
    let mut each = answer.results.iter().map(|result| result.error.as_ref());
    ensure!(
        refused_whole
            || (answer.results.len() == 4 && each.all(|e| e.is_some_and(|e| is_fenced(e.code())))),
        "{answer:?}"
    );
    for (place, offset) in crew.offsets()? {
        ensure!(offset < 1 << 40, "{place}: {offset}");
        ensure!(committed.get(&place).is_none_or(|before| *before <= offset));
    }

    drop(ice);
    // It finds out by itself, acknowledges what it has in its hands all the same, and goes on as a new
    // member with what it gets then.
    sleeper.wait_seen("its loss", |seen| seen.lost.len() == 4)?;
    sleeper.hold(false);
    let shared = claims_of(&crew.wait_stable(2, PARTITIONS as usize)?);
    ensure!(
        shared.values().filter(|(id, _)| *id == sleeper.id).count() == 2,
        "{shared:?}"
    );
    sleeper.wait_seen("records again", |seen| {
        let epochs = seen
            .began
            .iter()
            .filter(|(place, (epoch, _))| shared.get(place).is_some_and(|(_, now)| now == epoch));
        epochs.count() == 2
    })?;
    writer.stop(&crew.runtime)?;
    let written = crew.ends(TOPIC, PARTITIONS)?;
    crew.wait_handled(&written)?;
    // Nothing under an old epoch, nothing back, nothing twice but what was not committed.
    let story = crew.check(&written)?;
    ensure!(story.redelivered >= 20, "{story:?}");
    sleeper.seen(|seen| {
        for error in &seen.commit_errors {
            let kind = error.kind();
            ensure!(
                matches!(kind, ErrorKind::UnknownMember | ErrorKind::ClaimFenced),
                "{error}"
            );
        }
        Ok(())
    })?;
    for member in [sleeper, heir] {
        member.leave(&crew.runtime)?;
    }
    cluster.stop()
}

/// Another broker coordinates meanwhile; nobody is expired, neither by it nor by the one that wakes up.
#[test]
fn coordinator_frozen_and_thawed_expires_nobody() -> Result<()> {
    const PARTITIONS: u32 = 6;
    let mut cluster = Cluster::start(&bins(), 3)?;
    cluster.create_topic(TOPIC, PARTITIONS, 3)?;
    let mut crew = Crew::new(&cluster.bootstrap(), "g")?;
    crew.watch_offsets();
    // Longer than a takeover takes on a busy machine; what counts is that nobody is expired.
    let plan = || {
        let plan = Plan::reads(TOPIC).commits_by_hand();
        plan.with(|builder| builder.session_timeout(Duration::from_secs(60)))
    };
    let mut members = Vec::new();
    for i in 0..3 {
        members.push(crew.join(&format!("m{i}"), plan())?);
    }
    let before = crew.wait_stable(3, PARTITIONS as usize)?;
    let writer = Writer::start(&crew.runtime, &cluster.bootstrap(), TOPIC, PARTITIONS, PACE);
    for _ in 0..3 {
        let coordinator = crew.describe()?.coordinator;
        let place = cluster.place_of(&coordinator.to_string())?;
        for member in &members {
            member.wait_seen("records and commits", |seen| {
                seen.commits > 0 && seen.began.len() == 2
            })?;
        }
        cluster.node(place)?.pause()?;
        // The others' view: a commit is confirmed by somebody else.
        let commits: Vec<u64> = members
            .iter()
            .map(|m| m.seen(|seen| seen.commits))
            .collect();
        for (member, commits) in members.iter().zip(commits) {
            // One may have been on its way.
            member.wait_seen("commits", |seen| seen.commits > commits + 1)?;
        }
        ensure!(crew.describe()?.coordinator != coordinator);
        cluster.node(place)?.resume()?;
        cluster.node(place)?.wait_ready()?;
        writer.wait_more(10)?;
    }
    let after = crew.wait_stable(3, PARTITIONS as usize)?;
    ensure!(claims_of(&after) == claims_of(&before), "claims have moved");
    ensure!(after.listing.generation == before.listing.generation);
    writer.stop(&crew.runtime)?;
    let written = crew.ends(TOPIC, PARTITIONS)?;
    crew.wait_handled(&written)?;
    let story = crew.check(&written)?;
    ensure!(story.redelivered == 0, "{story:?}");
    for member in members {
        member.seen(|seen| {
            ensure!(seen.lost.is_empty(), "{:?}", seen.lost);
            Ok(())
        })?;
        member.leave(&crew.runtime)?;
    }
    cluster.stop()
}
