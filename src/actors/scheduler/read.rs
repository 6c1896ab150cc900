//! Reads an answer's text: thought, content and calls as events of its stream.

use crate::model::output::{OutputParser, OutputTerms};
use crate::model::text::TextModel;
use crate::types::{ChatEvent, OutputEvent, ReadAnswer};

/// See the module.
#[derive(Debug)]
pub(crate) struct AnswerReader {
    parser: OutputParser,
}

impl AnswerReader {
    pub(crate) fn new(text: &TextModel, read: &ReadAnswer) -> Self {
        let terms = OutputTerms { tools: &read.tools, is_thinking: read.is_thinking, seed: read.seed };
        Self { parser: OutputParser::new(&text.answer_form().format, terms) }
    }

    /// Takes more text and gives what is certain now.
    pub(crate) fn push(&mut self, text: &str) -> Vec<ChatEvent> {
        self.parser.push(text).into_iter().map(event).collect()
    }

    /// Bytes about which nothing is certain yet.
    pub(crate) fn held(&self) -> usize {
        self.parser.held()
    }

    /// The answer is over: gives what was held back.
    pub(crate) fn finish(self) -> Vec<ChatEvent> {
        self.parser.finish().into_iter().map(event).collect()
    }
}

fn event(event: OutputEvent) -> ChatEvent {
    match event {
        OutputEvent::Content(text) => ChatEvent::Text(text),
        OutputEvent::Reasoning(text) => ChatEvent::Reasoning(text),
        OutputEvent::Call(event) => ChatEvent::Call(event),
    }
}
