//! Checks against clusters that are made up.

use std::time::Duration;

use qute_client::{
    ClockReading, PartitionDescription, ReplicaCounts, ReplicaDescription, ReplicaRole, TopicId,
};

use super::*;
use crate::target::Source;

fn target() -> Target {
    Target {
        bootstrap: "h1:1,h2:1".parse().unwrap(),
        source: Source::Flag,
    }
}

fn broker(id: u64, state: BrokerState) -> BrokerDescription {
    BrokerDescription {
        id: BrokerId(id),
        name: format!("b{id}"),
        address: format!("h{id}:1"),
        rack: String::new(),
        state,
    }
}

/// A broker that is well, in a cluster of two that is led by the first.
fn status(id: u64) -> BrokerStatus {
    BrokerStatus {
        address: format!("h{id}:1"),
        id: BrokerId(id),
        name: format!("b{id}"),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        cluster_id: None,
        round_trip: Duration::from_millis(2),
        clock: Some(ClockReading {
            time_ms: 1,
            ahead_ms: 3,
            error_ms: 2,
        }),
        storage: Some(StorageSpace {
            total_bytes: 100 << 30,
            available_bytes: 50 << 30,
            floor_bytes: 1 << 30,
        }),
        replicas: Some(ReplicaCounts {
            desired: 4,
            open: 4,
            quarantined: 0,
            orphaned: 0,
            leading: 2,
            under_replicated: 0,
        }),
        faults: vec![],
        view: ClusterInfo {
            cluster_id: None,
            formed: true,
            controller: Some(BrokerId(1)),
            brokers: vec![broker(1, BrokerState::Alive), broker(2, BrokerState::Alive)],
            founding_brokers: 2,
            cluster_index: 7,
            topics: 1,
            partitions: 2,
            answered_by: format!("h{id}:1"),
            faults: vec![],
        },
    }
}

fn answer(status: BrokerStatus) -> Answer {
    Answer {
        address: status.address.clone(),
        outcome: Ok(status),
    }
}

/// An error as the client gives it when nobody listens.
async fn refused() -> Error {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap().to_string();
    drop(socket);
    let client = qute_client::Client::lazy(qute_client::ClientConfig::new(&address).unwrap());
    client.unwrap().broker_status(&address).await.unwrap_err()
}

fn topic(replicas: &[u64], leader: Option<u64>) -> TopicDescription {
    let replica = |id: &u64| ReplicaDescription {
        broker: BrokerId(*id),
        address: None,
        role: ReplicaRole::Voter,
    };
    TopicDescription {
        name: "t".to_owned(),
        id: TopicId::GROUPS,
        partitions: vec![PartitionDescription {
            partition: 0,
            leader: leader.map(BrokerId),
            leader_epoch: 1,
            log_start_offset: None,
            high_watermark: None,
            replicas: replicas.iter().map(replica).collect(),
        }],
        config: BTreeMap::new(),
    }
}

fn healthy() -> Findings {
    Findings {
        bootstrap: vec![answer(status(1)), answer(status(2))],
        advertised: vec![],
        topics: Some(Ok(vec![topic(&[1, 2], Some(1))])),
    }
}

/// What the checks that don't pass are about.
fn trouble(findings: &Findings) -> Vec<(Status, &'static str, String)> {
    all(findings, &target())
        .into_iter()
        .filter(|check| check.status != Status::Ok)
        .inspect(|check| assert!(check.advice.is_some(), "{check:?}"))
        .map(|check| (check.status, check.check, check.subject))
        .collect()
}

fn edit(findings: &mut Findings, broker: usize, edit: impl FnOnce(&mut BrokerStatus)) {
    edit(findings.bootstrap[broker].outcome.as_mut().unwrap());
}

/// Changes what every broker thinks of the cluster.
fn edit_view(findings: &mut Findings, change: impl Fn(&mut ClusterInfo)) {
    for answer in &mut findings.bootstrap {
        if let Ok(status) = &mut answer.outcome {
            change(&mut status.view);
        }
    }
}

