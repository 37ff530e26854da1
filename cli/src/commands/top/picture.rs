//! What two looks at the cluster say. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use qute_client::{BrokerDescription, BrokerId, BrokerState, TopicDescription, TopicId};
use serde::Serialize;
use tokio::time::Instant;

/// A partition of a topic's incarnation.
pub type PartitionKey = (TopicId, u32);

/// Log start offset and high watermark of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// First readable offset.
    pub log_start_offset: u64,
    /// One past the last committed offset.
    pub high_watermark: u64,
}

/// A group, as one look sees it.
#[derive(Clone, Debug, Default)]
pub struct GroupSample {
    /// `stable`, `rebalancing` or `empty`.
    pub state: String,
    /// How many members it has.
    pub members: u64,
    /// When its offsets were told, which may be before the look; `None`: not yet.
    pub told_at: Option<Instant>,
    /// Committed offsets.
    pub offsets: BTreeMap<PartitionKey, u64>,
}

/// One look at the cluster.
#[derive(Clone, Debug)]
pub struct Sample {
    /// When it was complete.
    pub at: Instant,
    /// Id of the cluster.
    pub cluster: Option<String>,
    /// Leader of `__cluster`.
    pub controller: Option<BrokerId>,
    /// All brokers, by id.
    pub brokers: Vec<BrokerDescription>,
    /// All topics, by name.
    pub topics: Vec<TopicDescription>,
    /// Where the leader told.
    pub ends: BTreeMap<PartitionKey, Ends>,
    /// By name.
    pub groups: BTreeMap<String, GroupSample>,
    /// What could not be found out, and what needs a human.
    pub trouble: Vec<String>,
}

/// What is shown. A figure that is not known is absent.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Picture {
    /// Id of the cluster.
    pub cluster: Option<String>,
    /// Records written a second.
    pub in_per_s: Option<f64>,
    /// Offsets committed by groups a second.
    pub out_per_s: Option<f64>,
    /// The brokers.
    pub brokers: Vec<BrokerRow>,
    /// The topics.
    pub topics: Vec<TopicRow>,
    /// The groups.
    pub groups: Vec<GroupRow>,
    /// What could not be found out, and what needs a human.
    pub trouble: Vec<String>,
}

/// A broker.
#[derive(Clone, Debug, Serialize)]
pub struct BrokerRow {
    /// Broker id.
    pub id: String,
    /// Its name for people.
    pub name: String,
    /// `alive`, `suspect`, `dead` or `draining`.
    pub state: String,
    /// Partitions that it leads.
    pub leads: usize,
    /// Replicas that it holds.
    pub replicas: usize,
    /// It leads `__cluster`.
    pub controller: bool,
    /// Where clients reach it.
    pub address: String,
    /// Its rack; empty if it has none.
    pub rack: String,
}

/// A topic.
#[derive(Clone, Debug, Serialize)]
pub struct TopicRow {
    /// Name.
    pub name: String,
    /// Partitions.
    pub partitions: usize,
    /// Partitions without a leader.
    pub leaderless: usize,
    /// Records that it holds, as far as leaders told.
    pub records: Option<u64>,
    /// Records written a second.
    pub in_per_s: Option<f64>,
    /// Offsets committed by groups a second, over all groups.
    pub out_per_s: Option<f64>,
}

/// A group.
#[derive(Clone, Debug, Serialize)]
pub struct GroupRow {
    /// Name.
    pub name: String,
    /// `stable`, `rebalancing` or `empty`.
    pub state: String,
    /// Members.
    pub members: u64,
    /// Partitions with a committed offset.
    pub partitions: usize,
    /// Records between the committed offsets and the ends; absent while an end is not known.
    pub lag: Option<u64>,
    /// Offsets committed a second.
    pub out_per_s: Option<f64>,
}

