//! What a coordinator does now and then: forgets offsets that nobody has used for long, and topics that
//! have been deleted.
//!
//! S22: a topic that a view lacks may only be unknown to it. Forgotten is what this broker has seen go
//! from one view to the next, or what the controller's ledger of deletions names.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use qute_proto::ids::{PartitionId, TopicId};
use qute_proto::internal::groups_command::Command;
use qute_proto::internal::{ForgetTopics, SweepOffsets};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use super::lead::Coordinator;
use crate::controller::view::ClusterView;
use crate::groups::state::{Group, Slot};
use crate::partition::directory::Presence;

const PERIOD_MIN: Duration = Duration::from_millis(200);
const PERIOD_MAX: Duration = Duration::from_secs(600);
/// A tenth of the retention is as exact as it needs to be.
const PERIODS: u32 = 10;
/// Topics named in one command.
const TOPICS_AT_ONCE: usize = 1000;

/// Runs until it is dropped.
pub(super) async fn run(coordinator: &Coordinator, mut view: watch::Receiver<Arc<ClusterView>>) {
    let retention = coordinator.office.limits.offsets_retention;
    let period = (retention / PERIODS).clamp(PERIOD_MIN, PERIOD_MAX);
    let mut ticker = tokio::time::interval_at(Instant::now() + period, period);
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last = Arc::clone(&view.borrow_and_update());
    forget(coordinator, |topic| is_deleted(coordinator, topic)).await;
    loop {
        tokio::select! {
            _ = ticker.tick() => {
                sweep(coordinator, retention).await;
                forget(coordinator, |topic| is_deleted(coordinator, topic)).await;
            }
            changed = view.changed() => {
                if changed.is_err() {
                    // The controller has ended, and the broker with it.
                    return std::future::pending().await;
                }
                let now = Arc::clone(&view.borrow_and_update());
                let gone = gone(&last, &now);
                last = now;
                if !gone.is_empty() {
                    forget(coordinator, |topic| gone.contains(&topic)).await;
                }
            }
        }
    }
}

/// The topics that a newer view has no more.
fn gone(last: &ClusterView, now: &ClusterView) -> BTreeSet<TopicId> {
    let before = last.topics_by_id.keys();
    before
        .filter(|topic| !now.topics_by_id.contains_key(topic))
        .copied()
        .collect()
}

fn is_deleted(coordinator: &Coordinator, topic: TopicId) -> bool {
    let partition = PartitionId {
        topic,
        partition: 0,
    };
    let presence = coordinator.office.directory.presence(partition);
    matches!(presence, Presence::Deleted { .. })
}

fn topics_of(group: &Group) -> impl Iterator<Item = TopicId> {
    let read = group.members().iter().flat_map(|member| &member.topics);
    let known = group.slots().iter().map(|(topic, _)| topic);
    read.map(|one| one.topic).chain(known)
}

async fn forget(coordinator: &Coordinator, is_deleted: impl Fn(TopicId) -> bool) {
    let known: BTreeSet<TopicId> = coordinator.read(|groups| {
        let groups = groups.iter_after("");
        groups.flat_map(|(_, group)| topics_of(group)).collect()
    });
    let mut deleted = known
        .into_iter()
        .filter(|topic| is_deleted(*topic))
        .peekable();
    while deleted.peek().is_some() {
        let topic_ids: Vec<_> = deleted.by_ref().take(TOPICS_AT_ONCE).collect();
        tracing::info!(topics = ?topic_ids, "deleted topics are forgotten by their groups");
        let topic_ids = topic_ids.into_iter().map(TopicId::to_wire).collect();
        let command = Command::ForgetTopics(ForgetTopics { topic_ids });
        if let Err(refused) = coordinator.command(command).await {
            // The next look finds what is left.
            tracing::debug!(error = refused.message, "deleted topics were not forgotten");
            return;
        }
    }
}

/// Whether a sweep would forget something of a group.
fn is_old(group: &Group, is_over: impl Fn(u64) -> bool) -> bool {
    let is_kept = |slot: &Slot| slot.committed().is_some_and(|it| !is_over(it.time_ms));
    // One that never had a partition has no slots.
    let holds_nothing = group.slots().committed() == 0;
    let mut slots = group.slots().iter();
    group.empty_since_ms().is_some_and(&is_over)
        && (holds_nothing || slots.any(|(_, slot)| !is_kept(slot)))
}

async fn sweep(coordinator: &Coordinator, retention: Duration) {
    let retention_ms = u64::try_from(retention.as_millis()).unwrap_or(u64::MAX);
    let now_ms = coordinator.office.clock.wall_ms();
    // No entry in the log for nothing.
    let is_over = |since_ms: u64| now_ms.saturating_sub(since_ms) >= retention_ms;
    let is_any_old = coordinator.read(|groups| {
        let mut groups = groups.iter_after("");
        groups.any(|(_, group)| is_old(group, is_over))
    });
    if !is_any_old {
        return;
    }
    let command = Command::Sweep(SweepOffsets { retention_ms });
    if let Err(refused) = coordinator.command(command).await {
        tracing::debug!(error = refused.message, "old offsets were not swept");
    }
}

#[cfg(test)]
mod tests {
    use qute_proto::ids::MemberId;
    use qute_proto::internal::{JoinMember, LeaveMember};
    use qute_proto::v1;

    use super::*;
    use crate::groups::state::{At, Groups};

    #[test]
    fn group_that_never_had_a_partition_is_old_once_it_has_been_empty_for_long() {
        let mut groups = Groups::default();
        let member_id = MemberId::random().to_wire();
        let join = v1::Join {
            group: "g".to_owned(),
            member_id: member_id.clone(),
            member_epoch: 1,
            assignors: vec![v1::AssignorVersion::default()],
            ..v1::Join::default()
        };
        let join = JoinMember {
            join: Some(join),
            ..JoinMember::default()
        };
        let at = |index, time_ms| At { index, time_ms };
        groups.apply(at(1, 1000), Command::Join(join));
        let old = |groups: &Groups, now_ms: u64| {
            let group = groups.get("g").unwrap();
            is_old(group, |since_ms| now_ms - since_ms >= 500)
        };
        assert!(!old(&groups, 9000), "it has a member");

        let leave = LeaveMember {
            group: "g".to_owned(),
            member_id,
            member_epoch: 1,
            ..LeaveMember::default()
        };
        groups.apply(at(2, 2000), Command::Leave(leave));
        assert_eq!(groups.get("g").unwrap().slots().iter().count(), 0);
        assert!(!old(&groups, 2499));
        assert!(old(&groups, 2500));

        let sweep = SweepOffsets { retention_ms: 500 };
        groups.apply(at(3, 2500), Command::Sweep(sweep));
        assert!(groups.is_empty());
    }
}
