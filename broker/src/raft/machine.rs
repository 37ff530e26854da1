//! `RaftStateMachine` over [`StateMachine`]: apply, checkpoints, snapshots at the log start.
//!
//! The state is in memory. It is checkpointed where segments roll (a log of commands: whenever about
//! as much of it has been applied as a checkpoint has bytes, see [`LogUse`]), rebuilt at start from the
//! newest checkpoint and the entries after it, and sent to a new replica as it was *at the log
//! start*, never as it is now: that replica then receives every retained entry as ordinary
//! replication. (A snapshot at last-applied would delete retained records there.)
//!
//! ```text
//!   log start                    segment rolls            last applied     log end
//!      |-----------+-----------------+-----------------------|---------------|
//!      C0          C1                C2                      state
//!      ^ Raft snapshot               ^ restart begins here
//! ```
//!
//! S1: a checkpoint is saved only when everything it covers is synced.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, TryStreamExt};
use openraft::storage::{ApplyResponder, EntryResponder, RaftStateMachine};
use openraft::{EntryPayload, OptionalSend, RaftSnapshotBuilder};
use qute_proto::ids::Offset;
use tokio::sync::watch;
use tokio_util::sync::DropGuard;

use super::checkpoint::Checkpoint;
use super::codec;
use super::group::AppliedMark;
use super::groups::LogUse;
use super::lane::SNAPSHOT_BYTES_MAX;
use super::log_store::position;
use super::state_machine::{AppliedEntry, EntryKind, StateMachine};
use super::types::{
    Applied, CommittedLeaderId, Entry, LogId, PayloadKind, ReplicaNode, StoredMembership,
    TypeConfig,
};
use crate::storage::Log;

/// A log of commands is checkpointed after this many bytes, or as many as the state has: what is
/// applied again at a restart is bounded, and checkpoints cost no more than the log does.
const COMMAND_BYTES_MIN: u64 = 1 << 20;
/// What an entry counts for beyond its payload.
const ENTRY_OVERHEAD: u64 = 64;
/// States that may wait in memory to be saved.
const UNSAVED_MAX: usize = 2;

/// Entries applied between two moves of the applied watch, at most.
const PUBLISH_EVERY: usize = 256;

/// A group's snapshot: one checkpoint envelope.
pub type SnapshotData = Bytes;
pub(super) type SnapshotMeta = openraft::SnapshotMeta<CommittedLeaderId, u64, ReplicaNode>;
type Snapshot = openraft::Snapshot<CommittedLeaderId, u64, ReplicaNode, SnapshotData>;

/// Why a replica's state cannot be rebuilt from what is on disk: it is quarantined.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unusable {
    /// S1: the log ends below a checkpoint.
    #[error("its log ends at {end:?}, below its checkpoint at index {checkpoint}")]
    LogEndsBelowCheckpoint { checkpoint: u64, end: Option<u64> },
    /// The checkpoint at an index is of another entry than the log holds there.
    #[error("its checkpoint at index {index} is of term {checkpoint}, its log holds term {log}")]
    OtherTerm {
        index: u64,
        checkpoint: u64,
        log: u64,
    },
    /// They cannot be read.
    #[error("its checkpoints cannot be read: {0}")]
    Unreadable(String),
    /// Entries were purged, and no usable checkpoint covers them.
    #[error("its log is purged up to index {purged}, and no usable checkpoint covers that: {last}")]
    NoCheckpoint { purged: u64, last: String },
}

/// Owns the state machine of one replica. One task at a time: openraft's worker.
pub struct Machine {
    state: Box<dyn StateMachine>,
    log: Arc<Log>,
    last: Option<LogId>,
    membership: StoredMembership,
    next_offset: Offset,
    // Of the last entry that brought one (S19: it never falls).
    broker_time_ms: u64,
    mark: watch::Sender<AppliedMark>,
    log_use: LogUse,
    // Taken, oldest first, waiting until what they cover is synced (S1).
    unsaved: VecDeque<Checkpoint>,
    // One past the index of the newest checkpoint taken; a segment that begins behind it asks for
    // the next one.
    checkpoint_after: u64,
    // Bytes applied since the newest checkpoint, and bytes of that one's state.
    applied_bytes: u64,
    state_bytes: u64,
    // Moves to the index of each checkpoint that is saved.
    saved: watch::Sender<u64>,
    // Dropped last of all: the log may then be opened again.
    _closed: Option<Arc<DropGuard>>,
}

