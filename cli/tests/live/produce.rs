//! `qute produce`: tombstones, files, rates.

use std::io::Write as _;

use crate::{one, run, run_with};

const RECORDS: &[&str] = &["consume", "t", "-e", "--output", "jsonl"];

fn values(output: &crate::Output) -> Vec<(serde_json::Value, serde_json::Value)> {
    let lines = output.text().lines();
    lines
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .map(|record| (record["key"].clone(), record["value"].clone()))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn tombstone_with_k_is_one_record_and_leaves_the_input_alone() {
    let cluster = one().await;
    cluster.create_topic("t", 1).await.unwrap();
    let args = ["produce", "t", "-k", "N725MQ", "--tombstone"];
    let output = run_with(&cluster, &args, b"not read\n").await.expect(0);
    assert_eq!(output.out, b"");
    let read = run(&cluster, RECORDS).await.expect(0);
    assert_eq!(values(&read), [("N725MQ".into(), serde_json::Value::Null)]);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tombstones_among_lines_are_those_without_a_value() {
    let cluster = one().await;
    cluster.create_topic("t", 1).await.unwrap();
    let args = ["produce", "t", "-K", ",", "--tombstone"];
    run_with(&cluster, &args, b"a,1\nb\nc,\n,\n")
        .await
        .expect(0);
    // Without the flag an empty value is a value, and a line without delimiter too.
    run_with(&cluster, &["produce", "t", "-K", ","], b"d,\ne\n")
        .await
        .expect(0);
    let null = serde_json::Value::Null;
    let read = run(&cluster, RECORDS).await.expect(0);
    assert_eq!(
        values(&read),
        [
            ("a".into(), "1".into()),
            ("b".into(), null.clone()),
            ("c".into(), null.clone()),
            ("".into(), null.clone()),
            ("d".into(), "".into()),
            (null, "e".into()),
        ]
    );
    let refused = run_with(&cluster, &args, b"x,1\n\ny,2\n").await.expect(1);
    refused.says("line 2 is blank").says("1 record");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn file_of_any_bytes_is_one_value_and_an_empty_one_is_empty() {
    let cluster = one().await;
    cluster.create_topic("t", 1).await.unwrap();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let bytes: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    file.write_all(&bytes).unwrap();
    let path = file.path().to_str().unwrap();
    run(&cluster, &["produce", "t", "--file", path])
        .await
        .expect(0);
    let read = run(&cluster, &["consume", "t", "-e", "-f", "%v"]).await;
    assert_eq!(read.expect(0).out, bytes);
    run_with(&cluster, &["produce", "t", "--file", "-"], b"")
        .await
        .expect(0);
    let read = run(&cluster, &["consume", "t", "-e", "-f", "<%v>", "-o", "-1"]).await;
    assert_eq!(read.expect(0).out, b"<>");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn file_that_cannot_be_sent_is_said_before_anything_connects() {
    let cluster = one().await;
    cluster.create_topic("t", 1).await.unwrap();
    for (path, says) in [
        ("/no/such", "/no/such"),
        ("/dev/zero", "the most that a record may have"),
        ("/tmp", "directory"),
    ] {
        let output = run(&cluster, &["produce", "t", "--file", path]).await;
        output.expect(1).says(says);
    }
    let read = run(&cluster, RECORDS).await.expect(0);
    assert_eq!(read.out, b"");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acknowledgements_as_json_are_one_array() {
    let cluster = one().await;
    cluster.create_topic("t", 1).await.unwrap();
    let args = ["produce", "t", "--output", "json"];
    let acks = run_with(&cluster, &args, b"a\nb\n").await.expect(0).json();
    assert_eq!(acks.as_array().unwrap().len(), 2);
    assert_eq!(
        (&acks[1]["line"], &acks[1]["offset"]),
        (&2.into(), &1.into())
    );
    let none = run(&cluster, &args).await.expect(0).json();
    assert_eq!(none, serde_json::json!([]));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rate_holds_lines_back_and_loses_none() {
    let cluster = one().await;
    cluster.create_topic("t", 1).await.unwrap();
    let started = std::time::Instant::now();
    let args = ["produce", "t", "--rate", "20"];
    let output = run_with(&cluster, &args, &b"x\n".repeat(11)).await;
    output.expect(0).says("11 records");
    // The last of eleven is due ten intervals after the first.
    assert!(started.elapsed() >= std::time::Duration::from_millis(500));
    let read = run(&cluster, RECORDS).await.expect(0);
    assert_eq!(read.text().lines().count(), 11);
    cluster.stop().await;
}
