//! The rules of group names.

/// A name is at most this long.
pub const NAME_BYTES_MAX: usize = 249;

/// Why a string is no group name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GroupNameError {
    /// Nothing there.
    #[error("a group name has at least one character")]
    Empty,
    /// Over [`NAME_BYTES_MAX`].
    #[error("a group name has at most {NAME_BYTES_MAX} bytes, this one has {bytes}")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// A control character.
    #[error("a group name has no control characters, and {character:?} at byte {at} is one")]
    Control {
        /// The first one.
        character: char,
        /// Where it starts, in bytes.
        at: usize,
    },
}

/// Checks a name that a user gave: 1 to 249 bytes of UTF-8 without control characters.
///
/// # Errors
/// [`GroupNameError`] says what is wrong.
pub fn check_name(name: &str) -> Result<(), GroupNameError> {
    if name.is_empty() {
        return Err(GroupNameError::Empty);
    }
    if name.len() > NAME_BYTES_MAX {
        return Err(GroupNameError::TooLong { bytes: name.len() });
    }
    match name.char_indices().find(|(_, c)| c.is_control()) {
        Some((at, character)) => Err(GroupNameError::Control { character, at }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_name_within_rules_is_taken() {
        for name in [
            "a",
            "billing",
            "a b/c",
            "caf\u{e9}",
            "__x",
            &"x".repeat(249),
        ] {
            assert_eq!(check_name(name), Ok(()), "{name:?}");
        }
    }

    #[test]
    fn group_name_against_rules_is_refused_with_reason() {
        assert_eq!(check_name(""), Err(GroupNameError::Empty));
        let long = "\u{e9}".repeat(125);
        assert_eq!(
            check_name(&long),
            Err(GroupNameError::TooLong { bytes: 250 })
        );
        for (name, character, at) in [
            ("a\0", '\0', 1),
            ("\n", '\n', 0),
            ("\u{e9}\u{85}", '\u{85}', 2),
        ] {
            assert_eq!(
                check_name(name),
                Err(GroupNameError::Control { character, at }),
                "{name:?}"
            );
        }
    }
}
