//! Leaders that die mid-burst, lose their answers, or are missing for a while.

use std::time::Duration;

use anyhow::{Result, ensure};
use futures::future::{join_all, try_join_all};
use qute_client::{OffsetSpec, ProducerConfig, Record};
use qute_test::{Call, Fault, Refusal};
use qute_tests::wait;

use super::rig::{Rig, check_numbered, numbered, read_all, until};

const TOPIC: &str = "t";

/// Promises 1 and 7: every acknowledged record once, per key in order.
#[test]
fn leader_killed_amid_a_burst_loses_doubles_and_reorders_nothing() -> Result<()> {
    const RECORDS: u64 = 100_000;
    const KEYS: u64 = 1000;
    let mut rig = Rig::start(3)?;
    rig.create_topic(TOPIC, 6)?;
    let client = rig.client()?;
    let producer = client.producer(ProducerConfig::default().batch_bytes(16 * 1024))?;
    let burst = rig.runtime.spawn({
        let producer = producer.clone();
        async move {
            let mut tickets = Vec::new();
            for number in 0..RECORDS {
                let (key, value) = numbered(number, KEYS);
                let record = Record::to(TOPIC).key(key).value(value);
                tickets.push(producer.enqueue(record).await?);
            }
            anyhow::Ok(try_join_all(tickets).await?)
        }
    });
    wait::until_true("a part to be written", wait::LONG, || {
        Ok(producer.report().delivered >= RECORDS / 10)
    })?;
    let leader = rig.leader(TOPIC, 0)?;
    rig.cluster.node(leader.place)?.kill()?;
    ensure!(
        producer.report().delivered < RECORDS,
        "the burst was over before the kill"
    );
    let acknowledged = rig.run(async { burst.await? })?;
    rig.cluster.start_all()?;
    let records = rig.run(read_all(&client, TOPIC))?;
    check_numbered(&records, RECORDS, KEYS)?;
    // Each is where its acknowledgement said.
    for (number, place) in (0..RECORDS).zip(acknowledged) {
        let (key, _) = numbered(number, KEYS);
        ensure!(
            qute_client::partition_of(&key, 6) == place.partition,
            "{number} in {place:?}"
        );
    }
    rig.stop()
}

/// Promise 1: a retry is no second record.
#[test]
fn reply_lost_after_the_commit_gives_one_record_with_its_first_offset() -> Result<()> {
    let rig = Rig::start(1)?;
    rig.create_topic(TOPIC, 1)?;
    let client = rig.client()?;
    let producer = client.producer(ProducerConfig::default())?;
    let send = |value: u64| producer.send(Record::to(TOPIC).value(value.to_string()));
    rig.run(async {
        let proxy = &rig.proxies[0];
        ensure!(send(0).await?.offset == 0);
        let lost = proxy.inject(Fault::drop_reply(Call::Produce).times(1));
        ensure!(send(1).await?.offset == 1);
        ensure!(lost.hits() == 1);
        // The connection breaks instead of the stream.
        let held = proxy.inject(Fault::swallow_reply(Call::Produce).times(1));
        let sent = async { Ok(send(2).await?) };
        let broken = async {
            until("the reply to be lost", || held.hits() == 1).await?;
            proxy.reset_connections();
            anyhow::Ok(())
        };
        let (written, ()) = tokio::try_join!(sent, broken)?;
        ensure!(written.offset == 2, "{written:?}");
        ensure!(send(3).await?.offset == 3);
        let values: Vec<_> = read_all(&client, TOPIC)
            .await?
            .into_iter()
            .map(|record| record.value.unwrap_or_default())
            .collect();
        ensure!(values == ["0", "1", "2", "3"], "{values:?}");
        Ok(())
    })?;
    rig.stop()
}

/// Promises 2 and 3: nothing fails while there is time, and nothing hammers.
#[test]
fn five_seconds_without_a_leader_delay_records_and_lose_none() -> Result<()> {
    const OUTAGE: Duration = Duration::from_secs(5);
    const RECORDS: u64 = 1000;
    const KEYS: u64 = 10;
    let mut rig = Rig::start(3)?;
    rig.create_topic(TOPIC, 1)?;
    let client = rig.client()?;
    let producer = client.producer(ProducerConfig::default())?;
    let enqueue = |numbers: std::ops::Range<u64>| {
        let producer = producer.clone();
        async move {
            let mut tickets = Vec::new();
            for number in numbers {
                let (key, value) = numbered(number, KEYS);
                let record = Record::to(TOPIC).key(key).value(value);
                tickets.push(producer.enqueue(record).await?);
            }
            anyhow::Ok(tickets)
        }
    };
    rig.run(async { Ok(try_join_all(enqueue(0..RECORDS / 2).await?).await?) })?;
    let begun = std::time::Instant::now();
    for place in [1, 2] {
        rig.cluster.node(place)?.kill()?;
    }
    rig.restart_counts();
    let waiting = rig.run(enqueue(RECORDS / 2..RECORDS))?;
    wait::rest_until(begun + OUTAGE);
    let requests = rig.count(Call::Produce);
    for place in [1, 2] {
        rig.cluster.start_one(place)?;
    }
    rig.run(async { Ok(try_join_all(waiting).await?) })?;
    // In flight at once: five; then at most one attempt of five batches per back-off.
    ensure!(requests <= 5 * 60, "{requests} requests in {OUTAGE:?}");
    rig.cluster.start_all()?;
    let records = rig.run(read_all(&client, TOPIC))?;
    check_numbered(&records, RECORDS, KEYS)?;
    rig.stop()
}

/// Promise 3: one refresh in flight, however many callers fail.
#[test]
fn thousand_stale_routes_share_one_metadata_call() -> Result<()> {
    const CALLERS: u64 = 1000;
    let rig = Rig::start(1)?;
    rig.create_topic(TOPIC, 1)?;
    let client = rig.client()?;
    rig.run(async {
        let proxy = &rig.proxies[0];
        // Slow enough that all callers meet.
        proxy.inject(Fault::delay(Call::Metadata, Duration::from_millis(50)));
        let stale = Refusal::not_leader();
        let stale = proxy.inject(Fault::refuse(Call::ListOffsets, stale).times(CALLERS));
        proxy.restart_counts();
        const END: [(u32, OffsetSpec); 1] = [(0, OffsetSpec::End)];
        let list = || client.list_offsets(TOPIC, &END);
        let listed = join_all((0..CALLERS).map(|_| list())).await;
        for offsets in listed {
            ensure!(offsets?.len() == 1);
        }
        ensure!(stale.hits() == CALLERS);
        let (calls, at_once) = (
            proxy.count(Call::Metadata),
            proxy.in_flight_max(Call::Metadata),
        );
        ensure!(at_once == 1, "{at_once} metadata calls at once");
        ensure!(calls <= CALLERS / 10, "{calls} metadata calls");
        Ok(())
    })?;
    rig.stop()
}
