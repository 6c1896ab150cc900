//! The conversation of a chat request: roles, content parts, tool calls.
//!
//! Text only: parts of text are joined, every other part is refused by its
//! path. What is left unread is reported as unknown.

use serde_json::{Map, Value};

use super::api_error::ApiError;
use super::body::{MAX_STRUCTURE, structure};
use super::cache_terms::read_mark;
use super::fields::{Fields, wrong_type};
use crate::types::{ChatMessage, Role, ToolCall};

/// Most messages in one request: a bound on work, far above any context.
const MAX_MESSAGES: usize = 100_000;

/// A conversation as the body has it.
pub struct Conversation {
    /// At least one.
    pub messages: Vec<ChatMessage>,
    /// Which of them the client marked as ends of what is worth keeping.
    pub marks: Vec<usize>,
    /// Where the parts of the first one's content end, bytes.
    pub first_parts: Vec<usize>,
}

/// What a message says besides itself.
#[derive(Default)]
struct Extras {
    marked: bool,
    /// Where the parts of its content end, bytes.
    parts: Vec<usize>,
}

/// Reads `messages`.
///
/// # Errors
/// The first field that is wrong, by its path.
pub fn read_messages(body: &mut Fields, unknown: &mut Vec<String>) -> Result<Conversation, ApiError> {
    let items = body
        .array("messages")?
        .ok_or_else(|| body.missing("messages", "an array with at least one message"))?;
    if items.len() > MAX_MESSAGES {
        let message = format!("has {} entries, the limit is {MAX_MESSAGES}", items.len());
        return Err(ApiError::field("messages", "invalid_value", message));
    }
    let (mut messages, mut marks) = (Vec::with_capacity(items.len()), Vec::new());
    let mut first_parts = Vec::new();
    // Arguments are JSON within the JSON: together they get as much as a body.
    let mut room = MAX_STRUCTURE;
    for (index, item) in items.into_iter().enumerate() {
        let fields = Fields::new(format!("messages[{index}]"), item)?;
        let mut extras = Extras::default();
        messages.push(read_message(fields, unknown, &mut room, &mut extras)?);
        marks.extend(extras.marked.then_some(index));
        if index == 0 {
            first_parts = extras.parts;
        }
    }
    // An empty answer at the end is what a failed turn leaves behind in a client's history.
    if messages.last().is_some_and(is_empty_answer) {
        messages.pop();
        marks.retain(|index| *index < messages.len());
    }
    if messages.is_empty() {
        return Err(ApiError::field("messages", "invalid_value", "must hold at least one message"));
    }
    Ok(Conversation { messages, marks, first_parts })
}

fn is_empty_answer(message: &ChatMessage) -> bool {
    message.role == Role::Assistant
        && message.tool_calls.is_empty()
        && message.content.as_deref().unwrap_or_default().is_empty()
        && message.reasoning.as_deref().unwrap_or_default().is_empty()
}

fn read_message(
    mut fields: Fields,
    unknown: &mut Vec<String>,
    room: &mut usize,
    extras: &mut Extras,
) -> Result<ChatMessage, ApiError> {
    let role = read_role(&mut fields)?;
    let content = read_content(&mut fields, role, unknown, extras)?;
    extras.marked |= read_mark(&mut fields)?;
    let name = fields.string("name")?;
    let mut message = ChatMessage::text(role, "");
    message.content = content;
    message.name = name;
    match role {
        Role::Assistant => {
            message.tool_calls = read_tool_calls(&mut fields, unknown, room)?;
            let thinking = fields.string("reasoning_content")?;
            message.reasoning = fields.string("reasoning")?.or(thinking);
            let hint = "earlier audio answers are not supported; send their text as content";
            fields.unsupported("audio", hint, |_| false)?;
            let hint = "is the older form; send tool_calls";
            fields.unsupported("function_call", hint, |_| false)?;
            if message.content.is_none() {
                // A refusal is what the assistant said.
                message.content = fields.string("refusal")?;
            } else {
                fields.string("refusal")?;
            }
        }
        Role::Tool => message.tool_call_id = fields.string("tool_call_id")?,
        Role::System | Role::User => {}
    }
    if message.content.is_none() && role != Role::Assistant {
        return Err(fields.missing("content", "a string or an array of parts"));
    }
    fields.unknown(unknown);
    Ok(message)
}

