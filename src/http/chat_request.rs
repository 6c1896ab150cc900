//! `POST /v1/chat/completions`, inward: JSON to [`ChatRequest`]. Pure.
//!
//! Every field of OpenAI's is known here: used, accepted because it asks for
//! nothing, or refused by name. Fields that nobody knows are reported, so that
//! the response can name them.

use serde_json::{Map, Value};

use super::api_error::ApiError;
use super::fields::{Fields, View, number, wrong_type};
use super::messages::{read_messages, short};
use crate::types::{ChatRequest, Range, SamplingOptions, TokenId};

/// Most stop strings.
const MAX_STOPS: usize = 16;
/// Longest stop string, bytes: the matcher holds back that much text.
const MAX_STOP_BYTES: usize = 1024;
/// Most tokens with a bias.
const MAX_BIASES: usize = 1024;
/// Values of `reasoning_effort`.
const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];
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

/// A request, and how its answer goes out.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatCall {
    /// What is asked; the client is filled in from the connection.
    pub request: ChatRequest,
    /// Events or one document.
    pub stream: bool,
    /// A usage chunk at the end of a stream.
    pub include_usage: bool,
    /// `user`, for fairness.
    pub user: Option<String>,
    /// Paths of fields that nobody knows.
    pub unknown: Vec<String>,
}

/// Reads a body.
///
/// # Errors
/// The first field that is wrong, by its path.
pub fn read_chat(body: Value) -> Result<ChatCall, ApiError> {
    let mut body = Fields::new("", body)?;
    let mut unknown = Vec::new();
    refuse_unsupported(&mut body)?;
    let stream = body.boolean("stream")?.unwrap_or(false);
    let include_usage = read_stream_options(&mut body, &mut unknown)?;
    let messages = read_messages(&mut body, &mut unknown)?;
    let mut template_kwargs = read_template_kwargs(&mut body)?;
    read_effort(&mut body, &mut template_kwargs)?;
    let tools = read_tools(&mut body)?;
    let older = body.count("max_tokens", 1)?;
    let max_tokens = body.count("max_completion_tokens", 1)?.or(older);
    let user = body.string("user")?;
    let request = ChatRequest {
        model: body.string("model")?,
        messages,
        tools,
        template_kwargs,
        sampling: read_sampling(&mut body)?,
        stop: read_stop(&mut body)?,
        max_tokens,
        ignore_eos: body.boolean("ignore_eos")?.unwrap_or(false),
        ..ChatRequest::default()
    };
    body.unknown(&mut unknown);
    Ok(ChatCall { request, stream, include_usage, user, unknown })
}

/// Refuses what is known and not supported, unless its value asks for nothing.
fn refuse_unsupported(body: &mut Fields) -> Result<(), ApiError> {
    let off = |value: &Value| *value == Value::Bool(false);
    let on = |value: &Value| *value == Value::Bool(true);
    let one = |value: &Value| value.as_f64() == Some(1.0);
    let zero = |value: &Value| value.as_f64() == Some(0.0);
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let never = |_: &Value| false;
    let said = |list: &'static [&'static str]| {
        move |value: &Value| value.as_str().is_some_and(|text| list.contains(&text))
    };
    body.unsupported("n", "only one answer a request is supported; send n requests", one)?;
    body.unsupported("best_of", "only one answer a request is supported", one)?;
    body.unsupported("logprobs", "log-probabilities are not supported yet", off)?;
    body.unsupported("top_logprobs", "log-probabilities are not supported yet", zero)?;
    body.unsupported("response_format", "only {\"type\": \"text\"} is supported", |value| {
        value.get("type").and_then(Value::as_str) == Some("text")
    })?;
    body.unsupported("modalities", "only [\"text\"] is supported", |value| {
        value.as_array().is_some_and(|list| list.iter().all(|item| item.as_str() == Some("text")))
    })?;
    body.unsupported("audio", "spoken answers are not supported", never)?;
    body.unsupported("prediction", "predicted output is not supported", never)?;
    body.unsupported("web_search_options", "web search is not supported", never)?;
    body.unsupported("store", "answers are not stored; send false", off)?;
    body.unsupported("functions", "is the older form; send tools", empty)?;
    body.unsupported("function_call", "is the older form; send tool_choice", said(&["none", "auto"]))?;
    body.unsupported("service_tier", "there is one tier; send auto or default", said(&["auto", "default"]))?;
    body.unsupported("verbosity", "only medium is supported", said(&["medium"]))?;
    body.unsupported("continue_final_message", "continuing a message is not supported yet", off)?;
    body.unsupported("add_generation_prompt", "only true is supported", on)?;
    body.unsupported("echo", "repeating the prompt is not supported", off)?;
    body.unsupported("use_beam_search", "beam search is not supported", off)?;
    body.unsupported("min_tokens", "a least length is not supported", zero)?;
    body.unsupported("stop_token_ids", "send stop strings instead", empty)?;
    for name in [
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "grammar",
        "json_schema",
        "structured_outputs",
    ] {
        body.unsupported(name, "constrained output is not supported yet", never)?;
    }
    // These are hints or labels: right to accept, nothing to do.
    body.boolean("parallel_tool_calls")?;
    body.object("metadata")?;
    for name in ["prompt_cache_key", "prompt_cache_retention", "safety_identifier"] {
        body.string(name)?;
    }
    Ok(())
}

