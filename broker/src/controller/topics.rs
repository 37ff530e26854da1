//! Creating, growing and deleting topics, at the leader of `__cluster`.
//!
//! What can be refused without asking anybody (names, numbers, settings) is refused by any
//! broker; everything else by the confirmed leader only, so its word is final.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use qute_proto::ids::{BrokerId, TopicId};
use qute_proto::internal::{
    AddPartitionsCommand, AlterTopicCommand, BrokerList, ClusterCommand, CreateTopicCommand,
    DeleteTopicCommand, cluster_command::Command,
};
use qute_proto::topic;
use qute_proto::v1::{self, ErrorCode};
use tokio::sync::watch;

use super::placement::{self, PARTITIONS_DEFAULT, PlacementError};
use super::proposer::{Decided, Proposer, error};
use super::settings::{self, SettingsError};
use super::view::{ClusterView, Topic};

/// How long the controller may take to decide.
pub(super) const DECIDE_DEADLINE: Duration = Duration::from_secs(8);

fn encode(command: Command) -> Bytes {
    ClusterCommand {
        command: Some(command),
    }
    .encode_to_vec()
    .into()
}

fn refused(problem: PlacementError) -> v1::Error {
    let code = match problem {
        PlacementError::NotEnoughBrokers { .. } => ErrorCode::NotEnoughBrokers,
        PlacementError::Replicas(_) | PlacementError::Partitions(_) => ErrorCode::InvalidArgument,
    };
    error(code, problem.to_string())
}

/// The same where brokers are looked at: a cluster whose founding brokers are still coming is worth
/// another try.
pub(super) fn not_placed(problem: PlacementError, view: &ClusterView) -> v1::Error {
    if problem.passes_with(placement::awaited(view)) {
        let text = format!("{problem}: not every founding broker has registered itself yet");
        return error(ErrorCode::NotReady, text);
    }
    refused(problem)
}

pub(super) fn lists(placed: Vec<Vec<BrokerId>>) -> Vec<BrokerList> {
    let list = |brokers: Vec<BrokerId>| BrokerList {
        broker_ids: brokers.into_iter().map(|broker| broker.0).collect(),
    };
    placed.into_iter().map(list).collect()
}

/// What belongs to the cluster itself is not for programs to change.
fn refuse_internal(name: &str, what: &str) -> Result<(), v1::Error> {
    if name != topic::GROUPS_NAME {
        return Ok(());
    }
    let text = format!("`{name}` belongs to the cluster itself: it can't be {what}");
    Err(error(ErrorCode::InvalidArgument, text))
}

/// The word of the confirmed leader of `__cluster`: final.
fn unknown(message: String) -> v1::Error {
    v1::Error {
        authoritative: true,
        ..error(ErrorCode::UnknownTopic, message)
    }
}

/// Creates a topic; the decision is committed and in this broker's view on return.
///
/// # Errors
/// Typed.
///
/// # Cancel safety
/// A dropped call may have created the topic.
pub async fn create(
    request: v1::CreateTopicRequest,
    proposer: &Proposer,
    mut view: watch::Receiver<Arc<ClusterView>>,
    alive: impl Fn(BrokerId) -> bool,
) -> Result<(Arc<Topic>, u64), v1::Error> {
    topic::check_name(&request.name)
        .map_err(|problem| error(ErrorCode::InvalidTopicName, problem.to_string()))?;
    let config: HashMap<String, String> = request.config;
    let config = settings::normalize(&config)
        .map_err(|problem| error(ErrorCode::InvalidArgument, problem.to_string()))?;
    let partitions = match request.partitions {
        0 => PARTITIONS_DEFAULT,
        n => n,
    };
    placement::check(partitions, request.replicas.max(1)).map_err(refused)?;
    proposer.confirm().await?;
    let now = Arc::clone(&view.borrow_and_update());
    if now.topics.contains_key(&request.name) {
        return Err(error(
            ErrorCode::TopicExists,
            format!("topic `{}` exists", request.name),
        ));
    }
    let replicas = match request.replicas {
        0 => placement::automatic_replicas(placement::members(&now)),
        n => n,
    };
    let candidates = placement::candidates(&now, alive);
    let placed = placement::place(candidates, partitions, replicas)
        .map_err(|problem| not_placed(problem, &now))?;
    let id = TopicId::random();
    let command = encode(Command::CreateTopic(CreateTopicCommand {
        name: request.name.clone(),
        topic_id: id.to_wire(),
        config,
        placement: lists(placed),
    }));
    let decided = decide(proposer, command, &mut view).await?;
    let topic = view.borrow().topics_by_id.get(&id).cloned();
    match topic {
        Some(topic) => {
            tracing::info!(topic = topic.name, %id, partitions, replicas, "topic created");
            Ok((topic, decided.index))
        }
        None => Err(error(
            ErrorCode::UnknownTopic,
            format!(
                "topic `{}` was created and has been deleted since",
                request.name
            ),
        )),
    }
}

