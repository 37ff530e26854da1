//! The picture as lists: columns, and rows of cells that can be sorted. Pure.

use std::cmp::Ordering;

use super::picture::Picture;

/// What a cell says by its looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// Nothing.
    Plain,
    /// All is well.
    Good,
    /// May need a look.
    Doubtful,
    /// Needs a human.
    Bad,
}

/// One value of a row.
#[derive(Clone, Debug)]
pub struct Cell {
    /// As it is shown.
    pub text: String,
    /// What it is sorted by; texts have none.
    number: Option<f64>,
    /// Its looks.
    pub tone: Tone,
}

/// A column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// Heading.
    pub name: &'static str,
    /// Numbers stand on the right, and the largest come first.
    pub numbers: bool,
}

/// A list of things of one kind.
#[derive(Clone, Debug)]
pub struct List {
    /// What it lists.
    pub name: &'static str,
    /// Its columns.
    pub columns: &'static [Column],
    /// One row per thing, a cell per column.
    pub rows: Vec<Vec<Cell>>,
}

const fn text(name: &'static str) -> Column {
    Column {
        name,
        numbers: false,
    }
}

const fn numbers(name: &'static str) -> Column {
    Column {
        name,
        numbers: true,
    }
}

/// Columns of the three lists.
const BROKERS: &[Column] = &[
    text("NAME"),
    text("STATE"),
    numbers("LEADS"),
    numbers("REPLICAS"),
    text("ADDRESS"),
    text("RACK"),
];
const TOPICS: &[Column] = &[
    text("NAME"),
    numbers("PARTITIONS"),
    numbers("RECORDS"),
    numbers("IN/S"),
    numbers("OUT/S"),
];
const GROUPS: &[Column] = &[
    text("NAME"),
    text("STATE"),
    numbers("MEMBERS"),
    numbers("PARTITIONS"),
    numbers("LAG"),
    numbers("OUT/S"),
];

/// The column that each list is sorted by at first: names, what is written most, what lags most.
pub const SORTED_BY: [usize; 3] = [0, 3, 4];

impl List {
    /// Brokers, topics, groups.
    #[must_use]
    pub fn all(picture: &Picture) -> [Self; 3] {
        [brokers(picture), topics(picture), groups(picture)]
    }

    /// Sorts by a column: texts upwards, numbers downwards, the other way round if `reversed`;
    /// what is not known comes last, what is equal by the first column.
    pub fn sort(&mut self, column: usize, reversed: bool) {
        let Some(kind) = self.columns.get(column) else {
            return;
        };
        let turned = |order: Ordering| if reversed { order.reverse() } else { order };
        self.rows.sort_by(|a, b| {
            let (Some(one), Some(other)) = (a.get(column), b.get(column)) else {
                return Ordering::Equal;
            };
            let order = match (kind.numbers, one.number, other.number) {
                (false, ..) => turned(one.text.cmp(&other.text)),
                (true, Some(one), Some(other)) => turned(other.total_cmp(&one)),
                (true, Some(_), None) => Ordering::Less,
                (true, None, Some(_)) => Ordering::Greater,
                (true, None, None) => Ordering::Equal,
            };
            let name = |row: &[Cell]| row.first().map(|cell| cell.text.clone());
            order.then_with(|| name(a).cmp(&name(b)))
        });
    }
}

fn brokers(picture: &Picture) -> List {
    let row = |broker: &super::picture::BrokerRow| {
        let tone = match broker.state.as_str() {
            "alive" => Tone::Good,
            "dead" => Tone::Bad,
            _ => Tone::Doubtful,
        };
        let mark = if broker.controller { " *" } else { "" };
        vec![
            label(&format!("{}{mark}", broker.name), Tone::Plain),
            label(&broker.state, tone),
            count(broker.leads, Tone::Plain),
            count(broker.replicas, Tone::Plain),
            label(&broker.address, Tone::Plain),
            label(&broker.rack, Tone::Plain),
        ]
    };
    List {
        name: "BROKERS",
        columns: BROKERS,
        rows: picture.brokers.iter().map(row).collect(),
    }
}

fn topics(picture: &Picture) -> List {
    let row = |topic: &super::picture::TopicRow| {
        let partitions = match topic.leaderless {
            0 => count(topic.partitions, Tone::Plain),
            lost => Cell {
                text: format!("{} ({lost} unled)", topic.partitions),
                ..count(topic.partitions, Tone::Bad)
            },
        };
        vec![
            label(&topic.name, Tone::Plain),
            partitions,
            whole(topic.records, Tone::Plain),
            rate(topic.in_per_s),
            rate(topic.out_per_s),
        ]
    };
    List {
        name: "TOPICS",
        columns: TOPICS,
        rows: picture.topics.iter().map(row).collect(),
    }
}

