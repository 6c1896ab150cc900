//! `POST /v1/messages`, inward: JSON to a [`ChatRequest`]. Pure.

use serde_json::{Map, Value, json};

use super::super::api_error::ApiError;
use super::super::cache_terms::{read_cache_terms, read_mark};
use super::super::chat_request::EFFORTS;
use super::super::client::NamedClient;
use super::super::fields::{Fields, wrong_type};
use super::super::messages::short;
use super::super::options::{self, Call};
use super::super::terms::AskedTerms;
use crate::types::{
    CacheTerms, ChatMessage, ChatRequest, Range, Role, SamplingOptions, ToolCall, ToolChoice,
};

/// What stands between two texts of one message.
const BETWEEN: &str = "\n\n";

/// What a body is read for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// An answer.
    Answer,
    /// The number of its prompt's tokens: nothing is produced, so nothing is said of how much.
    Count,
}

/// Reads a body.
///
/// # Errors
/// The first field that is wrong, by its path.
pub fn read_message_request(body: Value, purpose: Purpose) -> Result<Call, ApiError> {
    let mut body = Fields::new("", body)?;
    let mut unknown = Vec::new();
    refuse_unsupported(&mut body)?;
    let mut conversation = Conversation::default();
    read_system(&mut body, &mut conversation, &mut unknown)?;
    read_messages(&mut body, &mut conversation, &mut unknown)?;
    let (mut tools, tools_marked) = read_tools(&mut body)?;
    let (tool_choice, offers, parallel_tool_calls) = read_choice(&mut body)?;
    if !offers {
        tools.clear();
    }
    let mut template_kwargs = Map::new();
    let thinking = read_thinking(&mut body, &mut template_kwargs)?;
    let max_tokens = body.count("max_tokens", 1)?;
    if purpose == Purpose::Answer && max_tokens.is_none() {
        return Err(body.missing("max_tokens", "how many tokens may be produced"));
    }
    let stream = body.boolean("stream")?.unwrap_or(false);
    let client = read_client(&mut body)?;
    let terms = read_terms(&mut body)?;
    let Conversation { messages, mut marks, first_parts } = conversation;
    if (tools_marked || read_mark(&mut body)?) && marks.is_empty() {
        marks.push(messages.len().saturating_sub(1));
    }
    let marks_cache = !marks.is_empty();
    let cache = CacheTerms { first_parts, ..read_cache_terms(&mut body, &client, marks)? };
    let request = ChatRequest {
        model: body.string("model")?,
        messages,
        tools,
        tool_choice,
        parallel_tool_calls,
        thinking,
        template_kwargs,
        sampling: SamplingOptions {
            temperature: body.number("temperature", Range::TEMPERATURE)?,
            top_k: body.count("top_k", 0)?,
            top_p: body.number("top_p", Range::PROBABILITY)?,
            ..SamplingOptions::default()
        },
        stop: options::read_stops(&mut body, "stop_sequences")?,
        max_tokens,
        cache,
        ..ChatRequest::default()
    };
    body.unknown(&mut unknown);
    Ok(Call { request, choices: 1, stream, include_usage: false, marks_cache, client, terms, unknown })
}

/// Refuses what is known and not supported, unless its value asks for nothing.
fn refuse_unsupported(body: &mut Fields) -> Result<(), ApiError> {
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let never = |_: &Value| false;
    body.unsupported("mcp_servers", "tools are called by the client", empty)?;
    body.unsupported("container", "code is not run here", never)?;
    body.unsupported("output_format", "constrained output is not supported yet", never)?;
    // Edits of the context are the client's to make: what is not asked for by name is left alone.
    body.unsupported("context_management", "the context is the client's to manage", |value| {
        value.get("edits").and_then(Value::as_array).is_some_and(Vec::is_empty)
    })
}

/// The conversation as it is read.
#[derive(Default)]
struct Conversation {
    messages: Vec<ChatMessage>,
    /// Messages that bear a mark.
    marks: Vec<usize>,
    /// Where the parts of the first message's content end, bytes.
    first_parts: Vec<usize>,
}

impl Conversation {
    /// Adds a message; whether it bears a mark.
    fn say(&mut self, message: ChatMessage, marked: bool) {
        if marked {
            self.marks.push(self.messages.len());
        }
        self.messages.push(message);
    }
}

