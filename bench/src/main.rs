//! `qute-bench`: load and measurements, one JSON object on standard output.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::{Parser, Subcommand};
use qute_bench::frozen::FrozenArgs;
use qute_bench::groups::{CommitsArgs, GroupsArgs};
use qute_bench::load::LoadArgs;
use qute_bench::rebalance::RebalanceArgs;
use qute_bench::target::{Target, TargetArgs};
use qute_bench::{client, disk, failover, frozen, groups, idle, load, rebalance, restart};
use serde_json::Value;

#[global_allocator]
static ALLOCATOR: client::CountingAllocator = client::CountingAllocator;

/// Load generator and measurements for Qute
#[derive(Parser)]
#[command(name = "qute-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write records; latency until the acknowledgement
    Produce(Load),
    /// Read a topic from start to end; an empty one is filled first
    Consume(Load),
    /// Write and read at once; latency until a record is read
    EndToEnd(Load),
    /// Kill leaders of a cluster of three and measure how long writing stops
    Failover {
        /// How many kills
        #[arg(long, default_value_t = 10)]
        kills: usize,
    },
    /// Freeze one broker of three and measure what that costs the others
    Frozen(FrozenArgs),
    /// Restart a broker that holds many records
    Restart {
        /// Brokers
        #[arg(long, default_value_t = 1)]
        brokers: usize,
        /// Records
        #[arg(long, default_value_t = 500_000)]
        records: usize,
        /// Bytes of each value
        #[arg(long, default_value_t = 1024)]
        record_bytes: usize,
    },
    /// CPU, memory and restart time of brokers with many idle replicas
    Idle {
        /// Brokers
        #[arg(long, default_value_t = 3)]
        brokers: usize,
        /// Partitions
        #[arg(long, default_value_t = 100)]
        partitions: u32,
        /// Replicas of each
        #[arg(long, default_value_t = 3)]
        replicas: u32,
        /// How long to watch
        #[arg(long, value_parser = humantime::parse_duration, default_value = "30s")]
        watch: Duration,
    },
    /// Many groups: memory and disk of their coordinators, restart after a kill, heartbeats
    Groups(GroupsArgs),
    /// Commits of members a second, one in flight each
    Commits(CommitsArgs),
    /// Join a group at once, then kill members: how long until every partition has an owner
    Rebalance(RebalanceArgs),
    /// What the client costs on one core, without a network: records a second and allocations a
    /// record of the producer's path, nanoseconds of choosing a partition by key
    Client {
        /// Records of each case
        #[arg(long, default_value_t = 2_000_000)]
        records: u32,
        /// Partitions
        #[arg(long, default_value_t = 6)]
        partitions: u32,
        /// Bytes of each value
        #[arg(long, default_value_t = 100)]
        record_bytes: usize,
    },
    /// What the disk allows, without Qute
    Disk {
        /// Directory to write in
        #[arg(long, default_value = ".")]
        dir: PathBuf,
        /// How long each case runs
        #[arg(long, value_parser = humantime::parse_duration, default_value = "3s")]
        each: Duration,
    },
}

#[derive(clap::Args)]
struct Load {
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    load: LoadArgs,
}

fn main() -> Result<()> {
    let report = match Cli::parse().command {
        Command::Produce(args) => with_target(&args, |bootstrap, load| async move {
            load::produce(&bootstrap, &load).await
        }),
        Command::Consume(args) => with_target(&args, |bootstrap, load| async move {
            load::consume(&bootstrap, &load).await
        }),
        Command::EndToEnd(args) => with_target(&args, |bootstrap, load| async move {
            load::end_to_end(&bootstrap, &load).await
        }),
        Command::Failover { kills } => failover::measure(kills),
        Command::Frozen(args) => frozen::measure(&args),
        Command::Restart {
            brokers,
            records,
            record_bytes,
        } => restart::measure(brokers, records, record_bytes),
        Command::Idle {
            brokers,
            partitions,
            replicas,
            watch,
        } => idle::measure(brokers, partitions, replicas, watch),
        Command::Groups(args) => groups::measure(&args),
        Command::Commits(args) => groups::commits(&args),
        Command::Rebalance(args) => rebalance::measure(&args),
        Command::Client {
            records,
            partitions,
            record_bytes,
        } => client::measure(records, partitions, record_bytes),
        Command::Disk { dir, each } => disk::probe(&dir, each),
    }?;
    println!("{report:#}");
    Ok(())
}

/// Opens the target, runs the load against it, and closes it.
fn with_target<F>(args: &Load, run: impl FnOnce(String, LoadArgs) -> F) -> Result<Value>
where
    F: Future<Output = Result<Value>>,
{
    let target = Target::open(&args.target)?;
    let runtime = tokio::runtime::Runtime::new()?;
    let mut report = runtime.block_on(run(target.bootstrap(), args.load.clone()))?;
    if let Some(brokers) = args.target.brokers {
        report["brokers"] = brokers.into();
    }
    target.close()?;
    Ok(report)
}
