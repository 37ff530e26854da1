//! What falls to whoever leads `__cluster`, and to each member at its start.
//!
//! - [`initialize`]: the founders make the group, with exactly the founding voters (S10).
//! - [`lead`]: the leader records the founding and adds everybody who is no member of the group
//!   yet as a learner.
//! - [`register`]: each broker tells its present addresses until the view shows them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use prost::Message as _;
use qute_proto::ids::{BrokerId, ReplicaId};
use qute_proto::internal::{
    BrokerAddress, ClusterCommand, FoundCluster, FoundingSet, RegisterBroker,
    cluster_command::Command,
};
use qute_proto::v1::ErrorCode;
use tokio::sync::watch;

use super::placement::cluster_voters;
use super::proposer::Proposer;
use super::view::ClusterView;
use crate::raft::GroupHandle;

/// Partitions of `__groups`, fixed at forming.
const GROUPS_PARTITIONS: u32 = 16;
/// How much later each further founder initializes `__cluster`.
const INITIALIZE_DELAY: Duration = Duration::from_secs(1);
const DECIDE_DEADLINE: Duration = Duration::from_secs(5);
/// While there is something to do it is tried this often.
const PACE: Duration = Duration::from_millis(250);
/// Between two attempts to register, at most.
const REGISTER_PAUSE_MAX: Duration = Duration::from_secs(2);

/// The voters that the founding set gives `__cluster`: its replica ids are the ranks (S9).
#[must_use]
pub fn founding_voters(set: &FoundingSet) -> BTreeMap<ReplicaId, BrokerId> {
    let voters = cluster_voters(set.brokers.len());
    (1..)
        .zip(&set.brokers)
        .take(voters)
        .map(|(rank, broker)| (ReplicaId(rank), BrokerId(broker.broker_id)))
        .collect()
}

/// S10: a founder that votes initializes `__cluster` with exactly the founding voters, unless the
/// cluster is known to have been founded. The first founder does it at once.
pub async fn initialize(handle: GroupHandle, set: FoundingSet, founded: bool) {
    let voters = founding_voters(&set);
    let own = handle.replica();
    if founded || !voters.contains_key(&own) {
        return;
    }
    let rank = u32::try_from(own.0.saturating_sub(1)).unwrap_or(u32::MAX);
    let mut applied = handle.watch_applied();
    let delay = INITIALIZE_DELAY.saturating_mul(rank);
    // Another founder's entries arriving make it needless.
    let arrived = applied.wait_for(|mark| mark.next_index > 0);
    if rank > 0 && tokio::time::timeout(delay, arrived).await.is_ok() {
        return;
    }
    match handle.initialize(voters).await {
        Ok(true) => tracing::info!("initialized the controller's group"),
        Ok(false) => {}
        Err(error) => tracing::error!(%error, "the controller's group was not initialized"),
    }
}

/// A group whose only voter is here need not wait for anybody's lease or election timer.
pub async fn elect_if_alone(handle: &GroupHandle) {
    let metrics = handle.metrics();
    let mut voters = metrics.membership_config.membership().voter_ids();
    if voters.next() == Some(handle.replica().0)
        && voters.next().is_none()
        && let Err(error) = handle.elect().await
    {
        tracing::debug!(group = %handle.id(), %error, "did not stand for election");
    }
}

/// Does the leader's duties whenever this broker leads `__cluster`. Runs for ever.
pub async fn lead(
    handle: GroupHandle,
    set: Option<FoundingSet>,
    proposer: Arc<Proposer>,
    mut view: watch::Receiver<Arc<ClusterView>>,
) {
    let mut leadership = handle.watch_leadership();
    loop {
        let now = Arc::clone(&view.borrow_and_update());
        let unfinished = leadership.current().is_local
            && !do_duties(&handle, set.as_ref(), &proposer, &now).await;
        let pace = async {
            if unfinished {
                tokio::time::sleep(PACE).await;
            } else {
                std::future::pending().await
            }
        };
        tokio::select! {
            changed = leadership.changed() => {
                if changed.is_none() {
                    return;
                }
            }
            changed = view.changed() => {
                if changed.is_err() {
                    return;
                }
            }
            () = pace => {}
        }
    }
}

