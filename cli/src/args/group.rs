//! `qute group ...` as `clap` reads it.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::text::reset_target::{self, ResetTarget};

/// `qute group ...`
#[derive(Debug, Subcommand)]
pub enum Group {
    /// List the groups
    List,
    /// Show a group: its members, what they hold, how far each partition is
    Describe {
        /// Name of the group
        group: String,
    },
    /// Show how far a group is behind the ends of its partitions; topics that are gone as # and their id
    Lag {
        /// Name of the group
        group: String,
    },
    /// Set a group's committed offsets; without --execute, show what would become of them
    Reset(Reset),
    /// Forget a group that has no members, with its committed offsets
    Delete {
        /// Name of the group
        group: String,
    },
}

/// `qute group reset`
#[derive(Args, Debug)]
#[command(
    after_help = "Without --topic it is for all that the group has to do with. Offsets outside of what a \
                        partition holds become the nearest that it holds.\n\
                        @TIME is RFC 3339 (@2026-01-31T12:00:00Z), Unix milliseconds, or relative (@-1h).\n\
                        The file has a line per partition, of topic, partition and offset: what `qute group lag \
                        GROUP --output raw` prints."
)]
pub struct Reset {
    /// Name of the group
    pub group: String,

    /// Where to: start, end, an offset N, +N or -N from what is committed, @TIME, or forget
    #[arg(
        long,
        value_name = "WHERE",
        allow_hyphen_values = true,
        required_unless_present = "from_file",
        value_parser = reset_target::parse
    )]
    pub to: Option<ResetTarget>,

    /// Only this topic; may be repeated
    #[arg(long = "topic", value_name = "TOPIC", conflicts_with = "from_file")]
    pub topics: Vec<String>,

    /// Only this partition of the topic; may be repeated
    #[arg(
        short,
        long = "partition",
        value_name = "N",
        value_delimiter = ',',
        requires = "topics"
    )]
    pub partitions: Vec<u32>,

    /// To the offsets in this file, and only where it names one
    #[arg(long, value_name = "FILE", conflicts_with = "to")]
    pub from_file: Option<PathBuf>,

    /// Do it
    #[arg(long)]
    pub execute: bool,

    /// Do it even where members hold the partitions: they begin anew at the offset set
    #[arg(long, requires = "execute")]
    pub force: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Command;
    use crate::args::tests::{assert_usage_errors, parse};

    #[test]
    fn reset_flags_are_those_of_the_design() {
        let cli = parse(&[
            "group",
            "reset",
            "g",
            "--to",
            "-5",
            "--topic",
            "t",
            "-p",
            "1,2",
            "--execute",
            "--force",
        ])
        .unwrap();
        let Command::Group(Group::Reset(reset)) = cli.command else {
            panic!("another command");
        };
        assert_eq!(reset.to, Some(ResetTarget::Shift(-5)));
        assert_eq!(reset.partitions, [1, 2]);
        assert!(reset.execute && reset.force);
    }

    #[test]
    fn reset_is_a_dry_run_by_default() {
        let cli = parse(&["group", "reset", "g", "--to", "start"]).unwrap();
        let Command::Group(Group::Reset(reset)) = cli.command else {
            panic!("another command");
        };
        assert!(!reset.execute && !reset.force);
    }

    #[test]
    fn wrong_values_are_usage_errors() {
        assert_usage_errors(&[
            &["group"],
            &["group", "describe"],
            &["group", "reset", "g"],
            &["group", "reset", "g", "--to", "middle"],
            &["group", "reset", "g", "--to", "start", "--from-file", "f"],
            &["group", "reset", "g", "--from-file", "f", "--topic", "t"],
            &["group", "reset", "g", "--to", "start", "-p", "1"],
            &["group", "reset", "g", "--to", "start", "--force"],
            &["group", "delete"],
        ]);
    }
}
