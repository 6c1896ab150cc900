//! On what terms requests are served, over real sockets with a scripted engine: priority,
//! tier, timeout, in bodies and headers of both routes.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "fake")]

use std::time::Duration;

use greenroom::model::fake::Script;
use serde_json::{Value, json};

mod harness;
mod wire;
use harness::Server;
use wire::{Response, ask, with};

/// Both routes, with a body that each answers.
fn routes() -> [(&'static str, Value); 2] {
    [("/v1/chat/completions", ask("hello")), ("/v1/completions", json!({"prompt": "hello"}))]
}

fn server() -> Server {
    Server::start(Script::new().say("hello", "Hi"))
}

/// A request with more headers.
fn send(server: &Server, path: &str, headers: &[(&str, &str)], body: &Value) -> Response {
    let body = body.to_string();
    let mut head =
        format!("POST {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n", server.address);
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    server.send(format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()))
}

#[test]
fn an_answer_names_the_tier_that_was_used_where_the_request_named_one() {
    let server = server();
    for (path, body) in routes() {
        let tier = |fields: Value, headers: &[(&str, &str)]| {
            let whole = send(&server, path, headers, &with(body.clone(), fields.clone()));
            assert_eq!(whole.status, 200, "{}", whole.text());
            assert!(whole.header("warning").is_none(), "these fields are known");
            let streamed = with(with(body.clone(), fields), json!({"stream": true}));
            let events = send(&server, path, headers, &streamed).events();
            for event in &events[..events.len() - 1] {
                let chunk: Value = serde_json::from_str(event).unwrap();
                assert_eq!(chunk.get("service_tier"), whole.json().get("service_tier"), "{path}");
            }
            whole.json().get("service_tier").cloned()
        };
        assert_eq!(tier(json!({"priority": "background", "timeout": 30}), &[]), None);
        assert_eq!(tier(json!({"service_tier": "auto"}), &[]), Some(json!("default")));
        assert_eq!(tier(json!({"service_tier": "flex"}), &[]), Some(json!("flex")));
        assert_eq!(
            tier(json!({"service_tier": "flex"}), &[("X-Priority", "interactive")]),
            Some(json!("priority"))
        );
    }
}

#[test]
fn wrong_terms_are_400_and_name_the_field_or_the_header() {
    let server = server();
    for (path, body) in routes() {
        for (fields, headers, param, part) in [
            (
                json!({"priority": "now"}),
                [("X-Client-Id", "me")],
                "priority",
                "interactive, normal, background",
            ),
            (
                json!({"service_tier": "scale"}),
                [("X-Client-Id", "me")],
                "service_tier",
                "auto, default, flex, priority",
            ),
            (json!({"timeout": 0}), [("X-Client-Id", "me")], "timeout", "86400"),
            (json!({}), [("x-priority", "now")], "X-Priority", "interactive, normal, background"),
            (json!({}), [("x-request-timeout", "soon")], "X-Request-Timeout", "86400"),
        ] {
            let response = send(&server, path, &headers, &with(body.clone(), fields));
            let (code, named, message) = response.error();
            assert_eq!(
                (response.status, code.as_str(), named.as_deref()),
                (400, "invalid_value", Some(param))
            );
            assert!(message.contains(part), "{message}");
        }
        let overruled =
            send(&server, path, &[("x-priority", "now")], &with(body, json!({"priority": "normal"})));
        assert_eq!(overruled.status, 200, "the body wins: {}", overruled.text());
    }
}

#[test]
fn a_request_whose_time_runs_out_says_whether_it_was_begun() {
    let server = Server::start(Script::new().repeat("forever", "again ").gated());
    let path = "/v1/chat/completions";
    let soon = "0.000001";
    let waited = [
        send(&server, path, &[("X-Request-Timeout", soon)], &ask("forever")),
        send(&server, path, &[], &with(ask("forever"), json!({"timeout": 0.000_001}))),
    ];
    for response in waited {
        assert_eq!(
            (response.status, response.error().0.as_str()),
            (503, "queue_timeout"),
            "{}",
            response.text()
        );
    }
    let mut connection = server.connect();
    connection.write(server.chat_bytes(&with(ask("forever"), json!({"timeout": 1}))));
    assert!(server.control.wait_at_gate());
    let begun = server.handles.clock().now();
    server.wait("its time to run out", |handles| handles.clock().now() > begun + Duration::from_secs(1));
    server.control.open();
    let response = connection.read_response();
    assert_eq!(
        (response.status, response.error().0.as_str()),
        (504, "deadline_exceeded"),
        "{}",
        response.text()
    );
}
