//! Calls between tags: `<function=f><parameter=a>1</parameter></function>` and its kin.

use super::super::json::quoted;
use super::super::markers::{Begins, Found, begins, find};
use super::super::tools::Types;
use super::value::Value;
use super::{MAX_NAME, Reader, Step, Work, drop_half, is_name};

/// Longest value held because it is no text, bytes.
const MAX_HELD: usize = 1 << 20;

/// The tags of a format.
#[derive(Debug)]
pub(in crate::model::output) struct Tags {
    /// What stands around calls, if anything does.
    pub block: Option<(&'static str, &'static str)>,
    /// What comes before a tool's name.
    pub call: &'static str,
    /// What comes behind it; `None`: the name is a word.
    pub name_end: Option<&'static str>,
    /// What comes before a parameter's name, and behind it. A quotation mark in between ends the name,
    /// and attributes follow it.
    pub parameter: (&'static str, &'static str),
    /// What comes before its value, besides.
    pub value: Option<&'static str>,
    /// What comes behind its value.
    pub value_end: &'static str,
    /// What ends a value that begins with `<![CDATA[`, where values may.
    pub character_data_end: Option<&'static str>,
    /// What ends a call.
    pub call_end: &'static str,
    /// A line break on each side of a value belongs to the tags.
    pub is_framed: bool,
}

impl Tags {
    /// All of them.
    pub fn markers(&self) -> Vec<&'static str> {
        let mut markers = vec![self.call, self.parameter.0, self.parameter.1, self.value_end, self.call_end];
        markers.extend(self.block.into_iter().flat_map(|(begin, end)| [begin, end]));
        markers.extend(self.value);
        markers
    }
}

const CHARACTER_DATA: &str = "<![CDATA[";

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    /// Before a call's tag.
    Call,
    /// Within a tool's name.
    Name,
    /// Before a parameter, or the call's end.
    Between,
    /// Within a parameter's name.
    Key,
    /// Before the tag of its value.
    ValueTag,
    /// Before its value.
    ValueStart,
    /// Within its value.
    Value,
    /// Behind a call.
    Next,
}

/// Reads the calls of one block, or one call.
#[derive(Debug)]
pub(in crate::model::output) struct TaggedCalls {
    tags: &'static Tags,
    /// What may come between parameters: the next one, the call's end, the block's.
    between: Vec<&'static str>,
    place: Place,
    name: String,
    is_started: bool,
    is_first: bool,
    value: Value,
    value_end: &'static str,
}

impl TaggedCalls {
    /// Calls behind the block's tag, or one behind its own.
    pub fn new(tags: &'static Tags, in_block: bool) -> Self {
        let mut between = vec![tags.parameter.0, tags.call_end];
        between.extend(tags.block.map(|(_, end)| end));
        Self {
            tags,
            between,
            place: if in_block { Place::Call } else { Place::Name },
            name: String::new(),
            is_started: false,
            is_first: true,
            value: Value::new(Types::STRING, false),
            value_end: tags.value_end,
        }
    }

    fn advance(&mut self, work: &mut Work<'_>) -> Option<Step> {
        match self.place {
            Place::Call => self.tag(self.tags.call, Place::Name, work),
            Place::Name => self.name(work),
            Place::Between => self.between(work),
            Place::Key => self.key(work),
            Place::ValueTag => match self.tags.value {
                Some(tag) => self.tag(tag, Place::ValueStart, work),
                None => self.go(Place::ValueStart, work, 0),
            },
            Place::ValueStart => self.value_start(work),
            Place::Value => self.value(work),
            Place::Next => self.next(work),
        }
    }

    fn go(&mut self, place: Place, work: &mut Work<'_>, bytes: usize) -> Option<Step> {
        work.input.skip(bytes);
        self.place = place;
        None
    }

    /// Reads a tag that must come next.
    fn tag(&mut self, tag: &str, place: Place, work: &mut Work<'_>) -> Option<Step> {
        work.input.skip_space();
        match begins(work.input.rest(), &[tag]) {
            Begins::With(_) => self.go(place, work, tag.len()),
            Begins::Open => Some(Step::Wait),
            Begins::No => Some(Step::Broken),
        }
    }

    fn name(&mut self, work: &mut Work<'_>) -> Option<Step> {
        let (name, bytes) = match self.tags.name_end {
            Some(end) => match text_before(end, work) {
                Ok(name) => {
                    let bytes = name.len() + end.len();
                    (name, bytes)
                }
                Err(step) => return Some(step),
            },
            None => match word(work) {
                Ok(name) => {
                    let bytes = name.len();
                    (name, bytes)
                }
                Err(step) => return Some(step),
            },
        };
        let name = name.trim().trim_matches('"');
        if !is_name(name) {
            return Some(Step::Broken);
        }
        self.name = name.to_owned();
        (self.is_started, self.is_first) = (false, true);
        self.go(Place::Between, work, bytes)
    }

