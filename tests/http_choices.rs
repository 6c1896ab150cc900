//! Several choices, and log-probabilities, of chats and completions over real sockets with a scripted engine:
//! one token a byte, each by half less probable than the one before it among the best.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "fake")]

use greenroom::model::fake::Script;
use serde_json::{Value, json};

mod harness;
mod wire;
use harness::Server;
use wire::{Response, ask, with};

const SAID: &str = "Grüß dich 🙂";

fn server() -> Server {
    Server::start(Script::new().say("hello", SAID))
}

fn complete(server: &Server, body: &Value) -> Response {
    server.send(server.post("/v1/completions", "application/json", &body.to_string()))
}

/// The bytes of a list of chat tokens, joined.
fn bytes(content: &Value) -> Vec<u8> {
    let tokens = content.as_array().unwrap_or_else(|| panic!("{content}"));
    tokens
        .iter()
        .flat_map(|token| token["bytes"].as_array().unwrap())
        .map(|byte| byte.as_u64().unwrap() as u8)
        .collect()
}

#[test]
fn a_chat_tells_each_tokens_and_the_best_ones() {
    let server = server();
    let body = server.chat(&with(ask("hello"), json!({"logprobs": true, "top_logprobs": 2}))).json();
    let content = &body["choices"][0]["logprobs"]["content"];
    assert_eq!(bytes(content), SAID.as_bytes(), "of all tokens but the one that ends it");
    for token in content.as_array().unwrap() {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!((&token["logprob"], top.len()), (&json!(-0.5), 2), "{token}");
        assert_eq!((&top[0]["bytes"], &top[1]["logprob"]), (&token["bytes"], &json!(-1.0)), "{token}");
    }
    let alone = server.chat(&with(ask("hello"), json!({"logprobs": true}))).json();
    let first = &alone["choices"][0]["logprobs"]["content"][0];
    assert_eq!(*first, json!({"token": "G", "logprob": -0.5, "bytes": [71], "top_logprobs": []}));
    let without = server.chat(&with(ask("hello"), json!({"logprobs": false}))).json();
    assert_eq!(without["choices"][0]["logprobs"], Value::Null);
}

#[test]
fn in_a_stream_they_come_with_the_text_that_they_are_of() {
    let server = server();
    let asked = json!({"logprobs": true, "top_logprobs": 1, "stream": true});
    let events = server.chat(&with(ask("hello"), asked)).events();
    let (mut text, mut scored) = (String::new(), Vec::new());
    for event in &events[..events.len() - 1] {
        let chunk: Value = serde_json::from_str(event).unwrap();
        let choice = &chunk["choices"][0];
        text.push_str(choice["delta"]["content"].as_str().unwrap_or(""));
        if !choice["logprobs"].is_null() {
            scored.extend(bytes(&choice["logprobs"]["content"]));
        }
        assert!(scored.len() >= text.len(), "text never comes before its tokens: {event}");
    }
    assert_eq!((text.as_str(), scored.as_slice()), (SAID, SAID.as_bytes()));
}

#[test]
fn what_a_stop_string_cuts_off_is_not_told() {
    let server = server();
    for stream in [false, true] {
        let asked = json!({"logprobs": true, "stop": "dich", "stream": stream});
        let response = server.chat(&with(ask("hello"), asked));
        let told = if stream {
            let chunks = response.events().into_iter().filter(|event| event != "[DONE]");
            let chunks = chunks.map(|event| serde_json::from_str::<Value>(&event).unwrap());
            let scored = chunks.map(|chunk| chunk["choices"][0]["logprobs"]["content"].clone());
            scored.filter(|content| !content.is_null()).flat_map(|content| bytes(&content)).collect()
        } else {
            bytes(&response.json()["choices"][0]["logprobs"]["content"])
        };
        assert_eq!(String::from_utf8(told).unwrap(), "Grüß ", "stream: {stream}");
    }
}

