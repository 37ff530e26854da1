//! The `qute-broker` daemon.
//!
//! Exit codes: 0 after a clean shutdown (SIGTERM, SIGINT), 1 on a fatal error, 2 on wrong usage.

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use qute_broker::broker::Broker;
use qute_broker::config::{Config, Overrides};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// A broker of Qute, a distributed message queue.
///
/// Settings come from defaults < the file < QUTE_* variables < flags. With no flags at all it is
/// a cluster of one on 127.0.0.1:7700.
#[derive(Parser)]
#[command(name = "qute-broker", version)]
struct Args {
    /// Settings file (TOML)
    #[arg(long, value_name = "FILE", env = "QUTE_CONFIG")]
    config: Option<PathBuf>,
    /// Name that people see [default: host name]
    #[arg(long, value_name = "N")]
    name: Option<String>,
    /// Data directory, one broker each [default: ./qute-data]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<String>,
    /// Where gRPC is served [default: 127.0.0.1:7700]
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// Address told to clients [default: the listening address]
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
    /// Address told to brokers [default: the one told to clients]
    #[arg(long, value_name = "HOST:PORT")]
    advertise_peers: Option<String>,
    /// Where gossip is received, UDP [default: the listening address]
    #[arg(long, value_name = "HOST:PORT")]
    gossip: Option<String>,
    /// Where /metrics, /healthz and /readyz are served [default: 127.0.0.1:7780]
    #[arg(long, value_name = "HOST:PORT")]
    http: Option<String>,
    /// Peers' TCP addresses, comma-separated; may include its own
    #[arg(long, value_name = "HOST:PORT,..")]
    seeds: Option<String>,
    /// How many brokers found the cluster, this one included; without it a broker with seeds joins
    #[arg(long, value_name = "N")]
    expect: Option<u32>,
    /// Failure domain of this broker
    #[arg(long, value_name = "R")]
    rack: Option<String>,
}

impl Args {
    fn overrides(&self) -> Overrides {
        let expect = self.expect.map(|n| n.to_string());
        let given = [
            ("name", &self.name),
            ("data_dir", &self.data_dir),
            ("listen", &self.listen),
            ("advertise", &self.advertise),
            ("advertise_peers", &self.advertise_peers),
            ("gossip", &self.gossip),
            ("http", &self.http),
            ("seeds", &self.seeds),
            ("expect", &expect),
            ("rack", &self.rack),
        ];
        let values = given
            .into_iter()
            .filter_map(|(key, value)| Some((key, value.clone()?)))
            .collect();
        Overrides { values }
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let filter = EnvFilter::try_from_env("QUTE_LOG")
        .unwrap_or_else(|_| EnvFilter::new("info,openraft=error,foca=warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();

    let environment = std::env::vars().filter(|(key, _)| key != "QUTE_CONFIG");
    let config = match Config::load(args.config.as_deref(), environment, &args.overrides()) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("qute-broker: {error}");
            return ExitCode::from(2);
        }
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("qute-broker: cannot start the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(run(config));
    // Whatever still blocks (a read of a slow disk) must not keep a stopped broker alive.
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    code
}

async fn run(config: Config) -> ExitCode {
    let (mut terminate, mut interrupt) = match (
        signal(SignalKind::terminate()),
        signal(SignalKind::interrupt()),
    ) {
        (Ok(terminate), Ok(interrupt)) => (terminate, interrupt),
        (Err(error), _) | (_, Err(error)) => {
            eprintln!("qute-broker: cannot listen for signals: {error}");
            return ExitCode::FAILURE;
        }
    };
    let broker = tokio::select! {
        started = Broker::start(config) => match started {
            Ok(broker) => broker,
            Err(error) => {
                eprintln!("qute-broker: {error}");
                return ExitCode::FAILURE;
            }
        },
        _ = terminate.recv() => return ExitCode::SUCCESS,
        _ = interrupt.recv() => return ExitCode::SUCCESS,
    };
    let fatal = tokio::select! {
        _ = terminate.recv() => None,
        _ = interrupt.recv() => None,
        fault = broker.fatal() => Some(fault),
    };
    broker.shutdown().await;
    match fatal {
        None => ExitCode::SUCCESS,
        Some(fault) => {
            eprintln!("qute-broker: {fault}");
            ExitCode::FAILURE
        }
    }
}
