//! Settings of a client from environment variables.
//!
//! Pure but for [`ClientConfig::from_env`] itself: the variables are given.

use std::ffi::OsString;
use std::time::Duration;

use super::{ClientConfig, positive};
use crate::error::{Error, Result};

const BOOTSTRAP: &str = "QUTE_BOOTSTRAP";
const BOOTSTRAP_DEFAULT: &str = "127.0.0.1:7700";
const RACK: &str = "QUTE_RACK";
/// Names that begin so are all ours.
const PREFIX: &str = "QUTE_CLIENT_";
const NAME: &str = "QUTE_CLIENT_NAME";

/// A setting that is a number of milliseconds, and its field.
type Limit = (&'static str, fn(&mut ClientConfig) -> &mut Duration);

const LIMITS: [Limit; 7] = [
    ("QUTE_CLIENT_CONNECT_TIMEOUT_MS", |config| {
        &mut config.connect_timeout
    }),
    ("QUTE_CLIENT_CALL_TIMEOUT_MS", |config| {
        &mut config.call_timeout
    }),
    ("QUTE_CLIENT_KEEP_ALIVE_INTERVAL_MS", |config| {
        &mut config.keep_alive_interval
    }),
    ("QUTE_CLIENT_KEEP_ALIVE_TIMEOUT_MS", |config| {
        &mut config.keep_alive_timeout
    }),
    ("QUTE_CLIENT_BACKOFF_MIN_MS", |config| {
        &mut config.backoff_min
    }),
    ("QUTE_CLIENT_BACKOFF_MAX_MS", |config| {
        &mut config.backoff_max
    }),
    ("QUTE_CLIENT_METADATA_MAX_AGE_MS", |config| {
        &mut config.metadata_max_age
    }),
];

impl ClientConfig {
    /// The settings that the environment gives, the defaults for the rest:
    ///
    /// | variable | setting |
    /// | --- | --- |
    /// | `QUTE_BOOTSTRAP` | [`Self::bootstrap`]; default `127.0.0.1:7700` |
    /// | `QUTE_RACK` | [`Self::rack`] |
    /// | `QUTE_CLIENT_NAME` | [`Self::client_name`] |
    /// | `QUTE_CLIENT_CONNECT_TIMEOUT_MS` | [`Self::connect_timeout`], in milliseconds like all that follow |
    /// | `QUTE_CLIENT_CALL_TIMEOUT_MS` | [`Self::call_timeout`] |
    /// | `QUTE_CLIENT_KEEP_ALIVE_INTERVAL_MS` | [`Self::keep_alive_interval`] |
    /// | `QUTE_CLIENT_KEEP_ALIVE_TIMEOUT_MS` | [`Self::keep_alive_timeout`] |
    /// | `QUTE_CLIENT_BACKOFF_MIN_MS` | [`Self::backoff_min`] |
    /// | `QUTE_CLIENT_BACKOFF_MAX_MS` | [`Self::backoff_max`] |
    /// | `QUTE_CLIENT_METADATA_MAX_AGE_MS` | [`Self::metadata_max_age`] |
    ///
    /// An empty variable counts as not set. Other `QUTE_*` variables belong to the broker and to the
    /// command line, and are left alone.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Config`]: a value makes no sense, or a variable begins with `QUTE_CLIENT_`
    /// and is none of these (a slip of the pen would go unnoticed).
    pub fn from_env() -> Result<Self> {
        Self::from_variables(std::env::vars_os())
    }

    fn from_variables(variables: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Self> {
        let mut config = Self::new(BOOTSTRAP_DEFAULT)?;
        for (name, value) in variables {
            let Some(name) = name.to_str() else { continue };
            if name != BOOTSTRAP && name != RACK && !name.starts_with(PREFIX) {
                continue;
            }
            let value = value
                .to_str()
                .ok_or_else(|| Error::config(format!("{name} is not UTF-8")))?
                .trim();
            config.set(name, value)?;
        }
        Ok(config)
    }

    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let limit = LIMITS.iter().find(|(known, _)| *known == name);
        match (name, limit) {
            (BOOTSTRAP | RACK | NAME, _) | (_, Some(_)) if value.is_empty() => {}
            (BOOTSTRAP, _) => {
                self.bootstrap = value
                    .parse()
                    .map_err(|error: Error| Error::config(format!("{BOOTSTRAP}: {error}")))?;
            }
            (RACK, _) => self.rack = Some(value.to_owned()),
            (NAME, _) => self.client_name = value.to_owned(),
            (_, Some((_, field))) => *field(self) = milliseconds(name, value)?,
            (_, None) => {
                let known: Vec<_> = LIMITS.iter().map(|(known, _)| *known).collect();
                return Err(Error::config(format!(
                    "{name} is no setting of the client; there are {NAME}, {}",
                    known.join(", ")
                )));
            }
        }
        Ok(())
    }
}

fn milliseconds(name: &str, value: &str) -> Result<Duration> {
    match positive(value) {
        Some(ms) => Ok(Duration::from_millis(ms)),
        None => Err(Error::config(format!(
            "{name} is {value:?}: it should be a number of milliseconds above 0"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn read(variables: &[(&str, &str)]) -> Result<ClientConfig> {
        let own = |(name, value): &(&str, &str)| (OsString::from(name), OsString::from(value));
        ClientConfig::from_variables(variables.iter().map(own))
    }

    #[test]
    fn environment_without_settings_gives_the_defaults() {
        let config = read(&[("PATH", "/bin"), ("QUTE_DATA_DIR", "/x"), ("QUTE_RACK", "")]).unwrap();
        assert_eq!(config.bootstrap.addresses(), ["127.0.0.1:7700"]);
        assert_eq!(config.rack, None);
        assert_eq!(config.call_timeout, Duration::from_secs(10));
    }

    #[test]
    fn environment_sets_each_setting() {
        let mut variables = vec![
            ("QUTE_BOOTSTRAP", "qute://a,b:1"),
            ("QUTE_RACK", "r1"),
            ("QUTE_CLIENT_NAME", "me"),
        ];
        variables.extend(LIMITS.iter().map(|(name, _)| (*name, "77")));
        let mut config = read(&variables).unwrap();
        assert_eq!(config.bootstrap.addresses(), ["a:7700", "b:1"]);
        assert_eq!(config.rack.as_deref(), Some("r1"));
        assert_eq!(config.client_name, "me");
        for (name, field) in LIMITS {
            assert_eq!(*field(&mut config), Duration::from_millis(77), "{name}");
        }
    }

    #[test]
    fn environment_with_unknown_settings_or_nonsense_is_refused_by_name() {
        for (name, value) in [
            ("QUTE_CLIENT_CALL_TIMEOUT", "5s"),
            ("QUTE_CLIENT_", ""),
            ("QUTE_CLIENT_CALL_TIMEOUT_MS", "5s"),
            ("QUTE_CLIENT_CALL_TIMEOUT_MS", "0"),
            ("QUTE_CLIENT_CALL_TIMEOUT_MS", "-1"),
            ("QUTE_CLIENT_CALL_TIMEOUT_MS", "+5"),
            ("QUTE_BOOTSTRAP", "http://a"),
            ("QUTE_BOOTSTRAP", "qutes://a"),
        ] {
            let error = read(&[(name, value)]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn environment_that_is_not_utf_8_is_refused_if_it_is_ours_and_else_ignored() {
        use std::os::unix::ffi::OsStringExt;
        let bad = || OsString::from_vec(vec![b'a', 0xff]);
        assert!(ClientConfig::from_variables([(bad(), bad()), ("HOME".into(), bad())]).is_ok());
        assert!(ClientConfig::from_variables([("QUTE_RACK".into(), bad())]).is_err());
    }
}
