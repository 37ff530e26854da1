//! Which broker leads which group, as far as this broker has heard.
//!
//! Fed at first hand by the groups that have a replica here, and by the hints that other brokers
//! send about the groups they lead themselves. The newest term wins, so hints may come late,
//! twice or in any order. Nothing durable hangs on it: a client that is sent to the wrong broker
//! is told so there.
//!
//! One task ([`run`]) follows all local groups and tells the others: what changed at once
//! (coalesced), everything now and then and whenever a connection comes up.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt as _};
use parking_lot::Mutex;
use qute_proto::ids::{BrokerId, PartitionId};
use qute_proto::internal::{GroupLeader, LeaderHints};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior};

use super::view::ClusterView;
use crate::raft::{GroupHandle, GroupId, Leadership, LeadershipWatch};

/// Changes that come within this time travel in one message.
const COALESCE: Duration = Duration::from_millis(10);
/// How often new connections are looked for.
const CONNECT_CHECK: Duration = Duration::from_secs(1);
/// After this many checks everything is told again to everybody.
const FULL_EVERY: u32 = 15;
/// A hint about a topic that no view shows is kept for this long.
const EARLY: Duration = Duration::from_secs(30);
/// Hints taken from one message, at most.
const HINTS_MAX: usize = 100_000;

/// A leadership, as heard of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// Raft term: the leader epoch.
    pub term: u64,
    /// Who leads in that term; `None`: an election is on.
    pub broker: Option<BrokerId>,
}

#[derive(Debug, Default)]
struct Table {
    known: HashMap<GroupId, Known>,
    /// Groups that this broker leads now, by their term.
    leading: HashMap<GroupId, u64>,
    /// Groups of topics that no view has shown, and since when: a hint may be faster than the view.
    early: HashMap<GroupId, Instant>,
}

/// The leader table.
#[derive(Debug)]
pub struct Leaders {
    own: BrokerId,
    // Short: look-ups and inserts only, never across an await.
    table: Mutex<Table>,
    changes: watch::Sender<u64>,
}

impl Leaders {
    /// An empty table of the broker `own`.
    #[must_use]
    pub fn new(own: BrokerId) -> Self {
        Self {
            own,
            table: Mutex::default(),
            changes: watch::Sender::new(0),
        }
    }

    /// Rises with each change.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// The newest leadership heard of.
    #[must_use]
    pub fn get(&self, partition: PartitionId) -> Option<Known> {
        self.table
            .lock()
            .known
            .get(&GroupId::new(partition))
            .copied()
    }

    /// How many groups this broker leads.
    #[must_use]
    pub fn led_here(&self) -> usize {
        self.table.lock().leading.len()
    }

    /// Takes one piece of news; `true` if it was news.
    pub fn learn(&self, group: GroupId, news: Known) -> bool {
        let mut table = self.table.lock();
        let fresh = match table.known.get(&group) {
            None => true,
            Some(known) => {
                news.term > known.term
                    || (news.term == known.term && known.broker.is_none() && news.broker.is_some())
            }
        };
        if fresh {
            table.known.insert(group, news);
            drop(table);
            self.changes.send_modify(|n| *n += 1);
        }
        fresh
    }

    /// Takes another broker's hints.
    pub fn learn_hints(&self, hints: &LeaderHints) {
        for hint in hints.leaders.iter().take(HINTS_MAX) {
            let Some(group) = hint.group.as_ref().and_then(GroupId::from_wire) else {
                continue;
            };
            if hint.broker_id != 0 && hint.broker_id != self.own.0 {
                let broker = Some(BrokerId(hint.broker_id));
                self.learn(
                    group,
                    Known {
                        term: hint.term,
                        broker,
                    },
                );
            }
        }
    }

