//! Chat events to the bytes of an event stream, or of a whole answer. Pure, but
//! for the clock that [`body`] uses for its comments.
//!
//! Order: role (chat only), pieces of text, finish, usage if asked for, `[DONE]`; or, where
//! a request fails midway, one error event and the end. Identity and time are
//! the same in every chunk.

use std::convert::Infallible;
use std::pin::Pin;
use std::time::Duration;

use actix_web::HttpResponseBuilder;
use actix_web::http::header::{self, HeaderName};
use bytes::Bytes;
use futures_util::Stream;
use futures_util::stream;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep};

use super::api_error::ApiError;
use super::dto::{
    AnswerMessage, Choice, ChunkChoice, Completion, Delta, PromptTokensDetails, TextChoice, UsageBody,
};
use super::recorder::Recorder;
use super::scores::{ChatScores, TextScores, chat_scores, text_scores};
use crate::types::{ChatEvent, Failure, FailureReason, FinishReason, TokenScores, Usage};

/// A comment: keeps the connection alive and is ignored by every client.
pub(super) const HEARTBEAT: &[u8] = b": waiting\n\n";
/// The end of a stream that went well.
const DONE: &[u8] = b"data: [DONE]\n\n";

/// Which build answers, in every response.
pub const FINGERPRINT: &str = concat!("greenroom-", env!("CARGO_PKG_VERSION"));

/// The headers of every event stream.
pub(super) fn add_stream_headers(response: &mut HttpResponseBuilder) {
    response
        .insert_header((header::CONTENT_TYPE, "text/event-stream; charset=utf-8"))
        .insert_header((header::CACHE_CONTROL, "no-cache"))
        // A proxy in front would otherwise collect the events.
        .insert_header((HeaderName::from_static("x-accel-buffering"), "no"));
}

/// Which of OpenAI's two shapes an answer has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Surface {
    /// `POST /v1/chat/completions`: messages.
    Chat,
    /// `POST /v1/completions`: text.
    Text,
}

impl Surface {
    /// Its path.
    pub fn route(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Text => "/v1/completions",
        }
    }

    /// What an answer's id begins with.
    pub fn prefix(self) -> &'static str {
        match self {
            Self::Chat => "chatcmpl",
            Self::Text => "cmpl",
        }
    }
}

/// Writes one answer.
#[derive(Clone, Debug)]
pub struct AnswerWriter {
    /// Its shape.
    pub surface: Surface,
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
}

/// All of an answer's text.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Its tokens' log-probabilities, where they were asked for.
    pub scores: Vec<TokenScores>,
}

impl AnswerWriter {
    /// The first chunk of a chat's stream: who speaks.
    pub fn role(&self) -> Bytes {
        self.chat_chunk(Delta { role: Some("assistant"), content: Some("") }, None, None)
    }

    /// A piece of the answer.
    pub fn text(&self, text: &str) -> Bytes {
        match self.surface {
            Surface::Chat => self.chat_chunk(Delta { role: None, content: Some(text) }, None, None),
            Surface::Text => self.text_chunk(text, None, None),
        }
    }

    /// A piece of the answer with the log-probabilities of the tokens that begin in it; the answer has so
    /// many characters before it.
    pub fn scored_text(&self, text: &str, scores: &[TokenScores], offset: usize) -> Bytes {
        match self.surface {
            Surface::Chat => {
                let delta = Delta { role: None, content: Some(text) };
                self.chat_chunk(delta, Some(chat_scores(scores)), None)
            }
            Surface::Text => self.text_chunk(text, Some(text_scores(scores, offset)), None),
        }
    }

