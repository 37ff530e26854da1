//! Settings of a broker: defaults < TOML file < `QUTE_*` environment < flags.
//!
//! Every setting has one name: `data_dir` in the file, `QUTE_DATA_DIR` in the environment and, for
//! the ones that operators change most, `--data-dir` as a flag. An unknown key is an error, in the
//! file and in the environment alike: a misspelt setting must not be silently ignored.

use std::collections::BTreeMap;
use std::net::ToSocketAddrs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Why the settings can't be used. Each text names the key and says what to write instead.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file could not be read.
    #[error("cannot read the settings file {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not TOML or has a key or value that is not known.
    #[error("{origin}: {message}")]
    Invalid {
        /// Where the setting came from.
        origin: String,
        /// What is wrong and what would be right.
        message: String,
    },
}

fn invalid(origin: impl Into<String>, message: impl Into<String>) -> Error {
    Error::Invalid {
        origin: origin.into(),
        message: message.into(),
    }
}

/// The settings of one broker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Name that people see; need not be unique.
    pub name: String,
    /// The data directory; one broker per directory.
    pub data_dir: PathBuf,
    /// Where gRPC is served, `HOST:PORT`; port 0 takes a free one.
    pub listen: String,
    /// Address told to clients; empty: the listening address.
    pub advertise: String,
    /// Address told to brokers; empty: what clients are told. Differs where a proxy or a load
    /// balancer stands between clients and this broker.
    pub advertise_peers: String,
    /// Where gossip is received (UDP), `HOST:PORT`; empty: the listening address.
    pub gossip: String,
    /// Where `/metrics`, `/healthz` and `/readyz` are served, `HOST:PORT`; empty: nowhere.
    pub http: String,
    /// TCP addresses of peers, its own among them or not.
    pub seeds: Vec<String>,
    /// How many brokers found the cluster, this one included; 0: join only (with seeds).
    pub expect: u32,
    /// Failure domain of this broker; empty: none.
    pub rack: String,
    /// Bytes of recent batches kept in memory, over all partitions.
    pub tail_cache_bytes: u64,
    /// Free bytes below which records are refused; 0: the smaller of 1 GiB and 2% of the disk.
    pub disk_floor_bytes: u64,
    /// Bytes of a segment file of a topic that sets none itself.
    pub segment_bytes: u64,
    /// Interval of Raft heartbeats.
    pub raft_heartbeat_ms: u64,
    /// Shortest election timeout.
    pub raft_election_min_ms: u64,
    /// Longest election timeout; also the leader's lease.
    pub raft_election_max_ms: u64,
    /// Segment files kept open at most.
    pub open_files_max: u64,
    /// Replicas that this broker opens at most; more are refused.
    pub replicas_max: u64,
    /// Consumer groups that this broker coordinates at most; more are refused.
    pub groups_max: u64,
    /// Members of one group at most.
    pub group_members_max: u64,
    /// Committed offsets of one group at most.
    pub group_offsets_max: u64,
    /// How long committed offsets of a group without members are kept.
    pub group_offsets_retention_ms: u64,
    /// The shortest session timeout that a member may ask for.
    pub group_session_timeout_min_ms: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            name: gethostname::gethostname().to_string_lossy().into_owned(),
            data_dir: PathBuf::from("./qute-data"),
            listen: "127.0.0.1:7700".into(),
            advertise: String::new(),
            advertise_peers: String::new(),
            gossip: String::new(),
            http: "127.0.0.1:7780".into(),
            seeds: Vec::new(),
            expect: 0,
            rack: String::new(),
            tail_cache_bytes: 128 << 20,
            disk_floor_bytes: 0,
            segment_bytes: 128 << 20,
            raft_heartbeat_ms: 150,
            raft_election_min_ms: 500,
            raft_election_max_ms: 1000,
            open_files_max: 4096,
            replicas_max: 4000,
            groups_max: 100_000,
            group_members_max: 1000,
            group_offsets_max: 10_000,
            group_offsets_retention_ms: 7 * 24 * 60 * 60 * 1000,
            group_session_timeout_min_ms: 1000,
        }
    }
}

/// Environment variables that begin with `QUTE_` and belong to other programs.
const FOREIGN_VARIABLES: &[&str] = &["QUTE_BOOTSTRAP", "QUTE_CONFIG", "QUTE_CONTEXT", "QUTE_LOG"];
/// Variables that begin so are read by programs that use the client.
const CLIENT_PREFIX: &str = "QUTE_CLIENT_";

/// What the command line says; `None` where it is silent.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// By setting name, the value as text.
    pub values: BTreeMap<&'static str, String>,
}

