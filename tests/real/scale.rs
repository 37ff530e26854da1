//! A hundred partitions of three replicas.

use std::time::Duration;

use anyhow::{Result, ensure};
use qute_tests::cluster::Cluster;

use crate::bins;

#[test]
fn hundred_partitions_of_three_replicas_write_restart_and_read() -> Result<()> {
    let mut cluster = Cluster::start(&bins(), 3)?;
    let words = [
        "topic",
        "create",
        "many",
        "--partitions",
        "100",
        "--replicas",
        "3",
    ];
    cluster
        .qute(words)
        .args(["--timeout", "60s"])
        .limit(Duration::from_secs(90))
        .run()?
        .ok()?;
    let lines: String = (0..20_000).map(|i| format!("key{i}\t{i}\n")).collect();
    cluster
        .qute(["produce", "many", "-K", "\t"])
        .run_with(lines.as_bytes())?
        .ok()?;

    let leaders = cluster.leaders("many")?;
    ensure!(leaders.len() == 100, "{} partitions", leaders.len());
    let brokers: std::collections::BTreeSet<_> = leaders.values().flatten().collect();
    ensure!(
        brokers.len() == 3,
        "leaders are on {} brokers only",
        brokers.len()
    );

    for node in &mut cluster.nodes {
        node.kill()?;
    }
    cluster.start_all()?;
    let words = ["consume", "many", "-o", "start", "-e", "-f", r"%k\t%v\n"];
    let output = cluster.qute(words).run()?.ok()?;
    let mut read: Vec<&[u8]> = output
        .stdout
        .split_inclusive(|&byte| byte == b'\n')
        .collect();
    let mut written: Vec<&[u8]> = lines
        .as_bytes()
        .split_inclusive(|&byte| byte == b'\n')
        .collect();
    read.sort_unstable();
    written.sort_unstable();
    ensure!(
        read == written,
        "{} records read of {}",
        read.len(),
        written.len()
    );
    cluster.stop()
}
