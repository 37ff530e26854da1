//! A member of the group under test: how it works, what it has seen, and how it ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use qute_client::Error;
use qute_client::group::{CommitMode, GroupBuilder, GroupControl, LostReason, MemberId};
use qute_tests::oracle::{Name, Place, Ranges, Trace};
use qute_tests::wait;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};

use super::worker;

const LEAVE: Duration = Duration::from_secs(30);

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How a member works.
pub(super) struct Plan {
    pub(super) build: Box<dyn FnOnce(GroupBuilder) -> GroupBuilder + Send>,
    /// Commits by hand, one after the other.
    pub(super) by_hand: bool,
}

impl Plan {
    /// Reads this topic; everything is acknowledged as it comes.
    pub(super) fn reads(topic: &str) -> Self {
        let topic = topic.to_owned();
        Self {
            build: Box::new(move |builder| {
                // A session that dies within a test's patience, and lives on a busy machine.
                builder.topics([topic]).session_timeout(SESSION)
            }),
            by_hand: false,
        }
    }

    pub(super) fn with(
        self,
        more: impl FnOnce(GroupBuilder) -> GroupBuilder + Send + 'static,
    ) -> Self {
        let build = self.build;
        Self {
            build: Box::new(move |builder| more(build(builder))),
            ..self
        }
    }

    pub(super) fn instance(self, name: &str) -> Self {
        let name = name.to_owned();
        self.with(|builder| builder.instance(name))
    }

    /// Commits all the time, and waits for each.
    pub(super) fn commits_by_hand(self) -> Self {
        let plan = self.with(|builder| builder.commit(CommitMode::Manual));
        Self {
            by_hand: true,
            ..plan
        }
    }
}

/// Of the members, where a test says nothing else.
pub(super) const SESSION: Duration = Duration::from_secs(6);

/// What a member has seen.
#[derive(Default)]
pub(super) struct Seen {
    /// Since they were assigned, and until they were revoked or lost.
    pub(super) assigned: BTreeSet<Place>,
    pub(super) lost: Vec<(Place, LostReason)>,
    pub(super) revoked: Vec<Place>,
    pub(super) recreated: Vec<String>,
    pub(super) failed: Vec<Error>,
    pub(super) records: u64,
    /// By place: epoch, and where that claim began.
    pub(super) began: BTreeMap<Place, (u64, u64)>,
    /// Commits by hand that were confirmed.
    pub(super) commits: u64,
    pub(super) commit_errors: Vec<Error>,
    /// The stream has ended.
    pub(super) ended: bool,
}

/// Who it is, and where it puts down what happens.
pub(super) struct Spot {
    pub(super) name: Name,
    pub(super) trace: Trace,
    /// What was acknowledged, by all members together.
    pub(super) handled: Arc<Mutex<BTreeMap<Place, Ranges>>>,
}

pub(super) struct Shared {
    pub(super) spot: Spot,
    pub(super) seen: Mutex<Seen>,
}

pub(super) enum Order {
    Hold(bool),
    Leave(oneshot::Sender<Result<()>>),
    Die,
    Freeze(Arc<Ice>),
}

/// What a frozen member waits for.
#[derive(Default)]
pub(super) struct Ice {
    /// (frozen by now, thawed)
    state: Mutex<(bool, bool)>,
    changed: Condvar,
}

