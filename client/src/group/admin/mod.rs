//! [`GroupAdmin`]: groups from outside: list, describe, offsets, lag, reset, delete, and commits of
//! programs that are no members.
//!
//! | file | holds |
//! | --- | --- |
//! | `describe.rs` | listings and descriptions |
//! | `lag.rs` | how far a group is behind the ends of its partitions |
//! | `reset.rs` | setting committed offsets: a plan, what it would do, and doing it |
//! | `commit.rs` | commits without membership |

mod commit;
mod describe;
mod lag;
mod reset;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use qute_proto::ids::TopicId;
use qute_proto::v1;
use tokio::time::Instant;

pub use commit::OffsetCommit;
pub use describe::{
    AssignorName, CommittedOffset, GroupDescription, GroupListing, GroupMember, GroupPartition,
    GroupState, HeldClaim, SubscribedTopic,
};
pub use lag::PartitionLag;
pub use reset::{OffsetMove, PlannedReset, ResetPlan, ResetTo};

use super::coordinator::{Wanted, ask_coordinator, known_groups_topic};
use crate::client::{Client, Shared};
use crate::error::{Error, ErrorKind, Result};
use crate::metadata::{Metadata, Topic};

/// Groups from outside: see [`Client::groups`]. Cheap to clone.
///
/// Every call finds the group's coordinator, follows it when it moves, and ends by the client's call
/// timeout.
#[derive(Clone)]
pub struct GroupAdmin {
    shared: Arc<Shared>,
}

impl Client {
    /// Groups from outside: list and describe them, read, reset and commit their offsets, delete them.
    ///
    /// ```no_run
    /// use qute_client::group::{ResetPlan, ResetTo};
    ///
    /// # async fn example(client: qute_client::Client) -> qute_client::Result<()> {
    /// let groups = client.groups();
    /// for partition in groups.lag("billing").await? {
    ///     println!("{}: {:?} to go", partition.partition, partition.lag);
    /// }
    /// let planned = groups.reset("billing", ResetPlan::new(ResetTo::Start).topic("orders")).await?;
    /// for change in planned.moves() {
    ///     println!("{}: from {:?} to {:?}", change.partition, change.from, change.to);
    /// }
    /// planned.execute().await?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn groups(&self) -> GroupAdmin {
        GroupAdmin {
            shared: Arc::clone(&self.shared),
        }
    }
}

impl GroupAdmin {
    /// Forgets a group that has no members, with its committed offsets.
    ///
    /// # Errors
    /// [`ErrorKind::UnknownGroup`]; [`ErrorKind::GroupNotEmpty`] if it has members;
    /// [`ErrorKind::Timeout`].
    ///
    /// # Cancel safety
    /// Cancelled, the group may be gone or not.
    pub async fn delete(&self, group: &str) -> Result<()> {
        let deadline = self.deadline();
        self.known(group, deadline).await?;
        let request = v1::DeleteGroupRequest {
            group: group.to_owned(),
        };
        let wanted = Wanted::Group(group.into());
        let deleted = ask_coordinator(&self.shared, wanted, deadline, &request);
        match deleted.await {
            Ok(_) => Ok(()),
            // By the attempt before.
            Err(failed) if failed.repeated && failed.error.kind() == ErrorKind::UnknownGroup => {
                Ok(())
            }
            Err(failed) => Err(failed.error),
        }
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.shared.config.call_timeout
    }

    /// That there can be such a group. Where there has never been one, asking for it makes none.
    async fn known(&self, group: &str, deadline: Instant) -> Result<()> {
        check_name(group)?;
        match known_groups_topic(&self.shared, deadline).await? {
            Some(_) => Ok(()),
            None => Err(Error::new(
                ErrorKind::UnknownGroup,
                format!("there is no group `{group}`: the cluster has never had one"),
            )),
        }
    }
}

/// The rules of group names.
pub(super) fn check_name(group: &str) -> Result<()> {
    qute_proto::group::check_name(group)
        .map_err(|error| Error::new(ErrorKind::InvalidGroupName, error.to_string()))
}

/// The topics of a view by their ids.
struct TopicsById(BTreeMap<TopicId, Arc<Topic>>);

impl TopicsById {
    fn new(view: &Metadata) -> Self {
        let topics = view.topics.values();
        Self(topics.map(|it| (it.id, Arc::clone(it))).collect())
    }

    fn get(&self, id: TopicId) -> Option<&Arc<Topic>> {
        self.0.get(&id)
    }

    fn partition(&self, topic_id: TopicId, partition: u32) -> GroupPartition {
        GroupPartition {
            topic: self.get(topic_id).map(|topic| Arc::clone(&topic.name)),
            topic_id,
            partition,
        }
    }
}

fn topic_id(bytes: &[u8]) -> Result<TopicId> {
    let bad = || {
        Error::new(
            ErrorKind::Protocol,
            "the coordinator's answer lacks a topic id",
        )
    };
    TopicId::from_wire(bytes).ok_or_else(bad)
}

impl fmt::Debug for GroupAdmin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupAdmin").finish_non_exhaustive()
    }
}
