//! What a parser gave, joined, with the rules of the events checked on the way.

use greenroom::model::output::{OutputFormat, OutputParser, OutputTerms};
use greenroom::types::{CallEvent, OutputEvent};
use serde_json::{Value, json};

/// A part of an answer.
#[derive(Clone, PartialEq, Debug)]
pub enum Part {
    Thought(String),
    Text(String),
    Call { name: String, arguments: String, complete: bool },
}

pub fn thought(text: &str) -> Part {
    Part::Thought(text.into())
}

pub fn text(text: &str) -> Part {
    Part::Text(text.into())
}

pub fn call(name: &str, arguments: &str) -> Part {
    Part::Call { name: name.into(), arguments: arguments.into(), complete: true }
}

pub fn cut_call(name: &str, arguments: &str) -> Part {
    Part::Call { name: name.into(), arguments: arguments.into(), complete: false }
}

pub fn format(calls: &str, thought: &str) -> OutputFormat {
    OutputFormat::named(calls, thought).unwrap_or_else(|| panic!("{calls}, {thought}"))
}

/// The tools that tests offer.
pub fn tools() -> Vec<Value> {
    let properties = json!({
        "city": {"type": "string"}, "zip": {"type": "string"}, "days": {"type": "integer"},
        "exact": {"type": "boolean"}, "tags": {"type": "array"}, "where": {"type": "object"},
        "note": {"type": ["string", "null"]},
    });
    let tool = |name: &str| {
        let parameters = json!({"type": "object", "properties": properties});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    };
    vec![tool("get_weather"), tool("search")]
}

/// A parser of an answer with those tools.
pub fn parser(format: &OutputFormat, is_thinking: bool) -> OutputParser {
    OutputParser::new(format, OutputTerms { tools: &tools(), is_thinking, seed: 7 })
}

/// The parts of an answer that comes in these pieces.
pub fn read<'a>(mut parser: OutputParser, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Part> {
    let mut events: Vec<OutputEvent> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
    events.extend(parser.finish());
    join(&events)
}

/// Joins events and fails where they break a rule.
pub fn join(events: &[OutputEvent]) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    let (mut open, mut calls, mut ids) = (None, 0, Vec::new());
    for event in events {
        match event {
            OutputEvent::Reasoning(more) | OutputEvent::Content(more) => {
                assert!(open.is_none() && !more.is_empty(), "{events:?}");
                let is_thought = matches!(event, OutputEvent::Reasoning(_));
                match parts.last_mut() {
                    Some(Part::Thought(text)) if is_thought => text.push_str(more),
                    Some(Part::Text(text)) if !is_thought => text.push_str(more),
                    _ if is_thought => parts.push(thought(more)),
                    _ => parts.push(text(more)),
                }
            }
            OutputEvent::Call(CallEvent::Started { index, id, name }) => {
                assert!(open.is_none() && *index == calls && !ids.contains(&id), "{events:?}");
                (open, calls) = (Some(*index), calls + 1);
                ids.push(id);
                parts.push(cut_call(name, ""));
            }
            OutputEvent::Call(CallEvent::Arguments { index, text }) => {
                assert!(open == Some(*index) && !text.is_empty(), "{events:?}");
                if let Some(Part::Call { arguments, .. }) = parts.last_mut() {
                    arguments.push_str(text);
                }
            }
            OutputEvent::Call(CallEvent::Finished { index, complete: ended }) => {
                assert_eq!(open.take(), Some(*index), "{events:?}");
                if let Some(Part::Call { complete, .. }) = parts.last_mut() {
                    *complete = *ended;
                }
            }
        }
    }
    assert!(open.is_none(), "{events:?}");
    parts
}

/// A text's characters, each as a text.
pub fn characters(text: &str) -> impl Iterator<Item = &str> {
    text.char_indices().map(|(at, char)| &text[at..at + char.len_utf8()])
}

/// Where a text can be cut.
pub fn cuts(text: &str) -> impl Iterator<Item = usize> {
    (0..=text.len()).filter(|cut| text.is_char_boundary(*cut))
}

/// Reads an answer whole, in characters and in two pieces cut anywhere: all must give these parts.
pub fn check(format: &OutputFormat, is_thinking: bool, answer: &str, expected: &[Part]) {
    let name = format.calls.name;
    assert_eq!(read(parser(format, is_thinking), [answer]), expected, "{name}, whole: {answer}");
    assert_eq!(
        read(parser(format, is_thinking), characters(answer)),
        expected,
        "{name}, in characters: {answer}"
    );
    for cut in cuts(answer) {
        let pieces = [&answer[..cut], &answer[cut..]];
        assert_eq!(read(parser(format, is_thinking), pieces), expected, "{name}, cut at {cut}: {answer}");
    }
}
