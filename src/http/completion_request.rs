//! `POST /v1/completions`, inward: a prompt as text, to [`ChatRequest`]. Pure.
//!
//! The prompt goes to the model as it is: no template, and what it spells of
//! control tokens is meant. So base models are used, and prompts that somebody
//! wrote by hand.

use serde_json::Value;

use super::api_error::ApiError;
use super::cache_terms::read_cache_terms;
use super::client::NamedClient;
use super::fields::{Fields, wrong_type};
use super::options::{self, Call};
use super::terms::AskedTerms;
use crate::types::ChatRequest;

/// OpenAI's default: a base model seldom ends by itself.
const MAX_TOKENS: u32 = 16;

/// Reads a body.
///
/// # Errors
/// The first field that is wrong, by its path.
pub fn read_completion(body: Value) -> Result<Call, ApiError> {
    let mut body = Fields::new("", body)?;
    let mut unknown = Vec::new();
    options::refuse_unsupported(&mut body)?;
    body.unsupported(
        "suffix",
        "filling in the middle is not supported; write it into the prompt",
        |value| value.as_str() == Some(""),
    )?;
    for name in ["messages", "tools", "chat_template_kwargs"] {
        body.unsupported(name, "is a chat's; send it to /v1/chat/completions", |_| false)?;
    }
    let choices = options::read_choices(&mut body)?;
    let stream = body.boolean("stream")?.unwrap_or(false);
    let include_usage = options::read_stream_options(&mut body, &mut unknown)?;
    let older = body.count("max_tokens", 1)?;
    let max_tokens = body.count("max_completion_tokens", 1)?.or(older).unwrap_or(MAX_TOKENS);
    let client = NamedClient::read(&mut body)?;
    let terms = AskedTerms::read(&mut body)?;
    let cache = read_cache_terms(&mut body, &client, Vec::new())?;
    let request = ChatRequest {
        model: body.string("model")?,
        prompt: Some(read_prompt(&mut body)?),
        sampling: options::read_sampling(&mut body)?,
        stop: options::read_stop(&mut body)?,
        max_tokens: Some(max_tokens),
        cache,
        scores: read_scores(&mut body)?,
        ignore_eos: body.boolean("ignore_eos")?.unwrap_or(false),
        ..ChatRequest::default()
    };
    body.unknown(&mut unknown);
    Ok(Call { request, choices, stream, include_usage, marks_cache: false, client, terms, unknown })
}

/// How many of the best tokens are told in each one's place.
fn read_scores(body: &mut Fields) -> Result<Option<u8>, ApiError> {
    let top = body.integer("logprobs", 0, i64::from(ChatRequest::MAX_TOP))?;
    Ok(top.and_then(|top| u8::try_from(top).ok()))
}

/// One text, or a list that holds one.
fn read_prompt(body: &mut Fields) -> Result<String, ApiError> {
    let needed = "a string";
    let mut list = match body.value("prompt") {
        None => return Err(body.missing("prompt", needed)),
        Some(Value::String(text)) => return Ok(text),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong_type("prompt", needed, &other)),
    };
    match (list.len(), list.pop()) {
        (1, Some(Value::String(text))) => Ok(text),
        (_, Some(Value::Number(_) | Value::Array(_))) => {
            let message = "token ids are not supported yet; send text";
            Err(ApiError::field("prompt", "unsupported_parameter", message))
        }
        (1, Some(other)) => Err(wrong_type("prompt[0]", needed, &other)),
        (0, _) => Err(ApiError::field("prompt", "invalid_value", "must not be empty")),
        (count, _) => {
            let message =
                format!("has {count} prompts; only one a request is supported: send {count} requests");
            Err(ApiError::field("prompt", "unsupported_parameter", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_prompt_is_one_text_however_it_is_wrapped() {
        for prompt in [json!("Once"), json!(["Once"])] {
            let call = read_completion(json!({"prompt": prompt})).unwrap();
            assert_eq!(call.request.prompt.as_deref(), Some("Once"));
            assert_eq!(call.request.max_tokens, Some(16));
        }
        let wrong = [
            (json!({}), "prompt"),
            (json!({"prompt": null}), "prompt"),
            (json!({"prompt": 7}), "prompt"),
            (json!({"prompt": []}), "prompt"),
            (json!({"prompt": [1, 2]}), "prompt"),
            (json!({"prompt": [[1, 2]]}), "prompt"),
            (json!({"prompt": [{}]}), "prompt[0]"),
            (json!({"prompt": ["a", "b"]}), "prompt"),
            (json!({"prompt": "a", "suffix": "b"}), "suffix"),
            (json!({"prompt": "a", "logprobs": 21}), "logprobs"),
            (json!({"prompt": "a", "logprobs": true}), "logprobs"),
            (json!({"prompt": "a", "echo": true}), "echo"),
            (json!({"prompt": "a", "messages": []}), "messages"),
            (json!({"prompt": "a", "max_tokens": 0}), "max_tokens"),
            (json!({"prompt": "a", "n": 17}), "n"),
            (json!({"prompt": "a", "stop": ""}), "stop"),
        ];
        for (body, field) in wrong {
            let error = read_completion(body.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field), "{body}: {}", error.message);
        }
    }
}
