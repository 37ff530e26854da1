//! Plays the leader of one replica, for tests of the layers above: what it appends is committed when
//! the test says so.

use std::collections::BTreeMap;

use bytes::Bytes;
use openraft::raft::{AppendEntriesRequest, AppendEntriesResponse};
use qute_proto::ids::{BrokerId, Offset, ReplicaId};

use super::checkpoint::Checkpoint;
use super::codec::vote;
use super::group::GroupHandle;
use super::types::{
    Entry, EntryPayload, Membership, Payload, ReplicaNode, StoredMembership, log_id,
};

/// A leader that there is not: replica 99 on broker 9. The replica under test is its only voter's
/// learner, so it never stands for election.
pub(crate) struct PlayedLeader {
    pub(crate) follower: GroupHandle,
    pub(crate) term: u64,
}

/// What [`PlayedLeader::append`] puts into one entry.
pub(crate) enum Played {
    /// The members, as every log begins.
    Members,
    /// A batch of so many records.
    Batch(Bytes, u32),
    /// A command of the state machine.
    Command(Bytes),
}

const TIME_MS: u64 = 1_700_000_000_000;

impl PlayedLeader {
    fn members(&self) -> Membership {
        let own = self.follower.replica().0;
        let node = |broker| ReplicaNode {
            broker: BrokerId(broker),
        };
        let nodes = BTreeMap::from([(99, node(9)), (own, node(1))]);
        Membership::new(vec![[99].into()], nodes).unwrap()
    }

    /// Appends entries of this leader's term behind `previous` (term, index), and tells that
    /// everything up to `committed` (term, index) is.
    pub(crate) async fn append(
        &self,
        previous: Option<(u64, u64)>,
        entries: Vec<Played>,
        committed: Option<(u64, u64)>,
    ) {
        let first = previous.map_or(0, |(_, index)| index + 1);
        let entries = (first..).zip(entries).map(|(index, entry)| Entry {
            log_id: log_id(self.term, index),
            payload: match entry {
                Played::Members => EntryPayload::Membership(self.members()),
                Played::Batch(bytes, records) => {
                    EntryPayload::Normal(Payload::batch(bytes, records, TIME_MS))
                }
                Played::Command(bytes) => EntryPayload::Normal(Payload::command(bytes, TIME_MS)),
            },
        });
        let request = AppendEntriesRequest {
            vote: vote(self.term, 99, true),
            prev_log_id: previous.map(|(term, index)| log_id(term, index)),
            entries: entries.collect(),
            leader_commit: committed.map(|(term, index)| log_id(term, index)),
        };
        let answer = self.follower.append_entries(request).await.unwrap();
        assert_eq!(answer, AppendEntriesResponse::Success);
    }

    /// Installs a state machine's checkpoint of everything up to `last` (term, index).
    pub(crate) async fn install(&self, last: (u64, u64), next_offset: Offset, state: Bytes) {
        let last = log_id(last.0, last.1);
        let membership =
            StoredMembership::new(Some(log_id(last.leader_id.term, 0)), self.members());
        let checkpoint = Checkpoint {
            last,
            next_offset,
            broker_time_ms: TIME_MS,
            membership: membership.clone(),
            state,
        };
        let snapshot = openraft::Snapshot {
            meta: openraft::SnapshotMeta {
                last_log_id: Some(last),
                last_membership: membership,
            },
            snapshot: checkpoint.encode(),
        };
        let raft = self.follower.raft();
        let installed = raft.install_full_snapshot(vote(self.term, 99, true), snapshot);
        installed.await.unwrap();
    }

    /// The replica that the follower hears from.
    pub(crate) fn replica(&self) -> ReplicaId {
        ReplicaId(99)
    }
}
