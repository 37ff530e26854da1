//! Bootstrap endpoints: `HOST:PORT`, where the host is a name, an IPv4 address or an IPv6
//! address in brackets.

/// Checks one endpoint and returns it without surrounding blanks.
///
/// # Errors
/// No port, a port that is no number from 1 to 65535, an empty host.
pub fn parse(text: &str) -> Result<String, String> {
    let text = text.trim();
    let Some((host, port)) = text.rsplit_once(':') else {
        return Err(format!("`{text}` has no port; write HOST:PORT"));
    };
    let bracketed = host.starts_with('[') && host.ends_with(']') && host.len() > 2;
    if host.is_empty() {
        return Err(format!("`{text}` has no host; write HOST:PORT"));
    }
    if host.contains(':') && !bracketed {
        return Err(format!(
            "`{text}`: an IPv6 address goes in brackets, as [::1]:7700"
        ));
    }
    if host.contains(|c: char| c.is_whitespace() || c == '/' || c == '@') {
        return Err(format!("`{text}` is no HOST:PORT"));
    }
    match port.parse::<u16>() {
        Ok(port) if port > 0 => Ok(text.to_owned()),
        _ => Err(format!("`{port}` is no port (1 to 65535)")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_of_names_and_addresses_keeps_them() {
        for endpoint in ["localhost:7700", "127.0.0.1:1", "[::1]:65535", "a.b-c:7"] {
            assert_eq!(parse(endpoint).unwrap(), endpoint);
        }
        assert_eq!(parse(" h:1 ").unwrap(), "h:1");
    }

    #[test]
    fn parse_of_anything_else_is_refused() {
        for wrong in [
            "",
            "localhost",
            ":7700",
            "h:0",
            "h:70000",
            "h:x",
            "::1:7700",
            "http://h:1",
            "a b:1",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
