//! Shapes of `qute cluster brokers|info`.

use serde::Serialize;

use super::{Report, Tone, shown};

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

    fn tone(&self, row: usize, column: usize) -> Tone {
        match self.get(row).map(|broker| broker.state.as_str()) {
            Some("alive") if column == 2 => Tone::Good,
            Some("dead") if column == 2 => Tone::Bad,
            Some(_) if column == 2 => Tone::Doubtful,
            _ => Tone::Plain,
        }
    }

    fn json_lines(&self) -> serde_json::Result<Vec<String>> {
        self.iter().map(serde_json::to_string).collect()
    }
}

/// The first row of a fault.
const FAULTS_ROW: usize = 6;

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

    fn tone(&self, row: usize, column: usize) -> Tone {
        let bad = match row {
            1 => !self.formed,
            2 => self.controller.is_none(),
            row => row >= FAULTS_ROW,
        };
        match column {
            0 => Tone::Faint,
            _ if bad => Tone::Bad,
            _ => Tone::Plain,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::render;
    use super::*;
    use crate::args::Output;

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
}
