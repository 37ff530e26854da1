//! The cluster under load: one that runs, or brokers of its own.

use anyhow::{Context, Result, ensure};
use clap::Args;
use qute_tests::binaries::Binaries;
use qute_tests::cluster::Cluster;

/// Which cluster to use.
#[derive(Args, Clone, Debug)]
pub struct TargetArgs {
    /// Brokers of a running cluster
    #[arg(short, long, env = "QUTE_BOOTSTRAP", default_value = "127.0.0.1:7700")]
    pub bootstrap: String,
    /// Start this many `qute-broker` processes for the measurement instead (temporary data)
    #[arg(long, value_name = "N", conflicts_with = "bootstrap")]
    pub brokers: Option<usize>,
}

/// A cluster to put load on.
#[derive(Debug)]
pub enum Target {
    /// Somebody else's.
    Running(String),
    /// Started for this measurement; stopped when dropped.
    Own(Box<Cluster>),
}

impl Target {
    /// Uses or starts what the arguments say.
    ///
    /// # Errors
    /// When brokers of its own don't start.
    pub fn open(args: &TargetArgs) -> Result<Self> {
        match args.brokers {
            None => Ok(Self::Running(args.bootstrap.clone())),
            Some(count) => Ok(Self::Own(Box::new(own(count)?))),
        }
    }

    /// The bootstrap list.
    #[must_use]
    pub fn bootstrap(&self) -> String {
        match self {
            Self::Running(bootstrap) => bootstrap.clone(),
            Self::Own(cluster) => cluster.bootstrap(),
        }
    }

    /// Stops brokers of its own.
    ///
    /// # Errors
    /// When one doesn't stop cleanly.
    pub fn close(self) -> Result<()> {
        match self {
            Self::Running(_) => Ok(()),
            Self::Own(cluster) => cluster.stop(),
        }
    }
}

/// Brokers that have formed a cluster; the programs are those beside this one.
///
/// # Errors
/// When the programs are not there, or the cluster doesn't form.
pub fn own(count: usize) -> Result<Cluster> {
    let beside = std::env::current_exe()?;
    let beside = beside.parent().context("this program has no directory")?;
    let bins = Binaries {
        broker: beside.join("qute-broker"),
        qute: beside.join("qute"),
    };
    for path in [&bins.broker, &bins.qute] {
        ensure!(
            path.exists(),
            "{} is missing: run `cargo build --release` for the whole workspace first",
            path.display()
        );
    }
    eprintln!("starting {count} brokers");
    Cluster::start(&bins, count)
}
