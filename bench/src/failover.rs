//! The gap after a leader is killed.
//!
//! One writer per partition with one record in flight at a time writes without pause. The broker
//! leading most partitions is killed, again and again; the gap of a partition is the time from the
//! kill to the acknowledgement of its first write begun after it, and a kill's gap is the longest of
//! the partitions that the broker led.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use qute_client::{Client, ProducerConfig, Record};
use qute_load::latency::summary;
use qute_tests::cluster::Cluster;
use qute_tests::wait;
use serde_json::{Value, json};

use crate::target;

const TOPIC: &str = "bench-failover";
const PARTITIONS: u32 = 6;

/// What is known of one partition's writes.
#[derive(Default)]
struct Writes {
    /// When the last acknowledged one began.
    last_begun: Option<Instant>,
    /// When a leader was killed.
    killed: Option<Instant>,
    /// When the first write that began after it was acknowledged.
    resumed: Option<Instant>,
}

type Partitions = Arc<Vec<Mutex<Writes>>>;

/// Kills `kills` leaders of a cluster of three and measures each gap.
///
/// # Errors
/// When the cluster misbehaves or a write is lost.
pub fn measure(kills: usize) -> Result<Value> {
    let mut cluster = target::own(3)?;
    cluster.create_topic(TOPIC, PARTITIONS, 3)?;
    let partitions: Partitions = Arc::new((0..PARTITIONS).map(|_| Mutex::default()).collect());
    let stop = Arc::new(AtomicBool::new(false));
    let runtime = tokio::runtime::Runtime::new()?;
    let writers = runtime.spawn(write(
        cluster.bootstrap(),
        Arc::clone(&partitions),
        Arc::clone(&stop),
    ));

    let mut gaps = Vec::new();
    for kill in 1..=kills {
        ensure!(!writers.is_finished(), "the writers have ended");
        let gap = kill_one(&mut cluster, &partitions)?;
        eprintln!("kill {kill} of {kills}: {gap:?}");
        gaps.push(gap);
    }
    stop.store(true, Ordering::Relaxed);
    let records = runtime.block_on(writers)??;
    cluster.stop()?;
    Ok(json!({
        "bench": "failover",
        "partitions": PARTITIONS,
        "records": records,
        "kills": kills,
        "gap": summary(&gaps),
    }))
}

/// Reads or changes what is known of one partition.
fn with<T>(partitions: &Partitions, partition: u64, f: impl FnOnce(&mut Writes) -> T) -> Option<T> {
    let writes = partitions.get(usize::try_from(partition).ok()?)?;
    writes.lock().ok().map(|mut writes| f(&mut writes))
}

fn kill_one(cluster: &mut Cluster, partitions: &Partitions) -> Result<Duration> {
    // Everything writes before the next kill.
    let now = Instant::now();
    wait::until_true("all partitions to be written", wait::LONG, || {
        let begun = |p| with(partitions, u64::from(p), |writes| writes.last_begun).flatten();
        Ok((0..PARTITIONS).all(|p| begun(p).is_some_and(|begun| begun > now)))
    })?;
    let leader = cluster.busiest_leader(TOPIC)?;
    let led: BTreeSet<u64> = cluster
        .leaders(TOPIC)?
        .into_iter()
        .filter_map(|(partition, broker)| (broker.as_deref() == Some(&leader)).then_some(partition))
        .collect();
    let place = cluster.place_of(&leader)?;
    let killed = Instant::now();
    cluster.node(place)?.kill()?;
    let dead = Instant::now();
    for partition in &led {
        with(partitions, *partition, |writes| {
            writes.killed = Some(dead);
            writes.resumed = None;
        });
    }
    let mut longest = Duration::ZERO;
    for partition in led {
        let resumed = wait::until("writes to go on", wait::LONG, || {
            Ok(with(partitions, partition, |writes| writes.resumed).flatten())
        })?;
        longest = longest.max(resumed - killed);
    }
    cluster.start_one(place)?;
    cluster.node(place)?.wait_ready()?;
    Ok(longest)
}

async fn write(bootstrap: String, partitions: Partitions, stop: Arc<AtomicBool>) -> Result<u64> {
    let client = Client::connect(&bootstrap).await?;
    let producer = client.producer(ProducerConfig::default())?;
    let mut writers = tokio::task::JoinSet::new();
    for partition in 0..PARTITIONS {
        let (producer, partitions, stop) =
            (producer.clone(), Arc::clone(&partitions), Arc::clone(&stop));
        writers.spawn(async move {
            let mut records = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                let begun = Instant::now();
                let record = Record::to(TOPIC)
                    .partition(partition)
                    .value(vec![b'x'; 1024]);
                producer.send(record).await?;
                records += 1;
                with(&partitions, u64::from(partition), |writes| {
                    writes.last_begun = Some(begun);
                    if writes.resumed.is_none()
                        && writes.killed.is_some_and(|killed| begun > killed)
                    {
                        writes.resumed = Some(Instant::now());
                    }
                });
            }
            anyhow::Ok(records)
        });
    }
    let mut records = 0;
    while let Some(written) = writers.join_next().await {
        records += written??;
    }
    Ok(records)
}
