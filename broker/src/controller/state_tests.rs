//! Tests of the `__cluster` state machine.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use qute_proto::internal::{
    AddPartitionsCommand, AdmitBroker, AlterTopicCommand, BrokerList, CreateTopicCommand,
    DeleteTopicCommand, PartitionBorn, PartitionsBorn, RegisterBroker, ReplicaDeleted,
    ReplicasDeleted,
};

const CLUSTER: [u8; 16] = [7; 16];

fn address(broker: u64, boot: u64, process: u64) -> BrokerAddress {
    BrokerAddress {
        broker_id: broker,
        name: format!("b{broker}"),
        client_address: format!("10.0.0.{broker}:7700"),
        peer_address: format!("10.0.0.{broker}:7700"),
        gossip_address: format!("10.0.0.{broker}:7700"),
        rack: String::new(),
        boot,
        process_id: process,
    }
}

fn found(brokers: &[u64]) -> Command {
    Command::Found(FoundCluster {
        set: Some(FoundingSet {
            cluster_id: Bytes::copy_from_slice(&CLUSTER),
            brokers: brokers.iter().map(|id| address(*id, 1, *id)).collect(),
        }),
        groups_partitions: 16,
    })
}

fn register(broker: u64, boot: u64, process: u64) -> Command {
    Command::RegisterBroker(RegisterBroker {
        broker: Some(address(broker, boot, process)),
    })
}

fn admit(broker: u64, boot: u64, process: u64) -> Command {
    Command::AdmitBroker(AdmitBroker {
        broker: Some(address(broker, boot, process)),
    })
}

fn topic_id(n: u8) -> Bytes {
    Bytes::copy_from_slice(&[n; 16])
}

fn create(name: &str, id: u8, placement: &[&[u64]]) -> Command {
    Command::CreateTopic(CreateTopicCommand {
        name: name.to_owned(),
        topic_id: topic_id(id),
        config: BTreeMap::from([("segment_bytes".to_owned(), "65536".to_owned())]),
        placement: lists(placement),
    })
}

fn lists(placement: &[&[u64]]) -> Vec<BrokerList> {
    placement
        .iter()
        .map(|ids| BrokerList {
            broker_ids: ids.to_vec(),
        })
        .collect()
}

fn add(id: u8, partitions: u32, placement: &[&[u64]]) -> Command {
    Command::AddPartitions(AddPartitionsCommand {
        topic_id: topic_id(id),
        partitions,
        placement: lists(placement),
    })
}

fn alter(id: u8, set: &[(&str, &str)], unset: &[&str]) -> Command {
    let pair = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    Command::AlterTopic(AlterTopicCommand {
        topic_id: topic_id(id),
        set: set.iter().map(pair).collect(),
        unset: unset.iter().map(|key| (*key).to_owned()).collect(),
    })
}

fn create_groups(partitions: usize) -> Command {
    Command::CreateTopic(CreateTopicCommand {
        name: topic::GROUPS_NAME.to_owned(),
        topic_id: TopicId::GROUPS.to_wire(),
        config: BTreeMap::new(),
        placement: lists(&vec![&[1][..]; partitions]),
    })
}

fn delete(name: &str, id: u8) -> Command {
    Command::DeleteTopic(DeleteTopicCommand {
        name: name.to_owned(),
        topic_id: topic_id(id),
    })
}

fn born(id: u8, partition: u32) -> Command {
    Command::PartitionsBorn(PartitionsBorn {
        partitions: vec![PartitionBorn {
            topic_id: topic_id(id),
            partition,
        }],
    })
}

fn deleted(id: u8, partition: u32, replica: u64) -> Command {
    Command::ReplicasDeleted(ReplicasDeleted {
        replicas: vec![ReplicaDeleted {
            topic_id: topic_id(id),
            partition,
            replica_id: replica,
        }],
    })
}

struct Machine {
    state: ClusterState,
    watched: watch::Receiver<Arc<ClusterView>>,
    index: u64,
}

impl Machine {
    fn new() -> Self {
        let (state, watched) = ClusterState::new();
        Self {
            state,
            watched,
            index: 0,
        }
    }

    fn founded() -> Self {
        let mut machine = Self::new();
        machine.accepted(found(&[1, 2, 3]));
        machine
    }

    fn run(&mut self, command: Command) -> CommandReply {
        self.index += 1;
        let bytes = ClusterCommand {
            command: Some(command),
        }
        .encode_to_vec();
        self.state.apply_command(self.index, &bytes)
    }

