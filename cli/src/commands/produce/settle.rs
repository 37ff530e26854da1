//! The fate of every record, in input order: counted, acknowledged on standard output if asked
//! for, and the first failure told to whoever reads the input.

use futures::FutureExt as _;
use qute_client::{Error, RecordMetadata, Ticket};
use serde::Serialize;
use tokio::sync::{mpsc, oneshot};

use crate::progress::Progress;
use crate::sink::{self, BUFFER_BYTES, Sink};
use crate::text::json_series::JsonSeries;

/// A record that the client has taken in.
#[derive(Debug)]
pub struct Pending {
    /// Number of its line.
    pub number: u64,
    /// Bytes of key and value.
    pub bytes: usize,
    /// Its fate.
    pub ticket: Ticket,
}

/// What became of the records.
#[derive(Debug, Default)]
pub struct Tally {
    /// Records acknowledged.
    pub acknowledged: u64,
    /// Bytes of their keys and values.
    pub bytes: u64,
    /// Records that were taken in and not acknowledged.
    pub failed: u64,
    /// The first of those: line and error.
    pub first_failure: Option<(u64, Error)>,
    /// Standard output failed under the acknowledgements.
    pub output: Option<sink::Error>,
}

/// Resolves when a record has failed.
#[derive(Debug)]
pub struct FirstFailed(oneshot::Receiver<()>);

impl FirstFailed {
    /// Waits for it; never resolves if all goes well.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn wait(&mut self) {
        if (&mut self.0).await.is_err() {
            std::future::pending().await
        }
    }
}

/// Collects tickets.
#[derive(Debug)]
pub struct Settle {
    tally: Tally,
    failed: Option<oneshot::Sender<()>>,
    acks: Option<Acks>,
    buffer: Vec<u8>,
    progress: Option<Progress>,
}

/// Where acknowledgements are printed, and how.
#[derive(Debug)]
pub struct Acks {
    /// Where.
    pub sink: Sink,
    /// How.
    pub series: JsonSeries,
}

#[derive(Serialize)]
struct Ack<'a> {
    line: u64,
    topic: &'a str,
    partition: u32,
    offset: u64,
}

impl Settle {
    /// With `acks`, each acknowledgement becomes an object there.
    pub fn new(acks: Option<Acks>, progress: Option<Progress>) -> (Self, FirstFailed) {
        let (failed, first_failed) = oneshot::channel();
        let settle = Self {
            tally: Tally::default(),
            failed: Some(failed),
            acks,
            buffer: Vec::new(),
            progress,
        };
        (settle, FirstFailed(first_failed))
    }

    /// Runs until the last ticket has resolved. One task.
    pub async fn run(mut self, mut pending: mpsc::Receiver<Pending>) -> Tally {
        loop {
            let next = match pending.try_recv() {
                Ok(next) => Some(next),
                Err(_) => {
                    self.write_acks().await;
                    pending.recv().await
                }
            };
            let Some(Pending {
                number,
                bytes,
                mut ticket,
            }) = next
            else {
                break;
            };
            let fate = match (&mut ticket).now_or_never() {
                Some(fate) => fate,
                None => {
                    self.write_acks().await;
                    ticket.await
                }
            };
            match fate {
                Ok(at) => self.acknowledged(number, bytes, &at).await,
                Err(error) => self.failed(number, error),
            }
        }
        if let Some(acks) = &self.acks {
            acks.series.end(&mut self.buffer);
        }
        self.write_acks().await;
        if let Some(acks) = &mut self.acks
            && let Err(error) = acks.sink.flush().await
        {
            self.tally.output = Some(error);
        }
        self.tally
    }

    async fn acknowledged(&mut self, line: u64, bytes: usize, at: &RecordMetadata) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.tally.acknowledged += 1;
        self.tally.bytes += bytes;
        if let Some(progress) = &self.progress {
            progress.add(1, bytes);
        }
        let Some(acks) = &mut self.acks else {
            return;
        };
        let ack = Ack {
            line,
            topic: &at.topic,
            partition: at.partition,
            offset: at.offset,
        };
        acks.series.push(&mut self.buffer, |out| {
            // Strings and numbers into a vector: neither can fail.
            let _ = serde_json::to_writer(out, &ack);
        });
        if self.buffer.len() >= BUFFER_BYTES {
            self.write_acks().await;
        }
    }

    fn failed(&mut self, number: u64, error: Error) {
        self.tally.failed += 1;
        if self.tally.first_failure.is_none() {
            self.tally.first_failure = Some((number, error));
        }
        if let Some(failed) = self.failed.take() {
            let _ = failed.send(());
        }
    }

    /// Hands over what is printed. Without a reader the records go on, unprinted.
    async fn write_acks(&mut self) {
        let Some(acks) = &mut self.acks else {
            return;
        };
        if let Err(error) = acks.sink.write(&mut self.buffer).await {
            self.tally.output = Some(error);
            self.acks = None;
        }
    }
}