impl Config {
    /// Reads the settings from all sources.
    ///
    /// # Errors
    /// A file that can't be read, an unknown key, a value of the wrong kind or out of range.
    pub fn load(
        file: Option<&Path>,
        environment: impl Iterator<Item = (String, String)>,
        flags: &Overrides,
    ) -> Result<Self, Error> {
        let mut table = match file {
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(|source| Error::Read {
                    path: path.to_owned(),
                    source,
                })?;
                // Once by itself, for errors that name the file's line.
                toml::from_str::<Self>(&text)
                    .map_err(|e| invalid(path.display().to_string(), e.to_string().trim_end()))?;
                toml::from_str::<toml::Table>(&text)
                    .map_err(|e| invalid(path.display().to_string(), e.to_string()))?
            }
            None => toml::Table::new(),
        };
        let kinds = toml::Table::try_from(Self::default())
            .map_err(|e| invalid("defaults", e.to_string()))?;
        for (variable, text) in environment {
            let Some(key) = variable.strip_prefix("QUTE_") else {
                continue;
            };
            if FOREIGN_VARIABLES.contains(&variable.as_str()) || variable.starts_with(CLIENT_PREFIX)
            {
                continue;
            }
            set(
                &mut table,
                &kinds,
                &key.to_ascii_lowercase(),
                &text,
                &variable,
            )?;
        }
        for (key, text) in &flags.values {
            let flag = format!("--{}", key.replace('_', "-"));
            set(&mut table, &kinds, key, text, &flag)?;
        }
        let config: Self = table
            .try_into()
            .map_err(|e: toml::de::Error| invalid("settings", e.to_string()))?;
        config.check()?;
        Ok(config)
    }

    /// Checks ranges and addresses.
    ///
    /// # Errors
    /// The first setting that is out of its range.
    pub fn check(&self) -> Result<(), Error> {
        for (key, address, empty_ok) in [
            ("listen", &self.listen, false),
            ("advertise", &self.advertise, true),
            ("advertise_peers", &self.advertise_peers, true),
            ("gossip", &self.gossip, true),
            ("http", &self.http, true),
        ] {
            if !(empty_ok && address.is_empty()) {
                check_address(key, address)?;
            }
        }
        for seed in &self.seeds {
            check_address("seeds", seed)?;
        }
        if self.name.is_empty() || self.name.len() > 255 {
            return Err(invalid("name", "must have 1 to 255 bytes"));
        }
        if self.expect > 1 && self.seeds.is_empty() {
            return Err(invalid(
                "expect",
                format!(
                    "{} brokers cannot find each other without seeds: give --seeds HOST:PORT,...",
                    self.expect
                ),
            ));
        }
        if self.expect > 100 {
            return Err(invalid("expect", "at most 100 brokers can found a cluster"));
        }
        if self.raft_heartbeat_ms == 0
            || self.raft_election_min_ms < 2 * self.raft_heartbeat_ms
            || self.raft_election_max_ms <= self.raft_election_min_ms
        {
            return Err(invalid(
                "raft_heartbeat_ms, raft_election_min_ms, raft_election_max_ms",
                "must rise: the shortest election timeout is at least twice the heartbeat, \
                 the longest above the shortest",
            ));
        }
        if !(1 << 20..=1 << 30).contains(&self.segment_bytes) {
            return Err(invalid("segment_bytes", "must lie between 1 MiB and 1 GiB"));
        }
        if self.open_files_max < 16 {
            return Err(invalid("open_files_max", "must be at least 16"));
        }
        if !(1..=60_000).contains(&self.group_members_max) {
            return Err(invalid("group_members_max", "must lie between 1 and 60000"));
        }
        if self.group_offsets_retention_ms == 0 {
            return Err(invalid("group_offsets_retention_ms", "must be at least 1"));
        }
        if !(100..=1_800_000).contains(&self.group_session_timeout_min_ms) {
            return Err(invalid(
                "group_session_timeout_min_ms",
                "must lie between 100 ms and 30 minutes",
            ));
        }
        Ok(())
    }
}

/// Puts `text` into the table in the kind that the key's default has.
fn set(
    table: &mut toml::Table,
    kinds: &toml::Table,
    key: &str,
    text: &str,
    origin: &str,
) -> Result<(), Error> {
    let value = match kinds.get(key) {
        Some(toml::Value::Integer(_)) => {
            let number = text
                .trim()
                .parse::<i64>()
                .ok()
                .filter(|n| *n >= 0)
                .ok_or_else(|| invalid(origin, format!("`{text}` is not a whole number")))?;
            toml::Value::Integer(number)
        }
        Some(toml::Value::Array(_)) => toml::Value::Array(
            text.split(',')
                .map(str::trim)
                .filter(|part| !part.is_empty())
                .map(|part| toml::Value::String(part.to_owned()))
                .collect(),
        ),
        Some(_) => toml::Value::String(text.to_owned()),
        None => {
            let known: Vec<&str> = kinds.keys().map(String::as_str).collect();
            return Err(invalid(
                origin,
                format!(
                    "no setting is called `{key}`; the settings are {}",
                    known.join(", ")
                ),
            ));
        }
    };
    table.insert(key.to_owned(), value);
    Ok(())
}

