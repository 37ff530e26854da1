//! The byte credit of one consumer, over all its links: what bounds its memory, whatever streams
//! break and however well batches are compressed. Pure.
//!
//! Brokers count credit in *wire* bytes: batches as they are stored. The program's setting counts
//! what they are once *decompressed*, their charge. A link's ratio of the two is learned from the
//! batches that arrive, and keeps its worst for a while: it fades by an eighth with each message
//! that has any. Per link:
//!
//! ```text
//!   |------------------------- share ---------------------------|
//!   |  held: charge of what arrived  |  outstanding x ratio |   |
//! ```
//!
//! Invariants:
//! - Credit is granted only while the charges of all held batches and all outstanding credit (by
//!   its link's ratio) stay within the prefetch. So that none starves beside an idle one, each link
//!   may have [`LINK_CREDIT_MIN`], less what is still held of batches from links that have ended.
//! - Bytes held as they came in never exceed the prefetch plus, per link, [`LINK_CREDIT_MIN`] and
//!   one message that was larger than the credit left. A ratio that suddenly gets worse breaks only
//!   the first invariant, by what was outstanding: compressed batches wait compressed.
//! - A link's outstanding credit never exceeds what brokers let a stream save up
//!   ([`WIRE_CREDIT_MAX`]): more would be outstanding for ever, and nothing sent.
//! - What paused partitions keep is at most a part of the prefetch ([`PARKED_PART`]), and no link's
//!   share shrinks by it below its minimum.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use qute_proto::FETCH_CREDIT_BYTES_MAX;
use qute_proto::v1::{self, fetch_request::Request};
use tokio::sync::mpsc;

/// A link's share of the prefetch is at least this, and it gets no more before its first batch.
pub(super) const LINK_CREDIT_MIN: i64 = 256 * 1024;
/// Credit is given back in steps of this part of a link's share.
const CREDIT_STEP: i64 = 8;
/// Wire bytes that a link may have outstanding: no more than its broker counts.
const WIRE_CREDIT_MAX: i64 = FETCH_CREDIT_BYTES_MAX as i64;
/// Paused partitions together keep at most this part of the prefetch.
const PARKED_PART: i64 = 4;
/// A ratio of 1.
const RATIO_ONE: i64 = 16;

/// See the module header.
#[derive(Debug)]
pub(super) struct Pool {
    state: Mutex<State>,
}

/// What a consumer holds, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Held {
    pub(super) wire: i64,
    pub(super) charge: i64,
}

#[derive(Debug)]
struct State {
    prefetch: i64,
    held: Held,
    /// Charge of what is held of links that have ended.
    orphaned: i64,
    /// Charge of what paused partitions keep.
    parked: i64,
    /// The last id that was given to a link.
    last_link: u64,
    live: BTreeMap<u64, Account>,
}

/// Of a live link.
#[derive(Debug)]
struct Account {
    /// Into the link's stream, for grants. Unbounded: one per step.
    requests: mpsc::UnboundedSender<v1::FetchRequest>,
    share: i64,
    /// Wire bytes granted and not used; below zero when a batch was larger than what was left.
    outstanding: i64,
    /// Charge of what has arrived and is not taken.
    held: i64,
    /// Charge per wire byte, times [`RATIO_ONE`]; `None` before the first batch.
    ratio: Option<i64>,
}

impl Account {
    fn ratio(&self) -> i64 {
        self.ratio.unwrap_or(RATIO_ONE)
    }

    fn drawn(&self) -> i64 {
        let reserved = self.outstanding.max(0).saturating_mul(self.ratio()) / RATIO_ONE;
        self.held.saturating_add(reserved)
    }

    /// A message without batches says nothing.
    fn learn(&mut self, wire: i64, charge: i64) {
        if wire <= 0 {
            return;
        }
        let seen = charge.saturating_mul(RATIO_ONE) / wire;
        let faded = self.ratio.map_or(0, |ratio| ratio - ratio / 8);
        self.ratio = Some(seen.max(faded).max(RATIO_ONE));
    }

