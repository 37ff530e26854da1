//! `qute consume` as `clap` reads it.

use clap::Args;

use crate::text::format::Format;
use crate::text::position::{self, Position};

/// `qute consume`
#[derive(Debug, Args)]
#[command(
    after_help = "@TIME is RFC 3339 (@2026-01-31T12:00:00Z), Unix milliseconds, or relative (@-1h); \
                        it is looked up by the time at which brokers stored the records.\n\
                        With --output jsonl each record is a line of JSON, with --output json all are one array; what is \
                        no UTF-8 is {\"base64\": \"...\"}."
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

    /// Read as a member of this consumer group: from where it has committed, else from -o
    #[arg(short, long, value_name = "GROUP", conflicts_with = "partitions")]
    pub group: Option<String>,

    /// A static member of this name: a successor under the same name gets the same partitions
    #[arg(long, value_name = "NAME", requires = "group")]
    pub instance: Option<String>,

    /// TOPIC is a regular expression, and all topics that it matches somewhere are read
    #[arg(long, requires = "group")]
    pub regex: bool,

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Command;
    use crate::args::tests::{assert_usage_errors, parse};

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
        assert_usage_errors(&[
            &["consume", "t", "-f", "%x"],
            &["consume", "t", "-o", "middle"],
            &["consume", "t", "-o", "@-5"],
            &["consume", "t", "-n", "-1"],
            &["consume"],
            &["consume", "t", "-g"],
            &["consume", "t", "-g", "group", "-p", "0"],
            &["consume", "t", "--instance", "a"],
            &["consume", "t", "--regex"],
        ]);
    }
}
