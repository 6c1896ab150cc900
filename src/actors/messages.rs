//! Every message, in the order of the table in [`crate::actors`].
//!
//! Values only: no closures, no shared locks. What is not a message, on purpose:
//! tokens (a bounded channel), cancellation (a dropped receiver), liveness and
//! metrics (atomics), configuration.

use std::time::SystemTime;

use actix::Message;
use tokio::sync::mpsc;

use crate::types::{ChatEvent, ChatRequest, Refusal, RequestId};

/// Asks for an answer. From an HTTP handler, or a host's own actor, to the gateway.
#[derive(Message, Debug)]
#[rtype(result = "Result<ChatStream, Refusal>")]
pub struct OpenChat {
    /// What is asked.
    pub request: ChatRequest,
}

/// An accepted request's stream. Dropping it cancels the request within a step.
#[derive(Debug)]
pub struct ChatStream {
    /// Identity in logs and responses.
    pub id: RequestId,
    /// The model that answers.
    pub model: String,
    /// When it was accepted.
    pub created: SystemTime,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// The seed in use, so that any answer can be replayed.
    pub seed: u64,
    /// Events; exactly one terminal one, last.
    pub events: mpsc::Receiver<ChatEvent>,
}
