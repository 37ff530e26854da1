//! The state machine of a `__groups` partition, and the view of it that coordinators keep.
//!
//! [`GroupsMachine`] runs on the Raft group's apply task and reads nothing but the entry (S13).
//! Coordinators look through [`GroupsState`], which is up to date before the group's applied watch
//! moves. What has changed is noted by name, up to a limit: replicas that nobody coordinates on
//! collect no more than that.

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use prost::Message as _;
use qute_proto::internal::{GroupsCommand, GroupsReply};
use qute_proto::v1::ErrorCode;
use tokio::sync::Notify;

use super::state::{At, Groups};
use crate::raft::{AppliedEntry, EntryKind, RestoreError, StateMachine};

/// Names noted as changed, at most; past that, all count as changed.
const CHANGED_MAX: usize = 1024;

/// Which groups have changed. A commit is no change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changed {
    /// Any of them may have.
    All,
    /// These, in the order of their names. Some may be gone.
    Groups(BTreeSet<Arc<str>>),
}

impl Default for Changed {
    fn default() -> Self {
        Self::Groups(BTreeSet::new())
    }
}

impl Changed {
    fn is_empty(&self) -> bool {
        matches!(self, Self::Groups(names) if names.is_empty())
    }

    fn note(&mut self, changed: Vec<Arc<str>>) {
        let Self::Groups(names) = self else {
            return;
        };
        names.extend(changed);
        if names.len() > CHANGED_MAX {
            *self = Self::All;
        }
    }
}

#[derive(Debug, Default)]
struct Shared {
    /// Held for one command or one look: never across an await, never during I/O.
    groups: RwLock<Groups>,
    /// Held for an insert or a take. Taken after `groups` has been let go.
    changed: Mutex<Changed>,
    wake: Notify,
}

impl Shared {
    fn note(&self, note: impl FnOnce(&mut Changed)) {
        note(&mut self.changed.lock());
        self.wake.notify_one();
    }
}

/// The applied state as coordinators see it. Cheap to clone.
#[derive(Debug, Clone)]
pub struct GroupsState {
    shared: Arc<Shared>,
}

impl GroupsState {
    /// Looks at the groups. Applying waits meanwhile: be short.
    pub fn read<T>(&self, look: impl FnOnce(&Groups) -> T) -> T {
        look(&self.shared.groups.read())
    }

    /// Which groups have changed since the last call; waits until there is one. For one caller at a
    /// time: each change is told once.
    ///
    /// # Cancel safety
    /// Nothing is lost.
    pub async fn changed(&self) -> Changed {
        loop {
            // Whatever comes between this look and the wait leaves a permit.
            let changed = self.take_changed();
            if !changed.is_empty() {
                return changed;
            }
            self.shared.wake.notified().await;
        }
    }

    /// Which groups have changed since the last call, perhaps none.
    #[must_use]
    pub fn take_changed(&self) -> Changed {
        std::mem::take(&mut self.shared.changed.lock())
    }
}

/// See the module.
#[derive(Debug)]
pub struct GroupsMachine {
    shared: Arc<Shared>,
}

impl GroupsMachine {
    /// The state before the first entry, and the view of it.
    #[must_use]
    pub fn new() -> (Self, GroupsState) {
        let shared = Arc::new(Shared::default());
        let machine = Self {
            shared: Arc::clone(&shared),
        };
        (machine, GroupsState { shared })
    }

    fn apply_command(&self, entry: &AppliedEntry) -> GroupsReply {
        // The payload's bytes are shared while it is read; nothing of them stays in the state.
        let command = match GroupsCommand::decode(entry.payload.clone()) {
            Ok(GroupsCommand {
                command: Some(command),
            }) => command,
            // S25 keeps a later version's command from being proposed before all know it.
            Ok(GroupsCommand { command: None }) => return not_understood("unknown command"),
            Err(error) => return not_understood(&error.to_string()),
        };
        let at = At {
            index: entry.index,
            time_ms: entry.broker_time_ms,
        };
        let applied = self.shared.groups.write().apply(at, command);
        if !applied.changed.is_empty() {
            self.shared.note(|changed| changed.note(applied.changed));
        }
        applied.reply
    }
}

fn not_understood(why: &str) -> GroupsReply {
    GroupsReply {
        code: ErrorCode::InvalidArgument.into(),
        message: why.to_owned(),
        ..GroupsReply::default()
    }
}

impl StateMachine for GroupsMachine {
    // S13: nothing but the entry and the state made of earlier entries.
    fn apply(&mut self, entry: &AppliedEntry) -> Bytes {
        if entry.kind == EntryKind::Command {
            return self.apply_command(entry).encode_to_vec().into();
        }
        self.shared.groups.write().advance(entry.broker_time_ms);
        Bytes::new()
    }

    fn checkpoint(&self) -> Bytes {
        self.shared.groups.read().encode()
    }

