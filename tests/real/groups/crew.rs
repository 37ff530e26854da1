//! The members of one group, and what is asked about it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Result, ensure};
use qute_client::group::{GroupDescription, GroupState, MemberId};
use qute_client::{Client, ClientConfig, OffsetSpec};
use qute_tests::oracle::{Place, Ranges, Step, Story, Trace};
use qute_tests::wait;
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use super::member::{Joining, Spot, lock};
pub(super) use super::member::{Member, Plan};

/// How often somebody asks for the committed offsets.
const LOOK: Duration = Duration::from_millis(50);

/// The members of one group.
pub(super) struct Crew {
    pub(super) group: String,
    pub(super) trace: Trace,
    pub(super) client: Client,
    pub(super) runtime: Runtime,
    bootstrap: String,
    handled: Arc<Mutex<BTreeMap<Place, Ranges>>>,
    watch: Option<(oneshot::Sender<()>, tokio::task::JoinHandle<()>)>,
}

/// Who holds a partition: its member, and the epoch of its claim.
pub(super) type Claims = BTreeMap<Place, (MemberId, u64)>;

impl Crew {
    pub(super) fn new(bootstrap: &str, group: &str) -> Result<Self> {
        // A second group of the same process finds it there.
        let logged = tracing_subscriber::EnvFilter::from_default_env();
        let log = tracing_subscriber::fmt().with_env_filter(logged);
        let _ = log.with_test_writer().try_init();
        let runtime = Runtime::new()?;
        let client = runtime.block_on(connect(bootstrap))?;
        Ok(Self {
            group: group.to_owned(),
            trace: Trace::default(),
            client,
            runtime,
            bootstrap: bootstrap.to_owned(),
            handled: Arc::default(),
            watch: None,
        })
    }

    /// A member begins to join.
    pub(super) fn begin(&self, name: &str, plan: Plan) -> Joining {
        self.begin_at(&self.bootstrap, name, plan)
    }

    /// A member that knows brokers by other addresses.
    pub(super) fn begin_at(&self, bootstrap: &str, name: &str, plan: Plan) -> Joining {
        let spot = Spot {
            name: name.into(),
            trace: self.trace.clone(),
            handled: Arc::clone(&self.handled),
        };
        Joining::begin(spot, bootstrap, &self.group, plan)
    }

    /// A member joins.
    pub(super) fn join(&self, name: &str, plan: Plan) -> Result<Member> {
        self.begin(name, plan).wait(&self.runtime)
    }

    pub(super) fn describe(&self) -> Result<GroupDescription> {
        let described = self.client.groups();
        Ok(self.runtime.block_on(described.describe(&self.group))?)
    }

    /// Who holds what.
    pub(super) fn claims(&self) -> Result<Claims> {
        Ok(claims_of(&self.describe()?))
    }

    /// Waits until these many members have shared these many partitions out and nothing moves.
    pub(super) fn wait_stable(
        &self,
        members: usize,
        partitions: usize,
    ) -> Result<GroupDescription> {
        let what = format!("{members} members to share {partitions} partitions");
        wait::until(&what, wait::LONG, || {
            let seen = self.describe()?;
            let stable = seen.listing.state == GroupState::Stable
                && seen.members.len() == members
                && seen.claims.len() == partitions;
            ensure!(
                stable,
                "{} with {} members and {} claims",
                seen.listing.state,
                seen.members.len(),
                seen.claims.len()
            );
            Ok(Some(seen))
        })
    }

    /// What the group has committed.
    pub(super) fn offsets(&self) -> Result<BTreeMap<Place, u64>> {
        self.runtime.block_on(offsets(&self.client, &self.group))
    }

    /// Where the partitions of a topic end.
    pub(super) fn ends(&self, topic: &str, partitions: u32) -> Result<BTreeMap<Place, Range<u64>>> {
        let queries: Vec<_> = (0..partitions).map(|p| (p, OffsetSpec::End)).collect();
        let listed = self.client.list_offsets(topic, &queries);
        let listed = self.runtime.block_on(listed)?;
        let end = |(partition, listed): (u32, qute_client::ListedOffset)| {
            (Place::new(topic, partition), 0..listed.offset)
        };
        Ok((0..partitions).zip(listed).map(end).collect())
    }

    /// Waits until all of it is acknowledged.
    pub(super) fn wait_handled(&self, written: &BTreeMap<Place, Range<u64>>) -> Result<()> {
        wait::until_true("every record to be handled", wait::LONG, || {
            let handled = lock(&self.handled);
            for (place, offsets) in written {
                let done = handled.get(place);
                let hole = match done {
                    Some(done) => done.holes(offsets.clone()).next(),
                    None => Some(offsets.clone()).filter(|offsets| !offsets.is_empty()),
                };
                ensure!(hole.is_none(), "{place}: {hole:?} are missing");
            }
            Ok(true)
        })
    }

    /// Somebody asks for the committed offsets from now on, again and again.
    pub(super) fn watch_offsets(&mut self) {
        let (stop, mut stopped) = oneshot::channel();
        let (client, group, trace) = (self.client.clone(), self.group.clone(), self.trace.clone());
        let task = self.runtime.spawn(async move {
            while stopped.try_recv().is_err() {
                let asked = trace.len();
                if let Ok(offsets) = offsets(&client, &group).await {
                    let mut steps = trace.lock();
                    for (place, offset) in offsets {
                        steps.push(Step::Seen {
                            place,
                            offset,
                            asked,
                        });
                    }
                }
                tokio::time::sleep(LOOK).await;
            }
        });
        self.watch = Some((stop, task));
    }

    /// Holds everything that happened against the rules.
    pub(super) fn check(&mut self, written: &BTreeMap<Place, Range<u64>>) -> Result<Story> {
        if let Some((stop, task)) = self.watch.take() {
            let _ = stop.send(());
            self.runtime.block_on(task)?;
        }
        self.trace.check(written)
    }
}

pub(super) async fn connect(bootstrap: &str) -> Result<Client> {
    let config = ClientConfig::new(bootstrap)?.call_timeout(wait::LONG);
    Ok(Client::connect_with(config).await?)
}

async fn offsets(client: &Client, group: &str) -> Result<BTreeMap<Place, u64>> {
    let committed = client.groups().offsets(group).await?;
    let known = committed.into_iter().filter_map(|it| {
        let place = Place::new(it.partition.topic?, it.partition.partition);
        Some((place, it.offset))
    });
    Ok(known.collect())
}

pub(super) fn claims_of(seen: &GroupDescription) -> Claims {
    let claims = seen.claims.iter().filter_map(|claim| {
        let topic = claim.partition.topic.clone()?;
        let place = Place::new(topic, claim.partition.partition);
        Some((place, (claim.member, claim.claim_epoch)))
    });
    claims.collect()
}
