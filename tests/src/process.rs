//! One broker process: start, kill, pause, stop, its log.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

use crate::wait;

/// A running process with its output in a file. Killed, by its id, when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts a program with its arguments; both its outputs are appended to `log`.
    ///
    /// The environment variables of Qute that the test itself runs with don't reach it.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn start(words: &[String], log: &Path) -> Result<Self> {
        let open = || {
            File::options()
                .create(true)
                .append(true)
                .open(log)
                .with_context(|| log.display().to_string())
        };
        let (program, args) = words.split_first().context("no program")?;
        let mut command = Command::new(program);
        command
            .args(args)
            .stdin(Stdio::null())
            .stdout(open()?)
            .stderr(open()?);
        clear_settings(&mut command);
        let child = command
            .spawn()
            .with_context(|| format!("start {program}"))?;
        Ok(Self {
            child,
            log: log.to_path_buf(),
        })
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        kill_process(Pid::from_child(&self.child), signal)
            .with_context(|| format!("signal {signal:?} to {}", self.pid()))
    }

    /// Its exit status, if it has ended.
    ///
    /// # Errors
    /// When the system can't say.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// When it still runs after `within`.
    pub fn wait(&mut self, within: Duration) -> Result<ExitStatus> {
        let what = format!("the end of process {}", self.pid());
        wait::until(&what, within, || self.ended())
    }

    /// SIGKILL, and waits until the process is gone.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// All that it has printed so far.
    ///
    /// # Errors
    /// When the log can't be read.
    pub fn output(&self) -> Result<String> {
        let text = std::fs::read(&self.log).with_context(|| self.log.display().to_string())?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A process that has ended was waited for; its id may belong to another by now.
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Removes what the test's own environment would set in a program under test.
pub fn clear_settings(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("QUTE_") {
            command.env_remove(name);
        }
    }
}

/// The end of a log file, for a failure's report.
#[must_use]
pub fn log_end(path: &Path) -> String {
    const SHOWN: i64 = 8 * 1024;
    let read = || -> std::io::Result<String> {
        let mut file = File::open(path)?;
        let mut text = Vec::new();
        if file.seek(SeekFrom::End(-SHOWN)).is_err() {
            file.seek(SeekFrom::Start(0))?;
        }
        file.read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    };
    read().unwrap_or_else(|error| format!("no log: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, log: &Path) -> Process {
        let words = ["/bin/sh", "-c", script].map(str::to_owned);
        Process::start(&words, log).unwrap()
    }

    #[test]
    fn process_that_ends_leaves_its_code_and_its_output() {
        let dir = tempfile::tempdir().unwrap();
        let mut process = shell("echo out; echo err >&2; exit 7", &dir.path().join("log"));
        assert_eq!(process.wait(wait::LONG).unwrap().code(), Some(7));
        let output = process.output().unwrap();
        assert!(output.contains("out") && output.contains("err"), "{output}");
        assert!(log_end(&dir.path().join("log")).contains("err"));
    }

    #[test]
    fn process_dropped_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let process = shell("exec sleep 1000", &dir.path().join("log"));
        let proc = format!("/proc/{}", process.pid());
        assert!(Path::new(&proc).exists());
        drop(process);
        assert!(!Path::new(&proc).exists());
    }
}
