//! What holds after any sequence of commands.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use qute_proto::ids::MemberId;
use qute_proto::internal::groups_command::Command;
use qute_proto::internal::{GroupsReply, JoinMember};
use qute_proto::v1::{
    ClaimRelease, DescribeGroupResponse, GroupUpdate, Join, MemberAssignment, OffsetCommit,
    TopicPartitions,
};

use super::super::{At, Groups};
use super::fixture::*;

const MEMBERS: u8 = 4;
const PARTITIONS: u32 = 4;
const GROUPS: [&str; 2] = ["a", "b"];

/// Numbers that become a command once the state is known: mostly a sound one.
#[derive(Debug, Clone)]
struct Step {
    kind: u8,
    group: usize,
    member: u8,
    /// Off its present value where one is asked for: an epoch, a generation.
    off_by: u8,
    number: u64,
    bits: u32,
}

fn steps(max: usize) -> impl Strategy<Value = Vec<Step>> {
    let off_by = prop_oneof![6 => Just(0u8), 1 => 1u8..3];
    let step = (
        0u8..24,
        0..GROUPS.len(),
        0..MEMBERS,
        off_by,
        0u64..40,
        any::<u32>(),
    );
    let step = step.prop_map(|(kind, group, member, off_by, number, bits)| Step {
        kind,
        group,
        member,
        off_by,
        number,
        bits,
    });
    prop::collection::vec(step, 1..max)
}

impl Step {
    fn name(&self) -> &'static str {
        GROUPS[self.group]
    }

    fn bit(&self, at: u32) -> bool {
        self.bits >> at & 1 == 1
    }

    /// The epoch the member is at, or another one.
    fn epoch(&self, groups: &Groups) -> u64 {
        let group = groups.get(self.name());
        let known = group.and_then(|it| it.members().get(member(self.member)));
        known.map_or(1, |it| it.epoch) + u64::from(self.off_by)
    }

    fn claim_epoch(&self, groups: &Groups, partition: u32) -> u64 {
        let group = groups.get(self.name());
        let slot = group.and_then(|it| it.slots().get(topic(0), partition));
        slot.map_or(0, |it| it.claim_epoch()) + u64::from(self.off_by)
    }

    fn partitions(&self) -> impl Iterator<Item = u32> {
        (0..PARTITIONS).filter(|at| self.bit(*at))
    }

    fn claims(&self, groups: &Groups) -> Vec<ClaimRelease> {
        let of = |partition| {
            let offset = (!self.number.is_multiple_of(4)).then_some(self.number);
            claim(partition, self.claim_epoch(groups, partition), offset)
        };
        self.partitions().map(of).collect()
    }

    fn join(&self, groups: &Groups, epoch: u64) -> Command {
        let instance = match self.bits % 5 {
            0 => "w0",
            1 => "w1",
            _ => "",
        };
        let group = groups.get(self.name());
        let known = group.and_then(|it| it.members().get(member(self.member)));
        let instance = known.map_or(instance, |it| &it.instance);
        let holder = group.and_then(|it| it.instance(instance));
        let replaces = holder.filter(|_| self.bit(9)).map(|it| it.id.to_wire());
        let mut topics = vec![(0, PARTITIONS)];
        if self.bit(10) && self.bit(11) {
            topics.push((1, 2));
        }
        let versions = if self.bit(12) { &[2, 1][..] } else { &[1] };
        Command::Join(JoinMember {
            join: Some(Join {
                member_epoch: epoch,
                instance: instance.to_owned(),
                assignors: versions.iter().map(|it| assignor("sticky", *it)).collect(),
                topics: subscription(&topics),
                ..join(self.member)
            }),
            replaces: replaces.unwrap_or_default(),
            replaces_epoch: None,
        })
    }

    fn publish(&self, groups: &Groups) -> Command {
        let group = groups.get(self.name());
        let generation = group.map_or(0, |it| it.generation()) + u64::from(self.off_by);
        let ids: Vec<MemberId> = group.map_or(Vec::new(), |it| {
            it.members().iter().map(|it| it.id).collect()
        });
        let mut lists: BTreeMap<MemberId, Vec<u32>> = BTreeMap::new();
        for partition in 0..PARTITIONS {
            // Now and then nobody's.
            let pick = usize::try_from(self.bits >> (4 * partition) & 0xf).unwrap();
            if let Some(id) = ids.get(pick % (ids.len() + 1)) {
                lists.entry(*id).or_default().push(partition);
            }
        }
        let assignment = lists.into_iter().map(|(id, partitions)| MemberAssignment {
            member_id: id.to_wire(),
            partitions: vec![TopicPartitions {
                topic_id: topic(0).to_wire(),
                partitions,
            }],
        });
        let publish = publishes(self.member, generation, &[]);
        match publish {
            Command::Publish(mut publish) => {
                publish.assignment = assignment.collect();
                Command::Publish(publish)
            }
            other => other,
        }
    }

    fn command(&self, groups: &Groups) -> Command {
        let epoch = self.epoch(groups);
        let offsets = |step: &Self| -> Vec<OffsetCommit> {
            let of = |partition| {
                let epoch = step.claim_epoch(groups, partition);
                commit(partition, epoch, step.number)
            };
            step.partitions().map(of).collect()
        };
        let command = match self.kind {
            0..=4 => self.join(groups, epoch),
            5 => self.join(groups, epoch + 1),
            6 => leaves(self.member, self.claims(groups)),
            7 => expires(&[(self.member, epoch)]),
            8 => subscribes(self.member, &[(0, PARTITIONS), (1, self.bits % 2 + 1)]),
            9 => subscribes(self.member, &[(0, PARTITIONS)]),
            10 => subscribes(self.member, &[(1, 2)]),
            11..=14 => self.publish(groups),
            15..=17 => releases(self.member, self.claims(groups)),
            18 | 19 => commits(self.member, offsets(self)),
            20 => commits_alone(offsets(self)),
            21 => {
                let offset = (!self.number.is_multiple_of(3)).then_some(self.number);
                let resets_of: Vec<_> = self.partitions().map(|it| (it, offset)).collect();
                resets(&resets_of, self.bit(8))
            }
            22 if self.bit(9) => sweeps(self.number),
            22 => removes(),
            _ if self.bit(9) && self.bit(10) => forgets(0),
            _ => commits(self.member, offsets(self)),
        };
        with_epoch(named(self.name(), command), epoch)
    }
}

