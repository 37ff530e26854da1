//! `qute partition-of` as `clap` reads it.

use std::ffi::OsString;

use clap::Args;

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

#[cfg(test)]
mod tests {
    use crate::args::tests::assert_usage_errors;

    #[test]
    fn wrong_values_are_usage_errors() {
        assert_usage_errors(&[&["partition-of", "k"], &["partition-of", "k", "-n", "0"]]);
    }
}
