//! The screen. Pure: it draws into whatever it is given, of whatever size.
//!
//! ```text
//!  qute top   3 of 3 brokers alive   12 topics   4 groups   in 1200/s   out 900/s
//!  what could not be found out (only if there is such a thing)
//!  BROKERS  3, by NAME         each list: title, headings, rows; the one in focus gets the room
//!  TOPICS   1-9 of 12, by IN/S
//!  GROUPS   4, by LAG
//!  keys
//! ```

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Row, Table};

use super::lists::{Cell, Column, List, Tone, shown_rate};
use super::picture::Picture;
use super::state::{Choice, State};

/// Rows of a list that is not in focus, at most.
const OTHERS_ROWS: usize = 3;
/// Title and headings of a list.
const ABOVE_ROWS: u16 = 2;
/// With fewer lines only the list in focus is shown.
const ALL_LISTS_HEIGHT: u16 = 16;
/// Of names, where room is short.
const NAME_WIDTH_MIN: u16 = 12;
/// Between two columns.
const GAP: u16 = 2;
/// A picture older than this is said to be old.
const OLD: Duration = Duration::from_secs(3);

const KEYS: &str = "q quit   tab next list   s sort by   r reverse   up/down scroll";

/// What is to be drawn.
#[derive(Debug)]
pub struct Scene<'a> {
    /// The newest picture.
    pub picture: &'a Picture,
    /// Its lists, sorted as the state says.
    pub lists: &'a [List; 3],
    /// What the keys have chosen.
    pub state: &'a State,
    /// How old the picture is.
    pub age: Duration,
    /// Why there is no newer one.
    pub failure: Option<&'a str>,
    /// Whether to use colours.
    pub colour: bool,
}

/// Draws it all.
pub fn draw(frame: &mut Frame<'_>, scene: &Scene<'_>) {
    let trouble = trouble(scene);
    let alone = frame.area().height < ALL_LISTS_HEIGHT;
    let lists = scene.lists.iter().enumerate().map(|(place, list)| {
        match (place == scene.state.focus, alone) {
            (true, _) => Constraint::Fill(1),
            (false, true) => Constraint::Length(0),
            (false, false) => {
                let rows = list.rows.len().clamp(1, OTHERS_ROWS);
                Constraint::Length(ABOVE_ROWS + u16::try_from(rows).unwrap_or(u16::MAX))
            }
        }
    });
    let heights = [
        Constraint::Length(1),
        Constraint::Length(u16::from(trouble.is_some())),
    ]
    .into_iter()
    .chain(lists)
    .chain([Constraint::Length(1)]);
    let areas = Layout::vertical(heights).split(frame.area());
    let mut areas = areas.iter().copied();
    let mut next = || areas.next().unwrap_or_default();
    let bold = Style::new().add_modifier(Modifier::BOLD);
    frame.render_widget(Line::styled(summary(scene.picture), bold), next());
    let trouble_area = next();
    if let Some(trouble) = trouble {
        let style = toned(Tone::Bad, scene.colour);
        frame.render_widget(Line::styled(trouble, style), trouble_area);
    }
    for (place, list) in scene.lists.iter().enumerate() {
        let choice = scene.state.choices.get(place).copied();
        draw_list(
            frame,
            next(),
            list,
            choice,
            place == scene.state.focus,
            scene.colour,
        );
    }
    let faint = Style::new().add_modifier(Modifier::DIM);
    frame.render_widget(Line::styled(KEYS, faint), next());
}

fn summary(picture: &Picture) -> String {
    format!(
        "qute top   {} of {} brokers alive   {} topics   {} groups   in {}/s   out {}/s",
        picture.brokers_alive(),
        picture.brokers.len(),
        picture.topics.len(),
        picture.groups.len(),
        shown_rate(picture.in_per_s),
        shown_rate(picture.out_per_s),
    )
}

/// What needs to be known first.
fn trouble(scene: &Scene<'_>) -> Option<String> {
    let age = scene.age.as_secs();
    let clean = |text: &str| text.replace(char::is_control, " ");
    if let Some(failure) = scene.failure {
        return Some(format!("{age} s old: {}", clean(failure)));
    }
    if scene.picture.cluster.is_none() && scene.picture.topics.is_empty() {
        return Some("no answer yet".to_owned());
    }
    if scene.age >= OLD {
        return Some(format!("{age} s old: no newer answer yet"));
    }
    let first = clean(scene.picture.trouble.first()?);
    Some(match scene.picture.trouble.len() - 1 {
        0 => first,
        more => format!("{first} (and {more} more)"),
    })
}

