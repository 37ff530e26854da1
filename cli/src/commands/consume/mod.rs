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
//! | `group.rs`, `ends.rs` | `-g`: as a member of a group; where `-e` ends there |

mod ends;
mod group;
mod outlet;
mod printer;
mod session;

use std::time::{SystemTime, UNIX_EPOCH};

use futures::{FutureExt as _, StreamExt as _};
use qute_client::{BatchConsumer, OutOfRange, Position as Start};

use crate::args::{Consume, Global};
use crate::connection::{connect, explain};
use crate::exit::{Exit, Failure};
use crate::interrupt::Interrupt;
use crate::progress::Progress;
use crate::sink::{self, Sink};
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
    let Some(group) = &args.group else {
        let source = tokio::select! {
            opened = open(&args, global) => Topic(opened?),
            () = interrupt.wait() => return Ok(Exit::Done),
        };
        let session = session(source, printer, &args);
        return match session {
            Ok(mut session) => session.run(interrupt).await,
            Err(error) => error.ending(),
        };
    };
    let source = tokio::select! {
        joined = group::join(group, &args, global) => joined?,
        () = interrupt.wait() => return Ok(Exit::Done),
    };
    let mut session = match session(source, printer, &args) {
        Ok(session) => session,
        Err(error) => return error.ending(),
    };
    let ended = session.run(interrupt).await;
    let left = session.into_source().leave().await;
    // What went wrong first says more.
    ended.and_then(|exit| left.map(|()| exit))
}

fn session<S: Source>(
    source: S,
    printer: Printer,
    args: &Consume,
) -> Result<Session<S>, sink::Error> {
    let (sink, reader_left) = Sink::stdout()?;
    let title = format!("reading {}", args.topic);
    let progress = Progress::records_beside_stdout(title, args.count);
    let outlet = Outlet::new(printer, sink, args.count, progress);
    Ok(Session::new(source, outlet, reader_left))
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

    fn ready(&mut self) -> Option<Option<Item<()>>> {
        self.next().now_or_never()
    }

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
