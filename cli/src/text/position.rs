//! `-o`: where `consume` starts in each partition.

use std::time::Duration;

use jiff::Timestamp;

use super::duration;

/// A starting point, the same for every partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// The log start offset.
    Start,
    /// The high watermark: only what is written from now on.
    End,
    /// This offset.
    Offset(u64),
    /// This many records before the high watermark, or the log start if that is nearer.
    Last(u64),
    /// The first batch stamped at this broker time or later, Unix milliseconds.
    Time(u64),
    /// As `Time`, this long before now.
    Ago(Duration),
}

/// Reads `start`, `end`, `N`, `-N` or `@TIME` (RFC 3339, Unix milliseconds, or `@-1h`).
///
/// # Errors
/// Anything else, and times before 1970.
pub fn parse(text: &str) -> Result<Position, String> {
    match text {
        "start" => return Ok(Position::Start),
        "end" => return Ok(Position::End),
        _ => {}
    }
    if let Some(time) = text.strip_prefix('@') {
        return parse_time(time);
    }
    let (number, position): (&str, fn(u64) -> Position) = match text.strip_prefix('-') {
        Some(last) => (last, Position::Last),
        None => (text, Position::Offset),
    };
    if !is_number(number) {
        return Err("write start, end, an offset N, -N for the last N, or @TIME".to_owned());
    }
    number
        .parse()
        .map(position)
        .map_err(|_| format!("`{number}` is larger than any offset"))
}

fn parse_time(text: &str) -> Result<Position, String> {
    if let Some(ago) = text.strip_prefix('-') {
        return duration::parse(ago).map(Position::Ago);
    }
    if is_number(text) {
        return text
            .parse()
            .map(Position::Time)
            .map_err(|_| format!("`{text}` is too many milliseconds"));
    }
    let time: Timestamp = text.parse().map_err(|_| {
        format!(
            "`{text}` is no time; write @2026-01-31T12:00:00Z, @UNIX_MS, or @-1h for an hour ago"
        )
    })?;
    u64::try_from(time.as_millisecond())
        .map(Position::Time)
        .map_err(|_| format!("`{text}` is before 1970"))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

impl Position {
    /// The broker time to look up, for the two forms that need one. `now_ms` is the time of the
    /// call, Unix milliseconds.
    #[must_use]
    pub fn time_ms(self, now_ms: u64) -> Option<u64> {
        match self {
            Self::Time(time_ms) => Some(time_ms),
            Self::Ago(ago) => {
                let ago_ms = u64::try_from(ago.as_millis()).unwrap_or(u64::MAX);
                Some(now_ms.saturating_sub(ago_ms))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_of_designed_forms_gives_their_position() {
        let hour = Duration::from_secs(3600);
        for (text, position) in [
            ("start", Position::Start),
            ("end", Position::End),
            ("0", Position::Offset(0)),
            ("18446744073709551615", Position::Offset(u64::MAX)),
            ("-7", Position::Last(7)),
            ("-0", Position::Last(0)),
            ("@1700000000123", Position::Time(1_700_000_000_123)),
            (
                "@2023-11-14T22:13:20.123Z",
                Position::Time(1_700_000_000_123),
            ),
            (
                "@2023-11-14T23:13:20.123+01:00",
                Position::Time(1_700_000_000_123),
            ),
            ("@-1h", Position::Ago(hour)),
        ] {
            assert_eq!(parse(text).unwrap(), position, "{text}");
        }
    }

    #[test]
    fn parse_of_anything_else_is_refused() {
        for wrong in [
            "",
            "begin",
            "-",
            "--1",
            "+1",
            "1.5",
            "@",
            "@-",
            "@-5",
            "@yesterday",
            "@2023-11-14T22:13:20",
            "@1960-01-01T00:00:00Z",
            "18446744073709551616",
            "@18446744073709551616",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn time_of_ago_counts_back_from_now_and_stops_at_1970() {
        let ago = Position::Ago(Duration::from_secs(1));
        assert_eq!(ago.time_ms(5_000), Some(4_000));
        assert_eq!(ago.time_ms(500), Some(0));
        assert_eq!(Position::End.time_ms(5_000), None);
    }
}
