//! What the group commands print. Scripts depend on the JSON shapes; ids are strings there.

use qute_client::group::{
    AssignorName, GroupDescription, GroupListing, GroupMember, OffsetMove, PartitionLag,
};
use serde::Serialize;

use crate::output::Report;

/// A group, as `group list` shows it.
#[derive(Clone, Debug, Serialize)]
pub struct Listed {
    /// Its name.
    pub group: String,
    /// `empty`, `rebalancing` or `stable`.
    pub state: String,
    /// How many members it has.
    pub members: u32,
    /// Partitions with a committed offset.
    pub offsets: u32,
    /// Rises with each change of members and of what they read.
    pub generation: u64,
    /// What assignments are computed with; null without members.
    pub assignor: Option<Assignor>,
}

/// An assignor.
#[derive(Clone, Debug, Serialize)]
pub struct Assignor {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: u32,
}

/// A partition of a group. What is not known is null.
#[derive(Clone, Debug, Serialize)]
pub struct Partition {
    /// Name of the topic; null: it is gone.
    pub topic: Option<String>,
    /// Its incarnation.
    pub topic_id: String,
    /// Number, from 0.
    pub partition: u32,
    /// The next offset that the group reads; null: nothing is committed.
    pub committed: Option<u64>,
    /// First readable offset.
    pub log_start_offset: Option<u64>,
    /// One past the last committed record.
    pub high_watermark: Option<u64>,
    /// Records that are there and that the group has yet to read.
    pub lag: Option<u64>,
    /// Who holds it.
    pub member: Option<String>,
}

/// A member of a group.
#[derive(Clone, Debug, Serialize)]
pub struct Member {
    /// Its id.
    pub id: String,
    /// Its stable name, if it is static.
    pub instance: Option<String>,
    /// Name of its client.
    pub client: String,
    /// Its rack; empty if it has none.
    pub rack: String,
    /// How long it is waited for when it is silent.
    pub session_timeout_ms: u128,
    /// Topics that it reads; ids of those that are gone.
    pub topics: Vec<String>,
    /// What the assignment gives to it, as `topic/partition`.
    pub targets: Vec<String>,
    /// What it holds, as `topic/partition`.
    pub claims: Vec<String>,
}

/// A group, as `group describe` shows it.
#[derive(Clone, Debug, Serialize)]
pub struct Described {
    /// Its name.
    pub group: String,
    /// `empty`, `rebalancing` or `stable`.
    pub state: String,
    /// Rises with each change of members and of what they read.
    pub generation: u64,
    /// What assignments are computed with; null without members.
    pub assignor: Option<Assignor>,
    /// Broker id of its coordinator.
    pub coordinator: String,
    /// Where clients reach that broker; null if unknown.
    pub coordinator_address: Option<String>,
    /// Epoch of that leadership.
    pub coordinator_epoch: u64,
    /// Its members, in the order in which they joined.
    pub members: Vec<Member>,
    /// Its partitions.
    pub partitions: Vec<Partition>,
}

/// What a reset does to a partition.
#[derive(Clone, Debug, Serialize)]
pub struct Move {
    /// Name of the topic; null: it is gone.
    pub topic: Option<String>,
    /// Its incarnation.
    pub topic_id: String,
    /// Number, from 0.
    pub partition: u32,
    /// Committed before; null: nothing.
    pub from: Option<u64>,
    /// Committed afterwards; null: nothing.
    pub to: Option<u64>,
    /// What was asked for is not there, and `to` is the nearest that is.
    pub clamped: bool,
    /// Who holds the partition.
    pub member: Option<String>,
}

/// A reset, as `group reset` shows it.
#[derive(Clone, Debug, Serialize)]
pub struct Planned {
    /// The group.
    pub group: String,
    /// It was done.
    pub executed: bool,
    /// What becomes of each partition.
    pub moves: Vec<Move>,
}

impl From<&AssignorName> for Assignor {
    fn from(name: &AssignorName) -> Self {
        Self {
            name: name.name.clone(),
            version: name.version,
        }
    }
}

impl From<&GroupListing> for Listed {
    fn from(listing: &GroupListing) -> Self {
        Self {
            group: listing.group.clone(),
            state: listing.state.to_string(),
            members: listing.members,
            offsets: listing.offsets,
            generation: listing.generation,
            assignor: listing.assignor.as_ref().map(Assignor::from),
        }
    }
}

