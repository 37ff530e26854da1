//! The flusher: one thread per data directory that completes "durable up to here" for all logs.
//!
//! ```text
//!  drain the queue -> per log: write what fits the active segment -> sync the files, a few at once
//!    -> callbacks of appends -> meta log: write, one sync -> callbacks of votes and marks
//! ```
//!
//! Order kept, per log: operations complete in the order in which they were submitted; a vote or
//! mark is written after the log's data before it is synced (S5, S1); a round is written after the
//! one before is synced (S2). A log whose write or sync failed answers everything with that failure
//! from then on (S4); a failed meta log fails all.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::error::Error;
use super::log_core::LogCore;
use super::meta_record::{MetaRecord, ResetMark, TruncationMark};
use super::shared::Shared;
use super::state::Plan;
use super::sync_pool::SyncPool;
use super::types::{Durability, ReplicaKey};
use super::writer::{Buffers, Cut, Pending};

/// Bytes of one log in one round: bounds the wait of the others.
const ROUND_BYTES_MAX: usize = 8 << 20;
/// Logs of memory durability are synced, and commit marks written, this often.
const LAZY_EVERY: Duration = Duration::from_millis(500);

/// Called once, on the flusher's thread: must be quick.
pub(super) type Done = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// What the flusher is asked to do.
pub(super) enum Op {
    Append {
        core: Arc<LogCore>,
        frames: VecDeque<Pending>,
        done: Done,
    },
    /// Meta records that follow the log's synced data (votes, purges).
    Mark {
        core: Arc<LogCore>,
        records: Vec<MetaRecord>,
        done: Done,
    },
    /// Done alone, between rounds of the log.
    Alone {
        core: Arc<LogCore>,
        act: Act,
        done: Done,
    },
    /// Meta records of no log.
    Meta {
        records: Vec<MetaRecord>,
        done: Done,
    },
}

/// What is done alone.
pub(super) enum Act {
    /// Everything before is done.
    Barrier,
    Truncate(Cut),
    Reset {
        mark: ResetMark,
        plan: Plan,
        checkpoint: bytes::Bytes,
    },
}

/// The way in.
#[derive(Default)]
pub(super) struct Queue {
    inner: Mutex<QueueInner>,
    wake: Condvar,
}

#[derive(Default)]
struct QueueInner {
    ops: Vec<Op>,
    commits: HashMap<ReplicaKey, super::types::Position>,
    is_closed: bool,
}

impl Queue {
    pub(super) fn push(&self, op: Op) -> Result<(), Error> {
        let mut inner = self.inner.lock();
        if inner.is_closed {
            return Err(Error::Closed);
        }
        inner.ops.push(op);
        let is_first = inner.ops.len() == 1;
        drop(inner);
        if is_first {
            self.wake.notify_one();
        }
        Ok(())
    }

    /// A commit mark, to be written some time.
    pub(super) fn commit(&self, key: ReplicaKey, position: super::types::Position) {
        let mut inner = self.inner.lock();
        let is_first = inner.commits.insert(key, position).is_none() && inner.commits.len() == 1;
        drop(inner);
        if is_first {
            self.wake.notify_one();
        }
    }

    /// Forgets a commit mark that a truncation leaves beyond the end (S1).
    pub(super) fn cut_commit(&self, key: &ReplicaKey, from_index: u64) {
        self.inner
            .lock()
            .commits
            .retain(|other, at| other != key || at.index < from_index);
    }

    pub(super) fn close(&self) {
        self.inner.lock().is_closed = true;
        self.wake.notify_one();
    }

    /// Takes all operations; waits for some, but not past `until`, nor when the queue is closed.
    fn take(&self, until: impl Fn(bool) -> Option<Instant>) -> (Vec<Op>, bool) {
        let mut inner = self.inner.lock();
        while inner.ops.is_empty() && !inner.is_closed {
            match until(!inner.commits.is_empty()) {
                Some(until) => {
                    if self.wake.wait_until(&mut inner, until).timed_out() {
                        break;
                    }
                }
                None => self.wake.wait(&mut inner),
            }
        }
        (std::mem::take(&mut inner.ops), inner.is_closed)
    }

    fn take_commits(&self) -> Vec<MetaRecord> {
        std::mem::take(&mut self.inner.lock().commits)
            .into_iter()
            .map(|(key, position)| MetaRecord::Committed(key, position))
            .collect()
    }
}