/// What of a machine can be followed.
pub(super) struct Watched {
    /// How far it has applied.
    pub applied: watch::Receiver<AppliedMark>,
    /// Index of the checkpoint saved last. Closed when the machine goes.
    pub saved: watch::Receiver<u64>,
}

impl Machine {
    /// Rebuilds the state from the newest usable checkpoint.
    pub(super) fn recover(
        mut state: Box<dyn StateMachine>,
        log: Arc<Log>,
        log_use: LogUse,
        closed: Option<Arc<DropGuard>>,
    ) -> Result<(Self, Watched), Unusable> {
        let checkpoint = newest_usable(&log, state.as_mut())?;
        let (mark, applied) = watch::channel(AppliedMark::default());
        let newest = checkpoint.as_ref().map_or(0, |it| it.last.index);
        let (saved, saved_watch) = watch::channel(newest);
        let mut machine = Self {
            state,
            log,
            last: None,
            membership: StoredMembership::default(),
            next_offset: Offset(0),
            broker_time_ms: 0,
            mark,
            log_use,
            unsaved: VecDeque::new(),
            checkpoint_after: 0,
            applied_bytes: 0,
            state_bytes: 0,
            saved,
            _closed: closed,
        };
        if let Some(checkpoint) = checkpoint {
            machine.stand_at(&checkpoint);
        }
        machine.publish();
        let watched = Watched {
            applied,
            saved: saved_watch,
        };
        Ok((machine, watched))
    }

    fn stand_at(&mut self, checkpoint: &Checkpoint) {
        self.last = Some(checkpoint.last);
        self.membership = checkpoint.membership.clone();
        self.next_offset = checkpoint.next_offset;
        self.broker_time_ms = checkpoint.broker_time_ms;
        self.checkpoint_after = checkpoint.last.index + 1;
        self.applied_bytes = 0;
        self.state_bytes = len(&checkpoint.state);
        self.unsaved.clear();
    }

    fn apply_entry(&mut self, entry: Entry) -> Applied {
        let mut applied = AppliedEntry {
            term: entry.log_id.leader_id.term,
            index: entry.log_id.index,
            kind: EntryKind::Blank,
            base_offset: self.next_offset,
            records: 0,
            broker_time_ms: self.broker_time_ms,
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
                // The log does not let it fall.
                self.broker_time_ms = payload.broker_time_ms;
                applied.broker_time_ms = payload.broker_time_ms;
                applied.payload = payload.bytes;
            }
            EntryPayload::Membership(membership) => {
                applied.kind = EntryKind::Membership;
                applied.payload = codec::encode_membership(&membership);
                self.membership = StoredMembership::new(Some(entry.log_id), membership);
            }
        }
        self.applied_bytes += ENTRY_OVERHEAD + len(&applied.payload);
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

    /// Readers first: whoever gets an answer must find what it is about.
    fn answer(&self, answers: &mut Vec<(ApplyResponder<TypeConfig>, Applied)>) {
        self.publish();
        for (responder, applied) in answers.drain(..) {
            responder.send(applied);
        }
    }

    fn checkpoint(&self, last: LogId) -> Checkpoint {
        Checkpoint {
            last,
            next_offset: self.next_offset,
            broker_time_ms: self.broker_time_ms,
            membership: self.membership.clone(),
            state: self.state.checkpoint(),
        }
    }

    /// Whether it is time for a checkpoint after `last`; `roll` is [`next_roll`](Self::next_roll).
    fn is_checkpoint_due(&self, last: LogId, roll: Option<u64>) -> bool {
        match self.log_use {
            LogUse::Records => roll.is_some_and(|base| last.index + 1 >= base),
            LogUse::Commands => self.applied_bytes >= COMMAND_BYTES_MIN.max(self.state_bytes),
        }
    }

    fn take_checkpoint(&mut self, last: LogId) {
        let checkpoint = self.checkpoint(last);
        self.checkpoint_after = last.index + 1;
        self.applied_bytes = 0;
        self.state_bytes = len(&checkpoint.state);
        if checkpoint.state.len() > SNAPSHOT_BYTES_MAX {
            tracing::error!(
                replica = %self.log.key(), bytes = self.state_bytes, bytes_max = SNAPSHOT_BYTES_MAX,
                "the state is too large to be sent: a replica that falls far behind stays there"
            );
        }
        if self.log_use == LogUse::Commands {
            // Each makes the one before it needless, and the oldest is the next to be covered.
            self.unsaved.truncate(UNSAVED_MAX - 1);
            self.log.roll();
        }
        self.unsaved.push_back(checkpoint);
    }

