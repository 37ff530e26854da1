//! Commits of programs that are no members: each keeps its own place, in a group that has no members.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::future::try_join_all;
use qute_proto::v1;
use tokio::time::Instant;

use super::{GroupAdmin, check_name};
use crate::admin::{OffsetSpec, list_offsets, unknown_partition};
use crate::error::{Error, ErrorKind, OffsetBounds, Result};
use crate::group::coordinator::{Wanted, ask_coordinator};
use crate::metadata::Topic;

/// A metadata text is at most this long.
const METADATA_BYTES_MAX: usize = 4096;

/// An offset to be committed without membership.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OffsetCommit {
    /// Name of the topic.
    pub topic: String,
    /// Number of the partition, from 0.
    pub partition: u32,
    /// The next offset to read.
    pub offset: u64,
    /// For the program; 4 KiB at most.
    pub metadata: String,
}

impl OffsetCommit {
    /// The next offset to read of a partition.
    #[must_use]
    pub fn new(topic: impl Into<String>, partition: u32, offset: u64) -> Self {
        Self {
            topic: topic.into(),
            partition,
            offset,
            metadata: String::new(),
        }
    }

    /// Adds a text for the program, of 4 KiB at most.
    #[must_use]
    pub fn metadata(mut self, metadata: impl Into<String>) -> Self {
        self.metadata = metadata.into();
        self
    }
}

impl GroupAdmin {
    /// Commits offsets for a group that has no members, and makes the group if there is none. The
    /// leaders of the partitions are asked first what these hold.
    ///
    /// What is refused does not keep the other partitions from being committed, but for
    /// [`ErrorKind::OffsetOutOfRange`], which is found before anything is.
    ///
    /// # Errors
    /// [`ErrorKind::OffsetOutOfRange`] with [`Error::bounds`]: the offset lies before the first or beyond
    /// the end; [`ErrorKind::OffsetBehind`]: the group has got farther, [`Error::offset`] says how far,
    /// and only a reset goes back; [`ErrorKind::GroupNotEmpty`] if it has members;
    /// [`ErrorKind::UnknownTopic`], [`ErrorKind::UnknownPartition`], [`ErrorKind::GroupLimit`],
    /// [`ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// Cancelled, the offsets may be committed or not. To repeat it does no harm.
    pub async fn commit(
        &self,
        group: &str,
        offsets: impl IntoIterator<Item = OffsetCommit>,
    ) -> Result<()> {
        let deadline = self.deadline();
        let offsets = self.resolve(group, offsets, deadline).await?;
        self.check(&offsets, deadline).await?;
        self.commit_resolved(group, &offsets, deadline).await
    }

    /// The same without asking what the partitions hold: an offset that lies outside of it is found out
    /// by whoever reads from there.
    ///
    /// # Errors
    /// As [`Self::commit`], but for [`ErrorKind::OffsetOutOfRange`].
    ///
    /// # Cancel safety
    /// As [`Self::commit`].
    pub async fn commit_unchecked(
        &self,
        group: &str,
        offsets: impl IntoIterator<Item = OffsetCommit>,
    ) -> Result<()> {
        let deadline = self.deadline();
        let offsets = self.resolve(group, offsets, deadline).await?;
        self.commit_resolved(group, &offsets, deadline).await
    }

    async fn resolve(
        &self,
        group: &str,
        offsets: impl IntoIterator<Item = OffsetCommit>,
        deadline: Instant,
    ) -> Result<Vec<(Arc<Topic>, OffsetCommit)>> {
        check_name(group)?;
        let mut topics = BTreeMap::<String, Arc<Topic>>::new();
        let mut resolved = Vec::new();
        for offset in offsets {
            let topic = match topics.get(&offset.topic) {
                Some(topic) => Arc::clone(topic),
                None => {
                    self.shared.metadata.first_view(deadline).await?;
                    let topic = self.shared.metadata.topic(&offset.topic, deadline).await?;
                    topics.insert(offset.topic.clone(), Arc::clone(&topic));
                    topic
                }
            };
            if offset.partition >= topic.partitions() {
                return Err(unknown_partition(&topic, offset.partition));
            }
            if offset.metadata.len() > METADATA_BYTES_MAX {
                let message = format!("the metadata is longer than {METADATA_BYTES_MAX} bytes");
                let error = Error::new(ErrorKind::InvalidArgument, message);
                return Err(error.at(&topic.name, offset.partition));
            }
            resolved.push((topic, offset));
        }
        Ok(resolved)
    }

