//! The buffer, in bytes: who may take a record in now, and who waits.
//!
//! One lock over one small state; no call waits under it. Each partition has a [`Share`]; reservations
//! take from the whole, without one.
//!
//! ```text
//! |<------------------------------ size ------------------------------>|
//! [ share 0 ][ share 1 ][ reserved ][             free                 ]
//!            a share may grow to half of what is free
//! ```
//!
//! Shares are not fixed: each may hold as much as half of what is *free* (Choudhury and Hahne, dynamic
//! queue thresholds). One stuck partition thus ends with a third of the buffer, and of n of them each
//! with 1/(n+2): however many a frozen broker leads, the others have room left (promise 9).
//!
//! Invariants:
//! - bytes taken never exceed the size (promise 5);
//! - who waits for a share is served in order of arrival, and holds up nobody who waits for another;
//! - who waits for the whole holds up all who come later, so that it gets its turn; unless it wants
//!   more than a quarter of the buffer, in which case the others' traffic goes before;
//! - a waiter that goes away gives back what it was granted.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use crate::stats::Buffer;

/// The buffer of a producer.
#[derive(Debug)]
pub(super) struct Budget {
    size: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    free: usize,
    closed: bool,
    next_turn: u64,
    lanes: Vec<Lane>,
    /// Lanes that nobody has.
    idle: Vec<usize>,
    /// The first waiter of each lane that has one: its turn, and the lane.
    heads: BTreeMap<u64, usize>,
    /// Turns that have been granted and not taken yet, with their bytes.
    granted: BTreeMap<u64, usize>,
    /// The turn of a waiter for the whole that holds up those after it.
    short: Option<u64>,
}

#[derive(Debug, Default)]
struct Lane {
    used: usize,
    waiting: VecDeque<Waiter>,
    closed: bool,
}

#[derive(Debug)]
struct Waiter {
    turn: u64,
    cost: usize,
    waker: Waker,
}

/// The lane of those who take from the whole.
const WHOLE: usize = 0;

/// The producer, or the partition, takes nothing in any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Closed;

impl Budget {
    pub(super) fn new(size: usize) -> Arc<Self> {
        Arc::new(Self {
            size,
            state: Mutex::new(State {
                free: size,
                closed: false,
                next_turn: 0,
                lanes: vec![Lane::default()],
                idle: Vec::new(),
                heads: BTreeMap::new(),
                granted: BTreeMap::new(),
                short: None,
            }),
        })
    }

    /// A partition's share.
    pub(super) fn share(self: &Arc<Self>) -> Share {
        let mut state = self.state.lock();
        let lane = match state.idle.pop() {
            Some(lane) => lane,
            None => {
                state.lanes.push(Lane::default());
                state.lanes.len() - 1
            }
        };
        Share {
            budget: Arc::clone(self),
            lane,
        }
    }

    /// Takes from the whole, waiting for it.
    pub(super) async fn take(self: &Arc<Self>, cost: usize) -> Result<Taken, Closed> {
        self.wait(WHOLE, cost).await?;
        Ok(Taken {
            budget: Arc::clone(self),
            bytes: cost,
        })
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Bytes that are not taken.
    pub(super) fn free(&self) -> usize {
        self.state.lock().free
    }

    /// Nobody takes anything any more; who waits is told.
    pub(super) fn close(&self) {
        let mut woken = Vec::new();
        {
            let mut state = self.state.lock();
            state.closed = true;
            state.heads.clear();
            state.short = None;
            for lane in &mut state.lanes {
                woken.extend(lane.waiting.drain(..).map(|waiter| waiter.waker));
            }
        }
        woken.into_iter().for_each(Waker::wake);
    }

    fn wait(&self, lane: usize, cost: usize) -> Wait<'_> {
        Wait {
            budget: self,
            lane,
            cost,
            turn: None,
        }
    }

