//! One immutable view of the cluster, and the rules by which one replaces another (S28).
//!
//! Pure: no clock, no network. Rules:
//! - the cluster id of the first view is pinned;
//! - brokers and topics come from the view with the highest `__cluster` index;
//! - leaders are hints with an epoch of their own: per partition of the same topic incarnation
//!   the highest epoch wins, whichever view it came with;
//! - a hint to a broker that nobody has told of is taken in only with its address, and does not
//!   outlive the next view that still does not know the broker.

use std::collections::BTreeMap;
use std::sync::Arc;

use qute_proto::ids::{BrokerId, ClusterId, TopicId};
use qute_proto::v1;

use crate::error::{Error, ErrorKind, Result};
use crate::net::Address;

/// Who leads, since which epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Leader {
    pub(crate) broker: BrokerId,
    pub(crate) epoch: u64,
}

/// A broker as the cluster knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Broker {
    pub(crate) id: BrokerId,
    pub(crate) name: Arc<str>,
    pub(crate) address: Address,
    pub(crate) rack: String,
    pub(crate) state: v1::BrokerState,
}

/// One incarnation of a topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Topic {
    pub(crate) name: Arc<str>,
    pub(crate) id: TopicId,
    /// It is the cluster's own (`__groups`).
    pub(crate) internal: bool,
    /// By number; the count never depends on health.
    pub(crate) leaders: Vec<Option<Leader>>,
    /// By number: the brokers with a voting replica.
    pub(crate) voters: Vec<Vec<BrokerId>>,
}

impl Topic {
    pub(crate) fn partitions(&self) -> u32 {
        u32::try_from(self.leaders.len()).unwrap_or(u32::MAX)
    }

    pub(crate) fn leader(&self, partition: u32) -> Option<Leader> {
        let at = usize::try_from(partition).ok()?;
        self.leaders.get(at).copied().flatten()
    }

    /// The brokers with a voting replica of the partition.
    pub(crate) fn voters(&self, partition: u32) -> &[BrokerId] {
        usize::try_from(partition)
            .ok()
            .and_then(|at| self.voters.get(at))
            .map_or(&[], Vec::as_slice)
    }
}

/// A view of the cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Metadata {
    pub(crate) cluster_id: Option<ClusterId>,
    pub(crate) cluster_index: u64,
    pub(crate) controller: Option<Leader>,
    pub(crate) brokers: BTreeMap<BrokerId, Broker>,
    pub(crate) topics: BTreeMap<Arc<str>, Arc<Topic>>,
}

impl Metadata {
    pub(crate) fn topic(&self, name: &str) -> Option<&Arc<Topic>> {
        self.topics.get(name)
    }

    pub(crate) fn topic_by_id(&self, name: &str, id: TopicId) -> Option<&Arc<Topic>> {
        self.topic(name).filter(|topic| topic.id == id)
    }

    pub(crate) fn address(&self, broker: BrokerId) -> Option<&Address> {
        let address = &self.brokers.get(&broker)?.address;
        (!address.is_empty()).then_some(address)
    }

    /// The leader of a partition of this incarnation, and where it is.
    pub(crate) fn leader_of(&self, topic: &Topic, partition: u32) -> Option<(Leader, &Address)> {
        let leader = self.topic_by_id(&topic.name, topic.id)?.leader(partition)?;
        Some((leader, self.address(leader.broker)?))
    }

    /// Whether a leader of a newer epoch is known for it, and where that one is.
    pub(crate) fn has_newer(&self, topic: &Topic, partition: u32, than: Option<Leader>) -> bool {
        self.leader_of(topic, partition)
            .is_some_and(|(known, _)| than.is_none_or(|than| known.epoch > than.epoch))
    }

