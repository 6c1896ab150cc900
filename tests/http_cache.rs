//! The prompt cache over real sockets with a scripted engine: what usage, traces and metrics say of
//! it, sessions, marks, salts, nonce lines, sorted tools.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "fake")]

use greenroom::model::fake::Script;
use serde_json::{Value, json};

mod harness;
mod wire;
use harness::Server;

fn start() -> Server {
    Server::with(Script::new().say("end", "a fine answer"), |config| config.cache.enabled = true)
}

fn long(tail: &str) -> String {
    format!("{}{tail}", "what is always said first, and at length. ".repeat(12))
}

fn asked(server: &Server, body: &Value) -> (Value, String) {
    let response = server.chat(body);
    assert_eq!(response.status, 200, "{}", response.text());
    let id = response.header("x-request-id").unwrap().to_owned();
    (response.json(), id)
}

fn details(server: &Server, body: &Value) -> Value {
    asked(server, body).0["usage"]["prompt_tokens_details"].clone()
}

fn event(server: &Server, id: &str, phase: &str) -> Option<Value> {
    let trace = server.get(&format!("/v1/requests/{id}/trace")).json();
    let events = trace["events"].as_array().unwrap();
    events.iter().find(|event| event["phase"] == phase).map(|event| event["attributes"].clone())
}

