//! `POST /v1/responses`, inward: JSON to a [`ChatRequest`]. Pure.

use serde_json::{Map, Value, json};

use super::super::api_error::ApiError;
use super::super::cache_terms::read_cache_terms;
use super::super::chat_request::EFFORTS;
use super::super::client::NamedClient;
use super::super::fields::{Fields, wrong_type};
use super::super::messages::short;
use super::super::options::{self, Call};
use super::super::terms::AskedTerms;
use super::items::read_items;
use crate::types::{ChatMessage, ChatRequest, Role, ToolChoice};

/// A request for a response.
#[derive(Clone, Debug, PartialEq)]
pub struct ResponseCall {
    /// What the model is asked, without what came before this request.
    pub call: Call,
    /// What the model is told before everything else; of this request alone.
    pub instructions: Option<String>,
    /// The response that this one goes on from.
    pub previous: Option<String>,
    /// Whether it can be had again, and gone on from.
    pub store: bool,
    /// Its items as they came.
    pub input: Vec<Value>,
    /// Fields that the response repeats.
    pub echo: Map<String, Value>,
}

impl ResponseCall {
    /// Puts what came before in front of what was said now, and the instructions before both.
    pub fn compose(&mut self, before: Vec<ChatMessage>) -> Vec<ChatMessage> {
        let said = std::mem::take(&mut self.call.request.messages);
        let conversation: Vec<ChatMessage> = before.into_iter().chain(said).collect();
        let system = self.instructions.as_deref().map(|text| ChatMessage::text(Role::System, text));
        self.call.request.messages = system.into_iter().chain(conversation.iter().cloned()).collect();
        conversation
    }
}

/// Reads a body.
///
/// # Errors
/// The first field that is wrong, by its path.
pub fn read_response(body: Value) -> Result<ResponseCall, ApiError> {
    let mut body = Fields::new("", body)?;
    let mut unknown = Vec::new();
    refuse_unsupported(&mut body)?;
    let instructions = body.string("instructions")?.filter(|text| !text.is_empty());
    let previous = body.string("previous_response_id")?;
    let store = body.boolean("store")?.unwrap_or(true);
    let metadata = body.object("metadata")?.unwrap_or_default();
    let input = read_input(&mut body)?;
    let messages = read_items(&input, &mut unknown)?;
    if messages.is_empty() {
        return Err(ApiError::field("input", "invalid_value", "must say something"));
    }
    let mut template_kwargs = Map::new();
    let (thinking, reasoning) = read_reasoning(&mut body, &mut template_kwargs)?;
    let text = read_text(&mut body)?;
    let offered = body.array("tools")?.unwrap_or_default();
    let (tools, tool_choice, choice) = read_tools(&mut body, &offered)?;
    let parallel_tool_calls = body.boolean("parallel_tool_calls")?;
    let max_tokens = body.count("max_output_tokens", 1)?;
    let stream = body.boolean("stream")?.unwrap_or(false);
    options::read_stream_options(&mut body, &mut unknown)?;
    let client = NamedClient::read(&mut body)?;
    let terms = AskedTerms::read(&mut body)?;
    let cache = read_cache_terms(&mut body, &client, Vec::new())?;
    let sampling = options::read_sampling(&mut body)?;
    let echo = json!({
        "instructions": instructions,
        "max_output_tokens": max_tokens,
        "metadata": metadata,
        "parallel_tool_calls": parallel_tool_calls.unwrap_or(true),
        "previous_response_id": previous,
        "reasoning": reasoning,
        "store": store,
        "temperature": sampling.temperature,
        "text": text,
        "tool_choice": choice,
        "tools": offered,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": client.user,
    });
    let request = ChatRequest {
        model: body.string("model")?,
        messages,
        tools,
        tool_choice,
        parallel_tool_calls,
        thinking,
        template_kwargs,
        sampling,
        stop: options::read_stop(&mut body)?,
        max_tokens,
        cache,
        ..ChatRequest::default()
    };
    body.unknown(&mut unknown);
    let call = Call {
        request,
        choices: 1,
        stream,
        include_usage: false,
        marks_cache: false,
        client,
        terms,
        unknown,
    };
    let echo = if let Value::Object(echo) = echo { echo } else { Map::new() };
    Ok(ResponseCall { call, instructions, previous, store, input, echo })
}

/// Refuses what is known and not supported, unless its value asks for nothing.
fn refuse_unsupported(body: &mut Fields) -> Result<(), ApiError> {
    let off = |value: &Value| *value == Value::Bool(false);
    let never = |_: &Value| false;
    let zero = |value: &Value| value.as_f64() == Some(0.0);
    body.unsupported("background", "responses are computed while the client waits; send false", off)?;
    body.unsupported("conversation", "is not kept here; send previous_response_id", never)?;
    body.unsupported("prompt", "stored prompts are not supported; send input", never)?;
    body.unsupported("include", "nothing more can be included", |value| {
        value.as_array().is_some_and(|list| list.iter().all(|item| item == "reasoning.encrypted_content"))
    })?;
    body.unsupported("max_tool_calls", "tools are called by the client; it can stop", never)?;
    body.unsupported("top_logprobs", "is for /v1/chat/completions here", zero)?;
    body.unsupported("truncation", "only disabled is supported", |value| value == "disabled")?;
    for name in ["prompt_cache_retention", "safety_identifier"] {
        body.string(name)?;
    }
    Ok(())
}

