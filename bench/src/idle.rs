//! What replicas cost while nothing happens.

use std::time::{Duration, Instant};

use anyhow::Result;
use qute_load::latency::{as_millis, rounded};
use qute_tests::{procfs, wait};
use serde_json::{Value, json};

use crate::target;

const TOPIC: &str = "bench-idle";

/// Creates the partitions, writes a record to each, and watches the brokers for a while; then
/// restarts them one after the other and all at once.
///
/// # Errors
/// When the cluster misbehaves.
pub fn measure(brokers: usize, partitions: u32, replicas: u32, watch: Duration) -> Result<Value> {
    let mut cluster = target::own(brokers)?;
    let start = Instant::now();
    let count = partitions.to_string();
    let words = [
        "topic",
        "create",
        TOPIC,
        "--timeout",
        "120s",
        "--partitions",
        &count,
    ];
    let replicas_word = replicas.to_string();
    let command = cluster.qute(words).args(["--replicas", &replicas_word]);
    command.limit(Duration::from_secs(150)).run()?.ok()?;
    let created = start.elapsed();
    let lines: String = (0..partitions * 20)
        .map(|i| format!("key{i}\tvalue\n"))
        .collect();
    cluster
        .qute(["produce", TOPIC, "-K", "\t"])
        .run_with(lines.as_bytes())?
        .ok()?;

    eprintln!("watching for {watch:?}");
    let mut pids = Vec::new();
    for place in 0..brokers {
        pids.push(cluster.node(place)?.process()?.pid());
    }
    let cpu = |pids: &[u32]| {
        pids.iter()
            .map(|&pid| procfs::cpu_time(pid))
            .collect::<Result<Vec<_>>>()
    };
    let (start, before) = (Instant::now(), cpu(&pids)?);
    wait::rest_until(start + watch);
    let (seconds, after) = (start.elapsed().as_secs_f64(), cpu(&pids)?);
    let mut per_broker = Vec::new();
    for ((pid, before), after) in pids.iter().zip(before).zip(after) {
        #[allow(clippy::cast_precision_loss)]
        per_broker.push(json!({
            "cpu_percent_of_a_core": rounded((after - before).as_secs_f64() / seconds * 100.0),
            "resident_mb": rounded(procfs::resident_bytes(*pid)? as f64 / 1e6),
        }));
    }

    eprintln!("restarting");
    let mut restarts = Vec::new();
    for place in 0..brokers {
        cluster.node(place)?.terminate()?;
        let start = Instant::now();
        cluster.start_one(place)?;
        cluster.node(place)?.wait_ready()?;
        restarts.push(as_millis(start.elapsed()));
    }
    for node in &mut cluster.nodes {
        node.kill()?;
    }
    let start = Instant::now();
    cluster.start_all()?;
    let ready = start.elapsed();
    cluster.wait_led(TOPIC, None)?;
    let led = start.elapsed();
    let report = json!({
        "bench": "idle",
        "brokers": brokers,
        "partitions": partitions,
        "replicas": replicas,
        "created_ms": as_millis(created),
        "per_broker": per_broker,
        "restart_one_ready_ms": restarts,
        "restart_all_after_kill_ready_ms": as_millis(ready),
        "restart_all_after_kill_led_ms": as_millis(led),
    });
    cluster.stop()?;
    Ok(report)
}
