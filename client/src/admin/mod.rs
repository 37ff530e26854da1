//! Administration: topics, brokers, offsets.
//!
//! | file | holds |
//! | --- | --- |
//! | `topics.rs` | create, add partitions, list, describe, delete |
//! | `cluster.rs` | the state of the cluster, in one round |
//! | `health.rs` | how one broker fares |
//! | `offsets.rs` | offsets by position or time, from the leaders |

mod cluster;
mod health;
mod offsets;
mod topics;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use qute_proto::ids::{BrokerId, ClusterId, TopicId};
use qute_proto::v1;

pub(crate) use offsets::{list_each_offset, list_offsets, unknown_partition};

/// A topic to be created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicSpec {
    /// Its name: 1 to 249 of `A-Z a-z 0-9 . _ -`.
    pub name: String,
    /// How many partitions; `None`: the cluster's default.
    pub partitions: Option<u32>,
    /// How many replicas, an odd number; `None`: automatic (one, or three once there are three
    /// brokers).
    pub replicas: Option<u32>,
    /// Settings by name.
    pub config: BTreeMap<String, String>,
}

impl TopicSpec {
    /// A topic with defaults for everything.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            partitions: None,
            replicas: None,
            config: BTreeMap::new(),
        }
    }

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
}

/// Changes to a topic's settings. Those that are not named stay as they are.
///
/// ```
/// let changes = qute_client::TopicChanges::new()
///     .set("retention_ms", "2d")
///     .unset("segment_bytes");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TopicChanges {
    /// Settings to be given, by name, as [`TopicSpec::config`] takes them.
    pub set: BTreeMap<String, String>,
    /// Settings to go back to their defaults.
    pub unset: BTreeSet<String>,
}

impl TopicChanges {
    /// No change yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives a setting a value. What was said about it before no longer counts.
    #[must_use]
    pub fn set(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        let name = name.into();
        self.unset.remove(&name);
        self.set.insert(name, value.into());
        self
    }

    /// Lets a setting go back to its default. What was said about it before no longer counts.
    #[must_use]
    pub fn unset(mut self, name: impl Into<String>) -> Self {
        let name = name.into();
        self.set.remove(&name);
        self.unset.insert(name);
        self
    }
}

/// What a replica does in its partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplicaRole {
    /// It votes.
    Voter,
    /// It follows without a vote.
    Learner,
    /// The broker did not say.
    Unknown,
}

impl fmt::Display for ReplicaRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Voter => "voter",
            Self::Learner => "learner",
            Self::Unknown => "unknown",
        })
    }
}

/// One replica of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaDescription {
    /// The broker that holds it.
    pub broker: BrokerId,
    /// That broker's client address; `None` if the broker is not known.
    pub address: Option<String>,
    /// Its role.
    pub role: ReplicaRole,
}

/// One partition of a topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionDescription {
    /// Its number, from 0.
    pub partition: u32,
    /// The broker that leads it, if one is known.
    pub leader: Option<BrokerId>,
    /// The epoch of that leadership.
    pub leader_epoch: u64,
    /// First readable offset; `None` if the leader did not answer or was not asked.
    pub log_start_offset: Option<u64>,
    /// One past the last committed offset; `None` like the log start offset.
    pub high_watermark: Option<u64>,
    /// Its replicas.
    pub replicas: Vec<ReplicaDescription>,
}

/// A topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicDescription {
    /// Its name.
    pub name: String,
    /// Its incarnation: a topic deleted and made again has a new one.
    pub id: TopicId,
    /// Its partitions, by number.
    pub partitions: Vec<PartitionDescription>,
    /// Its settings.
    pub config: BTreeMap<String, String>,
}

/// What the cluster thinks of a broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BrokerState {
    /// It answers.
    Alive,
    /// It has missed probes.
    Suspect,
    /// It is gone.
    Dead,
    /// It is being emptied.
    Draining,
    /// The answering broker did not say.
    Unknown,
}

impl fmt::Display for BrokerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Alive => "alive",
            Self::Suspect => "suspect",
            Self::Dead => "dead",
            Self::Draining => "draining",
            Self::Unknown => "unknown",
        })
    }
}

impl BrokerState {
    pub(crate) fn told(state: v1::BrokerState) -> Self {
        match state {
            v1::BrokerState::Alive => Self::Alive,
            v1::BrokerState::Suspect => Self::Suspect,
            v1::BrokerState::Dead => Self::Dead,
            v1::BrokerState::Draining => Self::Draining,
            v1::BrokerState::Unspecified => Self::Unknown,
        }
    }
}

/// A broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokerDescription {
    /// Its id.
    pub id: BrokerId,
    /// Its name, a setting.
    pub name: String,
    /// Its client address.
    pub address: String,
    /// Its rack, may be empty.
    pub rack: String,
    /// Its state.
    pub state: BrokerState,
}

