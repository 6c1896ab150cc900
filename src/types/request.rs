//! A chat request as validated at the edge, and as prepared for the engine.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};

use super::cache_terms::CacheTerms;
use super::error::PrepareError;
use super::ids::TokenId;
use super::sampling::{SamplingOptions, SamplingParams};
use super::terms::Priority;
use super::trace::Trace;

/// Who speaks in a [`ChatMessage`]. The wire's `developer` is `System`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Instructions.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name that templates know.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// A function call that the assistant made earlier in the conversation.
#[derive(Clone, PartialEq, Debug)]
pub struct ToolCall {
    /// The call's id, which the tool's answer repeats.
    pub id: Option<String>,
    /// The function's name.
    pub name: String,
    /// Parsed arguments, always a JSON object.
    pub arguments: Value,
}

/// Whether the model may, or must, call a tool.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum ToolChoice {
    /// It may.
    #[default]
    Auto,
    /// It must call one of those offered.
    Required,
    /// It must call this one.
    Named(String),
}

/// One message of a conversation; text only (parts are joined at the edge).
#[derive(Clone, PartialEq, Debug)]
pub struct ChatMessage {
    /// Who speaks.
    pub role: Role,
    /// What is said; `None` for an assistant that only called tools.
    pub content: Option<String>,
    /// The assistant's earlier thinking, where the client sends it back.
    pub reasoning: Option<String>,
    /// The assistant's calls.
    pub tool_calls: Vec<ToolCall>,
    /// The call that a tool message answers.
    pub tool_call_id: Option<String>,
    /// Participant's or tool's name.
    pub name: Option<String>,
}

impl ChatMessage {
    /// A message with text and nothing else.
    pub fn text(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: Some(content.into()),
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }
}

/// Identity used for fairness and logs: API key, header, user, session or peer
/// address, whichever came first.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct ClientId(pub String);

impl ClientId {
    /// What identities made of an API key begin with; a hash of the key follows.
    pub const KEY: &str = "key:";

    /// The identity, if it is an API key's.
    pub fn api_key(&self) -> Option<&str> {
        self.0.starts_with(Self::KEY).then_some(self.0.as_str())
    }
}

/// A chat request, validated field by field where it entered the process.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct ChatRequest {
    /// The model's id; `None` or `default` for the default model.
    pub model: Option<String>,
    /// The conversation, at least one message.
    pub messages: Vec<ChatMessage>,
    /// Text to go on from as it is, control tokens that it spells included; messages, tools and
    /// template variables then play no part.
    pub prompt: Option<String>,
    /// Tool definitions in OpenAI's shape, handed to the template as they are.
    pub tools: Vec<Value>,
    /// Whether a tool must be called; where none may, `tools` is empty.
    pub tool_choice: ToolChoice,
    /// Whether one message may hold several calls; `None`: as the model likes.
    pub parallel_tool_calls: Option<bool>,
    /// Whether the model is to think before it answers, where its template has a switch for it; a
    /// variable of `template_kwargs` that is the switch wins. `None`: the template's own way.
    pub thinking: Option<bool>,
    /// Extra variables for the template.
    pub template_kwargs: Map<String, Value>,
    /// Sampling as asked for.
    pub sampling: SamplingOptions,
    /// Stop strings: not empty, matched on the answer's text.
    pub stop: Vec<String>,
    /// Most tokens to produce, at least 1; `None` = until the model ends or the context is full.
    pub max_tokens: Option<u32>,
    /// Go on past end-of-sequence tokens (for measurements).
    pub ignore_eos: bool,
    /// Log-probabilities of the answer's tokens, and of so many of the best in each one's place, at most
    /// [`ChatRequest::MAX_TOP`].
    pub scores: Option<u8>,
    /// What it says of the prompt cache.
    pub cache: CacheTerms,
    /// For fairness and logs.
    pub client: ClientId,
    /// How urgent it is.
    pub priority: Priority,
    /// Given up so long after it was accepted; `None` = never.
    pub timeout: Option<Duration>,
    /// Where its way is recorded; `None`: the gateway begins a trace, whose id is the request's.
    pub trace: Option<Trace>,
}

impl ChatRequest {
    /// Most tokens that can be told beside each one of the answer.
    pub const MAX_TOP: u8 = 20;

    /// Checks what can be checked without a model: the ranges of numbers.
    ///
    /// # Errors
    /// `Field`: the first value that is out of its range.
    pub fn check(&self) -> Result<(), PrepareError> {
        self.sampling.check()?;
        if self.max_tokens == Some(0) {
            let message = "0 is not at least 1".to_owned();
            return Err(PrepareError::Field { field: "max_tokens".to_owned(), message });
        }
        if let Some(count) = self.scores.filter(|count| *count > Self::MAX_TOP) {
            let message = format!("{count} is more than {}", Self::MAX_TOP);
            return Err(PrepareError::Field { field: "top_logprobs".to_owned(), message });
        }
        Ok(())
    }
}

/// What ends a row besides its length.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct StopRules {
    /// Matched on decoded text; may span tokens.
    pub strings: Vec<String>,
    /// End-of-sequence ids; empty when the request ignores them.
    pub tokens: Vec<TokenId>,
}

/// What has to be known of a request to read its answer: thought, content, calls.
#[derive(Clone, PartialEq, Debug)]
pub struct ReadAnswer {
    /// Tool definitions that were offered.
    pub tools: Arc<[Value]>,
    /// The prompt ended within a thought.
    pub is_thinking: bool,
    /// Decides the calls' ids.
    pub seed: u64,
}

/// A request ready for the engine.
#[derive(Clone, PartialEq, Debug)]
pub struct PreparedPrompt {
    /// Prompt ids, at least one, fewer than the context.
    pub tokens: Vec<TokenId>,
    /// Resolved sampling.
    pub sampling: Arc<SamplingParams>,
    /// What ends the row.
    pub stop: StopRules,
    /// Most tokens to produce, at least 1; prompt + this fits the context.
    pub max_new_tokens: u32,
    /// Log-probabilities wanted, see [`ChatRequest::scores`].
    pub scores: Option<u8>,
    /// How the answer is read; `None`: it is text as it stands.
    pub read: Option<ReadAnswer>,
    /// Tokens that the conversation's next prompt will begin with, as far as can be told.
    pub stable: u32,
    /// Lengths of the prompt that the client marked as worth keeping, ascending.
    pub breakpoints: Vec<u32>,
    /// Lines that the normaliser took out.
    pub stripped: u32,
    /// The conversation, by the client's name for it.
    pub session: Option<String>,
    /// Computed state is shared with requests of the same salt alone.
    pub salt: Option<String>,
}
