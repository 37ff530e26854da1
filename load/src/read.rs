//! Reading: a topic from start to end, and what is being written at the same time.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use qute_client::{Client, Consumer, Position};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use crate::schedule::Schedule;
use crate::write::send_all;
use crate::{Control, Error, Latencies, Load, Report};

/// How long acknowledged records may take to arrive once all have been written.
const ARRIVAL: Duration = Duration::from_secs(60);
/// How many records go by between two looks at whether the run is to end.
const LOOK_EVERY: u64 = 1024;

/// Reads a topic from its start to its end as it is now, or `records_max` records of it.
///
/// # Errors
/// The topic can't be read.
///
/// # Cancel safety
/// Nothing is lost: it only reads.
pub async fn consume(
    client: &Client,
    topic: &str,
    records_max: Option<u64>,
    control: &Control,
) -> Result<Report, Error> {
    let records_max = records_max.unwrap_or(u64::MAX);
    let start = Instant::now();
    let consumer = client.consumer(topic).start(Position::Start).until_end();
    let mut stream = consumer.open().await?;
    let (mut records, mut bytes) = (0_u64, 0_u64);
    while records < records_max {
        let record = tokio::select! {
            biased;
            record = stream.next() => record,
            () = control.stopped() => None,
        };
        let Some(record) = record.transpose()? else {
            break;
        };
        records += 1;
        let length = record.value.map_or(0, |value| value.len());
        bytes = bytes.saturating_add(u64::try_from(length).unwrap_or(u64::MAX));
        if records.is_multiple_of(LOOK_EVERY) {
            control.count(LOOK_EVERY);
            // A stream that always has more would never come to the other arm.
            if control.is_stopped() {
                break;
            }
        }
    }
    control.count(records % LOOK_EVERY);
    Ok(Report {
        records,
        bytes,
        errors: 0,
        first_error: None,
        seconds: start.elapsed().as_secs_f64(),
        latency: None,
        acknowledged: None,
    })
}

/// Writes and reads at the same time; latency runs from a record's due time to its reading. Other
/// records of the topic are passed over.
///
/// # Errors
/// The topic can't be written or read, or acknowledged records did not arrive within a minute.
///
/// # Cancel safety
/// Dropped, records in flight may still be written.
pub async fn end_to_end(client: &Client, load: &Load, control: &Control) -> Result<Report, Error> {
    load.check()?;
    let consumer = client.consumer(load.topic.as_str()).start(Position::End);
    let stream = consumer.open().await?;
    let schedule = Arc::new(Schedule::new(load, control.clone()));
    let (all_sent, sent) = oneshot::channel();
    let reading = tokio::spawn(read_run(stream, Arc::clone(&schedule), load.warmup, sent));
    let written = send_all(client, load, schedule, control).await?;
    // Whoever reads may have failed already: its own error says more.
    let _ = all_sent.send(written.acknowledged);
    let read = reading
        .await
        .map_err(|error| Error::Measuring(error.to_string()))??;
    let Report {
        bytes,
        errors,
        first_error,
        seconds,
        latency: acknowledged,
        ..
    } = written.report;
    Ok(Report {
        records: read.count(),
        bytes,
        errors,
        first_error,
        seconds,
        latency: Some(read),
        acknowledged,
    })
}

/// Reads the records of one run until as many came as were acknowledged in all.
async fn read_run(
    stream: Consumer,
    schedule: Arc<Schedule>,
    warmup: u64,
    mut sent: oneshot::Receiver<u64>,
) -> Result<Latencies, Error> {
    let mut reader = Reader {
        stream,
        schedule,
        warmup,
        latencies: Latencies::new()?,
        read: 0,
    };
    let acknowledged = loop {
        tokio::select! {
            acknowledged = &mut sent => match acknowledged {
                Ok(acknowledged) => break acknowledged,
                Err(_) => return Err(Error::Measuring("the writers are gone".to_owned())),
            },
            outcome = reader.next() => outcome?,
        }
    };
    let rest = async {
        while reader.read < acknowledged {
            reader.next().await?;
        }
        Ok(())
    };
    match timeout(ARRIVAL, rest).await {
        Ok(outcome) => outcome.map(|()| reader.latencies),
        Err(_) => Err(Error::Missing {
            read: reader.read,
            acknowledged,
            waited: ARRIVAL,
        }),
    }
}

struct Reader {
    stream: Consumer,
    schedule: Arc<Schedule>,
    warmup: u64,
    latencies: Latencies,
    /// Records of this run.
    read: u64,
}

impl Reader {
    /// Takes one record of whatever run. Dropped while it waits, it has taken none.
    async fn next(&mut self) -> Result<(), Error> {
        let record = self.stream.next().await.transpose()?;
        let record = record.ok_or_else(|| Error::Measuring("the stream has ended".to_owned()))?;
        if let Some(due) = self.schedule.due(&record.value.unwrap_or_default()) {
            self.read += 1;
            if self.read > self.warmup {
                self.latencies.record(due.elapsed());
            }
        }
        Ok(())
    }
}
