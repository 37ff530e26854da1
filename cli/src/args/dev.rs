//! `qute dev` as `clap` reads it.

use std::path::PathBuf;

use clap::Args;

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

#[cfg(test)]
mod tests {
    use crate::args::tests::assert_usage_errors;

    #[test]
    fn wrong_values_are_usage_errors() {
        assert_usage_errors(&[&["dev", "--brokers", "0"]]);
    }
}
