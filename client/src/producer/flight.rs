//! The batches of one partition between their admission and their fate: sequences, what is in
//! flight, and what a refusal or a broken stream means for each.
//!
//! Pure: no clock, no network; the driver (`driver.rs`) does what this decides.
//!
//! ```text
//! window:   [ sent, awaiting an answer ][ not sent in this round ]   at most `limit` batches
//!             lowest sequence first
//! ```
//!
//! A **round** is one pass over the window in order, down one stream. Invariants:
//! - within a round, batches are sent in order of their sequences and none is sent past one that
//!   is unsent;
//! - after any failure nothing more is sent in that round: it is drained (or given up), and the
//!   next one begins with the lowest unacknowledged batch;
//! - an acknowledgement counts whichever round it answers, a refusal only in its own;
//! - an acknowledged batch keeps its place until all before it are acknowledged: the window never
//!   spans more than `limit` batches, so that the broker, which knows the last five, still knows
//!   the lowest one (S12);
//! - a batch is **doubtful** once an attempt ended without a clear answer: it may be written, now
//!   or later. A batch that is not doubtful and has no answer outstanding is certainly not
//!   written, and then neither is any later batch of the same epoch, because brokers take
//!   sequences only in order. This is what makes it safe to renumber those under a new epoch (S12).

use std::collections::VecDeque;

/// Which attempt an answer belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) round: u64,
    pub(crate) epoch: u32,
    pub(crate) sequence: u64,
}

/// Why an attempt failed, as far as it matters for what to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Certainly not written; the same batch may succeed later or elsewhere.
    Retriable,
    /// No clear answer; the same batch again finds out.
    Unclear,
    /// An earlier batch is missing. Retriable, unless it is the lowest one that gets this.
    OutOfOrder,
    /// The partition does not know the producer at this sequence, or fences its epoch (S12).
    UnknownProducer,
    /// This batch will never be taken.
    Final,
    /// Taken for one that is written already, though it was sent only once: another writer uses the
    /// sequence. What became of it is unclear, and sequences of this epoch mean nothing any more.
    Usurped,
}

/// A batch that left the window without an acknowledgement.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Lost<P> {
    pub(crate) payload: P,
    /// It may be written, now or later.
    pub(crate) doubtful: bool,
}

/// A batch in the window.
#[derive(Debug)]
struct Slot<P> {
    sequence: u64,
    /// `None` once it is acknowledged.
    payload: Option<P>,
    records: u32,
    /// Sent in this round and not answered.
    outstanding: bool,
    doubtful: bool,
    /// How often it was sent, over all rounds.
    sends: u32,
    /// The refusal it got in this round.
    refusal: Option<Refusal>,
}

impl<P> Slot<P> {
    fn is_doubtful(&self) -> bool {
        self.doubtful || self.outstanding
    }

    fn into_lost(self) -> Option<Lost<P>> {
        let doubtful = self.is_doubtful();
        self.payload.map(|payload| Lost { payload, doubtful })
    }
}

/// The window of one partition. See the module header.
#[derive(Debug)]
pub(crate) struct Flight<P> {
    epoch: u32,
    next_sequence: u64,
    window: VecDeque<Slot<P>>,
    /// How many slots from the front are sent in this round.
    sent: usize,
    round: u64,
    draining: bool,
    limit: usize,
}

