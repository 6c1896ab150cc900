//! What goes over the wire, outward, and nothing else: serde types in
//! OpenAI's shape. Requests are read field by field in [`super::chat_request`].

use serde::Serialize;

use super::scores::{ChatScores, TextScores};

/// An error's envelope.
#[derive(Debug, Serialize)]
pub struct ErrorBody<'a> {
    /// The error.
    pub error: ErrorDetail<'a>,
}

/// An error.
#[derive(Debug, Serialize)]
pub struct ErrorDetail<'a> {
    /// What is wrong and what would be right.
    pub message: &'a str,
    /// Class.
    pub r#type: &'static str,
    /// The request's field.
    pub param: Option<&'a str>,
    /// Stable name.
    pub code: &'static str,
}

/// A whole answer, or one piece of a stream.
#[derive(Debug, Serialize)]
pub struct Completion<'a, C> {
    /// `chatcmpl-…` or `cmpl-…`, the same over a stream.
    pub id: &'a str,
    /// `chat.completion`, `chat.completion.chunk` or `text_completion`.
    pub object: &'static str,
    /// Seconds since 1970, the same over a stream.
    pub created: u64,
    /// Who answers.
    pub model: &'a str,
    /// The tier in use, where the request named one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_tier: Option<&'static str>,
    /// Which build answers.
    pub system_fingerprint: &'static str,
    /// In a stream one, or none in its usage chunk.
    pub choices: &'a [C],
    /// Token counts. In a stream absent unless asked for; then null in all chunks but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<UsageBody>>,
}

/// A choice of a whole answer.
#[derive(Debug, Serialize)]
pub struct Choice<'a> {
    /// Its number, from 0.
    pub index: usize,
    /// The answer.
    pub message: AnswerMessage<'a>,
    /// Where they were asked for.
    pub logprobs: Option<ChatScores>,
    /// `stop` or `length`.
    pub finish_reason: &'static str,
}

/// The answer.
#[derive(Debug, Serialize)]
pub struct AnswerMessage<'a> {
    /// `assistant`.
    pub role: &'static str,
    /// Its text; null where it only calls tools.
    pub content: Option<&'a str>,
    /// The thought before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<&'a str>,
    /// The tools that it calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<CallBody<'a>>,
    /// Always null.
    pub refusal: Option<()>,
}

/// A tool call, or what is new of one.
#[derive(Debug, Serialize)]
pub struct CallBody<'a> {
    /// In a stream: which call of the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    /// In a stream in its first piece.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<&'a str>,
    /// `function`; in a stream in its first piece.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r#type: Option<&'static str>,
    /// What is called.
    pub function: FunctionBody<'a>,
}

/// The function of a call.
#[derive(Debug, Serialize)]
pub struct FunctionBody<'a> {
    /// In a stream in its first piece.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    /// JSON text, or more of it.
    pub arguments: &'a str,
}

/// Token counts.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct UsageBody {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens produced.
    pub completion_tokens: u32,
    /// Their sum.
    pub total_tokens: u32,
    /// Of the prompt.
    pub prompt_tokens_details: PromptTokensDetails,
    /// Of what was produced.
    pub completion_tokens_details: CompletionTokensDetails,
}

/// Details of an answer's tokens.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CompletionTokensDetails {
    /// Those with which thought came.
    pub reasoning_tokens: u32,
}

/// Details of a prompt's tokens.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PromptTokensDetails {
    /// Not computed again.
    pub cached_tokens: u32,
    /// Of these, read from disk.
    #[serde(skip_serializing_if = "is_zero")]
    pub ssd_cached_tokens: u32,
    /// Computed, and kept for the next one.
    #[serde(skip_serializing_if = "is_zero")]
    pub created_tokens: u32,
    /// Lines that are different each time and were taken out of the system prompt.
    #[serde(skip_serializing_if = "is_zero")]
    pub stripped_lines: u32,
}

/// A choice of a text completion, whole or a chunk.
#[derive(Debug, Serialize)]
pub struct TextChoice<'a> {
    /// What the model goes on with, or a piece of it.
    pub text: &'a str,
    /// Its number, from 0.
    pub index: usize,
    /// Where they were asked for.
    pub logprobs: Option<TextScores>,
    /// `stop` or `length`; null in all chunks but the last.
    pub finish_reason: Option<&'static str>,
}

/// The choice of a chunk.
#[derive(Debug, Serialize)]
pub struct ChunkChoice<'a> {
    /// Its number, from 0.
    pub index: usize,
    /// What is new.
    pub delta: Delta<'a>,
    /// Where they were asked for: of the tokens that begin in this piece.
    pub logprobs: Option<ChatScores>,
    /// In the last chunk.
    pub finish_reason: Option<&'static str>,
}

/// What is new in a chunk.
#[derive(Debug, Default, Serialize)]
pub struct Delta<'a> {
    /// In the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// A piece of the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<&'a str>,
    /// A piece of the thought.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<&'a str>,
    /// A part of a tool call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<&'a [CallBody<'a>]>,
}

/// A list.
#[derive(Debug, Serialize)]
pub struct List<T> {
    /// `list`.
    pub object: &'static str,
    /// Its items.
    pub data: Vec<T>,
}

/// A model in a list.
#[derive(Debug, Serialize)]
pub struct ModelBody {
    /// What requests call it.
    pub id: String,
    /// `model`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// `greenroom`.
    pub owned_by: &'static str,
    /// `loading`, `ready` and so on.
    pub state: String,
    /// Tokens, once it is known.
    pub context_length: Option<u32>,
    /// Facts for people.
    pub facts: serde_json::Map<String, serde_json::Value>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_zero(count: &u32) -> bool {
    *count == 0
}
