//! `greenroom render` through the binary.

#![allow(clippy::expect_used, reason = "tests fail by panicking")]

mod common;

use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::{data, json};

fn render(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_greenroom"));
    command.arg("render").args(args).stdin(Stdio::null()).output().expect("runs")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

fn file(folder: &Path, name: &str, content: &[u8]) -> String {
    let path = folder.join(name);
    std::fs::write(&path, content).expect("writes");
    path.to_str().expect("a path").to_owned()
}

#[test]
fn it_prints_exactly_what_the_reference_prints() {
    let folder = tempfile::tempdir().expect("a folder");
    let conversations = json("chat-templates/conversations.json");
    for name in
        ["meta-llama-Llama-3.2-3B-Instruct", "Qwen-Qwen3-0.6B", "mistralai-Mistral-Nemo-Instruct-2407"]
    {
        let golden = json(&format!("chat-templates/golden/{name}.json"));
        let special = |key: &str| golden["special_tokens"][key].as_str().expect("a text").to_owned();
        let template = data(&format!("chat-templates/{name}.jinja"));
        let mut compared = 0;
        for (case, expected) in golden["results"].as_object().expect("results").iter().take(8) {
            let variables = file(folder.path(), "v.json", conversations[case].to_string().as_bytes());
            let (bos, eos) = (special("bos_token"), special("eos_token"));
            let got = render(&[
                template.to_str().expect("a path"),
                &variables,
                &format!("--bos={bos}"),
                &format!("--eos={eos}"),
                "--now",
                golden["now"].as_str().unwrap_or("2026-01-15T12:34:56Z"),
            ]);
            if let Some(ok) = expected["ok"].as_str() {
                assert_eq!((got.status.code(), text(&got.stdout)), (Some(0), ok), "{name}, {case}");
            } else if let Some(raised) = expected["raised"].as_str() {
                assert_eq!((got.status.code(), text(&got.stdout)), (Some(1), ""), "{name}, {case}");
                assert!(text(&got.stderr).contains(raised), "{name}, {case}: {}", text(&got.stderr));
            }
            compared += 1;
        }
        assert_eq!(compared, 8);
    }
}

#[test]
fn any_variable_is_handed_on_and_nothing_is_added() {
    let folder = tempfile::tempdir().expect("a folder");
    let template = file(
        folder.path(),
        "t.jinja",
        b"{{ bos_token }}{{ colour }}{{ add_generation_prompt }}{{ strftime_now('%F %T') }}",
    );
    let variables = file(folder.path(), "v.json", br#"{"colour": ["blue"], "add_generation_prompt": true}"#);
    let got = render(&[&template, &variables, "--bos", "<s>", "--now", "2024-02-29"]);
    assert_eq!(text(&got.stdout), "<s>['blue']True2024-02-29 00:00:00", "{}", text(&got.stderr));
    for wrong in ["2023-02-29", "yesterday", "2026-13-01", "2026-01-15T25:00:00Z", "1969-01-01", ""] {
        let got = render(&[&template, &variables, "--now", wrong]);
        assert_eq!(got.status.code(), Some(64), "{wrong}");
        assert!(text(&got.stderr).contains("--now"), "{}", text(&got.stderr));
    }
}

#[test]
fn what_cannot_be_read_is_named_with_its_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let template = file(folder.path(), "t.jinja", b"{{ messages[0].content }}");
    let variables = file(folder.path(), "v.json", br#"{"messages": [{"content": "x"}]}"#);
    let fails = |template: &str, variables: &str, words: &[&str]| {
        let got = render(&[template, variables]);
        assert_eq!((got.status.code(), text(&got.stdout)), (Some(1), ""));
        for word in words {
            assert!(text(&got.stderr).contains(word), "{word}: {}", text(&got.stderr));
        }
    };
    fails("/nowhere.jinja", &variables, &["/nowhere.jinja"]);
    fails(&template, "/nowhere.json", &["/nowhere.json"]);
    let broken = file(folder.path(), "broken.json", b"{\n  \"messages\": oops\n}");
    fails(&template, &broken, &["broken.json", "line 2", "column 15"]);
    let list = file(folder.path(), "list.json", b"[]");
    fails(&template, &list, &["list.json", "object"]);
    let bytes = file(folder.path(), "bytes.jinja", b"ab\xff");
    fails(&bytes, &variables, &["bytes.jinja", "byte 2"]);
    let open = file(folder.path(), "open.jinja", b"fine\n{% if x %}");
    fails(&open, &variables, &["open.jinja", ":2"]);
    let raising = file(folder.path(), "raising.jinja", b"{{ raise_exception('Only so.') }}");
    fails(&raising, &variables, &["greenroom: Only so."]);
}
