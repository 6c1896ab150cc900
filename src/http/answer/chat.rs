//! `POST /v1/chat/completions`, outward.
//!
//! Order of a stream: each choice's role; pieces; each choice's finish; usage if asked for; `[DONE]`. Or,
//! where a request fails midway, one error event and the end.

use bytes::Bytes;

use super::super::dto::{AnswerMessage, Choice, ChunkChoice, Delta};
use super::super::scores::chat_scores;
use super::openai::{self, Head, PieceFrame, finish_name, usage_body};
use super::{Answer, Writer};
use crate::types::{ChatEvent, Failure, FinishReason, TokenScores, Usage};

const CHUNK: &str = "chat.completion.chunk";

/// See the module.
#[derive(Debug)]
pub struct ChatWriter {
    head: Head,
    choices: Vec<State>,
}

/// Where a choice is.
#[derive(Debug)]
struct State {
    frame: PieceFrame,
    /// Log-probabilities whose text has not come yet.
    scores: Vec<TokenScores>,
}

impl ChatWriter {
    /// Of an answer with this head.
    pub fn new(head: Head) -> Self {
        let state = |index| {
            let mut empty = Vec::new();
            chunk(&head, &mut empty, index, content(""), None, None);
            State { frame: PieceFrame::of(&empty, "content"), scores: Vec::new() }
        };
        Self { choices: (0..head.choices).map(state).collect(), head }
    }

    fn scored(&mut self, out: &mut Vec<u8>, index: usize, text: &str) {
        let scores = std::mem::take(&mut self.choices[index].scores);
        chunk(&self.head, out, index, content(text), Some(&scores), None);
    }
}

impl Writer for ChatWriter {
    fn begin(&mut self, out: &mut Vec<u8>) {
        for index in 0..self.choices.len() {
            let delta = Delta { role: Some("assistant"), ..content("") };
            chunk(&self.head, out, index, delta, None, None);
        }
    }

    fn piece(&mut self, out: &mut Vec<u8>, choice: usize, event: ChatEvent) {
        match event {
            ChatEvent::Text(text) if self.head.has_scores => self.scored(out, choice, &text),
            ChatEvent::Text(text) => self.choices[choice].frame.write(out, &text),
            ChatEvent::Scores(scores) => self.choices[choice].scores.extend(scores),
            ChatEvent::Done { .. } | ChatEvent::Failed(_) => {}
        }
    }

    fn finish(&mut self, out: &mut Vec<u8>, choice: usize, finish: FinishReason) {
        if !self.choices[choice].scores.is_empty() {
            self.scored(out, choice, "");
        }
        chunk(&self.head, out, choice, Delta::default(), None, Some(finish_name(finish)));
    }

    fn end(&mut self, out: &mut Vec<u8>, usage: Usage) {
        self.head.end(out, CHUNK, usage);
    }

    fn fail(&mut self, out: &mut Vec<u8>, failure: Failure) {
        openai::fail(out, failure);
    }

    fn whole(&self, answers: &[Answer], usage: Usage) -> Bytes {
        let choices = answers.iter().enumerate().map(|(index, answer)| Choice {
            index,
            message: AnswerMessage { role: "assistant", content: &answer.text, refusal: None },
            logprobs: self.head.has_scores.then(|| chat_scores(&answer.scores)),
            finish_reason: finish_name(answer.finish),
        });
        let choices: Vec<_> = choices.collect();
        let mut out = Vec::new();
        openai::write(
            &mut out,
            &self.head.document("chat.completion", &choices, Some(Some(usage_body(usage)))),
        );
        out.into()
    }
}

fn content(text: &str) -> Delta<'_> {
    Delta { role: None, content: Some(text) }
}

fn chunk(
    head: &Head,
    out: &mut Vec<u8>,
    index: usize,
    delta: Delta<'_>,
    scores: Option<&[TokenScores]>,
    finish_reason: Option<&'static str>,
) {
    head.chunk(out, CHUNK, ChunkChoice { index, delta, logprobs: scores.map(chat_scores), finish_reason });
}
