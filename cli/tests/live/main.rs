//! The `qute` binary against real brokers in the test's process.

#![allow(clippy::unwrap_used, clippy::panic, reason = "test code")]

mod bench;
mod consume;
mod doctor;
mod group;
mod produce;
mod shapes;
mod top;
mod topic;

use std::process::Stdio;

use qute_test::Cluster;
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, Command};

/// One broker.
async fn one() -> Cluster {
    Cluster::start(1).await.unwrap()
}

/// `qute ARGS` against this cluster, not yet started.
fn qute(cluster: &Cluster, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_qute"));
    command
        .args(args)
        .env("QUTE_BOOTSTRAP", cluster.bootstrap())
        .env("QUTE_CONFIG", "/nowhere/contexts.toml")
        .env_remove("QUTE_LOG")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// What a finished command left behind.
#[derive(Debug)]
struct Output {
    code: i32,
    out: Vec<u8>,
    err: String,
}

impl Output {
    fn text(&self) -> &str {
        std::str::from_utf8(&self.out).unwrap()
    }

    fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    #[track_caller]
    fn expect(self, code: i32) -> Self {
        assert_eq!(self.code, code, "{self:?}");
        self
    }

    #[track_caller]
    fn says(self, text: &str) -> Self {
        assert!(self.err.contains(text), "no {text:?} in {:?}", self.err);
        self
    }
}

/// Waits for the end of a command.
async fn finish(child: Child) -> Output {
    let output = child.wait_with_output().await.unwrap();
    Output {
        code: output.status.code().unwrap_or(-1),
        out: output.stdout,
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Runs a command with these bytes as its standard input.
async fn run_with(cluster: &Cluster, args: &[&str], input: &[u8]) -> Output {
    let mut child = qute(cluster, args).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let writing = tokio::spawn(async move {
        // A command that does not read its input closes it.
        let _ = stdin.write_all(&input).await;
    });
    let output = finish(child).await;
    writing.await.unwrap();
    output
}

/// Runs a command without input.
async fn run(cluster: &Cluster, args: &[&str]) -> Output {
    run_with(cluster, args, b"").await
}

/// Sends a signal to a running command.
fn signal(child: &Child, name: &str) {
    let pid = child.id().unwrap().to_string();
    let mut kill = std::process::Command::new("kill");
    assert!(kill.args(["-s", name, &pid]).status().unwrap().success());
}
