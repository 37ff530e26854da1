//! `qute bench ...` as `clap` reads it.

use std::time::Duration;

use clap::{Args, Subcommand};

use crate::args::Compression;
use crate::text::duration;
use crate::text::rate::{self, Rate};

/// `qute bench ...`
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Write records; latency until the acknowledgement
    Produce(BenchLoad),
    /// Read a topic from its start to its end, as fast as it comes
    Consume {
        /// The topic to read
        topic: String,
        /// Read this many records at most
        #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
        records: Option<u64>,
    },
    /// Write records and read them at the same time; latency until a record is read
    EndToEnd(BenchLoad),
}

/// What to write and how.
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "The records stay in the topic; one that does not exist is created.\n\
                        With --rate latency counts from the moment at which a record was due, so that a stall \
                        is charged to every record that it held up; without, from the call.\n\
                        A signal ends it early, with the figures until then."
)]
pub struct BenchLoad {
    /// The topic to write to
    pub topic: String,

    /// Write this many records [default: 100000, or without end if there is a duration]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub records: Option<u64>,

    /// Write for this long
    #[arg(long, value_name = "DURATION", value_parser = duration::parse_limit)]
    pub duration: Option<Duration>,

    /// Bytes of each value, 16 at least
    #[arg(long, value_name = "BYTES", default_value_t = 1024, value_parser = size)]
    pub size: usize,

    /// Write this many records a second [default: as many as possible]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = rate::parse)]
    pub rate: Option<Rate>,

    /// Records written before anything counts
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub warmup: u64,

    /// Records in flight at most
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub concurrency: u32,

    /// Different keys; 0: records have none
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub keys: u64,

    /// How long a record may wait for others to share its batch
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration::parse)]
    pub linger: Duration,

    /// How batches are compressed
    #[arg(long, value_enum, default_value_t = Compression::None)]
    pub compression: Compression,

    /// Partitions of a topic that is created (default 6)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub partitions: Option<u32>,

    /// Replicas of a topic that is created, an odd number (default: three once there are three brokers, else one)
    #[arg(long, value_name = "N", value_parser = super::topic::odd)]
    pub replicas: Option<u32>,
}

fn size(text: &str) -> Result<usize, String> {
    let size: usize = text
        .parse()
        .map_err(|_| "write a number of bytes".to_owned())?;
    if size < qute_load::schedule::STAMP_BYTES {
        return Err("a value has 16 bytes at least: they say when it was due".to_owned());
    }
    if size > qute_proto::batch::RECORD_BYTES_MAX {
        return Err(format!(
            "no record may have more than {} bytes",
            qute_proto::batch::RECORD_BYTES_MAX
        ));
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Command;
    use crate::args::tests::{assert_usage_errors, parse};

    #[test]
    fn bench_produce_takes_what_makes_a_load() {
        let cli = parse(&[
            "bench",
            "produce",
            "t",
            "-n",
            "7",
            "--size",
            "16",
            "--rate",
            "2.5",
            "--keys",
            "3",
            "--replicas",
            "1",
        ])
        .unwrap();
        let Command::Bench(Bench::Produce(load)) = cli.command else {
            panic!("another command");
        };
        assert_eq!(load.records, Some(7));
        assert_eq!(load.size, 16);
        assert_eq!(load.rate.map(Rate::per_second), Some(2.5));
    }

    #[test]
    fn wrong_values_are_usage_errors() {
        assert_usage_errors(&[
            &["bench"],
            &["bench", "produce"],
            &["bench", "consume"],
            &["bench", "frobnicate", "t"],
            &["bench", "produce", "t", "--size", "15"],
            &["bench", "produce", "t", "--size", "99999999"],
            &["bench", "produce", "t", "--rate", "0"],
            &["bench", "produce", "t", "-n", "0"],
            &["bench", "produce", "t", "--concurrency", "0"],
            &["bench", "end-to-end", "t", "--replicas", "2"],
            &["bench", "end-to-end", "t", "--duration", "5"],
            &["bench", "consume", "t", "--size", "100"],
        ]);
    }
}
