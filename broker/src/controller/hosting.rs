//! The reconciler's [`Host`]: which layer keeps which replicas.
//!
//! A topic's replicas are kept by the layer that knows its state machine: records by the partition
//! layer, `__groups` by the layer of consumer groups. That one comes after this, so the composition
//! root hands both in as [`Keeper`]s.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::future::BoxFuture;
use qute_proto::ids::{BrokerId, PartitionId, ReplicaId, TopicId};
use tokio::sync::mpsc;

use super::reconciler::{Host, HostError, ReplicaSpec};
use crate::partition::registry::{Hosted, OpenError, PartitionSpec, ReplicaSettings, Replicas};
use crate::raft::GroupHandle;
use crate::storage::Store;

/// Keeps the replicas of one kind of topic.
pub trait Keeper: Send + Sync + 'static {
    /// Opens a replica, making it if it has never existed; one that is open is given its settings.
    fn open(&self, spec: ReplicaSpec) -> BoxFuture<'_, Result<GroupHandle, HostError>>;
    /// Gives an open replica the settings that its topic has now.
    fn adjust(&self, spec: &ReplicaSpec);
    /// Closes a replica if it is open and deletes what is stored of it. No error if there is none.
    fn delete(
        &self,
        partition: PartitionId,
        replica: ReplicaId,
    ) -> BoxFuture<'_, Result<(), HostError>>;
    /// The group of an open replica.
    fn group(&self, partition: PartitionId) -> Option<GroupHandle>;
}

/// Replicas on this broker. Each that opens is handed on to whoever follows leaders.
#[derive(Clone)]
pub struct LocalReplicas {
    /// Of records.
    pub records: Arc<dyn Keeper>,
    /// Of `__groups`.
    pub groups: Arc<dyn Keeper>,
    /// What is stored.
    pub store: Store,
    /// Where groups go once they are open.
    pub opened: mpsc::Sender<GroupHandle>,
}

impl LocalReplicas {
    fn keeper(&self, topic: TopicId) -> &Arc<dyn Keeper> {
        match topic {
            TopicId::GROUPS => &self.groups,
            _ => &self.records,
        }
    }
}

/// What the reconciler makes of a replica that did not open.
#[must_use]
pub fn host_error(error: OpenError) -> HostError {
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
        let keeper = Arc::clone(self.keeper(spec.partition.topic));
        let opened = self.opened.clone();
        detached(async move {
            let group = keeper.open(spec).await?;
            super::duties::elect_if_alone(&group).await;
            // Nobody follows leaders any more only when the broker stops.
            let _ = opened.send(group).await;
            Ok(())
        })
    }

    fn adjust(&self, spec: &ReplicaSpec) {
        self.keeper(spec.partition.topic).adjust(spec);
    }

    fn delete(
        &self,
        partition: PartitionId,
        replica: ReplicaId,
    ) -> BoxFuture<'static, Result<(), HostError>> {
        let keeper = Arc::clone(self.keeper(partition.topic));
        detached(async move { keeper.delete(partition, replica).await })
    }

    fn initialize(
        &self,
        partition: PartitionId,
        members: BTreeMap<ReplicaId, BrokerId>,
    ) -> BoxFuture<'static, Result<(), HostError>> {
        let group = self.keeper(partition.topic).group(partition);
        Box::pin(async move {
            let Some(group) = group else {
                return Err(HostError::Retry("it is not open".to_owned()));
            };
            let outcome = group.initialize(members).await;
            outcome
                .map(|_| ())
                .map_err(|error| HostError::Retry(error.to_string()))
        })
    }

    fn leads(&self, partition: PartitionId) -> bool {
        let group = self.keeper(partition.topic).group(partition);
        group.is_some_and(|group| group.serving().is_some())
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

fn replica_settings(spec: &ReplicaSpec) -> ReplicaSettings {
    ReplicaSettings {
        segment_bytes: spec.settings.segment_bytes,
        record_bytes_max: spec.settings.record_bytes_max,
    }
}

impl Keeper for Replicas {
    fn open(&self, spec: ReplicaSpec) -> BoxFuture<'_, Result<GroupHandle, HostError>> {
        let spec = PartitionSpec {
            partition: spec.partition,
            replica: spec.replica,
            settings: replica_settings(&spec),
        };
        Box::pin(async move {
            let replica = Self::open(self, spec).await.map_err(host_error)?;
            Ok(replica.group().clone())
        })
    }

    fn adjust(&self, spec: &ReplicaSpec) {
        if let Some(Hosted::Open(replica)) = self.get(spec.partition) {
            replica.adjust(replica_settings(spec));
        }
    }

    fn delete(
        &self,
        partition: PartitionId,
        replica: ReplicaId,
    ) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move {
            let deleted = Self::delete(self, partition, replica).await;
            deleted.map_err(host_error)
        })
    }

    fn group(&self, partition: PartitionId) -> Option<GroupHandle> {
        match self.get(partition) {
            Some(Hosted::Open(replica)) => Some(replica.group().clone()),
            Some(Hosted::Quarantined { .. }) | None => None,
        }
    }
}
