//! Thought and tool calls of chats over real sockets with a scripted engine, whose template writes calls as
//! `<tool_call>{…}</tool_call>`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "fake")]

use greenroom::model::fake::Script;
use serde_json::{Value, json};

mod harness;
mod wire;
use harness::Server;
use wire::{ask, with};

const CALL: &str =
    "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo, \\\"N\\\"\"}}</tool_call>";
const ARGUMENTS: &str = "{\"city\": \"Oslo, \\\"N\\\"\"}";

fn server() -> Server {
    let script = Script::new()
        .say("think", "<think>\nIt is easy.\n</think>\n\nFour.")
        .say("weather", &format!("<think>Look.</think>Let me see.\n{CALL}\n{CALL}"))
        .say("broken", "So: <tool_call>{\"name\": 5, oh</tool_call> well.")
        .say("markup", "A `<tool_call>` and <think> are markup.");
    Server::start(script)
}

fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!({"tools": [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]})
}

fn whole(server: &Server, question: &str, fields: Value) -> Value {
    let response = server.chat(&with(ask(question), fields));
    assert_eq!(response.status, 200, "{}", response.text());
    response.json()["choices"][0].clone()
}

/// The choices of a stream's chunks.
fn stream(server: &Server, question: &str, fields: Value) -> Vec<Value> {
    let events = server.chat(&with(with(ask(question), fields), json!({"stream": true}))).events();
    let chunks = events.iter().filter(|event| *event != "[DONE]");
    chunks.map(|chunk| serde_json::from_str::<Value>(chunk).unwrap()["choices"][0].clone()).collect()
}

fn joined(choices: &[Value], key: &str) -> String {
    choices.iter().filter_map(|choice| choice["delta"][key].as_str()).collect()
}

#[test]
fn a_thought_is_told_from_its_answer() {
    let server = server();
    let choice = whole(&server, "think", json!({}));
    let message = &choice["message"];
    assert_eq!(
        (&message["reasoning_content"], &message["content"]),
        (&json!("It is easy."), &json!("Four."))
    );
    assert_eq!(choice["finish_reason"], "stop");
    let chunks = stream(&server, "think", json!({}));
    assert_eq!(joined(&chunks, "reasoning_content"), "It is easy.");
    assert_eq!(joined(&chunks, "content"), "Four.");
    let first_text = chunks.iter().position(|choice| choice["delta"]["content"] == "F").unwrap();
    let last_thought =
        chunks.iter().rposition(|choice| choice["delta"]["reasoning_content"].is_string()).unwrap();
    assert!(last_thought < first_text);
    let usage = server.chat(&ask("think")).json()["usage"].clone();
    let thought = usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!((8..40).contains(&thought), "{usage}");
}

#[test]
fn calls_are_told_from_text_whole_and_in_a_stream() {
    let server = server();
    let choice = whole(&server, "weather", tools());
    let message = &choice["message"];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(
        (&message["content"], &message["reasoning_content"]),
        (&json!("Let me see."), &json!("Look."))
    );
    let calls = message["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2);
    for call in calls {
        assert_eq!(call["function"], json!({"name": "weather", "arguments": ARGUMENTS}));
        assert!(call["id"].as_str().unwrap().starts_with("call_"), "{call}");
    }
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    let chunks = stream(&server, "weather", tools());
    assert_eq!(joined(&chunks, "content"), "Let me see.");
    let parts = |index: u64| {
        let deltas = chunks.iter().filter_map(|choice| choice["delta"]["tool_calls"].as_array());
        let of = deltas.flatten().filter(move |call| call["index"] == index);
        of.cloned().collect::<Vec<_>>()
    };
    for index in 0..2 {
        let parts = parts(index);
        assert_eq!(
            (&parts[0]["type"], &parts[0]["function"]["name"]),
            (&json!("function"), &json!("weather"))
        );
        assert!(parts.len() > 5, "arguments come as they are written: {parts:?}");
        let text: String = parts.iter().map(|part| part["function"]["arguments"].as_str().unwrap()).collect();
        assert_eq!(text, ARGUMENTS);
    }
    assert_eq!(chunks.last().unwrap()["finish_reason"], "tool_calls");
}

#[test]
fn what_is_no_call_is_text() {
    let server = server();
    let broken = whole(&server, "broken", tools());
    assert_eq!(broken["finish_reason"], "stop");
    assert_eq!(broken["message"]["content"], "So: <tool_call>{\"name\": 5, oh</tool_call> well.");
    assert!(broken["message"].get("tool_calls").is_none(), "{broken}");
    // Nothing was offered, so nothing is called.
    let unasked = whole(&server, "weather", json!({}));
    assert_eq!(unasked["message"]["content"], format!("Let me see.\n{CALL}\n{CALL}"));
    let markup = whole(&server, "markup", tools());
    assert_eq!(markup["message"]["content"], "A `<tool_call>` and <think> are markup.");
}

#[test]
fn stop_strings_are_looked_for_in_the_text_alone() {
    let server = server();
    for word in ["Look", "Oslo", "weather", "tool_call", "<think>"] {
        let choice = whole(&server, "weather", with(tools(), json!({"stop": word})));
        assert_eq!(choice["finish_reason"], "tool_calls", "{word}: {choice}");
    }
    let choice = whole(&server, "weather", with(tools(), json!({"stop": "see"})));
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("stop"), &json!("Let me "))
    );
    assert_eq!(choice["message"]["reasoning_content"], "Look.");
}

#[test]
fn a_call_that_is_cut_gives_what_there_is() {
    let server = server();
    // One token a byte.
    let most =
        "<think>Look.</think>Let me see.\n<tool_call>{\"name\": \"weather\", \"arguments\": {\"ci".len();
    let choice = whole(&server, "weather", with(tools(), json!({"max_tokens": most})));
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"ci");
    for most in 1..most + 60 {
        let choice = whole(&server, "weather", with(tools(), json!({"max_tokens": most})));
        assert!(choice["message"].is_object(), "{choice}");
    }
}

#[test]
fn a_response_has_them_as_items() {
    let server = server();
    let tool = json!({"type": "function", "name": "weather", "parameters": {"type": "object"}});
    let body = json!({"input": "weather", "tools": [tool]});
    let body = server.send(server.post("/v1/responses", "application/json", &body.to_string())).json();
    let output = body["output"].as_array().unwrap();
    let kinds: Vec<&str> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call", "function_call"]);
    assert_eq!(output[2]["arguments"], ARGUMENTS);
    let answered =
        json!([{"type": "function_call_output", "call_id": output[2]["call_id"], "output": "think"}]);
    let body = json!({"input": answered, "previous_response_id": body["id"]});
    let next = server.send(server.post("/v1/responses", "application/json", &body.to_string())).json();
    assert_eq!(next["status"], "completed", "{next}");
}
