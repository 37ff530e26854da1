//! `qute consume`: records to standard output, in offset order per partition.
//!
//! The client follows leaders and finds the ends; here records become bytes. Bytes leave in
//! large buffers while there is more to come, and at once when there is not. An error of one
//! partition is said and the others go on; the exit code remembers it.

use std::collections::HashSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::{FutureExt as _, StreamExt as _};
use qute_client::{
    BatchConsumer, ConsumedBatch, ConsumedRecord, ErrorKind, OutOfRange, Position as Start,
};

use crate::args::{Consume, Global, Output};
use crate::connection::{connect, failure};
use crate::exit::{Exit, Failure};
use crate::interrupt::Interrupt;
use crate::output::say;
use crate::sink::{self, BUFFER_BYTES, ReaderLeft, Sink};
use crate::text::format::{Fields, Format};
use crate::text::position::Position;
use crate::text::record_json;

/// How long the last bytes may take to leave after a signal.
const LAST_FLUSH: Duration = Duration::from_secs(5);

/// Runs the command.
///
/// # Errors
/// A wrong combination of flags, an unknown topic or partition, no leader until the deadline.
pub async fn run(args: Consume, global: &Global, interrupt: &Interrupt) -> Result<Exit, Failure> {
    let printer = Printer::new(args.format.clone(), global.output)?;
    let opened = tokio::select! {
        opened = open(&args, global) => opened?,
        () = interrupt.wait() => return Ok(Exit::Done),
    };
    let (sink, reader_left) = match Sink::stdout() {
        Ok(sink) => sink,
        Err(error) => return error.ending(),
    };
    let session = Session {
        printer,
        left: args.count.unwrap_or(u64::MAX),
        buffer: Vec::with_capacity(BUFFER_BYTES + BUFFER_BYTES / 4),
        sink,
        faults: Faults::default(),
    };
    session.run(opened, reader_left, interrupt).await
}

async fn open(args: &Consume, global: &Global) -> Result<BatchConsumer, Failure> {
    let client = connect(global).await?;
    let mut consumer = client
        .consumer(args.topic.as_str())
        .start(start(args.offset))
        .out_of_range(OutOfRange::ToStart);
    if !args.partitions.is_empty() {
        consumer = consumer.partitions(args.partitions.iter().copied());
    }
    if args.end {
        consumer = consumer
            .until_end()
            .stall_timeout(global.delivery_timeout());
    }
    let consumer = consumer.open().await.map_err(|error| failure(&error))?;
    Ok(consumer.into_batches())
}

fn start(position: Position) -> Start {
    match position {
        Position::Start => Start::Start,
        Position::End => Start::End,
        Position::Offset(offset) => Start::Offset(offset),
        Position::Last(records) => Start::Tail(records),
        Position::Time(time_ms) => Start::TimeMs(time_ms),
        Position::Ago(ago) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            let ago_from = now.unwrap_or_default().saturating_sub(ago);
            Start::TimeMs(u64::try_from(ago_from.as_millis()).unwrap_or(u64::MAX))
        }
    }
}

/// How a record becomes bytes.
#[derive(Debug)]
enum Printer {
    Format(Format),
    JsonLines,
}

impl Printer {
    fn new(format: Option<Format>, output: Output) -> Result<Self, Failure> {
        match (output, format) {
            (Output::Json, _) => Err(Failure::usage(
                "records come one by one and are no single JSON document",
            )
            .hint("use --output jsonl")),
            (Output::Jsonl, Some(_)) => Err(Failure::usage(
                "-f and --output jsonl both say how records are printed",
            )
            .hint("give one of them")),
            (Output::Jsonl, None) => Ok(Self::JsonLines),
            (Output::Table | Output::Raw, format) => Ok(Self::Format(format.unwrap_or_default())),
        }
    }

    fn print(&self, record: &ConsumedRecord, out: &mut Vec<u8>) {
        let fields = Fields {
            topic: &record.topic,
            partition: record.partition,
            offset: record.offset,
            key: record.key.as_deref(),
            value: record.value.as_deref(),
            timestamp_ms: record.timestamp_ms,
            headers: &record.headers,
        };
        match self {
            Self::Format(format) => format.render(&fields, out),
            Self::JsonLines => record_json::render(&fields, out),
        }
    }
}

/// One run over a stream of batches.
struct Session {
    printer: Printer,
    /// Records still to be printed (`-n`).
    left: u64,
    /// Printed and not handed over.
    buffer: Vec<u8>,
    sink: Sink,
    faults: Faults,
}

/// What the session does next.
enum Step {
    Batch(Option<Result<ConsumedBatch, qute_client::Error>>),
    Written(Result<(), sink::Error>),
    Interrupted,
    ReaderLeft,
}

