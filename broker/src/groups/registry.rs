//! The replicas of `__groups` that are open on this broker.
//!
//! Opened, closed and deleted by the controller's reconciler alone (S22), through
//! [`Keeper`]; coordinators look partitions up and follow [`GroupReplicas::watch`]. Quarantine is as
//! in [`crate::partition::registry`] (S7).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use qute_proto::ids::{PartitionId, ReplicaId, TopicId};
use tokio::sync::watch;

use super::machine::GroupsMachine;
use super::replica::{Error, GroupReplica};
use crate::controller::hosting::{Keeper, host_error};
use crate::controller::reconciler::{HostError, ReplicaSpec};
use crate::env::Clock;
use crate::partition::hosted::{Hosted, Hosting, OpenError};
use crate::raft::{GroupHandle, GroupId, GroupSpec, Groups, LogUse};
use crate::storage;

/// See the module. Cheap to clone.
#[derive(Clone)]
pub struct GroupReplicas {
    hosting: Hosting<GroupReplica>,
    clock: Arc<dyn Clock>,
}

/// The partition of `__groups` with that number.
#[must_use]
pub fn partition_id(number: u32) -> PartitionId {
    PartitionId {
        topic: TopicId::GROUPS,
        partition: number,
    }
}

impl GroupReplicas {
    /// No replica is open yet.
    #[must_use]
    pub fn new(groups: Groups, clock: Arc<dyn Clock>) -> Self {
        Self {
            hosting: Hosting::new(groups),
            clock,
        }
    }

    /// Opens a replica, or makes it if this broker does not have it (S10: empty, as a learner).
    ///
    /// # Errors
    /// [`OpenError`].
    ///
    /// # Cancel safety
    /// Not safe: a dropped call may leave the group open. Run it in a task of its own.
    pub async fn open(
        &self,
        number: u32,
        replica: ReplicaId,
        segment_bytes: u64,
    ) -> Result<Arc<GroupReplica>, OpenError> {
        let partition = partition_id(number);
        let open = || async move {
            let (machine, state) = GroupsMachine::new();
            let spec = GroupSpec {
                id: GroupId::new(partition),
                replica,
                log: storage::LogConfig {
                    segment_bytes,
                    durability: storage::Durability::Disk,
                },
                log_use: LogUse::Commands,
            };
            let group = self.hosting.groups().open(spec, machine).await;
            let group = group.map_err(|error| OpenError::from_raft(partition, replica, &error))?;
            Ok(GroupReplica::new(group, state, Arc::clone(&self.clock)))
        };
        self.hosting.open(partition, replica, open).await
    }

    /// The open replica of a partition.
    #[must_use]
    pub fn get(&self, number: u32) -> Option<Arc<GroupReplica>> {
        match self.hosting.get(partition_id(number)) {
            Some(Hosted::Open(replica)) => Some(replica),
            Some(Hosted::Quarantined { .. }) | None => None,
        }
    }

    /// The same for services, which have to say why there is none.
    ///
    /// # Errors
    /// [`Error::NotHere`], [`Error::Quarantined`].
    pub fn serving(&self, number: u32) -> Result<Arc<GroupReplica>, Error> {
        match self.hosting.get(partition_id(number)) {
            Some(Hosted::Open(replica)) => Ok(replica),
            Some(Hosted::Quarantined { reason, .. }) => Err(Error::Quarantined(reason)),
            None => Err(Error::NotHere(number)),
        }
    }

    /// Everything that is registered, by partition number.
    #[must_use]
    pub fn list(&self) -> BTreeMap<u32, Hosted<GroupReplica>> {
        let all = self.hosting.list().into_iter();
        all.map(|(id, one)| (id.partition, one)).collect()
    }

    /// Moves whenever a replica is registered or goes.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.hosting.watch()
    }

    /// Hands over whatever this broker leads. See [`Hosting::hand_over`].
    pub async fn hand_over(&self, patience: Duration) -> usize {
        self.hosting.hand_over(patience).await
    }

    /// Closes a replica; its files stay. Nothing happens if it is not open.
    pub async fn close(&self, number: u32) {
        self.hosting.close(partition_id(number)).await;
    }

    /// Closes all replicas.
    pub async fn shutdown(&self) {
        self.hosting.shutdown().await;
    }
}

impl Keeper for GroupReplicas {
    fn open(&self, spec: ReplicaSpec) -> BoxFuture<'_, Result<GroupHandle, HostError>> {
        Box::pin(async move {
            let (number, segment_bytes) = (spec.partition.partition, spec.settings.segment_bytes);
            let replica = Self::open(self, number, spec.replica, segment_bytes).await;
            Ok(replica.map_err(host_error)?.group().clone())
        })
    }

    fn adjust(&self, _: &ReplicaSpec) {
        // `__groups` can't be altered.
    }

    fn delete(
        &self,
        partition: PartitionId,
        replica: ReplicaId,
    ) -> BoxFuture<'_, Result<(), HostError>> {
        Box::pin(async move {
            let deleted = self.hosting.delete(partition, replica).await;
            deleted.map_err(host_error)
        })
    }

    fn group(&self, partition: PartitionId) -> Option<GroupHandle> {
        Some(self.get(partition.partition)?.group().clone())
    }
}
