//! From an answer's text to its typed parts: thought, content, tool calls.
//!
//! [`OutputFormat`] says how a model writes them, found by what its chat template renders;
//! [`OutputParser`] takes the text as it is decoded, control tokens spelled out, and gives events.
//! This module knows neither tokens nor requests, and stop strings are not its matter: whoever drives
//! it matches them on content alone.
//!
//! - **Any cut gives the same**: joined events do not depend on how the text was split.
//! - **Nothing is lost.** What begins like a call and is none is content. A call is told when its name
//!   is certain; from then on arguments come as they are written, and one that breaks off ends with
//!   `complete: false`, what follows being content. Markers, and space around them, are dropped.
//! - **What is held back is bounded**: the beginning of a marker, a call's head, a value that is no text.
//! - **A marked call counts whatever its tool's name is**: the client knows what to say to that, as with
//!   other servers. A call without a marker counts only if its tool was offered and the answer begins
//!   with it, so that JSON in prose stays prose.
//! - **A thought's tags count where an answer, or what follows a thought or a call, begins.** Elsewhere
//!   they are text, unless they are control tokens.
//! - **Linear in the text's length**, but for heads that are looked at again, each within its bound.

mod calls;
mod channels;
mod detect;
mod format;
mod ids;
mod inline;
mod input;
mod json;
mod known;
mod literal;
mod markers;
mod sink;
mod thought;
mod tools;

use serde_json::Value;

use crate::types::OutputEvent;
use calls::{Reader, Work};
pub use format::{CallSyntax, OutputFormat};
use ids::CallIds;
use input::Input;
use sink::Sink;
pub use thought::Thought;
use tools::Tools;

/// What has to be known of a request to read its answer.
#[derive(Clone, Copy, Debug, Default)]
pub struct OutputTerms<'a> {
    /// Tool definitions in OpenAI's shape, as in [`ChatRequest::tools`](crate::types::ChatRequest);
    /// without any, nothing in a text is a call.
    pub tools: &'a [Value],
    /// The prompt ended within a thought, see [`OutputFormat::opens_thought`].
    pub is_thinking: bool,
    /// Decides the calls' ids: another one for every answer.
    pub seed: u64,
}

/// Reads one answer.
#[derive(Debug)]
pub struct OutputParser {
    input: Input,
    sink: Sink,
    tools: Tools,
    reader: Box<dyn Reader>,
}

impl OutputParser {
    /// A parser at the beginning of an answer.
    pub fn new(format: &OutputFormat, terms: OutputTerms<'_>) -> Self {
        let tools = Tools::new(terms.tools);
        let mut sink = Sink::new(CallIds::new(terms.seed, format.calls.ids), !tools.is_empty());
        if terms.is_thinking {
            // The prompt ends with a marker.
            sink.mark();
        }
        Self {
            input: Input::default(),
            sink,
            reader: format.reader(!tools.is_empty(), terms.is_thinking),
            tools,
        }
    }

    /// Takes more text and gives what is certain now.
    pub fn push(&mut self, text: &str) -> Vec<OutputEvent> {
        self.input.push(text);
        let mut work = Work { input: &mut self.input, sink: &mut self.sink, tools: &self.tools };
        self.reader.read(&mut work);
        self.sink.take()
    }

    /// Bytes of text that were taken and about which nothing is certain yet, as far as they are not within a call.
    pub fn held(&self) -> usize {
        self.input.held() + self.sink.held()
    }

    /// The answer is over: gives what was held back.
    pub fn finish(mut self) -> Vec<OutputEvent> {
        let mut work = Work { input: &mut self.input, sink: &mut self.sink, tools: &self.tools };
        self.reader.finish(&mut work);
        let left = self.input.take();
        self.sink.text(sink::Kind::Content, &left);
        self.sink.finish();
        self.sink.take()
    }
}
