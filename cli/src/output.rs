//! Results of the short commands, in the four forms of `--output`. Scripts depend on the JSON
//! shapes; ids are strings there, as 64 bits are more than a JSON number keeps.

use std::io::{self, Write as _};

use comfy_table::{Table, presets};
use serde::Serialize;

use crate::args::Output;
use crate::exit::{Exit, Failure};

/// A broker, as `cluster brokers` lists it.
#[derive(Clone, Debug, Serialize)]
pub struct Broker {
    /// Broker id.
    pub id: String,
    /// Its name for people.
    pub name: String,
    /// `alive`, `suspect`, `dead` or `draining`.
    pub state: String,
    /// Where clients reach it.
    pub address: String,
    /// Its rack; empty if it has none.
    pub rack: String,
}

/// A topic, as `topic describe` shows it.
#[derive(Clone, Debug, Serialize)]
pub struct Topic {
    /// Name.
    pub name: String,
    /// The UUID of this incarnation.
    pub id: String,
    /// By partition number.
    pub partitions: Vec<Partition>,
}

/// One partition of a [`Topic`]. What is not known now is null.
#[derive(Clone, Debug, Serialize)]
pub struct Partition {
    /// Number, from 0.
    pub partition: u32,
    /// Broker id of the leader.
    pub leader: Option<String>,
    /// Term of that leadership.
    pub leader_epoch: Option<u64>,
    /// First readable offset.
    pub log_start_offset: Option<u64>,
    /// One past the last committed offset.
    pub high_watermark: Option<u64>,
    /// Where the replicas are.
    pub replicas: Vec<Replica>,
}

/// One replica of a [`Partition`].
#[derive(Clone, Debug, Serialize)]
pub struct Replica {
    /// Broker id.
    pub broker: String,
    /// Where clients reach that broker; empty if unknown.
    pub address: String,
    /// `voter` or `learner`.
    pub role: String,
}

/// A topic, as `topic list` shows it.
#[derive(Clone, Debug, Serialize)]
pub struct TopicSummary {
    /// Name.
    pub name: String,
    /// The UUID of this incarnation.
    pub id: String,
    /// How many partitions it has.
    pub partitions: usize,
    /// How many replicas each has (the most, while they differ).
    pub replicas: usize,
}

/// The cluster, as `cluster info` shows it.
#[derive(Clone, Debug, Serialize)]
pub struct Cluster {
    /// Cluster id; null before it is formed.
    pub cluster_id: Option<String>,
    /// The answering broker belongs to a cluster.
    pub formed: bool,
    /// Broker id of the leader of `__cluster`.
    pub controller: Option<String>,
    /// Where clients reach that broker.
    pub controller_address: Option<String>,
    /// Brokers that founded the cluster.
    pub founding_brokers: u32,
    /// Brokers registered now.
    pub brokers: usize,
    /// Of those, seen alive.
    pub brokers_alive: usize,
    /// Topics.
    pub topics: u32,
    /// Partitions of all topics.
    pub partitions: u32,
    /// What needs a human, of each broker that answered.
    pub faults: Vec<String>,
}

/// A result that can be printed in any form.
pub trait Report: Serialize {
    /// Headings of the table.
    fn headings(&self) -> Vec<&'static str>;
    /// Rows of the table, and lines of the raw form.
    fn rows(&self) -> Vec<Vec<String>>;
    /// JSON documents, one a line in the `jsonl` form.
    ///
    /// # Errors
    /// The value can't be JSON.
    fn json_lines(&self) -> serde_json::Result<Vec<String>> {
        Ok(vec![serde_json::to_string(self)?])
    }
}

fn shown<T: ToString>(known: Option<T>) -> String {
    known.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

impl Report for Vec<Broker> {
    fn headings(&self) -> Vec<&'static str> {
        vec!["ID", "NAME", "STATE", "ADDRESS", "RACK"]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let row = |broker: &Broker| {
            vec![
                broker.id.clone(),
                broker.name.clone(),
                broker.state.clone(),
                broker.address.clone(),
                broker.rack.clone(),
            ]
        };
        self.iter().map(row).collect()
    }

    fn json_lines(&self) -> serde_json::Result<Vec<String>> {
        self.iter().map(serde_json::to_string).collect()
    }
}

