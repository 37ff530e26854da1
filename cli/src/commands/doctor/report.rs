//! How a diagnosis is printed: a line for each check, and below it what to do about it.

use serde::Serialize;

use crate::args::Output;
use crate::exit::{Exit, Failure};
use crate::output::{self, Report, Tone};

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Status {
    /// It is well.
    Ok,
    /// It works and may need a look.
    Warn,
    /// It does not work, or is about to stop.
    Fail,
}

impl Status {
    const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }

    const fn tone(self) -> Tone {
        match self {
            Self::Ok => Tone::Good,
            Self::Warn => Tone::Doubtful,
            Self::Fail => Tone::Bad,
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Check {
    /// What kind of thing: `bootstrap`, `cluster`, `broker`, `version`, `clock`, `disk`, `replicas`,
    /// `partitions`, `fault`.
    pub check: &'static str,
    /// Which one.
    pub subject: String,
    /// How it went.
    pub status: Status,
    /// What was found.
    pub message: String,
    /// What to do about it; null where nothing is to be done.
    pub advice: Option<String>,
}

/// All checks, counted.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Diagnosis {
    /// The worst of them.
    pub status: Status,
    /// How many are well.
    pub ok: usize,
    /// How many warn.
    pub warnings: usize,
    /// How many fail.
    pub failures: usize,
    /// What was looked at.
    pub checks: Vec<Check>,
}

impl Diagnosis {
    pub(super) fn of(checks: Vec<Check>) -> Self {
        let count = |status| checks.iter().filter(|check| check.status == status).count();
        let (warnings, failures) = (count(Status::Warn), count(Status::Fail));
        Self {
            status: match (warnings, failures) {
                (_, 1..) => Status::Fail,
                (1.., 0) => Status::Warn,
                (0, 0) => Status::Ok,
            },
            ok: count(Status::Ok),
            warnings,
            failures,
            checks,
        }
    }

    pub(super) fn print(&self, output: Output) -> Result<Exit, Failure> {
        match output {
            Output::Table => output::print(&Advised::of(self), output),
            Output::Json | Output::Jsonl | Output::Raw => output::print(self, output),
        }
    }

    /// One line about all of them.
    pub(super) fn summary(&self) -> String {
        let plural = |n: usize| if n == 1 { "" } else { "s" };
        let (ok, warnings, failures) = (self.ok, self.warnings, self.failures);
        match (warnings, failures) {
            (0, 0) => format!("all {ok} checks are ok"),
            (_, 0) => format!(
                "nothing fails: {ok} ok, {warnings} warning{}",
                plural(warnings)
            ),
            _ => format!(
                "{failures} failure{}, {warnings} warning{}, {ok} ok",
                plural(failures),
                plural(warnings)
            ),
        }
    }
}

impl Report for Diagnosis {
    fn headings(&self) -> Vec<&'static str> {
        vec![]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let row = |check: &Check| {
            vec![
                check.status.name().to_owned(),
                check.check.to_owned(),
                check.subject.clone(),
                check.message.clone(),
                check.advice.clone().unwrap_or_default(),
            ]
        };
        self.checks.iter().map(row).collect()
    }

    fn json_lines(&self) -> serde_json::Result<Vec<String>> {
        self.checks.iter().map(serde_json::to_string).collect()
    }
}

/// The table: each advice in a row of its own, below what it is about.
#[derive(Serialize)]
struct Advised {
    #[serde(skip)]
    rows: Vec<(Tone, [String; 4])>,
}

impl Advised {
    fn of(diagnosis: &Diagnosis) -> Self {
        let mut rows = Vec::new();
        for check in &diagnosis.checks {
            let status = check.status.name();
            let cells = [status, check.check, &check.subject, &check.message];
            rows.push((check.status.tone(), cells.map(str::to_owned)));
            if let Some(advice) = &check.advice {
                let cells = ["", "", "", &format!("-> {advice}")].map(str::to_owned);
                rows.push((Tone::Plain, cells));
            }
        }
        Self { rows }
    }
}

impl Report for Advised {
    fn headings(&self) -> Vec<&'static str> {
        vec!["STATUS", "CHECK", "OF", "FOUND"]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        self.rows.iter().map(|(_, cells)| cells.to_vec()).collect()
    }

    fn tone(&self, row: usize, column: usize) -> Tone {
        match self.rows.get(row) {
            Some((tone, _)) if column == 0 => *tone,
            _ => Tone::Plain,
        }
    }
}
