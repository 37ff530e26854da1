//! Offsets by position or time, from the leader of each partition.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use qute_proto::ids::{BrokerId, TopicId};
use qute_proto::v1::{self, ErrorCode, offset_query::Position};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::{ListedOffset, OffsetQuery, OffsetSpec};
use crate::client::{Client, Shared};
use crate::error::{Error, ErrorKind, Result};
use crate::metadata::{Leader, Metadata, Topic};
use crate::net::{Backoff, Lane, log_client};

/// Limit of one leader's answer before the partition is asked for again: more than what a leader gives
/// a partition that has lost its quorum (the broker's `LIST_WITHIN`), so that it can answer for the others.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

impl Client {
    /// Offsets of partitions of a topic, in the order of the queries: each leader is asked, leaders
    /// that move are followed until the client's call timeout.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownTopic`], [`ErrorKind::UnknownPartition`], [`ErrorKind::TopicRecreated`],
    /// [`ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// Nothing is lost: it only reads.
    pub async fn list_offsets(
        &self,
        topic: &str,
        queries: &[(u32, OffsetSpec)],
    ) -> Result<Vec<ListedOffset>> {
        let deadline = Instant::now() + self.shared.config.call_timeout;
        self.shared.metadata.first_view(deadline).await?;
        let topic = self.shared.metadata.topic(topic, deadline).await?;
        list_offsets(&self.shared, &topic, queries, deadline).await
    }

    /// Offsets of partitions of many topics at once, in the order of the queries, each with a result
    /// of its own: what one topic lacks does not hide the others. Every leader is asked once for all
    /// that it leads, and leaders that move are followed until the client's call timeout.
    ///
    /// The errors are those of [`Client::list_offsets`].
    ///
    /// # Cancel safety
    /// Nothing is lost: it only reads.
    pub async fn list_offsets_many(&self, queries: &[OffsetQuery]) -> Vec<Result<ListedOffset>> {
        let deadline = Instant::now() + self.shared.config.call_timeout;
        let names: BTreeSet<&str> = queries.iter().map(|query| query.topic.as_str()).collect();
        let found = names.into_iter().map(async |name| {
            let topic = match self.shared.metadata.first_view(deadline).await {
                Ok(()) => self.shared.metadata.topic(name, deadline).await,
                Err(error) => Err(error),
            };
            (name, topic)
        });
        let topics: HashMap<&str, Result<Arc<Topic>>> = join_all(found).await.into_iter().collect();
        let mut results: Vec<Option<Result<ListedOffset>>> = vec![None; queries.len()];
        let (mut asked, mut places) = (Vec::new(), Vec::new());
        for (place, query) in queries.iter().enumerate() {
            let refusal = match topics.get(query.topic.as_str()) {
                Some(Ok(topic)) if query.partition < topic.partitions() => {
                    asked.push(Query {
                        topic,
                        partition: query.partition,
                        spec: query.spec,
                    });
                    places.push(place);
                    continue;
                }
                Some(Ok(topic)) => unknown_partition(topic, query.partition),
                Some(Err(error)) => error.clone(),
                // Every name was looked up.
                None => Error::new(ErrorKind::UnknownTopic, "the topic does not exist"),
            };
            if let Some(result) = results.get_mut(place) {
                *result = Some(Err(refusal));
            }
        }
        let answers = list(&self.shared, &asked, false, deadline).await;
        for (place, answer) in places.into_iter().zip(answers) {
            if let Some(result) = results.get_mut(place) {
                *result = Some(answer);
            }
        }
        results.into_iter().flatten().collect()
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
    let listed = list(shared, &queries_of(topic, queries), true, deadline).await;
    listed.into_iter().collect()
}

/// The same with a result for each query: what keeps one partition does not hide the others.
pub(crate) async fn list_each_offset(
    shared: &Shared,
    topic: &Topic,
    queries: &[(u32, OffsetSpec)],
    deadline: Instant,
) -> Vec<Result<ListedOffset>> {
    list(shared, &queries_of(topic, queries), false, deadline).await
}

fn queries_of<'a>(topic: &'a Topic, queries: &[(u32, OffsetSpec)]) -> Vec<Query<'a>> {
    let query = |&(partition, spec): &(u32, OffsetSpec)| Query {
        topic,
        partition,
        spec,
    };
    queries.iter().map(query).collect()
}

