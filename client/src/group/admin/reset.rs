//! Setting committed offsets: a plan, what it would do, and doing it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use qute_proto::ids::MemberId;
use qute_proto::v1;
use tokio::time::Instant;

use super::lag::{concerned, key};
use super::{GroupAdmin, GroupDescription, GroupPartition, TopicsById};
use crate::admin::{ListedOffset, OffsetSpec, list_each_offset, unknown_partition};
use crate::client::Shared;
use crate::error::{Error, ErrorKind, OffsetBounds, Result};
use crate::group::coordinator::{Wanted, ask_coordinator};
use crate::metadata::Topic;

/// Where to.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResetTo {
    /// The first record there is.
    Start,
    /// The end: only what is written from now on.
    End,
    /// This offset.
    Offset(u64),
    /// The first record whose batch has at least this broker time, Unix milliseconds; the end if there
    /// is none.
    TimeMs(u64),
    /// So many records on from the committed offset, or back; partitions without one are left out.
    Shift(i64),
    /// Offsets by topic and partition, as saved before. The plan is for these partitions and no others.
    Offsets(BTreeMap<(String, u32), u64>),
    /// Nowhere: the committed offset is forgotten, and members begin as if there had never been one.
    Forget,
}

/// What a reset is to do: where to, and for which partitions. Without any named, it is for all that the
/// group has committed an offset for, that a member holds, or that a member reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResetPlan {
    to: ResetTo,
    topics: BTreeSet<String>,
    partitions: BTreeSet<(String, u32)>,
}

impl ResetPlan {
    /// For all that the group has to do with.
    #[must_use]
    pub fn new(to: ResetTo) -> Self {
        let partitions = match &to {
            ResetTo::Offsets(offsets) => offsets.keys().cloned().collect(),
            _ => BTreeSet::new(),
        };
        Self {
            to,
            topics: BTreeSet::new(),
            partitions,
        }
    }

    /// For all partitions of this topic, and of whatever else is named.
    #[must_use]
    pub fn topic(mut self, topic: impl Into<String>) -> Self {
        self.topics.insert(topic.into());
        self
    }

    /// For this partition, and whatever else is named.
    #[must_use]
    pub fn partition(mut self, topic: impl Into<String>, partition: u32) -> Self {
        self.partitions.insert((topic.into(), partition));
        self
    }
}

/// What a reset does to one partition.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OffsetMove {
    /// The partition.
    pub partition: GroupPartition,
    /// The committed offset before; `None`: none.
    pub from: Option<u64>,
    /// The committed offset after; `None`: none.
    pub to: Option<u64>,
    /// What was asked for lies outside of what the partition holds, and `to` is the nearest there is.
    pub clamped: bool,
    /// What the partition holds; `None` where that plays no part ([`ResetTo::Forget`]).
    pub bounds: Option<OffsetBounds>,
    /// Who holds the claim: unless that member stops, it takes [`PlannedReset::force`].
    pub member: Option<MemberId>,
}

/// A reset that has been thought through and not been done: nothing changes before
/// [`Self::execute`].
#[must_use = "nothing has been done yet"]
#[derive(Clone)]
pub struct PlannedReset {
    shared: Arc<Shared>,
    group: String,
    moves: Vec<OffsetMove>,
    force: bool,
}

