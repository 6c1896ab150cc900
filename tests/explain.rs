//! `greenroom cache explain` over requests as clients send them.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

fn explain(a: &Value, b: &Value, more: &[&str]) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, body: &Value| {
        let path = dir.path().join(name);
        std::fs::write(&path, body.to_string()).unwrap();
        path
    };
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/llama");
    Command::new(env!("CARGO_BIN_EXE_greenroom"))
        .args(["cache", "explain"])
        .arg(write("a.json", a))
        .arg(write("b.json", b))
        .arg("--model")
        .arg(model)
        .args(more)
        .env("GREENROOM_HOME", dir.path())
        .output()
        .unwrap()
}

fn report(a: &Value, b: &Value) -> Value {
    let output = explain(a, b, &["--json", "--tokens-per-s", "10"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn chat(system: &str, user: &str) -> Value {
    json!({"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]})
}

fn tools(names: [&str; 2]) -> Value {
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}});
    json!({"messages": [{"role": "user", "content": "hi"}], "tools": names.map(tool)})
}

#[test]
fn a_clock_in_the_system_prompt_is_found_and_its_cost_told() {
    let (a, b) = (chat("It is 12:01 now. Be kind.", "Hello"), chat("It is 12:05 now. Be kind.", "Hello"));
    let told = report(&a, &b);
    assert_eq!(told["in"], "messages[0] (system)");
    let (shared, anew) = (told["shared_tokens"].as_u64().unwrap(), told["computed_tokens"].as_u64().unwrap());
    assert_eq!(shared + anew, told["b"]["tokens"].as_u64().unwrap());
    assert_eq!(told["seconds"].as_f64().unwrap(), anew as f64 / 10.0);
    assert!(told["a"]["text"].as_str().unwrap().contains("12:0▸1"), "{told}");
    assert!(told["hints"][0].as_str().unwrap().contains("time"), "{told}");
    let text = String::from_utf8(explain(&a, &b, &[]).stdout).unwrap();
    assert!(text.contains("they part in messages[0] (system)") && text.contains("hint: `12:01`"), "{text}");
}

#[test]
fn equal_requests_are_said_to_be_equal() {
    let a = chat("Be kind.", "Hello");
    let told = report(&a, &a);
    assert_eq!((&told["computed_tokens"], &told["hints"]), (&json!(0), &json!([])));
    let text = String::from_utf8(explain(&a, &a, &[]).stdout).unwrap();
    assert!(text.contains("they are the same prompt"), "{text}");
}

#[test]
fn nonce_lines_and_the_order_of_tools_are_seen_through() {
    let line = |nonce: &str| chat(&format!("x-anthropic-billing-header: cch={nonce};\nBe kind."), "Hello");
    let told = report(&line("1a"), &line("2b"));
    assert_eq!(told["computed_tokens"], 0);
    assert!(told["hints"][0].as_str().unwrap().contains("cache.nonce_lines"));
    let salted = |salt: &str| {
        let mut body = chat("Be kind.", "Hello");
        body["cache_salt"] = salt.into();
        body
    };
    assert!(report(&salted("a"), &salted("b"))["hints"].to_string().contains("salts differ"));
    let told = report(&tools(["a", "b"]), &tools(["b", "a"]));
    assert!(told["hints"].to_string().contains("another order"), "{told}");
    let told = report(&tools(["a", "b"]), &tools(["a", "c"]));
    assert!(told["hints"].to_string().contains("the tools differ"), "{told}");
}

#[test]
fn what_cannot_be_read_is_named() {
    let output = explain(&json!({"messages": []}), &chat("a", "b"), &[]);
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && message.contains("a.json") && message.contains("messages"),
        "{message}"
    );
}
