//! Items of a response's input: messages, calls, what tools answered, thoughts.

use serde_json::{Map, Value};

use super::super::api_error::ApiError;
use super::super::fields::{Fields, wrong_type};
use super::super::messages::short;
use crate::types::{ChatMessage, Role, ToolCall};

/// Reads items as a conversation. A thought, a text and calls of the assistant that follow each other are
/// one message, as the model wrote them.
///
/// # Errors
/// The first field that is wrong, by its path.
pub fn read_items(items: &[Value], unknown: &mut Vec<String>) -> Result<Vec<ChatMessage>, ApiError> {
    let mut conversation = Conversation::default();
    for (index, item) in items.iter().enumerate() {
        let mut fields = Fields::new(format!("input[{index}]"), item.clone())?;
        let kind = fields.string("type")?;
        // What the server has made of an item plays no part.
        fields.value("id");
        fields.value("status");
        match kind.as_deref() {
            None | Some("message") => read_message(&mut fields, unknown, &mut conversation)?,
            Some("function_call") => {
                let call = read_call(&mut fields)?;
                conversation.answer(|_| true).tool_calls.push(call);
            }
            Some("function_call_output") => {
                let id = fields.required_string("call_id")?;
                let path = fields.path("output");
                let output = fields.value("output").ok_or_else(|| fields.missing("output", "a string"))?;
                let mut message = ChatMessage::text(Role::Tool, read_text(&path, output, unknown)?);
                message.tool_call_id = Some(id);
                conversation.say(message);
            }
            Some("reasoning") => {
                let thought = read_thought(&mut fields, unknown)?;
                if !thought.is_empty() {
                    let open =
                        |message: &ChatMessage| message.content.is_none() && message.tool_calls.is_empty();
                    conversation.answer(open).reasoning.get_or_insert_default().push_str(&thought);
                }
            }
            Some(other) => {
                let message = format!(
                    "`{}` is not supported; message, function_call, function_call_output and reasoning are",
                    short(other)
                );
                return Err(ApiError::field(&fields.path("type"), "unsupported_parameter", message));
            }
        }
        fields.unknown(unknown);
    }
    Ok(conversation.messages)
}

/// Messages so far; the last one may be an answer that more items belong to.
#[derive(Default)]
struct Conversation {
    messages: Vec<ChatMessage>,
}

impl Conversation {
    fn say(&mut self, message: ChatMessage) {
        self.messages.push(message);
    }

    /// The assistant's answer that the next item belongs to: the last message, if it is one and `open`.
    fn answer(&mut self, open: impl FnOnce(&ChatMessage) -> bool) -> &mut ChatMessage {
        let goes_on = self.messages.last().is_some_and(|last| last.role == Role::Assistant && open(last));
        if !goes_on {
            let mut message = ChatMessage::text(Role::Assistant, "");
            message.content = None;
            self.messages.push(message);
        }
        // There is one now: pushed, or found above.
        let last = self.messages.len() - 1;
        &mut self.messages[last]
    }
}

fn read_message(
    fields: &mut Fields,
    unknown: &mut Vec<String>,
    conversation: &mut Conversation,
) -> Result<(), ApiError> {
    let name = fields.required_string("role")?;
    let role = match name.as_str() {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        other => {
            let message = format!("`{}` is not one of system, developer, user, assistant", short(other));
            return Err(ApiError::field(&fields.path("role"), "invalid_value", message));
        }
    };
    let needed = "a string or an array of parts";
    let path = fields.path("content");
    let content = fields.value("content").ok_or_else(|| fields.missing("content", needed))?;
    let text = read_text(&path, content, unknown)?;
    if role == Role::Assistant {
        let open = |message: &ChatMessage| message.content.is_none() && message.tool_calls.is_empty();
        conversation.answer(open).content = Some(text);
    } else {
        conversation.say(ChatMessage::text(role, text));
    }
    Ok(())
}

/// Text, or parts of text joined without separator.
fn read_text(path: &str, content: Value, unknown: &mut Vec<String>) -> Result<String, ApiError> {
    let parts = match content {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => return Err(wrong_type(path, "a string or an array of parts", &other)),
    };
    let mut text = String::new();
    for (index, part) in parts.into_iter().enumerate() {
        let mut fields = Fields::new(format!("{path}[{index}]"), part)?;
        let kind = fields.required_string("type")?;
        match kind.as_str() {
            "input_text" | "output_text" | "text" | "reasoning_text" | "summary_text" => {
                text.push_str(&fields.required_string("text")?);
            }
            "refusal" => text.push_str(&fields.required_string("refusal")?),
            other => {
                let message =
                    format!("`{}` is not supported; this model reads text parts only", short(other));
                return Err(ApiError::field(&fields.path("type"), "unsupported_parameter", message));
            }
        }
        // What the server wrote beside an earlier answer.
        fields.value("annotations");
        fields.value("logprobs");
        fields.unknown(unknown);
    }
    Ok(text)
}

fn read_call(fields: &mut Fields) -> Result<ToolCall, ApiError> {
    let id = fields.required_string("call_id")?;
    let name = fields.required_string("name")?;
    let path = fields.path("arguments");
    let arguments = fields.string("arguments")?.unwrap_or_default();
    let arguments = match arguments.trim() {
        "" => Map::new(),
        text => serde_json::from_str(text).map_err(|error| {
            ApiError::field(&path, "invalid_value", format!("must hold a JSON object: {error}"))
        })?,
    };
    Ok(ToolCall { id: Some(id), name, arguments: Value::Object(arguments) })
}

/// The thought's own words, or else its summary.
fn read_thought(fields: &mut Fields, unknown: &mut Vec<String>) -> Result<String, ApiError> {
    let mut texts = Vec::new();
    for name in ["content", "summary"] {
        let path = fields.path(name);
        texts.push(match fields.value(name) {
            Some(parts) => read_text(&path, parts, unknown)?,
            None => String::new(),
        });
    }
    // Nothing is encrypted here; another server's secret is of no use.
    fields.value("encrypted_content");
    Ok(texts.into_iter().find(|text| !text.is_empty()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_answers_items_are_one_message() {
        let items = [
            json!({"role": "user", "content": [{"type": "input_text", "text": "2+2?"}]}),
            json!({"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "easy"}]}),
            json!({"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
                   "content": [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]}),
            json!({"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{\"a\": 2}"}),
            json!({"type": "function_call", "call_id": "c2", "name": "add", "arguments": ""}),
            json!({"type": "function_call_output", "call_id": "c1", "output": "4"}),
            json!({"type": "message", "role": "assistant", "content": "4."}),
            json!({"type": "message", "role": "assistant", "content": "Really."}),
        ];
        let mut unknown = Vec::new();
        let messages = read_items(&items, &mut unknown).unwrap();
        assert!(unknown.is_empty(), "{unknown:?}");
        let roles: Vec<Role> = messages.iter().map(|message| message.role).collect();
        assert_eq!(roles, [Role::User, Role::Assistant, Role::Tool, Role::Assistant, Role::Assistant]);
        let answer = &messages[1];
        assert_eq!(
            (answer.reasoning.as_deref(), answer.content.as_deref()),
            (Some("easy"), Some("Let me see."))
        );
        let calls: Vec<_> =
            answer.tool_calls.iter().map(|call| (call.id.as_deref().unwrap(), &call.arguments)).collect();
        assert_eq!(calls, [("c1", &json!({"a": 2})), ("c2", &json!({}))]);
        assert_eq!(messages[2].tool_call_id.as_deref(), Some("c1"));
    }
}
