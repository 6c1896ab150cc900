//! Calls written as Python: `[f(a=1, b='x'), g()]`.

use super::super::json::quoted;
use super::super::literal::{LiteralReader, PYTHON};
use super::{MAX_NAME, Reader, Step, Work, close, cut_literal, drop_half, is_name, read_literal};

#[derive(Debug)]
enum Place {
    /// Before the list.
    List,
    /// Before a call.
    Name,
    /// Before a parameter, or the call's end.
    Parameter,
    /// Within a value.
    Value(Box<LiteralReader>),
    /// Behind a value.
    After,
    /// Behind a call.
    Next,
    /// Before the closing marker.
    Close,
}

/// Reads a list of calls.
#[derive(Debug)]
pub(in crate::model::output) struct PythonicCalls {
    closers: &'static [&'static str],
    /// Nothing marks the calls: only tools that were offered count.
    is_bare: bool,
    place: Place,
    in_list: bool,
    /// The call has no argument yet.
    is_first: bool,
}

impl PythonicCalls {
    /// Calls that end with one of the markers.
    pub fn new(closers: &'static [&'static str]) -> Self {
        Self { closers, is_bare: false, place: Place::List, in_list: false, is_first: true }
    }

    /// Calls that nothing marks.
    pub fn bare() -> Self {
        Self { is_bare: true, ..Self::new(&[]) }
    }

    fn advance(&mut self, work: &mut Work<'_>) -> Option<Step> {
        if let Place::Value(reader) = &mut self.place {
            let step = read_literal(reader, work);
            if step.is_none() {
                self.place = Place::After;
            }
            return step;
        }
        if matches!(self.place, Place::Close) {
            return Some(close(work.input, self.closers));
        }
        let Some(first) = work.input.skip_space() else { return Some(Step::Wait) };
        match (&self.place, first) {
            (Place::List, '[') => {
                self.in_list = true;
                self.go(Place::Name, work, 1)
            }
            (Place::List, _) if self.is_bare => Some(Step::Broken),
            (Place::List, _) => self.go(Place::Name, work, 0),
            (Place::Name, _) => self.name(work),
            (Place::Parameter | Place::After, ')') => self.end_call(work),
            (Place::Parameter, _) => self.parameter(work),
            (Place::After, ',') => self.go(Place::Parameter, work, 1),
            (Place::Next, ',') => self.go(Place::Name, work, 1),
            (Place::Next, ']') if self.in_list => {
                self.go(Place::Close, work, 1);
                work.input.commit();
                None
            }
            (Place::Next, _) if !self.in_list => self.go(Place::Close, work, 0),
            _ => Some(Step::Broken),
        }
    }

    fn go(&mut self, place: Place, work: &mut Work<'_>, bytes: usize) -> Option<Step> {
        work.input.skip(bytes);
        self.place = place;
        None
    }

    fn name(&mut self, work: &mut Work<'_>) -> Option<Step> {
        let name = match word_before('(', work) {
            Ok(name) => name,
            Err(step) => return Some(step),
        };
        if self.is_bare && !work.tools.declares(&name) {
            return Some(Step::Broken);
        }
        work.sink.start_call(&name);
        work.sink.arguments("{");
        self.is_first = true;
        self.go(Place::Parameter, work, name.len() + 1);
        work.input.commit();
        None
    }

    fn parameter(&mut self, work: &mut Work<'_>) -> Option<Step> {
        let key = match word_before('=', work) {
            Ok(key) => key,
            Err(step) => return Some(step),
        };
        if !std::mem::take(&mut self.is_first) {
            work.sink.arguments(", ");
        }
        work.sink.arguments(&format!("{}: ", quoted(&key)));
        self.go(Place::Value(Box::new(LiteralReader::new(PYTHON))), work, key.len() + 1);
        work.input.commit();
        None
    }

    fn end_call(&mut self, work: &mut Work<'_>) -> Option<Step> {
        work.sink.arguments("}");
        work.sink.end_arguments();
        work.sink.finish_call();
        self.go(Place::Next, work, 1);
        work.input.commit();
        None
    }
}

/// The word before a sign, which must follow it directly.
fn word_before(sign: char, work: &Work<'_>) -> Result<String, Step> {
    let rest = work.input.rest();
    let end = rest.char_indices().find(|(_, char)| !is_name(char.encode_utf8(&mut [0; 4])));
    match end {
        Some((0, _)) => Err(Step::Broken),
        Some((at, char)) if char == sign && at <= MAX_NAME => Ok(rest[..at].to_owned()),
        None if rest.len() <= MAX_NAME => Err(Step::Wait),
        _ => Err(Step::Broken),
    }
}

impl Reader for PythonicCalls {
    fn read(&mut self, work: &mut Work<'_>) -> Step {
        loop {
            if let Some(step) = self.advance(work) {
                return step;
            }
        }
    }

    fn finish(&mut self, work: &mut Work<'_>) {
        match &mut self.place {
            Place::Value(reader) => cut_literal(reader, work),
            Place::Next | Place::Close => drop_half(work, self.closers),
            Place::List | Place::Name | Place::Parameter | Place::After => {}
        }
    }
}
