//! The flights data, its published table, and the checks against both.
//!
//! `tests/data/README.md` names source and licence. One event a line: key, tab, value. No two
//! lines are equal, so a line is its own identity: one that is missing, doubled or out of its
//! key's order shows.

use std::collections::{BTreeMap, HashMap};
use std::io::BufReader;
use std::path::Path;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail, ensure};

/// Number of lines.
pub const LINES: usize = 336_776;
/// Size when unpacked.
pub const SIZE_BYTES: usize = 33_399_479;

/// The published number of flights by carrier.
pub const CARRIERS: [(&str, usize); 16] = [
    ("UA", 58_665),
    ("B6", 54_635),
    ("EV", 54_173),
    ("DL", 48_110),
    ("AA", 32_729),
    ("MQ", 26_397),
    ("US", 20_536),
    ("9E", 18_460),
    ("WN", 12_275),
    ("VX", 5_162),
    ("FL", 3_260),
    ("AS", 714),
    ("F9", 685),
    ("YV", 601),
    ("HA", 342),
    ("OO", 32),
];

/// Some published numbers of events by key.
pub const KEYS: [(&str, usize); 4] = [
    ("NA", 2_512),
    ("N725MQ", 575),
    ("N722MQ", 513),
    ("N723MQ", 507),
];

/// The unpacked file, one copy per process.
///
/// # Errors
/// When it can't be read, or is not the file that was published.
pub fn text() -> Result<&'static [u8]> {
    static TEXT: OnceLock<std::result::Result<Vec<u8>, String>> = OnceLock::new();
    match TEXT.get_or_init(|| unpack().map_err(|error| format!("{error:#}"))) {
        Ok(text) => Ok(text),
        Err(error) => bail!("flights data: {error}"),
    }
}

fn unpack() -> Result<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/flights.tsv.xz");
    let file = std::fs::File::open(&path).with_context(|| path.display().to_string())?;
    let mut text = Vec::with_capacity(SIZE_BYTES);
    lzma_rs::xz_decompress(&mut BufReader::new(file), &mut text)
        .with_context(|| path.display().to_string())?;
    ensure!(text.len() == SIZE_BYTES, "{} bytes unpacked", text.len());
    let lines = text.iter().filter(|&&byte| byte == b'\n').count();
    ensure!(lines == LINES, "{lines} lines unpacked");
    Ok(text)
}

/// The lines, without their newlines.
///
/// # Errors
/// As [`text`].
pub fn lines() -> Result<Vec<&'static [u8]>> {
    let text = text()?;
    let text = text.strip_suffix(b"\n").unwrap_or(text);
    Ok(text.split(|&byte| byte == b'\n').collect())
}

/// The key of a line.
#[must_use]
pub fn key(line: &[u8]) -> &[u8] {
    line.split(|&byte| byte == b'\t').next().unwrap_or(line)
}

/// Number of lines by carrier, column 10 of the value.
///
/// # Errors
/// When a line has no such column.
pub fn carriers(text: &[u8]) -> Result<BTreeMap<String, usize>> {
    let mut table = BTreeMap::new();
    for line in text
        .split(|&byte| byte == b'\n')
        .filter(|line| !line.is_empty())
    {
        let column = line.split(|&byte| byte == b',').nth(9);
        let carrier = column.with_context(|| format!("no carrier in {}", show(line)))?;
        *table
            .entry(String::from_utf8_lossy(carrier).into_owned())
            .or_default() += 1;
    }
    Ok(table)
}

/// Holds consumed lines (`key \t value \n` each) against the input: each line of it exactly
/// once, nothing else, each key's lines in input order, the carriers as published.
///
/// # Errors
/// What is wrong, with counts and an example.
pub fn verify(consumed: &[u8]) -> Result<()> {
    let input = lines()?;
    let mut place_of: HashMap<&[u8], usize> = HashMap::with_capacity(input.len());
    for (place, line) in input.iter().enumerate() {
        place_of.insert(line, place);
    }
    let mut seen = vec![false; input.len()];
    let mut last_of_key: HashMap<&[u8], usize> = HashMap::new();
    let (mut count, mut foreign, mut doubled, mut misordered) = (0_usize, vec![], vec![], vec![]);
    let body = consumed.strip_suffix(b"\n").unwrap_or(consumed);
    for line in body
        .split(|&byte| byte == b'\n')
        .filter(|_| !body.is_empty())
    {
        count += 1;
        let Some(&place) = place_of.get(line) else {
            foreign.push(show(line));
            continue;
        };
        let Some(seen) = seen.get_mut(place) else {
            bail!("place {place} of {}", input.len())
        };
        if std::mem::replace(seen, true) {
            doubled.push(show(line));
        } else if last_of_key
            .insert(key(line), place)
            .is_some_and(|last| last > place)
        {
            misordered.push(show(line));
        }
    }
    let missing = seen.iter().filter(|&&seen| !seen).count();
    ensure!(
        count == LINES
            && missing == 0
            && foreign.is_empty()
            && doubled.is_empty()
            && misordered.is_empty(),
        "{count} records consumed of {LINES}: {missing} missing (the first: {:?}), \
         {} foreign (the first: {:?}), {} doubled (the first: {:?}), \
         {} out of their key's order (the first: {:?})",
        seen.iter()
            .zip(&input)
            .find(|(seen, _)| !**seen)
            .map(|(_, line)| show(line)),
        foreign.len(),
        foreign.first(),
        doubled.len(),
        doubled.first(),
        misordered.len(),
        misordered.first(),
    );
    ensure!(
        carriers(consumed)? == published(),
        "the table of carriers differs"
    );
    Ok(())
}

fn published() -> BTreeMap<String, usize> {
    CARRIERS
        .iter()
        .map(|&(carrier, count)| (carrier.to_owned(), count))
        .collect()
}

fn show(line: &[u8]) -> String {
    String::from_utf8_lossy(line).chars().take(120).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flights_match_their_published_tables() {
        assert_eq!(carriers(text().unwrap()).unwrap(), published());
        for (name, count) in KEYS {
            let of_key = |line: &&&[u8]| key(line) == name.as_bytes();
            assert_eq!(
                lines().unwrap().iter().filter(of_key).count(),
                count,
                "{name}"
            );
        }
    }

    #[test]
    fn verification_of_the_input_itself_passes() {
        verify(text().unwrap()).unwrap();
    }

    #[test]
    fn verification_of_a_changed_stream_names_the_fault() {
        let whole = lines().unwrap();
        let join = |lines: &[&[u8]]| [lines.join(&b'\n'), b"\n".to_vec()].concat();
        let fault = |lines: &[&[u8]]| verify(&join(lines)).unwrap_err().to_string();

        assert!(fault(&whole[1..]).contains("1 missing"));
        assert!(fault(&[&whole[..1], &whole[..]].concat()).contains("1 doubled"));
        assert!(fault(&[&whole[..], &[b"N1\tx".as_slice()]].concat()).contains("1 foreign"));

        let na: Vec<usize> = (0..whole.len())
            .filter(|&i| key(whole[i]) == b"NA")
            .collect();
        let mut swapped = whole.clone();
        swapped.swap(na[0], na[1]);
        assert!(fault(&swapped).contains("1 out of their key's order"));
    }
}
