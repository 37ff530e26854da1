//! `RaftStateMachine` over [`StateMachine`].

use std::io;

use bytes::Bytes;
use futures::{Stream, TryStreamExt};
use openraft::storage::{EntryResponder, RaftStateMachine};
use openraft::{EntryPayload, OptionalSend, RaftSnapshotBuilder};
use qute_proto::ids::Offset;
use tokio::sync::watch;

use super::codec;
use super::group::AppliedMark;
use super::state_machine::{AppliedEntry, EntryKind, StateMachine};
use super::types::{Applied, Entry, LogId, PayloadKind, StoredMembership, TypeConfig};

/// A group's snapshot: one checkpoint envelope.
pub type SnapshotData = Bytes;
type Snapshot = openraft::Snapshot<
    super::types::CommittedLeaderId,
    u64,
    super::types::ReplicaNode,
    SnapshotData,
>;
type SnapshotMeta =
    openraft::SnapshotMeta<super::types::CommittedLeaderId, u64, super::types::ReplicaNode>;

/// Owns the state machine of one replica.
pub struct Machine {
    state: Box<dyn StateMachine>,
    last: Option<LogId>,
    membership: StoredMembership,
    next_offset: Offset,
    mark: watch::Sender<AppliedMark>,
}

impl Machine {
    /// A machine in front of the first entry.
    pub fn new(state: Box<dyn StateMachine>) -> (Self, watch::Receiver<AppliedMark>) {
        let (mark, applied) = watch::channel(AppliedMark::default());
        let machine = Self {
            state,
            last: None,
            membership: StoredMembership::default(),
            next_offset: Offset(0),
            mark,
        };
        (machine, applied)
    }

    fn apply_entry(&mut self, entry: Entry) -> Applied {
        let mut applied = AppliedEntry {
            term: entry.log_id.leader_id.term,
            index: entry.log_id.index,
            kind: EntryKind::Blank,
            base_offset: self.next_offset,
            records: 0,
            broker_time_ms: 0,
            payload: Bytes::new(),
        };
        match entry.payload {
            EntryPayload::Blank => {}
            EntryPayload::Normal(payload) => {
                applied.kind = match payload.kind {
                    PayloadKind::Batch => EntryKind::Batch,
                    PayloadKind::Command => EntryKind::Command,
                };
                applied.records = payload.records;
                applied.broker_time_ms = payload.broker_time_ms;
                applied.payload = payload.bytes;
            }
            EntryPayload::Membership(membership) => {
                applied.kind = EntryKind::Membership;
                applied.payload = codec::encode_membership(&membership);
                self.membership = StoredMembership::new(Some(entry.log_id), membership);
            }
        }
        let reply = self.state.apply(&applied);
        self.last = Some(entry.log_id);
        self.next_offset = Offset(self.next_offset.0 + u64::from(applied.records));
        Applied {
            index: applied.index,
            base_offset: (applied.kind == EntryKind::Batch).then_some(applied.base_offset),
            reply,
        }
    }

    fn publish(&self) {
        self.mark.send_replace(AppliedMark {
            term: self.last.map_or(0, |last| last.leader_id.term),
            next_index: self.last.map_or(0, |last| last.index + 1),
            next_offset: self.next_offset,
        });
    }
}

/// Builds a snapshot from the checkpoint at the log start.
pub struct SnapshotBuilder;

impl RaftSnapshotBuilder<TypeConfig> for SnapshotBuilder {
    type SnapshotData = SnapshotData;

    async fn build_snapshot(&mut self) -> Result<Snapshot, io::Error> {
        Err(io::Error::from(io::ErrorKind::Unsupported))
    }
}

impl RaftStateMachine<TypeConfig> for Machine {
    type SnapshotData = SnapshotData;
    type SnapshotBuilder = SnapshotBuilder;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), io::Error> {
        Ok((self.last, self.membership.clone()))
    }

    async fn apply<Strm>(&mut self, mut entries: Strm) -> Result<(), io::Error>
    where
        Strm: Stream<Item = Result<EntryResponder<TypeConfig>, io::Error>> + Unpin + OptionalSend,
    {
        while let Some((entry, responder)) = entries.try_next().await? {
            let applied = self.apply_entry(entry);
            if let Some(responder) = responder {
                responder.send(applied);
            }
        }
        self.publish();
        Ok(())
    }

    async fn get_snapshot_builder(&mut self) -> Self::SnapshotBuilder {
        SnapshotBuilder
    }

    async fn install_snapshot(
        &mut self,
        _meta: &SnapshotMeta,
        _snapshot: SnapshotData,
    ) -> Result<(), io::Error> {
        Err(io::Error::from(io::ErrorKind::Unsupported))
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot>, io::Error> {
        Ok(None)
    }
}
