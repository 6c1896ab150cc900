//! One policy for conversations that a template cannot take as they are.
//!
//! Text is moved, never dropped, and a template that can print a conversation gets it unchanged:
//! - an empty assistant message at the end is taken as absent;
//! - several system messages at the beginning become one, where a template takes only one;
//! - without a system role, system text becomes the beginning of the first user message;
//! - a system message further on becomes a user message in its place, where a template refuses or
//!   loses it;
//! - neighbours of one role become one message, where user and assistant must alternate.
//!
//! What a template still refuses is refused with its own words.

use std::borrow::Cow;

use crate::model::template::Capabilities;
use crate::types::{ChatMessage, Role};

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
        && (!has_neighbours || !can.strict_alternation);
    if fits {
        return Cow::Borrowed(messages);
    }
    let mut shaped: Vec<ChatMessage> = Vec::with_capacity(messages.len());
    for (index, message) in messages.iter().enumerate() {
        let mut message = message.clone();
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
