//! `qute topic create|list|describe|alter|config|add-partitions|delete`. Settings are in `settings`.

mod settings;

use qute_client::{TopicDescription, TopicSpec};
use qute_proto::topic::check_name;
use serde::Serialize;

use crate::args::{self, Global, Output};
use crate::connection::{connect, connect_to, explain, failure};
use crate::exit::{Exit, Failure};
use crate::output::{self, Partition, Replica, Report, Topic, TopicSummary, say};
use crate::progress::waiting;

/// Runs the command.
///
/// # Errors
/// The cluster refuses, or does not answer in time.
pub async fn run(command: args::Topic, global: &Global) -> Result<Exit, Failure> {
    match command {
        args::Topic::Create {
            name,
            partitions,
            replicas,
            config,
        } => {
            let mut spec = TopicSpec::new(name);
            spec.partitions = partitions;
            spec.replicas = replicas;
            spec.config = settings::unique(config, "--config")?;
            create(spec, global).await
        }
        args::Topic::List { internal } => list(internal, global).await,
        args::Topic::Alter { name, set, unset } => settings::alter(&name, set, unset, global).await,
        args::Topic::Config {
            name,
            settings: named,
        } => settings::config(&name, &named, global).await,
        args::Topic::Describe { name } => describe(&name, global).await,
        args::Topic::AddPartitions { name, partitions } => {
            add_partitions(&name, partitions, global).await
        }
        args::Topic::Delete { name } => delete(&name, global).await,
    }
}

/// Refused here, before anything connects.
fn checked(name: &str) -> Result<(), Failure> {
    check_name(name).map_err(|error| Failure::error(error.to_string()).hint("choose another name"))
}

async fn create(spec: TopicSpec, global: &Global) -> Result<Exit, Failure> {
    checked(&spec.name)?;
    let (target, client) = connect_to(global).await?;
    let what = format!("creating topic {}", spec.name);
    let topic = waiting(what, client.create_topic(spec))
        .await
        .map_err(|error| failure(&error))?;
    match global.output {
        Output::Json | Output::Jsonl => output::print(&described(topic), global.output),
        Output::Table | Output::Raw => {
            let topic = summary(&topic);
            say(format_args!(
                "created topic {}{}: {}, {}",
                topic.name,
                target.source.place(),
                counted(topic.partitions, "partition"),
                counted(topic.replicas, "replica")
            ));
            Ok(Exit::Done)
        }
    }
}

fn counted(number: usize, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {what}{plural}")
}

async fn list(internal: bool, global: &Global) -> Result<Exit, Failure> {
    let client = connect(global).await?;
    let topics = match internal {
        true => waiting("listing topics", client.list_all_topics()).await,
        false => waiting("listing topics", client.list_topics()).await,
    };
    let topics = topics.map_err(|error| failure(&error))?;
    let topics: Vec<TopicSummary> = topics.iter().map(summary).collect();
    output::print(&topics, global.output)
}

async fn describe(name: &str, global: &Global) -> Result<Exit, Failure> {
    let client = connect(global).await?;
    match waiting(
        format!("describing topic {name}"),
        client.describe_topic(name),
    )
    .await
    {
        Ok(topic) => output::print(&described(topic), global.output),
        Err(error) => Err(explain(&client, &error).await),
    }
}

async fn add_partitions(name: &str, partitions: u32, global: &Global) -> Result<Exit, Failure> {
    checked(name)?;
    let (target, client) = connect_to(global).await?;
    let adding = client.add_partitions(name, partitions);
    let topic = match waiting(format!("adding partitions to topic {name}"), adding).await {
        Ok(topic) => topic,
        Err(error) => return Err(explain(&client, &error).await),
    };
    match global.output {
        Output::Json | Output::Jsonl => output::print(&described(topic), global.output),
        Output::Table | Output::Raw => {
            let number = counted(topic.partitions.len(), "partition");
            let place = target.source.place();
            say(format_args!("topic {name}{place} has {number} now"));
            Ok(Exit::Done)
        }
    }
}

async fn delete(name: &str, global: &Global) -> Result<Exit, Failure> {
    checked(name)?;
    let (target, client) = connect_to(global).await?;
    let deleting = client.delete_topic(name);
    if let Err(error) = waiting(format!("deleting topic {name}"), deleting).await {
        return Err(explain(&client, &error).await);
    }
    match global.output {
        Output::Json | Output::Jsonl => output::print(&Deleted { deleted: name }, global.output),
        Output::Table | Output::Raw => {
            say(format_args!(
                "deleted topic {name}{}",
                target.source.place()
            ));
            Ok(Exit::Done)
        }
    }
}

/// What was deleted, for programs.
#[derive(Serialize)]
struct Deleted<'a> {
    deleted: &'a str,
}

impl Report for Deleted<'_> {
    fn headings(&self) -> Vec<&'static str> {
        vec![]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        vec![vec![self.deleted.to_owned()]]
    }
}

fn summary(topic: &TopicDescription) -> TopicSummary {
    TopicSummary {
        name: topic.name.clone(),
        id: topic.id.to_string(),
        partitions: topic.partitions.len(),
        replicas: topic
            .partitions
            .iter()
            .map(|partition| partition.replicas.len())
            .max()
            .unwrap_or(0),
    }
}

fn described(topic: TopicDescription) -> Topic {
    let partitions = topic.partitions.into_iter().map(|partition| Partition {
        partition: partition.partition,
        leader: partition.leader.map(|broker| broker.to_string()),
        leader_epoch: partition.leader.map(|_| partition.leader_epoch),
        log_start_offset: partition.log_start_offset,
        high_watermark: partition.high_watermark,
        replicas: partition
            .replicas
            .into_iter()
            .map(|replica| Replica {
                broker: replica.broker.to_string(),
                address: replica.address.unwrap_or_default(),
                role: replica.role.to_string(),
            })
            .collect(),
    });
    Topic {
        name: topic.name,
        id: topic.id.to_string(),
        partitions: partitions.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_against_the_rules_are_refused_as_errors() {
        assert_eq!(checked("../x").unwrap_err().exit, Exit::Error);
        assert_eq!(checked("flights"), Ok(()));
    }
}
