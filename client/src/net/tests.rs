//! Connections against sockets that do what sockets do.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use parking_lot::Mutex;
use qute_proto::ids::ClusterId;
use qute_proto::v1;
use tokio::time::Instant;

use super::*;
use crate::config::ClientConfig;
use crate::error::ErrorKind;
use crate::fake::proxy::Proxy;
use crate::fake::{Fake, TOPIC};
use crate::stats::Stats;
use crate::{Client, ProducerConfig, Record};

/// What names resolve to, at present.
#[derive(Clone, Default)]
struct Names(Arc<Mutex<Vec<SocketAddr>>>);

impl Names {
    fn set(&self, addresses: &[SocketAddr]) {
        *self.0.lock() = addresses.to_vec();
    }

    fn resolver(&self) -> Arc<Resolver> {
        let names = self.clone();
        Arc::new(move |_| {
            let addresses = names.0.lock().clone();
            Box::pin(async move { Ok(addresses) })
        })
    }
}

fn config(bootstrap: &str) -> ClientConfig {
    ClientConfig::new(bootstrap).unwrap()
}

fn connections(config: ClientConfig, names: &Names) -> Connections {
    let stats = Arc::new(Stats::default());
    Connections::with_resolver(Arc::new(config), stats, names.resolver())
}

async fn address_of(fake: &Fake) -> Address {
    fake.state.lock().addresses[&1].as_str().into()
}

async fn refused_address() -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap()
}

async fn describe(connections: &Connections, address: &Address) -> crate::Result<(), CallError> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let ask = async |channel| {
        cluster_client(channel)
            .describe_cluster(v1::DescribeClusterRequest {})
            .await
    };
    let asked = connections.call(address, Lane::Control, deadline, ask);
    asked.await.map(drop)
}

#[tokio::test]
async fn dial_of_a_name_tries_all_its_addresses_and_is_not_held_up_by_a_black_hole() {
    let fake = Fake::start(1, 1).await;
    let black_hole = Proxy::start(None).await;
    let good = address_of(&fake).await.parse().unwrap();
    let names = Names::default();
    names.set(&[refused_address().await, black_hole.address, good]);
    let connections = connections(config("cluster:1"), &names);
    describe(&connections, &"cluster:1".into()).await.unwrap();
    assert_eq!(black_hole.accepted(), 1, "it was tried");
}

#[tokio::test]
async fn dial_of_a_black_hole_ends_within_the_connect_timeout_and_says_so() {
    let black_hole = Proxy::start(None).await;
    let names = Names::default();
    let limit = Duration::from_millis(200);
    let refused = refused_address().await;
    names.set(&[black_hole.address, refused]);
    let config = config("cluster:1").connect_timeout(limit);
    let connections = connections(config, &names);
    let error = describe(&connections, &"cluster:1".into())
        .await
        .unwrap_err();
    assert!(error.unsent);
    let error = error.error;
    assert_eq!(error.kind(), ErrorKind::Timeout);
    let cause_of = |address: SocketAddr| {
        let name = format!("cluster:1 ({address})");
        let failure = error.endpoints().iter().find(|f| f.endpoint == name);
        failure.unwrap().cause.clone()
    };
    assert!(cause_of(refused).contains("refused"), "{error}");
    assert!(cause_of(black_hole.address).contains("Hello"), "{error}");
    // One silence is enough: the next one does not wait.
    let next = describe(&connections, &"cluster:1".into()).await;
    assert!(next.unwrap_err().error.message().contains("not asked"));
    assert_eq!(black_hole.accepted(), 1);
}

#[tokio::test]
async fn dial_of_a_name_that_does_not_resolve_says_so() {
    let connections = connections(config("cluster:1"), &Names::default());
    let error = describe(&connections, &"cluster:1".into()).await;
    let error = error.unwrap_err().error;
    assert!(error.to_string().contains("no address"), "{error}");
}

#[tokio::test]
async fn connection_wanted_by_many_is_dialled_once() {
    let fake = Fake::start(1, 1).await;
    let proxy = Proxy::start(Some(&address_of(&fake).await)).await;
    let connections = connections(config("unused:1"), &Names::default());
    let address: Address = proxy.address.to_string().into();
    let many = join_all((0..100).map(|_| describe(&connections, &address))).await;
    assert!(many.iter().all(|answer| answer.is_ok()));
    assert_eq!(proxy.accepted(), 1);
}

