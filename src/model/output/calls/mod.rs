//! Readers of tool calls, one file a family of formats.
//!
//! A reader starts behind the marker that opens a call. Until it has the call's name it commits
//! nothing, so that what turns out to be no call is given back as text; from then on arguments are
//! given out as they come.

mod by_first;
mod headed;
mod json;
mod pythonic;
mod tagged;
mod value;

use super::input::Input;
use super::literal::{LiteralReader, Progress};
use super::markers::{Begins, begins};
use super::sink::Sink;
use super::tools::Tools;

pub(super) use by_first::ByFirst;
pub(super) use headed::{Arguments, Headed, HeadedCalls};
pub(super) use json::JsonCalls;
pub(super) use pythonic::PythonicCalls;
pub(super) use tagged::{TaggedCalls, Tags};

/// Longest name of a tool or a parameter, bytes.
const MAX_NAME: usize = 256;

/// How a reader left its input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// More text is needed.
    Wait,
    /// The rest is somebody else's.
    Done,
    /// What was kept, and the rest, is not what was expected.
    Broken,
}

/// What a reader works on.
pub(super) struct Work<'a> {
    /// The answer's text.
    pub input: &'a mut Input,
    /// Where its parts go.
    pub sink: &'a mut Sink,
    /// What was offered.
    pub tools: &'a Tools,
}

/// Reads one kind of text until it ends.
pub(super) trait Reader: std::fmt::Debug + Send {
    /// Reads as far as it can.
    fn read(&mut self, work: &mut Work<'_>) -> Step;

    /// No more text comes. Gives out what it held back within a call and commits what it used; what
    /// is left uncommitted is text.
    fn finish(&mut self, work: &mut Work<'_>);
}

/// Whether this can be a tool's or a parameter's name. Prose and markup cannot.
fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= MAX_NAME
        && !name.contains(|char: char| {
            char.is_whitespace() || char.is_control() || "<>{}[]()\"'`=,".contains(char)
        })
}

/// Reads one of the closing markers, if it comes next. Where it does not, the call is over too: the
/// marker may be a control token that the model ended with.
fn close(input: &mut Input, closers: &[&str]) -> Step {
    input.skip_space();
    match begins(input.rest(), closers) {
        Begins::With(number) => {
            input.skip(closers[number].len());
            input.commit();
        }
        Begins::Open => return Step::Wait,
        _ => input.rewind(),
    }
    Step::Done
}

/// Reads on in a literal and gives out its JSON; `None`: it ended.
fn read_literal(reader: &mut LiteralReader, work: &mut Work<'_>) -> Option<Step> {
    let mut text = String::new();
    let (bytes, step) = match reader.push(work.input.rest(), &mut text) {
        Progress::More(bytes) => (bytes, Some(Step::Wait)),
        Progress::End(bytes) => (bytes, None),
        Progress::Broken(bytes) => (bytes, Some(Step::Broken)),
    };
    work.input.skip(bytes);
    work.input.commit();
    work.sink.arguments(&text);
    step
}

/// The answer ends within a literal: gives out what it holds.
fn cut_literal(reader: &mut LiteralReader, work: &mut Work<'_>) {
    let mut text = String::new();
    if reader.finish(work.input.rest(), &mut text) {
        work.input.use_up();
    }
    work.sink.arguments(&text);
}

/// The answer ends where one of the markers is due: half of one is no text.
fn drop_half(work: &mut Work<'_>, markers: &[&str]) {
    if markers.iter().any(|marker| marker.starts_with(work.input.rest())) {
        work.input.use_up();
    }
}