struct Work {
    core: Arc<LogCore>,
    ops: VecDeque<Op>,
}

/// What one log has in the round.
struct Entry {
    core: Arc<LogCore>,
    appends: Vec<Done>,
    marks: Vec<(Vec<MetaRecord>, Done)>,
    wrote: bool,
    outcome: Result<(), Error>,
}

/// State of the flusher's thread.
pub(super) struct Flusher {
    shared: Arc<Shared>,
    pool: SyncPool,
    backlog: HashMap<u64, Work>,
    /// Logs with written and unsynced frames of memory durability.
    lazy: HashMap<u64, Arc<LogCore>>,
    last_due: Instant,
    buffers: Buffers,
    meta_failure: Option<Error>,
}

impl Flusher {
    pub(super) fn new(shared: Arc<Shared>, sync_threads: usize) -> Self {
        Self {
            shared,
            pool: SyncPool::new(sync_threads),
            backlog: HashMap::new(),
            lazy: HashMap::new(),
            last_due: Instant::now(),
            buffers: Buffers::default(),
            meta_failure: None,
        }
    }

    /// Until the queue is closed and empty.
    pub(super) fn run(mut self) {
        let queue = Arc::clone(&self.shared.queue);
        loop {
            let mut metas = Vec::new();
            let (ops, is_closed) = if self.backlog.is_empty() {
                let due_at = self.last_due + LAZY_EVERY;
                let has_lazy = !self.lazy.is_empty();
                queue.take(|has_commits| (has_lazy || has_commits).then_some(due_at))
            } else {
                queue.take(|_| Some(Instant::now()))
            };
            let is_idle = ops.is_empty() && self.backlog.is_empty();
            for op in ops {
                self.sort(op, &mut metas);
            }
            let is_due = (is_idle && is_closed) || self.last_due.elapsed() >= LAZY_EVERY;
            if is_due {
                self.last_due = Instant::now();
            }
            self.round(metas, is_due);
            if is_idle && is_closed {
                return;
            }
        }
    }

    fn sort(&mut self, op: Op, metas: &mut Vec<(Vec<MetaRecord>, Done)>) {
        let core = match &op {
            Op::Append { core, .. } | Op::Mark { core, .. } | Op::Alone { core, .. } => {
                Arc::clone(core)
            }
            Op::Meta { .. } => {
                if let Op::Meta { records, done } = op {
                    metas.push((records, done));
                }
                return;
            }
        };
        self.backlog
            .entry(core.slot)
            .or_insert_with(|| Work {
                core,
                ops: VecDeque::new(),
            })
            .ops
            .push_back(op);
    }

    fn round(&mut self, metas: Vec<(Vec<MetaRecord>, Done)>, is_due: bool) {
        let mut entries = Vec::with_capacity(self.backlog.len());
        let mut backlog = std::mem::take(&mut self.backlog);
        for work in backlog.values_mut() {
            entries.push(self.write(work));
        }
        backlog.retain(|_, work| !work.ops.is_empty());
        self.backlog = backlog;

        self.sync(&mut entries, is_due);

        let mut marks: Vec<(Option<Arc<LogCore>>, Vec<MetaRecord>, Done)> = Vec::new();
        for entry in entries {
            for done in entry.appends {
                done(entry.outcome.clone());
            }
            for (records, done) in entry.marks {
                match &entry.outcome {
                    Ok(()) => marks.push((Some(Arc::clone(&entry.core)), records, done)),
                    Err(error) => done(Err(error.clone())),
                }
            }
        }
        marks.extend(
            metas
                .into_iter()
                .map(|(records, done)| (None, records, done)),
        );
        self.mark(marks, is_due);
    }

