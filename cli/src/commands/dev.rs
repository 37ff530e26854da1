//! `qute dev`: a cluster on this machine, all brokers in this process.
//!
//! Broker i keeps its data in `<data dir>/broker-<i>`, so that the same command finds the same
//! cluster again. Standard output gets one line, `ready <bootstrap list>`, once every broker
//! serves; SIGINT or SIGTERM stops them all in order.

use std::path::Path;
use std::time::Duration;

use futures::future::join_all;
use qute_broker::broker::{Broker, StartError};
use qute_broker::config::Config;

use crate::args::{Dev, Global, Output};
use crate::exit::{Exit, Failure};
use crate::interrupt::Interrupt;
use crate::output::{print_text, say};

/// How far HTTP ports are from the gRPC ones.
const HTTP_PORT_OFFSET: u16 = 80;
/// How long the brokers may take to form the cluster, without `--timeout`.
const FORM_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs the command until a signal comes.
///
/// # Errors
/// A broker does not start, the cluster does not form in time, or a broker fails later.
pub async fn run(args: &Dev, global: &Global, interrupt: &Interrupt) -> Result<Exit, Failure> {
    let (data_dir, temporary) = match &args.data_dir {
        Some(dir) => (dir.clone(), None),
        None => {
            let dir = tempfile::Builder::new()
                .prefix("qute-dev-")
                .tempdir()
                .map_err(|error| {
                    Failure::error(format!("can't make a temporary directory: {error}"))
                        .hint("name one with --data-dir")
                })?;
            (dir.path().to_owned(), Some(dir))
        }
    };
    let brokers = tokio::select! {
        brokers = start_all(configs(args, &data_dir)) => brokers?,
        () = interrupt.wait() => return Ok(Exit::Done),
    };
    let timeout = global.timeout.unwrap_or(FORM_TIMEOUT);
    let ended = tokio::select! {
        ended = serve(&brokers, timeout, global.output) => ended,
        () = interrupt.wait() => Ok(Exit::Done),
    };
    join_all(brokers.into_iter().map(Broker::shutdown)).await;
    if let Some(dir) = temporary
        && let Err(error) = dir.close()
    {
        say(format_args!(
            "can't remove the temporary directory: {error}"
        ));
    }
    ended
}

/// The settings of each broker.
fn configs(args: &Dev, data_dir: &Path) -> Vec<Config> {
    let address = |port: u16| format!("127.0.0.1:{port}");
    let seeds: Vec<String> = (0..args.brokers).map(|i| address(args.port + i)).collect();
    let config = |i: u16| {
        let mut config = Config {
            name: format!("dev-{i}"),
            data_dir: data_dir.join(format!("broker-{i}")),
            listen: address(args.port + i),
            http: address(args.port + HTTP_PORT_OFFSET + i),
            ..Config::default()
        };
        // A broker without seeds is a cluster of one.
        if args.brokers > 1 {
            config.seeds.clone_from(&seeds);
            config.expect = u32::from(args.brokers);
        }
        config
    };
    (0..args.brokers).map(config).collect()
}

async fn start_all(configs: Vec<Config>) -> Result<Vec<Broker>, Failure> {
    let started = join_all(configs.into_iter().map(Broker::start)).await;
    let mut brokers = Vec::new();
    let mut failed = None;
    for result in started {
        match result {
            Ok(broker) => brokers.push(broker),
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    match failed {
        None => Ok(brokers),
        Some(error) => {
            join_all(brokers.into_iter().map(Broker::shutdown)).await;
            Err(not_started(&error))
        }
    }
}

fn not_started(error: &StartError) -> Failure {
    match error {
        // The broker's own advice names flags that this command doesn't have.
        StartError::Bind {
            purpose,
            address,
            source,
            ..
        } => Failure::error(format!("can't listen on {address} for {purpose}: {source}"))
            .hint("is another cluster running? choose other ports with --port"),
        other => Failure::error(other.to_string())
            .hint("--data-dir names another directory, -v says more"),
    }
}

/// Waits until all serve, says so, and returns only if that or a broker fails.
async fn serve(brokers: &[Broker], timeout: Duration, output: Output) -> Result<Exit, Failure> {
    let forming = join_all(brokers.iter().map(|broker| broker.ready(timeout)));
    let ready = tokio::select! {
        ready = forming => ready,
        failure = any_fatal(brokers) => return Err(failure),
    };
    let waits: Vec<String> = brokers
        .iter()
        .zip(ready)
        .filter_map(|(broker, ready)| {
            let waits = ready.err()?;
            Some(format!("{} waits: {}", broker.address(), waits.join(", ")))
        })
        .collect();
    if !waits.is_empty() {
        return Err(Failure::timeout(format!(
            "the cluster did not form within {}: {}",
            humantime::format_duration(timeout),
            waits.join("; ")
        ))
        .hint("a directory that held more brokers needs most of them: give the same --brokers as before"));
    }
    let addresses: Vec<&str> = brokers.iter().map(Broker::address).collect();
    // Whoever started the cluster may have stopped reading; that ends nothing.
    print_text(&match output {
        Output::Json | Output::Jsonl => format!("{}\n", serde_json::json!({ "ready": addresses })),
        Output::Table | Output::Raw => format!("ready {}\n", addresses.join(",")),
    })?;
    Err(any_fatal(brokers).await)
}

async fn any_fatal(brokers: &[Broker]) -> Failure {
    let fatal = brokers.iter().map(|broker| {
        Box::pin(async move {
            let reason = broker.fatal().await;
            Failure::error(format!("broker {}: {reason}", broker.address()))
        })
    });
    let (failure, _, _) = futures::future::select_all(fatal).await;
    failure
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(brokers: u16) -> Dev {
        Dev {
            brokers,
            data_dir: None,
            port: 7700,
        }
    }

    #[test]
    fn single_broker_has_no_seeds() {
        let configs = configs(&args(1), Path::new("d"));
        assert_eq!(configs.len(), 1);
        assert_eq!(configs[0].seeds, Vec::<String>::new());
        assert_eq!(configs[0].expect, 0);
        configs[0].check().unwrap();
    }

    #[test]
    fn brokers_get_consecutive_ports_and_directories_of_their_own() {
        let configs = configs(&args(3), Path::new("d"));
        assert_eq!(configs[2].listen, "127.0.0.1:7702");
        assert_eq!(configs[2].http, "127.0.0.1:7782");
        assert_eq!(configs[2].data_dir, Path::new("d/broker-2"));
        for config in &configs {
            assert_eq!(
                config.seeds,
                ["127.0.0.1:7700", "127.0.0.1:7701", "127.0.0.1:7702"]
            );
            assert_eq!(config.expect, 3);
            config.check().unwrap();
        }
    }
}
