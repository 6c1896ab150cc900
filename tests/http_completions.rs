//! `POST /v1/completions` over real sockets with a scripted engine: text in, text out.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "fake")]

use greenroom::model::fake::Script;
use serde_json::{Value, json};

mod harness;
mod wire;
use harness::Server;
use wire::{Response, with};

fn server() -> Server {
    Server::start(Script::new().say("Once", " upon a time 🙂").repeat("forever", "again "))
}

fn complete(server: &Server, body: &Value) -> Response {
    server.send(server.post("/v1/completions", "application/json", &body.to_string()))
}

fn once() -> Value {
    json!({"prompt": "Once", "max_tokens": 100})
}

#[test]
fn a_whole_answer_has_openais_shape() {
    let server = server();
    let response = complete(&server, &with(once(), json!({"seed": 7, "model": "default"})));
    assert_eq!(response.status, 200, "{}", response.text());
    let body = response.json();
    assert_eq!(body["object"], "text_completion");
    assert_eq!(
        body["choices"],
        json!([{"text": " upon a time 🙂", "index": 0, "logprobs": null, "finish_reason": "stop"}])
    );
    // The text and nothing else: one token a byte, no template around it.
    assert_eq!(body["usage"]["prompt_tokens"], "Once".len());
    assert_eq!(body["id"], format!("cmpl-{}", response.header("x-request-id").unwrap()));
    assert_eq!(response.header("x-greenroom-seed"), Some("7"));
}

#[test]
fn a_stream_has_one_id_pieces_a_finish_and_done() {
    let server = server();
    let options = json!({"stream": true, "stream_options": {"include_usage": true}});
    let response = complete(&server, &with(once(), options));
    let events = response.events();
    let (done, chunks) = events.split_last().unwrap();
    assert_eq!(done, "[DONE]");
    let chunks: Vec<Value> = chunks.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, " upon a time 🙂");
    assert!(
        chunks.iter().all(|chunk| chunk["object"] == "text_completion" && chunk["id"] == chunks[0]["id"])
    );
    let (usage, rest) = chunks.split_last().unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]["prompt_tokens"]), (&json!([]), &json!(4)));
    assert_eq!(rest.last().unwrap()["choices"][0]["finish_reason"], "stop");
    assert!(rest.iter().all(|chunk| chunk["usage"].is_null()));
}

#[test]
fn without_a_limit_sixteen_tokens_come_as_with_openai() {
    let server = server();
    let body = complete(&server, &json!({"prompt": ["forever"]})).json();
    assert_eq!(body["usage"]["completion_tokens"], 16, "{body}");
    assert_eq!(body["choices"][0]["finish_reason"], "length");
}

#[test]
fn control_tokens_that_a_prompt_spells_are_meant() {
    let server = server();
    let tokens = |prompt: &str| {
        let body = complete(&server, &json!({"prompt": prompt, "max_tokens": 1})).json();
        body["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    assert_eq!(tokens("<|im_start|>a"), 2);
    assert_eq!(tokens("<|im_start>a"), 12);
}

#[test]
fn stop_strings_are_cut_off() {
    let server = server();
    let body = complete(&server, &with(once(), json!({"stop": ["a t"]}))).json();
    assert_eq!(body["choices"][0]["text"], " upon ");
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
}

#[test]
fn what_is_wrong_names_the_field() {
    let server = server();
    for (body, param, code) in [
        (json!({}), "prompt", "missing_required_parameter"),
        (json!({"prompt": ""}), "prompt", "invalid_value"),
        (json!({"prompt": "x".repeat(100_000)}), "prompt", "context_length_exceeded"),
        (json!({"prompt": "x", "temperature": -1}), "temperature", "invalid_value"),
        (json!({"prompt": "x", "model": "gpt-5"}), "model", "model_not_found"),
    ] {
        let response = complete(&server, &body);
        let error = response.json()["error"].clone();
        assert!([400, 404].contains(&response.status), "{error}");
        assert_eq!((error["param"].as_str(), error["code"].as_str()), (Some(param), Some(code)), "{error}");
    }
}
