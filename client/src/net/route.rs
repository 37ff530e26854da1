//! The route of one partition's requests: to its leader, or waiting. Used by the producers, which
//! keep the leader's link as the target `T`. Consumers, which may also read from followers, have a
//! route of their own (`consumer/routing.rs`) by the same rules.
//!
//! ```text
//!            leader known                fail: no newer leader
//!   [idle] ---------------> [to leader] -----------------------> [waiting]
//!     ^  ^                       |                                   |
//!     |  '-- fail / on_view: a newer leader is known, at once -------|
//!     '--------------------- on_time: the pause is over -------------'
//! ```
//!
//! Rules (promise 3 of the client):
//! - a leader is left at once only for one of a newer epoch whose address is known;
//! - otherwise a pause with full jitter. One that follows a request which failed is charged to the
//!   client's retry budget; with the budget used up it is longer, so that an outage does not multiply
//!   traffic. Waiting without having asked anybody costs nothing: the many partitions of a dead
//!   broker must not use up what those of the living need;
//! - a broker whose breaker is open is not asked before the breaker allows it.
//!
//! Pure: view, time, draw and budget are given. Use:
//!
//! ```text
//! match route.find(&view, &topic, partition, |address| connections.refused_until(address)) {
//!     Next::To { leader, address } => route.open(link_to(address), leader),
//!     Next::Wait { until, why }    => route.wait(until, Retry::free()),
//!     Next::TopicMissing           => confirm the topic, and route.wait(None, Retry::free()),
//! }
//! ```

use tokio::time::Instant;

use super::{Address, Backoff, Budget};
use crate::config::ClientConfig;
use crate::metadata::{Leader, Metadata, Topic};

/// Where to go, by the present view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Next {
    /// To the leader.
    To { leader: Leader, address: Address },
    /// Nowhere at present; have metadata refreshed. Not before `until`, if it is given.
    Wait {
        until: Option<Instant>,
        why: &'static str,
    },
    /// The view has no such incarnation of the topic: find out whether it is gone.
    TopicMissing,
}

/// What a pause is made of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Retry<'a> {
    pub(crate) now: Instant,
    /// From `0.0..=1.0`.
    pub(crate) draw: f64,
    /// What is charged; `None` if no request left.
    pub(crate) budget: Option<&'a Budget>,
}

impl<'a> Retry<'a> {
    /// By the clock and the dice: after a request that failed.
    pub(crate) fn charged(budget: &'a Budget) -> Self {
        Self {
            budget: Some(budget),
            ..Self::free()
        }
    }

    /// The same where no request left.
    pub(crate) fn free() -> Self {
        Self {
            now: Instant::now(),
            draw: rand::random(),
            budget: None,
        }
    }
}

/// The route of one partition. See the module header.
#[derive(Debug)]
pub(crate) struct Route<T> {
    state: State<T>,
    /// The leader that was left last: only a newer one is gone to at once.
    left: Option<Leader>,
    backoff: Backoff,
}

#[derive(Debug)]
enum State<T> {
    Idle,
    To { target: T, leader: Leader },
    Waiting { until: Instant },
}

impl<T> Route<T> {
    pub(crate) fn new(config: &ClientConfig) -> Self {
        Self {
            state: State::Idle,
            left: None,
            backoff: Backoff::new(config),
        }
    }

    /// Where to go now. Changes nothing.
    pub(crate) fn find(
        &self,
        view: &Metadata,
        topic: &Topic,
        partition: u32,
        refused_until: impl Fn(&Address) -> Option<Instant>,
    ) -> Next {
        if view.topic_by_id(&topic.name, topic.id).is_none() {
            return Next::TopicMissing;
        }
        let wait = |until, why| Next::Wait { until, why };
        match view.leader_of(topic, partition) {
            Some((leader, address)) => match refused_until(address) {
                None => Next::To {
                    leader,
                    address: Address::clone(address),
                },
                until => wait(until, "the leader has failed again and again"),
            },
            None => wait(None, "no leader is known"),
        }
    }

    /// Goes to the leader.
    pub(crate) fn open(&mut self, target: T, leader: Leader) {
        self.state = State::To { target, leader };
    }

    /// No route and no pause: time to [`Self::find`] one.
    pub(crate) fn is_idle(&self) -> bool {
        matches!(self.state, State::Idle)
    }

