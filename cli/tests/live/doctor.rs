//! `qute doctor` against real brokers.

use qute_test::Cluster;

use crate::{one, run};

#[tokio::test(flavor = "multi_thread")]
async fn doctor_finds_nothing_failing_in_a_healthy_cluster() {
    let cluster = one().await;
    cluster.create_topic("orders", 2).await.unwrap();
    let output = run(&cluster, &["doctor", "--output", "json"])
        .await
        .expect(0);
    let found = output.json();
    assert_eq!(found["failures"], 0, "{found}");
    let checks = found["checks"].as_array().unwrap();
    let kinds = [
        "bootstrap",
        "cluster",
        "broker",
        "version",
        "clock",
        "disk",
        "replicas",
        "partitions",
    ];
    for kind in kinds {
        let check = checks.iter().find(|check| check["check"] == kind);
        let check = check.unwrap_or_else(|| panic!("no {kind} in {found}"));
        // How full the disk is depends on the machine.
        assert!(check["status"] == "ok" || kind == "disk", "{check}");
    }
    let raw = run(&cluster, &["doctor", "--output", "raw"])
        .await
        .expect(0);
    assert!(raw.text().starts_with("ok\tbootstrap\t"), "{raw:?}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_fails_with_advice_where_a_broker_is_gone() {
    let mut cluster = Cluster::start(3).await.unwrap();
    cluster.create_topic("orders", 1).await.unwrap();
    cluster.kill(2).await.unwrap();
    let output = run(&cluster, &["doctor", "--timeout", "30s"])
        .await
        .expect(1);
    let output = output.says("failure");
    let text = output.text();
    assert!(text.starts_with("STATUS"), "{text}");
    assert!(
        text.lines().any(|line| line.starts_with("fail    broker")),
        "{text}"
    );
    assert!(text.contains("-> "), "{text}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_says_what_to_do_where_nobody_answers() {
    let mut cluster = one().await;
    cluster.kill(0).await.unwrap();
    let output = run(
        &cluster,
        &["doctor", "--timeout", "1s", "--output", "jsonl"],
    )
    .await
    .expect(1);
    let check = output.json();
    assert_eq!(
        (&check["check"], &check["status"]),
        (&"bootstrap".into(), &"fail".into())
    );
    assert!(
        check["advice"]
            .as_str()
            .unwrap()
            .contains("is a broker running there?"),
        "{check}"
    );
}
