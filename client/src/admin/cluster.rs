//! The state of the cluster: every endpoint is asked once, the newest view wins, and a leader of
//! `__cluster` counts only if it says so itself: others repeat for a while what they last heard.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use qute_proto::ids::{BrokerId, ClusterId};
use qute_proto::v1;
use tokio::time::{Instant, timeout_at};

use super::{BrokerDescription, BrokerState, ClusterInfo};
use crate::client::{Client, Shared};
use crate::error::{EndpointFailure, Error, ErrorKind, Result};
use crate::net::{Address, Lane, cluster_client};

/// One round takes this long at most.
pub(super) const ROUND_TIMEOUT: Duration = Duration::from_secs(3);
/// After a complete answer the others get this much time to give a newer one.
const AFTER_COMPLETE: Duration = Duration::from_millis(200);

impl Client {
    /// The state of the cluster, from one round over all known endpoints, 3 s at most; works
    /// while the cluster is forming, too.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] if nobody answered, with the cause for each endpoint.
    ///
    /// # Cancel safety
    /// Nothing is lost: it only reads.
    pub async fn cluster_info(&self) -> Result<ClusterInfo> {
        let round_ends = Instant::now() + ROUND_TIMEOUT.min(self.shared.config.call_timeout);
        let mut deadline = round_ends;
        let mut endpoints: BTreeSet<_> = self.shared.metadata.endpoints().into_iter().collect();
        let mut asked: FuturesUnordered<_> = endpoints
            .iter()
            .map(|address| ask(&self.shared, Arc::clone(address), round_ends))
            .collect();
        let mut answers: Vec<(BrokerId, ClusterInfo)> = Vec::new();
        let mut failures = Vec::new();
        let mut silent = asked.len();
        while let Ok(Some((address, answer))) = timeout_at(deadline, asked.next()).await {
            silent -= 1;
            match answer {
                Ok(answer) => {
                    if let Some(controller) = answer.1.controller_address()
                        && endpoints.insert(Arc::clone(&controller))
                    {
                        asked.push(ask(&self.shared, controller, round_ends));
                        silent += 1;
                    }
                    answers.push(answer);
                    if best(&answers).is_some_and(|info| info.is_complete()) {
                        deadline = deadline.min(Instant::now() + AFTER_COMPLETE);
                    }
                }
                Err(error) => failures.push(EndpointFailure {
                    endpoint: address.to_string(),
                    cause: error.message().to_owned(),
                }),
            }
        }
        best(&answers).ok_or_else(|| {
            let message = match silent {
                0 => "no broker could be reached".to_owned(),
                silent => format!("no broker could be reached, {silent} did not answer in time"),
            };
            Error::new(ErrorKind::Unreachable, message).with_endpoints(failures)
        })
    }

    /// The registered brokers, by id; one round, 3 s at most.
    ///
    /// # Errors
    /// As [`Client::cluster_info`].
    ///
    /// # Cancel safety
    /// Nothing is lost: it only reads.
    pub async fn brokers(&self) -> Result<Vec<BrokerDescription>> {
        self.cluster_info().await.map(|info| info.brokers)
    }
}

/// The best of the answers; without a controller that does not say so itself.
fn best(answers: &[(BrokerId, ClusterInfo)]) -> Option<ClusterInfo> {
    let leads = |broker: BrokerId| {
        answers
            .iter()
            .any(|(id, info)| *id == broker && info.controller == Some(broker))
    };
    let confirmed = answers.iter().map(|(_, info)| ClusterInfo {
        controller: info.controller.filter(|broker| leads(*broker)),
        ..info.clone()
    });
    // Each broker speaks for itself; one that was reached by two addresses once.
    let mut faults: Vec<&(BrokerId, ClusterInfo)> = answers.iter().collect();
    faults.sort_by_key(|(id, _)| *id);
    faults.dedup_by_key(|(id, _)| *id);
    let faults = faults.into_iter().flat_map(|(_, info)| info.faults.clone());
    let best = confirmed.max_by_key(rank)?;
    Some(ClusterInfo {
        faults: faults.collect(),
        ..best
    })
}

/// Formed before unformed, with a leader before without, newer before older.
fn rank(info: &ClusterInfo) -> (bool, bool, u64) {
    (info.formed, info.controller.is_some(), info.cluster_index)
}

async fn ask(
    shared: &Shared,
    address: Address,
    deadline: Instant,
) -> (Address, Result<(BrokerId, ClusterInfo)>) {
    let answer = async {
        let describe = async |channel| {
            let request = v1::DescribeClusterRequest {};
            cluster_client(channel).describe_cluster(request).await
        };
        let response = shared
            .connections
            .call(&address, Lane::Control, deadline, describe)
            .await?;
        Ok((BrokerId(response.broker_id), read(&address, response)))
    };
    let answer = answer.await;
    (address, answer)
}

impl ClusterInfo {
    /// Where the broker that it names as the leader of `__cluster` is.
    fn controller_address(&self) -> Option<Address> {
        let controller = self.controller?;
        let named = self.brokers.iter().find(|broker| broker.id == controller)?;
        (!named.address.is_empty()).then(|| Address::from(named.address.as_str()))
    }
}

pub(super) fn read(address: &Address, response: v1::DescribeClusterResponse) -> ClusterInfo {
    let mut brokers: Vec<_> = response
        .brokers
        .iter()
        .map(|broker| BrokerDescription {
            id: BrokerId(broker.broker_id),
            name: broker.name.clone(),
            address: broker.address.clone(),
            rack: broker.rack.clone(),
            state: BrokerState::told(broker.state()),
        })
        .collect();
    brokers.sort_by_key(|broker| broker.id);
    let controller = response.controller.map(|hint| hint.broker_id);
    ClusterInfo {
        cluster_id: ClusterId::from_wire(&response.cluster_id),
        formed: response.formed,
        controller: controller.filter(|&id| id != 0).map(BrokerId),
        brokers,
        founding_brokers: response.founding_brokers,
        cluster_index: response.cluster_index,
        topics: response.topics,
        partitions: response.partitions,
        answered_by: address.to_string(),
        faults: response
            .faults
            .iter()
            .map(|fault| format!("{address}: {fault}"))
            .collect(),
    }
}
