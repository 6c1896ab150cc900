//! One policy for conversations that a template cannot take as they are.
//!
//! Text is moved, never dropped, and a template that can print a conversation gets it unchanged:
//! - an empty assistant message at the end is taken as absent;
//! - several system messages at the beginning become one, where a template takes only one;
//! - without a system role, system text becomes the beginning of the first user message;
//! - a system message further on becomes a user message in its place, where a template refuses or
//!   loses it;
//! - what an assistant says beside a call becomes a message of its own before it, where a template
//!   prints only one of them;
//! - neighbours of one role become one message, where user and assistant must alternate.
//!
//! What a template still refuses is refused with its own words; calls and tools' answers that it
//! would lose are refused here, by [`refuse_lost`].

use std::borrow::Cow;

use crate::model::template::Capabilities;
use crate::types::{ChatMessage, PrepareError, Role};

/// Between texts that become one message.
const BETWEEN: &str = "\n\n";

/// The messages as the template can take them.
pub(super) fn shaped<'a>(messages: &'a [ChatMessage], can: &Capabilities) -> Cow<'a, [ChatMessage]> {
    let messages = without_empty_end(messages);
    let leading = messages.iter().take_while(|message| message.role == Role::System).count();
    let later = messages.iter().skip(leading).any(|message| message.role == Role::System);
    let has_neighbours =
        messages.windows(2).any(|pair| matches!(pair, [a, b] if a.role == b.role && a.role != Role::Tool));
    let fits = (leading == 0 || can.system_role)
        && (leading <= 1 || can.system_neighbours)
        && (!later || can.system_anywhere)
        && (!has_neighbours || !can.strict_alternation)
        && !messages.iter().any(|message| is_said_apart(message, can));
    if fits {
        return Cow::Borrowed(messages);
    }
    let mut shaped: Vec<ChatMessage> = Vec::with_capacity(messages.len());
    for (index, message) in messages.iter().enumerate() {
        let mut message = message.clone();
        if is_said_apart(&message, can) {
            shaped.push(ChatMessage { tool_calls: Vec::new(), ..message.clone() });
            (message.content, message.reasoning) = (None, None);
        }
        let is_later = index >= leading && !can.system_anywhere;
        if message.role == Role::System && (is_later || !can.system_role) {
            message.role = Role::User;
        }
        match shaped.last_mut() {
            Some(last) if joins(last, &message, index < leading, index == leading, can) => {
                append(last, message)
            }
            _ => shaped.push(message),
        }
    }
    Cow::Owned(shaped)
}

/// Refuses calls and tools' answers that the template would leave out of the prompt.
pub(super) fn refuse_lost(
    messages: &[ChatMessage],
    has_tools: bool,
    can: &Capabilities,
) -> Result<(), PrepareError> {
    for (index, message) in messages.iter().enumerate() {
        let refuse = |field: &str, message: &str| {
            Err(PrepareError::Field { field: format!("messages[{index}]{field}"), message: message.into() })
        };
        match message.tool_calls.len() {
            0 => {}
            _ if !can.tool_calls => {
                return refuse(
                    ".tool_calls",
                    "the model's chat template prints no tool calls; leave them out",
                );
            }
            _ if !has_tools && !can.calls_without_tools => {
                return refuse(
                    ".tool_calls",
                    "the model's chat template prints tool calls only where `tools` are offered; send them as well",
                );
            }
            2.. if !can.parallel_calls => {
                return refuse(
                    ".tool_calls",
                    "the model's chat template prints only one call of a message; send each in a message of its own",
                );
            }
            _ if is_said(message) && !can.text_beside_calls && !can.text_before_calls => {
                return refuse(
                    ".content",
                    "the model's chat template prints no text beside a tool call; leave one of them out",
                );
            }
            _ => {}
        }
        if message.role == Role::Tool {
            if !can.tool_results {
                return refuse(
                    "",
                    "the model's chat template does not print what tools answer; send it as a user's message",
                );
            }
            if !has_tools && !can.results_without_tools {
                return refuse(
                    "",
                    "the model's chat template prints what tools answer only where `tools` are offered; send them as well",
                );
            }
        }
    }
    Ok(())
}

/// Whether a message's text goes before its calls, as a message of its own.
fn is_said_apart(message: &ChatMessage, can: &Capabilities) -> bool {
    !message.tool_calls.is_empty() && is_said(message) && !can.text_beside_calls && can.text_before_calls
}

fn is_said(message: &ChatMessage) -> bool {
    message.content.as_ref().is_some_and(|text| !text.trim().is_empty())
}

/// Whether a message becomes part of the one before.
fn joins(
    last: &ChatMessage,
    next: &ChatMessage,
    is_leading: bool,
    follows_leading: bool,
    can: &Capabilities,
) -> bool {
    let plain = last.tool_calls.is_empty() && next.tool_calls.is_empty();
    if last.role != next.role || last.role == Role::Tool || !plain {
        return false;
    }
    let is_system_text = is_leading && (!can.system_neighbours || !can.system_role);
    // The system's text, made a user's, begins the first turn of the user's own.
    let is_folded = follows_leading && !can.system_role;
    is_system_text || is_folded || can.strict_alternation
}

fn append(last: &mut ChatMessage, next: ChatMessage) {
    last.content = joined(last.content.take(), next.content);
    last.reasoning = joined(last.reasoning.take(), next.reasoning);
    last.name = last.name.take().or(next.name);
}

fn joined(first: Option<String>, second: Option<String>) -> Option<String> {
    match (first, second) {
        (Some(first), Some(second)) if first.is_empty() || second.is_empty() => Some(first + &second),
        (Some(first), Some(second)) => Some(first + BETWEEN + &second),
        (first, second) => first.or(second),
    }
}

/// An answer that failed leaves such a message behind.
fn without_empty_end(messages: &[ChatMessage]) -> &[ChatMessage] {
    match messages {
        [before @ .., last] if !before.is_empty() && is_empty_answer(last) => before,
        _ => messages,
    }
}

fn is_empty_answer(message: &ChatMessage) -> bool {
    let is_blank = |text: &Option<String>| text.as_ref().is_none_or(|text| text.trim().is_empty());
    message.role == Role::Assistant
        && message.tool_calls.is_empty()
        && is_blank(&message.content)
        && is_blank(&message.reasoning)
}
