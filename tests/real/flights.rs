//! The flights data through three brokers that are killed meanwhile.

use std::io::Write;
use std::process::ChildStdin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use qute_tests::cluster::Cluster;
use qute_tests::command::Running;
use qute_tests::{flights, wait};

use crate::bins;

const TOPIC: &str = "flights";
const LINES_PER_SECOND: usize = 10_000;
const PRODUCE_LIMIT: Duration = Duration::from_secs(240);
const CONSUME_LIMIT: Duration = Duration::from_secs(120);

/// Writes all lines at the wanted rate; counts what has been fed.
fn feed(mut stdin: ChildStdin, fed: &AtomicUsize) -> Result<()> {
    const TICK: Duration = Duration::from_millis(10);
    const LINES_PER_TICK: usize = LINES_PER_SECOND / 100;
    let (start, mut ticks) = (Instant::now(), 0);
    for chunk in flights::lines()?.chunks(LINES_PER_TICK) {
        let mut bytes = chunk.join(&b'\n');
        bytes.push(b'\n');
        stdin
            .write_all(&bytes)
            .context("qute produce stopped reading")?;
        fed.fetch_add(chunk.len(), Ordering::Relaxed);
        ticks += 1;
        wait::rest_until(start + TICK * ticks);
    }
    Ok(())
}

/// Three brokers with the topic, and a started `qute produce`.
fn prepare() -> Result<(Cluster, Running)> {
    let cluster = Cluster::start(&bins(), 3)?;
    cluster.create_topic(TOPIC, 6, 3)?;
    let words = ["produce", TOPIC, "-K", "\t"];
    let producer = cluster.qute(words).limit(PRODUCE_LIMIT).spawn()?;
    Ok((cluster, producer))
}

/// Feeds everything while `disturb` runs; it is given a way to wait for a share of the lines.
fn produce_while(
    producer: &mut Running,
    disturb: impl FnOnce(&dyn Fn(usize) -> Result<()>) -> Result<()>,
) -> Result<()> {
    let fed = AtomicUsize::new(0);
    let stdin = producer.stdin().context("no standard input")?;
    std::thread::scope(|scope| {
        let feeder = scope.spawn(|| feed(stdin, &fed));
        let wait_percent = |percent: usize| {
            let what = format!("{percent}% of the lines to be fed");
            wait::until_true(&what, PRODUCE_LIMIT, || {
                ensure!(!feeder.is_finished(), "the feeder has ended");
                Ok(fed.load(Ordering::Relaxed) >= flights::LINES * percent / 100)
            })
        };
        let disturbed = disturb(&wait_percent);
        let fed = feeder.join().ok().context("the feeder panicked")?;
        disturbed.and(fed)
    })?;
    let output = producer.finish()?.ok()?;
    ensure!(
        output.stdout.is_empty(),
        "produce printed to standard output: {}",
        output.text()
    );
    Ok(())
}

/// Consumes everything and holds it against the input.
fn verify(cluster: &Cluster) -> Result<()> {
    let words = ["consume", TOPIC, "-o", "start", "-e", "-f", r"%k\t%v\n"];
    let output = cluster.qute(words).limit(CONSUME_LIMIT).run()?.ok()?;
    flights::verify(&output.stdout)?;

    // Elections and restarts leave no hole in the offsets.
    let words = ["consume", TOPIC, "-o", "start", "-e", "-f", r"%p %o\n"];
    let output = cluster.qute(words).limit(CONSUME_LIMIT).run()?.ok()?;
    let mut next = [0_u64; 6];
    for line in output.text().lines() {
        let (partition, offset) = line.split_once(' ').with_context(|| line.to_owned())?;
        let expected = next
            .get_mut(partition.parse::<usize>()?)
            .context("a seventh partition")?;
        ensure!(
            offset.parse::<u64>()? == *expected,
            "{line}, expected offset {expected}"
        );
        *expected += 1;
    }
    ensure!(
        next.iter().sum::<u64>() == flights::LINES as u64,
        "end offsets {next:?}"
    );
    Ok(())
}

#[test]
fn flights_with_leaders_killed_arrive_once_and_in_order() -> Result<()> {
    let (mut cluster, mut producer) = prepare()?;
    produce_while(&mut producer, |wait_percent| {
        for percent in [15, 40, 65] {
            wait_percent(percent)?;
            let leader = cluster.busiest_leader(TOPIC)?;
            let place = cluster.place_of(&leader)?;
            cluster.node(place)?.kill()?;
            cluster.wait_led(TOPIC, Some(&leader))?;
            cluster.start_one(place)?;
            cluster.node(place)?.wait_ready()?;
        }
        Ok(())
    })?;
    verify(&cluster)?;
    cluster.stop()
}

#[test]
fn flights_with_all_brokers_killed_at_once_arrive_once_and_in_order() -> Result<()> {
    let (mut cluster, mut producer) = prepare()?;
    produce_while(&mut producer, |wait_percent| {
        wait_percent(50)?;
        for node in &mut cluster.nodes {
            node.kill()?;
        }
        cluster.start_all()
    })?;
    verify(&cluster)?;
    cluster.stop()
}
