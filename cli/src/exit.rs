//! How a run of `qute` ends: the exit codes, and the one line an error becomes.

use std::fmt;
use std::process::ExitCode;

use crate::terminal::{self, Painter};

/// The exit codes of `qute`. Scripts depend on the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Everything asked for was done.
    Done = 0,
    /// Refused or failed.
    Error = 1,
    /// The command line makes no sense.
    Usage = 2,
    /// The deadline passed first.
    Timeout = 3,
    /// Some records were acknowledged and some were not.
    Partly = 4,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Why a command ended other than with [`Exit::Done`]: what happened, and what to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The exit code.
    pub exit: Exit,
    /// What happened and where.
    pub message: String,
    /// What the reader can do about it.
    pub hint: Option<String>,
}

impl Failure {
    /// A refusal or a fault: exit 1.
    pub fn error(message: impl Into<String>) -> Self {
        Self::new(Exit::Error, message)
    }

    /// A command line that parses and still makes no sense: exit 2.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    /// The deadline passed: exit 3.
    pub fn timeout(message: impl Into<String>) -> Self {
        Self::new(Exit::Timeout, message)
    }

    /// A failure with any exit code.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self {
            exit,
            message: message.into(),
            hint: None,
        }
    }

    /// Says what to do next.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

impl Failure {
    /// The line that is said about it.
    #[must_use]
    pub fn told(&self, painter: Painter) -> String {
        let hint = self
            .hint
            .as_ref()
            .map(|hint| format!("; {}", OneLine(hint)));
        format!(
            "{} {}{}",
            painter.paint(terminal::BAD, "error:"),
            OneLine(&self.message),
            hint.unwrap_or_default()
        )
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.told(Painter::plain()))
    }
}

impl std::error::Error for Failure {}

/// One line, whatever the text holds: a name from the network must not break the terminal.
struct OneLine<'a>(&'a str);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '\n' => f.write_str(" ")?,
                c if c.is_control() => write!(f, "{}", c.escape_default())?,
                c => fmt::Write::write_char(f, c)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_with_hint_is_one_line() {
        let failure = Failure::error("no\nsuch \u{1b}[31mtopic").hint("create it");
        assert_eq!(
            failure.to_string(),
            "error: no such \\u{1b}[31mtopic; create it"
        );
    }

    #[test]
    fn exit_codes_are_those_of_the_design() {
        let codes = [
            Exit::Done,
            Exit::Error,
            Exit::Usage,
            Exit::Timeout,
            Exit::Partly,
        ];
        assert_eq!(codes.map(|exit| exit as u8), [0, 1, 2, 3, 4]);
    }
}
