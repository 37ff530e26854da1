//! `qute man` as `clap` reads it.

use std::path::PathBuf;

use clap::Args;

/// `qute man`
#[derive(Debug, Args)]
#[command(
    after_help = "Install all pages:  qute man --dir ~/.local/share/man/man1\n\
                        Read one at once:   qute man topic create | man -l -"
)]
pub struct Man {
    /// The command whose page is printed; without any, the page of qute itself
    #[arg(value_name = "COMMAND", conflicts_with = "dir")]
    pub command: Vec<String>,

    /// Write the pages of all commands into this directory instead
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}
