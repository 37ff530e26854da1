//! `qute group`.

use std::io::Write as _;

use qute_test::Cluster;

use crate::{one, qute, run, run_with, signal};

/// A group that has read ten records of one partition, five of which came later.
async fn with_group() -> Cluster {
    let cluster = one().await;
    cluster.create_topic("orders", 1).await.unwrap();
    let lines = |count: usize| b"x\n".repeat(count);
    run_with(&cluster, &["produce", "orders"], &lines(10))
        .await
        .expect(0);
    let read = run(&cluster, &["consume", "orders", "-g", "billing", "-e"]).await;
    assert_eq!(read.expect(0).text().lines().count(), 10);
    run_with(&cluster, &["produce", "orders"], &lines(5))
        .await
        .expect(0);
    cluster
}

async fn committed(cluster: &Cluster) -> serde_json::Value {
    let lag = run(cluster, &["group", "lag", "billing", "--output", "json"]).await;
    lag.expect(0).json()[0]["committed"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn group_is_listed_and_described_with_its_lag() {
    let cluster = with_group().await;
    let list = run(&cluster, &["group", "list", "--output", "json"]).await;
    let list = list.expect(0).json();
    assert_eq!(list[0]["group"], "billing");
    assert_eq!(list[0]["state"], "empty");
    assert_eq!(list[0]["offsets"], 1);
    let group = run(
        &cluster,
        &["group", "describe", "billing", "--output", "json"],
    )
    .await;
    let group = group.expect(0).json();
    assert_eq!(group["members"], serde_json::json!([]));
    let partition = &group["partitions"][0];
    assert_eq!(partition["topic"], "orders");
    assert_eq!(partition["committed"], 10);
    assert_eq!(partition["high_watermark"], 15);
    assert_eq!(partition["lag"], 5);
    assert!(group["coordinator_address"].is_string());
    let text = run(&cluster, &["group", "describe", "billing"])
        .await
        .expect(0);
    assert!(
        text.text().starts_with("group        billing\n"),
        "{text:?}"
    );
    assert!(text.text().contains("COMMITTED"), "{text:?}");
    let raw = run(&cluster, &["group", "lag", "billing", "--output", "raw"]).await;
    assert_eq!(raw.expect(0).text(), "orders\t0\t10\t15\t5\t-\n");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn group_is_seen_by_top_with_its_lag() {
    let cluster = with_group().await;
    let picture = run(
        &cluster,
        &["top", "--interval", "100ms", "--output", "json"],
    )
    .await;
    let picture = picture.expect(0).json();
    assert_eq!(picture["groups"][0]["name"], "billing");
    assert_eq!(picture["groups"][0]["lag"], 5);
    assert_eq!(picture["topics"].as_array().unwrap().len(), 1, "{picture}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reset_without_execute_changes_nothing_and_shows_what_it_would() {
    let cluster = with_group().await;
    let args = [
        "group", "reset", "billing", "--to", "start", "--output", "json",
    ];
    let plan = run(&cluster, &args).await.expect(0);
    let moves = plan.json()["moves"].clone();
    plan.says("nothing was changed: --execute does it");
    assert_eq!(
        (&moves[0]["from"], &moves[0]["to"]),
        (&10.into(), &0.into())
    );
    assert_eq!(committed(&cluster).await, 10);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reset_with_execute_sets_each_kind_of_target() {
    let cluster = with_group().await;
    for (to, expected) in [
        ("start", 0),
        ("+3", 3),
        ("end", 15),
        ("-4", 11),
        ("7", 7),
        ("99", 15),
        ("-99", 0),
        ("@0", 0),
        ("@99999999999999", 15),
    ] {
        let args = ["group", "reset", "billing", "--to", to, "--execute"];
        let output = run(&cluster, &args).await.expect(0);
        output.says("reset 1 partition of group billing");
        assert_eq!(committed(&cluster).await, expected, "{to}");
    }
    let args = [
        "group",
        "reset",
        "billing",
        "--to",
        "2",
        "--topic",
        "orders",
        "-p",
        "0",
        "--execute",
    ];
    run(&cluster, &args).await.expect(0);
    let rest = run(&cluster, &["consume", "orders", "-g", "billing", "-e"]).await;
    assert_eq!(rest.expect(0).text().lines().count(), 13);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reset_from_a_file_restores_what_lag_printed() {
    let cluster = with_group().await;
    let saved = run(&cluster, &["group", "lag", "billing", "--output", "raw"]).await;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&saved.expect(0).out).unwrap();
    let args = ["group", "reset", "billing", "--to", "start", "--execute"];
    run(&cluster, &args).await.expect(0);
    let path = file.path().to_str().unwrap();
    let args = [
        "group",
        "reset",
        "billing",
        "--from-file",
        path,
        "--execute",
    ];
    run(&cluster, &args).await.expect(0);
    assert_eq!(committed(&cluster).await, 10);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reset_and_delete_of_a_group_with_members_are_refused_until_forced_or_ended() {
    let cluster = with_group().await;
    let args = ["consume", "orders", "-g", "billing", "-f", r"%o\n"];
    let mut member = qute(&cluster, &args);
    let member = member.spawn().unwrap();
    loop {
        let args = ["group", "describe", "billing", "--output", "json"];
        let group = run(&cluster, &args).await.expect(0).json();
        if group["members"][0]["claims"][0] == "orders/0" && committed(&cluster).await == 15 {
            break;
        }
    }
    let args = ["group", "reset", "billing", "--to", "start", "--execute"];
    run(&cluster, &args).await.expect(1).says("--force");
    run(&cluster, &["group", "delete", "billing"])
        .await
        .expect(1)
        .says("stop them first");
    let plan = run(&cluster, &["group", "reset", "billing", "--to", "start"]).await;
    plan.expect(0).says("hold 1 of the 1 partition");
    let args = [
        "group",
        "reset",
        "billing",
        "--to",
        "14",
        "--execute",
        "--force",
    ];
    run(&cluster, &args).await.expect(0);
    // The member begins anew there.
    while committed(&cluster).await != 15 {}
    signal(&member, "TERM");
    let printed = crate::finish(member).await.expect(0);
    let printed: Vec<&str> = printed.text().lines().collect();
    assert_eq!(printed, ["10", "11", "12", "13", "14", "14"]);
    run(&cluster, &["group", "delete", "billing"])
        .await
        .expect(0)
        .says("deleted group billing");
    let list = run(&cluster, &["group", "list"]).await.expect(0);
    assert!(!list.text().contains("billing"), "{list:?}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_group_is_answered_with_the_one_that_may_have_been_meant() {
    let cluster = with_group().await;
    for args in [
        &["group", "describe", "biling"][..],
        &["group", "lag", "biling"],
        &["group", "delete", "biling"],
        &["group", "reset", "biling", "--to", "start"],
    ] {
        let output = run(&cluster, args).await.expect(1);
        output
            .says("group 'biling' does not exist")
            .says("did you mean 'billing'?");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn cluster_without_groups_has_none_to_show() {
    let cluster = one().await;
    let list = run(&cluster, &["group", "list", "--output", "json"]).await;
    assert_eq!(list.expect(0).json(), serde_json::json!([]));
    run(&cluster, &["group", "lag", "g"])
        .await
        .expect(1)
        .says("group 'g' does not exist");
    cluster.stop().await;
}