impl Report for Vec<TopicSummary> {
    fn headings(&self) -> Vec<&'static str> {
        vec!["NAME", "PARTITIONS", "REPLICAS", "ID"]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let row = |topic: &TopicSummary| {
            vec![
                topic.name.clone(),
                topic.partitions.to_string(),
                topic.replicas.to_string(),
                topic.id.clone(),
            ]
        };
        self.iter().map(row).collect()
    }

    fn json_lines(&self) -> serde_json::Result<Vec<String>> {
        self.iter().map(serde_json::to_string).collect()
    }
}

impl Report for Topic {
    fn headings(&self) -> Vec<&'static str> {
        vec!["PARTITION", "LEADER", "EPOCH", "START", "END", "REPLICAS"]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let row = |partition: &Partition| {
            let address_of = |broker: &str| {
                let at = partition.replicas.iter().find(|at| at.broker == broker);
                at.filter(|at| !at.address.is_empty())
                    .map_or(broker, |at| &at.address)
                    .to_owned()
            };
            let replicas = partition.replicas.iter().map(|replica| {
                let learner = if replica.role == "learner" {
                    " (learner)"
                } else {
                    ""
                };
                format!("{}{learner}", address_of(&replica.broker))
            });
            vec![
                partition.partition.to_string(),
                shown(partition.leader.as_deref().map(address_of)),
                shown(partition.leader_epoch),
                shown(partition.log_start_offset),
                shown(partition.high_watermark),
                replicas.collect::<Vec<_>>().join(", "),
            ]
        };
        self.partitions.iter().map(row).collect()
    }
}

impl Report for Cluster {
    fn headings(&self) -> Vec<&'static str> {
        vec![]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let controller = match (&self.controller, &self.controller_address) {
            (Some(id), Some(address)) => format!("{address} (broker {id})"),
            (Some(id), None) => format!("broker {id}"),
            (None, _) => "none".to_owned(),
        };
        [
            ("cluster", shown(self.cluster_id.as_ref())),
            ("formed", if self.formed { "yes" } else { "no" }.to_owned()),
            ("controller", controller),
            (
                "brokers",
                format!(
                    "{} alive of {}, {} founding",
                    self.brokers_alive, self.brokers, self.founding_brokers
                ),
            ),
            ("topics", self.topics.to_string()),
            ("partitions", self.partitions.to_string()),
        ]
        .into_iter()
        .chain(self.faults.iter().map(|fault| ("fault", fault.clone())))
        .map(|(name, value)| vec![name.to_owned(), value])
        .collect()
    }
}

/// The report as text, newline at the end included.
///
/// # Errors
/// The value can't be JSON.
pub fn render(report: &impl Report, output: Output) -> serde_json::Result<String> {
    let lines = match output {
        Output::Table => return Ok(table(report)),
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

fn table(report: &impl Report) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if !report.headings().is_empty() {
        table.set_header(report.headings());
    }
    table.add_rows(clean_rows(report));
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
    let text = render(report, output)
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
    fn cluster_brokers_json_has_the_designed_shape() {
        let brokers = vec![Broker {
            id: "7".to_owned(),
            name: "a".to_owned(),
            state: "alive".to_owned(),
            address: "h:1".to_owned(),
            rack: String::new(),
        }];
        let expected = serde_json::json!(
            {"id": "7", "name": "a", "state": "alive", "address": "h:1", "rack": ""}
        );
        let json: serde_json::Value =
            serde_json::from_str(&render(&brokers, Output::Json).unwrap()).unwrap();
        assert_eq!(json, serde_json::json!([expected]));
        let line: serde_json::Value =
            serde_json::from_str(render(&brokers, Output::Jsonl).unwrap().trim_end()).unwrap();
        assert_eq!(line, expected);
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