/// The items; a text is one message of the user's.
fn read_input(body: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let needed = "a string or an array of items";
    match body.value("input") {
        None => Err(body.missing("input", needed)),
        Some(Value::String(text)) => Ok(vec![json!({"type": "message", "role": "user", "content": text})]),
        Some(Value::Array(items)) => Ok(items),
        Some(other) => Err(wrong_type("input", needed, &other)),
    }
}

/// How much is to be thought, and how the response repeats it.
fn read_reasoning(
    body: &mut Fields,
    kwargs: &mut Map<String, Value>,
) -> Result<(Option<bool>, Value), ApiError> {
    let mut effort = None;
    let mut summary = None;
    if let Some(mut reasoning) = body.nested("reasoning")? {
        effort = reasoning.string("effort")?;
        // Thoughts are told as they are, not summed up.
        summary = reasoning.string("summary")?.or(reasoning.string("generate_summary")?);
        if let Some(effort) = effort.as_deref().filter(|effort| !EFFORTS.contains(effort)) {
            let message = format!("`{}` is not one of {}", short(effort), EFFORTS.join(", "));
            return Err(ApiError::field("reasoning.effort", "invalid_value", message));
        }
    }
    if let Some(effort) = &effort {
        kwargs.insert("reasoning_effort".into(), Value::String(effort.clone()));
    }
    let thinking = effort.as_deref().map(|effort| effort != "none");
    Ok((thinking, json!({"effort": effort, "summary": summary})))
}

/// The form of the text.
fn read_text(body: &mut Fields) -> Result<Value, ApiError> {
    if let Some(mut text) = body.nested("text")? {
        let hint = "constrained output is not supported yet";
        text.unsupported("format", hint, |format| format.get("type").is_some_and(|kind| kind == "text"))?;
        text.unsupported("verbosity", "only medium is supported", |value| value == "medium")?;
    }
    Ok(json!({"format": {"type": "text"}}))
}

/// Tools in the chat's shape, whether one must be called, and how the response repeats that.
fn read_tools(body: &mut Fields, offered: &[Value]) -> Result<(Vec<Value>, ToolChoice, Value), ApiError> {
    let read = |(index, tool): (usize, &Value)| read_tool(format!("tools[{index}]"), tool.clone());
    let tools = offered.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
    let said = body.value("tool_choice").unwrap_or(Value::String("auto".into()));
    let (tools, choice) = match said.as_str() {
        Some("auto") => (tools, ToolChoice::Auto),
        Some("none") => (Vec::new(), ToolChoice::Auto),
        Some("required") => (tools, ToolChoice::Required),
        Some(other) => {
            let message = format!("`{}` is not one of auto, none, required", short(other));
            return Err(ApiError::field("tool_choice", "invalid_value", message));
        }
        None => read_choice(tools, said.clone())?,
    };
    Ok((tools, choice, said))
}

/// A choice that names a tool, or those that are allowed.
fn read_choice(mut tools: Vec<Value>, said: Value) -> Result<(Vec<Value>, ToolChoice), ApiError> {
    let mut choice = Fields::new("tool_choice", said)?;
    let kind = choice.required_string("type")?;
    match kind.as_str() {
        "function" => Ok((tools, ToolChoice::Named(choice.required_string("name")?))),
        "allowed_tools" => {
            let mode = choice.string("mode")?.unwrap_or_else(|| "auto".into());
            let allowed = choice.array("tools")?.unwrap_or_default();
            let is_allowed = |tool: &Value| {
                let name = tool.pointer("/function/name");
                allowed.iter().any(|allowed| allowed.get("name") == name)
            };
            tools.retain(is_allowed);
            match mode.as_str() {
                "auto" => Ok((tools, ToolChoice::Auto)),
                "required" => Ok((tools, ToolChoice::Required)),
                other => {
                    let message = format!("`{}` is not one of auto, required", short(other));
                    Err(ApiError::field("tool_choice.mode", "invalid_value", message))
                }
            }
        }
        other => {
            let message = format!("`{}` is not supported; function and allowed_tools are", short(other));
            Err(ApiError::field("tool_choice.type", "unsupported_parameter", message))
        }
    }
}

