//! `qute man`: the help of every command as manual pages.

use std::fs;
use std::path::Path;

use clap::{Command, CommandFactory as _};

use crate::args::{Cli, Man};
use crate::exit::{Exit, Failure};
use crate::output::{print_text, say};
use crate::suggest;

/// Runs the command.
///
/// # Errors
/// There is no such command, or the pages can't be written.
pub fn run(args: &Man) -> Result<Exit, Failure> {
    let root = tree();
    let Some(dir) = &args.dir else {
        let page = page(find(&root, &args.command)?)?;
        return print_text(&String::from_utf8_lossy(&page));
    };
    let mut written = 0usize;
    write_all(&root, dir, &mut written).map_err(|(path, error)| {
        Failure::error(format!("can't write {path}: {error}")).hint("--dir names another place")
    })?;
    say(format_args!(
        "wrote {written} manual pages to {}",
        dir.display()
    ));
    Ok(Exit::Done)
}

/// All commands, as `clap` knows them once global flags have reached each.
fn tree() -> Command {
    let mut root = Cli::command().disable_help_subcommand(true);
    root.build();
    root
}

fn find<'a>(root: &'a Command, words: &[String]) -> Result<&'a Command, Failure> {
    let mut command = root;
    for word in words {
        command = command.find_subcommand(word).ok_or_else(|| {
            let failure = Failure::usage(format!("{} has no command '{word}'", command.get_name()));
            let names = command.get_subcommands().map(Command::get_name);
            let hint = suggest::did_you_mean(word, names);
            failure.hint(hint.unwrap_or_else(|| "`qute --help` shows the commands".to_owned()))
        })?;
    }
    Ok(command)
}

fn page(command: &Command) -> Result<Vec<u8>, Failure> {
    let mut page = Vec::new();
    man(command)
        .render(&mut page)
        .map_err(|error| Failure::error(format!("can't write the page: {error}")))?;
    Ok(page)
}

fn man(command: &Command) -> clap_mangen::Man {
    clap_mangen::Man::new(command.clone())
        .source(concat!("qute ", env!("CARGO_PKG_VERSION")))
        .manual("Qute Manual")
}

fn write_all(
    command: &Command,
    dir: &Path,
    written: &mut usize,
) -> Result<(), (String, std::io::Error)> {
    let at = |error| (dir.display().to_string(), error);
    fs::create_dir_all(dir).map_err(at)?;
    for subcommand in command
        .get_subcommands()
        .filter(|command| !command.is_hide_set())
    {
        write_all(subcommand, dir, written)?;
    }
    man(command).generate_to(dir).map_err(at)?;
    *written += 1;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_with_its_flags() {
        let dir = tempfile::tempdir().unwrap();
        let mut written = 0;
        write_all(&tree(), dir.path(), &mut written).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), written);
        let page = fs::read_to_string(dir.path().join("qute-topic-create.1")).unwrap();
        for part in [
            "qute\\-topic\\-create",
            "\\-\\-partitions",
            "\\-\\-bootstrap",
            "Qute Manual",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
    }

    #[test]
    fn page_of_an_unknown_command_is_a_usage_error_with_a_suggestion() {
        let words = |words: &[&str]| {
            words
                .iter()
                .map(|&word| word.to_owned())
                .collect::<Vec<_>>()
        };
        let root = tree();
        assert_eq!(
            find(&root, &words(&["topic", "list"])).unwrap().get_name(),
            "list"
        );
        let failure = find(&root, &words(&["topic", "lits"])).unwrap_err();
        assert_eq!(failure.exit, Exit::Usage);
        assert!(
            failure.to_string().contains("did you mean 'list'?"),
            "{failure}"
        );
    }
}
