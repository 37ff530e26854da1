use std::collections::HashMap;
use std::time::Duration;

use qute_proto::ids::{BrokerId, ClusterId};
use qute_proto::internal::PeerHello;

use super::super::identity::{Identity, KnownPeers, PROTOCOL_VERSION, Refusal};
use super::harness::{Broker, Cluster, eventually};

const OWN: Identity = Identity {
    broker: BrokerId(1),
    boot: 3,
    process: 11,
};

fn cluster() -> ClusterId {
    ClusterId::from_wire(&[7; 16]).unwrap()
}

fn hello(broker: u64, boot: u64, process: u64) -> PeerHello {
    PeerHello {
        cluster_id: cluster().to_wire(),
        broker_id: broker,
        boot,
        protocol_version: PROTOCOL_VERSION,
        process_id: process,
        // Boot 1 was process 16, boot 5 process 20: one line for all that are not copies.
        earlier_process_ids: (1..boot).rev().map(|boot| boot + 15).collect(),
    }
}

fn admit(peers: &KnownPeers, hello: &PeerHello) -> Result<(), Refusal> {
    peers.admit(OWN, Some(cluster()), hello).map(|_| ())
}

#[tokio::test(start_paused = true)]
async fn peer_that_reconnects_is_admitted() {
    // S23
    let peers = KnownPeers::default();
    admit(&peers, &hello(2, 5, 20)).unwrap();
    admit(&peers, &hello(2, 5, 20)).unwrap();
}

#[tokio::test(start_paused = true)]
async fn peer_with_an_equal_or_older_boot_from_another_process_is_refused() {
    // S23: a copied or a rolled-back data directory.
    let peers = KnownPeers::default();
    admit(&peers, &hello(2, 5, 20)).unwrap();
    for boot in [5, 4] {
        let refusal = admit(&peers, &hello(2, boot, 21)).unwrap_err();
        assert!(matches!(refusal, Refusal::Copied { .. }), "{refusal}");
        assert!(refusal.is_final());
    }
    admit(&peers, &hello(2, 5, 20)).unwrap();
}

#[tokio::test(start_paused = true)]
async fn peer_with_a_newer_boot_is_refused_while_the_known_process_is_alive() {
    // S23: opening a copy raises its boot, so newer does not mean genuine.
    let peers = KnownPeers::default();
    let known = peers.admit(OWN, Some(cluster()), &hello(2, 5, 20)).unwrap();
    let refusal = admit(&peers, &hello(2, 6, 21)).unwrap_err();
    assert!(matches!(refusal, Refusal::InUse { .. }), "{refusal}");
    tokio::time::advance(Duration::from_secs(2)).await;
    peers.heard(&known);
    tokio::time::advance(Duration::from_secs(2)).await;
    assert!(admit(&peers, &hello(2, 6, 21)).is_err());
    assert!(!known.superseded.is_cancelled());
}

#[tokio::test(start_paused = true)]
async fn peer_that_restarted_is_admitted_and_its_old_streams_end() {
    // S23
    let peers = KnownPeers::default();
    tokio::time::advance(Duration::from_secs(60)).await;
    let old = peers.admit(OWN, Some(cluster()), &hello(2, 5, 20)).unwrap();
    peers.lost(&old);
    admit(&peers, &hello(2, 6, 21)).unwrap();
    assert!(old.superseded.is_cancelled());
    assert!(
        admit(&peers, &hello(2, 5, 20)).is_err(),
        "the old one is gone"
    );
}

#[tokio::test(start_paused = true)]
async fn peer_with_a_boot_older_than_the_clusters_records_is_refused() {
    // S23
    let peers = KnownPeers::default();
    peers.remember(BrokerId(2), 9, 24);
    assert!(admit(&peers, &hello(2, 8, 23)).is_err());
    assert!(admit(&peers, &hello(2, 9, 25)).is_err(), "another process");
    admit(&peers, &hello(2, 9, 24)).unwrap();
}

