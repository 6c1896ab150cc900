//! The typed parts of an answer: thought, content and tool calls, as they come.

use super::event::CallEvent;

/// One piece of an answer. Pieces join in order: neighbours of one kind are one text, cut anywhere.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OutputEvent {
    /// Thought, never empty.
    Reasoning(String),
    /// Text for the reader, never empty.
    Content(String),
    /// A part of a tool call.
    Call(CallEvent),
}
