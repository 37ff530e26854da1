//! Where records without a key go: in runs of one batch, to each partition in proportion to how fast
//! it would get a batch acknowledged now. Pure: the caller gives time, randomness and loads.
//!
//! The expected time of one more batch is
//!
//! ```text
//!   max(smoothed ack latency, age of the oldest batch without an answer) * (1 + batches waiting)
//! ```
//!
//! and a partition's weight is its inverse: one that is ten times slower gets a tenth. The age makes a
//! frozen broker repel traffic while it is frozen, long before anything times out; once the age is far
//! beyond what is usual, the batches that wait there are all the probe that it gets. A latency fades
//! while nothing is under way, so that a partition that was slow once is tried again and shows how fast
//! it is now.

use std::time::Duration;

use rand::{Rng, RngExt};
use tokio::time::Instant;

use super::load::{PartitionLoad, faded};

/// A run ends after this time, however little was written: few records spread, too.
const RUN_MAX: Duration = Duration::from_millis(250);
/// No answer for this long and for this many times the usual latency: nothing more goes there.
const STALL_MIN: Duration = Duration::from_millis(250);
const STALL_FACTOR: u32 = 8;
/// No latency counts as less: below, it is noise.
const LATENCY_MIN: Duration = Duration::from_micros(100);

/// The present run.
#[derive(Debug)]
pub(super) struct Adaptive {
    batch_bytes: usize,
    partition: u32,
    bytes_left: usize,
    until: Option<Instant>,
    /// The run began while every partition repelled: it is not left for what it began with.
    forced: bool,
    weights: Vec<f64>,
}

impl Adaptive {
    pub(super) fn new(batch_bytes: usize) -> Self {
        Self {
            batch_bytes: batch_bytes.max(1),
            partition: 0,
            bytes_left: 0,
            until: None,
            forced: false,
            weights: Vec::new(),
        }
    }

    /// The partition of a record of `cost` bytes. 0 if there are no partitions. `present` is asked of
    /// the partition of the present run for every record, `load` of all when a run begins.
    pub(super) fn pick(
        &mut self,
        partitions: u32,
        cost: usize,
        now: Instant,
        rng: &mut impl Rng,
        present: impl Fn(u32) -> PartitionLoad,
        load: impl Fn(u32) -> PartitionLoad,
    ) -> u32 {
        let over = self.bytes_left == 0
            || self.partition >= partitions
            || self.until.is_none_or(|until| until <= now)
            || !self.forced && repels(&present(self.partition));
        if over {
            self.begin(partitions, None, now, rng, load);
        }
        self.bytes_left = self.bytes_left.saturating_sub(cost);
        self.partition
    }

    /// Another partition than the present one, if there is one: that one has no room.
    pub(super) fn pick_other(
        &mut self,
        partitions: u32,
        now: Instant,
        rng: &mut impl Rng,
        load: impl Fn(u32) -> PartitionLoad,
    ) -> u32 {
        self.begin(partitions, Some(self.partition), now, rng, load);
        self.partition
    }

    fn begin(
        &mut self,
        partitions: u32,
        avoid: Option<u32>,
        now: Instant,
        rng: &mut impl Rng,
        load: impl Fn(u32) -> PartitionLoad,
    ) {
        self.bytes_left = self.batch_bytes;
        self.until = Some(now + RUN_MAX);
        self.weigh(partitions, avoid, load);
        self.partition = draw(&self.weights, rng);
    }

    fn weigh(&mut self, partitions: u32, avoid: Option<u32>, load: impl Fn(u32) -> PartitionLoad) {
        let loads = || (0..partitions).map(&load);
        let known = loads()
            .filter(|load| load.available)
            .filter_map(|load| load.ack_latency);
        let best = known.min().unwrap_or(LATENCY_MIN).max(LATENCY_MIN);
        // The first of these that leaves a choice: all that is well, all that has a leader, all.
        let tiers: [fn(&PartitionLoad) -> bool; 3] =
            [|load| !repels(load), |load| load.available, |_| true];
        self.forced = false;
        for fits in tiers {
            self.weights.clear();
            let weights = (0..).zip(loads()).map(|(partition, load)| {
                if Some(partition) == avoid && partitions > 1 || !fits(&load) {
                    return 0.0;
                }
                1.0 / expected_secs(&load, best, self.batch_bytes)
            });
            self.weights.extend(weights);
            if self.weights.iter().any(|&weight| weight > 0.0) {
                return;
            }
            // What is avoided may be well, and have room again.
            self.forced = avoid.is_none();
        }
    }
}

/// Traffic keeps away altogether.
pub(super) fn repels(load: &PartitionLoad) -> bool {
    let usual = load.ack_latency.unwrap_or_default();
    let limit = STALL_MIN.max(usual.saturating_mul(STALL_FACTOR));
    !load.available || load.oldest_unacknowledged.is_some_and(|age| age > limit)
}

