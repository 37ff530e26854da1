//! Settings of a client: where to begin, limits. Those of producers and consumers stand with them.

mod env;

use std::net::Ipv6Addr;
use std::str::FromStr;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::interceptor::{Hooks, Interceptor};

const SCHEME: &str = "qute://";
const SECURE_SCHEME: &str = "qutes://";
const DEFAULT_PORT: u16 = 7700;
/// No time limit is longer: "for ever" still has to make a deadline.
const LIMIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

pub(crate) fn capped(limit: Duration) -> Duration {
    limit.min(LIMIT_MAX)
}

/// A list of broker addresses to begin with: `host:port,host:port` or `qute://host,host`. A
/// missing port is 7700. A few brokers are enough: the cluster tells of the rest. Names are
/// resolved anew whenever a connection is made, and all addresses of a name are tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bootstrap(Vec<String>);

impl Bootstrap {
    /// The addresses, `host:port` each.
    #[must_use]
    pub fn addresses(&self) -> &[String] {
        &self.0
    }
}

impl FromStr for Bootstrap {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut addresses: Vec<String> = Vec::new();
        for item in text.split(',') {
            let item = item.trim();
            if has_scheme(item, SECURE_SCHEME) {
                return Err(Error::config(format!(
                    "{item:?} asks for TLS, which this version of the client does not have yet: \
                     use {SCHEME} inside a network that you trust"
                )));
            }
            let item = match item.get(SCHEME.len()..) {
                Some(rest) if has_scheme(item, SCHEME) => rest,
                _ => item,
            };
            let item = item.strip_suffix('/').unwrap_or(item);
            if item.is_empty() {
                continue;
            }
            let address = with_port(item)?;
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        if addresses.is_empty() {
            return Err(Error::config(
                "the bootstrap list is empty: give host:port, several separated by commas",
            ));
        }
        Ok(Self(addresses))
    }
}

/// Schemes are written in any case.
fn has_scheme(item: &str, scheme: &str) -> bool {
    item.get(..scheme.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(scheme))
}

/// Letters, digits, `-`, `.` and `_`: what names and IPv4 addresses are made of.
fn is_host(host: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_');
    !host.is_empty() && host.bytes().all(allowed)
}

/// Above 0, and nothing but digits.
fn positive<T: FromStr + PartialOrd + Default>(text: &str) -> Option<T> {
    let digits = text.bytes().all(|b| b.is_ascii_digit());
    let number = digits.then(|| text.parse().ok()).flatten();
    number.filter(|number| *number > T::default())
}

/// `host`, `host:port`, `[v6]`, `[v6]:port`.
fn with_port(item: &str) -> Result<String> {
    let bad = |why: &str| {
        Error::config(format!(
            "bootstrap address {item:?} {why}: it should read host:port"
        ))
    };
    let (host, port) = if let Some(rest) = item.strip_prefix('[') {
        let (host, after) = rest.split_once(']').ok_or_else(|| bad("lacks a ]"))?;
        if host.parse::<Ipv6Addr>().is_err() {
            return Err(bad("has no IPv6 address in its [ ]"));
        }
        let port = after.strip_prefix(':');
        (
            format!("[{host}]"),
            port.or((!after.is_empty()).then_some(after)),
        )
    } else {
        if item.parse::<Ipv6Addr>().is_ok() {
            return Err(bad("is an IPv6 address without [ ]"));
        }
        let (host, port) = match item.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (item, None),
        };
        if host.is_empty() {
            return Err(bad("lacks a host"));
        }
        if !is_host(host) {
            return Err(bad("has characters that no host has"));
        }
        (host.to_owned(), port)
    };
    let port = match port {
        None => DEFAULT_PORT,
        Some(port) => positive(port).ok_or_else(|| bad("has a bad port"))?,
    };
    Ok(format!("{host}:{port}"))
}