    /// The view that follows from this one and a broker's full answer; `None`: nothing new.
    pub(crate) fn merged(&self, response: &v1::MetadataResponse) -> Result<Option<Self>> {
        let Some(cluster_id) = ClusterId::from_wire(&response.cluster_id) else {
            return Err(Error::new(
                ErrorKind::NotReady,
                "the broker does not belong to a cluster yet",
            ));
        };
        if let Some(pinned) = self.cluster_id
            && pinned != cluster_id
        {
            // S28: clusters are never mixed up.
            return Err(Error::new(
                ErrorKind::WrongCluster,
                format!("the broker belongs to cluster {cluster_id}, not {pinned}"),
            ));
        }
        let offered = read_topics(response)?;
        // S28: an older index brings no topics and no brokers, only leaders of a newer epoch.
        let current = response.cluster_index >= self.cluster_index;
        let mut next = if current {
            Self {
                cluster_id: Some(cluster_id),
                cluster_index: response.cluster_index,
                controller: self.controller,
                brokers: read_brokers(response),
                topics: offered.clone(),
            }
        } else {
            self.clone()
        };
        let other = if current { &self.topics } else { &offered };
        for (name, topic) in &mut next.topics {
            if let Some(other) = other.get(name).filter(|other| other.id == topic.id) {
                keep_newest(topic, other, &next.brokers);
            }
        }
        if let Some(hint) = response.controller.as_ref().and_then(leader_of_hint) {
            next.controller = newest(next.controller, Some(hint));
        }
        Ok((next != *self).then_some(next))
    }

    /// The view with a leader hint taken in; `None` unless its epoch is newer than what is known and
    /// it is known where the leader is.
    pub(crate) fn with_hint(
        &self,
        name: &str,
        id: TopicId,
        partition: u32,
        hint: &v1::LeaderHint,
    ) -> Option<Self> {
        let leader = leader_of_hint(hint)?;
        let topic = self.topic_by_id(name, id)?;
        let at = usize::try_from(partition).ok()?;
        let known = topic.leaders.get(at)?;
        let has_address = self.address(leader.broker).is_some();
        let newer = known.is_none_or(|known| known.epoch < leader.epoch);
        // Known already, but not where it is.
        let found = *known == Some(leader) && !has_address;
        let nowhere = !has_address && hint.address.is_empty();
        if nowhere || !(newer || found) {
            return None;
        }
        let mut topic = Topic::clone(topic);
        *topic.leaders.get_mut(at)? = Some(leader);
        let mut next = self.clone();
        next.topics.insert(Arc::clone(&topic.name), Arc::new(topic));
        if !hint.address.is_empty() {
            let broker = next.brokers.entry(leader.broker);
            let broker = broker.or_insert_with(|| Broker {
                id: leader.broker,
                name: Arc::from(""),
                address: Arc::from(""),
                rack: String::new(),
                state: v1::BrokerState::Unspecified,
            });
            if broker.address.is_empty() {
                broker.address = Arc::from(hint.address.as_str());
            }
        }
        Some(next)
    }
}

fn newest(a: Option<Leader>, b: Option<Leader>) -> Option<Leader> {
    match (a, b) {
        (Some(a), Some(b)) if b.epoch > a.epoch => Some(b),
        (Some(a), _) => Some(a),
        (None, b) => b,
    }
}

/// Takes from `other`, the same incarnation, the leaders of a newer epoch. "No leader" takes away
/// none: a broker says so of one that it only believes dead; who goes on asking it is held back by
/// its breaker until a newer one is known. Not those that are no
/// broker of the cluster: a hint that leads nowhere must not outlive the view that shows it.
fn keep_newest(topic: &mut Arc<Topic>, other: &Topic, brokers: &BTreeMap<BrokerId, Broker>) {
    let known = |leader: &Leader| brokers.contains_key(&leader.broker);
    let best = |mine: Option<Leader>, other: Option<Leader>| newest(mine, other.filter(known));
    let newer = |(mine, other): (&Option<Leader>, &Option<Leader>)| best(*mine, *other) != *mine;
    if topic.leaders.iter().zip(&other.leaders).any(newer) {
        let topic = Arc::make_mut(topic);
        for (mine, other) in topic.leaders.iter_mut().zip(&other.leaders) {
            *mine = best(*mine, *other);
        }
    }
}

