//! `POST /v1/chat/completions`, outward.
//!
//! Order of a stream: each choice's role; pieces; each choice's finish; usage if asked for; `[DONE]`. Or,
//! where a request fails midway, one error event and the end.

use bytes::Bytes;

use super::super::dto::{AnswerMessage, CallBody, Choice, ChunkChoice, Delta, FunctionBody};
use super::super::scores::chat_scores;
use super::openai::{self, Head, PieceFrame, finish_name, usage_body};
use super::{Answer, Call, Writer};
use crate::types::{CallEvent, ChatEvent, Failure, FinishReason, TokenScores, Usage};

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
    /// Tool calls so far.
    calls: u32,
}

impl ChatWriter {
    /// Of an answer with this head.
    pub fn new(head: Head) -> Self {
        let state = |index| {
            let mut empty = Vec::new();
            chunk(&head, &mut empty, index, content(""), None, None);
            State { frame: PieceFrame::of(&empty, "content"), scores: Vec::new(), calls: 0 }
        };
        Self { choices: (0..head.choices).map(state).collect(), head }
    }

    fn call(&mut self, out: &mut Vec<u8>, choice: usize, event: CallEvent) {
        let (index, id, name, arguments) = match event {
            CallEvent::Started { index, id, name } => {
                self.choices[choice].calls += 1;
                (index, Some(id), Some(name), String::new())
            }
            CallEvent::Arguments { index, text } => (index, None, None, text),
            CallEvent::Finished { .. } => return,
        };
        let kind = id.is_some().then_some("function");
        let function = FunctionBody { name: name.as_deref(), arguments: &arguments };
        let call = CallBody { index: Some(index), id: id.as_deref(), r#type: kind, function };
        let delta = Delta { tool_calls: Some(&[call]), ..Delta::default() };
        chunk(&self.head, out, choice, delta, None, None);
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
            ChatEvent::Reasoning(text) => {
                let delta = Delta { reasoning_content: Some(&text), ..Delta::default() };
                chunk(&self.head, out, choice, delta, None, None);
            }
            ChatEvent::Call(event) => self.call(out, choice, event),
            ChatEvent::Scores(scores) => self.choices[choice].scores.extend(scores),
            ChatEvent::Done { .. } | ChatEvent::Failed(_) => {}
        }
    }

    fn finish(&mut self, out: &mut Vec<u8>, choice: usize, finish: FinishReason, _: Option<&str>) {
        if !self.choices[choice].scores.is_empty() {
            self.scored(out, choice, "");
        }
        let finish = finish_name(finish, self.choices[choice].calls > 0);
        chunk(&self.head, out, choice, Delta::default(), None, Some(finish));
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
            message: message(answer),
            logprobs: self.head.has_scores.then(|| chat_scores(&answer.scores)),
            finish_reason: finish_name(answer.finish, !answer.calls.is_empty()),
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
    Delta { content: Some(text), ..Delta::default() }
}

/// A whole message. Its content is null where it only calls tools.
fn message(answer: &Answer) -> AnswerMessage<'_> {
    let silent = answer.text.is_empty() && !answer.calls.is_empty();
    AnswerMessage {
        role: "assistant",
        content: (!silent).then_some(&answer.text),
        reasoning_content: Some(answer.reasoning.as_str()).filter(|text| !text.is_empty()),
        tool_calls: answer.calls.iter().map(whole_call).collect(),
        refusal: None,
    }
}

fn whole_call(call: &Call) -> CallBody<'_> {
    CallBody {
        index: None,
        id: Some(&call.id),
        r#type: Some("function"),
        function: FunctionBody { name: Some(&call.name), arguments: &call.arguments },
    }
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