    /// Notes what a local replica says; a hint for the others if this broker leads now.
    pub fn learn_local(&self, group: GroupId, leadership: Leadership) -> Option<GroupLeader> {
        let broker = leadership.leader.map(|leader| leader.broker);
        let term = leadership.term;
        {
            let mut table = self.table.lock();
            if leadership.is_local {
                table.leading.insert(group, term);
            } else {
                table.leading.remove(&group);
            }
        }
        self.learn(group, Known { term, broker });
        leadership.is_local.then(|| self.hint(group, term))
    }

    /// A local replica has stopped.
    pub fn forget_local(&self, group: GroupId) {
        self.table.lock().leading.remove(&group);
    }

    /// Everything that this broker leads.
    #[must_use]
    pub fn led(&self) -> Vec<GroupLeader> {
        let table = self.table.lock();
        table
            .leading
            .iter()
            .map(|(group, term)| self.hint(*group, *term))
            .collect()
    }

    fn hint(&self, group: GroupId, term: u64) -> GroupLeader {
        GroupLeader {
            group: Some(group.to_wire()),
            broker_id: self.own.0,
            term,
        }
    }

    /// Forgets topics that are gone. One that is not there yet is given some time.
    pub fn keep_existing(&self, view: &ClusterView) {
        let exists = |group: &GroupId| {
            group.partition == PartitionId::CLUSTER
                || view.topics_by_id.contains_key(&group.partition.topic)
        };
        let mut table = self.table.lock();
        let Table { known, early, .. } = &mut *table;
        early.retain(|group, _| known.contains_key(group) && !exists(group));
        known.retain(|group, _| {
            let mut is_young =
                || early.entry(*group).or_insert_with(Instant::now).elapsed() < EARLY;
            exists(group) || is_young()
        });
    }
}

/// How hints reach other brokers.
pub trait HintLink: Send + Sync + 'static {
    /// To one broker; `false` if it is not connected.
    fn send(&self, broker: BrokerId, leaders: Vec<GroupLeader>) -> bool;
    /// To all that are connected.
    fn broadcast(&self, leaders: Vec<GroupLeader>);
    /// Who is connected.
    fn connected(&self) -> BTreeSet<BrokerId>;
}

type Next = BoxFuture<'static, (GroupId, LeadershipWatch, Option<Leadership>)>;

fn next(group: GroupId, mut watched: LeadershipWatch) -> Next {
    Box::pin(async move {
        let leadership = watched.changed().await;
        (group, watched, leadership)
    })
}