impl From<&PartitionLag> for Partition {
    fn from(lag: &PartitionLag) -> Self {
        Self {
            topic: lag.partition.topic.as_ref().map(ToString::to_string),
            topic_id: lag.partition.topic_id.to_string(),
            partition: lag.partition.partition,
            committed: lag.committed,
            log_start_offset: lag.bounds.map(|bounds| bounds.log_start_offset),
            high_watermark: lag.bounds.map(|bounds| bounds.high_watermark),
            lag: lag.lag,
            member: lag.member.map(|member| member.to_string()),
        }
    }
}

impl From<&GroupMember> for Member {
    fn from(member: &GroupMember) -> Self {
        let topic = |topic: &qute_client::group::SubscribedTopic| match &topic.topic {
            Some(name) => name.to_string(),
            None => topic.topic_id.to_string(),
        };
        Self {
            id: member.id.to_string(),
            instance: member.instance.clone(),
            client: member.client.clone(),
            rack: member.rack.clone(),
            session_timeout_ms: member.session_timeout.as_millis(),
            topics: member.topics.iter().map(topic).collect(),
            targets: member.targets.iter().map(ToString::to_string).collect(),
            claims: member.claims.iter().map(ToString::to_string).collect(),
        }
    }
}

impl Described {
    /// The group with the lag of its partitions; `coordinator_address` where the coordinator is.
    pub fn new(
        group: &GroupDescription,
        lags: &[PartitionLag],
        coordinator_address: Option<String>,
    ) -> Self {
        let Listed {
            group: name,
            state,
            generation,
            assignor,
            ..
        } = Listed::from(&group.listing);
        Self {
            group: name,
            state,
            generation,
            assignor,
            coordinator: group.coordinator.to_string(),
            coordinator_address,
            coordinator_epoch: group.coordinator_epoch,
            members: group.members.iter().map(Member::from).collect(),
            partitions: lags.iter().map(Partition::from).collect(),
        }
    }

    /// What is to be said of the group itself, name by value.
    pub fn summary(&self) -> Vec<(&'static str, String)> {
        let address = self.coordinator_address.as_deref();
        let coordinator = match address {
            Some(address) => format!("{address} (broker {})", self.coordinator),
            None => format!("broker {}", self.coordinator),
        };
        vec![
            ("group", self.group.clone()),
            ("state", self.state.clone()),
            ("generation", self.generation.to_string()),
            ("assignor", assignor(self.assignor.as_ref())),
            (
                "coordinator",
                format!("{coordinator}, epoch {}", self.coordinator_epoch),
            ),
        ]
    }
}

impl From<&OffsetMove> for Move {
    fn from(planned: &OffsetMove) -> Self {
        Self {
            topic: planned.partition.topic.as_ref().map(ToString::to_string),
            topic_id: planned.partition.topic_id.to_string(),
            partition: planned.partition.partition,
            from: planned.from,
            to: planned.to,
            clamped: planned.clamped,
            member: planned.member.map(|member| member.to_string()),
        }
    }
}

fn shown<T: ToString>(known: Option<T>) -> String {
    known.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

fn assignor(assignor: Option<&Assignor>) -> String {
    shown(assignor.map(|assignor| format!("{} {}", assignor.name, assignor.version)))
}

/// Its name, or the id of one that is gone, which a file of offsets passes over as a comment.
fn topic(name: Option<&String>, id: &str) -> String {
    name.cloned().unwrap_or_else(|| format!("#{id}"))
}

fn lines<T: Serialize>(items: &[T]) -> serde_json::Result<Vec<String>> {
    items.iter().map(serde_json::to_string).collect()
}

impl Report for Vec<Listed> {
    fn headings(&self) -> Vec<&'static str> {
        vec![
            "GROUP",
            "STATE",
            "MEMBERS",
            "OFFSETS",
            "GENERATION",
            "ASSIGNOR",
        ]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let row = |group: &Listed| {
            vec![
                group.group.clone(),
                group.state.clone(),
                group.members.to_string(),
                group.offsets.to_string(),
                group.generation.to_string(),
                assignor(group.assignor.as_ref()),
            ]
        };
        self.iter().map(row).collect()
    }

    fn json_lines(&self) -> serde_json::Result<Vec<String>> {
        lines(self)
    }
}

impl Report for Vec<Partition> {
    fn headings(&self) -> Vec<&'static str> {
        vec!["TOPIC", "PARTITION", "COMMITTED", "END", "LAG", "MEMBER"]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let row = |partition: &Partition| {
            vec![
                topic(partition.topic.as_ref(), &partition.topic_id),
                partition.partition.to_string(),
                shown(partition.committed),
                shown(partition.high_watermark),
                shown(partition.lag),
                shown(partition.member.as_ref()),
            ]
        };
        self.iter().map(row).collect()
    }

    fn json_lines(&self) -> serde_json::Result<Vec<String>> {
        lines(self)
    }
}

