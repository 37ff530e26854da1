//! What has been fetched and not yet taken, per partition, and where each partition stands: the one
//! piece of state that the reader's task, the program's stream and its [`super::ConsumerControl`]
//! share. No clock, no network.
//!
//! ```text
//!                 position            tail
//!  handed out ------|---- queue -------|---- fetched next, by the reader
//! ```
//!
//! Invariants, per partition:
//! - The queue holds exactly what lies between the position (or the end of the batch in the
//!   stream's hand) and the tail, in order.
//! - The reader puts in only what it fetched in the present *round*. Whoever moves the tail under
//!   it (seek, pause, a record that does not decode) begins a new round and marks the partition
//!   changed; the reader then begins anew at the tail. So nothing is skipped or doubled, however
//!   the three interleave.
//! - A seek begins a new *epoch*: the batch in the stream's hand is void, too. Once the seek has
//!   returned, no record from before it is handed out.
//! - A paused partition hands out nothing, keeps its position, and holds no more of the prefetch
//!   than `credit.rs` lets paused partitions have; the rest is fetched anew.
//!
//! Partitions take turns, one batch each. The lock is held for moves of memory only.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use parking_lot::{Mutex, MutexGuard};
use qute_proto::batch::BatchView;
use tokio::sync::Notify;

use super::credit::{Credit, Pool};
use crate::error::Error;

/// A partition's number in the buffer and in the reader. Never used again for another.
pub(super) type SlotId = usize;

/// A batch of which the records in `from..until` are wanted.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) base_offset: u64,
    pub(super) from: u64,
    pub(super) until: u64,
    pub(super) broker_time_ms: u64,
    pub(super) high_watermark: u64,
    pub(super) batch: BatchView,
    /// Held until the program has taken the records.
    pub(super) credit: Arc<Credit>,
}

/// An offset was proven out of range, and reading goes on elsewhere.
#[derive(Debug, Clone)]
pub(super) struct Moved {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) error: Error,
}

/// What waits for the program.
#[derive(Debug)]
pub(super) enum Entry {
    Batch(Taken),
    Moved(Moved),
    /// The partition ends here with an error.
    Failed(Error),
    /// The partition is read to its bound.
    End,
}

/// What the stream takes.
#[derive(Debug)]
pub(super) enum Handed {
    Added(Vec<u32>),
    /// Nothing more comes, for this reason.
    Deserted(Error),
    Entry {
        slot: SlotId,
        partition: u32,
        epoch: u64,
        entry: Entry,
    },
}

/// Whether a record may be handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leave {
    Granted,
    Paused,
    /// The program has gone elsewhere.
    Void,
}

/// Where the reader begins anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Begin {
    pub(super) round: u64,
    pub(super) next: u64,
    /// Neither paused nor ended, nor is its end queued.
    pub(super) wanted: bool,
}

struct Slot {
    partition: u32,
    position: u64,
    tail: u64,
    high_watermark: Option<u64>,
    epoch: u64,
    round: u64,
    paused: bool,
    /// The program has been told the end.
    ended: bool,
    /// With the offset that is wanted once more if the entry is dropped.
    queue: VecDeque<(u64, Entry)>,
    /// Stands in `turns`.
    in_turn: bool,
}

#[derive(Default)]
struct State {
    /// Partitions are added paused, and the stream does not end however many have: somebody attaches
    /// and detaches them.
    on_demand: bool,
    slots: Vec<Slot>,
    by_partition: HashMap<u32, SlotId>,
    turns: VecDeque<SlotId>,
    added: VecDeque<Vec<u32>>,
    changed: BTreeSet<SlotId>,
    waker: Option<Waker>,
    /// The stream has ended or was dropped.
    closed: bool,
    /// The reader's task has ended before the stream did.
    deserted: Option<Error>,
}

