//! `POST /v1/completions`, outward: as [`super::chat`], without roles.

use bytes::Bytes;

use super::super::dto::TextChoice;
use super::super::scores::text_scores;
use super::openai::{self, Head, PieceFrame, finish_name, usage_body};
use super::{Answer, Writer};
use crate::types::{ChatEvent, Failure, FinishReason, TokenScores, Usage};

const OBJECT: &str = "text_completion";

/// See the module.
#[derive(Debug)]
pub struct TextWriter {
    head: Head,
    choices: Vec<State>,
}

/// Where a choice is.
#[derive(Debug)]
struct State {
    frame: PieceFrame,
    /// Log-probabilities whose text has not come yet.
    scores: Vec<TokenScores>,
    /// Characters so far, counted where there are log-probabilities.
    offset: usize,
}

impl TextWriter {
    /// Of an answer with this head.
    pub fn new(head: Head) -> Self {
        let state = |index| {
            let mut empty = Vec::new();
            head.chunk(&mut empty, OBJECT, piece(index, ""));
            State { frame: PieceFrame::of(&empty, "text"), scores: Vec::new(), offset: 0 }
        };
        Self { choices: (0..head.choices).map(state).collect(), head }
    }

    fn scored(&mut self, out: &mut Vec<u8>, index: usize, text: &str) {
        let state = &mut self.choices[index];
        let logprobs = Some(text_scores(&state.scores, state.offset));
        state.scores.clear();
        state.offset += text.chars().count();
        self.head.chunk(out, OBJECT, TextChoice { logprobs, ..piece(index, text) });
    }
}

impl Writer for TextWriter {
    fn begin(&mut self, _: &mut Vec<u8>) {}

    fn piece(&mut self, out: &mut Vec<u8>, choice: usize, event: ChatEvent) {
        match event {
            ChatEvent::Text(text) if self.head.has_scores => self.scored(out, choice, &text),
            ChatEvent::Text(text) => self.choices[choice].frame.write(out, &text),
            ChatEvent::Scores(scores) => self.choices[choice].scores.extend(scores),
            // A text has no parts: nothing parses it.
            ChatEvent::Reasoning(_) | ChatEvent::Call(_) | ChatEvent::Done { .. } | ChatEvent::Failed(_) => {}
        }
    }

    fn finish(&mut self, out: &mut Vec<u8>, choice: usize, finish: FinishReason, _: Option<&str>) {
        if !self.choices[choice].scores.is_empty() {
            self.scored(out, choice, "");
        }
        let last = TextChoice { finish_reason: Some(finish_name(finish, false)), ..piece(choice, "") };
        self.head.chunk(out, OBJECT, last);
    }

    fn end(&mut self, out: &mut Vec<u8>, usage: Usage) {
        self.head.end(out, OBJECT, usage);
    }

    fn fail(&mut self, out: &mut Vec<u8>, failure: Failure) {
        openai::fail(out, failure);
    }

    fn whole(&self, answers: &[Answer], usage: Usage) -> Bytes {
        let choices = answers.iter().enumerate().map(|(index, answer)| TextChoice {
            text: &answer.text,
            index,
            logprobs: self.head.has_scores.then(|| text_scores(&answer.scores, 0)),
            finish_reason: Some(finish_name(answer.finish, false)),
        });
        let choices: Vec<_> = choices.collect();
        let mut out = Vec::new();
        openai::write(&mut out, &self.head.document(OBJECT, &choices, Some(Some(usage_body(usage)))));
        out.into()
    }
}

fn piece(index: usize, text: &str) -> TextChoice<'_> {
    TextChoice { text, index, logprobs: None, finish_reason: None }
}
