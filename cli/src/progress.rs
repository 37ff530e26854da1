//! Signs of life on standard error while something takes long: a spinner while one answer is
//! waited for, a count or a bar while records flow. Only where standard error is a terminal that
//! can redraw a line; elsewhere nothing at all is written.
//!
//! Whatever else is said on standard error meanwhile goes through [`crate::output::say`], which
//! moves the lines out of its way.

use std::borrow::Cow;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use indicatif::{
    HumanBytes, MultiProgress, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle,
};

use crate::terminal;

/// What is over sooner than this shows no sign of life.
const QUIET: Duration = Duration::from_secs(1);
/// How often a spinner turns.
const TICK: Duration = Duration::from_millis(100);

const SPINNER: &str = "{spinner} {msg} ({elapsed})";
const COUNT: &str = "{spinner} {msg}: {human_pos} records, {amount}, {pace} ({elapsed})";
const BAR: &str =
    "{msg} [{bar:30}] {human_pos} of {human_len} records, {amount}, {pace}, {eta} left";

/// All lines that are drawn now.
static LINES: LazyLock<MultiProgress> = LazyLock::new(|| {
    MultiProgress::with_draw_target(match terminal::redraws() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    })
});

/// Runs `print` with the lines out of its way.
pub fn aside<T>(print: impl FnOnce() -> T) -> T {
    LINES.suspend(print)
}

/// Waits for `work`; if that takes longer than a second, a spinner says what is waited for.
///
/// # Cancel safety
/// That of `work`; the spinner goes with it.
pub async fn waiting<T>(what: impl Into<Cow<'static, str>>, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    if !terminal::redraws() {
        return work.await;
    }
    if let Ok(done) = tokio::time::timeout(QUIET, &mut work).await {
        return done;
    }
    let spinner = Line::add(
        ProgressBar::new_spinner().with_elapsed(QUIET),
        SPINNER,
        None,
    );
    spinner.0.set_message(what);
    spinner.0.enable_steady_tick(TICK);
    work.await
}

/// A line that is wiped when it is dropped.
#[derive(Debug)]
struct Line(ProgressBar);

impl Line {
    fn add(bar: ProgressBar, template: &str, bytes: Option<Arc<AtomicU64>>) -> Self {
        let bar = LINES.add(bar);
        // The templates are those above; one that is wrong leaves the default look.
        if let Ok(mut style) = ProgressStyle::with_template(template) {
            if let Some(bytes) = bytes {
                style = style.with_key(
                    "amount",
                    move |_: &ProgressState, out: &mut dyn std::fmt::Write| {
                        let _ = write!(out, "{}", HumanBytes(bytes.load(Ordering::Relaxed)));
                    },
                );
            }
            style = style.with_key(
                "pace",
                |state: &ProgressState, out: &mut dyn std::fmt::Write| {
                    let _ = write!(out, "{:.0}/s", state.per_sec());
                },
            );
            bar.set_style(style.progress_chars("=> "));
        }
        Self(bar)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// How far a stream of records has come. Cheap to feed; gone when dropped.
#[derive(Debug)]
pub struct Progress {
    line: Option<Line>,
    bytes: Arc<AtomicU64>,
}

impl Progress {
    /// Begins to count: `what` is being done (`"producing to orders"`), to `total` records if that
    /// is known.
    #[must_use]
    pub fn records(what: impl Into<Cow<'static, str>>, total: Option<u64>) -> Self {
        Self::shown(what, total, terminal::redraws())
    }

    /// The same for records that go to standard output: nothing is shown if that is a terminal too,
    /// since the records themselves are.
    #[must_use]
    pub fn records_beside_stdout(what: impl Into<Cow<'static, str>>, total: Option<u64>) -> Self {
        let shown = terminal::redraws() && !terminal::stdout_is_terminal();
        Self::shown(what, total, shown)
    }

    fn shown(what: impl Into<Cow<'static, str>>, total: Option<u64>, shown: bool) -> Self {
        let bytes = Arc::<AtomicU64>::default();
        let line = shown.then(|| {
            let (bar, template) = match total {
                Some(total) => (ProgressBar::new(total), BAR),
                None => (ProgressBar::new_spinner(), COUNT),
            };
            let line = Line::add(bar, template, Some(Arc::clone(&bytes)));
            line.0.set_message(what);
            line.0.enable_steady_tick(TICK);
            line
        });
        Self { line, bytes }
    }

    /// So many more records are through, of so many bytes.
    pub fn add(&self, records: u64, bytes: u64) {
        if let Some(line) = &self.line {
            self.bytes.fetch_add(bytes, Ordering::Relaxed);
            line.0.inc(records);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_understood() {
        for template in [SPINNER, COUNT, BAR] {
            ProgressStyle::with_template(template).unwrap();
        }
    }

    #[test]
    fn progress_that_is_not_shown_takes_everything_and_draws_nothing() {
        let progress = Progress::shown("reading", Some(2), false);
        progress.add(3, 4);
        assert!(progress.line.is_none());
    }

    #[test]
    fn aside_gives_what_the_printing_gave() {
        assert_eq!(aside(|| 7), 7);
    }

    #[tokio::test]
    async fn waiting_gives_what_the_work_gave() {
        assert_eq!(waiting("an answer", async { 7 }).await, 7);
    }
}