    /// That the partitions hold the offsets.
    async fn check(&self, offsets: &[(Arc<Topic>, OffsetCommit)], deadline: Instant) -> Result<()> {
        let mut by_topic = BTreeMap::<_, (&Topic, Vec<&OffsetCommit>)>::new();
        for (topic, offset) in offsets {
            let (_, of_topic) = by_topic.entry(topic.id).or_insert((topic, Vec::new()));
            of_topic.push(offset);
        }
        let checks = by_topic.values().map(async |(topic, offsets)| {
            let ends = offsets.iter().map(|it| (it.partition, OffsetSpec::End));
            let ends: Vec<_> = ends.collect();
            let told = list_offsets(&self.shared, topic, &ends, deadline).await?;
            for (offset, told) in offsets.iter().zip(told) {
                let bounds = OffsetBounds {
                    log_start_offset: told.log_start_offset,
                    high_watermark: told.high_watermark,
                };
                check_bounds(topic, offset.partition, offset.offset, bounds)?;
            }
            Ok(())
        });
        try_join_all(checks).await.map(|_: Vec<()>| ())
    }

    async fn commit_resolved(
        &self,
        group: &str,
        offsets: &[(Arc<Topic>, OffsetCommit)],
        deadline: Instant,
    ) -> Result<()> {
        if offsets.is_empty() {
            return Ok(());
        }
        let tell = |(topic, offset): &(Arc<Topic>, OffsetCommit)| v1::OffsetCommit {
            topic_id: topic.id.to_wire(),
            partition: offset.partition,
            claim_epoch: 0,
            offset: offset.offset,
            leader_epoch: 0,
            metadata: offset.metadata.clone(),
        };
        let request = v1::CommitOffsetsRequest {
            group: group.to_owned(),
            offsets: offsets.iter().map(tell).collect(),
            ..Default::default()
        };
        let wanted = Wanted::Group(group.into());
        let asked = ask_coordinator(&self.shared, wanted, deadline, &request);
        let response = asked.await?;
        if response.results.len() != offsets.len() {
            let message = "the coordinator left commits unanswered";
            return Err(Error::new(ErrorKind::Protocol, message));
        }
        for ((topic, offset), told) in offsets.iter().zip(&response.results) {
            if let Some(error) = &told.error {
                let error = Error::told(error).at(&topic.name, offset.partition);
                return Err(error.with_offset(offset.offset));
            }
            if told.offset > offset.offset {
                let message = format!(
                    "the group has committed up to here, which is beyond {}: only a reset goes back",
                    offset.offset
                );
                let error = Error::new(ErrorKind::OffsetBehind, message);
                let error = error.at(&topic.name, offset.partition);
                return Err(error.with_offset(told.offset));
            }
        }
        Ok(())
    }
}

/// That a partition can be read from the offset, now or once more is written.
///
/// # Errors
/// [`ErrorKind::OffsetOutOfRange`] with the bounds.
pub(in crate::group) fn check_bounds(
    topic: &Topic,
    partition: u32,
    offset: u64,
    bounds: OffsetBounds,
) -> Result<()> {
    let what = if offset < bounds.log_start_offset {
        "the offset to commit lies before the start of the partition"
    } else if offset > bounds.high_watermark {
        "the offset to commit lies beyond the end of the partition"
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::OffsetOutOfRange, what)
        .at(&topic.name, partition)
        .with_offset(offset)
        .with_bounds(Some(bounds)))
}
