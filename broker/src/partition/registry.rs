//! The records replicas that are open on this broker.
//!
//! The controller's reconciler is the only caller of [`Replicas::open`], [`Replicas::close`] and
//! [`Replicas::delete`] (S22: absence never deletes); services look partitions up. What all
//! registries have in common: [`super::hosted`].
//!
//! A replica that storage refuses because of damage is *registered as quarantined*: it is
//! reported and answers with a typed error, and nothing of it is touched (S7).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use qute_proto::ids::{PartitionId, ReplicaId};
use tokio::sync::watch;

use super::error::Error;
pub use super::hosted::{Hosted, OpenError};
use super::hosted::{Hosting, Member};
use super::machine::RecordsMachine;
use super::replica::Replica;
use crate::env::Clock;
use crate::raft::{GroupHandle, GroupId, GroupSpec, Groups, LogUse};
use crate::storage;

/// A replica to open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionSpec {
    /// Of which partition.
    pub partition: PartitionId,
    /// Which replica of it (S9).
    pub replica: ReplicaId,
    /// Settings of its topic.
    pub settings: ReplicaSettings,
}

/// The topic settings that a replica needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaSettings {
    /// Size at which a segment is closed.
    pub segment_bytes: u64,
    /// Largest record, key, value and headers together.
    pub record_bytes_max: u64,
}

impl Member for Replica {
    fn group(&self) -> &GroupHandle {
        Self::group(self)
    }

    fn retire(&self) -> BoxFuture<'_, ()> {
        Box::pin(self.shutdown())
    }
}

/// See the module. Cheap to clone.
#[derive(Clone)]
pub struct Replicas {
    hosting: Hosting<Replica>,
    clock: Arc<dyn Clock>,
}

impl Replicas {
    /// No replica is open yet.
    #[must_use]
    pub fn new(groups: Groups, clock: Arc<dyn Clock>) -> Self {
        Self {
            hosting: Hosting::new(groups),
            clock,
        }
    }

    /// Opens a replica, or makes it if this broker does not have it. One that is open already is
    /// given its settings and left alone. S10: a new one is empty and waits as a learner;
    /// initializing its group is for the reconciler, which knows the first placement.
    ///
    /// # Errors
    /// [`OpenError`].
    ///
    /// # Cancel safety
    /// Not safe: a dropped call may leave the group open. Run it in a task of its own.
    pub async fn open(&self, spec: PartitionSpec) -> Result<Arc<Replica>, OpenError> {
        let (partition, id) = (spec.partition, spec.replica);
        let settings = spec.settings;
        let open = || self.open_group(spec);
        let replica = self.hosting.open(partition, id, open).await?;
        replica.adjust(settings);
        Ok(replica)
    }

    async fn open_group(&self, spec: PartitionSpec) -> Result<Replica, OpenError> {
        let machine = RecordsMachine::new();
        let state = machine.state();
        let group_spec = GroupSpec {
            id: GroupId::new(spec.partition),
            replica: spec.replica,
            log: storage::LogConfig {
                segment_bytes: spec.settings.segment_bytes,
                durability: storage::Durability::Disk,
            },
            log_use: LogUse::Records,
        };
        let opened = self.hosting.groups().open(group_spec, machine).await;
        let group =
            opened.map_err(|error| OpenError::from_raft(spec.partition, spec.replica, &error))?;
        let clock = Arc::clone(&self.clock);
        let record_bytes_max = spec.settings.record_bytes_max;
        Ok(Replica::new(group, state, clock, record_bytes_max))
    }

    /// Closes a replica; its files stay. Nothing happens if it is not open.
    pub async fn close(&self, partition: PartitionId) {
        self.hosting.close(partition).await;
    }

    /// Closes a replica and deletes its files. S22: the caller holds a tombstone for exactly this
    /// replica id.
    ///
    /// # Errors
    /// As [`Hosting::delete`].
    pub async fn delete(
        &self,
        partition: PartitionId,
        replica: ReplicaId,
    ) -> Result<(), OpenError> {
        self.hosting.delete(partition, replica).await
    }

    /// What is registered for a partition.
    #[must_use]
    pub fn get(&self, partition: PartitionId) -> Option<Hosted> {
        self.hosting.get(partition)
    }

    /// The open replica of a partition, for services.
    ///
    /// # Errors
    /// [`Error::NotHere`], [`Error::Quarantined`].
    pub fn serving(&self, partition: PartitionId) -> Result<Arc<Replica>, Error> {
        match self.hosting.get(partition) {
            Some(Hosted::Open(replica)) => Ok(replica),
            Some(Hosted::Quarantined { reason, .. }) => Err(Error::Quarantined(reason)),
            None => Err(Error::NotHere(partition)),
        }
    }

    /// Everything that is registered, by partition.
    #[must_use]
    pub fn list(&self) -> BTreeMap<PartitionId, Hosted> {
        self.hosting.list()
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

    /// Closes all replicas.
    pub async fn shutdown(&self) {
        self.hosting.shutdown().await;
    }
}
