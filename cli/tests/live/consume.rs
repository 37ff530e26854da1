//! `qute consume`, for itself and as a member of a group.

use std::time::Duration;

use qute_test::Cluster;
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::{Output, finish, one, qute, run, run_with, signal};

/// One broker with this many lines in a topic of so many partitions.
async fn with_lines(partitions: u32, lines: u32) -> Cluster {
    let cluster = one().await;
    cluster.create_topic("t", partitions).await.unwrap();
    write(&cluster, 0..lines).await;
    cluster
}

async fn write(cluster: &Cluster, numbers: std::ops::Range<u32>) {
    let input: String = numbers
        .map(|number| format!("k{number}\t{number}\n"))
        .collect();
    run_with(cluster, &["produce", "t", "-K", r"\t"], input.as_bytes())
        .await
        .expect(0);
}

/// The numbers that were printed, sorted.
fn numbers(output: &Output) -> Vec<u32> {
    let mut numbers: Vec<u32> = output
        .text()
        .lines()
        .map(|it| it.parse().unwrap())
        .collect();
    numbers.sort_unstable();
    numbers
}

#[tokio::test(flavor = "multi_thread")]
async fn records_as_json_are_one_document_with_base64_for_binary() {
    let cluster = one().await;
    cluster.create_topic("t", 1).await.unwrap();
    run_with(&cluster, &["produce", "t"], b"text\n\xff\xfe\n")
        .await
        .expect(0);
    let args = ["consume", "t", "-e", "--output", "json"];
    let records = run(&cluster, &args).await.expect(0).json();
    assert_eq!(records.as_array().unwrap().len(), 2);
    assert_eq!(records[0]["value"], "text");
    assert_eq!(records[1]["value"]["base64"], "//4=");
    let none = ["consume", "t", "-e", "-o", "end", "--output", "json"];
    assert_eq!(
        run(&cluster, &none).await.expect(0).json(),
        serde_json::json!([])
    );
    let typo = run(&cluster, &["consume", "tt", "-e"]).await.expect(1);
    typo.says("did you mean 't'?");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn group_reads_to_the_ends_and_goes_on_there_the_next_time() {
    let cluster = with_lines(4, 100).await;
    let args = ["consume", "t", "-g", "g", "-e"];
    let first = run(&cluster, &args).await.expect(0);
    assert_eq!(numbers(&first), Vec::from_iter(0..100));
    // Everything is committed: nothing is left, -o or not.
    let again = run(&cluster, &["consume", "t", "-g", "g", "-e", "-o", "start"]).await;
    assert_eq!(again.expect(0).text(), "");
    write(&cluster, 100..130).await;
    let rest = run(&cluster, &args).await.expect(0);
    assert_eq!(numbers(&rest), Vec::from_iter(100..130));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn group_without_commits_starts_where_o_says() {
    let cluster = with_lines(3, 50).await;
    let args = ["consume", "t", "-g", "late", "-e", "-o", "end"];
    assert_eq!(run(&cluster, &args).await.expect(0).text(), "");
    write(&cluster, 50..60).await;
    let rest = run(&cluster, &["consume", "t", "-g", "late", "-e"]).await;
    assert_eq!(numbers(&rest.expect(0)), Vec::from_iter(50..60));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn group_commits_the_records_that_a_count_lets_through_and_no_more() {
    let cluster = with_lines(2, 100).await;
    let mut seen = Vec::new();
    for count in ["1", "30", "7"] {
        let part = run(&cluster, &["consume", "t", "-g", "g", "-n", count]).await;
        let part = numbers(&part.expect(0));
        assert_eq!(part.len().to_string(), count);
        seen.extend(part);
    }
    seen.extend(numbers(
        &run(&cluster, &["consume", "t", "-g", "g", "-e"]).await,
    ));
    seen.sort_unstable();
    assert_eq!(seen, Vec::from_iter(0..100));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn group_member_ended_by_a_signal_commits_what_it_printed() {
    let cluster = with_lines(3, 40).await;
    for (round, name) in ["INT", "TERM"].into_iter().enumerate() {
        let group = format!("g{round}");
        let mut child = qute(&cluster, &["consume", "t", "-g", &group])
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        for _ in 0..40 {
            lines.next_line().await.unwrap().unwrap();
        }
        signal(&child, name);
        let output = finish(child).await.expect(0);
        assert_eq!(output.err, "");
        assert_eq!(lines.next_line().await.unwrap(), None);
        let rest = run(&cluster, &["consume", "t", "-g", &group, "-e"]).await;
        assert_eq!(rest.expect(0).text(), "");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn group_member_whose_reader_leaves_commits_nothing_that_was_not_written() {
    let cluster = one().await;
    cluster.create_topic("t", 1).await.unwrap();
    // More than a pipe holds.
    let value = "x".repeat(2000);
    let input: String = (0..500)
        .map(|number| format!("{number} {value}\n"))
        .collect();
    run_with(&cluster, &["produce", "t"], input.as_bytes())
        .await
        .expect(0);
    let mut child = qute(&cluster, &["consume", "t", "-g", "g"])
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut seen = std::collections::BTreeSet::new();
    let number = |line: &str| line.split(' ').next().unwrap().parse::<u32>().unwrap();
    for _ in 0..3 {
        seen.insert(number(&lines.next_line().await.unwrap().unwrap()));
    }
    drop(lines);
    finish(child).await.expect(0);
    let rest = run(&cluster, &["consume", "t", "-g", "g", "-e"])
        .await
        .expect(0);
    let first = number(rest.text().lines().next().unwrap());
    assert!(first <= 3, "{first} lines were committed, 3 were read");
    seen.extend(rest.text().lines().map(number));
    assert_eq!(seen, (0..500).collect());
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn group_members_share_the_partitions_and_read_each_record_once() {
    let cluster = with_lines(4, 200).await;
    let mut first = qute(&cluster, &["consume", "t", "-g", "g", "-v"])
        .env("QUTE_LOG", "off")
        .spawn()
        .unwrap();
    let mut told = BufReader::new(first.stderr.take().unwrap()).lines();
    // Rebalances are told: one member has them all, then gives some to the other.
    let mut wait_for = async |what: &str| {
        while let Some(line) = told.next_line().await.unwrap() {
            if line.contains(what) {
                return;
            }
        }
        panic!("it never says {what:?}");
    };
    wait_for(" reads t/").await;
    let second = qute(&cluster, &["consume", "t", "-g", "g"])
        .spawn()
        .unwrap();
    wait_for(" gives up t/").await;
    // The group has settled once both hold partitions.
    loop {
        let args = ["group", "describe", "g", "--output", "json"];
        let group = run(&cluster, &args).await.expect(0).json();
        let holds = |member: &serde_json::Value| member["claims"].as_array().unwrap().len();
        let members = group["members"].as_array().unwrap();
        if members.len() == 2 && members.iter().all(|member| holds(member) == 2) {
            break;
        }
    }
    write(&cluster, 200..300).await;
    // All is committed once the lag is gone.
    loop {
        let lag = run(&cluster, &["group", "lag", "g", "--output", "json"]).await;
        let lag = lag.expect(0).json();
        let lags = lag.as_array().unwrap().iter();
        if lags.map(|it| it["lag"].as_u64()).sum::<Option<u64>>() == Some(0) {
            break;
        }
    }
    signal(&first, "TERM");
    signal(&second, "TERM");
    // The lines of standard error are taken above, to their end.
    let drained = tokio::spawn(async move { while let Ok(Some(_)) = told.next_line().await {} });
    let (first, second) = tokio::join!(finish(first), finish(second));
    drained.await.unwrap();
    let mut all = numbers(&first.expect(0));
    all.extend(numbers(&second.expect(0)));
    all.sort_unstable();
    assert_eq!(all, Vec::from_iter(0..300));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn group_member_to_the_ends_stops_there_while_more_is_written() {
    let cluster = with_lines(2, 50).await;
    let mut writer = qute(&cluster, &["produce", "t", "--rate", "200"])
        .spawn()
        .unwrap();
    let mut stdin = writer.stdin.take().unwrap();
    let feeding = tokio::spawn(async move {
        use tokio::io::AsyncWriteExt as _;
        while stdin.write_all(b"7777\n").await.is_ok() {}
    });
    let read = run(&cluster, &["consume", "t", "-g", "g", "-e"])
        .await
        .expect(0);
    let read = numbers(&read).into_iter().filter(|number| *number != 7777);
    assert_eq!(read.collect::<Vec<_>>(), Vec::from_iter(0..50));
    writer.kill().await.unwrap();
    feeding.await.unwrap();
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn group_by_a_regular_expression_reads_all_topics_that_match() {
    let cluster = one().await;
    for topic in ["orders.eu", "orders.us", "refunds"] {
        cluster.create_topic(topic, 2).await.unwrap();
        let args = ["produce", topic];
        run_with(&cluster, &args, format!("{topic}\n").as_bytes())
            .await
            .expect(0);
    }
    let args = [
        "consume",
        r"^orders\.",
        "--regex",
        "-g",
        "g",
        "-e",
        "-f",
        r"%t=%v\n",
    ];
    let read = run(&cluster, &args).await.expect(0);
    let mut lines: Vec<&str> = read.text().lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["orders.eu=orders.eu", "orders.us=orders.us"]);
    let wrong = ["consume", "(", "--regex", "-g", "g", "-e"];
    run(&cluster, &wrong).await.expect(1);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn group_member_with_a_name_keeps_its_place_for_its_successor() {
    let cluster = with_lines(2, 10).await;
    let args = ["consume", "t", "-g", "g", "-e", "--instance", "worker-1"];
    let first = run(&cluster, &args).await.expect(0);
    assert_eq!(numbers(&first), Vec::from_iter(0..10));
    let describe = ["group", "describe", "g", "--output", "json"];
    let group = run(&cluster, &describe).await.expect(0).json();
    assert_eq!(group["members"][0]["instance"], "worker-1");
    write(&cluster, 10..15).await;
    let second = run(&cluster, &args).await.expect(0);
    assert_eq!(numbers(&second), Vec::from_iter(10..15));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn group_of_an_unknown_topic_is_refused_with_what_was_meant() {
    let cluster = with_lines(1, 1).await;
    let output = run(&cluster, &["consume", "tt", "-g", "g", "-e"]).await;
    output.expect(1).says("did you mean 't'?");
    let output = run(&cluster, &["consume", "t", "-g", "", "-e"]).await;
    output.expect(1);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn group_member_that_is_told_nothing_to_read_ends_at_once() {
    let cluster = with_lines(1, 5).await;
    let busy = qute(&cluster, &["consume", "t", "-g", "g"])
        .spawn()
        .unwrap();
    loop {
        let args = ["group", "describe", "g", "--output", "json"];
        let group = run(&cluster, &args).await;
        if group.code == 0 && group.json()["members"][0]["claims"][0] == "t/0" {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let idle = run(&cluster, &["consume", "t", "-g", "g", "-e"])
        .await
        .expect(0);
    assert_eq!(idle.text(), "");
    signal(&busy, "TERM");
    assert_eq!(numbers(&finish(busy).await.expect(0)), Vec::from_iter(0..5));
    cluster.stop().await;
}
