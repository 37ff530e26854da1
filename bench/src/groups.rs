//! What consumer groups cost their coordinators: many groups at once, and commits as fast as they go.
//!
//! Members speak raw gRPC (`qute_tests::member`): what is measured are the brokers. Each has a group of its
//! own, and groups spread over the partitions of `__groups` by their names.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use qute_client::Client;
use qute_load::latency::{Latencies, as_millis, rounded};
use qute_proto::v1::TopicSubscription;
use qute_tests::cluster::Cluster;
use qute_tests::fleet::{self, Fleet};
use qute_tests::member::Coordinators;
use qute_tests::{procfs, wait};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::target;

const TOPIC: &str = "bench-groups";
const SESSION_TIMEOUT_MS: u32 = 10_000;
/// The restart of a coordinator must not expire them.
const LONG_SESSION_MS: u32 = 300_000;

/// Many groups.
#[derive(Args, Clone, Debug)]
pub struct GroupsArgs {
    /// Brokers
    #[arg(long, default_value_t = 3)]
    pub brokers: usize,
    /// Groups, of one member each
    #[arg(long, default_value_t = 10_000)]
    pub groups: usize,
    /// Partitions that each reads
    #[arg(long, default_value_t = 10)]
    pub partitions: u32,
    /// Commits of each group, of all its partitions
    #[arg(long, default_value_t = 20)]
    pub commits: u64,
    /// How long to watch the members' heartbeats
    #[arg(long, value_parser = humantime::parse_duration, default_value = "20s")]
    pub watch: Duration,
}

/// Commits as fast as they go.
#[derive(Args, Clone, Debug)]
pub struct CommitsArgs {
    /// Brokers
    #[arg(long, default_value_t = 3)]
    pub brokers: usize,
    /// Members that commit, one commit in flight each
    #[arg(long, default_value_t = 64)]
    pub concurrency: usize,
    /// Partitions in each commit
    #[arg(long, default_value_t = 6)]
    pub partitions: u32,
    /// How long
    #[arg(long, value_parser = humantime::parse_duration, default_value = "10s")]
    pub duration: Duration,
}

/// A cluster with the topic that all groups read.
fn prepare(brokers: usize, partitions: u32) -> Result<(Cluster, Runtime, TopicSubscription)> {
    let cluster = target::own(brokers)?;
    cluster.create_topic(TOPIC, partitions, if brokers >= 3 { 3 } else { 1 })?;
    let runtime = Runtime::new()?;
    let bootstrap = cluster.bootstrap();
    let topic = runtime.block_on(async {
        let client = Client::connect(&bootstrap).await?;
        anyhow::Ok(client.describe_topic(TOPIC).await?)
    })?;
    let topic = TopicSubscription {
        topic_id: topic.id.to_wire(),
        partitions,
    };
    Ok((cluster, runtime, topic))
}

fn any(cluster: &Cluster) -> Result<String> {
    Ok(cluster.nodes.first().context("no broker")?.address())
}

/// Resident memory, CPU time and bytes on disk of each broker.
fn cost(cluster: &mut Cluster) -> Result<Vec<(u64, Duration, u64)>> {
    let mut costs = Vec::new();
    for node in &mut cluster.nodes {
        let pid = node.process()?.pid();
        let disk = procfs::usage(node.dir())?.allocated;
        costs.push((procfs::resident_bytes(pid)?, procfs::cpu_time(pid)?, disk));
    }
    Ok(costs)
}

#[allow(clippy::cast_precision_loss, reason = "a figure for people")]
fn megabytes(bytes: u64) -> f64 {
    rounded(bytes as f64 / 1e6)
}

