//! `qute cluster ...` as `clap` reads it.

use clap::Subcommand;

/// `qute cluster ...`
#[derive(Debug, Subcommand)]
pub enum Cluster {
    /// Whether the cluster is formed and led; exit 0 only if so
    Info,
    /// List the brokers
    Brokers,
}
