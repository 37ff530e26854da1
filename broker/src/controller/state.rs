//! The `__cluster` state machine: what the cluster has decided.
//!
//! Pure and deterministic: the state is a function of the log prefix alone (S13), so every
//! broker that has applied the same index holds the same state. Rules kept here:
//!
//! - S9: replica ids are handed out by counters that only rise, and never again.
//! - S10: the first placement of a partition never changes.
//! - S16: a placement carries a version that rises with each change.
//! - S22: a replica may be deleted only once its tombstone is in this state.
//! - S23: a broker registers with a start counter that rises; an equal or older one from
//!   another process is refused.
//!
//! A command is either applied whole or refused whole; a refusal is a reply, not an error.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use prost::Message as _;
use qute_proto::ids::{BrokerId, ClusterId, PartitionId, ReplicaId, TopicId};
use qute_proto::internal::{
    self, BrokerAddress, BrokerEntry, ClusterCommand, CommandReply, FoundCluster, FoundingSet,
    cluster_command::Command,
};
use qute_proto::topic;
use qute_proto::v1::ErrorCode;
use tokio::sync::watch;

use super::placement::{self, PARTITIONS_MAX};
use super::settings::TopicSettings;
use crate::raft;

use super::view::{Assignment, Broker, ClusterView, Placement, Tombstone, Topic};

/// A checkpoint that can't be read: written by a newer version, or damaged.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// Not the bytes of a checkpoint.
    #[error("checkpoint of __cluster is not readable: {0}")]
    Decode(#[from] prost::DecodeError),
    /// An id of the wrong length.
    #[error("checkpoint of __cluster holds a malformed {0}")]
    Malformed(&'static str),
}

struct Refusal {
    code: ErrorCode,
    message: String,
}

fn refuse<T>(code: ErrorCode, message: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal {
        code,
        message: message.into(),
    })
}

fn invalid(message: &str) -> Refusal {
    Refusal {
        code: ErrorCode::InvalidArgument,
        message: message.to_owned(),
    }
}

/// The state machine. Publishes its state after each entry.
#[derive(Debug)]
pub struct ClusterState {
    view: Arc<ClusterView>,
    /// As founded; kept whole for the checkpoint.
    founding: Option<FoundingSet>,
    /// S9: next replica id of any topic partition.
    next_replica: u64,
    /// S9: next replica id of `__cluster` itself.
    next_cluster_replica: u64,
    published: watch::Sender<Arc<ClusterView>>,
}

impl ClusterState {
    /// The state before the first entry, and where its pictures will appear.
    #[must_use]
    pub fn new() -> (Self, watch::Receiver<Arc<ClusterView>>) {
        let (published, watched) = watch::channel(Arc::default());
        let state = Self {
            view: Arc::default(),
            founding: None,
            next_replica: 1,
            next_cluster_replica: 1,
            published,
        };
        (state, watched)
    }

    /// The present picture.
    #[must_use]
    pub fn view(&self) -> &Arc<ClusterView> {
        &self.view
    }

    /// Notes an entry that carries no command (blank, membership).
    pub fn advance(&mut self, index: u64) {
        self.edit().index = index;
        self.publish();
    }

    /// Applies one encoded [`ClusterCommand`].
    pub fn apply_command(&mut self, index: u64, command: &[u8]) -> CommandReply {
        let result = match ClusterCommand::decode(command) {
            Ok(ClusterCommand {
                command: Some(command),
            }) => self.execute(command),
            // A command of a later version: S25 keeps it from being proposed before every
            // broker knows it, so every broker refuses it alike.
            Ok(ClusterCommand { command: None }) => {
                refuse(ErrorCode::InvalidArgument, "unknown command")
            }
            Err(error) => refuse(ErrorCode::InvalidArgument, error.to_string()),
        };
        self.edit().index = index;
        self.publish();
        match result {
            Ok(replica) => CommandReply {
                replica_id: replica.map_or(0, |id| id.0),
                ..CommandReply::default()
            },
            Err(refusal) => CommandReply {
                refused: refusal.message,
                code: refusal.code.into(),
                replica_id: 0,
            },
        }
    }