    fn accepted(&mut self, command: Command) -> CommandReply {
        let reply = self.run(command);
        assert_eq!(reply.refused, "");
        reply
    }

    fn refused(&mut self, command: Command) -> (ErrorCode, String) {
        let before = self.state.checkpoint();
        let reply = self.run(command);
        assert_ne!(reply.refused, "");
        // Nothing but the index has moved.
        let index = self.state.view().index;
        self.state.edit().index = index - 1;
        assert_eq!(self.state.checkpoint(), before);
        self.state.edit().index = index;
        (ErrorCode::try_from(reply.code).unwrap(), reply.refused)
    }
}

#[test]
fn founding_gives_ranks_as_replica_ids() {
    let machine = Machine::founded();
    let view = machine.watched.borrow();
    let ranks: Vec<_> = view.brokers.values().map(|b| b.cluster_replica.0).collect();
    assert_eq!(ranks, [1, 2, 3]);
    assert_eq!(view.index, 1);
    assert!(!view.founders_registered());
}

#[test]
fn founding_again_changes_nothing_and_another_cluster_is_refused() {
    let mut machine = Machine::founded();
    machine.accepted(register(1, 1, 1));
    machine.accepted(found(&[1, 2, 3]));
    assert!(machine.state.view().brokers[&BrokerId(1)].registered);
    let other = Command::Found(FoundCluster {
        set: Some(FoundingSet {
            cluster_id: topic_id(9),
            brokers: vec![],
        }),
        groups_partitions: 16,
    });
    assert_eq!(machine.refused(other).0, ErrorCode::WrongCluster);
}

#[test]
fn registration_brings_new_addresses_and_completes_the_founding_set() {
    let mut machine = Machine::founded();
    for id in 1..=3 {
        machine.accepted(register(id, 1, id));
    }
    assert!(machine.state.view().founders_registered());
    let mut moved = address(2, 2, 77);
    moved.peer_address = "10.0.0.2:9999".to_owned();
    machine.accepted(Command::RegisterBroker(RegisterBroker {
        broker: Some(moved),
    }));
    let view = machine.watched.borrow();
    assert_eq!(view.brokers[&BrokerId(2)].peer_address, "10.0.0.2:9999");
    assert_eq!(view.brokers[&BrokerId(2)].cluster_replica, ReplicaId(2));
}

#[test]
fn s23_copied_or_rolled_back_directory_is_refused() {
    let mut machine = Machine::founded();
    machine.accepted(register(2, 5, 50));
    machine.accepted(register(2, 5, 50));
    let (_, message) = machine.refused(register(2, 5, 51));
    assert!(message.contains("copied or rolled back"), "{message}");
    machine.refused(register(2, 4, 50));
    machine.accepted(register(2, 6, 51));
    // Its directory forgot the cluster although it had been a member.
    let (_, message) = machine.refused(admit(2, 7, 52));
    assert!(message.contains("empty"), "{message}");
}

#[test]
fn stranger_is_refused_until_admitted() {
    let mut machine = Machine::founded();
    assert_eq!(
        machine.refused(register(4, 1, 4)).0,
        ErrorCode::WrongCluster
    );
    assert_eq!(machine.accepted(admit(4, 1, 4)).replica_id, 4);
    // It crashed before it stored the answer: the same id, as nothing was made under it.
    assert_eq!(machine.accepted(admit(4, 2, 5)).replica_id, 4);
    assert_eq!(machine.accepted(admit(5, 1, 6)).replica_id, 5);
    machine.accepted(register(4, 2, 5));
}

#[test]
fn admission_before_founding_is_refused() {
    let mut machine = Machine::new();
    assert_eq!(machine.refused(admit(4, 1, 4)).0, ErrorCode::NotReady);
}

#[test]
fn duplicate_topic_is_refused_and_takes_no_ids() {
    let mut machine = Machine::founded();
    machine.accepted(create("t", 10, &[&[1, 2, 3]]));
    assert_eq!(
        machine.refused(create("t", 11, &[&[1]])).0,
        ErrorCode::TopicExists
    );
    assert_eq!(
        machine.refused(create("u", 10, &[&[1]])).0,
        ErrorCode::InvalidArgument
    );
    machine.accepted(create("u", 11, &[&[1]]));
    let view = machine.state.view();
    assert_eq!(
        view.topics["u"].partitions[0].replicas[0].replica,
        ReplicaId(4)
    );
    assert_eq!(view.topics["u"].settings.segment_bytes, 65536);
}