/// Settings of a [`crate::Client`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ClientConfig {
    /// Where to begin.
    pub bootstrap: Bootstrap,
    /// Name that brokers see in their logs. Default `qute-client`.
    pub client_name: String,
    /// Limit of one connection attempt. Default 3 s.
    pub connect_timeout: Duration,
    /// Limit of one administrative call, retries included. Default 10 s.
    pub call_timeout: Duration,
    /// A connection without any sign of life for this long and [`Self::keep_alive_timeout`] is
    /// dead. Default 3 s.
    pub keep_alive_interval: Duration,
    /// How long a keep-alive probe may take. Default 2 s.
    pub keep_alive_timeout: Duration,
    /// Shortest back-off between attempts. Default 20 ms.
    pub backoff_min: Duration,
    /// Longest back-off between attempts. Default 500 ms.
    pub backoff_max: Duration,
    /// Metadata that nobody has confirmed for this long is asked for again, with jitter, even if
    /// nothing failed and nothing was pushed. Default 5 min.
    pub metadata_max_age: Duration,
    /// Where this program runs, as brokers name their racks: what
    /// `ConsumerBuilder::nearest_replica` goes by. Default none.
    pub rack: Option<String>,
    pub(crate) hooks: Hooks,
}

impl ClientConfig {
    /// The defaults, beginning at `bootstrap` (see [`Bootstrap`]).
    ///
    /// # Errors
    /// [`crate::ErrorKind::Config`] if the list makes no sense.
    pub fn new(bootstrap: &str) -> Result<Self> {
        Ok(Self {
            bootstrap: bootstrap.parse()?,
            client_name: "qute-client".to_owned(),
            connect_timeout: Duration::from_secs(3),
            call_timeout: Duration::from_secs(10),
            keep_alive_interval: Duration::from_secs(3),
            keep_alive_timeout: Duration::from_secs(2),
            backoff_min: Duration::from_millis(20),
            backoff_max: Duration::from_millis(500),
            metadata_max_age: Duration::from_secs(5 * 60),
            rack: None,
            hooks: Hooks::default(),
        })
    }

    /// The settings as they are used: time limits that make deadlines.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Config`] for those that no call could succeed with.
    pub(crate) fn checked(mut self) -> Result<Self> {
        // It is sent as a header.
        if self.client_name.contains(|c: char| c.is_ascii_control()) {
            return Err(Error::config(format!(
                "client_name {:?} has characters that can't be sent",
                self.client_name
            )));
        }
        for (name, limit) in [
            ("connect_timeout", &mut self.connect_timeout),
            ("call_timeout", &mut self.call_timeout),
            ("keep_alive_interval", &mut self.keep_alive_interval),
            ("keep_alive_timeout", &mut self.keep_alive_timeout),
            ("backoff_min", &mut self.backoff_min),
            ("backoff_max", &mut self.backoff_max),
            ("metadata_max_age", &mut self.metadata_max_age),
        ] {
            if limit.is_zero() {
                return Err(Error::config(format!("{name} is 0: it should be above")));
            }
            *limit = capped(*limit);
        }
        Ok(self)
    }

    /// Sets the limit of one administrative call.
    #[must_use]
    pub fn call_timeout(mut self, timeout: Duration) -> Self {
        self.call_timeout = timeout;
        self
    }

    /// Sets the name that brokers see in their logs.
    #[must_use]
    pub fn client_name(mut self, name: impl Into<String>) -> Self {
        self.client_name = name.into();
        self
    }

    /// Sets the rack that this program runs in.
    #[must_use]
    pub fn rack(mut self, rack: impl Into<String>) -> Self {
        self.rack = Some(rack.into());
        self
    }

    /// Sets the age at which metadata is asked for again.
    #[must_use]
    pub fn metadata_max_age(mut self, age: Duration) -> Self {
        self.metadata_max_age = age;
        self
    }

