//! The handle beside the stream: pause, resume, seek; positions and lag.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use tokio::time::Instant;

use super::buffer::{Buffer, Refused};
use super::builder::{Position, locate};
use crate::admin::{OffsetSpec, list_offsets};
use crate::client::Shared;
use crate::error::{Error, ErrorKind, Result};
use crate::metadata::Topic;

/// Steers a consumer while its stream is being read, from any task. Cheap to clone. It keeps
/// nothing running: once the stream has ended or was dropped, its calls give
/// [`ErrorKind::Closed`].
#[derive(Clone)]
pub struct ConsumerControl {
    shared: Arc<Shared>,
    topic: Arc<Topic>,
    buffer: Arc<Buffer>,
}

/// What a consumer holds in memory, in bytes; see [`crate::ConsumerBuilder::prefetch_bytes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Buffered {
    /// Batches fetched ahead, as they came in.
    pub bytes: usize,
    /// The same batches as they would be decompressed: what counts against the prefetch.
    pub uncompressed_bytes: usize,
    /// The one batch whose records are being handed out, if it had to be decompressed.
    pub decompressed_bytes: usize,
}

impl ConsumerControl {
    pub(super) fn new(shared: Arc<Shared>, topic: Arc<Topic>, buffer: Arc<Buffer>) -> Self {
        Self {
            shared,
            topic,
            buffer,
        }
    }

    /// Hands out no record of these partitions until they are resumed. They keep their positions
    /// and a bounded part of the buffer, and hold up no other partition. A paused partition does
    /// not end, so neither does the stream. Partitions that are paused stay so.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownPartition`] for one that is not read (then none is paused),
    /// [`ErrorKind::Closed`].
    pub fn pause(&self, partitions: impl IntoIterator<Item = u32>) -> Result<()> {
        let partitions: Vec<u32> = partitions.into_iter().collect();
        self.told(self.buffer.pause(&partitions))
    }

    /// Goes on with paused partitions where they stand. Others are left as they are.
    ///
    /// # Errors
    /// As [`ConsumerControl::pause`].
    pub fn resume(&self, partitions: impl IntoIterator<Item = u32>) -> Result<()> {
        let partitions: Vec<u32> = partitions.into_iter().collect();
        self.told(self.buffer.resume(&partitions))
    }

    /// The partitions that are paused.
    #[must_use]
    pub fn paused(&self) -> Vec<u32> {
        self.buffer.paused()
    }

    /// Goes on elsewhere in a partition, and gives the offset. What was fetched is dropped: once
    /// this has returned, a poll that begins afterwards gives no record from before it. A partition
    /// that had ended or failed goes on, as long as the stream has not ended. Its bound stays.
    /// Except for [`Position::Offset`] the leader is asked, within the client's call timeout.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownPartition`] for one that is not read, [`ErrorKind::Closed`], and what
    /// kept the leader from answering; then the position is what it was.
    ///
    /// # Cancel safety
    /// Dropped before it has returned, it has either taken place or changed nothing.
    pub async fn seek(&self, partition: u32, to: Position) -> Result<u64> {
        self.told(self.buffer.check(partition))?;
        let deadline = Instant::now() + self.shared.config.call_timeout;
        let topic = self.present();
        let offset = locate(&self.shared, &topic, partition, to, deadline).await?;
        self.told(self.buffer.seek(partition, offset))?;
        Ok(offset)
    }

    /// The next offset to be given to the program, per partition.
    #[must_use]
    pub fn positions(&self) -> BTreeMap<u32, u64> {
        self.buffer.positions()
    }

    /// How many offsets lie between the position and the high watermark, per partition, as far as
    /// the latter is known: from the last batch that came in. Where batches have nowhere to go
    /// because the program takes none, the broker tells it about once a second. A partition that is
    /// paused learns nothing new: then ask [`ConsumerControl::latest_lag`].
    #[must_use]
    pub fn lag(&self) -> BTreeMap<u32, u64> {
        self.buffer.lag()
    }

    /// The same, after asking all leaders, within the client's call timeout.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] and whatever else kept a leader from answering.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn latest_lag(&self) -> Result<BTreeMap<u32, u64>> {
        let deadline = Instant::now() + self.shared.config.call_timeout;
        let topic = self.present();
        let end = |partition: u32| (partition, OffsetSpec::End);
        let queries: Vec<_> = self.positions().into_keys().map(end).collect();
        let listed = list_offsets(&self.shared, &topic, &queries, deadline).await?;
        let high_watermarks: Vec<_> = listed
            .iter()
            .map(|offset| (offset.partition, offset.high_watermark))
            .collect();
        self.buffer.see(&high_watermarks);
        Ok(self.buffer.lag())
    }

    /// What the consumer holds in memory.
    #[must_use]
    pub fn buffered(&self) -> Buffered {
        let held = self.buffer.pool.held();
        let bytes = |bytes: i64| usize::try_from(bytes).unwrap_or(0);
        Buffered {
            bytes: bytes(held.wire),
            uncompressed_bytes: bytes(held.charge),
            decompressed_bytes: self.buffer.decompressed_bytes(),
        }
    }

    /// The topic as it is known now: it may have more partitions than when reading began.
    fn present(&self) -> Arc<Topic> {
        let view = self.shared.metadata.load();
        let present = view.topic_by_id(&self.topic.name, self.topic.id);
        Arc::clone(present.unwrap_or(&self.topic))
    }

    fn told(&self, result: std::result::Result<(), Refused>) -> Result<()> {
        result.map_err(|refused| match refused {
            Refused::Closed => Error::closed("consumer"),
            Refused::Unknown(partition) => Error::new(
                ErrorKind::UnknownPartition,
                "this consumer does not read the partition",
            )
            .at(&self.topic.name, partition),
        })
    }
}

impl fmt::Debug for ConsumerControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConsumerControl")
            .field("topic", &self.topic.name)
            .field("positions", &self.positions())
            .finish_non_exhaustive()
    }
}