    fn edit(&mut self) -> &mut ClusterView {
        Arc::make_mut(&mut self.view)
    }

    fn publish(&self) {
        self.published.send_replace(Arc::clone(&self.view));
    }

    fn execute(&mut self, command: Command) -> Result<Option<ReplicaId>, Refusal> {
        match command {
            Command::Found(found) => self.found(found).map(|()| None),
            Command::RegisterBroker(register) => self
                .register(register.broker.unwrap_or_default())
                .map(|()| None),
            Command::AdmitBroker(admit) => self.admit(admit.broker.unwrap_or_default()).map(Some),
            Command::CreateTopic(create) => self.create_topic(create).map(|()| None),
            Command::AddPartitions(add) => self.add_partitions(&add).map(|()| None),
            Command::AlterTopic(alter) => self.alter_topic(alter).map(|()| None),
            Command::DeleteTopic(delete) => self.delete_topic(&delete).map(|()| None),
            Command::PartitionsBorn(born) => {
                self.partitions_born(&born);
                Ok(None)
            }
            Command::ReplicasDeleted(deleted) => {
                for replica in &deleted.replicas {
                    self.edit()
                        .tombstones
                        .remove(&ReplicaId(replica.replica_id));
                }
                Ok(None)
            }
        }
    }

    /// The first command. Each founder may propose it; the same one again changes nothing.
    fn found(&mut self, found: FoundCluster) -> Result<(), Refusal> {
        let set = found.set.unwrap_or_default();
        let Some(cluster_id) = ClusterId::from_wire(&set.cluster_id) else {
            return refuse(ErrorCode::InvalidArgument, "the cluster id is not 16 bytes");
        };
        if let Some(present) = self.view.cluster_id {
            return if present == cluster_id {
                Ok(())
            } else {
                refuse(
                    ErrorCode::WrongCluster,
                    format!("this is cluster {present}, not {cluster_id}"),
                )
            };
        }
        let mut next = 1;
        let mut brokers = BTreeMap::new();
        for address in &set.brokers {
            let broker = broker_from(address, ReplicaId(next), false);
            if broker.id.0 == 0 || brokers.insert(broker.id, Arc::new(broker)).is_some() {
                return refuse(ErrorCode::InvalidArgument, "the founding set is not sound");
            }
            next += 1;
        }
        let view = self.edit();
        view.cluster_id = Some(cluster_id);
        view.groups_partitions = found.groups_partitions;
        view.founding = set.brokers.iter().map(|b| BrokerId(b.broker_id)).collect();
        view.brokers = brokers;
        self.next_cluster_replica = next;
        self.founding = Some(set);
        Ok(())
    }

    fn register(&mut self, address: BrokerAddress) -> Result<(), Refusal> {
        let id = BrokerId(address.broker_id);
        let Some(known) = self.view.brokers.get(&id) else {
            return refuse(
                ErrorCode::WrongCluster,
                format!("broker {id} is not a member of this cluster"),
            );
        };
        check_boot(known, &address)?;
        let broker = broker_from(&address, known.cluster_replica, true);
        if **known != broker {
            self.edit().brokers.insert(id, Arc::new(broker));
        }
        Ok(())
    }

