//! What all coordinators of a broker share: limits, who leads elsewhere, and each other.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use qute_proto::ids::PartitionId;
use qute_proto::v1::{self, ErrorCode};
use tokio::sync::watch;

use super::lead::Coordinator;
use crate::controller::proposer::error;
use crate::env::Clock;
use crate::groups::replica;
use crate::groups::state::Totals;
use crate::partition::directory::LeaderDirectory;

/// What coordinators allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Groups that one broker coordinates.
    pub groups_max: usize,
    /// Members of one group.
    pub members_max: usize,
    /// Committed offsets of one group.
    pub offsets_max: usize,
    /// How long offsets of groups without members are kept.
    pub offsets_retention: Duration,
    /// The shortest session timeout that a member may ask for.
    pub session_timeout_min: Duration,
}

/// See the module.
pub(super) struct Office {
    pub(super) limits: Limits,
    pub(super) directory: Arc<dyn LeaderDirectory>,
    pub(super) clock: Arc<dyn Clock>,
    /// By partition number.
    pub(super) led: watch::Sender<BTreeMap<u32, Arc<Coordinator>>>,
}

impl Office {
    /// How many groups are coordinated here.
    pub(super) fn groups(&self) -> usize {
        let led = self.led.borrow();
        led.values().map(|it| it.read(|groups| groups.len())).sum()
    }

    /// How much is coordinated here.
    pub(super) fn totals(&self) -> Totals {
        let led = self.led.borrow();
        let mut all = Totals::default();
        for one in led.values().map(|it| it.read(|groups| groups.totals())) {
            all.groups += one.groups;
            all.members += one.members;
            all.offsets += one.offsets;
            all.bytes += one.bytes;
        }
        all
    }

    /// What a client is told about a refusal by a replica of `partition`.
    pub(super) fn refusal(&self, refused: &replica::Error, partition: PartitionId) -> v1::Error {
        let code = match refused {
            replica::Error::NotLeader | replica::Error::NotHere(_) => ErrorCode::NotLeader,
            replica::Error::NotReady => ErrorCode::NotReady,
            replica::Error::Overloaded => ErrorCode::Overloaded,
            replica::Error::StorageFull => ErrorCode::StorageFull,
            replica::Error::TooLarge { .. } => ErrorCode::InvalidArgument,
            replica::Error::StateFull { .. } => ErrorCode::GroupLimit,
            replica::Error::OutcomeUnknown => ErrorCode::OutcomeUnknown,
            replica::Error::Malformed(_) => ErrorCode::Internal,
            replica::Error::Quarantined(_) => ErrorCode::ReplicaQuarantined,
        };
        let mut told = error(code, refused.to_string());
        if matches!(
            code,
            ErrorCode::NotLeader | ErrorCode::OutcomeUnknown | ErrorCode::ReplicaQuarantined
        ) {
            told.leader_hint = self.hint(partition);
        }
        told
    }

    /// Who leads a partition, if that is known.
    pub(super) fn hint(&self, partition: PartitionId) -> Option<v1::LeaderHint> {
        let leader = self.directory.leader(partition)?;
        Some(v1::LeaderHint {
            broker_id: leader.broker.0,
            leader_epoch: leader.leader_epoch,
            address: leader.address,
        })
    }
}