#[tokio::test]
async fn connection_whose_socket_is_gone_is_dialled_anew_with_a_hello_of_its_own() {
    let fake = Fake::start(1, 1).await;
    let names = Names::default();
    let connections = connections(config("cluster:1"), &names);
    let address: Address = "cluster:1".into();
    let first = Proxy::start(Some(&address_of(&fake).await)).await;
    names.set(&[first.address]);
    describe(&connections, &address).await.unwrap();
    // Its successor at the same name belongs to another cluster.
    connections.expect_cluster(fake.state.lock().cluster_id);
    let stranger = Fake::start(1, 1).await;
    let second = Proxy::start(Some(&address_of(&stranger).await)).await;
    names.set(&[second.address]);
    first.cut();
    let refused = loop {
        match describe(&connections, &address).await {
            Err(failed) if failed.error.kind() == ErrorKind::WrongCluster => break failed,
            Err(_) => {}
            // The cut has not come through yet.
            Ok(()) => tokio::task::yield_now().await,
        }
    };
    assert!(refused.unsent, "S28: nothing is said to a stranger");
}

#[tokio::test]
async fn s28_connection_made_before_the_cluster_was_known_is_checked_too() {
    let fake = Fake::start(1, 1).await;
    let connections = connections(config("unused:1"), &Names::default());
    let address = address_of(&fake).await;
    describe(&connections, &address).await.unwrap();
    connections.expect_cluster(ClusterId::random());
    let refused = describe(&connections, &address).await.unwrap_err();
    assert_eq!(refused.error.kind(), ErrorKind::WrongCluster);
}

#[tokio::test]
async fn connection_of_an_unknown_or_cancelled_call_is_discarded_and_a_refusal_keeps_it() {
    for (code, discarded) in [
        (tonic::Code::Unknown, true),
        (tonic::Code::Cancelled, true),
        (tonic::Code::InvalidArgument, false),
    ] {
        let fake = Fake::start(1, 1).await;
        let proxy = Proxy::start(Some(&address_of(&fake).await)).await;
        let connections = connections(config("unused:1"), &Names::default());
        let address: Address = proxy.address.to_string().into();
        fake.state.lock().metadata.fail = Some((1, code));
        for _ in 0..2 {
            let deadline = Instant::now() + Duration::from_secs(10);
            let ask = async |channel| {
                cluster_client(channel)
                    .metadata(v1::MetadataRequest::default())
                    .await
            };
            // The first one fails.
            let _ = connections
                .call(&address, Lane::Control, deadline, ask)
                .await;
        }
        assert_eq!(proxy.accepted(), 1 + usize::from(discarded), "{code:?}");
    }
}

#[tokio::test]
async fn connection_that_is_discarded_late_is_not_its_successor() {
    let fake = Fake::start(1, 1).await;
    let proxy = Proxy::start(Some(&address_of(&fake).await)).await;
    let connections = connections(config("unused:1"), &Names::default());
    let address: Address = proxy.address.to_string().into();
    // Five streams over one connection end, and each says so.
    let first = connections.ready(&address, Lane::Produce).await.unwrap();
    for _ in 0..5 {
        connections.broken(&first, &tonic::Status::unknown("half dead"));
        connections.ready(&address, Lane::Produce).await.unwrap();
    }
    assert_eq!(proxy.accepted(), 2);
    let stats = connections.stats.snapshot();
    assert_eq!(stats.connections_discarded, 1);
    // In the broker's own words.
    let second = connections.ready(&address, Lane::Produce).await.unwrap();
    connections.broken(
        &second,
        &tonic::Status::resource_exhausted("too many streams"),
    );
    connections.ready(&address, Lane::Produce).await.unwrap();
    assert_eq!(proxy.accepted(), 2);
}