    /// Lets a new broker in. Asked again before it has registered, it gives the same id: the
    /// newcomer has no `__cluster` replica before it has stored the answer.
    fn admit(&mut self, address: BrokerAddress) -> Result<ReplicaId, Refusal> {
        let id = BrokerId(address.broker_id);
        if self.view.cluster_id.is_none() {
            return refuse(ErrorCode::NotReady, "the cluster has not been founded");
        }
        if id.0 == 0 {
            return refuse(ErrorCode::InvalidArgument, "a broker id is not 0");
        }
        let replica = match self.view.brokers.get(&id) {
            // S9, S23: it has had a replica and no longer knows: an older copy of its directory.
            Some(known) if known.registered => {
                return refuse(
                    ErrorCode::InvalidArgument,
                    format!(
                        "broker {id} is already a member and its data directory does not know \
                         it: the directory was copied or rolled back; start it with an empty one"
                    ),
                );
            }
            Some(known) => {
                check_boot(known, &address)?;
                known.cluster_replica
            }
            None => {
                let replica = ReplicaId(self.next_cluster_replica);
                self.next_cluster_replica += 1;
                replica
            }
        };
        let broker = broker_from(&address, replica, false);
        self.edit().brokers.insert(id, Arc::new(broker));
        Ok(replica)
    }

    fn create_topic(&mut self, create: internal::CreateTopicCommand) -> Result<(), Refusal> {
        let Some(id) = TopicId::from_wire(&create.topic_id) else {
            return refuse(ErrorCode::InvalidArgument, "the topic id is not 16 bytes");
        };
        if self.view.topics.contains_key(&create.name) {
            return refuse(
                ErrorCode::TopicExists,
                format!("topic `{}` exists", create.name),
            );
        }
        if (id == TopicId::GROUPS) != (create.name == topic::GROUPS_NAME) {
            return Err(invalid("the name and the id of `__groups` go together"));
        }
        if id == TopicId::CLUSTER || self.view.topics_by_id.contains_key(&id) {
            return refuse(
                ErrorCode::InvalidArgument,
                format!("topic id {id} is taken"),
            );
        }
        let count = u32::try_from(create.placement.len()).unwrap_or(u32::MAX);
        if id == TopicId::GROUPS && count != self.view.groups_partitions {
            let partitions = self.view.groups_partitions;
            return Err(invalid(&format!("`__groups` has {partitions} partitions")));
        }
        if count == 0 || count > PARTITIONS_MAX {
            return refuse(
                ErrorCode::InvalidArgument,
                format!("a topic has 1 to {PARTITIONS_MAX} partitions"),
            );
        }
        let (partitions, next) = self.place(&create.placement)?;
        self.next_replica = next;
        self.put_topic(Topic {
            settings: TopicSettings::from_config(&create.config),
            name: create.name,
            id,
            config: create.config,
            partitions,
        });
        Ok(())
    }

    /// By target: proposed again, or after one that went further up, it changes nothing twice.
    fn add_partitions(&mut self, add: &internal::AddPartitionsCommand) -> Result<(), Refusal> {
        let topic = self.topic_of(&add.topic_id)?;
        refuse_internal(&topic)?;
        let present = u32::try_from(topic.partitions.len()).unwrap_or(u32::MAX);
        placement::check_growth(&topic.name, present, add.partitions)
            .map_err(|message| invalid(&message))?;
        let added = add.partitions - present;
        let placed = u32::try_from(add.placement.len()).unwrap_or(u32::MAX);
        let passed_over = placed
            .checked_sub(added)
            .and_then(|n| usize::try_from(n).ok());
        let Some(lists) = passed_over.and_then(|n| add.placement.get(n..)) else {
            return Err(invalid("too few partitions are placed"));
        };
        if lists.is_empty() {
            return Ok(());
        }
        let (partitions, next) = self.place(lists)?;
        self.next_replica = next;
        let mut topic = Topic::clone(&topic);
        topic.partitions.extend(partitions);
        self.put_topic(topic);
        Ok(())
    }

    /// By setting: proposed again, it changes nothing. S28: one incarnation and no other.
    fn alter_topic(&mut self, alter: internal::AlterTopicCommand) -> Result<(), Refusal> {
        let topic = self.topic_of(&alter.topic_id)?;
        refuse_internal(&topic)?;
        let mut config = topic.config.clone();
        config.extend(alter.set);
        for key in &alter.unset {
            config.remove(key);
        }
        if config != topic.config {
            self.put_topic(Topic {
                settings: TopicSettings::from_config(&config),
                config,
                ..Topic::clone(&topic)
            });
        }
        Ok(())
    }