#[test]
fn unsound_placements_are_refused() {
    let mut machine = Machine::founded();
    let unsound: [&[&[u64]]; 5] = [&[], &[&[]], &[&[1, 2]], &[&[1, 1, 2]], &[&[1, 2, 9]]];
    for placement in unsound {
        assert_eq!(
            machine.refused(create("t", 1, placement)).0,
            ErrorCode::InvalidArgument
        );
    }
}

#[test]
fn s22_deletion_leaves_tombstones_until_each_is_reported_gone() {
    let mut machine = Machine::founded();
    machine.accepted(create("t", 10, &[&[1, 2, 3], &[2]]));
    machine.accepted(delete("t", 10));
    let view = machine.state.view().clone();
    assert!(view.topics.is_empty() && view.topics_by_id.is_empty());
    let owners: Vec<_> = view.tombstones.values().map(|t| t.broker.0).collect();
    assert_eq!(owners, [1, 2, 3, 2]);
    machine.accepted(deleted(10, 0, 2));
    machine.accepted(deleted(10, 0, 2));
    assert_eq!(machine.state.view().tombstones.len(), 3);
}

#[test]
fn retried_deletion_does_not_hit_the_topic_made_since() {
    let mut machine = Machine::founded();
    machine.accepted(create("t", 10, &[&[1]]));
    machine.accepted(delete("t", 10));
    machine.accepted(create("t", 11, &[&[1]]));
    assert_eq!(machine.refused(delete("t", 10)).0, ErrorCode::UnknownTopic);
    assert!(machine.state.view().topics.contains_key("t"));
}

#[test]
fn s10_first_placement_stays_and_birth_is_kept() {
    let mut machine = Machine::founded();
    machine.accepted(create("t", 10, &[&[1, 2, 3], &[2, 3, 1]]));
    let first = machine.state.view().topics["t"].partitions[0].first.clone();
    machine.accepted(born(10, 0));
    machine.accepted(born(10, 0));
    machine.accepted(born(10, 99));
    machine.accepted(born(99, 0));
    let view = machine.state.view();
    assert_eq!(view.topics["t"].partitions[0].first, first);
    assert!(view.topics["t"].partitions[0].born);
    assert!(!view.topics["t"].partitions[1].born);
    assert_eq!(view.topics["t"], view.topics_by_id[&view.topics["t"].id]);
}

#[test]
fn s9_s10_added_partitions_get_new_replica_ids_and_a_first_placement_of_their_own() {
    let mut machine = Machine::founded();
    machine.accepted(create("t", 10, &[&[1, 2, 3]]));
    machine.accepted(create("u", 11, &[&[1]]));
    machine.accepted(born(10, 0));
    let before = machine.state.view().topics["t"].partitions[0].clone();
    machine.accepted(add(10, 3, &[&[2, 3, 1], &[3, 1, 2]]));
    let view = machine.state.view();
    let topic = &view.topics["t"];
    assert_eq!(topic, &view.topics_by_id[&topic.id]);
    assert_eq!(topic.partitions[0], before);
    let ids = |at: usize| -> Vec<u64> {
        let placement: &Placement = &topic.partitions[at];
        assert_eq!(placement.first, placement.replicas);
        assert!(!placement.born && placement.version == 1);
        placement.replicas.iter().map(|a| a.replica.0).collect()
    };
    assert_eq!((ids(1), ids(2)), (vec![5, 6, 7], vec![8, 9, 10]));
    // Deleted whole (S22).
    machine.accepted(delete("t", 10));
    assert_eq!(machine.state.view().tombstones.len(), 9);
}

#[test]
fn partitions_added_again_or_behind_another_command_are_not_added_twice() {
    let mut machine = Machine::founded();
    machine.accepted(create("t", 10, &[&[1], &[2]]));
    let four = || add(10, 4, &[&[3], &[1]]);
    machine.accepted(four());
    let after = machine.state.view().topics["t"].clone();
    machine.accepted(four());
    assert_eq!(machine.state.view().topics["t"], after);
    // Chosen when there were two: what has been placed since is passed over.
    machine.accepted(add(10, 5, &[&[1], &[1], &[2]]));
    let topic = &machine.state.view().topics["t"];
    assert_eq!(topic.partitions[..4], after.partitions[..]);
    assert_eq!(topic.partitions[4].replicas[0].broker, BrokerId(2));
    assert_eq!(topic.partitions[4].replicas[0].replica, ReplicaId(5));
}

