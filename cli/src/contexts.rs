//! Saved clusters: names for bootstrap lists, in one TOML file, and the one that is in use.
//!
//! ```toml
//! current = "prod"
//!
//! [contexts.prod]
//! bootstrap = "a:7700,b:7700"
//! ```
//!
//! The file is `$QUTE_CONFIG`, else `qute/contexts.toml` in `$XDG_CONFIG_HOME` (`~/.config`). It is
//! replaced as a whole, so that a crash leaves the old one or the new one; a lock file beside it keeps
//! two commands from losing each other's change. What it holds is checked when it is read: a file
//! with anything that this version does not know is refused, since the next change would lose it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use qute_client::Bootstrap;
use serde::{Deserialize, Serialize};

use crate::exit::{Exit, Failure};
use crate::suggest;

/// A longer file is not ours.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Longest name of a context.
const NAME_BYTES_MAX: usize = 64;

/// What the file says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    current: Option<String>,
    #[serde(default)]
    contexts: BTreeMap<String, Saved>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    bootstrap: String,
}

/// The saved clusters, as the file has them.
#[derive(Clone, Debug)]
pub struct Contexts {
    path: PathBuf,
    current: Option<String>,
    saved: BTreeMap<String, Bootstrap>,
}

/// Checks the name of a context: 1 to 64 of `A-Z a-z 0-9 . _ -`.
///
/// # Errors
/// What is wrong with it.
pub fn check_name(name: &str) -> Result<String, String> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.bytes().all(allowed) {
        return Err("a context's name is 1 to 64 of A-Z a-z 0-9 . _ -".to_owned());
    }
    Ok(name.to_owned())
}

