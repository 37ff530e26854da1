//! Results of the short commands, in the four forms of `--output`. Scripts depend on the JSON
//! shapes; ids are strings there, as 64 bits are more than a JSON number keeps.

mod cluster;
mod topic;

use std::io::{self, Write as _};

use comfy_table::{Attribute, Cell, Color, Table, presets};
use serde::Serialize;

use crate::args::Output;
use crate::exit::{Exit, Failure};
use crate::terminal::Painter;

pub use cluster::{Broker, Cluster};
pub use topic::{Partition, Replica, Topic, TopicSummary};

/// A result that can be printed in any form.
pub trait Report: Serialize {
    /// Headings of the table.
    fn headings(&self) -> Vec<&'static str>;
    /// Rows of the table, and lines of the raw form.
    fn rows(&self) -> Vec<Vec<String>>;
    /// How a cell of the table is meant, where colour can show it.
    fn tone(&self, _row: usize, _column: usize) -> Tone {
        Tone::Plain
    }

    /// JSON documents, one a line in the `jsonl` form.
    ///
    /// # Errors
    /// The value can't be JSON.
    fn json_lines(&self) -> serde_json::Result<Vec<String>> {
        Ok(vec![serde_json::to_string(self)?])
    }
}

/// How something is meant; a colour where there are colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tone {
    /// As it is.
    #[default]
    Plain,
    /// It is well.
    Good,
    /// It may need a look.
    Doubtful,
    /// It needs a human.
    Bad,
    /// It can be passed over.
    Faint,
}

impl Tone {
    fn cell(self, text: String) -> Cell {
        let cell = Cell::new(text);
        match self {
            Self::Plain => cell,
            Self::Good => cell.fg(Color::DarkGreen),
            Self::Doubtful => cell.fg(Color::DarkYellow),
            Self::Bad => cell.fg(Color::DarkRed).add_attribute(Attribute::Bold),
            Self::Faint => cell.add_attribute(Attribute::Dim),
        }
    }
}

fn shown<T: ToString>(known: Option<T>) -> String {
    known.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// The report as plain text, newline at the end included.
///
/// # Errors
/// The value can't be JSON.
pub fn render(report: &impl Report, output: Output) -> serde_json::Result<String> {
    render_with(report, output, Painter::plain())
}

fn render_with(
    report: &impl Report,
    output: Output,
    painter: Painter,
) -> serde_json::Result<String> {
    let lines = match output {
        Output::Table => return Ok(table(report, painter)),
        Output::Json => vec![serde_json::to_string_pretty(report)?],
        Output::Jsonl => report.json_lines()?,
        Output::Raw => clean_rows(report)
            .iter()
            .map(|row| row.join("\t"))
            .collect(),
    };
    let mut text = lines.join("\n");
    if !lines.is_empty() {
        text.push('\n');
    }
    Ok(text)
}

/// The rows without control characters: names come from the network and must not drive the
/// terminal.
fn clean_rows(report: &impl Report) -> Vec<Vec<String>> {
    let mut rows = report.rows();
    for cell in rows.iter_mut().flatten() {
        if cell.contains(char::is_control) {
            *cell = cell.replace(char::is_control, "?");
        }
    }
    rows
}

fn table(report: &impl Report, painter: Painter) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if painter.is_on() {
        table.enforce_styling();
    } else {
        table.force_no_tty();
    }
    let headings = report.headings();
    if !headings.is_empty() {
        let heading = |text| Cell::new(text).add_attribute(Attribute::Bold);
        table.set_header(headings.into_iter().map(heading));
    }
    for (row, cells) in clean_rows(report).into_iter().enumerate() {
        let cells = cells.into_iter().enumerate();
        table.add_row(cells.map(|(column, text)| report.tone(row, column).cell(text)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let mut text = String::new();
    for line in table.lines() {
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// Prints a report.
///
/// # Errors
/// Standard output can't be written. A reader who left is no error.
pub fn print(report: &impl Report, output: Output) -> Result<Exit, Failure> {
    let text = render_with(report, output, Painter::stdout())
        .map_err(|error| Failure::error(format!("can't print the answer as JSON: {error}")))?;
    print_text(&text)
}

/// Prints text as it is.
///
/// # Errors
/// Standard output can't be written. A reader who left is no error.
pub fn print_text(text: &str) -> Result<Exit, Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(Exit::Done),
        Err(error) => crate::sink::Error::from(error).ending(),
    }
}

/// Says something to the person at the terminal, on standard error.
pub fn say(message: impl std::fmt::Display) {
    // Nobody to tell if standard error is gone.
    let _ = crate::progress::aside(|| writeln!(io::stderr().lock(), "{message}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topic() -> Topic {
        Topic {
            name: "flights".to_owned(),
            id: "6a0e".to_owned(),
            partitions: vec![
                Partition {
                    partition: 0,
                    leader: Some("18446744073709551615".to_owned()),
                    leader_epoch: Some(3),
                    log_start_offset: Some(0),
                    high_watermark: Some(12),
                    replicas: vec![Replica {
                        broker: "18446744073709551615".to_owned(),
                        address: "h:1".to_owned(),
                        role: "voter".to_owned(),
                    }],
                },
                Partition {
                    partition: 1,
                    leader: None,
                    leader_epoch: None,
                    log_start_offset: None,
                    high_watermark: None,
                    replicas: vec![],
                },
            ],
        }
    }

    #[test]
    fn topic_describe_json_has_the_designed_shape() {
        let json: serde_json::Value =
            serde_json::from_str(&render(&topic(), Output::Json).unwrap()).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "name": "flights",
                "id": "6a0e",
                "partitions": [
                    {"partition": 0, "leader": "18446744073709551615", "leader_epoch": 3,
                     "log_start_offset": 0, "high_watermark": 12,
                     "replicas": [{"broker": "18446744073709551615", "address": "h:1", "role": "voter"}]},
                    {"partition": 1, "leader": null, "leader_epoch": null,
                     "log_start_offset": null, "high_watermark": null, "replicas": []},
                ],
            })
        );
    }

    #[test]
    fn table_aligns_columns_and_shows_the_unknown_as_dash() {
        assert_eq!(
            render(&topic(), Output::Table).unwrap(),
            "PARTITION  LEADER  EPOCH  START  END  REPLICAS\n\
             0          h:1     3      0      12   h:1\n\
             1          -       -      -      -\n"
        );
    }

    #[test]
    fn raw_is_tabs_without_headings() {
        assert_eq!(
            render(&topic(), Output::Raw).unwrap(),
            "0\th:1\t3\t0\t12\th:1\n1\t-\t-\t-\t-\t\n"
        );
    }

    #[test]
    fn empty_lists_print_nothing_but_valid_json() {
        let none: Vec<TopicSummary> = vec![];
        assert_eq!(render(&none, Output::Json).unwrap(), "[]\n");
        assert_eq!(render(&none, Output::Jsonl).unwrap(), "");
        assert_eq!(render(&none, Output::Raw).unwrap(), "");
    }
}
