//! What a body says of the prompt cache: `session_id` or `prompt_cache_key`, `cache_salt`,
//! `sort_tools`, and `cache_control` of messages and parts. Pure.

use serde_json::Value;

use super::api_error::ApiError;
use super::client::NamedClient;
use super::fields::Fields;
use super::messages::short;
use crate::types::{CacheTerms, MAX_BREAKPOINTS, MAX_NAME_BYTES};

/// Takes the fields out of a body; `client` has read the session's name.
///
/// # Errors
/// The first field that is wrong.
pub(super) fn read_cache_terms(
    body: &mut Fields,
    client: &NamedClient,
    breakpoints: Vec<usize>,
) -> Result<CacheTerms, ApiError> {
    let salt = body.string("cache_salt")?;
    for (path, name) in [("session_id", &client.session), ("cache_salt", &salt)] {
        if let Some(bytes) = name.as_ref().map(String::len).filter(|bytes| *bytes > MAX_NAME_BYTES) {
            let message = format!("has {bytes} bytes, the limit is {MAX_NAME_BYTES}");
            return Err(ApiError::field(path, "invalid_value", message));
        }
    }
    if breakpoints.len() > MAX_BREAKPOINTS {
        let message = format!(
            "{} messages bear one, the limit is {MAX_BREAKPOINTS}; mark the ends of what is shared",
            breakpoints.len()
        );
        return Err(ApiError::field("messages.cache_control", "invalid_value", message));
    }
    Ok(CacheTerms {
        session: client.session.clone().filter(|name| !name.is_empty()),
        salt: salt.filter(|salt| !salt.is_empty()),
        breakpoints,
        first_parts: Vec::new(),
        sort_tools: body.boolean("sort_tools")?.unwrap_or(false),
    })
}

/// Whether a message or a part bears a mark. How long it is meant to last is the cache's affair.
///
/// # Errors
/// `invalid_type`, or `invalid_value` for a kind that nobody knows.
pub(super) fn read_mark(fields: &mut Fields) -> Result<bool, ApiError> {
    let Some(mut mark) = fields.nested("cache_control")? else { return Ok(false) };
    let kind = mark.required_string("type")?;
    if kind != "ephemeral" {
        let message = format!("`{}` is not ephemeral", short(&kind));
        return Err(ApiError::field(&mark.path("type"), "invalid_value", message));
    }
    let _any: Option<Value> = mark.value("ttl");
    Ok(true)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::http::chat_request::read_chat;

    #[test]
    fn a_session_a_salt_and_marks_are_read() {
        let call = read_chat(json!({
            "messages": [
                {"role": "system", "content": [
                    {"type": "text", "text": "a"},
                    {"type": "text", "text": "b", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
                ]},
                {"role": "user", "content": "c"},
                {"role": "user", "content": "d", "cache_control": {"type": "ephemeral"}},
            ],
            "session_id": "one", "prompt_cache_key": "two", "cache_salt": "s", "sort_tools": true,
        }))
        .unwrap();
        let terms = call.request.cache;
        assert_eq!(terms.session.as_deref(), Some("one"));
        assert_eq!(
            (terms.salt.as_deref(), terms.sort_tools, terms.breakpoints),
            (Some("s"), true, vec![0, 2])
        );
        assert!(call.unknown.is_empty(), "{:?}", call.unknown);
    }

    #[test]
    fn what_is_wrong_with_them_is_named() {
        let long = "x".repeat(257);
        let marked = json!({"role": "user", "content": "d", "cache_control": {"type": "ephemeral"}});
        let user = json!([{"role": "user", "content": "d"}]);
        let wrong = [
            (json!({"messages": user, "session_id": long}), "session_id"),
            (json!({"messages": user, "prompt_cache_key": long}), "session_id"),
            (json!({"messages": user, "cache_salt": long}), "cache_salt"),
            (json!({"messages": user, "cache_salt": 7}), "cache_salt"),
            (json!({"messages": user, "sort_tools": "yes"}), "sort_tools"),
            (json!({"messages": vec![marked.clone(); 5]}), "messages.cache_control"),
            (
                json!({"messages": [{"role": "user", "content": "d", "cache_control": {"type": "forever"}}]}),
                "messages[0].cache_control.type",
            ),
        ];
        for (body, field) in wrong {
            let error = read_chat(body.clone()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field), "{body}: {}", error.message);
        }
        assert_eq!(
            read_chat(json!({"messages": vec![marked; 4]})).unwrap().request.cache.breakpoints.len(),
            4
        );
    }
}
