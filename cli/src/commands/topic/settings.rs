//! `qute topic alter` and `qute topic config`: the settings of a topic, what they are by default, and
//! where each comes from.
//!
//! A topic carries only the settings that were given to it. The defaults are those of this program's
//! version, which are the brokers' if they are of the same one (`qute doctor` says so).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use indicatif::BinaryBytes;
use qute_broker::controller::settings::defaults;
use qute_client::{Client, Error, ErrorKind, TopicChanges, TopicDescription};
use serde::Serialize;

use super::checked;
use crate::args::{Global, Output};
use crate::connection::{connect_to, explain};
use crate::exit::{Exit, Failure};
use crate::output::{self, Report, Tone, say};
use crate::progress::waiting;
use crate::suggest;

/// One setting of a topic, as `topic config` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Setting {
    name: String,
    value: String,
    /// What it is where it is not given; null if this version does not know the setting.
    default: Option<String>,
    /// `topic` or `default`.
    source: &'static str,
}

/// The pairs by name.
///
/// # Errors
/// One setting given twice with different values.
pub(super) fn unique(
    pairs: Vec<(String, String)>,
    flag: &str,
) -> Result<BTreeMap<String, String>, Failure> {
    let mut settings = BTreeMap::new();
    for (key, value) in pairs {
        if let Some(before) = settings.insert(key.clone(), value.clone())
            && before != value
        {
            return Err(Failure::usage(format!(
                "{flag} {key} is given twice, as {before} and as {value}"
            ))
            .hint("give it once"));
        }
    }
    Ok(settings)
}

pub(super) async fn alter(
    name: &str,
    set: Vec<(String, String)>,
    unset: Vec<String>,
    global: &Global,
) -> Result<Exit, Failure> {
    let changes = changes(unique(set, "--set")?, unset)?;
    let touched: BTreeSet<String> = changes.set.keys().chain(&changes.unset).cloned().collect();
    let (topic, place) = change(name, changes, global).await?;
    let settings = settings_of(&topic);
    match global.output {
        Output::Json | Output::Jsonl => output::print(&settings, global.output),
        Output::Table | Output::Raw => {
            let touched = settings
                .iter()
                .filter(|setting| touched.contains(&setting.name));
            let told: Vec<String> = touched.map(Setting::told).collect();
            say(format_args!("topic {name}{place}: {}", told.join(", ")));
            Ok(Exit::Done)
        }
    }
}

/// # Errors
/// One setting both set and unset.
fn changes(set: BTreeMap<String, String>, unset: Vec<String>) -> Result<TopicChanges, Failure> {
    let mut changes = TopicChanges::new();
    for key in unset {
        if set.contains_key(&key) {
            return Err(Failure::usage(format!("{key} is both set and unset"))
                .hint("--unset puts it back to its default, --set gives it a value: choose one"));
        }
        changes = changes.unset(key);
    }
    Ok(set
        .into_iter()
        .fold(changes, |changes, (key, value)| changes.set(key, value)))
}

pub(super) async fn config(name: &str, named: &[String], global: &Global) -> Result<Exit, Failure> {
    let mut pairs = Vec::new();
    let mut keys = Vec::new();
    for setting in named {
        let (key, value) = match setting.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (setting.as_str(), None),
        };
        if key.is_empty() {
            return Err(Failure::usage(format!("{setting:?} names no setting"))
                .hint("write K to show a setting, K=V to set it"));
        }
        keys.push(key.to_owned());
        pairs.extend(value.map(|value| (key.to_owned(), value.to_owned())));
    }
    let set = unique(pairs, "setting")?;
    let topic = if set.is_empty() {
        let (_, client) = connect_to(global).await?;
        let describing = client.describe_topic(name);
        match waiting(format!("describing topic {name}"), describing).await {
            Ok(topic) => topic,
            Err(error) => return Err(explain(&client, &error).await),
        }
    } else {
        change(name, changes(set, Vec::new())?, global).await?.0
    };
    output::print(&chosen(settings_of(&topic), &keys)?, global.output)
}

/// Those that are named, or all if none is.
fn chosen(all: Vec<Setting>, keys: &[String]) -> Result<Vec<Setting>, Failure> {
    if let Some(unknown) = keys
        .iter()
        .find(|key| !all.iter().any(|setting| setting.name == **key))
    {
        let names: Vec<&str> = all.iter().map(|setting| setting.name.as_str()).collect();
        let question = suggest::did_you_mean(unknown, names.iter().copied());
        let hint = question.unwrap_or_else(|| format!("the settings are {}", names.join(", ")));
        return Err(Failure::error(format!("there is no topic setting '{unknown}'")).hint(hint));
    }
    let wanted = |setting: &Setting| keys.is_empty() || keys.contains(&setting.name);
    Ok(all.into_iter().filter(wanted).collect())
}

async fn change(
    name: &str,
    changes: TopicChanges,
    global: &Global,
) -> Result<(TopicDescription, String), Failure> {
    checked(name)?;
    let (target, client) = connect_to(global).await?;
    let altering = client.alter_topic(name, changes);
    match waiting(format!("changing topic {name}"), altering).await {
        Ok(topic) => Ok((topic, target.source.place())),
        Err(error) => Err(refused(&client, name, &error).await),
    }
}

