//! What the terminal can do: whether colours and moving lines are welcome there.
//!
//! Colour is for terminals only, and never with `NO_COLOR` (set and not empty) or `TERM=dumb`.
//! What goes to a file or a pipe is plain text.

use std::ffi::OsStr;
use std::fmt::Display;
use std::io::{self, IsTerminal};

use anstyle::{AnsiColor, Style};

/// Headings of tables.
pub const HEADING: Style = Style::new().bold();
/// What is well.
pub const GOOD: Style = AnsiColor::Green.on_default();
/// What may need a look.
pub const DOUBTFUL: Style = AnsiColor::Yellow.on_default();
/// What needs a human.
pub const BAD: Style = AnsiColor::Red.on_default().bold();
/// What can be passed over.
pub const FAINT: Style = Style::new().dimmed();

/// Paints text for one stream, if that stream takes colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Painter {
    on: bool,
}

impl Painter {
    /// For standard output.
    #[must_use]
    pub fn stdout() -> Self {
        Self::over(io::stdout().is_terminal())
    }

    /// For standard error.
    #[must_use]
    pub fn stderr() -> Self {
        Self::over(io::stderr().is_terminal())
    }

    /// Leaves everything as it is.
    #[must_use]
    pub const fn plain() -> Self {
        Self { on: false }
    }

    fn over(is_terminal: bool) -> Self {
        let (no_color, term) = (std::env::var_os("NO_COLOR"), std::env::var_os("TERM"));
        Self {
            on: is_terminal && takes_colour(no_color.as_deref(), term.as_deref()),
        }
    }

    /// Whether it paints at all.
    #[must_use]
    pub const fn is_on(self) -> bool {
        self.on
    }

    /// The text in this style.
    pub fn paint(self, style: Style, text: impl Display) -> String {
        if self.on {
            format!("{style}{text}{style:#}")
        } else {
            text.to_string()
        }
    }
}

/// Whether lines that are drawn anew (progress, spinners) can be shown on standard error.
#[must_use]
pub fn redraws() -> bool {
    io::stderr().is_terminal() && !is_dumb(std::env::var_os("TERM").as_deref())
}

/// Whether a full-screen view can be shown on standard output.
#[must_use]
pub fn stdout_is_terminal() -> bool {
    io::stdout().is_terminal()
}

fn takes_colour(no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
    no_color.is_none_or(OsStr::is_empty) && !is_dumb(term)
}

fn is_dumb(term: Option<&OsStr>) -> bool {
    term.is_some_and(|term| term == "dumb")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colour_is_refused_by_no_color_and_by_dumb_terminals() {
        for (no_color, term, takes) in [
            (None, None, true),
            (None, Some("xterm-256color"), true),
            (Some(""), Some("xterm"), true),
            (Some("1"), Some("xterm"), false),
            (Some("0"), None, false),
            (None, Some("dumb"), false),
        ] {
            let told = takes_colour(no_color.map(OsStr::new), term.map(OsStr::new));
            assert_eq!(told, takes, "{no_color:?} {term:?}");
        }
    }

    #[test]
    fn painter_adds_nothing_where_colour_is_off() {
        assert_eq!(Painter::plain().paint(BAD, "x"), "x");
        assert_eq!(
            Painter { on: true }.paint(GOOD, "x"),
            "\u{1b}[32mx\u{1b}[0m"
        );
    }
}