    /// What the present route leads to.
    pub(crate) fn target(&self) -> Option<&T> {
        match &self.state {
            State::To { target, .. } => Some(target),
            _ => None,
        }
    }

    /// The leader that the present route leads to.
    pub(crate) fn leader(&self) -> Option<Leader> {
        match self.state {
            State::To { leader, .. } => Some(leader),
            _ => None,
        }
    }

    /// When the pause is over.
    pub(crate) fn due(&self) -> Option<Instant> {
        match self.state {
            State::Waiting { until } => Some(until),
            _ => None,
        }
    }

    /// The leader serves: the next pause is short again, and the budget gains.
    pub(crate) fn succeeded(&mut self, budget: &Budget) {
        self.backoff.reset();
        budget.deposit();
    }

    /// The route failed: idle if a newer leader is known, else a pause. Gives the target that was
    /// left.
    pub(crate) fn fail(
        &mut self,
        view: &Metadata,
        topic: &Topic,
        partition: u32,
        retry: Retry<'_>,
    ) -> Option<T> {
        let target = self.leave();
        if !view.has_newer(topic, partition, self.left) {
            self.wait(None, retry);
        }
        target
    }

    /// Pauses, until the given moment at least. Gives the target that was left.
    pub(crate) fn wait(&mut self, at_least: Option<Instant>, retry: Retry<'_>) -> Option<T> {
        let target = self.leave();
        let pause = match retry.budget {
            Some(budget) => self
                .backoff
                .step_within_drawn(budget, retry.now, retry.draw),
            None => self.backoff.step_drawn(retry.draw),
        };
        let until = retry.now + pause;
        self.state = State::Waiting {
            until: at_least.map_or(until, |at_least| at_least.max(until)),
        };
        target
    }

    /// Metadata changed: true if a newer leader is known, which then is to be found at once. The
    /// target that was left comes with it.
    pub(crate) fn on_view(
        &mut self,
        view: &Metadata,
        topic: &Topic,
        partition: u32,
    ) -> (bool, Option<T>) {
        let than = self.leader().or(self.left);
        if self.is_idle() || !view.has_newer(topic, partition, than) {
            return (false, None);
        }
        (true, self.leave())
    }

    /// True if the pause is over.
    pub(crate) fn on_time(&mut self, now: Instant) -> bool {
        let over = self.due().is_some_and(|until| until <= now);
        if over {
            self.state = State::Idle;
        }
        over
    }

    /// Leaves the present route or pause; gives the target.
    pub(crate) fn leave(&mut self) -> Option<T> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::To { target, leader } => {
                self.left = Some(leader);
                Some(target)
            }
            State::Idle | State::Waiting { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use qute_proto::ids::{BrokerId, ClusterId, TopicId};
    use qute_proto::v1;

    use super::*;

    fn topic() -> Topic {
        Topic {
            name: "t".into(),
            id: TopicId(uuid::Uuid::from_u128(1)),
            internal: false,
            leaders: vec![None],
            voters: vec![Vec::new()],
        }
    }

    /// Brokers 1 and 2 are known; the partition is led by this one since this epoch.
    fn view(leader: u64, leader_epoch: u64) -> Metadata {
        let broker = |broker_id: u64| v1::BrokerInfo {
            broker_id,
            address: format!("h{broker_id}:1"),
            ..Default::default()
        };
        let response = v1::MetadataResponse {
            cluster_id: ClusterId(uuid::Uuid::from_u128(7)).to_wire(),
            cluster_index: 1,
            brokers: vec![broker(1), broker(2)],
            topics: vec![v1::TopicInfo {
                name: "t".to_owned(),
                topic_id: topic().id.to_wire(),
                partitions: vec![v1::PartitionInfo {
                    partition: 0,
                    leader,
                    leader_epoch,
                    replicas: Vec::new(),
                }],
                ..Default::default()
            }],
            ..Default::default()
        };
        Metadata::default().merged(&response).unwrap().unwrap()
    }

    fn route() -> Route<u64> {
        Route::new(&ClientConfig::new("h:1").unwrap())
    }

    fn retry(now: Instant, budget: &Budget) -> Retry<'_> {
        Retry {
            now,
            draw: 0.5,
            budget: Some(budget),
        }
    }

