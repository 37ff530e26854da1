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
