//! Logs of commands: cut by themselves, small for ever, and no less safe for it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;

use qute_proto::ids::{BrokerId, Offset};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::super::checkpoint::Checkpoint;
use super::super::*;
use super::harness::{Cluster, PATIENCE, batch, eventually};

/// What an entry of the smallest command takes in a file.
const ENTRY_BYTES: u64 = 80;
/// Three segments of a little over one checkpoint interval each, what is written ahead of the last,
/// and checkpoints that hold next to nothing.
const DIRECTORY_BYTES_MAX: u64 = 8 << 20;

fn command(number: u64, size: usize) -> Payload {
    Payload::command(batch(number, size).bytes, 1_700_000_000_000 + number)
}

/// Commands in order, many in flight. The last one is the last, though a machine under load may have
/// refused some.
async fn propose(leader: &GroupHandle, numbers: std::ops::Range<u64>, size: usize) {
    let last = numbers.end - 1;
    let numbers: Vec<u64> = numbers.collect();
    let mut refused = false;
    for some in numbers.chunks(2000) {
        let mut proposals = Vec::with_capacity(some.len());
        for number in some {
            let admission = leader.admit_command(size).await.unwrap();
            proposals.push(
                leader
                    .propose(admission, command(*number, size), None)
                    .unwrap(),
            );
        }
        for proposal in proposals {
            match tokio::time::timeout(PATIENCE, proposal).await.unwrap() {
                Ok(_) => {}
                Err(ProposalError::LeaseExpired) => refused = true,
                Err(error) => panic!("{error}"),
            }
        }
        if refused {
            // S15
            leader.confirm(PATIENCE).await.unwrap();
        }
    }
    if refused {
        let again = batch(last, size).bytes;
        let applied = leader.command(again, 1_800_000_000_000, None, PATIENCE);
        applied.await.unwrap();
    }
}

fn directory_bytes(dir: &Path) -> u64 {
    let mut bytes = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        // Files go while they are counted.
        let Ok(entry) = entry else { continue };
        let Ok(metadata) = entry.metadata() else {
            continue;
        };
        bytes += match metadata.is_dir() {
            true => directory_bytes(&entry.path()),
            false => metadata.len(),
        };
    }
    bytes
}

/// The last number that a replica has applied: the state of a log of commands here.
fn newest(cluster: &Cluster, at: usize) -> u64 {
    cluster.numbers[at].log_start().0
}

async fn applied(cluster: &Cluster, at: usize, number: u64) {
    eventually("the last command", async || {
        (newest(cluster, at) == number).then_some(())
    })
    .await;
}

fn purged(handle: &GroupHandle) -> u64 {
    handle.log().purged().map_or(0, |purged| purged.index)
}

/// Commands from `next` on, until everything up to `beyond` is gone from the leader's log. Gives the
/// number after the last.
async fn propose_until_cut(leader: &GroupHandle, mut next: u64, beyond: u64) -> u64 {
    let started = tokio::time::Instant::now();
    while purged(leader) <= beyond {
        propose(leader, next..next + 5000, 8).await;
        next += 5000;
        assert!(started.elapsed() < PATIENCE, "never cut");
    }
    next
}

