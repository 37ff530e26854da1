//! One picture on standard output, in the forms of `--output`.

use serde::Serialize;

use super::lists::{List, shown_rate};
use super::picture::Picture;
use crate::args::Output;
use crate::exit::{Exit, Failure};
use crate::output::{self, Report, say};

/// Lines on standard error, at most.
const NOTES_MAX: usize = 10;

/// Prints it.
///
/// # Errors
/// Standard output can't be written.
pub fn print(picture: &Picture, output: Output) -> Result<Exit, Failure> {
    for trouble in picture.trouble.iter().take(NOTES_MAX) {
        say(format_args!(
            "note: {}",
            trouble.replace(char::is_control, " ")
        ));
    }
    if let Some(more @ 1..) = picture.trouble.len().checked_sub(NOTES_MAX) {
        say(format_args!("note: and {more} more"));
    }
    let text = render(picture, output)
        .map_err(|error| Failure::error(format!("can't print the picture as JSON: {error}")))?;
    output::print_text(&text)
}

fn render(picture: &Picture, output: Output) -> serde_json::Result<String> {
    match output {
        Output::Table => tables(picture),
        Output::Json | Output::Jsonl => output::render(&Whole(picture), output),
        Output::Raw => {
            let mut text = String::new();
            for list in List::all(picture) {
                text.push_str(&output::render(&Titled(&list), Output::Raw)?);
            }
            Ok(text)
        }
    }
}

fn tables(picture: &Picture) -> serde_json::Result<String> {
    let mut text = format!(
        "{} of {} brokers alive, in {}/s, out {}/s\n",
        picture.brokers_alive(),
        picture.brokers.len(),
        shown_rate(picture.in_per_s),
        shown_rate(picture.out_per_s),
    );
    for list in List::all(picture) {
        text.push('\n');
        text.push_str(list.name);
        text.push('\n');
        text.push_str(&output::render(&Table(&list), Output::Table)?);
    }
    Ok(text)
}

#[derive(Serialize)]
#[serde(transparent)]
struct Whole<'a>(&'a Picture);

impl Report for Whole<'_> {
    fn headings(&self) -> Vec<&'static str> {
        vec![]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        vec![]
    }
}

/// A list as a table.
struct Table<'a>(&'a List);

/// A list as rows that say what they are.
struct Titled<'a>(&'a List);

fn cells(list: &List) -> Vec<Vec<String>> {
    let row = |row: &Vec<super::lists::Cell>| row.iter().map(|cell| cell.text.clone()).collect();
    list.rows.iter().map(row).collect()
}

impl Serialize for Table<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        cells(self.0).serialize(serializer)
    }
}

impl Report for Table<'_> {
    fn headings(&self) -> Vec<&'static str> {
        self.0.columns.iter().map(|column| column.name).collect()
    }

    fn rows(&self) -> Vec<Vec<String>> {
        cells(self.0)
    }
}

impl Serialize for Titled<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        cells(self.0).serialize(serializer)
    }
}

impl Report for Titled<'_> {
    fn headings(&self) -> Vec<&'static str> {
        vec![]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let kind = self.0.name.trim_end_matches('S').to_lowercase();
        let titled = |mut row: Vec<String>| {
            row.insert(0, kind.clone());
            row
        };
        cells(self.0).into_iter().map(titled).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::picture::TopicRow;
    use super::*;

    fn picture() -> Picture {
        Picture {
            in_per_s: Some(3.0),
            topics: vec![TopicRow {
                name: "orders".to_owned(),
                partitions: 6,
                leaderless: 0,
                records: Some(12),
                in_per_s: Some(3.0),
                out_per_s: None,
            }],
            ..Picture::default()
        }
    }

    #[test]
    fn picture_as_text_has_a_table_for_each_list() {
        assert_eq!(
            render(&picture(), Output::Table).unwrap(),
            "0 of 0 brokers alive, in 3.0/s, out -/s\n\
             \n\
             BROKERS\n\
             NAME  STATE  LEADS  REPLICAS  ADDRESS  RACK\n\
             \n\
             TOPICS\n\
             NAME    PARTITIONS  RECORDS  IN/S  OUT/S\n\
             orders  6           12       3.0   -\n\
             \n\
             GROUPS\n\
             NAME  STATE  MEMBERS  PARTITIONS  LAG  OUT/S\n"
        );
    }

    #[test]
    fn picture_as_raw_rows_says_what_each_is() {
        assert_eq!(
            render(&picture(), Output::Raw).unwrap(),
            "topic\torders\t6\t12\t3.0\t-\n"
        );
    }

    #[test]
    fn picture_as_json_is_one_object() {
        let text = render(&picture(), Output::Jsonl).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["topics"][0]["records"], 12);
        assert!(json["out_per_s"].is_null());
        assert_eq!(json["brokers"], serde_json::json!([]));
    }
}
