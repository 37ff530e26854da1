//! `qute produce` as `clap` reads it.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use clap::builder::TypedValueParser as _;
use clap::{Args, ValueEnum};

use crate::exit::Failure;
use crate::text::rate::{self, Rate};
use crate::text::{escape, key_value};

/// `qute produce`
#[derive(Debug, Args)]
#[command(
    after_help = "With --output jsonl each acknowledgement is a line of JSON on standard output, with \
                        --output json all are one array; otherwise nothing is printed there.\n\
                        A tombstone is a record with a key and no value: what deletes a key where topics are \
                        compacted. With -k it is the only record, and standard input is not read; with -K a line \
                        that ends at its delimiter or has none is the tombstone of its key, and the others are \
                        written as ever.\n\
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

    /// Write no value: of the one key of -k, or of each key of -K whose line has none
    #[arg(long, conflicts_with = "file")]
    pub tombstone: bool,

    /// Write this many records a second at most, at even distances
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        conflicts_with = "file",
        value_parser = rate::parse
    )]
    pub rate: Option<Rate>,

    /// How batches are compressed
    #[arg(long, value_enum, default_value_t = Compression::None)]
    pub compression: Compression,
}

/// What the records are made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// Each line of standard input is a value.
    Lines,
    /// Each line is key, delimiter, value.
    KeyedLines {
        /// What separates them.
        delimiter: Delimiter,
        /// A line without a value is its key's tombstone.
        tombstones: bool,
    },
    /// This file is one value; `-`: standard input.
    File(PathBuf),
    /// Nothing: one record without a value.
    Tombstone,
}

impl Produce {
    /// What the records are made of.
    ///
    /// # Errors
    /// A tombstone without a key, or a rate for a single record.
    pub fn source(&self) -> Result<Source, Failure> {
        let source = match (&self.file, &self.key_delimiter, self.tombstone) {
            (Some(path), _, _) => Source::File(path.clone()),
            (None, Some(delimiter), tombstones) => Source::KeyedLines {
                delimiter: delimiter.clone(),
                tombstones,
            },
            (None, None, false) => Source::Lines,
            (None, None, true) if self.key.is_some() => Source::Tombstone,
            (None, None, true) => {
                return Err(Failure::usage("--tombstone without a key")
                    .hint("name the key with -k, or read keys from lines with -K"));
            }
        };
        if self.rate.is_some() && source == Source::Tombstone {
            return Err(Failure::usage(
                "--rate is for many records, and --tombstone with -k writes one",
            ));
        }
        Ok(source)
    }
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

impl From<Compression> for qute_client::Compression {
    fn from(compression: Compression) -> Self {
        match compression {
            Compression::None => Self::None,
            Compression::Lz4 => Self::Lz4,
            Compression::Zstd => Self::Zstd,
        }
    }
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
            &["produce", "t", "--file", "x", "--rate", "5"],
            &["produce", "t", "--file", "x", "--tombstone"],
            &["produce", "t", "--rate", "0"],
            &["produce", "t", "--rate", "-1"],
            &["produce", "t", "--rate", "fast"],
            &["produce", "t", "-H", "novalue"],
            &["produce", "t", "--compression", "gzip"],
        ]);
    }

    fn source(args: &[&str]) -> Result<Source, Failure> {
        match parse(args).unwrap().command {
            Command::Produce(produce) => produce.source(),
            _ => panic!("another command"),
        }
    }

    #[test]
    fn tombstone_needs_a_key_and_with_k_is_one_record() {
        assert_eq!(source(&["produce", "t"]), Ok(Source::Lines));
        assert_eq!(
            source(&["produce", "t", "-k", "", "--tombstone"]),
            Ok(Source::Tombstone)
        );
        let keyed = |tombstones| {
            Ok(Source::KeyedLines {
                delimiter: Delimiter(b",".to_vec()),
                tombstones,
            })
        };
        assert_eq!(source(&["produce", "t", "-K", ","]), keyed(false));
        assert_eq!(
            source(&["produce", "t", "-K", ",", "--tombstone"]),
            keyed(true)
        );
        for args in [
            &["produce", "t", "--tombstone"][..],
            &["produce", "t", "--tombstone", "-k", "x", "--rate", "5"],
        ] {
            assert_eq!(source(args).unwrap_err().exit, crate::exit::Exit::Usage);
        }
    }
}
