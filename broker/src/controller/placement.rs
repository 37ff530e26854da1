//! Where the replicas of a new topic go. Pure functions.
//!
//! Each partition takes the least loaded brokers, on as many racks as there are, and its first
//! replica (the one that initializes the group and so leads first) is the one that leads least.

use std::collections::{BTreeMap, BTreeSet};

use qute_proto::ids::BrokerId;

use super::view::ClusterView;

/// Partitions of one topic, at most.
pub const PARTITIONS_MAX: u32 = 1024;
/// Partitions of a topic whose creator did not say.
pub const PARTITIONS_DEFAULT: u32 = 6;
/// Replicas of a partition, at most.
pub const REPLICAS_MAX: u32 = 7;

/// A broker that may take replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Which one.
    pub broker: BrokerId,
    /// Its failure domain; empty: a domain of its own.
    pub rack: String,
    /// Replicas it keeps already.
    pub replicas: u64,
    /// Partitions whose first replica it is already.
    pub leaders: u64,
}

/// Why no placement was made; the text is for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// Not a number of replicas that a group can have.
    #[error(
        "{0} replicas: only odd numbers up to {REPLICAS_MAX} are useful (an even one stops at the \
         same number of losses as the odd one below it)"
    )]
    Replicas(u32),
    /// Not a number of partitions that a topic can have.
    #[error("{0} partitions: a topic has 1 to {PARTITIONS_MAX}")]
    Partitions(u32),
    /// Fewer live brokers than replicas.
    #[error("{wanted} replicas need as many live brokers, and there are {alive}")]
    NotEnoughBrokers {
        /// Replicas asked for.
        wanted: u32,
        /// Brokers that could take one.
        alive: usize,
    },
}

impl PlacementError {
    /// Whether it will pass by itself once `awaited` brokers more are there ([`awaited`]).
    #[must_use]
    pub fn passes_with(self, awaited: usize) -> bool {
        match self {
            Self::NotEnoughBrokers { wanted, alive } => {
                usize::try_from(wanted).is_ok_and(|wanted| wanted <= alive + awaited)
            }
            Self::Replicas(_) | Self::Partitions(_) => false,
        }
    }
}

/// Number of replicas where the creator left it open: three once there are three brokers
/// (never two: either loss would stop the partition).
#[must_use]
pub fn automatic_replicas(brokers: usize) -> u32 {
    if brokers >= 3 { 3 } else { 1 }
}

/// The candidates of a view, with what they carry already; `alive` says who may be chosen.
#[must_use]
pub fn candidates(view: &ClusterView, alive: impl Fn(BrokerId) -> bool) -> Vec<Candidate> {
    let mut loads: BTreeMap<BrokerId, (u64, u64)> = BTreeMap::new();
    for placement in view.topics.values().flat_map(|topic| &topic.partitions) {
        for (rank, assignment) in placement.replicas.iter().enumerate() {
            let load = loads.entry(assignment.broker).or_default();
            load.0 += 1;
            load.1 += u64::from(rank == 0);
        }
    }
    view.brokers
        .values()
        .filter(|broker| broker.registered && alive(broker.id))
        .map(|broker| {
            let (replicas, leaders) = loads.get(&broker.id).copied().unwrap_or_default();
            Candidate {
                broker: broker.id,
                rack: broker.rack.clone(),
                replicas,
                leaders,
            }
        })
        .collect()
}

/// Founding brokers that have not registered themselves yet: a cluster that has just formed is about
/// to have them.
#[must_use]
pub fn awaited(view: &ClusterView) -> usize {
    let registered = |id: &BrokerId| view.brokers.get(id).is_some_and(|broker| broker.registered);
    view.founding.iter().filter(|id| !registered(id)).count()
}

/// How many brokers the cluster has. Founding brokers count before they have registered: a topic made
/// the moment after forming must not be left with one replica.
#[must_use]
pub fn members(view: &ClusterView) -> usize {
    let registered = view.brokers.values().filter(|broker| broker.registered);
    registered.count() + awaited(view)
}

/// Checks numbers without looking at any broker.
///
/// # Errors
/// Numbers that make no sense.
pub fn check(partitions: u32, replicas: u32) -> Result<(), PlacementError> {
    if replicas.is_multiple_of(2) || replicas > REPLICAS_MAX {
        return Err(PlacementError::Replicas(replicas));
    }
    if partitions == 0 || partitions > PARTITIONS_MAX {
        return Err(PlacementError::Partitions(partitions));
    }
    Ok(())
}

/// Checks how many partitions a topic that has `present` is to have.
///
/// # Errors
/// Fewer, or too many; the text is for people.
pub fn check_growth(topic: &str, present: u32, wanted: u32) -> Result<(), String> {
    if wanted > PARTITIONS_MAX {
        return Err(PlacementError::Partitions(wanted).to_string());
    }
    if wanted < present {
        return Err(format!(
            "topic `{topic}` has {present} partitions, and their number is never lowered"
        ));
    }
    Ok(())
}

