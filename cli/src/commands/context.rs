//! `qute context add|use|list|show|remove`: saved clusters. Connects to nobody.

use serde::Serialize;

use crate::args::{self, Global, Output};
use crate::contexts::{self, Contexts};
use crate::exit::{Exit, Failure};
use crate::output::{self, Report, Tone, say};
use crate::target::{Source, Target};

/// A saved cluster, as `context list` shows it.
#[derive(Clone, Debug, Serialize)]
struct Saved {
    name: String,
    bootstrap: Vec<String>,
    current: bool,
}

/// Whom commands talk to, as `context show` shows it.
#[derive(Clone, Debug, Serialize)]
struct Shown {
    /// Name of the context; null if none decides.
    name: Option<String>,
    bootstrap: Vec<String>,
    /// `flag`, `environment`, `context` or `default`.
    source: &'static str,
    /// The file of contexts, whether it exists or not; null if nothing leads to one.
    file: Option<String>,
}

/// Runs the command.
///
/// # Errors
/// The file can't be read or written, or a context doesn't exist (or exists already).
pub fn run(command: args::Context, global: &Global) -> Result<Exit, Failure> {
    match command {
        args::Context::Add {
            name,
            brokers,
            take_into_use,
            replace,
        } => {
            let current = Contexts::change(&contexts::path()?, |contexts| {
                let first = contexts.iter().next().is_none();
                contexts.add(&name, brokers, replace)?;
                if take_into_use || first {
                    contexts.take_into_use(Some(&name))?;
                }
                Ok(contexts.clone())
            })?;
            let used = match current.current() == Some(&name) {
                true => "it is in use".to_owned(),
                false => format!("`qute context use {name}` takes it into use"),
            };
            changed(
                &current,
                &name,
                global,
                &format!("saved context {name}; {used}"),
            )
        }
        args::Context::Use { name, .. } => {
            let contexts = Contexts::change(&contexts::path()?, |contexts| {
                contexts.take_into_use(name.as_deref())?;
                Ok(contexts.clone())
            })?;
            match name {
                Some(name) => {
                    let brokers = contexts.get(&name)?.addresses().join(",");
                    changed(
                        &contexts,
                        &name,
                        global,
                        &format!("context {name} is in use: {brokers}"),
                    )
                }
                None => {
                    say("no context is in use");
                    Ok(Exit::Done)
                }
            }
        }
        args::Context::List => {
            output::print(&listed(&Contexts::load(&contexts::path()?)?), global.output)
        }
        args::Context::Show { name } => show(name.as_deref(), global),
        args::Context::Remove { name } => {
            let was_current =
                Contexts::change(&contexts::path()?, |contexts| contexts.remove(&name))?;
            let none = if was_current {
                "; none is in use now"
            } else {
                ""
            };
            say(format_args!("removed context {name}{none}"));
            Ok(Exit::Done)
        }
    }
}

/// Says what was done, or prints what there is now.
fn changed(
    contexts: &Contexts,
    name: &str,
    global: &Global,
    message: &str,
) -> Result<Exit, Failure> {
    match global.output {
        Output::Json | Output::Jsonl => {
            let saved = listed(contexts)
                .into_iter()
                .find(|saved| saved.name == name);
            saved.map_or(Ok(Exit::Done), |saved| output::print(&saved, global.output))
        }
        Output::Table | Output::Raw => {
            say(message);
            Ok(Exit::Done)
        }
    }
}

fn listed(contexts: &Contexts) -> Vec<Saved> {
    let saved = contexts.iter().map(|(name, bootstrap)| Saved {
        name: name.to_owned(),
        bootstrap: bootstrap.addresses().to_vec(),
        current: contexts.current() == Some(name),
    });
    saved.collect()
}

fn show(name: Option<&str>, global: &Global) -> Result<Exit, Failure> {
    let file = contexts::path().ok();
    let target = match name {
        Some(name) => Target {
            bootstrap: Contexts::load(&contexts::path()?)?.get(name)?.clone(),
            source: Source::Context(name.to_owned()),
        },
        None => Target::resolve(global)?,
    };
    let (name, source) = match target.source {
        Source::Flag => (None, "flag"),
        Source::Environment => (None, "environment"),
        Source::Context(name) => (Some(name), "context"),
        Source::Default => (None, "default"),
    };
    let shown = Shown {
        name,
        bootstrap: target.bootstrap.addresses().to_vec(),
        source,
        file: file.map(|file| file.display().to_string()),
    };
    output::print(&shown, global.output)
}

impl Saved {
    fn row(&self) -> Vec<String> {
        let current = if self.current { "*" } else { "" };
        vec![
            current.to_owned(),
            self.name.clone(),
            self.bootstrap.join(","),
        ]
    }
}

impl Report for Saved {
    fn headings(&self) -> Vec<&'static str> {
        vec!["", "NAME", "BROKERS"]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        vec![self.row()]
    }
}

impl Report for Vec<Saved> {
    fn headings(&self) -> Vec<&'static str> {
        vec!["", "NAME", "BROKERS"]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        self.iter().map(Saved::row).collect()
    }

    fn tone(&self, row: usize, _column: usize) -> Tone {
        match self.get(row) {
            Some(saved) if saved.current => Tone::Good,
            _ => Tone::Plain,
        }
    }

    fn json_lines(&self) -> serde_json::Result<Vec<String>> {
        self.iter().map(serde_json::to_string).collect()
    }
}

impl Report for Shown {
    fn headings(&self) -> Vec<&'static str> {
        vec![]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let source = match self.source {
            "flag" => "-b",
            "environment" => "QUTE_BOOTSTRAP",
            other => other,
        };
        let dash = || "-".to_owned();
        [
            ("context", self.name.clone().unwrap_or_else(dash)),
            ("brokers", self.bootstrap.join(",")),
            ("named by", source.to_owned()),
            ("file", self.file.clone().unwrap_or_else(dash)),
        ]
        .map(|(name, value)| vec![name.to_owned(), value])
        .to_vec()
    }
}
