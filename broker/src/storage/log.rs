//! The handle of one log: append, truncate, purge, votes and marks, checkpoints.
//!
//! Appended entries are readable at once and durable when the callback comes. Calls that change the
//! log are expected from one caller at a time (the Raft core); reads come from anywhere.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};

use super::checkpoint;
use super::error::{At as _, Error, Full};
use super::flusher::{Act, Op};
use super::frame::{self, PAYLOAD_MAX};
use super::index::SegmentEnd;
use super::log_core::LogCore;
use super::meta_record::{MetaRecord, ResetMark};
use super::space::Reservation;
use super::state::{Plan, cost, plan_id};
use super::types::{Frame, LogConfig, LogStats, NewFrame, Position, ReplicaKey, VoteRecord};
use super::writer::{Cut, Pending};

/// See the module's documentation.
pub struct Log {
    pub(super) core: Arc<LogCore>,
    checkpoints: Mutex<BTreeSet<u64>>,
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Log({})", self.core.key)
    }
}

impl Log {
    pub(super) fn new(core: Arc<LogCore>, checkpoints: BTreeSet<u64>) -> Arc<Self> {
        Arc::new(Self {
            core,
            checkpoints: Mutex::new(checkpoints),
        })
    }

    /// Whose log it is.
    #[must_use]
    pub fn key(&self) -> ReplicaKey {
        self.core.key
    }

    /// Turns `true` when a write or sync has failed: final for this process (S4).
    #[must_use]
    pub fn failed(&self) -> watch::Receiver<bool> {
        self.core.failed()
    }

