//! Addresses for clients and for brokers, and the abrupt stop.

use qute_proto::v1::{MetadataRequest, WatchMetadataRequest};
use tokio_stream::StreamExt as _;

use super::cluster::{Cluster, LONG, until};

#[tokio::test(flavor = "multi_thread")]
async fn brokers_reach_each_other_where_clients_are_sent_elsewhere() {
    // Nothing listens where clients are sent: a proxy would.
    let told = |at: usize| format!("127.0.0.1:{}", at + 1);
    let cluster = Cluster::start(|at, config| {
        config.advertise = told(at);
        config.advertise_peers = config.listen.clone();
    })
    .await;
    for at in 0..3 {
        let request = MetadataRequest::default();
        let answer = cluster.admin(at).await.metadata(request).await.unwrap();
        let mut addresses: Vec<String> = answer
            .into_inner()
            .brokers
            .into_iter()
            .map(|broker| broker.address)
            .collect();
        addresses.sort();
        assert_eq!(addresses, [told(0), told(1), told(2)]);
    }
    let controller = cluster.broker(0).controller.controller().unwrap();
    assert!(
        (0..3)
            .map(told)
            .any(|address| address == controller.address)
    );
    cluster.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn aborted_broker_is_cut_off_at_once_and_comes_back_on_its_directory() {
    let mut cluster = Cluster::start(|_, _| {}).await;
    let leader = cluster.controller_seen_by(0).unwrap();
    let identity = cluster.broker(leader).broker_id();
    let mut admin = cluster.admin(leader).await;
    let watch = admin.watch_metadata(WatchMetadataRequest {}).await;
    let mut watch = watch.unwrap().into_inner();
    watch.next().await.unwrap().unwrap();

    cluster.abort(leader).await;
    // No good end of the stream: the connection is gone.
    let ended = tokio::time::timeout(LONG, async {
        loop {
            match watch.next().await {
                Some(Ok(_)) => {}
                Some(Err(_)) => return true,
                None => return false,
            }
        }
    });
    assert!(ended.await.unwrap());
    let others: Vec<usize> = (0..3).filter(|at| *at != leader).collect();
    until("another leader of `__cluster`", || {
        let seen: Vec<_> = others
            .iter()
            .map(|at| cluster.controller_seen_by(*at))
            .collect();
        seen.iter()
            .all(|leader| leader.is_some_and(|at| others.contains(&at)))
    })
    .await;

    cluster.restart(leader).await;
    cluster.ready().await;
    assert_eq!(cluster.broker(leader).broker_id(), identity);
    cluster.shutdown().await;
}