/// Where the file is, by these environment variables: `$QUTE_CONFIG`, else below
/// `$XDG_CONFIG_HOME`, else below `$HOME`.
///
/// # Errors
/// None of them is set.
fn path_by(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, Failure> {
    let set = |name| {
        variable(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    if let Some(path) = set("QUTE_CONFIG") {
        return Ok(path);
    }
    // The specification has relative paths ignored.
    let config = set("XDG_CONFIG_HOME").filter(|dir| dir.is_absolute());
    let config = config.or_else(|| Some(set("HOME")?.join(".config")));
    config
        .map(|dir| dir.join("qute").join("contexts.toml"))
        .ok_or_else(|| {
            Failure::error("there is no home directory to keep contexts in")
                .hint("set QUTE_CONFIG to the path of a file")
        })
}

/// Where the file is.
///
/// # Errors
/// No environment variable leads to it.
pub fn path() -> Result<PathBuf, Failure> {
    path_by(|name| std::env::var_os(name))
}

impl Contexts {
    /// Reads the file; there being none is no error.
    ///
    /// # Errors
    /// It can't be read, or is not what this version writes.
    pub fn load(path: &Path) -> Result<Self, Failure> {
        let text = read(path).map_err(|error| {
            Failure::error(format!(
                "can't read the contexts in {}: {error}",
                path.display()
            ))
            .hint("QUTE_CONFIG names another file, and -b needs none")
        })?;
        let document = Document::parse(&text.unwrap_or_default());
        document
            .and_then(|document| Self::checked(path, document))
            .map_err(|broken| {
                Failure::error(format!("{} is broken: {broken}", path.display()))
                    .hint("correct it or remove it; -b HOST:PORT,.. needs none")
            })
    }

    fn checked(path: &Path, document: Document) -> Result<Self, String> {
        let mut saved = BTreeMap::new();
        for (name, context) in document.contexts {
            check_name(&name).map_err(|error| format!("context {name:?}: {error}"))?;
            let bootstrap = context.bootstrap.parse();
            let bootstrap = bootstrap.map_err(|error| format!("context {name}: {error}"))?;
            saved.insert(name, bootstrap);
        }
        Ok(Self {
            path: path.to_owned(),
            current: document.current,
            saved,
        })
    }

    /// Changes the file: reads it, applies `change`, writes it, with nobody in between.
    ///
    /// # Errors
    /// As [`Contexts::load`], those of `change` (then nothing is written), and of writing.
    pub fn change<T>(
        path: &Path,
        change: impl FnOnce(&mut Self) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        // A link stays a link: what it leads to is replaced.
        let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let unwritable = |error: io::Error| {
            Failure::error(format!("can't write {}: {error}", path.display()))
                .hint("QUTE_CONFIG names another place")
        };
        let _locked = lock(path).map_err(unwritable)?;
        let mut contexts = Self::load(path)?;
        let done = change(&mut contexts)?;
        contexts.write().map_err(unwritable)?;
        Ok(done)
    }

    fn write(&self) -> io::Result<()> {
        let saved = |bootstrap: &Bootstrap| Saved {
            bootstrap: bootstrap.addresses().join(","),
        };
        let document = Document {
            current: self.current.clone(),
            contexts: self
                .saved
                .iter()
                .map(|(name, bootstrap)| (name.clone(), saved(bootstrap)))
                .collect(),
        };
        let text = toml::to_string(&document).map_err(io::Error::other)?;
        let dir = directory(&self.path);
        let mut file = tempfile::Builder::new()
            .prefix(".contexts-")
            .tempfile_in(dir)?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(&self.path)?;
        // The name is durable once its directory is.
        File::open(dir)?.sync_all()
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.path
    }

    /// The name of the one in use.
    #[must_use]
    pub fn current(&self) -> Option<&str> {
        self.current.as_deref()
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Bootstrap)> {
        self.saved
            .iter()
            .map(|(name, bootstrap)| (name.as_str(), bootstrap))
    }

    /// The brokers of this one.
    ///
    /// # Errors
    /// There is none of that name: exit 2.
    pub fn get(&self, name: &str) -> Result<&Bootstrap, Failure> {
        self.saved.get(name).ok_or_else(|| self.unknown(name))
    }

    fn unknown(&self, name: &str) -> Failure {
        let names = self.saved.keys().map(String::as_str);
        let next = "`qute context list` shows what is saved, `qute context add` saves more";
        let hint = match suggest::did_you_mean(name, names) {
            Some(question) => format!("{question} {next}"),
            None => next.to_owned(),
        };
        Failure::new(Exit::Usage, format!("context '{name}' does not exist")).hint(hint)
    }

    /// Adds one. The same again is no change.
    ///
    /// # Errors
    /// There is one of that name for other brokers, unless it may be replaced.
    pub fn add(&mut self, name: &str, bootstrap: Bootstrap, replace: bool) -> Result<(), Failure> {
        match self.saved.get(name) {
            Some(before) if *before != bootstrap && !replace => {
                let before = before.addresses().join(",");
                Err(
                    Failure::error(format!("context '{name}' exists, for {before}"))
                        .hint("--replace puts the new brokers in their place"),
                )
            }
            _ => {
                self.saved.insert(name.to_owned(), bootstrap);
                Ok(())
            }
        }
    }

    /// Takes this one, or none, into use.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn take_into_use(&mut self, name: Option<&str>) -> Result<(), Failure> {
        if let Some(name) = name {
            self.get(name)?;
        }
        self.current = name.map(str::to_owned);
        Ok(())
    }

    /// Removes one; says whether it was in use, which none is then.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn remove(&mut self, name: &str) -> Result<bool, Failure> {
        if self.saved.remove(name).is_none() {
            return Err(self.unknown(name));
        }
        let was_current = self.current.as_deref() == Some(name);
        if was_current {
            self.current = None;
        }
        Ok(was_current)
    }
}

impl Document {
    fn parse(text: &str) -> Result<Self, String> {
        toml::from_str(text).map_err(|error| {
            let line = error
                .span()
                .and_then(|span| text.get(..span.start))
                .map(|before| before.matches('\n').count() + 1);
            let message = error.message().trim_end();
            match line {
                Some(line) => format!("line {line}: {message}"),
                None => message.to_owned(),
            }
        })
    }
}

fn read(path: &Path) -> io::Result<Option<String>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut text = String::new();
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text)?;
    if u64::try_from(text.len()).is_ok_and(|bytes| bytes > FILE_BYTES_MAX) {
        return Err(io::Error::other("it is larger than 1 MiB"));
    }
    Ok(Some(text))
}

