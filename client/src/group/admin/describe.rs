//! Listings and descriptions of groups.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures::future::try_join_all;
use qute_proto::ids::{BrokerId, MemberId, TopicId};
use qute_proto::v1;
use tokio::time::Instant;

use super::{GroupAdmin, TopicsById, topic_id};
use crate::error::{Error, ErrorKind, Result};
use crate::group::coordinator::{Wanted, ask_coordinator, known_groups_topic};

/// Where a group stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GroupState {
    /// No members; its offsets are kept for a while.
    Empty,
    /// An assignment is awaited, or partitions are changing hands.
    Rebalancing,
    /// Every partition is with the member that it was assigned to.
    Stable,
    /// The coordinator did not say.
    Unknown,
}

impl fmt::Display for GroupState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Empty => "empty",
            Self::Rebalancing => "rebalancing",
            Self::Stable => "stable",
            Self::Unknown => "unknown",
        })
    }
}

/// An assignor, by name and version.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct AssignorName {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: u32,
}

impl fmt::Display for AssignorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.version)
    }
}

/// A line of the list of groups.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupListing {
    /// Its name.
    pub group: String,
    /// Where it stands.
    pub state: GroupState,
    /// How many members it has.
    pub members: u32,
    /// How many partitions it has a committed offset for.
    pub offsets: u32,
    /// Rises with each change of members and of what they read.
    pub generation: u64,
    /// What assignments are computed with; `None` without members.
    pub assignor: Option<AssignorName>,
}

/// A partition of a topic, as a group knows it. Shown as `topic/partition`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupPartition {
    /// Name of the topic; `None`: there is no such incarnation any more.
    pub topic: Option<Arc<str>>,
    /// The incarnation of the topic.
    pub topic_id: TopicId,
    /// Number of the partition, from 0.
    pub partition: u32,
}

impl fmt::Display for GroupPartition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.topic {
            Some(topic) => write!(f, "{topic}/{}", self.partition),
            None => write!(f, "{}/{}", self.topic_id, self.partition),
        }
    }
}

/// What a group has committed for a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CommittedOffset {
    /// The partition.
    pub partition: GroupPartition,
    /// The next offset to read.
    pub offset: u64,
    /// Leader epoch of the record before it, as the committer knew it; 0: unknown.
    pub leader_epoch: u64,
    /// What the program added.
    pub metadata: String,
    /// Broker time of the commit, Unix milliseconds.
    pub time_ms: u64,
}

/// A claim that a member holds.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldClaim {
    /// The partition.
    pub partition: GroupPartition,
    /// Rises each time the partition is claimed anew.
    pub claim_epoch: u64,
    /// Who holds it.
    pub member: MemberId,
}

/// A member of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupMember {
    /// Its id.
    pub id: MemberId,
    /// Its stable name, if it is static.
    pub instance: Option<String>,
    /// Its rack; empty: unknown.
    pub rack: String,
    /// Name of its client.
    pub client: String,
    /// What it can compute assignments with, the best first.
    pub assignors: Vec<AssignorName>,
    /// The topics that it reads, each with the number of partitions that it knows of.
    pub topics: Vec<SubscribedTopic>,
    /// How long it is waited for when it is silent.
    pub session_timeout: Duration,
    /// What the assignment in force gives to it.
    pub targets: Vec<GroupPartition>,
    /// What it holds.
    pub claims: Vec<GroupPartition>,
}

/// A topic that a member reads.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubscribedTopic {
    /// Its name; `None`: there is no such incarnation any more.
    pub topic: Option<Arc<str>>,
    /// Its incarnation.
    pub topic_id: TopicId,
    /// How many partitions the member knows of.
    pub partitions: u32,
}

/// All that a coordinator knows of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupDescription {
    /// Its line of the list.
    pub listing: GroupListing,
    /// Its members, in the order in which they joined.
    pub members: Vec<GroupMember>,
    /// What they hold.
    pub claims: Vec<HeldClaim>,
    /// Its committed offsets.
    pub offsets: Vec<CommittedOffset>,
    /// The broker that coordinates it.
    pub coordinator: BrokerId,
    /// The epoch of that leadership.
    pub coordinator_epoch: u64,
}

impl GroupAdmin {
    /// All groups of the cluster, by name.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`], [`ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// Nothing is lost: it only reads.
    pub async fn list(&self) -> Result<Vec<GroupListing>> {
        let deadline = self.deadline();
        let Some(topic) = known_groups_topic(&self.shared, deadline).await? else {
            return Ok(Vec::new());
        };
        let partitions = 0..topic.partitions();
        let lists = partitions.map(|partition| self.list_partition(partition, deadline));
        let mut groups = try_join_all(lists).await?.concat();
        groups.sort_by(|a, b| a.group.cmp(&b.group));
        Ok(groups)
    }

    /// The groups of one partition of `__groups`, page by page.
    async fn list_partition(&self, partition: u32, deadline: Instant) -> Result<Vec<GroupListing>> {
        let mut groups = Vec::<GroupListing>::new();
        loop {
            let request = v1::ListGroupsRequest {
                partition,
                after: groups.last().map_or("", |last| &last.group).to_owned(),
                limit: 0,
            };
            let wanted = Wanted::Partition(partition);
            let asked = ask_coordinator(&self.shared, wanted, deadline, &request);
            let page = asked.await?;
            let is_forward = |it: &v1::GroupListing| it.group > request.after;
            if page.more && !page.groups.last().is_some_and(is_forward) {
                let message = "the coordinator lists the same groups again and again";
                return Err(Error::new(ErrorKind::Protocol, message));
            }
            groups.extend(page.groups.into_iter().map(GroupListing::told));
            if !page.more {
                return Ok(groups);
            }
        }
    }

