//! `qute group list|describe|lag|reset|delete`.
//!
//! | file | holds |
//! | --- | --- |
//! | `report.rs` | what is printed |

mod report;

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use qute_client::group::{GroupAdmin, PartitionLag, ResetPlan, ResetTo};
use qute_client::{Client, Error, ErrorKind};

use crate::args::{self, Global, Output, Reset};
use crate::connection::{connect, explain, failure};
use crate::exit::{Exit, Failure};
use crate::output::{self, say};
use crate::suggest;
use crate::text::offsets_file;
use crate::text::reset_target::ResetTarget;
use report::{Described, Listed, Move, Partition, Planned};

/// Bytes of a file of offsets, at most: more partitions than a group may have.
const FILE_BYTES_MAX: u64 = 16 << 20;
/// Lines on standard error about partitions whose ends are not known, at most.
const NOTES_MAX: usize = 10;

/// Runs the command.
///
/// # Errors
/// The cluster refuses, or does not answer in time.
pub async fn run(command: args::Group, global: &Global) -> Result<Exit, Failure> {
    match command {
        args::Group::List => list(global).await,
        args::Group::Describe { group } => describe(&group, global).await,
        args::Group::Lag { group } => lag(&group, global).await,
        args::Group::Reset(reset) => reset_offsets(&reset, global).await,
        args::Group::Delete { group } => delete(&group, global).await,
    }
}

async fn list(global: &Global) -> Result<Exit, Failure> {
    let client = connect(global).await?;
    let groups = client.groups().list().await;
    let groups = groups.map_err(|error| failure(&error))?;
    let groups: Vec<Listed> = groups.iter().map(Listed::from).collect();
    output::print(&groups, global.output)
}

async fn describe(group: &str, global: &Global) -> Result<Exit, Failure> {
    let client = connect(global).await?;
    let groups = client.groups();
    let asked = tokio::try_join!(groups.describe(group), groups.lag(group));
    let (described, lags) = match asked {
        Ok(told) => told,
        Err(error) => return Err(refused(&client, group, &error).await),
    };
    // Where the coordinator is, is a courtesy.
    let brokers = client.brokers().await.unwrap_or_default();
    let coordinator = brokers
        .into_iter()
        .find(|broker| broker.id == described.coordinator);
    let address = coordinator.map(|broker| broker.address);
    note_unknown_ends(&lags);
    let described = Described::new(&described, &lags, address);
    if global.output != Output::Table {
        return output::print(&described, global.output);
    }
    let text = tables(&described)
        .map_err(|error| Failure::error(format!("can't print the answer: {error}")))?;
    output::print_text(&text)
}

/// The group, its members, its partitions.
fn tables(described: &Described) -> serde_json::Result<String> {
    let mut text = String::new();
    for (name, value) in described.summary() {
        let value = value.replace(char::is_control, "?");
        text.push_str(&format!("{name:<13}{value}\n"));
    }
    if !described.members.is_empty() {
        text.push('\n');
        text.push_str(&output::render(&described.members, Output::Table)?);
    }
    if !described.partitions.is_empty() {
        text.push('\n');
        text.push_str(&output::render(&described.partitions, Output::Table)?);
    }
    Ok(text)
}

async fn lag(group: &str, global: &Global) -> Result<Exit, Failure> {
    let client = connect(global).await?;
    let lags = match client.groups().lag(group).await {
        Ok(lags) => lags,
        Err(error) => return Err(refused(&client, group, &error).await),
    };
    note_unknown_ends(&lags);
    let partitions: Vec<Partition> = lags.iter().map(Partition::from).collect();
    output::print(&partitions, global.output)
}

fn note_unknown_ends(lags: &[PartitionLag]) {
    let unknown = || lags.iter().filter_map(|lag| lag.error.as_ref());
    for error in unknown().take(NOTES_MAX) {
        say(format_args!("note: {error}"));
    }
    if let Some(more @ 1..) = unknown().count().checked_sub(NOTES_MAX) {
        say(format_args!("note: {more} more ends are not known"));
    }
}

async fn delete(group: &str, global: &Global) -> Result<Exit, Failure> {
    let client = connect(global).await?;
    match client.groups().delete(group).await {
        Ok(()) => {
            say(format_args!("deleted group {group}"));
            Ok(Exit::Done)
        }
        Err(error) => Err(refused(&client, group, &error).await),
    }
}

async fn reset_offsets(args: &Reset, global: &Global) -> Result<Exit, Failure> {
    // Before anything connects: what makes no sense needs no cluster.
    let plan = plan(args)?;
    let client = connect(global).await?;
    match reset(&client.groups(), args, plan).await {
        Ok(planned) => {
            let exit = output::print(&planned, global.output)?;
            say(said(&planned));
            Ok(exit)
        }
        Err(error) => {
            let mut told = refused(&client, &args.group, &error).await;
            if error.kind() == ErrorKind::GroupNotEmpty {
                told.hint = Some(
                    "stop its members first, or --force has them begin anew at the offsets set"
                        .to_owned(),
                );
            }
            Err(told)
        }
    }
}

async fn reset(groups: &GroupAdmin, args: &Reset, plan: ResetPlan) -> Result<Planned, Error> {
    let mut planned = groups.reset(&args.group, plan).await?;
    if args.force {
        planned = planned.force();
    }
    if args.execute {
        planned.execute().await?;
    }
    Ok(Planned {
        group: args.group.clone(),
        executed: args.execute,
        moves: planned.moves().iter().map(Move::from).collect(),
    })
}

