//! `qute produce`: lines of standard input, or one file, to a topic.
//!
//! ```text
//! stdin thread --groups of lines--> pump --enqueue--> client
//!                                    |
//!                                    +--tickets, in input order--> settle: counts, acks, failures
//! ```
//!
//! Everything in between is bounded: lines read ahead, the client's buffer in bytes, tickets in
//! number. The first refusal stops the reading; what was taken in before is still delivered.
//!
//! | file | holds |
//! | --- | --- |
//! | `input.rs` | standard input and files |
//! | `pace.rs` | `--rate` |
//! | `settle.rs` | the fate of every record, in input order |
//! | `ending.rs` | exit code and last words |

mod ending;
mod input;
mod pace;
mod settle;

use std::io::{self, IsTerminal as _};
use std::os::unix::ffi::OsStrExt as _;
use std::pin::pin;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::FutureExt as _;
use qute_client::{Client, Producer, ProducerConfig, Record};
use qute_proto::batch::{BATCH_BYTES_MAX, RECORD_BYTES_MAX};
use tokio::sync::mpsc;

use crate::args::{Global, Output, Produce, Source};
use crate::connection::{connect, explain, failure};
use crate::exit::{Exit, Failure};
use crate::interrupt::Interrupt;
use crate::lines::split_key;
use crate::progress::Progress;
use crate::sink::{self, Sink};
use crate::text::json_series::JsonSeries;
use crate::text::rate::Rate;
use ending::{Ending, Stop};
use pace::Pace;
use settle::{Acks, Pending, Settle};

/// How long a record may wait for others to share its batch.
const LINGER: Duration = Duration::from_millis(5);
/// Records whose fate is open, in number (the client bounds them in bytes).
const TICKETS_MAX: usize = 64 * 1024;
/// After a failure: how long what was taken in before may still take.
const AFTER_FAILURE: Duration = Duration::from_secs(10);

/// Runs the command.
///
/// # Errors
/// A line is refused, the deadline passes, the input can't be read.
pub async fn run(args: Produce, global: &Global, interrupt: &Interrupt) -> Result<Exit, Failure> {
    let source = args.source()?;
    // Before anything connects: a file that can't be sent needs no cluster.
    let prepared = async {
        let input = match source {
            Source::Lines => Input::Lines(Keys::None),
            Source::KeyedLines {
                delimiter,
                tombstones,
            } => Input::Lines(Keys::Before {
                delimiter: delimiter.0,
                tombstones,
            }),
            Source::File(path) => {
                Input::One(Some(input::whole_file(path, RECORD_BYTES_MAX).await?))
            }
            Source::Tombstone => Input::One(None),
        };
        Ok((input, open(&args, global).await?))
    };
    let (input, (client, producer)) = tokio::select! {
        prepared = prepared => prepared?,
        () = interrupt.wait() => return Err(Failure::error("interrupted before anything was sent")),
    };
    let started = Instant::now();
    let series = match global.output {
        Output::Json => Some(JsonSeries::array()),
        Output::Jsonl => Some(JsonSeries::lines()),
        Output::Table | Output::Raw => None,
    };
    let acks = match series.map(|series| Ok((Sink::stdout()?.0, series))) {
        None => None,
        Some(Ok((sink, series))) => Some(Acks { sink, series }),
        Some(Err(error)) => return sink::Error::ending(error),
    };
    let (tickets, pending) = mpsc::channel(TICKETS_MAX);
    // Whoever types the lines needs no sign of life.
    let typed = args.file.is_none() && io::stdin().is_terminal();
    let progress = (!typed).then(|| {
        let title = format!("producing to {}", args.topic);
        match acks {
            Some(_) => Progress::records_beside_stdout(title, None),
            None => Progress::records(title, None),
        }
    });
    let (settle, mut first_failed) = Settle::new(acks, progress);
    let settling = tokio::spawn(settle.run(pending));
    let pump = Pump {
        producer: &producer,
        template: template(&args),
        tickets,
    };
    let sending = async {
        match input {
            Input::One(value) => pump.one(value, interrupt).await,
            Input::Lines(keys) => {
                let failed = first_failed.wait();
                pump.lines(&keys, args.rate, interrupt, failed).await
            }
        }
    };
    let stop = sending.await?;
    let wait = match stop {
        Stop::EndOfInput | Stop::Interrupted { .. } | Stop::Input(_) | Stop::NoKey { .. } => {
            // Each record's own deadline comes first.
            global
                .delivery_timeout()
                .saturating_add(Duration::from_secs(5))
        }
        Stop::Refused { .. } | Stop::Failed => AFTER_FAILURE.min(global.delivery_timeout()),
    };
    // Closing resolves every ticket, so settling ends.
    producer.close(wait).await;
    let tally = settling
        .await
        .map_err(|error| Failure::error(format!("counting acknowledgements failed: {error}")))?;
    drop(client);
    Ending {
        tally,
        stop,
        only: only(&args),
        elapsed: started.elapsed(),
    }
    .say()
}