#[test]
fn healthy_cluster_passes_every_check() {
    let checks = all(&healthy(), &target());
    assert!(
        checks.iter().all(|check| check.status == Status::Ok),
        "{checks:?}"
    );
    let kinds: BTreeSet<_> = checks.iter().map(|check| check.check).collect();
    let wanted = [
        "bootstrap",
        "broker",
        "clock",
        "cluster",
        "disk",
        "partitions",
        "replicas",
        "version",
    ];
    assert_eq!(kinds, BTreeSet::from(wanted));
}

#[tokio::test]
async fn nobody_there_fails_with_what_to_do_and_nothing_else_is_said() {
    let answer = Answer {
        address: "h1:1".to_owned(),
        outcome: Err(refused().await),
    };
    let findings = Findings {
        bootstrap: vec![answer],
        advertised: vec![],
        topics: None,
    };
    assert_eq!(
        trouble(&findings),
        [(Status::Fail, "bootstrap", "h1:1".to_owned())]
    );
}

#[tokio::test]
async fn broker_that_only_the_others_reach_fails_by_its_advertised_address() {
    let mut findings = healthy();
    findings.bootstrap.pop();
    findings.advertised = vec![Answer {
        address: "h2:1".to_owned(),
        outcome: Err(refused().await),
    }];
    assert_eq!(
        trouble(&findings),
        [(Status::Fail, "broker", "b2".to_owned())]
    );
}

#[tokio::test]
async fn one_silent_address_of_several_is_a_warning() {
    let mut findings = healthy();
    findings.bootstrap.push(Answer {
        address: "h3:1".to_owned(),
        outcome: Err(refused().await),
    });
    assert_eq!(
        trouble(&findings),
        [(Status::Warn, "bootstrap", "h3:1".to_owned())]
    );
}

#[test]
fn dead_and_suspect_brokers_and_what_lives_on_them_are_named() {
    let mut findings = healthy();
    edit_view(&mut findings, |view| {
        view.brokers[1].state = BrokerState::Dead
    });
    assert_eq!(
        trouble(&findings),
        [
            (Status::Fail, "broker", "b2".to_owned()),
            (Status::Warn, "partitions", "t/0".to_owned()),
        ]
    );
    findings.topics = Some(Ok(vec![topic(&[1, 2], Some(2))]));
    assert_eq!(
        trouble(&findings)[1],
        (Status::Fail, "partitions", "t/0".to_owned())
    );
    edit_view(&mut findings, |view| {
        view.brokers[1].state = BrokerState::Suspect
    });
    assert_eq!(
        trouble(&findings),
        [(Status::Warn, "broker", "b2".to_owned())]
    );
}

#[test]
fn partition_without_leader_fails_and_silent_voters_warn() {
    let mut findings = healthy();
    findings.topics = Some(Ok(vec![topic(&[1, 2], None)]));
    assert_eq!(
        trouble(&findings),
        [(Status::Fail, "partitions", "t/0".to_owned())]
    );
    let mut findings = healthy();
    edit(&mut findings, 0, |status| {
        status.replicas.as_mut().unwrap().under_replicated = 1
    });
    assert_eq!(
        trouble(&findings),
        [(Status::Warn, "partitions", "1 partitions".to_owned())]
    );
}

#[test]
fn controller_counts_only_if_it_says_so_itself() {
    let mut findings = healthy();
    edit(&mut findings, 0, |status| status.view.controller = None);
    assert_eq!(
        trouble(&findings),
        [(Status::Fail, "cluster", "-".to_owned())]
    );
}

#[test]
fn unformed_and_half_registered_clusters_fail() {
    let mut findings = healthy();
    edit_view(&mut findings, |view| view.founding_brokers = 3);
    assert_eq!(
        trouble(&findings),
        [(Status::Fail, "cluster", "-".to_owned())]
    );
    let mut findings = healthy();
    findings.topics = None;
    edit_view(&mut findings, |view| view.formed = false);
    assert_eq!(
        trouble(&findings),
        [(Status::Fail, "cluster", "-".to_owned())]
    );
}

