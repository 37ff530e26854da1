//! Refusals and answers that clients build on, over raw gRPC: leaders, duplicates, credit, offsets.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use qute_proto::batch::ProducerStamp;
use qute_proto::ids::ProducerId;
use qute_proto::v1::fetch_response::Response;
use qute_proto::v1::offset_query::Position;
use qute_proto::v1::{Batches, ErrorCode, ProduceAck};
use qute_tests::cluster::Cluster;
use qute_tests::wait;

use crate::bins;
use crate::wire::{self, Raw};

/// Within this time a healthy broker answers.
const SOON: Duration = Duration::from_secs(20);
/// Within this time nothing must come.
const SILENCE: Duration = Duration::from_millis(300);

fn one_with_topic() -> Result<(Cluster, Raw, Bytes)> {
    let cluster = Cluster::start(&bins(), 1)?;
    let raw = Raw::connect(&cluster.nodes[0].address())?;
    let topic = raw.create_topic("t", 1)?.ok().context("refused")?;
    raw.wait_leader(&topic)?;
    Ok((cluster, raw, topic))
}

fn stamp(epoch: u32, base_sequence: u64) -> ProducerStamp {
    ProducerStamp {
        producer_id: ProducerId(77),
        epoch,
        base_sequence,
    }
}

#[test]
fn follower_refuses_records_and_names_the_leader() -> Result<()> {
    let cluster = Cluster::start(&bins(), 3)?;
    cluster.create_topic("t", 1, 3)?;
    let description = cluster
        .qute(["topic", "describe", "t", "--output", "json"])
        .run()?
        .ok()?;
    let topic: qute_proto::ids::TopicId = description.json()?["id"]
        .as_str()
        .context("no id")?
        .parse()?;
    let batch = wire::batch(&[b"x"])?;
    let (mut acknowledged, mut refused) = (0, 0);
    for node in &cluster.nodes {
        let raw = Raw::connect(&node.address())?;
        let answers = raw.produce_in_full(topic.to_wire(), 0, vec![batch.clone()])?;
        match answers.into_iter().next().context("no answer")? {
            Ok(_) => acknowledged += 1,
            Err(error) => {
                ensure!(error.code() == ErrorCode::NotLeader, "{error:?}");
                let hint = error.leader_hint.context("no hint")?;
                ensure!(hint.broker_id != 0 && hint.leader_epoch > 0, "{hint:?}");
                let known = cluster
                    .nodes
                    .iter()
                    .any(|node| node.address() == hint.address);
                ensure!(known && hint.address != node.address(), "{hint:?}");
                refused += 1;
            }
        }
    }
    ensure!(
        (acknowledged, refused) == (1, 2),
        "{acknowledged} leaders, {refused} followers"
    );
    cluster.stop()
}

#[test]
fn batch_sent_twice_is_stored_once_across_a_restart() -> Result<()> {
    let (mut cluster, raw, topic) = one_with_topic()?;
    let send = |raw: &Raw, epoch, sequence, values: &[&[u8]]| -> Result<_> {
        let batch = wire::stamped(values, stamp(epoch, sequence))?;
        let answers = raw.produce_in_full(topic.clone(), 0, vec![batch])?;
        answers.into_iter().next().context("no answer")
    };
    let offset = |ack: std::result::Result<ProduceAck, _>| match ack {
        Ok(ack) => Ok((ack.base_offset, ack.duplicate)),
        Err(error) => bail!("{error:?}"),
    };
    ensure!(offset(send(&raw, 0, 0, &[b"a", b"b"])?)? == (0, false));
    ensure!(offset(send(&raw, 0, 2, &[b"c"])?)? == (2, false));
    ensure!(offset(send(&raw, 0, 0, &[b"a", b"b"])?)? == (0, true));
    ensure!(offset(send(&raw, 0, 2, &[b"c"])?)? == (2, true));
    let ahead = send(&raw, 0, 9, &[b"z"])?;
    ensure!(ahead.is_err_and(|error| error.code() == ErrorCode::OutOfOrderSequence));

    // What is known of the producer survives (S12).
    cluster.node(0)?.kill()?;
    cluster.start_all()?;
    let raw = Raw::connect(&cluster.nodes[0].address())?;
    raw.wait_leader(&topic)?;
    ensure!(offset(send(&raw, 0, 2, &[b"c"])?)? == (2, true));
    ensure!(offset(send(&raw, 0, 3, &[b"d"])?)? == (3, false));
    ensure!(offset(send(&raw, 1, 0, &[b"e"])?)? == (4, false));
    let old = send(&raw, 0, 4, &[b"f"])?;
    ensure!(old.is_err_and(|error| error.code() == ErrorCode::ProducerFenced));
    let end = raw.list_offset(&topic, Position::End(true))?;
    ensure!(end.offset == 5, "{end:?}");
    cluster.stop()
}

