//! Whatever a client sends is a request or an error that names a field.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::types::{Role, TokenId};

/// Any JSON, with names that the reader knows among its keys.
fn any_json() -> impl Strategy<Value = Value> {
    let names = "messages|role|content|type|text|tools|function|name|arguments|tool_calls|stop|seed|logit_bias|n|[a-z]{1,4}";
    let words = "user|assistant|system|tool|function|text|auto|none|[ -~]{0,6}";
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        words.prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 40, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((names, inner), 0..5)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn any_body_is_read_or_refused_by_name(fields in any_json(), messages in any_json()) {
        let mut body = match fields {
            Value::Object(map) => map,
            other => Map::from_iter([("temperature".to_owned(), other)]),
        };
        body.insert("messages".into(), messages);
        match read_chat(Value::Object(body)) {
            Ok(call) => prop_assert!(!call.request.messages.is_empty()),
            Err(error) => {
                let param = error.param.unwrap();
                prop_assert!(error.message.starts_with(&format!("{param}: ")), "{}", error.message);
                prop_assert_eq!(error.status.as_u16(), 400);
            }
        }
    }

    #[test]
    fn text_comes_through_as_it_is(text in ".*") {
        let call = read_chat(json!({"messages": [{"role": "user", "content": text}]})).unwrap();
        prop_assert_eq!(call.request.messages[0].content.as_deref(), Some(text.as_str()));
    }

    #[test]
    fn any_seed_of_64_bits_is_taken(seed in any::<u64>(), negative in i64::MIN..0) {
        let read = |seed: Value| {
            let body = json!({"messages": [{"role": "user", "content": "x"}], "seed": seed});
            read_chat(body).unwrap().request.sampling.seed
        };
        prop_assert_eq!(read(json!(seed)), Some(seed));
        prop_assert_eq!(read(json!(negative)), Some(negative.cast_unsigned()));
    }
}

#[test]
fn a_request_is_read_field_by_field() {
    let call = read_chat(json!({
        "model": "m", "stream": true, "user": "me",
        "messages": [
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": "hi", "name": "ann"},
            {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": 2}"}},
                {"id": "c2", "function": {"name": "g", "arguments": ""}},
            ]},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "chat_template_kwargs": {"enable_thinking": false}, "reasoning_effort": "high",
        "temperature": 0.5, "top_k": 40.0, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": -0.2, "repetition_context_size": 64,
        "logit_bias": {"5": -100}, "seed": 9, "stop": "END", "max_tokens": 3, "ignore_eos": true,
    }))
    .unwrap();
    let request = call.request;
    assert!(call.stream && request.ignore_eos && call.unknown.is_empty(), "{:?}", call.unknown);
    assert_eq!((request.model.as_deref(), call.client.user.as_deref()), (Some("m"), Some("me")));
    assert_eq!(request.messages[0].role, Role::System);
    assert_eq!(request.messages[1].name.as_deref(), Some("ann"));
    let assistant = &request.messages[2];
    assert_eq!((assistant.content.as_deref(), assistant.reasoning.as_deref()), (None, Some("hm")));
    assert_eq!(assistant.tool_calls[0].arguments.to_string(), r#"{"b":1,"a":2}"#);
    assert_eq!(assistant.tool_calls[1].arguments, json!({}));
    assert_eq!(request.messages[3].content.as_deref(), Some("42"));
    assert_eq!(request.messages[3].tool_call_id.as_deref(), Some("c1"));
    assert_eq!(request.tools[0]["function"]["name"], "f");
    assert_eq!(request.template_kwargs["enable_thinking"], false);
    assert_eq!(request.template_kwargs["reasoning_effort"], "high");
    let sampling = request.sampling;
    assert_eq!(
        (sampling.temperature, sampling.top_k, sampling.penalty_window),
        (Some(0.5), Some(40), Some(64))
    );
    assert_eq!(sampling.logit_bias, [(TokenId(5), -100.0)]);
    assert_eq!((request.stop, request.max_tokens), (vec!["END".to_owned()], Some(3)));
}

#[test]
fn a_request_that_forbids_calls_shows_no_tools() {
    let body = |choice: &str| {
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        json!({"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": choice})
    };
    assert_eq!(read_chat(body("auto")).unwrap().request.tools.len(), 1);
    assert!(read_chat(body("none")).unwrap().request.tools.is_empty());
}

#[test]
fn an_effort_is_a_switch_for_thinking_as_well() {
    let read = |effort: Value| {
        let body = json!({"messages": [{"role": "user", "content": "a"}], "reasoning_effort": effort});
        read_chat(body).unwrap().request.thinking
    };
    let switches = ["none", "minimal", "high"].map(|effort| read(effort.into()));
    assert_eq!((switches, read(Value::Null)), ([Some(false), Some(true), Some(true)], None));
}

#[test]
fn only_allowed_tools_are_offered() {
    let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
    let read = |mode: &str| {
        let allowed = json!({"mode": mode, "tools": [tool("b"), tool("x")]});
        read_chat(json!({
            "messages": [{"role": "user", "content": "a"}], "tools": [tool("a"), tool("b")],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
        }))
    };
    assert_eq!(read("auto").unwrap().request.tools, [tool("b")]);
    assert_eq!(read("required").unwrap_err().param.as_deref(), Some("tool_choice"));
}