/// Brokers for each of `partitions` partitions; the first of each is the preferred leader.
///
/// # Errors
///
/// Numbers that make no sense, or fewer candidates than replicas.
pub fn place(
    mut candidates: Vec<Candidate>,
    partitions: u32,
    replicas: u32,
) -> Result<Vec<Vec<BrokerId>>, PlacementError> {
    check(partitions, replicas)?;
    let not_enough = PlacementError::NotEnoughBrokers {
        wanted: replicas,
        alive: candidates.len(),
    };
    let width = usize::try_from(replicas).map_err(|_| not_enough)?;
    if candidates.len() < width {
        return Err(not_enough);
    }
    candidates.sort_by_key(|candidate| candidate.broker);
    Ok((0..partitions)
        .map(|_| place_one(&mut candidates, width))
        .collect())
}

fn place_one(candidates: &mut [Candidate], width: usize) -> Vec<BrokerId> {
    let mut chosen: Vec<usize> = Vec::with_capacity(width);
    let mut racks: BTreeMap<String, usize> = BTreeMap::new();
    while chosen.len() < width {
        let best = (0..candidates.len())
            .filter(|at| !chosen.contains(at))
            .min_by_key(|&at| {
                let candidate = &candidates[at];
                let rack_used = racks.get(&rack_of(candidate)).copied().unwrap_or(0);
                (
                    rack_used,
                    candidate.replicas,
                    candidate.leaders,
                    candidate.broker,
                )
            });
        // `place` checked that there are enough.
        let Some(best) = best else { break };
        *racks.entry(rack_of(&candidates[best])).or_default() += 1;
        chosen.push(best);
    }
    chosen.sort_by_key(|&at| {
        let candidate = &candidates[at];
        (candidate.leaders, candidate.replicas, candidate.broker)
    });
    for (rank, &at) in chosen.iter().enumerate() {
        candidates[at].replicas += 1;
        candidates[at].leaders += u64::from(rank == 0);
    }
    chosen.iter().map(|&at| candidates[at].broker).collect()
}

fn rack_of(candidate: &Candidate) -> String {
    if candidate.rack.is_empty() {
        // Cannot collide with a rack's name: those hold no NUL.
        format!("\0{}", candidate.broker)
    } else {
        candidate.rack.clone()
    }
}

/// The founding replicas of `__cluster` that vote, of `n` in rank order: all of 1, 3 or 5,
/// otherwise the first of the largest odd number up to five. The rest follow as learners.
#[must_use]
pub fn cluster_voters(n: usize) -> usize {
    match n.min(5) {
        0 => 0,
        n if n % 2 == 0 => n - 1,
        n => n,
    }
}

