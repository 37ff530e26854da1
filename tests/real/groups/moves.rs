//! Members that join, die and come back: who has to move, and who never pauses.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use qute_client::group::{GroupDescription, GroupState};
use qute_tests::cluster::Cluster;
use qute_tests::oracle::{Place, Step};
use qute_tests::wait;

use super::crew::{Claims, Crew, Member, Plan, claims_of};
use super::writer::Writer;
use crate::bins;

const TOPIC: &str = "t";
const PACE: Duration = Duration::from_millis(20);

/// What stays with whoever has it, by place.
fn kept(before: &Claims, after: &Claims) -> Claims {
    let same = |place: &Place, claim: &_| after.get(place) == Some(claim);
    let kept = before.iter().filter(|(place, claim)| same(place, claim));
    kept.map(|(place, claim)| (place.clone(), *claim)).collect()
}

/// The most and the fewest partitions of a member are one apart.
fn ensure_balanced(seen: &GroupDescription) -> Result<()> {
    let counts: Vec<usize> = seen
        .members
        .iter()
        .map(|member| member.claims.len())
        .collect();
    let (most, fewest) = (counts.iter().max(), counts.iter().min());
    let (most, fewest) = most.zip(fewest).context("no members")?;
    ensure!(most - fewest <= 1, "shared out as {counts:?}");
    Ok(())
}

/// Twenty join while the four that are there work on; one of the four does not finish what it has to give
/// up, so that the group is between two assignments for as long as the test wants.
#[test]
fn twenty_members_join_at_once_and_partitions_not_concerned_never_pause() -> Result<()> {
    const PARTITIONS: u32 = 64;
    const STEADY: usize = 4;
    const NEW: usize = 20;
    let cluster = Cluster::start(&bins(), 1)?;
    cluster.create_topic(TOPIC, PARTITIONS, 1)?;
    let mut crew = Crew::new(&cluster.bootstrap(), "g")?;
    let mut members = BTreeMap::new();
    for i in 0..STEADY {
        let name = format!("steady-{i}");
        members.insert(name.clone(), crew.join(&name, Plan::reads(TOPIC))?);
    }
    let before = crew.wait_stable(STEADY, PARTITIONS as usize)?;
    ensure_balanced(&before)?;
    let writer = Writer::start(&crew.runtime, &cluster.bootstrap(), TOPIC, PARTITIONS, PACE);
    for member in members.values() {
        let all = PARTITIONS as usize / STEADY;
        member.wait_seen("records of all it has", |seen| seen.began.len() == all)?;
    }
    let slow = members.get("steady-0").context("no member")?;
    slow.hold(true);
    let held = slow.seen(|seen| seen.records);
    slow.wait_seen("records that it holds back", |seen| {
        seen.records > held + 64
    })?;

    let joining: Vec<_> = (0..NEW)
        .map(|i| crew.begin(&format!("new-{i}"), Plan::reads(TOPIC)))
        .collect();
    for joining in joining {
        let member = joining.wait(&crew.runtime)?;
        members.insert(member.name().to_owned(), member);
    }
    // Everything that is to move has moved, but for what the slow one has.
    let all = STEADY + NEW;
    let between = wait::until("an assignment for all", wait::LONG, || {
        let seen = crew.describe()?;
        let slow = members.get("steady-0").context("no member")?;
        let waits = |seen: &GroupDescription| {
            seen.members.iter().all(|member| {
                let only_targets = member.claims.iter().all(|it| member.targets.contains(it));
                !member.targets.is_empty() && (only_targets || member.id == slow.id)
            })
        };
        let owned = seen.claims.len() == PARTITIONS as usize;
        Ok((seen.members.len() == all && owned && waits(&seen)).then_some(seen))
    })?;
    ensure!(
        between.listing.state == GroupState::Rebalancing,
        "it is over"
    );
    // All but the partitions that the slow one is to give up flow on, those that have moved as well.
    let slow = members.get("steady-0").context("no member")?.id;
    let (claims, at) = (claims_of(&between), crew.trace.len());
    let flowing: Claims = claims
        .into_iter()
        .filter(|(_, (id, _))| *id != slow)
        .collect();
    ensure!(flowing.len() > PARTITIONS as usize / 2, "{flowing:?}");
    writer.wait_more(3)?;
    wait::until_true("records in the midst of it", wait::LONG, || {
        let steps = crew.trace.lock();
        let mut got: BTreeSet<(Place, u64)> = BTreeSet::new();
        for step in steps.iter().skip(at) {
            if let Step::Delivered { place, epoch, .. } = step {
                got.insert((place.clone(), *epoch));
            }
        }
        let missing = flowing
            .iter()
            .find(|(place, (_, epoch))| !got.contains(&((*place).clone(), *epoch)));
        ensure!(missing.is_none(), "nothing of {missing:?}");
        Ok(true)
    })?;
    ensure!(crew.describe()?.listing.state == GroupState::Rebalancing);
    members.get("steady-0").context("no member")?.hold(false);

    let after = crew.wait_stable(all, PARTITIONS as usize)?;
    ensure_balanced(&after)?;
    // Whoever was there keeps as much as a fair share allows, under the claims that it had.
    let kept = kept(&claims_of(&before), &claims_of(&after));
    ensure!(
        kept.len() >= STEADY * (PARTITIONS as usize / all),
        "{kept:?}"
    );
    writer.stop(&crew.runtime)?;
    let written = crew.ends(TOPIC, PARTITIONS)?;
    crew.wait_handled(&written)?;
    for (name, member) in members {
        member.seen(|seen| {
            ensure!(seen.lost.is_empty(), "{name} lost {:?}", seen.lost);
            ensure!(seen.failed.is_empty(), "{name}: {:?}", seen.failed);
            Ok(())
        })?;
        member.leave(&crew.runtime)?;
    }
    // Nobody died: what was acknowledged was committed before it moved.
    let story = crew.check(&written)?;
    ensure!(story.redelivered == 0, "{story:?}");
    cluster.stop()
}

