//! Settings of a producer; each states its default, and the whole checks itself.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use qute_proto::batch::{BATCH_BYTES_MAX, Codec};

use crate::admin::TopicSpec;
use crate::config::capped;
use crate::error::{Error, Result};
use crate::interceptor::{Hooks, Interceptor};

use super::partitioner::Partitioner;

/// Settings of a [`crate::Producer`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ProducerConfig {
    /// How long a record may wait for others to share its batch. Default 0: a batch leaves as
    /// soon as there is room in flight, so batches form by themselves under load. At most half of
    /// the delivery timeout; ends early when the buffer is full.
    pub linger: Duration,
    /// A batch is at most this long, before compression. Default 256 KiB, at most 4 MiB.
    pub batch_bytes: usize,
    /// Bytes of records (keys, values, headers and 64 bytes each) held until they have their fate;
    /// beyond that, enqueueing waits. A partition may take as much as half of what is free.
    /// Default 64 MiB.
    pub buffer_bytes: usize,
    /// How batches are compressed. Default not at all.
    pub compression: Codec,
    /// A record that is not acknowledged within this time fails: counted from the call that hands it
    /// over, with waiting for metadata, for room and for connections. Default 120 s.
    pub delivery_timeout: Duration,
    /// Batches in flight per partition, 1 to 5 (S12: brokers know a producer's last five).
    /// Default 5.
    pub in_flight_max: usize,
    /// With what a topic is created that does not exist when it is first written to. Default `None`:
    /// it is not, and the record is refused.
    pub create_topics: Option<TopicTemplate>,
    pub(super) partitioner: Choice,
    pub(crate) hooks: Hooks,
}

/// What a topic is created with by a producer that finds it missing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopicTemplate {
    /// How many partitions; `None`: the cluster's default.
    pub partitions: Option<u32>,
    /// How many replicas, an odd number; `None`: automatic.
    pub replicas: Option<u32>,
    /// Settings by name.
    pub config: BTreeMap<String, String>,
}

impl TopicTemplate {
    /// Sets the number of partitions.
    #[must_use]
    pub fn partitions(mut self, partitions: u32) -> Self {
        self.partitions = Some(partitions);
        self
    }

    /// Sets the number of replicas.
    #[must_use]
    pub fn replicas(mut self, replicas: u32) -> Self {
        self.replicas = Some(replicas);
        self
    }

    /// Sets one of the topic's settings.
    #[must_use]
    pub fn config(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.config.insert(name.into(), value.into());
        self
    }

    pub(super) fn spec(&self, name: &str) -> TopicSpec {
        TopicSpec {
            partitions: self.partitions,
            replicas: self.replicas,
            config: self.config.clone(),
            ..TopicSpec::new(name)
        }
    }
}

/// The program's partitioner, if it has one.
#[derive(Clone, Default)]
pub(super) struct Choice(pub(super) Option<Arc<dyn Partitioner>>);

impl fmt::Debug for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() {
            "the program's"
        } else {
            "default"
        })
    }
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
            create_topics: None,
            partitioner: Choice::default(),
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

    /// Has topics created that do not exist when they are first written to (see
    /// [`crate::Producer::enqueue`]).
    #[must_use]
    pub fn create_topics(mut self, template: impl Into<Option<TopicTemplate>>) -> Self {
        self.create_topics = template.into();
        self
    }

    /// Sets who chooses partitions, in place of or before the default.
    #[must_use]
    pub fn partitioner(mut self, partitioner: impl Partitioner) -> Self {
        self.partitioner = Choice(Some(Arc::new(partitioner)));
        self
    }

    /// Installs a hook for this producer's records, within those of the client; see
    /// [`Interceptor`] for the order.
    #[must_use]
    pub fn interceptor(mut self, hook: impl Interceptor) -> Self {
        self.hooks.install(hook);
        self
    }

    /// The settings as they are used: time limits that make deadlines, and a linger that leaves time
    /// for delivery.
    pub(crate) fn capped(mut self) -> Self {
        self.delivery_timeout = capped(self.delivery_timeout);
        self.linger = self.linger.min(self.delivery_timeout / 2);
        self
    }

    pub(crate) fn check(&self) -> Result<()> {
        if !(1..=5).contains(&self.in_flight_max) {
            return Err(Error::config("in_flight_max is between 1 and 5"));
        }
        if !(1024..=BATCH_BYTES_MAX).contains(&self.batch_bytes) {
            return Err(Error::config("batch_bytes is between 1 KiB and 4 MiB"));
        }
        if self.buffer_bytes < 2 * BATCH_BYTES_MAX || u32::try_from(self.buffer_bytes).is_err() {
            return Err(Error::config("buffer_bytes is between 8 MiB and 4 GiB"));
        }
        if self.delivery_timeout.is_zero() {
            return Err(Error::config("delivery_timeout is more than zero"));
        }
        Ok(())
    }
}