    fn give_back(&self, lane: usize, bytes: usize) {
        let woken = {
            let mut state = self.state.lock();
            state.put(lane, bytes);
            state.settle(self.size)
        };
        woken.into_iter().for_each(Waker::wake);
    }
}

impl Buffer for Budget {
    fn held_bytes(&self) -> usize {
        self.size - self.free()
    }
}

impl State {
    fn lane(&mut self, lane: usize) -> &mut Lane {
        // Lanes are never removed, only reused.
        &mut self.lanes[lane]
    }

    /// Whether the lane may take that much now, turns apart.
    fn fits(&self, lane: usize, cost: usize) -> bool {
        let used = self.lanes[lane].used;
        cost <= self.free && (lane == WHOLE || used == 0 || used + cost <= self.free / 2)
    }

    /// Whether the whole alone keeps the lane waiting, so that those after it wait, too.
    fn is_short(&self, lane: usize, cost: usize, size: usize) -> bool {
        let within_share = lane == WHOLE || self.lanes[lane].used == 0;
        within_share && cost > self.free && cost <= size / 4
    }

    fn get(&mut self, lane: usize, bytes: usize) {
        self.free -= bytes;
        self.lane(lane).used += bytes;
    }

    fn put(&mut self, lane: usize, bytes: usize) {
        self.free += bytes;
        self.lane(lane).used -= bytes;
    }

    fn try_get(&mut self, lane: usize, cost: usize) -> bool {
        let turn = self.short.is_none() && self.lanes[lane].waiting.is_empty();
        let granted = turn && self.fits(lane, cost);
        if granted {
            self.get(lane, cost);
        }
        granted
    }

    /// Serves whoever may be served; gives whom to wake.
    fn settle(&mut self, size: usize) -> Vec<Waker> {
        let mut woken = Vec::new();
        self.short = None;
        let mut from = Bound::Unbounded;
        while let Some((&turn, &lane)) = self.heads.range((from, Bound::Unbounded)).next() {
            from = Bound::Excluded(turn);
            let Some(cost) = self.lanes[lane].waiting.front().map(|waiter| waiter.cost) else {
                continue;
            };
            if !self.fits(lane, cost) {
                if self.is_short(lane, cost, size) {
                    self.short = Some(turn);
                    break;
                }
                continue;
            }
            self.get(lane, cost);
            self.heads.remove(&turn);
            if let Some(waiter) = self.lane(lane).waiting.pop_front() {
                self.granted.insert(turn, cost);
                woken.push(waiter.waker);
            }
            if let Some(next) = self.lanes[lane].waiting.front() {
                self.heads.insert(next.turn, lane);
            }
        }
        woken
    }

    /// A waiter goes away.
    fn leave(&mut self, lane: usize, turn: u64) {
        if let Some(bytes) = self.granted.remove(&turn) {
            self.put(lane, bytes);
            return;
        }
        let waiting = &mut self.lanes[lane].waiting;
        let Ok(at) = waiting.binary_search_by_key(&turn, |waiter| waiter.turn) else {
            return;
        };
        waiting.remove(at);
        let next = waiting.front().map(|waiter| waiter.turn);
        if self.heads.remove(&turn).is_some()
            && let Some(next) = next
        {
            self.heads.insert(next, lane);
        }
    }
}

/// Bytes taken from the whole. Given back when dropped.
#[derive(Debug)]
pub(super) struct Taken {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Taken {
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Moves a part of it to a partition's share, which it may overdraw; false if there is not
    /// enough.
    pub(super) fn move_to(&mut self, share: &Share, bytes: usize) -> bool {
        if bytes > self.bytes {
            return false;
        }
        self.bytes -= bytes;
        let mut state = self.budget.state.lock();
        state.lane(WHOLE).used -= bytes;
        state.lane(share.lane).used += bytes;
        true
    }

