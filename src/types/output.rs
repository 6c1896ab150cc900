//! The typed parts of an answer: thought, content and tool calls, as they come.

/// One piece of an answer. Pieces join in order: neighbours of one kind are one text, cut anywhere.
///
/// A call is `CallStarted`, any number of `CallArguments`, `CallFinished`; calls do not overlap, and
/// neither text nor thought comes between the parts of one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum OutputEvent {
    /// Thought, never empty.
    Reasoning(String),
    /// Text for the reader, never empty.
    Content(String),
    /// A tool is called.
    CallStarted {
        /// Which call of the answer, from 0.
        index: u32,
        /// Made here, unique within the answer.
        id: String,
        /// The tool's name as the model wrote it; it may be one that was not offered.
        name: String,
    },
    /// More of the call's arguments, which join to a JSON text.
    CallArguments {
        /// The call's.
        index: u32,
        /// Never empty.
        text: String,
    },
    /// Nothing more comes for the call.
    CallFinished {
        /// The call's.
        index: u32,
        /// Whether the arguments came to their end. If not, they are the beginning of a JSON text:
        /// the answer was cut, or the model left the format.
        complete: bool,
    },
}