impl GroupAdmin {
    /// Thinks a reset through: what would become of each partition. Nothing changes before
    /// [`PlannedReset::execute`].
    ///
    /// # Errors
    /// [`ErrorKind::UnknownGroup`]; [`ErrorKind::UnknownTopic`] and [`ErrorKind::UnknownPartition`] of what
    /// is named; [`ErrorKind::InvalidArgument`] if there is nothing to reset; [`ErrorKind::Timeout`], also
    /// where the leader of one partition does not tell what that holds.
    ///
    /// # Cancel safety
    /// Nothing is lost: it only reads.
    pub async fn reset(&self, group: &str, plan: ResetPlan) -> Result<PlannedReset> {
        let deadline = self.deadline();
        let described = self.describe_within(group, deadline).await?;
        let partitions = self.scope(&described, &plan, deadline).await?;
        let mut moves = self.moves(&described, &plan, partitions, deadline).await?;
        moves.sort_by(|a, b| a.partition.cmp(&b.partition));
        if moves.is_empty() {
            let message =
                format!("group `{group}` has nothing to reset: name topics or partitions");
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        Ok(PlannedReset {
            shared: Arc::clone(&self.shared),
            group: group.to_owned(),
            moves,
            force: false,
        })
    }

    /// The partitions that the plan is for.
    async fn scope(
        &self,
        described: &GroupDescription,
        plan: &ResetPlan,
        deadline: Instant,
    ) -> Result<BTreeSet<GroupPartition>> {
        let metadata = &self.shared.metadata;
        if plan.topics.is_empty() && plan.partitions.is_empty() {
            let topics = TopicsById::new(&metadata.load());
            let mut partitions = concerned(described, &topics);
            // What is gone can be forgotten, and set to nothing else.
            partitions.retain(|it| it.topic.is_some() || plan.to == ResetTo::Forget);
            return Ok(partitions);
        }
        let mut partitions = BTreeSet::new();
        let partition = |topic: &Topic, partition| GroupPartition {
            topic: Some(Arc::clone(&topic.name)),
            topic_id: topic.id,
            partition,
        };
        for name in &plan.topics {
            let topic = metadata.topic(name, deadline).await?;
            partitions.extend((0..topic.partitions()).map(|number| partition(&topic, number)));
        }
        for (name, number) in &plan.partitions {
            let topic = metadata.topic(name, deadline).await?;
            if *number >= topic.partitions() {
                return Err(unknown_partition(&topic, *number));
            }
            partitions.insert(partition(&topic, *number));
        }
        Ok(partitions)
    }

    async fn moves(
        &self,
        described: &GroupDescription,
        plan: &ResetPlan,
        partitions: BTreeSet<GroupPartition>,
        deadline: Instant,
    ) -> Result<Vec<OffsetMove>> {
        let offsets = described.offsets.iter();
        let committed: BTreeMap<_, _> = offsets.map(|it| (key(&it.partition), it.offset)).collect();
        let claims = described.claims.iter();
        let holders: BTreeMap<_, _> = claims.map(|it| (key(&it.partition), it.member)).collect();
        let mut moves: Vec<OffsetMove> = partitions
            .into_iter()
            .map(|partition| OffsetMove {
                from: committed.get(&key(&partition)).copied(),
                member: holders.get(&key(&partition)).copied(),
                partition,
                to: None,
                clamped: false,
                bounds: None,
            })
            .collect();
        if matches!(plan.to, ResetTo::Forget | ResetTo::Shift(_)) {
            moves.retain(|it| it.from.is_some());
        }
        if plan.to != ResetTo::Forget {
            self.aim(&plan.to, &mut moves, deadline).await?;
        }
        Ok(moves)
    }

    /// Asks the leaders for what the partitions hold, and aims.
    async fn aim(&self, to: &ResetTo, moves: &mut [OffsetMove], deadline: Instant) -> Result<()> {
        let topics = TopicsById::new(&self.shared.metadata.load());
        let spec = match to {
            ResetTo::TimeMs(time_ms) => OffsetSpec::TimeMs(*time_ms),
            _ => OffsetSpec::End,
        };
        // Those of a topic stand side by side.
        for of_topic in moves.chunk_by_mut(|a, b| a.partition.topic_id == b.partition.topic_id) {
            let Some(first) = of_topic.first() else {
                continue;
            };
            let Some(topic) = topics.get(first.partition.topic_id).cloned() else {
                let message = "the topic was deleted meanwhile";
                return Err(Error::new(ErrorKind::UnknownTopic, message));
            };
            let queries = of_topic.iter().map(|it| (it.partition.partition, spec));
            let queries: Vec<_> = queries.collect();
            let answers = list_each_offset(&self.shared, &topic, &queries, deadline).await;
            for (it, answer) in of_topic.iter_mut().zip(answers) {
                it.aim(to, &answer?);
            }
        }
        Ok(())
    }
}

impl OffsetMove {
    fn aim(&mut self, to: &ResetTo, told: &ListedOffset) {
        let (start, end) = (told.log_start_offset, told.high_watermark);
        let named = |topic: &Arc<str>| (topic.to_string(), self.partition.partition);
        let wanted = match to {
            ResetTo::Start => start,
            ResetTo::End => end,
            ResetTo::Offset(offset) => *offset,
            ResetTo::TimeMs(_) => told.offset,
            ResetTo::Shift(by) => self.from.unwrap_or(start).saturating_add_signed(*by),
            ResetTo::Offsets(offsets) => {
                let saved = self.partition.topic.as_ref().map(named);
                let saved = saved.and_then(|it| offsets.get(&it).copied());
                saved.unwrap_or(start)
            }
            ResetTo::Forget => return,
        };
        let reached = wanted.max(start).min(end);
        self.to = Some(reached);
        self.clamped = reached != wanted;
        self.bounds = Some(OffsetBounds {
            log_start_offset: start,
            high_watermark: end,
        });
    }
}

impl PlannedReset {
    /// The group.
    #[must_use]
    pub fn group(&self) -> &str {
        &self.group
    }

    /// What becomes of each partition, by topic and number.
    #[must_use]
    pub fn moves(&self) -> &[OffsetMove] {
        &self.moves
    }

    /// To be done even where members hold the claims: these begin anew at the offset that is set, and
    /// what they had in flight is not committed any more.
    pub fn force(mut self) -> Self {
        self.force = true;
        self
    }

    /// Does it, all of it or nothing.
    ///
    /// # Errors
    /// [`ErrorKind::GroupNotEmpty`] if members hold claims on what is to change, and it is not to be
    /// forced; [`ErrorKind::UnknownGroup`] if the group has gone meanwhile; [`ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// Cancelled, it may be done or not. To repeat it does no harm as long as nobody commits in between.
    pub async fn execute(&self) -> Result<()> {
        let deadline = Instant::now() + self.shared.config.call_timeout;
        let tell = |it: &OffsetMove| v1::OffsetReset {
            topic_id: it.partition.topic_id.to_wire(),
            partition: it.partition.partition,
            offset: it.to,
        };
        let request = v1::ResetOffsetsRequest {
            group: self.group.clone(),
            offsets: self.moves.iter().map(tell).collect(),
            force: self.force,
        };
        let wanted = Wanted::Group(self.group.as_str().into());
        let asked = ask_coordinator(&self.shared, wanted, deadline, &request);
        asked.await?;
        Ok(())
    }
}

impl fmt::Debug for PlannedReset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlannedReset")
            .field("group", &self.group)
            .field("moves", &self.moves)
            .field("force", &self.force)
            .finish_non_exhaustive()
    }
}
