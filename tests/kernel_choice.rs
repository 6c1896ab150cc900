//! `GREENROOM_CPU` through the program: each name is taken or refused with the reason, before and at a model's load.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::{Command, Output};

use greenroom::model::cpu::SimdPath;

fn greenroom(home: &Path, forced: Option<&str>, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_greenroom"));
    command.args(args).env("GREENROOM_HOME", home).env("GREENROOM__HTTP__PORT", "0").env("NO_COLOR", "1");
    match forced {
        Some(name) => command.env("GREENROOM_CPU", name),
        None => command.env_remove("GREENROOM_CPU"),
    };
    command.output().unwrap()
}

/// What `doctor` says about the kernels: whether they are right, and which.
fn doctor(forced: Option<&str>) -> (bool, String) {
    let home = tempfile::tempdir().unwrap();
    let text = String::from_utf8(greenroom(home.path(), forced, &["doctor"]).stdout).unwrap();
    let line = text.lines().find(|line| line.split_whitespace().nth(1) == Some("kernels")).unwrap();
    let (verdict, rest) = line.split_once("kernels").unwrap();
    (verdict.trim() == "ok", rest.trim().to_owned())
}

/// An answer of a tiny model on the CPU, or what went wrong.
fn answer(forced: Option<&str>) -> Result<String, String> {
    let home = tempfile::tempdir().unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/gguf-llama-q4_1/llama-q4_1.gguf");
    let args = ["run", model.to_str().unwrap(), "hello", "--device", "cpu", "--max-tokens", "8"];
    let output = greenroom(home.path(), forced, &[&args[..], &["--temperature", "0"]].concat());
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

#[test]
fn each_path_is_taken_by_name_or_refused_with_the_reason() {
    let free = answer(None).unwrap();
    assert!(!free.trim().is_empty());
    let best = SimdPath::choose(None).unwrap().name();
    for unset in [None, Some("")] {
        assert_eq!(doctor(unset), (true, best.to_owned()));
    }
    for path in SimdPath::ALL {
        let name = path.name();
        let (fine, line) = doctor(Some(name));
        assert_eq!(fine, path.is_supported(), "{line}");
        match answer(Some(name)) {
            Ok(text) => {
                assert!(path.is_supported());
                assert_eq!(line, name);
                assert_eq!(text, free, "all paths give the same bits");
            }
            Err(message) => {
                assert!(!path.is_supported(), "{message}");
                let reason = format!("GREENROOM_CPU={name}: this processor lacks");
                assert!(message.contains(&reason) && line.contains(&reason), "{message} / {line}");
            }
        }
    }
}

#[test]
fn a_name_that_is_none_is_refused_with_those_that_are() {
    let (fine, line) = doctor(Some("mmx"));
    let message = answer(Some("mmx")).unwrap_err();
    assert!(!fine);
    for text in [line, message] {
        assert!(text.contains("GREENROOM_CPU=mmx"), "{text}");
        for path in SimdPath::ALL {
            assert!(text.contains(path.name()), "{} in {text}", path.name());
        }
    }
}
