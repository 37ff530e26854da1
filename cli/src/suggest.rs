//! Which of the names that exist was meant by one that does not.

/// Names are compared up to this many characters; longer ones are meant to be pasted.
const NAME_CHARS_MAX: usize = 256;
/// A beginning this long says which name was meant, if only one goes on from it.
const BEGINNING_CHARS_MIN: usize = 3;

/// The most similar of `candidates`, if one is similar enough to have been meant: a third of its
/// characters may be mistyped (or swapped), at least one; case and the choice of `-`, `_` and `.`
/// don't count. Else the only one that goes on from `name`.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let wanted = folded(name);
    if wanted.is_empty() {
        return None;
    }
    let mut best: Option<(usize, &str)> = None;
    let mut longer = (0usize, None);
    for candidate in candidates {
        let folded = folded(candidate);
        let allowed = (folded.len().max(wanted.len()) / 3).max(1);
        if folded.len().abs_diff(wanted.len()) <= allowed {
            let edits = edits(&wanted, &folded);
            // Of two that are as near, the first in the order of names: the same each time.
            if edits <= allowed && best.is_none_or(|best| (edits, candidate) < best) {
                best = Some((edits, candidate));
            }
        }
        if wanted.len() >= BEGINNING_CHARS_MIN && folded.starts_with(&wanted) {
            longer = (longer.0 + 1, Some(candidate));
        }
    }
    match (best, longer) {
        (Some((_, candidate)), _) => Some(candidate),
        (None, (1, candidate)) => candidate,
        _ => None,
    }
}

/// `did you mean 'orders'?`, if there is something similar.
pub fn did_you_mean<'a>(
    name: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<String> {
    nearest(name, candidates).map(|meant| format!("did you mean '{meant}'?"))
}

fn folded(name: &str) -> Vec<char> {
    name.chars()
        .take(NAME_CHARS_MAX)
        .map(|c| match c {
            '-' | '.' => '_',
            c => c.to_ascii_lowercase(),
        })
        .collect()
}

/// How many characters are to be inserted, removed, replaced or swapped with their neighbour:
/// optimal string alignment, which edits no place twice.
fn edits(a: &[char], b: &[char]) -> usize {
    let mut before: Vec<usize> = Vec::new();
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.iter().enumerate() {
        let mut row = Vec::with_capacity(b.len() + 1);
        row.push(i + 1);
        for (j, to) in b.iter().enumerate() {
            let replaced = last[j] + usize::from(from != to);
            let mut least = replaced.min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *from == b[j - 1] && a[i - 1] == *to {
                least = least.min(before[j - 1] + 1);
            }
            row.push(least);
        }
        before = std::mem::replace(&mut last, row);
    }
    last.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn distance(a: &str, b: &str) -> usize {
        edits(&folded(a), &folded(b))
    }

    #[test]
    fn edits_counts_a_swap_once() {
        assert_eq!(distance("ordres", "orders"), 1);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("abc", ""), 3);
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("ca", "abc"), 3);
        assert_eq!(distance("same", "same"), 0);
    }

    #[test]
    fn nearest_finds_the_name_that_was_meant() {
        let topics = ["orders", "orders.archive", "refunds", "users-v2"];
        let near = |name| nearest(name, topics);
        assert_eq!(near("ordres"), Some("orders"));
        assert_eq!(near("Orders"), Some("orders"));
        assert_eq!(near("users_v2"), Some("users-v2"));
        assert_eq!(near("refund"), Some("refunds"));
        assert_eq!(near("ref"), Some("refunds"), "the only one that goes on");
        assert_eq!(near("flights"), None);
        assert_eq!(near(""), None);
        assert_eq!(nearest("or", ["orders"]), None, "too short to say");
        assert_eq!(nearest("x", ["y"]), Some("y"));
    }

    #[test]
    fn nearest_is_the_same_whatever_the_order() {
        assert_eq!(nearest("topic-3", ["topic-2", "topic-1"]), Some("topic-1"));
        assert_eq!(nearest("topic-3", ["topic-1", "topic-2"]), Some("topic-1"));
    }

    #[test]
    fn nearest_copes_with_names_of_any_length() {
        let long = "x".repeat(100_000);
        assert_eq!(nearest(&long, ["orders"]), None);
        assert_eq!(
            did_you_mean("ordres", ["orders"]).as_deref(),
            Some("did you mean 'orders'?")
        );
    }
}
