//! Moves partitions until loads are as even as they can be.
//!
//! From the most loaded member down, a search for a path: it gives one partition to a member that gives one
//! of its own to another, and so on to a member with at least two fewer than the first. Members between
//! keep their load. A member without such a path is settled, and so are all whom it reaches: none of them
//! leads to a less loaded one, now or later, since a path found afterwards would have to go through them.
//! So each member is settled once, and one pass over all is enough.

use std::cmp::Reverse;
use std::collections::{BTreeSet, VecDeque};

use super::board::{Board, Bond, Held, Member, Place};

const UNREACHED: usize = usize::MAX;

/// How many partitions were moved.
pub(super) fn run(board: &mut Board<'_, '_>) -> usize {
    let members = board.table.members();
    // The last gives first: the most loaded, one without a stable name among equals.
    let key = |board: &Board<'_, '_>, member: Member| {
        let is_dynamic = !board.table.is_static(member);
        (board.load(member), is_dynamic, Reverse(member))
    };
    let mut queue: BTreeSet<_> = (0..members).map(|member| key(board, member)).collect();
    let mut search = Search::new(board);
    let mut moved = 0;
    while let (Some(&(least, ..)), Some(&(load, _, Reverse(from)))) = (queue.first(), queue.last())
    {
        if load - least < 2 {
            break;
        }
        let Some(to) = search.run(board, from, least) else {
            for member in search.settle(board, from) {
                queue.remove(&key(board, member));
            }
            continue;
        };
        queue.remove(&key(board, from));
        queue.remove(&key(board, to));
        moved += search.apply(board, from, to);
        queue.insert(key(board, from));
        queue.insert(key(board, to));
    }
    moved
}

/// How a member was reached.
#[derive(Debug, Clone, Copy)]
struct Step {
    /// How many partitions the path takes from members that keep them.
    cost: usize,
    from: Member,
    topic: usize,
    expanded: bool,
}

/// The lowest partition numbers of a topic that somebody on the way could give: of those that nobody is
/// attached to, and of all.
#[derive(Debug, Clone, Copy)]
struct Lowest {
    loose: usize,
    any: usize,
}

/// A search by cost: nothing for a partition that moves anyway, one for any other.
struct Search {
    steps: Vec<Step>,
    /// What each topic has been looked through for.
    topics: Vec<Lowest>,
    queue: VecDeque<(usize, Member)>,
    settled: Vec<bool>,
}

impl Search {
    fn new(board: &Board<'_, '_>) -> Self {
        Self {
            steps: Vec::new(),
            topics: Vec::new(),
            queue: VecDeque::new(),
            settled: vec![false; board.table.members()],
        }
    }

    /// The end of a path from the member, if there is one.
    fn run(&mut self, board: &Board<'_, '_>, start: Member, least: usize) -> Option<Member> {
        self.steps.clear();
        let unreached = Step {
            cost: UNREACHED,
            from: start,
            topic: 0,
            expanded: false,
        };
        self.steps.resize(board.table.members(), unreached);
        self.topics.clear();
        let nothing = Lowest {
            loose: UNREACHED,
            any: UNREACHED,
        };
        self.topics.resize(board.table.topics(), nothing);
        self.queue.clear();
        self.steps[start].cost = 0;
        self.queue.push_back((0, start));
        let mut found: Option<(usize, usize, Member)> = None;
        while let Some((cost, member)) = self.queue.pop_front() {
            if found.is_some_and(|(best, ..)| cost > best) {
                break;
            }
            if std::mem::replace(&mut self.steps[member].expanded, true) {
                continue;
            }
            let load = board.load(member);
            if load + 2 <= board.load(start) {
                let end = (cost, load, member);
                found = Some(found.map_or(end, |best| best.min(end)));
            }
            if let Some(end) = self.expand(board, start, member, least) {
                return Some(end);
            }
        }
        found.map(|(.., member)| member)
    }

