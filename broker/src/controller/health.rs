//! How this broker fares, as `DescribeCluster` tells it to whoever looks after the cluster
//! (`qute doctor`): its wall clock, the space of its data directory, its replicas. Pulled together
//! when asked; nothing runs here.

use std::time::Duration;

use qute_proto::ids::PartitionId;
use qute_proto::v1::{ReplicaStatus, StorageStatus};

use super::Controller;
use crate::env::{Clock as _, SystemClock};
use crate::raft::GroupHandle;

/// A voter that has not answered its leader for so long is missing. Leaders call several times a
/// second, so that one busy moment is no absence.
const MISSING_AFTER: Duration = Duration::from_secs(5);

impl Controller {
    /// The wall clock that stamps records here, Unix milliseconds.
    #[must_use]
    pub fn wall_ms(&self) -> u64 {
        SystemClock.wall_ms()
    }

    /// The space of the data directory's file system.
    #[must_use]
    pub fn storage_status(&self) -> StorageStatus {
        let space = self.groups().store().free_space();
        StorageStatus {
            total_bytes: space.total_bytes,
            available_bytes: space.available_bytes,
            floor_bytes: space.floor_bytes,
        }
    }

    /// The replicas of this broker, in numbers.
    #[must_use]
    pub fn replica_status(&self) -> ReplicaStatus {
        let progress = self.progress();
        let all = self.groups().all();
        let led: Vec<&GroupHandle> = all
            .values()
            .filter(|handle| handle.id().partition != PartitionId::CLUSTER)
            .filter(|handle| handle.leadership().is_local)
            .collect();
        let lacking = led
            .iter()
            .filter(|handle| handle.lacks_voter(MISSING_AFTER));
        ReplicaStatus {
            desired: count(progress.desired),
            open: count(progress.open),
            quarantined: count(progress.quarantined.len()),
            orphaned: count(progress.orphans.len()),
            under_replicated: count(lacking.count()),
            leading: count(led.len()),
        }
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
