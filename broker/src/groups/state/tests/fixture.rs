//! A log of commands in short words.

use std::collections::BTreeMap;

use bytes::Bytes;
use qute_proto::ids::{MemberId, TopicId};
use qute_proto::internal::groups_command::Command;
use qute_proto::internal::{
    CommitClaims, ExpireMembers, ForgetTopics, GroupsReply, JoinMember, LeaveMember, MemberEpoch,
    PublishAssignment, ReleaseClaims, RemoveGroup, ResetClaims, SubscribeMember, SweepOffsets,
};
use qute_proto::v1::{
    AssignorVersion, ClaimRelease, CommitOffsetsRequest, ErrorCode, Join, MemberAssignment,
    OffsetCommit, OffsetReset, ResetOffsetsRequest, TopicPartitions, TopicSubscription,
};
use uuid::Uuid;

use super::super::{At, Group, Groups};

pub const GROUP: &str = "billing";

pub fn topic(number: u8) -> TopicId {
    TopicId(Uuid::from_u128(0x1000 + u128::from(number)))
}

pub fn member(number: u8) -> MemberId {
    MemberId(Uuid::from_u128(0x2000 + u128::from(number)))
}

pub fn assignor(name: &str, version: u32) -> AssignorVersion {
    AssignorVersion {
        name: name.to_owned(),
        version,
    }
}

pub fn subscription(topics: &[(u8, u32)]) -> Vec<TopicSubscription> {
    topics
        .iter()
        .map(|(number, partitions)| TopicSubscription {
            topic_id: topic(*number).to_wire(),
            partitions: *partitions,
        })
        .collect()
}

/// Member `number` at epoch 1, reading four partitions of topic 0.
pub fn join(number: u8) -> Join {
    Join {
        group: GROUP.to_owned(),
        member_id: member(number).to_wire(),
        member_epoch: 1,
        client: format!("m{number}"),
        assignors: vec![assignor("sticky", 1)],
        topics: subscription(&[(0, 4)]),
        session_timeout_ms: 10_000,
        ..Join::default()
    }
}

/// The same with a stable name.
pub fn join_as(number: u8, instance: &str) -> Join {
    Join {
        instance: instance.to_owned(),
        ..join(number)
    }
}

pub fn joins(join: Join) -> Command {
    Command::Join(JoinMember {
        join: Some(join),
        ..JoinMember::default()
    })
}

pub fn joins_for(join: Join, replaced: u8) -> Command {
    Command::Join(JoinMember {
        join: Some(join),
        replaces: member(replaced).to_wire(),
        replaces_epoch: Some(1),
    })
}

/// Of topic 0.
pub fn claim(partition: u32, epoch: u64, offset: Option<u64>) -> ClaimRelease {
    ClaimRelease {
        topic_id: topic(0).to_wire(),
        partition,
        claim_epoch: epoch,
        offset,
        leader_epoch: 3,
        metadata: String::new(),
    }
}

pub fn leaves(number: u8, claims: Vec<ClaimRelease>) -> Command {
    Command::Leave(LeaveMember {
        group: GROUP.to_owned(),
        member_id: member(number).to_wire(),
        member_epoch: 1,
        claims,
    })
}

pub fn expires(members: &[(u8, u64)]) -> Command {
    Command::Expire(ExpireMembers {
        group: GROUP.to_owned(),
        members: members
            .iter()
            .map(|(number, epoch)| MemberEpoch {
                member_id: member(*number).to_wire(),
                member_epoch: *epoch,
            })
            .collect(),
    })
}

pub fn subscribes(number: u8, topics: &[(u8, u32)]) -> Command {
    Command::Subscribe(SubscribeMember {
        group: GROUP.to_owned(),
        member_id: member(number).to_wire(),
        member_epoch: 1,
        topics: subscription(topics),
    })
}

/// Partitions of topic 0 for members.
pub fn publishes(by: u8, generation: u64, assignment: &[(u8, &[u32])]) -> Command {
    let assignment = assignment
        .iter()
        .map(|(number, partitions)| MemberAssignment {
            member_id: member(*number).to_wire(),
            partitions: vec![TopicPartitions {
                topic_id: topic(0).to_wire(),
                partitions: partitions.to_vec(),
            }],
        })
        .collect();
    Command::Publish(PublishAssignment {
        group: GROUP.to_owned(),
        member_id: member(by).to_wire(),
        generation,
        assignment,
    })
}

pub fn releases(number: u8, claims: Vec<ClaimRelease>) -> Command {
    Command::Release(ReleaseClaims {
        group: GROUP.to_owned(),
        member_id: member(number).to_wire(),
        member_epoch: 1,
        claims,
    })
}

/// Of topic 0.
pub fn commit(partition: u32, epoch: u64, offset: u64) -> OffsetCommit {
    OffsetCommit {
        topic_id: topic(0).to_wire(),
        partition,
        claim_epoch: epoch,
        offset,
        leader_epoch: 3,
        metadata: String::new(),
    }
}

pub fn commits(number: u8, offsets: Vec<OffsetCommit>) -> Command {
    commits_as(member(number).to_wire(), offsets)
}

