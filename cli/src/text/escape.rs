//! Backslash escapes in `-f` and `-K`: `\n \t \r \0 \\`. Works on bytes, so that a delimiter may
//! be any bytes a shell can pass.

/// Replaces the escapes in `text`.
///
/// # Errors
/// An escape that is not one of the five, or a backslash at the end.
pub fn unescape(text: &[u8]) -> Result<Vec<u8>, String> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.iter().copied();
    while let Some(byte) = rest.next() {
        if byte == b'\\' {
            out.push(resolve(rest.next())?);
        } else {
            out.push(byte);
        }
    }
    Ok(out)
}

/// The byte that a backslash and `after` stand for.
///
/// # Errors
/// `after` starts no escape.
pub fn resolve(after: Option<u8>) -> Result<u8, String> {
    match after {
        Some(b'n') => Ok(b'\n'),
        Some(b't') => Ok(b'\t'),
        Some(b'r') => Ok(b'\r'),
        Some(b'0') => Ok(0),
        Some(b'\\') => Ok(b'\\'),
        Some(other) => Err(format!(
            r"unknown escape `\{}`; there are \n \t \r \0 \\",
            char::from(other).escape_default()
        )),
        None => Err(r"a backslash at the end; write `\\` for the backslash itself".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unescape_of_all_five_gives_their_bytes() {
        assert_eq!(
            unescape(br"a\n\t\r\0\\z").unwrap(),
            b"a\n\t\r\0\\z".to_vec()
        );
    }

    #[test]
    fn unescape_keeps_bytes_that_are_no_text() {
        assert_eq!(unescape(b"\xff\t\xfe").unwrap(), b"\xff\t\xfe".to_vec());
    }

    #[test]
    fn unescape_of_unknown_or_cut_escape_is_refused() {
        assert!(unescape(br"\x41").unwrap_err().contains(r"`\x`"));
        assert!(unescape(br"a\").unwrap_err().contains("at the end"));
    }
}