    fn restore(&mut self, checkpoint: &[u8]) -> Result<(), RestoreError> {
        let restored = if checkpoint.is_empty() {
            Groups::default()
        } else {
            Groups::decode(checkpoint)?
        };
        *self.shared.groups.write() = restored;
        self.shared.note(|changed| *changed = Changed::All);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use qute_proto::ids::{MemberId, Offset};
    use qute_proto::internal::{CommitClaims, JoinMember};
    use qute_proto::v1::{AssignorVersion, CommitOffsetsRequest, Join, OffsetCommit};
    use uuid::Uuid;

    use super::super::state::command::{Command, decode_reply, encode};
    use super::*;

    fn entry(index: u64, kind: EntryKind, payload: Bytes) -> AppliedEntry {
        AppliedEntry {
            term: 1,
            index,
            kind,
            base_offset: Offset(0),
            records: 0,
            broker_time_ms: 1000 + index,
            payload,
        }
    }

    fn join(group: &str) -> Command {
        Command::Join(JoinMember {
            join: Some(Join {
                group: group.to_owned(),
                member_id: MemberId(Uuid::from_u128(7)).to_wire(),
                member_epoch: 1,
                assignors: vec![AssignorVersion::default()],
                ..Join::default()
            }),
            ..JoinMember::default()
        })
    }

    fn apply(machine: &mut GroupsMachine, index: u64, command: Command) -> GroupsReply {
        let reply = machine.apply(&entry(index, EntryKind::Command, encode(command)));
        decode_reply(&reply).unwrap()
    }

    #[test]
    fn applied_command_is_seen_and_told() {
        let (mut machine, state) = GroupsMachine::new();
        assert_eq!(state.changed().now_or_never(), None);
        assert_eq!(apply(&mut machine, 1, join("b")).code, 0);
        assert_eq!(apply(&mut machine, 2, join("a")).code, 0);
        assert_eq!(state.read(|groups| groups.get("b").unwrap().revision()), 1);
        let both = Changed::Groups(["a".into(), "b".into()].into());
        assert_eq!(state.changed().now_or_never(), Some(both));
        assert_eq!(state.changed().now_or_never(), None);
    }

    #[tokio::test]
    async fn waiting_for_a_change_ends_with_the_next_one() {
        let (mut machine, state) = GroupsMachine::new();
        let waiting = tokio::spawn(async move { state.changed().await });
        tokio::task::yield_now().await;
        apply(&mut machine, 1, join("a"));
        let changed = Changed::Groups(["a".into()].into());
        assert_eq!(waiting.await.unwrap(), changed);
    }

    #[test]
    fn commit_is_no_change_to_be_told() {
        let (mut machine, state) = GroupsMachine::new();
        let commit = || {
            Command::Commit(CommitClaims {
                request: Some(CommitOffsetsRequest {
                    group: "a".to_owned(),
                    offsets: vec![OffsetCommit {
                        topic_id: MemberId(Uuid::from_u128(9)).to_wire(),
                        ..OffsetCommit::default()
                    }],
                    ..CommitOffsetsRequest::default()
                }),
            })
        };
        apply(&mut machine, 1, commit());
        // The group is new.
        assert!(!state.take_changed().is_empty());
        apply(&mut machine, 2, commit());
        assert!(state.take_changed().is_empty());
    }

    #[test]
    fn changes_that_nobody_asks_for_take_no_more_than_their_limit() {
        let (mut machine, state) = GroupsMachine::new();
        for index in 0..=1100 {
            apply(&mut machine, index, join(&format!("g{index}")));
        }
        assert_eq!(state.take_changed(), Changed::All);
        apply(&mut machine, 2000, join("x"));
        assert_eq!(state.take_changed(), Changed::Groups(["x".into()].into()));
    }

    #[test]
    fn what_is_no_command_is_answered_and_changes_nothing() {
        let (mut machine, _) = GroupsMachine::new();
        for payload in [&b""[..], b"\xff\xff\xff", b"\xfa\x01\x00"] {
            let entry = entry(0, EntryKind::Command, Bytes::copy_from_slice(payload));
            let before = machine.checkpoint();
            let reply = decode_reply(&machine.apply(&entry)).unwrap();
            assert_eq!(reply.code(), ErrorCode::InvalidArgument, "{payload:?}");
            assert_eq!(machine.checkpoint(), before);
        }
    }

    #[test]
    fn other_entries_bring_time_only() {
        let (mut machine, state) = GroupsMachine::new();
        for (index, kind) in (5..).zip([EntryKind::Blank, EntryKind::Membership]) {
            assert!(machine.apply(&entry(index, kind, Bytes::new())).is_empty());
            assert_eq!(state.read(Groups::time_ms), 1000 + index);
        }
    }

    #[test]
    fn restored_state_is_seen_and_told() {
        let (mut machine, _) = GroupsMachine::new();
        apply(&mut machine, 1, join("a"));
        let (mut second, state) = GroupsMachine::new();
        second.restore(&machine.checkpoint()).unwrap();
        assert_eq!(state.read(Groups::len), 1);
        assert_eq!(state.take_changed(), Changed::All);
        assert!(second.restore(b"\x09").is_err());
        assert_eq!(state.read(Groups::len), 1);
        second.restore(&[]).unwrap();
        assert!(state.read(Groups::is_empty));
    }
}