fn directory(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

/// Makes the directory if need be and locks the file beside `path`, until the result is dropped.
fn lock(path: &Path) -> io::Result<File> {
    fs::create_dir_all(directory(path))?;
    let mut beside = path.as_os_str().to_owned();
    beside.push(".lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(beside)?;
    file.lock()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> Bootstrap {
        text.parse().unwrap()
    }

    #[test]
    fn path_is_that_of_the_first_variable_that_is_set() {
        let path = |variables: &[(&str, &str)]| {
            let value = |name: &str| {
                let found = variables.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| OsString::from(value))
            };
            path_by(value).map(|path| path.display().to_string())
        };
        let home = ("HOME", "/h");
        assert_eq!(path(&[home]).unwrap(), "/h/.config/qute/contexts.toml");
        let xdg = ("XDG_CONFIG_HOME", "/x");
        assert_eq!(path(&[home, xdg]).unwrap(), "/x/qute/contexts.toml");
        let relative = ("XDG_CONFIG_HOME", "x");
        assert_eq!(
            path(&[home, relative]).unwrap(),
            "/h/.config/qute/contexts.toml"
        );
        assert_eq!(
            path(&[home, xdg, ("QUTE_CONFIG", "c.toml")]).unwrap(),
            "c.toml"
        );
        assert_eq!(
            path(&[home, ("QUTE_CONFIG", "")]).unwrap(),
            "/h/.config/qute/contexts.toml"
        );
        assert!(path(&[]).is_err());
    }

    #[test]
    fn changes_are_there_when_the_file_is_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new").join("contexts.toml");
        assert_eq!(Contexts::load(&path).unwrap().iter().count(), 0);
        Contexts::change(&path, |contexts| {
            contexts.add("prod", list("a:1,b:2"), false)?;
            contexts.add("dev", list("c:3"), false)?;
            contexts.take_into_use(Some("prod"))
        })
        .unwrap();
        let contexts = Contexts::load(&path).unwrap();
        assert_eq!(contexts.current(), Some("prod"));
        assert_eq!(contexts.get("prod").unwrap().addresses(), ["a:1", "b:2"]);
        assert_eq!(
            fs::read_to_string(&path).unwrap(),
            "current = \"prod\"\n\n[contexts.dev]\nbootstrap = \"c:3\"\n\n[contexts.prod]\nbootstrap = \"a:1,b:2\"\n"
        );
        assert!(Contexts::change(&path, |contexts| contexts.remove("prod")).unwrap());
        assert_eq!(Contexts::load(&path).unwrap().current(), None);
        // Nothing lies around but the file and its lock.
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 2);
    }

    #[test]
    fn refused_change_writes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("contexts.toml");
        Contexts::change(&path, |contexts| contexts.add("prod", list("a:1"), false)).unwrap();
        let before = fs::read(&path).unwrap();
        let again = |bootstrap, replace| {
            Contexts::change(&path, |contexts| {
                contexts.add("prod", list(bootstrap), replace)
            })
        };
        assert_eq!(again("b:1", false).unwrap_err().exit, Exit::Error);
        assert_eq!(fs::read(&path).unwrap(), before);
        again("a:1", false).unwrap();
        again("b:1", true).unwrap();
        assert_ne!(fs::read(&path).unwrap(), before);
    }

    #[test]
    fn change_through_a_link_leaves_the_link() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real.toml"), dir.path().join("link.toml"));
        fs::write(&real, "").unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        Contexts::change(&link, |contexts| contexts.add("x", list("a:1"), false)).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert!(Contexts::load(&real).unwrap().get("x").is_ok());
    }

    #[test]
    fn changes_at_the_same_time_are_all_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("contexts.toml");
        std::thread::scope(|scope| {
            for i in 0..16 {
                let path = &path;
                scope.spawn(move || {
                    let name = format!("c{i}");
                    Contexts::change(path, |contexts| contexts.add(&name, list("a:1"), false))
                        .unwrap();
                });
            }
        });
        assert_eq!(Contexts::load(&path).unwrap().iter().count(), 16);
    }

    #[test]
    fn broken_files_are_named_with_the_line_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("contexts.toml");
        for (text, says) in [
            ("current = \"a\"\nwhat is this", "line 2"),
            ("colour = 1\n", "unknown field `colour`"),
            ("[contexts.a]\nbootstrap = 7\n", "line 2"),
            ("[contexts.a]\n", "missing field `bootstrap`"),
            (
                "[contexts.a]\nbootstrap = \"a:x\"\n",
                "context a: bootstrap address",
            ),
            (
                "[contexts.\"a b\"]\nbootstrap = \"a:1\"\n",
                "context \"a b\"",
            ),
        ] {
            fs::write(&path, text).unwrap();
            let error =
                Contexts::change(&path, |contexts| contexts.take_into_use(None)).unwrap_err();
            assert_eq!(error.exit, Exit::Error);
            let said = error.to_string();
            assert!(said.contains(says) && said.contains("is broken"), "{said}");
            assert!(error.hint.is_some());
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        fs::write(&path, b"\xff").unwrap();
        assert!(Contexts::load(&path).is_err());
        fs::write(&path, vec![b'#'; 2 << 20]).unwrap();
        assert!(Contexts::load(&path).unwrap_err().message.contains("1 MiB"));
    }

    #[test]
    fn unknown_context_is_answered_with_the_one_that_may_have_been_meant() {
        let mut contexts = Contexts::checked(Path::new("f"), Document::default()).unwrap();
        contexts.add("prod", list("a:1"), false).unwrap();
        let error = contexts.get("prdo").unwrap_err();
        assert_eq!(error.exit, Exit::Usage);
        assert!(
            error.to_string().contains("did you mean 'prod'?"),
            "{error}"
        );
        assert!(contexts.take_into_use(Some("x")).is_err());
        assert!(contexts.remove("x").is_err());
    }

    #[test]
    fn names_are_plain() {
        assert!(check_name("prod-1.eu_west").is_ok());
        for bad in ["", "a b", "caf\u{e9}", "a/b", &"x".repeat(65)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
