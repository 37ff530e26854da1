//! openraft's own storage suite against the real store.
//!
//! What is left out, and why, is in `docs/adr/0003-raft-conformance.md`.

use std::fmt::Debug;
use std::io;
use std::ops::{RangeBounds, RangeInclusive};
use std::sync::Arc;

use bytes::Bytes;
use futures::Stream;
use openraft::entry::RaftEntry;
use openraft::storage::{IOFlushed, LogState, RaftLogReader, RaftLogStorage};
use openraft::testing::log::{StoreBuilder, Suite};
use openraft::{OptionalSend, StorageError};
use qute_proto::ids::{Offset, PartitionId, ReplicaId, TopicId};
use tempfile::TempDir;

use super::super::checkpoint::Checkpoint;
use super::super::groups::LogUse;
use super::super::log_store::{LogStore, position};
use super::super::machine::Machine;
use super::super::state_machine::{AppliedEntry, RestoreError, StateMachine};
use super::super::types::{Entry, LogId, StoredMembership, TypeConfig, Vote, log_id};
use crate::storage::{Log, LogConfig, ReplicaKey, Store, StoreConfig};

/// Counts what it applies.
#[derive(Default)]
struct Counter {
    applied: u64,
}

impl StateMachine for Counter {
    fn apply(&mut self, _entry: &AppliedEntry) -> Bytes {
        self.applied += 1;
        Bytes::new()
    }

    fn checkpoint(&self) -> Bytes {
        Bytes::copy_from_slice(&self.applied.to_le_bytes())
    }

    fn restore(&mut self, checkpoint: &[u8]) -> Result<(), RestoreError> {
        self.applied = match checkpoint.try_into() {
            Ok(bytes) => u64::from_le_bytes(bytes),
            Err(_) if checkpoint.is_empty() => 0,
            Err(_) => return Err(RestoreError::new("not eight bytes")),
        };
        Ok(())
    }
}

/// The real log store, with what the suite leaves out of the story put back in:
///
/// - it purges without a checkpoint, which S1 forbids: one is saved first;
/// - it purges beyond the end of the log: here that is the install of a snapshot;
/// - it begins an empty log at index 1 or 2: the entries in front are filled in.
///
/// Everything else goes straight through.
#[derive(Clone)]
struct Checkpointed {
    store: LogStore,
    log: Arc<Log>,
}

impl RaftLogReader<TypeConfig> for Checkpointed {
    async fn entries_stream<RB>(
        &mut self,
        range: RB,
    ) -> impl Stream<Item = Result<Entry, io::Error>> + OptionalSend
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        self.store.entries_stream(range).await
    }

    async fn try_get_log_entries<RB>(&mut self, range: RB) -> Result<Vec<Entry>, io::Error>
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        self.store.try_get_log_entries(range).await
    }

    async fn read_vote(&mut self) -> Result<Option<Vote>, io::Error> {
        self.store.read_vote().await
    }

    async fn limited_get_log_entries(
        &mut self,
        start: u64,
        end: u64,
    ) -> Result<Vec<Entry>, io::Error> {
        self.store.limited_get_log_entries(start, end).await
    }

    async fn get_key_log_ids(
        &mut self,
        range: RangeInclusive<LogId>,
    ) -> Result<Vec<LogId>, io::Error> {
        self.store.get_key_log_ids(range).await
    }
}

impl RaftLogStorage<TypeConfig> for Checkpointed {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> Result<LogState<TypeConfig>, io::Error> {
        self.store.get_log_state().await
    }