#[test]
fn member_killed_costs_only_its_own_partitions_a_move() -> Result<()> {
    const PARTITIONS: u32 = 12;
    let cluster = Cluster::start(&bins(), 1)?;
    cluster.create_topic(TOPIC, PARTITIONS, 1)?;
    let mut crew = Crew::new(&cluster.bootstrap(), "g")?;
    crew.watch_offsets();
    let mut members = Vec::new();
    for i in 0..4 {
        members.push(crew.join(&format!("m{i}"), Plan::reads(TOPIC))?);
    }
    let before = claims_of(&crew.wait_stable(4, PARTITIONS as usize)?);
    let writer = Writer::start(&crew.runtime, &cluster.bootstrap(), TOPIC, PARTITIONS, PACE);
    for member in &members {
        member.wait_seen("records", |seen| seen.began.len() == 3)?;
    }
    let victim = members.pop().context("no member")?;
    let (id, theirs) = (victim.id, of_member(&before, &victim));
    victim.kill()?;
    let after = claims_of(&crew.wait_stable(3, PARTITIONS as usize)?);
    for (place, (holder, epoch)) in &before {
        let (now, now_epoch) = after.get(place).context("nobody has it")?;
        if *holder == id {
            ensure!(*now_epoch == epoch + 1, "{place}: epoch {now_epoch}");
        } else {
            ensure!((now, now_epoch) == (holder, epoch), "{place} has moved");
        }
    }
    ensure!(theirs.len() == 3, "{theirs:?}");
    writer.stop(&crew.runtime)?;
    let written = crew.ends(TOPIC, PARTITIONS)?;
    crew.wait_handled(&written)?;
    let story = crew.check(&written)?;
    ensure!(story.claims == u64::from(PARTITIONS) + 3, "{story:?}");
    for member in members {
        member.leave(&crew.runtime)?;
    }
    cluster.stop()
}

fn of_member(claims: &Claims, member: &Member) -> BTreeSet<Place> {
    let theirs = claims.iter().filter(|(_, (id, _))| *id == member.id);
    theirs.map(|(place, _)| place.clone()).collect()
}