    /// The topic of that incarnation.
    fn topic_of(&self, wire: &[u8]) -> Result<Arc<Topic>, Refusal> {
        let id = TopicId::from_wire(wire);
        let topic = id.and_then(|id| self.view.topics_by_id.get(&id));
        topic.map(Arc::clone).ok_or_else(|| Refusal {
            code: ErrorCode::UnknownTopic,
            message: "the topic has been deleted, or made again under another id".to_owned(),
        })
    }

    /// S9: first placements with replica ids from the counter on, and where the counter is then.
    fn place(&self, lists: &[internal::BrokerList]) -> Result<(Vec<Placement>, u64), Refusal> {
        let mut next = self.next_replica;
        let mut partitions = Vec::with_capacity(lists.len());
        for list in lists {
            let brokers: Vec<_> = list.broker_ids.iter().copied().map(BrokerId).collect();
            let known = brokers.iter().all(|id| self.view.brokers.contains_key(id));
            if !known || !placement::is_sound(&brokers) {
                return Err(invalid(&format!(
                    "{brokers:?} is no placement for a partition"
                )));
            }
            let first: Vec<Assignment> = brokers
                .into_iter()
                .map(|broker| {
                    let replica = ReplicaId(next);
                    next += 1;
                    Assignment { replica, broker }
                })
                .collect();
            partitions.push(Placement {
                replicas: first.clone(),
                first,
                version: 1,
                born: false,
            });
        }
        Ok((partitions, next))
    }

    /// Under its name and its id alike.
    fn put_topic(&mut self, topic: Topic) {
        let topic = Arc::new(topic);
        let view = self.edit();
        view.topics_by_id.insert(topic.id, Arc::clone(&topic));
        view.topics.insert(topic.name.clone(), topic);
    }

    fn delete_topic(&mut self, delete: &internal::DeleteTopicCommand) -> Result<(), Refusal> {
        // By incarnation: a retried deletion must not hit a topic made since.
        let topic = TopicId::from_wire(&delete.topic_id)
            .and_then(|id| self.view.topics_by_id.get(&id))
            .cloned();
        let Some(topic) = topic else {
            return refuse(
                ErrorCode::UnknownTopic,
                format!("topic `{}` does not exist", delete.name),
            );
        };
        refuse_internal(&topic)?;
        let view = self.edit();
        view.topics.remove(&topic.name);
        view.topics_by_id.remove(&topic.id);
        for (number, placement) in (0..).zip(&topic.partitions) {
            let partition = PartitionId {
                topic: topic.id,
                partition: number,
            };
            for assignment in &placement.replicas {
                // S22: the permission to delete this replica, and only this one.
                view.tombstones.insert(
                    assignment.replica,
                    Tombstone {
                        partition,
                        replica: assignment.replica,
                        broker: assignment.broker,
                    },
                );
            }
        }
        Ok(())
    }

    /// S10: from here on nobody initializes these groups. A topic deleted meanwhile is no error.
    fn partitions_born(&mut self, born: &internal::PartitionsBorn) {
        // By topic: a topic of many partitions is copied once, not once for each.
        let mut by_topic: BTreeMap<TopicId, Vec<usize>> = BTreeMap::new();
        for one in &born.partitions {
            let number = usize::try_from(one.partition);
            if let (Some(topic), Ok(number)) = (TopicId::from_wire(&one.topic_id), number) {
                by_topic.entry(topic).or_default().push(number);
            }
        }
        for (id, mut numbers) in by_topic {
            let Some(topic) = self.view.topics_by_id.get(&id) else {
                continue;
            };
            let unborn = |number: &usize| {
                let placement = topic.partitions.get(*number);
                placement.is_some_and(|placement| !placement.born)
            };
            numbers.retain(unborn);
            if numbers.is_empty() {
                continue;
            }
            let mut topic = Topic::clone(topic);
            for number in numbers {
                if let Some(placement) = topic.partitions.get_mut(number) {
                    placement.born = true;
                }
            }
            self.put_topic(topic);
        }
    }

