//! The one door for writes to a partition (S11).
//!
//! ```text
//!  submit ---> queue ---> Keeper: check against applied table + ledger ---> Raft ---> applied
//!  (any task)  (bytes     (one task; the only one that proposes batches)              |
//!               bounded)        ^                                                     v
//!                               '------------------ fate ------------------ answer, in order
//! ```
//!
//! Owns the order of a partition's batches: the order of [`Door::submit`] calls is the order of
//! appends. One task per open replica runs the [`Keeper`]; it sleeps on watches and channels.
//! The decisions themselves are pure and live in [`super::ledger`].
//!
//! Invariants (S11):
//! - Every proposal carries the term it was checked in; Raft refuses it in any other.
//! - A producer's next batch is proposed only once the one before it is known to be in the
//!   leader's log, because Raft may refuse one proposal (lease) and take the next.
//! - A refusal that left nothing in the log closes the door until nothing is in flight; the
//!   refused batches then knock again, in their order, after a ReadIndex round (S15).
//! - Whatever was submitted and may be in some log ends as [`Error::OutcomeUnknown`].
//! - The door opens once the first entry of the own term is applied: by then the fate of
//!   everything proposed in earlier terms shows in the applied table.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use qute_proto::ids::Offset;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::error::Error;
use super::intake::Intake;
use super::ledger::{Decision, Gate, Ledger, Ticket};
use super::machine::RecordsState;
use super::producers::Verdict;
use crate::env::Clock;
use crate::raft::{
    Admission, Applied, ConfirmError, GroupHandle, Leadership, Payload, Proposal, ProposalError,
    ProposeError,
};

/// Batches waiting in front of the door; their bytes are bounded by the group's admission.
const QUEUE_BATCHES_MAX: usize = 8192;
/// Proposals that are not known to be in the log, before the keeper asks.
const UNACCEPTED_MAX: usize = 32;
/// How long a batch that Raft keeps refusing knocks again.
const KNOCK_FOR: Duration = Duration::from_secs(10);
const CONFIRM_WITHIN: Duration = Duration::from_secs(2);
const CONFIRM_PAUSE: Duration = Duration::from_millis(50);

/// A batch is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack {
    /// Offset of its first record.
    pub base_offset: Offset,
    /// Term of the leader that answers.
    pub leader_epoch: u64,
    /// It had been written before: `base_offset` is its original offset.
    pub duplicate: bool,
}

/// The fate of a submitted batch.
///
/// # Cancel safety
/// Dropping it changes nothing: the batch takes its course.
#[derive(Debug)]
#[must_use = "the batch may be refused"]
pub struct Pending(oneshot::Receiver<Result<Ack, Error>>);

impl Future for Pending {
    type Output = Result<Ack, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        // A keeper that is gone may have proposed it.
        Pin::new(&mut self.0)
            .poll(context)
            .map(|answer| answer.unwrap_or(Err(Error::OutcomeUnknown)))
    }
}

/// See the module.
pub struct Door {
    group: GroupHandle,
    queue: mpsc::Sender<Item>,
    stop: CancellationToken,
    keeper: parking_lot::Mutex<Option<JoinHandle<()>>>,
}

impl Door {
    /// Puts a door in front of `group`, whose state machine shows `state`.
    pub fn new(group: GroupHandle, state: RecordsState, clock: Arc<dyn Clock>) -> Self {
        let (queue, items) = mpsc::channel(QUEUE_BATCHES_MAX);
        let stop = CancellationToken::new();
        let keeper = Keeper {
            group: group.clone(),
            state,
            clock,
            ledger: Ledger::default(),
            leading: None,
            flights: VecDeque::new(),
            accepted: 0,
            barrier: None,
            confirm: None,
            lease_lost: false,
            refused: BTreeMap::new(),
            front: VecDeque::new(),
            items,
            stamp_ms: 0,
        };
        let keeper = tokio::spawn(keeper.run(stop.clone()));
        Self {
            group,
            queue,
            stop,
            keeper: parking_lot::Mutex::new(Some(keeper)),
        }
    }

