use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use qute_proto::ids::Offset;

use super::super::checkpoint::Checkpoint;
use super::super::*;
use super::harness::{Cluster, PATIENCE, eventually};
use crate::storage::LogConfig;

fn range(numbers: std::ops::Range<u64>) -> Vec<u64> {
    numbers.collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn group_of_three_that_loses_its_leader_loses_no_entry() {
    let mut cluster = Cluster::form(3).await;
    let (first, leader) = cluster.leader().await;
    let first_term = leader.leadership().term;
    cluster.propose(&leader, 0..1000, 100).await;
    assert_eq!(leader.applied().next_offset, Offset(1000));
    drop(leader);
    cluster.stop(first).await;

    let (_, leader) = cluster.leader().await;
    assert!(leader.leadership().term > first_term);
    cluster.propose(&leader, 1000..1200, 100).await;
    cluster.converged(&range(0..1200)).await;

    // The old leader comes back from its disk, at another port.
    cluster.restart(first).await;
    cluster.converged(&range(0..1200)).await;
    cluster.propose(&leader, 1200..1300, 100).await;
    cluster.converged(&range(0..1300)).await;
    // Elections and membership entries leave no holes in offsets.
    assert_eq!(cluster.numbers[first].offsets(), range(0..1300));
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_that_hands_over_follows_and_the_heir_has_everything() {
    let mut cluster = Cluster::form(3).await;
    let (first, leader) = cluster.leader().await;
    cluster.propose(&leader, 0..100, 100).await;
    assert!(leader.hand_over(PATIENCE).await);
    assert!(!leader.hand_over(PATIENCE).await, "it leads no more");
    drop(leader);

    let (second, heir) = cluster.leader().await;
    assert_ne!(first, second);
    cluster.propose(&heir, 100..200, 100).await;
    cluster.converged(&range(0..200)).await;
    drop(heir);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn group_of_three_restarted_at_once_serves_what_it_held() {
    let mut cluster = Cluster::form(3).await;
    let (_, leader) = cluster.leader().await;
    cluster.propose(&leader, 0..100, 2000).await;
    drop(leader);
    cluster.stop_all().await;
    for at in 0..3 {
        cluster.numbers[at] = Default::default();
        cluster.restart(at).await;
    }
    let (_, leader) = cluster.leader().await;
    cluster.converged(&range(0..100)).await;
    cluster.propose(&leader, 100..110, 2000).await;
    cluster.converged(&range(0..110)).await;
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_of_one_that_restarts_takes_a_new_term() {
    // S8
    let mut cluster = Cluster::form(1).await;
    let (_, leader) = cluster.leader().await;
    let term = leader.leadership().term;
    cluster.propose(&leader, 0..10, 100).await;
    drop(leader);
    cluster.stop(0).await;
    cluster.restart(0).await;
    let (_, leader) = cluster.leader().await;
    assert!(leader.leadership().term > term);
    cluster.converged(&range(0..10)).await;
    drop(leader);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn group_that_is_initialized_twice_says_no() {
    // S10
    let mut cluster = Cluster::form(1).await;
    let (_, leader) = cluster.leader().await;
    let members = BTreeMap::from([(Cluster::replica(0), cluster.broker(0).id)]);
    assert!(!leader.initialize(members).await.unwrap());
    drop(leader);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tail_that_was_never_committed_gives_way_to_the_new_leaders() {
    let mut cluster = Cluster::form(3).await;
    let (old, leader) = cluster.leader().await;
    cluster.propose(&leader, 0..10, 100).await;
    cluster.converged(&range(0..10)).await;
    let others: Vec<usize> = (0..3).filter(|at| *at != old).collect();
    // The followers are gone: what the leader takes now reaches nobody.
    for at in &others {
        assert!(cluster.broker(*at).groups.close(cluster.group).await);
    }
    let mut lost = Vec::new();
    for number in 10..20 {
        let admission = leader.admit(100).await.unwrap();
        let proposal = leader.propose(admission, super::harness::batch(number, 100), None);
        lost.push(proposal.unwrap());
    }
    let tail = eventually("the tail on the old leader's disk", async || {
        leader.log().synced_index().filter(|synced| *synced >= 20)
    })
    .await;
    drop(leader);
    cluster.stop(old).await;
    for proposal in lost {
        let error = proposal.await.unwrap_err();
        assert!(
            !error.is_unwritten(),
            "S11: unknown, not unwritten: {error}"
        );
    }

    for at in &others {
        cluster.open(*at).await;
    }
    let (_, leader) = cluster.leader().await;
    cluster.propose(&leader, 100..103, 100).await;
    let back = cluster.restart(old).await;
    let expected: Vec<u64> = (0..10).chain(100..103).collect();
    cluster.converged(&expected).await;
    assert!(back.log().last().unwrap().index < tail, "the tail is cut");
    drop((leader, back));
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn learner_of_a_cut_log_gets_the_snapshot_at_the_log_start_and_then_every_entry() {
    let mut cluster = Cluster::start(3).await;
    cluster.log = LogConfig {
        segment_bytes: 16 << 10,
        ..LogConfig::default()
    };
    cluster.open_all().await;
    cluster.initialize(3).await;
    let (_, leader) = cluster.leader().await;
    cluster.propose(&leader, 0..200, 500).await;
    // The log start is a command; the cut goes to the last checkpoint at or below it (S17).
    let start = super::harness::batch(150, 8).bytes;
    let log = leader.log().clone();
    eventually("a checkpoint at each roll", async || {
        let command = leader.command(start.clone(), 1_800_000_000_000, None, PATIENCE);
        command.await.unwrap();
        let saved = log.checkpoint_indexes();
        let bases = log.segment_bases();
        let all = bases.iter().skip(1).all(|base| saved.contains(&(base - 1)));
        all.then_some(())
    })
    .await;
    let expected = log
        .checkpoints()
        .unwrap()
        .into_iter()
        .map(|(_, bytes)| Checkpoint::decode(bytes).unwrap())
        .rfind(|it| it.next_offset <= Offset(150))
        .unwrap();
    assert!(expected.last.index > 50, "{expected:?}");
    let cut = eventually("the cut", async || {
        leader.cut_log().await.unwrap();
        log.purged()
    })
    .await;
    drop(log);
    assert_eq!(cut.index, expected.last.index);
    assert_eq!(leader.log().first_index(), cut.index + 1);
    eventually("the checkpoints below are gone", async || {
        (leader.log().checkpoint_indexes().first() == Some(&cut.index)).then_some(())
    })
    .await;
    cluster.propose(&leader, 200..220, 500).await;

    let at = cluster.add_broker().await;
    let learner = cluster.open(at).await;
    let broker = cluster.broker(at).id;
    leader
        .add_learner(Cluster::replica(at), broker, PATIENCE)
        .await
        .unwrap();
    cluster.converged(&range(0..220)).await;
    let purged = learner.log().purged().unwrap();
    assert_eq!(purged, cut, "one snapshot, at the log start");
    let retained = learner
        .log()
        .read(purged.index + 1..u64::MAX, usize::MAX)
        .unwrap();
    assert_eq!(retained.first().unwrap().index, cut.index + 1);
    let last = leader.log().last().unwrap().index;
    assert_eq!(
        retained.last().unwrap().index,
        last,
        "the rest as replication"
    );

    // The same content on both, checksums of time included (S7, S19).
    let original = leader
        .log()
        .read(cut.index + 1..u64::MAX, usize::MAX)
        .unwrap();
    assert_eq!(original.len(), retained.len());
    for (ours, theirs) in original.iter().zip(&retained) {
        assert_eq!(ours, theirs);
    }

    // It restarts from what it was sent, and becomes a voter.
    drop(learner);
    cluster.stop(at).await;
    cluster.numbers[at] = Default::default();
    cluster.restart(at).await;
    cluster.converged(&range(0..220)).await;
    let voters: BTreeSet<_> = (0..4).filter(|it| *it != 1).map(Cluster::replica).collect();
    let (_, leader) = cluster.leader().await;
    leader.set_voters(voters, false, PATIENCE).await.unwrap();
    drop(leader);
    let (_, leader) = cluster.leader().await;
    cluster.propose(&leader, 220..225, 500).await;
    drop(leader);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_without_a_quorum_confirms_nothing() {
    let mut cluster = Cluster::form(3).await;
    let (at, leader) = cluster.leader().await;
    let confirmed = leader.confirm(PATIENCE).await.unwrap();
    assert_eq!(confirmed.term, leader.leadership().term);
    for other in (0..3).filter(|other| *other != at) {
        cluster.stop(other).await;
    }
    let error = leader
        .confirm(Duration::from_millis(500))
        .await
        .unwrap_err();
    assert!(matches!(
        error,
        ConfirmError::NoQuorum | ConfirmError::NotLeader { .. }
    ));
    drop(leader);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn proposal_for_another_term_writes_nothing() {
    // S11: bound to the term it was checked in.
    let mut cluster = Cluster::form(1).await;
    let (_, leader) = cluster.leader().await;
    let term = leader.leadership().term;
    let before = leader.log().last();
    let admission = leader.admit(100).await.unwrap();
    let proposal = leader.propose(admission, super::harness::batch(1, 100), Some(term + 1));
    let error = proposal.unwrap().await.unwrap_err();
    assert!(error.is_unwritten(), "{error}");
    assert_eq!(leader.log().last(), before);
    drop(leader);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn proposals_beyond_the_bytes_in_flight_are_busy_until_some_are_applied() {
    let mut cluster = Cluster::form(1).await;
    let (_, leader) = cluster.leader().await;
    let size = group::ENTRY_BYTES_MAX;
    let held: Vec<Admission> = (0..group::IN_FLIGHT_BYTES_MAX / size)
        .map(|_| leader.try_admit(size).unwrap())
        .collect();
    assert!(matches!(leader.try_admit(1), Err(ProposeError::Busy)));
    drop(held);
    assert!(leader.try_admit(1).is_ok());
    assert!(matches!(
        leader.try_admit(size + 1),
        Err(ProposeError::TooLarge { .. })
    ));
    drop(leader);
    cluster.stop_all().await;
}
