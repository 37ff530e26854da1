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
use super::server::Reply;
use super::types::{Raft, Space, TypeConfig};

/// Bytes that may wait in front of one replica.
const QUEUED_BYTES_MAX: usize = 64 << 20;

/// Appends handed to openraft and not yet synced.
const HANDED_OVER_MAX: usize = 64;

/// Promises space on disk for an append (S4); the error goes back to the leader, who retries.
pub(super) type ReserveFn = Box<dyn Fn(usize) -> Result<Space, String> + Send + Sync>;

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
    reserve: ReserveFn,
    // Short: push and pop. Never held across an await.
    queue: Mutex<Queue>,
    pushed: Notify,
    _closed: Option<Arc<DropGuard>>,
}

impl Inbound {
    pub(super) fn new(raft: Raft, reserve: ReserveFn, closed: Option<Arc<DropGuard>>) -> Arc<Self> {
        Arc::new(Self {
            raft,
            reserve,
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
                    Ok(response) => reply.append(&AppendAnswer::Handled(response)),
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
            mut request,
            bytes,
            reply,
        } = job;
        if bytes == 0 {
            return Some((request, reply));
        }
        match (self.reserve)(bytes) {
            Ok(space) => {
                let first = request
                    .entries
                    .iter_mut()
                    .find_map(|entry| match &mut entry.payload {
                        EntryPayload::Normal(payload) => Some(payload),
                        EntryPayload::Blank | EntryPayload::Membership(_) => None,
                    });
                if let Some(payload) = first {
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