    /// Writes what this log may write in one round.
    fn write(&mut self, work: &mut Work) -> Entry {
        let core = Arc::clone(&work.core);
        let mut entry = Entry {
            core: Arc::clone(&core),
            appends: Vec::new(),
            marks: Vec::new(),
            wrote: false,
            outcome: core.check(),
        };
        if entry.outcome.is_ok()
            && let Some(error) = &self.meta_failure
        {
            core.fail(error.to_string());
            entry.outcome = core.check();
        }
        let mut batch: Vec<Pending> = Vec::new();
        let mut bytes = 0;
        let mut plan: Option<Plan> = None;
        while entry.outcome.is_ok() {
            match work.ops.front_mut() {
                Some(Op::Append { frames, .. }) if entry.marks.is_empty() => {
                    while let Some(next) = frames.front() {
                        if bytes >= ROUND_BYTES_MAX {
                            break;
                        }
                        if let Some(starts) = next.starts {
                            if !batch.is_empty() {
                                break;
                            }
                            plan = Some(starts);
                        }
                        bytes += next.frame.payload.len();
                        batch.extend(frames.pop_front());
                    }
                    if !frames.is_empty() {
                        break;
                    }
                    if let Some(Op::Append { done, .. }) = work.ops.pop_front() {
                        entry.appends.push(done);
                    }
                }
                Some(Op::Mark { .. }) => {
                    if let Some(Op::Mark { records, done, .. }) = work.ops.pop_front() {
                        entry.marks.push((records, done));
                    }
                }
                Some(Op::Alone { .. })
                    if batch.is_empty() && entry.appends.is_empty() && entry.marks.is_empty() =>
                {
                    if let Some(Op::Alone { act, done, .. }) = work.ops.pop_front() {
                        let outcome = self.act(&core, act);
                        if let Err(error) = &outcome {
                            core.fail(error.to_string());
                            entry.outcome = core.check();
                        }
                        done(outcome);
                    }
                }
                _ => break,
            }
        }
        if entry.outcome.is_ok() && !batch.is_empty() {
            entry.wrote = true;
            entry.outcome = self.write_batch(&core, plan.as_ref(), &batch);
        }
        if entry.outcome.is_err() {
            self.fail_all(work, &entry.outcome);
        }
        entry
    }

    fn write_batch(
        &mut self,
        core: &Arc<LogCore>,
        plan: Option<&Plan>,
        batch: &[Pending],
    ) -> Result<(), Error> {
        let mut writer = core.writer.lock();
        let rolled = plan.map_or(Ok(()), |plan| writer.roll(core, plan));
        if rolled.is_err() {
            self.give_up(batch);
        }
        let written = rolled.and_then(|()| writer.write(core, batch, &mut self.buffers));
        let end = writer.end.index;
        drop(writer);
        match written {
            Ok(bytes) => {
                metrics::counter!("qute_storage_written_bytes_total").increment(bytes);
                if core.durability == Durability::Memory {
                    core.stable_end
                        .store(end, std::sync::atomic::Ordering::Release);
                }
                Ok(())
            }
            Err(error) => {
                // S4: final.
                core.fail(error.to_string());
                core.check()
            }
        }
    }

    fn sync(&mut self, entries: &mut [Entry], is_due: bool) {
        let mut cores: Vec<Arc<LogCore>> = Vec::new();
        for entry in entries.iter().filter(|entry| entry.outcome.is_ok()) {
            let is_lazy = entry.core.durability == Durability::Memory;
            if entry.wrote && is_lazy {
                self.lazy.insert(entry.core.slot, Arc::clone(&entry.core));
            }
            // S5: data before votes, whatever the durability.
            if (entry.wrote && !is_lazy) || !entry.marks.is_empty() {
                cores.push(Arc::clone(&entry.core));
            }
        }
        if is_due && !self.lazy.is_empty() {
            let due: Vec<_> = self
                .lazy
                .values()
                .filter(|core| !cores.iter().any(|other| other.slot == core.slot))
                .cloned()
                .collect();
            cores.extend(due);
        }
        cores.retain(|core| core.failure().is_none() && core.writer.lock().round_open);
        for core in &cores {
            self.lazy.remove(&core.slot);
        }
        self.lazy.retain(|_, core| core.failure().is_none());
        if cores.is_empty() {
            return;
        }
        let files = cores
            .iter()
            .map(|core| Arc::clone(&core.writer.lock().file))
            .collect();
        let started = Instant::now();
        let results = self.pool.sync(files);
        metrics::histogram!("qute_storage_sync_seconds").record(started.elapsed().as_secs_f64());
        metrics::counter!("qute_storage_syncs_total").increment(cores.len() as u64);
        for (core, result) in cores.iter().zip(results) {
            match result {
                Ok(()) => {
                    let end = {
                        let mut writer = core.writer.lock();
                        writer.synced();
                        writer.end.index
                    };
                    let order = std::sync::atomic::Ordering::Release;
                    core.synced_end.store(end, order);
                    core.stable_end.store(end, order);
                }
                Err(error) => {
                    // S4: final, never retried: the kernel has forgotten the dirty pages.
                    core.fail(format!("sync of the active segment: {error}"));
                }
            }
        }
        for entry in entries.iter_mut() {
            if entry.outcome.is_ok() {
                entry.outcome = entry.core.check();
            }
        }
    }

