//! `qute partition-of KEY -n N`: offline, and the number alone on standard output.

use std::os::unix::ffi::OsStrExt as _;

use qute_proto::partition::partition_of;
use serde::Serialize;

use crate::args::{Global, Output, PartitionOf};
use crate::exit::{Exit, Failure};
use crate::output::{self, Report, print_text};
use crate::text::record_json::Binary;

#[derive(Serialize)]
struct Place<'a> {
    key: Binary<'a>,
    partitions: u32,
    partition: u32,
}

impl Report for Place<'_> {
    fn headings(&self) -> Vec<&'static str> {
        vec![]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        vec![vec![self.partition.to_string()]]
    }
}

/// Runs the command.
///
/// # Errors
/// Standard output can't be written.
pub fn run(args: &PartitionOf, global: &Global) -> Result<Exit, Failure> {
    let key = args.key.as_bytes();
    let place = Place {
        key: Binary(key),
        partitions: args.partitions,
        partition: partition_of(key, args.partitions),
    };
    match global.output {
        Output::Json | Output::Jsonl => output::print(&place, global.output),
        Output::Table | Output::Raw => print_text(&format!("{}\n", place.partition)),
    }
}
