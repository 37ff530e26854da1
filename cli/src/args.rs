//! The command line as `clap` reads it. Every value is checked here, before anything connects:
//! what can be wrong about it is a usage error (exit 2).

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::TypedValueParser as _;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use qute_client::Bootstrap;

use crate::text::format::Format;
use crate::text::position::{self, Position};
use crate::text::{duration, escape, key_value};

/// The address of a broker that runs with its defaults.
pub const DEFAULT_BOOTSTRAP: &str = "127.0.0.1:7700";

/// Heading of the global flags in the help of each command.
const EVERYWHERE: &str = "Options of every command";

/// The Qute message queue at a terminal
#[derive(Debug, Parser)]
#[command(
    name = "qute",
    version,
    arg_required_else_help = true,
    after_help = "Data goes to standard output, everything else to standard error.\n\
                  Exit codes: 0 done, 1 error, 2 usage, 3 timeout, 4 partly delivered."
)]
pub struct Cli {
    /// Flags of every command.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Flags that may stand before or after the command.
#[derive(Clone, Debug, Args)]
pub struct Global {
    /// Brokers to ask first; any one of them is enough
    #[arg(
        short,
        long,
        global = true,
        env = "QUTE_BOOTSTRAP",
        hide_env_values = true,
        help_heading = EVERYWHERE,
        default_value = DEFAULT_BOOTSTRAP,
        value_name = "HOST:PORT,.."
    )]
    pub bootstrap: Bootstrap,

    /// Limit of each admin call (default 10s) and of each record's delivery (default 120s)
    #[arg(long, global = true, help_heading = EVERYWHERE, value_name = "DURATION", value_parser = duration::parse_limit)]
    pub timeout: Option<Duration>,

    /// How results are printed
    #[arg(long, global = true, help_heading = EVERYWHERE, value_enum, default_value_t = Output::Table)]
    pub output: Output,

    /// Say more on standard error; twice for more still
    #[arg(short, long, global = true, help_heading = EVERYWHERE, action = ArgAction::Count)]
    pub verbose: u8,
}

impl Global {
    /// The limit of one admin call.
    #[must_use]
    pub fn admin_timeout(&self) -> Duration {
        self.timeout.unwrap_or(Duration::from_secs(10))
    }

    /// The limit of one record's delivery.
    #[must_use]
    pub fn delivery_timeout(&self) -> Duration {
        self.timeout.unwrap_or(Duration::from_secs(120))
    }
}

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Table,
    /// One JSON document.
    Json,
    /// One JSON object a line.
    Jsonl,
    /// Values and tabs, no headings.
    Raw,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a local cluster in this process
    Dev(Dev),
    /// Create, list, describe, grow and delete topics
    #[command(subcommand)]
    Topic(Topic),
    /// Write lines of standard input, or one file, to a topic
    Produce(Produce),
    /// Read a topic to standard output
    Consume(Consume),
    /// Ask about the cluster
    #[command(subcommand)]
    Cluster(Cluster),
    /// Print the partition that a key belongs to, offline
    PartitionOf(PartitionOf),
    /// Print a completion script for a shell
    Completion {
        /// The shell
        shell: Shell,
    },
}

/// `qute dev`
#[derive(Debug, Args)]
pub struct Dev {
    /// How many brokers; broker i listens on PORT+i, HTTP on PORT+80+i
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub brokers: u16,

    /// Where the brokers keep their data; without it, a temporary directory removed at the end
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,

    /// Port of the first broker
    #[arg(long, value_name = "PORT", default_value_t = 7700, value_parser = clap::value_parser!(u16).range(1..=65_300))]
    pub port: u16,
}

/// `qute topic ...`
#[derive(Debug, Subcommand)]
pub enum Topic {
    /// Create a topic; returns when every partition has a leader
    Create {
        /// Name of the topic: 1 to 249 of A-Z a-z 0-9 . _ -
        name: String,
        /// Partitions (default 6)
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        partitions: Option<u32>,
        /// Replicas of each partition, an odd number (default: three once there are three brokers, else one)
        #[arg(long, value_name = "N", value_parser = odd)]
        replicas: Option<u32>,
        /// A setting, such as retention_ms=86400000; may be repeated
        #[arg(long, value_name = "K=V", value_parser = key_value::parse)]
        config: Vec<(String, String)>,
    },
    /// List the topics
    List,
    /// Show the partitions of a topic: leaders, offsets, replicas
    Describe {
        /// Name of the topic
        name: String,
    },
    /// Raise the number of a topic's partitions; keys move, and the number is never lowered
    AddPartitions {
        /// Name of the topic
        name: String,
        /// How many partitions the topic has afterwards
        #[arg(value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        partitions: u32,
    },
    /// Delete a topic with all its records
    Delete {
        /// Name of the topic
        name: String,
    },
}

