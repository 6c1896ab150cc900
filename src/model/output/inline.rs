//! Answers that are one text, with thoughts and calls between markers.

use super::calls::{Reader, Step, Work};
use super::format::CallSyntax;
use super::markers::{Begins, Found, begins, find};
use super::sink::Kind;
use super::thought::Thought;

/// What a marker says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Meaning {
    /// A thought begins.
    Think,
    /// A thought ends; where none was open, nothing.
    Answer,
    /// A call begins.
    Call,
    /// A call begins, and the marker is part of it.
    Bare,
    /// Nothing.
    Nothing,
}

/// Markers and what they say.
#[derive(Debug, Default)]
struct Signs {
    markers: Vec<&'static str>,
    meanings: Vec<Meaning>,
}

impl Signs {
    fn add(&mut self, markers: &[&'static str], meaning: Meaning) {
        for marker in markers {
            if !self.markers.contains(marker) {
                self.markers.push(marker);
                self.meanings.push(meaning);
            }
        }
    }

    fn add_all(&mut self, others: &Self) {
        for (marker, meaning) in others.markers.iter().zip(&others.meanings) {
            self.add(&[marker], *meaning);
        }
    }
}

/// Those that count within a thought, or outside one.
#[derive(Debug, Default)]
struct Place {
    /// Only where nothing but space came yet.
    first: Signs,
    /// Wherever they stand.
    anywhere: Signs,
}

/// A call on its way.
#[derive(Debug)]
struct Call {
    reader: Box<dyn Reader>,
    /// Bytes of the marker that opened it.
    opener: usize,
    /// Calls told before it.
    before: u32,
}

/// Reads a whole answer.
#[derive(Debug)]
pub(super) struct Inline {
    calls: &'static CallSyntax,
    thinking: Place,
    answering: Place,
    is_thinking: bool,
    call: Option<Call>,
}

impl Inline {
    /// For an answer that may call tools if they were offered. `is_thinking`: it goes on with a
    /// thought that the prompt opened.
    pub fn new(
        calls: &'static CallSyntax,
        thought: &'static Thought,
        offered: bool,
        is_thinking: bool,
    ) -> Self {
        let (mut thinking, mut answering) = (Place::default(), Place::default());
        thinking.anywhere.add(&[thought.close], Meaning::Answer);
        // Some repeat the marker that the prompt ended with.
        thinking.first.add(&[thought.open], Meaning::Nothing);
        let markers = if thought.anywhere { &mut answering.anywhere } else { &mut answering.first };
        markers.add(&[thought.open], Meaning::Think);
        markers.add(&[thought.close], Meaning::Answer);
        answering.first.add(thought.frame_first, Meaning::Nothing);
        answering.anywhere.add(thought.frame, Meaning::Nothing);
        if offered {
            answering.anywhere.add(calls.openers, Meaning::Call);
            answering.anywhere.add(calls.ignored, Meaning::Nothing);
            answering.first.add(calls.bare, Meaning::Bare);
            // Words in a thought may speak of a tag; a control token is no word.
            let is_control = |marker: &&&str| marker.contains(['|', '｜']) || marker.starts_with("[TOOL");
            let controls: Vec<&str> = calls.openers.iter().filter(is_control).copied().collect();
            thinking.anywhere.add(&controls, Meaning::Call);
            let controls: Vec<&str> = calls.ignored.iter().filter(is_control).copied().collect();
            thinking.anywhere.add(&controls, Meaning::Nothing);
        }
        for place in [&mut thinking, &mut answering] {
            // Among the others, because one may begin with a bracket that is a marker there.
            place.first.add_all(&place.anywhere);
        }
        Self { calls, thinking, answering, is_thinking, call: None }
    }

    fn kind(&self) -> Kind {
        if self.is_thinking { Kind::Reasoning } else { Kind::Content }
    }

    /// Reads up to the next marker, and that; false: more text is needed.
    fn advance(&mut self, work: &mut Work<'_>) -> bool {
        let kind = self.kind();
        let place = if self.is_thinking { &self.thinking } else { &self.answering };
        if work.sink.is_fresh() {
            if work.input.skip_space().is_none() {
                self.give(kind, work);
                return false;
            }
            self.give(kind, work);
            match begins(work.input.rest(), &place.first.markers) {
                Begins::With(number) => {
                    let (marker, meaning) = (place.first.markers[number], place.first.meanings[number]);
                    self.take(marker, meaning, work);
                    return true;
                }
                Begins::Open => return false,
                Begins::No => {}
            }
        }
        match find(work.input.rest(), &place.anywhere.markers) {
            Found::At(at, number) => {
                let (marker, meaning) = (place.anywhere.markers[number], place.anywhere.meanings[number]);
                work.input.skip(at);
                self.give(kind, work);
                self.take(marker, meaning, work);
                true
            }
            Found::Open(at) => {
                work.input.skip(at);
                self.give(kind, work);
                false
            }
        }
    }

    /// What was read is text.
    fn give(&self, kind: Kind, work: &mut Work<'_>) {
        work.sink.text(kind, work.input.kept());
        work.input.commit();
    }

    /// Does what a marker says.
    fn take(&mut self, marker: &'static str, meaning: Meaning, work: &mut Work<'_>) {
        let opener = if meaning == Meaning::Bare { 0 } else { marker.len() };
        work.input.skip(opener);
        if matches!(meaning, Meaning::Call | Meaning::Bare) {
            let (reader, before) = (self.calls.reader(marker), work.sink.calls());
            self.call = Some(Call { reader, opener, before });
            return;
        }
        work.input.commit();
        work.sink.mark();
        match meaning {
            Meaning::Think => self.is_thinking = true,
            Meaning::Answer => self.is_thinking = false,
            Meaning::Call | Meaning::Bare | Meaning::Nothing => {}
        }
    }

    /// The call is over.
    fn end_call(&mut self, work: &mut Work<'_>) {
        work.sink.finish_call();
        work.input.commit();
        self.is_thinking = false;
        self.call = None;
    }

    /// What was to be a call, or the next one, is text: its beginning at once, the rest is looked at anew.
    fn give_back(&mut self, work: &mut Work<'_>) {
        let Some(call) = self.call.take() else { return };
        let was_told = work.sink.calls() > call.before;
        let has_kept = !work.input.kept().is_empty();
        work.sink.finish_call();
        work.input.rewind();
        let first = work.input.rest().chars().next().map_or(0, char::len_utf8);
        let bytes = match (was_told, call.opener) {
            (true, _) if !has_kept => 0,
            (false, opener) if opener > 0 => opener,
            // Without a marker it would be taken for a call again.
            _ => first,
        };
        self.is_thinking &= !was_told;
        work.input.skip(bytes);
        self.give(self.kind(), work);
    }
}

impl Reader for Inline {
    fn read(&mut self, work: &mut Work<'_>) -> Step {
        loop {
            let Some(call) = &mut self.call else {
                if self.advance(work) {
                    continue;
                }
                return Step::Wait;
            };
            match call.reader.read(work) {
                Step::Wait => return Step::Wait,
                Step::Done => self.end_call(work),
                Step::Broken => self.give_back(work),
            }
        }
    }

    fn finish(&mut self, work: &mut Work<'_>) {
        while let Some(call) = &mut self.call {
            call.reader.finish(work);
            if work.sink.calls() > call.before {
                self.is_thinking = false;
                work.sink.finish_call();
                break;
            }
            self.give_back(work);
            self.read(work);
        }
        let left = work.input.take();
        work.sink.text(self.kind(), &left);
    }
}
