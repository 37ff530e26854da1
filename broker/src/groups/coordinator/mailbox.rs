//! What one session's stream is to be told: at most one letter of each kind, the latest. A reader that
//! is slow gets fewer letters, and costs no more memory.

use parking_lot::Mutex;
use qute_proto::v1;
use tokio::sync::Notify;

/// See the module.
#[derive(Debug, Default)]
pub struct Letters {
    /// A round has confirmed the session: it lives.
    pub joined: bool,
    /// Something that concerns the member may have changed.
    pub concerned: bool,
    /// The highest heartbeat that a round has confirmed (S26).
    pub heartbeat: Option<u64>,
    /// The session is over.
    pub ended: Option<v1::Error>,
}

/// Where a coordinator leaves letters, and a stream fetches them.
#[derive(Debug, Default)]
pub struct Mailbox {
    // Short: a flag is set, or all is taken.
    letters: Mutex<Letters>,
    arrived: Notify,
}

impl Mailbox {
    /// Leaves a letter.
    pub fn put(&self, write: impl FnOnce(&mut Letters)) {
        write(&mut self.letters.lock());
        self.arrived.notify_one();
    }

    /// Ends the session, unless that has been said already.
    pub fn end(&self, error: &v1::Error) {
        self.put(|letters| {
            letters.ended.get_or_insert_with(|| error.clone());
        });
    }

    /// Fetches what is there.
    #[must_use]
    pub fn take(&self) -> Letters {
        std::mem::take(&mut self.letters.lock())
    }

    /// Waits for a letter. One reader at a time.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn arrived(&self) {
        self.arrived.notified().await;
    }
}
