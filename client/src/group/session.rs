//! The task behind a member: it keeps a session with the coordinator, whatever the program does, and
//! carries out what the membership says.
//!
//! ```text
//!   Line (stream to the coordinator) --.
//!   views, timers ---------------------+--> [Membership] --commands--> this task --> Line, Topics, commits
//!   program: poll, ack, commit, leave -'         |
//!                                                '--told--> the program's stream
//! ```

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use qute_proto::v1::session_response::Response;
use qute_proto::v1::{self, ErrorCode};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::assignor::wire::version_of;
use super::assignor::{AssignInput, Assignor};
use super::commit::{RoundDone, run_round};
use super::core::Core;
use super::line::{Line, Turn};
use super::membership::Command;
use super::topics::{Starting, Topics};
use crate::error::{Error, ErrorKind, Result};
use crate::net::until;
use crate::trace;

/// What is done beside the loop.
pub(super) enum Work {
    Located(Starting, bool, Result<u64>),
    Computed {
        generation: u64,
        assignment: Result<Vec<v1::MemberAssignment>>,
    },
    Committed(RoundDone),
}

/// Tells everybody when the task ends, however it does.
struct Deserting(Arc<Core>);

impl Drop for Deserting {
    fn drop(&mut self) {
        self.0.desert();
    }
}

/// See the module header.
pub(super) struct Session {
    core: Arc<Core>,
    assignors: Vec<Arc<dyn Assignor>>,
    /// Of commits; `None`: by hand.
    interval: Option<Duration>,
    line: Line,
    topics: Topics,
    work: JoinSet<Work>,
    views: watch::Receiver<u64>,
    commit_at: Option<Instant>,
    _deserting: Deserting,
}

impl Session {
    pub(super) fn new(
        core: &Arc<Core>,
        topics: Topics,
        assignors: Vec<Arc<dyn Assignor>>,
        interval: Option<Duration>,
    ) -> Self {
        Self {
            core: Arc::clone(core),
            assignors,
            interval,
            line: Line::new(core),
            topics,
            work: JoinSet::new(),
            views: core.shared.metadata.subscribe(),
            commit_at: None,
            _deserting: Deserting(Arc::clone(core)),
        }
    }

    /// Runs until the member has left, or can't be one.
    pub(super) async fn run(mut self) {
        // A view that came meanwhile.
        self.topics.on_view(&mut self.work);
        let core = Arc::clone(&self.core);
        loop {
            self.run_commands();
            if core.with(|state| state.membership.has_ended()) {
                return;
            }
            if self.line.is_apart() && core.with(|state| state.membership.wants_stream()) {
                self.line.find();
            }
            self.commit();
            let due = self.due();
            tokio::select! {
                biased;
                () = core.wake.notified() => {}
                turn = self.line.turn() => self.on_turn(turn),
                Some(done) = self.work.join_next(), if !self.work.is_empty() => self.on_work(done),
                Ok(()) = self.views.changed() => self.topics.on_view(&mut self.work),
                () = until(due), if due.is_some() => {}
            }
            self.on_time();
        }
    }

    fn due(&self) -> Option<Instant> {
        let (membership, leave_by) = self
            .core
            .with(|state| (state.membership.next_due(), state.leave_by));
        let times = [membership, leave_by, self.commit_at, self.topics.due()];
        times.into_iter().flatten().min()
    }

    fn on_time(&mut self) {
        let now = Instant::now();
        self.core.with(|state| {
            state.membership.advance(now);
            if state.leave_by.is_some_and(|at| at <= now) && state.membership.is_leaving() {
                state.membership.abandon();
            }
        });
        if self.topics.due().is_some_and(|at| at <= now) {
            self.topics.try_again(&mut self.work);
        }
    }

    fn run_commands(&mut self) {
        while let Some(command) = self.core.with(|state| state.membership.take_command()) {
            match command {
                Command::Send(request) => {
                    if !self.line.send(request) {
                        self.line.leave();
                        self.core
                            .with(|state| state.membership.on_down(Instant::now()));
                    }
                }
                Command::Close { doubt } => {
                    self.line.leave();
                    if doubt {
                        let silent = "the coordinator did not confirm the session in time";
                        self.line.failed(Error::new(ErrorKind::Timeout, silent));
                    }
                }
                Command::Attach {
                    place,
                    epoch,
                    committed,
                } => self.topics.granted(place, epoch, committed, &mut self.work),
                Command::Detach(place) => self.topics.detach(place),
                Command::Compute(task) => self.compute(task),
                Command::Probe => self.core.probe(),
            }
        }
    }