/// See the module header.
pub(super) struct Buffer {
    state: Mutex<State>,
    /// Tells the reader of changed partitions.
    changes: Notify,
    pub(super) pool: Arc<Pool>,
    /// Bytes of the batch in the stream's hand, if it had to be decompressed.
    decompressed_bytes: AtomicUsize,
}

/// What the buffer is asked for a partition that it does not have, or after its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    Unknown(u32),
    Closed,
}

impl Slot {
    fn begin_round(&mut self) {
        self.round += 1;
    }

    /// Nothing more comes: the program has been told so, or will be once it has taken what is queued.
    fn ends(&self) -> bool {
        let last = self.queue.back();
        self.ended || matches!(last, Some((_, Entry::Failed(_) | Entry::End)))
    }

    /// Queues an entry. Of moves that nothing was read between one is left, so that a broker that
    /// makes many fills no memory.
    fn queue(&mut self, from: u64, entry: Entry) {
        if let Entry::Moved(moved) = &entry
            && let Some((_, Entry::Moved(before))) = self.queue.back_mut()
        {
            before.to = moved.to;
        } else {
            self.queue.push_back((from, entry));
        }
    }

    /// Drops what is queued from entry `keep` on; it is fetched anew.
    fn truncate(&mut self, keep: usize) {
        if let Some((from, _)) = self.queue.get(keep) {
            self.tail = *from;
            self.queue.truncate(keep);
        }
    }

    /// Leaves what paused partitions may keep.
    fn park(&mut self) {
        let fits = |(_, entry): &(u64, Entry)| match entry {
            Entry::Batch(taken) => taken.credit.park(),
            _ => true,
        };
        if let Some(first) = self.queue.iter().position(|queued| !fits(queued)) {
            self.truncate(first);
        }
    }
}

impl State {
    fn find(&self, partitions: &[u32]) -> Result<Vec<SlotId>, Refused> {
        if self.closed {
            return Err(Refused::Closed);
        }
        let find = |partition: &u32| {
            let slot = self.by_partition.get(partition).copied();
            slot.ok_or(Refused::Unknown(*partition))
        };
        partitions.iter().map(find).collect()
    }

    /// The slot's turn comes, if it has something to hand out. Whether there is news.
    fn enter(&mut self, id: SlotId) -> bool {
        if let Some(slot) = self.slots.get_mut(id)
            && !slot.in_turn
            && !slot.paused
            && !slot.queue.is_empty()
        {
            slot.in_turn = true;
            self.turns.push_back(id);
            return true;
        }
        false
    }

    fn take_turn(&mut self) -> Option<Handed> {
        loop {
            let id = self.turns.pop_front()?;
            let slot = self.slots.get_mut(id)?;
            slot.in_turn = false;
            if slot.paused {
                continue;
            }
            let Some((_, entry)) = slot.queue.pop_front() else {
                continue;
            };
            match &entry {
                Entry::Batch(_) => {}
                Entry::Moved(moved) => slot.position = moved.to,
                Entry::Failed(_) | Entry::End => slot.ended = true,
            }
            let handed = Handed::Entry {
                slot: id,
                partition: slot.partition,
                epoch: slot.epoch,
                entry,
            };
            self.enter(id);
            return Some(handed);
        }
    }
}

/// The lock, and the waker that is woken once it is free again (the order of the fields).
struct Locked<'a> {
    state: MutexGuard<'a, State>,
    woken: WakeOnDrop,
}

#[derive(Default)]
struct WakeOnDrop(Option<Waker>);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        if let Some(waker) = self.0.take() {
            waker.wake();
        }
    }
}

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Locked<'_> {
    fn wake(&mut self) {
        if let Some(waker) = self.state.waker.take() {
            self.woken.0 = Some(waker);
        }
    }

    fn enter_and_wake(&mut self, id: SlotId) {
        if self.state.enter(id) {
            self.wake();
        }
    }
}

impl Buffer {
    pub(super) fn new(pool: Arc<Pool>) -> Self {
        Self {
            state: Mutex::default(),
            changes: Notify::new(),
            pool,
            decompressed_bytes: AtomicUsize::new(0),
        }
    }

