//! Calls that are JSON: `{"name": "f", "arguments": {…}}`, alone, in a row or in a list.
//!
//! Arguments are passed through as they are written. Those that come before the name wait for it.

use super::super::json::{JsonScanner, Scan, StringDecoder};
use super::super::markers::{Begins, begins};
use super::{MAX_NAME, Reader, Step, Work, close, drop_half, is_name};

const NAME_KEYS: [&str; 3] = ["name", "tool_name", "function"];
const ARGUMENT_KEYS: [&str; 3] = ["arguments", "parameters", "args"];
/// What else a bare call has.
const OTHER_KEYS: [&str; 3] = ["id", "type", "tool_call_id"];
/// Longest arguments that wait for a name, bytes.
const MAX_HELD: usize = 16 << 10;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// Before a call, or a list of them.
    Call,
    /// Before a key, or the call's end.
    Key,
    /// Within a key.
    KeyText,
    /// Before a colon.
    Colon,
    /// Before a value.
    Value,
    /// Within a value that plays no part, or a name.
    Other,
    /// Within arguments.
    Arguments,
    /// Within arguments that are JSON in a string.
    ArgumentString,
    /// Behind a value.
    After,
    /// Behind a call.
    Next,
    /// Before the closing marker.
    Close,
}

/// Reads the calls between two markers.
#[derive(Debug)]
pub(in crate::model::output) struct JsonCalls {
    closers: &'static [&'static str],
    /// Nothing marks the calls: only tools that were offered count, and only keys that calls have.
    is_bare: bool,
    place: Place,
    in_list: bool,
    scanner: JsonScanner,
    decoder: StringDecoder,
    /// The raw key or value that is being read.
    token: String,
    key: String,
    name: Option<String>,
    /// The call was told.
    is_started: bool,
    /// Arguments that wait for the name.
    waiting: Option<String>,
    /// Arguments in a string had no text so far.
    is_empty: bool,
}