impl Picture {
    /// The picture at `now`, with rates since `before`.
    #[must_use]
    pub fn between(before: Option<&Sample>, now: &Sample) -> Self {
        let written = before.map(|before| written(before, now));
        let committed = committed(before, now);
        let here: BTreeSet<TopicId> = now.topics.iter().map(|topic| topic.id).collect();
        let groups = now.groups.iter().map(|(name, group)| {
            let rates = committed.get(name.as_str());
            group_row(name, group, now, &here, rates)
        });
        let groups: Vec<_> = groups.collect();
        let mut out_of: BTreeMap<TopicId, f64> = BTreeMap::new();
        for (topic, rate) in committed.values().flatten() {
            *out_of.entry(*topic).or_default() += rate;
        }
        let topics = now.topics.iter().map(|topic| {
            let into = written
                .as_ref()
                .and_then(|written| written.get(&topic.id).copied());
            topic_row(topic, now, into, out_of.get(&topic.id).copied())
        });
        let topics: Vec<_> = topics.collect();
        Self {
            cluster: now.cluster.clone(),
            in_per_s: total(topics.iter().map(|topic| topic.in_per_s)),
            out_per_s: total(groups.iter().map(|group| group.out_per_s)),
            brokers: broker_rows(now),
            topics,
            groups,
            trouble: now.trouble.clone(),
        }
    }

    /// Brokers that are alive.
    #[must_use]
    pub fn brokers_alive(&self) -> usize {
        let alive = BrokerState::Alive.to_string();
        let alive = self.brokers.iter().filter(|broker| broker.state == alive);
        alive.count()
    }
}

/// The sum of what is known; `None` if nothing is.
fn total(rates: impl Iterator<Item = Option<f64>>) -> Option<f64> {
    rates.flatten().fold(None, |sum: Option<f64>, rate| {
        Some(sum.unwrap_or(0.0) + rate)
    })
}

/// A count over a time, each second. Nothing can be said of no time.
#[allow(clippy::cast_precision_loss)]
fn rate(count: u64, time: Duration) -> Option<f64> {
    (!time.is_zero()).then(|| count as f64 / time.as_secs_f64())
}

/// Records written a second, by topic. A partition counts if both looks know its end.
fn written(before: &Sample, now: &Sample) -> BTreeMap<TopicId, f64> {
    let time = now.at.saturating_duration_since(before.at);
    let mut counts: BTreeMap<TopicId, u64> = BTreeMap::new();
    for (key, ends) in &now.ends {
        if let Some(old) = before.ends.get(key) {
            // An end that went back is a leader that does not know yet: nothing was written.
            let count = ends.high_watermark.saturating_sub(old.high_watermark);
            *counts.entry(key.0).or_default() += count;
        }
    }
    let rates = counts.into_iter();
    rates
        .filter_map(|(topic, count)| rate(count, time).map(|rate| (topic, rate)))
        .collect()
}

/// Offsets committed a second, by group and topic. A group is in it if it was told about twice.
fn committed<'a>(
    before: Option<&Sample>,
    now: &'a Sample,
) -> BTreeMap<&'a str, BTreeMap<TopicId, f64>> {
    let mut rates = BTreeMap::new();
    for (name, group) in &now.groups {
        let old = before.and_then(|before| before.groups.get(name));
        let Some((old, (then, told))) =
            old.and_then(|old| Some((old, old.told_at.zip(group.told_at)?)))
        else {
            continue;
        };
        let time = told.saturating_duration_since(then);
        let mut counts: BTreeMap<TopicId, u64> = BTreeMap::new();
        for (key, offset) in &group.offsets {
            if let Some(from) = old.offsets.get(key) {
                // A reset to an earlier offset is nothing read.
                *counts.entry(key.0).or_default() += offset.saturating_sub(*from);
            }
        }
        // Told before the look before this one: nothing new is known.
        if time.is_zero() {
            continue;
        }
        let by_topic = counts.into_iter();
        let by_topic = by_topic.filter_map(|(topic, count)| Some((topic, rate(count, time)?)));
        rates.insert(name.as_str(), by_topic.collect());
    }
    rates
}

