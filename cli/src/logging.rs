//! What the libraries underneath say, on standard error: warnings of brokers, errors of the
//! client; more with `-v`, and whatever `QUTE_LOG` asks for.

use std::io::{self, IsTerminal as _};

use tracing_subscriber::EnvFilter;

/// Starts logging. `quiet` is the level without `-v`.
pub fn start(verbose: u8, quiet: &str) {
    let default = match verbose {
        0 => quiet,
        1 => "info,openraft=warn,foca=warn,h2=warn,hyper=warn",
        2 => "debug,openraft=info,foca=info,h2=info,hyper=info",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_env("QUTE_LOG").unwrap_or_else(|_| EnvFilter::new(default));
    // Fails only if somebody has set one before: a test.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::stderr().is_terminal())
        .with_writer(io::stderr)
        .try_init();
}