    /// Puts a verified batch into the queue. The order of calls is the order of appends.
    ///
    /// # Errors
    /// Nothing was submitted: [`Error::NotLeader`], [`Error::Overloaded`], [`Error::StorageFull`],
    /// [`Error::BatchTooLarge`], [`Error::Failed`].
    pub fn submit(&self, intake: Intake) -> Result<Pending, Error> {
        if !self.group.leadership().is_local {
            return Err(Error::NotLeader);
        }
        let admission = self
            .group
            .try_admit(intake.batch.len())
            .map_err(|error| not_proposed(&error))?;
        self.enqueue(intake, admission)
    }

    /// As [`Door::submit`], but waits for room in front of the door, at most `patience`.
    ///
    /// # Errors
    /// As [`Door::submit`]; [`Error::Overloaded`] when there was no room in time.
    ///
    /// # Cancel safety
    /// A dropped call has submitted nothing.
    pub async fn submit_within(
        &self,
        intake: Intake,
        patience: Duration,
    ) -> Result<Pending, Error> {
        if !self.group.leadership().is_local {
            return Err(Error::NotLeader);
        }
        let admission = match self.group.try_admit(intake.batch.len()) {
            Err(ProposeError::Busy) => {
                tokio::time::timeout(patience, self.group.admit(intake.batch.len()))
                    .await
                    .map_err(|_elapsed| Error::Overloaded)?
            }
            other => other,
        };
        self.enqueue(intake, admission.map_err(|error| not_proposed(&error))?)
    }

