//! Several broker processes with their data directories.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::binaries::Binaries;
use crate::command::Qute;
use crate::http::{self, Metrics};
use crate::ports::Port;
use crate::process::{self, Process};
use crate::wait;

/// How long a broker may take to stop cleanly.
const STOP: Duration = Duration::from_secs(30);

/// One broker: where it lives, and its process while it runs.
#[derive(Debug)]
pub struct Node {
    name: String,
    dir: PathBuf,
    log: PathBuf,
    port: Port,
    http: Port,
    seeds: Vec<String>,
    expect: Option<usize>,
    extra: Vec<String>,
    /// Instead of all arguments.
    only: Option<Vec<String>>,
    /// Put before the program.
    wrap: Vec<String>,
    process: Option<Process>,
}

impl Node {
    /// A broker of its own: no seeds, nothing expected.
    ///
    /// # Errors
    /// When no ports are free.
    pub fn new(name: &str, base: &Path) -> Result<Self> {
        Ok(Self {
            name: name.to_owned(),
            dir: base.join(name),
            log: base.join(format!("{name}.out")),
            port: Port::take()?,
            http: Port::take()?,
            seeds: Vec::new(),
            expect: None,
            extra: Vec::new(),
            only: None,
            wrap: Vec::new(),
            process: None,
        })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its client address.
    #[must_use]
    pub fn address(&self) -> String {
        self.port.address()
    }

    /// Its HTTP address.
    #[must_use]
    pub fn http(&self) -> String {
        self.http.address()
    }

    /// Its data directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Puts another data directory under it.
    pub fn set_dir(&mut self, dir: &Path) {
        self.dir = dir.to_path_buf();
    }

    /// Sets `--seeds` and `--expect`.
    pub fn set_seeds(&mut self, seeds: &[String], expect: Option<usize>) {
        self.seeds = seeds.to_vec();
        self.expect = expect;
    }

    /// Arguments on top of those that the harness gives.
    pub fn set_extra(&mut self, extra: &[&str]) {
        self.extra = extra.iter().map(|&arg| arg.to_owned()).collect();
    }

    /// Arguments instead of those that the harness gives.
    pub fn set_only(&mut self, only: &[&str]) {
        self.only = Some(only.iter().map(|&arg| arg.to_owned()).collect());
    }

    /// A command that the broker is started through; it has to `exec` its arguments.
    pub fn set_wrap(&mut self, wrap: &[&str]) {
        self.wrap = wrap.iter().map(|&word| word.to_owned()).collect();
    }

    /// Gives it new ports; they count from its next start.
    ///
    /// # Errors
    /// When no ports are free.
    pub fn move_ports(&mut self) -> Result<()> {
        self.port = Port::take()?;
        self.http = Port::take()?;
        Ok(())
    }

    /// Starts its process.
    ///
    /// # Errors
    /// When it runs already or can't be started.
    pub fn start(&mut self, bins: &Binaries) -> Result<()> {
        ensure!(self.process.is_none(), "{} runs already", self.name);
        let mut args = vec![
            format!("--name={}", self.name),
            format!("--data-dir={}", self.dir.display()),
            format!("--listen={}", self.address()),
            format!("--http={}", self.http()),
        ];
        if !self.seeds.is_empty() {
            args.push(format!("--seeds={}", self.seeds.join(",")));
        }
        if let Some(expect) = self.expect {
            args.push(format!("--expect={expect}"));
        }
        args.extend(self.extra.iter().cloned());
        let mut words = self.wrap.clone();
        words.push(bins.broker.to_string_lossy().into_owned());
        words.extend(self.only.clone().unwrap_or(args));
        self.process = Some(Process::start(&words, &self.log)?);
        Ok(())
    }

    /// Its process.
    ///
    /// # Errors
    /// When it doesn't run.
    pub fn process(&mut self) -> Result<&mut Process> {
        let name = &self.name;
        self.process
            .as_mut()
            .with_context(|| format!("{name} doesn't run"))
    }

    /// SIGKILL.
    ///
    /// # Errors
    /// When it doesn't run.
    pub fn kill(&mut self) -> Result<()> {
        self.process()?.kill()?;
        self.process = None;
        Ok(())
    }

    /// SIGTERM; the process has to end with code 0.
    ///
    /// # Errors
    /// When it doesn't.
    pub fn terminate(&mut self) -> Result<()> {
        self.stop_by(Signal::TERM)
    }

    /// A signal that asks for an end; the process has to end with code 0.
    ///
    /// # Errors
    /// When it doesn't.
    pub fn stop_by(&mut self, signal: Signal) -> Result<()> {
        self.process()?.signal(signal)?;
        let code = self.wait_end(STOP)?;
        ensure!(
            code == Some(0),
            "{} ended with {code:?} on {signal:?}",
            self.name
        );
        Ok(())
    }

    /// Waits until the process ends by itself, and says its exit code.
    ///
    /// # Errors
    /// When it runs on.
    pub fn wait_end(&mut self, within: Duration) -> Result<Option<i32>> {
        let status = self.process()?.wait(within)?;
        self.process = None;
        Ok(status.code())
    }

    /// Freezes the process.
    ///
    /// # Errors
    /// When it doesn't run.
    pub fn pause(&mut self) -> Result<()> {
        self.process()?.signal(Signal::STOP)
    }

    /// Lets a frozen process go on.
    ///
    /// # Errors
    /// When it doesn't run.
    pub fn resume(&mut self) -> Result<()> {
        self.process()?.signal(Signal::CONT)
    }

    /// Whether `/readyz` answers 200.
    ///
    /// # Errors
    /// When nothing answers, or the process has ended.
    pub fn is_ready(&mut self) -> Result<bool> {
        if let Some(status) = self.process()?.ended()? {
            anyhow::bail!("{} has ended with {status}", self.name);
        }
        Ok(http::get(&self.http(), "/readyz")?.status == 200)
    }

    /// Waits until `/readyz` answers 200.
    ///
    /// # Errors
    /// When it doesn't in time.
    pub fn wait_ready(&mut self) -> Result<()> {
        let what = format!("{} to be ready", self.name);
        wait::until_true(&what, wait::LONG, || self.is_ready())
    }

    /// Waits until its log holds `text`, whatever its case.
    ///
    /// # Errors
    /// When it doesn't in time.
    pub fn wait_says(&mut self, text: &str) -> Result<()> {
        let what = format!("{} to say {text:?}", self.name);
        let text = text.to_lowercase();
        wait::until_true(&what, wait::LONG, || {
            Ok(self.log()?.to_lowercase().contains(&text))
        })
    }

    /// Everything that its processes have printed.
    ///
    /// # Errors
    /// When there is no log yet.
    pub fn log(&self) -> Result<String> {
        Ok(String::from_utf8_lossy(&std::fs::read(&self.log)?).into_owned())
    }

    /// Its metrics.
    ///
    /// # Errors
    /// When it doesn't answer.
    pub fn metrics(&self) -> Result<Metrics> {
        http::metrics(&self.http())
    }
}

/// Some brokers and the directory they live in.
#[derive(Debug)]
pub struct Cluster {
    /// The brokers, `b0` and so on.
    pub nodes: Vec<Node>,
    bins: Binaries,
    dir: TempDir,
    passed: bool,
}

impl Cluster {
    /// `count` brokers that are to form one cluster; none is started.
    ///
    /// # Errors
    /// When there is no directory or port for them.
    pub fn prepare(bins: &Binaries, count: usize) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("qute-test-").tempdir()?;
        let mut nodes = (0..count)
            .map(|i| Node::new(&format!("b{i}"), dir.path()))
            .collect::<Result<Vec<_>>>()?;
        if count > 1 {
            let seeds: Vec<String> = nodes.iter().map(Node::address).collect();
            for node in &mut nodes {
                node.set_seeds(&seeds, Some(count));
            }
        }
        Ok(Self {
            nodes,
            bins: bins.clone(),
            dir,
            passed: false,
        })
    }

