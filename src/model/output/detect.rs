//! Finds a model's format by what its chat template renders for a call.

use serde_json::{Map, Value, json};
use std::time::UNIX_EPOCH;

use crate::model::template::{ChatTemplate, TemplateInput, as_parts};

use super::format::{CallSyntax, OutputFormat};
use super::known::{BARE, SYNTAXES};
use super::thought::{THINK, THOUGHTS, Thought};

/// Words that come out where they were put in.
const QUESTION: &str = "greenroomprobequestion";
const CALL: &str = "greenroomprobecall";
const OFFERED: &str = "greenroomprobeoffered";
const ANSWER: &str = "greenroomprobeanswer";

impl OutputFormat {
    /// The format that a template renders the assistant's calls in; where it renders none, the one that
    /// its text speaks of.
    pub fn detect(template: &ChatTemplate) -> Self {
        let template = template.of(true);
        Self { calls: calls(template), thought: thought(&template.source) }
    }
}

fn calls(template: &ChatTemplate) -> &'static CallSyntax {
    let rendered = rendered_call(template);
    let by_call = |syntax: &&&CallSyntax| {
        let Some(text) = rendered.as_deref() else { return false };
        !syntax.rendered.is_empty() && has_in_order(text, syntax.rendered)
    };
    let by_source = |syntax: &&&CallSyntax| {
        !syntax.source.is_empty() && syntax.source.iter().all(|sign| template.source.contains(sign))
    };
    let found = SYNTAXES.iter().find(by_call).or_else(|| SYNTAXES.iter().find(by_source));
    found.copied().unwrap_or(&BARE)
}

/// The thought whose markers a template's text has.
fn thought(source: &str) -> &'static Thought {
    THOUGHTS.iter().find(|thought| thought.is_in(source)).copied().unwrap_or(&THINK)
}

/// Whether a text has the signs, one after the other; `@` stands for the call's name.
fn has_in_order(text: &str, signs: &[&str]) -> bool {
    let mut rest = text;
    signs.iter().all(|sign| {
        let sign = sign.replace('@', CALL);
        rest.find(&sign).map(|at| rest = &rest[at + sign.len()..]).is_some()
    })
}

/// What comes behind the question of a conversation with a call, up to the tool's answer.
fn rendered_call(template: &ChatTemplate) -> Option<String> {
    let can = template.own_capabilities();
    let arguments = json!({"greenroomprobekey": "greenroomprobevalue"});
    let arguments = if can.string_arguments { arguments.to_string().into() } else { arguments };
    let content = if can.null_content { Value::Null } else { "".into() };
    // Some templates ask for ids of nine letters and digits.
    let call =
        json!({"id": "probe0001", "type": "function", "function": {"name": CALL, "arguments": arguments}});
    let mut messages = [
        json!({"role": "user", "content": QUESTION}),
        json!({"role": "assistant", "content": content, "tool_calls": [call]}),
        json!({"role": "tool", "content": ANSWER, "tool_call_id": "probe0001", "name": CALL}),
    ];
    if can.content_parts {
        messages.iter_mut().for_each(as_parts);
    }
    let function = json!({"name": OFFERED, "description": "Probes.", "parameters": {"type": "object", "properties": {}}});
    let input = TemplateInput {
        messages: messages.to_vec().into(),
        tools: json!([{"type": "function", "function": function}]),
        add_generation_prompt: true,
        variables: Map::new(),
    };
    let text = template.render(&input, UNIX_EPOCH).ok()?;
    let (_, behind) = text.rsplit_once(QUESTION)?;
    let call = behind.split_once(ANSWER).map_or(behind, |(call, _)| call);
    call.contains(CALL).then(|| call.to_owned())
}