/// Follows the local groups handed in, and tells the others. Ends when `opened` is closed.
pub async fn run(
    leaders: Arc<Leaders>,
    link: impl HintLink,
    mut opened: mpsc::Receiver<GroupHandle>,
) {
    let mut following: FuturesUnordered<Next> = FuturesUnordered::new();
    let mut connected = BTreeSet::new();
    let mut checks: u32 = 0;
    let mut check = tokio::time::interval(CONNECT_CHECK);
    check.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut news: Vec<GroupLeader> = Vec::new();
    loop {
        let tell = async {
            if news.is_empty() {
                std::future::pending().await
            } else {
                tokio::time::sleep(COALESCE).await;
            }
        };
        tokio::select! {
            handle = opened.recv() => {
                let Some(handle) = handle else { return };
                let (group, watched) = (handle.id(), handle.watch_leadership());
                news.extend(leaders.learn_local(group, watched.current()));
                following.push(next(group, watched));
            }
            Some((group, watched, leadership)) = following.next() => match leadership {
                Some(leadership) => {
                    news.extend(leaders.learn_local(group, leadership));
                    following.push(next(group, watched));
                }
                None => leaders.forget_local(group),
            },
            () = tell => link.broadcast(std::mem::take(&mut news)),
            _ = check.tick() => {
                let now = link.connected();
                checks = checks.wrapping_add(1);
                let led = leaders.led();
                if !led.is_empty() {
                    if checks.is_multiple_of(FULL_EVERY) {
                        link.broadcast(led);
                    } else {
                        for broker in now.difference(&connected) {
                            link.send(*broker, led.clone());
                        }
                    }
                }
                connected = now;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use qute_proto::ids::{ReplicaId, TopicId};

    use super::*;
    use crate::raft::Leader;

    fn group(partition: u32) -> GroupId {
        GroupId::new(PartitionId {
            topic: TopicId(uuid::Uuid::from_u128(9)),
            partition,
        })
    }

    fn hints(list: &[(u32, u64, u64)]) -> LeaderHints {
        LeaderHints {
            leaders: list
                .iter()
                .map(|(partition, broker, term)| GroupLeader {
                    group: Some(group(*partition).to_wire()),
                    broker_id: *broker,
                    term: *term,
                })
                .collect(),
        }
    }

    fn leadership(term: u64, broker: Option<u64>, own: u64) -> Leadership {
        Leadership {
            term,
            leader: broker.map(|id| Leader {
                replica: ReplicaId(id),
                broker: BrokerId(id),
            }),
            is_local: broker == Some(own),
        }
    }

    #[test]
    fn newest_term_wins_in_any_order() {
        let leaders = Leaders::new(BrokerId(1));
        leaders.learn_hints(&hints(&[(0, 2, 5)]));
        leaders.learn_hints(&hints(&[(0, 3, 4)]));
        let known = leaders.get(group(0).partition).unwrap();
        assert_eq!((known.broker, known.term), (Some(BrokerId(2)), 5));
        leaders.learn_hints(&hints(&[(0, 3, 6)]));
        assert_eq!(
            leaders.get(group(0).partition).unwrap().broker,
            Some(BrokerId(3))
        );
    }

    #[test]
    fn election_hides_the_old_leader_until_the_new_one_is_known() {
        let leaders = Leaders::new(BrokerId(1));
        assert!(
            leaders
                .learn_local(group(0), leadership(5, Some(1), 1))
                .is_some()
        );
        assert_eq!(leaders.led_here(), 1);
        assert!(
            leaders
                .learn_local(group(0), leadership(6, None, 1))
                .is_none()
        );
        let known = leaders.get(group(0).partition).unwrap();
        assert_eq!((known.broker, known.term), (None, 6));
        assert_eq!(leaders.led_here(), 0);
        leaders.learn_hints(&hints(&[(0, 3, 6)]));
        assert_eq!(
            leaders.get(group(0).partition).unwrap().broker,
            Some(BrokerId(3))
        );
    }

    #[test]
    fn hints_about_oneself_and_malformed_ones_are_ignored() {
        let leaders = Leaders::new(BrokerId(1));
        leaders.learn_hints(&hints(&[(0, 1, 9), (1, 0, 9)]));
        leaders.learn_hints(&LeaderHints {
            leaders: vec![GroupLeader {
                group: None,
                broker_id: 2,
                term: 3,
            }],
        });
        assert!(leaders.get(group(0).partition).is_none());
        assert_eq!(*leaders.changes().borrow(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn hint_that_is_faster_than_the_view_is_kept_and_goes_in_the_end() {
        let leaders = Leaders::new(BrokerId(1));
        let news = Known {
            term: 3,
            broker: Some(BrokerId(2)),
        };
        leaders.learn(group(0), news);
        leaders.learn(GroupId::CLUSTER, news);
        leaders.keep_existing(&ClusterView::default());
        assert_eq!(leaders.get(group(0).partition), Some(news));
        tokio::time::advance(EARLY).await;
        leaders.keep_existing(&ClusterView::default());
        assert_eq!(leaders.get(group(0).partition), None);
        assert_eq!(leaders.get(PartitionId::CLUSTER), Some(news));
        assert!(leaders.table.lock().early.contains_key(&group(0)));
        leaders.keep_existing(&ClusterView::default());
        assert!(leaders.table.lock().early.is_empty());
    }
}