fn draw_list(
    frame: &mut Frame<'_>,
    area: Rect,
    list: &List,
    choice: Option<Choice>,
    focused: bool,
    colour: bool,
) {
    let Some(choice) = choice else {
        return;
    };
    let [title_area, table_area] =
        Layout::vertical([Constraint::Length(1), Constraint::Fill(1)]).areas(area);
    let visible = usize::from(table_area.height.saturating_sub(1));
    let total = list.rows.len();
    let first = choice.scrolled.min(total.saturating_sub(1));
    let rows = list.rows.get(first..).unwrap_or_default();
    let rows = rows.get(..visible).unwrap_or(rows);
    let range = match rows.len() {
        shown if shown == total => total.to_string(),
        0 => format!("0 of {total}"),
        shown => format!("{}-{} of {total}", first + 1, first + shown),
    };
    let sorted_by = list.columns.get(choice.column).map_or("", |by| by.name);
    let turned = if choice.reversed { ", reversed" } else { "" };
    let title = format!("{}  {range}, by {sorted_by}{turned}", list.name);
    let look = match focused {
        true => Modifier::BOLD | Modifier::REVERSED,
        false => Modifier::BOLD,
    };
    let title = Line::styled(title, Style::new().add_modifier(look));
    frame.render_widget(title, title_area);
    let headings = list
        .columns
        .iter()
        .map(|column| aligned(column, column.name, Style::new()));
    let heading_style = Style::new().add_modifier(Modifier::UNDERLINED);
    let table = Table::new(
        rows.iter().map(|row| shown_row(list.columns, row, colour)),
        widths(list.columns, rows),
    )
    .header(Row::new(headings).style(heading_style))
    .column_spacing(GAP);
    frame.render_widget(table, table_area);
}

fn shown_row<'a>(columns: &[Column], row: &'a [Cell], colour: bool) -> Row<'a> {
    let cells = columns.iter().zip(row);
    Row::new(cells.map(|(column, cell)| aligned(column, &cell.text, toned(cell.tone, colour))))
}

fn aligned<'a>(column: &Column, text: &'a str, style: Style) -> Text<'a> {
    let alignment = if column.numbers {
        Alignment::Right
    } else {
        Alignment::Left
    };
    Text::styled(text, style).alignment(alignment)
}

/// The first column gets what the others leave.
fn widths(columns: &[Column], rows: &[Vec<Cell>]) -> Vec<Constraint> {
    let width = |(place, column): (usize, &Column)| {
        let cells = rows.iter().filter_map(|row| row.get(place));
        let texts = cells.map(|cell| cell.text.chars().count());
        let widest = texts.chain([column.name.len()]).max().unwrap_or(0);
        match place {
            0 => Constraint::Min(NAME_WIDTH_MIN),
            _ => Constraint::Length(u16::try_from(widest).unwrap_or(u16::MAX)),
        }
    };
    columns.iter().enumerate().map(width).collect()
}