/// Without membership.
pub fn commits_alone(offsets: Vec<OffsetCommit>) -> Command {
    commits_as(Bytes::new(), offsets)
}

fn commits_as(member_id: Bytes, offsets: Vec<OffsetCommit>) -> Command {
    Command::Commit(CommitClaims {
        request: Some(CommitOffsetsRequest {
            group: GROUP.to_owned(),
            member_id,
            member_epoch: 1,
            offsets,
        }),
    })
}

/// Of topic 0.
pub fn resets(offsets: &[(u32, Option<u64>)], force: bool) -> Command {
    let offsets = offsets.iter().map(|(partition, offset)| OffsetReset {
        topic_id: topic(0).to_wire(),
        partition: *partition,
        offset: *offset,
    });
    Command::Reset(ResetClaims {
        request: Some(ResetOffsetsRequest {
            group: GROUP.to_owned(),
            offsets: offsets.collect(),
            force,
        }),
    })
}

pub fn removes() -> Command {
    Command::Remove(RemoveGroup {
        group: GROUP.to_owned(),
    })
}

pub fn sweeps(retention_ms: u64) -> Command {
    Command::Sweep(SweepOffsets { retention_ms })
}

pub fn forgets(number: u8) -> Command {
    Command::ForgetTopics(ForgetTopics {
        topic_ids: vec![topic(number).to_wire()],
    })
}

/// The command, for another group.
pub fn named(group: &str, command: Command) -> Command {
    let mut command = command;
    let name = match &mut command {
        Command::Join(it) => &mut it.join.get_or_insert_default().group,
        Command::Leave(it) => &mut it.group,
        Command::Expire(it) => &mut it.group,
        Command::Subscribe(it) => &mut it.group,
        Command::Publish(it) => &mut it.group,
        Command::Release(it) => &mut it.group,
        Command::Commit(it) => &mut it.request.get_or_insert_default().group,
        Command::Reset(it) => &mut it.request.get_or_insert_default().group,
        Command::Remove(it) => &mut it.group,
        Command::Sweep(_) | Command::ForgetTopics(_) => return command,
    };
    *name = group.to_owned();
    command
}

/// A log that is applied as it is written.
#[derive(Default)]
pub struct Log {
    pub groups: Groups,
    pub index: u64,
    pub time_ms: u64,
    pub changed: Vec<String>,
}

impl Log {
    /// Members 0.. have joined, one after another.
    pub fn with_members(count: u8) -> Self {
        let mut log = Self::default();
        (0..count).for_each(|number| log.does(joins(join(number))));
        log
    }

    /// Member 0 has partitions 0 and 1, member 1 has 2 and 3, all at claim epoch 1.
    pub fn with_claims() -> Self {
        let mut log = Self::with_members(2);
        log.does(publishes(0, 2, &[(0, &[0, 1]), (1, &[2, 3])]));
        log
    }

    pub fn apply(&mut self, command: Command) -> GroupsReply {
        self.index += 1;
        self.time_ms += 1;
        let at = At {
            index: self.index,
            time_ms: self.time_ms,
        };
        let applied = self.groups.apply(at, command);
        self.changed = applied.changed.iter().map(ToString::to_string).collect();
        // What is kept beside the state is what it would be if it were counted.
        let counted = Groups::decode(&self.groups.encode()).unwrap().totals();
        assert_eq!(self.groups.totals(), counted);
        applied.reply
    }

    /// Applies what must be done.
    pub fn does(&mut self, command: Command) {
        let reply = self.apply(command);
        assert_eq!(reply.code, 0, "{}", reply.message);
        let refused = reply.offsets.iter().find_map(|one| one.error.as_ref());
        assert_eq!(refused, None);
    }

    /// Applies what must be refused, changing nothing.
    pub fn refuses(&mut self, command: Command) -> (ErrorCode, String) {
        let before = self.state();
        let reply = self.apply(command);
        assert_eq!(before, self.state(), "{}", reply.message);
        (reply.code(), reply.message)
    }

    /// The state but for the time.
    pub fn state(&self) -> Bytes {
        let mut groups = self.groups.clone();
        groups.advance(1 << 40);
        groups.encode()
    }

    pub fn group(&self) -> &Group {
        self.groups.get(GROUP).unwrap()
    }

    /// Partition of topic 0 -> holder and claim epoch.
    pub fn claims(&self) -> BTreeMap<u32, (u8, u64)> {
        let described = self.group().describe(GROUP);
        let number = |id: &[u8]| id[15];
        described
            .claims
            .iter()
            .map(|it| (it.partition, (number(&it.member_id), it.claim_epoch)))
            .collect()
    }

    /// Partition of topic 0 -> committed offset.
    pub fn offsets(&self) -> BTreeMap<u32, u64> {
        let offsets = self.group().offsets();
        offsets.map(|it| (it.partition, it.offset)).collect()
    }

    /// Numbers of the members, in order of joining.
    pub fn members(&self) -> Vec<u8> {
        let members = self.group().members().iter();
        members.map(|it| it.id.0.as_bytes()[15]).collect()
    }
}
