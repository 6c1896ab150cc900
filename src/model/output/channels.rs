//! Harmony, the form of gpt-oss: an answer is messages, each with a channel and perhaps a recipient.
//!
//! `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>`.
//! The channel `analysis` is thought, what is addressed to a function is a call, all else is content.

use super::calls::{Reader, Step, Work};
use super::json::{JsonScanner, Scan};
use super::markers::{Begins, Found, begins, find};
use super::sink::Kind;

/// Longest head of a message, bytes.
const MAX_HEAD: usize = 1024;
const MESSAGE: &str = "<|message|>";
/// What a head begins with; the prompt ends with the first one's `<|start|>assistant`.
const HEADS: [&str; 3] = ["<|", " to=", "to="];
/// What ends a message: the first three are no part of the next one's head.
const ENDS: [&str; 5] = ["<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>"];
const MESSAGE_ENDS: usize = 3;

#[derive(Debug)]
enum Place {
    /// Within a message's head.
    Head,
    /// Within a text.
    Text(Kind),
    /// Within arguments.
    Arguments(Arguments),
}

#[derive(Debug)]
struct Arguments {
    /// Knows where they end; none once they turned out to be no JSON.
    scanner: Option<JsonScanner>,
    is_empty: bool,
}

impl Arguments {
    /// Where in more text they end, if they do.
    fn scan(&mut self, text: &str) -> Option<usize> {
        match self.scanner.as_mut()?.scan(text) {
            Scan::End(bytes) => Some(bytes),
            Scan::More => None,
            Scan::Broken(_) => {
                self.scanner = None;
                None
            }
        }
    }
}

/// Reads a whole answer.
#[derive(Debug)]
pub(super) struct Channels {
    place: Place,
}

impl Channels {
    /// For an answer whose prompt ends with `<|start|>assistant`.
    pub fn new() -> Self {
        Self { place: Place::Head }
    }

    fn head(&mut self, work: &mut Work<'_>) -> Option<Step> {
        if work.input.kept().is_empty() {
            match begins(work.input.rest(), &HEADS) {
                Begins::With(_) => {}
                Begins::Open => return Some(Step::Wait),
                Begins::No => return self.no_head(work),
            }
        }
        let rest = work.input.rest();
        match find(rest, &[MESSAGE]) {
            Found::At(at, _) => {
                work.input.skip(at);
                self.place = place_of(work);
                work.input.skip(MESSAGE.len());
                work.input.commit();
                None
            }
            Found::Open(at) => {
                work.input.skip(at);
                if work.input.kept().len() > MAX_HEAD { self.no_head(work) } else { Some(Step::Wait) }
            }
        }
    }

    /// What stands where a head should is content.
    fn no_head(&mut self, work: &mut Work<'_>) -> Option<Step> {
        self.place = Place::Text(Kind::Content);
        work.sink.text(Kind::Content, work.input.kept());
        work.input.commit();
        None
    }

    /// Reads on in a message.
    fn body(&mut self, work: &mut Work<'_>) -> Option<Step> {
        let (bytes, end) = match find(work.input.rest(), &ENDS) {
            Found::At(at, number) => (at, Some(number)),
            Found::Open(at) => (at, None),
        };
        work.input.skip(bytes);
        self.give(work);
        work.input.commit();
        let Some(number) = end else { return Some(Step::Wait) };
        self.end(work);
        if number < MESSAGE_ENDS {
            work.input.skip(ENDS[number].len());
            work.input.commit();
        }
        None
    }

    /// Gives out what was read of a message.
    fn give(&mut self, work: &mut Work<'_>) {
        let text = work.input.kept();
        let left = match &mut self.place {
            Place::Head => return,
            Place::Text(kind) => return work.sink.text(*kind, text),
            Place::Arguments(_) if work.sink.has_arguments() => text,
            Place::Arguments(arguments) => {
                let text = if arguments.is_empty { text.trim_start() } else { text };
                let bytes = arguments.scan(text);
                arguments.is_empty &= text.is_empty();
                work.sink.arguments(&text[..bytes.unwrap_or(text.len())]);
                let Some(bytes) = bytes else { return };
                work.sink.end_arguments();
                &text[bytes..]
            }
        };
        if !left.trim().is_empty() {
            work.sink.finish_call();
            work.sink.text(Kind::Content, left);
            self.place = Place::Text(Kind::Content);
        }
    }

    /// The message is over.
    fn end(&mut self, work: &mut Work<'_>) {
        if matches!(&self.place, Place::Arguments(arguments) if arguments.is_empty) {
            work.sink.arguments("{}");
            work.sink.end_arguments();
        }
        work.sink.finish_call();
        work.sink.mark();
        self.place = Place::Head;
    }
}

/// What a message is by its head.
fn place_of(work: &mut Work<'_>) -> Place {
    let head = work.input.kept();
    let word_after = |sign: &str| {
        let (_, rest) = head.split_once(sign)?;
        rest.split(|char: char| char.is_whitespace() || char == '<').next().filter(|word| !word.is_empty())
    };
    let recipient = word_after("to=").filter(|name| !["assistant", "user", "all"].contains(name));
    if let Some(name) = recipient {
        let name = name.strip_prefix("functions.").unwrap_or(name).to_owned();
        work.sink.start_call(&name);
        return Place::Arguments(Arguments { scanner: Some(JsonScanner::default()), is_empty: true });
    }
    let kind = if word_after("<|channel|>") == Some("analysis") { Kind::Reasoning } else { Kind::Content };
    work.sink.mark();
    Place::Text(kind)
}

impl Reader for Channels {
    fn read(&mut self, work: &mut Work<'_>) -> Step {
        loop {
            let step = if matches!(self.place, Place::Head) { self.head(work) } else { self.body(work) };
            if let Some(step) = step {
                return step;
            }
        }
    }

    fn finish(&mut self, work: &mut Work<'_>) {
        let is_head = matches!(self.place, Place::Head);
        if is_head {
            // Half a head says nothing; what is none is text.
            let left = work.input.take();
            if !HEADS.iter().any(|head| left.starts_with(head)) {
                work.sink.text(Kind::Content, &left);
            }
        } else {
            let rest = work.input.rest().len();
            work.input.skip(rest);
            self.give(work);
            work.input.commit();
        }
    }
}
