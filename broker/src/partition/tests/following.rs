//! Reads from replicas that do not lead.

use std::sync::Arc;
use std::time::Duration;

use qute_proto::ids::Offset;

use super::cuts::{Cluster, numbered, produce};
use crate::partition::error::Error;
use crate::partition::machine::{Command, RecordsMachine};
use crate::partition::replica::{Chunk, Replica};
use crate::partition::testing::{PATIENCE, TestBroker, batch, partition, spec};
use crate::raft::testing::{Played, PlayedLeader};
use crate::raft::{AppliedEntry, EntryKind, StateMachine as _};

async fn within<T>(wait: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, wait).await.unwrap()
}

fn offsets(chunk: &Chunk) -> Vec<u64> {
    chunk.batches.iter().map(|one| one.base_offset.0).collect()
}

/// Reads up to `end` as a subscription does, and gives the base offsets.
async fn read_to(replica: &Replica, end: u64) -> Vec<u64> {
    within(replica.wait_following(PATIENCE)).await.unwrap();
    let (mut all, mut next) = (Vec::new(), Offset(0));
    while next < Offset(end) {
        within(replica.wait_beyond_following(next)).await.unwrap();
        let chunk = replica.read_following(next, 1 << 20).await.unwrap();
        all.extend(offsets(&chunk));
        next = chunk.next_offset;
    }
    all
}

