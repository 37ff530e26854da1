//! Which sealed segment files are open: a bounded number, the least recently used closed first.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::index::SparseIndex;
use crate::env::File;

/// An open sealed segment. A reader that holds it keeps the file open past its eviction.
pub(super) struct OpenSegment {
    pub file: Arc<dyn File>,
    pub index: OnceLock<Arc<SparseIndex>>,
}

/// See the module's documentation.
pub(super) struct FileCache {
    open_max: usize,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    open: HashMap<u64, (Arc<OpenSegment>, u64)>,
    by_use: BTreeMap<u64, u64>,
    tick: u64,
}

impl FileCache {
    pub(super) fn new(open_max: usize) -> Self {
        Self {
            open_max: open_max.max(1),
            inner: Mutex::new(Inner::default()),
        }
    }

    pub(super) fn get(&self, id: u64) -> Option<Arc<OpenSegment>> {
        let mut inner = self.inner.lock();
        inner.tick += 1;
        let tick = inner.tick;
        let (open, used) = inner.open.get_mut(&id)?;
        let open = Arc::clone(open);
        let before = std::mem::replace(used, tick);
        inner.by_use.remove(&before);
        inner.by_use.insert(tick, id);
        Some(open)
    }

    /// Keeps an opened segment; another thread's, when it was faster.
    pub(super) fn put(&self, id: u64, opened: Arc<OpenSegment>) -> Arc<OpenSegment> {
        if let Some(open) = self.get(id) {
            return open;
        }
        let mut closed = Vec::new();
        let mut inner = self.inner.lock();
        inner.tick += 1;
        let tick = inner.tick;
        inner.open.insert(id, (Arc::clone(&opened), tick));
        inner.by_use.insert(tick, id);
        while inner.open.len() > self.open_max {
            let Some((_, oldest)) = inner.by_use.pop_first() else {
                break;
            };
            closed.extend(inner.open.remove(&oldest));
        }
        drop(inner);
        // Files are closed outside the lock.
        drop(closed);
        opened
    }

    pub(super) fn forget(&self, id: u64) {
        let mut inner = self.inner.lock();
        let gone = inner.open.remove(&id);
        if let Some((_, used)) = &gone {
            inner.by_use.remove(used);
        }
        drop(inner);
        drop(gone);
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.inner.lock().open.len()
    }
}