#[tokio::test(start_paused = true)]
async fn peer_rolled_back_stays_refused_however_often_it_starts() {
    // S23: each start raises its boot, but the process that was met is not in its line.
    let peers = KnownPeers::default();
    tokio::time::advance(Duration::from_secs(60)).await;
    let known = peers.admit(OWN, Some(cluster()), &hello(2, 5, 20)).unwrap();
    peers.lost(&known);
    // Rolled back to boot 3 (process 18), then started again and again.
    let mut line: Vec<u64> = vec![18, 17, 16];
    for boot in 4..12 {
        let rolled_back = PeerHello {
            earlier_process_ids: line.clone(),
            ..hello(2, boot, 100 + boot)
        };
        let refusal = admit(&peers, &rolled_back).unwrap_err();
        assert!(matches!(refusal, Refusal::Copied { .. }), "{refusal}");
        line.insert(0, 100 + boot);
    }
    admit(&peers, &hello(2, 6, 21)).unwrap();
}

#[tokio::test(start_paused = true)]
async fn peer_met_by_others_at_a_newer_boot_is_known_by_it() {
    // S23: a copy of boot 5 would pass for a restart here, but the cluster has let boot 6 in.
    let peers = KnownPeers::default();
    tokio::time::advance(Duration::from_secs(60)).await;
    let old = peers.admit(OWN, Some(cluster()), &hello(2, 5, 20)).unwrap();
    peers.remember(BrokerId(2), 6, 21);
    assert!(old.superseded.is_cancelled());
    assert!(admit(&peers, &hello(2, 6, 99)).is_err());
    assert!(admit(&peers, &hello(2, 7, 22)).is_ok());
}

#[tokio::test(start_paused = true)]
async fn stranger_is_refused() {
    let peers = KnownPeers::default();
    let other = PeerHello {
        cluster_id: ClusterId::random().to_wire(),
        ..hello(2, 5, 20)
    };
    assert!(matches!(
        admit(&peers, &other),
        Err(Refusal::WrongCluster { .. })
    ));
    let none = PeerHello {
        cluster_id: Default::default(),
        ..hello(2, 5, 20)
    };
    assert_eq!(admit(&peers, &none), Err(Refusal::NotFormed));
    let later = PeerHello {
        protocol_version: PROTOCOL_VERSION + 1,
        ..hello(2, 5, 20)
    };
    assert!(matches!(
        admit(&peers, &later),
        Err(Refusal::ProtocolVersion { .. })
    ));
    for bad in [
        hello(0, 5, 20),
        hello(2, 5, 0),
        PeerHello {
            cluster_id: vec![1, 2, 3].into(),
            ..hello(2, 5, 20)
        },
    ] {
        assert!(matches!(admit(&peers, &bad), Err(Refusal::Malformed(_))));
    }
}

#[tokio::test(start_paused = true)]
async fn another_process_with_this_brokers_own_identity_is_refused() {
    // S23
    let peers = KnownPeers::default();
    assert!(admit(&peers, &hello(1, 3, 12)).is_err());
    admit(&peers, &hello(1, 3, 11)).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clone_of_a_running_broker_is_refused_by_its_peers_and_told_so() {
    // S23: the same identity and boot in another process, with another, empty store.
    let mut cluster = Cluster::form(3).await;
    cluster.leader().await;
    let original = cluster.broker(1).peers.identity();
    let dir = tempfile::tempdir().unwrap();
    let config = crate::storage::StoreConfig::new(dir.path().join("data"));
    let store = crate::storage::Store::open(config).unwrap();
    let copy = Identity {
        process: original.process + 1,
        ..original
    };
    let clone = Broker::start_as(copy, store, cluster.cluster).await;
    let mut addresses = HashMap::new();
    for at in [0, 2] {
        let peer = cluster.broker(at);
        eventually("the genuine broker is connected", async || {
            peer.peers.send_hints(original.broker, Vec::new());
            peer.peers.is_connected(original.broker).then_some(())
        })
        .await;
        addresses.insert(peer.id, peer.address.to_string());
        clone.peers.set_addresses(addresses.clone());
        clone.peers.send_hints(peer.id, Vec::new());
    }
    let reason = eventually("the refusal", async || {
        clone.peers.watch_refused().borrow().clone()
    })
    .await;
    assert!(reason.contains("copied"), "{reason}");
    assert!(!clone.peers.is_connected(cluster.broker(0).id));
    clone.stop().await;
    cluster.stop_all().await;
}