    /// Why it has failed, if it has (S4).
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        self.core.failure.get().cloned()
    }

    /// S4: space for a batch of this payload, or a refusal that a retry may get past.
    ///
    /// Hold the reservation until the batch is appended (a proposal: until it is answered).
    ///
    /// # Errors
    /// [`Full`] when granting it would go below the disk floor.
    pub fn reserve(&self, payload_bytes: u64) -> Result<Reservation, Full> {
        self.core
            .shared
            .space
            .reserve(payload_bytes + frame::FRAME_HEADER as u64)
    }

    /// S4: space for `batches` batches, `payload_bytes` together, that their leader has admitted
    /// and sends here. They may go deeper than [`Self::reserve`] lets new ones go.
    ///
    /// # Errors
    /// [`Full`] when granting it would go below half the disk floor.
    pub fn reserve_admitted(
        &self,
        batches: usize,
        payload_bytes: u64,
    ) -> Result<Reservation, Full> {
        let headers = (batches * frame::FRAME_HEADER) as u64;
        let space = &self.core.shared.space;
        space.reserve_admitted(payload_bytes + headers)
    }

    /// Appends frames that follow the last one. They are readable when this returns; `done` is
    /// called once, on the flusher's thread, when they are as durable as the log's durability says.
    /// Callbacks of one log come in the order of the appends. Does not block on files.
    ///
    /// # Errors
    /// When the frames do not follow or are too large, or the log has failed: then nothing was
    /// appended and `done` is not called.
    pub fn append(
        &self,
        frames: Vec<NewFrame>,
        done: impl FnOnce(Result<(), Error>) + Send + 'static,
    ) -> Result<(), Error> {
        let core = &self.core;
        core.check()?;
        let Some(last_index) = frames.last().map(|last| last.index) else {
            done(Ok(()));
            return Ok(());
        };
        // Checksums of payloads are taken before the lock.
        let mut crcs = Vec::with_capacity(frames.len());
        for frame in &frames {
            if frame.payload.len() > PAYLOAD_MAX {
                return Err(Error::TooLarge {
                    replica: core.key,
                    bytes: frame.payload.len(),
                    bytes_max: PAYLOAD_MAX,
                });
            }
            crcs.push(crc32c::crc32c(&frame.payload));
        }
        let mut state = core.state.lock();
        // Again under the lock: a failure empties the cache once, and nothing may enter it after.
        core.check()?;
        for (expected, frame) in (state.next_index..).zip(&frames) {
            if frame.index != expected {
                return Err(Error::NotContiguous {
                    replica: core.key,
                    expected,
                    found: frame.index,
                });
            }
        }
        let mut pending = VecDeque::with_capacity(frames.len());
        let (mut stored, mut cached) = (0, 0);
        for (new, payload_crc) in frames.into_iter().zip(crcs) {
            let frame = Frame {
                term: new.term,
                index: new.index,
                kind: new.kind,
                base_offset: state.next_offset,
                records: new.records,
                broker_time_ms: new.broker_time_ms,
                payload: new.payload,
            };
            let length = u32::try_from(frame.payload.len()).unwrap_or(u32::MAX);
            let len = frame::stored_len(length);
            let starts = state.roll_before(len, core.segment_bytes());
            stored += len;
            cached += cost(&frame);
            let content_crc = frame::content_crc(payload_crc, &frame);
            state.push(&frame, len);
            pending.push_back(Pending {
                frame,
                content_crc,
                starts,
            });
        }
        core.shared.space.queued(stored);
        // Pushed under the lock: the queue has the order of the log.
        core.shared.queue.push(Op::Append {
            core: Arc::clone(core),
            frames: pending,
            done: Box::new(done),
        })?;
        // Under the lock too: what is cached is counted before anybody can take it out.
        let budget = &core.shared.budget;
        budget.added(Arc::downgrade(core), last_index, cached);
        drop(state);
        budget.trim();
        Ok(())
    }

    /// Cuts everything after index `last` (everything, when `None`). Done at once for readers and
    /// appends, durably when the future ends (S3).
    ///
    /// # Cancel safety
    /// A dropped future does not stop the truncation.
    ///
    /// # Errors
    /// When `last` is below the purge mark or the log has failed.
    pub async fn truncate_after(&self, last: Option<u64>) -> Result<(), Error> {
        match self.begin_truncate(last)? {
            Some(done) => answer(done).await,
            None => Ok(()),
        }
    }

    fn begin_truncate(&self, last: Option<u64>) -> Result<Option<Answer>, Error> {
        let core = &self.core;
        core.check()?;
        let from_index = last.map_or(0, |last| last + 1);
        let (first_index, next_index) = {
            let state = core.state.lock();
            (state.first_index(), state.next_index)
        };
        if from_index >= next_index {
            return Ok(None);
        }
        if from_index < first_index {
            return Err(Error::OutOfOrder {
                replica: core.key,
                index: from_index,
                reason: format!("the log begins at {first_index}"),
            });
        }
        let kept = match last {
            Some(last) => self.find_place(last)?,
            None => None,
        };
        let mut state = core.state.lock();
        let (keep_base, last, end) = match kept {
            Some((base, pos, end)) => (base, Some((pos, end)), end),
            None => {
                // Nothing stays: the log ends where its first segment begins.
                let first = state.segments.front().ok_or_else(|| Error::Damaged {
                    replica: core.key,
                    reason: "it has no segment".into(),
                })?;
                let end = SegmentEnd::empty(&first.header, first.header_crc);
                (first.base_index(), None, end)
            }
        };
        let cut = Cut {
            from_index,
            keep_base,
            last,
        };
        let gone = state.cut(&cut, &end);
        core.shared.queue.cut_commit(&core.key, from_index);
        let receiver = self.alone(Act::Truncate(cut))?;
        drop(state);
        core.uncount(&gone);
        Ok(Some(receiver))
    }

    fn alone(&self, act: Act) -> Result<Answer, Error> {
        let (done, receiver) = oneshot::channel();
        self.core.shared.queue.push(Op::Alone {
            core: Arc::clone(&self.core),
            act,
            done: Box::new(move |outcome| {
                // The caller may have gone.
                let _ = done.send(outcome);
            }),
        })?;
        Ok(receiver)
    }

    /// Forgets everything up to `position`, which must be synced and covered by a checkpoint (S1).
    /// Whole segments are removed; the order is checkpoint, mark, files, directory.
    ///
    /// # Cancel safety
    /// A dropped future does not stop the purge.
    ///
    /// # Errors
    /// When S1 forbids it or the log has failed.
    pub async fn purge(&self, position: Position) -> Result<(), Error> {
        let core = Arc::clone(&self.core);
        core.check()?;
        let refused = |reason: String| Error::OutOfOrder {
            replica: core.key,
            index: position.index,
            reason,
        };
        let synced_end = core.synced_end.load(Ordering::Acquire);
        if position.index >= synced_end {
            return Err(refused(format!("the log is synced up to {synced_end}")));
        }
        if self
            .checkpoints
            .lock()
            .range(position.index..)
            .next()
            .is_none()
        {
            return Err(refused("no checkpoint covers it".into()));
        }
        let (receiver, gone, uncached) = {
            let mut state = core.state.lock();
            if state
                .purged
                .is_some_and(|purged| purged.index >= position.index)
            {
                return Ok(());
            }
            if state.term_at(position.index) != Some(position.term) {
                return Err(refused(format!("its term is not {}", position.term)));
            }
            state.purged = Some(position);
            state.terms.drop_below(position.index);
            let mut gone = Vec::new();
            while state
                .segments
                .get(1)
                .is_some_and(|second| second.base_index() <= position.index + 1)
            {
                gone.extend(state.segments.pop_front());
            }
            let mut uncached = Vec::new();
            while state
                .cache
                .front()
                .is_some_and(|oldest| oldest.frame.index <= position.index)
            {
                uncached.extend(state.cache.pop_front());
            }
            let receiver = self.mark(MetaRecord::Purged(core.key, position))?;
            (receiver, gone, uncached)
        };
        core.uncount(&uncached);
        let outcome = answer(receiver).await;
        if outcome.is_ok() {
            core.shared.background.remove(&core, gone);
        }
        outcome
    }

    fn mark(&self, record: MetaRecord) -> Result<Answer, Error> {
        let (done, receiver) = oneshot::channel();
        self.core.shared.queue.push(Op::Mark {
            core: Arc::clone(&self.core),
            records: vec![record],
            done: Box::new(move |outcome| {
                // The caller may have gone.
                let _ = done.send(outcome);
            }),
        })?;
        Ok(receiver)
    }

    /// Makes a vote durable, after everything appended before it (S5).
    ///
    /// # Cancel safety
    /// A dropped future does not stop the vote from being saved.
    ///
    /// # Errors
    /// When the log or the meta log has failed (S4): the vote must not be given then.
    pub async fn save_vote(&self, vote: VoteRecord) -> Result<(), Error> {
        self.core.check()?;
        let receiver = {
            let mut state = self.core.state.lock();
            state.vote = Some(vote);
            self.mark(MetaRecord::Vote(self.core.key, vote))?
        };
        answer(receiver).await
    }

    /// The vote saved last.
    #[must_use]
    pub fn vote(&self) -> Option<VoteRecord> {
        self.core.state.lock().vote
    }

    /// Notes what is known to be committed; written some time, without a sync. Never ahead of what
    /// is synced here (S1): a mark beyond is lowered.
    pub fn save_committed(&self, position: Position) {
        let core = &self.core;
        let synced_end = core.synced_end.load(Ordering::Acquire);
        let mut state = core.state.lock();
        let Some(index) = synced_end
            .checked_sub(1)
            .map(|last| last.min(position.index))
        else {
            return;
        };
        let Some(term) = state.term_at(index) else {
            return;
        };
        let position = Position { term, index };
        if state.committed.is_none_or(|before| before.index < index) {
            state.committed = Some(position);
            core.shared.queue.commit(core.key, position);
        }
    }

    /// The commit mark; at most what is synced.
    #[must_use]
    pub fn committed(&self) -> Option<Position> {
        self.core.state.lock().committed
    }

    /// The last entry, synced or not; the purge mark when there is none after it.
    #[must_use]
    pub fn last(&self) -> Option<Position> {
        self.core.state.lock().last()
    }

    /// Everything up to here is purged.
    #[must_use]
    pub fn purged(&self) -> Option<Position> {
        self.core.state.lock().purged
    }

    /// The term of an entry, or of the purge mark.
    #[must_use]
    pub fn term_at(&self, index: u64) -> Option<u64> {
        self.core.state.lock().term_at(index)
    }

    /// The first index that can be read.
    #[must_use]
    pub fn first_index(&self) -> u64 {
        self.core.state.lock().first_index()
    }

    /// The first index from which on everything is in memory; [`Self::next_index`] if nothing is.
    #[must_use]
    pub fn cached_from(&self) -> u64 {
        let state = self.core.state.lock();
        let oldest = state.cache.front().map(|oldest| oldest.frame.index);
        oldest.unwrap_or(state.next_index)
    }

    /// The index of the next entry.
    #[must_use]
    pub fn next_index(&self) -> u64 {
        self.core.state.lock().next_index
    }

    /// The offset of the next record.
    #[must_use]
    pub fn next_offset(&self) -> u64 {
        self.core.state.lock().next_offset
    }

    /// Broker time of the last entry (S19: the next one is not earlier).
    #[must_use]
    pub fn last_time_ms(&self) -> u64 {
        self.core.state.lock().last_time_ms
    }

    /// The last synced entry's index.
    #[must_use]
    pub fn synced_index(&self) -> Option<u64> {
        self.core.synced_end.load(Ordering::Acquire).checked_sub(1)
    }

    /// First indexes of all segments, those that an append has begun included.
    #[must_use]
    pub fn segment_bases(&self) -> Vec<u64> {
        let state = self.core.state.lock();
        let next = state.next_index;
        state
            .segments
            .iter()
            .map(|segment| segment.base_index())
            .filter(|base| *base <= next)
            .chain(state.planned.iter().map(|plan| plan.base_index))
            .collect()
    }

    /// Closes segments at this size from the next append on. Sizes beyond what is allowed become the
    /// nearest that is.
    pub fn set_segment_bytes(&self, bytes: u64) {
        let bytes = bytes.clamp(LogConfig::SEGMENT_BYTES_MIN, LogConfig::SEGMENT_BYTES_MAX);
        self.core.segment_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Size at which segments are closed.
    #[must_use]
    pub fn segment_bytes(&self) -> u64 {
        self.core.segment_bytes()
    }

    /// Lets the next append begin a new segment, unless there is nothing in the present one: what is
    /// in front of it can then be purged as whole files.
    pub fn roll(&self) {
        self.core.state.lock().roll_asked = true;
    }

    /// First index of the segment that takes the next frame, cheaply: it changes with a roll.
    #[must_use]
    pub fn active_base(&self) -> u64 {
        self.core.state.lock().tail_base
    }

    /// Saves the state as of `index`, synced when this returns. Blocks on files.
    ///
    /// # Errors
    /// When `index` is not synced here (S1), and what the file system reports.
    pub fn save_checkpoint(&self, index: u64, state: &[u8]) -> Result<(), Error> {
        let core = &self.core;
        core.check()?;
        let synced_end = core.synced_end.load(Ordering::Acquire);
        if index >= synced_end {
            return Err(Error::OutOfOrder {
                replica: core.key,
                index,
                reason: format!("the log is synced up to {synced_end}"),
            });
        }
        if state.len() > checkpoint::STATE_BYTES_MAX {
            return Err(Error::TooLarge {
                replica: core.key,
                bytes: state.len(),
                bytes_max: checkpoint::STATE_BYTES_MAX,
            });
        }
        checkpoint::write(core.shared.fs.as_ref(), &core.dir, index, state)?;
        self.checkpoints.lock().insert(index);
        Ok(())
    }

    /// The checkpoints, oldest first. Blocks on files.
    ///
    /// # Errors
    /// What the file system reports. Damaged ones are left out.
    pub fn checkpoints(&self) -> Result<Vec<(u64, Bytes)>, Error> {
        let indexes = self.checkpoint_indexes();
        let mut out = Vec::with_capacity(indexes.len());
        for index in indexes {
            out.extend(self.checkpoint(index)?.map(|state| (index, state)));
        }
        Ok(out)
    }

    /// The checkpoint as of `index`; `None` if it is damaged, or not there any more. Blocks on files.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn checkpoint(&self, index: u64) -> Result<Option<Bytes>, Error> {
        let core = &self.core;
        match checkpoint::read(core.shared.fs.as_ref(), &core.dir, index) {
            Ok(Some(state)) => Ok(Some(state)),
            // Removed while it was read.
            _ if !self.checkpoints.lock().contains(&index) => Ok(None),
            Ok(None) => {
                tracing::error!(replica = %core.key, index, "a checkpoint is damaged and not used");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Indexes of the checkpoints, rising.
    #[must_use]
    pub fn checkpoint_indexes(&self) -> Vec<u64> {
        self.checkpoints.lock().iter().copied().collect()
    }

    /// Removes checkpoints below `index`; the newest always stays. Blocks on files.
    ///
    /// # Errors
    /// What the file system reports.
    pub fn drop_checkpoints_below(&self, index: u64) -> Result<(), Error> {
        let core = &self.core;
        let gone: Vec<u64> = {
            let mut checkpoints = self.checkpoints.lock();
            let newest = checkpoints.last().copied().unwrap_or(0);
            let kept = checkpoints.split_off(&index.min(newest));
            std::mem::replace(&mut *checkpoints, kept)
                .into_iter()
                .collect()
        };
        let fs = core.shared.fs.as_ref();
        for index in &gone {
            let path = core.dir.join(checkpoint::name(*index));
            fs.remove_file(&path).at("remove", &path)?;
        }
        if !gone.is_empty() {
            fs.sync_dir(&core.dir).at("sync", &core.dir)?;
        }
        Ok(())
    }

    /// Installs a snapshot: saves `checkpoint` as the state at `position`, empties the log and lets it
    /// begin after `position`, an entry of broker time `time_ms`, with `base_offset`. The install is on record while it runs (S1): a stop
    /// in between finishes or forgets it at the next opening. The vote stays.
    ///
    /// # Cancel safety
    /// A dropped future does not stop the install.
    ///
    /// # Errors
    /// When the log has failed, and what the file system reports (then the log has failed, S4).
    pub async fn reset_to(
        &self,
        position: Position,
        base_offset: u64,
        time_ms: u64,
        checkpoint: Bytes,
    ) -> Result<(), Error> {
        let core = Arc::clone(&self.core);
        core.check()?;
        let (receiver, gone) = {
            let mut state = core.state.lock();
            let plan = Plan {
                id: plan_id(),
                base_index: position.index + 1,
                base_offset,
                prev_term: position.term,
                prev_time_ms: time_ms,
            };
            let gone = state.reset(position, base_offset, time_ms);
            let act = Act::Reset {
                mark: ResetMark {
                    position,
                    base_offset,
                    time_ms,
                },
                plan,
                checkpoint,
            };
            (self.alone(act)?, gone)
        };
        core.uncount(&gone);
        answer(receiver).await?;
        let stale: Vec<u64> = {
            let mut checkpoints = self.checkpoints.lock();
            let stale = std::mem::take(&mut *checkpoints);
            checkpoints.insert(position.index);
            stale
                .into_iter()
                .filter(|index| *index != position.index)
                .collect()
        };
        for index in stale {
            let path = core.dir.join(checkpoint::name(index));
            core.shared.fs.remove_file(&path).at("remove", &path)?;
        }
        core.shared.fs.sync_dir(&core.dir).at("sync", &core.dir)
    }

    /// Waits until everything appended before is synced, whatever the durability.
    ///
    /// # Errors
    /// When the log has failed.
    pub async fn sync(&self) -> Result<(), Error> {
        answer(self.alone(Act::Barrier)?).await
    }

    /// Figures.
    #[must_use]
    pub fn stats(&self) -> LogStats {
        let state = self.core.state.lock();
        let size_bytes: u64 = state
            .segments
            .iter()
            .map(|segment| u64::from(segment.end().pos))
            .sum();
        LogStats {
            size_bytes,
            prewritten_bytes: self.core.ahead.bytes(),
            segments: state.segments.len() + state.planned.len(),
            cached_bytes: state.cache.iter().map(|cached| cost(&cached.frame)).sum(),
        }
    }

    /// Frames of the indexes in `range` as far as they exist, at least one, then up to `bytes_max`
    /// of payload. Blocks on files when they are not in memory.
    ///
    /// # Errors
    /// [`Error::Damaged`] when what is read is not what was written (S7), and what the file system
    /// reports.
    pub fn read(&self, range: Range<u64>, bytes_max: usize) -> Result<Vec<Frame>, Error> {
        super::read::by_index(&self.core, range, bytes_max)
    }

    /// Batches with records at or after offset `from` and below `end` (the high watermark), at least
    /// one if there is any, then up to `bytes_max` of payload. The first may begin below `from`.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_offsets(&self, from: u64, end: u64, bytes_max: usize) -> Result<Vec<Frame>, Error> {
        super::read::by_offset(&self.core, from, end, bytes_max)
    }

    /// Whether a read from this offset on begins in memory: it then does not block.
    #[must_use]
    pub fn is_cached(&self, offset: u64) -> bool {
        super::read::is_cached(&self.core, offset)
    }

    /// The first offset below `end` of a batch whose broker time is at or after `time_ms`.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn offset_at_time(&self, time_ms: u64, end: u64) -> Result<Option<u64>, Error> {
        super::read::offset_at_time(&self.core, time_ms, end)
    }

    /// Base of the segment, position there, and the end after it, of the entry `index`.
    fn find_place(&self, index: u64) -> Result<Option<(u64, u32, SegmentEnd)>, Error> {
        super::read::find_place(&self.core, index)
    }
}

type Answer = oneshot::Receiver<Result<(), Error>>;

async fn answer(receiver: Answer) -> Result<(), Error> {
    receiver.await.unwrap_or(Err(Error::Closed))
}
