//! The command line of the real binary: help, mistakes, exit codes. Nothing
//! here needs a model.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]

use std::path::Path;
use std::process::{Command, Output, Stdio};

/// A run with a home of its own and no settings from outside.
fn greenroom(home: &Path, args: &[&str]) -> Output {
    command(home, args).output().unwrap()
}

fn command(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_greenroom"));
    command.args(args).env("GREENROOM_HOME", home).stdin(Stdio::null());
    command.env("HF_HOME", home.join("hf")).env_remove("HF_HUB_CACHE").env("HF_HUB_OFFLINE", "1");
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("GREENROOM__") {
            command.env_remove(name);
        }
    }
    command
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn help_shows_examples_and_version_the_version() {
    let home = tempfile::tempdir().unwrap();
    for args in [&["--help"][..], &["serve", "--help"], &["run", "--help"], &["pull", "--help"]] {
        let output = greenroom(home.path(), args);
        assert_eq!(output.status.code(), Some(0));
        assert!(stdout(&output).contains("Examples:"), "{}", stdout(&output));
    }
    let output = greenroom(home.path(), &["--version"]);
    assert_eq!(
        (output.status.code(), stdout(&output).trim()),
        (Some(0), concat!("greenroom ", env!("CARGO_PKG_VERSION")))
    );
}

#[test]
fn unknown_flags_are_usage_errors() {
    let home = tempfile::tempdir().unwrap();
    for args in [
        &["serve", "--prot", "1"][..],
        &["serve", "--port", "99999"],
        &["frobnicate"],
        &[],
        &["serve", "--device", "abacus"],
    ] {
        let output = greenroom(home.path(), args);
        assert_eq!(output.status.code(), Some(64), "{args:?}: {}", stderr(&output));
        assert!(!output.stderr.is_empty());
    }
}

#[test]
fn a_model_that_is_not_there_is_named_with_the_way_to_get_one() {
    let home = tempfile::tempdir().unwrap();
    let output = greenroom(home.path(), &["serve"]);
    assert_eq!(output.status.code(), Some(78));
    assert!(stderr(&output).contains("greenroom pull demo"), "{}", stderr(&output));
    let output = greenroom(home.path(), &["serve", "/nowhere/model.gguf"]);
    assert_eq!(output.status.code(), Some(78));
    assert!(stderr(&output).contains("/nowhere/model.gguf: no such file"), "{}", stderr(&output));
    let output = greenroom(home.path(), &["run", "org/model", "hello"]);
    assert_eq!(output.status.code(), Some(78));
    assert!(stderr(&output).contains("greenroom pull org/model"), "{}", stderr(&output));
}

#[test]
fn wrong_settings_are_78_and_all_named_but_0_under_launchd() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("wrong.toml");
    std::fs::write(&file, "[http]\nworkers = 0\n\n[cpu]\nkv = \"f8\"\n").unwrap();
    let file = file.to_str().unwrap();
    let output = greenroom(home.path(), &["serve", "--config", file]);
    assert_eq!(output.status.code(), Some(78));
    let text = stderr(&output);
    assert!(text.contains("wrong.toml:2: http.workers") && text.contains("wrong.toml:5: cpu.kv"), "{text}");
    let output = greenroom(home.path(), &["serve", "--config", file, "--service", "systemd"]);
    assert_eq!(output.status.code(), Some(78));
    let output = greenroom(home.path(), &["serve", "--config", file, "--service", "launchd"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(stderr(&output).contains("wrong.toml:2"), "it is logged all the same");
    let output = greenroom(home.path(), &["serve", "--service", "launchd", "--prot"]);
    assert_eq!(output.status.code(), Some(0));
    let output = command(home.path(), &["serve"]).env("GREENROOM__HTTP__PORT", "many").output().unwrap();
    assert_eq!(output.status.code(), Some(78));
    assert!(stderr(&output).contains("GREENROOM__HTTP__PORT"), "{}", stderr(&output));
    let output = greenroom(home.path(), &["serve", "--config", "/nowhere.toml"]);
    assert_eq!(output.status.code(), Some(78));
}

#[test]
fn a_log_level_that_is_none_is_78_and_named() {
    let home = tempfile::tempdir().unwrap();
    for args in [&["serve", "--log-level", "inof"][..], &["run", "x.gguf", "hi", "--log-level", "warn,inof"]]
    {
        let output = greenroom(home.path(), args);
        assert_eq!(output.status.code(), Some(78), "{args:?}: {}", stderr(&output));
        let text = stderr(&output);
        assert!(text.contains("--log-level") && text.contains("`inof`") && text.contains("info"), "{text}");
    }
}

#[test]
fn flags_out_of_range_are_64_and_named_before_a_model_is_looked_for() {
    let home = tempfile::tempdir().unwrap();
    for (flag, value) in [
        ("--top-p", "7"),
        ("--top-p", "nan"),
        ("--top-p", "-0.1"),
        ("--temperature", "nan"),
        ("--temperature", "-3"),
        ("--temperature", "inf"),
        ("--max-tokens", "0"),
        ("--max-tokens", "-1"),
    ] {
        let output = greenroom(home.path(), &["run", "absent.gguf", "hi", flag, value]);
        assert_eq!(output.status.code(), Some(64), "{flag} {value}: {}", stderr(&output));
        assert!(stderr(&output).contains(flag) || flag == "--max-tokens", "{}", stderr(&output));
    }
    let args = ["run", "absent.gguf", "hi", "--top-p", "1", "--temperature", "0", "--max-tokens", "1"];
    assert_eq!(greenroom(home.path(), &args).status.code(), Some(78), "only the model is missing");
}

#[test]
fn settings_in_the_home_folder_are_read() {
    let home = tempfile::tempdir().unwrap();
    std::fs::write(home.path().join("greenroom.toml"), "[http]\nnonsense = 1\n").unwrap();
    let output = greenroom(home.path(), &["serve"]);
    assert_eq!(output.status.code(), Some(78));
    assert!(stderr(&output).contains("greenroom.toml:2: http.nonsense"), "{}", stderr(&output));
}

#[test]
fn an_empty_pipe_is_no_prompt() {
    let home = tempfile::tempdir().unwrap();
    let output = greenroom(home.path(), &["run", "x.gguf"]);
    assert_eq!(output.status.code(), Some(64));
    assert!(stderr(&output).contains("no prompt"), "{}", stderr(&output));
}

#[test]
fn doctor_says_what_is_wrong_and_how_to_mend_it() {
    let home = tempfile::tempdir().unwrap();
    let run = || command(home.path(), &["doctor"]).env("GREENROOM__HTTP__PORT", "0").output().unwrap();
    let output = run();
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("WRONG  models") && text.contains("greenroom pull demo"), "{text}");
    for name in ["version", "settings", "processor", "memory", "features"] {
        assert!(text.contains(&format!("ok     {name}")), "{name} in {text}");
    }
    // MLX says its version, so a library that loads and is another shows.
    let mlx = text.lines().find(|line| line.starts_with("ok     mlx"));
    assert_eq!(mlx.is_some(), cfg!(feature = "mlx"), "{text}");
    assert!(mlx.is_none_or(|line| line.contains(|c: char| c.is_ascii_digit())), "{text}");
    std::fs::create_dir(home.path().join("models")).unwrap();
    std::fs::write(home.path().join("models/small.gguf"), "").unwrap();
    assert!(stdout(&run()).contains("small.gguf in "));
    let holder = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = holder.local_addr().unwrap().port().to_string();
    let output = command(home.path(), &["doctor"]).env("GREENROOM__HTTP__PORT", &port).output().unwrap();
    assert!(stdout(&output).contains("WRONG  port"), "{}", stdout(&output));
}

