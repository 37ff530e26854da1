//! Settings of a producer; each states its default, and the whole checks itself.

use std::time::Duration;

use qute_proto::batch::{BATCH_BYTES_MAX, Codec};

use crate::config::capped;
use crate::error::{Error, Result};
use crate::interceptor::{Hooks, Interceptor};

/// Settings of a [`crate::Producer`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ProducerConfig {
    /// How long a record may wait for others to share its batch. Default 0: a batch leaves as
    /// soon as there is room in flight, so batches form by themselves under load.
    pub linger: Duration,
    /// A batch is at most this long, before compression. Default 256 KiB, at most 4 MiB.
    pub batch_bytes: usize,
    /// Bytes of records held until they are acknowledged; beyond that, enqueueing waits.
    /// Default 64 MiB.
    pub buffer_bytes: usize,
    /// How batches are compressed. Default not at all.
    pub compression: Codec,
    /// A record that is not acknowledged within this time fails. Default 120 s.
    pub delivery_timeout: Duration,
    /// Batches in flight per partition, 1 to 5 (S12: brokers know a producer's last five).
    /// Default 5.
    pub in_flight_max: usize,
    pub(crate) hooks: Hooks,
}

impl Default for ProducerConfig {
    fn default() -> Self {
        Self {
            linger: Duration::ZERO,
            batch_bytes: 256 * 1024,
            buffer_bytes: 64 * 1024 * 1024,
            compression: Codec::None,
            delivery_timeout: Duration::from_secs(120),
            in_flight_max: 5,
            hooks: Hooks::default(),
        }
    }
}

impl ProducerConfig {
    /// Sets how long a record may wait for company.
    #[must_use]
    pub fn linger(mut self, linger: Duration) -> Self {
        self.linger = linger;
        self
    }

    /// Sets the size of batches.
    #[must_use]
    pub fn batch_bytes(mut self, bytes: usize) -> Self {
        self.batch_bytes = bytes;
        self
    }

    /// Sets the bytes that may wait for acknowledgement.
    #[must_use]
    pub fn buffer_bytes(mut self, bytes: usize) -> Self {
        self.buffer_bytes = bytes;
        self
    }

    /// Sets the compression.
    #[must_use]
    pub fn compression(mut self, codec: Codec) -> Self {
        self.compression = codec;
        self
    }

    /// Sets the limit of each record's delivery.
    #[must_use]
    pub fn delivery_timeout(mut self, timeout: Duration) -> Self {
        self.delivery_timeout = timeout;
        self
    }

    /// Sets how many batches of a partition may be in flight.
    #[must_use]
    pub fn in_flight_max(mut self, batches: usize) -> Self {
        self.in_flight_max = batches;
        self
    }

    /// Installs a hook for this producer's records, within those of the client; see
    /// [`Interceptor`] for the order.
    #[must_use]
    pub fn interceptor(mut self, hook: impl Interceptor) -> Self {
        self.hooks.install(hook);
        self
    }

    /// The settings as they are used: time limits that make deadlines.
    pub(crate) fn capped(mut self) -> Self {
        self.linger = capped(self.linger);
        self.delivery_timeout = capped(self.delivery_timeout);
        self
    }

    pub(crate) fn check(&self) -> Result<()> {
        if !(1..=5).contains(&self.in_flight_max) {
            return Err(Error::config("in_flight_max is between 1 and 5"));
        }
        if !(1024..=BATCH_BYTES_MAX).contains(&self.batch_bytes) {
            return Err(Error::config("batch_bytes is between 1 KiB and 4 MiB"));
        }
        // Semaphore permits are counted in 32 bits.
        if self.buffer_bytes < 2 * BATCH_BYTES_MAX || u32::try_from(self.buffer_bytes).is_err() {
            return Err(Error::config("buffer_bytes is between 8 MiB and 4 GiB"));
        }
        if self.delivery_timeout.is_zero() {
            return Err(Error::config("delivery_timeout is more than zero"));
        }
        Ok(())
    }
}