#[derive(Clone, Copy)]
struct Query<'a> {
    topic: &'a Topic,
    partition: u32,
    spec: OffsetSpec,
}

/// One result per query, in their order; with `all` a final refusal of one ends them all, and is
/// the only result.
async fn list(
    shared: &Shared,
    queries: &[Query<'_>],
    all: bool,
    deadline: Instant,
) -> Vec<Result<ListedOffset>> {
    let mut backoff = Backoff::new(&shared.config);
    let mut done: BTreeMap<usize, Result<ListedOffset>> = BTreeMap::new();
    let mut failures: HashMap<usize, Error> = HashMap::new();
    let mut doubts = Doubts::default();
    let mut views = shared.metadata.subscribe();
    loop {
        views.mark_unchanged();
        let view = shared.metadata.load();
        let mut missing: Vec<(usize, Query<'_>)> = queries
            .iter()
            .copied()
            .enumerate()
            .filter(|(number, _)| !done.contains_key(number))
            .collect();
        if missing.is_empty() {
            return done.into_values().collect();
        }
        let mut moved = false;
        for answer in ask_leaders(shared, &view, &missing, deadline).await {
            match answer.outcome {
                Ok(offset) => {
                    done.insert(answer.number, Ok(offset));
                }
                Err(Refusal::Final(error)) if all => return vec![Err(error)],
                Err(Refusal::Final(error)) => {
                    done.insert(answer.number, Err(error));
                }
                Err(Refusal::Later(error)) => {
                    failures.insert(answer.number, error);
                }
                Err(Refusal::Moved) => moved = true,
            }
        }
        if moved || done.len() == queries.len() {
            continue;
        }
        missing.retain(|(number, _)| !done.contains_key(number));
        for (_, query) in &missing {
            doubts.look_into(shared, query.topic);
        }
        let now = Instant::now();
        let until = now + backoff.step_within(shared.connections.budget(), now);
        if until >= deadline {
            for (number, query) in missing {
                let late = || Err(timed_out(&query, failures.get(&number)));
                done.entry(number).or_insert_with(late);
            }
            return done.into_values().collect();
        }
        let is_newer = |(_, query): &(usize, Query<'_>)| {
            let asked = query.leader(&view);
            let metadata = &shared.metadata;
            metadata.newer_leader(query.topic, query.partition, asked)
        };
        let news = async {
            // The sender is the client's: never closed.
            while views.changed().await.is_ok() && !missing.iter().any(is_newer) {}
        };
        let pause = async {
            if timeout_at(until, news).await.is_err() {
                // Nobody has told of a new leader: ask.
                let _ = timeout_at(deadline, shared.metadata.refresh()).await;
            }
        };
        tokio::pin!(pause);
        while done.len() < queries.len() {
            let (id, error) = tokio::select! {
                gone = doubts.gone() => gone,
                () = &mut pause => break,
            };
            for (number, query) in missing.iter().filter(|(_, query)| query.topic.id == id) {
                let error = error.clone().at(&query.topic.name, query.partition);
                if all {
                    return vec![Err(error)];
                }
                done.insert(*number, Err(error));
            }
        }
    }
}

/// Topics that the view lacks or knows anew. What became of them is found out while the rounds for
/// the others go on.
#[derive(Default)]
struct Doubts {
    in_question: HashSet<TopicId>,
    asked: JoinSet<(TopicId, Option<Error>)>,
}

impl Doubts {
    /// Asks about the topic if there is cause to, and nobody asks yet.
    fn look_into(&mut self, shared: &Shared, topic: &Topic) {
        let doubtful = shared.metadata.incarnation(topic).error(topic).is_some();
        if doubtful && self.in_question.insert(topic.id) {
            let (metadata, topic) = (Arc::clone(&shared.metadata), topic.clone());
            self.asked.spawn(async move {
                let told = metadata.confirm(&topic).await;
                (topic.id, told.and_then(|told| told.error(&topic)))
            });
        }
    }

    /// The next topic that is gone, with what to say of it; none for ever if none is.
    async fn gone(&mut self) -> (TopicId, Error) {
        loop {
            match self.asked.join_next().await {
                Some(Ok((id, told))) => {
                    self.in_question.remove(&id);
                    if let Some(error) = told {
                        return (id, error);
                    }
                }
                Some(Err(_)) => {}
                None => return std::future::pending().await,
            }
        }
    }
}

fn timed_out(query: &Query<'_>, failure: Option<&Error>) -> Error {
    let last = failure.map(|error| format!("; last: {error}"));
    let error = Error::new(
        ErrorKind::Timeout,
        format!(
            "the leader did not answer in time{}",
            last.unwrap_or_default()
        ),
    )
    .at(&query.topic.name, query.partition);
    match failure {
        Some(failure) => error.with_endpoints(failure.endpoints().to_vec()),
        None => error,
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
    view: &Metadata,
    missing: &[(usize, Query<'_>)],
    deadline: Instant,
) -> Vec<Answered> {
    let mut by_leader: HashMap<BrokerId, Vec<(usize, Query<'_>)>> = HashMap::new();
    let mut answers = Vec::new();
    for &(number, query) in missing {
        match query.leader(view) {
            Some(leader) => by_leader
                .entry(leader.broker)
                .or_default()
                .push((number, query)),
            None => answers.push(Answered {
                number,
                outcome: Err(Refusal::Later(
                    Error::new(ErrorKind::NoLeader, "no leader is known")
                        .at(&query.topic.name, query.partition),
                )),
            }),
        }
    }
    let rounds = by_leader
        .into_iter()
        .map(|(broker, asked)| ask_leader(shared, broker, asked, deadline));
    answers.extend(join_all(rounds).await.into_iter().flatten());
    answers
}

async fn ask_leader(
    shared: &Shared,
    broker: BrokerId,
    asked: Vec<(usize, Query<'_>)>,
    deadline: Instant,
) -> Vec<Answered> {
    let queries = asked.iter().map(|(_, query)| query.to_wire()).collect();
    let deadline = deadline.min(Instant::now() + ANSWER_TIMEOUT);
    let response = call(shared, broker, v1::ListOffsetsRequest { queries }, deadline).await;
    let answers = match response {
        Ok(response) if response.answers.len() == asked.len() => response.answers,
        other => {
            let error = other.err().unwrap_or_else(|| {
                Error::new(ErrorKind::Protocol, "the broker left queries unanswered")
            });
            let later = |&(number, _): &(usize, Query<'_>)| Answered {
                number,
                outcome: Err(Refusal::Later(error.clone())),
            };
            return asked.iter().map(later).collect();
        }
    };
    asked
        .iter()
        .zip(answers)
        .map(|((number, query), answer)| Answered {
            number: *number,
            outcome: read_answer(shared, query, &answer),
        })
        .collect()
}

impl Query<'_> {
    fn leader(&self, view: &Metadata) -> Option<Leader> {
        view.topic_by_id(&self.topic.name, self.topic.id)?
            .leader(self.partition)
    }

    fn to_wire(self) -> v1::OffsetQuery {
        v1::OffsetQuery {
            topic_id: self.topic.id.to_wire(),
            partition: self.partition,
            position: Some(match self.spec {
                OffsetSpec::Start => Position::Start(true),
                OffsetSpec::End => Position::End(true),
                OffsetSpec::TimeMs(time_ms) => Position::TimeMs(time_ms),
            }),
        }
    }
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
    query: &Query<'_>,
    answer: &v1::OffsetAnswer,
) -> Result<ListedOffset, Refusal> {
    let Query {
        topic, partition, ..
    } = *query;
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