    fn on_turn(&mut self, turn: Turn) {
        let now = Instant::now();
        match turn {
            Turn::Lost(error) => self.core.with(|state| {
                state.last_failure = Some(error.clone());
                state.membership.on_down(now);
                state.membership.fail(error);
            }),
            Turn::Broken(error) => {
                debug!(target: trace::GROUP, group = %self.core.group, %error, "no stream to the coordinator");
                self.core.with(|state| {
                    state.last_failure = Some(error);
                    state.membership.on_down(now);
                });
            }
            Turn::Response(number, response) => {
                if let Some(response) = response.response {
                    self.on_response(number, response, now);
                }
            }
        }
    }

    fn on_response(&mut self, number: u64, response: Response, now: Instant) {
        match &response {
            Response::Joined(joined) => {
                debug!(target: trace::GROUP, group = %self.core.group, coordinator_epoch = joined.coordinator_epoch, "session open");
                self.line.succeeded();
            }
            Response::Error(error) => {
                info!(target: trace::GROUP, group = %self.core.group, code = error.code().as_str_name(), message = error.message, "the coordinator ended the session");
                if error.code() == ErrorCode::UnknownMember {
                    // It serves, and is asked again at once, but not again and again.
                    self.line.failed(Error::told(error));
                } else {
                    self.line.refused(error);
                }
                let error = Error::told(error);
                self.core.with(|state| state.last_failure = Some(error));
            }
            _ => {}
        }
        self.core
            .with(|state| state.membership.on_response(number, response, now));
    }

    fn on_work(&mut self, done: Result<Work, JoinError>) {
        let now = Instant::now();
        match done {
            Ok(Work::Located(starting, pin, found)) => self.topics.located(starting, pin, found),
            Ok(Work::Computed {
                generation,
                assignment: Ok(assignment),
            }) => self.core.with(|state| {
                state.membership.publish(generation, assignment, now);
            }),
            Ok(Work::Computed {
                generation,
                assignment: Err(error),
            }) => {
                debug!(target: trace::GROUP, group = %self.core.group, %error, "no assignment: another member is asked");
                self.core
                    .with(|state| state.membership.not_computed(generation, error));
            }
            Ok(Work::Committed(done)) => {
                let core = Arc::clone(&self.core);
                core.with(|state| state.end_round(&core, done, now));
            }
            Err(error) => {
                warn!(target: trace::GROUP, group = %self.core.group, %error, "a task of the group's consumer failed");
            }
        }
    }

    fn compute(&mut self, task: v1::AssignTask) {
        let wanted = task.assignor.clone().unwrap_or_default();
        let known = |assignor: &&Arc<dyn Assignor>| version_of(assignor.as_ref()) == wanted;
        let Some(assignor) = self.assignors.iter().find(known).cloned() else {
            let name = &wanted.name;
            let error = Error::new(
                ErrorKind::Protocol,
                format!("the member has no assignor `{name}` of the version that the group uses"),
            );
            let generation = task.generation;
            return (self.core).with(|state| state.membership.not_computed(generation, error));
        };
        let view = self.core.shared.metadata.load();
        // It is the program's code, and may take its time.
        self.work.spawn_blocking(move || {
            let input = AssignInput::told(&task, &view);
            let assignment = input.and_then(|input| {
                let assign = || assignor.assign(&input).to_wire();
                std::panic::catch_unwind(AssertUnwindSafe(assign)).map_err(|_| {
                    let name = assignor.name();
                    let message = format!("the assignor `{name}` panicked");
                    Error::new(ErrorKind::NotAssigned, message)
                })
            });
            Work::Computed {
                generation: task.generation,
                assignment,
            }
        });
    }

    /// Begins a round of commits, or sets the clock for one.
    fn commit(&mut self) {
        let now = Instant::now();
        let core = Arc::clone(&self.core);
        let round = core.with(|state| {
            let due = self.commit_at.is_some_and(|at| at <= now);
            if state.commits.is_asked() || (due && state.commits.is_due()) {
                self.commit_at = None;
                return state.begin_round(&core, now);
            }
            if due {
                self.commit_at = None;
                state.commits.scheduled = false;
            }
            if state.commits.is_due() && self.commit_at.is_none() {
                self.commit_at = Some(now + state.commits.pause(self.interval));
                state.commits.scheduled = true;
            }
            None
        });
        if let Some(round) = round {
            let run = run_round(core, round);
            self.work.spawn(async move { Work::Committed(run.await) });
        }
    }
}
