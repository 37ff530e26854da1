//! Objects that come one by one, as `--output json` and `jsonl` print them: one array, an object a
//! line, or objects alone, one a line.

/// What stands between the objects.
#[derive(Debug)]
pub struct JsonSeries {
    array: bool,
    /// Nothing was printed yet.
    first: bool,
}

impl JsonSeries {
    /// One array.
    #[must_use]
    pub const fn array() -> Self {
        Self {
            array: true,
            first: true,
        }
    }

    /// An object a line.
    #[must_use]
    pub const fn lines() -> Self {
        Self {
            array: false,
            first: true,
        }
    }

    /// Appends an object, which `render` appends without a newline.
    pub fn push(&mut self, out: &mut Vec<u8>, render: impl FnOnce(&mut Vec<u8>)) {
        if self.array {
            let before: &[u8] = if self.first { b"[\n" } else { b",\n" };
            out.extend_from_slice(before);
        }
        render(out);
        if !self.array {
            out.push(b'\n');
        }
        self.first = false;
    }

    /// Appends what comes after the last object.
    pub fn end(&self, out: &mut Vec<u8>) {
        if self.array {
            let end: &[u8] = if self.first { b"[]\n" } else { b"\n]\n" };
            out.extend_from_slice(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(mut series: JsonSeries, count: u64) -> String {
        let mut out = Vec::new();
        for number in 0..count {
            series.push(&mut out, |out| {
                out.extend_from_slice(number.to_string().as_bytes())
            });
        }
        series.end(&mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn array_is_one_document_however_many_objects_there_are() {
        assert_eq!(printed(JsonSeries::array(), 0), "[]\n");
        assert_eq!(printed(JsonSeries::array(), 1), "[\n0\n]\n");
        assert_eq!(printed(JsonSeries::array(), 3), "[\n0,\n1,\n2\n]\n");
    }

    #[test]
    fn lines_are_a_document_each() {
        assert_eq!(printed(JsonSeries::lines(), 0), "");
        assert_eq!(printed(JsonSeries::lines(), 2), "0\n1\n");
    }
}
