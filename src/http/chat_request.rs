//! `POST /v1/chat/completions`, inward: JSON to [`ChatRequest`]. Pure.
//!
//! Every field of OpenAI's is known here: used, accepted because it asks for
//! nothing, or refused by name. Fields that nobody knows are reported, so that
//! the response can name them.

use serde_json::{Map, Value};

use super::api_error::ApiError;
use super::cache_terms::read_cache_terms;
use super::client::NamedClient;
use super::fields::{Fields, View};
use super::messages::{Conversation, read_messages, short};
use super::options::{self, Call};
use super::terms::AskedTerms;
use crate::types::{CacheTerms, ChatRequest};

/// Values of `reasoning_effort`.
pub(super) const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];
/// Variables of the template that are the server's own.
const RESERVED: [&str; 8] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "raise_exception",
    "strftime_now",
    "documents",
];

/// Reads the text of a body as `POST /v1/chat/completions` does, for tools beside the server.
///
/// # Errors
/// What the route would answer, in words.
pub fn read_chat_request(body: &str) -> Result<ChatRequest, String> {
    let body = serde_json::from_str(body).map_err(|error| format!("no JSON: {error}"))?;
    let read = read_chat(body).map_err(|error| match &error.param {
        Some(param) if !error.message.starts_with(param.as_str()) => format!("{param}: {}", error.message),
        _ => error.message.clone(),
    });
    read.map(|call| call.request)
}

/// Reads a body.
///
/// # Errors
/// The first field that is wrong, by its path.
pub fn read_chat(body: Value) -> Result<Call, ApiError> {
    let mut body = Fields::new("", body)?;
    let mut unknown = Vec::new();
    options::refuse_unsupported(&mut body)?;
    refuse_unsupported(&mut body)?;
    let choices = options::read_choices(&mut body)?;
    let stream = body.boolean("stream")?.unwrap_or(false);
    let include_usage = options::read_stream_options(&mut body, &mut unknown)?;
    let Conversation { messages, marks, first_parts } = read_messages(&mut body, &mut unknown)?;
    let mut template_kwargs = read_template_kwargs(&mut body)?;
    let thinking = read_effort(&mut body, &mut template_kwargs)?;
    let tools = read_tools(&mut body)?;
    let older = body.count("max_tokens", 1)?;
    let max_tokens = body.count("max_completion_tokens", 1)?.or(older);
    let client = NamedClient::read(&mut body)?;
    let terms = AskedTerms::read(&mut body)?;
    let cache = CacheTerms { first_parts, ..read_cache_terms(&mut body, &client, marks)? };
    let marks_cache = !cache.breakpoints.is_empty();
    let request = ChatRequest {
        model: body.string("model")?,
        messages,
        tools,
        thinking,
        template_kwargs,
        sampling: options::read_sampling(&mut body)?,
        stop: options::read_stop(&mut body)?,
        max_tokens,
        cache,
        scores: read_scores(&mut body)?,
        ignore_eos: body.boolean("ignore_eos")?.unwrap_or(false),
        ..ChatRequest::default()
    };
    body.unknown(&mut unknown);
    Ok(Call { request, choices, stream, include_usage, marks_cache, client, terms, unknown })
}

/// Refuses what only chat has and is not supported, unless its value asks for nothing.
fn refuse_unsupported(body: &mut Fields) -> Result<(), ApiError> {
    let off = |value: &Value| *value == Value::Bool(false);
    let on = |value: &Value| *value == Value::Bool(true);
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let never = |_: &Value| false;
    let said = |list: &'static [&'static str]| {
        move |value: &Value| value.as_str().is_some_and(|text| list.contains(&text))
    };
    body.unsupported("modalities", "only [\"text\"] is supported", |value| {
        value.as_array().is_some_and(|list| list.iter().all(|item| item.as_str() == Some("text")))
    })?;
    body.unsupported("audio", "spoken answers are not supported", never)?;
    body.unsupported("prediction", "predicted output is not supported", never)?;
    body.unsupported("web_search_options", "web search is not supported", never)?;
    body.unsupported("functions", "is the older form; send tools", empty)?;
    body.unsupported("function_call", "is the older form; send tool_choice", said(&["none", "auto"]))?;
    body.unsupported("verbosity", "only medium is supported", said(&["medium"]))?;
    body.unsupported("continue_final_message", "continuing a message is not supported yet", off)?;
    body.unsupported("add_generation_prompt", "only true is supported", on)?;
    // A hint: right to accept, nothing to do.
    body.boolean("parallel_tool_calls")?;
    Ok(())
}

