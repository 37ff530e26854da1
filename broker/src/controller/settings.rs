//! Topic settings: which keys exist, what they accept, their defaults.
//!
//! Pure. A setting is checked once, by the broker that receives the request, and travels in its
//! normal form (plain integers) from then on.
//!
//! | key | accepts | acted upon |
//! | --- | --- | --- |
//! | `segment_bytes` | 64 KiB to 1 GiB | yes |
//! | `record_bytes_max` | 1 byte to 1 MiB | yes |
//! | `durability` | `disk` | yes; `memory` is refused until replicas can be rebuilt (S9) |
//! | `timestamp` | `create` | yes: records keep their producer's time |
//! | `cleanup` | `delete` | yes; `compact` is refused until compaction exists |
//! | `retention_ms`, `retention_bytes` | a duration or size, -1 for no limit | stored only |
//! | `segment_ms` | a duration | stored only |

use std::collections::BTreeMap;
use std::time::Duration;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
const GIB: u64 = 1024 * MIB;
const DAY_MS: u64 = 24 * 60 * 60 * 1000;

const KEYS: [&str; 8] = [
    "cleanup",
    "durability",
    "record_bytes_max",
    "retention_bytes",
    "retention_ms",
    "segment_bytes",
    "segment_ms",
    "timestamp",
];

/// The settings of a topic, with defaults filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TopicSettings {
    /// Size at which a segment is closed.
    pub segment_bytes: u64,
    /// Age at which a segment is closed. Stored, not acted upon yet.
    pub segment_ms: u64,
    /// Largest record, key, value and headers together.
    pub record_bytes_max: u64,
    /// How long records are kept; `None`: for ever. Stored, not acted upon yet.
    pub retention_ms: Option<u64>,
    /// How many bytes of a partition are kept; `None`: all. Stored, not acted upon yet.
    pub retention_bytes: Option<u64>,
}

impl Default for TopicSettings {
    fn default() -> Self {
        Self {
            segment_bytes: 128 * MIB,
            segment_ms: 7 * DAY_MS,
            record_bytes_max: MIB,
            retention_ms: Some(7 * DAY_MS),
            retention_bytes: None,
        }
    }
}

impl TopicSettings {
    /// Reads settings in their normal form. A key or value it does not know keeps its default:
    /// what was once committed is never an error (S13).
    #[must_use]
    pub fn from_config(config: &BTreeMap<String, String>) -> Self {
        let mut settings = Self::default();
        for (key, value) in config {
            let number = value.parse::<u64>().ok();
            match (key.as_str(), number) {
                ("segment_bytes", Some(bytes)) => settings.segment_bytes = bytes,
                ("segment_ms", Some(ms)) => settings.segment_ms = ms,
                ("record_bytes_max", Some(bytes)) => settings.record_bytes_max = bytes,
                ("retention_ms", _) => settings.retention_ms = number,
                ("retention_bytes", _) => settings.retention_bytes = number,
                _ => {}
            }
        }
        settings
    }
}

/// What each setting is where a topic does not have it, in its normal form.
#[must_use]
pub fn defaults() -> BTreeMap<&'static str, String> {
    let TopicSettings {
        segment_bytes,
        segment_ms,
        record_bytes_max,
        retention_ms,
        retention_bytes,
    } = TopicSettings::default();
    let limit = |limit: Option<u64>| limit.map_or_else(|| "-1".to_owned(), |max| max.to_string());
    BTreeMap::from([
        ("cleanup", "delete".to_owned()),
        ("durability", "disk".to_owned()),
        ("record_bytes_max", record_bytes_max.to_string()),
        ("retention_bytes", limit(retention_bytes)),
        ("retention_ms", limit(retention_ms)),
        ("segment_bytes", segment_bytes.to_string()),
        ("segment_ms", segment_ms.to_string()),
        ("timestamp", "create".to_owned()),
    ])
}