    /// Writes and syncs meta records, then answers.
    fn mark(&mut self, marks: Vec<(Option<Arc<LogCore>>, Vec<MetaRecord>, Done)>, is_due: bool) {
        if marks.is_empty() {
            if is_due && self.meta_failure.is_none() {
                let commits = self.shared.queue.take_commits();
                let outcome = self.shared.meta_write(&commits, false);
                self.note_meta(&outcome);
            }
            return;
        }
        let mut records = self.shared.queue.take_commits();
        for (_, of_log, _) in &marks {
            records.extend(of_log.iter().cloned());
        }
        let outcome = self.meta_write(&records);
        for (core, _, done) in marks {
            if outcome.is_err()
                && let Some(core) = core
            {
                core.fail("the meta log cannot be written".into());
            }
            done(outcome.clone());
        }
    }

    fn meta_write(&mut self, records: &[MetaRecord]) -> Result<(), Error> {
        if let Some(error) = &self.meta_failure {
            return Err(error.clone());
        }
        let outcome = self.shared.meta_write(records, true);
        self.note_meta(&outcome);
        outcome
    }

    fn note_meta(&mut self, outcome: &Result<(), Error>) {
        if let Err(error) = outcome {
            tracing::error!(%error, "the meta log failed: every replica stops at its next operation");
            self.meta_failure = Some(error.clone());
        }
    }

    fn act(&mut self, core: &Arc<LogCore>, act: Act) -> Result<(), Error> {
        match act {
            Act::Barrier => {
                let mut writer = core.writer.lock();
                writer.sync_now()?;
                core.synced_end
                    .store(writer.end.index, std::sync::atomic::Ordering::Release);
                Ok(())
            }
            Act::Truncate(cut) => {
                // S2: the round is closed before anything is written over.
                let mark = {
                    let mut writer = core.writer.lock();
                    writer.sync_now()?;
                    let round = writer.round;
                    writer.round += 1;
                    TruncationMark {
                        from_index: cut.from_index,
                        round,
                    }
                };
                // S3: what is cut off is void before it is written over.
                self.meta_write(&[MetaRecord::Truncated(core.key, mark)])?;
                let mut writer = core.writer.lock();
                writer.cut(core, &cut)?;
                let end = writer.end.index;
                let order = std::sync::atomic::Ordering::Release;
                core.synced_end.store(end, order);
                core.stable_end.store(end, order);
                Ok(())
            }
            Act::Reset {
                mark,
                plan,
                checkpoint,
            } => {
                core.writer.lock().sync_now()?;
                // S1: the interrupted install is on record before the checkpoint exists, and the
                // checkpoint exists before the log is emptied.
                self.meta_write(&[MetaRecord::ResetBegun(core.key, mark)])?;
                super::checkpoint::write(
                    self.shared.fs.as_ref(),
                    &core.dir,
                    mark.position.index,
                    &checkpoint,
                )?;
                let mut writer = core.writer.lock();
                writer.restart(core, &plan)?;
                let end = writer.end.index;
                drop(writer);
                self.meta_write(&[MetaRecord::ResetDone(core.key)])?;
                let order = std::sync::atomic::Ordering::Release;
                core.synced_end.store(end, order);
                core.stable_end.store(end, order);
                Ok(())
            }
        }
    }

    /// Answers everything queued for a log that has failed.
    fn fail_all(&self, work: &mut Work, outcome: &Result<(), Error>) {
        for op in work.ops.drain(..) {
            if let Op::Append { frames, .. } = &op {
                self.give_up(frames);
            }
            let (Op::Append { done, .. }
            | Op::Mark { done, .. }
            | Op::Alone { done, .. }
            | Op::Meta { done, .. }) = op;
            done(outcome.clone());
        }
    }

    /// Frames that will never be written: the space promised to them is free again.
    fn give_up<'a>(&self, frames: impl IntoIterator<Item = &'a Pending>) {
        let bytes = frames.into_iter().map(Pending::stored_len).sum();
        self.shared.space.written(bytes, 0);
    }
}