    /// Sets the shortest and the longest back-off between attempts.
    #[must_use]
    pub fn backoff(mut self, min: Duration, max: Duration) -> Self {
        self.backoff_min = min;
        self.backoff_max = max;
        self
    }

    /// Sets how long a connection may be without a sign of life, and how long a probe may take.
    #[must_use]
    pub fn keep_alive(mut self, interval: Duration, timeout: Duration) -> Self {
        self.keep_alive_interval = interval;
        self.keep_alive_timeout = timeout;
        self
    }

    /// Installs a hook for all producers and consumers of the client; see [`Interceptor`] for the
    /// order.
    #[must_use]
    pub fn interceptor(mut self, hook: impl Interceptor) -> Self {
        self.hooks.install(hook);
        self
    }

    /// Sets the limit of one connection attempt.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bootstrap_lists_are_read_in_both_forms() {
        for (text, addresses) in [
            ("127.0.0.1:7700", &["127.0.0.1:7700"][..]),
            ("a:1, b:2,,a:1", &["a:1", "b:2"]),
            ("qute://a,b:9/", &["a:7700", "b:9"]),
            ("QUTE://a,qute://b:9,c/", &["a:7700", "b:9", "c:7700"]),
            ("[::1]:7701,[::2]", &["[::1]:7701", "[::2]:7700"]),
        ] {
            assert_eq!(
                text.parse::<Bootstrap>().unwrap().addresses(),
                addresses,
                "{text}"
            );
        }
    }

    #[test]
    fn bootstrap_that_asks_for_tls_is_told_that_there_is_none_yet() {
        for text in ["qutes://a:1,b:2", "Qutes://a", "a:1,qutes://b"] {
            let error = text.parse::<Bootstrap>().unwrap_err();
            assert!(error.to_string().contains("TLS"), "{error}");
        }
    }

    #[test]
    fn bootstrap_nonsense_is_refused() {
        for text in [
            "",
            ",",
            "qute://",
            "http://a:1",
            "qute://user@a:1/x",
            "qute:///",
            "a:0",
            "a:99999",
            "a:b",
            ":7700",
            "::1",
            "a b",
            "[::1]x",
            "[::1",
            "[zz]:1",
            "[]",
            "a]:1",
            "a:1]",
            "a:+7",
            "a:",
            "a:1:2",
            "a:1;b:2",
            "b;c",
            "qute://a?x=1",
            "a#f",
            "a\0b",
            "a\u{200b}",
            "\"a\"",
        ] {
            assert!(text.parse::<Bootstrap>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn settings_that_no_call_could_succeed_with_are_refused_by_name() {
        let fine = || ClientConfig::new("a").unwrap();
        let (zero, long) = (Duration::ZERO, Duration::from_secs(1));
        for (config, named) in [
            (fine().client_name("a\nb"), "client_name"),
            (fine().client_name("x\u{7f}"), "client_name"),
            (fine().connect_timeout(zero), "connect_timeout"),
            (fine().call_timeout(zero), "call_timeout"),
            (fine().keep_alive(zero, long), "keep_alive_interval"),
            (fine().keep_alive(long, zero), "keep_alive_timeout"),
            (fine().backoff(zero, long), "backoff_min"),
            (fine().backoff(long, zero), "backoff_max"),
            (fine().metadata_max_age(zero), "metadata_max_age"),
        ] {
            // Outside of a runtime: what is wrong with the settings is said first.
            let error = crate::Client::lazy(config).unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::Config);
            assert!(error.to_string().contains(named), "{error}");
        }
        assert!(fine().client_name("caf\u{e9} 1").checked().is_ok());
    }

    #[test]
    fn client_outside_of_a_runtime_is_refused() {
        let error = crate::Client::lazy(ClientConfig::new("a").unwrap()).unwrap_err();
        assert_eq!(error.kind(), crate::ErrorKind::Config);
        assert!(error.to_string().contains("runtime"), "{error}");
    }
}
