//! Each record byte is written once per replica: into the segment that consumers read.

use anyhow::{Result, ensure};
use qute_client::{Client, ProducerConfig, Record};
use qute_tests::cluster::Cluster;
use qute_tests::procfs::{self, Usage};
use qute_tests::wait;
use tokio::runtime::Runtime;

use crate::bins;

const RECORDS: u64 = 60_000;
const VALUE_BYTES: u64 = 1_000;

/// What one broker has written and holds.
#[derive(Clone, Copy, Debug)]
struct Account {
    /// To any file, as the broker counts where it calls the system. (The kernel's count of a
    /// process is of no use: it counts a whole folio, up to 2 MiB, for each page that is touched.)
    written: u64,
    /// Of it: blocks of zeros written ahead of the records.
    prewritten: u64,
    /// Bytes of frames in segments, as the broker counts.
    appended: u64,
    usage: Usage,
}

fn account(cluster: &Cluster, place: usize) -> Result<Account> {
    let node = &cluster.nodes[place];
    let metrics = node.metrics()?;
    Ok(Account {
        written: bytes(metrics.sum("qute_storage_file_written_bytes_total")),
        prewritten: bytes(metrics.sum("qute_storage_prewritten_bytes_total")),
        appended: bytes(metrics.sum("qute_storage_written_bytes_total")),
        usage: procfs::usage(node.dir())?,
    })
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn bytes(value: f64) -> u64 {
    value as u64
}

/// Writes values that no file system could store in less.
fn produce(cluster: &Cluster) -> Result<()> {
    let config = ProducerConfig::default();
    Runtime::new()?.block_on(async {
        let client = Client::connect(&cluster.bootstrap()).await?;
        let producer = client.producer(config)?;
        let mut state = 1_u64;
        for _ in 0..RECORDS {
            let mut value = Vec::new();
            for _ in 0..VALUE_BYTES {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                value.push(b'!' + ((state >> 33) % 90) as u8);
            }
            let _ticket = producer.enqueue(Record::to("t").value(value)).await?;
        }
        let report = producer.close(wait::LONG).await;
        ensure!(report.undelivered.is_empty(), "{report:?}");
        Ok(())
    })
}

#[test]
fn record_bytes_are_written_once_per_replica() -> Result<()> {
    let cluster = Cluster::start(&bins(), 3)?;
    cluster.create_topic("t", 6, 3)?;
    let before: Vec<Account> = (0..3)
        .map(|place| account(&cluster, place))
        .collect::<Result<_>>()?;

    let produced = RECORDS * VALUE_BYTES;
    produce(&cluster)?;

    for (place, before) in before.iter().enumerate() {
        // A follower may be a little behind the acknowledgement.
        let what = format!("b{place} to have every byte");
        let after = wait::until(&what, wait::LONG, || {
            let now = account(&cluster, place)?;
            Ok((now.appended - before.appended >= produced).then_some(now))
        })?;
        let appended = after.appended - before.appended;
        let prewritten = after.prewritten - before.prewritten;
        let written = after.written - before.written;
        let grown = after.usage.length - before.usage.length;
        eprintln!(
            "b{place}: produced {produced}, appended {appended}, written to files {written}, \
             of it ahead {prewritten}; the directory grew by {grown}"
        );
        // Frames and batches cost a few bytes a record.
        ensure!(appended < produced * 11 / 10, "{appended} bytes of frames");
        // The directory holds the frames and at most one block ahead per partition.
        ensure!(
            grown < appended + 6 * (8 << 20) + (8 << 20),
            "the directory grew by {grown}"
        );
        // Votes, marks and checkpoints are next to nothing.
        let own = written.saturating_sub(prewritten);
        ensure!(
            own < appended * 11 / 10,
            "{own} bytes written for {appended} of frames"
        );
    }
    cluster.stop()
}
