//! How far a group is behind the ends of its partitions.

use std::collections::{BTreeMap, BTreeSet};

use qute_proto::ids::{MemberId, PartitionId};

use super::{GroupAdmin, GroupDescription, GroupPartition, TopicsById};
use crate::admin::{OffsetQuery, OffsetSpec};
use crate::error::{Error, OffsetBounds, Result};

/// One partition of a group: where the group is, where the partition ends, who reads it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PartitionLag {
    /// The partition.
    pub partition: GroupPartition,
    /// The next offset that the group reads; `None`: it has committed nothing.
    pub committed: Option<u64>,
    /// What the partition holds, by its leader; `None` if that did not tell, or the topic is gone.
    pub bounds: Option<OffsetBounds>,
    /// How many offsets the group has yet to read, of those that are still there; `None` if it has
    /// committed nothing or the bounds are not known.
    pub lag: Option<u64>,
    /// Who holds the claim.
    pub member: Option<MemberId>,
    /// Why the bounds are not known.
    pub error: Option<Error>,
}

impl GroupAdmin {
    /// How far the group is behind, for each partition that it has committed an offset for, that a
    /// member holds, or that a member reads; by topic and partition. The ends come from the leaders of the
    /// partitions, after the commits have been read: what one leader does not tell hides nothing else.
    ///
    /// # Errors
    /// [`crate::ErrorKind::UnknownGroup`], [`crate::ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// Nothing is lost: it only reads.
    pub async fn lag(&self, group: &str) -> Result<Vec<PartitionLag>> {
        let described = self.describe(group).await?;
        let client = crate::Client {
            shared: std::sync::Arc::clone(&self.shared),
        };
        let topics = TopicsById::new(&self.shared.metadata.load());
        let mut lags = unmeasured(&described, &topics);
        let named = |lag: &PartitionLag| {
            let topic = lag.partition.topic.as_ref()?;
            Some(OffsetQuery::new(
                topic.to_string(),
                lag.partition.partition,
                OffsetSpec::End,
            ))
        };
        let queries: Vec<OffsetQuery> = lags.iter().filter_map(named).collect();
        let answers = client.list_offsets_many(&queries).await;
        let there = lags.iter_mut().filter(|lag| lag.partition.topic.is_some());
        for (lag, answer) in there.zip(answers) {
            match answer {
                Ok(told) => lag.measure(OffsetBounds {
                    log_start_offset: told.log_start_offset,
                    high_watermark: told.high_watermark,
                }),
                Err(error) => lag.error = Some(error),
            }
        }
        Ok(lags)
    }
}

impl PartitionLag {
    fn measure(&mut self, bounds: OffsetBounds) {
        let next = |committed: u64| committed.max(bounds.log_start_offset);
        let left = |committed| bounds.high_watermark.saturating_sub(next(committed));
        self.lag = self.committed.map(left);
        self.bounds = Some(bounds);
    }
}

/// The partitions that the group has to do with, by topic and number.
pub(super) fn concerned(
    described: &GroupDescription,
    topics: &TopicsById,
) -> BTreeSet<GroupPartition> {
    let offsets = described.offsets.iter().map(|it| it.partition.clone());
    let claims = described.claims.iter().map(|it| it.partition.clone());
    let read = described.members.iter().flat_map(|member| &member.topics);
    let read = read.flat_map(|topic| {
        let numbers = 0..topics.get(topic.topic_id).map_or(0, |it| it.partitions());
        numbers.map(|number| topics.partition(topic.topic_id, number))
    });
    offsets.chain(claims).chain(read).collect()
}

pub(super) fn key(partition: &GroupPartition) -> PartitionId {
    PartitionId {
        topic: partition.topic_id,
        partition: partition.partition,
    }
}

fn unmeasured(described: &GroupDescription, topics: &TopicsById) -> Vec<PartitionLag> {
    let offsets = described.offsets.iter();
    let committed: BTreeMap<_, _> = offsets.map(|it| (key(&it.partition), it.offset)).collect();
    let claims = described.claims.iter();
    let holders: BTreeMap<_, _> = claims.map(|it| (key(&it.partition), it.member)).collect();
    let partitions = concerned(described, topics).into_iter();
    let unmeasured = partitions.map(|partition| PartitionLag {
        committed: committed.get(&key(&partition)).copied(),
        member: holders.get(&key(&partition)).copied(),
        partition,
        bounds: None,
        lag: None,
        error: None,
    });
    unmeasured.collect()
}