#[test]
fn partitions_that_can_not_be_added_are_refused() {
    let mut machine = Machine::founded();
    machine.accepted(create("t", 10, &[&[1], &[2]]));
    for (command, code) in [
        (add(9, 3, &[&[1]]), ErrorCode::UnknownTopic),
        (add(10, 1, &[]), ErrorCode::InvalidArgument),
        (add(10, 0, &[]), ErrorCode::InvalidArgument),
        (add(10, 3, &[]), ErrorCode::InvalidArgument),
        (add(10, 4, &[&[1]]), ErrorCode::InvalidArgument),
        (add(10, 3, &[&[1, 2]]), ErrorCode::InvalidArgument),
        (add(10, 3, &[&[9]]), ErrorCode::InvalidArgument),
        (add(10, PARTITIONS_MAX + 1, &[]), ErrorCode::InvalidArgument),
        (add(10, u32::MAX, &[]), ErrorCode::InvalidArgument),
    ] {
        assert_eq!(machine.refused(command.clone()).0, code, "{command:?}");
    }
    let (_, message) = machine.refused(add(10, 1, &[]));
    assert!(message.contains("never lowered"), "{message}");
    // Made again under the same name: another incarnation.
    machine.accepted(delete("t", 10));
    machine.accepted(create("t", 11, &[&[1]]));
    assert_eq!(
        machine.refused(add(10, 3, &[&[1]])).0,
        ErrorCode::UnknownTopic
    );
}

#[test]
fn add_partitions_command_golden_bytes() {
    let command = ClusterCommand {
        command: Some(add(10, 3, &[&[2, 300]])),
    };
    let mut golden = vec![0x42, 27, 0x0a, 16];
    golden.extend([10; 16]);
    golden.extend([0x10, 3, 0x1a, 5, 0x0a, 3, 2, 0xac, 0x02]);
    assert_eq!(command.encode_to_vec(), golden);
}

#[test]
fn alter_topic_command_golden_bytes() {
    let command = ClusterCommand {
        command: Some(alter(10, &[("b", "2"), ("a", "1")], &["c"])),
    };
    let mut golden = vec![0x4a, 37, 0x0a, 16];
    golden.extend([10; 16]);
    golden.extend([0x12, 6, 0x0a, 1, b'a', 0x12, 1, b'1']);
    golden.extend([0x12, 6, 0x0a, 1, b'b', 0x12, 1, b'2']);
    golden.extend([0x1a, 1, b'c']);
    assert_eq!(command.encode_to_vec(), golden);
}

#[test]
fn topic_altered_has_the_settings_named_and_keeps_the_others() {
    let mut machine = Machine::founded();
    machine.accepted(create("t", 10, &[&[1], &[2]]));
    let before = machine.state.view().topics["t"].clone();
    machine.accepted(alter(10, &[("retention_ms", "5")], &[]));
    // Decided at the same time on the strength of the same view: neither undoes the other.
    machine.accepted(alter(
        10,
        &[("record_bytes_max", "100")],
        &["segment_bytes"],
    ));
    let topic = machine.state.view().topics["t"].clone();
    let keys: Vec<_> = topic.config.keys().map(String::as_str).collect();
    assert_eq!(keys, ["record_bytes_max", "retention_ms"]);
    assert_eq!(topic.settings.retention_ms, Some(5));
    assert_eq!(topic.settings.record_bytes_max, 100);
    let defaults = TopicSettings::default();
    assert_eq!(topic.settings.segment_bytes, defaults.segment_bytes);
    assert_eq!(topic.partitions, before.partitions);
    assert_eq!(machine.state.view().topics_by_id[&topic.id], topic);
    // Proposed again: nothing changes.
    machine.accepted(alter(
        10,
        &[("record_bytes_max", "100")],
        &["segment_bytes"],
    ));
    assert!(Arc::ptr_eq(&machine.state.view().topics["t"], &topic));
}

// S28
#[test]
fn alteration_of_an_incarnation_that_is_gone_is_refused() {
    let mut machine = Machine::founded();
    machine.accepted(create("t", 10, &[&[1]]));
    machine.accepted(delete("t", 10));
    machine.accepted(create("t", 11, &[&[1]]));
    let late = alter(10, &[("retention_ms", "5")], &[]);
    assert_eq!(machine.refused(late).0, ErrorCode::UnknownTopic);
}