fn read_template_kwargs(body: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let kwargs = body.object("chat_template_kwargs")?.unwrap_or_default();
    if let Some(name) = kwargs.keys().find(|name| RESERVED.contains(&name.as_str())) {
        let path = format!("chat_template_kwargs.{name}");
        return Err(ApiError::field(&path, "invalid_value", "is set by the server itself"));
    }
    Ok(kwargs)
}

/// `logprobs`, and `top_logprobs` beside it.
fn read_scores(body: &mut Fields) -> Result<Option<u8>, ApiError> {
    let wanted = body.boolean("logprobs")?.unwrap_or(false);
    let top = body.integer("top_logprobs", 0, i64::from(ChatRequest::MAX_TOP))?;
    if top.is_some_and(|top| top > 0) && !wanted {
        return Err(ApiError::field("top_logprobs", "invalid_value", "needs `logprobs`: true"));
    }
    Ok(wanted.then(|| u8::try_from(top.unwrap_or(0)).unwrap_or(ChatRequest::MAX_TOP)))
}

/// Hands `reasoning_effort` to the template, which knows what to do with it, or ignores it; and says whether
/// anything is to be thought, for templates that have a switch alone.
fn read_effort(body: &mut Fields, kwargs: &mut Map<String, Value>) -> Result<Option<bool>, ApiError> {
    let Some(effort) = body.string("reasoning_effort")? else { return Ok(None) };
    if !EFFORTS.contains(&effort.as_str()) {
        let message = format!("`{}` is not one of {}", short(&effort), EFFORTS.join(", "));
        return Err(ApiError::field("reasoning_effort", "invalid_value", message));
    }
    let thinking = effort != "none";
    kwargs.entry("reasoning_effort").or_insert(Value::String(effort));
    Ok(Some(thinking))
}

/// Tool definitions, checked and handed on as they are; none when the request forbids calls.
fn read_tools(body: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let tools = body.array("tools")?.unwrap_or_default();
    for (index, tool) in tools.iter().enumerate() {
        check_tool(format!("tools[{index}]"), tool)?;
    }
    match body.value("tool_choice") {
        None => Ok(tools),
        Some(Value::String(choice)) if choice == "auto" => Ok(tools),
        Some(Value::String(choice)) if choice == "none" => Ok(Vec::new()),
        Some(Value::String(choice)) if choice != "required" => {
            let message = format!("`{}` is not one of auto, none", short(&choice));
            Err(ApiError::field("tool_choice", "invalid_value", message))
        }
        Some(Value::Object(choice)) if choice.get("type").is_some_and(|kind| kind == "allowed_tools") => {
            allowed(tools, choice)
        }
        Some(_) => Err(forced()),
    }
}

fn forced() -> ApiError {
    let message = "forcing a call is not supported yet; send auto or none";
    ApiError::field("tool_choice", "unsupported_parameter", message)
}

/// Those of the tools that a choice allows.
fn allowed(mut tools: Vec<Value>, choice: Map<String, Value>) -> Result<Vec<Value>, ApiError> {
    let mut choice = Fields::new("tool_choice", Value::Object(choice))?;
    let needed = "an object with mode and tools";
    let mut allowed =
        choice.nested("allowed_tools")?.ok_or_else(|| choice.missing("allowed_tools", needed))?;
    if allowed.string("mode")?.is_some_and(|mode| mode != "auto") {
        return Err(forced());
    }
    let names = allowed.array("tools")?.unwrap_or_default();
    let name = |tool: &Value| tool.pointer("/function/name").cloned();
    tools.retain(|tool| names.iter().any(|named| name(named) == name(tool)));
    Ok(tools)
}

fn check_tool(path: String, tool: &Value) -> Result<(), ApiError> {
    let fields = View::new(path, tool)?;
    let kind = fields.string("type")?.unwrap_or("function");
    if kind != "function" {
        let message = format!("`{}` is not supported; only function is", short(kind));
        return Err(ApiError::field(&fields.path("type"), "unsupported_parameter", message));
    }
    let function =
        fields.nested("function")?.ok_or_else(|| fields.missing("function", "an object with a name"))?;
    let name = function.string("name")?.ok_or_else(|| function.missing("name", "a string"))?;
    if name.is_empty() {
        return Err(ApiError::field(&function.path("name"), "invalid_value", "must not be empty"));
    }
    function.string("description")?;
    function.nested("parameters")?;
    match function.value("strict") {
        None | Some(Value::Bool(false)) => Ok(()),
        Some(_) => {
            let hint = "strict schemas are not enforced yet; send false";
            Err(ApiError::field(&function.path("strict"), "unsupported_parameter", hint))
        }
    }
}

#[cfg(test)]
mod tests;
