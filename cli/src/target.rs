//! Which cluster a command talks to, and who said so.
//!
//! Flags go before the environment, the environment before the file, and in each the brokers before
//! the name of a context: `-b`, `--context`, `QUTE_BOOTSTRAP`, `QUTE_CONTEXT`, the context in use,
//! the default address.

use std::fmt;
use std::path::Path;

use clap::ArgMatches;
use clap::parser::ValueSource;
use qute_client::Bootstrap;

use crate::args::{DEFAULT_BOOTSTRAP, Global};
use crate::contexts::{self, Contexts};
use crate::exit::Failure;

/// The brokers that are asked first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Their addresses.
    pub bootstrap: Bootstrap,
    /// Who named them.
    pub source: Source,
}

/// Who named the brokers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// `-b`.
    Flag,
    /// `QUTE_BOOTSTRAP`.
    Environment,
    /// A saved context, by its name.
    Context(String),
    /// Nobody: a broker that runs with its defaults.
    Default,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("-b"),
            Self::Environment => f.write_str("QUTE_BOOTSTRAP"),
            Self::Context(name) => write!(f, "context '{name}'"),
            Self::Default => f.write_str("default"),
        }
    }
}

impl Source {
    /// ` in context 'prod'` where one decided: for messages about changes, so that a change in the
    /// wrong cluster is seen at once.
    #[must_use]
    pub fn place(&self) -> String {
        match self {
            Self::Context(_) => format!(" in {self}"),
            _ => String::new(),
        }
    }
}

/// Which of the two flags stood on the command line; else they may have come from the environment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Given {
    bootstrap: bool,
    context: bool,
}

impl Given {
    /// What `clap` says.
    #[must_use]
    pub fn of(matches: &ArgMatches) -> Self {
        let given = |id| matches.value_source(id) == Some(ValueSource::CommandLine);
        Self {
            bootstrap: given("bootstrap"),
            context: given("context"),
        }
    }
}

impl Target {
    /// The cluster that the command is to talk to.
    ///
    /// # Errors
    /// Both flags are given, the context does not exist, or the file of contexts, if it has to be
    /// looked at, is broken.
    pub fn resolve(global: &Global) -> Result<Self, Failure> {
        match contexts::path() {
            Ok(path) => Self::resolve_with(global, Some(&path)),
            // Nowhere to keep contexts: then there are none.
            Err(_) if global.context.is_none() => Self::resolve_with(global, None),
            Err(failure) => Err(failure),
        }
    }

    fn resolve_with(global: &Global, file: Option<&Path>) -> Result<Self, Failure> {
        let Given { bootstrap, context } = global.given;
        if bootstrap && context {
            return Err(
                Failure::usage("-b and --context both say which cluster is meant")
                    .hint("give one of them"),
            );
        }
        let source = if bootstrap {
            Source::Flag
        } else {
            Source::Environment
        };
        if let Some(bootstrap) = &global.bootstrap
            && !context
        {
            return Ok(Self {
                bootstrap: bootstrap.clone(),
                source,
            });
        }
        let Some(file) = file else {
            return Self::fallback();
        };
        let contexts = Contexts::load(file)?;
        // A variable that is set to nothing asks for nothing.
        let named = global
            .context
            .as_deref()
            .filter(|name| context || !name.is_empty());
        match named.or(contexts.current()) {
            Some(name) => Ok(Self {
                bootstrap: contexts.get(name)?.clone(),
                source: Source::Context(name.to_owned()),
            }),
            None => Self::fallback(),
        }
    }

    fn fallback() -> Result<Self, Failure> {
        let bootstrap: Result<Bootstrap, _> = DEFAULT_BOOTSTRAP.parse();
        Ok(Self {
            bootstrap: bootstrap.map_err(|error| Failure::error(error.to_string()))?,
            source: Source::Default,
        })
    }

    /// What to look at when none of these brokers answers.
    #[must_use]
    pub fn advice(&self) -> String {
        match &self.source {
            Source::Flag => "is a broker running there? -b HOST:PORT,.. has to name one that is".to_owned(),
            Source::Environment => {
                "is a broker running there? QUTE_BOOTSTRAP named these; -b names others".to_owned()
            }
            Source::Context(name) => format!(
                "is a broker running there? `qute context show` says where context '{name}' comes from; \
                 -b names others"
            ),
            Source::Default => {
                "is a broker running there? start one with `qute dev`, or name others with -b HOST:PORT,.."
                    .to_owned()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::tests::global;
    use crate::exit::Exit;

    const FILE: &str = "current = \"prod\"\n[contexts.prod]\nbootstrap = \"p:1\"\n[contexts.dev]\nbootstrap = \"d:1\"\n";

    fn resolved(
        flags: &[&str],
        variables: (&str, &str),
        text: &str,
    ) -> Result<(String, Source), Exit> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("contexts.toml");
        std::fs::write(&file, text).unwrap();
        let mut global = global(flags);
        let (bootstrap, context) = variables;
        if !bootstrap.is_empty() && global.bootstrap.is_none() {
            global.bootstrap = Some(bootstrap.parse().unwrap());
        }
        global.context = global.context.or(Some(context.to_owned()));
        let target = Target::resolve_with(&global, Some(&file)).map_err(|failure| failure.exit)?;
        Ok((target.bootstrap.addresses().join(","), target.source))
    }

    #[test]
    fn flags_go_before_the_environment_and_that_before_the_file() {
        let context = |name: &str| Source::Context(name.to_owned());
        let of = |flags: &[&str], variables, text| {
            let (address, source) = resolved(flags, variables, text).unwrap();
            (address, source)
        };
        let both = ("e:1", "dev");
        for (flags, variables, text, address, source) in [
            (&["-b", "f:1"][..], both, FILE, "f:1", Source::Flag),
            (&["--context", "prod"], both, FILE, "p:1", context("prod")),
            (&[], both, FILE, "e:1", Source::Environment),
            (&[], ("", "dev"), FILE, "d:1", context("dev")),
            (&[], ("", ""), FILE, "p:1", context("prod")),
            (&[], ("", ""), "", DEFAULT_BOOTSTRAP, Source::Default),
            // A file that is not needed may be broken.
            (&["-b", "f:1"], ("", ""), "?", "f:1", Source::Flag),
            (&[], ("e:1", ""), "?", "e:1", Source::Environment),
        ] {
            let told = of(flags, variables, text);
            assert_eq!(
                told,
                (address.to_owned(), source),
                "{flags:?} {variables:?}"
            );
        }
    }

    #[test]
    fn contradictions_and_unknown_contexts_are_usage_errors() {
        let exit = |flags: &[&str], text| resolved(flags, ("", ""), text).unwrap_err();
        assert_eq!(exit(&["-b", "f:1", "--context", "prod"], FILE), Exit::Usage);
        assert_eq!(exit(&["--context", "prd"], FILE), Exit::Usage);
        assert_eq!(exit(&[], "current = \"gone\"\n"), Exit::Usage);
        assert_eq!(exit(&[], "?"), Exit::Error);
    }
}
