//! How long a group takes to share its partitions out.
//!
//! Members are real clients, each with a thread, a runtime and connections of its own. *Joined*: from
//! the first of all joins at once until every partition has an owner, and everybody a fair share. *Killed*:
//! from a member's death until others have been given its partitions, less the session timeout, which
//! has to pass first.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use futures::StreamExt;
use qute_client::Client;
use qute_client::group::{Event, TopicPartition};
use qute_load::latency::{as_millis, summary};
use qute_tests::wait;
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::target;

const TOPIC: &str = "bench-rebalance";
const GROUP: &str = "bench";

/// How to measure.
#[derive(Args, Clone, Debug)]
pub struct RebalanceArgs {
    /// Brokers
    #[arg(long, default_value_t = 3)]
    pub brokers: usize,
    /// Members that join at once
    #[arg(long, default_value_t = 20)]
    pub members: usize,
    /// Partitions
    #[arg(long, default_value_t = 64)]
    pub partitions: u32,
    /// Members that are killed, one after the other
    #[arg(long, default_value_t = 3)]
    pub kills: usize,
    /// Their session timeout
    #[arg(long, value_parser = humantime::parse_duration, default_value = "10s")]
    pub session: Duration,
}

/// What a member was told.
enum News {
    Has(Vec<TopicPartition>),
    HasNot(Vec<TopicPartition>),
    Ended(String),
}

struct Told {
    member: usize,
    at: Instant,
    news: News,
}

struct Member {
    kill: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

fn start(member: usize, bootstrap: &str, session: Duration, told: Sender<Told>) -> Member {
    let (kill, killed) = oneshot::channel();
    let bootstrap = bootstrap.to_owned();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let tell = |news| {
            let at = Instant::now();
            // The measurement may be over.
            let _ = told.send(Told { member, at, news });
        };
        let Ok(runtime) = runtime else {
            return tell(News::Ended("no runtime".to_owned()));
        };
        let worked = runtime.block_on(async {
            tokio::select! {
                worked = work(&bootstrap, session, &tell) => worked,
                // Everything of it goes with the runtime, and says nothing.
                _ = killed => Ok(()),
            }
        });
        if let Err(error) = worked {
            tell(News::Ended(format!("{error:#}")));
        }
    });
    Member { kill, thread }
}

async fn work(bootstrap: &str, session: Duration, tell: &impl Fn(News)) -> Result<()> {
    let client = Client::connect(bootstrap).await?;
    let group = client.group(GROUP).topics([TOPIC]).session_timeout(session);
    let mut group = group.join().await?;
    while let Some(event) = group.next().await {
        match event {
            Event::Assigned(it) => tell(News::Has(it.partitions)),
            Event::Revoking(it) => tell(News::HasNot(it.partitions)),
            Event::Lost(it) => tell(News::HasNot(it.partitions)),
            Event::Failed(error) => return Err(error.into()),
            _ => {}
        }
    }
    bail!("its stream has ended")
}

/// Who has what, as members were told.
struct Board {
    told: Receiver<Told>,
    partitions: usize,
    has: BTreeMap<usize, BTreeSet<TopicPartition>>,
}

impl Board {
    /// Waits until these members have everything in fair shares; says when the last of it came.
    fn wait_shared(&mut self, members: usize) -> Result<Instant> {
        let end = Instant::now() + wait::LONG * 2;
        let mut last = Instant::now();
        while !self.is_shared(members) {
            let left = end.saturating_duration_since(Instant::now());
            let told = self.told.recv_timeout(left);
            let told = told.with_context(|| format!("not shared among {members}"))?;
            last = told.at;
            let has = self.has.entry(told.member).or_default();
            match told.news {
                News::Has(partitions) => has.extend(partitions),
                News::HasNot(partitions) => has.retain(|it| !partitions.contains(it)),
                News::Ended(why) => bail!("member {} has ended: {why}", told.member),
            }
        }
        Ok(last)
    }

    fn is_shared(&self, members: usize) -> bool {
        let counts: Vec<usize> = self.has.values().map(BTreeSet::len).collect();
        let fair = counts.iter().max().zip(counts.iter().min());
        counts.len() == members
            && counts.iter().sum::<usize>() == self.partitions
            && fair.is_some_and(|(most, fewest)| most - fewest <= 1)
    }
}

/// All join at once; then some are killed.
///
/// # Errors
/// When the cluster misbehaves or a member fails.
pub fn measure(args: &RebalanceArgs) -> Result<Value> {
    ensure!(args.kills < args.members, "nobody would be left");
    let cluster = target::own(args.brokers)?;
    let replicas = if args.brokers >= 3 { 3 } else { 1 };
    cluster.create_topic(TOPIC, args.partitions, replicas)?;
    let bootstrap = cluster.bootstrap();
    let (tell, told) = channel();
    let mut board = Board {
        told,
        partitions: args.partitions as usize,
        has: BTreeMap::new(),
    };
    // The first group of a cluster has `__groups` made.
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let coordinators = qute_tests::member::Coordinators::connect(
            bootstrap.split(',').next().context("no broker")?,
        );
        coordinators.await?.address_of(GROUP).await
    })?;

    let begun = Instant::now();
    let members = (0..args.members).map(|i| start(i, &bootstrap, args.session, tell.clone()));
    let mut members: BTreeMap<usize, Member> = members.enumerate().collect();
    let joined = board.wait_shared(args.members)?.duration_since(begun);
    eprintln!(
        "{} members have shared {} partitions after {joined:?}",
        args.members, args.partitions
    );

    let mut taken = Vec::new();
    for kill in 1..=args.kills {
        let (victim, member) = members.pop_first().context("no member")?;
        board.has.remove(&victim);
        let begun = Instant::now();
        let _ = member.kill.send(());
        member.thread.join().ok().context("a member panicked")?;
        let shared = board.wait_shared(args.members - kill)?;
        let beyond = shared.duration_since(begun).saturating_sub(args.session);
        eprintln!(
            "kill {kill} of {}: {beyond:?} after the session timeout",
            args.kills
        );
        taken.push(beyond);
    }
    for (_, member) in members {
        let _ = member.kill.send(());
        member.thread.join().ok().context("a member panicked")?;
    }
    let report = json!({
        "bench": "rebalance",
        "brokers": args.brokers,
        "members": args.members,
        "partitions": args.partitions,
        "session_timeout_ms": as_millis(args.session),
        "joined_ms": as_millis(joined),
        "killed_beyond_session_timeout": summary(&taken),
    });
    cluster.stop()?;
    Ok(report)
}
