//! The terminal: drawing, keys, signals, and leaving it as it was. One task looks at the cluster,
//! this one draws; a look that hangs keeps no key waiting.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crossterm::event::{Event, EventStream};
use futures::StreamExt as _;
use ratatui::DefaultTerminal;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::task::AbortOnDropHandle;

use super::draw::{Scene, draw};
use super::lists::List;
use super::look::Looker;
use super::picture::Picture;
use super::state::{Reaction, State};
use crate::exit::{Exit, Failure};
use crate::interrupt::Interrupt;
use crate::terminal::Painter;

/// Age and trouble are shown anew this often, whatever comes.
const REDRAW: Duration = Duration::from_secs(1);

/// What the looking task has found out.
#[derive(Clone, Debug)]
struct Seen {
    picture: Arc<Picture>,
    at: Instant,
    /// Why there is no newer picture.
    failure: Option<String>,
}

/// Runs the view until a key or a signal ends it.
///
/// # Errors
/// The terminal can't be driven.
pub async fn run(
    looker: Looker,
    interval: Duration,
    interrupt: &Interrupt,
) -> Result<Exit, Failure> {
    let (tell, mut seen) = watch::channel(Seen {
        picture: Arc::default(),
        at: Instant::now(),
        failure: None,
    });
    let _looking = AbortOnDropHandle::new(tokio::spawn(keep_looking(looker, interval, tell)));
    let mut screen = Screen::open()?;
    let mut keys = EventStream::new();
    let mut redraw = tokio::time::interval(REDRAW);
    redraw.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut state = State::default();
    loop {
        let now = seen.borrow_and_update().clone();
        let lists = screen.show(&now, &state)?;
        loop {
            tokio::select! {
                biased;
                () = interrupt.wait() => return Ok(Exit::Done),
                event = keys.next() => match event {
                    Some(Ok(Event::Key(key))) => match state.key(key, &lists) {
                        Reaction::Quit => return Ok(Exit::Done),
                        Reaction::Redraw => break,
                        Reaction::Nothing => {}
                    },
                    Some(Ok(Event::Resize(..))) => break,
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Err(failed(&error)),
                    // Nobody is at the terminal any more.
                    None => return Ok(Exit::Done),
                },
                changed = seen.changed() => match changed {
                    Ok(()) => break,
                    Err(_) => return Err(Failure::error("looking at the cluster has ended")),
                },
                _ = redraw.tick() => break,
            }
        }
    }
}

/// Looks at the cluster until it is aborted.
async fn keep_looking(mut looker: Looker, interval: Duration, tell: watch::Sender<Seen>) {
    let mut looks = tokio::time::interval(interval);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut before = None;
    loop {
        looks.tick().await;
        match looker.look().await {
            Ok(now) => {
                let picture = Arc::new(Picture::between(before.as_ref(), &now));
                let at = now.at;
                before = Some(now);
                tell.send_replace(Seen {
                    picture,
                    at,
                    failure: None,
                });
            }
            Err(error) => tell.send_modify(|seen| seen.failure = Some(error.to_string())),
        }
    }
}

/// The terminal in full-screen mode; dropped, it is as it was. A panic restores it, too, before it
/// is said (`ratatui` takes care of that).
struct Screen {
    terminal: DefaultTerminal,
    colour: bool,
}

impl Screen {
    fn open() -> Result<Self, Failure> {
        let colour = Painter::stdout().is_on();
        match ratatui::try_init() {
            Ok(terminal) => Ok(Self { terminal, colour }),
            Err(error) => {
                ratatui::restore();
                Err(failed(&error))
            }
        }
    }

    /// Draws, and gives the lists as they are on the screen.
    fn show(&mut self, seen: &Seen, state: &State) -> Result<[List; 3], Failure> {
        let mut lists = List::all(&seen.picture);
        for (list, choice) in lists.iter_mut().zip(state.choices) {
            list.sort(choice.column, choice.reversed);
        }
        let scene = Scene {
            picture: &seen.picture,
            lists: &lists,
            state,
            age: seen.at.elapsed(),
            failure: seen.failure.as_deref(),
            colour: self.colour,
        };
        let drawn = self.terminal.draw(|frame| draw(frame, &scene));
        drawn.map_err(|error| failed(&error))?;
        Ok(lists)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

fn failed(error: &io::Error) -> Failure {
    Failure::error(format!("can't drive the terminal: {error}"))
        .hint("`qute top --once` prints one picture instead")
}
