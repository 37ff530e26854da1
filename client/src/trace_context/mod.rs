//! W3C trace context in record headers: which trace a record belongs to, across programs.
//!
//! Two headers, as in HTTP: `traceparent` (trace, span, flags) and `tracestate` (what tracing systems
//! add to it). By <https://www.w3.org/TR/trace-context/>; keys of `tracestate` by level 2, which takes
//! all that level 1 does. Needs no tracing library:
//!
//! ```text
//!  00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01
//!  |  |                                |                '- flags: 1 = sampled
//!  |  '- trace: 16 bytes, not all zero '- span that caused it: 8 bytes, not all zero
//!  '- version; later ones may go on behind the flags
//! ```
//!
//! What is not well formed is ignored, as if it were not there: a bad `traceparent` with its
//! `tracestate`, a bad `tracestate` alone.

mod layer;
mod state;

use std::fmt;

use bytes::Bytes;
use qute_proto::batch::RecordHeader;

use crate::record::ConsumedRecord;
pub use layer::TraceContextLayer;

const TRACEPARENT: &str = "traceparent";
const TRACESTATE: &str = "tracestate";
/// Length of a `traceparent` of version 0.
const TRACEPARENT_CHARS: usize = 55;
const SAMPLED: u8 = 1;

/// The place of a record, or of a span, in a trace.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TraceContext {
    trace_id: u128,
    parent_id: u64,
    flags: u8,
    state: String,
}

impl TraceContext {
    /// The context of a known span: the trace's id, the span's id, the flags (1: sampled). `None`
    /// if one of the ids is 0, which stands for "no trace".
    #[must_use]
    pub fn new(trace_id: u128, parent_id: u64, flags: u8) -> Option<Self> {
        (trace_id != 0 && parent_id != 0).then_some(Self {
            trace_id,
            parent_id,
            flags,
            state: String::new(),
        })
    }

    /// A new trace with random ids.
    #[must_use]
    pub fn root(sampled: bool) -> Self {
        Self {
            trace_id: rand::random::<u128>().max(1),
            parent_id: rand::random::<u64>().max(1),
            flags: if sampled { SAMPLED } else { 0 },
            state: String::new(),
        }
    }

    /// Another span of the same trace, with a random id.
    #[must_use]
    pub fn child(&self) -> Self {
        Self {
            parent_id: rand::random::<u64>().max(1),
            ..self.clone()
        }
    }

    /// Reads the two headers' values. `None` if `traceparent` is not well formed; a `tracestate` that
    /// is not is left out.
    #[must_use]
    pub fn parse(traceparent: &str, tracestate: Option<&str>) -> Option<Self> {
        let bytes = traceparent.as_bytes();
        let version = parse_hex(bytes.get(..2)?)?;
        let ends_well = match version {
            0 => bytes.len() == TRACEPARENT_CHARS,
            0xff => false,
            _ => matches!(bytes.get(TRACEPARENT_CHARS), None | Some(b'-')),
        };
        let separated = [2, 35, 52].iter().all(|&at| bytes.get(at) == Some(&b'-'));
        if !ends_well || !separated {
            return None;
        }
        let trace_id = parse_hex(bytes.get(3..35)?)?;
        let parent_id = u64::try_from(parse_hex(bytes.get(36..52)?)?).ok()?;
        let flags = u8::try_from(parse_hex(bytes.get(53..55)?)?).ok()?;
        // Of a later version, only this flag is known to mean the same.
        let flags = if version == 0 { flags } else { flags & SAMPLED };
        let mut context = Self::new(trace_id, parent_id, flags)?;
        context.state = tracestate.and_then(state::parse).unwrap_or_default();
        Some(context)
    }

    /// Reads the headers of a record. `None` if there is no trace context, a malformed one, or
    /// more than one.
    #[must_use]
    pub fn from_headers(headers: &[RecordHeader]) -> Option<Self> {
        let mut parents = values_of(headers, TRACEPARENT);
        let parent = parents.next()??;
        if parents.next().is_some() {
            return None;
        }
        // Several of them are one list. One that is no text spoils it.
        let states: Option<Vec<&str>> = values_of(headers, TRACESTATE).collect();
        Self::parse(parent, states.map(|states| states.join(",")).as_deref())
    }

    /// Puts the context into headers, in place of what trace context they have.
    pub fn put_into(&self, headers: &mut Vec<RecordHeader>) {
        headers.retain(|header| !is_named(header, TRACEPARENT) && !is_named(header, TRACESTATE));
        let mut put = |name: &str, value: String| {
            headers.push(RecordHeader {
                name: name.to_owned(),
                value: Some(Bytes::from(value)),
            });
        };
        put(TRACEPARENT, self.traceparent());
        if !self.state.is_empty() {
            put(TRACESTATE, self.state.clone());
        }
    }

    /// The same context with this `tracestate`; `None` if that is not well formed.
    #[must_use]
    pub fn with_state(mut self, tracestate: &str) -> Option<Self> {
        self.state = state::parse(tracestate)?;
        Some(self)
    }

    /// The trace's id, never 0. As text: 32 digits, `{:032x}`.
    #[must_use]
    pub fn trace_id(&self) -> u128 {
        self.trace_id
    }

    /// The id of the span that caused the record, never 0. As text: 16 digits, `{:016x}`.
    #[must_use]
    pub fn parent_id(&self) -> u64 {
        self.parent_id
    }

    /// The flags.
    #[must_use]
    pub fn flags(&self) -> u8 {
        self.flags
    }

