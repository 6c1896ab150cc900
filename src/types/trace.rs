//! A request's trace: which phases it went through, and when.
//!
//! Passed explicitly with the request, never ambient: rows of many requests interleave on
//! one thread. Times are of the instance's monotonic clock. What is recorded is bounded
//! and holds no text and no token ids: those are content.
//!
//! A finished trace is exported once ([`TARGET`]): at its end, or where the part that
//! answers holds it, when that part lets it go, because the last bytes come after the end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::ids::RequestId;

mod export;
mod record;
mod ring;

pub use export::TARGET;
pub use record::{EventRecord, TraceRecord};
pub use ring::TraceRing;

/// Most events of a trace; later ones are counted and dropped.
const MAX_EVENTS: usize = 512;

/// A value beside an event.
#[derive(Clone, PartialEq, Debug, serde::Serialize)]
#[serde(untagged)]
pub enum TraceValue {
    /// A count, a position, bytes.
    Number(u64),
    /// A short word of ours.
    Text(String),
    /// Yes or no.
    Flag(bool),
}

impl From<u64> for TraceValue {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<u32> for TraceValue {
    fn from(number: u32) -> Self {
        Self::Number(u64::from(number))
    }
}

impl From<usize> for TraceValue {
    fn from(number: usize) -> Self {
        Self::Number(number as u64)
    }
}

impl From<&str> for TraceValue {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<bool> for TraceValue {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

/// One phase of a request.
#[derive(Clone, PartialEq, Debug)]
pub struct TraceEvent {
    /// Its name, dotted: `prefill.chunk`.
    pub phase: &'static str,
    /// When it began, on the clock's scale.
    pub start: Duration,
    /// When it ended; equal to `start` for a mark, `None` while it is open.
    pub end: Option<Duration>,
    /// What else is known of it.
    pub attributes: Vec<(&'static str, TraceValue)>,
}

/// Attributes of an event.
pub type Attributes<'a> = &'a [(&'static str, TraceValue)];

/// Where a request came from that came from outside the process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TraceOrigin {
    /// The client's own name for the request, if it gave one.
    pub client_id: Option<String>,
    /// The route that it took.
    pub route: &'static str,
}

#[derive(Debug, Default)]
struct Record {
    events: Vec<TraceEvent>,
    dropped: u64,
    outcome: Option<(&'static str, Duration)>,
    /// The event that lasts until the request has ended.
    lasting: Option<usize>,
    held: bool,
    exported: bool,
}

impl Record {
    /// Whether it is the moment to export; says so once.
    fn is_due(&mut self) -> bool {
        let due = self.outcome.is_some() && !self.held && !self.exported;
        self.exported |= due;
        due
    }
}

#[derive(Debug)]
struct Shared {
    id: RequestId,
    origin: Option<TraceOrigin>,
    started: Duration,
    /// Whether a ring has it.
    listed: AtomicBool,
    record: Mutex<Record>,
}

/// A request's trace. Clones are the same trace.
#[derive(Clone, Debug)]
pub struct Trace {
    shared: Arc<Shared>,
}

impl PartialEq for Trace {
    /// Whether both are the same trace.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl Trace {
    /// An empty trace of a request that began at `started`.
    pub fn new(id: RequestId, started: Duration) -> Self {
        Self::make(id, started, None)
    }

    /// The same, of a request from outside the process.
    pub fn of(origin: TraceOrigin, id: RequestId, started: Duration) -> Self {
        Self::make(id, started, Some(origin))
    }

    fn make(id: RequestId, started: Duration, origin: Option<TraceOrigin>) -> Self {
        let (listed, record) = (AtomicBool::new(false), Mutex::default());
        Self { shared: Arc::new(Shared { id, origin, started, listed, record }) }
    }

    /// Whose it is.
    pub fn id(&self) -> RequestId {
        self.shared.id
    }

    /// The client's own name for the request, if it gave one.
    pub fn client_id(&self) -> Option<&str> {
        self.shared.origin.as_ref()?.client_id.as_deref()
    }

    /// The route that it took; `None` where it came from inside the process.
    pub fn route(&self) -> Option<&'static str> {
        self.shared.origin.as_ref().map(|origin| origin.route)
    }

    /// When the request began, on the clock's scale.
    pub fn started(&self) -> Duration {
        self.shared.started
    }

    /// A phase that began and ended.
    pub fn span(&self, phase: &'static str, start: Duration, end: Duration, attributes: Attributes<'_>) {
        self.add(TraceEvent { phase, start, end: Some(end), attributes: attributes.to_vec() });
    }

    /// Something that happened at one moment.
    pub fn mark(&self, phase: &'static str, at: Duration, attributes: Attributes<'_>) {
        self.span(phase, at, at, attributes);
    }

    /// A phase begins. One that is still open when the request ends is recorded as open.
    pub fn begin(&self, phase: &'static str, at: Duration, attributes: Attributes<'_>) {
        self.add(TraceEvent { phase, start: at, end: None, attributes: attributes.to_vec() });
    }

    /// A phase begins that ends with the request; only the last such one does.
    pub fn begin_lasting(&self, phase: &'static str, at: Duration, attributes: Attributes<'_>) {
        let mut record = self.lock();
        let event = TraceEvent { phase, start: at, end: None, attributes: attributes.to_vec() };
        record.lasting = push(&mut record, event).or(record.lasting);
    }

    /// The latest open phase of this name ends; without one nothing happens.
    pub fn end(&self, phase: &'static str, at: Duration, attributes: Attributes<'_>) {
        let mut record = self.lock();
        let open = record.events.iter_mut().rev().find(|event| event.phase == phase && event.end.is_none());
        if let Some(event) = open {
            event.end = Some(at);
            event.attributes.extend_from_slice(attributes);
        }
    }

    /// The request has ended. Only the first end counts. What is told of it later is still
    /// recorded: the last bytes go out after the end.
    pub fn finish(&self, outcome: &'static str, at: Duration) {
        let mut record = self.lock();
        if record.outcome.is_none() {
            record.outcome = Some((outcome, at));
            let lasting = record.lasting;
            if let Some(event) = lasting.and_then(|index| record.events.get_mut(index)) {
                event.end.get_or_insert(at);
            }
        }
        let due = record.is_due();
        drop(record);
        if due {
            export::emit(self, at);
        }
    }

    /// Puts the export off until [`Trace::release`].
    pub fn hold(&self) {
        self.lock().held = true;
    }

    /// Nothing more will be told by the part that held it: a trace that has ended is exported
    /// now, another one at its end.
    pub fn release(&self, at: Duration) {
        let mut record = self.lock();
        record.held = false;
        let due = record.is_due();
        drop(record);
        if due {
            export::emit(self, at);
        }
    }

    /// What was recorded so far, sorted by start.
    pub fn events(&self) -> Vec<TraceEvent> {
        let mut events = self.lock().events.clone();
        events.sort_by_key(|event| event.start);
        events
    }

    /// How the request ended, and when.
    pub fn outcome(&self) -> Option<(&'static str, Duration)> {
        self.lock().outcome
    }

    /// Events that were too many.
    pub fn dropped(&self) -> u64 {
        self.lock().dropped
    }

    fn add(&self, event: TraceEvent) {
        push(&mut self.lock(), event);
    }

    /// Whether this call is the first to list it.
    fn list(&self) -> bool {
        !self.shared.listed.swap(true, Ordering::AcqRel)
    }

    fn lock(&self) -> MutexGuard<'_, Record> {
        self.shared.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Adds an event if there is room; says where it lies.
fn push(record: &mut Record, event: TraceEvent) -> Option<usize> {
    if record.events.len() < MAX_EVENTS {
        record.events.push(event);
        Some(record.events.len() - 1)
    } else {
        record.dropped += 1;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn spans_marks_and_open_phases_come_back_by_their_start() {
        let trace = Trace::new(RequestId(1), at(10));
        trace.begin("b", at(30), &[("n", 3u32.into())]);
        trace.span("a", at(20), at(25), &[]);
        trace.begin("c", at(40), &[]);
        trace.end("b", at(50), &[("late", true.into())]);
        trace.end("nobody", at(60), &[]);
        let seen: Vec<_> = trace.events().iter().map(|event| (event.phase, event.start, event.end)).collect();
        assert_eq!(seen, [("a", at(20), Some(at(25))), ("b", at(30), Some(at(50))), ("c", at(40), None)]);
        assert_eq!(trace.events()[1].attributes.len(), 2);
        trace.finish("stop", at(70));
        trace.finish("failed", at(80));
        assert_eq!(trace.outcome(), Some(("stop", at(70))));
    }

    #[test]
    fn a_trace_is_bounded_and_says_what_it_dropped() {
        let trace = Trace::new(RequestId(1), at(0));
        for step in 0..2 * MAX_EVENTS as u64 {
            trace.mark("step", at(step), &[]);
        }
        assert_eq!((trace.events().len(), trace.dropped()), (MAX_EVENTS, MAX_EVENTS as u64));
    }
}
