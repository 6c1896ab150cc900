//! What a request's stream carries, and how it ends.

use std::time::Duration;

use super::ids::TokenId;

/// Why generation ended normally.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FinishReason {
    /// An end-of-sequence token or a stop string.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
}

/// Token counts of one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Of these, how many came from the prompt cache.
    pub cached_tokens: u32,
    /// Of those, how many came from its tier on disk.
    pub ssd_cached_tokens: u32,
    /// Tokens of the prompt that were computed and are kept now.
    pub created_tokens: u32,
    /// Lines of the system prompt that the normaliser took out.
    pub stripped_lines: u32,
    /// Tokens produced, the end-of-sequence token included.
    pub completion_tokens: u32,
    /// Of these, those with which thought came.
    pub reasoning_tokens: u32,
}

/// Where a request's time went.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Timings {
    /// From acceptance to the row's first step.
    pub queued: Duration,
    /// From the first step to the first token.
    pub prefill: Duration,
    /// From the first token to the end.
    pub decode: Duration,
}

/// Why a request that was accepted could not be finished.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FailureReason {
    /// The engine broke and was rebuilt; trying again is sensible.
    EngineRestarted,
    /// The step failed for this row alone; trying again gives the same.
    RowFailed,
    /// The server is going down.
    ShuttingDown,
    /// The client read too slowly for too long.
    StreamStalled,
    /// No memory for this row although it is alone.
    OutOfMemory,
    /// Its time ran out while it waited; nothing was computed for it.
    QueueTimeout,
    /// Its time ran out while it was computed.
    DeadlineExceeded,
}

/// The failed end of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Failure {
    /// The kind, which decides code and retry.
    pub reason: FailureReason,
    /// One sentence for the client: no paths, no prompt text.
    pub message: String,
    /// When trying again is sensible, where that is known better than from the reason.
    pub retry_after: Option<Duration>,
}

impl Failure {
    /// A failure without a word on when to try again.
    pub fn new(reason: FailureReason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), retry_after: None }
    }
}

/// Bytes of a token, possibly part of a character, with the natural logarithm of its probability under
/// the model's own distribution: before bias, penalties, temperature and filters.
#[derive(Clone, PartialEq, Debug)]
pub struct ScoredToken {
    /// Which.
    pub token: TokenId,
    /// As it stands in the answer; of a control token its name.
    pub bytes: Vec<u8>,
    /// Minus infinity for a token that cannot come.
    pub logprob: f32,
}

/// A token of an answer, and what could have come in its place.
#[derive(Clone, PartialEq, Debug)]
pub struct TokenScores {
    /// The answer's.
    pub chosen: ScoredToken,
    /// The most probable ones, as many as were asked for, best first.
    pub top: Vec<ScoredToken>,
}

/// A part of a tool call that the model makes: `Started`, any number of `Arguments`, `Finished`. Calls do not
/// overlap, and neither text nor thought comes between the parts of one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CallEvent {
    /// A tool is called.
    Started {
        /// Which call of the answer, from 0.
        index: u32,
        /// Made here, unique within the answer.
        id: String,
        /// The tool's name as the model wrote it; it may be one that was not offered.
        name: String,
    },
    /// More of the call's arguments, which join to a JSON text.
    Arguments {
        /// The call's.
        index: u32,
        /// Never empty.
        text: String,
    },
    /// Nothing more comes for the call.
    Finished {
        /// The call's.
        index: u32,
        /// Whether the arguments came to their end. If not, they are the beginning of a JSON text:
        /// the answer was cut, or the model left the format.
        complete: bool,
    },
}

/// One event of a chat stream. Exactly one of `Done` and `Failed` comes, last.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum ChatEvent {
    /// A piece of the answer; never empty, never half a character.
    Text(String),
    /// A piece of the thought before the answer, or within it; never empty.
    Reasoning(String),
    /// A part of a tool call.
    Call(CallEvent),
    /// Log-probabilities of the tokens that the next text, or the end, is made of; where they were
    /// asked for. Those of all events are those of all tokens of the text.
    Scores(Vec<TokenScores>),
    /// The end.
    Done {
        /// Why.
        finish: FinishReason,
        /// The stop string that ended it, if one did.
        stop_string: Option<String>,
        /// Token counts.
        usage: Usage,
        /// Where the time went.
        timings: Timings,
    },
    /// The failed end.
    Failed(Failure),
}

impl ChatEvent {
    /// Whether no event follows this one.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Done { .. } | Self::Failed(_))
    }
}
