//! How a record becomes bytes.

use qute_client::ConsumedRecord;

use crate::args::Output;
use crate::exit::Failure;
use crate::text::format::{Fields, Format};
use crate::text::json_series::JsonSeries;
use crate::text::record_json;

/// Prints records.
#[derive(Debug)]
pub struct Printer {
    form: Form,
}

#[derive(Debug)]
enum Form {
    Format(Format),
    Json(JsonSeries),
}

impl Printer {
    /// What the flags ask for.
    ///
    /// # Errors
    /// Two flags that both say how records are printed.
    pub fn new(format: Option<Format>, output: Output) -> Result<Self, Failure> {
        let form = match (output, format) {
            (Output::Json | Output::Jsonl, Some(_)) => {
                return Err(Failure::usage(
                    "-f and --output json or jsonl both say how records are printed",
                )
                .hint("give one of them"));
            }
            (Output::Json, None) => Form::Json(JsonSeries::array()),
            (Output::Jsonl, None) => Form::Json(JsonSeries::lines()),
            (Output::Table | Output::Raw, format) => Form::Format(format.unwrap_or_default()),
        };
        Ok(Self { form })
    }

    /// Appends the record to `out`.
    pub fn print(&mut self, record: &ConsumedRecord, out: &mut Vec<u8>) {
        let fields = Fields {
            topic: &record.topic,
            partition: record.partition,
            offset: record.offset,
            key: record.key.as_deref(),
            value: record.value.as_deref(),
            timestamp_ms: record.timestamp_ms,
            headers: &record.headers,
        };
        match &mut self.form {
            Form::Format(format) => format.render(&fields, out),
            Form::Json(series) => series.push(out, |out| record_json::render(&fields, out)),
        }
    }

    /// Appends what comes after the last record.
    pub fn end(&mut self, out: &mut Vec<u8>) {
        if let Form::Json(series) = &self.form {
            series.end(out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Exit;

    fn record(offset: u64) -> ConsumedRecord {
        ConsumedRecord {
            topic: "t".into(),
            partition: 0,
            offset,
            timestamp_ms: 5,
            broker_time_ms: 5,
            key: None,
            value: Some(b"\xff"[..].into()),
            headers: Vec::new(),
        }
    }

    fn printed(output: Output, offsets: std::ops::Range<u64>) -> Vec<u8> {
        let mut printer = Printer::new(None, output).unwrap();
        let mut out = Vec::new();
        for offset in offsets {
            printer.print(&record(offset), &mut out);
        }
        printer.end(&mut out);
        out
    }

    #[test]
    fn printer_refuses_what_cannot_go_together() {
        for output in [Output::Json, Output::Jsonl] {
            let refused = Printer::new(Format::parse("%v").ok(), output);
            assert_eq!(refused.unwrap_err().exit, Exit::Usage);
        }
        for output in [Output::Raw, Output::Table] {
            assert!(Printer::new(Format::parse("%v").ok(), output).is_ok());
        }
    }

    #[test]
    fn json_is_one_document_however_many_records_there_are() {
        for count in 0..3 {
            let text = printed(Output::Json, 0..count);
            let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
            let offsets = json
                .as_array()
                .unwrap()
                .iter()
                .map(|it| it["offset"].as_u64());
            assert_eq!(
                offsets.collect::<Option<Vec<_>>>().unwrap(),
                Vec::from_iter(0..count)
            );
            assert_eq!(text.last(), Some(&b'\n'));
        }
    }

    #[test]
    fn json_lines_are_a_document_each_with_base64_for_what_is_no_text() {
        let text = String::from_utf8(printed(Output::Jsonl, 0..2)).unwrap();
        assert_eq!(text.lines().count(), 2);
        for line in text.lines() {
            let json: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(json["value"]["base64"], "/w==");
        }
    }

    #[test]
    fn formats_have_nothing_after_the_last_record() {
        assert_eq!(printed(Output::Raw, 0..2), b"\xff\n\xff\n");
    }
}
