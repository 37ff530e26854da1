//! `qute bench`.

use crate::{one, run};

#[tokio::test(flavor = "multi_thread")]
async fn bench_writes_and_reads_what_it_says() {
    let cluster = one().await;
    let args = [
        "bench",
        "produce",
        "load",
        "-n",
        "500",
        "--size",
        "100",
        "--partitions",
        "2",
        "--output",
        "json",
    ];
    let written = run(&cluster, &args).await.expect(0);
    let figures = written.json();
    assert_eq!(figures["records"], 500);
    assert_eq!(figures["errors"], 0);
    assert_eq!(figures["settings"]["record_bytes"], 100);
    assert!(figures["latency_ms"]["p99"].as_f64().unwrap() > 0.0);
    written.says("created topic load with 2 partitions");

    let read = run(&cluster, &["bench", "consume", "load", "--output", "json"]).await;
    assert_eq!(read.expect(0).json()["records"], 500);
    let part = ["bench", "consume", "load", "-n", "7", "--output", "json"];
    assert_eq!(run(&cluster, &part).await.expect(0).json()["records"], 7);

    // What the topic holds already is none of this run's.
    let args = [
        "bench",
        "end-to-end",
        "load",
        "-n",
        "100",
        "--warmup",
        "10",
        "--rate",
        "1000",
        "--output",
        "json",
    ];
    let both = run(&cluster, &args).await.expect(0).json();
    assert_eq!(both["records"], 100);
    assert!(both["acknowledged_ms"]["p50"].is_number());
    let table = run(&cluster, &["bench", "consume", "load"]).await.expect(0);
    let first: Vec<&str> = table
        .text()
        .lines()
        .next()
        .unwrap()
        .split_whitespace()
        .collect();
    assert_eq!(first, ["records", "610"]);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bench_consume_of_nothing_says_what_to_do() {
    let cluster = one().await;
    cluster.create_topic("empty", 1).await.unwrap();
    let output = run(&cluster, &["bench", "consume", "empty"]).await;
    output.expect(1).says("`qute bench produce empty` fills it");
    let output = run(&cluster, &["bench", "consume", "emtpy"]).await;
    output.expect(1).says("did you mean 'empty'?");
    cluster.stop().await;
}