    /// Follows the view and opens whatever it says.
    fn go(route: &mut Route<u64>, view: &Metadata) -> Option<u64> {
        match route.find(view, &topic(), 0, |_| None) {
            Next::To { leader, .. } => {
                route.open(leader.broker.0, leader);
                Some(leader.broker.0)
            }
            _ => None,
        }
    }

    #[test]
    fn route_follows_a_newer_leader_at_once_and_waits_for_the_same_one() {
        let (now, budget) = (Instant::now(), Budget::new(Instant::now()));
        let mut route = route();
        assert_eq!(go(&mut route, &view(1, 5)), Some(1));
        assert_eq!(
            route.fail(&view(2, 6), &topic(), 0, retry(now, &budget)),
            Some(1)
        );
        assert!(route.is_idle(), "a newer epoch: at once");
        assert_eq!(go(&mut route, &view(2, 6)), Some(2));
        for hint in [view(1, 6), view(1, 5), view(0, 0)] {
            route.open(
                2,
                Leader {
                    broker: BrokerId(2),
                    epoch: 6,
                },
            );
            route.fail(&hint, &topic(), 0, retry(now, &budget));
            assert!(route.due().is_some_and(|due| due > now), "{hint:?}");
            assert_eq!(route.on_view(&hint, &topic(), 0), (false, None));
        }
        assert_eq!(route.on_view(&view(1, 7), &topic(), 0), (true, None));
        assert!(route.is_idle());
    }

    #[test]
    fn route_to_a_silent_leader_is_left_when_the_view_knows_a_newer_one() {
        let mut route = route();
        go(&mut route, &view(1, 5));
        assert_eq!(route.on_view(&view(2, 5), &topic(), 0), (false, None));
        assert_eq!(route.on_view(&view(2, 6), &topic(), 0), (true, Some(1)));
    }

    #[test]
    fn route_wrong_hint_of_the_same_epoch_for_ten_seconds_is_bounded_by_the_back_off() {
        let start = Instant::now();
        let budget = Budget::new(start);
        let mut route = route();
        let mut now = start;
        let mut requests = 0;
        while now < start + Duration::from_secs(10) {
            assert!(go(&mut route, &view(1, 5)).is_some());
            requests += 1;
            // The worst draw there is.
            let worst = Retry {
                now,
                draw: 0.0,
                budget: Some(&budget),
            };
            route.fail(&view(2, 5), &topic(), 0, worst);
            now = route.due().unwrap();
            assert!(route.on_time(now));
        }
        // A hundred saved retries at the floor, then ten a second and one longest pause each.
        assert!(requests <= 100 + 2 * 10 * 10, "{requests}");
    }

    #[test]
    fn route_without_a_leader_for_five_seconds_asks_nobody_and_goes_as_soon_as_there_is_one() {
        let start = Instant::now();
        let budget = Budget::new(start);
        let mut route = route();
        assert_eq!(go(&mut route, &view(1, 5)), Some(1));
        let (mut now, mut looks) = (start, 0);
        route.fail(&view(0, 0), &topic(), 0, retry(now, &budget));
        while now < start + Duration::from_secs(5) {
            now = route.due().unwrap();
            assert!(route.on_time(now));
            assert_eq!(go(&mut route, &view(0, 0)), None);
            looks += 1;
            route.wait(None, retry(now, &budget));
            assert_eq!(route.on_view(&view(0, 0), &topic(), 0), (false, None));
        }
        assert!(looks < 40, "{looks} times metadata was asked for");
        // In the middle of a pause.
        assert_eq!(route.on_view(&view(2, 6), &topic(), 0), (true, None));
        assert_eq!(go(&mut route, &view(2, 6)), Some(2));
    }

    #[test]
    fn route_between_two_brokers_that_name_each_other_stays_with_the_epoch_that_is_known() {
        let start = Instant::now();
        let budget = Budget::new(start);
        let mut route = route();
        let mut known = view(1, 5);
        let (mut now, mut requests) = (start, 0);
        while now < start + Duration::from_secs(10) {
            assert_eq!(go(&mut route, &known), Some(1), "never to the other one");
            requests += 1;
            let hint = v1::LeaderHint {
                broker_id: 2,
                leader_epoch: 5,
                address: "h2:1".to_owned(),
            };
            if let Some(obeyed) = known.with_hint("t", topic().id, 0, &hint) {
                known = obeyed;
            }
            route.fail(&known, &topic(), 0, retry(now, &budget));
            now = route.due().unwrap();
            assert!(route.on_time(now));
        }
        assert!(requests < 60, "{requests}");
    }

