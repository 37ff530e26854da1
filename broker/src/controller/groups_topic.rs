//! `__groups`: made when somebody first asks for a coordinator, so that clusters without consumer
//! groups pay nothing for them.
//!
//! Any broker may be asked ([`ensure`]); the leader of `__cluster` places it ([`create_here`]), by
//! the ordinary command, so that asking twice or in two places at once makes it once.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use qute_proto::ids::{BrokerId, TopicId};
use qute_proto::internal::{ClusterCommand, CreateTopicCommand, cluster_command::Command};
use qute_proto::topic::GROUPS_NAME;
use qute_proto::v1::{self, ErrorCode};
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};

use super::placement;
use super::proposer::{Proposer, error};
use super::settings;
use super::topics;
use super::view::ClusterView;

/// Size of its segments.
const SEGMENT_BYTES: u64 = 16 << 20;
/// Between two attempts, unless there is news.
const PAUSE: Duration = Duration::from_millis(200);

/// Makes `__groups` if there is none, wherever `__cluster` is led; it is in this broker's view on
/// return. Gives the index at which it is known to exist.
///
/// # Errors
/// `NOT_READY` after `patience`, or what kept it from being made.
///
/// # Cancel safety
/// A dropped call may have made it.
pub async fn ensure(
    proposer: &Proposer,
    mut view: watch::Receiver<Arc<ClusterView>>,
    alive: impl Fn(BrokerId) -> bool,
    patience: Duration,
) -> Result<u64, v1::Error> {
    let end = Instant::now() + patience;
    loop {
        if let Some(index) = known(&view.borrow_and_update()) {
            return Ok(index);
        }
        let made = attempt(proposer, &mut view.clone(), &alive, end).await;
        let failure = match made {
            Ok(index) => {
                let seen = view.wait_for(|view| view.index >= index || known(view).is_some());
                match timeout_at(end, seen).await {
                    Ok(_) => continue,
                    Err(_) => error(
                        ErrorCode::NotReady,
                        "this broker has not heard of `__groups` yet; try again or ask another",
                    ),
                }
            }
            Err(failure) => failure,
        };
        let is_final = failure.code() == ErrorCode::InvalidArgument;
        if is_final || Instant::now() + PAUSE >= end {
            return Err(failure);
        }
        // Woken early by news.
        let _ = timeout(PAUSE, view.changed()).await;
    }
}

/// The index of a view that has it.
fn known(view: &ClusterView) -> Option<u64> {
    let is_known = view.topics_by_id.contains_key(&TopicId::GROUPS);
    is_known.then_some(view.index)
}

async fn attempt(
    proposer: &Proposer,
    view: &mut watch::Receiver<Arc<ClusterView>>,
    alive: &impl Fn(BrokerId) -> bool,
    end: Instant,
) -> Result<u64, v1::Error> {
    match create_here(proposer, view, alive).await {
        Err(failure) if failure.code() == ErrorCode::NotLeader => {
            // The leader places it.
            let command = Command::CreateTopic(CreateTopicCommand {
                name: GROUPS_NAME.to_owned(),
                topic_id: TopicId::GROUPS.to_wire(),
                ..CreateTopicCommand::default()
            });
            let left = end.saturating_duration_since(Instant::now());
            let decided = proposer.hand_in(command, failure, left).await?;
            match decided.refusal() {
                Some(refusal) if refusal.code() != ErrorCode::TopicExists => Err(refusal),
                _ => Ok(decided.index),
            }
        }
        outcome => outcome,
    }
}

/// Makes `__groups` as the leader of `__cluster`, or finds it made. Gives the index from which on
/// views have it.
///
/// Replicas are automatic, as for any topic: founding brokers that have yet to register count. A
/// broker that is down may be given one: the group begins with a majority, and no group could be
/// coordinated as long as a single broker is away.
///
/// # Errors
/// `NOT_LEADER`, `NOT_READY`, or what the log decided.
///
/// # Cancel safety
/// A dropped call may have made it.
pub async fn create_here(
    proposer: &Proposer,
    view: &mut watch::Receiver<Arc<ClusterView>>,
    alive: impl Fn(BrokerId) -> bool,
) -> Result<u64, v1::Error> {
    proposer.confirm().await?;
    let now = Arc::clone(&view.borrow_and_update());
    if let Some(index) = known(&now) {
        return Ok(index);
    }
    if now.cluster_id.is_none() {
        let text = "the cluster is being founded; try again";
        return Err(error(ErrorCode::NotReady, text));
    }
    let replicas = placement::automatic_replicas(placement::members(&now));
    let (there, all) = (
        placement::candidates(&now, alive),
        placement::candidates(&now, |_| true),
    );
    let placed = placement::place(there, now.groups_partitions, replicas)
        .or_else(|_| placement::place(all, now.groups_partitions, replicas))
        .map_err(|problem| topics::not_placed(problem, &now))?;
    let config = HashMap::from([("segment_bytes".to_owned(), SEGMENT_BYTES.to_string())]);
    let config = settings::normalize(&config)
        .map_err(|problem| error(ErrorCode::Internal, problem.to_string()))?;
    let command = ClusterCommand {
        command: Some(Command::CreateTopic(CreateTopicCommand {
            name: GROUPS_NAME.to_owned(),
            topic_id: TopicId::GROUPS.to_wire(),
            config,
            placement: topics::lists(placed),
        })),
    };
    let bytes: Bytes = command.encode_to_vec().into();
    let decided = proposer
        .propose_here(bytes, topics::DECIDE_DEADLINE)
        .await?;
    match decided.refusal() {
        None => {
            tracing::info!(
                partitions = now.groups_partitions,
                replicas,
                "`__groups` made"
            );
            Ok(decided.index)
        }
        // Another call came first.
        Some(refusal) if refusal.code() == ErrorCode::TopicExists => Ok(decided.index),
        Some(refusal) => Err(refusal),
    }
}
