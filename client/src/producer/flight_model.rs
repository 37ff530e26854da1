//! The flight against a model of brokers and network: streams that break with requests still in
//! them, leaders that change, answers that are lost, tables that are evicted.
//!
//! Checked after every step and at the end, when all faults have healed: no batch is in the log
//! twice, batches are in the log in the order of their admission, what was acknowledged is there
//! at its offset, what ended "not written" is not there, and every batch has one fate.

use std::collections::{BTreeMap, VecDeque};

use proptest::prelude::*;

use super::flight::{Flight, Key, Lost, Refusal};

const RECORDS: u32 = 2;

#[derive(Debug, Clone)]
struct Request {
    key: Key,
    id: u32,
}

#[derive(Debug, Clone)]
enum Answer {
    Written { offset: usize },
    Refused(Refusal),
}

/// A stream to the leader of one term; requests may outlive it on their way.
#[derive(Debug, Default)]
struct Stream {
    term: u64,
    requests: VecDeque<Request>,
    answers: VecDeque<(Key, Answer)>,
    broken: bool,
}

/// What the brokers know of the producer (S12: its last five batches).
#[derive(Debug, Clone, Default)]
struct Table {
    epoch: u32,
    next_sequence: u64,
    last: VecDeque<(u64, usize)>,
}

#[derive(Debug, PartialEq, Eq, Clone, Copy)]
enum Fate {
    Written,
    NotWritten,
    Unknown,
}

struct World {
    term: u64,
    log: Vec<u32>,
    table: Option<Table>,
    flight: Flight<u32>,
    streams: Vec<Stream>,
    /// Of the client: the stream in use, or none while it backs off.
    route: Option<usize>,
    out_of_order: u32,
    admitted: u32,
    fates: BTreeMap<u32, Fate>,
}

impl World {
    fn new() -> Self {
        Self {
            term: 1,
            log: Vec::new(),
            table: Some(Table::default()),
            flight: Flight::new(5),
            streams: Vec::new(),
            route: None,
            out_of_order: 0,
            admitted: 0,
            fates: BTreeMap::new(),
        }
    }

    fn step(&mut self, op: u8, arg: u8) {
        match op % 16 {
            0..=2 => self.admit(),
            3..=5 => self.send(),
            6..=8 => self.serve(arg, None),
            9..=10 => self.deliver(arg),
            11 => self.serve(arg, Some(arg)),
            12 => self.break_stream(arg),
            13 => self.change_leader(arg),
            14 => self.evict(),
            _ => self.expire(arg),
        }
        self.check();
    }

    fn admit(&mut self) {
        if self.flight.has_room() {
            self.flight.admit(self.admitted, RECORDS);
            self.admitted += 1;
        }
    }

    fn send(&mut self) {
        if !self.flight.wants_send() {
            return;
        }
        let at = *self.route.get_or_insert_with(|| {
            self.streams.push(Stream {
                term: self.term,
                ..Stream::default()
            });
            self.streams.len() - 1
        });
        if self.streams[at].broken {
            self.end_round();
            return;
        }
        let (key, &mut id) = self.flight.next_unsent().unwrap();
        let request = Request { key, id };
        self.streams[at].requests.push_back(request);
        self.flight.mark_sent();
    }

    /// A broker takes the next request of some stream, also of one that the client left.
    fn serve(&mut self, which: u8, fault: Option<u8>) {
        let busy: Vec<usize> = (0..self.streams.len())
            .filter(|&at| !self.streams[at].requests.is_empty())
            .collect();
        let Some(&at) = busy.get(usize::from(which) % busy.len().max(1)) else {
            return;
        };
        let request = self.streams[at].requests.pop_front().unwrap();
        let answer = if self.streams[at].term != self.term {
            Answer::Refused(Refusal::Retriable)
        } else {
            match fault.map(|fault| fault % 3) {
                None => self.append(&request),
                Some(0) => Answer::Refused(Refusal::Retriable),
                // Submitted, then committed or lost, and nobody can tell which.
                Some(1) => {
                    self.append(&request);
                    Answer::Refused(Refusal::Unclear)
                }
                Some(_) => Answer::Refused(Refusal::Unclear),
            }
        };
        if !self.streams[at].broken {
            self.streams[at].answers.push_back((request.key, answer));
        }
    }