    /// The whole state, encoded.
    #[must_use]
    pub fn checkpoint(&self) -> Bytes {
        let view = &self.view;
        internal::ClusterState {
            cluster_id: view.cluster_id.map(ClusterId::to_wire).unwrap_or_default(),
            groups_partitions: view.groups_partitions,
            founding: self.founding.clone(),
            brokers: view
                .brokers
                .values()
                .map(|broker| entry_of(broker))
                .collect(),
            topics: view
                .topics
                .values()
                .map(|topic| topic_to_wire(topic))
                .collect(),
            tombstones: view.tombstones.values().map(tombstone_to_wire).collect(),
            next_replica_id: self.next_replica,
            next_cluster_replica_id: self.next_cluster_replica,
            applied_index: view.index,
        }
        .encode_to_vec()
        .into()
    }

    /// Replaces the state by a checkpoint; no bytes: the state before the first entry.
    ///
    /// # Errors
    ///
    /// Bytes that are no checkpoint; the state is then unchanged.
    pub fn restore(&mut self, checkpoint: &[u8]) -> Result<(), RestoreError> {
        let state = internal::ClusterState::decode(checkpoint)?;
        let view = view_from_wire(&state)?;
        self.founding = state.founding;
        self.next_replica = state.next_replica_id.max(1);
        self.next_cluster_replica = state.next_cluster_replica_id.max(1);
        self.view = Arc::new(view);
        self.publish();
        Ok(())
    }
}

impl raft::StateMachine for ClusterState {
    fn apply(&mut self, entry: &raft::AppliedEntry) -> Bytes {
        match entry.kind {
            raft::EntryKind::Command => {
                let reply = self.apply_command(entry.index, &entry.payload);
                reply.encode_to_vec().into()
            }
            raft::EntryKind::Batch | raft::EntryKind::Blank | raft::EntryKind::Membership => {
                self.advance(entry.index);
                Bytes::new()
            }
        }
    }

    fn checkpoint(&self) -> Bytes {
        Self::checkpoint(self)
    }

    fn restore(&mut self, checkpoint: &[u8]) -> Result<(), raft::RestoreError> {
        Self::restore(self, checkpoint).map_err(|error| raft::RestoreError::new(error.to_string()))
    }
}

/// `__groups` keeps its partitions for the life of the cluster: groups are found by their number.
fn refuse_internal(topic: &Topic) -> Result<(), Refusal> {
    if topic.id == TopicId::GROUPS {
        return Err(invalid("`__groups` belongs to the cluster itself"));
    }
    Ok(())
}

/// S23: a start counter that does not rise belongs to a copy, unless it is the same process.
fn check_boot(known: &Broker, address: &BrokerAddress) -> Result<(), Refusal> {
    let same_process = known.boot == address.boot && known.process_id == address.process_id;
    if address.boot > known.boot || same_process {
        return Ok(());
    }
    refuse(
        ErrorCode::InvalidArgument,
        format!(
            "broker {} has started {} times, and another process comes with start {}: its data \
             directory was copied or rolled back",
            known.id, known.boot, address.boot
        ),
    )
}

fn broker_from(address: &BrokerAddress, replica: ReplicaId, registered: bool) -> Broker {
    Broker {
        id: BrokerId(address.broker_id),
        name: address.name.clone(),
        client_address: address.client_address.clone(),
        peer_address: address.peer_address.clone(),
        gossip_address: address.gossip_address.clone(),
        rack: address.rack.clone(),
        boot: address.boot,
        process_id: address.process_id,
        cluster_replica: replica,
        registered,
    }
}

