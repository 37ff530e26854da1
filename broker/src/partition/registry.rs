//! The records replicas that are open on this broker.
//!
//! The controller's reconciler is the only caller of [`Replicas::open`], [`Replicas::close`] and
//! [`Replicas::delete`] (S22: absence never deletes); services look partitions up. One operation
//! on a partition at a time: operations queue behind each other, look-ups never wait for them.
//!
//! A replica that storage refuses because of damage is *registered as quarantined*: it is
//! reported and answers with a typed error, and nothing of it is touched (S7).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use qute_proto::ids::{PartitionId, ReplicaId};
use tokio::sync::{Mutex, watch};

use super::error::Error;
use super::machine::RecordsMachine;
use super::replica::Replica;
use crate::env::Clock;
use crate::raft::{self, GroupId, GroupSpec, Groups};
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

/// A replica on this broker.
#[derive(Clone)]
pub enum Hosted {
    /// Open: it follows or leads.
    Open(Arc<Replica>),
    /// Damaged: it does neither (S7).
    Quarantined {
        /// Which replica.
        replica: ReplicaId,
        /// What was found.
        reason: String,
    },
}

impl Hosted {
    /// Which replica.
    #[must_use]
    pub fn replica(&self) -> ReplicaId {
        match self {
            Self::Open(open) => open.id(),
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

struct Inner {
    groups: Groups,
    clock: Arc<dyn Clock>,
    /// Look-ups and inserts only.
    hosted: RwLock<HashMap<PartitionId, Hosted>>,
    /// One operation per partition at a time. An entry stays: there are few partitions.
    operations: parking_lot::Mutex<HashMap<PartitionId, Arc<Mutex<()>>>>,
    /// Counts changes of `hosted`.
    changed: watch::Sender<u64>,
}

/// See the module. Cheap to clone.
#[derive(Clone)]
pub struct Replicas {
    inner: Arc<Inner>,
}

impl Replicas {
    /// No replica is open yet.
    #[must_use]
    pub fn new(groups: Groups, clock: Arc<dyn Clock>) -> Self {
        Self {
            inner: Arc::new(Inner {
                groups,
                clock,
                hosted: RwLock::default(),
                operations: parking_lot::Mutex::default(),
                changed: watch::Sender::new(0),
            }),
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
            open.set_record_bytes_max(spec.settings.record_bytes_max);
            return Ok(open);
        }
        let opened = self.open_group(&spec).await;
        match opened {
            Ok(replica) => {
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

    async fn open_group(&self, spec: &PartitionSpec) -> Result<Arc<Replica>, OpenError> {
        let machine = RecordsMachine::new();
        let state = machine.state();
        let group_spec = GroupSpec {
            id: GroupId::new(spec.partition),
            replica: spec.replica,
            log: storage::LogConfig {
                segment_bytes: spec.settings.segment_bytes,
                durability: storage::Durability::Disk,
            },
        };
        let group = self
            .inner
            .groups
            .open(group_spec, machine)
            .await
            .map_err(|error| open_error(spec, &error))?;
        let clock = Arc::clone(&self.inner.clock);
        let record_bytes_max = spec.settings.record_bytes_max;
        Ok(Arc::new(Replica::new(
            group,
            state,
            clock,
            record_bytes_max,
        )))
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
            replica.shutdown().await;
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
    pub fn get(&self, partition: PartitionId) -> Option<Hosted> {
        self.inner.hosted.read().get(&partition).cloned()
    }

    /// The open replica of a partition, for services.
    ///
    /// # Errors
    /// [`Error::NotHere`], [`Error::Quarantined`].
    pub fn serving(&self, partition: PartitionId) -> Result<Arc<Replica>, Error> {
        match self.inner.hosted.read().get(&partition) {
            Some(Hosted::Open(replica)) => Ok(Arc::clone(replica)),
            Some(Hosted::Quarantined { reason, .. }) => Err(Error::Quarantined(reason.clone())),
            None => Err(Error::NotHere(partition)),
        }
    }

    /// Everything that is registered, by partition.
    #[must_use]
    pub fn list(&self) -> BTreeMap<PartitionId, Hosted> {
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
            Hosted::Open(replica) if replica.leadership().is_local => Some(replica),
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
    fn register(&self, partition: PartitionId, hosted: Option<Hosted>) -> Option<Hosted> {
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

fn open_error(spec: &PartitionSpec, error: &raft::OpenError) -> OpenError {
    let (partition, replica) = (spec.partition, spec.replica);
    match error {
        raft::OpenError::Quarantined { reason, .. }
        | raft::OpenError::Storage(storage::Error::Quarantined { reason, .. }) => {
            OpenError::Quarantined {
                partition,
                replica,
                reason: reason.clone(),
            }
        }
        raft::OpenError::Storage(storage::Error::Full(_)) => OpenError::StorageFull(partition),
        other => OpenError::Failed {
            partition,
            replica,
            reason: other.to_string(),
        },
    }
}
