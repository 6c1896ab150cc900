//! Records a request's way through HTTP in its trace, and sees to it that every trace ends.
//!
//! Dropped without an answer, it is taken as the client's leaving. Nothing is recorded a
//! token.

use std::sync::Arc;
use std::time::Duration;

use actix_web::HttpRequest;

use super::api_error::ApiError;
use super::identity::Identity;
use super::state::State;
use crate::observe::Outcome;
use crate::types::{Clock, Timings, Trace, TraceOrigin};

const BODY_PARSE: &str = "request.body_parse";
const PROMPT_PREPARE: &str = "request.prompt_prepare";

/// See the module.
#[derive(Debug)]
pub(super) struct Recorder {
    trace: Trace,
    clock: Arc<dyn Clock>,
    first_written: bool,
}

impl Recorder {
    /// Begins the trace of a request whose head was read, and lists it.
    pub(super) fn begin(request: &HttpRequest, state: &State, route: &'static str) -> Self {
        let identity = Identity::of(request, state);
        let origin = TraceOrigin { client_id: identity.client_id, route };
        let recorder = Self::new(Trace::of(origin, identity.id, identity.begun), state.handles.clock());
        recorder.trace.begin(BODY_PARSE, identity.begun, &[]);
        state.handles.traces().insert(&recorder.trace);
        recorder
    }

    /// Records in this trace.
    pub(super) fn new(trace: Trace, clock: &Arc<dyn Clock>) -> Self {
        trace.hold();
        Self { trace, clock: Arc::clone(clock), first_written: false }
    }

    /// Where others record.
    pub(super) fn trace(&self) -> &Trace {
        &self.trace
    }

    /// The body was read and understood, or not.
    pub(super) fn parsed(&self) {
        self.trace.end(BODY_PARSE, self.clock.now(), &[]);
    }

    /// The request was not accepted.
    pub(super) fn refused(&self, error: &ApiError) {
        let now = self.clock.now();
        let attributes = [("status", u32::from(error.status.as_u16()).into()), ("code", error.code.into())];
        self.trace.mark("response.refused", now, &attributes);
        self.trace.finish(Outcome::Refused.as_str(), now);
    }

    /// Bytes of an answer go out.
    pub(super) fn written(&mut self) {
        if !self.first_written {
            self.first_written = true;
            self.trace.mark("response.first_write", self.clock.now(), &[]);
        }
    }

    /// The last bytes of an answer that ended so go out.
    pub(super) fn closed(&mut self, outcome: Outcome) {
        self.written();
        let now = self.clock.now();
        self.trace.mark("response.final_write", now, &[]);
        // The part that computed it has said so already, and earlier; its word counts.
        self.trace.finish(outcome.as_str(), now);
    }

    /// Value of a `server-timing` header: where the time went so far.
    pub(super) fn server_timing(&self, timings: Option<Timings>) -> String {
        let prepare = self.lasted(PROMPT_PREPARE);
        let total = self.clock.now().saturating_sub(self.trace.started());
        let queue = timings.map(|timings| timings.queued.saturating_sub(prepare.unwrap_or_default()));
        let metrics = [
            ("prepare", prepare),
            ("queue", queue),
            ("prefill", timings.map(|timings| timings.prefill)),
            ("decode", timings.map(|timings| timings.decode)),
            ("total", Some(total)),
        ];
        let write = |(name, time): (&str, Option<Duration>)| {
            time.map(|time| format!("{name};dur={:.3}", time.as_secs_f64() * 1e3))
        };
        metrics.into_iter().filter_map(write).collect::<Vec<_>>().join(", ")
    }

    fn lasted(&self, phase: &str) -> Option<Duration> {
        let event = self.trace.events().into_iter().find(|event| event.phase == phase)?;
        Some(event.end?.saturating_sub(event.start))
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        let now = self.clock.now();
        // Nothing is left to say where it has ended.
        self.trace.finish(Outcome::Cancelled.as_str(), now);
        self.trace.release(now);
    }
}
