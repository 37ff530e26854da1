//! The pure half of the door: what to do with the next batch (S11).
//!
//! The applied log knows only what is applied. Between the check and the application of a
//! batch its successors must be checked already, so the ledger lays the proposals in flight over
//! the applied [`ProducerTable`]:
//!
//! ```text
//!              own term's first entry applied
//!   Closed ------------------------------------> Open <----------------------.
//!     ^                                           |  refused by Raft          | nothing is
//!     |                                           v                           | in flight
//!     '-------- leadership of the term lost --- Settling ---------------------'
//! ```
//!
//! While *settling* nothing is proposed: what was checked against a refused batch may be in
//! flight behind it. Once all of it is resolved, applied state is the whole truth again.
//!
//! A batch stays in the overlay until its fate is known *and* visible in the applied table, so
//! the two views never leave a gap between them.

use std::collections::{HashMap, VecDeque};

use qute_proto::ids::ProducerId;

use super::producers::{ProducerTable, Stamp, Verdict};

/// A proposal in flight, unique within one ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(u64);

/// Whether batches are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// Not leading, or the first entry of the own term is not applied.
    Closed,
    /// Leading in this term with all of the log before it applied.
    Open {
        /// Every proposal is bound to it.
        term: u64,
    },
    /// Leading, but a proposal was refused: waiting until nothing is in flight.
    Settling {
        /// As in [`Gate::Open`].
        term: u64,
    },
}

/// What to do with a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// Propose it, then tell the ledger with [`Ledger::submitted`].
    Propose,
    /// It is in flight already: its fate is this proposal's.
    Wait(Ticket),
    /// Answer it without proposing; never [`Verdict::Append`].
    Answer(Verdict),
    /// A proposal of the same producer is not yet known to be in the log, and this batch must not
    /// overtake it: ask again after [`Ledger::accepted`].
    Hold,
}

#[derive(Debug, Clone, Copy)]
struct Flying {
    ticket: Ticket,
    stamp: Stamp,
    /// In the leader's log: whatever is proposed from now on comes behind it.
    accepted: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Ledger {
    gate: Gate,
    next_ticket: u64,
    /// In order of proposal; all of one producer's are of one epoch or rise.
    producers: HashMap<ProducerId, VecDeque<Flying>>,
    /// Ticket -> its producer, if it has one.
    in_flight: HashMap<Ticket, Option<ProducerId>>,
}

impl Default for Ledger {
    fn default() -> Self {
        Self {
            gate: Gate::Closed,
            next_ticket: 0,
            producers: HashMap::new(),
            in_flight: HashMap::new(),
        }
    }
}

impl Ledger {
    /// Whether batches are taken.
    #[must_use]
    pub fn gate(&self) -> Gate {
        self.gate
    }

    /// Proposals whose fate is not known.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// What to do with a batch, given the applied table. `None`: it has no producer and is never
    /// a duplicate.
    #[must_use]
    pub fn decide(&self, stamp: Option<&Stamp>, applied: &ProducerTable) -> Decision {
        let Some(stamp) = stamp else {
            return Decision::Propose;
        };
        let verdict = match self.producers.get(&stamp.producer) {
            None => applied.judge(stamp),
            Some(flying) => match judge_flying(stamp, flying, applied) {
                Ok(verdict) => verdict,
                Err(ticket) => return Decision::Wait(ticket),
            },
        };
        if verdict != Verdict::Append {
            return Decision::Answer(verdict);
        }
        let behind = self
            .producers
            .get(&stamp.producer)
            .and_then(|flying| flying.back());
        // S11: Raft may refuse one proposal and take the next in the same term (its lease was
        // renewed in between). The successor would then stand in the log without it.
        if behind.is_some_and(|flying| !flying.accepted) {
            Decision::Hold
        } else {
            Decision::Propose
        }
    }

    /// A batch was proposed. The gate must be open.
    pub fn submitted(&mut self, stamp: Option<&Stamp>) -> Ticket {
        debug_assert!(matches!(self.gate, Gate::Open { .. }));
        let ticket = Ticket(self.next_ticket);
        self.next_ticket += 1;
        self.in_flight.insert(ticket, stamp.map(|s| s.producer));
        if let Some(stamp) = stamp {
            let flying = Flying {
                ticket,
                stamp: *stamp,
                accepted: false,
            };
            self.producers
                .entry(stamp.producer)
                .or_default()
                .push_back(flying);
        }
        ticket
    }

    /// A proposal is in the leader's log, behind all that were accepted before.
    pub fn accepted(&mut self, ticket: Ticket) {
        let Some(Some(producer)) = self.in_flight.get(&ticket) else {
            return;
        };
        if let Some(flying) = self.producers.get_mut(producer) {
            for one in flying.iter_mut().filter(|one| one.ticket == ticket) {
                one.accepted = true;
            }
        }
    }

    /// A proposal was applied, and the applied table shows it.
    pub fn applied(&mut self, ticket: Ticket) {
        self.remove(ticket);
    }