/// `HOST:PORT` with a name or address and a port; names are resolved later, and anew.
fn check_address(key: &str, address: &str) -> Result<(), Error> {
    let wrong = |why: &str| Err(invalid(key, format!("`{address}` is not HOST:PORT: {why}")));
    let Some((host, port)) = address.rsplit_once(':') else {
        return wrong("the port is missing");
    };
    if host.is_empty() {
        return wrong("the host is missing");
    }
    if host.contains(':') && !(host.starts_with('[') && host.ends_with(']')) {
        return wrong("an IPv6 address goes into brackets, as in [::1]:7700");
    }
    if port.parse::<u16>().is_err() {
        return wrong("the port is a number from 0 to 65535");
    }
    Ok(())
}

/// Resolves `HOST:PORT`, for binding.
///
/// # Errors
/// The name is unknown.
pub fn resolve(key: &str, address: &str) -> Result<std::net::SocketAddr, Error> {
    address
        .to_socket_addrs()
        .ok()
        .and_then(|mut found| found.next())
        .ok_or_else(|| invalid(key, format!("`{address}` does not resolve to an address")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(
        file: Option<&str>,
        env: &[(&str, &str)],
        flags: &[(&'static str, &str)],
    ) -> Result<Config, Error> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qute.toml");
        if let Some(text) = file {
            std::fs::write(&path, text).unwrap();
        }
        let overrides = Overrides {
            values: flags.iter().map(|(k, v)| (*k, (*v).to_owned())).collect(),
        };
        Config::load(
            file.map(|_| path.as_path()),
            env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())),
            &overrides,
        )
    }

    #[test]
    fn load_without_sources_gives_the_defaults() {
        let config = load(
            None,
            &[
                ("HOME", "/root"),
                ("QUTE_BOOTSTRAP", "x:1"),
                ("QUTE_CONFIG", "contexts.toml"),
                ("QUTE_CONTEXT", "prod"),
                ("QUTE_CLIENT_NAME", "a"),
            ],
            &[],
        )
        .unwrap();
        assert_eq!(config, Config::default());
        assert_eq!(config.listen, "127.0.0.1:7700");
    }

    #[test]
    fn load_prefers_flags_to_environment_to_file() {
        let file = "name = \"file\"\nlisten = \"127.0.0.1:1\"\nhttp = \"127.0.0.1:2\"";
        let env = [("QUTE_LISTEN", "127.0.0.1:3"), ("QUTE_HTTP", "127.0.0.1:4")];
        let config = load(Some(file), &env, &[("http", "127.0.0.1:5")]).unwrap();
        assert_eq!(config.name, "file");
        assert_eq!(config.listen, "127.0.0.1:3");
        assert_eq!(config.http, "127.0.0.1:5");
    }

    #[test]
    fn load_lists_and_numbers_from_text_keep_their_kind() {
        let env = [
            ("QUTE_SEEDS", "a:1, b:2"),
            ("QUTE_EXPECT", "3"),
            ("QUTE_NAME", "17"),
        ];
        let config = load(None, &env, &[]).unwrap();
        assert_eq!(config.seeds, ["a:1", "b:2"]);
        assert_eq!((config.expect, config.name.as_str()), (3, "17"));
    }

    #[test]
    fn load_unknown_key_is_refused_wherever_it_stands() {
        for outcome in [
            load(Some("lisen = \"127.0.0.1:1\""), &[], &[]),
            load(None, &[("QUTE_LISEN", "127.0.0.1:1")], &[]),
        ] {
            assert!(outcome.unwrap_err().to_string().contains("lisen"));
        }
    }

    #[test]
    fn load_bad_values_name_the_setting() {
        for (env, word) in [
            (("QUTE_LISTEN", "nowhere"), "port is missing"),
            (("QUTE_LISTEN", "::1:7700"), "brackets"),
            (("QUTE_LISTEN", "h:99999"), "65535"),
            (("QUTE_EXPECT", "three"), "whole number"),
            (("QUTE_EXPECT", "3"), "--seeds"),
            (("QUTE_SEGMENT_BYTES", "1"), "1 MiB"),
            (("QUTE_GROUP_MEMBERS_MAX", "0"), "60000"),
            (("QUTE_GROUP_SESSION_TIMEOUT_MIN_MS", "10"), "100 ms"),
        ] {
            let text = load(None, &[env], &[]).unwrap_err().to_string();
            assert!(text.contains(word), "{text}");
        }
    }
}
