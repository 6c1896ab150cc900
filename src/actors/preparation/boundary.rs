//! Where a conversation's next prompt will leave this one.
//!
//! A prompt ends with the beginning of an answer, which templates write otherwise once the answer
//! is there (a thought that was opened, say). How much that is, is found out by rendering the
//! conversation with a reply and a further message, once as text and once, where there are tools,
//! as a call; the shorter common beginning counts. It depends on the template and on how the
//! request uses it, not on what is said, so it is found once and remembered. A wrong boundary costs
//! time, never an answer.

use std::collections::HashMap;
use std::time::SystemTime;

use serde_json::{Map, Value};

use crate::model::text::{Rendered, TextModel};
use crate::types::{ChatMessage, ChatRequest, Role, TokenId, ToolCall};

/// Longest end of a prompt that is remembered, bytes: a longer one was cut by what is said.
const LONGEST_PRIMER: usize = 512;
/// Ways of using templates that are remembered.
const MOST_REMEMBERED: usize = 256;
/// What is replied; a letter that no template trims.
const REPLY: &str = "x";

/// Ends of prompts that were found out.
#[derive(Debug, Default)]
pub(crate) struct Primers {
    known: HashMap<String, usize>,
}

impl Primers {
    /// Tokens that the next prompt will share with this one.
    pub(super) fn stable(
        &mut self,
        text: &TextModel,
        request: &ChatRequest,
        rendered: &Rendered,
        ids: &[TokenId],
        now: SystemTime,
    ) -> u32 {
        let all = text.spell(rendered).text.len();
        let key = key(text, request);
        let primer = match self.known.get(&key) {
            Some(primer) => *primer,
            None => {
                let primer = find_out(text, request, rendered, now);
                if primer <= LONGEST_PRIMER {
                    if self.known.len() >= MOST_REMEMBERED {
                        self.known.clear();
                    }
                    self.known.insert(key, primer);
                }
                primer
            }
        };
        text.tokens_within(ids, all.saturating_sub(primer))
    }
}

/// All that the end of a prompt can depend on besides what is said.
fn key(text: &TextModel, request: &ChatRequest) -> String {
    let last = request.messages.last();
    let role = last.map_or("", |message| message.role.as_str());
    let calls = last.is_some_and(|message| !message.tool_calls.is_empty());
    let first_tool = request.tools.first().map(name_of);
    let variables = Value::Object(request.template_kwargs.clone());
    format!("{}\n{role} {calls} {first_tool:?}\n{variables}", text.name)
}

fn name_of(tool: &Value) -> String {
    let name = tool.pointer("/function/name").or_else(|| tool.get("name"));
    name.and_then(Value::as_str).unwrap_or(REPLY).to_owned()
}

/// Bytes at the prompt's end that the next one will not have.
fn find_out(text: &TextModel, request: &ChatRequest, rendered: &Rendered, now: SystemTime) -> usize {
    let this = rendered.text();
    let common = replies(request).filter_map(|(reply, after)| {
        let mut messages = request.messages.clone();
        messages.extend([reply, after]);
        let next = text.render_messages(request, &messages, true, now).ok()?.text();
        Some(this.bytes().zip(next.bytes()).take_while(|(a, b)| a == b).count())
    });
    // A template that refuses all of it: nothing is known, and all may be shared.
    common.min().map_or(0, |common| this.len() - common)
}

/// What may follow, with a message that says something after it.
fn replies(request: &ChatRequest) -> impl Iterator<Item = (ChatMessage, ChatMessage)> {
    let said = (ChatMessage::text(Role::Assistant, REPLY), ChatMessage::text(Role::User, REPLY));
    let called = request.tools.first().map(|tool| {
        let id = Some("call00000".to_owned());
        let call = ToolCall { id: id.clone(), name: name_of(tool), arguments: Value::Object(Map::new()) };
        let reply =
            ChatMessage { content: None, tool_calls: vec![call], ..ChatMessage::text(Role::Assistant, "") };
        let result = ChatMessage { tool_call_id: id, ..ChatMessage::text(Role::Tool, REPLY) };
        (reply, result)
    });
    std::iter::once(said).chain(called)
}

/// Lengths of the prompt at the ends of messages that the client marked.
pub(super) fn breakpoints(
    text: &TextModel,
    request: &ChatRequest,
    rendered: &Rendered,
    ids: &[TokenId],
    now: SystemTime,
) -> Vec<u32> {
    let marked = request.cache.breakpoints.iter().filter_map(|last| {
        let messages = request.messages.get(..=*last)?;
        let part = text.render_messages(request, messages, false, now).ok()?;
        let (all, part) = (text.spell(rendered).text, text.spell(&part).text);
        let common = all.bytes().zip(part.bytes()).take_while(|(a, b)| a == b).count();
        Some(text.tokens_within(ids, common))
    });
    let mut lengths: Vec<u32> = marked.filter(|length| *length > 0).collect();
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}