    #[test]
    fn route_to_a_broker_that_is_being_probed_goes_soon_after_the_probe_has_succeeded() {
        use super::super::breaker::{Admission, Breaker, Failure};
        let start = Instant::now();
        let mut breaker = Breaker::default();
        breaker.failed(Failure::Silence, start, 1.0);
        let probed = breaker.refused_until(start).unwrap();
        let limit = Duration::from_secs(6);
        assert_eq!(breaker.admit(probed, limit), Admission::Probe);
        let mut route = route();
        let Next::Wait { until, .. } =
            route.find(&view(1, 5), &topic(), 0, |_| breaker.refused_until(probed))
        else {
            panic!("it is being probed");
        };
        let worst = Retry {
            now: probed,
            draw: 0.0,
            budget: None,
        };
        route.wait(until, worst);
        breaker.succeeded();
        let due = route.due().unwrap();
        assert!(
            due <= probed + Duration::from_millis(150),
            "{:?}",
            due - probed
        );
        assert!(route.on_time(due));
        assert_eq!(go(&mut route, &view(1, 5)), Some(1));
    }

    #[test]
    fn route_that_waits_without_asking_leaves_the_budget_to_requests_that_fail() {
        let now = Instant::now();
        let budget = Budget::new(now);
        // The partitions of a dead broker, for a while.
        let waits = Retry {
            budget: None,
            ..retry(now, &budget)
        };
        for _ in 0..200 {
            route().wait(Some(now + Duration::from_secs(1)), waits);
        }
        let mut other = route();
        go(&mut other, &view(1, 5));
        other.fail(&view(1, 5), &topic(), 0, retry(now, &budget));
        let shortest = Duration::from_millis(100);
        assert!(other.due().is_some_and(|due| due < now + shortest));
    }

    #[test]
    fn route_without_budget_pauses_longer() {
        let now = Instant::now();
        let budget = Budget::new(now);
        while budget.withdraw(now) {}
        let mut route = route();
        go(&mut route, &view(1, 5));
        route.fail(&view(1, 5), &topic(), 0, retry(now, &budget));
        assert!(route.due().unwrap() >= now + Duration::from_millis(500));
    }

    #[test]
    fn route_to_a_leader_without_an_address_waits_and_goes_as_soon_as_it_has_one() {
        let (now, budget) = (Instant::now(), Budget::new(Instant::now()));
        let mut route = route();
        go(&mut route, &view(1, 5));
        let unknown = view(9, 6);
        route.fail(&unknown, &topic(), 0, retry(now, &budget));
        assert!(route.due().is_some());
        assert!(matches!(
            route.find(&unknown, &topic(), 0, |_| None),
            Next::Wait { until: None, .. }
        ));
        let mut known = unknown;
        let hint = v1::LeaderHint {
            broker_id: 2,
            leader_epoch: 7,
            address: String::new(),
        };
        known = known.with_hint("t", topic().id, 0, &hint).unwrap();
        assert_eq!(route.on_view(&known, &topic(), 0), (true, None));
        assert_eq!(go(&mut route, &known), Some(2));
    }

    #[test]
    fn route_to_a_broker_with_an_open_breaker_waits_for_the_breaker() {
        let (now, budget) = (Instant::now(), Budget::new(Instant::now()));
        let later = now + Duration::from_secs(1);
        let mut route = route();
        let next = route.find(&view(1, 5), &topic(), 0, |address| {
            (&**address == "h1:1").then_some(later)
        });
        let Next::Wait { until, .. } = next else {
            panic!("{next:?}");
        };
        route.wait(until, retry(now, &budget));
        assert_eq!(route.due(), Some(later));
    }

    #[test]
    fn route_of_a_topic_that_is_not_in_the_view_is_told_apart() {
        let route = route();
        let other = Topic {
            id: TopicId(uuid::Uuid::from_u128(2)),
            ..topic()
        };
        let next = route.find(&view(1, 5), &other, 0, |_| None);
        assert_eq!(next, Next::TopicMissing);
    }
}