/// How long one more batch would take.
fn expected_secs(load: &PartitionLoad, best: Duration, batch_bytes: usize) -> f64 {
    let latency = match (load.ack_latency, load.oldest_unacknowledged) {
        (None, age) => best.max(age.unwrap_or_default()),
        (Some(latency), Some(age)) => latency.max(age),
        (Some(latency), None) => faded(latency, load.last_ack.unwrap_or_default()),
    };
    #[allow(clippy::cast_precision_loss, reason = "a weight, not a count")]
    let waiting = load.queued_bytes as f64 / batch_bytes as f64;
    latency.max(best).as_secs_f64() * (1.0 + waiting)
}

/// An index, in proportion to its weight; 0 if there are none.
fn draw(weights: &[f64], rng: &mut impl Rng) -> u32 {
    let total: f64 = weights.iter().sum();
    let mut left = rng.random::<f64>() * total;
    let mut last = 0;
    for (index, &weight) in (0..).zip(weights) {
        if weight > 0.0 {
            last = index;
            if left < weight {
                break;
            }
            left -= weight;
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use rand::SeedableRng;
    use rand::rngs::SmallRng;

    use super::super::load::LoadCell;
    use super::*;

    const BATCH: usize = 1000;
    const IN_FLIGHT: usize = 5;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// A partition whose leader acknowledges each batch a fixed time after it was sent, five in
    /// flight; while it is frozen, not at all.
    struct Partition {
        cell: LoadCell,
        latency: Duration,
        frozen: bool,
        /// When each batch was taken in, and when it was sent.
        waiting: VecDeque<Option<Instant>>,
        open_bytes: usize,
        taken: usize,
    }

    /// One producer that writes at a steady rate.
    struct World {
        now: Instant,
        rng: SmallRng,
        adaptive: Adaptive,
        partitions: Vec<Partition>,
    }

    impl World {
        fn new(latencies_ms: &[u64]) -> Self {
            let now = Instant::now();
            let partition = |&latency| Partition {
                cell: LoadCell::new(now),
                latency: ms(latency),
                frozen: false,
                waiting: VecDeque::new(),
                open_bytes: 0,
                taken: 0,
            };
            Self {
                now,
                rng: SmallRng::seed_from_u64(7),
                adaptive: Adaptive::new(BATCH),
                partitions: latencies_ms.iter().map(partition).collect(),
            }
        }

        /// Writes `records` of a tenth of a batch, one each `gap`.
        fn run(&mut self, records: usize, gap: Duration) -> Vec<usize> {
            let before: Vec<_> = self.partitions.iter().map(|p| p.taken).collect();
            for _ in 0..records {
                self.now += gap;
                let now = self.now;
                for partition in &mut self.partitions {
                    partition.step(now);
                }
                let partitions = &self.partitions;
                let count = u32::try_from(partitions.len()).unwrap();
                let load = |p: u32| partitions[p as usize].cell.read(true, now);
                let picked = self
                    .adaptive
                    .pick(count, BATCH / 10, now, &mut self.rng, load, load);
                self.partitions[picked as usize].take(BATCH / 10);
            }
            let after = self.partitions.iter().map(|p| p.taken);
            after
                .zip(before)
                .map(|(after, before)| after - before)
                .collect()
        }
    }

    impl Partition {
        fn take(&mut self, bytes: usize) {
            self.taken += 1;
            self.cell.add_bytes(bytes);
            self.open_bytes += bytes;
            if self.open_bytes >= BATCH {
                self.open_bytes -= BATCH;
                self.waiting.push_back(None);
            }
        }

        fn step(&mut self, now: Instant) {
            for sent in self.waiting.iter_mut().take(IN_FLIGHT) {
                sent.get_or_insert(now);
            }
            while !self.frozen
                && let Some(&Some(sent)) = self.waiting.front()
                && sent + self.latency <= now
            {
                self.waiting.pop_front();
                self.cell.acknowledged(now - sent, now);
                self.cell.remove_bytes(BATCH);
            }
            self.cell
                .set_oldest(self.waiting.front().copied().flatten());
        }
    }

    #[test]
    fn adaptive_runs_are_one_batch_long() {
        let now = Instant::now();
        let mut rng = SmallRng::seed_from_u64(1);
        let mut adaptive = Adaptive::new(1000);
        let untried = |_| PartitionLoad::untried(true);
        let picks: Vec<u32> = (0..1000)
            .map(|_| adaptive.pick(6, 100, now, &mut rng, untried, untried))
            .collect();
        for run in picks.chunks(10) {
            assert!(run.iter().all(|&p| p == run[0]), "{run:?}");
        }
        let used: std::collections::BTreeSet<_> = picks.into_iter().collect();
        assert_eq!(used, (0..6).collect());
    }

    #[test]
    fn adaptive_few_records_spread_all_the_same() {
        let mut world = World::new(&[2, 2, 2]);
        let taken = world.run(300, ms(300));
        assert!(taken.iter().all(|&taken| taken > 50), "{taken:?}");
    }

    #[test]
    fn adaptive_equal_partitions_get_equal_shares() {
        let mut world = World::new(&[2; 6]);
        world.run(5_000, ms(1));
        let taken = world.run(60_000, ms(1));
        for &share in &taken {
            assert!((8_500..11_500).contains(&share), "{taken:?}");
        }
    }

    #[test]
    fn adaptive_partition_ten_times_slower_gets_about_a_tenth() {
        let mut world = World::new(&[5, 5, 5, 50]);
        world.run(5_000, ms(1));
        let taken = world.run(60_000, ms(1));
        let others = (taken[0] + taken[1] + taken[2]) / 3;
        let ratio = others as f64 / taken[3] as f64;
        assert!((6.0..25.0).contains(&ratio), "{taken:?}");
    }

    #[test]
    fn adaptive_frozen_partition_gets_a_probe_at_most_and_recovers() {
        let mut world = World::new(&[5; 4]);
        world.run(5_000, ms(1));
        world.partitions[2].frozen = true;
        // Until its silence is noticed, its share goes on; then next to nothing.
        world.run(500, ms(1));
        let taken = world.run(20_000, ms(1));
        assert!(taken[2] <= 20, "{taken:?}");
        world.partitions[2].frozen = false;
        world.run(10_000, ms(1));
        let taken = world.run(20_000, ms(1));
        assert!(taken[2] > 3_500, "recovered: {taken:?}");
    }

    #[test]
    fn adaptive_broker_frozen_in_mid_run_loses_the_run() {
        let now = Instant::now();
        let mut rng = SmallRng::seed_from_u64(3);
        let mut adaptive = Adaptive::new(1 << 20);
        let first = adaptive.pick(
            2,
            10,
            now,
            &mut rng,
            |_| PartitionLoad::untried(true),
            |_| PartitionLoad::untried(true),
        );
        let stalled = |p| PartitionLoad {
            oldest_unacknowledged: (p == first).then_some(ms(300)),
            ..PartitionLoad::untried(true)
        };
        assert_ne!(adaptive.pick(2, 10, now, &mut rng, stalled, stalled), first);
    }

    #[test]
    fn adaptive_while_all_repel_runs_are_kept_and_weighed_once() {
        let now = Instant::now();
        let mut rng = SmallRng::seed_from_u64(6);
        let mut adaptive = Adaptive::new(1000);
        let stalled = |_| PartitionLoad {
            oldest_unacknowledged: Some(ms(300)),
            ..PartitionLoad::untried(true)
        };
        let weighed = std::cell::Cell::new(0);
        let load = |partition| {
            weighed.set(weighed.get() + 1);
            stalled(partition)
        };
        let picks: Vec<u32> = (0..10)
            .map(|_| adaptive.pick(6, 100, now, &mut rng, stalled, load))
            .collect();
        assert!(picks.iter().all(|&p| p == picks[0]), "{picks:?}");
        assert!(weighed.get() <= 6 * 6, "{} looks", weighed.get());
        // Once the run is over, what is well again is found.
        let one_is_well = |p| match p {
            4 => PartitionLoad::untried(true),
            _ => stalled(p),
        };
        let then = adaptive.pick(6, 100, now, &mut rng, one_is_well, one_is_well);
        assert_eq!(then, 4);
    }

    #[test]
    fn adaptive_without_any_leader_still_picks_one_that_is_there() {
        let now = Instant::now();
        let mut rng = SmallRng::seed_from_u64(4);
        let mut adaptive = Adaptive::new(10);
        for _ in 0..100 {
            let picked = adaptive.pick(
                3,
                10,
                now,
                &mut rng,
                |_| PartitionLoad::untried(false),
                |_| PartitionLoad::untried(false),
            );
            assert!(picked < 3);
            let led = adaptive.pick(
                3,
                10,
                now,
                &mut rng,
                |p| PartitionLoad::untried(p == 1),
                |p| PartitionLoad::untried(p == 1),
            );
            assert_eq!(led, 1);
        }
        assert_eq!(
            adaptive.pick(
                0,
                10,
                now,
                &mut rng,
                |_| PartitionLoad::untried(true),
                |_| PartitionLoad::untried(true)
            ),
            0
        );
    }

    #[test]
    fn adaptive_partition_without_room_is_left_for_another() {
        let now = Instant::now();
        let mut rng = SmallRng::seed_from_u64(5);
        let mut adaptive = Adaptive::new(1000);
        let untried = |_| PartitionLoad::untried(true);
        for _ in 0..100 {
            let full = adaptive.pick(4, 10, now, &mut rng, untried, untried);
            assert_ne!(adaptive.pick_other(4, now, &mut rng, untried), full);
        }
        assert_eq!(adaptive.pick_other(1, now, &mut rng, untried), 0);
    }
}