async fn open(args: &Produce, global: &Global) -> Result<(Client, Producer), Failure> {
    let client = connect(global).await?;
    // An unknown topic is said before a line is read; the leaders may still be on their way.
    if let Err(error) = client.list_offsets(&args.topic, &[]).await {
        return Err(explain(&client, &error).await);
    }
    let config = ProducerConfig::default()
        .linger(LINGER)
        .compression(args.compression.into())
        .delivery_timeout(global.delivery_timeout());
    let producer = client.producer(config).map_err(|error| failure(&error))?;
    Ok((client, producer))
}

/// What all records have in common.
fn template(args: &Produce) -> Record {
    let mut record = Record::to(args.topic.as_str());
    record.partition = args.partition;
    record.key = args
        .key
        .as_ref()
        .map(|key| Bytes::copy_from_slice(key.as_bytes()));
    for (name, value) in &args.headers {
        record = record.header(name.clone(), Bytes::copy_from_slice(value.as_bytes()));
    }
    record
}

/// What the only record is to be called in an error; `None`: there are lines, and they have numbers.
fn only(args: &Produce) -> Option<String> {
    match &args.file {
        Some(path) => Some(path.display().to_string()),
        None if args.tombstone && args.key.is_some() => Some("tombstone".to_owned()),
        None => None,
    }
}

/// Where the values come from.
enum Input {
    /// This is the only one.
    One(Option<Bytes>),
    /// Standard input.
    Lines(Keys),
}

/// What a line holds besides its value.
enum Keys {
    None,
    Before {
        delimiter: Vec<u8>,
        /// Without a value the line is the tombstone of its key.
        tombstones: bool,
    },
}

impl Keys {
    /// Key and value of a line; `None`: it has no key and needs one.
    fn split(&self, line: Bytes) -> Option<(Option<Bytes>, Option<Bytes>)> {
        let Self::Before {
            delimiter,
            tombstones,
        } = self
        else {
            return Some((None, Some(line)));
        };
        let (key, value) = split_key(&line, delimiter);
        match (tombstones, key) {
            (false, key) => Some((key, Some(value))),
            (true, Some(key)) => Some((Some(key), (!value.is_empty()).then_some(value))),
            (true, None) if line.is_empty() => None,
            (true, None) => Some((Some(line), None)),
        }
    }

    fn delimiter_bytes(&self) -> usize {
        match self {
            Self::None => 0,
            Self::Before { delimiter, .. } => delimiter.len(),
        }
    }
}

/// Turns input into records and hands them to the client.
struct Pump<'a> {
    producer: &'a Producer,
    template: Record,
    tickets: mpsc::Sender<Pending>,
}

