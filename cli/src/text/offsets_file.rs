//! `group reset --from-file`: a line per partition, of topic, partition and offset, as
//! `group lag --output raw` prints them. Further columns, blank lines and those that begin with `#`
//! count for nothing, and so do partitions whose offset is `-`: nothing was committed there.

use std::collections::BTreeMap;

/// Offsets by topic and partition.
pub type Offsets = BTreeMap<(String, u32), u64>;

/// Reads a whole file.
///
/// # Errors
/// A line that is none of these, with its number; a partition given twice; no offset at all.
pub fn parse(text: &str) -> Result<Offsets, String> {
    let mut offsets = Offsets::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong =
            || format!("line {number}: write topic, partition and offset, with blanks between");
        let mut words = line.split_whitespace();
        let (Some(topic), Some(partition), Some(offset)) =
            (words.next(), words.next(), words.next())
        else {
            return Err(wrong());
        };
        let partition: u32 = partition.parse().map_err(|_| wrong())?;
        if offset == "-" {
            continue;
        }
        let offset: u64 = offset.parse().map_err(|_| wrong())?;
        if offsets
            .insert((topic.to_owned(), partition), offset)
            .is_some()
        {
            return Err(format!(
                "line {number}: {topic}/{partition} comes a second time"
            ));
        }
    }
    match offsets.is_empty() {
        true => Err("there is no offset in it".to_owned()),
        false => Ok(offsets),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_takes_what_lag_prints_and_what_people_write() {
        let text = "# saved before the trial\n\norders\t0\t42\t50\t8\tmember\norders 1 7\norders\t2\t-\t9\t-\t-\n  refunds   0   0\r\n";
        let expected = [(("orders", 0), 42), (("orders", 1), 7), (("refunds", 0), 0)];
        let expected =
            expected.map(|((topic, partition), offset)| ((topic.to_owned(), partition), offset));
        assert_eq!(parse(text), Ok(expected.into()));
    }

    #[test]
    fn parse_names_the_line_that_is_wrong() {
        for (text, says) in [
            ("a 0 1\nb", "line 2"),
            ("a 0", "line 1"),
            ("a x 1", "line 1"),
            ("a 0 -1", "line 1"),
            ("a 0 1\n\na 0 1", "line 3: a/0 comes a second time"),
            ("", "no offset"),
            ("a 0 -", "no offset"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(says), "{text:?}: {error}");
        }
    }
}
