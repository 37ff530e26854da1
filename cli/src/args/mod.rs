//! The command line as `clap` reads it. Every value is checked here, before anything connects:
//! what can be wrong about it is a usage error (exit 2). One module per command; here is what
//! all of them share.

mod bench;
mod cluster;
mod consume;
mod context;
mod dev;
mod group;
mod man;
mod partition_of;
mod produce;
mod top;
mod topic;

use std::ffi::OsString;
use std::time::Duration;

use clap::{
    ArgAction, Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand, ValueEnum,
};
use clap_complete::Shell;
use qute_client::Bootstrap;

use crate::target::Given;
use crate::text::duration;

pub use bench::{Bench, BenchLoad};
pub use cluster::Cluster;
pub use consume::Consume;
pub use context::Context;
pub use dev::Dev;
pub use group::{Group, Reset};
pub use man::Man;
pub use partition_of::PartitionOf;
pub use produce::{Compression, Delimiter, Produce, Source};
pub use top::Top;
pub use topic::Topic;

/// The address of a broker that runs with its defaults.
pub const DEFAULT_BOOTSTRAP: &str = "127.0.0.1:7700";

/// Where scripts go.
const COMPLETION_HELP: &str = "Install:\n  \
    bash:        qute completion bash > ~/.local/share/bash-completion/completions/qute\n  \
    zsh:         qute completion zsh > DIR/_qute, where DIR is one of $fpath\n  \
    fish:        qute completion fish > ~/.config/fish/completions/qute.fish\n  \
    elvish:      qute completion elvish >> ~/.config/elvish/rc.elv\n  \
    powershell:  qute completion powershell >> $PROFILE";

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
    /// Brokers to ask first; any one of them is enough [default: those of the context in use, else 127.0.0.1:7700]
    #[arg(
        short,
        long,
        global = true,
        env = "QUTE_BOOTSTRAP",
        hide_env_values = true,
        help_heading = EVERYWHERE,
        value_name = "HOST:PORT,.."
    )]
    pub bootstrap: Option<Bootstrap>,

    /// The saved cluster to talk to (see `qute context`)
    #[arg(
        long,
        global = true,
        env = "QUTE_CONTEXT",
        hide_env_values = true,
        help_heading = EVERYWHERE,
        value_name = "NAME"
    )]
    pub context: Option<String>,

    /// Limit of each admin call (default 10s) and of each record's delivery (default 120s)
    #[arg(long, global = true, help_heading = EVERYWHERE, value_name = "DURATION", value_parser = duration::parse_limit)]
    pub timeout: Option<Duration>,

    /// How results are printed
    #[arg(long, global = true, help_heading = EVERYWHERE, value_enum, default_value_t = Output::Table)]
    pub output: Output,

    /// Say more on standard error; twice for more still
    #[arg(short, long, global = true, help_heading = EVERYWHERE, action = ArgAction::Count)]
    pub verbose: u8,

    /// Which of `-b` and `--context` are flags, not variables.
    #[arg(skip)]
    pub given: Given,
}

impl Cli {
    /// Reads the command line, the program's name first.
    ///
    /// # Errors
    /// It is wrong, or asks for help or the version.
    pub fn read<T>(args: impl IntoIterator<Item = T>) -> Result<Self, clap::Error>
    where
        T: Into<OsString> + Clone,
    {
        let matches = Self::command().try_get_matches_from(args)?;
        let mut cli = Self::from_arg_matches(&matches)?;
        cli.global.given = Given::of(&matches);
        Ok(cli)
    }
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
    /// Create, list, describe, change, grow and delete topics
    #[command(subcommand)]
    Topic(Topic),
    /// Write lines of standard input, or one file, to a topic
    Produce(Produce),
    /// Read a topic to standard output
    Consume(Consume),
    /// Ask about the cluster
    #[command(subcommand)]
    Cluster(Cluster),
    /// List, describe, reset and delete consumer groups
    #[command(subcommand)]
    Group(Group),
    /// Watch brokers, topics and groups at the terminal
    Top(Top),
    /// Put load on the cluster and measure it
    #[command(subcommand)]
    Bench(Bench),
    /// Save clusters under names, and choose which one commands talk to
    #[command(subcommand)]
    Context(Context),
    /// Print the partition that a key belongs to, offline
    PartitionOf(PartitionOf),
    /// Look for what is wrong with the cluster, and say what to do; exit 0 only if nothing fails
    Doctor,
    /// Print a completion script for a shell
    #[command(after_help = COMPLETION_HELP)]
    Completion {
        /// The shell
        shell: Shell,
    },
    /// Print the manual page of a command, or write all of them
    Man(Man),
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::error::ErrorKind;

    use super::*;

    /// What `clap` makes of `qute ARGS`.
    pub(crate) fn parse(args: &[&str]) -> Result<Cli, clap::Error> {
        Cli::read(std::iter::once("qute").chain(args.iter().copied()))
    }

    /// The flags of every command, from these ones.
    pub(crate) fn global(flags: &[&str]) -> Global {
        parse(&[flags, &["topic", "list"]].concat()).unwrap().global
    }

    /// Each of these command lines ends with exit code 2.
    pub(crate) fn assert_usage_errors(lines: &[&[&str]]) {
        for args in lines {
            let error = parse(args).expect_err(&format!("{args:?}"));
            assert_eq!(error.exit_code(), 2, "{args:?}: {error}");
        }
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
            assert_eq!(global.bootstrap.unwrap().addresses(), ["h:1", "i:2"]);
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

    #[test]
    fn wrong_values_are_usage_errors() {
        assert_usage_errors(&[
            &["topic", "list", "--timeout", "10"],
            &["topic", "list", "--timeout", "0s"],
            &["topic", "list", "--output", "yaml"],
            &["topic", "list", "-b", "localhost:x"],
            &["topic", "list", "-b", ""],
            &["frobnicate"],
        ]);
    }
}
