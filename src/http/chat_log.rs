//! What a chat request looked like from HTTP: outcome, tokens, phases, at debug level.
//!
//! The line that every request leaves is the scheduler's, which hosts without HTTP get as
//! well. This one is written when the log is dropped, so a request whose client went away
//! has it too. Never holds text of prompts or answers.

use std::time::Instant;

use crate::observe::fields;
use crate::types::{ChatEvent, RequestId, Timings, Usage};

/// What is known of a request so far.
#[derive(Debug)]
pub struct ChatLog {
    id: RequestId,
    model: String,
    stream: bool,
    begun: Instant,
    outcome: &'static str,
    usage: Usage,
    timings: Timings,
}

impl ChatLog {
    /// Begins with an accepted request.
    pub fn new(id: RequestId, model: &str, stream: bool, prompt_tokens: u32) -> Self {
        Self {
            id,
            model: model.to_owned(),
            stream,
            begun: Instant::now(),
            outcome: "cancelled",
            usage: Usage { prompt_tokens, ..Usage::default() },
            timings: Timings::default(),
        }
    }

    /// Takes note of an event.
    pub fn saw(&mut self, event: &ChatEvent) {
        match event {
            ChatEvent::Text(_) => {}
            ChatEvent::Done { finish, usage, timings } => {
                self.outcome = super::sse::finish_name(*finish);
                self.usage = *usage;
                self.timings = *timings;
            }
            ChatEvent::Failed(_) => self.outcome = "failed",
        }
    }
}

impl Drop for ChatLog {
    fn drop(&mut self) {
        let ms = |duration: std::time::Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        tracing::debug!(
            target: fields::REQUEST,
            request_id = %self.id,
            model = %self.model,
            stream = self.stream,
            outcome = self.outcome,
            prompt_tokens = self.usage.prompt_tokens,
            cached_tokens = self.usage.cached_tokens,
            completion_tokens = self.usage.completion_tokens,
            queued_ms = ms(self.timings.queued),
            prefill_ms = ms(self.timings.prefill),
            decode_ms = ms(self.timings.decode),
            total_ms = ms(self.begun.elapsed()),
            "chat"
        );
    }
}
