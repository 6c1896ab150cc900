//! Where readers put what they understood: joins events, trims space around markers, numbers calls.

use crate::types::{CallEvent, OutputEvent};

use super::ids::CallIds;
use super::input::SPACE;

/// Space held back because a marker may follow, at most; of a longer run its beginning is given out.
const MAX_SPACE: usize = 256;

/// What a text is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Thought.
    Reasoning,
    /// Text for the reader.
    Content,
}

/// How far the call that is being read has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Call {
    None,
    Open,
    /// Its arguments are at their end.
    Whole,
}

/// The events since they were last taken.
#[derive(Debug)]
pub(super) struct Sink {
    events: Vec<OutputEvent>,
    ids: CallIds,
    /// Calls started.
    calls: u32,
    call: Call,
    /// The latest text's kind.
    kind: Kind,
    /// Space after the latest text.
    space: String,
    /// Only space came since the answer or the last marker began.
    fresh: bool,
    /// Space that comes now follows a marker.
    trims: bool,
    /// Space after content waits, because a call may follow.
    holds: bool,
}

impl Sink {
    /// A sink for one answer; `holds`: space before a call is no content.
    pub fn new(ids: CallIds, holds: bool) -> Self {
        Self {
            events: Vec::new(),
            ids,
            calls: 0,
            call: Call::None,
            kind: Kind::Content,
            space: String::new(),
            fresh: true,
            trims: false,
            holds,
        }
    }

    /// What came since the last time.
    pub fn take(&mut self) -> Vec<OutputEvent> {
        std::mem::take(&mut self.events)
    }

    /// Bytes of space that wait.
    pub fn held(&self) -> usize {
        self.space.len()
    }

    /// Whether nothing but space came since the answer or the last marker began.
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// Adds text.
    pub fn text(&mut self, kind: Kind, text: &str) {
        let text = if self.trims { text.trim_start_matches(SPACE) } else { text };
        if text.is_empty() {
            return;
        }
        self.kind = kind;
        let body = text.trim_end_matches(SPACE);
        if !body.is_empty() {
            self.release(self.space.len());
            self.emit(body);
            (self.trims, self.fresh) = (false, false);
        }
        self.space.push_str(&text[body.len()..]);
        let waits = self.holds || self.fresh || kind == Kind::Reasoning;
        self.release(self.space.len().saturating_sub(if waits { MAX_SPACE } else { 0 }));
    }

    /// A marker stands here: space around it is dropped.
    pub fn mark(&mut self) {
        self.space.clear();
        (self.fresh, self.trims) = (true, true);
    }

    /// Calls started so far.
    pub fn calls(&self) -> u32 {
        self.calls
    }

    /// A call begins.
    pub fn start_call(&mut self, name: &str) {
        self.finish_call();
        self.mark();
        let (index, id) = (self.calls, self.ids.draw());
        self.push(CallEvent::Started { index, id, name: name.to_owned() });
        self.calls += 1;
        self.call = Call::Open;
    }

    fn push(&mut self, event: CallEvent) {
        self.events.push(OutputEvent::Call(event));
    }

    /// More of the call's arguments.
    pub fn arguments(&mut self, more: &str) {
        if more.is_empty() || self.call == Call::None {
            return;
        }
        if let Some(OutputEvent::Call(CallEvent::Arguments { text, .. })) = self.events.last_mut() {
            text.push_str(more);
            return;
        }
        let index = self.calls.saturating_sub(1);
        self.push(CallEvent::Arguments { index, text: more.to_owned() });
    }

    /// The call's arguments are at their end.
    pub fn end_arguments(&mut self) {
        if self.call == Call::Open {
            self.call = Call::Whole;
        }
    }

    /// The call is over, if there is one.
    pub fn finish_call(&mut self) {
        if self.call == Call::None {
            return;
        }
        let complete = self.call == Call::Whole;
        self.push(CallEvent::Finished { index: self.calls.saturating_sub(1), complete });
        self.call = Call::None;
        self.mark();
    }

    /// Whether a call is under way whose arguments are at their end.
    pub fn has_arguments(&self) -> bool {
        self.call == Call::Whole
    }

    /// The answer is over: space that waited for a marker is text.
    pub fn finish(&mut self) {
        self.finish_call();
        self.release(self.space.len());
    }

    /// Gives out the first bytes of the space that waits.
    fn release(&mut self, bytes: usize) {
        if bytes > 0 {
            let space: String = self.space.drain(..bytes).collect();
            self.emit(&space);
        }
    }

    fn emit(&mut self, more: &str) {
        match (self.events.last_mut(), self.kind) {
            (Some(OutputEvent::Reasoning(text)), Kind::Reasoning)
            | (Some(OutputEvent::Content(text)), Kind::Content) => text.push_str(more),
            (_, Kind::Reasoning) => self.events.push(OutputEvent::Reasoning(more.to_owned())),
            (_, Kind::Content) => self.events.push(OutputEvent::Content(more.to_owned())),
        }
    }
}
