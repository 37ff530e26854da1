//! `group reset --to`: where a group's offsets are set.

use super::position::{self, Position};

/// Where to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetTarget {
    /// The log start offset.
    Start,
    /// The high watermark.
    End,
    /// This offset.
    Offset(u64),
    /// So many records on from the committed offset, or back.
    Shift(i64),
    /// The first record stored at this broker time or later; never [`Position`]'s other forms.
    Time(Position),
    /// Nowhere: the committed offset is forgotten.
    Forget,
}

/// Reads `start`, `end`, `N`, `+N`, `-N`, `@TIME` or `forget`.
///
/// # Errors
/// Anything else.
pub fn parse(text: &str) -> Result<ResetTarget, String> {
    let shift = |digits: &str, sign: &str| {
        let by: i64 = format!("{sign}{digits}")
            .parse()
            .map_err(|_| format!("`{text}` is farther than any offset"))?;
        Ok(ResetTarget::Shift(by))
    };
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let wrong = || {
        "write start, end, an offset N, +N or -N to go on or back from what is committed, @TIME, or forget"
            .to_owned()
    };
    match text {
        "forget" => return Ok(ResetTarget::Forget),
        _ if text.starts_with('@') => return position::parse(text).map(ResetTarget::Time),
        _ => {}
    }
    if let Some(by) = text.strip_prefix('+').filter(|by| is_number(by)) {
        return shift(by, "");
    }
    if let Some(by) = text.strip_prefix('-').filter(|by| is_number(by)) {
        return shift(by, "-");
    }
    match position::parse(text) {
        Ok(Position::Start) => Ok(ResetTarget::Start),
        Ok(Position::End) => Ok(ResetTarget::End),
        Ok(Position::Offset(offset)) => Ok(ResetTarget::Offset(offset)),
        Ok(_) => Err(wrong()),
        Err(error) if is_number(text) => Err(error),
        Err(_) => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn parse_of_designed_forms_gives_their_target() {
        for (text, target) in [
            ("start", ResetTarget::Start),
            ("end", ResetTarget::End),
            ("0", ResetTarget::Offset(0)),
            ("42", ResetTarget::Offset(42)),
            ("+7", ResetTarget::Shift(7)),
            ("-7", ResetTarget::Shift(-7)),
            (
                "@1700000000123",
                ResetTarget::Time(Position::Time(1_700_000_000_123)),
            ),
            (
                "@-1h",
                ResetTarget::Time(Position::Ago(Duration::from_secs(3600))),
            ),
            ("forget", ResetTarget::Forget),
        ] {
            assert_eq!(parse(text), Ok(target), "{text}");
        }
    }

    #[test]
    fn parse_of_anything_else_is_refused() {
        for wrong in [
            "",
            "begin",
            "+",
            "-",
            "+-1",
            "--1",
            "1.5",
            "@",
            "@noon",
            "+9223372036854775808",
            "18446744073709551616",
            "none",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
