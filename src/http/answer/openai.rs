//! What OpenAI's chats and completions have in common.

use serde::Serialize;

use super::super::api_error::ApiError;
use super::super::dto::{Completion, CompletionTokensDetails, PromptTokensDetails, UsageBody};
use crate::types::{Failure, FinishReason, Usage};

/// The end of a stream that went well.
pub const DONE: &[u8] = b"data: [DONE]\n\n";

/// Which build answers, in every response.
const FINGERPRINT: &str = concat!("greenroom-", env!("CARGO_PKG_VERSION"));

/// What is the same in all chunks of an answer.
#[derive(Clone, Debug)]
pub struct Head {
    /// `chatcmpl-…` or `cmpl-…`.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Who answers.
    pub model: String,
    /// On what terms it was served, where the request named a tier.
    pub service_tier: Option<&'static str>,
    /// Whether a stream's usage chunk was asked for.
    pub include_usage: bool,
    /// Whether log-probabilities were asked for.
    pub has_scores: bool,
    /// How many choices there are.
    pub choices: usize,
}

impl Head {
    /// A document with choices.
    pub fn document<'a, C>(
        &'a self,
        object: &'static str,
        choices: &'a [C],
        usage: Option<Option<UsageBody>>,
    ) -> Completion<'a, C> {
        Completion {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            service_tier: self.service_tier,
            system_fingerprint: FINGERPRINT,
            choices,
            usage,
        }
    }

    /// A chunk with one choice.
    pub fn chunk<C: Serialize>(&self, out: &mut Vec<u8>, object: &'static str, choice: C) {
        event(out, &self.document(object, &[choice], self.include_usage.then_some(None)));
    }

    /// The end of a stream that went well: usage if asked for, `[DONE]`.
    pub fn end(&self, out: &mut Vec<u8>, object: &'static str, usage: Usage) {
        if self.include_usage {
            let none: &[()] = &[];
            event(out, &self.document(object, none, Some(Some(usage_body(usage)))));
        }
        out.extend_from_slice(DONE);
    }
}

/// The end of a stream that failed.
pub fn fail(out: &mut Vec<u8>, failure: Failure) {
    event(out, &ApiError::from(failure).body());
}

/// One `data:` event. JSON has no raw line breaks, so one line is enough.
fn event(out: &mut Vec<u8>, value: &impl Serialize) {
    out.extend_from_slice(b"data: ");
    write(out, value);
    out.extend_from_slice(b"\n\n");
}

/// A value as JSON.
pub fn write(out: &mut Vec<u8>, value: &impl Serialize) {
    // Our own types: strings, numbers and nothing that could refuse to be written.
    if serde_json::to_writer(&mut *out, value).is_err() {
        out.extend_from_slice(b"{\"error\":{\"message\":\"internal error\",\"type\":\"server_error\"}}");
    }
}

/// OpenAI's word for why generation ended; `calls`: tools are called.
pub fn finish_name(finish: FinishReason, calls: bool) -> &'static str {
    match finish {
        FinishReason::Stop if calls => "tool_calls",
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

/// Token counts in OpenAI's shape.
pub fn usage_body(usage: Usage) -> UsageBody {
    UsageBody {
        prompt_tokens: usage.prompt_tokens,
        completion_tokens: usage.completion_tokens,
        total_tokens: usage.prompt_tokens.saturating_add(usage.completion_tokens),
        prompt_tokens_details: PromptTokensDetails {
            cached_tokens: usage.cached_tokens,
            ssd_cached_tokens: usage.ssd_cached_tokens,
            created_tokens: usage.created_tokens,
            stripped_lines: usage.stripped_lines,
        },
        completion_tokens_details: CompletionTokensDetails { reasoning_tokens: usage.reasoning_tokens },
    }
}

/// A piece's event, written once: all of a choice's differ in their text alone.
#[derive(Debug)]
pub struct PieceFrame {
    /// Up to the text, its quotation mark not included.
    head: Vec<u8>,
    /// From behind the text on.
    tail: Vec<u8>,
}

impl PieceFrame {
    /// Of the event of a piece without text, whose text is the value of this field.
    pub fn of(empty: &[u8], field: &str) -> Self {
        let field = format!("\"{field}\":\"\"").into_bytes();
        // In the values before it quotation marks are escaped, so this is the field itself.
        let at = empty.windows(field.len()).position(|found| found == field);
        let (head, tail) = match at {
            Some(at) => (&empty[..at + field.len() - 2], &empty[at + field.len()..]),
            None => (empty, &[][..]),
        };
        Self { head: head.to_vec(), tail: tail.to_vec() }
    }

    /// The event of a piece with this text.
    pub fn write(&self, out: &mut Vec<u8>, text: &str) {
        // Room for the quotation marks and some escapes.
        out.reserve(self.head.len() + text.len() + self.tail.len() + 16);
        out.extend_from_slice(&self.head);
        write(out, &text);
        out.extend_from_slice(&self.tail);
    }
}
