//! A finished trace as `tracing` spans, for whatever subscriber the host has.
//!
//! One span `request` with one child a phase, and in it one event with the whole record, for
//! logs. The phases are over when they are told: times are in their fields. `otel.name` is
//! what OpenTelemetry's layer takes for a span's name.

use std::time::Duration;

use serde_json::{Map, Value};

use super::{EventRecord, Trace, TraceRecord};

/// Target of exported traces, at level debug.
pub const TARGET: &str = "greenroom::trace";

/// Tells a trace, if anybody listens.
pub(super) fn emit(trace: &Trace, now: Duration) {
    if tracing::enabled!(target: TARGET, tracing::Level::DEBUG) {
        tell(&trace.record(now));
    }
}

fn tell(record: &TraceRecord) {
    let request = tracing::debug_span!(
        target: TARGET,
        parent: None,
        "request",
        otel.name = record.route,
        request_id = record.request_id,
        trace_id = record.trace_id,
        outcome = record.outcome,
        end = record.end,
        started_ms = record.started_at_ms,
        total_ms = record.total_ms,
    );
    for event in &record.events {
        let _told = tracing::debug_span!(
            target: TARGET,
            parent: &request,
            "phase",
            otel.name = event.phase,
            start_ms = event.start_ms,
            duration_ms = event.duration_ms,
            open = event.open,
            attributes = attributes(event),
        );
    }
    let text = serde_json::to_string(record).unwrap_or_default();
    tracing::debug!(target: TARGET, parent: &request, record = text, "trace");
}

/// As JSON: names and types of fields are fixed in `tracing`, those of attributes are not.
fn attributes(event: &EventRecord) -> Option<String> {
    let map: Map<String, Value> = event
        .attributes
        .iter()
        .filter_map(|(name, value)| Some(((*name).to_owned(), serde_json::to_value(value).ok()?)))
        .collect();
    (!map.is_empty()).then(|| Value::Object(map).to_string())
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;
    use std::sync::{Arc, Mutex};

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id};
    use tracing_subscriber::Layer;
    use tracing_subscriber::layer::{Context, SubscriberExt};
    use tracing_subscriber::registry::LookupSpan;

    use super::*;
    use crate::types::RequestId;

    /// Notes every span that it is shown, with its parent's name.
    #[derive(Clone, Default)]
    struct Notes(Arc<Mutex<Vec<String>>>);

    impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Notes {
        fn on_new_span(&self, span: &Attributes<'_>, _: &Id, context: Context<'_, S>) {
            let parent = span.parent().and_then(|id| context.span(id)).map_or("-", |span| span.name());
            let mut line = format!("{parent} > {}", span.metadata().name());
            span.record(&mut Line(&mut line));
            self.0.lock().unwrap().push(line);
        }

        fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
            let mut line = "event".to_owned();
            event.record(&mut Line(&mut line));
            self.0.lock().unwrap().push(line);
        }
    }

    struct Line<'a>(&'a mut String);

    impl Visit for Line<'_> {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            self.0.push_str(&format!(" {}={value:?}", field.name()));
        }
    }

    #[test]
    fn a_trace_is_told_once_when_it_has_ended_and_nobody_holds_it() {
        let notes = Notes::default();
        let ms = Duration::from_millis;
        tracing::subscriber::with_default(tracing_subscriber::registry().with(notes.clone()), || {
            let trace = Trace::new(RequestId(1), ms(0));
            trace.hold();
            trace.span("prefill.chunk", ms(1), ms(3), &[("rows", 2usize.into())]);
            trace.finish("stop", ms(4));
            trace.mark("response.final_write", ms(5), &[]);
            assert!(notes.0.lock().unwrap().is_empty(), "the part that answers still holds it");
            trace.release(ms(6));
            trace.release(ms(7));
            trace.finish("failed", ms(8));
        });
        let told = notes.0.lock().unwrap().clone();
        let [request, chunk, write, record] = told.as_slice() else { panic!("{told:#?}") };
        for part in ["- > request", "outcome=\"success\"", "end=\"stop\"", "total_ms=5.0"] {
            assert!(request.contains(part), "{request}");
        }
        for part in ["request > phase", "otel.name=\"prefill.chunk\"", "start_ms=1.0", "duration_ms=2.0"] {
            assert!(chunk.contains(part), "{chunk}");
        }
        assert!(chunk.contains(r#"attributes="{\"rows\":2}""#), "{chunk}");
        assert!(write.contains("response.final_write"), "{write}");
        assert!(record.contains("totalMs"), "{record}");
    }

    #[test]
    fn a_trace_that_is_let_go_before_its_end_is_told_at_its_end() {
        let notes = Notes::default();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(notes.clone()), || {
            let trace = Trace::new(RequestId(1), Duration::ZERO);
            trace.hold();
            trace.release(Duration::ZERO);
            assert!(notes.0.lock().unwrap().is_empty());
            trace.finish("cancelled", Duration::ZERO);
        });
        assert_eq!(notes.0.lock().unwrap().len(), 2, "a span and the record");
    }
}