/// `qute produce`
#[derive(Debug, Args)]
#[command(
    after_help = "With --output jsonl each acknowledgement is a line of JSON on standard output; \
                        otherwise nothing is printed there.\n\
                        Reading stops at the first line that is refused; its number is named. Exit codes: \
                        1 refused, 3 no line acknowledged in time, 4 some were."
)]
pub struct Produce {
    /// The topic to write to
    pub topic: String,

    /// One key for all records
    #[arg(short, long, value_name = "KEY", allow_hyphen_values = true)]
    pub key: Option<OsString>,

    /// Each line is key, delimiter, value; a line without it has no key (escapes: \n \t \r \0 \\)
    #[arg(
        short = 'K',
        long,
        value_name = "DELIM",
        allow_hyphen_values = true,
        conflicts_with_all = ["key", "file"],
        value_parser = clap::builder::OsStringValueParser::new().try_map(delimiter)
    )]
    pub key_delimiter: Option<Delimiter>,

    /// A header of every record; may be repeated
    #[arg(short = 'H', long = "header", value_name = "K=V", value_parser = key_value::parse)]
    pub headers: Vec<(String, String)>,

    /// Write to this partition, whatever the keys
    #[arg(short, long, value_name = "N")]
    pub partition: Option<u32>,

    /// Send this whole file as one value, instead of lines of standard input
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// How batches are compressed
    #[arg(long, value_enum, default_value_t = Compression::None)]
    pub compression: Compression,
}

/// How batches are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Compression {
    /// Not at all.
    None,
    /// Fast.
    Lz4,
    /// Small.
    Zstd,
}

/// What separates key and value: one byte at least.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delimiter(pub Vec<u8>);

fn delimiter(text: OsString) -> Result<Delimiter, String> {
    let bytes = escape::unescape(text.as_bytes())?;
    if bytes.is_empty() {
        return Err("an empty delimiter separates nothing".to_owned());
    }
    if bytes.contains(&b'\n') {
        return Err("a line holds no newline, so none can separate its key".to_owned());
    }
    Ok(Delimiter(bytes))
}

/// `qute consume`
#[derive(Debug, Args)]
#[command(
    after_help = "@TIME is RFC 3339 (@2026-01-31T12:00:00Z), Unix milliseconds, or relative (@-1h); \
                        it is looked up by the time at which brokers stored the records.\n\
                        With --output jsonl each record is a line of JSON."
)]
pub struct Consume {
    /// The topic to read
    pub topic: String,

    /// Where to start in each partition: start, end, an offset N, -N for the last N, or @TIME
    #[arg(
        short,
        long,
        value_name = "POSITION",
        default_value = "start",
        allow_hyphen_values = true,
        value_parser = position::parse
    )]
    pub offset: Position,

    /// End after this many records
    #[arg(short = 'n', long, value_name = "COUNT")]
    pub count: Option<u64>,

    /// End at the end offsets seen at the start
    #[arg(short = 'e', long)]
    pub end: bool,

    /// Read only this partition; may be repeated
    #[arg(short, long = "partition", value_name = "N", value_delimiter = ',')]
    pub partitions: Vec<u32>,

    /// How a record is printed: %t %p %o %k %v %T %h %% and \n \t \r \0 \\ [default: %v\n]
    #[arg(
        short,
        long,
        value_name = "FORMAT",
        allow_hyphen_values = true,
        value_parser = Format::parse
    )]
    pub format: Option<Format>,
}

/// `qute cluster ...`
#[derive(Debug, Subcommand)]
pub enum Cluster {
    /// Whether the cluster is formed and led; exit 0 only if so
    Info,
    /// List the brokers
    Brokers,
}

/// `qute partition-of`
#[derive(Debug, Args)]
pub struct PartitionOf {
    /// The key
    #[arg(allow_hyphen_values = true)]
    pub key: OsString,
    /// How many partitions the topic has
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub partitions: u32,
}