    async fn get_log_reader(&mut self) -> Self::LogReader {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> Result<(), io::Error> {
        self.store.save_vote(vote).await
    }

    async fn save_committed(&mut self, committed: Option<LogId>) -> Result<(), io::Error> {
        self.store.save_committed(committed).await
    }

    async fn read_committed(&mut self) -> Result<Option<LogId>, io::Error> {
        self.store.read_committed().await
    }

    async fn append<I>(
        &mut self,
        entries: I,
        callback: IOFlushed<TypeConfig>,
    ) -> Result<(), io::Error>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let mut entries: Vec<Entry> = entries.into_iter().collect();
        if self.log.last().is_none() && self.log.purged().is_none() {
            let first = entries.first().map_or(log_id(0, 0), |entry| entry.log_id);
            let term = first.leader_id.term;
            let filling = (0..first.index).map(|index| Entry::new_blank(log_id(term, index)));
            entries.splice(..0, filling.collect::<Vec<_>>());
        }
        self.store.append(entries, callback).await
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> Result<(), io::Error> {
        self.store.truncate_after(last).await
    }

    async fn purge(&mut self, upto: LogId) -> Result<(), io::Error> {
        self.log.sync().await.map_err(io::Error::other)?;
        let checkpoint = Checkpoint {
            last: upto,
            next_offset: Offset(0),
            broker_time_ms: 0,
            membership: StoredMembership::default(),
            state: Bytes::new(),
        };
        let bytes = checkpoint.encode();
        if self.log.synced_index() < Some(upto.index) {
            let install = self.log.reset_to(position(upto), 0, 0, bytes);
            install.await.map_err(io::Error::other)?;
        } else {
            self.log
                .save_checkpoint(upto.index, &bytes)
                .map_err(io::Error::other)?;
        }
        self.store.purge(upto).await
    }
}

struct Builder;

type Guard = (TempDir, Store);

impl StoreBuilder<TypeConfig, Checkpointed, Machine, Guard> for Builder {
    async fn build(&self) -> Result<(Guard, Checkpointed, Machine), StorageError<TypeConfig>> {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(StoreConfig::new(dir.path().join("data"))).unwrap();
        let key = ReplicaKey {
            partition: PartitionId {
                topic: TopicId::random(),
                partition: 0,
            },
            replica: ReplicaId(1),
        };
        let log = store.create_log(key, LogConfig::default()).unwrap();
        let state = Box::new(Counter::default());
        let (machine, _applied) =
            Machine::recover(state, Arc::clone(&log), LogUse::Records, None).unwrap();
        let checkpointed = Checkpointed {
            store: LogStore::new(Arc::clone(&log), None),
            log,
        };
        Ok(((dir, store), checkpointed, machine))
    }
}

type Conformance = Suite<TypeConfig, Checkpointed, Machine, Builder, Guard>;

macro_rules! cases {
    ($($case:ident),+ $(,)?) => {$(
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $case() {
            let (guard, store, machine) = Builder.build().await.unwrap();
            Conformance::$case(store, machine).await.unwrap();
            guard.1.shutdown().await;
        }
    )+};
}

cases!(
    last_membership_in_log_initial,
    last_membership_in_log,
    last_membership_in_log_multi_step,
    get_membership_initial,
    get_membership_from_log_and_empty_sm,
    get_membership_from_empty_log_and_sm,
    get_membership_from_log_le_sm_last_applied,
    get_membership_from_log_gt_sm_last_applied_1,
    get_membership_from_log_gt_sm_last_applied_2,
    get_initial_state_without_init,
    get_initial_state_membership_from_empty_log_and_sm,
    get_initial_state_membership_from_sm_inlog_is_smaller,
    get_initial_state_membership_from_log_insm_is_smaller,
    get_initial_state_with_state,
    get_initial_state_last_log_gt_sm,
    get_initial_state_last_log_lt_sm,
    get_initial_state_inverted_log_order,
    get_initial_state_conflict_at_same_index,
    get_initial_state_log_ids,
    get_initial_state_re_apply_committed,
    save_vote,
    get_log_entries,
    limited_get_log_entries,
    leader_bounded_stream,
    entries_stream,
    try_get_log_entry,
    log_reader_reads_new_entries,
    initial_logs,
    get_log_state,
    get_log_id,
    last_id_in_log,
    last_applied_state,
    purge_logs_upto_0,
    purge_logs_upto_5,
    purge_logs_upto_20,
    delete_logs_after_11,
    delete_logs_after_5,
    delete_logs_after_0,
    delete_logs_after_none,
    append_to_log,
    snapshot_meta_optional,
    apply_single,
    apply_multiple,
);
