//! Offsets by position or time, from the leader of each partition.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use futures::future::join_all;
use qute_proto::ids::BrokerId;
use qute_proto::v1::{self, ErrorCode, offset_query::Position};
use tokio::time::{Instant, timeout_at};

use super::{ListedOffset, OffsetSpec};
use crate::client::{Client, Shared};
use crate::error::{Error, ErrorKind, Result};
use crate::metadata::Topic;
use crate::net::{Backoff, Lane, log_client};

/// Limit of one leader's answer before the partition is asked for again.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

impl Client {
    /// Offsets of partitions of a topic: each leader is asked, leaders that move are followed
    /// until the client's call timeout.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownTopic`], [`ErrorKind::UnknownPartition`], [`ErrorKind::Timeout`].
    pub async fn list_offsets(
        &self,
        topic: &str,
        queries: &[(u32, OffsetSpec)],
    ) -> Result<Vec<ListedOffset>> {
        let deadline = Instant::now() + self.shared.config.call_timeout;
        let topic = self.shared.metadata.topic(topic, deadline).await?;
        list_offsets(&self.shared, &topic, queries, deadline).await
    }
}

/// The offsets asked for, in the order of the queries.
pub(crate) async fn list_offsets(
    shared: &Shared,
    topic: &Topic,
    queries: &[(u32, OffsetSpec)],
    deadline: Instant,
) -> Result<Vec<ListedOffset>> {
    if let Some((partition, _)) = queries.iter().find(|(p, _)| *p >= topic.partitions()) {
        return Err(unknown_partition(topic, *partition));
    }
    let mut backoff = Backoff::new(&shared.config);
    let mut found: BTreeMap<usize, ListedOffset> = BTreeMap::new();
    let mut failure = None;
    loop {
        let missing: Vec<usize> = (0..queries.len())
            .filter(|number| !found.contains_key(number))
            .collect();
        if missing.is_empty() {
            return Ok(found.into_values().collect());
        }
        let mut moved = false;
        for round in ask_leaders(shared, topic, queries, &missing, deadline).await {
            match round.outcome {
                Ok(offset) => {
                    found.insert(round.number, offset);
                }
                Err(Refusal::Final(error)) => return Err(error),
                Err(Refusal::Later(error)) => failure = Some(error),
                Err(Refusal::Moved) => moved = true,
            }
        }
        if moved || found.len() == queries.len() {
            continue;
        }
        let until = Instant::now() + backoff.step();
        let timed_out = || {
            let last = failure.as_ref().map(|error| format!("; last: {error}"));
            Error::new(
                ErrorKind::Timeout,
                format!(
                    "a leader did not answer in time{}",
                    last.unwrap_or_default()
                ),
            )
            .with_topic(&topic.name)
        };
        if until >= deadline {
            return Err(timed_out());
        }
        tokio::time::sleep_until(until).await;
        let _ = timeout_at(deadline, shared.metadata.refresh()).await;
        if let Some(now) = shared.metadata.known_topic(&topic.name)
            && now.id != topic.id
        {
            return Err(
                Error::new(ErrorKind::UnknownTopic, "the topic was made anew")
                    .with_topic(&topic.name),
            );
        }
    }
}

struct Answered {
    /// Which query.
    number: usize,
    outcome: Result<ListedOffset, Refusal>,
}

enum Refusal {
    Final(Error),
    Later(Error),
    /// A newer leader is known: ask it at once.
    Moved,
}