impl Pump<'_> {
    async fn one(self, value: Option<Bytes>, interrupt: &Interrupt) -> Result<Stop, Failure> {
        let record = Record {
            value,
            ..self.template.clone()
        };
        let stopped = self.send(1, record, interrupt).await;
        Ok(stopped.err().unwrap_or(Stop::EndOfInput))
    }

    /// Until the end of input, a refusal, a failure told by `failed`, or a signal.
    async fn lines(
        self,
        keys: &Keys,
        rate: Option<Rate>,
        interrupt: &Interrupt,
        failed: impl Future<Output = ()>,
    ) -> Result<Stop, Failure> {
        let mut input = input::stdin_lines(BATCH_BYTES_MAX + keys.delimiter_bytes())?;
        let mut failed = pin!(failed.fuse());
        let mut pace = Pace::new(rate);
        let mut read = 0;
        loop {
            let group = tokio::select! {
                biased;
                () = interrupt.wait() => return Ok(Stop::Interrupted { read }),
                () = &mut failed => return Ok(Stop::Failed),
                group = input.recv() => group,
            };
            let group = match group {
                None => return Ok(Stop::EndOfInput),
                Some(Err(error)) => return Ok(Stop::Input(error)),
                Some(Ok(group)) => group,
            };
            for (number, line) in (group.first_number..).zip(group.lines) {
                if rate.is_some() {
                    tokio::select! {
                        biased;
                        () = interrupt.wait() => return Ok(Stop::Interrupted { read }),
                        () = &mut failed => return Ok(Stop::Failed),
                        () = pace.wait() => {}
                    }
                }
                let Some(record) = self.record(line, keys) else {
                    return Ok(Stop::NoKey { number });
                };
                if let Err(stop) = self.send(number, record, interrupt).await {
                    return Ok(stop);
                }
                read = number;
            }
        }
    }

    /// The record of a line; `None`: it has no key and needs one.
    fn record(&self, line: Bytes, keys: &Keys) -> Option<Record> {
        let (key, value) = keys.split(line)?;
        let mut record = self.template.clone();
        record.key = key.or(record.key);
        record.value = value;
        Some(record)
    }

    async fn send(&self, number: u64, record: Record, interrupt: &Interrupt) -> Result<(), Stop> {
        let size = |bytes: &Option<Bytes>| bytes.as_ref().map_or(0, Bytes::len);
        let bytes = size(&record.key) + size(&record.value);
        let mut enqueue = pin!(self.producer.enqueue(record));
        let taken = match enqueue.as_mut().now_or_never() {
            Some(taken) => taken,
            // The buffer is full: this is where slow brokers slow the reading down.
            None => tokio::select! {
                taken = enqueue => taken,
                () = interrupt.wait() => return Err(Stop::Interrupted { read: number - 1 }),
            },
        };
        let ticket = taken.map_err(|error| Stop::Refused { number, error })?;
        let pending = Pending {
            number,
            bytes,
            ticket,
        };
        // Settling ends only when this sender is gone.
        self.tickets.send(pending).await.map_err(|_| Stop::Failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(tombstones: bool, line: &'static str) -> Option<(Option<Bytes>, Option<Bytes>)> {
        let keys = Keys::Before {
            delimiter: b"::".to_vec(),
            tombstones,
        };
        keys.split(Bytes::from_static(line.as_bytes()))
    }

    fn pair(
        key: Option<&'static str>,
        value: Option<&'static str>,
    ) -> Option<(Option<Bytes>, Option<Bytes>)> {
        Some((key.map(Bytes::from), value.map(Bytes::from)))
    }

    #[test]
    fn line_without_delimiter_is_a_value_and_with_tombstones_a_key() {
        assert_eq!(split(false, "plain"), pair(None, Some("plain")));
        assert_eq!(split(true, "plain"), pair(Some("plain"), None));
    }

    #[test]
    fn empty_value_stays_empty_and_with_tombstones_is_absent() {
        assert_eq!(split(false, "k::"), pair(Some("k"), Some("")));
        assert_eq!(split(true, "k::"), pair(Some("k"), None));
        assert_eq!(split(true, "::"), pair(Some(""), None));
    }

    #[test]
    fn line_with_a_value_is_written_as_ever() {
        for tombstones in [false, true] {
            assert_eq!(split(tombstones, "k::v"), pair(Some("k"), Some("v")));
        }
    }

    #[test]
    fn blank_line_is_a_value_but_no_tombstone() {
        assert_eq!(split(false, ""), pair(None, Some("")));
        assert_eq!(split(true, ""), None);
    }
}
