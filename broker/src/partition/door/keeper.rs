//! The task behind the door: decides, proposes, and answers when the fate is known.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::{Ack, not_proposed};
use crate::env::Clock;
use crate::partition::error::Error;
use crate::partition::intake::Intake;
use crate::partition::ledger::{Decision, Gate, Ledger, Ticket};
use crate::partition::machine::RecordsState;
use crate::partition::producers::Verdict;
use crate::raft::{
    Admission, Applied, ConfirmError, GroupHandle, Leadership, Payload, Proposal, ProposalError,
};

/// Proposals that are not known to be in the log, before the keeper asks.
const UNACCEPTED_MAX: usize = 32;
/// How long a batch waits on a leader that finds no quorum.
const KNOCK_FOR: Duration = Duration::from_secs(10);
/// A batch that has no fate for so long makes the keeper ask for a quorum.
const STALLED_AFTER: Duration = Duration::from_secs(5);
/// How often the keeper looks for such batches, while there are any batches.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const CONFIRM_WITHIN: Duration = Duration::from_secs(2);
const CONFIRM_PAUSE: Duration = Duration::from_millis(50);

pub(super) type Answer = oneshot::Sender<Result<Ack, Error>>;

/// A batch in front of the door or in flight.
pub(super) struct Item {
    intake: Intake,
    /// Spent by the proposal.
    admission: Option<Admission>,
    since: Instant,
    /// `None`: it was told that its outcome is unknown.
    answer: Option<Answer>,
    /// Retries of the same batch, which wait for its fate.
    duplicates: Vec<Answer>,
}

impl Item {
    pub(super) fn new(intake: Intake, admission: Admission, answer: Answer) -> Self {
        Self {
            intake,
            admission: Some(admission),
            since: Instant::now(),
            answer: Some(answer),
            duplicates: Vec::new(),
        }
    }

    fn refuse(mut self, error: &Error) {
        self.answer_all(error);
    }

    /// Answers whoever waits; the batch itself may still take its course.
    fn answer_all(&mut self, error: &Error) {
        for waiting in self.duplicates.drain(..).chain(self.answer.take()) {
            let _ = waiting.send(Err(error.clone()));
        }
    }

    fn has_waited(&self, time: Duration) -> bool {
        self.since.elapsed() >= time
    }

    fn acknowledge(self, ack: Ack) {
        for duplicate in self.duplicates {
            let duplicate_ack = Ack {
                duplicate: true,
                ..ack
            };
            let _ = duplicate.send(Ok(duplicate_ack));
        }
        if let Some(answer) = self.answer {
            let _ = answer.send(Ok(ack));
        }
    }
}

struct Flight {
    ticket: Ticket,
    item: Item,
    proposal: Proposal,
}

/// See the module; the rules are in the header of [`super`].
pub(super) struct Keeper {
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
    pub(super) fn new(
        group: GroupHandle,
        state: RecordsState,
        clock: Arc<dyn Clock>,
        items: mpsc::Receiver<Item>,
    ) -> Self {
        Self {
            group,
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
        }
    }

    /// Until stopped, or the group has.
    pub(super) async fn run(mut self, stop: CancellationToken) {
        let mut leadership = self.group.watch_leadership();
        let mut applied = self.group.watch_applied();
        let mut look = tokio::time::interval(LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.lead(leadership.current());
        loop {
            self.try_open();
            self.pump();
            let opening = self.leading.is_some() && self.ledger.gate() == Gate::Closed;
            let waiting = self.has_waiting();
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
                _ = look.tick(), if waiting => self.look(),
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
                    Some(flight) => flight.item.duplicates.extend(item.answer),
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

    /// Whether a leader has batches whose fate is open.
    fn has_waiting(&self) -> bool {
        self.leading.is_some()
            && !(self.flights.is_empty()
                && self.refused.is_empty()
                && self.front.is_empty()
                && self.items.is_empty())
    }

    /// A leader that is cut off from its peers stays one, and what is in its log alone has no fate
    /// until the cut is healed. Asked for a quorum, it finds out.
    fn look(&mut self) {
        self.take_first();
        let in_flight = self.flights.front().map(|flight| &flight.item);
        let mut oldest = in_flight
            .into_iter()
            .chain(self.refused.values().next())
            .chain(self.front.front());
        if oldest.any(|item| item.has_waited(STALLED_AFTER)) {
            self.ask_quorum();
        }
    }

    /// Makes the first batch of the queue visible, if the gate keeps it there.
    fn take_first(&mut self) {
        if self.front.is_empty()
            && let Ok(item) = self.items.try_recv()
        {
            self.front.push_back(item);
        }
    }

    /// No quorum answers: batches do not wait for ever, and their producers look for a leader.
    fn refuse_the_old(&mut self) {
        for flight in &mut self.flights {
            if flight.item.has_waited(KNOCK_FOR) {
                // S11: it is or may be in the log and stays in flight: a retry waits for its fate.
                flight.item.answer_all(&Error::OutcomeUnknown);
            }
        }
        let old = |item: &Item| item.has_waited(KNOCK_FOR);
        for (_, item) in self.refused.extract_if(.., |_, item| old(item)) {
            item.refuse(&Error::NotReady);
        }
        self.take_first();
        while let Some(item) = self.front.pop_front_if(|item| old(item)) {
            item.refuse(&Error::NotReady);
            self.take_first();
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
