use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use qute_proto::ids::{BrokerId, ReplicaId};
use qute_proto::internal::{FrameKind, GroupLeader, PeerFrame};
use tokio::time::Instant;

use super::super::lane::{Lane, LinkError};
use super::super::queue::Urgency;
use super::super::*;
use super::harness::{Cluster, PATIENCE, batch, eventually};
use crate::env::{Fault, FaultOp, Fs as _, SimFs};

async fn ask(cluster: &Cluster, frame: PeerFrame) -> Result<PeerFrame, LinkError> {
    let target = cluster.broker(1).id;
    let link = cluster.broker(0).peers.link(target, Lane::Control);
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut ticket = link.send(frame, Urgency::Now, deadline).await?;
    ticket.answer(deadline).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_for_another_replica_id_is_refused() {
    // S9: a replica that came back under a new id is never taken for the old one.
    let mut cluster = Cluster::form(3).await;
    cluster.leader().await;
    let frame = PeerFrame {
        group: Some(cluster.group.to_wire()),
        target: 99,
        kind: FrameKind::VoteRequest.into(),
        ..Default::default()
    };
    let error = ask(&cluster, frame.clone()).await.unwrap_err();
    assert!(matches!(error, LinkError::Remote(_)), "{error}");
    assert!(
        error.to_string().contains("replica 99 is not here"),
        "{error}"
    );

    let unknown = PeerFrame {
        group: Some(GroupId::CLUSTER.to_wire()),
        ..frame
    };
    let error = ask(&cluster, unknown).await.unwrap_err();
    assert!(error.to_string().contains("not open here"), "{error}");
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_that_make_no_sense_are_refused_and_the_stream_lives_on() {
    let mut cluster = Cluster::form(3).await;
    let (_, leader) = cluster.leader().await;
    let kinds = [
        FrameKind::Unspecified,
        FrameKind::AppendRequest,
        FrameKind::AppendResponse,
        FrameKind::VoteRequest,
        FrameKind::PreVoteRequest,
        FrameKind::SnapshotRequest,
        FrameKind::TransferRequest,
    ];
    for kind in kinds {
        let frame = PeerFrame {
            group: Some(cluster.group.to_wire()),
            target: Cluster::replica(1).0,
            kind: kind.into(),
            payload: vec![0xff; 100].into(),
            ..Default::default()
        };
        let error = ask(&cluster, frame).await.unwrap_err();
        assert!(matches!(error, LinkError::Remote(_)), "{kind:?}: {error}");
    }
    let no_group = PeerFrame {
        target: 2,
        kind: FrameKind::VoteRequest.into(),
        ..Default::default()
    };
    assert!(ask(&cluster, no_group).await.is_err());
    cluster.propose(&leader, 0..10, 100).await;
    drop(leader);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follower_that_is_full_refuses_and_catches_up_once_there_is_room() {
    // S4: running out of space is no failure; append never meets it.
    let disk = Arc::new(SimFs::new(4));
    disk.set_capacity(24 << 20);
    let mut cluster = Cluster::start(2).await;
    let small = cluster.add_broker_on(disk.clone()).await;
    cluster.open(0).await;
    cluster.open(1).await;
    cluster.initialize(3).await;
    let (_, leader) = cluster.leader().await;
    let follower = cluster.open(small).await;

    let count = 400;
    for from in (0..count).step_by(50) {
        cluster.propose(&leader, from..from + 50, 64 << 10).await;
    }
    let lag = follower.applied().next_offset.0;
    assert!(lag < count, "24 MiB hold {lag} batches of 64 KiB?");
    assert!(!*follower.log().failed().borrow(), "full is not failed");
    assert!(follower.metrics().running_state.is_ok());

    disk.set_capacity(1 << 30);
    let all: Vec<u64> = (0..count).collect();
    cluster.converged(&all).await;
    drop((leader, follower));
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_elected_on_full_disks_commits_in_its_term_and_can_be_read() {
    // S4: looking for where a follower's log ends takes no space, nor does a blank.
    let disks = [5, 6, 7].map(|seed| Arc::new(SimFs::new(seed)));
    let mut cluster = Cluster::start(0).await;
    for disk in &disks {
        disk.set_capacity(1 << 30);
        cluster.add_broker_on(disk.clone()).await;
    }
    cluster.open_all().await;
    cluster.initialize(3).await;
    let (first, leader) = cluster.leader().await;
    let count = 200;
    for from in (0..count).step_by(10) {
        // S15: on a busy machine the lease runs out between two rounds, or within a longer one.
        eventually("a quorum", async || leader.confirm(PATIENCE).await.ok()).await;
        cluster.propose(&leader, from..from + 10, 64 << 10).await;
    }
    let all: Vec<u64> = (0..count).collect();
    cluster.converged(&all).await;
    let used = |disk: &SimFs| {
        let space = disk.space(Path::new("/data")).unwrap();
        space.total_bytes - space.available_bytes
    };
    // Blocks are written ahead by a thread that looks at the space four times a second: what it is
    // still about to write must not come out of the little that is left.
    let mut seen = (Instant::now(), Vec::new());
    eventually("nothing written ahead", async || {
        let now: Vec<u64> = disks.iter().map(|disk| used(disk)).collect();
        if now != seen.1 {
            seen = (Instant::now(), now);
        }
        (seen.0.elapsed() > Duration::from_millis(500)).then_some(())
    })
    .await;
    // Another program takes the space: a quarter of what is kept back is left.
    for disk in &disks {
        let used = used(disk);
        disk.set_capacity(used + used / 200);
    }
    eventually("no space", async || {
        leader.admit(1000).await.err().map(|_| ())
    })
    .await;
    drop(leader);
    cluster.stop(first).await;

    let (second, leader) = cluster.leader().await;
    assert_ne!(second, first);
    assert_eq!(leader.applied().next_offset.0, count);
    assert_eq!(cluster.numbers[second].all(), all);
    // Data is still refused.
    let refused = leader.admit(1000).await.err();
    assert!(matches!(refused, Some(ProposeError::StorageFull)));
    drop(leader);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_whose_disk_fails_leads_no_more_and_says_why() {
    // S4
    let disks = [8, 9, 10].map(|seed| Arc::new(SimFs::new(seed)));
    let mut cluster = Cluster::start(0).await;
    for disk in &disks {
        cluster.add_broker_on(disk.clone()).await;
    }
    cluster.open_all().await;
    cluster.initialize(3).await;
    let (first, leader) = cluster.leader().await;
    cluster.propose(&leader, 0..10, 100).await;
    let mut watch = leader.watch_leadership();
    assert!(watch.current().is_local && leader.stopped().is_none());

    disks[first].inject(Fault {
        op: FaultOp::Sync,
        path_contains: "topics".to_owned(),
        skip: 0,
        times: u64::MAX,
        errno: 5,
    });
    let admission = leader.admit(100).await.unwrap();
    let doomed = leader.propose(admission, batch(10, 100), None).unwrap();
    let now = tokio::time::timeout(PATIENCE, watch.changed())
        .await
        .unwrap();
    assert!(now.is_none_or(|now| !now.is_local), "{now:?}");
    assert!(!leader.leadership().is_local && !watch.current().is_local);
    let reason = leader.stopped().unwrap();
    assert!(reason.contains("sync"), "{reason}");
    drop(tokio::time::timeout(PATIENCE, doomed).await.unwrap());
    let (second, _) = cluster.leader().await;
    assert_ne!(second, first);
    drop((leader, watch));
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replica_opened_twice_is_refused() {
    let mut cluster = Cluster::form(1).await;
    let again = cluster
        .broker(0)
        .groups
        .open(cluster.spec(0), cluster.numbers[0].clone());
    assert!(matches!(again.await, Err(OpenError::AlreadyOpen { .. })));
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listed_replica_without_its_files_is_quarantined_not_made_anew() {
    // S6
    let mut cluster = Cluster::form(1).await;
    let (_, leader) = cluster.leader().await;
    cluster.propose(&leader, 0..10, 100).await;
    drop(leader);
    cluster.stop(0).await;
    std::fs::remove_dir_all(cluster.dir(0).join("topics")).unwrap();
    std::fs::create_dir(cluster.dir(0).join("topics")).unwrap();
    let broker = super::harness::Broker::start(cluster.dir(0), cluster.cluster).await;
    let opened = broker
        .groups
        .open(cluster.spec(0), cluster.numbers[0].clone());
    let error = opened.await.unwrap_err();
    assert!(matches!(error, OpenError::Quarantined { .. }), "{error}");
    broker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_that_ends_below_its_checkpoint_is_quarantined() {
    // S1: openraft would purge everything and go on.
    let mut cluster = Cluster::start(1).await;
    cluster.log.segment_bytes = 4 << 10;
    cluster.open_all().await;
    cluster.initialize(1).await;
    let (_, leader) = cluster.leader().await;
    cluster.propose(&leader, 0..40, 500).await;
    eventually("a checkpoint", async || {
        leader.log().checkpoint_indexes().last().copied()
    })
    .await;
    drop(leader);
    cluster.stop(0).await;
    // A checkpoint from beyond the end, as an older log under a newer checkpoint has.
    let replica_dir = find_dir_with_checkpoints(&cluster.dir(0));
    let newest = newest_checkpoint(&replica_dir);
    let broker = super::harness::Broker::start(cluster.dir(0), cluster.cluster).await;
    let key = crate::storage::ReplicaKey {
        partition: cluster.group.partition,
        replica: ReplicaId(1),
    };
    let log = broker.store.open_log(key, cluster.log).unwrap();
    log.truncate_after(Some(2)).await.unwrap();
    drop(log);
    assert!(newest > 2);
    let opened = broker
        .groups
        .open(cluster.spec(0), cluster.numbers[0].clone());
    let error = opened.await.unwrap_err();
    assert!(matches!(error, OpenError::Quarantined { .. }), "{error}");
    broker.stop().await;
}

fn find_dir_with_checkpoints(dir: &std::path::Path) -> std::path::PathBuf {
    let mut stack = vec![dir.to_path_buf()];
    while let Some(dir) = stack.pop() {
        for entry in std::fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                stack.push(path);
            } else if path.extension().is_some_and(|it| it == "ckpt") {
                return dir;
            }
        }
    }
    panic!("no checkpoint");
}

fn newest_checkpoint(dir: &std::path::Path) -> u64 {
    let files = std::fs::read_dir(dir).unwrap();
    files
        .filter_map(|file| file.unwrap().path().file_stem()?.to_str()?.parse().ok())
        .max()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hints_that_are_broadcast_reach_every_peer() {
    let mut cluster = Cluster::form(3).await;
    type Heard = Vec<(BrokerId, GroupLeader)>;
    let heard: Arc<Mutex<Heard>> = Arc::default();
    for at in [1, 2] {
        let heard = Arc::clone(&heard);
        cluster
            .broker(at)
            .peers
            .on_hints(Arc::new(move |from, hints| {
                heard
                    .lock()
                    .extend(hints.leaders.into_iter().map(|it| (from, it)));
            }));
    }
    let from = cluster.broker(0);
    let leader = GroupLeader {
        group: Some(cluster.group.to_wire()),
        broker_id: 5,
        term: 6,
    };
    eventually("connections", async || {
        let connected = [1, 2]
            .iter()
            .all(|at| from.peers.is_connected(cluster.broker(*at).id));
        if !connected {
            from.peers.broadcast_hints(Vec::new());
        }
        connected.then_some(())
    })
    .await;
    from.peers.broadcast_hints(vec![leader.clone()]);
    eventually("hints", async || (heard.lock().len() == 2).then_some(())).await;
    assert!(
        heard
            .lock()
            .iter()
            .all(|it| *it == (from.id, leader.clone()))
    );
    cluster.stop_all().await;
}