    /// `count` brokers that have formed a cluster.
    ///
    /// # Errors
    /// When they don't.
    pub fn start(bins: &Binaries, count: usize) -> Result<Self> {
        let mut cluster = Self::prepare(bins, count)?;
        cluster.start_all()?;
        Ok(cluster)
    }

    /// Starts every broker that doesn't run, and waits until all are ready.
    ///
    /// # Errors
    /// When one doesn't get there.
    pub fn start_all(&mut self) -> Result<()> {
        for node in &mut self.nodes {
            if node.process.is_none() {
                node.start(&self.bins)?;
            }
        }
        for node in &mut self.nodes {
            node.wait_ready()?;
        }
        Ok(())
    }

    /// Adds a broker that knows the others as seeds; it is not started.
    ///
    /// # Errors
    /// When there is no port for it.
    pub fn add(&mut self, expect: Option<usize>) -> Result<usize> {
        let seeds: Vec<String> = self.nodes.iter().map(Node::address).collect();
        let mut node = Node::new(&format!("b{}", self.nodes.len()), self.dir.path())?;
        node.set_seeds(&seeds, expect);
        self.nodes.push(node);
        Ok(self.nodes.len() - 1)
    }

    /// Starts broker `i` without waiting for it.
    ///
    /// # Errors
    /// When it runs already.
    pub fn start_one(&mut self, i: usize) -> Result<()> {
        let bins = self.bins.clone();
        self.node(i)?.start(&bins)
    }

    /// Broker `i`.
    ///
    /// # Errors
    /// When there is none.
    pub fn node(&mut self, i: usize) -> Result<&mut Node> {
        self.nodes
            .get_mut(i)
            .with_context(|| format!("no broker {i}"))
    }

    /// A directory for the test's own files.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The bootstrap list.
    #[must_use]
    pub fn bootstrap(&self) -> String {
        let all: Vec<String> = self.nodes.iter().map(Node::address).collect();
        all.join(",")
    }

