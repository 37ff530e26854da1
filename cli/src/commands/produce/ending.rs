//! How `produce` ends: the summary, the first thing that went wrong, and the exit code.

use std::time::Duration;

use qute_client::{Error, ErrorKind};

use super::settle::Tally;
use crate::connection::failure;
use crate::exit::{Exit, Failure};
use crate::lines;
use crate::output::say;
use crate::sink;

/// Why no more was read.
#[derive(Debug)]
pub enum Stop {
    /// All of it was.
    EndOfInput,
    /// The client did not take a record in.
    Refused {
        /// Its line.
        number: u64,
        /// Why.
        error: Error,
    },
    /// A record taken in before has failed; the tally knows.
    Failed,
    /// The input failed, or has a line that is too long.
    Input(lines::Error),
    /// A line has no key, and a tombstone needs one.
    NoKey {
        /// The line.
        number: u64,
    },
    /// A signal came.
    Interrupted {
        /// Lines sent until then.
        read: u64,
    },
}

/// Everything that decides the ending.
#[derive(Debug)]
pub struct Ending {
    /// What became of the records that were taken in.
    pub tally: Tally,
    /// Why no more was read.
    pub stop: Stop,
    /// What the only record is called, if there are no lines.
    pub only: Option<String>,
    /// From the first read to the last acknowledgement.
    pub elapsed: Duration,
}

impl Ending {
    /// Says the summary and gives the result.
    ///
    /// # Errors
    /// Whatever kept a record from being acknowledged, the first one in input order.
    pub fn say(self) -> Result<Exit, Failure> {
        say(self.summary());
        self.result()
    }

    fn summary(&self) -> String {
        let Tally {
            acknowledged,
            bytes,
            ..
        } = self.tally;
        let seconds = self.elapsed.as_secs_f64().max(1e-6);
        #[allow(clippy::cast_precision_loss)]
        let (records_rate, bytes_rate) = (acknowledged as f64 / seconds, bytes as f64 / seconds);
        let records = if acknowledged == 1 {
            "record"
        } else {
            "records"
        };
        format!(
            "{acknowledged} {records}, {bytes} bytes in {seconds:.3} s: {records_rate:.0} records/s, {:.2} MB/s",
            bytes_rate / 1e6
        )
    }

    fn result(self) -> Result<Exit, Failure> {
        let Self {
            tally, stop, only, ..
        } = self;
        let place = |number: u64| match &only {
            Some(name) => name.clone(),
            None => format!("line {number}"),
        };
        if let Some((number, error)) = &tally.first_failure {
            let mut told = record_failure(&place(*number), error, &tally);
            if tally.failed > 1 {
                let others = tally.failed - 1;
                told.message = format!("{}; {others} more not acknowledged", told.message);
            }
            return Err(told);
        }
        match stop {
            Stop::Refused { number, error } => Err(record_failure(&place(number), &error, &tally)),
            Stop::Input(lines::Error::TooLong { number, bytes_max }) => {
                Err(Failure::error(format!(
                    "line {number} has more than {bytes_max} bytes, more than any record may have; \
                     nothing was read beyond it"
                ))
                .hint("split it, or send a reference to it"))
            }
            Stop::Input(lines::Error::Read { number, source }) => Err(Failure::error(format!(
                "can't read standard input in line {number}: {source}"
            ))),
            Stop::NoKey { number } => Err(Failure::error(format!(
                "line {number} is blank: a tombstone needs a key"
            ))
            .hint("an empty key is a line with the delimiter alone")),
            Stop::Interrupted { read } => Err(interrupted(read, &tally)),
            Stop::Failed => Err(Failure::error("a record failed and its error is lost")),
            Stop::EndOfInput => match tally.output {
                Some(sink::Error::Failed(error)) => Err(Failure::error(format!(
                    "all records are acknowledged, but standard output can't be written: {error}"
                ))),
                Some(sink::Error::Closed) | None => Ok(Exit::Done),
            },
        }
    }
}

fn record_failure(place: &str, error: &Error, tally: &Tally) -> Failure {
    let mut told = failure(error);
    told.exit = exit_of(error, tally.acknowledged);
    told.message = format!("{place}: {}", told.message);
    told
}

/// Refused: 1. Out of time (the client retries until then): 3, or 4 if others were acknowledged.
fn exit_of(error: &Error, acknowledged: u64) -> Exit {
    let out_of_time = error.is_retriable() || error.kind() == ErrorKind::Closed;
    match (out_of_time, acknowledged) {
        (false, _) => Exit::Error,
        (true, 0) => Exit::Timeout,
        (true, _) => Exit::Partly,
    }
}

fn interrupted(read: u64, tally: &Tally) -> Failure {
    let exit = if tally.acknowledged > 0 {
        Exit::Partly
    } else {
        Exit::Error
    };
    Failure::new(
        exit,
        format!(
            "interrupted after line {read}: acknowledged records: {}",
            tally.acknowledged
        ),
    )
    .hint(format!("go on with line {}", read + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ending(tally: Tally, stop: Stop) -> Ending {
        Ending {
            tally,
            stop,
            only: None,
            elapsed: Duration::from_millis(2500),
        }
    }

    fn acknowledged(records: u64) -> Tally {
        Tally {
            acknowledged: records,
            bytes: records * 10,
            ..Tally::default()
        }
    }

    #[test]
    fn summary_names_records_bytes_seconds_and_rates() {
        assert_eq!(
            ending(acknowledged(1_000_000), Stop::EndOfInput).summary(),
            "1000000 records, 10000000 bytes in 2.500 s: 400000 records/s, 4.00 MB/s"
        );
    }

    #[test]
    fn end_of_input_with_all_acknowledged_is_done() {
        assert_eq!(
            ending(acknowledged(5), Stop::EndOfInput).result(),
            Ok(Exit::Done)
        );
        let mut tally = acknowledged(5);
        tally.output = Some(sink::Error::Closed);
        assert_eq!(ending(tally, Stop::EndOfInput).result(), Ok(Exit::Done));
    }

    #[test]
    fn line_too_long_is_an_error_that_names_it() {
        let too_long = lines::Error::TooLong {
            number: 7,
            bytes_max: 9,
        };
        let failure = ending(acknowledged(6), Stop::Input(too_long))
            .result()
            .unwrap_err();
        assert_eq!(failure.exit, Exit::Error);
        assert!(failure.message.contains("line 7"));
    }

    #[test]
    fn interrupt_says_where_to_go_on() {
        let failure = ending(acknowledged(6), Stop::Interrupted { read: 6 })
            .result()
            .unwrap_err();
        assert_eq!(failure.exit, Exit::Partly);
        assert_eq!(failure.hint.as_deref(), Some("go on with line 7"));
        let failure = ending(acknowledged(0), Stop::Interrupted { read: 0 })
            .result()
            .unwrap_err();
        assert_eq!(failure.exit, Exit::Error);
    }
}