    /// The end of a stream that went well: finish, usage if asked for, `[DONE]`.
    pub fn done(&self, finish: FinishReason, usage: Usage) -> Bytes {
        let finish = Some(finish_name(finish));
        let mut bytes = match self.surface {
            Surface::Chat => self.chat_chunk(Delta::default(), None, finish),
            Surface::Text => self.text_chunk("", None, finish),
        }
        .to_vec();
        if self.include_usage {
            let none: &[TextChoice<'_>] = &[];
            bytes.extend_from_slice(&event(&self.document(true, none, Some(Some(usage_body(usage))))));
        }
        bytes.extend_from_slice(DONE);
        bytes.into()
    }

    /// The end of a stream that failed.
    pub fn failed(&self, failure: Failure) -> Bytes {
        event(&ApiError::from(failure).body())
    }

    /// A whole answer, as JSON.
    pub fn whole(&self, answer: &Answer, finish: FinishReason, usage: Usage) -> Bytes {
        let Answer { text, scores } = answer;
        let is_scored = self.has_scores;
        let usage = Some(Some(usage_body(usage)));
        let finish_reason = finish_name(finish);
        let mut bytes = Vec::new();
        match self.surface {
            Surface::Chat => {
                let message = AnswerMessage { role: "assistant", content: text, refusal: None };
                let logprobs = is_scored.then(|| chat_scores(scores));
                let choice = Choice { index: 0, message, logprobs, finish_reason };
                write(&mut bytes, &self.document(false, &[choice], usage));
            }
            Surface::Text => {
                let logprobs = is_scored.then(|| text_scores(scores, 0));
                let choice = TextChoice { text, index: 0, logprobs, finish_reason: Some(finish_reason) };
                write(&mut bytes, &self.document(false, &[choice], usage));
            }
        }
        bytes.into()
    }

    fn chat_chunk(
        &self,
        delta: Delta<'_>,
        logprobs: Option<ChatScores>,
        finish_reason: Option<&'static str>,
    ) -> Bytes {
        let choice = ChunkChoice { index: 0, delta, logprobs, finish_reason };
        event(&self.document(true, &[choice], self.include_usage.then_some(None)))
    }

    fn text_chunk(
        &self,
        text: &str,
        logprobs: Option<TextScores>,
        finish_reason: Option<&'static str>,
    ) -> Bytes {
        let choice = TextChoice { text, index: 0, logprobs, finish_reason };
        event(&self.document(true, &[choice], self.include_usage.then_some(None)))
    }

    fn document<'a, C>(
        &'a self,
        chunk: bool,
        choices: &'a [C],
        usage: Option<Option<UsageBody>>,
    ) -> Completion<'a, C> {
        let object = match (self.surface, chunk) {
            (Surface::Chat, true) => "chat.completion.chunk",
            (Surface::Chat, false) => "chat.completion",
            (Surface::Text, _) => "text_completion",
        };
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
}

/// One `data:` event. JSON has no raw line breaks, so one line is enough.
fn event(value: &impl Serialize) -> Bytes {
    let mut bytes = b"data: ".to_vec();
    write(&mut bytes, value);
    bytes.extend_from_slice(b"\n\n");
    bytes.into()
}

fn write(bytes: &mut Vec<u8>, value: &impl Serialize) {
    // Our own types: strings, numbers and nothing that could refuse to be written.
    if serde_json::to_writer(&mut *bytes, value).is_err() {
        bytes.extend_from_slice(b"{\"error\":{\"message\":\"internal error\",\"type\":\"server_error\"}}");
    }
}

/// OpenAI's word for why generation ended.
pub fn finish_name(finish: FinishReason) -> &'static str {
    match finish {
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
    }
}

/// The failure of a channel that closed without a last event.
pub fn broken_off() -> Failure {
    Failure::new(FailureReason::RowFailed, "the answer broke off inside the server")
}

/// A piece's event, written once: all of an answer's differ in their text alone.
struct PieceFrame {
    /// Up to the text, its quotation mark not included.
    head: Vec<u8>,
    /// From behind the text on.
    tail: Vec<u8>,
}

impl PieceFrame {
    fn of(writer: &AnswerWriter) -> Self {
        let empty = writer.text("");
        let field: &[u8] = match writer.surface {
            Surface::Chat => b"\"content\":\"\"",
            Surface::Text => b"\"text\":\"\"",
        };
        // In the values before it quotation marks are escaped, so this is the field itself.
        let at = empty.windows(field.len()).position(|found| found == field);
        let (head, tail) = match at {
            Some(at) => (&empty[..at + field.len() - 2], &empty[at + field.len()..]),
            None => (&empty[..], &[][..]),
        };
        Self { head: head.to_vec(), tail: tail.to_vec() }
    }

