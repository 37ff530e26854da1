//! Shapes of `qute topic ...`.

use serde::Serialize;

use super::{Report, Tone, shown};

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

    fn tone(&self, row: usize, column: usize) -> Tone {
        match self.partitions.get(row) {
            Some(partition) if column == 1 && partition.leader.is_none() => Tone::Bad,
            _ => Tone::Plain,
        }
    }
}
