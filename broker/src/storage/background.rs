//! The background thread: writes blocks ahead, seals closed segments, removes purged ones.
//!
//! Nothing waits for it, and nothing it does is needed for safety: what it leaves undone at a stop,
//! recovery does or does without.

use std::collections::VecDeque;
use std::io::IoSlice;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::ahead::PIECE_BYTES;
use super::codec::usize_of;
use super::error::{At as _, Error};
use super::log_core::LogCore;
use super::meta_record::MetaRecord;
use super::segment::Segment;
use super::shared::Shared;
use super::writer::remove_segments;
use crate::env::File;

/// Failures to write ahead are spoken of at most this often, all logs together.
const COMPLAIN_EVERY: Duration = Duration::from_secs(10);

/// The way in.
pub(super) struct Background {
    writes_ahead: bool,
    inner: Mutex<Inner>,
    wake: Condvar,
}

#[derive(Default)]
struct Inner {
    jobs: VecDeque<Job>,
    is_closed: bool,
}

enum Job {
    WriteAhead(Weak<LogCore>),
    Seal {
        core: Weak<LogCore>,
        segment: Arc<Segment>,
        round: u64,
    },
    Remove {
        dir: PathBuf,
        segments: Vec<Arc<Segment>>,
    },
}

impl Background {
    pub(super) fn new(writes_ahead: bool) -> Self {
        Self {
            writes_ahead,
            inner: Mutex::new(Inner::default()),
            wake: Condvar::new(),
        }
    }

    fn push(&self, job: Job, is_urgent: bool) {
        let mut inner = self.inner.lock();
        if inner.is_closed {
            return;
        }
        if is_urgent {
            inner.jobs.push_front(job);
        } else {
            inner.jobs.push_back(job);
        }
        drop(inner);
        self.wake.notify_one();
    }

    pub(super) fn write_ahead(&self, core: &Arc<LogCore>) {
        if self.writes_ahead {
            self.push(Job::WriteAhead(Arc::downgrade(core)), true);
        }
    }

    /// A segment was closed; frames from now on are of `round` or later.
    pub(super) fn seal(&self, core: &Arc<LogCore>, segment: Arc<Segment>, round: u64) {
        let core = Arc::downgrade(core);
        self.push(
            Job::Seal {
                core,
                segment,
                round,
            },
            false,
        );
    }

    pub(super) fn remove(&self, core: &Arc<LogCore>, segments: Vec<Arc<Segment>>) {
        if !segments.is_empty() {
            let dir = core.dir.clone();
            self.push(Job::Remove { dir, segments }, false);
        }
    }

    pub(super) fn close(&self) {
        self.inner.lock().is_closed = true;
        self.wake.notify_all();
    }

    fn next(&self) -> Option<Job> {
        let mut inner = self.inner.lock();
        loop {
            if let Some(job) = inner.jobs.pop_front() {
                return Some(job);
            }
            if inner.is_closed {
                return None;
            }
            self.wake.wait(&mut inner);
        }
    }
}

/// Until closed.
pub(super) fn run(shared: &Arc<Shared>) {
    let zeros = vec![0; usize_of(PIECE_BYTES)];
    let mut complaints = Complaints::default();
    while let Some(job) = shared.background.next() {
        match job {
            Job::WriteAhead(core) => {
                if let Some(core) = core.upgrade() {
                    write_ahead(shared, &core, &zeros, &mut complaints);
                }
            }
            Job::Seal {
                core,
                segment,
                round,
            } => match segment.seal(shared.fs.as_ref()) {
                // Its leftovers are cut off: truncation marks that voided them are done (S3).
                Ok(true) => {
                    if let Some(core) = core.upgrade() {
                        shared.forget_marks(&core, round);
                    }
                }
                Ok(false) => {}
                Err(error) => tracing::warn!(
                    %error,
                    "a closed segment was not sealed: its index is rebuilt at the next start"
                ),
            },
            Job::Remove { dir, segments } => {
                if let Err(error) = remove_segments(shared.fs.as_ref(), &dir, &segments, false) {
                    tracing::warn!(
                        %error,
                        "purged segments were not removed: the next start does"
                    );
                }
                for segment in &segments {
                    shared.files.forget(segment.id);
                }
            }
        }
    }
}

/// What goes wrong in hundreds of logs at once, such as having no file descriptor left, is said
/// now and then.
#[derive(Default)]
struct Complaints {
    last: Option<Instant>,
    unsaid: u64,
}

impl Complaints {
    /// How many were not said since the last one that was; `None`: this one is not either.
    fn due(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now < last + COMPLAIN_EVERY) {
            self.unsaid += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
}

fn write_ahead(shared: &Shared, core: &LogCore, zeros: &[u8], complaints: &mut Complaints) {
    let mut open: Option<(u64, Arc<dyn File>)> = None;
    while let Some((segment, path, piece)) = core.ahead.next_piece(core.segment_bytes()) {
        let len = piece.end - piece.start;
        // S4: blocks written ahead never eat what is kept back.
        if core.failure().is_some() || !shared.space.is_ample(len) {
            core.ahead.piece_done(false);
            return;
        }
        let written = (|| -> Result<(), Error> {
            // A file of its own: an error of its sync must not be taken from the flusher's (S4).
            let file = match &open {
                Some((id, file)) if *id == segment => Arc::clone(file),
                _ => shared.fs.open(&path).at("open", &path)?,
            };
            let zeros = zeros.get(..usize_of(len)).unwrap_or_default();
            file.write_all_at(&mut [IoSlice::new(zeros)], piece.start)
                .at("write", &path)?;
            file.sync_data().at("sync", &path)?;
            open = Some((segment, file));
            Ok(())
        })();
        core.ahead.piece_done(written.is_ok());
        match written {
            Ok(()) => {
                shared.space.written(0, len);
                metrics::counter!("qute_storage_prewritten_bytes_total").increment(len);
            }
            Err(error) => {
                metrics::counter!("qute_storage_prewrite_failures_total").increment(1);
                if let Some(unsaid) = complaints.due(Instant::now()) {
                    tracing::warn!(
                        replica = %core.key, %error, unsaid,
                        "no blocks written ahead: syncs are slower until it works again"
                    );
                }
                return;
            }
        }
    }
}

impl Shared {
    /// Marks of rounds before `round` are of no use once no leftover of them is in a file.
    fn forget_marks(&self, core: &LogCore, round: u64) {
        let has_old_marks = self
            .meta
            .lock()
            .replicas
            .get(&core.key)
            .is_some_and(|meta| meta.marks.iter().any(|mark| mark.round < round));
        if has_old_marks {
            // Nobody waits; a closed queue means that the mark stays, harmlessly.
            let _ = self.queue.push(super::flusher::Op::Meta {
                records: vec![MetaRecord::RoundFloor(core.key, round)],
                done: Box::new(|_| {}),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_are_said_now_and_then_and_counted_in_between() {
        let mut complaints = Complaints::default();
        let start = Instant::now();
        assert_eq!(complaints.due(start), Some(0));
        assert_eq!(complaints.due(start), None);
        assert_eq!(complaints.due(start + COMPLAIN_EVERY / 2), None);
        assert_eq!(complaints.due(start + COMPLAIN_EVERY), Some(2));
        assert_eq!(complaints.due(start + COMPLAIN_EVERY), None);
    }
}
