//! The help of every command, held against snapshots: what people read changes only on purpose.
//! After such a change: `INSTA_UPDATE=always cargo test -p qute-cli --test help`.

#![allow(clippy::unwrap_used, reason = "test code")]

use clap::{Command, CommandFactory as _};

/// As wide as where there is no terminal.
const WIDTH: usize = 100;

fn all(command: &Command, words: &[String], seen: &mut Vec<(String, String)>) {
    let mut words = words.to_vec();
    words.push(command.get_name().to_owned());
    let mut shown = command.clone().term_width(WIDTH);
    let help = shown.render_long_help().to_string();
    // The last column of a wrapped table has nothing behind it.
    let help: Vec<&str> = help.lines().map(str::trim_end).collect();
    seen.push((words.join("-"), help.join("\n")));
    for subcommand in command
        .get_subcommands()
        .filter(|command| command.get_name() != "help")
    {
        all(subcommand, &words, seen);
    }
}

#[test]
fn help_of_every_command_is_as_it_was() {
    let mut root = qute_cli::args::Cli::command();
    root.build();
    let mut seen = Vec::new();
    all(&root, &[], &mut seen);
    assert!(seen.len() > 20, "{}", seen.len());
    for (name, help) in seen {
        insta::assert_snapshot!(name, help);
    }
}

#[test]
fn every_shell_gets_a_script_that_names_the_commands() {
    use clap::ValueEnum as _;
    for shell in clap_complete::Shell::value_variants() {
        let mut script = Vec::new();
        clap_complete::generate(
            *shell,
            &mut qute_cli::args::Cli::command(),
            "qute",
            &mut script,
        );
        let script = String::from_utf8(script).unwrap();
        for word in ["partition-of", "add-partitions", "doctor", "bootstrap"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
}