    fn enqueue(&self, intake: Intake, admission: Admission) -> Result<Pending, Error> {
        let (answer, pending) = oneshot::channel();
        let item = Item {
            intake,
            admission: Some(admission),
            since: Instant::now(),
            answer,
            duplicates: Vec::new(),
        };
        self.queue.try_send(item).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => Error::Overloaded,
            mpsc::error::TrySendError::Closed(_) => Error::NotReady,
        })?;
        Ok(Pending(pending))
    }

    /// Stops the keeper: what waits is refused, what is in flight ends as unknown.
    pub async fn shutdown(&self) {
        self.stop.cancel();
        let keeper = self.keeper.lock().take();
        if let Some(keeper) = keeper
            && let Err(error) = keeper.await
        {
            tracing::error!(partition = %self.group.id(), %error, "the door's task failed");
        }
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn not_proposed(error: &ProposeError) -> Error {
    match error {
        ProposeError::Busy => Error::Overloaded,
        ProposeError::StorageFull => Error::StorageFull,
        ProposeError::TooLarge { size, size_max } => Error::BatchTooLarge {
            size_bytes: u64::try_from(*size).unwrap_or(u64::MAX),
            max_bytes: u64::try_from(*size_max).unwrap_or(u64::MAX),
        },
        ProposeError::Stopped => Error::Failed("its log does not take writes any more".into()),
    }
}

type Answer = oneshot::Sender<Result<Ack, Error>>;

/// A batch in front of the door or in flight.
struct Item {
    intake: Intake,
    /// Spent by the proposal.
    admission: Option<Admission>,
    since: Instant,
    answer: Answer,
    /// Retries of the same batch, which wait for its fate.
    duplicates: Vec<Answer>,
}

impl Item {
    fn refuse(self, error: &Error) {
        for duplicate in self.duplicates {
            let _ = duplicate.send(Err(error.clone()));
        }
        let _ = self.answer.send(Err(error.clone()));
    }

    fn acknowledge(self, ack: Ack) {
        for duplicate in self.duplicates {
            let duplicate_ack = Ack {
                duplicate: true,
                ..ack
            };
            let _ = duplicate.send(Ok(duplicate_ack));
        }
        let _ = self.answer.send(Ok(ack));
    }
}

struct Flight {
    ticket: Ticket,
    item: Item,
    proposal: Proposal,
}

/// The task behind the door.
struct Keeper {
    group: GroupHandle,
    state: RecordsState,
    clock: Arc<dyn Clock>,
    ledger: Ledger,
    /// The term this replica leads in.
    leading: Option<u64>,
    /// In order of proposal, which is the order of the log.
    flights: VecDeque<Flight>,
    /// How many of the first flights are known to be in the leader's log.
    accepted: usize,
    /// Tells that Raft has looked at every proposal up to the ticket.
    barrier: Option<(Ticket, BoxFuture<'static, bool>)>,
    /// S15: a ReadIndex round after a refusal by lease.
    confirm: Option<BoxFuture<'static, Result<(), ConfirmError>>>,
    lease_lost: bool,
    /// Refused by Raft without a trace: they knock again, in this order.
    refused: BTreeMap<Ticket, Item>,
    /// Taken off the queue and not proposed yet.
    front: VecDeque<Item>,
    items: mpsc::Receiver<Item>,
    /// The last broker time given out (S19: never falls).
    stamp_ms: u64,
}

enum Event {
    Fate(usize, Result<Applied, ProposalError>),
    Barrier(bool),
    Confirmed(Result<(), ConfirmError>),
    Item(Item),
    Closed,
}

impl Keeper {
    async fn run(mut self, stop: CancellationToken) {
        let mut leadership = self.group.watch_leadership();
        let mut applied = self.group.watch_applied();
        self.lead(leadership.current());
        loop {
            self.try_open();
            self.pump();
            let opening = self.leading.is_some() && self.ledger.gate() == Gate::Closed;
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                event = std::future::poll_fn(|context| self.poll_event(context)) => {
                    if !self.handle(event) {
                        break;
                    }
                }
                change = leadership.changed() => match change {
                    Some(now) => self.lead(now),
                    None => break,
                },
                moved = applied.changed(), if opening => {
                    if moved.is_err() {
                        break;
                    }
                }
            }
        }
        self.abandon();
        self.items.close();
        while let Ok(item) = self.items.try_recv() {
            item.refuse(&Error::NotReady);
        }
    }

    fn lead(&mut self, now: Leadership) {
        let leading = now.is_local.then_some(now.term);
        if leading != self.leading {
            self.abandon();
            self.leading = leading;
        }
    }

    /// The term is over, or the replica stops.
    fn abandon(&mut self) {
        self.leading = None;
        self.ledger.close();
        self.accepted = 0;
        self.barrier = None;
        self.confirm = None;
        self.lease_lost = false;
        let unknown = u64::try_from(self.flights.len()).unwrap_or(u64::MAX);
        if unknown > 0 {
            metrics::counter!("qute_door_outcome_unknown_total").increment(unknown);
        }
        for flight in self.flights.drain(..) {
            // S11: it may be in some log. The retry finds out, by its sequence.
            flight.item.refuse(&Error::OutcomeUnknown);
        }
        for item in std::mem::take(&mut self.refused).into_values() {
            item.refuse(&Error::NotLeader);
        }
        for item in self.front.drain(..) {
            item.refuse(&Error::NotLeader);
        }
    }

    fn try_open(&mut self) {
        let Some(term) = self.leading else {
            return;
        };
        // S11: the first entry of the own term is applied, and so is everything before it.
        if self.ledger.gate() == Gate::Closed && self.group.applied().term == term {
            self.ledger.open(term);
            self.stamp_ms = self.stamp_ms.max(self.state.last_time_ms());
        }
    }

    /// Proposes what waits in front, as far as the ledger lets it.
    fn pump(&mut self) {
        let Gate::Open { term } = self.ledger.gate() else {
            return;
        };
        if self.lease_lost {
            self.ask_quorum();
            return;
        }
        // Nothing is in flight here if anything was refused.
        for item in std::mem::take(&mut self.refused).into_values().rev() {
            self.front.push_front(item);
        }
        while let Some(item) = self.next_item() {
            if let Some(held) = self.knock(item, term) {
                self.front.push_front(held);
                break;
            }
        }
        if self.flights.len() - self.accepted > UNACCEPTED_MAX {
            self.ask_core();
        }
    }

    fn next_item(&mut self) -> Option<Item> {
        let waiting = self.front.pop_front();
        waiting.or_else(|| self.items.try_recv().ok())
    }

    /// Decides about one batch; gives it back if it must wait.
    fn knock(&mut self, mut item: Item, term: u64) -> Option<Item> {
        let stamp = item.intake.stamp;
        let now_ms = self.clock.wall_ms();
        let (decision, room) = self.state.with_producers(|table| {
            let decision = self.ledger.decide(stamp.as_ref(), table);
            let known = stamp.is_none_or(|stamp| table.known(stamp.producer).is_some());
            (decision, known || table.has_room(now_ms))
        });
        match decision {
            Decision::Hold => {
                self.ask_core();
                return Some(item);
            }
            Decision::Wait(ticket) => {
                match self
                    .flights
                    .iter_mut()
                    .find(|flight| flight.ticket == ticket)
                {
                    Some(flight) => flight.item.duplicates.push(item.answer),
                    None => item.refuse(&Error::OutcomeUnknown),
                }
                return None;
            }
            Decision::Answer(verdict) => {
                answer(item, verdict, term);
                return None;
            }
            Decision::Propose if !room => {
                item.refuse(&Error::Overloaded);
                return None;
            }
            Decision::Propose => {}
        }
        let bytes = item.intake.batch.len();
        let admission = match item.admission.take() {
            Some(admission) => Ok(admission),
            None => self.group.try_admit(bytes),
        };
        // S19: stamped by the leader, never falling.
        self.stamp_ms = self.stamp_ms.max(now_ms);
        let payload = Payload::batch(
            item.intake.batch.clone(),
            item.intake.records,
            self.stamp_ms,
        );
        match admission.and_then(|leave| self.group.propose(leave, payload, Some(term))) {
            Ok(proposal) => {
                let ticket = self.ledger.submitted(stamp.as_ref());
                self.flights.push_back(Flight {
                    ticket,
                    item,
                    proposal,
                });
            }
            Err(error) => item.refuse(&not_proposed(&error)),
        }
        None
    }

    /// Asks Raft's core to answer once it has looked at everything proposed so far.
    fn ask_core(&mut self) {
        if self.barrier.is_some() {
            return;
        }
        let Some(last) = self.flights.back() else {
            return;
        };
        let raft = self.group.raft().clone();
        let asked = async move { raft.with_raft_state(|_| ()).await.is_ok() };
        self.barrier = Some((last.ticket, Box::pin(asked)));
    }

    fn ask_quorum(&mut self) {
        if self.confirm.is_some() {
            return;
        }
        let group = self.group.clone();
        self.confirm = Some(Box::pin(async move {
            let confirmed = group.confirm(CONFIRM_WITHIN).await;
            if confirmed.is_err() {
                // The loss of leadership shows in its watch; until then do not spin.
                tokio::time::sleep(CONFIRM_PAUSE).await;
            }
            confirmed.map(|_| ())
        }));
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Event> {
        // Applied in order: of what is in the log only the first can end well now. What may not
        // be in the log can be refused at any time.
        let first = usize::from(self.accepted > 0);
        for position in (0..first).chain(self.accepted..self.flights.len()) {
            if let Poll::Ready(fate) = self.poll_flight(position, context) {
                return Poll::Ready(Event::Fate(position, fate));
            }
        }
        if let Some((_, barrier)) = &mut self.barrier
            && let Poll::Ready(passed) = barrier.as_mut().poll(context)
        {
            return Poll::Ready(Event::Barrier(passed));
        }
        if let Some(confirm) = &mut self.confirm
            && let Poll::Ready(confirmed) = confirm.as_mut().poll(context)
        {
            return Poll::Ready(Event::Confirmed(confirmed));
        }
        let open = matches!(self.ledger.gate(), Gate::Open { .. }) && !self.lease_lost;
        if self.front.is_empty() && (open || self.leading.is_none()) {
            return match self.items.poll_recv(context) {
                Poll::Ready(Some(item)) => Poll::Ready(Event::Item(item)),
                Poll::Ready(None) => Poll::Ready(Event::Closed),
                Poll::Pending => Poll::Pending,
            };
        }
        Poll::Pending
    }

    /// Unconstrained: a `Pending` here must mean that Raft has not answered, not that the task
    /// has used up its budget.
    fn poll_flight(
        &mut self,
        position: usize,
        context: &mut Context<'_>,
    ) -> Poll<Result<Applied, ProposalError>> {
        match self.flights.get_mut(position) {
            Some(flight) => {
                let mut proposal = tokio::task::unconstrained(&mut flight.proposal);
                Pin::new(&mut proposal).poll(context)
            }
            None => Poll::Pending,
        }
    }

    /// Returns whether to go on.
    fn handle(&mut self, event: Event) -> bool {
        match event {
            Event::Fate(position, fate) => self.fate(position, fate),
            Event::Barrier(true) => self.passed_barrier(),
            Event::Barrier(false) | Event::Closed => return false,
            Event::Confirmed(confirmed) => {
                self.confirm = None;
                if confirmed.is_ok() {
                    self.lease_lost = false;
                } else {
                    self.refuse_the_old();
                }
            }
            Event::Item(item) if self.leading.is_none() => item.refuse(&Error::NotLeader),
            Event::Item(item) => self.front.push_back(item),
        }
        true
    }

    fn fate(&mut self, position: usize, fate: Result<Applied, ProposalError>) {
        let Some(flight) = self.flights.remove(position) else {
            return;
        };
        if position < self.accepted {
            self.accepted -= 1;
        }
        match fate {
            Ok(applied) => {
                self.ledger.applied(flight.ticket);
                flight.item.acknowledge(Ack {
                    base_offset: applied.base_offset.unwrap_or_default(),
                    leader_epoch: self.leading.unwrap_or_default(),
                    duplicate: false,
                });
            }
            Err(error) if error.is_unwritten() => {
                // S15: ReadIndex, then again. Nothing of it is in any log.
                metrics::counter!("qute_door_knocked_again_total").increment(1);
                self.lease_lost = true;
                self.ledger.refused(flight.ticket);
                self.refused.insert(flight.ticket, flight.item);
                self.refuse_the_old();
            }
            Err(_) => {
                // Discarded or stopped: the term is over, whatever the watch says yet.
                flight.item.refuse(&Error::OutcomeUnknown);
                self.abandon();
            }
        }
    }

    /// Raft has looked at every proposal up to the barrier's ticket: those it has not refused
    /// are in its log.
    fn passed_barrier(&mut self) {
        let Some((upto, _)) = self.barrier.take() else {
            return;
        };
        let mut context = Context::from_waker(std::task::Waker::noop());
        while let Some(flight) = self.flights.get(self.accepted) {
            let ticket = flight.ticket;
            if ticket > upto {
                break;
            }
            match self.poll_flight(self.accepted, &mut context) {
                Poll::Ready(fate) => self.fate(self.accepted, fate),
                Poll::Pending => {
                    self.ledger.accepted(ticket);
                    self.accepted += 1;
                }
            }
        }
    }

    /// Batches do not knock for ever.
    fn refuse_the_old(&mut self) {
        let refused = std::mem::take(&mut self.refused);
        for (ticket, item) in refused {
            if item.since.elapsed() < KNOCK_FOR {
                self.refused.insert(ticket, item);
            } else {
                item.refuse(&Error::NotReady);
            }
        }
    }
}

fn answer(item: Item, verdict: Verdict, term: u64) {
    let stamp = item.intake.stamp;
    let error = match verdict {
        Verdict::Duplicate(base_offset) => {
            let ack = Ack {
                base_offset,
                leader_epoch: term,
                duplicate: true,
            };
            return item.acknowledge(ack);
        }
        Verdict::DuplicateUnknownOffset => Error::DuplicateUnknownOffset,
        Verdict::OutOfOrder { expected } => Error::OutOfOrder {
            expected,
            actual: stamp.map_or(0, |stamp| stamp.base_sequence),
        },
        Verdict::Fenced { current } => Error::Fenced {
            current,
            actual: stamp.map_or(0, |stamp| stamp.epoch),
        },
        Verdict::UnknownProducer => Error::UnknownProducer,
        Verdict::Overlapping => Error::Overlapping,
        // Never an answer; it would be proposed.
        Verdict::Append => Error::NotReady,
    };
    item.refuse(&error);
}