    /// Reaches out to all who could take something from the member. Gives the end of a path, if no other
    /// could be cheaper: the least loaded of those who can take from the first member directly.
    fn expand(
        &mut self,
        board: &Board<'_, '_>,
        start: Member,
        member: Member,
        least: usize,
    ) -> Option<Member> {
        let cost = self.steps[member].cost;
        let hand = board.hand(member);
        let is_loose = |key: Option<&Held>| key.is_some_and(|it| it.0 == Bond::None);
        let has_loose = hand.values().any(|places| is_loose(places.first()));
        let mut best: Option<(usize, Member)> = None;
        for (&topic, places) in hand {
            let lowest = lowest(board, places);
            let before = self.topics[topic];
            if before.loose <= lowest.loose && before.any <= lowest.any {
                continue;
            }
            self.topics[topic] = Lowest {
                loose: before.loose.min(lowest.loose),
                any: before.any.min(lowest.any),
            };
            for &(reader, knows) in board.table.readers(topic) {
                let more = match () {
                    () if lowest.loose < knows => 0,
                    () if lowest.any < knows => 1,
                    () => continue,
                };
                let is_settled = self.settled[reader] || self.steps[reader].expanded;
                if is_settled || self.steps[reader].cost <= cost + more {
                    continue;
                }
                self.steps[reader] = Step {
                    cost: cost + more,
                    from: member,
                    topic,
                    expanded: false,
                };
                let is_cheapest = member == start && (more == 0 || !has_loose);
                let end = (board.load(reader), reader);
                if is_cheapest && end.0 + 2 <= board.load(start) {
                    if end.0 == least {
                        return Some(reader);
                    }
                    best = Some(best.map_or(end, |best| best.min(end)));
                }
                if more == 0 {
                    self.queue.push_front((cost, reader));
                } else {
                    self.queue.push_back((cost + 1, reader));
                }
            }
        }
        best.map(|(_, reader)| reader)
    }

    /// After a search in vain: the member, and whom it reached, as far as no more is loaded than it.
    fn settle(&mut self, board: &Board<'_, '_>, start: Member) -> Vec<Member> {
        let reached = (0..self.steps.len()).filter(|&member| {
            let is_reached = self.steps[member].cost != UNREACHED;
            is_reached && board.load(member) <= board.load(start) && !self.settled[member]
        });
        let reached: Vec<Member> = reached.collect();
        for &member in &reached {
            self.settled[member] = true;
        }
        reached
    }

    /// Moves a partition along each step of the path.
    fn apply(&self, board: &mut Board<'_, '_>, start: Member, end: Member) -> usize {
        let (mut to, mut moved) = (end, 0);
        while to != start {
            let Step { from, topic, .. } = self.steps[to];
            if let Some(place) = choose(board, from, to, topic) {
                board.give(place, to);
                moved += 1;
            }
            to = from;
        }
        moved
    }
}

fn lowest(board: &Board<'_, '_>, places: &BTreeSet<Held>) -> Lowest {
    let mut lowest = Lowest {
        loose: UNREACHED,
        any: UNREACHED,
    };
    for bond in [Bond::None, Bond::Target, Bond::Claim, Bond::Both] {
        for near in [false, true] {
            let mut run = places.range((bond, near, 0)..=(bond, near, Place::MAX));
            let Some(&(.., place)) = run.next() else {
                continue;
            };
            let number = board.table.number(place);
            lowest.any = lowest.any.min(number);
            if bond == Bond::None {
                lowest.loose = lowest.loose.min(number);
            }
        }
    }
    lowest
}

/// The one that the giver is least attached to, of these one that the taker is attached to.
fn choose(board: &Board<'_, '_>, from: Member, to: Member, topic: usize) -> Option<Place> {
    let places = board.hand(from).get(&topic)?;
    let may = |key: &&Held| board.table.may(to, key.2);
    let &(bond, _, first) = places.iter().find(may)?;
    if bond != Bond::Claim || !board.table.is_promised(from, to) {
        return Some(first);
    }
    // Held by the one and promised to the other: on its way already.
    let alike = places.range((bond, false, 0)..=(bond, true, Place::MAX));
    let promised = alike
        .filter(may)
        .find(|key| board.table.target_of(key.2) == Some(to));
    Some(promised.map_or(first, |key| key.2))
}
