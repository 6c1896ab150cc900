//! An answer on its way out: the events of its choices become bytes in an API's shape, as a stream or
//! as one document.
//!
//! Each API is a [`Writer`], pure; [`body`] and [`collect`] drive it. A request that asks for several
//! choices is as many rows of the scheduler, whose events come mixed.

use actix_web::HttpResponseBuilder;
use actix_web::http::header::{self, HeaderName};
use bytes::Bytes;

use super::api_error::ApiError;
use crate::types::{CallEvent, ChatEvent, Failure, FailureReason, FinishReason, TokenScores, Usage};

mod body;
mod chat;
mod choices;
mod openai;
mod text;

pub(super) use body::body;
pub(super) use chat::ChatWriter;
pub(super) use choices::{Choices, collect};
pub(super) use openai::Head;
pub(super) use text::TextWriter;

/// A comment: keeps the connection alive and is ignored by every client.
pub(super) const HEARTBEAT: &[u8] = b": waiting\n\n";

/// The headers of every event stream.
pub(super) fn add_stream_headers(response: &mut HttpResponseBuilder) {
    response
        .insert_header((header::CONTENT_TYPE, "text/event-stream; charset=utf-8"))
        .insert_header((header::CACHE_CONTROL, "no-cache"))
        // A proxy in front would otherwise collect the events.
        .insert_header((HeaderName::from_static("x-accel-buffering"), "no"));
}

/// Writes one answer in an API's shape. Pure: what it writes depends on what it was told alone.
///
/// Of a stream: [`Self::begin`]; pieces of the choices and each choice's [`Self::finish`], mixed;
/// [`Self::end`]. Or [`Self::fail`] at any place, and nothing after it.
pub(super) trait Writer {
    /// The first bytes of a stream.
    fn begin(&mut self, out: &mut Vec<u8>);

    /// A piece of a choice's answer: an event that is no end.
    fn piece(&mut self, out: &mut Vec<u8>, choice: usize, event: ChatEvent);

    /// A choice has come to its end, by a stop string where one is given.
    fn finish(&mut self, out: &mut Vec<u8>, choice: usize, finish: FinishReason, stop_string: Option<&str>);

    /// All choices have.
    fn end(&mut self, out: &mut Vec<u8>, usage: Usage);

    /// The answer cannot be finished.
    fn fail(&mut self, out: &mut Vec<u8>, failure: Failure);

    /// What is written where nothing has happened for a while.
    fn heartbeat(&self) -> &'static [u8] {
        HEARTBEAT
    }

    /// The document in place of an answer that failed before anything was sent.
    fn error(&self, error: &ApiError) -> Bytes {
        let mut out = Vec::new();
        openai::write(&mut out, &error.body());
        out.into()
    }

    /// All of it in one document.
    fn whole(&self, answers: &[Answer], usage: Usage) -> Bytes;
}

/// All of a choice's answer.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    /// Its text.
    pub text: String,
    /// The thought before it, or within it.
    pub reasoning: String,
    /// The tool calls in it.
    pub calls: Vec<Call>,
    /// Its tokens' log-probabilities, where they were asked for.
    pub scores: Vec<TokenScores>,
    /// Why it ended.
    pub finish: FinishReason,
    /// The stop string that ended it.
    pub stop_string: Option<String>,
}

/// A tool call that the model made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Call {
    /// Its id.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// JSON text; its beginning where the answer was cut.
    pub arguments: String,
}

impl Default for Answer {
    fn default() -> Self {
        Self {
            text: String::new(),
            reasoning: String::new(),
            calls: Vec::new(),
            scores: Vec::new(),
            finish: FinishReason::Stop,
            stop_string: None,
        }
    }
}

impl Answer {
    /// Takes a piece in.
    pub(super) fn push(&mut self, event: ChatEvent) {
        match event {
            ChatEvent::Text(text) => self.text.push_str(&text),
            ChatEvent::Reasoning(text) => self.reasoning.push_str(&text),
            ChatEvent::Call(CallEvent::Started { id, name, .. }) => {
                self.calls.push(Call { id, name, arguments: String::new() });
            }
            ChatEvent::Call(CallEvent::Arguments { text, .. }) => {
                // Calls do not overlap: it is the latest one's.
                if let Some(call) = self.calls.last_mut() {
                    call.arguments.push_str(&text);
                }
            }
            ChatEvent::Call(CallEvent::Finished { .. }) => {}
            ChatEvent::Scores(scores) => self.scores.extend(scores),
            ChatEvent::Done { .. } | ChatEvent::Failed(_) => {}
        }
    }
}

/// The failure of a channel that closed without a last event.
pub(super) fn broken_off() -> Failure {
    Failure::new(FailureReason::RowFailed, "the answer broke off inside the server")
}

#[cfg(test)]
mod tests;
