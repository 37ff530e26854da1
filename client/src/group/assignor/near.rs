//! Exchanges what moves anyway, so that more of it lies near its reader.
//!
//! Two ways, each of which brings one partition more into a rack that has a replica, and changes neither
//! anybody's bonds nor how even the loads are: to a near member that has one less, or in exchange for a
//! partition that loses nothing by it. Chains of three and more are not looked for.
//!
//! Members of one rack that read the same form a class, partitions of one topic with replicas in the same
//! racks a kind: candidates are looked through by class and kind.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::board::{Board, Bond, Member, Place, Table};

pub(super) fn run(board: &mut Board<'_, '_>) {
    let mut exchange = Exchange::new(board);
    // Each brings something nearer, so this ends.
    while exchange.pass(board) {}
}

type Class = usize;
type Kind = usize;

struct Exchange {
    class_of: Vec<Class>,
    /// Of each rack.
    classes: BTreeMap<usize, Vec<Class>>,
    /// The members of each class by load.
    members: Vec<BTreeSet<(usize, Member)>>,
    kind_of: HashMap<Place, Kind>,
    /// What moves and is with each class, by kind.
    moving: Vec<BTreeMap<Kind, BTreeSet<Place>>>,
    places: Vec<Place>,
}

impl Exchange {
    fn new(board: &Board<'_, '_>) -> Self {
        let table = board.table;
        let mut by_reading = BTreeMap::new();
        let mut class_of = Vec::with_capacity(table.members());
        let mut classes = BTreeMap::<usize, Vec<Class>>::new();
        for member in 0..table.members() {
            let (rack, next) = (table.rack(member), by_reading.len());
            let class = *by_reading
                .entry((rack, table.knows(member)))
                .or_insert(next);
            if let Some(rack) = rack
                && class == next
            {
                classes.entry(rack).or_default().push(class);
            }
            class_of.push(class);
        }
        let mut exchange = Self {
            members: vec![BTreeSet::new(); by_reading.len()],
            moving: vec![BTreeMap::new(); by_reading.len()],
            class_of,
            classes,
            kind_of: HashMap::new(),
            places: Vec::new(),
        };
        for (member, &class) in exchange.class_of.iter().enumerate() {
            exchange.members[class].insert((board.load(member), member));
        }
        exchange.collect(board);
        exchange
    }

    fn collect(&mut self, board: &Board<'_, '_>) {
        let table = board.table;
        let mut kinds = BTreeMap::new();
        for place in 0..table.places() {
            let Some(owner) = board.owner(place) else {
                continue;
            };
            if table.bond(owner, place) > Bond::None {
                continue;
            }
            let next = kinds.len();
            let key = (table.topic_of(place), table.racks(place));
            let kind = *kinds.entry(key).or_insert(next);
            self.kind_of.insert(place, kind);
            self.places.push(place);
            let class = self.class_of[owner];
            self.moving[class].entry(kind).or_default().insert(place);
        }
    }

    /// Once over all that is far from its reader; true if anything was brought nearer.
    fn pass(&mut self, board: &mut Board<'_, '_>) -> bool {
        let mut any = false;
        for at in 0..self.places.len() {
            let place = self.places[at];
            let Some(owner) = board.owner(place) else {
                continue;
            };
            let table = board.table;
            let is_loose = table.bond(owner, place) == Bond::None;
            let is_far = !table.near(owner, place) && !table.racks(place).is_empty();
            if is_loose
                && is_far
                && (self.hand_over(board, place, owner) || self.swap(board, place, owner))
            {
                any = true;
            }
        }
        any
    }

    /// The classes near a partition that read it.
    fn near<'s>(&'s self, table: &'s Table<'_>, place: Place) -> impl Iterator<Item = Class> + 's {
        let racks = table.racks(place).iter();
        let classes = racks.filter_map(|rack| self.classes.get(rack)).flatten();
        classes
            .copied()
            .filter(move |&class| self.may(table, class, place))
    }

    fn may(&self, table: &Table<'_>, class: Class, place: Place) -> bool {
        let first = self.members[class].first();
        first.is_some_and(|&(_, member)| table.may(member, place))
    }

    /// To a near member with one less: who has more changes places with who has less.
    fn hand_over(&mut self, board: &mut Board<'_, '_>, place: Place, owner: Member) -> bool {
        let table = board.table;
        let least = self
            .near(table, place)
            .filter_map(|class| self.members[class].first().copied())
            .min();
        match least {
            Some((load, member)) if load < board.load(owner) => {
                self.give(board, place, owner, member);
                true
            }
            _ => false,
        }
    }

    /// Against one that is far from its reader as well, or that is near to both.
    fn swap(&mut self, board: &mut Board<'_, '_>, place: Place, owner: Member) -> bool {
        let table = board.table;
        let mut best: Option<(usize, Place, Member)> = None;
        for class in self.near(table, place) {
            for places in self.moving[class].values() {
                let Some(&other) = places.first() else {
                    continue;
                };
                let Some(reader) = board.owner(other) else {
                    continue;
                };
                // Brought back to who holds it meanwhile.
                let is_bound = table.bond(reader, other) > Bond::None;
                if is_bound || !table.may(owner, other) {
                    continue;
                }
                let gain = 1 + usize::from(table.near(owner, other));
                let gain = gain - usize::from(table.near(reader, other));
                if gain > best.map_or(0, |(best, ..)| best) {
                    best = Some((gain, other, reader));
                }
            }
        }
        let Some((_, other, reader)) = best else {
            return false;
        };
        self.give(board, place, owner, reader);
        self.give(board, other, reader, owner);
        true
    }

    fn give(&mut self, board: &mut Board<'_, '_>, place: Place, from: Member, to: Member) {
        for member in [from, to] {
            let key = (board.load(member), member);
            self.members[self.class_of[member]].remove(&key);
        }
        board.give(place, to);
        for member in [from, to] {
            let key = (board.load(member), member);
            self.members[self.class_of[member]].insert(key);
        }
        let Some(&kind) = self.kind_of.get(&place) else {
            return;
        };
        if let Some(places) = self.moving[self.class_of[from]].get_mut(&kind) {
            places.remove(&place);
        }
        let class = &mut self.moving[self.class_of[to]];
        class.entry(kind).or_default().insert(place);
    }
}