fn entry_of(broker: &Broker) -> BrokerEntry {
    BrokerEntry {
        broker: Some(broker.into()),
        cluster_replica_id: broker.cluster_replica.0,
        registered: broker.registered,
    }
}

fn tombstone_to_wire(tombstone: &Tombstone) -> internal::Tombstone {
    internal::Tombstone {
        topic_id: tombstone.partition.topic.to_wire(),
        partition: tombstone.partition.partition,
        replica_id: tombstone.replica.0,
        broker_id: tombstone.broker.0,
    }
}

fn assignments_to_wire(assignments: &[Assignment]) -> Vec<internal::ReplicaAssignment> {
    assignments
        .iter()
        .map(|assignment| internal::ReplicaAssignment {
            replica_id: assignment.replica.0,
            broker_id: assignment.broker.0,
        })
        .collect()
}

fn topic_to_wire(topic: &Topic) -> internal::TopicState {
    internal::TopicState {
        name: topic.name.clone(),
        topic_id: topic.id.to_wire(),
        config: topic.config.clone(),
        partitions: (0..)
            .zip(&topic.partitions)
            .map(|(partition, placement)| internal::PartitionPlacement {
                partition,
                replicas: assignments_to_wire(&placement.replicas),
                first: assignments_to_wire(&placement.first),
                version: placement.version,
                born: placement.born,
            })
            .collect(),
    }
}

fn view_from_wire(state: &internal::ClusterState) -> Result<ClusterView, RestoreError> {
    let mut view = ClusterView {
        index: state.applied_index,
        groups_partitions: state.groups_partitions,
        ..ClusterView::default()
    };
    if !state.cluster_id.is_empty() {
        let id = ClusterId::from_wire(&state.cluster_id);
        view.cluster_id = Some(id.ok_or(RestoreError::Malformed("cluster id"))?);
    }
    if let Some(founding) = &state.founding {
        view.founding = founding
            .brokers
            .iter()
            .map(|b| BrokerId(b.broker_id))
            .collect();
    }
    for entry in &state.brokers {
        let address = entry
            .broker
            .as_ref()
            .ok_or(RestoreError::Malformed("broker"))?;
        let replica = ReplicaId(entry.cluster_replica_id);
        let broker = broker_from(address, replica, entry.registered);
        view.brokers.insert(broker.id, Arc::new(broker));
    }
    for topic in &state.topics {
        let topic = Arc::new(topic_from_wire(topic)?);
        view.topics_by_id.insert(topic.id, Arc::clone(&topic));
        view.topics.insert(topic.name.clone(), topic);
    }
    for tombstone in &state.tombstones {
        let topic = TopicId::from_wire(&tombstone.topic_id);
        let replica = ReplicaId(tombstone.replica_id);
        view.tombstones.insert(
            replica,
            Tombstone {
                partition: PartitionId {
                    topic: topic.ok_or(RestoreError::Malformed("topic id"))?,
                    partition: tombstone.partition,
                },
                replica,
                broker: BrokerId(tombstone.broker_id),
            },
        );
    }
    Ok(view)
}

fn topic_from_wire(topic: &internal::TopicState) -> Result<Topic, RestoreError> {
    let assignments = |list: &[internal::ReplicaAssignment]| {
        list.iter()
            .map(|assignment| Assignment {
                replica: ReplicaId(assignment.replica_id),
                broker: BrokerId(assignment.broker_id),
            })
            .collect()
    };
    Ok(Topic {
        name: topic.name.clone(),
        id: TopicId::from_wire(&topic.topic_id).ok_or(RestoreError::Malformed("topic id"))?,
        config: topic.config.clone(),
        settings: TopicSettings::from_config(&topic.config),
        partitions: topic
            .partitions
            .iter()
            .map(|placement| Placement {
                replicas: assignments(&placement.replicas),
                first: assignments(&placement.first),
                version: placement.version,
                born: placement.born,
            })
            .collect(),
    })
}

#[cfg(test)]
#[path = "state_tests.rs"]
mod tests;