    fn append(&mut self, request: &Request) -> Answer {
        let key = request.key;
        let table = match &mut self.table {
            Some(table) => table,
            None if key.sequence == 0 => self.table.insert(Table {
                epoch: key.epoch,
                ..Table::default()
            }),
            None => return Answer::Refused(Refusal::UnknownProducer),
        };
        if key.epoch < table.epoch {
            return Answer::Refused(Refusal::UnknownProducer);
        }
        if key.epoch > table.epoch {
            if key.sequence != 0 {
                return Answer::Refused(Refusal::OutOfOrder);
            }
            *table = Table {
                epoch: key.epoch,
                ..Table::default()
            };
        }
        if let Some((_, offset)) = table
            .last
            .iter()
            .find(|(sequence, _)| *sequence == key.sequence)
        {
            return Answer::Written { offset: *offset };
        }
        if key.sequence != table.next_sequence {
            return Answer::Refused(Refusal::OutOfOrder);
        }
        let offset = self.log.len();
        self.log.push(request.id);
        table.next_sequence += u64::from(RECORDS);
        table.last.push_back((key.sequence, offset));
        if table.last.len() > 5 {
            table.last.pop_front();
        }
        Answer::Written { offset }
    }

    fn deliver(&mut self, which: u8) {
        let ready: Vec<usize> = (0..self.streams.len())
            .filter(|&at| !self.streams[at].answers.is_empty())
            .collect();
        let Some(&at) = ready.get(usize::from(which) % ready.len().max(1)) else {
            return;
        };
        let (key, answer) = self.streams[at].answers.pop_front().unwrap();
        match answer {
            Answer::Written { offset } => {
                if let Some(id) = self.flight.acknowledge(key) {
                    self.out_of_order = 0;
                    assert_eq!(self.log[offset], id, "acknowledged at its offset");
                    self.resolve(id, Fate::Written);
                }
            }
            Answer::Refused(refusal) => {
                self.flight.refuse(key, refusal);
            }
        }
        self.after_answer();
    }

    fn after_answer(&mut self) {
        if !self.flight.is_draining() || !self.flight.is_drained() {
            return;
        }
        match self.flight.verdict() {
            Some(Refusal::UnknownProducer) => self.restart(),
            Some(Refusal::OutOfOrder) if self.out_of_order >= 2 => self.restart(),
            verdict => {
                self.out_of_order += u32::from(verdict == Some(Refusal::OutOfOrder));
                self.end_round();
            }
        }
    }

    fn restart(&mut self) {
        self.out_of_order = 0;
        let lost = self.flight.restart_epoch();
        self.lose(lost);
    }

    fn end_round(&mut self) {
        self.flight.rewind();
        self.route = None;
    }

    /// Requests in the stream may still reach the broker; answers are lost.
    fn break_stream(&mut self, arg: u8) {
        let Some(at) = self.route else { return };
        let stream = &mut self.streams[at];
        stream.broken = true;
        stream.answers.clear();
        if arg.is_multiple_of(2) {
            stream.requests.clear();
        }
        // Every request without an answer is told so, as the link does: they all lead here.
        self.end_round();
    }

    fn change_leader(&mut self, arg: u8) {
        self.term += 1;
        if arg.is_multiple_of(2) {
            // The client hears of it before the old leader answers.
            self.end_round();
        }
    }

    /// Eviction takes longer than anything stays under way, and than a delivery timeout: a first
    /// batch in doubt is never evicted.
    fn evict(&mut self) {
        let under_way = self
            .streams
            .iter()
            .any(|stream| !stream.requests.is_empty());
        let first_in_flight = self.flight.front_sequence() == Some(0);
        if !under_way && !first_in_flight {
            self.table = None;
        }
    }

    fn expire(&mut self, arg: u8) {
        if arg.is_multiple_of(4) && !self.flight.is_empty() {
            let lost = self.flight.give_up(1);
            self.lose(lost);
        }
    }

    fn lose(&mut self, lost: Vec<Lost<u32>>) {
        for batch in lost {
            let fate = if batch.doubtful {
                Fate::Unknown
            } else {
                Fate::NotWritten
            };
            self.resolve(batch.payload, fate);
        }
    }

    fn resolve(&mut self, id: u32, fate: Fate) {
        assert_eq!(self.fates.insert(id, fate), None, "batch {id} has one fate");
    }

    fn check(&self) {
        assert!(
            self.log.windows(2).all(|pair| pair[0] < pair[1]),
            "in order and without doubles: {:?}",
            self.log
        );
        for (id, fate) in &self.fates {
            match fate {
                Fate::Written => assert!(self.log.contains(id), "acknowledged {id} is there"),
                Fate::NotWritten => {
                    assert!(!self.log.contains(id), "not written {id} is not there")
                }
                Fate::Unknown => {}
            }
        }
    }

