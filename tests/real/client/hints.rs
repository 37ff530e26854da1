//! Wrong hints (promise 3): a hint is obeyed only if its epoch is newer, so no two brokers can play
//! ball with a client, and no lie holds it up for longer than it is told.

use std::time::Duration;

use anyhow::{Result, ensure};
use qute_client::{Producer, ProducerConfig, Record};
use qute_test::{Call, Fault, Injected, Refusal};

use super::rig::{Leader, Rig};

const TOPIC: &str = "t";

/// At most so many requests of one partition in so long: back-off begins at 20 ms and ends, with
/// jitter, between 0 and 500 ms; twice the mean is left for luck.
fn requests_max(during: Duration) -> u64 {
    let steps_of_250_ms = u64::try_from(during.as_millis() / 250).unwrap_or(u64::MAX);
    2 * steps_of_250_ms + 20
}

/// Three brokers, one partition, one record written.
fn prepare() -> Result<(Rig, Producer, Leader)> {
    let rig = Rig::start(3)?;
    rig.create_topic(TOPIC, 1)?;
    let producer = rig.client()?.producer(ProducerConfig::default())?;
    rig.run(async { Ok(producer.send(Record::to(TOPIC).value("0")).await?) })?;
    let leader = rig.leader(TOPIC, 0)?;
    Ok((rig, producer, leader))
}

/// Sends one record, has `faults` last for `during`, and wants the record written afterwards; gives
/// how many produce requests and metadata calls came in meanwhile.
fn lied_to(
    rig: &Rig,
    producer: &Producer,
    faults: &[Injected],
    during: Duration,
) -> Result<(u64, u64)> {
    rig.restart_counts();
    rig.run(async {
        let mut sent = std::pin::pin!(producer.send(Record::to(TOPIC).value("1")));
        // The time that the lie lasts is what the test is about.
        let early = tokio::time::timeout(during, &mut sent).await;
        ensure!(early.is_err(), "answered during the lie: {early:?}");
        let counts = (rig.count(Call::Produce), rig.count(Call::Metadata));
        for fault in faults {
            fault.stop();
        }
        ensure!(sent.await?.offset == 1);
        Ok(counts)
    })
}

#[test]
fn hint_of_the_same_epoch_for_ten_seconds_costs_no_more_than_back_off() -> Result<()> {
    const LIE: Duration = Duration::from_secs(10);
    let (rig, producer, leader) = prepare()?;
    let other = (leader.place + 1) % 3;
    let other_id = rig.broker_ids()?[other];
    let wrong = Refusal::not_leader().hint(other_id, leader.epoch, &rig.proxies[other].address());
    let refused = rig.proxies[leader.place].inject(Fault::refuse(Call::Produce, wrong));
    let (produced, asked) = lied_to(&rig, &producer, &[refused], LIE)?;
    let bound = requests_max(LIE);
    ensure!(produced <= bound, "{produced} produce requests");
    ensure!(asked <= bound, "{asked} metadata calls");
    ensure!(produced >= 5, "no tries: {produced}");
    rig.stop()
}

#[test]
fn brokers_that_name_each_other_are_asked_no_more_than_back_off_allows() -> Result<()> {
    const LIE: Duration = Duration::from_secs(3);
    let (rig, producer, leader) = prepare()?;
    let ids = rig.broker_ids()?;
    let other = (leader.place + 1) % 3;
    let mut faults = Vec::new();
    for (teller, named) in [(leader.place, other), (other, leader.place)] {
        let address = rig.proxies[named].address();
        let wrong = Refusal::not_leader().hint(ids[named], leader.epoch, &address);
        faults.push(rig.proxies[teller].inject(Fault::refuse(Call::Produce, wrong)));
    }
    let (produced, asked) = lied_to(&rig, &producer, &faults, LIE)?;
    let bound = requests_max(LIE);
    ensure!(produced <= bound, "{produced} produce requests");
    ensure!(asked <= bound, "{asked} metadata calls");
    rig.stop()
}

/// The worst lie: a newer epoch that nobody has, of a broker that nobody knows, nowhere.
#[test]
fn hint_to_an_unknown_broker_holds_nothing_up() -> Result<()> {
    let (rig, producer, leader) = prepare()?;
    let nowhere = qute_tests::ports::Port::take()?;
    for (offset, address) in [(1, String::new()), (2, nowhere.address())] {
        let wrong = Refusal::not_leader().hint(4711, leader.epoch + 1, &address);
        let refused =
            rig.proxies[leader.place].inject(Fault::refuse(Call::Produce, wrong).times(1));
        let record = Record::to(TOPIC).value(offset.to_string());
        let written = rig.run(async { Ok(producer.send(record).await?) })?;
        ensure!(written.offset == offset && refused.hits() == 1);
    }
    rig.stop()
}
