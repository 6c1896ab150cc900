//! `greenroom bench` as a user runs it: against any server, and in process.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![cfg(any(feature = "fake", feature = "cpu"))]

use std::process::{Command, Output, Stdio};

use serde_json::Value;

#[cfg(feature = "fake")]
mod harness;
#[cfg(feature = "fake")]
mod wire;

const SHORT: [&str; 4] = ["--rounds", "2", "--gen", "8"];

fn bench(args: &[&str]) -> Output {
    let home = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_greenroom"));
    command.arg("bench").args(SHORT).args(args);
    if !args.contains(&"--concurrency") {
        command.args(["--concurrency", "1,3"]);
    }
    command.env("GREENROOM_HOME", home.path());
    command.stdin(Stdio::null()).output().unwrap()
}

/// Every figure there, and none that cannot be.
fn check(report: &Value, prompt: std::ops::RangeInclusive<u64>) {
    let tokens = report["prefill"]["tokens"].as_u64().unwrap();
    assert!(prompt.contains(&tokens), "{report:#}");
    assert!(report["prefill"]["tokens_per_second"].as_f64().unwrap() > 0.0, "{report:#}");
    let clients: Vec<u64> =
        report["decode"].as_array().unwrap().iter().map(|burst| burst["clients"].as_u64().unwrap()).collect();
    assert_eq!(clients, [1, 3]);
    for burst in report["decode"].as_array().unwrap() {
        let figure = |name: &str| burst[name].as_f64().unwrap();
        assert!(figure("total_tokens_per_second") > 0.0 && figure("first_token_ms") > 0.0, "{report:#}");
        assert!(figure("gap_p50_ms") <= figure("gap_p95_ms") && figure("gap_p95_ms") <= figure("gap_p99_ms"));
    }
}

#[cfg(feature = "fake")]
#[test]
fn any_server_is_measured_by_its_address() {
    let server = harness::Server::start(greenroom::model::fake::Script::new().repeat("e", "word "));
    let url = format!("http://{}/v1/", server.address);
    let output = bench(&["--url", &url, "--json", "--prompt", "200", "--context", "400"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    // The scripted engine has a token a byte: the prompt is measured, not guessed.
    check(&report, 150..=250);
    for burst in report["decode"].as_array().unwrap() {
        let tokens = burst["prompt_tokens"].as_u64().unwrap();
        assert!((300..=500).contains(&tokens), "{report:#}");
    }
    assert!(report["peak_memory"].is_null(), "that is the other process' own");
}

#[cfg(feature = "fake")]
#[test]
fn what_a_server_says_is_said() {
    let server = harness::Server::start(greenroom::model::fake::Script::new());
    let url = format!("http://{}", server.address);
    let output = bench(&["gpt-5", "--url", &url]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("404") && said.contains("gpt-5"), "{said}");
}

#[test]
fn wrong_flags_are_named() {
    for (args, named) in [
        (["--concurrency", "0"], "--concurrency: 0"),
        (["--prompt", "3"], "--prompt: 3"),
        (["--context", "1"], "--context: 1"),
        (["--url", "localhost:1"], "--url: localhost:1"),
    ] {
        let output = bench(&args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{said}");
        assert!(said.contains(named), "{said}");
    }
}

#[cfg(feature = "cpu")]
#[test]
fn a_model_is_measured_in_process() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tiny/llama");
    let args = [model, "--device", "cpu", "--prompt", "64"];
    let output = bench(&[&args[..], &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    check(&serde_json::from_slice(&output.stdout).unwrap(), 32..=96);
    let table = bench(&args);
    let text = String::from_utf8_lossy(&table.stdout);
    assert!(text.contains("load average") && text.contains("clients"), "{text}");
}