/// Texts of one message on their way together.
#[derive(Default)]
struct Texts {
    text: String,
    ends: Vec<usize>,
    marked: bool,
}

impl Texts {
    fn push(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        if !self.text.is_empty() {
            self.text.push_str(BETWEEN);
        }
        self.text.push_str(text);
        self.ends.push(self.text.len());
    }

    /// Takes them as a message of this role, if there are any.
    fn flush(&mut self, role: Role, conversation: &mut Conversation) {
        let Self { text, ends, marked } = std::mem::take(self);
        if text.is_empty() {
            return;
        }
        if conversation.messages.is_empty() && role == Role::System {
            conversation.first_parts = ends;
        }
        conversation.say(ChatMessage::text(role, text), marked);
    }
}

fn read_system(
    body: &mut Fields,
    conversation: &mut Conversation,
    unknown: &mut Vec<String>,
) -> Result<(), ApiError> {
    let mut texts = Texts::default();
    for mut block in blocks("system", body.value("system"))? {
        read_text_block(&mut block, &mut texts)?;
        block.unknown(unknown);
    }
    texts.flush(Role::System, conversation);
    Ok(())
}

/// A text, or blocks, as blocks.
fn blocks(path: &str, content: Option<Value>) -> Result<Vec<Fields>, ApiError> {
    match content {
        None => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![Fields::new(path, json!({"type": "text", "text": text}))?]),
        Some(Value::Array(blocks)) => blocks
            .into_iter()
            .enumerate()
            .map(|(index, block)| Fields::new(format!("{path}[{index}]"), block))
            .collect(),
        Some(other) => Err(wrong_type(path, "a string or an array of blocks", &other)),
    }
}

fn read_text_block(block: &mut Fields, texts: &mut Texts) -> Result<(), ApiError> {
    let kind = block.required_string("type")?;
    if kind != "text" {
        return Err(unreadable(block, &kind));
    }
    let text = block.required_string("text")?;
    texts.marked |= read_mark(block)?;
    block.value("citations");
    texts.push(&text);
    Ok(())
}

fn unreadable(block: &Fields, kind: &str) -> ApiError {
    let message = format!("`{}` is not supported; this model reads text", short(kind));
    ApiError::field(&block.path("type"), "unsupported_parameter", message)
}

fn read_messages(
    body: &mut Fields,
    conversation: &mut Conversation,
    unknown: &mut Vec<String>,
) -> Result<(), ApiError> {
    let needed = "an array with at least one message";
    let items = body.array("messages")?.ok_or_else(|| body.missing("messages", needed))?;
    let before = conversation.messages.len();
    let mut last = None;
    for (index, item) in items.into_iter().enumerate() {
        let path = format!("messages[{index}]");
        let mut fields = Fields::new(path.clone(), item)?;
        let role = fields.required_string("role")?;
        let content =
            fields.value("content").ok_or_else(|| fields.missing("content", "a string or blocks"))?;
        let blocks = blocks(&fields.path("content"), Some(content))?;
        let length = conversation.messages.len();
        match role.as_str() {
            "user" => read_user(blocks, conversation, unknown)?,
            "assistant" => read_assistant(blocks, conversation, unknown)?,
            "system" => {
                let mut texts = Texts::default();
                for mut block in blocks {
                    read_text_block(&mut block, &mut texts)?;
                    block.unknown(unknown);
                }
                texts.flush(Role::System, conversation);
            }
            other => {
                let message = format!("`{}` is not one of user, assistant", short(other));
                return Err(ApiError::field(&fields.path("role"), "invalid_value", message));
            }
        }
        if conversation.messages.len() > length {
            last = Some((path, role));
        }
        fields.unknown(unknown);
    }
    if conversation.messages.len() == before {
        return Err(ApiError::field("messages", "invalid_value", "must hold at least one message"));
    }
    match last {
        Some((path, role)) if role == "assistant" => {
            let message = "an assistant's message cannot be continued; end with a user's";
            Err(ApiError::field(&path, "unsupported_parameter", message))
        }
        _ => Ok(()),
    }
}