impl Ice {
    /// Blocks the calling thread.
    pub(super) fn freeze(&self) {
        let mut state = lock(&self.state);
        state.0 = true;
        self.changed.notify_all();
        while !state.1 {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn wait_frozen(&self) {
        let mut state = lock(&self.state);
        while !state.0 {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn thaw(&self) {
        lock(&self.state).1 = true;
        self.changed.notify_all();
    }
}

struct Unjoined {
    shared: Arc<Shared>,
    orders: mpsc::UnboundedSender<Order>,
    thread: JoinHandle<Result<()>>,
}

/// A member that is joining.
pub(super) struct Joining {
    joined: oneshot::Receiver<(GroupControl, MemberId)>,
    member: Unjoined,
}

impl Joining {
    pub(super) fn begin(spot: Spot, bootstrap: &str, group: &str, plan: Plan) -> Self {
        let (orders, received) = mpsc::unbounded_channel();
        let (told, joined) = oneshot::channel();
        let shared = Arc::new(Shared {
            spot,
            seen: Mutex::default(),
        });
        let worker = Arc::clone(&shared);
        let (bootstrap, group) = (bootstrap.to_owned(), group.to_owned());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            let runtime = runtime.context("no runtime")?;
            let life = worker::work(bootstrap, group, plan, worker, received, told);
            runtime.block_on(life)
        });
        Joining {
            joined,
            member: Unjoined {
                shared,
                orders,
                thread,
            },
        }
    }

    /// Waits until it has joined.
    pub(super) fn wait(self, runtime: &Runtime) -> Result<Member> {
        let limited = async { tokio::time::timeout(wait::LONG, self.joined).await };
        let Ok((control, id)) = runtime.block_on(limited).context("not joined in time")? else {
            let ended = self
                .member
                .thread
                .join()
                .ok()
                .context("a member panicked")?;
            return Err(ended.err().context("a member ended before it joined")?);
        };
        Ok(Member {
            control,
            id,
            shared: self.member.shared,
            orders: self.member.orders,
            thread: Some(self.member.thread),
        })
    }
}

/// A member. Killed when dropped.
pub(super) struct Member {
    pub(super) control: GroupControl,
    pub(super) id: MemberId,
    shared: Arc<Shared>,
    orders: mpsc::UnboundedSender<Order>,
    thread: Option<JoinHandle<Result<()>>>,
}

/// A frozen member; it thaws when this is dropped.
pub(super) struct Frozen(Arc<Ice>);

impl Drop for Frozen {
    fn drop(&mut self) {
        self.0.thaw();
    }
}

impl Member {
    pub(super) fn name(&self) -> &str {
        &self.shared.spot.name
    }

    /// Looks at what it has seen.
    pub(super) fn seen<T>(&self, look: impl FnOnce(&Seen) -> T) -> T {
        look(&lock(&self.shared.seen))
    }

    /// Waits until it has seen something.
    pub(super) fn wait_seen(&self, what: &str, is_it: impl Fn(&Seen) -> bool) -> Result<()> {
        let what = format!("{} to see {what}", self.name());
        wait::until_true(&what, wait::LONG, || {
            let seen = lock(&self.shared.seen);
            let is_it = is_it(&seen);
            ensure!(
                is_it || (!seen.ended && self.is_running()),
                "its stream has ended: {:?}",
                seen.failed
            );
            Ok(is_it)
        })
    }

    fn is_running(&self) -> bool {
        self.thread
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
    }

    /// Acknowledges nothing from now on; or everything that it has.
    pub(super) fn hold(&self, on: bool) {
        let _ = self.orders.send(Order::Hold(on));
    }

    /// Everything of it stands still, connections stay.
    pub(super) fn freeze(&self) -> Frozen {
        let ice = Arc::new(Ice::default());
        let _ = self.orders.send(Order::Freeze(Arc::clone(&ice)));
        ice.wait_frozen();
        Frozen(ice)
    }

    /// Leaves in order.
    pub(super) fn leave(mut self, runtime: &Runtime) -> Result<()> {
        let (told, left) = oneshot::channel();
        let _ = self.orders.send(Order::Leave(told));
        let left = async { tokio::time::timeout(LEAVE, left).await };
        let left = runtime.block_on(left).context("a member does not leave")?;
        let ended = self.end();
        match left {
            Ok(left) => left.and(ended),
            Err(_) => ended.and(Err(anyhow::anyhow!("a member ended instead of leaving"))),
        }
    }

    /// As SIGKILL: its connections close, and nothing is said.
    pub(super) fn kill(mut self) -> Result<()> {
        let _ = self.orders.send(Order::Die);
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let thread = self.thread.take().context("ended before")?;
        let ended = thread.join().ok().context("a member panicked")?;
        ended.with_context(|| self.shared.spot.name.to_string())
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.orders.send(Order::Die);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
