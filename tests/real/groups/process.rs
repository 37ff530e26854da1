//! Members that are processes: `qute consume -g`, killed, frozen and stopped.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use qute_tests::cluster::Cluster;
use qute_tests::oracle::Place;
use qute_tests::process::Process;
use qute_tests::wait;
use rustix::process::Signal;

use super::crew::Crew;
use super::writer::Writer;
use crate::bins;

const TOPIC: &str = "t";
const GROUP: &str = "g";
const PARTITIONS: u32 = 4;
const PACE: Duration = Duration::from_millis(5);
const STOP: Duration = Duration::from_secs(30);

/// A member and where it prints to.
struct Reader(Process);

/// What it has printed: partition and offset, in order.
type Printed = Vec<(Place, u64)>;

impl Reader {
    fn start(cluster: &Cluster, name: &str) -> Result<Self> {
        let bootstrap = cluster.bootstrap();
        let words = [
            "-b", &bootstrap, "consume", TOPIC, "-g", GROUP, "-f", r"%p %o\n",
        ];
        let mut line = vec![bins().qute.to_string_lossy().into_owned()];
        line.extend(words.map(str::to_owned));
        let log = cluster.dir().join(format!("{name}.printed"));
        Ok(Self(Process::start(&line, &log)?))
    }

    /// Whole lines; what is none of a record's is from standard error.
    fn printed(&self) -> Result<Printed> {
        let text = self.0.output()?;
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let record = |line: &str| {
            let (partition, offset) = line.split_once(' ')?;
            let place = Place::new(TOPIC, partition.parse().ok()?);
            Some((place, offset.parse().ok()?))
        };
        Ok(whole.lines().filter_map(record).collect())
    }

    fn partitions(&self) -> Result<BTreeSet<Place>> {
        Ok(self
            .printed()?
            .into_iter()
            .map(|(place, _)| place)
            .collect())
    }

    /// SIGTERM: it commits, leaves, and ends with 0.
    fn stop(mut self) -> Result<Printed> {
        self.0.signal(Signal::TERM)?;
        let status = self.0.wait(STOP)?;
        ensure!(
            status.code() == Some(0),
            "ended with {status}: {}",
            self.0.output()?
        );
        self.printed()
    }
}

/// How often each offset was printed, by place.
fn times<'a>(all: impl IntoIterator<Item = &'a Printed>) -> BTreeMap<Place, BTreeMap<u64, usize>> {
    let mut times: BTreeMap<Place, BTreeMap<u64, usize>> = BTreeMap::new();
    for (place, offset) in all.into_iter().flatten() {
        *times
            .entry(place.clone())
            .or_default()
            .entry(*offset)
            .or_default() += 1;
    }
    times
}

/// Waits until every offset was printed by one of them.
fn wait_printed(crew: &Crew, readers: &[&Reader]) -> Result<()> {
    let written = crew.ends(TOPIC, PARTITIONS)?;
    wait::until_true("every record to be printed", wait::LONG, || {
        let printed = readers.iter().map(|reader| reader.printed());
        let printed = printed.collect::<Result<Vec<Printed>>>()?;
        let times = times(&printed);
        for (place, offsets) in &written {
            let have = times.get(place).map_or(0, |of_place| of_place.len() as u64);
            ensure!(have == offsets.end, "{place}: {have} of {}", offsets.end);
        }
        Ok(true)
    })
}

/// Waits until all that is written is committed.
fn wait_committed(crew: &Crew) -> Result<()> {
    let written = crew.ends(TOPIC, PARTITIONS)?;
    wait::until_true("everything to be committed", wait::LONG, || {
        let committed = crew.offsets()?;
        let all = written
            .iter()
            .all(|(place, offsets)| committed.get(place) == Some(&offsets.end));
        ensure!(all, "{committed:?} of {written:?}");
        Ok(true)
    })
}

struct Scene {
    cluster: Cluster,
    crew: Crew,
    readers: Vec<Reader>,
}

/// Two processes that share the partitions, with something printed of each.
fn two_readers() -> Result<Scene> {
    let cluster = Cluster::start(&bins(), 1)?;
    cluster.create_topic(TOPIC, PARTITIONS, 1)?;
    let crew = Crew::new(&cluster.bootstrap(), GROUP)?;
    let readers = vec![
        Reader::start(&cluster, "first")?,
        Reader::start(&cluster, "second")?,
    ];
    crew.wait_stable(2, PARTITIONS as usize)?;
    let scene = Scene {
        cluster,
        crew,
        readers,
    };
    scene.write(20)?;
    for reader in &scene.readers {
        wait::until_true("records of two partitions", wait::LONG, || {
            Ok(reader.partitions()?.len() == 2)
        })?;
    }
    Ok(scene)
}

