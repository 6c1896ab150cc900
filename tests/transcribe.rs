//! `greenroom transcribe`, as a person uses it.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test")]

mod common;

use std::io::Write;
use std::process::{Command, Output, Stdio};

fn transcribe(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_greenroom"));
    command.arg("transcribe").args(args).arg("--model").arg(common::speech_model("whisper-tiny.en"));
    command.output().unwrap()
}

fn clip(name: &str) -> String {
    common::data("audio").join(name).display().to_string()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn writes_text_subtitles_and_json() {
    let out = transcribe(&[&clip("jfk.mp3")]);
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert!(text(&out.stdout).contains("ask what you can do for your country"), "{}", text(&out.stdout));
    let out = transcribe(&[&clip("jfk.webm"), "--format", "srt"]);
    assert!(text(&out.stdout).starts_with("1\n00:00:00,"), "{}", text(&out.stdout));
    let out = transcribe(&[&clip("jfk.flac"), "--format", "verbose-json", "--words"]);
    let body: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(body["duration"], 11.0);
    let words = body["words"].as_array().unwrap();
    let americans =
        words.iter().find(|word| word["word"].as_str().unwrap().starts_with("Americans")).unwrap();
    let (start, end) = (americans["start"].as_f64().unwrap(), americans["end"].as_f64().unwrap());
    assert!(start <= 1.8 && 1.8 <= end, "{americans}");
}

#[test]
fn reads_stdin_and_writes_a_file_for_each_recording() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_greenroom"))
        .args(["transcribe", "-", "--model"])
        .arg(common::speech_model("whisper-tiny.en"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let bytes = std::fs::read(clip("ps-goforward.wav")).unwrap();
    child.stdin.take().unwrap().write_all(&bytes).unwrap();
    assert_eq!(text(&child.wait_with_output().unwrap().stdout), "Go forward 10 meters.\n");
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().display().to_string();
    let out = transcribe(&[
        &clip("ps-goforward.wav"),
        &clip("ps-something.wav"),
        "--format",
        "vtt",
        "--output",
        &to,
    ]);
    assert!(out.status.success() && out.stdout.is_empty(), "{}", text(&out.stderr));
    let written = std::fs::read_to_string(folder.path().join("ps-something.vtt")).unwrap();
    assert!(written.starts_with("WEBVTT\n\n") && written.contains("do something"), "{written}");
}

#[test]
fn says_what_is_wrong_with_a_file_and_goes_on_with_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let broken = folder.path().join("talk.mp3");
    std::fs::write(&broken, b"%PDF-1.7 not audio at all, whatever the name says").unwrap();
    let out =
        transcribe(&[&broken.display().to_string(), &clip("silence-5s.wav"), &clip("ps-goforward.wav")]);
    assert_eq!(out.status.code(), Some(1));
    assert!(text(&out.stderr).contains("talk.mp3: "), "{}", text(&out.stderr));
    assert!(text(&out.stdout).contains("Go forward 10 meters."), "{}", text(&out.stdout));
}

#[test]
fn refuses_what_an_english_model_cannot_do() {
    for (args, named) in [
        (["--language", "de"], "--language"),
        (["--language", "klingon"], "klingon"),
        (["--beam-size", "99"], "--beam-size"),
    ] {
        let out = transcribe(&[&clip("jfk.wav"), args[0], args[1]]);
        assert_eq!(out.status.code(), Some(64), "{}", text(&out.stderr));
        assert!(text(&out.stderr).contains(named), "{}", text(&out.stderr));
    }
    let out = transcribe(&[&clip("jfk.wav"), "--translate"]);
    assert!(text(&out.stderr).contains("--translate"), "{}", text(&out.stderr));
}