/// A tool's definition, which is flat here, in the chat's shape.
fn read_tool(path: String, tool: Value) -> Result<Value, ApiError> {
    let mut fields = Fields::new(path, tool)?;
    let kind = fields.required_string("type")?;
    if kind != "function" {
        let message = format!("`{}` is not supported; only function is", short(&kind));
        return Err(ApiError::field(&fields.path("type"), "unsupported_parameter", message));
    }
    let name = fields.required_string("name")?;
    if name.is_empty() {
        return Err(ApiError::field(&fields.path("name"), "invalid_value", "must not be empty"));
    }
    let mut function = Map::new();
    function.insert("name".into(), Value::String(name));
    if let Some(description) = fields.string("description")? {
        function.insert("description".into(), Value::String(description));
    }
    if let Some(parameters) = fields.object("parameters")? {
        function.insert("parameters".into(), Value::Object(parameters));
    }
    // OpenAI's clients send true where nobody asked for it: calls are then as good as the model makes them.
    fields.boolean("strict")?;
    Ok(json!({"type": "function", "function": function}))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_text_is_a_users_message_behind_the_instructions_and_what_came_before() {
        let mut call = read_response(json!({
            "model": "m", "input": "Hello", "instructions": "Be brief.", "max_output_tokens": 7,
            "temperature": 0, "previous_response_id": "resp_1", "reasoning": {"effort": "none"},
            "prompt_cache_key": "k", "user": "ann",
        }))
        .unwrap();
        assert_eq!((call.previous.as_deref(), call.store), (Some("resp_1"), true));
        let before = vec![ChatMessage::text(Role::User, "a"), ChatMessage::text(Role::Assistant, "b")];
        let conversation = call.compose(before);
        let request = &call.call.request;
        let said: Vec<_> = request.messages.iter().map(|m| (m.role, m.content.as_deref().unwrap())).collect();
        let expected =
            [(Role::System, "Be brief."), (Role::User, "a"), (Role::Assistant, "b"), (Role::User, "Hello")];
        assert_eq!(said, expected);
        assert_eq!(conversation.len(), 3, "instructions are not handed on");
        assert_eq!((request.max_tokens, request.thinking), (Some(7), Some(false)));
        assert_eq!(request.cache.session.as_deref(), Some("k"));
        assert!(call.call.unknown.is_empty(), "{:?}", call.call.unknown);
    }

    #[test]
    fn tools_are_flat_and_choices_are_kept() {
        let tool = |name: &str| json!({"type": "function", "name": name, "parameters": {"type": "object"}, "strict": true});
        let read = |choice: Value| {
            let body = json!({"input": "x", "tools": [tool("a"), tool("b")], "tool_choice": choice});
            let request = read_response(body).unwrap().call.request;
            let names: Vec<_> = request
                .tools
                .iter()
                .map(|tool| tool["function"]["name"].as_str().unwrap().to_owned())
                .collect();
            (names.concat(), request.tool_choice)
        };
        assert_eq!(read(json!("auto")), ("ab".into(), ToolChoice::Auto));
        assert_eq!(read(json!("none")), (String::new(), ToolChoice::Auto));
        assert_eq!(read(json!("required")), ("ab".into(), ToolChoice::Required));
        assert_eq!(
            read(json!({"type": "function", "name": "a"})),
            ("ab".into(), ToolChoice::Named("a".into()))
        );
        let allowed = json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "b"}]});
        assert_eq!(read(allowed), ("b".into(), ToolChoice::Required));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let wrong = [
            (json!({}), "input"),
            (json!({"input": 5}), "input"),
            (json!({"input": []}), "input"),
            (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type"),
            (json!({"input": [{"role": "robot", "content": "x"}]}), "input[0].role"),
            (
                json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
                "input[0].content[0].type",
            ),
            (
                json!({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}),
                "input[0].call_id",
            ),
            (json!({"input": [{"type": "function_call_output", "call_id": "c"}]}), "input[0].output"),
            (json!({"input": "x", "background": true}), "background"),
            (json!({"input": "x", "conversation": "c"}), "conversation"),
            (json!({"input": "x", "text": {"format": {"type": "json_object"}}}), "text.format"),
            (json!({"input": "x", "tools": [{"type": "web_search"}]}), "tools[0].type"),
            (json!({"input": "x", "tools": [{"type": "function"}]}), "tools[0].name"),
            (json!({"input": "x", "tool_choice": "maybe"}), "tool_choice"),
            (json!({"input": "x", "reasoning": {"effort": "much"}}), "reasoning.effort"),
            (json!({"input": "x", "truncation": "auto"}), "truncation"),
            (json!({"input": "x", "max_output_tokens": 0}), "max_output_tokens"),
        ];
        for (body, field) in wrong {
            let error = read_response(body.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field), "{body}: {}", error.message);
        }
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i32>().prop_map(Value::from),
            prop::sample::select(vec!["message", "user", "function_call", "reasoning", "text", "x"])
                .prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 16, 4, |inner| {
            let key = prop::sample::select(vec![
                "type",
                "role",
                "content",
                "text",
                "call_id",
                "output",
                "name",
                "arguments",
            ]);
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(key, inner, 0..5).prop_map(|map| map
                    .into_iter()
                    .map(|(k, v)| (k.to_owned(), v))
                    .collect::<Map<_, _>>()
                    .into()),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_body_is_read_or_refused_by_name(input in any_json(), tools in any_json(), choice in any_json()) {
            let body = json!({"input": input, "tools": tools, "tool_choice": choice});
            if let Err(error) = read_response(body) {
                let param = error.param.unwrap();
                prop_assert!(["input", "tools", "tool_choice"].iter().any(|name| param.starts_with(name)), "{param}");
            }
        }
    }
}
