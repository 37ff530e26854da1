//! SIGINT and SIGTERM: the first asks a command to end well, the second ends the process.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use crate::exit::{Exit, Failure};

/// Tells when the first signal has come. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Interrupt {
    seen: watch::Receiver<bool>,
}

impl Interrupt {
    /// Takes over both signals. Needs a running runtime.
    ///
    /// # Errors
    /// The signals can't be watched.
    pub fn listen() -> Result<Self, Failure> {
        let watch_failed =
            |error: io::Error| Failure::error(format!("can't watch for signals: {error}"));
        let interrupt = signal(SignalKind::interrupt()).map_err(watch_failed)?;
        let terminate = signal(SignalKind::terminate()).map_err(watch_failed)?;
        let (tell, seen) = watch::channel(false);
        tokio::spawn(watch_signals(interrupt, terminate, tell));
        Ok(Self { seen })
    }

    /// Resolves once a signal has come, at once if it came before.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn wait(&self) {
        let mut seen = self.seen.clone();
        if seen.wait_for(|seen| *seen).await.is_err() {
            // The watching task is gone, so is the runtime.
            std::future::pending().await
        }
    }
}

async fn watch_signals(mut interrupt: Signal, mut terminate: Signal, tell: watch::Sender<bool>) {
    loop {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        if tell.send_replace(true) {
            // The user has asked twice and wants no more waiting.
            std::process::exit(Exit::Error as i32);
        }
    }
}
