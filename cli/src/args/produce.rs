//! `qute produce` as `clap` reads it.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use clap::builder::TypedValueParser as _;
use clap::{Args, ValueEnum};

use crate::text::{escape, key_value};

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Command;
    use crate::args::tests::{assert_usage_errors, parse};

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
    fn wrong_values_are_usage_errors() {
        assert_usage_errors(&[
            &["produce", "t", "-K", ""],
            &["produce", "t", "-K", r"\n"],
            &["produce", "t", "-K", r"\x"],
            &["produce", "t", "-K", ",", "-k", "x"],
            &["produce", "t", "-K", ",", "--file", "x"],
            &["produce", "t", "-H", "novalue"],
            &["produce", "t", "--compression", "gzip"],
        ]);
    }
}
