//! `K=V` pairs: headers and topic settings. The value may be empty and may hold `=`.

/// Splits at the first `=`.
///
/// # Errors
/// No `=`, or nothing before it.
pub fn parse(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some(("", _)) => Err("nothing before the `=`; write KEY=VALUE".to_owned()),
        Some((key, value)) => Ok((key.to_owned(), value.to_owned())),
        None => Err("no `=`; write KEY=VALUE".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_splits_at_the_first_equals_sign() {
        assert_eq!(parse("a=b=c").unwrap(), ("a".to_owned(), "b=c".to_owned()));
        assert_eq!(parse("a=").unwrap(), ("a".to_owned(), String::new()));
    }

    #[test]
    fn parse_without_key_or_sign_is_refused() {
        assert!(parse("=v").is_err());
        assert!(parse("v").is_err());
        assert!(parse("").is_err());
    }
}