    /// No more faults: everything gets its fate.
    fn heal(&mut self) {
        for _ in 0..2000 {
            if self.flight.is_empty() && self.streams.iter().all(|s| s.requests.is_empty()) {
                break;
            }
            for _ in 0..5 {
                self.send();
            }
            for which in 0..5 {
                self.serve(which, None);
            }
            for which in 0..5 {
                self.deliver(which);
            }
            self.check();
        }
        assert!(self.flight.is_empty(), "everything has its fate");
        assert_eq!(self.fates.len(), self.admitted as usize);
        self.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn s11_s12_flight_under_any_faults_neither_loses_doubles_nor_reorders(
        steps in proptest::collection::vec((any::<u8>(), any::<u8>()), 0..250),
    ) {
        let mut world = World::new();
        for (op, arg) in steps {
            world.step(op, arg);
        }
        world.heal();
    }
}

fn flight_of(batches: u32) -> Flight<u32> {
    let mut flight = Flight::new(5);
    for id in 0..batches {
        flight.admit(id, RECORDS);
    }
    flight
}

fn send_all(flight: &mut Flight<u32>) -> Vec<Key> {
    let mut keys = Vec::new();
    while let Some((key, _)) = flight.next_unsent() {
        keys.push(key);
        flight.mark_sent();
    }
    keys
}

#[test]
fn flight_after_a_refusal_sends_nothing_until_the_round_is_drained() {
    let mut flight = flight_of(3);
    let keys = send_all(&mut flight);
    assert!(flight.refuse(keys[0], Refusal::Retriable));
    flight.admit(3, RECORDS);
    assert!(!flight.wants_send());
    assert!(!flight.is_drained());
    assert!(flight.refuse(keys[1], Refusal::OutOfOrder));
    assert!(flight.refuse(keys[2], Refusal::OutOfOrder));
    assert!(flight.is_drained());
    assert_eq!(flight.verdict(), Some(Refusal::Retriable));
    flight.rewind();
    let again = send_all(&mut flight);
    let sequences: Vec<_> = again.iter().map(|key| (key.epoch, key.sequence)).collect();
    assert_eq!(sequences, [(0, 0), (0, 2), (0, 4), (0, 6)]);
    // A refusal of the earlier round changes nothing; an acknowledgement counts.
    assert!(!flight.refuse(keys[1], Refusal::Retriable));
    assert_eq!(flight.acknowledge(keys[0]), Some(0));
    assert_eq!(flight.acknowledge(again[0]), None);
}

#[test]
fn s12_unknown_producer_ends_doubtful_batches_and_renumbers_the_rest() {
    let mut flight = flight_of(2);
    send_all(&mut flight);
    // The stream breaks: both in doubt.
    flight.rewind();
    flight.admit(2, RECORDS);
    let keys = send_all(&mut flight);
    for key in keys {
        flight.refuse(key, Refusal::UnknownProducer);
    }
    let lost = flight.restart_epoch();
    assert_eq!(
        lost,
        [
            Lost {
                payload: 0,
                doubtful: true
            },
            Lost {
                payload: 1,
                doubtful: true
            }
        ]
    );
    let keys = send_all(&mut flight);
    assert_eq!((keys[0].epoch, keys[0].sequence, keys.len()), (1, 0, 1));
}

#[test]
fn flight_giving_up_what_was_never_sent_stays_in_its_epoch() {
    let mut flight = flight_of(3);
    let keys = send_all(&mut flight);
    flight.acknowledge(keys[0]);
    flight.acknowledge(keys[1]);
    flight.acknowledge(keys[2]);
    for id in 3..6 {
        flight.admit(id, RECORDS);
    }
    assert_eq!(
        flight.give_up(1),
        [Lost {
            payload: 3,
            doubtful: false
        }]
    );
    let keys = send_all(&mut flight);
    assert_eq!((keys[0].epoch, keys[0].sequence), (0, 6));
}

#[test]
fn flight_final_refusal_of_the_lowest_keeps_the_later_ones() {
    let mut flight = flight_of(3);
    let keys = send_all(&mut flight);
    flight.refuse(keys[0], Refusal::Final);
    flight.refuse(keys[1], Refusal::OutOfOrder);
    flight.refuse(keys[2], Refusal::OutOfOrder);
    assert_eq!(flight.verdict(), Some(Refusal::Final));
    assert_eq!(
        flight.give_up(1),
        [Lost {
            payload: 0,
            doubtful: false
        }]
    );
    let keys = send_all(&mut flight);
    assert_eq!(
        keys.iter()
            .map(|k| (k.epoch, k.sequence))
            .collect::<Vec<_>>(),
        [(1, 0), (1, 2)]
    );
}