#[test]
fn groups_topic_has_its_partitions_once_and_for_all() {
    let mut machine = Machine::founded();
    assert_eq!(
        machine.refused(create_groups(15)).0,
        ErrorCode::InvalidArgument
    );
    let misnamed = create(topic::GROUPS_NAME, 10, &[&[1]]);
    assert_eq!(machine.refused(misnamed).0, ErrorCode::InvalidArgument);
    machine.accepted(create_groups(16));
    assert_eq!(machine.refused(create_groups(16)).0, ErrorCode::TopicExists);
    let id = || TopicId::GROUPS.to_wire();
    let changes = [
        Command::DeleteTopic(DeleteTopicCommand {
            name: topic::GROUPS_NAME.to_owned(),
            topic_id: id(),
        }),
        Command::AddPartitions(AddPartitionsCommand {
            topic_id: id(),
            partitions: 17,
            placement: lists(&[&[1]]),
        }),
        Command::AlterTopic(AlterTopicCommand {
            topic_id: id(),
            ..AlterTopicCommand::default()
        }),
    ];
    for change in changes {
        assert_eq!(machine.refused(change).0, ErrorCode::InvalidArgument);
    }
    // Not among those that people have made.
    machine.accepted(create("t", 10, &[&[1], &[2]]));
    assert_eq!(machine.state.view().counts(), (1, 2));
}

/// A log is read for ever: what a number means never changes.
#[test]
fn commands_keep_their_field_numbers() {
    for (command, number) in [
        (found(&[1]), 1),
        (register(1, 1, 1), 2),
        (create("t", 10, &[&[1]]), 3),
        (delete("t", 10), 4),
        (born(10, 0), 5),
        (deleted(10, 0, 1), 6),
        (admit(4, 1, 4), 7),
        (add(10, 3, &[&[1]]), 8),
        (alter(10, &[("a", "1")], &[]), 9),
    ] {
        let bytes = ClusterCommand {
            command: Some(command.clone()),
        }
        .encode_to_vec();
        assert_eq!(bytes[0], number << 3 | 2, "{command:?}");
    }
}

#[test]
fn checkpoint_golden_bytes_are_read_and_written_alike() {
    let mut machine = Machine::new();
    machine.accepted(found(&[1]));
    machine.accepted(create("t", 10, &[&[1]]));
    machine.accepted(born(10, 0));
    let hex: String = machine
        .state
        .checkpoint()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(hex, GOLDEN_CHECKPOINT);
    let mut restored = Machine::new();
    restored.state.restore(&machine.state.checkpoint()).unwrap();
    assert_eq!(restored.state.view(), machine.state.view());
}

/// Written before partitions could be added: a cluster of one with one topic.
const GOLDEN_CHECKPOINT: &str = "0a100707070707070707070707070707070710101a4b0a10070707070707070707070707070707071237\
    0801120262311a0d31302e302e302e313a37373030220d31302e302e302e313a373730302a0d31302e30\
    2e302e313a3737303038014001223b0a370801120262311a0d31302e302e302e313a37373030220d3130\
    2e302e302e313a373730302a0d31302e302e302e313a373730303801400110012a3f0a017412100a0a0a\
    0a0a0a0a0a0a0a0a0a0a0a0a0a1a160a0d7365676d656e745f6279746573120536353533362210120408\
    0110011a040801100120012801380240024803";

#[test]
fn births_of_several_topics_come_in_one_command() {
    let mut machine = Machine::founded();
    machine.accepted(create("t", 10, &[&[1], &[1], &[1]]));
    machine.accepted(create("u", 11, &[&[1]]));
    let partitions = [(10, 0), (11, 0), (10, 2), (99, 0)]
        .map(|(id, partition)| PartitionBorn {
            topic_id: topic_id(id),
            partition,
        })
        .to_vec();
    machine.accepted(Command::PartitionsBorn(PartitionsBorn { partitions }));
    let view = machine.state.view();
    let births = |name: &str| -> Vec<bool> {
        let topic = &view.topics[name];
        assert_eq!(topic, &view.topics_by_id[&topic.id]);
        topic.partitions.iter().map(|one| one.born).collect()
    };
    assert_eq!(births("t"), [true, false, true]);
    assert_eq!(births("u"), [true]);
}