/// What the user says, and what tools answered: each a message, in their order.
fn read_user(
    blocks: Vec<Fields>,
    conversation: &mut Conversation,
    unknown: &mut Vec<String>,
) -> Result<(), ApiError> {
    let mut texts = Texts::default();
    for mut block in blocks {
        match block.required_string("type")?.as_str() {
            "text" => {
                let text = block.required_string("text")?;
                texts.marked |= read_mark(&mut block)?;
                block.value("citations");
                texts.push(&text);
            }
            "tool_result" => {
                texts.flush(Role::User, conversation);
                let id = block.required_string("tool_use_id")?;
                let marked = read_mark(&mut block)?;
                block.boolean("is_error")?;
                let path = block.path("content");
                let mut said = Texts::default();
                for mut part in self::blocks(&path, block.value("content"))? {
                    read_text_block(&mut part, &mut said)?;
                    part.unknown(unknown);
                }
                let mut message = ChatMessage::text(Role::Tool, said.text);
                message.tool_call_id = Some(id);
                conversation.say(message, marked || said.marked);
            }
            other => return Err(unreadable(&block, other)),
        }
        block.unknown(unknown);
    }
    texts.flush(Role::User, conversation);
    Ok(())
}

/// What the model said earlier: one message with its thought, text and calls.
fn read_assistant(
    blocks: Vec<Fields>,
    conversation: &mut Conversation,
    unknown: &mut Vec<String>,
) -> Result<(), ApiError> {
    let mut message = ChatMessage::text(Role::Assistant, "");
    let mut texts = Texts::default();
    for mut block in blocks {
        match block.required_string("type")?.as_str() {
            "text" => {
                let text = block.required_string("text")?;
                texts.marked |= read_mark(&mut block)?;
                block.value("citations");
                texts.push(&text);
            }
            "thinking" => {
                let thought = block.required_string("thinking")?;
                block.string("signature")?;
                if !thought.is_empty() {
                    message.reasoning.get_or_insert_default().push_str(&thought);
                }
            }
            // Another server's secret is of no use.
            "redacted_thinking" => drop(block.value("data")),
            "tool_use" => {
                let id = Some(block.required_string("id")?);
                let name = block.required_string("name")?;
                let arguments = Value::Object(block.object("input")?.unwrap_or_default());
                texts.marked |= read_mark(&mut block)?;
                message.tool_calls.push(ToolCall { id, name, arguments });
            }
            other => return Err(unreadable(&block, other)),
        }
        block.unknown(unknown);
    }
    let Texts { text, marked, .. } = texts;
    let is_empty = text.is_empty() && message.tool_calls.is_empty() && message.reasoning.is_none();
    message.content = (!text.is_empty() || message.tool_calls.is_empty()).then_some(text);
    if !is_empty {
        conversation.say(message, marked);
    }
    Ok(())
}

/// Tools in the chat's shape, and whether one of them bears a mark.
fn read_tools(body: &mut Fields) -> Result<(Vec<Value>, bool), ApiError> {
    let mut marked = false;
    let mut tools = Vec::new();
    for (index, tool) in body.array("tools")?.unwrap_or_default().into_iter().enumerate() {
        let mut fields = Fields::new(format!("tools[{index}]"), tool)?;
        let kind = fields.string("type")?;
        if let Some(kind) = kind.filter(|kind| kind != "custom") {
            let message = format!("`{}` is not supported; only tools of your own are", short(&kind));
            return Err(ApiError::field(&fields.path("type"), "unsupported_parameter", message));
        }
        marked |= read_mark(&mut fields)?;
        let name = fields.required_string("name")?;
        if name.is_empty() {
            return Err(ApiError::field(&fields.path("name"), "invalid_value", "must not be empty"));
        }
        let mut function = Map::new();
        function.insert("name".into(), Value::String(name));
        if let Some(description) = fields.string("description")? {
            function.insert("description".into(), Value::String(description));
        }
        if let Some(schema) = fields.object("input_schema")? {
            function.insert("parameters".into(), Value::Object(schema));
        }
        tools.push(json!({"type": "function", "function": function}));
    }
    Ok((tools, marked))
}