async fn refused(client: &Client, name: &str, error: &Error) -> Failure {
    let told = explain(client, error).await;
    match error.kind() {
        ErrorKind::InvalidArgument => told.hint(format!(
            "nothing was changed; `qute topic config {name}` shows the settings"
        )),
        _ => told,
    }
}

/// All settings of the topic, by name, also those that this version does not know.
fn settings_of(topic: &TopicDescription) -> Vec<Setting> {
    let defaults = defaults();
    let names: BTreeSet<&str> = topic
        .config
        .keys()
        .map(String::as_str)
        .chain(defaults.keys().copied())
        .collect();
    let setting = |name: &str| {
        let default = defaults.get(name).cloned();
        let (value, source) = match topic.config.get(name) {
            Some(value) => (value.clone(), "topic"),
            None => (default.clone().unwrap_or_default(), "default"),
        };
        Setting {
            name: name.to_owned(),
            value,
            default,
            source,
        }
    };
    names.into_iter().map(setting).collect()
}

impl Setting {
    /// `retention_ms is 172800000 (2days)`, for people.
    fn told(&self) -> String {
        let means = match self.means() {
            means if means.is_empty() => String::new(),
            means => format!(" ({means})"),
        };
        let default = if self.source == "default" {
            ", its default"
        } else {
            ""
        };
        format!("{} is {}{means}{default}", self.name, self.value)
    }

    /// The value with a unit, where the name says which.
    fn means(&self) -> String {
        if self.value == "-1" {
            return "no limit".to_owned();
        }
        let Ok(number) = self.value.parse::<u64>() else {
            return String::new();
        };
        if self.name.ends_with("_ms") {
            humantime::format_duration(Duration::from_millis(number)).to_string()
        } else if self.name.contains("bytes") {
            BinaryBytes(number).to_string()
        } else {
            String::new()
        }
    }
}

impl Report for Vec<Setting> {
    fn headings(&self) -> Vec<&'static str> {
        vec!["SETTING", "VALUE", "MEANS", "FROM", "DEFAULT"]
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let row = |setting: &Setting| {
            vec![
                setting.name.clone(),
                setting.value.clone(),
                setting.means(),
                setting.source.to_owned(),
                setting.default.clone().unwrap_or_else(|| "-".to_owned()),
            ]
        };
        self.iter().map(row).collect()
    }

    fn tone(&self, row: usize, _column: usize) -> Tone {
        match self.get(row) {
            Some(setting) if setting.source == "default" => Tone::Faint,
            _ => Tone::Plain,
        }
    }

    fn json_lines(&self) -> serde_json::Result<Vec<String>> {
        self.iter().map(serde_json::to_string).collect()
    }
}

#[cfg(test)]
mod tests {
    use qute_client::TopicId;

    use super::*;

    fn topic(config: &[(&str, &str)]) -> TopicDescription {
        TopicDescription {
            name: "t".to_owned(),
            id: TopicId::GROUPS,
            partitions: vec![],
            config: config
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
        }
    }

    fn keys(keys: &[&str]) -> Vec<String> {
        keys.iter().map(|&key| key.to_owned()).collect()
    }

    #[test]
    fn settings_given_twice_differently_are_a_usage_error() {
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        let same = unique(
            vec![pair("a", "1"), pair("b", "2"), pair("a", "1")],
            "--set",
        )
        .unwrap();
        assert_eq!(same.len(), 2);
        let error = unique(vec![pair("a", "1"), pair("a", "2")], "--set").unwrap_err();
        assert_eq!(error.exit, Exit::Usage);
        let error = changes(same, keys(&["b"])).unwrap_err();
        assert_eq!(error.exit, Exit::Usage);
    }

    #[test]
    fn settings_say_where_they_come_from_and_what_they_mean() {
        let settings = settings_of(&topic(&[
            ("retention_ms", "172800000"),
            ("of_the_future", "x"),
        ]));
        let named = |name: &str| {
            settings
                .iter()
                .find(|setting| setting.name == name)
                .unwrap()
        };
        assert_eq!(named("retention_ms").source, "topic");
        assert_eq!(named("retention_ms").default.as_deref(), Some("604800000"));
        assert_eq!(
            named("retention_ms").told(),
            "retention_ms is 172800000 (2days)"
        );
        assert_eq!(
            named("retention_bytes").told(),
            "retention_bytes is -1 (no limit), its default"
        );
        assert_eq!(named("segment_bytes").means(), "128.00 MiB");
        assert_eq!(named("of_the_future").default, None);
        assert_eq!(named("cleanup").value, "delete");
    }

    #[test]
    fn chosen_settings_are_those_named_and_unknown_ones_are_answered_with_the_nearest() {
        let all = || settings_of(&topic(&[]));
        assert_eq!(chosen(all(), &[]).unwrap(), all());
        assert_eq!(chosen(all(), &keys(&["cleanup"])).unwrap().len(), 1);
        let error = chosen(all(), &keys(&["retention.ms"])).unwrap_err();
        assert!(
            error.to_string().contains("did you mean 'retention_ms'?"),
            "{error}"
        );
        let error = chosen(all(), &keys(&["colour"])).unwrap_err();
        assert!(
            error.to_string().contains("the settings are cleanup,"),
            "{error}"
        );
    }
}