/// `true` if nothing is left to do.
async fn do_duties(
    handle: &GroupHandle,
    set: Option<&FoundingSet>,
    proposer: &Proposer,
    view: &ClusterView,
) -> bool {
    // Until an entry of its own term is applied the view may be behind what is decided.
    if handle.applied().term != handle.leadership().term {
        return false;
    }
    if view.cluster_id.is_none() {
        let Some(set) = set else {
            return true;
        };
        let command = ClusterCommand {
            command: Some(Command::Found(FoundCluster {
                set: Some(set.clone()),
                groups_partitions: GROUPS_PARTITIONS,
            })),
        };
        let bytes = command.encode_to_vec().into();
        if let Err(error) = proposer.propose_here(bytes, DECIDE_DEADLINE).await {
            tracing::debug!(error = error.message, "the founding is not recorded yet");
        }
        return false;
    }
    add_learners(handle, view).await
}

async fn add_learners(handle: &GroupHandle, view: &ClusterView) -> bool {
    let metrics = handle.metrics();
    let membership = metrics.membership_config;
    let mut complete = true;
    for broker in view.brokers.values() {
        let replica = broker.cluster_replica;
        if membership.get_node(&replica.0).is_some() {
            continue;
        }
        match handle
            .add_learner(replica, broker.id, DECIDE_DEADLINE)
            .await
        {
            Ok(_) => tracing::info!(broker = %broker.id, %replica, "follows the controller now"),
            Err(error) => {
                complete = false;
                tracing::debug!(broker = %broker.id, %error, "not a learner of the controller yet");
            }
        }
    }
    complete
}

/// Tells the cluster this broker's addresses until the view shows them, then watches that nobody
/// else registers under its identity. Ends when that happens, with what to tell the operator.
pub async fn register(
    me: BrokerAddress,
    proposer: Arc<Proposer>,
    mut view: watch::Receiver<Arc<ClusterView>>,
) -> String {
    let mut pause = PACE;
    loop {
        let known = view
            .borrow_and_update()
            .brokers
            .get(&BrokerId(me.broker_id))
            .cloned();
        if let Some(known) = &known
            && known.boot >= me.boot
            && known.process_id != me.process_id
        {
            // S23
            return format!(
                "broker {} is registered by another process (start {}, this is start {}): the \
                 data directory was copied or rolled back",
                me.broker_id, known.boot, me.boot
            );
        }
        let registered = known
            .is_some_and(|known| known.registered && BrokerAddress::from(known.as_ref()) == me);
        if registered {
            if view.changed().await.is_err() {
                return std::future::pending().await;
            }
            continue;
        }
        let command = Command::RegisterBroker(RegisterBroker {
            broker: Some(me.clone()),
        });
        let outcome = proposer.propose(command, DECIDE_DEADLINE).await;
        let failure = match &outcome {
            Ok(decided) => decided.refusal(),
            Err(error) => Some(error.clone()),
        };
        match failure {
            // The view will show it.
            None => pause = PACE,
            Some(error) if error.code() == ErrorCode::InvalidArgument => return error.message,
            Some(error) => {
                tracing::debug!(error = error.message, "not registered yet");
                pause = (pause * 2).min(REGISTER_PAUSE_MAX);
            }
        }
        // Woken early by news; a quiet view is asked for again.
        let _ = tokio::time::timeout(pause, view.changed()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn founding_voters_are_the_first_odd_number_of_ranks() {
        let set = |n: u64| FoundingSet {
            brokers: (1..=n)
                .map(|id| BrokerAddress {
                    broker_id: id * 10,
                    ..BrokerAddress::default()
                })
                .collect(),
            ..FoundingSet::default()
        };
        let voters = founding_voters(&set(4));
        let ids: Vec<_> = voters
            .iter()
            .map(|(replica, broker)| (replica.0, broker.0))
            .collect();
        assert_eq!(ids, [(1, 10), (2, 20), (3, 30)]);
        assert_eq!(founding_voters(&set(2)).len(), 1);
        assert_eq!(founding_voters(&set(7)).len(), 5);
    }
}