/// Whether a tool must be called, whether any may, and whether several may at once.
fn read_choice(body: &mut Fields) -> Result<(ToolChoice, bool, Option<bool>), ApiError> {
    let Some(mut choice) = body.nested("tool_choice")? else { return Ok((ToolChoice::Auto, true, None)) };
    let single = choice.boolean("disable_parallel_tool_use")?;
    let kind = choice.required_string("type")?;
    let (asked, offers) = match kind.as_str() {
        "auto" => (ToolChoice::Auto, true),
        "none" => (ToolChoice::Auto, false),
        "any" => (ToolChoice::Required, true),
        "tool" => (ToolChoice::Named(choice.required_string("name")?), true),
        other => {
            let message = format!("`{}` is not one of auto, any, tool, none", short(other));
            return Err(ApiError::field("tool_choice.type", "invalid_value", message));
        }
    };
    Ok((asked, offers, single.map(|single| !single)))
}

/// Whether to think, and how much.
fn read_thinking(body: &mut Fields, kwargs: &mut Map<String, Value>) -> Result<Option<bool>, ApiError> {
    let mut thinking = None;
    if let Some(mut asked) = body.nested("thinking")? {
        let kind = asked.required_string("type")?;
        thinking = match kind.as_str() {
            "enabled" | "adaptive" => Some(true),
            "disabled" => Some(false),
            other => {
                let message = format!("`{}` is not one of enabled, adaptive, disabled", short(other));
                return Err(ApiError::field("thinking.type", "invalid_value", message));
            }
        };
        // How long a thought may be is the model's to know.
        asked.count("budget_tokens", 1)?;
        asked.string("display")?;
    }
    if let Some(mut output) = body.nested("output_config")? {
        output.unsupported("format", "constrained output is not supported yet", |_| false)?;
        if let Some(effort) = output.string("effort")? {
            if !EFFORTS.contains(&effort.as_str()) && effort != "max" {
                let message = format!("`{}` is not one of {}, max", short(&effort), EFFORTS.join(", "));
                return Err(ApiError::field("output_config.effort", "invalid_value", message));
            }
            kwargs.insert("reasoning_effort".into(), Value::String(effort));
        }
    }
    Ok(thinking)
}

/// On what terms it is served. There is but one kind of capacity: that none is to be bought is no wish.
fn read_terms(body: &mut Fields) -> Result<AskedTerms, ApiError> {
    let tier = body.value("service_tier").filter(|tier| tier != "standard_only");
    if let Some(tier) = tier.filter(|tier| tier != "auto") {
        let shown = tier.as_str().map_or_else(|| tier.to_string(), str::to_owned);
        let message = format!("`{}` is not one of auto, standard_only", short(&shown));
        return Err(ApiError::field("service_tier", "invalid_value", message));
    }
    AskedTerms::read(body)
}

