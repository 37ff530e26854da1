//! How soon a broker with many records serves again.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use qute_load::latency::as_millis;
use serde_json::{Value, json};

use crate::target;

const TOPIC: &str = "bench-restart";

/// Fills brokers with records, then stops and kills one and measures until it is ready and, for a
/// cluster of one, until a record has been read.
///
/// # Errors
/// When the cluster misbehaves.
pub fn measure(brokers: usize, records: usize, record_bytes: usize) -> Result<Value> {
    let mut cluster = target::own(brokers)?;
    let replicas = if brokers >= 3 { 3 } else { 1 };
    cluster.create_topic(TOPIC, 6, replicas)?;
    eprintln!("writing {records} records");
    let line = [vec![b'x'; record_bytes], b"\n".to_vec()].concat();
    let input = line.repeat(records);
    let limit = Duration::from_secs(600);
    cluster
        .qute(["produce", TOPIC])
        .limit(limit)
        .run_with(&input)?
        .ok()?;

    let mut runs = Vec::new();
    for how in ["SIGTERM", "SIGKILL"] {
        match how {
            "SIGTERM" => cluster.node(0)?.terminate()?,
            _ => cluster.node(0)?.kill()?,
        }
        let start = Instant::now();
        cluster.start_one(0)?;
        cluster.node(0)?.wait_ready()?;
        let ready = start.elapsed();
        let address = cluster.nodes.first().context("no broker")?.address();
        cluster
            .qute_at(&address, ["consume", TOPIC, "-n", "1"])
            .run()?
            .ok()?;
        runs.push(json!({
            "stopped_by": how,
            "ready_ms": as_millis(ready),
            "first_record_read_ms": as_millis(start.elapsed()),
        }));
    }
    let report = json!({
        "bench": "restart",
        "brokers": brokers,
        "records": records,
        "record_bytes": record_bytes,
        "runs": runs,
    });
    cluster.stop()?;
    Ok(report)
}