/// Raises the number of a topic's partitions; the decision is committed and in this broker's view
/// on return. As many as there are already: nothing is done.
///
/// # Errors
/// Typed; `UNKNOWN_TOPIC` from here is final.
///
/// # Cancel safety
/// A dropped call may have added the partitions.
pub async fn add_partitions(
    request: v1::AddPartitionsRequest,
    proposer: &Proposer,
    mut view: watch::Receiver<Arc<ClusterView>>,
    alive: impl Fn(BrokerId) -> bool,
) -> Result<(Arc<Topic>, u64), v1::Error> {
    refuse_internal(&request.name, "given partitions")?;
    topic::check_name(&request.name)
        .map_err(|problem| error(ErrorCode::InvalidTopicName, problem.to_string()))?;
    let wanted_id = wanted_incarnation(&request.topic_id)?;
    placement::check(request.partitions, 1).map_err(refused)?;
    proposer.confirm().await?;
    let now = Arc::clone(&view.borrow_and_update());
    let topic = &incarnation(&now, &request.name, wanted_id)?;
    let present = u32::try_from(topic.partitions.len()).unwrap_or(u32::MAX);
    placement::check_growth(&topic.name, present, request.partitions)
        .map_err(|text| error(ErrorCode::InvalidArgument, text))?;
    if request.partitions == present {
        return Ok((Arc::clone(topic), now.index));
    }
    // As many replicas as the topic's partitions have.
    let replicas = topic.partitions.iter().map(|one| one.replicas.len()).max();
    let replicas = u32::try_from(replicas.unwrap_or(1)).unwrap_or(1);
    let candidates = placement::candidates(&now, alive);
    let placed = placement::place(candidates, request.partitions - present, replicas);
    let command = encode(Command::AddPartitions(AddPartitionsCommand {
        topic_id: topic.id.to_wire(),
        partitions: request.partitions,
        placement: lists(placed.map_err(|problem| not_placed(problem, &now))?),
    }));
    let decided = decide(proposer, command, &mut view).await?;
    let grown = view.borrow().topics_by_id.get(&topic.id).cloned();
    let Some(grown) = grown else {
        let text = format!("topic `{}` has been deleted meanwhile", request.name);
        return Err(unknown(text));
    };
    tracing::info!(
        topic = topic.name, id = %topic.id, partitions = grown.partitions.len(), "partitions added"
    );
    Ok((grown, decided.index))
}

