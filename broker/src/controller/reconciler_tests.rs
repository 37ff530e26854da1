//! Tests of the reconciler: the plan by itself, and the task over a host in memory.

use parking_lot::Mutex;
use qute_proto::ids::{ClusterId, TopicId};

use super::*;
use crate::controller::view::{Assignment, Tombstone, Topic};

const OWN: BrokerId = BrokerId(1);

fn topic_id() -> TopicId {
    TopicId(uuid::Uuid::from_u128(77))
}

fn partition(number: u32) -> PartitionId {
    PartitionId {
        topic: topic_id(),
        partition: number,
    }
}

/// A topic whose partition `p` has the replicas `3p+1 ..= 3p+3` on brokers 1, 2, 3, turned.
fn view(partitions: u32, born: bool) -> ClusterView {
    let placements = (0..partitions)
        .map(|p| {
            let replicas: Vec<Assignment> = (0..3)
                .map(|n| Assignment {
                    replica: ReplicaId(u64::from(3 * p + n + 1)),
                    broker: BrokerId(u64::from((p + n) % 3 + 1)),
                })
                .collect();
            Placement {
                first: replicas.clone(),
                replicas,
                version: 1,
                born,
            }
        })
        .collect();
    let topic = Arc::new(Topic {
        name: "t".to_owned(),
        id: topic_id(),
        config: BTreeMap::new(),
        settings: TopicSettings::default(),
        partitions: placements,
    });
    let mut view = ClusterView {
        index: 1,
        cluster_id: Some(ClusterId(uuid::Uuid::from_u128(1))),
        ..ClusterView::default()
    };
    view.topics_by_id.insert(topic.id, Arc::clone(&topic));
    view.topics.insert(topic.name.clone(), topic);
    view
}

fn deleted(partitions: u32) -> ClusterView {
    let before = view(partitions, true);
    let mut after = ClusterView {
        index: 2,
        cluster_id: before.cluster_id,
        ..ClusterView::default()
    };
    for (partition, _, placement) in placements(&before) {
        for assignment in &placement.replicas {
            after.tombstones.insert(
                assignment.replica,
                Tombstone {
                    partition,
                    replica: assignment.replica,
                    broker: assignment.broker,
                },
            );
        }
    }
    after
}

fn open(since: Instant) -> State {
    State::Open {
        since,
        initialized: false,
        settings: TopicSettings::default(),
    }
}

