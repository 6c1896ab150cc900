//! What chat and text completions ask for alike: sampling, stops, how the
//! answer goes out, and the fields that are known and not supported. Pure.

use serde_json::Value;

use super::api_error::ApiError;
use super::client::NamedClient;
use super::fields::{Fields, number, wrong_type};
use super::messages::short;
use super::terms::AskedTerms;
use crate::types::{ChatRequest, Range, SamplingOptions, TokenId};

/// Most stop strings.
const MAX_STOPS: usize = 16;
/// Longest stop string, bytes: the matcher holds back that much text.
const MAX_STOP_BYTES: usize = 1024;
/// Most answers of a request.
const MAX_CHOICES: i64 = 16;
/// Most tokens with a bias.
const MAX_BIASES: usize = 1024;

/// A request, and how its answer goes out.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// What is asked; the client is filled in from the connection.
    pub request: ChatRequest,
    /// How many answers.
    pub choices: usize,
    /// Events or one document.
    pub stream: bool,
    /// A usage chunk at the end of a stream.
    pub include_usage: bool,
    /// It says what of its prompt is worth keeping.
    pub marks_cache: bool,
    /// Whose it is, as far as the body says so.
    pub client: NamedClient,
    /// How urgent it is and how long it may take, as far as the body says so.
    pub terms: AskedTerms,
    /// Paths of fields that nobody knows.
    pub unknown: Vec<String>,
}

/// Refuses what is known and not supported, unless its value asks for nothing.
pub(super) fn refuse_unsupported(body: &mut Fields) -> Result<(), ApiError> {
    let off = |value: &Value| *value == Value::Bool(false);
    let one = |value: &Value| value.as_f64() == Some(1.0);
    let zero = |value: &Value| value.as_f64() == Some(0.0);
    let empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let never = |_: &Value| false;
    body.unsupported("best_of", "choosing among hidden answers is not supported; send n", one)?;
    body.unsupported("response_format", "only {\"type\": \"text\"} is supported", |value| {
        value.get("type").and_then(Value::as_str) == Some("text")
    })?;
    body.unsupported("store", "answers are not stored; send false", off)?;
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
    body.object("metadata")?;
    for name in ["prompt_cache_retention", "safety_identifier"] {
        body.string(name)?;
    }
    Ok(())
}

/// How many answers are asked for.
pub(super) fn read_choices(body: &mut Fields) -> Result<usize, ApiError> {
    let count = body.integer("n", 1, MAX_CHOICES)?.unwrap_or(1);
    Ok(usize::try_from(count).unwrap_or(1))
}

pub(super) fn read_stream_options(body: &mut Fields, unknown: &mut Vec<String>) -> Result<bool, ApiError> {
    let Some(mut options) = body.nested("stream_options")? else { return Ok(false) };
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    // Padding against traffic analysis: nothing to hide on one's own machine.
    options.boolean("include_obfuscation")?;
    options.unknown(unknown);
    Ok(include_usage)
}

pub(super) fn read_sampling(body: &mut Fields) -> Result<SamplingOptions, ApiError> {
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

pub(super) fn read_stop(body: &mut Fields) -> Result<Vec<String>, ApiError> {
    read_stops(body, "stop")
}

/// Stop strings in the field of this name: one, or a list.
pub(super) fn read_stops(body: &mut Fields, name: &str) -> Result<Vec<String>, ApiError> {
    let stops = match body.value(name) {
        None => Vec::new(),
        Some(Value::String(text)) => vec![(name.to_owned(), Value::String(text))],
        Some(Value::Array(list)) => {
            list.into_iter().enumerate().map(|(index, item)| (format!("{name}[{index}]"), item)).collect()
        }
        Some(other) => return Err(wrong_type(name, "a string or an array of strings", &other)),
    };
    if stops.len() > MAX_STOPS {
        let message = format!("has {} entries, the limit is {MAX_STOPS}", stops.len());
        return Err(ApiError::field(name, "invalid_value", message));
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
