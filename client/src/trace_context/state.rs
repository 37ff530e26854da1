//! The value of `tracestate`: a list of members `key=value`, the newest in front.

const MEMBERS_MAX: usize = 32;
/// What is longer is shortened, member by member.
const CHARS_MAX: usize = 512;
/// Members longer than this go first.
const MEMBER_LONG: usize = 128;

/// A list of members, without blanks around them and without empty ones; `None` if one is not well
/// formed, comes twice, or there are too many. Shortened if it is too long.
pub(super) fn parse(text: &str) -> Option<String> {
    let mut members: Vec<(&str, &str)> = Vec::new();
    for member in text
        .split(',')
        .map(|member| member.trim_matches([' ', '\t']))
    {
        if member.is_empty() {
            continue;
        }
        let (key, value) = member.split_once('=')?;
        let known = members.iter().any(|(other, _)| *other == key);
        if known || !is_key(key) || !is_value(value) {
            return None;
        }
        members.push((key, value));
        if members.len() > MEMBERS_MAX {
            return None;
        }
    }
    let chars = |(key, value): &(&str, &str)| key.len() + 1 + value.len();
    let mut total = members
        .iter()
        .map(|member| chars(member) + 1)
        .sum::<usize>();
    // The newest stand in front.
    for least in [MEMBER_LONG + 1, 0] {
        let mut at = members.len();
        while total > CHARS_MAX + 1 && at > 0 {
            at -= 1;
            if let Some(long) = members.get(at).map(chars).filter(|&chars| chars >= least) {
                total -= long + 1;
                members.remove(at);
            }
        }
    }
    let members: Vec<String> = members
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    Some(members.join(","))
}

fn is_key(key: &str) -> bool {
    let letter_or_digit = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    (1..=256).contains(&key.len())
        && key.bytes().next().is_some_and(letter_or_digit)
        && key
            .bytes()
            .all(|b| letter_or_digit(b) || b"_-*/@".contains(&b))
}

fn is_value(value: &str) -> bool {
    (1..=256).contains(&value.len())
        && !value.ends_with(' ')
        && value
            .bytes()
            .all(|b| (b' '..=b'~').contains(&b) && b != b',' && b != b'=')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn tracestate_is_kept_in_order_without_blanks() {
        for (text, state) in [
            (
                "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
                "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
            ),
            (" a=1 ,\tb=2\t,, ", "a=1,b=2"),
            (
                "fw529a3039@dt=FfAAAA,0tenant@sys=x",
                "fw529a3039@dt=FfAAAA,0tenant@sys=x",
            ),
            ("a= b c", "a= b c"),
            ("", ""),
        ] {
            assert_eq!(parse(text).as_deref(), Some(state), "{text:?}");
        }
    }

    #[test]
    fn malformed_tracestate_is_refused() {
        let many = (0..33)
            .map(|n| format!("k{n}=v"))
            .collect::<Vec<_>>()
            .join(",");
        let long_key = format!("{}=v", "k".repeat(257));
        let long_value = format!("k={}", "v".repeat(257));
        for text in [
            "a",
            "a=",
            "=a",
            "a=1,a=2",
            "A=1",
            "a=b=c",
            "_a=1",
            "a=\u{e9}",
            "é=1",
            "a=\u{7}",
            "a b=1",
            &many,
            &long_key,
            &long_value,
        ] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn tracestate_that_is_too_long_loses_long_members_and_then_the_last() {
        let long = format!("long={}", "v".repeat(200));
        let short: Vec<String> = (0..30).map(|n| format!("k{n:02}=0123456789")).collect();
        let text = format!("{},{long},{}", short[..5].join(","), short[5..].join(","));
        assert!(short.join(",").len() <= CHARS_MAX);
        let state = parse(&text).unwrap();
        assert_eq!(state, short.join(","), "only the long one had to go");

        let short: Vec<String> = (0..32)
            .map(|n| format!("k{n:02}=0123456789abcdef"))
            .collect();
        let state = parse(&short.join(",")).unwrap();
        assert!(state.len() <= CHARS_MAX);
        assert!(short.join(",").starts_with(&state));
        assert!(CHARS_MAX - state.len() < 21, "and no more than needed");
    }

    proptest! {
        #[test]
        fn any_text_is_refused_or_read_for_good(text in "([a-c]{0,3}[=, ]{0,2}|\\PC){0,300}") {
            if let Some(state) = parse(&text) {
                prop_assert!(state.len() <= CHARS_MAX);
                let again = parse(&state);
                prop_assert_eq!(again, Some(state));
            }
        }
    }
}