fn group_row(
    name: &str,
    group: &GroupSample,
    now: &Sample,
    here: &BTreeSet<TopicId>,
    rates: Option<&BTreeMap<TopicId, f64>>,
) -> GroupRow {
    let mut lag = group.told_at.map(|_| 0_u64);
    // Offsets of a topic that is gone are behind nothing.
    let offsets = group
        .offsets
        .iter()
        .filter(|(key, _)| here.contains(&key.0));
    for (key, offset) in offsets {
        let end = now.ends.get(key).map(|ends| ends.high_watermark);
        lag = lag
            .zip(end)
            .map(|(lag, end)| lag.saturating_add(end.saturating_sub(*offset)));
    }
    GroupRow {
        name: name.to_owned(),
        state: group.state.clone(),
        members: group.members,
        partitions: group.offsets.len(),
        lag,
        out_per_s: rates.map(|rates| rates.values().sum()),
    }
}

fn topic_row(
    topic: &TopicDescription,
    now: &Sample,
    in_per_s: Option<f64>,
    out_per_s: Option<f64>,
) -> TopicRow {
    let ends = topic.partitions.iter().filter_map(|partition| {
        let ends = now.ends.get(&(topic.id, partition.partition))?;
        Some(ends.high_watermark.saturating_sub(ends.log_start_offset))
    });
    TopicRow {
        name: topic.name.clone(),
        partitions: topic.partitions.len(),
        leaderless: topic
            .partitions
            .iter()
            .filter(|partition| partition.leader.is_none())
            .count(),
        records: ends.fold(None, |sum: Option<u64>, records| {
            Some(sum.unwrap_or(0).saturating_add(records))
        }),
        in_per_s,
        out_per_s,
    }
}

