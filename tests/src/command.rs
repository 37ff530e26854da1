//! Running `qute` with a deadline.

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::process::clear_settings;
use crate::wait;

/// How long a command may take before the test gives up on it.
const LIMIT: Duration = Duration::from_secs(60);

/// A command line being put together.
#[derive(Debug)]
pub struct Qute {
    command: Command,
    words: Vec<String>,
    limit: Duration,
}

impl Qute {
    /// `qute` without a bootstrap list.
    #[must_use]
    pub fn new(program: &Path) -> Self {
        let mut command = Command::new(program);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        clear_settings(&mut command);
        Self {
            command,
            words: vec!["qute".to_owned()],
            limit: LIMIT,
        }
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        for arg in args {
            self.words.push(arg.as_ref().to_string_lossy().into_owned());
            self.command.arg(arg);
        }
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Sets the limit on its running time; the default is a minute.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Runs it with an empty standard input.
    ///
    /// # Errors
    /// When it can't be started or overruns its limit; an exit code is no error.
    pub fn run(self) -> Result<Output> {
        self.run_with(b"")
    }

    /// Runs it with this standard input.
    ///
    /// # Errors
    /// As [`Qute::run`].
    pub fn run_with(self, input: &[u8]) -> Result<Output> {
        let mut running = self.spawn()?;
        let stdin = running.stdin();
        std::thread::scope(|scope| {
            // A command that ends before it has read everything is no failure here.
            scope.spawn(move || stdin.map(|mut stdin| stdin.write_all(input)));
            running.finish()
        })
    }

    /// Starts it with an open standard input.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn spawn(mut self) -> Result<Running> {
        self.command.stdin(Stdio::piped());
        let line = self.words.join(" ");
        let mut child = self.command.spawn().with_context(|| line.clone())?;
        let stdout = collect(child.stdout.take());
        let stderr = collect(child.stderr.take());
        Ok(Running {
            child,
            line,
            stdout: Some(stdout),
            stderr: Some(stderr),
            deadline: Instant::now() + self.limit,
        })
    }
}

fn collect(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // What came before an error is still worth having.
            let _ = pipe.read_to_end(&mut bytes);
        }
        bytes
    })
}

/// A started command. Killed when dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    line: String,
    stdout: Option<JoinHandle<Vec<u8>>>,
    stderr: Option<JoinHandle<Vec<u8>>>,
    deadline: Instant,
}

impl Running {
    /// Its standard input; `None` when it was taken before. Dropping it is the end of input.
    pub fn stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }

    /// Whether it still runs.
    ///
    /// # Errors
    /// When the system can't say.
    pub fn runs(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Waits for its end and takes what it printed.
    ///
    /// # Errors
    /// When it overruns its limit.
    pub fn finish(&mut self) -> Result<Output> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let ended = wait::until(&self.line, left, || Ok(self.child.try_wait()?));
        if ended.is_err() {
            self.child.kill()?;
        }
        let status = self.child.wait()?;
        let output = Output {
            line: self.line.clone(),
            code: status.code(),
            stdout: take(&mut self.stdout)?,
            stderr: String::from_utf8_lossy(&take(&mut self.stderr)?).into_owned(),
        };
        ended.with_context(|| format!("standard error: {}", output.stderr))?;
        Ok(output)
    }
}

fn take(thread: &mut Option<JoinHandle<Vec<u8>>>) -> Result<Vec<u8>> {
    let thread = thread.take().context("the output was taken before")?;
    thread.join().ok().context("a reader thread panicked")
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// What a finished command left behind.
#[derive(Debug)]
pub struct Output {
    line: String,
    /// Exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error, as text.
    pub stderr: String,
}

impl Output {
    /// Goes on if the exit code is `code`.
    ///
    /// # Errors
    /// With the command and what it said.
    pub fn expect(self, code: i32) -> Result<Self> {
        ensure!(
            self.code == Some(code),
            "`{}` ended with {:?} instead of {code}\nstandard error: {}\nstandard output: {:.2000}",
            self.line,
            self.code,
            self.stderr,
            String::from_utf8_lossy(&self.stdout),
        );
        Ok(self)
    }

    /// Goes on if it succeeded.
    ///
    /// # Errors
    /// With the command and what it said.
    pub fn ok(self) -> Result<Self> {
        self.expect(0)
    }

    /// Goes on if standard error holds `text`, whatever its case.
    ///
    /// # Errors
    /// With the command and what it said.
    pub fn says(self, text: &str) -> Result<Self> {
        let found = self.stderr.to_lowercase().contains(&text.to_lowercase());
        if !found {
            bail!("`{}` doesn't say {text:?}: {}", self.line, self.stderr);
        }
        Ok(self)
    }

    /// Standard output as JSON.
    ///
    /// # Errors
    /// When it is not JSON.
    pub fn json(&self) -> Result<serde_json::Value> {
        let text = String::from_utf8_lossy(&self.stdout);
        serde_json::from_str(&text).with_context(|| format!("`{}` printed {text}", self.line))
    }

    /// Standard output as text.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Qute {
        Qute::new(Path::new("/bin/sh")).args(["-c", script])
    }

    #[test]
    fn command_gets_its_input_and_gives_its_output() {
        let input = vec![b'x'; 1 << 20];
        let output = shell("cat; echo done >&2; exit 3")
            .run_with(&input)
            .unwrap();
        assert_eq!(output.stdout, input);
        let output = output.expect(3).unwrap().says("DONE").unwrap();
        assert!(output.ok().is_err());
    }

    #[test]
    fn command_that_overruns_is_killed_with_what_it_said() {
        let limit = Duration::from_millis(300);
        let error = shell("echo stuck >&2; exec sleep 1000")
            .limit(limit)
            .run()
            .unwrap_err();
        assert!(format!("{error:#}").contains("stuck"), "{error:#}");
    }
}