pub(crate) fn leader_of_hint(hint: &v1::LeaderHint) -> Option<Leader> {
    (hint.broker_id != 0).then_some(Leader {
        broker: BrokerId(hint.broker_id),
        epoch: hint.leader_epoch,
    })
}

fn read_brokers(response: &v1::MetadataResponse) -> BTreeMap<BrokerId, Broker> {
    let read = |broker: &v1::BrokerInfo| {
        let id = BrokerId(broker.broker_id);
        let broker = Broker {
            id,
            name: broker.name.as_str().into(),
            address: broker.address.as_str().into(),
            rack: broker.rack.clone(),
            state: broker.state(),
        };
        (id, broker)
    };
    response.brokers.iter().map(read).collect()
}

fn read_topics(response: &v1::MetadataResponse) -> Result<BTreeMap<Arc<str>, Arc<Topic>>> {
    let mut topics = BTreeMap::new();
    for info in &response.topics {
        let topic = read_topic(info)?;
        topics.insert(Arc::clone(&topic.name), Arc::new(topic));
    }
    Ok(topics)
}

fn read_topic(info: &v1::TopicInfo) -> Result<Topic> {
    let bad = |what: &str| {
        Error::new(
            ErrorKind::Protocol,
            format!("the broker's metadata of topic {:?} {what}", info.name),
        )
    };
    let id = TopicId::from_wire(&info.topic_id).ok_or_else(|| bad("lacks a topic id"))?;
    let mut leaders = vec![None; info.partitions.len()];
    let mut voters = vec![Vec::new(); info.partitions.len()];
    let mut seen = vec![false; info.partitions.len()];
    for partition in &info.partitions {
        let at = usize::try_from(partition.partition).unwrap_or(usize::MAX);
        let (Some(leader), Some(seen)) = (leaders.get_mut(at), seen.get_mut(at)) else {
            return Err(bad("skips partitions"));
        };
        if std::mem::replace(seen, true) {
            return Err(bad("names a partition twice"));
        }
        if let Some(voters) = voters.get_mut(at) {
            *voters = read_voters(partition);
        }
        if partition.leader != 0 {
            *leader = Some(Leader {
                broker: BrokerId(partition.leader),
                epoch: partition.leader_epoch,
            });
        }
    }
    Ok(Topic {
        name: info.name.as_str().into(),
        id,
        internal: info.internal,
        leaders,
        voters,
    })
}