    /// Raft refused a proposal and still leads in the term. Closes the door until nothing is in
    /// flight.
    pub fn refused(&mut self, ticket: Ticket) {
        if let Gate::Open { term } = self.gate {
            self.gate = Gate::Settling { term };
        }
        self.remove(ticket);
    }

    /// The term's leadership is over, or the replica stopped: nothing of it is ever resolved
    /// here. The fates show in the log by the time a later term's first entry is applied.
    pub fn close(&mut self) {
        self.gate = Gate::Closed;
        self.producers.clear();
        self.in_flight.clear();
    }

    /// The first entry of the own `term` is applied: applied state is the whole truth.
    pub fn open(&mut self, term: u64) {
        match self.gate {
            Gate::Open { term: old } | Gate::Settling { term: old } if old == term => {}
            _ => {
                self.close();
                self.gate = Gate::Open { term };
            }
        }
    }

    fn remove(&mut self, ticket: Ticket) {
        if let Some(Some(producer)) = self.in_flight.remove(&ticket)
            && let Some(flying) = self.producers.get_mut(&producer)
        {
            flying.retain(|one| one.ticket != ticket);
            if flying.is_empty() {
                self.producers.remove(&producer);
            }
        }
        if let Gate::Settling { term } = self.gate
            && self.in_flight.is_empty()
        {
            self.gate = Gate::Open { term };
        }
    }
}

/// Judges a batch of a producer that has proposals in flight; `Err`: it is one of them.
fn judge_flying(
    stamp: &Stamp,
    flying: &VecDeque<Flying>,
    applied: &ProducerTable,
) -> Result<Verdict, Ticket> {
    let Some(last) = flying.back() else {
        return Ok(applied.judge(stamp));
    };
    let epoch = last.stamp.epoch;
    if stamp.epoch < epoch {
        return Ok(Verdict::Fenced { current: epoch });
    }
    if stamp.epoch > epoch {
        return Ok(match stamp.base_sequence {
            0 => Verdict::Append,
            _ => Verdict::OutOfOrder { expected: 0 },
        });
    }
    if let Some(same) = flying.iter().find(|one| one.stamp == *stamp) {
        return Err(same.ticket);
    }
    let next = last.stamp.end_sequence().unwrap_or(u64::MAX);
    if stamp.base_sequence == next {
        return Ok(Verdict::Append);
    }
    if stamp.base_sequence > next {
        return Ok(Verdict::OutOfOrder { expected: next });
    }
    // Behind the proposals in flight: only the applied table can know it.
    Ok(match applied.known(stamp.producer) {
        Some((known, _)) if known == epoch => match applied.judge(stamp) {
            done @ (Verdict::Duplicate(_) | Verdict::DuplicateUnknownOffset) => done,
            _ => Verdict::Overlapping,
        },
        _ => Verdict::Overlapping,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use qute_proto::ids::Offset;

    use super::*;

    fn stamp(epoch: u32, base_sequence: u64, records: u32) -> Stamp {
        Stamp {
            producer: ProducerId(9),
            epoch,
            base_sequence,
            records,
        }
    }

    fn opened() -> Ledger {
        let mut ledger = Ledger::default();
        ledger.open(4);
        ledger
    }

    fn propose(ledger: &mut Ledger, applied: &ProducerTable, batch: Stamp) -> Ticket {
        assert_eq!(ledger.decide(Some(&batch), applied), Decision::Propose);
        let ticket = ledger.submitted(Some(&batch));
        ledger.accepted(ticket);
        ticket
    }

    #[test]
    fn successor_of_a_batch_in_flight_is_proposed() {
        let (mut ledger, applied) = (opened(), ProducerTable::default());
        propose(&mut ledger, &applied, stamp(0, 0, 3));
        propose(&mut ledger, &applied, stamp(0, 3, 1));
        assert_eq!(
            ledger.decide(Some(&stamp(0, 5, 1)), &applied),
            Decision::Answer(Verdict::OutOfOrder { expected: 4 })
        );
    }

    #[test]
    fn duplicate_of_a_batch_in_flight_waits_for_its_fate() {
        let (mut ledger, applied) = (opened(), ProducerTable::default());
        let first = propose(&mut ledger, &applied, stamp(0, 0, 3));
        propose(&mut ledger, &applied, stamp(0, 3, 1));
        assert_eq!(
            ledger.decide(Some(&stamp(0, 0, 3)), &applied),
            Decision::Wait(first)
        );
    }

    // S11: Raft may refuse the first and take the second in the same term.
    #[test]
    fn successor_is_held_until_its_predecessor_is_in_the_log() {
        let (mut ledger, applied) = (opened(), ProducerTable::default());
        let first = ledger.submitted(Some(&stamp(0, 0, 3)));
        assert_eq!(
            ledger.decide(Some(&stamp(0, 3, 1)), &applied),
            Decision::Hold
        );
        let other = Stamp {
            producer: ProducerId(10),
            ..stamp(0, 0, 1)
        };
        assert_eq!(ledger.decide(Some(&other), &applied), Decision::Propose);
        ledger.accepted(first);
        assert_eq!(
            ledger.decide(Some(&stamp(0, 3, 1)), &applied),
            Decision::Propose
        );
    }

    #[test]
    fn refusal_closes_the_door_until_nothing_is_in_flight() {
        let (mut ledger, applied) = (opened(), ProducerTable::default());
        let first = propose(&mut ledger, &applied, stamp(0, 0, 3));
        let second = propose(&mut ledger, &applied, stamp(0, 3, 1));
        let third = ledger.submitted(None);
        ledger.refused(first);
        assert_eq!(ledger.gate(), Gate::Settling { term: 4 });
        ledger.open(4);
        assert_eq!(ledger.gate(), Gate::Settling { term: 4 });
        ledger.refused(second);
        ledger.applied(third);
        assert_eq!(ledger.gate(), Gate::Open { term: 4 });
        assert_eq!(
            ledger.decide(Some(&stamp(0, 3, 1)), &applied),
            Decision::Answer(Verdict::UnknownProducer)
        );
    }

    #[test]
    fn applied_batch_that_is_still_in_the_overlay_is_judged_once() {
        let (mut ledger, mut applied) = (opened(), ProducerTable::default());
        let first = propose(&mut ledger, &applied, stamp(0, 0, 3));
        applied.record(&stamp(0, 0, 3), Offset(40), 1, 1);
        assert_eq!(
            ledger.decide(Some(&stamp(0, 3, 1)), &applied),
            Decision::Propose
        );
        assert_eq!(
            ledger.decide(Some(&stamp(0, 0, 3)), &applied),
            Decision::Wait(first)
        );
        ledger.applied(first);
        assert_eq!(
            ledger.decide(Some(&stamp(0, 0, 3)), &applied),
            Decision::Answer(Verdict::Duplicate(Offset(40)))
        );
    }

    #[test]
    fn epoch_in_flight_fences_the_older_one() {
        let (mut ledger, mut applied) = (opened(), ProducerTable::default());
        applied.record(&stamp(1, 0, 3), Offset(0), 1, 1);
        propose(&mut ledger, &applied, stamp(2, 0, 1));
        assert_eq!(
            ledger.decide(Some(&stamp(1, 3, 1)), &applied),
            Decision::Answer(Verdict::Fenced { current: 2 })
        );
        assert_eq!(
            ledger.decide(Some(&stamp(2, 0, 2)), &applied),
            Decision::Answer(Verdict::Overlapping)
        );
    }

    #[test]
    fn new_term_forgets_what_was_in_flight() {
        let (mut ledger, applied) = (opened(), ProducerTable::default());
        propose(&mut ledger, &applied, stamp(0, 0, 3));
        ledger.open(6);
        assert_eq!(ledger.gate(), Gate::Open { term: 6 });
        assert_eq!(ledger.in_flight(), 0);
        assert_eq!(
            ledger.decide(Some(&stamp(0, 0, 3)), &applied),
            Decision::Propose
        );
    }

    proptest! {
        /// Whatever Raft refuses, the log never holds a batch without its predecessor, nor one
        /// twice.
        #[test]
        fn log_stays_gapless_whatever_is_refused(
            steps in prop::collection::vec((0u8..6, 0u64..8), 1..300)
        ) {
            let mut ledger = opened();
            let mut applied = ProducerTable::default();
            // Batches of one record each. `core`: proposed, not yet looked at by Raft.
            let mut core: VecDeque<(Ticket, Stamp)> = VecDeque::new();
            let mut log: VecDeque<(Ticket, Stamp)> = VecDeque::new();
            let mut written: Vec<u64> = Vec::new();
            let mut index = 0;
            for (step, back) in steps {
                match step {
                    // The client sends the next batch, or an earlier one again.
                    0..=2 => {
                        let Gate::Open { .. } = ledger.gate() else { continue };
                        let next = u64::try_from(written.len()).unwrap() + back;
                        let batch = stamp(0, next.saturating_sub(3), 1);
                        if ledger.decide(Some(&batch), &applied) == Decision::Propose {
                            core.push_back((ledger.submitted(Some(&batch)), batch));
                        }
                    }
                    3 => if let Some((ticket, batch)) = core.pop_front() {
                        ledger.accepted(ticket);
                        log.push_back((ticket, batch));
                        prop_assert_eq!(batch.base_sequence, u64::try_from(written.len()).unwrap());
                        written.push(batch.base_sequence);
                    },
                    4 => if let Some((ticket, _)) = core.pop_front() {
                        ledger.refused(ticket);
                    },
                    _ => if let Some((ticket, batch)) = log.pop_front() {
                        index += 1;
                        applied.record(&batch, Offset(index), index, index);
                        ledger.applied(ticket);
                    },
                }
            }
        }
    }
}
