//! Writing: `concurrency` senders, each with one record in flight.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use qute_client::{Client, Producer, ProducerConfig, Record};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::schedule::{STAMP_BYTES, Schedule, filler};
use crate::{Control, Error, Latencies, Load, Report};

/// How long closing the producer may take.
const CLOSE: Duration = Duration::from_secs(30);

/// Writes records and waits for their acknowledgements.
///
/// Records that ran out of time are counted and the run goes on; one that is refused for good ends
/// it, as the others would be, too.
///
/// # Errors
/// The load makes no sense, or there can be no producer. What became of records is in the report.
///
/// # Cancel safety
/// Dropped, records in flight may still be written.
pub async fn produce(client: &Client, load: &Load, control: &Control) -> Result<Report, Error> {
    load.check()?;
    let schedule = Arc::new(Schedule::new(load, control.clone()));
    Ok(send_all(client, load, schedule, control).await?.report)
}

/// What all senders saw.
pub(crate) struct SentAll {
    pub report: Report,
    /// Those of the warm-up included.
    pub acknowledged: u64,
}

/// What one sender saw.
struct Sent {
    latencies: Latencies,
    records: u64,
    acknowledged: u64,
    errors: u64,
    first_error: Option<qute_client::Error>,
    first: Option<Instant>,
    last: Option<Instant>,
}

impl Sent {
    fn new() -> Result<Self, Error> {
        Ok(Self {
            latencies: Latencies::new()?,
            records: 0,
            acknowledged: 0,
            errors: 0,
            first_error: None,
            first: None,
            last: None,
        })
    }

    fn add(&mut self, other: Self) -> Result<(), Error> {
        self.latencies.add(&other.latencies)?;
        self.records += other.records;
        self.acknowledged += other.acknowledged;
        self.errors += other.errors;
        self.first_error = self.first_error.take().or(other.first_error);
        self.first = self.first.into_iter().chain(other.first).min();
        self.last = self.last.into_iter().chain(other.last).max();
        Ok(())
    }
}

/// What every sender shares.
struct Job {
    producer: Producer,
    schedule: Arc<Schedule>,
    control: Control,
    topic: Arc<str>,
    filler: Bytes,
    keys: u64,
    warmup: u64,
}

/// Sends everything.
pub(crate) async fn send_all(
    client: &Client,
    load: &Load,
    schedule: Arc<Schedule>,
    control: &Control,
) -> Result<SentAll, Error> {
    let config = ProducerConfig::default()
        .linger(load.linger)
        .batch_bytes(load.batch_bytes)
        .compression(load.compression)
        .delivery_timeout(load.delivery_timeout);
    let producer = client.producer(config)?;
    let job = Arc::new(Job {
        producer: producer.clone(),
        schedule,
        control: control.clone(),
        topic: load.topic.as_str().into(),
        filler: filler(load.record_bytes - STAMP_BYTES),
        keys: load.keys,
        warmup: load.warmup,
    });
    let mut senders = JoinSet::new();
    for _ in 0..load.concurrency.max(1) {
        senders.spawn(send(Arc::clone(&job)));
    }
    drop(job);
    let mut all = Sent::new()?;
    while let Some(sent) = senders.join_next().await {
        all.add(sent.map_err(|error| Error::Measuring(error.to_string()))??)?;
    }
    producer.close(CLOSE).await;
    let seconds = all
        .first
        .zip(all.last)
        .map_or(0.0, |(first, last)| (last - first).as_secs_f64());
    let record_bytes = u64::try_from(load.record_bytes).unwrap_or(u64::MAX);
    Ok(SentAll {
        acknowledged: all.acknowledged,
        report: Report {
            records: all.records,
            bytes: all.records.saturating_mul(record_bytes),
            errors: all.errors,
            first_error: all.first_error,
            seconds,
            latency: Some(all.latencies),
            acknowledged: None,
        },
    })
}

async fn send(job: Arc<Job>) -> Result<Sent, Error> {
    let mut sent = Sent::new()?;
    while let Some((number, due)) = job.schedule.next().await {
        let value = job.schedule.value(due, &job.filler);
        let mut record = Record::to(Arc::clone(&job.topic)).value(value);
        if let Some(key) = number.checked_rem(job.keys) {
            record = record.key(format!("key{key}"));
        }
        match job.producer.send(record).await {
            Ok(_) => {
                sent.acknowledged += 1;
                job.control.count(1);
                if number >= job.warmup {
                    let now = Instant::now();
                    sent.latencies.record(now.saturating_duration_since(due));
                    sent.records += 1;
                    sent.first.get_or_insert(due);
                    sent.last = Some(now);
                }
            }
            Err(error) => {
                sent.errors += 1;
                if !error.is_retriable() {
                    job.control.stop();
                }
                sent.first_error.get_or_insert(error);
            }
        }
    }
    Ok(sent)
}
