//! Space is promised before it is used (S4).
//!
//! A promise is granted when the file system has that much beyond the disk floor and all other
//! promises. The floor is what entries that nobody asks for (blanks, memberships, commands), meta
//! records, checkpoints and indexes live on when data is refused. What a leader has admitted may
//! take half of it on a follower: else the last batches before the floor would have no quorum, and
//! no later leader could commit anything behind them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::error::{At as _, Error, Full};
use super::store::FreeSpace;
use crate::env::{Fs, Space};

/// The file system is asked again after so long, or after so many bytes.
const ASK_EVERY: Duration = Duration::from_millis(250);
const ASK_AFTER_BYTES: u64 = 16 << 20;

/// Free space and what is promised of it.
pub(super) struct SpaceAccount {
    fs: Arc<dyn Fs>,
    dir: PathBuf,
    floor_max_bytes: u64,
    inner: Mutex<Inner>,
}

struct Inner {
    space: Space,
    asked: Instant,
    /// Written into new blocks since the file system was asked.
    used_bytes: u64,
    promised_bytes: u64,
}

/// Space promised to its holder; given back when dropped.
#[must_use]
pub struct Reservation {
    account: Arc<SpaceAccount>,
    bytes: u64,
}

impl Reservation {
    /// How much is promised.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl std::fmt::Debug for Reservation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Reservation({})", self.bytes)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut inner = self.account.inner.lock();
        inner.promised_bytes = inner.promised_bytes.saturating_sub(self.bytes);
    }
}

impl SpaceAccount {
    pub(super) fn open(
        fs: Arc<dyn Fs>,
        dir: PathBuf,
        floor_max_bytes: u64,
    ) -> Result<Arc<Self>, Error> {
        let space = fs.space(&dir).at("measure the space of", &dir)?;
        Ok(Arc::new(Self {
            fs,
            dir,
            floor_max_bytes,
            inner: Mutex::new(Inner {
                space,
                asked: Instant::now(),
                used_bytes: 0,
                promised_bytes: 0,
            }),
        }))
    }

    /// The smaller of the configured floor (1 GiB) and 2% of the file system.
    fn floor(&self, space: &Space) -> u64 {
        self.floor_max_bytes.min(space.total_bytes / 50)
    }

    fn ask(&self, inner: &mut Inner) {
        // A file system that does not answer keeps its last figure; writes then tell.
        if let Ok(space) = self.fs.space(&self.dir) {
            inner.space = space;
            inner.used_bytes = 0;
        }
        inner.asked = Instant::now();
    }

    fn left(&self, inner: &mut Inner) -> u64 {
        // Near the floor every byte counts, also those that only the file system knows of.
        let room = inner
            .space
            .available_bytes
            .saturating_sub(self.floor(&inner.space));
        if inner.asked.elapsed() > ASK_EVERY
            || inner.used_bytes > ASK_AFTER_BYTES
            || inner.used_bytes > room / 8
        {
            self.ask(inner);
        }
        inner
            .space
            .available_bytes
            .saturating_sub(inner.used_bytes)
            .saturating_sub(inner.promised_bytes)
    }

    /// S4: promises `bytes` to a batch that nobody has admitted yet, or refuses.
    pub(super) fn reserve(self: &Arc<Self>, bytes: u64) -> Result<Reservation, Full> {
        self.reserve_above(bytes, |floor| floor)
    }

    /// S4: promises `bytes` to batches that their leader has admitted, or refuses.
    pub(super) fn reserve_admitted(self: &Arc<Self>, bytes: u64) -> Result<Reservation, Full> {
        self.reserve_above(bytes, |floor| floor / 2)
    }

    fn reserve_above(
        self: &Arc<Self>,
        bytes: u64,
        kept_back: impl Fn(u64) -> u64,
    ) -> Result<Reservation, Full> {
        let mut inner = self.inner.lock();
        let mut left = self.left(&mut inner);
        let floor = kept_back(self.floor(&inner.space));
        if left < floor.saturating_add(bytes) {
            // Something may have been deleted since the last look.
            self.ask(&mut inner);
            left = self.left(&mut inner);
        }
        if left < floor.saturating_add(bytes) {
            metrics::counter!("qute_storage_full_refusals_total").increment(1);
            return Err(Full {
                wanted_bytes: bytes,
                available_bytes: left,
                floor_bytes: floor,
            });
        }
        inner.promised_bytes += bytes;
        Ok(Reservation {
            account: Arc::clone(self),
            bytes,
        })
    }

    /// Whether `bytes` may be used for comfort (blocks written ahead): only well above the floor.
    pub(super) fn is_ample(&self, bytes: u64) -> bool {
        let mut inner = self.inner.lock();
        let left = self.left(&mut inner);
        left > self
            .floor(&inner.space)
            .saturating_mul(2)
            .saturating_add(bytes)
    }

    /// An append was accepted: its bytes are promised until written.
    pub(super) fn queued(&self, bytes: u64) {
        self.inner.lock().promised_bytes += bytes;
    }

    /// Queued bytes were written, `fresh` of them into new blocks, or given up (0).
    pub(super) fn written(&self, queued: u64, fresh: u64) {
        let mut inner = self.inner.lock();
        inner.promised_bytes = inner.promised_bytes.saturating_sub(queued);
        inner.used_bytes += fresh;
    }

    #[cfg(test)]
    pub(super) fn promised(&self) -> u64 {
        self.inner.lock().promised_bytes
    }

    /// What the file system has left, promises subtracted.
    pub(super) fn free(&self) -> FreeSpace {
        let mut inner = self.inner.lock();
        FreeSpace {
            available_bytes: self.left(&mut inner),
            floor_bytes: self.floor(&inner.space),
            total_bytes: inner.space.total_bytes,
        }
    }
}