/// Why a setting was refused; the text is for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// There is no such key.
    #[error("unknown topic setting `{key}`{}", suggestion(.nearest))]
    UnknownKey {
        /// What was asked for.
        key: String,
        /// The most similar key that exists.
        nearest: Option<&'static str>,
    },
    /// The value is not one that the key accepts.
    #[error("topic setting `{key}`: `{value}` is not accepted; {accepts}")]
    BadValue {
        /// The setting.
        key: String,
        /// What was asked for.
        value: String,
        /// What would be accepted.
        accepts: &'static str,
    },
}

fn suggestion(nearest: &Option<&'static str>) -> String {
    match nearest {
        Some(key) => format!("; did you mean `{key}`?"),
        None => format!("; the settings are {}", KEYS.join(", ")),
    }
}

/// Checks settings and brings them to their normal form.
///
/// # Errors
///
/// The first key that does not exist or whose value is not accepted.
pub fn normalize<'a>(
    config: impl IntoIterator<Item = (&'a String, &'a String)>,
) -> Result<BTreeMap<String, String>, SettingsError> {
    let mut normal = BTreeMap::new();
    for (key, value) in config {
        normal.insert(key.clone(), normal_value(key, value)?);
    }
    Ok(normal)
}

/// Checks that there is such a setting.
///
/// # Errors
/// [`SettingsError::UnknownKey`].
pub fn check_key(key: &str) -> Result<(), SettingsError> {
    if KEYS.contains(&key) {
        return Ok(());
    }
    Err(SettingsError::UnknownKey {
        key: shortened(key),
        nearest: nearest(key),
    })
}

fn normal_value(key: &str, value: &str) -> Result<String, SettingsError> {
    let bad = |accepts| SettingsError::BadValue {
        key: shortened(key),
        value: shortened(value),
        accepts,
    };
    let within = |number: Option<u64>, min: u64, max: u64, accepts| match number {
        Some(number) if (min..=max).contains(&number) => Ok(number.to_string()),
        _ => Err(bad(accepts)),
    };
    match key {
        "segment_bytes" => within(size(value), 64 * KIB, GIB, "64KiB to 1GiB"),
        "record_bytes_max" => within(size(value), 1, MIB, "1 byte to 1MiB"),
        "segment_ms" => within(
            duration_ms(value),
            1000,
            u64::MAX,
            "a duration of 1s or more",
        ),
        "retention_ms" if value == "-1" => Ok(value.to_owned()),
        "retention_ms" => within(
            duration_ms(value),
            1,
            u64::MAX,
            "a duration (7d, 12h, milliseconds) or -1 for no limit",
        ),
        "retention_bytes" if value == "-1" => Ok(value.to_owned()),
        "retention_bytes" => within(size(value), 1, u64::MAX, "a size or -1 for no limit"),
        "durability" if value == "disk" => Ok(value.to_owned()),
        "durability" if value == "memory" => Err(bad(
            "this version has only `disk` (`memory` needs the rebuilding of replicas, which comes later)",
        )),
        "durability" => Err(bad("only `disk` for now")),
        "timestamp" if value == "create" => Ok(value.to_owned()),
        "timestamp" => Err(bad("only `create` (the producer's time) for now")),
        "cleanup" if value == "delete" => Ok(value.to_owned()),
        "cleanup" => Err(bad("only `delete` for now (`compact` comes later)")),
        _ => check_key(key).and(Err(bad("this version does not know what to do with it"))),
    }
}

