//! The byte credit of one consumer, over all its links: what bounds its memory, whatever streams
//! break. Pure.
//!
//! Invariant: what is free, what live links have drawn, and what is held of batches from links
//! that have ended, add up to the prefetch. A link draws its share as far as there is any; what
//! it lacks follows as the program takes what older links brought. So that none starves beside
//! an idle one, each link has at least [`LINK_CREDIT_MIN`], less what is still held from ended
//! links; `free` is negative by as much.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use qute_proto::v1::{self, fetch_request::Request};
use tokio::sync::mpsc;

/// A link's share of the prefetch is at least this.
pub(super) const LINK_CREDIT_MIN: i64 = 256 * 1024;
/// Credit is given back in steps of this part of what a link has drawn.
const CREDIT_STEP: i64 = 8;

/// See the module header.
#[derive(Debug)]
pub(super) struct Pool {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    free: i64,
    /// Of batches from links that have ended.
    held: i64,
    live: BTreeMap<u64, Account>,
}

/// Of a live link.
#[derive(Debug)]
struct Account {
    /// Into the link's stream, for grants. Unbounded: one per step, or per batch of an ended link.
    requests: mpsc::UnboundedSender<v1::FetchRequest>,
    share: i64,
    drawn: i64,
    /// Of batches that have arrived and are not taken.
    held: i64,
    /// Taken, not granted again yet.
    returned: i64,
}

impl Account {
    fn draw(&mut self, bytes: i64) {
        self.drawn += bytes;
        self.grant(bytes);
    }

    fn grant(&self, bytes: i64) {
        // Of a link that has ended, everything returns when it is closed.
        let _ = self.requests.send(v1::FetchRequest {
            request: Some(Request::Credit(v1::Credit {
                bytes: bytes.unsigned_abs(),
            })),
        });
    }
}

/// A batch's part of the credit: given back when dropped.
#[derive(Debug)]
pub(super) struct Credit {
    pool: Arc<Pool>,
    link: u64,
    bytes: i64,
}

impl Drop for Credit {
    fn drop(&mut self) {
        self.pool.release(self.link, self.bytes);
    }
}

impl Pool {
    pub(super) fn new(prefetch_bytes: u64) -> Self {
        Self {
            state: Mutex::new(State {
                free: signed(prefetch_bytes),
                held: 0,
                live: BTreeMap::new(),
            }),
        }
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
            drawn: 0,
            held: 0,
            returned: 0,
        };
        let mut state = self.state.lock();
        state.live.insert(link, account);
        state.distribute();
    }

    /// The link has ended: what it did not use returns now, the rest as it is taken.
    pub(super) fn close(&self, link: u64) {
        let mut state = self.state.lock();
        if let Some(account) = state.live.remove(&link) {
            state.free += account.drawn - account.held;
            state.held += account.held;
            state.distribute();
        }
    }

    /// A batch of this length has arrived.
    pub(super) fn hold(self: &Arc<Self>, link: u64, bytes: usize) -> Credit {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let mut state = self.state.lock();
        if let Some(account) = state.live.get_mut(&link) {
            account.held += bytes;
        } else {
            state.free -= bytes;
            state.held += bytes;
        }
        Credit {
            pool: Arc::clone(self),
            link,
            bytes,
        }
    }

    fn release(&self, link: u64, bytes: i64) {
        let mut state = self.state.lock();
        if let Some(account) = state.live.get_mut(&link) {
            account.held -= bytes;
            account.returned += bytes;
            if account.returned >= account.drawn / CREDIT_STEP {
                let returned = std::mem::take(&mut account.returned);
                account.grant(returned);
            }
        } else {
            state.held -= bytes;
            state.free += bytes;
            state.distribute();
        }
    }
}

impl State {
    fn distribute(&mut self) {
        let least = (LINK_CREDIT_MIN - self.held).max(0);
        for account in self.live.values_mut() {
            let lacking = least - account.drawn;
            if lacking > 0 {
                self.free -= lacking;
                account.draw(lacking);
            }
        }
        for account in self.live.values_mut() {
            let more = self.free.min(account.share - account.drawn);
            if more > 0 {
                self.free -= more;
                account.draw(more);
            }
        }
    }
}

fn signed(bytes: u64) -> i64 {
    // Half the range: sums stay in it.
    i64::try_from(bytes).unwrap_or(i64::MAX).min(i64::MAX / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: i64 = 1024 * 1024;

    struct Link {
        id: u64,
        grants: mpsc::UnboundedReceiver<v1::FetchRequest>,
    }

    fn open(pool: &Pool, id: u64, share: i64) -> Link {
        let (sender, grants) = mpsc::unbounded_channel();
        pool.open(id, share.unsigned_abs(), sender);
        Link { id, grants }
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
            pool.hold(self.id, usize::try_from(bytes).unwrap())
        }
    }

    #[test]
    fn reopened_link_waits_for_what_the_program_has_not_taken() {
        let pool = Arc::new(Pool::new(4 * 1024 * 1024));
        let mut first = open(&pool, 1, 4 * MIB);
        assert_eq!(first.granted(), 4 * MIB);
        let held: Vec<_> = (0..3).map(|_| first.arrive(&pool, MIB)).collect();
        pool.close(first.id);
        let mut second = open(&pool, 2, 4 * MIB);
        assert_eq!(second.granted(), MIB);
        let late = first.arrive(&pool, MIB);
        drop(held);
        assert_eq!(second.granted(), 2 * MIB, "what came late is held, too");
        drop(late);
        assert_eq!(second.granted(), MIB);
        pool.close(second.id);
        let state = pool.state.lock();
        assert_eq!((state.free, state.held), (4 * MIB, 0));
    }

    #[test]
    fn link_beside_idle_ones_never_starves() {
        let pool = Arc::new(Pool::new(1024 * 1024));
        let mut idle = open(&pool, 1, MIB);
        assert_eq!(idle.granted(), MIB);
        let mut broken = open(&pool, 2, MIB);
        assert_eq!(broken.granted(), LINK_CREDIT_MIN);
        let held = broken.arrive(&pool, LINK_CREDIT_MIN);
        pool.close(broken.id);
        let mut again = open(&pool, 3, MIB);
        assert_eq!(again.granted(), 0);
        drop(held);
        assert_eq!(again.granted(), LINK_CREDIT_MIN);
        pool.close(idle.id);
        assert_eq!(again.granted(), MIB - LINK_CREDIT_MIN);
    }

    #[test]
    fn taken_batches_are_granted_again_in_steps() {
        let pool = Arc::new(Pool::new(1024 * 1024));
        let mut link = open(&pool, 1, MIB);
        link.granted();
        let mut held: Vec<_> = (0..8).map(|_| link.arrive(&pool, MIB / 16)).collect();
        held.pop();
        assert_eq!(link.granted(), 0);
        held.pop();
        assert_eq!(link.granted(), MIB / 8);
    }
}