fn groups(picture: &Picture) -> List {
    let row = |group: &super::picture::GroupRow| {
        let tone = match group.state.as_str() {
            "stable" => Tone::Good,
            "rebalancing" => Tone::Doubtful,
            _ => Tone::Plain,
        };
        let lag = match group.lag {
            Some(1..) => Tone::Doubtful,
            _ => Tone::Plain,
        };
        vec![
            label(&group.name, Tone::Plain),
            label(&group.state, tone),
            whole(Some(group.members), Tone::Plain),
            count(group.partitions, Tone::Plain),
            whole(group.lag, lag),
            rate(group.out_per_s),
        ]
    };
    List {
        name: "GROUPS",
        columns: GROUPS,
        rows: picture.groups.iter().map(row).collect(),
    }
}

/// Names come from the network and must not drive the terminal.
fn label(text: &str, tone: Tone) -> Cell {
    Cell {
        text: text.replace(char::is_control, "?"),
        number: None,
        tone,
    }
}

fn count(number: usize, tone: Tone) -> Cell {
    whole(u64::try_from(number).ok(), tone)
}

#[allow(clippy::cast_precision_loss)]
fn whole(number: Option<u64>, tone: Tone) -> Cell {
    Cell {
        text: number.map_or_else(|| "-".to_owned(), |number| number.to_string()),
        number: number.map(|number| number as f64),
        tone,
    }
}

fn rate(rate: Option<f64>) -> Cell {
    Cell {
        text: shown_rate(rate),
        number: rate,
        tone: Tone::Plain,
    }
}

/// A rate with as many digits as tell something; `-` where it is not known.
#[must_use]
pub fn shown_rate(rate: Option<f64>) -> String {
    match rate {
        None => "-".to_owned(),
        Some(0.0) => "0".to_owned(),
        Some(rate) if rate < 10.0 => format!("{rate:.1}"),
        Some(rate) => format!("{rate:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::picture::{GroupRow, TopicRow};
    use super::*;

    fn topic(name: &str, in_per_s: Option<f64>) -> TopicRow {
        TopicRow {
            name: name.to_owned(),
            partitions: 6,
            leaderless: 0,
            records: Some(5),
            in_per_s,
            out_per_s: None,
        }
    }

    fn names(list: &List) -> Vec<&str> {
        list.rows.iter().map(|row| row[0].text.as_str()).collect()
    }

    #[test]
    fn sort_puts_large_numbers_first_and_the_unknown_last_either_way() {
        let picture = Picture {
            topics: vec![
                topic("b", Some(1.0)),
                topic("a", Some(1.0)),
                topic("unknown", None),
                topic("busy", Some(9.5)),
            ],
            ..Picture::default()
        };
        let [_, mut list, _] = List::all(&picture);
        list.sort(3, false);
        assert_eq!(names(&list), ["busy", "a", "b", "unknown"]);
        list.sort(3, true);
        assert_eq!(names(&list), ["a", "b", "busy", "unknown"]);
        list.sort(0, false);
        assert_eq!(names(&list), ["a", "b", "busy", "unknown"]);
        list.sort(0, true);
        assert_eq!(names(&list), ["unknown", "busy", "b", "a"]);
        list.sort(99, false);
        assert_eq!(list.rows.len(), 4);
    }

    #[test]
    fn names_with_control_characters_are_made_harmless() {
        let picture = Picture {
            groups: vec![GroupRow {
                name: "a\u{1b}[31m\n".to_owned(),
                state: "stable".to_owned(),
                members: 1,
                partitions: 2,
                lag: Some(3),
                out_per_s: Some(0.25),
            }],
            ..Picture::default()
        };
        let [_, _, list] = List::all(&picture);
        assert_eq!(names(&list), ["a?[31m?"]);
        assert_eq!(list.rows[0][4].tone, Tone::Doubtful);
    }

    #[test]
    fn rates_are_shown_with_the_digits_that_tell_something() {
        for (rate, shown) in [
            (None, "-"),
            (Some(0.0), "0"),
            (Some(0.25), "0.2"),
            (Some(9.94), "9.9"),
            (Some(12_345.6), "12346"),
        ] {
            assert_eq!(shown_rate(rate), shown);
        }
    }

    #[test]
    fn every_row_has_a_cell_for_each_column() {
        let picture = Picture {
            topics: vec![topic("t", None)],
            ..Picture::default()
        };
        for (list, sorted_by) in List::all(&picture).iter().zip(SORTED_BY) {
            assert!(sorted_by < list.columns.len());
            assert!(list.rows.iter().all(|row| row.len() == list.columns.len()));
        }
    }
}