fn read_role(fields: &mut Fields) -> Result<Role, ApiError> {
    let role = fields.required_string("role")?;
    Ok(match role.as_str() {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" => Role::Tool,
        other => {
            let message =
                format!("`{}` is not one of system, developer, user, assistant, tool", short(other));
            return Err(ApiError::field(&fields.path("role"), "invalid_value", message));
        }
    })
}

/// Text, or parts of text joined without separator.
fn read_content(
    fields: &mut Fields,
    role: Role,
    unknown: &mut Vec<String>,
    extras: &mut Extras,
) -> Result<Option<String>, ApiError> {
    let path = fields.path("content");
    match fields.value("content") {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            for (index, part) in parts.into_iter().enumerate() {
                text.push_str(&read_part(format!("{path}[{index}]"), part, role, unknown, extras)?);
                extras.parts.push(text.len());
            }
            Ok(Some(text))
        }
        Some(other) => Err(wrong_type(&path, "a string or an array of parts", &other)),
    }
}

fn read_part(
    path: String,
    part: Value,
    role: Role,
    unknown: &mut Vec<String>,
    extras: &mut Extras,
) -> Result<String, ApiError> {
    if let Value::String(text) = part {
        return Ok(text);
    }
    let mut fields = Fields::new(path, part)?;
    let kind = fields.required_string("type")?;
    let text = match kind.as_str() {
        "text" | "input_text" | "output_text" => fields.required_string("text")?,
        "refusal" if role == Role::Assistant => fields.required_string("refusal")?,
        other => {
            let message = format!("`{}` is not supported; this model reads text parts only", short(other));
            return Err(ApiError::field(&fields.path("type"), "unsupported_parameter", message));
        }
    };
    extras.marked |= read_mark(&mut fields)?;
    fields.unknown(unknown);
    Ok(text)
}

fn read_tool_calls(
    fields: &mut Fields,
    unknown: &mut Vec<String>,
    room: &mut usize,
) -> Result<Vec<ToolCall>, ApiError> {
    let path = fields.path("tool_calls");
    let calls = fields.array("tool_calls")?.unwrap_or_default();
    let read = |(index, call)| read_tool_call(Fields::new(format!("{path}[{index}]"), call)?, unknown, room);
    calls.into_iter().enumerate().map(read).collect()
}

fn read_tool_call(
    mut call: Fields,
    unknown: &mut Vec<String>,
    room: &mut usize,
) -> Result<ToolCall, ApiError> {
    let id = call.string("id")?;
    if let Some(kind) = call.string("type")?
        && kind != "function"
    {
        let message = format!("`{}` is not supported; only function is", short(&kind));
        return Err(ApiError::field(&call.path("type"), "unsupported_parameter", message));
    }
    let mut function = call
        .nested("function")?
        .ok_or_else(|| call.missing("function", "an object with name and arguments"))?;
    let name = function.required_string("name")?;
    let path = function.path("arguments");
    let arguments = match function.value("arguments") {
        None => Map::new(),
        Some(Value::Object(map)) => map,
        Some(Value::String(text)) => read_arguments(&path, &text, room)?,
        Some(other) => return Err(wrong_type(&path, "a string that holds a JSON object", &other)),
    };
    // Streams number their calls; histories often keep the number.
    call.value("index");
    function.unknown(unknown);
    call.unknown(unknown);
    Ok(ToolCall { id, name, arguments: Value::Object(arguments) })
}

/// Arguments as models and clients write them: JSON in a string, empty for none.
fn read_arguments(path: &str, text: &str, room: &mut usize) -> Result<Map<String, Value>, ApiError> {
    if text.trim().is_empty() {
        return Ok(Map::new());
    }
    *room = room.checked_sub(structure(text.as_bytes())).ok_or_else(|| {
        let message = format!("with the arguments before it holds more than {MAX_STRUCTURE} values");
        ApiError::field(path, "invalid_value", message)
    })?;
    serde_json::from_str(text).map_err(|error| {
        let message = format!("must hold a JSON object: {error}");
        ApiError::field(path, "invalid_value", message)
    })
}

/// A client's word as it may be quoted: bounded.
pub(super) fn short(text: &str) -> String {
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