/// Whose partitions are whose, by stable name.
fn by_instance(seen: &GroupDescription) -> BTreeMap<String, BTreeSet<(String, u32)>> {
    let of_member = |member: &qute_client::group::GroupMember| {
        let claims = member.claims.iter();
        let claims = claims.map(|it| (it.topic.as_deref().unwrap_or("").to_owned(), it.partition));
        (
            member.instance.clone().unwrap_or_default(),
            claims.collect(),
        )
    };
    seen.members.iter().map(of_member).collect()
}

/// One after the other is stopped, started again under its name, and killed and started again.
#[test]
fn static_members_restarted_one_by_one_move_nothing() -> Result<()> {
    const PARTITIONS: u32 = 40;
    const MEMBERS: usize = 20;
    let cluster = Cluster::start(&bins(), 1)?;
    cluster.create_topic(TOPIC, PARTITIONS, 1)?;
    let mut crew = Crew::new(&cluster.bootstrap(), "g")?;
    let name = |i: usize| format!("worker-{i}");
    // A rolling restart is done with sessions that are longer than a restart takes.
    let plan = |i: usize| {
        let plan = Plan::reads(TOPIC).instance(&name(i));
        plan.with(|builder| builder.session_timeout(Duration::from_secs(20)))
    };
    let joining: Vec<_> = (0..MEMBERS)
        .map(|i| crew.begin(&name(i), plan(i)))
        .collect();
    let mut members = Vec::new();
    for joining in joining {
        members.push(joining.wait(&crew.runtime)?);
    }
    let before = crew.wait_stable(MEMBERS, PARTITIONS as usize)?;
    let writer = Writer::start(&crew.runtime, &cluster.bootstrap(), TOPIC, PARTITIONS, PACE);
    let mut restarted = Vec::new();
    for (i, member) in members.into_iter().enumerate() {
        member.wait_seen("records", |seen| seen.began.len() == 2)?;
        member.leave(&crew.runtime)?;
        restarted.push(crew.join(&name(i), plan(i))?);
    }
    let after = crew.wait_stable(MEMBERS, PARTITIONS as usize)?;
    ensure!(
        by_instance(&after) == by_instance(&before),
        "{:?}\n{:?}",
        by_instance(&before),
        by_instance(&after)
    );
    ensure!(after.listing.generation == before.listing.generation);
    for member in &restarted {
        member.wait_seen("records", |seen| seen.began.len() == 2)?;
    }
    writer.stop(&crew.runtime)?;
    let written = crew.ends(TOPIC, PARTITIONS)?;
    crew.wait_handled(&written)?;
    let story = crew.check(&written)?;
    ensure!(story.redelivered == 0, "stopped in order: {story:?}");
    for member in restarted {
        member.leave(&crew.runtime)?;
    }
    cluster.stop()
}

/// Its successor waits until the session of the killed one is over, and nothing else moves.
#[test]
fn static_member_killed_and_started_again_moves_nothing() -> Result<()> {
    const PARTITIONS: u32 = 6;
    let cluster = Cluster::start(&bins(), 1)?;
    cluster.create_topic(TOPIC, PARTITIONS, 1)?;
    let mut crew = Crew::new(&cluster.bootstrap(), "g")?;
    let plan = |name: &str| Plan::reads(TOPIC).instance(name);
    let other = crew.join("a", plan("a"))?;
    let victim = crew.join("b", plan("b"))?;
    let before = crew.wait_stable(2, PARTITIONS as usize)?;
    let writer = Writer::start(&crew.runtime, &cluster.bootstrap(), TOPIC, PARTITIONS, PACE);
    victim.wait_seen("records", |seen| seen.began.len() == 3)?;
    victim.kill()?;
    let successor = crew.join("b2", plan("b"))?;
    let after = crew.wait_stable(2, PARTITIONS as usize)?;
    ensure!(by_instance(&after) == by_instance(&before));
    ensure!(after.listing.generation == before.listing.generation);
    successor.wait_seen("records", |seen| seen.began.len() == 3)?;
    writer.stop(&crew.runtime)?;
    let written = crew.ends(TOPIC, PARTITIONS)?;
    crew.wait_handled(&written)?;
    crew.check(&written)?;
    for member in [other, successor] {
        member.seen(|seen| {
            ensure!(seen.lost.is_empty(), "lost {:?}", seen.lost);
            Ok(())
        })?;
        member.leave(&crew.runtime)?;
    }
    cluster.stop()
}