fn read_stream_options(body: &mut Fields, unknown: &mut Vec<String>) -> Result<bool, ApiError> {
    let Some(mut options) = body.nested("stream_options")? else { return Ok(false) };
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    // Padding against traffic analysis: nothing to hide on one's own machine.
    options.boolean("include_obfuscation")?;
    options.unknown(unknown);
    Ok(include_usage)
}

fn read_template_kwargs(body: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let kwargs = body.object("chat_template_kwargs")?.unwrap_or_default();
    if let Some(name) = kwargs.keys().find(|name| RESERVED.contains(&name.as_str())) {
        let path = format!("chat_template_kwargs.{name}");
        return Err(ApiError::field(&path, "invalid_value", "is set by the server itself"));
    }
    Ok(kwargs)
}

/// Hands `reasoning_effort` to the template, which knows what to do with it, or ignores it.
fn read_effort(body: &mut Fields, kwargs: &mut Map<String, Value>) -> Result<(), ApiError> {
    let Some(effort) = body.string("reasoning_effort")? else { return Ok(()) };
    if !EFFORTS.contains(&effort.as_str()) {
        let message = format!("`{}` is not one of {}", short(&effort), EFFORTS.join(", "));
        return Err(ApiError::field("reasoning_effort", "invalid_value", message));
    }
    kwargs.entry("reasoning_effort").or_insert(Value::String(effort));
    Ok(())
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
        Some(_) => {
            let message = "forcing a call is not supported yet; send auto or none";
            Err(ApiError::field("tool_choice", "unsupported_parameter", message))
        }
    }
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

fn read_sampling(body: &mut Fields) -> Result<SamplingOptions, ApiError> {
    // -1 is how some clients write "all".
    let top_k = body.integer("top_k", -1, i64::from(u32::MAX))?.map(|k| u32::try_from(k).unwrap_or(0));
    Ok(SamplingOptions {
        temperature: body.number("temperature", Range::TEMPERATURE)?,
        top_k,
        top_p: body.number("top_p", Range::PROBABILITY)?,
        min_p: body.number("min_p", Range::PROBABILITY)?,
        repetition_penalty: body.number("repetition_penalty", Range::REPETITION)?,
        presence_penalty: body.number("presence_penalty", Range::PENALTY)?,
        frequency_penalty: body.number("frequency_penalty", Range::PENALTY)?,
        penalty_window: body.count("repetition_context_size", 1)?,
        logit_bias: read_biases(body)?,
        seed: read_seed(body)?,
    })
}

/// Any 64-bit number; a negative one keeps its bits.
fn read_seed(body: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(value) = body.value("seed") else { return Ok(None) };
    let seed = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
    seed.map(Some).ok_or_else(|| wrong_type("seed", "a whole number of at most 64 bits", &value))
}

fn read_biases(body: &mut Fields) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let map = body.object("logit_bias")?.unwrap_or_default();
    if map.len() > MAX_BIASES {
        let message = format!("has {} entries, the limit is {MAX_BIASES}", map.len());
        return Err(ApiError::field("logit_bias", "invalid_value", message));
    }
    let read = |(token, value): (&String, &Value)| {
        let path = format!("logit_bias.{}", short(token));
        let id = token
            .parse()
            .map_err(|_| ApiError::field(&path, "invalid_value", "the key must be a token id"))?;
        Ok((TokenId(id), number(&path, value, Range::BIAS)?))
    };
    map.iter().map(read).collect()
}

fn read_stop(body: &mut Fields) -> Result<Vec<String>, ApiError> {
    let stops = match body.value("stop") {
        None => Vec::new(),
        Some(Value::String(text)) => vec![("stop".to_owned(), Value::String(text))],
        Some(Value::Array(list)) => {
            list.into_iter().enumerate().map(|(index, item)| (format!("stop[{index}]"), item)).collect()
        }
        Some(other) => return Err(wrong_type("stop", "a string or an array of strings", &other)),
    };
    if stops.len() > MAX_STOPS {
        let message = format!("has {} entries, the limit is {MAX_STOPS}", stops.len());
        return Err(ApiError::field("stop", "invalid_value", message));
    }
    stops.into_iter().map(|(path, item)| check_stop(&path, item)).collect()
}

fn check_stop(path: &str, item: Value) -> Result<String, ApiError> {
    match item {
        Value::String(text) if text.is_empty() => {
            Err(ApiError::field(path, "invalid_value", "must not be empty"))
        }
        Value::String(text) if text.len() > MAX_STOP_BYTES => {
            let message = format!("has {} bytes, the limit is {MAX_STOP_BYTES}", text.len());
            Err(ApiError::field(path, "invalid_value", message))
        }
        Value::String(text) => Ok(text),
        other => Err(wrong_type(path, "a string", &other)),
    }
}

#[cfg(test)]
mod tests;
