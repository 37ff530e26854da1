//! The reconciler's [`Host`] over the partition layer.

use std::collections::BTreeMap;

use futures::future::BoxFuture;
use qute_proto::ids::{BrokerId, PartitionId, ReplicaId};
use tokio::sync::mpsc;

use super::reconciler::{Host, HostError, ReplicaSpec};
use crate::partition::registry::{Hosted, OpenError, PartitionSpec, ReplicaSettings, Replicas};
use crate::raft::GroupHandle;
use crate::storage::Store;

/// Replicas on this broker. Each that opens is handed on to whoever follows leaders.
#[derive(Clone)]
pub struct LocalReplicas {
    /// The partition layer.
    pub replicas: Replicas,
    /// What is stored.
    pub store: Store,
    /// Where groups go once they are open.
    pub opened: mpsc::Sender<GroupHandle>,
}

fn host_error(error: OpenError) -> HostError {
    match error {
        OpenError::Quarantined { reason, .. } => HostError::Quarantined(reason),
        error => HostError::Retry(error.to_string()),
    }
}

/// Runs in a task of its own: dropping the future does not stop half way.
fn detached(
    work: impl Future<Output = Result<(), HostError>> + Send + 'static,
) -> BoxFuture<'static, Result<(), HostError>> {
    let task = tokio::spawn(work);
    Box::pin(async move {
        task.await
            .unwrap_or_else(|error| Err(HostError::Retry(error.to_string())))
    })
}

impl Host for LocalReplicas {
    fn open(&self, spec: ReplicaSpec) -> BoxFuture<'static, Result<(), HostError>> {
        let host = self.clone();
        detached(async move {
            let spec = PartitionSpec {
                partition: spec.partition,
                replica: spec.replica,
                settings: ReplicaSettings {
                    segment_bytes: spec.settings.segment_bytes,
                    record_bytes_max: spec.settings.record_bytes_max,
                },
            };
            let replica = host.replicas.open(spec).await.map_err(host_error)?;
            super::duties::elect_if_alone(replica.group()).await;
            // Nobody follows leaders any more only when the broker stops.
            let _ = host.opened.send(replica.group().clone()).await;
            Ok(())
        })
    }

    fn delete(
        &self,
        partition: PartitionId,
        replica: ReplicaId,
    ) -> BoxFuture<'static, Result<(), HostError>> {
        let host = self.clone();
        detached(async move {
            host.replicas
                .delete(partition, replica)
                .await
                .map_err(host_error)
        })
    }

    fn initialize(
        &self,
        partition: PartitionId,
        members: BTreeMap<ReplicaId, BrokerId>,
    ) -> BoxFuture<'static, Result<(), HostError>> {
        let hosted = self.replicas.get(partition);
        Box::pin(async move {
            let Some(Hosted::Open(replica)) = hosted else {
                return Err(HostError::Retry("it is not open".to_owned()));
            };
            let outcome = replica.group().initialize(members).await;
            outcome
                .map(|_| ())
                .map_err(|error| HostError::Retry(error.to_string()))
        })
    }

    fn leads(&self, partition: PartitionId) -> bool {
        matches!(
            self.replicas.get(partition),
            Some(Hosted::Open(replica)) if replica.serving().is_some()
        )
    }

    fn stored(&self) -> BTreeMap<ReplicaId, PartitionId> {
        self.store
            .replicas()
            .into_iter()
            .filter(|key| key.partition != PartitionId::CLUSTER)
            .map(|key| (key.replica, key.partition))
            .collect()
    }
}
