//! Anthropic's messages over real sockets with a scripted engine: answers, streams, errors, counting.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "fake")]

use std::time::Duration;

use greenroom::model::fake::Script;
use serde_json::{Value, json};

mod harness;
mod wire;
use harness::Server;
use wire::{Response, with};

const CALL: &str = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}</tool_call>";

fn script() -> Script {
    Script::new()
        .say("hello", "Good day!")
        .say("weather", &format!("<think>Look.</think>Let me see.{CALL}"))
        .repeat("forever", "again ")
}

fn server() -> Server {
    Server::start(script())
}

fn ask(question: &str) -> Value {
    json!({"model": "default", "max_tokens": 200, "messages": [{"role": "user", "content": question}]})
}

fn bytes(server: &Server, path: &str, body: &Value) -> Vec<u8> {
    server.post(path, "application/json", &body.to_string())
}

fn message(server: &Server, body: &Value) -> Response {
    server.send(bytes(server, "/v1/messages", body))
}

fn tools() -> Value {
    json!({"tools": [{"name": "weather", "input_schema": {"type": "object"}}]})
}

#[test]
fn a_whole_message_has_anthropics_shape() {
    let server = server();
    let response = message(&server, &ask("hello"));
    assert_eq!(response.status, 200, "{}", response.text());
    let body = response.json();
    assert_eq!(
        (&body["type"], &body["role"], &body["model"]),
        (&json!("message"), &json!("assistant"), &json!("scripted"))
    );
    assert_eq!(body["content"], json!([{"type": "text", "text": "Good day!"}]));
    assert_eq!((&body["stop_reason"], &body["stop_sequence"]), (&json!("end_turn"), &Value::Null));
    assert_eq!(body["id"], format!("msg_{}", response.header("x-request-id").unwrap()));
    assert_eq!(body["usage"]["output_tokens"], "Good day!".len() + 1);
    let stopped = message(&server, &with(ask("hello"), json!({"stop_sequences": ["day"]}))).json();
    assert_eq!(
        (&stopped["stop_reason"], &stopped["stop_sequence"]),
        (&json!("stop_sequence"), &json!("day"))
    );
    assert_eq!(stopped["content"][0]["text"], "Good ");
    let cut = message(&server, &with(ask("hello"), json!({"max_tokens": 4}))).json();
    assert_eq!((&cut["stop_reason"], &cut["content"][0]["text"]), (&json!("max_tokens"), &json!("Good")));
}

