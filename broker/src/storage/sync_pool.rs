//! A few threads that sync files at once: a device takes several syncs side by side.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex};

use crate::env::File;

/// See the module's documentation.
pub(super) struct SyncPool {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
}

struct Inner {
    jobs: Mutex<Jobs>,
    wake: Condvar,
    all_done: Condvar,
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<(usize, Arc<dyn File>)>,
    results: Vec<Option<io::Result<()>>>,
    running: usize,
    is_closed: bool,
}

impl SyncPool {
    /// `threads` counts the caller of [`Self::sync`], which works too.
    pub(super) fn new(threads: usize) -> Self {
        let inner = Arc::new(Inner {
            jobs: Mutex::new(Jobs::default()),
            wake: Condvar::new(),
            all_done: Condvar::new(),
        });
        let threads = (1..threads)
            .filter_map(|number| {
                let inner = Arc::clone(&inner);
                std::thread::Builder::new()
                    .name(format!("storage-sync-{number}"))
                    .spawn(move || inner.work())
                    .ok()
            })
            .collect();
        Self { inner, threads }
    }

    /// Syncs all files; results in their order.
    pub(super) fn sync(&self, files: Vec<Arc<dyn File>>) -> Vec<io::Result<()>> {
        if let [file] = files.as_slice() {
            return vec![file.sync_data()];
        }
        let mut jobs = self.inner.jobs.lock();
        jobs.results = files.iter().map(|_| None).collect();
        jobs.waiting = files.into_iter().enumerate().collect();
        let wanted = jobs.waiting.len().saturating_sub(1).min(self.threads.len());
        for _ in 0..wanted {
            self.inner.wake.notify_one();
        }
        while let Some((at, file)) = jobs.waiting.pop_front() {
            parking_lot::MutexGuard::unlocked(&mut jobs, || file.sync_data()).keep(&mut jobs, at);
        }
        while jobs.running > 0 {
            self.inner.all_done.wait(&mut jobs);
        }
        std::mem::take(&mut jobs.results)
            .into_iter()
            .map(|result| result.unwrap_or_else(|| Err(io::Error::other("not synced"))))
            .collect()
    }
}

trait Keep {
    fn keep(self, jobs: &mut Jobs, at: usize);
}

impl Keep for io::Result<()> {
    fn keep(self, jobs: &mut Jobs, at: usize) {
        if let Some(slot) = jobs.results.get_mut(at) {
            *slot = Some(self);
        }
    }
}

impl Inner {
    fn work(&self) {
        let mut jobs = self.jobs.lock();
        while !jobs.is_closed {
            let Some((at, file)) = jobs.waiting.pop_front() else {
                self.wake.wait(&mut jobs);
                continue;
            };
            jobs.running += 1;
            parking_lot::MutexGuard::unlocked(&mut jobs, || file.sync_data()).keep(&mut jobs, at);
            drop(file);
            jobs.running -= 1;
            if jobs.running == 0 {
                self.all_done.notify_one();
            }
        }
    }
}

impl Drop for SyncPool {
    fn drop(&mut self) {
        self.inner.jobs.lock().is_closed = true;
        self.inner.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A panic there was reported by its thread.
            let _ = thread.join();
        }
    }
}