#[tokio::test]
async fn call_that_is_late_or_dropped_counts_as_load_and_never_as_a_dead_broker() {
    let fake = Fake::start(1, 1).await;
    let connections = connections(config("unused:1"), &Names::default());
    let address = address_of(&fake).await;
    describe(&connections, &address).await.unwrap();
    let answered = connections.load(&address);
    let mut last = answered;
    let long = Instant::now() + Duration::from_secs(3600);
    for number in 1..=6 {
        let limit = Instant::now() + Duration::from_millis(20) * number;
        let silent = async |_| std::future::pending::<Result<tonic::Response<()>, _>>().await;
        if number % 2 == 0 {
            let late = connections.call(&address, Lane::Control, limit, silent);
            assert!(!late.await.unwrap_err().unsent);
        } else {
            // As the losers of a race are.
            let dropped = connections.call(&address, Lane::Control, long, silent);
            tokio::time::timeout_at(limit, dropped).await.unwrap_err();
        }
        let load = connections.load(&address);
        assert!(load >= last, "{load} after {last}");
        last = load;
        assert_eq!(connections.refused_until(&address), None);
    }
    assert!(last > answered);
    describe(&connections, &address).await.unwrap();
    assert_eq!(connections.stats.snapshot().breaker_openings, 0);
}

#[tokio::test]
async fn connection_that_is_open_is_used_whatever_dials_of_other_lanes_meet_with() {
    let fake = Fake::start(1, 1).await;
    let names = Names::default();
    let connections = connections(config("cluster:1"), &names);
    let address: Address = "cluster:1".into();
    names.set(&[address_of(&fake).await.parse().unwrap()]);
    describe(&connections, &address).await.unwrap();
    names.set(&[refused_address().await]);
    while connections.refused_until(&address).is_none() {
        assert!(connections.ready(&address, Lane::Fetch).await.is_err());
    }
    connections.ready(&address, Lane::Control).await.unwrap();
    describe(&connections, &address).await.unwrap();
    assert_eq!(connections.refused_until(&address), None, "it is alive");
}

#[tokio::test]
async fn limits_of_the_brokers_are_learnt_when_connecting() {
    let fake = Fake::start(1, 1).await;
    fake.state.lock().limits = Some(v1::Limits {
        batch_bytes_max: 1000,
        ..Default::default()
    });
    let connections = connections(config("unused:1"), &Names::default());
    let before = connections.limits().batch_bytes_max;
    describe(&connections, &address_of(&fake).await)
        .await
        .unwrap();
    assert!(before > 1000);
    assert_eq!(connections.limits().batch_bytes_max, 1000);
}

#[tokio::test]
async fn breaker_of_a_dead_broker_opens_and_closes_again_when_it_is_back() {
    let fake = Fake::start(1, 1).await;
    let names = Names::default();
    names.set(&[refused_address().await]);
    let connections = connections(config("cluster:1"), &names);
    let address: Address = "cluster:1".into();
    while connections.refused_until(&address).is_none() {
        describe(&connections, &address).await.unwrap_err();
    }
    assert!(connections.stats.snapshot().breaker_openings >= 1);
    let failed = connections.stats.snapshot().connections_failed;
    let fast = describe(&connections, &address).await.unwrap_err();
    assert!(fast.unsent && fast.error.to_string().contains("refused"));
    assert_eq!(
        connections.stats.snapshot().connections_failed,
        failed,
        "not dialled"
    );
    names.set(&[address_of(&fake).await.parse().unwrap()]);
    while describe(&connections, &address).await.is_err() {
        tokio::time::sleep_until(
            connections
                .refused_until(&address)
                .unwrap_or_else(Instant::now),
        )
        .await;
    }
    assert_eq!(connections.refused_until(&address), None);
}

#[tokio::test]
async fn all_addresses_changed_are_found_by_the_bootstrap_name() {
    let fake = Fake::start(1, 1).await;
    let target = address_of(&fake).await;
    let names = Names::default();
    let first = Proxy::start(Some(&target)).await;
    names.set(&[first.address]);
    let move_to = |proxy: &Proxy| {
        let address = proxy.address.to_string();
        fake.state.lock().addresses.insert(1, address);
    };
    move_to(&first);
    let client = Client::resolving(config("cluster:1"), names.resolver()).unwrap();
    let producer = client.producer(ProducerConfig::default()).unwrap();
    let record = || Record::to(TOPIC).value("x");
    producer.send(record()).await.unwrap();
    // Everything that the client knows by now leads nowhere.
    let second = Proxy::start(Some(&target)).await;
    move_to(&second);
    fake.state.lock().cluster_index += 1;
    first.cut();
    names.set(&[second.address]);
    let written = producer.send(record()).await.unwrap();
    assert_eq!(written.offset, 1);
}
