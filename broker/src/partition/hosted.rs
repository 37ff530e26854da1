//! What is open of one kind of replica on this broker, by partition.
//!
//! Shared by the registries ([`super::registry`] and that of consumer groups): which operation may
//! run when, what is registered, quarantine. One operation on a partition at a time: operations
//! queue behind each other, look-ups never wait for them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use parking_lot::RwLock;
use qute_proto::ids::{PartitionId, ReplicaId};
use tokio::sync::{Mutex, watch};

use super::replica::Replica;
use crate::raft::{self, GroupHandle, Groups};
use crate::storage;

/// A replica that a registry keeps.
pub trait Member: Send + Sync + 'static {
    /// Its Raft group.
    fn group(&self) -> &GroupHandle;
    /// Refuses what waits and ends its tasks; the group is closed afterwards.
    fn retire(&self) -> BoxFuture<'_, ()>;
}

/// A replica on this broker.
pub enum Hosted<R = Replica> {
    /// Open: it follows or leads.
    Open(Arc<R>),
    /// Damaged: it does neither (S7).
    Quarantined {
        /// Which replica.
        replica: ReplicaId,
        /// What was found.
        reason: String,
    },
}

impl<R> Clone for Hosted<R> {
    fn clone(&self) -> Self {
        match self {
            Self::Open(open) => Self::Open(Arc::clone(open)),
            Self::Quarantined { replica, reason } => Self::Quarantined {
                replica: *replica,
                reason: reason.clone(),
            },
        }
    }
}

impl<R: Member> Hosted<R> {
    /// Which replica.
    #[must_use]
    pub fn replica(&self) -> ReplicaId {
        match self {
            Self::Open(open) => open.group().replica(),
            Self::Quarantined { replica, .. } => *replica,
        }
    }
}

/// Why a replica is not open.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// It is registered as quarantined now.
    #[error("replica {replica} of {partition} is quarantined: {reason}")]
    Quarantined {
        /// Of which partition.
        partition: PartitionId,
        /// Which replica.
        replica: ReplicaId,
        /// What was found.
        reason: String,
    },
    /// Another replica of the partition is registered: it must be deleted first.
    #[error("replica {present} of {partition} is here, {wanted} can't be opened beside it")]
    Occupied {
        /// Of which partition.
        partition: PartitionId,
        /// Registered.
        present: ReplicaId,
        /// Asked for.
        wanted: ReplicaId,
    },
    /// No space to make it. Retriable.
    #[error("no space for a replica of {0}")]
    StorageFull(PartitionId),
    /// Storage or Raft refused. Retriable unless the broker is stopping.
    #[error("replica {replica} of {partition}: {reason}")]
    Failed {
        /// Of which partition.
        partition: PartitionId,
        /// Which replica.
        replica: ReplicaId,
        /// What went wrong.
        reason: String,
    },
}

impl OpenError {
    /// Why Raft or storage did not open it.
    #[must_use]
    pub fn from_raft(partition: PartitionId, replica: ReplicaId, error: &raft::OpenError) -> Self {
        match error {
            raft::OpenError::Quarantined { reason, .. }
            | raft::OpenError::Storage(storage::Error::Quarantined { reason, .. }) => {
                Self::Quarantined {
                    partition,
                    replica,
                    reason: reason.clone(),
                }
            }
            raft::OpenError::Storage(storage::Error::Full(_)) => Self::StorageFull(partition),
            other => Self::Failed {
                partition,
                replica,
                reason: other.to_string(),
            },
        }
    }
}

struct Inner<R> {
    groups: Groups,
    /// Look-ups and inserts only.
    hosted: RwLock<HashMap<PartitionId, Hosted<R>>>,
    /// One operation per partition at a time. An entry stays: there are few partitions.
    operations: parking_lot::Mutex<HashMap<PartitionId, Arc<Mutex<()>>>>,
    /// Counts changes of `hosted`.
    changed: watch::Sender<u64>,
}

/// See the module. Cheap to clone.
pub struct Hosting<R> {
    inner: Arc<Inner<R>>,
}

impl<R> Clone for Hosting<R> {
    fn clone(&self) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
        }
    }
}

impl<R: Member> Hosting<R> {
    /// None is open yet.
    #[must_use]
    pub fn new(groups: Groups) -> Self {
        Self {
            inner: Arc::new(Inner {
                groups,
                hosted: RwLock::default(),
                operations: parking_lot::Mutex::default(),
                changed: watch::Sender::new(0),
            }),
        }
    }

    /// The Raft groups of this broker.
    #[must_use]
    pub fn groups(&self) -> &Groups {
        &self.inner.groups
    }