/// Joins many groups, commits, watches them live, and restarts all brokers after a kill.
///
/// # Errors
/// When the cluster misbehaves, or a committed offset is not there afterwards.
pub fn measure(args: &GroupsArgs) -> Result<Value> {
    let (mut cluster, runtime, topic) = prepare(args.brokers, args.partitions)?;
    let address = any(&cluster)?;
    let coordinators = runtime.block_on(Coordinators::connect(&address))?;
    // Made when it is first asked for.
    runtime.block_on(coordinators.address_of("first"))?;
    let empty = cost(&mut cluster)?;

    eprintln!("{} groups join", args.groups);
    let begun = Instant::now();
    let join = Fleet::join(&coordinators, &topic, args.groups, LONG_SESSION_MS);
    let fleet = runtime.block_on(join)?;
    let joined = begun.elapsed();
    let begun = Instant::now();
    for offset in 1..=args.commits {
        runtime.block_on(fleet.commit(&coordinators, offset))?;
    }
    let committed = begun.elapsed();
    let full = cost(&mut cluster)?;
    drop(fleet);

    eprintln!("restarting");
    for node in &mut cluster.nodes {
        node.kill()?;
    }
    let begun = Instant::now();
    cluster.start_all()?;
    let ready = begun.elapsed();
    let served = runtime.block_on(async {
        let coordinators = Coordinators::connect(&address).await?;
        fleet::verify(&coordinators, args.groups, args.partitions, args.commits).await?;
        anyhow::Ok(begun.elapsed())
    })?;
    let again = cost(&mut cluster)?;

    let live = live(&mut cluster, &runtime, &topic, args)?;
    let brokers: Vec<Value> = empty
        .iter()
        .zip(&full)
        .zip(&again)
        .map(|((empty, full), again)| {
            json!({
                "resident_mb_before": megabytes(empty.0),
                "resident_mb": megabytes(full.0),
                "resident_mb_after_restart": megabytes(again.0),
                "disk_mb_before": megabytes(empty.2),
                "disk_mb": megabytes(full.2),
            })
        })
        .collect();
    let commits = args.commits * args.groups as u64;
    #[allow(clippy::cast_precision_loss, reason = "a figure for people")]
    let report = json!({
        "bench": "groups",
        "brokers": args.brokers,
        "groups": args.groups,
        "partitions": args.partitions,
        "joined_ms": as_millis(joined),
        "commits": commits,
        "commits_per_second": rounded(commits as f64 / committed.as_secs_f64()),
        "per_broker": brokers,
        "restart_all_after_kill_ready_ms": as_millis(ready),
        "restart_all_after_kill_all_offsets_read_ms": as_millis(served),
        "live": live,
    });
    cluster.stop()?;
    Ok(report)
}

/// Heartbeats of all members at the default session timeout, and nothing else.
fn live(
    cluster: &mut Cluster,
    runtime: &Runtime,
    topic: &TopicSubscription,
    args: &GroupsArgs,
) -> Result<Value> {
    let address = any(cluster)?;
    let coordinators = runtime.block_on(Coordinators::connect(&address))?;
    let join = Fleet::join(&coordinators, topic, args.groups, SESSION_TIMEOUT_MS);
    let fleet = runtime.block_on(join)?;
    eprintln!("watching for {:?}", args.watch);
    let (begun, before) = (Instant::now(), cost(cluster)?);
    wait::rest_until(begun + args.watch);
    let (seconds, after) = (begun.elapsed().as_secs_f64(), cost(cluster)?);
    let cpu = before
        .iter()
        .zip(&after)
        .map(|(before, after)| rounded((after.1 - before.1).as_secs_f64() / seconds * 100.0));
    let cpu: Vec<f64> = cpu.collect();
    let lost = fleet.ended();
    ensure!(lost == 0, "{lost} sessions have ended");
    Ok(json!({ "session_timeout_ms": SESSION_TIMEOUT_MS, "cpu_percent_of_a_core": cpu }))
}

/// Members that commit all the time.
///
/// # Errors
/// When the cluster misbehaves or a commit is refused.
pub fn commits(args: &CommitsArgs) -> Result<Value> {
    let (cluster, runtime, topic) = prepare(args.brokers, args.partitions)?;
    let address = any(&cluster)?;
    let (latencies, elapsed) = runtime.block_on(async {
        let coordinators = Coordinators::connect(&address).await?;
        let members = args.concurrency;
        let fleet = Fleet::join(&coordinators, &topic, members, SESSION_TIMEOUT_MS).await?;
        let fleet = Arc::new(fleet);
        let begun = Instant::now();
        let end = begun + args.duration;
        let mut tasks = Vec::new();
        for number in 0..args.concurrency {
            let (fleet, coordinators) = (Arc::clone(&fleet), coordinators.clone());
            tasks.push(tokio::spawn(async move {
                let mut latencies = Latencies::new()?;
                let mut offset = 0;
                while Instant::now() < end {
                    offset += 1;
                    let begun = Instant::now();
                    fleet.commit_one(&coordinators, number, offset).await?;
                    latencies.record(begun.elapsed());
                }
                anyhow::Ok(latencies)
            }));
        }
        let mut all = Latencies::new()?;
        for task in tasks {
            all.add(&task.await??)?;
        }
        anyhow::Ok((all, begun.elapsed()))
    })?;
    #[allow(clippy::cast_precision_loss, reason = "a figure for people")]
    let per_second = latencies.count() as f64 / elapsed.as_secs_f64();
    let report = json!({
        "bench": "commits",
        "brokers": args.brokers,
        "concurrency": args.concurrency,
        "partitions": args.partitions,
        "commits_per_second": rounded(per_second),
        "offsets_per_second": rounded(per_second * f64::from(args.partitions)),
        "latency_ms": latencies.to_json(),
    });
    cluster.stop()?;
    Ok(report)
}
