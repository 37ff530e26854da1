//! `-f`: the language in which a record is printed, compiled once to a list of steps.
//!
//! Verbs: `%t` topic, `%p` partition, `%o` offset, `%k` key, `%v` value, `%T` timestamp in Unix
//! milliseconds, `%h` headers (`a=1,b=2`), `%%`. Escapes: `\n \t \r \0 \\`. Keys and values come
//! out byte for byte; one that is absent prints nothing.

use qute_proto::batch::RecordHeader;

use super::escape;

/// The parts of a record that a format can print.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a> {
    /// Topic name.
    pub topic: &'a str,
    /// Partition number.
    pub partition: u32,
    /// Offset.
    pub offset: u64,
    /// Key, if the record has one.
    pub key: Option<&'a [u8]>,
    /// Value, if the record has one.
    pub value: Option<&'a [u8]>,
    /// Timestamp, Unix milliseconds.
    pub timestamp_ms: i64,
    /// Headers, in the order of the record.
    pub headers: &'a [RecordHeader],
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Literal(Vec<u8>),
    Topic,
    Partition,
    Offset,
    Key,
    Value,
    Timestamp,
    Headers,
}

/// A compiled format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Format {
    steps: Vec<Step>,
}

impl Default for Format {
    /// What is printed without `-f`: `%v\n`.
    fn default() -> Self {
        Self {
            steps: vec![Step::Value, Step::Literal(b"\n".to_vec())],
        }
    }
}

impl Format {
    /// Compiles a format.
    ///
    /// # Errors
    /// An unknown verb or escape, or one cut off at the end.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut steps = Vec::new();
        let mut literal = Vec::new();
        let mut rest = text.chars();
        while let Some(c) = rest.next() {
            let step = match c {
                '%' => match verb(rest.next())? {
                    Some(step) => step,
                    None => {
                        literal.push(b'%');
                        continue;
                    }
                },
                '\\' => {
                    literal.push(escaped(rest.next())?);
                    continue;
                }
                c => {
                    literal.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
                    continue;
                }
            };
            if !literal.is_empty() {
                steps.push(Step::Literal(std::mem::take(&mut literal)));
            }
            steps.push(step);
        }
        if !literal.is_empty() {
            steps.push(Step::Literal(literal));
        }
        Ok(Self { steps })
    }

    /// Appends the printed record to `out`.
    pub fn render(&self, record: &Fields<'_>, out: &mut Vec<u8>) {
        for step in &self.steps {
            match step {
                Step::Literal(bytes) => out.extend_from_slice(bytes),
                Step::Topic => out.extend_from_slice(record.topic.as_bytes()),
                Step::Partition => decimal(record.partition, out),
                Step::Offset => decimal(record.offset, out),
                Step::Key => out.extend_from_slice(record.key.unwrap_or_default()),
                Step::Value => out.extend_from_slice(record.value.unwrap_or_default()),
                Step::Timestamp => decimal(record.timestamp_ms, out),
                Step::Headers => headers(record.headers, out),
            }
        }
    }
}

fn verb(letter: Option<char>) -> Result<Option<Step>, String> {
    Ok(Some(match letter {
        Some('t') => Step::Topic,
        Some('p') => Step::Partition,
        Some('o') => Step::Offset,
        Some('k') => Step::Key,
        Some('v') => Step::Value,
        Some('T') => Step::Timestamp,
        Some('h') => Step::Headers,
        Some('%') => return Ok(None),
        Some(other) => {
            return Err(format!(
                "unknown verb `%{}`; there are %t %p %o %k %v %T %h %%",
                other.escape_default()
            ));
        }
        None => return Err("a `%` at the end; write `%%` for the sign itself".to_owned()),
    }))
}

fn escaped(after: Option<char>) -> Result<u8, String> {
    match after {
        Some(c) if !c.is_ascii() => {
            Err(format!(r"unknown escape `\{c}`; there are \n \t \r \0 \\"))
        }
        Some(c) => {
            let mut buffer = [0; 4];
            escape::resolve(c.encode_utf8(&mut buffer).bytes().next())
        }
        None => escape::resolve(None),
    }
}