/// Changes a topic's settings; the decision is committed and in this broker's view on return. If it
/// has them already, nothing is done.
///
/// # Errors
/// Typed; `UNKNOWN_TOPIC` from here is final.
///
/// # Cancel safety
/// A dropped call may have changed the settings.
pub async fn alter(
    request: v1::AlterTopicRequest,
    proposer: &Proposer,
    mut view: watch::Receiver<Arc<ClusterView>>,
) -> Result<(Arc<Topic>, u64), v1::Error> {
    refuse_internal(&request.name, "altered")?;
    topic::check_name(&request.name)
        .map_err(|problem| error(ErrorCode::InvalidTopicName, problem.to_string()))?;
    let wanted_id = wanted_incarnation(&request.topic_id)?;
    let bad = |problem: SettingsError| error(ErrorCode::InvalidArgument, problem.to_string());
    let set = settings::normalize(&request.set).map_err(bad)?;
    for key in &request.unset {
        settings::check_key(key).map_err(bad)?;
        if set.contains_key(key) {
            let text = format!("topic setting `{key}`: either give it a value or unset it");
            return Err(error(ErrorCode::InvalidArgument, text));
        }
    }
    proposer.confirm().await?;
    let now = Arc::clone(&view.borrow_and_update());
    let topic = incarnation(&now, &request.name, wanted_id)?;
    let has = |(key, value): (&String, &String)| topic.config.get(key) == Some(value);
    let lacks = |key: &String| !topic.config.contains_key(key);
    if set.iter().all(has) && request.unset.iter().all(lacks) {
        return Ok((topic, now.index));
    }
    let command = encode(Command::AlterTopic(AlterTopicCommand {
        topic_id: topic.id.to_wire(),
        set,
        unset: request.unset,
    }));
    let decided = decide(proposer, command, &mut view).await?;
    let altered = view.borrow().topics_by_id.get(&topic.id).cloned();
    let Some(altered) = altered else {
        let text = format!("topic `{}` has been deleted meanwhile", request.name);
        return Err(unknown(text));
    };
    tracing::info!(topic = topic.name, id = %topic.id, config = ?altered.config, "topic altered");
    Ok((altered, decided.index))
}

/// The incarnation that a request names; `None`: whichever there is.
fn wanted_incarnation(wire: &[u8]) -> Result<Option<TopicId>, v1::Error> {
    if wire.is_empty() {
        return Ok(None);
    }
    let id = TopicId::from_wire(wire).ok_or_else(|| {
        let text = format!("a topic id has 16 bytes, not {}", wire.len());
        error(ErrorCode::InvalidArgument, text)
    })?;
    Ok(Some(id))
}

/// The topic of that name, if it is the incarnation wanted (S28).
fn incarnation(
    view: &ClusterView,
    name: &str,
    wanted: Option<TopicId>,
) -> Result<Arc<Topic>, v1::Error> {
    let Some(topic) = view.topics.get(name) else {
        return Err(unknown(format!("topic `{name}` does not exist")));
    };
    if wanted.is_some_and(|id| id != topic.id) {
        return Err(unknown(format!(
            "topic `{name}` was deleted and made again: it has another id now"
        )));
    }
    Ok(Arc::clone(topic))
}

/// Deletes a topic; the decision is committed on return, the files go soon after. S28: with an
/// incarnation named, no other is touched, however often the call is made.
///
/// # Errors
/// Typed; `UNKNOWN_TOPIC` from here is final.
///
/// # Cancel safety
/// A dropped call may have deleted the topic.
pub async fn delete(
    request: v1::DeleteTopicRequest,
    proposer: &Proposer,
    mut view: watch::Receiver<Arc<ClusterView>>,
) -> Result<u64, v1::Error> {
    refuse_internal(&request.name, "deleted")?;
    topic::check_name(&request.name)
        .map_err(|problem| error(ErrorCode::InvalidTopicName, problem.to_string()))?;
    let wanted = wanted_incarnation(&request.topic_id)?;
    proposer.confirm().await?;
    let topic = incarnation(&view.borrow_and_update(), &request.name, wanted)?;
    let command = encode(Command::DeleteTopic(DeleteTopicCommand {
        name: topic.name.clone(),
        topic_id: topic.id.to_wire(),
    }));
    let decided = decide(proposer, command, &mut view).await?;
    tracing::info!(topic = topic.name, id = %topic.id, "topic deleted");
    Ok(decided.index)
}

async fn decide(
    proposer: &Proposer,
    command: Bytes,
    view: &mut watch::Receiver<Arc<ClusterView>>,
) -> Result<Decided, v1::Error> {
    let decided = proposer.propose_here(command, DECIDE_DEADLINE).await?;
    if let Some(refusal) = decided.refusal() {
        // The log decides, so its word is final.
        let authoritative = refusal.code() == ErrorCode::UnknownTopic;
        return Err(v1::Error {
            authoritative,
            ..refusal
        });
    }
    // The view is published before the command is answered.
    view.borrow_and_update();
    Ok(decided)
}