#[test]
fn thought_text_and_calls_are_blocks_and_come_back() {
    let server = server();
    let body = message(&server, &with(ask("weather"), tools())).json();
    assert_eq!(body["stop_reason"], "tool_use");
    let blocks = body["content"].as_array().unwrap();
    let kinds: Vec<&str> = blocks.iter().map(|block| block["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["thinking", "text", "tool_use"]);
    assert_eq!((&blocks[0]["thinking"], &blocks[2]["input"]), (&json!("Look."), &json!({"city": "Oslo"})));
    let result = json!({"type": "tool_result", "tool_use_id": blocks[2]["id"], "content": "hello"});
    let turns = json!([
        {"role": "user", "content": "weather"},
        {"role": "assistant", "content": body["content"]},
        {"role": "user", "content": [result]},
    ]);
    let next = message(&server, &with(with(ask(""), tools()), json!({"messages": turns})));
    assert_eq!(next.status, 200, "{}", next.text());
}

#[test]
fn a_stream_has_its_events_in_order() {
    let server = server();
    let response = message(&server, &with(with(ask("weather"), tools()), json!({"stream": true})));
    let events: Vec<Value> =
        response.events().iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(events[0]["type"], "message_start");
    assert!(events[0]["message"]["usage"]["input_tokens"].as_u64().unwrap() > 5);
    let last: Vec<&str> =
        events[events.len() - 2..].iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(last, ["message_delta", "message_stop"]);
    let mut open = None;
    for event in &events {
        match event["type"].as_str().unwrap() {
            "content_block_start" => assert_eq!(open.replace(event["index"].clone()), None, "{event}"),
            "content_block_delta" => assert_eq!(open.as_ref(), Some(&event["index"]), "{event}"),
            "content_block_stop" => assert_eq!(open.take().as_ref(), Some(&event["index"]), "{event}"),
            _ => assert_eq!(open, None),
        }
    }
    let joined = |field: &str| -> String {
        events.iter().filter_map(|event| event["delta"][field].as_str()).collect()
    };
    assert_eq!((joined("thinking"), joined("text")), ("Look.".into(), "Let me see.".into()));
    assert_eq!(joined("partial_json"), "{\"city\": \"Oslo\"}");
}

#[test]
fn counting_agrees_with_what_is_charged() {
    let server = server();
    let body = with(with(ask("weather"), tools()), json!({"system": "Be kind."}));
    let mut counted = body.clone();
    counted.as_object_mut().unwrap().remove("max_tokens");
    let tokens = server.send(bytes(&server, "/v1/messages/count_tokens", &counted)).json();
    let usage = message(&server, &body).json()["usage"].clone();
    let sum: u64 = ["input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"]
        .iter()
        .map(|name| usage[name].as_u64().unwrap())
        .sum();
    assert_eq!(tokens, json!({"input_tokens": sum}));
    let long = ask(&"x".repeat(5000));
    let counted = server.send(bytes(&server, "/v1/messages/count_tokens", &long)).json();
    assert!(counted["input_tokens"].as_u64().unwrap() > 5000, "what does not fit has a length: {counted}");
}

#[test]
fn errors_have_anthropics_shape() {
    let server = server();
    for (path, body, status, kind, said) in [
        (
            "/v1/messages",
            json!({"messages": [{"role": "user", "content": "x"}]}),
            400,
            "invalid_request_error",
            "max_tokens",
        ),
        ("/v1/messages", with(ask("x"), json!({"model": "claude"})), 404, "not_found_error", "scripted"),
        ("/v1/messages", ask(&"x".repeat(9000)), 400, "invalid_request_error", "4096"),
        ("/v1/messages/count_tokens", json!({"messages": []}), 400, "invalid_request_error", "messages"),
        (
            "/v1/messages",
            with(with(ask("x"), tools()), json!({"tool_choice": {"type": "any"}})),
            400,
            "invalid_request_error",
            "tool_choice",
        ),
    ] {
        let response = server.send(bytes(&server, path, &body));
        let body = response.json();
        assert_eq!(
            (response.status, &body["type"], &body["error"]["type"]),
            (status, &json!("error"), &json!(kind)),
            "{body}"
        );
        assert!(body["error"]["message"].as_str().unwrap().contains(said), "{body}");
        assert!(body["request_id"].is_string(), "{body}");
    }
    let broken = server.send(server.post("/v1/messages", "application/json", "{"));
    assert_eq!((broken.status, &broken.json()["error"]["type"]), (400, &json!("invalid_request_error")));
    let kind = server.send(server.post("/v1/messages", "text/plain", "{}"));
    assert_eq!((kind.status, &kind.json()["type"]), (415, &json!("error")));
}

#[test]
fn silence_is_filled_with_pings_and_leaving_cancels() {
    let server = Server::with(script().gated(), |config| config.http.heartbeat_s = 1);
    let mut connection = server.connect();
    connection.write(bytes(&server, "/v1/messages", &with(ask("forever"), json!({"stream": true}))));
    assert_eq!(connection.read_head().status, 200);
    let start = String::from_utf8(connection.read_chunk().unwrap()).unwrap();
    assert!(start.starts_with("event: message_start\n"), "{start}");
    let ping = String::from_utf8(connection.read_chunk().unwrap()).unwrap();
    assert_eq!(ping, "event: ping\ndata: {\"type\": \"ping\"}\n\n");
    server.control.open();
    drop(connection);
    server.wait("it to be cancelled", |handles| handles.gauges().tickets_live() == 0);
    server.drain(Duration::from_secs(1));
}