    fn between(&mut self, work: &mut Work<'_>) -> Option<Step> {
        work.input.skip_space();
        let number = match begins(work.input.rest(), &self.between) {
            Begins::With(number) => number,
            Begins::Open => return Some(Step::Wait),
            Begins::No => return Some(Step::Broken),
        };
        // A tag of its own is what tells a call from a name in prose.
        if !self.is_started {
            work.sink.start_call(&self.name);
            work.sink.arguments("{");
            self.is_started = true;
        }
        if number == 0 {
            self.go(Place::Key, work, self.between[number].len());
            work.input.commit();
            return None;
        }
        work.sink.arguments("}");
        work.sink.end_arguments();
        work.sink.finish_call();
        // The block's end is read there.
        let bytes = if number == 1 { self.between[number].len() } else { 0 };
        self.go(Place::Next, work, bytes);
        work.input.commit();
        None
    }

    fn key(&mut self, work: &mut Work<'_>) -> Option<Step> {
        let end = self.tags.parameter.1;
        let text = match text_before(end, work) {
            Ok(text) => text,
            Err(step) => return Some(step),
        };
        let (key, attributes) = text.split_once('"').unwrap_or((text.as_str(), ""));
        let key = key.trim();
        let types = if attributes.contains("string=\"true\"") {
            Types::STRING
        } else if attributes.contains("string=\"false\"") {
            Types::VALUE
        } else {
            work.tools.types(&self.name, key)
        };
        self.value = Value::new(types, self.tags.is_framed);
        if !std::mem::take(&mut self.is_first) {
            work.sink.arguments(", ");
        }
        work.sink.arguments(&format!("{}: ", quoted(key)));
        self.go(Place::ValueTag, work, text.len() + end.len());
        work.input.commit();
        None
    }

    fn value_start(&mut self, work: &mut Work<'_>) -> Option<Step> {
        self.value_end = self.tags.value_end;
        if let Some(end) = self.tags.character_data_end {
            match begins(work.input.rest(), &[CHARACTER_DATA]) {
                Begins::With(_) => {
                    self.value_end = end;
                    work.input.skip(CHARACTER_DATA.len());
                }
                Begins::Open => return Some(Step::Wait),
                Begins::No => {}
            }
        }
        self.go(Place::Value, work, 0)
    }

    fn value(&mut self, work: &mut Work<'_>) -> Option<Step> {
        let rest = work.input.rest();
        let (bytes, is_whole) = match find(rest, &[self.value_end]) {
            Found::At(at, _) => (at, true),
            Found::Open(at) => (at, false),
        };
        let mut json = self.value.push(&rest[..bytes]);
        work.input.skip(bytes);
        if is_whole {
            json.push_str(&self.value.finish());
            self.go(Place::Between, work, self.value_end.len());
        }
        work.sink.arguments(&json);
        work.input.commit();
        if is_whole {
            return None;
        }
        if self.value.held() > MAX_HELD {
            work.sink.arguments(&self.value.cut());
            return Some(Step::Broken);
        }
        Some(Step::Wait)
    }

    /// Whether another call follows, or the block's end.
    fn next(&mut self, work: &mut Work<'_>) -> Option<Step> {
        let Some((_, end)) = self.tags.block else { return Some(Step::Done) };
        work.input.skip_space();
        match begins(work.input.rest(), &[end, self.tags.call]) {
            Begins::With(0) => {
                work.input.skip(end.len());
                work.input.commit();
            }
            Begins::With(_) => return self.go(Place::Call, work, 0),
            Begins::Open => return Some(Step::Wait),
            Begins::No => work.input.rewind(),
        }
        Some(Step::Done)
    }
}

/// The text before a marker.
fn text_before(end: &str, work: &Work<'_>) -> Result<String, Step> {
    match find(work.input.rest(), &[end]) {
        Found::At(at, _) if at <= MAX_NAME => Ok(work.input.rest()[..at].to_owned()),
        Found::Open(at) if at <= MAX_NAME => Err(Step::Wait),
        _ => Err(Step::Broken),
    }
}

/// The word that ends where a tag or space comes.
fn word(work: &mut Work<'_>) -> Result<String, Step> {
    work.input.skip_space();
    let rest = work.input.rest();
    match rest.find(|char: char| char.is_whitespace() || char == '<') {
        Some(at) => Ok(rest[..at].to_owned()),
        None if rest.len() <= MAX_NAME => Err(Step::Wait),
        None => Err(Step::Broken),
    }
}

impl Reader for TaggedCalls {
    fn read(&mut self, work: &mut Work<'_>) -> Step {
        loop {
            if let Some(step) = self.advance(work) {
                return step;
            }
        }
    }

    fn finish(&mut self, work: &mut Work<'_>) {
        match self.place {
            Place::Value => {
                let mut json = self.value.push(work.input.rest());
                json.push_str(&self.value.cut());
                work.sink.arguments(&json);
                work.input.use_up();
            }
            Place::Between if self.is_started => drop_half(work, &self.between),
            Place::Next => drop_half(work, &self.between),
            _ => {}
        }
    }
}