async fn commands(count: usize) -> Cluster {
    let mut cluster = Cluster::start(count).await;
    cluster.log_use = LogUse::Commands;
    cluster.open_all().await;
    cluster.initialize(count).await;
    cluster
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_of_thousands_of_commands_leave_a_small_directory_and_a_short_replay() {
    let mut cluster = commands(1).await;
    let (_, leader) = cluster.leader().await;
    let count = 250_000;
    propose(&leader, 1..count + 1, 8).await;
    eventually("files are gone", async || {
        (directory_bytes(&cluster.dir(0)) < DIRECTORY_BYTES_MAX).then_some(())
    })
    .await;
    assert!(purged(&leader) > count / 2, "{}", purged(&leader));
    // Two to fall back on, and one that may just have been saved.
    let checkpoints = leader.log().checkpoint_indexes();
    assert!((2..=3).contains(&checkpoints.len()), "{checkpoints:?}");
    // S1
    assert!(*checkpoints.last().unwrap() <= leader.log().synced_index().unwrap());
    assert!(purged(&leader) <= checkpoints[0], "nothing to fall back on");
    let replayed = leader.log().last().unwrap().index - checkpoints.last().unwrap();
    assert!(replayed * ENTRY_BYTES < 2 << 20, "{replayed}");
    drop(leader);

    cluster.stop(0).await;
    cluster.numbers[0] = super::harness::Numbers::default();
    cluster.restart(0).await;
    let (_, leader) = cluster.leader().await;
    applied(&cluster, 0, count).await;
    propose(&leader, count + 1..count + 1000, 8).await;
    applied(&cluster, 0, count + 999).await;
    drop(leader);
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_newest_checkpoint_is_made_up_for_by_the_one_before() {
    let mut cluster = commands(1).await;
    let (_, leader) = cluster.leader().await;
    let last = propose_until_cut(&leader, 1, 0).await - 1;
    let damaged = *leader.log().checkpoint_indexes().last().unwrap();
    drop(leader);
    cluster.stop(0).await;
    let path = find(&cluster.dir(0), &format!("{damaged:020}.ckpt")).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();

    cluster.numbers[0] = super::harness::Numbers::default();
    cluster.restart(0).await;
    let (_, leader) = cluster.leader().await;
    applied(&cluster, 0, last).await;
    drop(leader);
    cluster.stop_all().await;
}

fn find(dir: &Path, name: &str) -> Option<std::path::PathBuf> {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if let Some(found) = find(&path, name) {
                return Some(found);
            }
        } else if path.file_name().is_some_and(|found| found == name) {
            return Some(path);
        }
    }
    None
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follower_that_was_down_for_long_catches_up_by_snapshot_and_one_away_for_a_moment_by_log() {
    let mut cluster = commands(3).await;
    let (at, leader) = cluster.leader().await;
    let down = (at + 1) % 3;
    propose(&leader, 1..1000, 8).await;
    applied(&cluster, down, 999).await;
    cluster.stop(down).await;
    cluster.numbers[down] = super::harness::Numbers::default();
    let count = propose_until_cut(&leader, 1000, 2000).await;
    let back = cluster.restart(down).await;
    applied(&cluster, down, count - 1).await;
    // It began anew where a checkpoint of the leader stands, and the log goes on from there.
    let from = purged(&back);
    assert!(from > 1000, "no snapshot");
    let state = back.log().checkpoints().unwrap().remove(0).1;
    assert!(Checkpoint::decode(state).unwrap().next_offset == Offset(0));

    // Away for a moment: nothing is lost of its log.
    drop(back);
    cluster.stop(down).await;
    cluster.numbers[down] = super::harness::Numbers::default();
    propose(&leader, count..count + 5000, 8).await;
    let back = cluster.restart(down).await;
    applied(&cluster, down, count + 4999).await;
    assert_eq!(purged(&back), from, "a snapshot for a few entries");
    drop((leader, back));
    cluster.stop_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whole_group_restarted_after_cuts_holds_the_same_and_goes_on() {
    let mut cluster = commands(3).await;
    let (_, leader) = cluster.leader().await;
    let mut count = propose_until_cut(&leader, 1, 0).await;
    // Each by itself, leader or not.
    while (0..3).any(|at| purged(&cluster.handle(at)) == 0) {
        propose(&leader, count..count + 5000, 8).await;
        count += 5000;
        assert!(count < 1_000_000, "never cut");
    }
    drop(leader);
    for at in 0..3 {
        applied(&cluster, at, count - 1).await;
    }
    for at in 0..3 {
        cluster.stop(at).await;
        cluster.numbers[at] = super::harness::Numbers::default();
    }
    for at in 0..3 {
        cluster.restart(at).await;
    }
    let (_, leader) = cluster.leader().await;
    propose(&leader, count..count + 100, 8).await;
    for at in 0..3 {
        applied(&cluster, at, count + 99).await;
    }
    drop(leader);
    cluster.stop_all().await;
}

/// A TCP relay that can hold everything back, without breaking a connection.
async fn relay(to: SocketAddr, open: watch::Receiver<bool>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let Ok(far) = TcpStream::connect(to).await else {
                continue;
            };
            let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
            tokio::spawn(pass(near_in, far_out, open.clone()));
            tokio::spawn(pass(far_in, near_out, open.clone()));
        }
    });
    address
}

async fn pass(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    mut open: watch::Receiver<bool>,
) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(read) = from.read(&mut bytes).await {
        if read == 0 || open.wait_for(|open| *open).await.is_err() {
            return;
        }
        if to.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
}

/// What openraft would wait for, for ever: the entries that a follower lacks go while they are on
/// their way to it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follower_that_stalls_until_its_next_entries_are_purged_gets_the_snapshot() {
    let mut cluster = Cluster::start(3).await;
    cluster.log_use = LogUse::Commands;
    let gates: Vec<_> = (0..3).map(|_| watch::Sender::new(true)).collect();
    let mut addresses = HashMap::<BrokerId, String>::new();
    for (at, gate) in gates.iter().enumerate() {
        let broker = cluster.broker(at);
        let address = relay(broker.address, gate.subscribe()).await;
        addresses.insert(broker.id, address.to_string());
    }
    for at in 0..3 {
        cluster.broker(at).peers.set_addresses(addresses.clone());
    }
    cluster.open_all().await;
    cluster.initialize(3).await;
    let (at, leader) = cluster.leader().await;
    let stalled = (at + 1) % 3;
    propose(&leader, 1..100, 8).await;
    applied(&cluster, stalled, 99).await;

    gates[stalled].send_replace(false);
    // More than may be in flight to one follower, which is 8 MiB, and soon enough: a connection that
    // is silent for 3 s is made anew, and that alone makes openraft look again.
    let handle = cluster.handle(stalled);
    let has = || handle.log().last().unwrap().index;
    let mut next = 100;
    while purged(&leader) <= has() + 140 {
        propose(&leader, next..next + 20, 64 << 10).await;
        next += 20;
        assert!(next < 10_000, "never cut");
    }
    gates[stalled].send_replace(true);
    applied(&cluster, stalled, next - 1).await;
    propose(&leader, next..next + 100, 8).await;
    applied(&cluster, stalled, next + 99).await;
    drop((leader, handle));
    cluster.stop_all().await;
}
