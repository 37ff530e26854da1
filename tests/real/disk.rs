//! A disk that is full: at the start, and while records arrive.
//!
//! The data directory is a small tmpfs in a mount namespace of the broker's own, which any user
//! may make where the system allows user namespaces.

use std::time::Duration;

use anyhow::{Result, ensure};
use qute_tests::cluster::Cluster;
use qute_tests::wait;

use crate::bins;

/// A cluster of one whose broker lives on a tmpfs of this size, with `fill` bytes taken; `None`
/// where the system has no user namespaces.
fn on_small_disk(size: &str, fill_kib: u32) -> Result<Option<Cluster>> {
    let mut cluster = Cluster::prepare(&bins(), 1)?;
    let probe = std::process::Command::new("unshare")
        .args(["-rm", "true"])
        .status();
    if !probe.is_ok_and(|status| status.success()) {
        eprintln!("skipped: this system lets nobody make a user and mount namespace");
        cluster.stop()?;
        return Ok(None);
    }
    let node = cluster.node(0)?;
    let (dir, disk) = (node.dir().to_path_buf(), node.dir().with_extension("disk"));
    std::fs::create_dir_all(&disk)?;
    let script = format!(
        "mount -t tmpfs -o size={size} tmpfs '{disk}' && \
         {{ dd if=/dev/zero of='{disk}/fill' bs=1k count={fill_kib} 2>/dev/null; true; }} && \
         exec \"$@\"",
        disk = disk.display(),
    );
    node.set_wrap(&["unshare", "-rm", "sh", "-c", &script, "sh"]);
    node.set_dir(&disk.join(dir.file_name().unwrap_or_default()));
    Ok(Some(cluster))
}

#[test]
fn disk_full_at_start_is_fatal_and_named() -> Result<()> {
    let Some(mut cluster) = on_small_disk("64k", 1000)? else {
        return Ok(());
    };
    cluster.start_one(0)?;
    let code = cluster.node(0)?.wait_end(wait::LONG)?;
    ensure!(code == Some(1), "ended with {code:?}");
    let log = cluster.nodes[0].log()?.to_lowercase();
    ensure!(
        log.contains("space") || log.contains("full"),
        "no clear line: {log}"
    );
    ensure!(!log.contains("panicked"), "{log}");
    cluster.stop()
}

#[test]
fn disk_full_refuses_records_and_keeps_serving() -> Result<()> {
    let Some(mut cluster) = on_small_disk("96m", 0)? else {
        return Ok(());
    };
    cluster.start_all()?;
    cluster.create_topic("t", 1, 1)?;
    let mut line = vec![b'x'; 100_000];
    line.push(b'\n');
    let input = line.repeat(2000);
    let words = ["produce", "t", "--timeout", "5s"];
    let output = cluster
        .qute(words)
        .limit(Duration::from_secs(90))
        .run_with(&input)?;
    ensure!(
        matches!(output.code, Some(1 | 3 | 4)),
        "200 MB went to a disk of 96: {:?} {}",
        output.code,
        output.stderr
    );
    let said = output.stderr.to_lowercase();
    ensure!(
        said.contains("full") || said.contains("space"),
        "no reason: {said}"
    );

    ensure!(
        cluster.node(0)?.process()?.ended()?.is_none(),
        "the broker has ended"
    );
    let output = cluster
        .qute(["consume", "t", "-e", "-f", r"%o\n"])
        .run()?
        .ok()?;
    let count = output.text().lines().count();
    ensure!(count > 100, "only {count} records are readable");
    cluster.qute(["cluster", "info"]).run()?.ok()?;
    cluster.stop()
}
