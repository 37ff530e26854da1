//! The `qute` command: Qute at a terminal.
//!
//! A library, so that the parts can be tested; the binary only calls [`main`].
//!
//! | module | holds |
//! | --- | --- |
//! | [`args`] | the command line, checked before anything connects |
//! | [`text`] | the small languages in it: formats, positions, durations |
//! | [`commands`] | one module per command |
//! | [`target`] | which cluster is meant, and who said so |
//! | [`contexts`] | saved clusters |
//! | [`connection`] | reaching the cluster; what its errors mean here |
//! | [`lines`] | standard input, split into lines |
//! | [`sink`] | standard output for streams of records |
//! | [`output`] | results as tables and JSON |
//! | [`terminal`] | whether colours and moving lines are welcome |
//! | [`progress`] | signs of life while something takes long |
//! | [`suggest`] | which name was meant by one that doesn't exist |
//! | [`interrupt`] | SIGINT and SIGTERM |
//! | [`logging`] | what the libraries underneath say |
//! | [`exit`] | exit codes and the line an error becomes |
//!
//! Data goes to standard output, everything else to standard error. A command returns its exit
//! code or a [`exit::Failure`], which is printed here and nowhere else.

pub mod args;
pub mod commands;
pub mod connection;
pub mod contexts;
pub mod exit;
pub mod interrupt;
pub mod lines;
pub mod logging;
pub mod output;
pub mod progress;
pub mod sink;
pub mod suggest;
pub mod target;
pub mod terminal;
pub mod text;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::CommandFactory as _;

use args::{Cli, Command, Global};
use exit::{Exit, Failure};
use interrupt::Interrupt;

/// Runs `qute` with these arguments, the program's name first.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::read(args) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come this way too, with exit code 0. A closed output is no news.
            let _ = error.print();
            return u8::try_from(error.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from);
        }
    };
    match run(cli) {
        Ok(exit) => exit.into(),
        Err(failure) => {
            output::say(failure.told(terminal::Painter::stderr()));
            failure.exit.into()
        }
    }
}

fn run(cli: Cli) -> Result<Exit, Failure> {
    match cli.command {
        Command::PartitionOf(args) => commands::partition_of::run(&args, &cli.global),
        Command::Completion { shell } => completion(shell),
        Command::Context(command) => commands::context::run(command, &cli.global),
        Command::Man(args) => commands::man::run(&args),
        command => {
            let quiet = match &command {
                Command::Dev(_) => "warn,openraft=error,foca=error",
                // What the client has to say it says in its errors.
                _ => "off",
            };
            logging::start(cli.global.verbose, quiet);
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .enable_all()
                .build()
                .map_err(|error| Failure::error(format!("can't start the runtime: {error}")))?;
            let result = runtime.block_on(connected(command, &cli.global));
            // Nothing that is still running matters to the answer.
            runtime.shutdown_background();
            result
        }
    }
}

async fn connected(command: Command, global: &Global) -> Result<Exit, Failure> {
    let interrupt = Interrupt::listen()?;
    match command {
        Command::Dev(args) => commands::dev::run(&args, global, &interrupt).await,
        Command::Topic(command) => commands::topic::run(command, global).await,
        Command::Produce(args) => commands::produce::run(args, global, &interrupt).await,
        Command::Consume(args) => commands::consume::run(args, global, &interrupt).await,
        Command::Cluster(command) => commands::cluster::run(command, global).await,
        Command::Group(command) => commands::group::run(command, global).await,
        Command::Top(args) => commands::top::run(args, global, &interrupt).await,
        Command::Bench(command) => commands::bench::run(command, global, &interrupt).await,
        Command::Doctor => commands::doctor::run(global).await,
        Command::Context(command) => commands::context::run(command, global),
        Command::Man(args) => commands::man::run(&args),
        Command::PartitionOf(args) => commands::partition_of::run(&args, global),
        Command::Completion { shell } => completion(shell),
    }
}

fn completion(shell: clap_complete::Shell) -> Result<Exit, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "qute", &mut script);
    output::print_text(&String::from_utf8_lossy(&script))
}