    /// The first segment that begins behind the newest checkpoint, if it exists yet.
    fn next_roll(&self) -> Option<u64> {
        if self.log.active_base() <= self.checkpoint_after {
            return None;
        }
        let bases = self.log.segment_bases();
        bases.into_iter().find(|base| *base > self.checkpoint_after)
    }

    /// Saves the checkpoints that wait, once what they cover is synced (S1). Off this task: each is
    /// a sync of its own.
    fn save_when_synced(&mut self) {
        let synced = self.log.synced_index();
        let covered = |it: &Checkpoint| synced >= Some(it.last.index);
        let count = self.unsaved.iter().take_while(|it| covered(it)).count();
        if count == 0 {
            return;
        }
        let mut ready: Vec<Checkpoint> = self.unsaved.drain(..count).collect();
        if self.log_use == LogUse::Commands {
            ready.drain(..ready.len() - 1);
        }
        let (log, saved) = (Arc::clone(&self.log), self.saved.clone());
        tokio::task::spawn_blocking(move || {
            for checkpoint in ready {
                let index = checkpoint.last.index;
                match log.save_checkpoint(index, &checkpoint.encode()) {
                    Ok(()) => _ = saved.send_replace(index),
                    // The next restart begins at an older one; nothing is lost.
                    Err(error) => tracing::warn!(index, %error, "checkpoint not saved"),
                }
            }
        });
    }
}

fn len(bytes: &Bytes) -> u64 {
    u64::try_from(bytes.len()).unwrap_or(u64::MAX)
}

/// The newest checkpoint that fits the log, with the state restored from it.
fn newest_usable(log: &Log, state: &mut dyn StateMachine) -> Result<Option<Checkpoint>, Unusable> {
    let purged = log.purged();
    let end = log.last().or(purged).map(|last| last.index);
    // S1: a checkpoint is made of synced entries, so the log cannot end below it.
    if let Some(newest) = log.checkpoint_indexes().last()
        && end < Some(*newest)
    {
        return Err(Unusable::LogEndsBelowCheckpoint {
            checkpoint: *newest,
            end,
        });
    }
    let mut reason = "there is none".to_owned();
    for index in log.checkpoint_indexes().into_iter().rev() {
        if purged.is_some_and(|purged| index < purged.index) {
            break;
        }
        let read = log.checkpoint(index);
        let Some(bytes) = read.map_err(|error| Unusable::Unreadable(error.to_string()))? else {
            reason = format!("the one at index {index} is damaged");
            continue;
        };
        let checkpoint = match Checkpoint::decode(bytes) {
            Ok(checkpoint) if checkpoint.last.index == index => checkpoint,
            Ok(_) => {
                reason = format!("the one at index {index} says it is of another");
                continue;
            }
            Err(error) => {
                reason = format!("the one at index {index}: {error}");
                tracing::warn!(index, %error, "checkpoint passed over");
                continue;
            }
        };
        let covered = purged.filter(|purged| purged.index == index);
        let term = covered.map(|purged| purged.term).or(log.term_at(index));
        if term != Some(checkpoint.last.leader_id.term) {
            return Err(Unusable::OtherTerm {
                index,
                checkpoint: checkpoint.last.leader_id.term,
                log: term.unwrap_or(0),
            });
        }
        match state.restore(&checkpoint.state) {
            Ok(()) => return Ok(Some(checkpoint)),
            Err(error) => {
                reason = format!("the one at index {index}: {error}");
                tracing::warn!(index, %error, "checkpoint passed over");
            }
        }
    }
    if let Some(purged) = purged {
        return Err(Unusable::NoCheckpoint {
            purged: purged.index,
            last: reason,
        });
    }
    // From the first entry on.
    state.restore(&[]).map_err(|error| Unusable::NoCheckpoint {
        purged: 0,
        last: error.to_string(),
    })?;
    Ok(None)
}

