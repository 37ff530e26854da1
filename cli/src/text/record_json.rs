//! A record as one JSON object (`--output jsonl` and `json`).
//!
//! Keys and values are strings where they are UTF-8, `{"base64": "..."}` where they are not, and
//! null where they are absent, so that every record can be told from every other.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Serialize, Serializer};

use super::format::Fields;

#[derive(Serialize)]
struct Line<'a> {
    topic: &'a str,
    partition: u32,
    offset: u64,
    timestamp_ms: i64,
    key: Option<Binary<'a>>,
    value: Option<Binary<'a>>,
    headers: Vec<Header<'a>>,
}

#[derive(Serialize)]
struct Header<'a> {
    name: &'a str,
    value: Option<Binary<'a>>,
}

/// Bytes: a string where they are UTF-8, `{"base64": "..."}` where they are not.
pub(crate) struct Binary<'a>(pub(crate) &'a [u8]);

#[derive(Serialize)]
struct Base64 {
    base64: String,
}

impl Serialize for Binary<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match std::str::from_utf8(self.0) {
            Ok(text) => serializer.serialize_str(text),
            Err(_) => Base64 {
                base64: STANDARD.encode(self.0),
            }
            .serialize(serializer),
        }
    }
}

/// Appends the record to `out`, without a newline.
pub fn render(record: &Fields<'_>, out: &mut Vec<u8>) {
    let line = Line {
        topic: record.topic,
        partition: record.partition,
        offset: record.offset,
        timestamp_ms: record.timestamp_ms,
        key: record.key.map(Binary),
        value: record.value.map(Binary),
        headers: record
            .headers
            .iter()
            .map(|header| Header {
                name: &header.name,
                value: header.value.as_deref().map(Binary),
            })
            .collect(),
    };
    // Strings and numbers into a vector: neither can fail.
    let _ = serde_json::to_writer(out, &line);
}

#[cfg(test)]
mod tests {
    use super::*;
    use qute_proto::batch::RecordHeader;

    #[test]
    fn render_tells_absent_empty_text_and_binary_apart() {
        let mut record = Fields {
            topic: "t",
            partition: 1,
            offset: 2,
            key: None,
            value: Some(b""),
            timestamp_ms: -3,
            headers: &[RecordHeader {
                name: "h".to_owned(),
                value: None,
            }],
        };
        let mut out = Vec::new();
        render(&record, &mut out);
        out.push(b'\n');
        record.key = Some(b"a\n\"");
        record.value = Some(b"\xff\x00");
        record.headers = &[];
        render(&record, &mut out);
        let expected = concat!(
            r#"{"topic":"t","partition":1,"offset":2,"timestamp_ms":-3,"key":null,"value":"","headers":[{"name":"h","value":null}]}"#,
            "\n",
            r#"{"topic":"t","partition":1,"offset":2,"timestamp_ms":-3,"key":"a\n\"","value":{"base64":"/wA="},"headers":[]}"#
        );
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }
}