    /// Undoes [`Self::move_to`].
    pub(super) fn move_back(&mut self, share: &Share, bytes: usize) {
        self.bytes += bytes;
        let woken = {
            let mut state = self.budget.state.lock();
            state.lane(share.lane).used -= bytes;
            state.lane(WHOLE).used += bytes;
            // The share may have room for who waits there.
            state.settle(self.budget.size)
        };
        woken.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.budget.give_back(WHOLE, self.bytes);
        }
    }
}

/// What a partition may hold of the buffer. Whoever takes from it gives back as much.
#[derive(Debug)]
pub(super) struct Share {
    budget: Arc<Budget>,
    lane: usize,
}

impl Share {
    /// Takes without waiting; false if somebody else's turn comes first or there is no room.
    pub(super) fn try_take(&self, cost: usize) -> bool {
        let mut state = self.budget.state.lock();
        !state.closed && !state.lanes[self.lane].closed && state.try_get(self.lane, cost)
    }

    /// Takes, waiting for room and turn.
    ///
    /// # Cancel safety
    /// Cancelled, nothing is taken.
    pub(super) async fn take(&self, cost: usize) -> Result<(), Closed> {
        self.budget.wait(self.lane, cost).await
    }

    pub(super) fn give_back(&self, bytes: usize) {
        self.budget.give_back(self.lane, bytes);
    }

    #[cfg(test)]
    fn used(&self) -> usize {
        self.budget.state.lock().lanes[self.lane].used
    }

    /// Takes nothing any more; who waits for it is told.
    pub(super) fn close(&self) {
        let woken: Vec<Waker> = {
            let mut state = self.budget.state.lock();
            let lane = state.lane(self.lane);
            lane.closed = true;
            let waiters = std::mem::take(&mut lane.waiting);
            if let Some(head) = waiters.front() {
                state.heads.remove(&head.turn);
            }
            let others = state.settle(self.budget.size);
            waiters
                .into_iter()
                .map(|waiter| waiter.waker)
                .chain(others)
                .collect()
        };
        woken.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        // All that was taken is given back: whoever has yet to do so holds the share.
        let mut state = self.budget.state.lock();
        *state.lane(self.lane) = Lane::default();
        state.idle.push(self.lane);
    }
}

/// Waits for a turn and room.
struct Wait<'a> {
    budget: &'a Budget,
    lane: usize,
    cost: usize,
    turn: Option<u64>,
}

