//! `qute partition-of KEY -n N`: offline, and the number alone on standard output.

use std::os::unix::ffi::OsStrExt as _;

use qute_proto::partition::partition_of;

use crate::args::PartitionOf;
use crate::exit::{Exit, Failure};
use crate::output::print_text;

/// Runs the command.
///
/// # Errors
/// Standard output can't be written.
pub fn run(args: &PartitionOf) -> Result<Exit, Failure> {
    let partition = partition_of(args.key.as_bytes(), args.partitions);
    print_text(&format!("{partition}\n"))
}
