//! The loop over a source of records.
//!
//! Bytes leave in large buffers while there is more to come, and at once when there is not. An error
//! of one partition is said and the others go on; the exit code remembers it.

use std::collections::HashSet;
use std::time::Duration;

use qute_client::{ConsumedRecord, Error, ErrorKind};

use super::outlet::{Outlet, Receipt};
use crate::connection::failure;
use crate::exit::{Exit, Failure};
use crate::interrupt::Interrupt;
use crate::output::say;
use crate::sink::{self, ReaderLeft};

/// How long the last bytes may take to leave after a signal.
const LAST_FLUSH: Duration = Duration::from_secs(5);

/// Where records come from.
pub trait Source {
    /// What is owed for records.
    type Receipt: Receipt;

    /// What is there already, without any waiting; `None`: [`Self::next`] knows.
    fn ready(&mut self) -> Option<Option<Item<Self::Receipt>>>;

    /// What comes next; `None` at the end.
    ///
    /// # Cancel safety
    /// Cancelled, nothing is lost: the next call gives it.
    fn next(&mut self) -> impl Future<Output = Option<Item<Self::Receipt>>>;
}

/// What comes from a source.
#[derive(Debug)]
pub enum Item<R> {
    /// Records of one partition.
    Records(Vec<ConsumedRecord>, R),
    /// Something is wrong with a partition, or with everything: then the end comes next.
    Fault(Error),
    /// The command fails, once what is printed is written.
    Failed(Failure),
}

/// One run over a source.
#[derive(Debug)]
pub struct Session<S: Source> {
    source: S,
    outlet: Outlet<S::Receipt>,
    reader_left: ReaderLeft,
    faults: Faults,
    failed: Option<Failure>,
}

/// What the session does next.
enum Step<R> {
    Next(Option<Item<R>>),
    Written(Result<(), sink::Error>),
    Interrupted,
    ReaderLeft,
}

impl<S: Source> Session<S> {
    /// From the source through the outlet, as long as somebody reads it.
    pub fn new(source: S, outlet: Outlet<S::Receipt>, reader_left: ReaderLeft) -> Self {
        Self {
            source,
            outlet,
            reader_left,
            faults: Faults::default(),
            failed: None,
        }
    }

    /// The source, once the run is over.
    pub fn into_source(self) -> S {
        self.source
    }

    /// Until the source ends, enough is printed, a signal comes or the reader leaves.
    ///
    /// # Errors
    /// What the source said, or standard output can't be written.
    pub async fn run(&mut self, interrupt: &Interrupt) -> Result<Exit, Failure> {
        let mut interrupted = false;
        while !self.outlet.is_done() {
            match self.step(interrupt).await {
                Step::Next(None) => break,
                Step::Interrupted => {
                    interrupted = true;
                    break;
                }
                Step::Next(Some(Item::Records(records, receipt))) => {
                    self.outlet.print(&records, receipt);
                }
                Step::Next(Some(Item::Fault(error))) => self.faults.note(&error),
                Step::Next(Some(Item::Failed(failure))) => {
                    self.failed = Some(failure);
                    break;
                }
                Step::Written(Ok(())) => {}
                Step::Written(Err(error)) => return error.ending(),
                Step::ReaderLeft => return Ok(Exit::Done),
            }
        }
        self.outlet.end();
        tokio::select! {
            ended = self.finish() => ended,
            // With a signal there is a limit on what a stalled reader may hold up.
            () = async {
                if !interrupted {
                    interrupt.wait().await;
                }
                tokio::time::sleep(LAST_FLUSH).await;
            } => Err(Failure::error(format!(
                "standard output took nothing for {}",
                humantime::format_duration(LAST_FLUSH)
            ))),
        }
    }

    async fn step(&mut self, interrupt: &Interrupt) -> Step<S::Receipt> {
        if self.outlet.is_full() {
            return tokio::select! {
                biased;
                () = interrupt.wait() => Step::Interrupted,
                () = self.reader_left.wait() => Step::ReaderLeft,
                written = self.outlet.write() => Step::Written(written),
            };
        }
        if let Some(next) = self.source.ready() {
            // There is more: no system call and no waiting in between.
            return Step::Next(next);
        }
        let unwritten = self.outlet.holds_something();
        tokio::select! {
            biased;
            () = interrupt.wait() => Step::Interrupted,
            () = self.reader_left.wait() => Step::ReaderLeft,
            written = self.outlet.write(), if unwritten => Step::Written(written),
            next = self.source.next() => Step::Next(next),
        }
    }

    /// Lets the last bytes out.
    async fn finish(&mut self) -> Result<Exit, Failure> {
        let flushed = tokio::select! {
            flushed = self.outlet.flush() => flushed,
            () = self.reader_left.wait() => return Ok(Exit::Done),
        };
        match (flushed, self.failed.take()) {
            (Ok(()), Some(failure)) => Err(failure),
            (Ok(()), None) => self.faults.ending(),
            (Err(error), _) => error.ending(),
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
    fn note(&mut self, error: &Error) {
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
