//! The task of one coordinator: confirm rounds, ticks, expiries, changes that were applied.
//!
//! One round is in flight at a time; the next serves all that came meanwhile. Heartbeats wait for the
//! tick, so that many share a round; reads and joins do not.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use qute_proto::ids::MemberId;
use qute_proto::internal::groups_command::Command;
use qute_proto::internal::{ExpireMembers, MemberEpoch};
use qute_proto::v1;
use tokio::time::{Instant, MissedTickBehavior};

use super::lead::{Coordinator, Pending};
use super::sessions::Name;
use super::steady::TICK;
use crate::groups::machine::Changed;
use crate::groups::replica;

/// A round that takes longer has found no quorum.
const CONFIRM_WITHIN: Duration = Duration::from_secs(2);
/// Expiries that are proposed at once: a coordinator whose members have all gone must not flood its log.
const EXPIRIES_AT_ONCE: usize = 64;
/// Between two looks at what has changed, at least: a burst makes one update for each member.
const CHANGES_PAUSE: Duration = Duration::from_millis(5);

/// And that much more for each member that may have to be told: about what an update costs.
const UPDATE_COST: Duration = Duration::from_micros(50);
/// Groups that are taken in without a break.
const GROUPS_AT_ONCE: usize = 128;

type Expired = (Name, Vec<(MemberId, u64)>);

/// Runs until the replica leads no more in the coordinator's term. Returns why. Calls `began` once it
/// knows all members.
pub(super) async fn drive(coordinator: &Arc<Coordinator>, began: impl FnOnce()) -> v1::Error {
    coordinator.begin();
    began();
    let (replica, term) = (&coordinator.replica, coordinator.term);
    let mut leadership = replica.group().watch_leadership();
    let mut ticker = tokio::time::interval(TICK);
    ticker.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut rounds = FuturesUnordered::new();
    let mut expiring = FuturesUnordered::new();
    let mut expired: VecDeque<Expired> = VecDeque::new();
    let mut is_tick = false;
    let mut pause: Option<Instant> = None;
    let not_leader = || {
        coordinator
            .office
            .refusal(&replica::Error::NotLeader, replica.partition())
    };
    loop {
        let now = leadership.current();
        if !now.is_local || now.term != term {
            return not_leader();
        }
        if rounds.is_empty()
            && let Some(pending) = coordinator.begin_round(std::mem::take(&mut is_tick))
        {
            rounds.push(confirm(coordinator, pending));
        }
        while expiring.len() < EXPIRIES_AT_ONCE
            && let Some(next) = expired.pop_front()
        {
            expiring.push(expire(coordinator, next));
        }
        tokio::select! {
            change = leadership.changed() => if change.is_none() {
                return not_leader();
            },
            () = replica.closed() => return not_leader(),
            Some((pending, outcome)) = rounds.next(), if !rounds.is_empty() => {
                if let Err(refused) = answer(coordinator, pending, outcome) {
                    return refused;
                }
            }
            Some((name, members)) = expiring.next(), if !expiring.is_empty() => {
                coordinator.expiry_ended(&name, &members);
            }
            _ = ticker.tick(), if coordinator.wants_ticks() => {
                is_tick = true;
                expired.extend(coordinator.tick());
            }
            changed = replica.state().changed(), if pause.is_none() => {
                let told = refresh(coordinator, changed).await;
                pause = Some(Instant::now() + CHANGES_PAUSE + UPDATE_COST * told);
            }
            () = until(pause), if pause.is_some() => pause = None,
            () = coordinator.work.notified() => {}
        }
    }
}

/// Takes in what has changed. Returns how many members may have something to be told.
async fn refresh(coordinator: &Coordinator, changed: Changed) -> u32 {
    let names = match changed {
        Changed::All => coordinator.groups(),
        Changed::Groups(names) => names.into_iter().collect(),
    };
    let mut told = 0;
    for some in names.chunks(GROUPS_AT_ONCE) {
        let counts = some.iter().map(|name| coordinator.refresh(name));
        told += counts.sum::<usize>();
        // Others want the thread, too.
        tokio::task::yield_now().await;
    }
    u32::try_from(told).unwrap_or(u32::MAX)
}

async fn until(end: Option<Instant>) {
    if let Some(end) = end {
        tokio::time::sleep_until(end).await;
    }
}

async fn confirm(
    coordinator: &Coordinator,
    pending: Pending,
) -> (Pending, Result<u64, replica::Error>) {
    metrics::counter!("qute_group_confirm_rounds_total").increment(1);
    let outcome = coordinator.replica.confirm(CONFIRM_WITHIN).await;
    (pending, outcome)
}

/// # Errors
/// It leads no more.
fn answer(
    coordinator: &Coordinator,
    pending: Pending,
    outcome: Result<u64, replica::Error>,
) -> Result<(), v1::Error> {
    let refused = match outcome {
        Ok(term) if term == coordinator.term => {
            coordinator.confirmed(pending);
            return Ok(());
        }
        Ok(_) => replica::Error::NotLeader,
        Err(refused) => refused,
    };
    let partition = coordinator.partition();
    let told = coordinator.office.refusal(&refused, partition);
    if refused == replica::Error::NotReady {
        tracing::warn!(%partition, "no quorum: its members are sent to look elsewhere");
        coordinator.unconfirmed(pending, &told);
        return Ok(());
    }
    Err(told)
}

async fn expire(coordinator: &Coordinator, (name, members): Expired) -> Expired {
    let epochs = members.iter().map(|(id, epoch)| MemberEpoch {
        member_id: id.to_wire(),
        member_epoch: *epoch,
    });
    let command = Command::Expire(ExpireMembers {
        group: name.to_string(),
        members: epochs.collect(),
    });
    // What came of it, the state says.
    match coordinator.command(command).await {
        Ok(_) => {
            let count = u64::try_from(members.len()).unwrap_or(u64::MAX);
            metrics::counter!("qute_group_expiries_total").increment(count);
            let ids: Vec<String> = members.iter().map(|(id, _)| id.to_string()).collect();
            tracing::info!(
                group = &*name,
                members = ids.join(", "),
                "members have expired"
            );
        }
        Err(refused) => {
            tracing::debug!(
                group = &*name,
                error = refused.message,
                "an expiry did not end well"
            );
        }
    }
    (name, members)
}
