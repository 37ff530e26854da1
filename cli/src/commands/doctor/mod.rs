//! `qute doctor`: looks at a cluster from here and says what is wrong and what to do about it.
//!
//! | file | holds |
//! | --- | --- |
//! | [`gather`] | asking: each address of the bootstrap list, each broker where it says it is, the topics |
//! | [`checks`] | what follows from the answers: pure |
//! | [`report`] | how that is printed |
//!
//! It only reads. Exit 0 if nothing fails; warnings are allowed and said.

mod checks;
mod gather;
mod report;

use qute_client::Client;

use crate::args::Global;
use crate::connection::{config_for, failure};
use crate::exit::{Exit, Failure};
use crate::output::say;
use crate::progress::waiting;
use crate::target::Target;
use report::Diagnosis;

/// Runs the command.
///
/// # Errors
/// There is no saying whom to ask, or standard output can't be written. What is wrong with the
/// cluster is no error but the result.
pub async fn run(global: &Global) -> Result<Exit, Failure> {
    let target = Target::resolve(global)?;
    let client = Client::lazy(config_for(&target, global)?).map_err(|error| failure(&error))?;
    let asked = gather::gather(&client, target.bootstrap.addresses());
    let findings = waiting("looking at the cluster", asked).await;
    let diagnosis = Diagnosis::of(checks::all(&findings, &target));
    diagnosis.print(global.output)?;
    say(format_args!(
        "{}{}",
        diagnosis.summary(),
        target.source.place()
    ));
    Ok(match diagnosis.failures {
        0 => Exit::Done,
        _ => Exit::Error,
    })
}