#[test]
fn clocks_warn_and_fail_beyond_what_the_measurement_can_be_off() {
    let judged = |ahead_ms, error_ms| {
        let mut findings = healthy();
        edit(&mut findings, 1, |status| {
            status.clock = Some(ClockReading {
                time_ms: 1,
                ahead_ms,
                error_ms,
            });
        });
        trouble(&findings)
    };
    let both = |status| {
        vec![
            (status, "clock", "b2".to_owned()),
            (status, "clock", "brokers".to_owned()),
        ]
    };
    assert_eq!(judged(900, 1), []);
    assert_eq!(judged(-1500, 2), both(Status::Warn));
    assert_eq!(judged(60_000, 2), both(Status::Fail));
    // An answer that took long says little.
    assert_eq!(judged(1500, 1400), []);
    assert_eq!(judged(i64::MIN, 0), both(Status::Fail));
}

#[test]
fn disk_warns_before_the_floor_and_fails_at_it() {
    let judged = |available_bytes| {
        let mut findings = healthy();
        edit(&mut findings, 0, |status| {
            status.storage.as_mut().unwrap().available_bytes = available_bytes;
        });
        trouble(&findings).pop().map(|(status, ..)| status)
    };
    assert_eq!(judged(50 << 30), None);
    assert_eq!(judged(9 << 30), Some(Status::Warn));
    assert_eq!(judged(1 << 30), Some(Status::Fail));
    assert_eq!(judged(0), Some(Status::Fail));
}

#[test]
fn replicas_that_are_damaged_fail_and_those_missing_or_unknown_warn() {
    let judged = |change: fn(&mut ReplicaCounts)| {
        let mut findings = healthy();
        edit(&mut findings, 0, |status| {
            change(status.replicas.as_mut().unwrap())
        });
        trouble(&findings)
    };
    let one = |status| vec![(status, "replicas", "b1".to_owned())];
    assert_eq!(judged(|counts| counts.quarantined = 1), one(Status::Fail));
    assert_eq!(judged(|counts| counts.open = 3), one(Status::Warn));
    assert_eq!(judged(|counts| counts.orphaned = 1), one(Status::Warn));
}

#[test]
fn versions_that_differ_warn_and_brokers_that_tell_little_are_old() {
    let mut findings = healthy();
    edit(&mut findings, 1, |status| {
        status.version = "9.9.9".to_owned();
        (status.clock, status.storage, status.replicas) = (None, None, None);
    });
    assert_eq!(
        trouble(&findings),
        [
            (Status::Warn, "version", "brokers".to_owned()),
            (Status::Warn, "clock", "b2".to_owned()),
        ]
    );
}

#[test]
fn faults_fail_and_an_address_that_another_broker_has_is_told() {
    let mut findings = healthy();
    edit(&mut findings, 0, |status| {
        status.faults = vec!["t/0: damaged".to_owned()]
    });
    assert_eq!(
        trouble(&findings),
        [(Status::Fail, "fault", "b1".to_owned())]
    );
    let mut findings = healthy();
    edit(&mut findings, 1, |status| status.id = BrokerId(9));
    assert_eq!(
        trouble(&findings),
        [(Status::Fail, "broker", "b2".to_owned())]
    );
}

#[test]
fn loopback_address_of_a_broker_that_is_elsewhere_warns() {
    let mut findings = healthy();
    let mut moved = findings.bootstrap.pop().unwrap();
    moved.address = "127.0.0.1:1".to_owned();
    findings.advertised = vec![moved];
    for answer in findings
        .bootstrap
        .iter_mut()
        .chain(&mut findings.advertised)
    {
        let view = &mut answer.outcome.as_mut().unwrap().view;
        view.brokers[1].address = "127.0.0.1:1".to_owned();
    }
    assert_eq!(
        trouble(&findings),
        [(Status::Warn, "broker", "b2".to_owned())]
    );
    for (address, loopback) in [
        ("localhost:1", true),
        ("[::1]:7700", true),
        ("10.0.0.1:1", false),
        ("host:1", false),
    ] {
        assert_eq!(is_loopback(address), loopback, "{address}");
    }
}

#[test]
fn long_lists_are_cut() {
    let names: Vec<String> = (0..7).map(|i| format!("t/{i}")).collect();
    assert_eq!(listed(&names), "t/0, t/1, t/2, t/3, t/4 and 2 more");
    assert_eq!(listed(&names[..1]), "t/0");
}