/// Whose it is. Coding agents put their session into the user's name.
fn read_client(body: &mut Fields) -> Result<NamedClient, ApiError> {
    let mut client = NamedClient::read(body)?;
    if let Some(mut metadata) = body.nested("metadata")? {
        let user = metadata.string("user_id")?;
        let session = user.clone().filter(|user| user.contains("session"));
        client.session = client.session.or(session);
        client.user = client.user.or(user);
    }
    Ok(client)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(body: Value) -> Result<Call, ApiError> {
        read_message_request(body, Purpose::Answer)
    }

    fn user(content: Value) -> Value {
        json!({"max_tokens": 5, "messages": [{"role": "user", "content": content}]})
    }

    #[test]
    fn a_conversation_is_read_block_by_block() {
        let call = read(json!({
            "model": "m", "max_tokens": 9, "stream": true, "temperature": 0.5, "top_k": 3, "stop_sequences": ["END"],
            "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}],
            "metadata": {"user_id": "user_1_account__session_2"},
            "thinking": {"type": "enabled", "budget_tokens": 2000},
            "tools": [{"name": "add", "description": "d", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": true},
            "messages": [
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "easy", "signature": "x"},
                    {"type": "redacted_thinking", "data": "y"},
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 2}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "4"}], "is_error": false},
                    {"type": "text", "text": ""},
                    {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
                ]},
            ],
        }))
        .unwrap();
        assert!(call.unknown.is_empty(), "{:?}", call.unknown);
        let request = &call.request;
        let said: Vec<_> = request
            .messages
            .iter()
            .map(|message| (message.role, message.content.as_deref().unwrap_or_default()))
            .collect();
        let expected = [
            (Role::System, "a\n\nb"),
            (Role::User, "2+2?"),
            (Role::Assistant, "Let me see."),
            (Role::Tool, "4"),
            (Role::User, "So?"),
        ];
        assert_eq!(said, expected);
        let answer = &request.messages[2];
        assert_eq!(
            (answer.reasoning.as_deref(), &answer.tool_calls[0].arguments),
            (Some("easy"), &json!({"a": 2}))
        );
        assert_eq!(request.messages[3].tool_call_id.as_deref(), Some("t1"));
        assert_eq!((&request.cache.breakpoints, &request.cache.first_parts), (&vec![0, 4], &vec![1, 4]));
        assert_eq!(request.cache.session.as_deref(), Some("user_1_account__session_2"));
        assert_eq!((request.thinking, request.parallel_tool_calls), (Some(true), Some(false)));
        assert_eq!(
            (request.stop.clone(), call.stream, call.marks_cache),
            (vec!["END".to_owned()], true, true)
        );
        assert_eq!(request.tools[0]["function"]["parameters"], json!({"type": "object"}));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let with = |more: Value| {
            let mut body = user("x".into());
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            body
        };
        let said = |messages: Value| json!({"max_tokens": 5, "messages": messages});
        let wrong = [
            (json!({"messages": [{"role": "user", "content": "x"}]}), "max_tokens"),
            (json!({"max_tokens": 5}), "messages"),
            (said(json!([])), "messages"),
            (said(json!([{"role": "user", "content": ""}])), "messages"),
            (said(json!([{"role": "robot", "content": "x"}])), "messages[0].role"),
            (said(json!([{"role": "user"}])), "messages[0].content"),
            (
                said(json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])),
                "messages[1]",
            ),
            (user(json!([{"type": "image", "source": {}}])), "messages[0].content[0].type"),
            (
                user(json!([{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}])),
                "messages[0].content[0].content[0].type",
            ),
            (user(json!([{"type": "text"}])), "messages[0].content[0].text"),
            (with(json!({"system": 5})), "system"),
            (
                with(json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]})),
                "tools[0].type",
            ),
            (with(json!({"tools": [{"description": "x"}]})), "tools[0].name"),
            (with(json!({"tool_choice": {"type": "maybe"}})), "tool_choice.type"),
            (with(json!({"tool_choice": {"type": "tool"}})), "tool_choice.name"),
            (with(json!({"thinking": {"type": "much"}})), "thinking.type"),
            (with(json!({"stop_sequences": [""]})), "stop_sequences[0]"),
            (with(json!({"mcp_servers": [{"name": "x"}]})), "mcp_servers"),
            (with(json!({"output_format": {"type": "json_schema"}})), "output_format"),
            (with(json!({"max_tokens": 0})), "max_tokens"),
        ];
        for (body, field) in wrong {
            let error = read(body.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field), "{body}: {}", error.message);
        }
        let count = json!({"messages": [{"role": "user", "content": "x"}]});
        assert!(read_message_request(count, Purpose::Count).is_ok(), "nothing is produced");
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let words = ["text", "user", "assistant", "tool_use", "tool_result", "thinking", "x"];
        let keys = ["type", "role", "content", "text", "id", "tool_use_id", "name", "input", "thinking"];
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i32>().prop_map(Value::from),
            prop::sample::select(words.to_vec()).prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 24, 4, move |inner| {
            let key = prop::sample::select(keys.to_vec());
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(key, inner, 0..5).prop_map(|map| {
                    map.into_iter().map(|(key, value)| (key.to_owned(), value)).collect::<Map<_, _>>().into()
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_body_is_read_or_refused_by_name(
            messages in any_json(), system in any_json(), tools in any_json(), choice in any_json(),
        ) {
            let fields = ["messages", "system", "tools", "tool_choice"];
            let body = json!({
                "max_tokens": 5, "messages": messages, "system": system, "tools": tools, "tool_choice": choice,
            });
            if let Err(error) = read(body) {
                let param = error.param.unwrap();
                prop_assert!(fields.iter().any(|name| param.starts_with(name)), "{param}");
            }
        }
    }
}