    /// Grants what `room` of charge allows, if it is worth a message; gives the charge used.
    fn fill(&mut self, room: i64, step: i64) -> i64 {
        // What is outstanding or held gives another chance.
        if room <= 0 || (room < step && (self.outstanding > 0 || self.held > 0)) {
            return 0;
        }
        let before = self.drawn();
        let mut wire = (room.saturating_mul(RATIO_ONE) / self.ratio()).max(1);
        if self.ratio.is_none() {
            wire = wire.min(LINK_CREDIT_MIN - self.outstanding);
        }
        let left = WIRE_CREDIT_MAX - self.outstanding.max(0);
        if left < wire {
            // The broker's cap binds: in steps of that.
            wire = if left < WIRE_CREDIT_MAX / CREDIT_STEP {
                0
            } else {
                left
            };
        }
        if wire <= 0 {
            return 0;
        }
        let bytes = wire - self.outstanding.min(0);
        self.outstanding += bytes;
        // Of a link that has ended, everything returns when it is closed.
        let _ = self.requests.send(v1::FetchRequest {
            request: Some(Request::Credit(v1::Credit {
                bytes: bytes.unsigned_abs(),
            })),
        });
        self.drawn() - before
    }
}

/// What a message's batches hold of the credit: given back when the last of them is dropped,
/// because they share one piece of memory.
#[derive(Debug)]
pub(super) struct Credit {
    pool: Arc<Pool>,
    link: u64,
    held: Held,
    parked: AtomicBool,
}

impl Credit {
    /// Moves it to the account of paused partitions; false if that is full. One caller at a time.
    pub(super) fn park(&self) -> bool {
        if self.parked.swap(true, Ordering::AcqRel) {
            return true;
        }
        let fits = self.pool.park(self.link, self.held.charge);
        self.parked.store(fits, Ordering::Release);
        fits
    }
}

impl Drop for Credit {
    fn drop(&mut self) {
        let parked = *self.parked.get_mut();
        self.pool.release(self.link, self.held, parked);
    }
}

impl Pool {
    pub(super) fn new(prefetch_bytes: u64) -> Self {
        Self {
            state: Mutex::new(State {
                prefetch: signed(prefetch_bytes),
                held: Held::default(),
                orphaned: 0,
                parked: 0,
                last_link: 0,
                live: BTreeMap::new(),
            }),
        }
    }

    /// An id for another link: several readers may share the pool.
    pub(super) fn new_link(&self) -> u64 {
        let mut state = self.state.lock();
        state.last_link += 1;
        state.last_link
    }

    /// What is held now.
    pub(super) fn held(&self) -> Held {
        self.state.lock().held
    }

    /// The link's broker may send.
    pub(super) fn has_credit(&self, link: u64) -> bool {
        let state = self.state.lock();
        let account = state.live.get(&link);
        account.is_some_and(|account| account.outstanding > 0)
    }

    /// Opens the account of a link; what it may have comes as grants.
    pub(super) fn open(
        &self,
        link: u64,
        share: u64,
        requests: mpsc::UnboundedSender<v1::FetchRequest>,
    ) {
        let account = Account {
            requests,
            share: signed(share).max(LINK_CREDIT_MIN),
            outstanding: 0,
            held: 0,
            ratio: None,
        };
        let mut state = self.state.lock();
        state.live.insert(link, account);
        state.distribute();
    }

    /// The link has ended: what it did not use returns now, the rest as it is taken.
    pub(super) fn close(&self, link: u64) {
        let mut state = self.state.lock();
        if let Some(account) = state.live.remove(&link) {
            state.orphaned += account.held;
            state.distribute();
        }
    }

    /// A message with batches of so many bytes has arrived.
    pub(super) fn hold(self: &Arc<Self>, link: u64, wire: usize, charge: usize) -> Credit {
        let held = Held {
            wire: of_length(wire),
            charge: of_length(charge.max(wire)),
        };
        let mut state = self.state.lock();
        state.held.wire += held.wire;
        state.held.charge += held.charge;
        if let Some(account) = state.live.get_mut(&link) {
            account.outstanding -= held.wire;
            account.held += held.charge;
            account.learn(held.wire, held.charge);
        } else {
            state.orphaned += held.charge;
        }
        state.distribute();
        Credit {
            pool: Arc::clone(self),
            link,
            held,
            parked: AtomicBool::new(false),
        }
    }

    fn park(&self, link: u64, charge: i64) -> bool {
        let mut state = self.state.lock();
        if state.parked + charge > state.prefetch / PARKED_PART {
            return false;
        }
        state.give_back(link, charge);
        state.parked += charge;
        state.distribute();
        true
    }

    fn release(&self, link: u64, held: Held, parked: bool) {
        let mut state = self.state.lock();
        state.held.wire -= held.wire;
        state.held.charge -= held.charge;
        if parked {
            state.parked -= held.charge;
        } else {
            state.give_back(link, held.charge);
        }
        state.distribute();
    }
}

impl State {
    fn give_back(&mut self, link: u64, charge: i64) {
        match self.live.get_mut(&link) {
            Some(account) => account.held -= charge,
            None => self.orphaned -= charge,
        }
    }