/// The last word on a reset.
fn said(planned: &Planned) -> String {
    let count = planned.moves.len();
    let partitions = if count == 1 {
        "partition"
    } else {
        "partitions"
    };
    if planned.executed {
        return format!("reset {count} {partitions} of group {}", planned.group);
    }
    let held = planned.moves.iter().filter(|it| it.member.is_some());
    match held.count() {
        0 => "nothing was changed: --execute does it".to_owned(),
        held => format!(
            "nothing was changed: --execute does it, once the members that hold {held} of the \
             {count} {partitions} have stopped, or with --force"
        ),
    }
}

fn plan(args: &Reset) -> Result<ResetPlan, Failure> {
    if !args.partitions.is_empty() && args.topics.len() > 1 {
        return Err(
            Failure::usage("-p with several topics: whose partitions are meant?")
                .hint("reset one topic at a time, or use --from-file"),
        );
    }
    let to = match (args.to, &args.from_file) {
        (_, Some(path)) => ResetTo::Offsets(saved_offsets(path)?),
        (Some(to), None) => target(to),
        (None, None) => return Err(Failure::usage("where to? give --to or --from-file")),
    };
    let mut plan = ResetPlan::new(to);
    for topic in &args.topics {
        match args.partitions.as_slice() {
            [] => plan = plan.topic(topic),
            partitions => {
                for partition in partitions {
                    plan = plan.partition(topic, *partition);
                }
            }
        }
    }
    Ok(plan)
}

fn target(to: ResetTarget) -> ResetTo {
    match to {
        ResetTarget::Start => ResetTo::Start,
        ResetTarget::End => ResetTo::End,
        ResetTarget::Offset(offset) => ResetTo::Offset(offset),
        ResetTarget::Shift(by) => ResetTo::Shift(by),
        ResetTarget::Forget => ResetTo::Forget,
        ResetTarget::Time(position) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            let now_ms = now.unwrap_or_default().as_millis();
            let now_ms = u64::try_from(now_ms).unwrap_or(u64::MAX);
            ResetTo::TimeMs(position.time_ms(now_ms).unwrap_or(0))
        }
    }
}

fn saved_offsets(path: &Path) -> Result<offsets_file::Offsets, Failure> {
    use std::io::Read as _;
    let shown = path.display();
    let mut text = String::new();
    let read = std::fs::File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX).read_to_string(&mut text));
    read.map_err(|error| Failure::error(format!("can't read {shown}: {error}")))?;
    offsets_file::parse(&text).map_err(|error| Failure::error(format!("{shown}: {error}")))
}

/// How an error about a group ends the command: one that does not exist is answered with the one that
/// may have been meant.
async fn refused(client: &Client, group: &str, error: &Error) -> Failure {
    let mut told = explain(client, error).await;
    match error.kind() {
        ErrorKind::UnknownGroup => {
            told.message = format!("group '{group}' does not exist");
            let groups = client.groups().list().await.unwrap_or_default();
            let names = groups.iter().map(|listed| listed.group.as_str());
            let list = "`qute group list` shows what there is";
            told.hint = Some(match suggest::did_you_mean(group, names) {
                Some(question) => format!("{question} {list}"),
                None => list.to_owned(),
            });
        }
        ErrorKind::GroupNotEmpty => {
            told.hint = Some(format!(
                "`qute group describe {group}` shows its members: stop them first"
            ));
        }
        _ => {}
    }
    told
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn args(edit: impl Fn(&mut Reset)) -> Reset {
        let mut args = Reset {
            group: "g".to_owned(),
            to: Some(ResetTarget::Start),
            topics: vec!["a".to_owned()],
            partitions: vec![],
            from_file: None,
            execute: false,
            force: false,
        };
        edit(&mut args);
        args
    }

    #[test]
    fn plan_is_for_the_partitions_named() {
        let all = plan(&args(|_| {})).unwrap();
        assert_eq!(all, ResetPlan::new(ResetTo::Start).topic("a"));
        let some = plan(&args(|args| args.partitions = vec![2, 0])).unwrap();
        let expected = ResetPlan::new(ResetTo::Start).partition("a", 0);
        assert_eq!(some, expected.partition("a", 2));
        let unclear = plan(&args(|args| {
            args.partitions = vec![1];
            args.topics.push("b".to_owned());
        }));
        assert_eq!(unclear.unwrap_err().exit, Exit::Usage);
    }

    #[test]
    fn plan_from_a_file_is_for_what_it_names() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"a 0 5\nb 1 6\n").unwrap();
        let from = |path: &Path| {
            plan(&args(|args| {
                args.to = None;
                args.topics.clear();
                args.from_file = Some(path.to_owned());
            }))
        };
        let offsets = [(("a".to_owned(), 0), 5), (("b".to_owned(), 1), 6)];
        let expected = ResetPlan::new(ResetTo::Offsets(offsets.into()));
        assert_eq!(from(file.path()), Ok(expected));
        let missing = from(Path::new("/no/such")).unwrap_err();
        assert!(missing.message.contains("/no/such"));
        file.write_all(b"c\n").unwrap();
        let wrong = from(file.path()).unwrap_err();
        assert!(wrong.message.contains("line 3"), "{wrong}");
    }

    #[test]
    fn last_word_on_a_reset_says_whether_it_was_done_and_what_stands_in_the_way() {
        let planned = |executed, members: &[Option<&str>]| Planned {
            group: "g".to_owned(),
            executed,
            moves: members
                .iter()
                .map(|member| Move {
                    topic: None,
                    topic_id: String::new(),
                    partition: 0,
                    from: None,
                    to: None,
                    clamped: false,
                    member: member.map(str::to_owned),
                })
                .collect(),
        };
        assert_eq!(
            said(&planned(true, &[None])),
            "reset 1 partition of group g"
        );
        assert!(said(&planned(false, &[None, None])).ends_with("--execute does it"));
        assert!(said(&planned(false, &[None, Some("m")])).contains("hold 1 of the 2 partitions"));
    }
}
