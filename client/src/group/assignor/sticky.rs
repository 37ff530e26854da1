//! [`StickyAssignor`]: who has something keeps it, unless balance asks for it.
//!
//! ```text
//!  in force, whole, balanced? --yes--> as it is
//!        | no
//!  keep (claims, then targets) --> fill --> balance (`balance.rs`) --> near racks (`near.rs`)
//! ```
//!
//! 1. **As it is**: an assignment in force that is whole and can't be balanced better is kept, whatever
//!    hands claims are passing through: computing anew moves nothing.
//! 2. **Keep**: each partition stays with the member that holds it, else with the one that was to get it.
//! 3. **Fill**: what nobody has goes to the least loaded of its readers, a near one among equals; those
//!    with the fewest readers first.
//! 4. **Balance**: partitions move along paths from loaded to less loaded members until no path is left
//!    that would lessen the difference, which is the optimum whatever members read (the theorem of optimal
//!    semi-matchings: Harvey, Ladner, Lovász, Tamir, "Semi-matchings for bipartite graphs and load
//!    balancing"). Paths that take the fewest partitions from those that keep them come first. Where all
//!    read the same this moves as few as can be.
//! 5. **Near racks**: what moves anyway is exchanged among members, so that more of it lies in the rack of
//!    its reader. No load changes, and nobody loses what it has.

use super::board::{Board, Table};
use super::{AssignInput, Assignment, Assignor, balance, near};

/// The default assignor. Balanced: members that read the same have at most one partition more than each
/// other, and with different topics the loads are as even as they can be. Sticky: a partition moves only
/// where that asks for it, from members with a stable name ([`super::AssignMember::instance`]) last. Aware
/// of racks: what moves goes to a member in a rack that has a replica, where it can. The order of members
/// plays no part.
#[derive(Debug, Clone, Copy, Default)]
pub struct StickyAssignor;

impl Assignor for StickyAssignor {
    fn name(&self) -> &str {
        "sticky"
    }

    fn version(&self) -> u32 {
        1
    }

    fn assign(&self, input: &AssignInput) -> Assignment {
        let table = Table::new(input);
        if let Some(in_force) = in_force(&table) {
            return in_force.into_assignment();
        }
        let mut board = kept(&table);
        fill(&mut board);
        balance::run(&mut board);
        near::run(&mut board);
        board.into_assignment()
    }
}

/// The assignment in force, if nothing is to be done about it.
fn in_force<'t, 'a>(table: &'t Table<'a>) -> Option<Board<'t, 'a>> {
    let mut board = Board::new(table);
    for place in 0..table.places() {
        if let Some(member) = table.target_of(place) {
            board.give(place, member);
        }
    }
    (board.is_complete() && balance::run(&mut board) == 0).then_some(board)
}

fn kept<'t, 'a>(table: &'t Table<'a>) -> Board<'t, 'a> {
    let mut board = Board::new(table);
    for place in 0..table.places() {
        if let Some(member) = table.claimed_by(place).or(table.target_of(place)) {
            board.give(place, member);
        }
    }
    board
}

fn fill(board: &mut Board<'_, '_>) {
    let table = board.table;
    let free = (0..table.places()).filter(|&place| board.owner(place).is_none());
    let mut free: Vec<_> = free.collect();
    free.sort_by_key(|&place| table.readers(table.topic_of(place)).len());
    for place in free {
        let cost = |&member: &usize| (board.load(member), !table.near(member, place), member);
        if let Some(member) = table.candidates(place).min_by_key(cost) {
            board.give(place, member);
        }
    }
}