/// The state of the cluster, as the broker with the newest view sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterInfo {
    /// The cluster's id; `None` while it is forming.
    pub cluster_id: Option<ClusterId>,
    /// A cluster exists and the answering broker belongs to it.
    pub formed: bool,
    /// The broker that leads `__cluster`, if one is known.
    pub controller: Option<BrokerId>,
    /// The registered brokers, by id.
    pub brokers: Vec<BrokerDescription>,
    /// How many brokers founded the cluster.
    pub founding_brokers: u32,
    /// The `__cluster` index of this view.
    pub cluster_index: u64,
    /// How many topics there are.
    pub topics: u32,
    /// How many partitions they have.
    pub partitions: u32,
    /// The address that gave this answer.
    pub answered_by: String,
    /// What needs a human: replicas that have stopped or are quarantined, for people. Of every
    /// broker that answered, each with its address in front.
    pub faults: Vec<String>,
}

impl ClusterInfo {
    /// The cluster is formed, `__cluster` has a leader and the founding set is registered.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        let registered = u32::try_from(self.brokers.len()).unwrap_or(u32::MAX);
        self.formed && self.controller.is_some() && registered >= self.founding_brokers.max(1)
    }
}

/// How one broker fares, in its own words: see [`crate::Client::broker_status`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokerStatus {
    /// The address that was asked.
    pub address: String,
    /// Its id.
    pub id: BrokerId,
    /// Its name, a setting.
    pub name: String,
    /// The version of its software.
    pub version: String,
    /// The cluster that it belongs to; `None` while it belongs to none.
    pub cluster_id: Option<ClusterId>,
    /// From the question to the answer.
    pub round_trip: std::time::Duration,
    /// Its clock against this machine's; `None` from a version that doesn't tell.
    pub clock: Option<ClockReading>,
    /// Space where it keeps its data; `None` from a version that doesn't tell.
    pub storage: Option<StorageSpace>,
    /// Its replicas; `None` from a version that doesn't tell.
    pub replicas: Option<ReplicaCounts>,
    /// What of it needs a human, for people.
    pub faults: Vec<String>,
    /// The cluster as it sees it. Whom it takes for the leader of `__cluster` may be out of date, and
    /// `faults` is empty here.
    pub view: ClusterInfo,
}

/// The wall clock of a broker against this machine's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockReading {
    /// What it showed, Unix milliseconds.
    pub time_ms: u64,
    /// How far it is ahead of this machine's, milliseconds; negative: behind.
    pub ahead_ms: i64,
    /// `ahead_ms` is off by this many milliseconds at most.
    pub error_ms: u64,
}

/// The file system that holds a broker's data directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StorageSpace {
    /// Its size.
    pub total_bytes: u64,
    /// What it has left, what is promised to batches on their way subtracted.
    pub available_bytes: u64,
    /// What is kept back: with no more than this left, records are refused
    /// ([`crate::ErrorKind::StorageFull`]).
    pub floor_bytes: u64,
}

/// The replicas of a broker, in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaCounts {
    /// Placed on it by the cluster.
    pub desired: u32,
    /// Of those, open and not stopped.
    pub open: u32,
    /// Not served because of damage.
    pub quarantined: u32,
    /// Stored there and not known to the cluster; kept.
    pub orphaned: u32,
    /// Partitions that it leads.
    pub leading: u32,
    /// Of those, the ones with a voter that has not answered its leader for 5 s.
    pub under_replicated: u32,
}

/// Which offset is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OffsetSpec {
    /// The log start offset.
    Start,
    /// The high watermark.
    End,
    /// The first offset whose batch has at least this broker time, Unix milliseconds; the high
    /// watermark if there is none.
    TimeMs(u64),
}

/// Which offset of which partition is wanted: see [`crate::Client::list_offsets_many`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OffsetQuery {
    /// Name of the topic.
    pub topic: String,
    /// Number of the partition, from 0.
    pub partition: u32,
    /// Which offset.
    pub spec: OffsetSpec,
}

impl OffsetQuery {
    /// Asks for an offset of a partition.
    #[must_use]
    pub fn new(topic: impl Into<String>, partition: u32, spec: OffsetSpec) -> Self {
        Self {
            topic: topic.into(),
            partition,
            spec,
        }
    }
}

/// An offset that the leader of a partition told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListedOffset {
    /// The partition.
    pub partition: u32,
    /// The offset.
    pub offset: u64,
    /// First readable offset at that time.
    pub log_start_offset: u64,
    /// One past the last committed offset at that time.
    pub high_watermark: u64,
    /// The epoch of the leader that answered.
    pub leader_epoch: u64,
}
