//! `qute topic create|list|describe|add-partitions|delete`.

use std::collections::BTreeMap;

use qute_client::{TopicDescription, TopicSpec};
use qute_proto::topic::check_name;

use crate::args::{self, Global, Output};
use crate::connection::{connect, failure};
use crate::exit::{Exit, Failure};
use crate::output::{self, Partition, Replica, Topic, TopicSummary, say};

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
            spec.config = settings(config)?;
            create(spec, global).await
        }
        args::Topic::List => list(global).await,
        args::Topic::Describe { name } => describe(&name, global).await,
        args::Topic::AddPartitions { name, partitions } => {
            add_partitions(&name, partitions, global).await
        }
        args::Topic::Delete { name } => delete(&name, global).await,
    }
}

/// # Errors
/// One setting given twice with different values.
fn settings(pairs: Vec<(String, String)>) -> Result<BTreeMap<String, String>, Failure> {
    let mut settings = BTreeMap::new();
    for (key, value) in pairs {
        if let Some(before) = settings.insert(key.clone(), value.clone())
            && before != value
        {
            return Err(Failure::usage(format!(
                "--config {key} is given twice, as {before} and as {value}"
            )));
        }
    }
    Ok(settings)
}

/// Refused here, before anything connects.
fn checked(name: &str) -> Result<(), Failure> {
    check_name(name).map_err(|error| Failure::error(error.to_string()))
}

async fn create(spec: TopicSpec, global: &Global) -> Result<Exit, Failure> {
    checked(&spec.name)?;
    let client = connect(global).await?;
    let topic = client
        .create_topic(spec)
        .await
        .map_err(|error| failure(&error))?;
    match global.output {
        Output::Json | Output::Jsonl => output::print(&described(topic), global.output),
        Output::Table | Output::Raw => {
            let topic = summary(&topic);
            say(format_args!(
                "created topic {}: {}, {}",
                topic.name,
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

async fn list(global: &Global) -> Result<Exit, Failure> {
    let client = connect(global).await?;
    let topics = client
        .list_topics()
        .await
        .map_err(|error| failure(&error))?;
    let topics: Vec<TopicSummary> = topics.iter().map(summary).collect();
    output::print(&topics, global.output)
}

async fn describe(name: &str, global: &Global) -> Result<Exit, Failure> {
    let client = connect(global).await?;
    let topic = client
        .describe_topic(name)
        .await
        .map_err(|error| failure(&error))?;
    output::print(&described(topic), global.output)
}

async fn add_partitions(name: &str, partitions: u32, global: &Global) -> Result<Exit, Failure> {
    checked(name)?;
    let client = connect(global).await?;
    let topic = client
        .add_partitions(name, partitions)
        .await
        .map_err(|error| failure(&error))?;
    match global.output {
        Output::Json | Output::Jsonl => output::print(&described(topic), global.output),
        Output::Table | Output::Raw => {
            let number = counted(topic.partitions.len(), "partition");
            say(format_args!("topic {name} has {number} now"));
            Ok(Exit::Done)
        }
    }
}

async fn delete(name: &str, global: &Global) -> Result<Exit, Failure> {
    checked(name)?;
    let client = connect(global).await?;
    client
        .delete_topic(name)
        .await
        .map_err(|error| failure(&error))?;
    say(format_args!("deleted topic {name}"));
    Ok(Exit::Done)
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
    fn settings_given_twice_differently_are_a_usage_error() {
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let same = settings(vec![pair("a", "1"), pair("b", "2"), pair("a", "1")]).unwrap();
        assert_eq!(same.len(), 2);
        let error = settings(vec![pair("a", "1"), pair("a", "2")]).unwrap_err();
        assert_eq!(error.exit, Exit::Usage);
    }

    #[test]
    fn names_against_the_rules_are_refused_as_errors() {
        assert_eq!(checked("../x").unwrap_err().exit, Exit::Error);
        assert_eq!(checked("flights"), Ok(()));
    }
}