/// Whether a list of brokers is one that a partition may be placed on.
#[must_use]
pub fn is_sound(brokers: &[BrokerId]) -> bool {
    let distinct: BTreeSet<_> = brokers.iter().collect();
    brokers.len() % 2 == 1
        && distinct.len() == brokers.len()
        && u32::try_from(brokers.len()).is_ok_and(|n| n <= REPLICAS_MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use qute_proto::ids::ReplicaId;

    use super::super::view::Broker;
    use super::*;

    fn fresh(racks: &[&str]) -> Vec<Candidate> {
        (1..)
            .zip(racks)
            .map(|(id, rack)| Candidate {
                broker: BrokerId(id),
                rack: (*rack).to_owned(),
                replicas: 0,
                leaders: 0,
            })
            .collect()
    }

    #[test]
    fn three_equal_brokers_share_replicas_and_leaders() {
        let placed = place(fresh(&["", "", ""]), 6, 3).unwrap();
        for broker in 1..=3 {
            let leads = placed.iter().filter(|p| p[0] == BrokerId(broker)).count();
            assert_eq!(leads, 2, "{placed:?}");
        }
    }

    #[test]
    fn single_replicas_go_round_the_brokers() {
        let placed = place(fresh(&["", "", ""]), 3, 1).unwrap();
        let brokers: BTreeSet<_> = placed.iter().map(|p| p[0]).collect();
        assert_eq!(brokers.len(), 3, "{placed:?}");
    }

    #[test]
    fn loaded_broker_is_spared() {
        let mut candidates = fresh(&["", "", "", ""]);
        candidates[0].replicas = 100;
        let placed = place(candidates, 4, 3).unwrap();
        assert!(
            placed.iter().flatten().all(|b| *b != BrokerId(1)),
            "{placed:?}"
        );
    }

    #[test]
    fn two_racks_are_both_used() {
        let placed = place(fresh(&["a", "a", "a", "b"]), 10, 3).unwrap();
        assert!(
            placed.iter().all(|p| p.contains(&BrokerId(4))),
            "{placed:?}"
        );
    }

    #[test]
    fn numbers_that_make_no_sense_are_refused() {
        let three = || fresh(&["", "", ""]);
        assert_eq!(place(three(), 1, 2), Err(PlacementError::Replicas(2)));
        assert_eq!(place(three(), 1, 0), Err(PlacementError::Replicas(0)));
        assert_eq!(place(three(), 1, 9), Err(PlacementError::Replicas(9)));
        assert_eq!(place(three(), 0, 1), Err(PlacementError::Partitions(0)));
        assert_eq!(
            place(three(), 5000, 1),
            Err(PlacementError::Partitions(5000))
        );
        assert_eq!(
            place(three(), 1, 5),
            Err(PlacementError::NotEnoughBrokers {
                wanted: 5,
                alive: 3
            })
        );
    }

    #[test]
    fn brokers_that_a_new_cluster_still_waits_for_make_up_for_those_that_lack() {
        let broker = |id, registered| {
            let broker = Broker {
                id: BrokerId(id),
                name: String::new(),
                client_address: String::new(),
                peer_address: String::new(),
                gossip_address: String::new(),
                rack: String::new(),
                boot: 1,
                process_id: 1,
                cluster_replica: ReplicaId(id),
                registered,
            };
            (BrokerId(id), Arc::new(broker))
        };
        let founding = vec![BrokerId(1), BrokerId(2), BrokerId(3)];
        let view = |brokers: Vec<(BrokerId, Arc<Broker>)>| ClusterView {
            founding: founding.clone(),
            brokers: brokers.into_iter().collect(),
            ..ClusterView::default()
        };
        let refusal = |view: &ClusterView, alive: &[u64], replicas| {
            let candidates = candidates(view, |broker| alive.contains(&broker.0));
            let refusal = place(candidates, 1, replicas).unwrap_err();
            refusal.passes_with(awaited(view))
        };
        let none = view(Vec::new());
        assert!(refusal(&none, &[1, 2, 3], 1));
        assert!(refusal(&none, &[1, 2, 3], 3));
        assert!(!refusal(&none, &[1, 2, 3], 5), "never that many");
        assert!(!refusal(&none, &[1, 2, 3], 2), "never an even number");
        let one = view(vec![broker(1, true), broker(2, false)]);
        assert_eq!(automatic_replicas(members(&one)), 3, "the two others count");
        assert!(refusal(&one, &[1, 2, 3], 3));
        // All have been there: one that is down may never come back.
        let all = view(vec![broker(1, true), broker(2, true), broker(3, true)]);
        assert!(!refusal(&all, &[1, 2], 3));
    }

    #[test]
    fn automatic_replication_is_one_or_three_never_two() {
        let chosen: Vec<_> = (1..=5).map(automatic_replicas).collect();
        assert_eq!(chosen, [1, 1, 3, 3, 3]);
    }

    #[test]
    fn cluster_voters_are_odd_and_at_most_five() {
        let chosen: Vec<_> = (1..=8).map(cluster_voters).collect();
        assert_eq!(chosen, [1, 1, 3, 3, 5, 5, 5, 5]);
    }

    proptest! {
        #[test]
        fn placement_is_distinct_balanced_and_rack_aware(
            racks in proptest::collection::vec(0..4u8, 1..9),
            partitions in 1..40u32,
            replicas in prop_oneof![Just(1u32), Just(3), Just(5), Just(7)],
        ) {
            let names: Vec<String> =
                racks.iter().map(|r| if *r == 0 { String::new() } else { format!("r{r}") }).collect();
            let candidates = fresh(&names.iter().map(String::as_str).collect::<Vec<_>>());
            let domains: BTreeSet<_> = candidates.iter().map(rack_of).collect();
            let by_id: BTreeMap<_, _> =
                candidates.iter().map(|c| (c.broker, rack_of(c))).collect();
            let wanted = usize::try_from(replicas).unwrap();
            let brokers = candidates.len();
            let placed = place(candidates, partitions, replicas);
            if brokers < wanted {
                prop_assert!(placed.is_err());
                return Ok(());
            }
            let placed = placed.unwrap();
            prop_assert_eq!(placed.len(), usize::try_from(partitions).unwrap());
            for partition in &placed {
                prop_assert_eq!(partition.len(), wanted);
                prop_assert!(is_sound(partition));
                let used: BTreeSet<_> = partition.iter().map(|b| &by_id[b]).collect();
                prop_assert_eq!(used.len(), domains.len().min(wanted));
            }
            if domains.len() == brokers {
                // Nothing but load decides: replicas differ by one at most.
                let mut load: BTreeMap<BrokerId, usize> = by_id.keys().map(|b| (*b, 0)).collect();
                for broker in placed.iter().flatten() {
                    *load.get_mut(broker).unwrap() += 1;
                }
                let (min, max) = (load.values().min().unwrap(), load.values().max().unwrap());
                prop_assert!(max - min <= 1, "{load:?}");
            }
        }
    }
}