#[test]
fn own_replicas_are_opened_and_those_of_others_are_not() {
    let actions = plan(OWN, &view(3, true), &BTreeMap::new(), Instant::now());
    let replicas: Vec<_> = actions
        .iter()
        .map(|action| match action {
            Action::Open(spec) => spec.replica.0,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(replicas, [1, 6, 8]);
}

#[tokio::test(start_paused = true)]
async fn s10_first_of_the_placement_initializes_at_once_the_others_later() {
    let now = Instant::now();
    let states = BTreeMap::from([1, 6, 8].map(|id| (ReplicaId(id), open(now))));
    let initialized = |at: Instant| -> Vec<u64> {
        plan(OWN, &view(3, false), &states, at)
            .into_iter()
            .map(|action| match action {
                Action::Initialize(_, replica, members) => {
                    assert_eq!(members.len(), 3);
                    replica.0
                }
                other => panic!("{other:?}"),
            })
            .collect()
    };
    assert_eq!(initialized(now), [1]);
    assert_eq!(initialized(now + INITIALIZE_DELAY), [1, 8]);
    assert_eq!(initialized(now + INITIALIZE_DELAY * 2), [1, 6, 8]);
}

#[test]
fn s10_born_partition_is_never_initialized() {
    let now = Instant::now();
    let states = BTreeMap::from([1, 6, 8].map(|id| (ReplicaId(id), open(now))));
    let later = now + INITIALIZE_DELAY * 10;
    assert_eq!(plan(OWN, &view(3, true), &states, later), []);
}

#[test]
fn s10_replica_outside_the_first_placement_waits_as_a_learner() {
    let mut moved = view(1, false);
    let mut topic = Topic::clone(&moved.topics["t"]);
    topic.partitions[0].replicas[0].replica = ReplicaId(50);
    moved.topics_by_id.insert(topic.id, Arc::new(topic));
    let now = Instant::now();
    let states = BTreeMap::from([(ReplicaId(50), open(now))]);
    assert_eq!(plan(OWN, &moved, &states, now + INITIALIZE_DELAY * 10), []);
}

#[test]
fn s22_only_tombstones_delete_and_only_here() {
    let now = Instant::now();
    let states = BTreeMap::from([1, 6, 8].map(|id| (ReplicaId(id), open(now))));
    // The topic is absent and there is no tombstone: nothing happens.
    let mut absent = deleted(3);
    absent.tombstones.clear();
    assert_eq!(plan(OWN, &absent, &states, now), []);
    let actions = plan(OWN, &deleted(3), &states, now);
    let expected: Vec<_> = [(0, 1), (1, 6), (2, 8)]
        .into_iter()
        .map(|(p, r)| Action::Delete(partition(p), ReplicaId(r)))
        .collect();
    assert_eq!(actions, expected);
}

#[derive(Default)]
struct World {
    open: BTreeSet<ReplicaId>,
    settings: BTreeMap<ReplicaId, TopicSettings>,
    stored: BTreeMap<ReplicaId, PartitionId>,
    initialized: BTreeSet<PartitionId>,
    fail_opens: usize,
    quarantine: BTreeSet<ReplicaId>,
    opening: usize,
    opening_max: usize,
    reports: Vec<Command>,
}

#[derive(Clone, Default)]
struct Memory(Arc<Mutex<World>>);

impl Host for Memory {
    fn open(&self, spec: ReplicaSpec) -> BoxFuture<'static, Result<(), HostError>> {
        let world = Arc::clone(&self.0);
        Box::pin(async move {
            {
                let mut world = world.lock();
                world.opening += 1;
                world.opening_max = world.opening_max.max(world.opening);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
            let mut world = world.lock();
            world.opening -= 1;
            if world.fail_opens > 0 {
                world.fail_opens -= 1;
                return Err(HostError::Retry("not now".to_owned()));
            }
            if world.quarantine.contains(&spec.replica) {
                return Err(HostError::Quarantined("damage".to_owned()));
            }
            world.open.insert(spec.replica);
            world.settings.insert(spec.replica, spec.settings);
            world.stored.insert(spec.replica, spec.partition);
            Ok(())
        })
    }

    fn adjust(&self, spec: &ReplicaSpec) {
        let mut world = self.0.lock();
        assert!(world.open.contains(&spec.replica));
        world.settings.insert(spec.replica, spec.settings.clone());
    }

    fn delete(
        &self,
        _: PartitionId,
        replica: ReplicaId,
    ) -> BoxFuture<'static, Result<(), HostError>> {
        let mut world = self.0.lock();
        world.open.remove(&replica);
        world.stored.remove(&replica);
        Box::pin(std::future::ready(Ok(())))
    }

    fn initialize(
        &self,
        partition: PartitionId,
        _: BTreeMap<ReplicaId, BrokerId>,
    ) -> BoxFuture<'static, Result<(), HostError>> {
        self.0.lock().initialized.insert(partition);
        Box::pin(std::future::ready(Ok(())))
    }

    fn leads(&self, partition: PartitionId) -> bool {
        self.0.lock().initialized.contains(&partition)
    }

    fn stored(&self) -> BTreeMap<ReplicaId, PartitionId> {
        self.0.lock().stored.clone()
    }
}

impl Reports for Memory {
    fn report(&self, command: Command) -> BoxFuture<'static, Result<(), String>> {
        self.0.lock().reports.push(command);
        Box::pin(std::future::ready(Ok(())))
    }
}

struct Running {
    world: Memory,
    views: watch::Sender<Arc<ClusterView>>,
    progress: watch::Receiver<Progress>,
    _poke: watch::Sender<u64>,
}

fn start(view: ClusterView, world: World) -> Running {
    let world = Memory(Arc::new(Mutex::new(world)));
    let (views, watched) = watch::channel(Arc::new(view));
    let (poke, poked) = watch::channel(0);
    let (published, progress) = watch::channel(Progress::default());
    tokio::spawn(run(
        OWN,
        world.clone(),
        world.clone(),
        watched,
        poked,
        published,
    ));
    Running {
        world,
        views,
        progress,
        _poke: poke,
    }
}