/// The newest checkpoint at or below the log start: the Raft snapshot (S17). What is purged is
/// covered by it.
async fn at_log_start(log: &Arc<Log>, log_start: Offset) -> Result<Option<Checkpoint>, io::Error> {
    if log.checkpoint_indexes().is_empty() {
        return Ok(None);
    }
    let log = Arc::clone(log);
    let found = tokio::task::spawn_blocking(move || {
        let purged = log.purged();
        for index in log.checkpoint_indexes().into_iter().rev() {
            let bytes = log.checkpoint(index)?;
            let Some(it) = bytes.and_then(|bytes| Checkpoint::decode(bytes).ok()) else {
                continue;
            };
            if it.next_offset <= log_start || purged == Some(position(it.last)) {
                let covers = purged.is_none_or(|purged| purged.index <= it.last.index);
                return Ok(covers.then_some(it));
            }
        }
        Ok::<_, crate::storage::Error>(None)
    });
    found.await?.map_err(io::Error::other)
}

fn snapshot(checkpoint: &Checkpoint) -> Snapshot {
    Snapshot {
        meta: SnapshotMeta {
            last_log_id: Some(checkpoint.last),
            last_membership: checkpoint.membership.clone(),
        },
        snapshot: checkpoint.encode(),
    }
}

/// Builds the snapshot: the checkpoint at the log start.
pub struct SnapshotBuilder {
    log: Arc<Log>,
    log_start: Offset,
}

impl RaftSnapshotBuilder<TypeConfig> for SnapshotBuilder {
    type SnapshotData = SnapshotData;

    async fn build_snapshot(&mut self) -> Result<Snapshot, io::Error> {
        at_log_start(&self.log, self.log_start)
            .await?
            .map(|checkpoint| snapshot(&checkpoint))
            .ok_or_else(|| io::Error::other("there is no checkpoint at or below the log start"))
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
        let mut answers = Vec::new();
        let mut unpublished = 0;
        let mut roll = self.next_roll();
        while let Some((entry, responder)) = entries.try_next().await? {
            let last = entry.log_id;
            let applied = self.apply_entry(entry);
            if let Some(responder) = responder {
                answers.push((responder, applied));
            }
            if self.is_checkpoint_due(last, roll) {
                self.take_checkpoint(last);
                roll = self.next_roll();
            }
            unpublished += 1;
            if unpublished >= PUBLISH_EVERY {
                self.answer(&mut answers);
                unpublished = 0;
            }
        }
        self.answer(&mut answers);
        self.save_when_synced();
        Ok(())
    }

    async fn try_create_snapshot_builder(&mut self, force: bool) -> Option<SnapshotBuilder> {
        let log_start = self.state.log_start();
        let found = at_log_start(&self.log, log_start).await;
        if !force && !matches!(found, Ok(Some(_))) {
            // Nothing to cut: the log starts at its first entry.
            return None;
        }
        Some(self.get_snapshot_builder().await)
    }

    async fn get_snapshot_builder(&mut self) -> SnapshotBuilder {
        SnapshotBuilder {
            log: Arc::clone(&self.log),
            log_start: self.state.log_start(),
        }
    }

    async fn install_snapshot(
        &mut self,
        meta: &SnapshotMeta,
        data: SnapshotData,
    ) -> Result<(), io::Error> {
        let checkpoint = Checkpoint::decode(data.clone()).map_err(io::Error::other)?;
        if Some(checkpoint.last) != meta.last_log_id {
            return Err(io::Error::other(
                "the snapshot covers another entry than it says",
            ));
        }
        let last = checkpoint.last;
        if self.log.term_at(last.index) == Some(last.leader_id.term) {
            // The log holds the entry, and perhaps acknowledged ones behind it: they stay, and the
            // log is cut in front of them.
            self.log.sync().await.map_err(io::Error::other)?;
            let log = Arc::clone(&self.log);
            let saved = tokio::task::spawn_blocking(move || log.save_checkpoint(last.index, &data));
            saved.await?.map_err(io::Error::other)?;
        } else {
            self.log
                .reset_to(
                    position(last),
                    checkpoint.next_offset.0,
                    checkpoint.broker_time_ms,
                    data,
                )
                .await
                .map_err(io::Error::other)?;
        }
        self.state
            .restore(&checkpoint.state)
            .map_err(io::Error::other)?;
        self.stand_at(&checkpoint);
        self.publish();
        Ok(())
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot>, io::Error> {
        let checkpoint = at_log_start(&self.log, self.state.log_start()).await?;
        Ok(checkpoint.as_ref().map(snapshot))
    }
}
