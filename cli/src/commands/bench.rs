//! `qute bench produce|consume|end-to-end`: load on a cluster, and what it measures (`qute-load`).

use std::time::Duration;

use qute_client::{Client, ErrorKind, TopicSpec};
use qute_load::{Control, Error, Load};
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::{Bench, BenchLoad, Global};
use crate::connection::{connect, explain, failure};
use crate::exit::{Exit, Failure};
use crate::interrupt::Interrupt;
use crate::output::{self, Report, say};
use crate::progress::Progress;

/// Records without `-n` and without a duration.
const RECORDS: u64 = 100_000;
/// How often the sign of life moves.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Runs the command.
///
/// # Errors
/// The cluster refuses or can't be reached, records failed, or there is nothing to read.
pub async fn run(command: Bench, global: &Global, interrupt: &Interrupt) -> Result<Exit, Failure> {
    match command {
        Bench::Produce(args) => write("produce", &args, global, interrupt).await,
        Bench::EndToEnd(args) => write("end-to-end", &args, global, interrupt).await,
        Bench::Consume { topic, records } => read(&topic, records, global, interrupt).await,
    }
}

async fn write(
    bench: &'static str,
    args: &BenchLoad,
    global: &Global,
    interrupt: &Interrupt,
) -> Result<Exit, Failure> {
    let client = tokio::select! {
        opened = open(args, global) => opened?,
        () = interrupt.wait() => return Err(Failure::error("interrupted before anything was written")),
    };
    let load = load(args, global);
    let total = load
        .records
        .map(|records| records.saturating_add(load.warmup));
    let control = Control::new();
    let run = async {
        match bench {
            "produce" => qute_load::produce(&client, &load, &control).await,
            _ => qute_load::end_to_end(&client, &load, &control).await,
        }
    };
    let title = format!("writing to {}", args.topic);
    let report = watched(run, &control, title, total, interrupt)
        .await
        .map_err(told)?;
    let ending = ending(&report);
    output::print(&Figures::of(bench, settings(args), &report), global.output)?;
    ending
}

async fn read(
    topic: &str,
    records: Option<u64>,
    global: &Global,
    interrupt: &Interrupt,
) -> Result<Exit, Failure> {
    let client = tokio::select! {
        opened = connect(global) => opened?,
        () = interrupt.wait() => return Err(Failure::error("interrupted before anything was read")),
    };
    let control = Control::new();
    let run = qute_load::consume(&client, topic, records, &control);
    let title = format!("reading {topic}");
    let report = match watched(run, &control, title, records, interrupt).await {
        Ok(report) => report,
        Err(Error::Client(error)) => return Err(explain(&client, &error).await),
        Err(error) => return Err(told(error)),
    };
    if report.records == 0 {
        return Err(
            Failure::error(format!("there was nothing to read in topic {topic}"))
                .hint(format!("`qute bench produce {topic}` fills it")),
        );
    }
    let settings = json!({ "topic": topic, "records": records });
    output::print(&Figures::of("consume", settings, &report), global.output)
}

/// Runs a load with a sign of life; a signal ends it early.
async fn watched<T>(
    run: impl Future<Output = T>,
    control: &Control,
    title: String,
    total: Option<u64>,
    interrupt: &Interrupt,
) -> T {
    let mut run = std::pin::pin!(run);
    let progress = Progress::records(title, total);
    let mut seen = 0;
    let mut looks = tokio::time::interval(LOOK_EVERY);
    let mut interrupted = false;
    loop {
        tokio::select! {
            ended = &mut run => return ended,
            () = interrupt.wait(), if !interrupted => {
                interrupted = true;
                say("interrupted: the figures are those until now");
                control.stop();
            }
            _ = looks.tick() => {
                let done = control.done();
                progress.add(done - seen, 0);
                seen = done;
            }
        }
    }
}

/// Connects and makes sure that the topic is there.
async fn open(args: &BenchLoad, global: &Global) -> Result<Client, Failure> {
    let client = connect(global).await?;
    let known = client
        .list_topics()
        .await
        .map_err(|error| failure(&error))?;
    if known.iter().any(|topic| topic.name == args.topic) {
        return Ok(client);
    }
    let mut spec = TopicSpec::new(&args.topic);
    spec.partitions = args.partitions;
    spec.replicas = args.replicas;
    match client.create_topic(spec).await {
        Ok(topic) => say(format_args!(
            "created topic {} with {} partitions",
            topic.name,
            topic.partitions.len()
        )),
        Err(error) if error.kind() == ErrorKind::TopicExists => {}
        Err(error) => return Err(failure(&error)),
    }
    Ok(client)
}