/// One round: every leader of the missing queries is asked at the same time.
async fn ask_leaders(
    shared: &Shared,
    topic: &Topic,
    queries: &[(u32, OffsetSpec)],
    missing: &[usize],
    deadline: Instant,
) -> Vec<Answered> {
    let view = shared.metadata.load();
    let present = view.topic_by_id(&topic.name, topic.id);
    let mut by_leader: HashMap<BrokerId, Vec<(usize, u32, OffsetSpec)>> = HashMap::new();
    let mut answers = Vec::new();
    for &number in missing {
        let Some(&(partition, spec)) = queries.get(number) else {
            continue;
        };
        match present.and_then(|topic| topic.leader(partition)) {
            Some(leader) => by_leader
                .entry(leader.broker)
                .or_default()
                .push((number, partition, spec)),
            None => answers.push(Answered {
                number,
                outcome: Err(Refusal::Later(
                    Error::new(ErrorKind::NoLeader, "no leader is known")
                        .at(&topic.name, partition),
                )),
            }),
        }
    }
    let rounds = by_leader
        .into_iter()
        .map(|(broker, asked)| ask_leader(shared, topic, broker, asked, deadline));
    answers.extend(join_all(rounds).await.into_iter().flatten());
    answers
}

async fn ask_leader(
    shared: &Shared,
    topic: &Topic,
    broker: BrokerId,
    asked: Vec<(usize, u32, OffsetSpec)>,
    deadline: Instant,
) -> Vec<Answered> {
    let queries = asked
        .iter()
        .map(|&(_, partition, spec)| v1::OffsetQuery {
            topic_id: topic.id.to_wire(),
            partition,
            position: Some(match spec {
                OffsetSpec::Start => Position::Start(true),
                OffsetSpec::End => Position::End(true),
                OffsetSpec::TimeMs(time_ms) => Position::TimeMs(time_ms),
            }),
        })
        .collect();
    let deadline = deadline.min(Instant::now() + ANSWER_TIMEOUT);
    let response = call(shared, broker, v1::ListOffsetsRequest { queries }, deadline).await;
    let answers = match response {
        Ok(response) if response.answers.len() == asked.len() => response.answers,
        other => {
            let error = other.err().unwrap_or_else(|| {
                Error::new(ErrorKind::Protocol, "the broker left queries unanswered")
            });
            let later = |&(number, ..): &(usize, u32, OffsetSpec)| Answered {
                number,
                outcome: Err(Refusal::Later(error.clone())),
            };
            return asked.iter().map(later).collect();
        }
    };
    asked
        .iter()
        .zip(answers)
        .map(|(&(number, partition, _), answer)| Answered {
            number,
            outcome: read_answer(shared, topic, partition, &answer),
        })
        .collect()
}

async fn call(
    shared: &Shared,
    broker: BrokerId,
    request: v1::ListOffsetsRequest,
    deadline: Instant,
) -> Result<v1::ListOffsetsResponse> {
    let view = shared.metadata.load();
    let address = view
        .address(broker)
        .ok_or_else(|| Error::new(ErrorKind::NoLeader, "the leader's address is not known"))?;
    let list = async |channel| log_client(channel).list_offsets(request).await;
    let asked = shared
        .connections
        .call(address, Lane::Control, deadline, list);
    Ok(asked.await?)
}

fn read_answer(
    shared: &Shared,
    topic: &Topic,
    partition: u32,
    answer: &v1::OffsetAnswer,
) -> Result<ListedOffset, Refusal> {
    let Some(error) = &answer.error else {
        let bounds = answer.bounds.unwrap_or(v1::OffsetBounds {
            log_start_offset: answer.offset,
            high_watermark: answer.offset,
        });
        return Ok(ListedOffset {
            partition,
            offset: answer.offset,
            log_start_offset: bounds.log_start_offset,
            high_watermark: bounds.high_watermark,
            leader_epoch: answer.leader_epoch,
        });
    };
    if shared
        .metadata
        .learn(topic, partition, error.leader_hint.as_ref())
    {
        return Err(Refusal::Moved);
    }
    let told = Error::told(error).at(&topic.name, partition);
    Err(match error.code() {
        ErrorCode::UnknownTopic if error.authoritative => Refusal::Final(told),
        ErrorCode::InvalidArgument | ErrorCode::WrongCluster => Refusal::Final(told),
        _ => Refusal::Later(told),
    })
}

pub(crate) fn unknown_partition(topic: &Topic, partition: u32) -> Error {
    Error::new(
        ErrorKind::UnknownPartition,
        format!("the topic has {} partitions", topic.partitions()),
    )
    .at(&topic.name, partition)
}