    /// A buffer whose partitions are read while they are attached: [`Self::attach`].
    pub(super) fn on_demand(pool: Arc<Pool>) -> Self {
        let buffer = Self::new(pool);
        buffer.lock().on_demand = true;
        buffer
    }

    fn lock(&self) -> Locked<'_> {
        Locked {
            state: self.state.lock(),
            woken: WakeOnDrop::default(),
        }
    }

    // What the reader does.

    /// Another partition, to be read from `position`.
    pub(super) fn add(&self, partition: u32, position: u64) -> SlotId {
        let mut state = self.lock();
        let id = state.slots.len();
        let paused = state.on_demand;
        state.slots.push(Slot {
            partition,
            position,
            tail: position,
            high_watermark: None,
            epoch: 0,
            round: 0,
            paused,
            ended: false,
            queue: VecDeque::new(),
            in_turn: false,
        });
        state.by_partition.insert(partition, id);
        id
    }

    /// Tells the program of partitions that have been added to the topic.
    pub(super) fn announce(&self, partitions: Vec<u32>) {
        let mut state = self.lock();
        state.added.push_back(partitions);
        state.wake();
    }

    /// Puts in what was fetched in that round; `tail` follows it. False if the round is over.
    pub(super) fn push(&self, id: SlotId, round: u64, entry: Entry, tail: u64) -> bool {
        let mut locked = self.lock();
        let state = &mut *locked;
        let closed = state.closed;
        match state.slots.get_mut(id) {
            Some(slot) if slot.round == round && !closed => {
                let from = match &entry {
                    Entry::Batch(taken) => {
                        slot.high_watermark = slot.high_watermark.max(Some(taken.high_watermark));
                        taken.from
                    }
                    Entry::Moved(moved) => moved.from,
                    Entry::Failed(_) | Entry::End => slot.tail,
                };
                slot.queue(from, entry);
                slot.tail = tail;
            }
            _ => return false,
        }
        locked.enter_and_wake(id);
        true
    }

    /// A new partition's log starts here, and nothing of it has been fetched.
    pub(super) fn begin_at(&self, id: SlotId, round: u64, start: u64) {
        if let Some(slot) = self.lock().slots.get_mut(id)
            && slot.round == round
            && slot.queue.is_empty()
        {
            slot.position = start;
            slot.tail = start;
        }
    }

    /// The partition's high watermark is at least this.
    pub(super) fn saw(&self, id: SlotId, high_watermark: u64) {
        if let Some(slot) = self.lock().slots.get_mut(id) {
            slot.high_watermark = slot.high_watermark.max(Some(high_watermark));
        }
    }

    /// The leader has proven that it is this, however high it was believed.
    pub(super) fn correct(&self, id: SlotId, high_watermark: u64) {
        if let Some(slot) = self.lock().slots.get_mut(id) {
            slot.high_watermark = Some(high_watermark);
        }
    }

    /// Where the reader goes on.
    pub(super) fn begin(&self, id: SlotId) -> Option<Begin> {
        let state = self.lock();
        let slot = state.slots.get(id)?;
        Some(Begin {
            round: slot.round,
            next: slot.tail,
            wanted: !slot.paused && !slot.ends(),
        })
    }

    /// Nothing of the partition waits for the program.
    pub(super) fn is_drained(&self, id: SlotId) -> bool {
        let state = self.lock();
        state.slots.get(id).is_none_or(|slot| slot.queue.is_empty())
    }

    /// Waits for partitions that were changed under the reader.
    ///
    /// # Cancel safety
    /// Safe: what is not taken stays.
    pub(super) async fn changed(&self) -> BTreeSet<SlotId> {
        loop {
            let changed = std::mem::take(&mut self.lock().changed);
            if !changed.is_empty() {
                return changed;
            }
            self.changes.notified().await;
        }
    }

    /// The reader's task has ended. If that was not for want of a stream, the stream says so.
    pub(super) fn desert(&self, reason: Error) {
        let mut state = self.lock();
        state.deserted = Some(reason);
        state.wake();
    }

    // What the stream does.

    /// The next thing for the program; `None` once every partition has ended.
    pub(super) fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Option<Handed>> {
        let mut state = self.lock();
        if state.closed {
            return Poll::Ready(None);
        }
        if let Some(added) = state.added.pop_front() {
            return Poll::Ready(Some(Handed::Added(added)));
        }
        if let Some(handed) = state.take_turn() {
            return Poll::Ready(Some(handed));
        }
        if !state.on_demand && state.slots.iter().all(|slot| slot.ended) {
            state.closed = true;
            return Poll::Ready(None);
        }
        if let Some(reason) = state.deserted.take() {
            state.closed = true;
            return Poll::Ready(Some(Handed::Deserted(reason)));
        }
        if !state
            .waker
            .as_ref()
            .is_some_and(|waker| waker.will_wake(cx.waker()))
        {
            state.waker = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Asks for the record at `offset` of the batch in hand to be handed out.
    pub(super) fn leave(&self, id: SlotId, epoch: u64, offset: u64) -> Leave {
        let mut state = self.lock();
        match state.slots.get_mut(id) {
            Some(slot) if slot.epoch == epoch => {
                if slot.paused {
                    return Leave::Paused;
                }
                slot.position = offset.saturating_add(1);
                Leave::Granted
            }
            _ => Leave::Void,
        }
    }

    /// What was taken in this epoch is still wanted.
    pub(super) fn is_valid(&self, id: SlotId, epoch: u64) -> bool {
        let state = self.lock();
        state.slots.get(id).is_some_and(|slot| slot.epoch == epoch)
    }

    /// The partition was paused while the batch was in hand: what is left of it waits in front.
    pub(super) fn put_back(&self, id: SlotId, epoch: u64, mut taken: Taken) {
        let mut locked = self.lock();
        let state = &mut *locked;
        if let Some(slot) = state.slots.get_mut(id)
            && slot.epoch == epoch
        {
            taken.from = slot.position;
            slot.queue.push_front((slot.position, Entry::Batch(taken)));
            if slot.paused {
                let tail = slot.tail;
                slot.park();
                if slot.tail != tail {
                    slot.begin_round();
                    state.changed.insert(id);
                    self.changes.notify_one();
                }
            }
        }
        // Resumed meanwhile, perhaps.
        locked.enter_and_wake(id);
    }

    /// The batch in hand does not decode: the partition ends at its position, until a seek.
    pub(super) fn give_up(&self, id: SlotId, epoch: u64) {
        let mut locked = self.lock();
        let state = &mut *locked;
        if let Some(slot) = state.slots.get_mut(id)
            && slot.epoch == epoch
        {
            slot.queue.clear();
            slot.tail = slot.position;
            slot.ended = true;
            slot.begin_round();
            state.changed.insert(id);
            self.changes.notify_one();
        }
    }

    /// The stream ends here, whatever is left.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        for slot in &mut state.slots {
            slot.queue.clear();
        }
    }

    pub(super) fn set_decompressed(&self, bytes: usize) {
        self.decompressed_bytes.store(bytes, Ordering::Relaxed);
    }

    // What the program asks for.

    pub(super) fn decompressed_bytes(&self) -> usize {
        self.decompressed_bytes.load(Ordering::Relaxed)
    }

    /// Does nothing unless it knows all of them.
    pub(super) fn pause(&self, partitions: &[u32]) -> Result<(), Refused> {
        let mut locked = self.lock();
        let state = &mut *locked;
        for id in state.find(partitions)? {
            if let Some(slot) = state.slots.get_mut(id)
                && !slot.paused
            {
                slot.paused = true;
                slot.park();
                slot.begin_round();
                state.changed.insert(id);
            }
        }
        self.changes.notify_one();
        Ok(())
    }

    /// Does nothing unless it knows all of them.
    pub(super) fn resume(&self, partitions: &[u32]) -> Result<(), Refused> {
        let mut locked = self.lock();
        let state = &mut *locked;
        let mut news = false;
        for id in state.find(partitions)? {
            if let Some(slot) = state.slots.get_mut(id)
                && slot.paused
            {
                slot.paused = false;
                slot.begin_round();
                state.changed.insert(id);
                news |= state.enter(id);
            }
        }
        if news {
            locked.wake();
        }
        self.changes.notify_one();
        Ok(())
    }

    pub(super) fn seek(&self, partition: u32, offset: u64) -> Result<(), Refused> {
        let seek = |slot: &mut Slot| {
            slot.position = offset;
            slot.tail = offset;
            slot.ended = false;
        };
        self.begin_epoch(partition, seek).map(drop)
    }

    /// Reads the partition from `offset` on, and gives the epoch of all that is handed out of it from
    /// now on until it is detached, attached again or sought in.
    pub(super) fn attach(&self, partition: u32, offset: u64) -> Result<u64, Refused> {
        self.begin_epoch(partition, |slot| {
            slot.position = offset;
            slot.tail = offset;
            slot.ended = false;
            slot.paused = false;
        })
    }

    /// Reads the partition no more: what is buffered is dropped, what is in the stream's hand is void.
    pub(super) fn detach(&self, partition: u32) -> Result<(), Refused> {
        let detach = |slot: &mut Slot| {
            slot.tail = slot.position;
            slot.paused = true;
        };
        self.begin_epoch(partition, detach).map(drop)
    }

    fn begin_epoch(&self, partition: u32, change: impl Fn(&mut Slot)) -> Result<u64, Refused> {
        let mut locked = self.lock();
        let state = &mut *locked;
        let mut epoch = 0;
        for id in state.find(&[partition])? {
            if let Some(slot) = state.slots.get_mut(id) {
                slot.queue.clear();
                change(slot);
                slot.epoch += 1;
                epoch = slot.epoch;
                slot.begin_round();
                state.changed.insert(id);
            }
        }
        self.changes.notify_one();
        Ok(epoch)
    }

    /// Refuses as a seek would.
    pub(super) fn check(&self, partition: u32) -> Result<(), Refused> {
        self.lock().find(&[partition]).map(drop)
    }

    pub(super) fn positions(&self) -> BTreeMap<u32, u64> {
        let state = self.lock();
        let position = |slot: &Slot| (slot.partition, slot.position);
        state.slots.iter().map(position).collect()
    }

    /// How far each partition's high watermark, where it is known, is ahead of its position.
    pub(super) fn lag(&self) -> BTreeMap<u32, u64> {
        let state = self.lock();
        let lag = |slot: &Slot| {
            let high_watermark = slot.high_watermark?;
            Some((slot.partition, high_watermark.saturating_sub(slot.position)))
        };
        state.slots.iter().filter_map(lag).collect()
    }

    pub(super) fn high_watermark(&self, partition: u32) -> Option<u64> {
        let state = self.lock();
        let slot = state.by_partition.get(&partition)?;
        state.slots.get(*slot)?.high_watermark
    }

    pub(super) fn see(&self, high_watermarks: &[(u32, u64)]) {
        let mut state = self.lock();
        for (partition, high_watermark) in high_watermarks {
            if let Some(&id) = state.by_partition.get(partition)
                && let Some(slot) = state.slots.get_mut(id)
            {
                slot.high_watermark = slot.high_watermark.max(Some(*high_watermark));
            }
        }
    }

    pub(super) fn paused(&self) -> Vec<u32> {
        let state = self.lock();
        let paused = state.slots.iter().filter(|slot| slot.paused);
        paused.map(|slot| slot.partition).collect()
    }
}