    /// The replica if it is open, else what `open` makes of it: registered, as quarantined if that
    /// is what was found.
    ///
    /// # Errors
    /// [`OpenError`].
    ///
    /// # Cancel safety
    /// Not safe: a dropped call may leave the group open. Run it in a task of its own.
    pub async fn open<F>(
        &self,
        partition: PartitionId,
        id: ReplicaId,
        open: impl FnOnce() -> F + Send,
    ) -> Result<Arc<R>, OpenError>
    where
        F: Future<Output = Result<R, OpenError>> + Send,
    {
        let operation = self.operation(partition);
        let _one = operation.lock().await;
        let present = self.get(partition);
        if let Some(present) = &present
            && present.replica() != id
        {
            return Err(OpenError::Occupied {
                partition,
                present: present.replica(),
                wanted: id,
            });
        }
        if let Some(Hosted::Open(open)) = present {
            return Ok(open);
        }
        match open().await {
            Ok(replica) => {
                let replica = Arc::new(replica);
                self.register(partition, Some(Hosted::Open(Arc::clone(&replica))));
                Ok(replica)
            }
            Err(error) => {
                if let OpenError::Quarantined { reason, .. } = &error {
                    let quarantined = Hosted::Quarantined {
                        replica: id,
                        reason: reason.clone(),
                    };
                    self.register(partition, Some(quarantined));
                }
                Err(error)
            }
        }
    }

    /// Closes a replica; its files stay. Nothing happens if it is not open.
    pub async fn close(&self, partition: PartitionId) {
        let operation = self.operation(partition);
        let _one = operation.lock().await;
        self.close_registered(partition).await;
    }

    async fn close_registered(&self, partition: PartitionId) {
        let Some(hosted) = self.register(partition, None) else {
            return;
        };
        if let Hosted::Open(replica) = hosted {
            replica.retire().await;
            self.inner.groups.close(replica.group().id()).await;
        }
    }

    /// Closes a replica and deletes its files. S22: the caller holds a tombstone for exactly this
    /// replica id.
    ///
    /// # Errors
    /// [`OpenError::Occupied`] if another replica of the partition is open;
    /// [`OpenError::Failed`] if storage refuses. A replica that is already gone is deleted.
    pub async fn delete(
        &self,
        partition: PartitionId,
        replica: ReplicaId,
    ) -> Result<(), OpenError> {
        let operation = self.operation(partition);
        let _one = operation.lock().await;
        if let Some(present) = self.get(partition) {
            if present.replica() != replica {
                return Err(OpenError::Occupied {
                    partition,
                    present: present.replica(),
                    wanted: replica,
                });
            }
            self.close_registered(partition).await;
        }
        let store = self.inner.groups.store().clone();
        let key = storage::ReplicaKey { partition, replica };
        if !store.replicas().contains(&key) {
            return Ok(());
        }
        let refused = |reason: String| OpenError::Failed {
            partition,
            replica,
            reason,
        };
        tokio::task::spawn_blocking(move || store.delete_log(key))
            .await
            .map_err(|error| refused(error.to_string()))?
            .map_err(|error| refused(error.to_string()))
    }

    /// What is registered for a partition.
    #[must_use]
    pub fn get(&self, partition: PartitionId) -> Option<Hosted<R>> {
        self.inner.hosted.read().get(&partition).cloned()
    }

    /// Everything that is registered, by partition.
    #[must_use]
    pub fn list(&self) -> BTreeMap<PartitionId, Hosted<R>> {
        let hosted = self.inner.hosted.read();
        hosted.iter().map(|(id, one)| (*id, one.clone())).collect()
    }

    /// Moves whenever a replica is registered or goes.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.inner.changed.subscribe()
    }

    /// Hands over whatever this broker leads, so that writing goes on elsewhere within
    /// milliseconds instead of after an election timeout. Returns how many leads were given.
    pub async fn hand_over(&self, patience: Duration) -> usize {
        let leading = self.list().into_values().filter_map(|hosted| match hosted {
            Hosted::Open(replica) if replica.group().leadership().is_local => Some(replica),
            _ => None,
        });
        let given = leading
            .map(|replica| async move { replica.group().hand_over(patience).await })
            .collect::<Vec<_>>();
        let given = futures::future::join_all(given).await;
        given.into_iter().filter(|given| *given).count()
    }

    /// Closes all replicas.
    pub async fn shutdown(&self) {
        let partitions: Vec<_> = self.inner.hosted.read().keys().copied().collect();
        let closing = partitions.into_iter().map(|id| self.close(id));
        futures::future::join_all(closing).await;
    }

    fn operation(&self, partition: PartitionId) -> Arc<Mutex<()>> {
        Arc::clone(self.inner.operations.lock().entry(partition).or_default())
    }

    /// Registers, or unregisters with `None`; returns what was there.
    fn register(&self, partition: PartitionId, hosted: Option<Hosted<R>>) -> Option<Hosted<R>> {
        let before = {
            let mut all = self.inner.hosted.write();
            match hosted {
                Some(hosted) => all.insert(partition, hosted),
                None => all.remove(&partition),
            }
        };
        self.inner.changed.send_modify(|count| *count += 1);
        before
    }
}