    fn write(&self, out: &mut Vec<u8>, text: &str) {
        // Room for the quotation marks and some escapes.
        out.reserve(self.head.len() + text.len() + self.tail.len() + 16);
        out.extend_from_slice(&self.head);
        write(out, &text);
        out.extend_from_slice(&self.tail);
    }
}

/// Events that wait are written together, up to about so many bytes.
const TOGETHER: usize = 8 * 1024;

struct Body {
    frame: PieceFrame,
    writer: AnswerWriter,
    events: mpsc::Receiver<ChatEvent>,
    heartbeat: Duration,
    recorder: Recorder,
    /// Set again only when it fires: an event costs a look at the clock and no timer.
    timer: Pin<Box<Sleep>>,
    heard: Instant,
    begun: bool,
    ended: bool,
    /// Log-probabilities whose text has not come yet.
    scores: Vec<TokenScores>,
    /// Characters of the answer so far, counted where there are log-probabilities.
    offset: usize,
}

impl Body {
    async fn next(&mut self) -> Bytes {
        if !self.begun {
            self.begun = true;
            self.recorder.written();
            return self.writer.role();
        }
        let event = loop {
            tokio::select! {
                biased;
                event = self.events.recv() => break event,
                () = &mut self.timer => {
                    let now = Instant::now();
                    let silent = now.saturating_duration_since(self.heard) >= self.heartbeat;
                    let from = if silent { now } else { self.heard };
                    self.heard = from;
                    self.timer.as_mut().reset(from + self.heartbeat);
                    if silent {
                        return Bytes::from_static(HEARTBEAT);
                    }
                }
            }
        };
        self.heard = Instant::now();
        let mut out = Vec::new();
        self.write(&mut out, event.unwrap_or_else(|| ChatEvent::Failed(broken_off())));
        while !self.ended && out.len() < TOGETHER {
            let Ok(event) = self.events.try_recv() else { break };
            self.write(&mut out, event);
        }
        out.into()
    }

    fn write(&mut self, out: &mut Vec<u8>, event: ChatEvent) {
        self.ended = event.is_terminal();
        if self.ended {
            self.recorder.ended(&event);
        } else {
            self.recorder.written();
        }
        match event {
            ChatEvent::Text(text) if !self.writer.has_scores => self.frame.write(out, &text),
            ChatEvent::Text(text) => self.write_scored(out, &text),
            ChatEvent::Scores(scores) => self.scores.extend(scores),
            ChatEvent::Done { finish, usage, .. } => {
                if !self.scores.is_empty() {
                    self.write_scored(out, "");
                }
                out.extend_from_slice(&self.writer.done(finish, usage));
            }
            ChatEvent::Failed(failure) => out.extend_from_slice(&self.writer.failed(failure)),
        }
    }
}

impl Body {
    fn write_scored(&mut self, out: &mut Vec<u8>, text: &str) {
        let scores = std::mem::take(&mut self.scores);
        out.extend_from_slice(&self.writer.scored_text(text, &scores, self.offset));
        self.offset += text.chars().count();
    }
}

/// The response's body. Dropping it drops the receiver, which cancels the request.
pub(super) fn body(
    writer: AnswerWriter,
    events: mpsc::Receiver<ChatEvent>,
    heartbeat: Duration,
    recorder: Recorder,
) -> impl Stream<Item = Result<Bytes, Infallible>> {
    // A text has no role to begin with.
    let begun = writer.surface == Surface::Text;
    let frame = PieceFrame::of(&writer);
    let timer = Box::pin(tokio::time::sleep(heartbeat));
    let heard = Instant::now();
    let (scores, offset, ended) = (Vec::new(), 0, false);
    let body =
        Body { frame, writer, events, heartbeat, recorder, timer, heard, begun, ended, scores, offset };
    stream::unfold(body, |mut body| async move {
        if body.ended {
            return None;
        }
        let bytes = body.next().await;
        Some((Ok(bytes), body))
    })
}

#[cfg(test)]
mod tests;
