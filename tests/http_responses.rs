//! `/v1/responses` over real sockets with a scripted engine: answers, streams, what can be gone on from.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "fake")]

use greenroom::model::fake::Script;
use serde_json::{Value, json};

mod harness;
mod wire;
use harness::Server;
use wire::Response;

fn server() -> Server {
    Server::start(Script::new().say("name?", "Ann.").say("hello", "Good day!").repeat("forever", "again "))
}

fn respond(server: &Server, body: &Value) -> Response {
    server.send(server.post("/v1/responses", "application/json", &body.to_string()))
}

fn delete(server: &Server, path: &str) -> Response {
    server.send(format!("DELETE {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", server.address))
}

#[test]
fn a_whole_response_has_openais_shape() {
    let server = server();
    let response =
        respond(&server, &json!({"model": "default", "input": "hello", "instructions": "Be kind."}));
    assert_eq!(response.status, 200, "{}", response.text());
    let body = response.json();
    assert_eq!(
        (&body["object"], &body["status"], &body["model"]),
        (&json!("response"), &json!("completed"), &json!("scripted"))
    );
    let item = &body["output"][0];
    assert_eq!(
        (&item["type"], &item["role"], &item["status"]),
        (&json!("message"), &json!("assistant"), &json!("completed"))
    );
    assert_eq!(
        item["content"],
        json!([{"type": "output_text", "text": "Good day!", "annotations": [], "logprobs": []}])
    );
    assert_eq!(
        (&body["instructions"], &body["error"], &body["store"]),
        (&json!("Be kind."), &Value::Null, &json!(true))
    );
    assert_eq!(body["usage"]["output_tokens"], "Good day!".len() + 1);
    assert_eq!(body["id"], format!("resp_{}", response.header("x-request-id").unwrap()));
    let cut = respond(&server, &json!({"input": "hello", "max_output_tokens": 4})).json();
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
}

#[test]
fn a_stream_ends_with_the_response_that_can_be_had_again() {
    let server = server();
    let response = respond(&server, &json!({"input": "hello", "stream": true}));
    assert!(response.header("content-type").unwrap().starts_with("text/event-stream"));
    let events: Vec<Value> =
        response.events().iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(events[0]["type"], "response.created");
    let text: String = events
        .iter()
        .filter(|event| event["type"] == "response.output_text.delta")
        .map(|event| event["delta"].as_str().unwrap())
        .collect();
    assert_eq!(text, "Good day!");
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.completed");
    let id = last["response"]["id"].as_str().unwrap();
    let again = server.get(&format!("/v1/responses/{id}"));
    assert_eq!((again.status, again.json()), (200, last["response"].clone()));
    let items = server.get(&format!("/v1/responses/{id}/input_items")).json();
    assert_eq!(items["data"][0]["content"], "hello");
    let path = format!("/v1/responses/{id}");
    assert_eq!(delete(&server, &path).json(), json!({"id": id, "object": "response", "deleted": true}));
    for gone in [delete(&server, &path), server.get(&path)] {
        assert_eq!((gone.status, &gone.json()["error"]["code"]), (404, &json!("response_not_found")));
    }
}

#[test]
fn a_conversation_goes_on_from_a_response() {
    let server = server();
    let first = respond(&server, &json!({"input": "hello", "instructions": "Not handed on."})).json();
    let second = respond(&server, &json!({"input": "name?", "previous_response_id": first["id"]})).json();
    assert_eq!(second["output"][0]["content"][0]["text"], "Ann.");
    assert_eq!(second["previous_response_id"], first["id"]);
    let whole = json!([
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Good day!"},
        {"role": "user", "content": "name?"},
    ]);
    let written_out = respond(&server, &json!({"input": whole})).json();
    assert_eq!(written_out["usage"]["input_tokens"], second["usage"]["input_tokens"], "the same prompt");
    assert!(second["usage"]["input_tokens_details"]["cached_tokens"].as_u64().is_some());
    let unknown = respond(&server, &json!({"input": "name?", "previous_response_id": "resp_nobody"}));
    assert_eq!((unknown.status, &unknown.json()["error"]["param"]), (404, &json!("previous_response_id")));
    let unstored = respond(&server, &json!({"input": "hello", "store": false})).json();
    let gone = respond(&server, &json!({"input": "name?", "previous_response_id": unstored["id"]}));
    assert_eq!(gone.status, 404);
}

#[test]
fn what_is_wrong_names_the_field_of_this_route() {
    let server = server();
    for (body, param) in [
        (json!({"input": "x", "background": true}), "background"),
        (json!({"input": [], "model": "default"}), "input"),
        (json!({"input": "x".repeat(20_000)}), "input"),
    ] {
        let response = respond(&server, &body);
        assert_eq!(
            (response.status, &response.json()["error"]["param"]),
            (400, &json!(param)),
            "{}",
            response.text()
        );
    }
    let given = respond(&server, &json!({"input": "hello"})).json();
    let path = format!("/v1/responses/{}/cancel", given["id"].as_str().unwrap());
    assert_eq!(server.send(server.post(&path, "application/json", "{}")).status, 400);
    assert_eq!(server.get("/v1/responses").status, 405);
}

#[test]
fn a_client_that_goes_away_cancels_its_response() {
    let server = server();
    let mut connection = server.connect();
    let body = json!({"input": "forever", "stream": true}).to_string();
    connection.write(server.post("/v1/responses", "application/json", &body));
    assert_eq!(connection.read_head().status, 200);
    drop(connection);
    server.wait("it to be cancelled", |handles| handles.gauges().tickets_live() == 0);
}
