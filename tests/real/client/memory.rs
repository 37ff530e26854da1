//! A slow reader of what compresses well (promise 5): memory is bounded by what batches are once
//! decompressed, not by what they were on the way.

use std::io::Read;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use futures::future::try_join_all;
use qute_client::{Compression, Position, ProducerConfig, Record};
use qute_tests::process::clear_settings;
use qute_tests::{procfs, wait};

use super::rig::{Rig, until};
use crate::bins;

const TOPIC: &str = "t";
const PARTITIONS: u32 = 64;
const VALUE_BYTES: usize = 256 << 10;
/// Of these, so many do not compress.
const NOISE_BYTES: usize = 4 << 10;
/// Four batches of 1 MiB in each partition: 256 MiB that travel as some four.
const VALUES_EACH: usize = 16;
const BATCH_BYTES: usize = 1 << 20;

/// Killed when dropped.
struct Reader(Child);

impl Drop for Reader {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn slow_reader_of_64_compressed_partitions_stays_within_its_bytes() -> Result<()> {
    const PREFETCH_BYTES: usize = 4 << 20;
    /// What a broker may send before the reader knows how it compresses, and one message.
    const BLIND_BYTES: usize = 2 * (256 << 10);
    const TOTAL_BYTES: usize = PARTITIONS as usize * VALUES_EACH * VALUE_BYTES;
    let rig = Rig::start(1)?;
    rig.create_topic(TOPIC, PARTITIONS)?;
    let client = rig.client()?;
    rig.run(async {
        let config = ProducerConfig::default()
            .compression(Compression::Zstd)
            .batch_bytes(BATCH_BYTES)
            .linger(std::time::Duration::from_millis(50));
        let producer = client.producer(config)?;
        let mut tickets = Vec::new();
        for partition in 0..PARTITIONS {
            for _ in 0..VALUES_EACH {
                let mut value = vec![b'x'; VALUE_BYTES];
                value[..NOISE_BYTES].fill_with(rand::random);
                let record = Record::to(TOPIC).partition(partition).value(value);
                tickets.push(producer.enqueue(record).await?);
            }
        }
        try_join_all(tickets).await?;
        Ok(())
    })?;

    // By the client's own count, while nobody reads.
    rig.run(async {
        let consumer = client.consumer(TOPIC).start(Position::Start);
        let consumer = consumer.prefetch_bytes(PREFETCH_BYTES).until_end();
        let mut reader = consumer.open().await?;
        let control = reader.control();
        until("the buffer to fill", || {
            control.buffered().uncompressed_bytes > PREFETCH_BYTES / 2
        })
        .await?;
        let (mut most, mut values) = (0, 0);
        while let Some(record) = reader.next().await {
            let held = control.buffered();
            most = most.max(held.bytes + held.decompressed_bytes);
            values += 1;
            let value = record?.value.context("no value")?;
            ensure!(value.len() == VALUE_BYTES);
        }
        ensure!(
            values == PARTITIONS as usize * VALUES_EACH,
            "{values} values"
        );
        let bound = PREFETCH_BYTES + BLIND_BYTES + BATCH_BYTES;
        ensure!(most <= bound, "{most} bytes of {bound}");
        Ok(())
    })?;

    // By the kernel's: a program whose output nobody takes.
    let mut command = Command::new(bins().qute);
    command
        .args(["-b", &rig.bootstrap(), "consume", TOPIC, "-e", "-f", "%v"])
        .stdout(Stdio::piped());
    clear_settings(&mut command);
    let mut reader = Reader(command.spawn()?);
    let pid = reader.0.id();
    // It has filled the pipe, and then uses no more time: all it wants to hold, it holds.
    let mut last = None;
    wait::until_true("the reader to stand still", wait::LONG, || {
        let used = procfs::cpu_time(pid)?;
        let still = last.replace(used) == Some(used);
        Ok(still && !used.is_zero() && procfs::resident_bytes(pid)? > (8 << 20))
    })?;
    let resident = procfs::resident_bytes(pid)?;
    ensure!(
        resident < TOTAL_BYTES as u64 / 2,
        "{resident} bytes in memory"
    );
    let mut output = reader.0.stdout.take().context("no output")?;
    let (mut chunk, mut read, mut most) = (vec![0; 1 << 20], 0, resident);
    loop {
        let count = output.read(&mut chunk)?;
        if count == 0 {
            break;
        }
        read += count;
        // Gone at its end.
        most = most.max(procfs::resident_bytes(pid).unwrap_or(0));
    }
    ensure!(reader.0.wait()?.success());
    ensure!(read == TOTAL_BYTES, "{read} bytes of {TOTAL_BYTES}");
    ensure!(most < TOTAL_BYTES as u64 / 2, "{most} bytes in memory");
    rig.stop()
}