fn load(args: &BenchLoad, global: &Global) -> Load {
    let records = match args.duration {
        None => Some(args.records.unwrap_or(RECORDS)),
        Some(_) => args.records,
    };
    Load {
        record_bytes: args.size,
        records,
        duration: args.duration,
        warmup: args.warmup,
        rate: args.rate.map(crate::text::rate::Rate::per_second),
        concurrency: usize::try_from(args.concurrency).unwrap_or(usize::MAX),
        linger: args.linger,
        compression: args.compression.into(),
        keys: args.keys,
        delivery_timeout: global.delivery_timeout(),
        ..Load::new(&args.topic)
    }
}

fn settings(args: &BenchLoad) -> Value {
    json!({
        "topic": args.topic,
        "record_bytes": args.size,
        "rate": args.rate.map(crate::text::rate::Rate::per_second),
        "concurrency": args.concurrency,
        "warmup": args.warmup,
        "linger_ms": args.linger.as_secs_f64() * 1000.0,
        "keys": args.keys,
    })
}

fn told(error: Error) -> Failure {
    match error {
        Error::Client(error) => failure(&error),
        error => Failure::error(error.to_string()),
    }
}

/// Records that failed: exit 3 or 1 if none were acknowledged, else 4.
fn ending(report: &qute_load::Report) -> Result<Exit, Failure> {
    let Some(error) = &report.first_error else {
        return Ok(Exit::Done);
    };
    let mut told = failure(error);
    if report.records > 0 {
        told.exit = Exit::Partly;
    }
    told.message = format!(
        "{} records failed, the first: {}",
        report.errors, told.message
    );
    Err(told)
}

/// The figures of a run, in the forms of `--output`.
#[derive(Serialize)]
#[serde(transparent)]
struct Figures {
    json: Value,
    #[serde(skip)]
    rows: Vec<Vec<String>>,
}

impl Figures {
    fn of(bench: &str, settings: Value, report: &qute_load::Report) -> Self {
        let mut rows = vec![
            ("records", report.records.to_string()),
            ("errors", report.errors.to_string()),
            ("seconds", format!("{:.3}", report.seconds)),
            ("records/s", format!("{:.0}", report.records_per_s())),
            ("MB/s", format!("{:.2}", report.mb_per_s())),
        ];
        let read = report.acknowledged.is_some();
        let kinds = [
            (&report.acknowledged, "acknowledged ms"),
            (
                &report.latency,
                if read { "read ms" } else { "acknowledged ms" },
            ),
        ];
        for (latencies, name) in kinds {
            let Some(latencies) = latencies else {
                continue;
            };
            let quantiles = latencies.quantiles();
            let shown = quantiles.map(|(name, ms)| format!("{} {ms:.2}", name.replace('_', ".")));
            rows.push((name, shown.join("  ")));
        }
        Self {
            json: report.to_json(bench, settings),
            rows: rows
                .into_iter()
                .map(|(name, value)| vec![name.to_owned(), value])
                .collect(),
        }
    }
}

impl Report for Figures {
    fn headings(&self) -> Vec<&'static str> {
        vec![]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        self.rows.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Output;

    fn report() -> qute_load::Report {
        let mut latency = qute_load::Latencies::new().unwrap();
        for millis in 1..=100 {
            latency.record(Duration::from_millis(millis));
        }
        qute_load::Report {
            records: 100,
            bytes: 1_000_000,
            errors: 0,
            first_error: None,
            seconds: 2.0,
            latency: Some(latency),
            acknowledged: None,
        }
    }

    #[test]
    fn figures_name_throughput_and_percentiles() {
        let figures = Figures::of("produce", json!({"topic": "t"}), &report());
        let table = output::render(&figures, Output::Raw).unwrap();
        assert!(
            table.starts_with(
                "records\t100\nerrors\t0\nseconds\t2.000\nrecords/s\t50\nMB/s\t0.50\n"
            )
        );
        assert!(table.contains("acknowledged ms\tp50 50.0"), "{table}");
        let json = output::render(&figures, Output::Jsonl).unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["bench"], "produce");
        assert_eq!(json["settings"]["topic"], "t");
        assert!(json["latency_ms"]["p99_9"].is_number());
    }
}