fn broker_rows(now: &Sample) -> Vec<BrokerRow> {
    let mut leads: BTreeMap<BrokerId, usize> = BTreeMap::new();
    let mut replicas: BTreeMap<BrokerId, usize> = BTreeMap::new();
    for partition in now.topics.iter().flat_map(|topic| &topic.partitions) {
        if let Some(leader) = partition.leader {
            *leads.entry(leader).or_default() += 1;
        }
        for replica in &partition.replicas {
            *replicas.entry(replica.broker).or_default() += 1;
        }
    }
    let row = |broker: &BrokerDescription| BrokerRow {
        id: broker.id.to_string(),
        name: broker.name.clone(),
        state: broker.state.to_string(),
        leads: leads.get(&broker.id).copied().unwrap_or(0),
        replicas: replicas.get(&broker.id).copied().unwrap_or(0),
        controller: now.controller == Some(broker.id),
        address: broker.address.clone(),
        rack: broker.rack.clone(),
    };
    now.brokers.iter().map(row).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use qute_client::{PartitionDescription, ReplicaDescription, ReplicaRole};

    use super::*;

    pub fn id(number: u8) -> TopicId {
        TopicId::from_wire(&[number; 16]).unwrap()
    }

    fn partition(number: u32, leader: Option<u64>) -> PartitionDescription {
        PartitionDescription {
            partition: number,
            leader: leader.map(BrokerId),
            leader_epoch: 1,
            log_start_offset: None,
            high_watermark: None,
            replicas: vec![ReplicaDescription {
                broker: BrokerId(1),
                address: None,
                role: ReplicaRole::Voter,
            }],
        }
    }

    pub fn sample(at: Instant) -> Sample {
        let broker = |id: u64, state| BrokerDescription {
            id: BrokerId(id),
            name: format!("broker-{id}"),
            address: format!("h:{id}"),
            rack: String::new(),
            state,
        };
        Sample {
            at,
            cluster: Some("c".to_owned()),
            controller: Some(BrokerId(1)),
            brokers: vec![broker(1, BrokerState::Alive), broker(2, BrokerState::Dead)],
            topics: vec![TopicDescription {
                name: "orders".to_owned(),
                id: id(1),
                partitions: vec![partition(0, Some(1)), partition(1, None)],
                config: BTreeMap::new(),
            }],
            ends: BTreeMap::new(),
            groups: BTreeMap::new(),
            trouble: Vec::new(),
        }
    }

    fn ends(log_start_offset: u64, high_watermark: u64) -> Ends {
        Ends {
            log_start_offset,
            high_watermark,
        }
    }

    fn group(told_at: Option<Instant>, offsets: &[(PartitionKey, u64)]) -> GroupSample {
        GroupSample {
            state: "stable".to_owned(),
            members: 2,
            told_at,
            offsets: offsets.iter().copied().collect(),
        }
    }

    /// Two looks, two seconds apart.
    fn looks() -> (Sample, Sample) {
        let at = Instant::now();
        (sample(at), sample(at + Duration::from_secs(2)))
    }

    #[test]
    fn rate_of_a_topic_is_how_far_its_ends_have_moved_a_second() {
        let (mut before, mut now) = looks();
        before.ends = [((id(1), 0), ends(0, 10)), ((id(1), 1), ends(0, 50))].into();
        now.ends = [((id(1), 0), ends(5, 30)), ((id(1), 1), ends(0, 50))].into();
        let picture = Picture::between(Some(&before), &now);
        assert_eq!(picture.topics[0].in_per_s, Some(10.0));
        assert_eq!(picture.topics[0].records, Some(75));
        assert_eq!(picture.in_per_s, Some(10.0));
    }

    #[test]
    fn rate_that_cannot_be_known_is_absent_and_never_negative() {
        let (mut before, mut now) = looks();
        now.ends = [((id(1), 0), ends(0, 30))].into();
        assert_eq!(Picture::between(None, &now).topics[0].in_per_s, None);
        // A partition that was not told before says nothing.
        assert_eq!(Picture::between(Some(&before), &now).in_per_s, None);
        before.ends = [((id(1), 0), ends(0, 31))].into();
        assert_eq!(Picture::between(Some(&before), &now).in_per_s, Some(0.0));
        // Made again under the same name: another topic.
        before.ends = [((id(9), 0), ends(0, 1))].into();
        assert_eq!(Picture::between(Some(&before), &now).in_per_s, None);
        assert_eq!(Picture::between(Some(&now), &now).in_per_s, None, "no time");
    }

    #[test]
    fn lag_of_a_group_is_what_lies_between_its_offsets_and_the_ends() {
        let (mut before, mut now) = looks();
        now.ends = [((id(1), 0), ends(0, 100)), ((id(1), 1), ends(0, 7))].into();
        let (then, told) = (Some(before.at), Some(now.at));
        before.groups = [("g".to_owned(), group(then, &[((id(1), 0), 40)]))].into();
        let offsets = [((id(1), 0), 90), ((id(1), 1), 7), ((id(9), 0), 3)];
        now.groups = [("g".to_owned(), group(told, &offsets))].into();
        let picture = Picture::between(Some(&before), &now);
        assert_eq!(
            picture.groups[0].lag,
            Some(10),
            "a topic that is gone counts nothing"
        );
        assert_eq!(picture.groups[0].out_per_s, Some(25.0));
        assert_eq!(picture.topics[0].out_per_s, Some(25.0));
        // Without one of the ends the lag is not known.
        now.ends.remove(&(id(1), 1));
        assert_eq!(Picture::between(Some(&before), &now).groups[0].lag, None);
    }

    #[test]
    fn group_whose_offsets_were_not_told_anew_has_no_rate() {
        let (mut before, mut now) = looks();
        let at = Some(before.at);
        before.groups = [("g".to_owned(), group(at, &[((id(1), 0), 40)]))].into();
        now.groups = before.groups.clone();
        let picture = Picture::between(Some(&before), &now);
        assert_eq!(picture.groups[0].out_per_s, None);
        now.groups = [("g".to_owned(), group(None, &[]))].into();
        let picture = Picture::between(Some(&before), &now);
        assert_eq!(picture.groups[0].lag, None);
    }

    #[test]
    fn brokers_are_shown_with_what_they_lead_and_hold() {
        let (_, now) = looks();
        let picture = Picture::between(None, &now);
        let row = |place: usize| {
            let broker = &picture.brokers[place];
            (broker.leads, broker.replicas, broker.controller)
        };
        assert_eq!(row(0), (1, 2, true));
        assert_eq!(row(1), (0, 0, false));
        assert_eq!(picture.brokers_alive(), 1);
        assert_eq!(picture.topics[0].leaderless, 1);
    }
}
