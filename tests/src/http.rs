//! `GET` against a broker's HTTP port, and its metrics as numbers.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

const LIMIT: Duration = Duration::from_secs(5);

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// What follows the header.
    pub body: String,
}

/// Gets `path` from `address` (`127.0.0.1:port`).
///
/// # Errors
/// When nothing answers within five seconds.
pub fn get(address: &str, path: &str) -> Result<Answer> {
    let socket: SocketAddr = address.parse()?;
    let mut stream = TcpStream::connect_timeout(&socket, LIMIT)
        .with_context(|| format!("connect to {address}"))?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )?;
    let mut text = String::new();
    stream
        .read_to_string(&mut text)
        .with_context(|| format!("read {path} from {address}"))?;
    let (head, body) = text
        .split_once("\r\n\r\n")
        .with_context(|| format!("no HTTP header in {text:?}"))?;
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|code| code.parse().ok())
        .with_context(|| format!("no status in {head:?}"))?;
    let body = if head
        .to_ascii_lowercase()
        .contains("transfer-encoding: chunked")
    {
        unchunk(body)?
    } else {
        body.to_owned()
    };
    Ok(Answer { status, body })
}

/// Joins the chunks of a chunked body.
fn unchunk(mut rest: &str) -> Result<String> {
    let mut body = String::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).context("chunk size")?;
        if size == 0 {
            break;
        }
        ensure!(
            after.is_char_boundary(size),
            "a chunk of {size} is cut short"
        );
        let (chunk, next) = after.split_at(size);
        body.push_str(chunk);
        rest = next.strip_prefix("\r\n").unwrap_or(next);
    }
    Ok(body)
}

/// All samples of `/metrics`, labels included in the name.
///
/// # Errors
/// When the broker doesn't answer.
pub fn metrics(address: &str) -> Result<Metrics> {
    let answer = get(address, "/metrics")?;
    ensure!(answer.status == 200, "/metrics answered {}", answer.status);
    Ok(Metrics::parse(&answer.body))
}

/// Samples by name with labels, as in the text format.
#[derive(Clone, Debug, Default)]
pub struct Metrics(pub BTreeMap<String, f64>);

impl Metrics {
    fn parse(text: &str) -> Self {
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        Self(
            samples
                .filter_map(|line| line.rsplit_once(' '))
                .filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)))
                .collect(),
        )
    }

    /// The sum over all labels of one metric; 0 if it is absent.
    #[must_use]
    pub fn sum(&self, name: &str) -> f64 {
        let of_name = |key: &str| {
            key.strip_prefix(name)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('{'))
        };
        let samples = self.0.iter().filter(|(key, _)| of_name(key));
        samples.map(|(_, value)| value).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_text_sums_over_labels() {
        let metrics = Metrics::parse("# HELP a\na{x=\"1\"} 2\na{x=\"2\"} 3.5\nab 7\n");
        assert!((metrics.sum("a") - 5.5).abs() < 1e-9);
        assert!((metrics.sum("ab") - 7.0).abs() < 1e-9);
    }

    #[test]
    fn chunked_body_is_joined() {
        assert_eq!(
            unchunk("3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n").unwrap(),
            "abcde"
        );
    }
}
