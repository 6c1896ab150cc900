//! A trace as a document, for the API and for exports. Version 1: fields are only added.

use std::time::Duration;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::{Trace, TraceEvent, TraceValue};

/// A trace at one moment.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TraceRecord {
    /// 1.
    pub version: u32,
    /// The client's own name for the request, else the request's id.
    pub trace_id: String,
    /// The request's id.
    pub request_id: String,
    /// The route that it took, or `in-process`.
    pub route: &'static str,
    /// Whose milliseconds these are: they only compare within one run of the process.
    pub clock: &'static str,
    /// `success`, `error` or `abort`; `None` while it is under way.
    pub outcome: Option<&'static str>,
    /// How it ended, in the words of the metrics.
    pub end: Option<&'static str>,
    /// When it began.
    pub started_at_ms: f64,
    /// How long it took, its last bytes included; so far, while it is under way.
    pub total_ms: f64,
    /// What happened, by its start.
    pub events: Vec<EventRecord>,
    /// Events that were too many.
    pub dropped: u64,
}

/// An event of a [`TraceRecord`].
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EventRecord {
    /// Its name.
    pub phase: &'static str,
    /// When it began, from the request's begin.
    pub start_ms: f64,
    /// How long it lasted; 0 for a mark. While it is open: so far.
    pub duration_ms: f64,
    /// Whether it has not ended.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub open: bool,
    /// What else is known of it.
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "as_map")]
    pub attributes: Vec<(&'static str, TraceValue)>,
}

impl Trace {
    /// The trace as it is at `now`.
    pub fn record(&self, now: Duration) -> TraceRecord {
        let events = self.events();
        let ended = self.outcome();
        // The last bytes go out after the end.
        let last = events.iter().filter_map(|event| event.end).max();
        let close = ended.map_or(now, |(_, at)| last.map_or(at, |last| last.max(at)));
        let end = ended.map(|(end, _)| end);
        TraceRecord {
            version: 1,
            trace_id: self.client_id().map_or_else(|| self.id().to_string(), str::to_owned),
            request_id: self.id().to_string(),
            route: self.route().unwrap_or("in-process"),
            clock: "monotonic-ms",
            outcome: end.map(outcome),
            end,
            started_at_ms: milliseconds(self.started()),
            total_ms: milliseconds(close.saturating_sub(self.started())),
            events: events.into_iter().map(|event| write(event, self.started(), close)).collect(),
            dropped: self.dropped(),
        }
    }
}

fn write(event: TraceEvent, started: Duration, close: Duration) -> EventRecord {
    EventRecord {
        phase: event.phase,
        start_ms: milliseconds(event.start.saturating_sub(started)),
        duration_ms: milliseconds(event.end.unwrap_or(close).saturating_sub(event.start)),
        open: event.end.is_none(),
        attributes: event.attributes,
    }
}

/// The class of an end.
fn outcome(end: &'static str) -> &'static str {
    match end {
        "stop" | "length" => "success",
        "cancelled" => "abort",
        _ => "error",
    }
}

/// To the microsecond: more is noise.
fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

fn as_map<S: Serializer>(
    attributes: &[(&'static str, TraceValue)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(attributes.len()))?;
    for (name, value) in attributes {
        map.serialize_entry(name, value)?;
    }
    map.end()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::types::{RequestId, TraceOrigin};

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_record_has_times_from_its_begin_and_says_what_is_open() {
        let origin = TraceOrigin { client_id: Some("mine".into()), route: "/v1/completions" };
        let trace = Trace::of(origin, RequestId(255), at(1000));
        trace.begin_lasting("completion.total", at(1010), &[("priority", "normal".into())]);
        trace.begin("request.prompt_prepare", at(1010), &[]);
        trace.span("prefill.chunk", at(1020), Duration::from_micros(1_021_500), &[("rows", 2usize.into())]);
        let under_way = trace.record(at(1030));
        assert_eq!((under_way.outcome, under_way.total_ms), (None, 30.0));
        assert!(under_way.events[0].open && under_way.events[0].duration_ms == 20.0, "{under_way:?}");
        trace.finish("length", at(1040));
        trace.mark("response.final_write", at(1050), &[]);
        let record = serde_json::to_value(trace.record(at(9999))).unwrap();
        assert_eq!(
            record,
            json!({
                "version": 1, "traceId": "mine", "requestId": "000000000000000000000000000000ff",
                "route": "/v1/completions", "clock": "monotonic-ms", "outcome": "success", "end": "length",
                "startedAtMs": 1000.0, "totalMs": 50.0, "dropped": 0,
                "events": [
                    {"phase": "completion.total", "startMs": 10.0, "durationMs": 30.0, "attributes": {"priority": "normal"}},
                    {"phase": "request.prompt_prepare", "startMs": 10.0, "durationMs": 40.0, "open": true},
                    {"phase": "prefill.chunk", "startMs": 20.0, "durationMs": 1.5, "attributes": {"rows": 2}},
                    {"phase": "response.final_write", "startMs": 50.0, "durationMs": 0.0},
                ],
            })
        );
    }

    #[test]
    fn every_end_has_a_class_and_a_request_without_a_name_goes_by_its_id() {
        for (end, class) in
            [("stop", "success"), ("cancelled", "abort"), ("failed", "error"), ("refused", "error")]
        {
            let trace = Trace::new(RequestId(7), at(0));
            trace.finish(end, at(1));
            let record = trace.record(at(1));
            assert_eq!((record.outcome, record.end), (Some(class), Some(end)));
            assert_eq!((record.trace_id, record.route), (RequestId(7).to_string(), "in-process"));
        }
    }
}