impl Session {
    async fn run(
        mut self,
        mut batches: BatchConsumer,
        mut reader_left: ReaderLeft,
        interrupt: &Interrupt,
    ) -> Result<Exit, Failure> {
        let mut interrupted = false;
        while self.left > 0 {
            let step = if self.buffer.len() >= BUFFER_BYTES {
                tokio::select! {
                    biased;
                    () = interrupt.wait() => Step::Interrupted,
                    () = reader_left.wait() => Step::ReaderLeft,
                    written = self.sink.write(&mut self.buffer) => Step::Written(written),
                }
            } else if let Some(batch) = batches.next().now_or_never() {
                // There is more: no system call and no waiting in between.
                Step::Batch(batch)
            } else {
                let unwritten = !self.buffer.is_empty() || self.sink.is_writing();
                tokio::select! {
                    biased;
                    () = interrupt.wait() => Step::Interrupted,
                    () = reader_left.wait() => Step::ReaderLeft,
                    written = self.sink.write(&mut self.buffer), if unwritten => Step::Written(written),
                    batch = batches.next() => Step::Batch(batch),
                }
            };
            match step {
                Step::Batch(None) => break,
                Step::Interrupted => {
                    interrupted = true;
                    break;
                }
                Step::Batch(Some(Ok(batch))) => self.print(&batch),
                Step::Batch(Some(Err(error))) => self.faults.note(&error),
                Step::Written(Ok(())) => {}
                Step::Written(Err(error)) => return error.ending(),
                Step::ReaderLeft => return Ok(Exit::Done),
            }
        }
        let limit = tokio::select! {
            ended = self.finish(&mut reader_left) => return ended,
            // With a signal there is a limit on what a stalled reader may hold up.
            () = async {
                if !interrupted {
                    interrupt.wait().await;
                }
                tokio::time::sleep(LAST_FLUSH).await;
            } => LAST_FLUSH,
        };
        Err(Failure::error(format!(
            "standard output took nothing for {}",
            humantime::format_duration(limit)
        )))
    }

    fn print(&mut self, batch: &ConsumedBatch) {
        for record in &batch.records {
            if self.left == 0 {
                return;
            }
            self.printer.print(record, &mut self.buffer);
            self.left -= 1;
        }
    }

    /// Lets the last bytes out.
    async fn finish(mut self, reader_left: &mut ReaderLeft) -> Result<Exit, Failure> {
        let flush = async {
            self.sink.write(&mut self.buffer).await?;
            self.sink.flush().await
        };
        let flushed = tokio::select! {
            flushed = flush => flushed,
            () = reader_left.wait() => return Ok(Exit::Done),
        };
        match flushed {
            Ok(()) => self.faults.ending(),
            Err(error) => error.ending(),
        }
    }
}

/// What went wrong with single partitions.
#[derive(Debug, Default)]
struct Faults {
    said: HashSet<(ErrorKind, String)>,
    exit: Option<Exit>,
    unsaid: u64,
}

impl Faults {
    /// Says an error, once for all partitions that have the same.
    fn note(&mut self, error: &qute_client::Error) {
        let told = failure(error);
        if error.kind() == ErrorKind::OffsetOutOfRange {
            // An event, not a fault: retention was faster, or the offset named is beyond the end.
            say(format_args!("note: {error}; reading on at the log start"));
            return;
        }
        self.exit = self.exit.or(Some(told.exit));
        if self.said.insert((error.kind(), error.message().to_owned())) {
            say(&told);
        } else {
            self.unsaid += 1;
        }
    }

    fn ending(&self) -> Result<Exit, Failure> {
        if self.unsaid > 0 {
            say(format_args!("({} more errors of these kinds)", self.unsaid));
        }
        Ok(self.exit.unwrap_or(Exit::Done))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printer_refuses_what_cannot_go_together() {
        let format = || Format::parse("%v").ok();
        assert_eq!(
            Printer::new(None, Output::Json).unwrap_err().exit,
            Exit::Usage
        );
        assert_eq!(
            Printer::new(format(), Output::Jsonl).unwrap_err().exit,
            Exit::Usage
        );
        assert!(matches!(
            Printer::new(None, Output::Jsonl),
            Ok(Printer::JsonLines)
        ));
        assert!(matches!(
            Printer::new(format(), Output::Raw),
            Ok(Printer::Format(_))
        ));
        assert!(matches!(
            Printer::new(None, Output::Table),
            Ok(Printer::Format(_))
        ));
    }

    #[test]
    fn start_of_ago_is_a_time_before_now() {
        let Start::TimeMs(hour_ago) = start(Position::Ago(Duration::from_secs(3600))) else {
            panic!("another position");
        };
        let Start::TimeMs(now) = start(Position::Ago(Duration::ZERO)) else {
            panic!("another position");
        };
        assert!((3_600_000..3_700_000).contains(&(now - hour_ago)));
        assert_eq!(start(Position::Last(5)), Start::Tail(5));
    }
}
