//! Assignments as they travel.

use std::collections::{BTreeMap, BTreeSet};

use qute_proto::ids::{MemberId, PartitionId, TopicId};
use qute_proto::v1;

use super::{AssignInput, AssignMember, Assignment, Assignor};
use crate::error::{Error, ErrorKind, Result};
use crate::metadata::Metadata;

/// How members name an assignor to the coordinator.
pub(crate) fn version_of(assignor: &dyn Assignor) -> v1::AssignorVersion {
    v1::AssignorVersion {
        name: assignor.name().to_owned(),
        version: assignor.version(),
    }
}

impl AssignInput {
    /// What the coordinator asks for, with the racks that the view knows of.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`]: ids that are none.
    pub(crate) fn told(task: &v1::AssignTask, view: &Metadata) -> Result<Self> {
        let members = task.members.iter().map(AssignMember::told);
        let mut input = Self::new(members.collect::<Result<_>>()?);
        let members = input.members.iter();
        let read: BTreeSet<TopicId> = members.flat_map(|it| it.topics.keys().copied()).collect();
        let topics = view.topics.values().filter(|it| read.contains(&it.id));
        let racks_of = |voters: &[crate::BrokerId]| {
            let brokers = voters.iter().filter_map(|id| view.brokers.get(id));
            let racks = brokers.map(|broker| broker.rack.clone());
            racks.filter(|rack| !rack.is_empty()).collect()
        };
        input.racks = topics
            .map(|topic| {
                let voters = topic.voters.iter();
                (topic.id, voters.map(|voters| racks_of(voters)).collect())
            })
            .collect();
        Ok(input)
    }
}

impl AssignMember {
    fn told(member: &v1::GroupMember) -> Result<Self> {
        let id = MemberId::from_wire(&member.member_id).ok_or_else(|| bad("a member"))?;
        let mut read = Self::new(id);
        read.instance = (!member.instance.is_empty()).then(|| member.instance.clone());
        read.rack.clone_from(&member.rack);
        for topic in &member.topics {
            let id = TopicId::from_wire(&topic.topic_id).ok_or_else(|| bad("a topic"))?;
            read.topics.insert(id, topic.partitions);
        }
        read.targets = partitions_told(&member.targets)?;
        read.claims = partitions_told(&member.claims)?;
        Ok(read)
    }
}

/// Partitions of many topics, in the order in which they came.
pub(crate) fn partitions_told(told: &[v1::TopicPartitions]) -> Result<Vec<PartitionId>> {
    let mut partitions = Vec::new();
    for told in told {
        let topic = TopicId::from_wire(&told.topic_id).ok_or_else(|| bad("a topic"))?;
        let numbers = told.partitions.iter();
        partitions.extend(numbers.map(|&partition| PartitionId { topic, partition }));
    }
    Ok(partitions)
}

fn bad(what: &str) -> Error {
    let message = format!("the coordinator named {what} by something that is no id");
    Error::new(ErrorKind::Protocol, message)
}

impl Assignment {
    /// What to publish: all members that get something, each with its partitions.
    pub(crate) fn to_wire(&self) -> Vec<v1::MemberAssignment> {
        let mut members = BTreeMap::<MemberId, BTreeMap<TopicId, Vec<u32>>>::new();
        for (&PartitionId { topic, partition }, &owner) in &self.owners {
            let topics = members.entry(owner).or_default();
            topics.entry(topic).or_default().push(partition);
        }
        let tell = |(topic, partitions): (TopicId, Vec<u32>)| v1::TopicPartitions {
            topic_id: topic.to_wire(),
            partitions,
        };
        members
            .into_iter()
            .map(|(member, topics)| v1::MemberAssignment {
                member_id: member.to_wire(),
                partitions: topics.into_iter().map(tell).collect(),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use qute_proto::ids::BrokerId;

    use super::*;
    use crate::metadata::{Broker, Topic};

    fn topic(n: u128) -> TopicId {
        TopicId(uuid::Uuid::from_u128(n))
    }

    fn member(n: u128) -> MemberId {
        MemberId(uuid::Uuid::from_u128(n))
    }

    fn view() -> Metadata {
        let broker = |n: u64, rack: &str| Broker {
            id: BrokerId(n),
            name: "".into(),
            address: "h:1".into(),
            rack: rack.to_owned(),
            state: v1::BrokerState::Alive,
        };
        let named = |name: &str, n: u128| {
            let topic = Topic {
                name: name.into(),
                id: topic(n),
                internal: false,
                leaders: vec![None; 2],
                voters: vec![vec![BrokerId(1), BrokerId(2)], vec![BrokerId(3)]],
            };
            (Arc::from(name), Arc::new(topic))
        };
        Metadata {
            brokers: [broker(1, "a"), broker(2, "b"), broker(3, "")]
                .map(|broker| (broker.id, broker))
                .into(),
            topics: [named("read", 1), named("not-read", 2)].into(),
            ..Metadata::default()
        }
    }

    fn partitions(n: u128, partitions: &[u32]) -> v1::TopicPartitions {
        v1::TopicPartitions {
            topic_id: topic(n).to_wire(),
            partitions: partitions.to_vec(),
        }
    }

    #[test]
    fn task_is_read_with_the_racks_of_the_topics_that_members_read() {
        let task = v1::AssignTask {
            generation: 3,
            assignor: None,
            members: vec![v1::GroupMember {
                member_id: member(9).to_wire(),
                instance: "worker-1".to_owned(),
                rack: "a".to_owned(),
                topics: vec![v1::TopicSubscription {
                    topic_id: topic(1).to_wire(),
                    partitions: 2,
                }],
                targets: vec![partitions(1, &[0, 1])],
                claims: vec![partitions(1, &[1])],
                ..Default::default()
            }],
        };
        let input = AssignInput::told(&task, &view()).unwrap();
        let read = &input.members[0];
        assert_eq!(
            (read.instance.as_deref(), &*read.rack),
            (Some("worker-1"), "a")
        );
        assert_eq!((read.targets.len(), read.claims.len()), (2, 1));
        let racks: Vec<Vec<_>> = input.racks[&topic(1)]
            .iter()
            .map(|racks| racks.iter().map(String::as_str).collect())
            .collect();
        assert_eq!(racks, [vec!["a", "b"], vec![]]);
        assert_eq!(input.racks.len(), 1);
    }

    #[test]
    fn task_with_ids_that_are_none_is_refused() {
        let mut task = v1::AssignTask {
            members: vec![v1::GroupMember::default()],
            ..Default::default()
        };
        let refused = |task: &v1::AssignTask| AssignInput::told(task, &view()).unwrap_err().kind();
        assert_eq!(refused(&task), ErrorKind::Protocol);
        task.members[0].member_id = member(1).to_wire();
        task.members[0].claims = vec![v1::TopicPartitions::default()];
        assert_eq!(refused(&task), ErrorKind::Protocol);
    }

    #[test]
    fn assignment_travels_by_member_and_topic() {
        let mut assignment = Assignment::default();
        for (owner, n, number) in [(1, 1, 0), (1, 1, 1), (1, 2, 0), (2, 1, 2)] {
            let topic = topic(n);
            assignment.give(
                member(owner),
                PartitionId {
                    topic,
                    partition: number,
                },
            );
        }
        let wire = assignment.to_wire();
        assert_eq!(wire.len(), 2);
        assert_eq!(
            wire[0].partitions,
            [partitions(1, &[0, 1]), partitions(2, &[0])]
        );
        assert_eq!(
            partitions_told(&wire[0].partitions).unwrap(),
            assignment.of(member(1)).collect::<Vec<_>>()
        );
    }
}
