//! `qute top`: brokers, topics and groups at a glance, as a live view or as one picture.
//!
//! ```text
//! look (client calls) --Sample--> Picture::between(before, now) --lists--> screen | plain text
//! ```
//!
//! | file | holds |
//! | --- | --- |
//! | `look.rs` | one look at the cluster through the client |
//! | `picture.rs` | what two looks say: rates, lag (pure) |
//! | `lists.rs` | the picture as lists of cells that can be sorted (pure) |
//! | `state.rs` | what the keys have chosen (pure) |
//! | `draw.rs` | the screen (pure) |
//! | `screen.rs` | the terminal: drawing, keys, signals, and leaving it as it was |
//! | `plain.rs` | one picture on standard output |

mod draw;
mod lists;
mod look;
mod picture;
mod plain;
mod screen;
mod state;

use std::time::Duration;

use qute_client::Client;

use crate::args::{Global, Output, Top};
use crate::connection::{config_for, nobody_answers};
use crate::exit::{Exit, Failure};
use crate::interrupt::Interrupt;
use crate::target::Target;
use crate::terminal;
use look::Looker;
use picture::Picture;

/// A leader that does not answer holds a look up by this much at most.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// Runs the command.
///
/// # Errors
/// Nobody answers, or the terminal can't be driven.
pub async fn run(args: Top, global: &Global, interrupt: &Interrupt) -> Result<Exit, Failure> {
    let timeout = global.timeout.unwrap_or(CALL_TIMEOUT);
    let target = Target::resolve(global)?;
    let connecting = Client::connect_with(config_for(&target, global)?.call_timeout(timeout));
    let client = tokio::select! {
        connected = connecting => connected.map_err(|error| nobody_answers(&error, &target))?,
        () = interrupt.wait() => return Ok(Exit::Done),
    };
    let live = !args.once && global.output == Output::Table && terminal::stdout_is_terminal();
    let mut looker = Looker::new(client);
    if live {
        return screen::run(looker, args.interval, interrupt).await;
    }
    let looks = async {
        let before = looker.look().await?;
        tokio::time::sleep(args.interval).await;
        let now = looker.look().await?;
        Ok(Picture::between(Some(&before), &now))
    };
    let picture = tokio::select! {
        picture = looks => picture.map_err(|error| nobody_answers(&error, &target))?,
        () = interrupt.wait() => return Ok(Exit::Done),
    };
    plain::print(&picture, global.output)
}