impl JsonCalls {
    /// Calls that end with one of the markers.
    pub fn new(closers: &'static [&'static str]) -> Self {
        Self {
            closers,
            is_bare: false,
            place: Place::Call,
            in_list: false,
            scanner: JsonScanner::default(),
            decoder: StringDecoder::default(),
            token: String::new(),
            key: String::new(),
            name: None,
            is_started: false,
            waiting: None,
            is_empty: false,
        }
    }

    /// Calls that nothing marks.
    pub fn bare() -> Self {
        Self { is_bare: true, ..Self::new(&[]) }
    }

    /// Goes on to another place behind so many bytes.
    fn go(&mut self, place: Place, work: &mut Work<'_>, bytes: usize) -> Option<Step> {
        work.input.skip(bytes);
        self.place = place;
        None
    }

    /// One move; `None`: go on.
    fn advance(&mut self, work: &mut Work<'_>) -> Option<Step> {
        match self.place {
            Place::KeyText => return self.key_text(work),
            Place::Other => return self.other(work),
            Place::Arguments => return self.arguments(work),
            Place::ArgumentString => return self.argument_string(work),
            Place::Next => return self.next(work),
            Place::Close => return Some(close(work.input, self.closers)),
            Place::Call | Place::Key | Place::Colon | Place::Value | Place::After => {}
        }
        let Some(first) = work.input.skip_space() else { return Some(Step::Wait) };
        match (self.place, first) {
            (Place::Call, '{') => self.go(Place::Key, work, 1),
            (Place::Call, '[') if !self.in_list => {
                self.in_list = true;
                self.go(Place::Call, work, 1)
            }
            (Place::Key, '"') => self.go(Place::KeyText, work, 0),
            (Place::Key | Place::After, '}') => self.end_call(work, 1),
            (Place::After, ',') => self.go(Place::Key, work, 1),
            (Place::Colon, ':') => self.go(Place::Value, work, 1),
            (Place::Value, first) => self.value(first, work),
            (Place::After, _) => self.unclosed(work),
            _ => Some(Step::Broken),
        }
    }

    fn key_text(&mut self, work: &mut Work<'_>) -> Option<Step> {
        match self.take_token(work, MAX_NAME) {
            Ok(raw) => {
                self.key = serde_json::from_str(&raw).unwrap_or_default();
                self.go(Place::Colon, work, 0)
            }
            Err(step) => Some(step),
        }
    }

    /// A value begins.
    fn value(&mut self, first: char, work: &mut Work<'_>) -> Option<Step> {
        let key = self.key.as_str();
        let is_call_key = NAME_KEYS.contains(&key) || OTHER_KEYS.contains(&key);
        if ARGUMENT_KEYS.contains(&key) && first == '{' {
            return self.begin_arguments(Place::Arguments, work, 0);
        }
        if ARGUMENT_KEYS.contains(&key) && first == '"' {
            // The scanner is within the string from here on.
            self.scanner.scan("\"");
            self.is_empty = true;
            return self.begin_arguments(Place::ArgumentString, work, 1);
        }
        // What else arguments may be is nothing at all: null.
        if (self.is_bare && !is_call_key) || (ARGUMENT_KEYS.contains(&key) && first != 'n') {
            return Some(Step::Broken);
        }
        self.go(Place::Other, work, 0)
    }

    fn other(&mut self, work: &mut Work<'_>) -> Option<Step> {
        let raw = match self.take_token(work, MAX_HELD) {
            Ok(raw) => raw,
            Err(step) => return Some(step),
        };
        self.place = Place::After;
        if self.is_started || self.name.is_some() || !NAME_KEYS.contains(&self.key.as_str()) {
            return None;
        }
        let Ok(name) = serde_json::from_str::<String>(&raw) else { return Some(Step::Broken) };
        if !is_name(&name) || (self.is_bare && !work.tools.declares(&name)) {
            return Some(Step::Broken);
        }
        self.name = Some(name);
        if let Some(arguments) = self.waiting.take() {
            self.start(work);
            work.sink.arguments(&arguments);
            work.sink.end_arguments();
        }
        None
    }

    fn begin_arguments(&mut self, place: Place, work: &mut Work<'_>, bytes: usize) -> Option<Step> {
        if self.is_started || self.waiting.is_some() {
            return Some(Step::Broken);
        }
        if self.name.is_some() {
            self.start(work);
        } else {
            self.waiting = Some(String::new());
        }
        self.go(place, work, bytes)
    }

    /// Tells the call.
    fn start(&mut self, work: &mut Work<'_>) {
        if let Some(name) = &self.name {
            work.sink.start_call(name);
            work.input.commit();
            self.is_started = true;
        }
    }

    fn arguments(&mut self, work: &mut Work<'_>) -> Option<Step> {
        let rest = work.input.rest();
        let (bytes, step) = match self.scanner.scan(rest) {
            Scan::More => (rest.len(), Some(Step::Wait)),
            Scan::End(bytes) => (bytes, None),
            Scan::Broken(bytes) => (bytes, Some(Step::Broken)),
        };
        let text = rest[..bytes].to_owned();
        self.give(&text, bytes, step, work)
    }

    fn argument_string(&mut self, work: &mut Work<'_>) -> Option<Step> {
        let rest = work.input.rest();
        let (bytes, text, step) = match self.scanner.scan(rest) {
            Scan::End(bytes) => {
                let mut text = self.decoder.push(&rest[..bytes - 1]);
                text.push_str(&self.decoder.finish());
                (bytes, text, None)
            }
            _ => (rest.len(), self.decoder.push(rest), Some(Step::Wait)),
        };
        self.is_empty &= text.is_empty();
        let nothing = step.is_none() && self.is_empty;
        self.give(if nothing { "{}" } else { &text }, bytes, step, work)
    }

    /// Gives arguments out, or lets them wait; `None`: they are at their end.
    fn give(&mut self, text: &str, bytes: usize, step: Option<Step>, work: &mut Work<'_>) -> Option<Step> {
        work.input.skip(bytes);
        if let Some(waiting) = &mut self.waiting {
            waiting.push_str(text);
            if waiting.len() > MAX_HELD {
                return Some(Step::Broken);
            }
        } else {
            work.sink.arguments(text);
            work.input.commit();
        }
        if step.is_none() {
            self.scanner = JsonScanner::default();
            self.place = Place::After;
            if self.waiting.is_none() {
                work.sink.end_arguments();
            }
        }
        step
    }

    /// The call's object ends.
    fn end_call(&mut self, work: &mut Work<'_>, bytes: usize) -> Option<Step> {
        if self.name.is_none() {
            return Some(Step::Broken);
        }
        if !self.is_started {
            self.start(work);
            work.sink.arguments("{}");
            work.sink.end_arguments();
        }
        work.sink.finish_call();
        (self.name, self.is_started) = (None, false);
        self.go(Place::Next, work, bytes);
        work.input.commit();
        None
    }

    /// Behind a value comes neither a comma nor a bracket: some models forget the last one.
    fn unclosed(&mut self, work: &mut Work<'_>) -> Option<Step> {
        match begins(work.input.rest(), self.closers) {
            Begins::With(_) if self.is_started => self.end_call(work, 0),
            Begins::Open => Some(Step::Wait),
            _ => Some(Step::Broken),
        }
    }

    /// Whether another call follows.
    fn next(&mut self, work: &mut Work<'_>) -> Option<Step> {
        let Some(first) = work.input.skip_space() else { return Some(Step::Wait) };
        if self.in_list {
            return match first {
                ',' => self.go(Place::Call, work, 1),
                ']' => {
                    self.go(Place::Close, work, 1);
                    work.input.commit();
                    None
                }
                _ => Some(Step::Broken),
            };
        }
        if matches!(first, ',' | ';') {
            work.input.skip(1);
            match work.input.skip_space() {
                None => {
                    work.input.rewind();
                    return Some(Step::Wait);
                }
                Some('{') => {}
                Some(_) => work.input.rewind(),
            }
        }
        let follows = work.input.rest().starts_with('{');
        self.go(if follows { Place::Call } else { Place::Close }, work, 0)
    }

    /// The raw value that begins or goes on here, once it is whole.
    fn take_token(&mut self, work: &mut Work<'_>, limit: usize) -> Result<String, Step> {
        let rest = work.input.rest();
        let (bytes, is_whole) = match self.scanner.scan(rest) {
            Scan::More => (rest.len(), false),
            Scan::End(bytes) => (bytes, true),
            Scan::Broken(_) => return Err(Step::Broken),
        };
        self.token.push_str(&rest[..bytes]);
        work.input.skip(bytes);
        if self.token.len() > limit {
            return Err(Step::Broken);
        }
        if !is_whole {
            return Err(Step::Wait);
        }
        self.scanner = JsonScanner::default();
        Ok(std::mem::take(&mut self.token))
    }
}

impl Reader for JsonCalls {
    fn read(&mut self, work: &mut Work<'_>) -> Step {
        loop {
            if let Some(step) = self.advance(work) {
                return step;
            }
        }
    }

    fn finish(&mut self, work: &mut Work<'_>) {
        if self.place == Place::ArgumentString && self.waiting.is_none() {
            let tail = self.decoder.finish();
            work.sink.arguments(&tail);
        }
        match self.place {
            Place::Close => drop_half(work, self.closers),
            // What is left of a call whose arguments are whole is punctuation.
            _ if self.place == Place::Next || work.sink.has_arguments() => work.input.use_up(),
            _ => {}
        }
    }
}