fn toned(tone: Tone, colour: bool) -> Style {
    match (tone, colour) {
        (Tone::Plain, _) => Style::new(),
        (Tone::Good, true) => Style::new().fg(Color::Green),
        (Tone::Doubtful, true) => Style::new().fg(Color::Yellow),
        (Tone::Bad, true) => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
        (Tone::Bad, false) => Style::new().add_modifier(Modifier::BOLD),
        (_, false) => Style::new(),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::picture::{BrokerRow, GroupRow, TopicRow};
    use super::*;

    fn picture() -> Picture {
        let broker = |number: u64, state: &str| BrokerRow {
            id: number.to_string(),
            name: format!("broker-{number}"),
            state: state.to_owned(),
            leads: 12,
            replicas: 36,
            controller: number == 1,
            address: format!("10.0.0.{number}:7700"),
            rack: "r1".to_owned(),
        };
        let topic = |number: u64| TopicRow {
            name: format!("topic-{number:02}"),
            partitions: 6,
            leaderless: usize::from(number == 3),
            records: Some(1_000 * number),
            in_per_s: Some(number as f64),
            out_per_s: None,
        };
        let group = |name: &str, lag| GroupRow {
            name: name.to_owned(),
            state: "stable".to_owned(),
            members: 3,
            partitions: 6,
            lag: Some(lag),
            out_per_s: Some(7.5),
        };
        Picture {
            cluster: Some("c".to_owned()),
            in_per_s: Some(820.0),
            out_per_s: Some(15.0),
            brokers: vec![broker(1, "alive"), broker(2, "dead"), broker(3, "alive")],
            topics: (1..=40).map(topic).collect(),
            groups: vec![group("billing", 5), group("audit", 0)],
            trouble: Vec::new(),
        }
    }

    fn screen(
        width: u16,
        height: u16,
        state: &State,
        edit: impl Fn(&mut Scene<'_>),
    ) -> Vec<String> {
        screen_of(&picture(), width, height, state, edit)
    }

    fn screen_of(
        picture: &Picture,
        width: u16,
        height: u16,
        state: &State,
        edit: impl Fn(&mut Scene<'_>),
    ) -> Vec<String> {
        let mut lists = List::all(picture);
        for (list, choice) in lists.iter_mut().zip(state.choices) {
            list.sort(choice.column, choice.reversed);
        }
        let mut scene = Scene {
            picture,
            lists: &lists,
            state,
            age: Duration::ZERO,
            failure: None,
            colour: true,
        };
        edit(&mut scene);
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, &scene)).unwrap();
        let buffer = terminal.backend().buffer();
        let rows = buffer.content().chunks(usize::from(width.max(1)));
        rows.map(|row| {
            let line: String = row.iter().map(|cell| cell.symbol()).collect();
            line.trim_end().to_owned()
        })
        .collect()
    }

    #[test]
    fn screen_of_80_by_24_shows_the_summary_all_lists_and_the_keys() {
        let lines = screen(80, 24, &State::default(), |_| {});
        assert_eq!(
            lines[0],
            "qute top   2 of 3 brokers alive   40 topics   2 groups   in 820/s   out 15/s"
        );
        assert_eq!(lines[1], "BROKERS  3, by NAME");
        assert_eq!(
            lines[2].split_whitespace().collect::<Vec<_>>(),
            ["NAME", "STATE", "LEADS", "REPLICAS", "ADDRESS", "RACK"]
        );
        assert!(lines[3].starts_with("broker-1 *"), "{}", lines[3]);
        assert!(lines[4].contains("dead"), "{}", lines[4]);
        assert_eq!(lines[6], "TOPICS  1-11 of 40, by IN/S");
        assert!(lines[8].starts_with("topic-40 "), "{}", lines[8]);
        assert!(lines[8].ends_with(" 40000    40      -"), "{}", lines[8]);
        assert_eq!(lines[19], "GROUPS  2, by LAG");
        assert!(lines[21].starts_with("billing "), "{}", lines[21]);
        assert!(lines[22].starts_with("audit "), "{}", lines[22]);
        assert_eq!(lines[23], KEYS);
    }

    #[test]
    fn list_in_focus_gets_the_room_and_scrolls() {
        let mut state = State::default();
        state.choices[1].scrolled = 35;
        let lines = screen(80, 24, &state, |_| {});
        assert_eq!(lines[6], "TOPICS  36-40 of 40, by IN/S");
        state.focus = 2;
        state.choices[2].reversed = true;
        let lines = screen(80, 24, &state, |_| {});
        let titles: Vec<&str> = lines
            .iter()
            .map(String::as_str)
            .filter(|line| line.contains(", by "))
            .collect();
        assert_eq!(
            titles,
            [
                "BROKERS  3, by NAME",
                "TOPICS  36-38 of 40, by IN/S",
                "GROUPS  2, by LAG, reversed"
            ]
        );
    }

    #[test]
    fn trouble_is_said_above_the_lists() {
        let lines = screen(80, 24, &State::default(), |scene| {
            scene.failure = Some("nobody\nanswers");
            scene.age = Duration::from_secs(7);
        });
        assert_eq!(lines[1], "7 s old: nobody answers");
        assert_eq!(lines[2], "BROKERS  3, by NAME");
        let lines = screen(80, 24, &State::default(), |scene| {
            scene.age = Duration::from_secs(4);
        });
        assert_eq!(lines[1], "4 s old: no newer answer yet");
    }

    #[test]
    fn screen_without_a_picture_says_so() {
        let lines = screen_of(&Picture::default(), 80, 24, &State::default(), |_| {});
        assert_eq!(lines[1], "no answer yet");
    }

    #[test]
    fn small_terminal_shows_the_list_in_focus_alone() {
        let lines = screen(80, 10, &State::default(), |_| {});
        assert_eq!(lines[1], "TOPICS  1-6 of 40, by IN/S");
        assert_eq!(lines[9], KEYS);
        assert!(!lines.iter().any(|line| line.contains("BROKERS")));
    }

    #[test]
    fn terminal_of_any_size_is_drawn_on() {
        for width in [1, 2, 7, 20, 300] {
            for height in [1, 2, 3, 5, 16, 100] {
                let lines = screen(width, height, &State::default(), |_| {});
                assert_eq!(lines.len(), usize::from(height));
            }
        }
    }

    #[test]
    fn unled_partitions_stand_out() {
        let mut state = State::default();
        state.choices[1].column = 0;
        let lines = screen(80, 24, &state, |_| {});
        assert!(lines[10].contains("6 (1 unled)"), "{}", lines[10]);
    }
}