/// Of the member that the command is from.
fn with_epoch(mut command: Command, epoch: u64) -> Command {
    match &mut command {
        Command::Leave(it) => it.member_epoch = epoch,
        Command::Subscribe(it) => it.member_epoch = epoch,
        Command::Release(it) => it.member_epoch = epoch,
        Command::Commit(it) => it.request.get_or_insert_default().member_epoch = epoch,
        _ => {}
    }
    command
}

/// What a group showed after a command.
#[derive(Debug, Clone, Default, PartialEq)]
struct Seen {
    described: DescribeGroupResponse,
    updates: BTreeMap<MemberId, GroupUpdate>,
    epochs: BTreeMap<u32, u64>,
    revision: u64,
}

type Holders = BTreeMap<u32, (MemberId, u64, u64)>;

impl Seen {
    fn of(groups: &Groups, name: &str) -> Option<Self> {
        let group = groups.get(name)?;
        let ids = group.members().iter().map(|it| it.id);
        let slots = group.slots().iter().filter(|(id, _)| *id == topic(0));
        Some(Self {
            described: group.describe(name),
            updates: ids.map(|id| (id, group.update_for(id).unwrap())).collect(),
            epochs: slots
                .map(|(_, it)| (it.partition(), it.claim_epoch()))
                .collect(),
            revision: group.revision(),
        })
    }

    fn offsets(&self) -> BTreeMap<u32, u64> {
        let offsets = self.described.offsets.iter();
        offsets.map(|it| (it.partition, it.offset)).collect()
    }

    /// Partition -> holder, its epoch, epoch of the claim.
    fn holders(&self, groups: &Groups, name: &str) -> Holders {
        let members = groups.get(name).unwrap().members();
        let mut holders = BTreeMap::new();
        for claim in &self.described.claims {
            let id = MemberId::from_wire(&claim.member_id).unwrap();
            let epoch = members.get(id).expect("the holder is a member").epoch;
            let before = holders.insert(claim.partition, (id, epoch, claim.claim_epoch));
            assert_eq!(before, None, "two holders");
        }
        holders
    }
}

/// An update without what commits change.
fn plain(update: &GroupUpdate) -> GroupUpdate {
    let mut update = update.clone();
    update.revision = 0;
    update
        .claims
        .iter_mut()
        .for_each(|claim| claim.committed = None);
    update
}

struct Checker {
    log: Log,
    holders: BTreeMap<&'static str, Holders>,
}

impl Checker {
    fn step(&mut self, step: &Step) {
        let command = step.command(&self.log.groups);
        let name = step.name();
        let before = Seen::of(&self.log.groups, name);
        let state = self.log.state();
        let reply = self.log.apply(command.clone());
        let after = Seen::of(&self.log.groups, name);

        self.check_refusal(&reply, &state);
        if let Some(after) = &after
            && let Some(before) = &before
        {
            self.check_progress(before, after, &command);
            self.check_told(name, before, after);
        }
        // A sweep and the end of a topic concern all groups.
        for name in GROUPS {
            match Seen::of(&self.log.groups, name) {
                Some(seen) => {
                    self.check_group(name, &seen);
                    self.check_fencing(name, &seen);
                }
                None => drop(self.holders.remove(name)),
            }
        }
        if matches!(command, Command::Publish(_)) && reply.code == 0 {
            self.log.refuses(command);
        }
    }

