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
use qute_proto::v1::{self, ErrorCode};
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

/// Between two attempts to learn what came of a proposal.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Members whose end is proposed: they get no session before it is known what came of it.
struct Ending {
    group: Name,
    members: Vec<(MemberId, u64)>,
    /// By a takeover that may be applied yet, not by expiry.
    is_takeover: bool,
}

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
    let mut endings: VecDeque<Ending> = VecDeque::new();
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
        let doubtful = coordinator.take_doubtful().into_iter();
        endings.extend(doubtful.map(|(group, replaced)| Ending {
            group,
            members: vec![replaced],
            is_takeover: true,
        }));
        while expiring.len() < EXPIRIES_AT_ONCE
            && let Some(next) = endings.pop_front()
        {
            expiring.push(bring_to_an_end(coordinator, next));
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
            Some(Ending { group, members, .. }) = expiring.next(), if !expiring.is_empty() => {
                coordinator.expiry_ended(&group, &members);
            }
            _ = ticker.tick(), if coordinator.wants_ticks() => {
                is_tick = true;
                let expired = coordinator.tick().into_iter();
                endings.extend(expired.map(|(group, members)| Ending {
                    group,
                    members,
                    is_takeover: false,
                }));
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

/// Until the members have gone, or it is known that they stay.
async fn bring_to_an_end(coordinator: &Coordinator, ending: Ending) -> Ending {
    let is_takeover = ending.is_takeover;
    // A takeover has been proposed already: to expire nobody shows what came of it.
    let members = ending.members.iter().filter(|_| !is_takeover);
    let members: Vec<MemberEpoch> = members
        .map(|(id, epoch)| MemberEpoch {
            member_id: id.to_wire(),
            member_epoch: *epoch,
        })
        .collect();
    let expired = members.len();
    let expiry = ExpireMembers {
        group: ending.group.to_string(),
        members,
    };
    let propose = || coordinator.command(Command::Expire(expiry.clone()));
    // What came of it, the state says.
    match settle(is_takeover, propose).await {
        Ok(_) if is_takeover => {}
        Ok(_) => {
            let count = u64::try_from(expired).unwrap_or(u64::MAX);
            metrics::counter!("qute_group_expiries_total").increment(count);
            let ids = ending.members.iter().map(|(id, _)| id.to_string());
            tracing::info!(
                group = &*ending.group,
                members = ids.collect::<Vec<_>>().join(", "),
                "members have expired"
            );
        }
        Err(refused) => {
            tracing::debug!(
                group = &*ending.group,
                error = refused.message,
                "an expiry did not end well"
            );
        }
    }
    ending
}

/// Proposes something that may well be applied twice until it is known what came of all that was
/// submitted: a command whose fate is unknown may be applied much later, but not behind one that was
/// proposed after it in the same term. `is_submitted`: something was, before.
async fn settle<T, F>(
    mut is_submitted: bool,
    mut propose: impl FnMut() -> F,
) -> Result<T, v1::Error>
where
    F: Future<Output = Result<T, v1::Error>>,
{
    loop {
        match propose().await {
            Err(refused) if is_submitted || refused.code() == ErrorCode::OutcomeUnknown => {
                is_submitted = true;
                tracing::debug!(error = refused.message, "what came of it is not known yet");
                tokio::time::sleep(AGAIN_AFTER).await;
            }
            outcome => return outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::proposer::error;

    /// How often is proposed, and what comes of it in the end.
    async fn settled(
        is_submitted: bool,
        outcomes: &[Result<(), ErrorCode>],
    ) -> (usize, Result<(), ErrorCode>) {
        let mut left = outcomes.iter();
        let propose = || {
            let outcome = left.next().expect("one attempt too many");
            std::future::ready(outcome.map_err(|code| error(code, "refused")))
        };
        let outcome = settle(is_submitted, propose).await;
        let attempts = outcomes.len() - left.len();
        (attempts, outcome.map_err(|refused| refused.code()))
    }

    // S26: it could be applied after its member was given a session again.
    #[tokio::test(start_paused = true)]
    async fn s26_proposal_whose_fate_is_unknown_is_not_over_before_a_later_one_is_applied() {
        use ErrorCode::{NotReady, OutcomeUnknown, Overloaded};
        let unknown = Err(OutcomeUnknown);
        let outcomes = [unknown, Err(NotReady), unknown, Ok(())];
        assert_eq!(settled(false, &outcomes).await, (4, Ok(())));
        assert_eq!(settled(true, &[Err(Overloaded), Ok(())]).await, (2, Ok(())));
        // Nothing was written.
        let refused = Err(Overloaded);
        assert_eq!(settled(false, &[refused]).await, (1, refused));
        assert_eq!(settled(false, &[Ok(())]).await, (1, Ok(())));
    }
}