impl Running {
    async fn until(&mut self, what: impl Fn(&World, &Progress) -> bool) {
        let waited = async {
            while !what(&self.world.0.lock(), &self.progress.borrow()) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(120), waited)
            .await
            .unwrap_or_else(|_| panic!("{:?}", self.progress.borrow()));
    }
}

#[tokio::test(start_paused = true)]
async fn hundreds_of_replicas_open_concurrently_and_bounded() {
    let mut running = start(view(300, true), World::default());
    running.until(|_, progress| progress.open == 300).await;
    assert!(running.progress.borrow().is_settled());
    let most = running.world.0.lock().opening_max;
    assert!(most > 1 && most <= WORKING_MAX, "{most}");
}

#[tokio::test(start_paused = true)]
async fn first_leaders_report_their_partitions_born_until_the_view_says_so() {
    let mut running = start(view(3, false), World::default());
    running
        .until(|world, _| {
            let born = world.reports.iter().filter_map(|command| match command {
                Command::PartitionsBorn(born) => Some(born.partitions.len()),
                _ => None,
            });
            born.sum::<usize>() >= 3
        })
        .await;
    running.views.send_replace(Arc::new(view(3, true)));
    // The view shows it: the reconciler has nothing left to do.
    tokio::time::sleep(REPORT_AGAIN * 3).await;
    let reports = running.world.0.lock().reports.len();
    tokio::time::sleep(REPORT_AGAIN * 3).await;
    assert_eq!(running.world.0.lock().reports.len(), reports);
}

#[tokio::test(start_paused = true)]
async fn altered_topic_s_open_replicas_are_adjusted_and_stay_open() {
    let mut running = start(view(3, true), World::default());
    running.until(|_, progress| progress.open == 3).await;
    let mut progress = running.progress.clone();
    progress.mark_unchanged();
    let mut altered = view(3, true);
    let mut topic = Topic::clone(&altered.topics["t"]);
    topic.settings.record_bytes_max = 7;
    let topic = Arc::new(topic);
    altered.topics_by_id.insert(topic.id, Arc::clone(&topic));
    altered.topics.insert(topic.name.clone(), topic);
    running.views.send_replace(Arc::new(altered));
    running
        .until(|world, _| {
            let adjusted = world
                .settings
                .values()
                .filter(|it| it.record_bytes_max == 7);
            adjusted.count() == 3
        })
        .await;
    // Ready all the while.
    assert!(!progress.has_changed().unwrap());
}

#[tokio::test(start_paused = true)]
async fn deleted_topic_goes_from_disk_and_is_reported() {
    let mut running = start(view(3, true), World::default());
    running.until(|_, progress| progress.open == 3).await;
    running.views.send_replace(Arc::new(deleted(3)));
    running
        .until(|world, _| {
            world.stored.is_empty()
                && world.reports.iter().any(|command| {
                    matches!(command, Command::ReplicasDeleted(d) if !d.replicas.is_empty())
                })
        })
        .await;
}

#[tokio::test(start_paused = true)]
async fn failed_open_is_tried_again_and_quarantine_is_left_alone() {
    let world = World {
        fail_opens: 4,
        quarantine: BTreeSet::from([ReplicaId(6)]),
        ..World::default()
    };
    let mut running = start(view(3, true), world);
    running
        .until(|_, progress| progress.open == 2 && progress.quarantined.len() == 1)
        .await;
    assert!(running.progress.borrow().is_settled());
}

#[tokio::test(start_paused = true)]
async fn s22_unknown_replica_is_kept_and_reported() {
    let world = World {
        stored: BTreeMap::from([(ReplicaId(999), partition(0))]),
        ..World::default()
    };
    let mut running = start(view(1, true), world);
    running
        .until(|_, progress| progress.orphans.contains(&ReplicaId(999)))
        .await;
    assert!(running.world.0.lock().stored.contains_key(&ReplicaId(999)));
}

#[tokio::test(start_paused = true)]
async fn nothing_happens_before_the_cluster_is_founded() {
    let mut unfounded = view(3, true);
    unfounded.cluster_id = None;
    let running = start(unfounded, World::default());
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(running.world.0.lock().open.is_empty());
}