/// Digits by hand: formatting machinery costs more than all else that a record of a few bytes does.
fn decimal(number: impl Into<i128>, out: &mut Vec<u8>) {
    let number: i128 = number.into();
    if number < 0 {
        out.push(b'-');
    }
    let mut rest = u64::try_from(number.unsigned_abs()).unwrap_or(u64::MAX);
    let mut digits = [b'0'; 20];
    let mut first = digits.len();
    for (place, digit) in digits.iter_mut().enumerate().rev() {
        *digit = b'0' + u8::try_from(rest % 10).unwrap_or(0);
        rest /= 10;
        first = place;
        if rest == 0 {
            break;
        }
    }
    out.extend_from_slice(digits.get(first..).unwrap_or_default());
}

fn headers(headers: &[RecordHeader], out: &mut Vec<u8>) {
    for (i, header) in headers.iter().enumerate() {
        if i > 0 {
            out.push(b',');
        }
        out.extend_from_slice(header.name.as_bytes());
        out.push(b'=');
        out.extend_from_slice(header.value.as_deref().unwrap_or_default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: Fields<'static> = Fields {
        topic: "flights",
        partition: 3,
        offset: 42,
        key: Some(b"N725MQ"),
        value: Some(b"a\xffb"),
        timestamp_ms: 1_700_000_000_123,
        headers: &[],
    };

    fn render(format: &str, record: &Fields<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        Format::parse(format).unwrap().render(record, &mut out);
        out
    }

    #[test]
    fn render_of_every_verb_prints_its_field() {
        let header = |name: &str, value: Option<&'static [u8]>| RecordHeader {
            name: name.to_owned(),
            value: value.map(bytes::Bytes::from_static),
        };
        let record = Fields {
            headers: &[header("source", Some(b"x")), header("empty", None)],
            ..RECORD
        };
        assert_eq!(
            render(r"%t %p %o %k %v %T %h %%\t\0\\\r\n", &record),
            b"flights 3 42 N725MQ a\xffb 1700000000123 source=x,empty= %\t\0\\\r\n".to_vec()
        );
    }

    #[test]
    fn render_of_numbers_prints_the_largest_and_the_smallest() {
        let record = Fields {
            partition: u32::MAX,
            offset: u64::MAX,
            timestamp_ms: i64::MIN,
            ..RECORD
        };
        let printed = format!("{} {} {}", u32::MAX, u64::MAX, i64::MIN);
        assert_eq!(render("%p %o %T", &record), printed.into_bytes());
        let record = Fields {
            partition: 0,
            offset: 10,
            timestamp_ms: -1,
            ..RECORD
        };
        assert_eq!(render("%p %o %T", &record), b"0 10 -1".to_vec());
    }

    #[test]
    fn render_of_default_prints_value_and_newline() {
        assert_eq!(Format::default(), Format::parse(r"%v\n").unwrap());
        assert_eq!(render(r"%v\n", &RECORD), b"a\xffb\n".to_vec());
    }

    #[test]
    fn render_adds_nothing_of_its_own() {
        assert_eq!(render("%k", &RECORD), b"N725MQ".to_vec());
        assert_eq!(render("", &RECORD), Vec::<u8>::new());
        assert_eq!(render("é", &RECORD), "é".as_bytes().to_vec());
    }

    #[test]
    fn render_of_absent_key_and_value_prints_nothing() {
        let record = Fields {
            key: None,
            value: None,
            ..RECORD
        };
        assert_eq!(render("[%k|%v]", &record), b"[|]".to_vec());
    }

    #[test]
    fn parse_of_unknown_verb_names_it() {
        assert!(Format::parse("%x").unwrap_err().contains("`%x`"));
        assert!(Format::parse("%é").is_err());
        assert!(Format::parse("100%").unwrap_err().contains("at the end"));
    }

    #[test]
    fn parse_of_unknown_escape_is_refused() {
        assert!(Format::parse(r"\x").unwrap_err().contains(r"`\x`"));
        assert!(Format::parse(r"\é").is_err());
        assert!(Format::parse("\\").is_err());
    }
}