#[test]
fn a_completion_has_lists() {
    let server = Server::start(Script::new().say("Once", "Grüß"));
    let body = json!({"prompt": "Once", "logprobs": 1, "max_tokens": 20});
    let whole = complete(&server, &body).json()["choices"][0].clone();
    let scores = &whole["logprobs"];
    assert_eq!(scores["tokens"][0], "G");
    assert_eq!(scores["tokens"][2], "bytes:\\xc3", "half a character");
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(scores[list].as_array().unwrap().len(), "Grüß".len(), "{list}");
    }
    assert_eq!(scores["top_logprobs"][0], json!({"G": -0.5}));
    assert_eq!(whole["text"], "Grüß");
}

#[test]
fn wrong_numbers_are_named() {
    let server = server();
    for (fields, param) in [
        (json!({"top_logprobs": 2}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"logprobs": 3}), "logprobs"),
    ] {
        let response = server.chat(&with(ask("hello"), fields));
        assert_eq!((response.status, &response.json()["error"]["param"]), (400, &json!(param)));
    }
    let response = complete(&server, &json!({"prompt": "Once", "logprobs": 21}));
    assert_eq!((response.status, &response.json()["error"]["param"]), (400, &json!("logprobs")));
}

#[test]
fn several_answers_are_numbered_and_share_their_prompt() {
    let server = server();
    let body = server.chat(&with(ask("hello"), json!({"n": 3, "seed": 5}))).json();
    let choices = body["choices"].as_array().unwrap();
    let of = |key: &str| choices.iter().map(|choice| choice[key].clone()).collect::<Vec<_>>();
    assert_eq!(of("index"), [json!(0), json!(1), json!(2)]);
    assert!(choices.iter().all(|choice| choice["message"]["content"] == SAID), "{body}");
    assert_eq!(of("finish_reason"), vec![json!("stop"); 3]);
    let alone = server.chat(&with(ask("hello"), json!({"seed": 5}))).json();
    let (together, one) = (&body["usage"], &alone["usage"]);
    assert_eq!(together["prompt_tokens"], one["prompt_tokens"], "the prompt counts once");
    assert_eq!(together["completion_tokens"].as_u64(), one["completion_tokens"].as_u64().map(|n| 3 * n));
    let texts = complete(&server, &json!({"prompt": "hello", "n": 2})).json();
    assert_eq!(texts["choices"].as_array().unwrap().len(), 2);
}

#[test]
fn a_stream_of_several_answers_ends_each_once() {
    let server = server();
    let asked = json!({"n": 3, "stream": true, "stream_options": {"include_usage": true}});
    let events = server.chat(&with(ask("hello"), asked)).events();
    assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    let (mut texts, mut ends, mut roles) = ([const { String::new() }; 3], [0; 3], [0; 3]);
    for event in &events[..events.len() - 1] {
        let chunk: Value = serde_json::from_str(event).unwrap();
        for choice in chunk["choices"].as_array().unwrap() {
            let index = choice["index"].as_u64().unwrap() as usize;
            texts[index].push_str(choice["delta"]["content"].as_str().unwrap_or(""));
            ends[index] += u32::from(choice["finish_reason"] == "stop");
            roles[index] += u32::from(choice["delta"]["role"] == "assistant");
        }
    }
    assert_eq!((texts, ends, roles), ([SAID; 3].map(String::from), [1; 3], [1; 3]));
}

#[test]
fn answers_are_refused_together() {
    let server = Server::with(Script::new().repeat("forever", "again ").gated(), |config| {
        config.scheduler.max_rows = 1;
        config.scheduler.max_queue = 0;
    });
    let response = server.chat(&with(ask("forever"), json!({"n": 2})));
    assert_eq!(response.status, 429, "{}", response.text());
    server.control.open();
    server.wait("the first one to be given up", |handles| handles.gauges().tickets_live() == 0);
}

#[test]
fn all_answers_go_with_their_client() {
    let server = Server::start(Script::new().repeat("forever", "again "));
    let mut connection = server.connect();
    connection.write(server.chat_bytes(&with(ask("forever"), json!({"n": 2, "stream": true}))));
    server.wait("both to run", |handles| {
        handles.gauges().admitted.all().map(|(_, count)| count).sum::<u64>() == 2
    });
    drop(connection);
    server.wait("both to be cancelled", |handles| handles.gauges().tickets_live() == 0);
}
