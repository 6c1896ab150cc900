//! Calls with a head and one value: `name[ARGS]{…}`, `name<｜tool▁sep｜>{…}`, `call:name{…}`.

use super::super::json::{JsonScanner, Scan};
use super::super::literal::{LiteralReader, Quotes};
use super::super::markers::{Found, find};
use super::{Reader, Step, Work, close, cut_literal, drop_half, is_name, read_literal};

/// Longest head, bytes.
const MAX_HEAD: usize = 1024;

/// How arguments are written.
#[derive(Clone, Copy, Debug)]
pub(in crate::model::output) enum Arguments {
    /// As JSON, which is passed through as it is.
    Json,
    /// Nearly so.
    Literal(Quotes),
}

/// A format of such calls.
#[derive(Debug)]
pub(in crate::model::output) struct Headed {
    /// The tool's name in what stands before the arguments; `None` where it is no head.
    pub name: fn(&str) -> Option<&str>,
    /// How arguments are written.
    pub arguments: Arguments,
    /// What ends a call, if anything does.
    pub closers: &'static [&'static str],
}

impl Headed {
    /// All its markers.
    pub fn markers(&self) -> Vec<&'static str> {
        match self.arguments {
            Arguments::Json => self.closers.to_vec(),
            Arguments::Literal(quotes) => [self.closers, quotes.marks].concat(),
        }
    }
}

#[derive(Debug)]
enum Place {
    Head,
    Json(JsonScanner),
    Literal(Box<LiteralReader>),
    Close,
}

/// Reads one call.
#[derive(Debug)]
pub(in crate::model::output) struct HeadedCalls {
    format: &'static Headed,
    /// The bracket that begins the arguments, then the closing markers.
    stops: Vec<&'static str>,
    place: Place,
    head: String,
}

impl HeadedCalls {
    /// A call of this format.
    pub fn new(format: &'static Headed) -> Self {
        let stops = [&["{"], format.closers].concat();
        Self { format, stops, place: Place::Head, head: String::new() }
    }

    fn head(&mut self, work: &mut Work<'_>) -> Option<Step> {
        let rest = work.input.rest();
        let (bytes, stop) = match find(rest, &self.stops) {
            Found::At(at, stop) => (at, Some(stop)),
            Found::Open(at) => (at, None),
        };
        self.head.push_str(&rest[..bytes]);
        work.input.skip(bytes);
        if self.head.len() > MAX_HEAD {
            return Some(Step::Broken);
        }
        let Some(stop) = stop else { return Some(Step::Wait) };
        let Some(name) = (self.format.name)(&self.head).filter(|name| is_name(name)) else {
            return Some(Step::Broken);
        };
        work.sink.start_call(name);
        work.input.commit();
        if stop > 0 {
            work.sink.arguments("{}");
            self.end(work);
            return None;
        }
        self.place = match self.format.arguments {
            Arguments::Json => Place::Json(JsonScanner::default()),
            Arguments::Literal(quotes) => Place::Literal(Box::new(LiteralReader::new(quotes))),
        };
        None
    }

    /// The arguments are at their end.
    fn end(&mut self, work: &mut Work<'_>) {
        work.sink.end_arguments();
        work.sink.finish_call();
        self.place = Place::Close;
    }
}

/// Passes on in a JSON value; `None`: it ended.
fn read_json(scanner: &mut JsonScanner, work: &mut Work<'_>) -> Option<Step> {
    let rest = work.input.rest();
    let (bytes, step) = match scanner.scan(rest) {
        Scan::More => (rest.len(), Some(Step::Wait)),
        Scan::End(bytes) => (bytes, None),
        Scan::Broken(bytes) => (bytes, Some(Step::Broken)),
    };
    work.sink.arguments(&rest[..bytes]);
    work.input.skip(bytes);
    work.input.commit();
    step
}

impl Reader for HeadedCalls {
    fn read(&mut self, work: &mut Work<'_>) -> Step {
        loop {
            let value = match &mut self.place {
                Place::Head => match self.head(work) {
                    Some(step) => return step,
                    None => continue,
                },
                Place::Json(scanner) => read_json(scanner, work),
                Place::Literal(reader) => read_literal(reader, work),
                Place::Close => return close(work.input, self.format.closers),
            };
            match value {
                Some(step) => return step,
                None => self.end(work),
            }
        }
    }

    fn finish(&mut self, work: &mut Work<'_>) {
        match &mut self.place {
            Place::Literal(reader) => cut_literal(reader, work),
            Place::Close => drop_half(work, self.format.closers),
            Place::Head | Place::Json(_) => {}
        }
    }
}