#[test]
fn unknown_producer_with_a_sequence_is_told_so() -> Result<()> {
    let (cluster, raw, topic) = one_with_topic()?;
    let batch = wire::stamped(&[b"x"], stamp(3, 12))?;
    let answers = raw.produce(&topic, vec![batch])?;
    ensure!(answers == [Err(ErrorCode::UnknownProducer)], "{answers:?}");
    cluster.stop()
}

/// Waits for batches, past confirmations of the subscription.
fn batches(fetch: &mut wire::Fetch<'_>) -> Result<Batches> {
    wait::until("batches", SOON, || match fetch.next(SOON)? {
        Some(Response::Batches(batches)) => Ok(Some(batches)),
        Some(Response::Error(error)) => bail!("{error:?}"),
        Some(Response::Subscribed(_)) | None => Ok(None),
    })
}

#[test]
fn fetch_sends_what_its_credit_allows_and_no_more() -> Result<()> {
    let (cluster, raw, topic) = one_with_topic()?;
    let batch = wire::batch(&[&[b'x'; 1000]])?;
    raw.produce(&topic, vec![batch.clone(); 50])?;
    let mut fetch = raw.fetch(&topic, 0)?;
    ensure!(
        matches!(fetch.next(SOON)?, Some(Response::Subscribed(it)) if it.high_watermark == 50),
        "no confirmation"
    );
    ensure!(fetch.next(SILENCE)?.is_none(), "batches without credit");

    // One byte buys one batch, which comes as its producer made it; the debt is paid first.
    fetch.credit(1)?;
    let first = batches(&mut fetch)?;
    ensure!(
        first.batches.len() == 1,
        "{} batches for one byte",
        first.batches.len()
    );
    ensure!(first.batches[0].base_offset == 0 && first.batches[0].batch == batch);
    ensure!(fetch.next(SILENCE)?.is_none(), "batches on debt");
    fetch.credit(1 << 20)?;
    let mut next = 1;
    while next < 50 {
        for batch in batches(&mut fetch)?.batches {
            ensure!(
                batch.base_offset == next,
                "{} instead of {next}",
                batch.base_offset
            );
            next += 1;
        }
    }

    // At the end it waits, and is served when a record commits (S18).
    ensure!(fetch.next(SILENCE)?.is_none(), "batches behind the end");
    raw.produce(&topic, vec![batch])?;
    ensure!(batches(&mut fetch)?.batches[0].base_offset == 50);
    cluster.stop()
}

#[test]
fn fetch_at_the_end_waits_and_far_beyond_is_out_of_range() -> Result<()> {
    let (cluster, raw, topic) = one_with_topic()?;
    raw.produce(&topic, vec![wire::batch(&[b"a", b"b"])?])?;
    let mut fetch = raw.fetch(&topic, 2)?;
    fetch.credit(1 << 20)?;
    ensure!(matches!(fetch.next(SOON)?, Some(Response::Subscribed(_))));
    ensure!(fetch.next(SILENCE)?.is_none());

    let mut fetch = raw.fetch(&topic, 1_000_000)?;
    fetch.credit(1 << 20)?;
    let error = wait::until("a refusal", SOON, || match fetch.next(SOON)? {
        Some(Response::Error(error)) => Ok(Some(error)),
        other => bail!("{other:?}"),
    })?;
    ensure!(error.code() == ErrorCode::OffsetOutOfRange, "{error:?}");
    let bounds = error.bounds.context("no bounds")?;
    ensure!(
        (bounds.log_start_offset, bounds.high_watermark) == (0, 2),
        "{bounds:?}"
    );
    cluster.stop()
}

#[test]
fn offsets_are_listed_by_position_and_by_time() -> Result<()> {
    let (cluster, raw, topic) = one_with_topic()?;
    let now = || -> Result<u64> {
        Ok(u64::try_from(
            SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis(),
        )?)
    };
    let list = |position| -> Result<u64> {
        let answer = raw.list_offset(&topic, position)?;
        ensure!(answer.error.is_none(), "{answer:?}");
        Ok(answer.offset)
    };
    let before = now()?;
    raw.produce(&topic, vec![wire::batch(&[b"a", b"b"])?])?;
    let between = wait::until("the clock to go on", SOON, || {
        let now = now()?;
        Ok((now > before + 50).then_some(now))
    })?;
    raw.produce(&topic, vec![wire::batch(&[b"c"])?])?;
    ensure!(list(Position::Start(true))? == 0);
    ensure!(list(Position::End(true))? == 3);
    ensure!(list(Position::TimeMs(before))? == 0);
    ensure!(list(Position::TimeMs(between))? == 2);
    ensure!(list(Position::TimeMs(between + 3_600_000))? == 3);
    cluster.stop()
}