impl Future for Wait<'_> {
    type Output = Result<(), Closed>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let (lane, cost) = (self.lane, self.cost);
        let mut state = self.budget.state.lock();
        if let Some(turn) = self.turn
            && state.granted.remove(&turn).is_some()
        {
            drop(state);
            self.turn = None;
            return Poll::Ready(Ok(()));
        }
        if state.closed || state.lanes[lane].closed || cost > self.budget.size {
            drop(state);
            self.turn = None;
            return Poll::Ready(Err(Closed));
        }
        match self.turn {
            Some(turn) => {
                let waiting = &mut state.lane(lane).waiting;
                if let Ok(at) = waiting.binary_search_by_key(&turn, |waiter| waiter.turn) {
                    waiting[at].waker.clone_from(cx.waker());
                }
                Poll::Pending
            }
            None if state.try_get(lane, cost) => Poll::Ready(Ok(())),
            None => {
                let turn = state.next_turn;
                state.next_turn += 1;
                let first = state.lanes[lane].waiting.is_empty();
                let waiter = Waiter {
                    turn,
                    cost,
                    waker: cx.waker().clone(),
                };
                state.lane(lane).waiting.push_back(waiter);
                if first {
                    state.heads.insert(turn, lane);
                }
                if first && state.short.is_none() && state.is_short(lane, cost, self.budget.size) {
                    state.short = Some(turn);
                }
                drop(state);
                self.turn = Some(turn);
                Poll::Pending
            }
        }
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        let Some(turn) = self.turn else { return };
        let woken = {
            let mut state = self.budget.state.lock();
            state.leave(self.lane, turn);
            state.settle(self.budget.size)
        };
        woken.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use std::task::Wake;

    use proptest::prelude::*;

    use super::*;

    struct Noop;

    impl Wake for Noop {
        fn wake(self: Arc<Self>) {}
    }

    fn poll<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
        let waker = Waker::from(Arc::new(Noop));
        future.poll(&mut Context::from_waker(&waker))
    }

    #[test]
    fn budget_stuck_shares_leave_the_others_room() {
        let budget = Budget::new(64 << 20);
        let stuck: Vec<_> = (0..20).map(|_| budget.share()).collect();
        while stuck.iter().filter(|share| share.try_take(4096)).count() > 0 {}
        let each = budget.size() / 22;
        for share in &stuck {
            assert!(share.used().abs_diff(each) < 64 << 10, "{}", share.used());
        }
        let healthy = budget.share();
        for _ in 0..1000 {
            assert!(healthy.try_take(512 << 10), "room for what is given back");
            healthy.give_back(512 << 10);
        }
    }

    #[test]
    fn budget_waiter_of_a_share_holds_up_no_other_share() {
        let budget = Budget::new(1 << 20);
        let (stuck, healthy) = (budget.share(), budget.share());
        while stuck.try_take(1000) {}
        let mut waiting = Box::pin(stuck.take(1000));
        assert!(poll(waiting.as_mut()).is_pending());
        assert!(healthy.try_take(1000));
        assert!(!stuck.try_take(1), "the waiter's turn comes first");
        drop(waiting);
        healthy.give_back(1000);
        stuck.give_back(100_000);
        assert!(stuck.try_take(1000));
    }

    #[test]
    fn budget_waiter_for_the_whole_gets_its_turn() {
        let budget = Budget::new(1 << 20);
        let shares: Vec<_> = (0..8).map(|_| budget.share()).collect();
        for share in &shares {
            assert!(share.try_take(100 << 10));
        }
        let mut waiting = Box::pin(budget.take(250 << 10));
        assert!(poll(waiting.as_mut()).is_pending());
        let late = budget.share();
        assert!(!late.try_take(1), "nobody overtakes it");
        shares[0].give_back(100 << 10);
        let Poll::Ready(Ok(taken)) = poll(waiting.as_mut()) else {
            panic!("its turn has come");
        };
        assert!(late.try_take(1));
        assert_eq!(taken.bytes(), 250 << 10);
    }

    #[test]
    fn budget_what_a_share_took_of_a_reservation_goes_back_to_it() {
        let budget = Budget::new(1000);
        let share = budget.share();
        let mut whole = Box::pin(budget.take(1000));
        let Poll::Ready(Ok(mut reserved)) = poll(whole.as_mut()) else {
            panic!("all is free");
        };
        assert!(reserved.move_to(&share, 300));
        reserved.move_back(&share, 300);
        assert_eq!(
            (reserved.bytes(), share.used(), budget.free()),
            (1000, 0, 0)
        );
        drop(reserved);
        assert_eq!(budget.free(), 1000);
    }

    #[test]
    fn budget_huge_waiter_goes_after_the_others_traffic() {
        let budget = Budget::new(1 << 20);
        let share = budget.share();
        assert!(share.try_take(1000));
        let mut waiting = Box::pin(budget.take(1 << 20));
        assert!(poll(waiting.as_mut()).is_pending());
        assert!(share.try_take(1000));
        share.give_back(2000);
        assert!(poll(waiting.as_mut()).is_ready());
        assert_eq!(budget.free(), 0x10_0000);
    }

    #[test]
    fn budget_closed_tells_who_waits_and_who_comes() {
        let budget = Budget::new(1000);
        let share = budget.share();
        assert!(share.try_take(900));
        let mut in_line = Box::pin(share.take(900));
        let mut of_whole = Box::pin(budget.take(900));
        assert!(poll(in_line.as_mut()).is_pending());
        assert!(poll(of_whole.as_mut()).is_pending());
        share.close();
        assert_eq!(poll(in_line.as_mut()), Poll::Ready(Err(Closed)));
        assert!(poll(of_whole.as_mut()).is_pending());
        budget.close();
        assert!(matches!(poll(of_whole.as_mut()), Poll::Ready(Err(Closed))));
        assert!(!budget.share().try_take(1));
        share.give_back(900);
        assert_eq!(budget.free(), 1000);
    }

    proptest! {
        /// Any interleaving of takers, waiters that come, are polled and go away, and givers: never
        /// more than the size is out, and in the end everything is back and nobody is left behind.
        #[test]
        fn budget_under_any_interleaving_neither_leaks_nor_strands(
            steps in proptest::collection::vec((0u8..6, 0usize..4, 1usize..600), 0..200),
        ) {
            let budget = Budget::new(1000);
            let shares: Vec<_> = (0..3).map(|_| budget.share()).collect();
            let mut held: Vec<(usize, usize)> = Vec::new();
            let mut reserved: Vec<Taken> = Vec::new();
            type Waiting<'a> = Pin<Box<dyn Future<Output = Result<(), Closed>> + 'a>>;
            let mut waiting: Vec<(usize, usize, Waiting<'_>)> = Vec::new();
            for (op, lane, amount) in steps {
                match op {
                    0 if lane < 3 && shares[lane].try_take(amount) => held.push((lane, amount)),
                    1 if lane < 3 => {
                        let mut wait: Waiting<'_> = Box::pin(shares[lane].take(amount));
                        match poll(wait.as_mut()) {
                            Poll::Ready(_) => held.push((lane, amount)),
                            Poll::Pending => waiting.push((lane, amount, wait)),
                        }
                    }
                    2 if !held.is_empty() => {
                        let (lane, bytes) = held.swap_remove(amount % held.len());
                        shares[lane].give_back(bytes);
                    }
                    3 if !waiting.is_empty() => {
                        drop(waiting.remove(amount % waiting.len()));
                    }
                    4 => {
                        let mut wait = Box::pin(budget.take(amount));
                        if let Poll::Ready(taken) = poll(wait.as_mut()) {
                            let mut taken = taken.unwrap();
                            if lane < 3 && taken.move_to(&shares[lane], amount / 2) {
                                held.push((lane, amount / 2));
                            }
                            reserved.push(taken);
                        }
                    }
                    5 => drop(reserved.pop()),
                    _ => {}
                }
                let mut still = Vec::new();
                for (lane, amount, mut wait) in waiting {
                    match poll(wait.as_mut()) {
                        Poll::Ready(_) => held.push((lane, amount)),
                        Poll::Pending => still.push((lane, amount, wait)),
                    }
                }
                waiting = still;
                let out: usize = held.iter().map(|(_, bytes)| bytes).sum::<usize>()
                    + reserved.iter().map(Taken::bytes).sum::<usize>();
                prop_assert_eq!(budget.free() + out, 1000);
            }
            reserved.clear();
            while !waiting.is_empty() || !held.is_empty() {
                for (lane, bytes) in held.drain(..) {
                    shares[lane].give_back(bytes);
                }
                let before = waiting.len();
                let mut still = Vec::new();
                for (lane, amount, mut wait) in waiting {
                    match poll(wait.as_mut()) {
                        Poll::Ready(_) => held.push((lane, amount)),
                        Poll::Pending => still.push((lane, amount, wait)),
                    }
                }
                waiting = still;
                prop_assert!(waiting.len() < before || before == 0, "somebody is left behind");
            }
            prop_assert_eq!(budget.free(), 1000);
            let state = budget.state.lock();
            prop_assert!(state.heads.is_empty() && state.granted.is_empty() && state.short.is_none());
        }
    }
}
