//! What can go wrong in the kit itself.

use std::io;

/// Why the kit could not do what a test asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No port or no directory.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A broker did not start.
    #[error("broker {broker} did not start: {source}")]
    Start {
        /// Its place in the cluster.
        broker: usize,
        /// Why.
        source: qute_broker::broker::StartError,
    },
    /// The test named a broker that does not exist, or asked a killed one.
    #[error("broker {broker} {problem}")]
    NoBroker {
        /// Its place in the cluster.
        broker: usize,
        /// What about it.
        problem: &'static str,
    },
    /// Something did not come about in time.
    #[error("waited {waited_ms} ms in vain for {what}")]
    Timeout {
        /// What was waited for.
        what: String,
        /// How long.
        waited_ms: u128,
    },
    /// The client failed.
    #[error(transparent)]
    Client(#[from] qute_client::Error),
}

impl Error {
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}
