//! The hook that gives records their trace context.

use std::fmt;

use super::TraceContext;
use crate::interceptor::{HookError, Interceptor};
use crate::record::Record;

type Source = Box<dyn Fn() -> Option<TraceContext> + Send + Sync>;

/// A hook that gives each record sent a trace context, unless it has one already.
///
/// The source is asked on the task that sends: it is where the program tells its current span. With
/// `tracing-opentelemetry`, for instance:
///
/// ```text
/// use opentelemetry::trace::TraceContextExt;
/// use tracing_opentelemetry::OpenTelemetrySpanExt;
///
/// let layer = TraceContextLayer::from_source(|| {
///     let context = tracing::Span::current().context();
///     let span = context.span().span_context().clone();
///     TraceContext::new(
///         u128::from_be_bytes(span.trace_id().to_bytes()),
///         u64::from_be_bytes(span.span_id().to_bytes()),
///         span.trace_flags().to_u8(),
///     )
/// });
/// ```
///
/// And for a record that was read, the other way round: `SpanContext::new(trace_id, parent_id, ..)`
/// from [`crate::ConsumedRecord::trace_context`], as remote parent (or link) of the span that handles it.
pub struct TraceContextLayer {
    source: Source,
    roots: bool,
}

impl TraceContextLayer {
    /// Each record without a context begins a new, sampled trace.
    #[must_use]
    pub fn new() -> Self {
        Self::from_source(|| None)
    }

    /// Takes the context from the program; where it has none, a new, sampled trace begins.
    #[must_use]
    pub fn from_source(source: impl Fn() -> Option<TraceContext> + Send + Sync + 'static) -> Self {
        Self {
            source: Box::new(source),
            roots: true,
        }
    }

    /// Whether a new trace begins where the source gives nothing. Default: yes.
    #[must_use]
    pub fn roots(mut self, roots: bool) -> Self {
        self.roots = roots;
        self
    }
}

impl Default for TraceContextLayer {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for TraceContextLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TraceContextLayer")
            .field("roots", &self.roots)
            .finish_non_exhaustive()
    }
}

impl Interceptor for TraceContextLayer {
    fn before_send(&self, record: &mut Record) -> Result<(), HookError> {
        if TraceContext::from_headers(&record.headers).is_some() {
            return Ok(());
        }
        let root = || self.roots.then(|| TraceContext::root(true));
        if let Some(context) = (self.source)().or_else(root) {
            context.put_into(&mut record.headers);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn layer_takes_the_records_own_context_then_the_source_then_a_root() {
        let of_source = TraceContext::root(false);
        let given = of_source.clone();
        let layer = TraceContextLayer::from_source(move || Some(given.clone()));
        let sent = |layer: &TraceContextLayer, mut record: Record| {
            layer.before_send(&mut record).unwrap();
            TraceContext::from_headers(&record.headers)
        };
        let own = Record::to("t").header("traceparent", PARENT);
        assert_eq!(sent(&layer, own.clone()).unwrap().traceparent(), PARENT);
        assert_eq!(sent(&layer, Record::to("t")), Some(of_source));
        let malformed = Record::to("t").header("traceparent", "?");
        assert!(
            sent(&TraceContextLayer::new(), malformed)
                .unwrap()
                .is_sampled()
        );
        let none = TraceContextLayer::new().roots(false);
        assert_eq!(sent(&none, Record::to("t")), None);
    }
}
