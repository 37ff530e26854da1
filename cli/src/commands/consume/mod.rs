//! `qute consume`: records to standard output, in offset order per partition.
//!
//! ```text
//! source --records--> outlet: printer -> buffer -> sink -> standard output
//!   ^                                       |
//!   '------ receipts, once the bytes are written (what a group may commit)
//! ```
//!
//! | file | holds |
//! | --- | --- |
//! | `session.rs` | the loop over a source, signals, and how it ends |
//! | `outlet.rs` | buffers on their way out, and the receipts of what is written |
//! | `printer.rs` | how a record becomes bytes |

mod outlet;
mod printer;
mod session;

use std::time::{SystemTime, UNIX_EPOCH};

use futures::StreamExt as _;
use qute_client::{BatchConsumer, OutOfRange, Position as Start};

use crate::args::{Consume, Global};
use crate::connection::{connect, explain};
use crate::exit::{Exit, Failure};
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::sink::Sink;
use crate::text::position::Position;
use outlet::Outlet;
use printer::Printer;
use session::{Item, Session, Source};

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
    let progress = progress(&args);
    let outlet = Outlet::new(printer, sink, args.count, progress);
    let mut session = Session::new(Topic(opened), outlet, reader_left);
    session.run(interrupt).await
}

fn progress(args: &Consume) -> Progress {
    Progress::records_beside_stdout(format!("reading {}", args.topic), args.count)
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
    match consumer.open().await {
        Ok(consumer) => Ok(consumer.into_batches()),
        Err(error) => Err(explain(&client, &error).await),
    }
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

/// A topic for itself: nobody keeps track of what was read.
struct Topic(BatchConsumer);

impl Source for Topic {
    type Receipt = ();

    async fn next(&mut self) -> Option<Item<()>> {
        Some(match self.0.next().await? {
            Ok(batch) => Item::Records(batch.records, ()),
            Err(error) => Item::Fault(error),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

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
