//! The ceiling that the disk sets, without Qute.
//!
//! Appends with a sync after each, to a growing file and to one whose blocks were written before:
//! the two ways in which a log can be kept. Single runs are good to about 30% on shared machines.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use qute_load::latency::{Latencies, rounded};
use serde_json::{Value, json};

const SPAN_BYTES: usize = 256 << 20;

/// Measures for about `each` per case in a file of its own in `dir`.
///
/// # Errors
/// When the disk refuses.
pub fn probe(dir: &Path, each: Duration) -> Result<Value> {
    let mut cases = Vec::new();
    for written_before in [false, true] {
        for size in [4 << 10, 64 << 10, 1 << 20] {
            cases.push(case(dir, size, written_before, each)?);
        }
    }
    Ok(json!({ "bench": "disk", "directory": dir.display().to_string(), "cases": cases }))
}

fn case(dir: &Path, size: usize, written_before: bool, each: Duration) -> Result<Value> {
    let path = dir.join("qute-bench-disk.tmp");
    let file = File::create(&path).with_context(|| path.display().to_string())?;
    if written_before {
        let block = vec![0_u8; 1 << 20];
        for at in (0..SPAN_BYTES).step_by(block.len()) {
            file.write_all_at(&block, at as u64)?;
        }
        file.sync_all()?;
    }
    let block = vec![b'q'; size];
    let (mut latencies, start, mut written) = (Latencies::new()?, Instant::now(), 0_usize);
    while start.elapsed() < each {
        let before = Instant::now();
        // A file written before is gone through again from its start.
        let at = if written_before {
            written % SPAN_BYTES
        } else {
            written
        };
        file.write_all_at(&block, at as u64)?;
        file.sync_data()?;
        latencies.record(before.elapsed());
        written += size;
    }
    let seconds = start.elapsed().as_secs_f64();
    std::fs::remove_file(&path)?;
    eprintln!("disk: {size} bytes, blocks written before: {written_before}");
    #[allow(clippy::cast_precision_loss)]
    Ok(json!({
        "bytes": size,
        "blocks_written_before": written_before,
        "mb_per_s": rounded(written as f64 / 1e6 / seconds),
        "syncs_per_s": rounded(latencies.count() as f64 / seconds),
        "latency_ms": latencies.to_json(),
    }))
}