fn user(text: &str) -> Value {
    json!({"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0})
}

fn with(mut body: Value, name: &str, value: Value) -> Value {
    body[name] = value;
    body
}

fn delete(server: &Server, path: &str, key: Option<&str>) -> wire::Response {
    let key = key.map_or(String::new(), |key| format!("Authorization: Bearer {key}\r\n"));
    server
        .send(format!("DELETE {path} HTTP/1.1\r\nHost: {}\r\n{key}Connection: close\r\n\r\n", server.address))
}

#[test]
fn usage_and_trace_tell_what_was_read_what_was_kept_and_why_not_more() {
    let server = start();
    let (first, id) = asked(&server, &user(&long("end one")));
    let prompt = first["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(
        first["usage"]["prompt_tokens_details"],
        json!({"cached_tokens": 0, "created_tokens": prompt})
    );
    assert_eq!(event(&server, &id, "cache.lookup_restore").unwrap()["why"], "not_seen");
    let (second, id) = asked(&server, &user(&long("end two")));
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(cached > 500 && cached < prompt, "{second}");
    let why = event(&server, &id, "cache.lookup_restore").unwrap();
    assert_eq!((&why["why"], &why["endedAt"]), (&json!("other_token"), &json!(cached)));
    assert!(why["savedMs"].is_u64());
    let (_, id) = asked(&server, &with(user(&long("end two")), "cache_salt", json!("mine")));
    assert_eq!(
        event(&server, &id, "cache.lookup_restore").unwrap()["why"],
        "not_seen",
        "what others say is nobody's affair"
    );
    let metrics = server.get("/metrics").text();
    assert!(metrics.contains(&format!("greenroom_cache_hit_tokens_total {cached}\n")), "{metrics}");
    assert!(metrics.contains("greenroom_cache_ssd_hit_tokens_total 0\n"));
}

#[test]
fn a_salt_keeps_state_to_itself() {
    let server = start();
    let body = |salt: &str| with(user(&long("end")), "cache_salt", json!(salt));
    assert_eq!(details(&server, &body("a"))["cached_tokens"], 0);
    assert_eq!(details(&server, &body("b"))["cached_tokens"], 0);
    assert!(details(&server, &body("a"))["cached_tokens"].as_u64().unwrap() > 500);
}

#[test]
fn a_nonce_line_is_taken_out_and_told() {
    let server = start();
    let body = |nonce: &str| {
        json!({"messages": [
            {"role": "system", "content": format!("x-anthropic-billing-header: cch={nonce};\n{}", long(""))},
            {"role": "user", "content": "end"},
        ], "max_tokens": 4})
    };
    assert_eq!(details(&server, &body("a1"))["stripped_lines"], 1);
    let (second, id) = asked(&server, &body("b2"));
    let usage = &second["usage"];
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"].as_u64().unwrap() - 1);
    let told = event(&server, &id, "prompt.normalized").unwrap();
    assert_eq!(told, json!({"lines": 1, "pattern": "x-anthropic-billing-header: *;"}));
    // In a part of its own, as agents send it: what the next part says stays, to its first line.
    let in_parts = |nonce: &str| {
        json!({"messages": [
            {"role": "system", "content": [
                {"type": "text", "text": format!("x-anthropic-billing-header: cch={nonce};")},
                {"type": "text", "text": long("")},
            ]},
            {"role": "user", "content": "end"},
        ], "max_tokens": 4})
    };
    let (parted, _) = asked(&server, &in_parts("c3"));
    assert_eq!(parted["usage"]["prompt_tokens"], usage["prompt_tokens"], "the same prompt");
    assert_eq!(
        parted["usage"]["prompt_tokens_details"]["cached_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"]
    );
    // Said by anybody else it is text like any other.
    let said = user("x-anthropic-billing-header: end");
    assert_eq!(details(&server, &said)["stripped_lines"], Value::Null);
}

#[test]
fn tools_are_sorted_only_where_the_client_asks() {
    let server = start();
    let tool =
        |name: &str| json!({"type": "function", "function": {"name": name, "description": long(name)}});
    let body = |names: [&str; 2], sorts: bool| {
        json!({
            "messages": [{"role": "user", "content": "end"}], "max_tokens": 4,
            "tools": names.map(tool), "sort_tools": sorts,
        })
    };
    details(&server, &body(["a", "b"], false));
    let mixed = details(&server, &body(["b", "a"], false))["cached_tokens"].as_u64().unwrap();
    assert!(mixed < 100, "{mixed}");
    let sorted = details(&server, &body(["b", "a"], true))["cached_tokens"].as_u64().unwrap();
    assert!(sorted > 1000, "{sorted}");
}

#[test]
fn sessions_are_listed_pinned_and_dropped_by_whose_they_are() {
    let server = start();
    let list = || server.get("/v1/cache/sessions").json()["data"].clone();
    assert_eq!(list(), json!([]));
    details(&server, &with(user(&long("end")), "session_id", json!("one")));
    details(&server, &with(user("end"), "prompt_cache_key", json!("two")));
    let sessions = list();
    assert_eq!(sessions.as_array().unwrap().len(), 2);
    let one = sessions.as_array().unwrap().iter().find(|session| session["id"] == "one").unwrap();
    assert!(one["tokens"].as_u64().unwrap() > 500 && one["turns"] == 1 && one["pinned"] == false, "{one}");
    let pin = |id: &str, body: &str| {
        server.send(server.post(&format!("/v1/cache/sessions/{id}"), "application/json", body))
    };
    assert_eq!(pin("one", r#"{"pinned": true}"#).status, 200);
    assert_eq!(
        list()[0]["pinned"].as_bool().unwrap() as u8 + list()[1]["pinned"].as_bool().unwrap() as u8,
        1
    );
    assert_eq!(pin("nobody", r#"{"pinned": true}"#).status, 404);
    assert_eq!(pin("one", "{}").json()["error"]["param"], "pinned");
    // A header names a conversation where the body does not.
    let body = user("end").to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: {}\r\nX-Session-Affinity: three\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        server.address,
        body.len()
    );
    assert_eq!(server.send(head).status, 200);
    assert_eq!(list()[0]["id"], "three");
    assert_eq!(delete(&server, "/v1/cache/sessions/three", None).status, 200);
    // Another key's conversations are its own.
    assert_eq!(delete(&server, "/v1/cache/sessions/one", Some("secret")).status, 404);
    assert_eq!(delete(&server, "/v1/cache/sessions/one", None).status, 200);
    assert_eq!(delete(&server, "/v1/cache/sessions/one", None).status, 404);
    assert_eq!(list().as_array().unwrap().len(), 1);
    assert!(
        details(&server, &user(&long("end")))["cached_tokens"].as_u64().unwrap() < 100,
        "its state is gone"
    );
    assert_eq!(server.get("/v1/cache/sessions/one").header("allow"), Some("POST, DELETE"));
}

#[test]
fn the_cache_is_looked_at_and_cleared() {
    let server = start();
    details(&server, &user(&long("end")));
    let report = server.get("/v1/cache").json();
    assert!(report["entries"] == 1 && report["tokens"].as_u64().unwrap() > 500, "{report}");
    assert_eq!(report["kind"], "prefixes in memory; nothing on disk");
    assert_eq!(delete(&server, "/v1/cache?disk=perhaps", None).json()["error"]["param"], "disk");
    assert_eq!(delete(&server, "/v1/cache?dsk=true", None).json()["error"]["param"], "dsk");
    assert_eq!(delete(&server, "/v1/cache", None).json()["entries"], 0);
    assert_eq!(details(&server, &user(&long("end")))["cached_tokens"], 0);
    assert_eq!(server.get("/v1/cache/").status, 404);
    assert_eq!(server.send(server.post("/v1/cache", "application/json", "{}")).status, 405);
}

#[test]
fn a_mark_is_taken_and_a_wrong_one_is_named() {
    let server = start();
    let marked = json!({"messages": [
        {"role": "system", "content": [{"type": "text", "text": long(""), "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "end"},
    ], "max_tokens": 4});
    let response = server.chat(&marked);
    assert_eq!((response.status, response.header("warning")), (200, None), "known, so nobody is warned");
    let wrong =
        json!({"messages": [{"role": "user", "content": "x", "cache_control": {"type": "for ever"}}]});
    assert_eq!(server.chat(&wrong).json()["error"]["param"], "messages[0].cache_control.type");
}