/// A count of bytes: `65536`, `64KiB`, `1MiB`, `1GiB`.
fn size(value: &str) -> Option<u64> {
    let (digits, unit) = match value.find(|c: char| !c.is_ascii_digit()) {
        Some(end) => value.split_at(end),
        None => (value, ""),
    };
    let unit = match unit {
        "" | "B" => 1,
        "KiB" => KIB,
        "MiB" => MIB,
        "GiB" => GIB,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

/// Milliseconds: `5000`, `5s`, `7d`.
fn duration_ms(value: &str) -> Option<u64> {
    if let Ok(ms) = value.parse::<u64>() {
        return Some(ms);
    }
    let duration: Duration = humantime::parse_duration(value).ok()?;
    u64::try_from(duration.as_millis()).ok()
}

/// At most 64 characters of what a stranger sent, for messages.
fn shortened(text: &str) -> String {
    text.chars().take(64).collect()
}

/// The key that takes the fewest edits to reach, if it takes few.
fn nearest(key: &str) -> Option<&'static str> {
    let key = shortened(key).to_ascii_lowercase().replace(['.', '-'], "_");
    KEYS.iter()
        .map(|candidate| (edits(&key, candidate), *candidate))
        .filter(|(edits, candidate)| *edits <= candidate.len() / 3)
        .min()
        .map(|(_, candidate)| candidate)
}

/// Levenshtein distance.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, to) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(key: &str, value: &str) -> Result<String, SettingsError> {
        normal_value(key, value)
    }

    #[test]
    fn defaults_name_every_setting_and_are_in_their_normal_form() {
        let defaults = defaults();
        assert!(defaults.keys().copied().eq(KEYS));
        for (key, value) in &defaults {
            assert_eq!(one(key, value).as_ref(), Ok(value), "{key}");
        }
        let named = defaults
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value));
        let read = TopicSettings::from_config(&named.collect());
        assert_eq!(read, TopicSettings::default());
    }

    #[test]
    fn values_with_units_become_plain_numbers() {
        assert_eq!(one("segment_bytes", "1MiB").unwrap(), "1048576");
        assert_eq!(one("segment_bytes", "65536").unwrap(), "65536");
        assert_eq!(one("retention_ms", "7d").unwrap(), "604800000");
        assert_eq!(one("retention_ms", "-1").unwrap(), "-1");
        assert_eq!(one("retention_bytes", "10GiB").unwrap(), "10737418240");
        assert_eq!(one("segment_ms", "5000").unwrap(), "5000");
    }

    #[test]
    fn unknown_key_is_refused_with_a_suggestion() {
        let error = one("retention.ms", "1").unwrap_err();
        assert_eq!(
            error.to_string(),
            "unknown topic setting `retention.ms`; did you mean `retention_ms`?"
        );
        let error = one("segment_byte", "1").unwrap_err();
        assert!(error.to_string().contains("`segment_bytes`"), "{error}");
        let error = one("zzz", "1").unwrap_err();
        assert!(error.to_string().contains("the settings are"), "{error}");
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for (key, value) in [
            ("segment_bytes", "1"),
            ("segment_bytes", "2GiB"),
            ("segment_bytes", "99999999999999999999GiB"),
            ("segment_bytes", "1MB"),
            ("record_bytes_max", "0"),
            ("record_bytes_max", "2MiB"),
            ("retention_ms", "soon"),
            ("retention_ms", "-2"),
            ("durability", "memory"),
            ("durability", ""),
            ("cleanup", "compact"),
            ("timestamp", "append"),
            ("segment_ms", "1"),
        ] {
            let error = one(key, value).unwrap_err();
            assert!(
                matches!(error, SettingsError::BadValue { .. }),
                "{key}={value}: {error}"
            );
        }
    }

    #[test]
    fn normal_form_round_trips_into_typed_settings() {
        let config = BTreeMap::from([
            ("segment_bytes".to_owned(), "1MiB".to_owned()),
            ("retention_ms".to_owned(), "-1".to_owned()),
            ("retention_bytes".to_owned(), "5".to_owned()),
        ]);
        let settings = TopicSettings::from_config(&normalize(&config).unwrap());
        assert_eq!(settings.segment_bytes, 1 << 20);
        assert_eq!(settings.retention_ms, None);
        assert_eq!(settings.retention_bytes, Some(5));
        assert_eq!(settings.record_bytes_max, 1 << 20);
    }

    #[test]
    fn committed_nonsense_keeps_defaults() {
        let config = BTreeMap::from([
            ("from_the_future".to_owned(), "1".to_owned()),
            ("segment_bytes".to_owned(), "many".to_owned()),
        ]);
        assert_eq!(
            TopicSettings::from_config(&config),
            TopicSettings::default()
        );
    }
}