    /// All that the group's coordinator knows of it.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownGroup`], [`ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// Nothing is lost: it only reads.
    pub async fn describe(&self, group: &str) -> Result<GroupDescription> {
        let deadline = self.deadline();
        self.describe_within(group, deadline).await
    }

    pub(super) async fn describe_within(
        &self,
        group: &str,
        deadline: Instant,
    ) -> Result<GroupDescription> {
        self.known(group, deadline).await?;
        let request = v1::DescribeGroupRequest {
            group: group.to_owned(),
        };
        let wanted = Wanted::Group(group.into());
        let asked = ask_coordinator(&self.shared, wanted, deadline, &request);
        let response = asked.await?;
        let topics = TopicsById::new(&self.shared.metadata.load());
        GroupDescription::told(response, &topics)
    }

    /// What the group has committed, by topic id and partition.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownGroup`] if there has never been a group in the cluster: a group without
    /// commits is not told from one that does not exist; [`ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// Nothing is lost: it only reads.
    pub async fn offsets(&self, group: &str) -> Result<Vec<CommittedOffset>> {
        let deadline = self.deadline();
        self.known(group, deadline).await?;
        let request = v1::FetchOffsetsRequest {
            group: group.to_owned(),
            partitions: Vec::new(),
        };
        let wanted = Wanted::Group(group.into());
        let asked = ask_coordinator(&self.shared, wanted, deadline, &request);
        let response = asked.await?;
        let topics = TopicsById::new(&self.shared.metadata.load());
        let offsets = response.offsets.into_iter();
        offsets
            .map(|it| CommittedOffset::told(it, &topics))
            .collect()
    }
}

impl GroupListing {
    fn told(told: v1::GroupListing) -> Self {
        Self {
            state: match told.state() {
                v1::GroupState::Empty => GroupState::Empty,
                v1::GroupState::Rebalancing => GroupState::Rebalancing,
                v1::GroupState::Stable => GroupState::Stable,
                v1::GroupState::Unspecified => GroupState::Unknown,
            },
            group: told.group,
            members: told.members,
            offsets: told.offsets,
            generation: told.generation,
            assignor: told.assignor.map(AssignorName::told),
        }
    }
}

impl AssignorName {
    fn told(told: v1::AssignorVersion) -> Self {
        Self {
            name: told.name,
            version: told.version,
        }
    }
}

impl CommittedOffset {
    fn told(told: v1::CommittedOffset, topics: &TopicsById) -> Result<Self> {
        Ok(Self {
            partition: topics.partition(topic_id(&told.topic_id)?, told.partition),
            offset: told.offset,
            leader_epoch: told.leader_epoch,
            metadata: told.metadata,
            time_ms: told.time_ms,
        })
    }
}

fn member_id(bytes: &[u8]) -> Result<MemberId> {
    let bad = || {
        Error::new(
            ErrorKind::Protocol,
            "the coordinator's answer lacks a member id",
        )
    };
    MemberId::from_wire(bytes).ok_or_else(bad)
}

fn partitions(told: &[v1::TopicPartitions], topics: &TopicsById) -> Result<Vec<GroupPartition>> {
    let mut partitions = Vec::new();
    for told in told {
        let id = topic_id(&told.topic_id)?;
        let numbers = told.partitions.iter();
        partitions.extend(numbers.map(|&number| topics.partition(id, number)));
    }
    Ok(partitions)
}

impl GroupMember {
    fn told(told: v1::GroupMember, topics: &TopicsById) -> Result<Self> {
        let subscribed = |told: &v1::TopicSubscription| {
            let topic_id = topic_id(&told.topic_id)?;
            Ok(SubscribedTopic {
                topic: topics.get(topic_id).map(|topic| Arc::clone(&topic.name)),
                topic_id,
                partitions: told.partitions,
            })
        };
        Ok(Self {
            id: member_id(&told.member_id)?,
            topics: told.topics.iter().map(subscribed).collect::<Result<_>>()?,
            targets: partitions(&told.targets, topics)?,
            claims: partitions(&told.claims, topics)?,
            instance: (!told.instance.is_empty()).then_some(told.instance),
            rack: told.rack,
            client: told.client,
            assignors: told.assignors.into_iter().map(AssignorName::told).collect(),
            session_timeout: Duration::from_millis(told.session_timeout_ms.into()),
        })
    }
}

impl GroupDescription {
    fn told(told: v1::DescribeGroupResponse, topics: &TopicsById) -> Result<Self> {
        let claim = |claim: v1::HeldClaim| {
            Ok(HeldClaim {
                partition: topics.partition(topic_id(&claim.topic_id)?, claim.partition),
                claim_epoch: claim.claim_epoch,
                member: member_id(&claim.member_id)?,
            })
        };
        let (members, offsets) = (told.members.into_iter(), told.offsets.into_iter());
        Ok(Self {
            listing: GroupListing::told(told.group.unwrap_or_default()),
            members: members
                .map(|it| GroupMember::told(it, topics))
                .collect::<Result<_>>()?,
            claims: told.claims.into_iter().map(claim).collect::<Result<_>>()?,
            offsets: offsets
                .map(|it| CommittedOffset::told(it, topics))
                .collect::<Result<_>>()?,
            coordinator: BrokerId(told.coordinator),
            coordinator_epoch: told.coordinator_epoch,
        })
    }
}
