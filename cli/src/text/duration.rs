//! Durations with a unit: `5s`, `500ms`, `7d`.

use std::time::Duration;

/// Reads a duration.
///
/// # Errors
/// No unit, an unknown unit, or a value out of range.
pub fn parse(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text.trim())
        .map_err(|error| format!("{error}; write it as 5s, 500ms or 7d"))
}

/// As [`parse`], for limits, of which none is zero.
///
/// # Errors
/// As [`parse`], and zero.
pub fn parse_limit(text: &str) -> Result<Duration, String> {
    let limit = parse(text)?;
    if limit.is_zero() {
        return Err("a limit of zero leaves no time for anything".to_owned());
    }
    Ok(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_of_designed_forms_gives_their_length() {
        assert_eq!(parse("5s").unwrap(), Duration::from_secs(5));
        assert_eq!(parse("500ms").unwrap(), Duration::from_millis(500));
        assert_eq!(parse("7d").unwrap(), Duration::from_secs(7 * 86_400));
    }

    #[test]
    fn parse_without_unit_says_how_to_write_it() {
        assert!(parse("10").unwrap_err().contains("5s, 500ms or 7d"));
        assert!(parse("").is_err());
        assert!(parse("-1s").is_err());
        assert!(parse("99999999999999999999999d").is_err());
    }

    #[test]
    fn parse_limit_of_zero_is_refused() {
        assert!(parse_limit("0s").is_err());
        assert_eq!(parse_limit("1ms").unwrap(), Duration::from_millis(1));
    }
}