#[test]
fn garbage_is_refused_and_counts_as_applied() {
    let mut machine = Machine::founded();
    let reply = machine.state.apply_command(2, b"\xff\xff\xff");
    assert_ne!(reply.refused, "");
    assert_eq!(machine.state.view().index, 2);
    assert!(machine.state.restore(b"\xff\xff").is_err());
}

fn command() -> impl Strategy<Value = Command> {
    let broker = 1..6u64;
    let id = 0..6u8;
    prop_oneof![
        Just(found(&[1, 2, 3])),
        (broker.clone(), 1..4u64, 1..3u64).prop_map(|(b, boot, p)| register(b, boot, p)),
        (broker.clone(), 1..4u64, 1..3u64).prop_map(|(b, boot, p)| admit(b, boot, p)),
        (
            id.clone(),
            id.clone(),
            proptest::collection::vec(proptest::collection::vec(broker, 1..4), 1..4)
        )
            .prop_map(|(name, id, placement)| {
                let lists: Vec<&[u64]> = placement.iter().map(Vec::as_slice).collect();
                create(&format!("t{name}"), id, &lists)
            }),
        (
            id.clone(),
            0..7u32,
            proptest::collection::vec(proptest::collection::vec(1..6u64, 1..4), 0..4)
        )
            .prop_map(|(id, partitions, placement)| {
                let lists: Vec<&[u64]> = placement.iter().map(Vec::as_slice).collect();
                add(id, partitions, &lists)
            }),
        (id.clone(), id.clone()).prop_map(|(name, id)| delete(&format!("t{name}"), id)),
        (id.clone(), 0..3u32, any::<bool>()).prop_map(|(id, value, unset)| {
            let value = value.to_string();
            let unset: &[&str] = if unset { &["segment_bytes"] } else { &[] };
            alter(id, &[("retention_ms", &value)], unset)
        }),
        (id.clone(), 0..4u32).prop_map(|(id, p)| born(id, p)),
        (id, 0..4u32, 1..40u64).prop_map(|(id, p, r)| deleted(id, p, r)),
    ]
}

proptest! {
    /// S9, S10 and the checkpoint: over any history, a replica restored from a checkpoint taken
    /// anywhere ends in the same state, ids are never handed out twice, first placements stay.
    #[test]
    fn any_history_restores_alike_and_spends_ids_once(
        commands in proptest::collection::vec(command(), 1..60),
        cut in 0..60usize,
    ) {
        let mut whole = Machine::new();
        let mut restored: Option<Machine> = None;
        let mut seen: BTreeSet<ReplicaId> = BTreeSet::new();
        let mut topics_seen: BTreeMap<(TopicId, u64), Vec<Placement>> = BTreeMap::new();
        for (at, command) in commands.into_iter().enumerate() {
            if at == cut {
                let mut machine = Machine::new();
                machine.state.restore(&whole.state.checkpoint()).unwrap();
                machine.index = whole.index;
                restored = Some(machine);
            }
            let before = whole.state.view().clone();
            let reply = whole.run(command.clone());
            if let Some(machine) = &mut restored {
                prop_assert_eq!(&machine.run(command), &reply);
                prop_assert_eq!(machine.state.view(), whole.state.view());
                prop_assert_eq!(machine.state.checkpoint(), whole.state.checkpoint());
            }
            let after = whole.state.view();
            prop_assert_eq!(&*whole.watched.borrow(), after);
            prop_assert!(after.index == before.index + 1);
            for (id, topic) in &after.topics_by_id {
                let known = before.topics_by_id.get(id);
                let known = known.map_or(0, |topic| topic.partitions.len());
                prop_assert!(topic.partitions.len() >= known);
                let first = topics_seen
                    .entry((*id, topic.partitions[0].first[0].replica.0))
                    .or_default();
                for placement in &topic.partitions[known..] {
                    for assignment in &placement.replicas {
                        prop_assert!(seen.insert(assignment.replica), "S9: id handed out twice");
                    }
                    first.push(placement.clone());
                }
                prop_assert_eq!(topic.partitions.len(), first.len());
                for (now, then) in topic.partitions.iter().zip(first) {
                    prop_assert_eq!(&now.first, &then.first, "S10");
                    prop_assert!(now.version >= then.version, "S16");
                }
            }
        }
    }
}