    fn distribute(&mut self) {
        let drawn: i64 = self.live.values().map(Account::drawn).sum();
        let mut free = self.prefetch - drawn - self.orphaned - self.parked;
        let least = (LINK_CREDIT_MIN - self.orphaned).max(0);
        for account in self.live.values_mut() {
            free -= account.fill(least - account.drawn(), LINK_CREDIT_MIN / CREDIT_STEP);
        }
        for account in self.live.values_mut() {
            let room = free.min(account.share - account.drawn());
            free -= account.fill(room, account.share / CREDIT_STEP);
        }
    }
}

fn signed(bytes: u64) -> i64 {
    // 64 GiB are as good as no limit, and products with ratios stay in the range.
    i64::try_from(bytes.min(1 << 36)).unwrap_or(0)
}

fn of_length(bytes: usize) -> i64 {
    signed(u64::try_from(bytes).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: i64 = 1024;
    const MIB: i64 = 1024 * KIB;

    struct Link {
        id: u64,
        grants: mpsc::UnboundedReceiver<v1::FetchRequest>,
    }

    fn open(pool: &Pool, id: u64, share: i64) -> Link {
        let (sender, grants) = mpsc::unbounded_channel();
        pool.open(id, share.unsigned_abs(), sender);
        Link { id, grants }
    }

    fn pool(prefetch: i64) -> Arc<Pool> {
        Arc::new(Pool::new(prefetch.unsigned_abs()))
    }

    impl Link {
        fn granted(&mut self) -> i64 {
            let mut sum = 0;
            while let Ok(v1::FetchRequest {
                request: Some(Request::Credit(credit)),
            }) = self.grants.try_recv()
            {
                sum += signed(credit.bytes);
            }
            sum
        }

        fn arrive(&self, pool: &Arc<Pool>, bytes: i64) -> Credit {
            self.arrive_compressed(pool, bytes, bytes)
        }

        fn arrive_compressed(&self, pool: &Arc<Pool>, wire: i64, charge: i64) -> Credit {
            let length = |bytes| usize::try_from(bytes).unwrap();
            pool.hold(self.id, length(wire), length(charge))
        }
    }

    /// A link that knows its ratio, 1, and what it was granted in all.
    fn warm(pool: &Arc<Pool>, id: u64, share: i64) -> (Link, i64) {
        let mut link = open(pool, id, share);
        let first = link.granted();
        learn_one(pool, id);
        let more = link.granted();
        (link, first + more)
    }

    fn learn_one(pool: &Pool, id: u64) {
        let mut state = pool.state.lock();
        state.live.get_mut(&id).unwrap().ratio = Some(RATIO_ONE);
        state.distribute();
    }

    #[test]
    fn outstanding_credit_never_exceeds_what_a_broker_counts_however_large_the_prefetch() {
        for prefetch in [1 << 30, 2 << 30, 8 << 30, 9 << 30, 64 << 30, i64::MAX] {
            let pool = pool(prefetch);
            let (mut link, mut granted) = warm(&pool, 1, prefetch);
            // As the broker counts it.
            let mut balance = 0;
            let mut held = std::collections::VecDeque::new();
            for round in 0..2000 {
                balance = (balance + granted).min(WIRE_CREDIT_MAX);
                let outstanding = pool.state.lock().live[&1].outstanding;
                assert_eq!(outstanding, balance, "{prefetch}, round {round}");
                assert!(balance > 0, "it may send, {prefetch}, round {round}");
                held.push_back(link.arrive(&pool, 8 * MIB));
                balance -= 8 * MIB;
                if held.len() > 3 {
                    held.pop_front();
                }
                granted = link.granted();
            }
        }
    }

    #[test]
    fn message_without_batches_leaves_the_ratio_alone() {
        let pool = pool(16 * MIB);
        let mut link = open(&pool, 1, 16 * MIB);
        let first = link.granted();
        drop(link.arrive(&pool, 0));
        assert_eq!(link.granted(), 0, "still nothing is known");
        drop(link.arrive_compressed(&pool, 1024, 64 * 1024));
        let outstanding = first - 1024 + link.granted();
        for _ in 0..1000 {
            drop(link.arrive(&pool, 0));
        }
        assert_eq!(link.granted(), 0);
        assert!(outstanding * 64 <= 16 * MIB, "{outstanding}");
    }

    #[test]
    fn link_gets_its_share_once_it_knows_how_batches_are_compressed() {
        let pool = pool(16 * MIB);
        let mut plain = open(&pool, 1, 8 * MIB);
        assert_eq!(plain.granted(), LINK_CREDIT_MIN);
        let batch = plain.arrive(&pool, 64 * KIB);
        assert_eq!(plain.granted(), 8 * MIB - LINK_CREDIT_MIN);
        drop(batch);
        let mut tight = open(&pool, 2, 8 * MIB);
        let first = tight.granted();
        drop(tight.arrive_compressed(&pool, 64 * KIB, 256 * KIB));
        let outstanding = first - 64 * KIB + tight.granted();
        assert_eq!(
            outstanding,
            2 * MIB - 64 * KIB,
            "a quarter of 8 MiB less 256 KiB"
        );
    }

    #[test]
    fn batches_far_larger_than_the_prefetch_come_one_at_a_time() {
        let pool = pool(16 * MIB);
        let mut link = open(&pool, 1, 16 * MIB);
        let mut outstanding = link.granted();
        let mut held = Vec::new();
        // What was on its way before the ratio was known.
        while outstanding > 0 {
            held.push(link.arrive_compressed(&pool, 64 * KIB, 64 * MIB));
            outstanding -= 64 * KIB;
            assert_eq!(link.granted(), 0);
        }
        assert_eq!(pool.held().wire, LINK_CREDIT_MIN);
        while held.len() > 1 {
            held.pop();
            assert_eq!(link.granted(), 0, "still more than the prefetch");
        }
        held.clear();
        for _ in 0..10 {
            let granted = link.granted();
            assert!((1..=16 * KIB + 64 * KIB).contains(&granted), "{granted}");
            let batch = link.arrive_compressed(&pool, 64 * KIB, 64 * MIB);
            assert_eq!(link.granted(), 0);
            drop(batch);
        }
        assert_eq!(pool.held(), Held::default());
    }

    #[test]
    fn reopened_link_waits_for_what_the_program_has_not_taken() {
        let pool = pool(4 * MIB);
        let (first, granted) = warm(&pool, 1, 4 * MIB);
        assert_eq!(granted, 4 * MIB);
        let held: Vec<_> = (0..4).map(|_| first.arrive(&pool, MIB)).collect();
        pool.close(first.id);
        let mut second = open(&pool, 2, 4 * MIB);
        assert_eq!(second.granted(), 0);
        let late = first.arrive(&pool, MIB);
        drop(held);
        assert_eq!(second.granted(), LINK_CREDIT_MIN, "what came late is held");
        learn_one(&pool, second.id);
        assert_eq!(second.granted(), 3 * MIB - LINK_CREDIT_MIN);
        drop(late);
        assert_eq!(second.granted(), MIB);
        pool.close(second.id);
        let state = pool.state.lock();
        assert_eq!((state.orphaned, state.held), (0, Held::default()));
    }

    #[test]
    fn link_beside_idle_ones_never_starves() {
        let pool = pool(MIB);
        let (idle, granted) = warm(&pool, 1, MIB);
        assert_eq!(granted, MIB);
        let mut broken = open(&pool, 2, MIB);
        assert_eq!(broken.granted(), LINK_CREDIT_MIN);
        let held = broken.arrive(&pool, LINK_CREDIT_MIN);
        pool.close(broken.id);
        let mut again = open(&pool, 3, MIB);
        assert_eq!(again.granted(), 0);
        drop(held);
        assert_eq!(again.granted(), LINK_CREDIT_MIN);
        learn_one(&pool, again.id);
        pool.close(idle.id);
        assert_eq!(again.granted(), MIB - LINK_CREDIT_MIN);
    }

    #[test]
    fn taken_batches_are_granted_again_in_steps() {
        let pool = pool(MIB);
        let (mut link, _) = warm(&pool, 1, MIB);
        let mut held: Vec<_> = (0..8).map(|_| link.arrive(&pool, MIB / 16)).collect();
        held.pop();
        assert_eq!(link.granted(), 0);
        held.pop();
        assert_eq!(link.granted(), MIB / 8);
    }

    #[test]
    fn paused_partitions_keep_a_part_and_block_no_link() {
        let pool = pool(4 * MIB);
        let (mut link, _) = warm(&pool, 1, 4 * MIB);
        let held: Vec<_> = (0..4).map(|_| link.arrive(&pool, MIB)).collect();
        assert_eq!(link.granted(), 0);
        assert!(held[0].park());
        assert!(held[0].park(), "once is enough");
        assert!(!held[1].park(), "a quarter of the prefetch is full");
        let mut held = held.into_iter();
        let parked = held.next();
        drop(held);
        assert_eq!(link.granted(), 3 * MIB);
        drop(parked);
        assert_eq!(link.granted(), MIB);
        assert_eq!(pool.held(), Held::default());
    }
}