fn odd(text: &str) -> Result<u32, String> {
    let number: u32 = text
        .parse()
        .map_err(|_| "write an odd number: 1, 3, 5".to_owned())?;
    if number.is_multiple_of(2) {
        return Err("an even number of replicas survives no more losses than one fewer; write an odd number: 1, 3, 5".to_owned());
    }
    Ok(number)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use clap::error::ErrorKind;

    use super::*;

    fn parse(args: &[&str]) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("qute").chain(args.iter().copied()))
    }

    #[test]
    fn command_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn global_flags_count_before_and_after_the_command() {
        for args in [
            &[
                "-b",
                "h:1,i:2",
                "--timeout",
                "5s",
                "--output",
                "json",
                "-v",
                "topic",
                "list",
            ][..],
            &[
                "topic",
                "-b",
                "h:1,i:2",
                "--timeout",
                "5s",
                "list",
                "--output",
                "json",
                "-v",
            ],
            &[
                "topic",
                "list",
                "-b",
                "h:1,i:2",
                "--timeout",
                "5s",
                "--output",
                "json",
                "-v",
            ],
        ] {
            let global = parse(args).unwrap().global;
            assert_eq!(global.bootstrap.addresses(), ["h:1", "i:2"]);
            assert_eq!(global.timeout, Some(Duration::from_secs(5)));
            assert_eq!(global.output, Output::Json);
            assert_eq!(global.verbose, 1);
        }
    }

    #[test]
    fn timeout_given_sets_both_limits() {
        let global = parse(&["topic", "list"]).unwrap().global;
        assert_eq!(global.admin_timeout(), Duration::from_secs(10));
        assert_eq!(global.delivery_timeout(), Duration::from_secs(120));
        let global = parse(&["topic", "list", "--timeout", "7s"]).unwrap().global;
        assert_eq!(global.admin_timeout(), Duration::from_secs(7));
        assert_eq!(global.delivery_timeout(), Duration::from_secs(7));
    }

    #[test]
    fn produce_flags_are_those_of_the_design() {
        let cli = parse(&[
            "produce",
            "t",
            "-K",
            r"\t",
            "-H",
            "a=1",
            "-H",
            "b=x=y",
            "-p",
            "3",
            "--compression",
            "zstd",
        ])
        .unwrap();
        let Command::Produce(produce) = cli.command else {
            panic!("another command");
        };
        assert_eq!(produce.key_delimiter, Some(Delimiter(b"\t".to_vec())));
        assert_eq!(produce.headers[1], ("b".to_owned(), "x=y".to_owned()));
        assert_eq!(produce.partition, Some(3));
        assert_eq!(produce.compression, Compression::Zstd);
    }

    #[test]
    fn produce_keeps_an_empty_key_apart_from_none() {
        let key = |args: &[&str]| match parse(args).unwrap().command {
            Command::Produce(produce) => produce.key,
            _ => panic!("another command"),
        };
        assert_eq!(key(&["produce", "t"]), None);
        assert_eq!(key(&["produce", "t", "-k", ""]), Some(OsString::new()));
    }

    #[test]
    fn consume_flags_are_those_of_the_design() {
        let cli = parse(&[
            "consume", "t", "-o", "-5", "-n", "7", "-e", "-p", "2", "-f", "%k\\n",
        ])
        .unwrap();
        let Command::Consume(consume) = cli.command else {
            panic!("another command");
        };
        assert_eq!(consume.offset, Position::Last(5));
        assert_eq!(consume.count, Some(7));
        assert!(consume.end);
        assert_eq!(consume.partitions, [2]);
        assert_eq!(consume.format, Format::parse("%k\\n").ok());
    }

    #[test]
    fn consume_starts_at_start_by_default() {
        let Command::Consume(consume) = parse(&["consume", "t"]).unwrap().command else {
            panic!("another command");
        };
        assert_eq!(consume.offset, Position::Start);
        assert_eq!(consume.format, None);
    }

    #[test]
    fn wrong_values_are_usage_errors() {
        for args in [
            &["consume", "t", "-f", "%x"][..],
            &["consume", "t", "-o", "middle"],
            &["consume", "t", "-o", "@-5"],
            &["consume", "t", "-n", "-1"],
            &["consume"],
            &["consume", "t", "-g", "group"],
            &["produce", "t", "-K", ""],
            &["produce", "t", "-K", r"\n"],
            &["produce", "t", "-K", r"\x"],
            &["produce", "t", "-K", ",", "-k", "x"],
            &["produce", "t", "-K", ",", "--file", "x"],
            &["produce", "t", "-H", "novalue"],
            &["produce", "t", "--compression", "gzip"],
            &["topic", "create", "t", "--partitions", "0"],
            &["topic", "create", "t", "--replicas", "2"],
            &["topic", "create", "t", "--config", "x"],
            &["topic", "list", "--timeout", "10"],
            &["topic", "list", "--timeout", "0s"],
            &["topic", "list", "--output", "yaml"],
            &["topic", "list", "-b", "localhost:x"],
            &["topic", "list", "-b", ""],
            &["dev", "--brokers", "0"],
            &["partition-of", "k"],
            &["partition-of", "k", "-n", "0"],
            &["group", "list"],
            &["frobnicate"],
        ] {
            let error = parse(args).expect_err(&format!("{args:?}"));
            assert_eq!(error.exit_code(), 2, "{args:?}: {error}");
        }
    }

    #[test]
    fn help_and_version_are_no_errors() {
        for (args, kind) in [
            (&["--help"][..], ErrorKind::DisplayHelp),
            (&["produce", "--help"], ErrorKind::DisplayHelp),
            (&["--version"], ErrorKind::DisplayVersion),
        ] {
            let error = parse(args).unwrap_err();
            assert_eq!(error.kind(), kind);
            assert_eq!(error.exit_code(), 0);
        }
    }
}