impl Report for Vec<Member> {
    fn headings(&self) -> Vec<&'static str> {
        vec!["MEMBER", "INSTANCE", "CLIENT", "RACK", "SESSION", "HOLDS"]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let row = |member: &Member| {
            let holds = match member.claims.len() {
                0 => "nothing".to_owned(),
                1..=4 => member.claims.join(", "),
                more => format!("{more} partitions"),
            };
            vec![
                member.id.clone(),
                shown(member.instance.as_ref()),
                member.client.clone(),
                member.rack.clone(),
                format!("{} ms", member.session_timeout_ms),
                holds,
            ]
        };
        self.iter().map(row).collect()
    }
}

/// The whole of it, for the forms that are no tables.
impl Report for Described {
    fn headings(&self) -> Vec<&'static str> {
        vec![]
    }

    /// For `raw`: what each row is comes first.
    fn rows(&self) -> Vec<Vec<String>> {
        let kind = |kind: &str, row: Vec<String>| [vec![kind.to_owned()], row].concat();
        let summary = self.summary().into_iter();
        let summary = summary.map(|(name, value)| vec![name.to_owned(), value]);
        let members = self.members.rows().into_iter();
        let members = members.map(|row| kind("member", row));
        let partitions = self.partitions.rows().into_iter();
        let partitions = partitions.map(|row| kind("partition", row));
        summary.chain(members).chain(partitions).collect()
    }
}

impl Report for Planned {
    fn headings(&self) -> Vec<&'static str> {
        vec!["TOPIC", "PARTITION", "FROM", "TO", "NOTE"]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let row = |planned: &Move| {
            let mut notes = Vec::new();
            if planned.clamped {
                notes.push("nearest there is".to_owned());
            }
            if let Some(member) = &planned.member {
                notes.push(format!("held by {member}"));
            }
            vec![
                topic(planned.topic.as_ref(), &planned.topic_id),
                planned.partition.to_string(),
                shown(planned.from),
                shown(planned.to),
                notes.join(", "),
            ]
        };
        self.moves.iter().map(row).collect()
    }

    fn json_lines(&self) -> serde_json::Result<Vec<String>> {
        lines(&self.moves)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Output;
    use crate::output::render;

    fn partition(topic: Option<&str>, committed: Option<u64>) -> Partition {
        Partition {
            topic: topic.map(str::to_owned),
            topic_id: "6a0e".to_owned(),
            partition: 3,
            committed,
            log_start_offset: Some(0),
            high_watermark: Some(50),
            lag: committed.map(|committed| 50 - committed),
            member: None,
        }
    }

    #[test]
    fn lag_as_raw_rows_is_what_a_reset_reads() {
        let lags = vec![
            partition(Some("orders"), Some(42)),
            partition(Some("new"), None),
            partition(None, Some(7)),
        ];
        let raw = render(&lags, Output::Raw).unwrap();
        assert_eq!(
            raw,
            "orders\t3\t42\t50\t8\t-\nnew\t3\t-\t50\t-\t-\n#6a0e\t3\t7\t50\t43\t-\n"
        );
        let offsets = crate::text::offsets_file::parse(&raw).unwrap();
        assert_eq!(offsets, [(("orders".to_owned(), 3), 42)].into());
    }

    #[test]
    fn deleted_topic_is_shown_by_its_id() {
        let table = render(&vec![partition(None, Some(1))], Output::Table).unwrap();
        assert!(table.contains("#6a0e"), "{table}");
        let json = render(&vec![partition(None, Some(1))], Output::Json).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert!(json[0]["topic"].is_null());
        assert_eq!(json[0]["topic_id"], "6a0e");
    }

    #[test]
    fn plan_says_what_is_clamped_and_who_holds_it() {
        let planned = Planned {
            group: "g".to_owned(),
            executed: false,
            moves: vec![Move {
                topic: Some("orders".to_owned()),
                topic_id: "6a0e".to_owned(),
                partition: 0,
                from: None,
                to: Some(50),
                clamped: true,
                member: Some("m1".to_owned()),
            }],
        };
        assert_eq!(
            render(&planned, Output::Raw).unwrap(),
            "orders\t0\t-\t50\tnearest there is, held by m1\n"
        );
        let json = render(&planned, Output::Json).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["executed"], false);
        assert_eq!(json["moves"][0]["to"], 50);
    }
}