fn read_voters(partition: &v1::PartitionInfo) -> Vec<BrokerId> {
    let voters = partition
        .replicas
        .iter()
        .filter(|replica| replica.role() == v1::ReplicaRole::Voter);
    voters.map(|replica| BrokerId(replica.broker_id)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster() -> ClusterId {
        ClusterId(uuid::Uuid::from_u128(7))
    }

    fn topic_id(n: u128) -> TopicId {
        TopicId(uuid::Uuid::from_u128(n))
    }

    /// Name, id, and leader with epoch per partition.
    type TopicSketch<'a> = (&'a str, u128, &'a [(u64, u64)]);

    fn response(index: u64, topics: &[TopicSketch<'_>]) -> v1::MetadataResponse {
        v1::MetadataResponse {
            cluster_id: cluster().to_wire(),
            cluster_index: index,
            brokers: (1..=3)
                .map(|broker_id| v1::BrokerInfo {
                    broker_id,
                    ..Default::default()
                })
                .collect(),
            topics: topics
                .iter()
                .map(|(name, id, leaders)| v1::TopicInfo {
                    name: (*name).to_owned(),
                    topic_id: topic_id(*id).to_wire(),
                    partitions: (0..)
                        .zip(*leaders)
                        .map(|(partition, &(leader, leader_epoch))| v1::PartitionInfo {
                            partition,
                            leader,
                            leader_epoch,
                            replicas: Vec::new(),
                        })
                        .collect(),
                    ..Default::default()
                })
                .collect(),
            ..Default::default()
        }
    }

    fn view(response: &v1::MetadataResponse) -> Metadata {
        Metadata::default().merged(response).unwrap().unwrap()
    }

    fn leader(metadata: &Metadata, name: &str) -> Option<(u64, u64)> {
        metadata
            .topic(name)?
            .leader(0)
            .map(|l| (l.broker.0, l.epoch))
    }

    #[test]
    fn s28_older_index_is_ignored_but_for_newer_leaders() {
        let now = view(&response(10, &[("a", 1, &[(1, 5)]), ("b", 2, &[(1, 5)])]));
        let older = response(9, &[("a", 1, &[(2, 6)]), ("gone", 3, &[(1, 1)])]);
        let next = now.merged(&older).unwrap().unwrap();
        assert_eq!(next.cluster_index, 10);
        assert_eq!(leader(&next, "a"), Some((2, 6)));
        assert!(next.topic("b").is_some());
        assert!(next.topic("gone").is_none());
        let stale = response(9, &[("a", 1, &[(3, 4)])]);
        assert_eq!(next.merged(&stale).unwrap(), None);
    }

    #[test]
    fn s28_newer_index_keeps_leaders_of_newer_epochs() {
        let now = view(&response(10, &[("a", 1, &[(2, 6)])]));
        let newer = response(11, &[("a", 1, &[(1, 5)])]);
        let next = now.merged(&newer).unwrap().unwrap();
        assert_eq!((next.cluster_index, leader(&next, "a")), (11, Some((2, 6))));
        let unknown = response(12, &[("a", 1, &[(0, 0)])]);
        assert_eq!(
            leader(&next.merged(&unknown).unwrap().unwrap(), "a"),
            Some((2, 6))
        );
    }

    #[test]
    fn s28_new_incarnation_does_not_inherit_leaders() {
        let now = view(&response(10, &[("a", 1, &[(2, 60)])]));
        let next = now
            .merged(&response(12, &[("a", 9, &[(1, 1)])]))
            .unwrap()
            .unwrap();
        assert_eq!(leader(&next, "a"), Some((1, 1)));
        assert!(next.topic_by_id("a", topic_id(1)).is_none());
    }

    #[test]
    fn s28_other_cluster_is_refused() {
        let now = view(&response(10, &[]));
        let mut other = response(99, &[]);
        other.cluster_id = ClusterId(uuid::Uuid::from_u128(8)).to_wire();
        assert_eq!(
            now.merged(&other).unwrap_err().kind(),
            ErrorKind::WrongCluster
        );
        other.cluster_id = Default::default();
        assert_eq!(now.merged(&other).unwrap_err().kind(), ErrorKind::NotReady);
    }

    #[test]
    fn hint_is_taken_only_with_a_newer_epoch() {
        let now = view(&response(10, &[("a", 1, &[(1, 5)])]));
        let hint = |broker_id, leader_epoch| v1::LeaderHint {
            broker_id,
            leader_epoch,
            address: "h:1".to_owned(),
        };
        for stale in [hint(2, 5), hint(2, 4), hint(0, 9)] {
            assert_eq!(now.with_hint("a", topic_id(1), 0, &stale), None);
        }
        assert_eq!(now.with_hint("a", topic_id(2), 0, &hint(2, 6)), None);
        assert_eq!(now.with_hint("a", topic_id(1), 1, &hint(2, 6)), None);
        let next = now.with_hint("a", topic_id(1), 0, &hint(4, 6)).unwrap();
        assert_eq!(leader(&next, "a"), Some((4, 6)));
        assert_eq!(next.address(BrokerId(4)).map(|a| &**a), Some("h:1"));
    }

    #[test]
    fn hint_to_a_broker_that_no_view_knows_ends_with_the_next_view() {
        let now = view(&response(10, &[("a", 1, &[(1, 5)])]));
        let hint = |address: &str| v1::LeaderHint {
            broker_id: 4711,
            leader_epoch: 6,
            address: address.to_owned(),
        };
        assert_eq!(now.with_hint("a", topic_id(1), 0, &hint("")), None);
        let misled = now.with_hint("a", topic_id(1), 0, &hint("h:1")).unwrap();
        assert_eq!(leader(&misled, "a"), Some((4711, 6)));
        // Of the same index, as nothing has happened.
        let shown = response(10, &[("a", 1, &[(1, 5)])]);
        let next = misled.merged(&shown).unwrap().unwrap();
        assert_eq!(leader(&next, "a"), Some((1, 5)));
    }

    #[test]
    fn hint_tells_where_a_known_leader_is_only_as_long_as_no_view_does() {
        let hint = |address: &str| v1::LeaderHint {
            broker_id: 9,
            leader_epoch: 6,
            address: address.to_owned(),
        };
        let nowhere = view(&response(10, &[("a", 1, &[(9, 6)])]));
        assert_eq!(nowhere.with_hint("a", topic_id(1), 0, &hint("")), None);
        let found = nowhere
            .with_hint("a", topic_id(1), 0, &hint("h9:1"))
            .unwrap();
        assert!(found.address(BrokerId(9)).is_some());
        assert_eq!(found.with_hint("a", topic_id(1), 0, &hint("x:1")), None);
        let mut told = response(12, &[("a", 1, &[(9, 6)])]);
        told.brokers.push(v1::BrokerInfo {
            broker_id: 9,
            address: "moved:1".to_owned(),
            ..Default::default()
        });
        let told = found.merged(&told).unwrap().unwrap();
        assert_eq!(told.address(BrokerId(9)).map(|a| &**a), Some("moved:1"));
    }

    proptest::proptest! {
        /// S28: whatever order answers and hints come in, nothing goes back.
        #[test]
        fn s28_view_never_goes_back(
            steps in proptest::collection::vec(
                (proptest::bool::ANY, 0_u64..6, 1_u128..3, 1_u64..4, 0_u64..6),
                1..60,
            )
        ) {
            let mut now = Metadata::default();
            let mut seen: std::collections::BTreeMap<TopicId, u64> = Default::default();
            for (is_hint, index, incarnation, broker, epoch) in steps {
                let next = if is_hint {
                    let hint = v1::LeaderHint {
                        broker_id: broker,
                        leader_epoch: epoch,
                        address: "h:1".to_owned(),
                    };
                    now.with_hint("a", topic_id(incarnation), 0, &hint)
                } else {
                    // An incarnation belongs to its range of indexes.
                    let incarnation = 1 + u128::from(index / 3);
                    now.merged(&response(index, &[("a", incarnation, &[(broker, epoch)])]))
                        .unwrap()
                };
                let Some(next) = next else { continue };
                proptest::prop_assert!(next.cluster_index >= now.cluster_index);
                proptest::prop_assert_eq!(next.cluster_id.or(now.cluster_id), next.cluster_id);
                if let Some(topic) = next.topic("a") {
                    let epoch = topic.leader(0).map_or(0, |leader| leader.epoch);
                    let highest = seen.entry(topic.id).or_default();
                    proptest::prop_assert!(epoch >= *highest, "{} after {}", epoch, highest);
                    *highest = epoch;
                    proptest::prop_assert_eq!(
                        topic.id,
                        topic_id(1 + u128::from(next.cluster_index / 3))
                    );
                }
                now = next;
            }
        }
    }

    #[test]
    fn metadata_with_holes_in_its_partitions_is_refused() {
        let mut broken = response(1, &[("a", 1, &[(1, 1), (1, 1)])]);
        broken.topics[0].partitions[1].partition = 2;
        assert!(Metadata::default().merged(&broken).is_err());
        broken.topics[0].partitions[1].partition = 0;
        assert!(Metadata::default().merged(&broken).is_err());
    }
}