impl Scene {
    fn write(&self, rounds: u64) -> Result<()> {
        let writer = self.writer();
        writer.wait_more(rounds)?;
        writer.stop(&self.crew.runtime)
    }

    fn writer(&self) -> Writer {
        Writer::start(
            &self.crew.runtime,
            &self.cluster.bootstrap(),
            TOPIC,
            PARTITIONS,
            PACE,
        )
    }
}

#[test]
fn consume_killed_hands_its_partitions_over_and_loses_nothing() -> Result<()> {
    let mut scene = two_readers()?;
    let writer = scene.writer();
    writer.wait_more(50)?;
    let mut victim = scene.readers.remove(0);
    let committed = scene.crew.offsets()?;
    victim.0.kill()?;
    writer.wait_more(50)?;
    scene.crew.wait_stable(1, PARTITIONS as usize)?;
    writer.stop(&scene.crew.runtime)?;
    let heir = scene.readers.remove(0);
    wait_printed(&scene.crew, &[&victim, &heir])?;
    let (of_victim, of_heir) = (victim.printed()?, heir.stop()?);
    for (place, times) in times([&of_victim, &of_heir]) {
        let committed = committed.get(&place).copied().unwrap_or(0);
        for (offset, times) in times {
            ensure!(
                times == 1 || (times == 2 && offset >= committed),
                "{place}: {offset} {times} times"
            );
        }
    }
    let own: Vec<_> = times([&of_heir]).into_values().flatten().collect();
    ensure!(
        own.iter().all(|(_, times)| *times == 1),
        "the heir repeats itself"
    );
    wait_committed(&scene.crew)?;
    scene.cluster.stop()
}

/// It has committed everything when it freezes, so nothing may be printed twice; what others handle
/// meanwhile lies in its connections when it thaws.
#[test]
fn consume_frozen_past_its_session_prints_nothing_that_others_have_printed() -> Result<()> {
    let mut scene = two_readers()?;
    wait_printed(&scene.crew, &[&scene.readers[0], &scene.readers[1]])?;
    wait_committed(&scene.crew)?;
    let sleeper = scene.readers.remove(0);
    let awake = scene.readers.remove(0);
    sleeper.0.signal(Signal::STOP)?;
    // On their way to the one that sleeps, before others have its partitions.
    scene.write(20)?;
    scene.crew.wait_stable(1, PARTITIONS as usize)?;
    scene.write(20)?;
    wait_printed(&scene.crew, &[&sleeper, &awake])?;
    let before = sleeper.printed()?.len();
    sleeper.0.signal(Signal::CONT)?;
    scene.crew.wait_stable(2, PARTITIONS as usize)?;
    scene.write(20)?;
    wait::until_true("the thawed one to print again", wait::LONG, || {
        Ok(sleeper.printed()?.len() > before)
    })?;
    wait_printed(&scene.crew, &[&sleeper, &awake])?;
    let printed = [sleeper.stop()?, awake.stop()?];
    for (place, times) in times(&printed) {
        let twice = times.iter().find(|(_, times)| **times != 1);
        ensure!(twice.is_none(), "{place}: {twice:?}");
    }
    wait_committed(&scene.crew)?;
    scene.cluster.stop()
}

/// SIGTERM: nothing is printed twice, however often members come and go.
#[test]
fn consume_stopped_in_order_commits_what_it_printed() -> Result<()> {
    let mut scene = two_readers()?;
    let writer = scene.writer();
    let mut printed = Vec::new();
    for i in 0..4 {
        writer.wait_more(20)?;
        printed.push(scene.readers.remove(0).stop()?);
        scene
            .readers
            .push(Reader::start(&scene.cluster, &format!("next-{i}"))?);
        scene.crew.wait_stable(2, PARTITIONS as usize)?;
    }
    writer.stop(&scene.crew.runtime)?;
    wait::until_true("all to be printed", wait::LONG, || {
        let lag = scene.crew.client.groups();
        let lag = scene.crew.runtime.block_on(lag.lag(GROUP))?;
        Ok(lag.iter().all(|it| it.lag == Some(0)))
    })?;
    for reader in scene.readers {
        printed.push(reader.stop()?);
    }
    let written = scene.crew.ends(TOPIC, PARTITIONS)?;
    let times = times(&printed);
    for (place, offsets) in written {
        let of_place = times.get(&place).context("nothing printed")?;
        ensure!(
            of_place.len() as u64 == offsets.end,
            "{place}: {} printed",
            of_place.len()
        );
        let twice = of_place.iter().find(|(_, times)| **times != 1);
        ensure!(twice.is_none(), "{place}: {twice:?}");
    }
    scene.cluster.stop()
}
