//! The rules of topic names. A name that keeps them is safe as a path component.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// The name of the topic that consumer groups live in ([`crate::ids::TopicId::GROUPS`]).
pub const GROUPS_NAME: &str = "__groups";

/// A name is at most this long.
pub const NAME_BYTES_MAX: usize = 249;

/// Why a string is no topic name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TopicNameError {
    /// Nothing there.
    #[error("a topic name has at least one character")]
    Empty,
    /// Over [`NAME_BYTES_MAX`].
    #[error("a topic name has at most {NAME_BYTES_MAX} bytes, this one has {bytes}")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// A character outside `[A-Za-z0-9._-]`.
    #[error(
        "a topic name consists of A-Z a-z 0-9 . _ -, and {character:?} at byte {at} is none of them"
    )]
    BadCharacter {
        /// The first one.
        character: char,
        /// Where it starts, in bytes.
        at: usize,
    },
    /// `.` or `..`.
    #[error("a topic can't be named {name:?}")]
    Dots {
        /// The name.
        name: &'static str,
    },
    /// Names beginning with `__` belong to the cluster.
    #[error("topic names beginning with __ are reserved for the cluster itself")]
    Reserved,
}

/// Checks a name that a user gave.
///
/// # Errors
/// [`TopicNameError`] says what is wrong.
pub fn check_name(name: &str) -> Result<(), TopicNameError> {
    if name.is_empty() {
        return Err(TopicNameError::Empty);
    }
    if name.len() > NAME_BYTES_MAX {
        return Err(TopicNameError::TooLong { bytes: name.len() });
    }
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if let Some((at, character)) = name.char_indices().find(|&(_, c)| !allowed(c)) {
        return Err(TopicNameError::BadCharacter { character, at });
    }
    match name {
        "." => Err(TopicNameError::Dots { name: "." }),
        ".." => Err(TopicNameError::Dots { name: ".." }),
        _ if name.starts_with("__") => Err(TopicNameError::Reserved),
        _ => Ok(()),
    }
}

/// A name that keeps the rules. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopicName(Arc<str>);

impl TopicName {
    /// Checks `name` and keeps it.
    ///
    /// # Errors
    /// [`TopicNameError`] says what is wrong.
    pub fn new(name: &str) -> Result<Self, TopicNameError> {
        check_name(name)?;
        Ok(Self(name.into()))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TopicName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for TopicName {
    type Err = TopicNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::new(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topic_name_within_rules_is_taken() {
        for name in [
            "a",
            "flights",
            "A.b_c-9",
            "_x",
            "...",
            "-",
            &"x".repeat(249),
        ] {
            assert_eq!(check_name(name), Ok(()), "{name:?}");
        }
    }

    #[test]
    fn topic_name_against_rules_is_refused_with_reason() {
        assert_eq!(check_name(""), Err(TopicNameError::Empty));
        assert_eq!(
            check_name(&"x".repeat(250)),
            Err(TopicNameError::TooLong { bytes: 250 })
        );
        assert_eq!(check_name("."), Err(TopicNameError::Dots { name: "." }));
        assert_eq!(check_name(".."), Err(TopicNameError::Dots { name: ".." }));
        assert_eq!(check_name("__cluster"), Err(TopicNameError::Reserved));
        for (name, character, at) in [
            ("../../etc/passwd", '/', 2),
            ("a/b", '/', 1),
            ("a\\b", '\\', 1),
            ("caf\u{e9}", '\u{e9}', 3),
            ("\u{202e}x", '\u{202e}', 0),
            ("a b", ' ', 1),
            ("a\0", '\0', 1),
            ("a\n", '\n', 1),
        ] {
            assert_eq!(
                check_name(name),
                Err(TopicNameError::BadCharacter { character, at }),
                "{name:?}"
            );
        }
    }
}