impl Cluster {
    /// The leader and the others.
    async fn roles(&self) -> (usize, Vec<usize>) {
        let leader = self.wait_leader().await;
        (leader, (0..3).filter(|at| *at != leader).collect())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_serve_what_is_committed_and_wake_for_more() {
    let cluster = Cluster::start().await;
    let mut acknowledged = Vec::new();
    produce(&cluster, &mut acknowledged, 20).await;
    let (leader, followers) = cluster.roles().await;
    let term = cluster.replicas[leader].serving().unwrap();
    let reading: Vec<_> = followers
        .iter()
        .map(|at| {
            let replica = Arc::clone(&cluster.replicas[*at]);
            tokio::spawn(async move { read_to(&replica, 40).await })
        })
        .collect();
    produce(&cluster, &mut acknowledged, 40).await;
    for reader in reading {
        assert_eq!(reader.await.unwrap(), (0..40).collect::<Vec<_>>());
    }
    for at in followers {
        let replica = &cluster.replicas[at];
        assert_eq!(within(replica.wait_following(PATIENCE)).await, Ok(term));
        // As a leader it serves nobody.
        let as_leader = replica.read(Offset(0), 1, term).await;
        assert_eq!(as_leader, Err(Error::NotLeader));
    }
    let leads = &cluster.replicas[leader];
    assert_eq!(leads.check_following(), Err(Error::NotLeader));
    assert_eq!(
        leads.read_following(Offset(0), 1).await,
        Err(Error::NotLeader)
    );
    cluster.stop().await;
}

// S18: it does not know the end, so nothing is beyond it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s18_offset_beyond_a_follower_s_high_watermark_waits() {
    let cluster = Cluster::start().await;
    let mut acknowledged = Vec::new();
    produce(&cluster, &mut acknowledged, 5).await;
    let (_, followers) = cluster.roles().await;
    let replica = Arc::clone(&cluster.replicas[followers[0]]);
    within(replica.wait_following(PATIENCE)).await.unwrap();
    for offset in [30, u64::MAX] {
        let chunk = replica.read_following(Offset(offset), 1 << 20).await;
        let chunk = chunk.unwrap();
        assert!(chunk.batches.is_empty() && chunk.next_offset == Offset(offset));
    }
    let waiting = tokio::spawn(async move {
        replica.wait_beyond_following(Offset(30)).await.unwrap();
        replica.read_following(Offset(30), 1).await.unwrap()
    });
    produce(&cluster, &mut acknowledged, 31).await;
    assert_eq!(offsets(&within(waiting).await.unwrap()), [30]);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cut_off_follower_ends_its_readers_and_serves_again_once_it_is_back() {
    let cluster = Cluster::start().await;
    let mut acknowledged = Vec::new();
    produce(&cluster, &mut acknowledged, 5).await;
    let (_, followers) = cluster.roles().await;
    let replica = &cluster.replicas[followers[0]];
    assert_eq!(read_to(replica, 5).await.len(), 5);
    cluster.cuts[followers[0]].send_replace(false);
    let waited = within(replica.wait_beyond_following(Offset(5))).await;
    assert_eq!(waited, Err(Error::LeaderLost));
    let read = replica.read_following(Offset(0), 1).await;
    assert_eq!(read, Err(Error::LeaderLost));
    let started = replica.wait_following(Duration::from_millis(100)).await;
    assert_eq!(started, Err(Error::LeaderLost));
    // The others go on without it; it catches up.
    produce(&cluster, &mut acknowledged, 10).await;
    assert_eq!(replica.bounds().high_watermark, Offset(5));
    cluster.cuts[followers[0]].send_replace(true);
    within(replica.wait_following(PATIENCE)).await.unwrap();
    assert_eq!(read_to(replica, 10).await, (0..10).collect::<Vec<_>>());
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follower_that_is_elected_ends_its_readers_and_the_other_follows_on() {
    let cluster = Cluster::start().await;
    let mut acknowledged = Vec::new();
    produce(&cluster, &mut acknowledged, 5).await;
    let (leader, followers) = cluster.roles().await;
    let waiting: Vec<_> = followers
        .iter()
        .map(|at| {
            let replica = Arc::clone(&cluster.replicas[*at]);
            tokio::spawn(async move {
                replica.wait_following(PATIENCE).await?;
                replica.wait_beyond_following(Offset(5)).await
            })
        })
        .collect();
    for at in &followers {
        within(cluster.replicas[*at].wait_following(PATIENCE))
            .await
            .unwrap();
    }
    let handed = cluster.replicas[leader].group().hand_over(PATIENCE).await;
    assert!(handed);
    let elected = cluster.wait_leader().await;
    assert!(followers.contains(&elected));
    produce(&cluster, &mut acknowledged, 6).await;
    for (at, waited) in followers.iter().zip(waiting) {
        let waited = within(waited).await.unwrap();
        if *at == elected {
            assert_eq!(waited, Err(Error::NotLeader));
        } else {
            assert_eq!(waited, Ok(()));
        }
    }
    cluster.stop().await;
}

// S17: the log start is replicated, so a follower's word on it is as good as the leader's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s17_offset_below_the_log_start_is_out_of_range_at_a_follower() {
    let cluster = Cluster::start().await;
    let mut acknowledged = Vec::new();
    produce(&cluster, &mut acknowledged, 10).await;
    let (leader, followers) = cluster.roles().await;
    let moved = cluster.replicas[leader].set_log_start(Offset(4));
    assert_eq!(within(moved).await, Ok(Offset(4)));
    let replica = &cluster.replicas[followers[0]];
    let applied = async {
        let mut applied = replica.group().watch_applied();
        while replica.bounds().log_start < Offset(4) {
            applied.changed().await.unwrap();
        }
    };
    within(applied).await;
    let refused = replica.read_following(Offset(3), 1).await;
    assert!(
        matches!(
            refused,
            Err(Error::OutOfRange {
                log_start: Offset(4),
                ..
            })
        ),
        "{refused:?}"
    );
    let chunk = replica.read_following(Offset(4), 1).await.unwrap();
    assert_eq!(offsets(&chunk), [4]);
    cluster.stop().await;
}

async fn played(term: u64) -> (TestBroker, Arc<Replica>, PlayedLeader) {
    let broker = TestBroker::start().await;
    let replica = broker.replicas.open(spec(0)).await.unwrap();
    let follower = replica.group().clone();
    (broker, replica, PlayedLeader { follower, term })
}

/// What a follower shows from offset 0 on: the values' offsets and bytes.
async fn shown(replica: &Replica) -> Vec<(u64, bytes::Bytes)> {
    let chunk = replica.read_following(Offset(0), 1 << 20).await.unwrap();
    let batches = chunk.batches.into_iter();
    batches.map(|one| (one.base_offset.0, one.bytes)).collect()
}

#[tokio::test]
async fn uncommitted_tail_is_never_shown_and_its_successor_is() {
    let (broker, replica, leader) = played(1).await;
    assert_eq!(replica.check_following(), Err(Error::LeaderLost));
    let entries = vec![
        Played::Members,
        Played::Batch(numbered(0), 1),
        Played::Batch(numbered(1), 1),
        Played::Batch(numbered(2), 1),
    ];
    leader.append(None, entries, Some((1, 1))).await;
    within(replica.wait_beyond_following(Offset(0)))
        .await
        .unwrap();
    assert_eq!(replica.wait_following(PATIENCE).await, Ok(1));
    // In the log up to 3, committed up to 1.
    assert_eq!(replica.log_end(), Offset(3));
    assert_eq!(shown(&replica).await, [(0, numbered(0))]);
    assert!(
        replica
            .read_following(Offset(1), 1 << 20)
            .await
            .unwrap()
            .batches
            .is_empty()
    );
    // A new leader cuts the tail and writes another record in its place.
    let next = PlayedLeader {
        follower: replica.group().clone(),
        term: 2,
    };
    let other = batch(8, 0, 1);
    let entries = vec![Played::Batch(other.clone(), 1)];
    next.append(Some((1, 1)), entries, Some((1, 1))).await;
    assert_eq!(shown(&replica).await, [(0, numbered(0))]);
    next.append(Some((2, 2)), Vec::new(), Some((2, 2))).await;
    within(replica.wait_beyond_following(Offset(1)))
        .await
        .unwrap();
    assert_eq!(shown(&replica).await, [(0, numbered(0)), (1, other)]);
    assert_eq!(replica.leadership().leader.unwrap().replica, next.replica());
    broker.stop().await;
}

// S17: a replica that began with a snapshot knows the log start of that time only.
#[tokio::test]
async fn s17_records_below_a_snapshot_are_for_others_until_the_log_start_has_come() {
    let (broker, replica, leader) = played(1).await;
    let mut machine = RecordsMachine::new();
    for index in 0..3 {
        machine.apply(&AppliedEntry {
            term: 1,
            index: index + 1,
            kind: EntryKind::Batch,
            base_offset: Offset(index),
            records: 1,
            broker_time_ms: 1,
            payload: numbered(index),
        });
    }
    leader
        .install((1, 3), Offset(3), machine.checkpoint())
        .await;
    let entries = vec![Played::Batch(numbered(3), 1)];
    leader.append(Some((1, 3)), entries, Some((1, 4))).await;
    within(replica.wait_beyond_following(Offset(3)))
        .await
        .unwrap();
    assert_eq!(replica.bounds().log_start, Offset(0));
    for offset in 0..3 {
        let read = replica.read_following(Offset(offset), 1 << 20).await;
        assert_eq!(read, Err(Error::NotLeader), "offset {offset}");
    }
    let chunk = replica.read_following(Offset(3), 1).await.unwrap();
    assert_eq!(offsets(&chunk), [3]);
    let moved = vec![Played::Command(Command::LogStart(Offset(3)).encode())];
    leader.append(Some((1, 4)), moved, Some((1, 5))).await;
    let applied = async {
        let mut applied = replica.group().watch_applied();
        while replica.bounds().log_start < Offset(3) {
            applied.changed().await.unwrap();
        }
    };
    within(applied).await;
    let read = replica.read_following(Offset(2), 1 << 20).await;
    assert!(matches!(read, Err(Error::OutOfRange { .. })), "{read:?}");
    assert_eq!(replica.partition(), partition(0));
    broker.stop().await;
}

#[tokio::test]
async fn deleted_replica_ends_its_readers() {
    let (broker, replica, leader) = played(1).await;
    leader
        .append(None, vec![Played::Members], Some((1, 0)))
        .await;
    within(replica.wait_following(PATIENCE)).await.unwrap();
    let waiting = {
        let replica = Arc::clone(&replica);
        tokio::spawn(async move { replica.wait_beyond_following(Offset(0)).await })
    };
    drop(leader);
    let id = replica.id();
    drop(replica);
    broker.replicas.delete(partition(0), id).await.unwrap();
    let ended = within(waiting).await.unwrap();
    assert!(
        matches!(ended, Err(Error::NotHere(_) | Error::LeaderLost)),
        "{ended:?}"
    );
    broker.stop().await;
}