impl<P> Flight<P> {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            epoch: 0,
            next_sequence: 0,
            window: VecDeque::with_capacity(limit),
            sent: 0,
            round: 0,
            draining: false,
            limit,
        }
    }

    pub(crate) fn epoch(&self) -> u32 {
        self.epoch
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.window.is_empty()
    }

    pub(crate) fn has_room(&self) -> bool {
        self.window.len() < self.limit
    }

    /// The lowest unacknowledged batch.
    pub(crate) fn front(&self) -> Option<&P> {
        self.window.front().and_then(|slot| slot.payload.as_ref())
    }

    /// The batches of the window, lowest first.
    pub(crate) fn batches(&self) -> impl Iterator<Item = &P> {
        self.window.iter().filter_map(|slot| slot.payload.as_ref())
    }

    /// Takes a batch in behind the others and gives it its sequence. The caller has checked
    /// [`Flight::has_room`].
    pub(crate) fn admit(&mut self, payload: P, records: u32) {
        self.window.push_back(Slot {
            sequence: self.next_sequence,
            payload: Some(payload),
            records,
            outstanding: false,
            doubtful: false,
            sends: 0,
            refusal: None,
        });
        self.next_sequence += u64::from(records);
    }

    /// There is a batch to be sent now.
    pub(crate) fn wants_send(&self) -> bool {
        let mut unsent = self.window.iter().skip(self.sent);
        !self.draining && unsent.any(|slot| slot.payload.is_some())
    }

    /// The batch to be sent next, if one may be.
    pub(crate) fn next_unsent(&mut self) -> Option<(Key, &mut P)> {
        if self.draining {
            return None;
        }
        let (round, epoch) = (self.round, self.epoch);
        let acknowledged = |slot: &Slot<P>| slot.payload.is_none();
        while self.window.get(self.sent).is_some_and(acknowledged) {
            self.sent += 1;
        }
        let slot = self.window.get_mut(self.sent)?;
        let key = Key {
            round,
            epoch,
            sequence: slot.sequence,
        };
        slot.payload.as_mut().map(|payload| (key, payload))
    }

    /// The batch of [`Flight::next_unsent`] has gone into the stream.
    pub(crate) fn mark_sent(&mut self) {
        if let Some(slot) = self.window.get_mut(self.sent) {
            slot.outstanding = true;
            slot.sends += 1;
            self.sent += 1;
        }
    }

    /// Whether the batch may rightly be told that it is written already: only one that was sent
    /// more than once, or has its fate.
    pub(crate) fn may_be_duplicate(&self, key: Key) -> bool {
        let slot = self
            .position(key.sequence)
            .and_then(|at| self.window.get(at));
        key.epoch != self.epoch || slot.is_none_or(|slot| slot.payload.is_none() || slot.sends > 1)
    }

    /// The batch is written: gives it back. `None` if it had its fate before.
    pub(crate) fn acknowledge(&mut self, key: Key) -> Option<P> {
        if key.epoch != self.epoch {
            return None;
        }
        let at = self.position(key.sequence)?;
        let slot = self.window.get_mut(at)?;
        slot.outstanding = false;
        slot.refusal = None;
        let payload = slot.payload.take();
        while self
            .window
            .pop_front_if(|slot| slot.payload.is_none())
            .is_some()
        {
            self.sent = self.sent.saturating_sub(1);
        }
        payload
    }

    /// The attempt was refused: nothing more is sent until [`Flight::rewind`]. False if the
    /// refusal is of an earlier round or comes too late to matter.
    pub(crate) fn refuse(&mut self, key: Key, refusal: Refusal) -> bool {
        if key.epoch != self.epoch || key.round != self.round {
            return false;
        }
        let Some(slot) = self
            .position(key.sequence)
            .and_then(|at| self.window.get_mut(at))
        else {
            return false;
        };
        slot.outstanding = false;
        slot.doubtful |= matches!(refusal, Refusal::Unclear | Refusal::Usurped);
        slot.refusal = Some(refusal);
        self.draining = true;
        true
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining
    }

    /// Every batch sent in this round has its answer.
    pub(crate) fn is_drained(&self) -> bool {
        !self.window.iter().any(|slot| slot.outstanding)
    }

    /// What the lowest unacknowledged batch was told in this round: it alone decides, since the
    /// others fail in its wake.
    pub(crate) fn verdict(&self) -> Option<Refusal> {
        self.window.front().and_then(|slot| slot.refusal)
    }

    /// Ends the round: the next one begins at the lowest unacknowledged batch. Batches without
    /// an answer become doubtful.
    pub(crate) fn rewind(&mut self) {
        for slot in &mut self.window {
            slot.doubtful |= slot.outstanding;
            slot.outstanding = false;
            slot.refusal = None;
        }
        self.round += 1;
        self.sent = 0;
        self.draining = false;
    }

    /// Gives up the first `count` batches (deadline, final refusal) and goes on with the rest,
    /// under a new epoch if need be. Gives the lost ones: those, and what became doubtful with
    /// them.
    pub(crate) fn give_up(&mut self, count: usize) -> Vec<Lost<P>> {
        self.rewind();
        let first = self
            .window
            .front()
            .map_or(self.next_sequence, |slot| slot.sequence);
        let mut lost: Vec<Lost<P>> = Vec::new();
        // Whether the rest is certainly unwritten: see the module header.
        let mut certain = false;
        let mut unsent = true;
        while lost.len() < count {
            let Some(slot) = self.window.pop_front() else {
                break;
            };
            if slot.payload.is_none() {
                continue;
            }
            certain |= !slot.is_doubtful();
            unsent &= slot.sends == 0;
            lost.extend(slot.into_lost());
        }
        if unsent {
            // Their sequences were never seen by anybody: close the gap, in the same epoch.
            self.renumber(first);
            return lost;
        }
        lost.extend(self.restart(certain));
        lost
    }

    /// Goes on under a new epoch, from sequence 0 (S12). Doubtful batches at the front are lost:
    /// to send them again under another epoch could double them.
    pub(crate) fn restart_epoch(&mut self) -> Vec<Lost<P>> {
        self.rewind();
        self.restart(false)
    }

    /// Everything that is left, at the end.
    pub(crate) fn drain(&mut self) -> Vec<Lost<P>> {
        self.rewind();
        self.window.drain(..).filter_map(Slot::into_lost).collect()
    }

    fn restart(&mut self, certain: bool) -> Vec<Lost<P>> {
        let mut lost = Vec::new();
        let stale = |slot: &mut Slot<P>| slot.is_doubtful() || slot.payload.is_none();
        while !certain && let Some(slot) = self.window.pop_front_if(stale) {
            lost.extend(slot.into_lost());
        }
        self.window.retain(|slot| slot.payload.is_some());
        self.epoch += 1;
        self.renumber(0);
        lost
    }

    fn renumber(&mut self, first: u64) {
        let mut next = first;
        for slot in &mut self.window {
            slot.sequence = next;
            slot.doubtful = false;
            slot.sends = 0;
            next += u64::from(slot.records);
        }
        self.next_sequence = next;
    }

    #[cfg(test)]
    pub(crate) fn front_sequence(&self) -> Option<u64> {
        self.window.front().map(|slot| slot.sequence)
    }

    fn position(&self, sequence: u64) -> Option<usize> {
        self.window
            .iter()
            .position(|slot| slot.sequence == sequence)
    }
}