    /// `qute` with the whole bootstrap list.
    pub fn qute<S: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Qute {
        self.qute_at(&self.bootstrap(), args)
    }

    /// `qute` with a bootstrap list of its own.
    pub fn qute_at<S: AsRef<std::ffi::OsStr>>(
        &self,
        bootstrap: &str,
        args: impl IntoIterator<Item = S>,
    ) -> Qute {
        Qute::new(&self.bins.qute)
            .args(["-b", bootstrap])
            .args(args)
    }

    /// Creates a topic.
    ///
    /// # Errors
    /// When `qute topic create` fails.
    pub fn create_topic(&self, name: &str, partitions: u32, replicas: u32) -> Result<()> {
        let (partitions, replicas) = (partitions.to_string(), replicas.to_string());
        let words = [
            "topic",
            "create",
            name,
            "--partitions",
            &partitions,
            "--replicas",
            &replicas,
        ];
        self.qute(words).run()?.ok()?;
        Ok(())
    }

    /// What `qute cluster brokers` prints.
    ///
    /// # Errors
    /// When it fails.
    pub fn brokers(&self) -> Result<Vec<Value>> {
        let output = self
            .qute(["cluster", "brokers", "--output", "json"])
            .run()?
            .ok()?;
        let Value::Array(brokers) = output.json()? else {
            anyhow::bail!("no array: {}", output.text());
        };
        Ok(brokers)
    }

    /// The place of the broker with this id among [`Cluster::nodes`].
    ///
    /// # Errors
    /// When the cluster doesn't know it.
    pub fn place_of(&self, broker_id: &str) -> Result<usize> {
        let brokers = self.brokers()?;
        let broker = brokers.iter().find(|broker| broker["id"] == broker_id);
        let name = broker.with_context(|| format!("no broker {broker_id}"))?["name"].clone();
        let place = self.nodes.iter().position(|node| name == node.name);
        place.with_context(|| format!("no node {name}"))
    }

    /// The leaders of a topic's partitions, by broker id; `None` where there is none.
    ///
    /// # Errors
    /// When `qute topic describe` fails.
    pub fn leaders(&self, topic: &str) -> Result<BTreeMap<u64, Option<String>>> {
        let output = self
            .qute(["topic", "describe", topic, "--output", "json"])
            .run()?
            .ok()?;
        let description = output.json()?;
        let partitions = description["partitions"]
            .as_array()
            .context("no partitions")?;
        let leader = |partition: &Value| -> Option<(u64, Option<String>)> {
            let number = partition["partition"].as_u64()?;
            Some((number, partition["leader"].as_str().map(str::to_owned)))
        };
        Ok(partitions.iter().filter_map(leader).collect())
    }

    /// The id of the broker that leads most partitions of a topic.
    ///
    /// # Errors
    /// When nobody leads any in time.
    pub fn busiest_leader(&self, topic: &str) -> Result<String> {
        wait::until("a leader", wait::LONG, || {
            let mut counts = BTreeMap::<String, usize>::new();
            for leader in self.leaders(topic)?.into_values().flatten() {
                *counts.entry(leader).or_default() += 1;
            }
            Ok(counts
                .into_iter()
                .max_by_key(|(_, count)| *count)
                .map(|(id, _)| id))
        })
    }

    /// Waits until every partition of a topic has a leader, and none of them is `not`.
    ///
    /// # Errors
    /// When it doesn't come about.
    pub fn wait_led(&self, topic: &str, not: Option<&str>) -> Result<()> {
        wait::until_true("leaders for all partitions", wait::LONG, || {
            let leaders = self.leaders(topic)?;
            let led = |leader: &Option<String>| leader.is_some() && leader.as_deref() != not;
            Ok(!leaders.is_empty() && leaders.values().all(led))
        })
    }

    /// Stops every running broker by SIGTERM, wants exit code 0 of each, and marks the test as
    /// passed: without this call the ends of all logs are printed.
    ///
    /// # Errors
    /// When a broker doesn't stop cleanly.
    pub fn stop(mut self) -> Result<()> {
        for node in running_of(&mut self.nodes) {
            node.process()?.signal(Signal::TERM)?;
        }
        for node in running_of(&mut self.nodes) {
            let code = node.wait_end(STOP)?;
            ensure!(
                code == Some(0),
                "{} ended with {code:?} on SIGTERM",
                node.name
            );
        }
        self.passed = true;
        Ok(())
    }
}

fn running_of(nodes: &mut [Node]) -> impl Iterator<Item = &mut Node> {
    nodes.iter_mut().filter(|node| node.process.is_some())
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.passed {
            return;
        }
        for node in &self.nodes {
            let end = process::log_end(&node.log);
            eprintln!(
                "--- the end of {}'s log, {} ---\n{end}",
                node.name,
                node.log.display()
            );
        }
        if std::env::var_os("QUTE_TEST_KEEP").is_some() {
            self.dir.disable_cleanup(true);
            eprintln!("--- kept: {} ---", self.dir.path().display());
        }
    }
}