/// A folder of models with a tiny one, a damaged file, and one of an unknown family.
fn some_models(home: &Path) -> std::path::PathBuf {
    let models = home.join("models");
    std::fs::create_dir_all(models.join("abacus")).unwrap();
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/gguf-llama-q4_1/llama-q4_1.gguf");
    std::fs::copy(&tiny, models.join("tiny.gguf")).unwrap();
    let bytes = std::fs::read(&tiny).unwrap();
    std::fs::write(models.join("cut.gguf"), &bytes[..bytes.len() / 2]).unwrap();
    std::fs::write(models.join("abacus/config.json"), r#"{"model_type": "abacus\u001b[2J"}"#).unwrap();
    models
}

#[test]
fn models_are_listed_whatever_is_wrong_with_some() {
    let home = tempfile::tempdir().unwrap();
    let output = greenroom(home.path(), &["models"]);
    assert!(stdout(&output).contains("greenroom pull demo"), "{}", stdout(&output));
    some_models(home.path());
    let output = greenroom(home.path(), &["models"]);
    let text = stdout(&output);
    let line = |name: &str| text.lines().find(|line| line.starts_with(name)).unwrap_or_default().to_owned();
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(line("tiny.gguf").contains("llama") && line("tiny.gguf").ends_with("yes"), "{text}");
    assert!(line("cut.gguf").contains("no: ") && line("cut.gguf").contains("cut short"), "{text}");
    assert!(line("abacus").contains("no: ") && !text.contains('\u{1b}'), "{text}");
    let output = greenroom(home.path(), &["models", "--json"]);
    let list: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let tiny = list.as_array().unwrap().iter().find(|model| model["id"] == "tiny.gguf").unwrap();
    assert_eq!((&tiny["supported"], &tiny["complete"]), (&true.into(), &true.into()));
    assert_eq!((&tiny["context"], &tiny["memory"]["fits"]), (&2048.into(), &true.into()));
    let small = command(home.path(), &["models"]).env("GREENROOM__ENGINE__MEMORY_MIB", "1").output().unwrap();
    let text = stdout(&small);
    assert!(text.lines().any(|line| line.starts_with("tiny.gguf") && !line.ends_with("yes")), "{text}");
}

#[test]
fn inspect_shows_what_a_model_is_made_of() {
    let home = tempfile::tempdir().unwrap();
    let models = some_models(home.path());
    let output = greenroom(home.path(), &["inspect", "tiny.gguf"]);
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    for words in [
        "family       llama",
        "2048 tokens",
        "Q4_1",
        "model.embed_tokens.weight",
        "may be used: fits",
        "special",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert!(!text.contains(".layers.1."), "{text}");
    assert!(stdout(&greenroom(home.path(), &["inspect", "tiny.gguf", "--tensors"])).contains(".layers.1."));
    let output = greenroom(home.path(), &["inspect", "tiny.gguf", "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let tensors = json["details"]["tensors"].as_array().unwrap();
    let bytes: u64 = tensors.iter().map(|tensor| tensor["bytes"].as_u64().unwrap()).sum();
    assert_eq!(json["details"]["memory"]["weights"], bytes);
    let output = greenroom(home.path(), &["inspect", models.join("cut.gguf").to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(78));
    assert!(stdout(&output).contains("cut short"), "{}", stdout(&output));
}
