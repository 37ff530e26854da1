//! One replica's queue of appends from its leader.
//!
//! Appends are handed to openraft in the order in which they came, without waiting for one to be
//! synced before the next is handed over. No task runs while there is nothing to do: the first
//! append starts it, and it ends when the queue is empty and everything is answered.

use std::collections::VecDeque;
use std::sync::Arc;

use futures::StreamExt;
use futures::stream::FuturesOrdered;
use openraft::EntryPayload;
use openraft::raft::AppendEntriesRequest;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::DropGuard;

use super::codec::{self, AppendAnswer};
use super::contact::Contact;
use super::server::Reply;
use super::types::{Entry, PayloadKind, Raft, Space, TypeConfig};
use crate::storage::Log;

/// Bytes that may wait in front of one replica.
const QUEUED_BYTES_MAX: usize = 64 << 20;

/// Appends handed to openraft and not yet synced.
const HANDED_OVER_MAX: usize = 64;

/// What is asked of the log before an append gets to it.
pub(super) trait Receiving: Send + Sync {
    /// Whether this entry is in the log already, or was and is purged.
    fn holds(&self, term: u64, index: u64) -> bool;
    /// Promises space on disk (S4); the error goes back to the leader, who retries.
    fn reserve(&self, batches: usize, bytes: u64) -> Result<Space, String>;
}

impl Receiving for Log {
    fn holds(&self, term: u64, index: u64) -> bool {
        index < self.first_index() || self.term_at(index) == Some(term)
    }

    fn reserve(&self, batches: usize, bytes: u64) -> Result<Space, String> {
        match self.reserve_admitted(batches, bytes) {
            Ok(reservation) => Ok(Arc::new(reservation)),
            Err(full) => Err(full.to_string()),
        }
    }
}

struct Job {
    request: AppendEntriesRequest<TypeConfig>,
    bytes: usize,
    reply: Reply,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    bytes: usize,
    running: bool,
}

/// See the module header.
pub(super) struct Inbound {
    raft: Raft,
    log: Arc<dyn Receiving>,
    contact: Arc<Contact>,
    // Short: push and pop. Never held across an await.
    queue: Mutex<Queue>,
    pushed: Notify,
    _closed: Option<Arc<DropGuard>>,
}

impl Inbound {
    pub(super) fn new(
        raft: Raft,
        log: Arc<dyn Receiving>,
        contact: Arc<Contact>,
        closed: Option<Arc<DropGuard>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            raft,
            log,
            contact,
            queue: Mutex::default(),
            pushed: Notify::new(),
            _closed: closed,
        })
    }

    /// Queues an append; it is answered through `reply`.
    pub(super) fn push(self: &Arc<Self>, request: AppendEntriesRequest<TypeConfig>, reply: Reply) {
        let bytes = codec::data_bytes(&request);
        let mut queue = self.queue.lock();
        if queue.bytes + bytes > QUEUED_BYTES_MAX {
            drop(queue);
            reply.append(&AppendAnswer::Refused("too many bytes queued".to_owned()));
            return;
        }
        queue.bytes += bytes;
        queue.jobs.push_back(Job {
            request,
            bytes,
            reply,
        });
        let start = !queue.running;
        queue.running = true;
        drop(queue);
        if start {
            // Unconstrained: an append that is told to wait for the next turn of the scheduler
            // could be overtaken. The loop waits by itself at each step.
            tokio::spawn(tokio::task::unconstrained(Arc::clone(self).run()));
        } else {
            self.pushed.notify_one();
        }
    }

    async fn run(self: Arc<Self>) {
        let mut handed_over = FuturesOrdered::new();
        loop {
            let mut handed = false;
            while handed_over.len() < HANDED_OVER_MAX {
                let Some(job) = self.pop() else { break };
                handed = true;
                if let Some((request, reply)) = self.with_space(job) {
                    handed_over.push_back(async {
                        let result = self.raft.append_entries(request).await;
                        (result, reply)
                    });
                }
            }
            if handed_over.is_empty() {
                if handed {
                    continue;
                }
                if self.stop() {
                    return;
                }
                continue;
            }
            let has_room = handed_over.len() < HANDED_OVER_MAX;
            let done = tokio::select! {
                // First: this is also what hands the newest appends over, in order.
                biased;
                done = handed_over.next() => done,
                () = self.pushed.notified(), if has_room => None,
            };
            if let Some((result, reply)) = done {
                match result {
                    Ok(response) => {
                        self.contact.answered(&response);
                        reply.append(&AppendAnswer::Handled(response));
                    }
                    Err(error) => reply.fail(&error),
                }
            }
        }
    }

    fn pop(&self) -> Option<Job> {
        let mut queue = self.queue.lock();
        let job = queue.jobs.pop_front()?;
        queue.bytes -= job.bytes;
        Some(job)
    }

    /// True if there is nothing to do: the task ends.
    fn stop(&self) -> bool {
        let mut queue = self.queue.lock();
        let stop = queue.jobs.is_empty();
        queue.running = !stop;
        stop
    }

    /// S4: space is promised before openraft sees the entries. `None`: refused and answered.
    fn with_space(&self, job: Job) -> Option<(AppendEntriesRequest<TypeConfig>, Reply)> {
        let Job {
            mut request, reply, ..
        } = job;
        let mut fresh = Fresh::default();
        for (at, entry) in request.entries.iter().enumerate() {
            fresh.count(at, entry, self.log.as_ref());
        }
        let Some(first) = fresh.first else {
            return Some((request, reply));
        };
        match self.log.reserve(fresh.batches, fresh.bytes) {
            Ok(space) => {
                if let Some(EntryPayload::Normal(payload)) =
                    request.entries.get_mut(first).map(|it| &mut it.payload)
                {
                    payload.space = Some(space);
                }
                Some((request, reply))
            }
            Err(reason) => {
                reply.append(&AppendAnswer::Refused(reason));
                None
            }
        }
    }
}

/// What of an append needs space that it does not have yet (S4).
///
/// Blanks, memberships and commands live on what is kept back. A new leader looks for where this
/// log ends by sending entries that are in it: those need no space, and were they refused on a
/// full disk, the leader would never commit in its own term and nobody could read.
#[derive(Default)]
struct Fresh {
    /// Place in the append of the first batch that is not in the log: it carries the promise.
    first: Option<usize>,
    batches: usize,
    bytes: u64,
}

impl Fresh {
    fn count(&mut self, at: usize, entry: &Entry, log: &dyn Receiving) {
        let EntryPayload::Normal(payload) = &entry.payload else {
            return;
        };
        let id = &entry.log_id;
        if payload.kind != PayloadKind::Batch || log.holds(id.committed_leader_id().term, id.index)
        {
            return;
        }
        self.first.get_or_insert(at);
        self.batches += 1;
        self.bytes += payload.bytes.len() as u64;
    }
}