    /// What is refused, whole or in each item, has changed nothing.
    fn check_refusal(&self, reply: &GroupsReply, before: &[u8]) {
        let items = &reply.offsets;
        let is_refused =
            reply.code != 0 || (!items.is_empty() && items.iter().all(|item| item.error.is_some()));
        // A leave is carried out even where each of its claims is fenced.
        let is_leave = self.log.changed.is_empty();
        if is_refused && (reply.code != 0 || is_leave) {
            assert_eq!(self.log.state(), before, "{reply:?}");
        }
    }

    fn check_group(&self, name: &str, seen: &Seen) {
        let group = self.log.groups.get(name).unwrap();
        let mut targeted = BTreeSet::new();
        let held: BTreeSet<u32> = seen
            .described
            .claims
            .iter()
            .map(|it| it.partition)
            .collect();
        for member in group.members().iter() {
            let update = &seen.updates[&member.id];
            for list in &update.targets {
                let id = qute_proto::ids::TopicId::from_wire(&list.topic_id).unwrap();
                assert!(member.reads(id));
                for partition in &list.partitions {
                    assert!(targeted.insert((id, *partition)), "assigned twice");
                    assert!(held.contains(partition), "assigned, and nobody holds it");
                }
            }
            assert_eq!(update.revision, seen.revision);
            assert!(member.revision <= seen.revision);
        }
        assert_eq!(group.assignor().is_some(), !group.members().is_empty());
        assert!(group.assigned_generation() <= group.generation());
        let instances: Vec<_> = group
            .members()
            .iter()
            .map(|it| &it.instance)
            .filter(|it| !it.is_empty())
            .collect();
        let unique: BTreeSet<_> = instances.iter().collect();
        assert_eq!(unique.len(), instances.len());
    }

    fn check_progress(&self, before: &Seen, after: &Seen, command: &Command) {
        let listing = |seen: &Seen| seen.described.group.clone().unwrap();
        assert!(listing(before).generation <= listing(after).generation);
        assert!(before.revision <= after.revision);
        let may_forget = matches!(command, Command::Sweep(_) | Command::ForgetTopics(_));
        if !may_forget {
            for (partition, epoch) in &before.epochs {
                assert!(after.epochs[partition] >= *epoch, "a claim epoch fell");
            }
        }
        if !may_forget && !matches!(command, Command::Reset(_)) {
            let now = after.offsets();
            for (partition, offset) in before.offsets() {
                assert!(now[&partition] >= offset, "a committed offset went back");
            }
        }
    }

    /// Whoever sees something else is told so.
    fn check_told(&self, name: &str, before: &Seen, after: &Seen) {
        let group = self.log.groups.get(name).unwrap();
        let concerned: BTreeSet<_> = group.concerned_since(before.revision).collect();
        for (id, update) in &after.updates {
            let same = before.updates.get(id).map(plain) == Some(plain(update));
            assert!(same || concerned.contains(id), "{id} was not told");
        }
        let is_told = self.log.changed.iter().any(|it| it == name);
        assert_eq!(is_told, before.revision != after.revision);
    }

    /// A claim that has another holder, or the same one anew, has a higher epoch.
    fn check_fencing(&mut self, name: &'static str, after: &Seen) {
        let holders = after.holders(&self.log.groups, name);
        let last = self.holders.entry(name).or_default();
        // Epochs may end with the partition.
        last.retain(|partition, _| after.epochs.contains_key(partition));
        for (partition, (id, epoch, claim)) in holders {
            if let Some((last_id, last_epoch, last_claim)) = last.get(&partition) {
                let is_same = (id, epoch) == (*last_id, *last_epoch);
                assert!(claim > *last_claim || (is_same && claim == *last_claim));
            }
            last.insert(partition, (id, epoch, claim));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn rules_hold_after_any_sequence_of_commands(steps in steps(80)) {
        let mut checker = Checker { log: Log::default(), holders: BTreeMap::new() };
        for step in &steps {
            checker.step(step);
        }
    }

    // S13: a replica that starts from a checkpoint ends in the same state, byte for byte.
    #[test]
    fn checkpoint_and_replay_give_the_same_state(
        steps in steps(80),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut through = Groups::default();
        let mut restored = Groups::default();
        let cut = cut.index(steps.len());
        for (number, step) in steps.iter().enumerate() {
            if number == cut {
                restored = Groups::decode(&through.encode()).unwrap();
            }
            let at = At { index: u64::try_from(number).unwrap() + 1, time_ms: step.number * 3 };
            let command = step.command(&through);
            let reply = through.apply(at, command.clone()).reply;
            if number >= cut {
                prop_assert_eq!(restored.apply(at, command).reply, reply);
            }
        }
        prop_assert_eq!(through.encode(), restored.encode());
        prop_assert_eq!(through.totals(), restored.totals());
    }
}