    /// Whether the caller may have recorded its part of the trace.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// The value of `tracestate`, maybe empty.
    #[must_use]
    pub fn state(&self) -> &str {
        &self.state
    }

    /// The value of `traceparent`, version 0.
    #[must_use]
    pub fn traceparent(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (trace, parent, flags) = (self.trace_id, self.parent_id, self.flags);
        write!(f, "00-{trace:032x}-{parent:016x}-{flags:02x}")
    }
}

impl ConsumedRecord {
    /// The trace that the record belongs to, if its headers tell a well-formed one.
    #[must_use]
    pub fn trace_context(&self) -> Option<TraceContext> {
        TraceContext::from_headers(&self.headers)
    }
}

fn is_named(header: &RecordHeader, name: &str) -> bool {
    header.name.eq_ignore_ascii_case(name)
}

/// `None` for a value that is absent or no text.
fn values_of<'a>(
    headers: &'a [RecordHeader],
    name: &'a str,
) -> impl Iterator<Item = Option<&'a str>> {
    let named = headers.iter().filter(move |header| is_named(header, name));
    named.map(|header| std::str::from_utf8(header.value.as_deref()?).ok())
}

/// Small letters only, as the standard wants it; at most 32 digits.
fn parse_hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |number, digit| {
        let value = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some((number << 4) | u128::from(value))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn header(name: &str, value: &str) -> RecordHeader {
        RecordHeader {
            name: name.to_owned(),
            value: Some(Bytes::from(value.to_owned())),
        }
    }

    #[test]
    fn traceparent_of_the_standard_is_read_and_written() {
        let context = TraceContext::parse(PARENT, None).unwrap();
        assert_eq!(
            context.trace_id(),
            0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736
        );
        assert_eq!(context.parent_id(), 0x00f0_67aa_0ba9_02b7);
        assert!(context.is_sampled());
        assert_eq!(context.traceparent(), PARENT);
        let unsampled = PARENT.replace("-01", "-00");
        assert!(!TraceContext::parse(&unsampled, None).unwrap().is_sampled());
    }

    #[test]
    fn traceparent_of_a_later_version_is_read_as_far_as_it_is_known() {
        for text in [
            PARENT.replace("00-4b", "cc-4b").replace("-01", "-ff"),
            PARENT.replace("00-4b", "01-4b") + "-what-comes",
        ] {
            let context = TraceContext::parse(&text, None).unwrap();
            assert_eq!(context.traceparent(), PARENT, "{text}");
        }
    }

    #[test]
    fn malformed_traceparent_is_ignored() {
        for text in [
            String::new(),
            "00".to_owned(),
            "é".repeat(30),
            PARENT.to_uppercase(),
            PARENT.replace("00-4b", "ff-4b"),
            PARENT.replace("00-4b", "0g-4b"),
            PARENT.to_owned() + "-",
            PARENT.to_owned() + "-x",
            PARENT.replace("00-4b", "01-4b") + "x",
            PARENT.replacen('-', "_", 1),
            PARENT.replace("4736-", "4736_"),
            PARENT.replace("-01", "-0"),
            PARENT.replace("-01", "-0x"),
            format!("00-{}-00f067aa0ba902b7-01", "0".repeat(32)),
            format!("00-4bf92f3577b34da6a3ce929d0e0e4736-{}-01", "0".repeat(16)),
            format!(" {PARENT}"),
        ] {
            assert_eq!(TraceContext::parse(&text, None), None, "{text:?}");
        }
    }

    #[test]
    fn malformed_tracestate_is_left_out_and_the_parent_kept() {
        let context = TraceContext::parse(PARENT, Some("a=1,a=2")).unwrap();
        assert_eq!(context.state(), "");
        assert_eq!(context.clone().with_state("a=1,a=2"), None);
        let context = TraceContext::parse(PARENT, Some("a=1, b=2")).unwrap();
        assert_eq!(context.state(), "a=1,b=2");
    }

    #[test]
    fn headers_carry_a_context_whatever_their_case() {
        let headers = [
            header("x", "y"),
            header("TraceParent", PARENT),
            header("tracestate", "a=1"),
            header("Tracestate", "b=2"),
        ];
        let context = TraceContext::from_headers(&headers).unwrap();
        assert_eq!(context.state(), "a=1,b=2");
        let mut headers = headers.to_vec();
        let child = context.child();
        child.put_into(&mut headers);
        assert_eq!(headers.len(), 3);
        assert_eq!(TraceContext::from_headers(&headers), Some(child.clone()));
        assert_eq!(child.trace_id(), context.trace_id());
        assert_ne!(child.parent_id(), context.parent_id());
    }

    #[test]
    fn headers_without_exactly_one_parent_carry_none() {
        let absent = RecordHeader {
            name: TRACEPARENT.to_owned(),
            value: None,
        };
        for headers in [
            vec![],
            vec![header("tracestate", "a=1")],
            vec![absent],
            vec![header(TRACEPARENT, PARENT), header(TRACEPARENT, PARENT)],
        ] {
            assert_eq!(TraceContext::from_headers(&headers), None);
        }
    }

    proptest! {
        #[test]
        fn any_context_survives_headers(trace_id in 1_u128.., parent_id in 1_u64.., flags: u8) {
            let context = TraceContext::new(trace_id, parent_id, flags).unwrap();
            let mut headers = Vec::new();
            context.put_into(&mut headers);
            prop_assert_eq!(TraceContext::from_headers(&headers), Some(context));
        }

        #[test]
        fn any_text_is_refused_or_read_without_panic(parent in "\\PC{0,60}") {
            let _ = TraceContext::parse(&parent, Some(&parent));
        }
    }
}
