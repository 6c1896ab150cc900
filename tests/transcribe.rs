//! `greenroom transcribe`, as a person uses it.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a test")]

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

/// A µ-law sample (ITU-T G.711).
fn mu_law(sample: i16) -> u8 {
    let sign = if sample < 0 { 0x80 } else { 0 };
    let magnitude = (i32::from(sample).abs() + 132).min(32_635);
    let exponent = (magnitude.ilog2() - 7).min(7);
    let mantissa = (magnitude >> (exponent + 3)) & 0x0f;
    !(sign | (exponent as u8) << 4 | mantissa as u8)
}

/// `minutes` of the minute that is there, as a telephone has them: 8 kHz, µ-law.
fn telephone(minutes: usize) -> Vec<u8> {
    let samples = common::samples("long-60s.wav");
    let minute: Vec<u8> = samples
        .chunks_exact(2)
        .map(|pair| mu_law((f32::midpoint(pair[0], pair[1]) * 32_767.0) as i16))
        .collect();
    let size = (minute.len() * minutes) as u32;
    let mut wav =
        b"RIFF\xff\xff\xff\xffWAVEfmt \x12\0\0\0\x07\0\x01\0\x40\x1f\0\0\x40\x1f\0\0\x01\0\x08\0\0\0data"
            .to_vec();
    wav.extend_from_slice(&size.to_le_bytes());
    wav.extend(minute.repeat(minutes));
    wav
}

/// What a recording comes to, and the most memory that it took, in bytes.
#[cfg(target_os = "linux")]
fn heard_and_peak(wav: &[u8]) -> (serde_json::Value, usize) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("talk.wav");
    std::fs::write(&file, wav).unwrap();
    let model = common::speech_model("whisper-tiny.en");
    let mut child = Command::new(env!("CARGO_BIN_EXE_greenroom"))
        .args(["transcribe", "--format", "verbose-json"])
        .arg(&file)
        .arg("--model")
        .arg(model)
        .args(["--output".as_ref(), folder.path().as_os_str()])
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    while child.try_wait().unwrap().is_none() {
        let status = std::fs::read_to_string(&status).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<usize>().ok());
        peak = peak.max(kib.unwrap_or(0) * 1024);
        std::thread::sleep(std::time::Duration::from_millis(200));
    }
    let json = std::fs::read(folder.path().join("talk.json")).unwrap();
    (serde_json::from_slice(&json).unwrap(), peak)
}

#[test]
#[cfg(target_os = "linux")]
#[ignore = "takes nine minutes on two cores: make test-full"]
fn three_hours_are_heard_in_the_memory_of_five_minutes_and_their_file() {
    let (short, long) = (telephone(5), telephone(180));
    let (five, least) = heard_and_peak(&short);
    let (three, most) = heard_and_peak(&long);
    let words = |body: &serde_json::Value| body["text"].as_str().unwrap().split_whitespace().count();
    println!("{} and {} words, {} and {} MiB", words(&five), words(&three), least >> 20, most >> 20);
    let (seconds, minutes) = (three["duration"].as_f64().unwrap(), five["duration"].as_f64().unwrap() * 36.0);
    assert!((seconds - minutes).abs() < 1.0 && seconds > 10_800.0, "{seconds} s");
    // Where windows begin differs, and a word here and there with it.
    assert!(words(&three).abs_diff(36 * words(&five)) * 10 < words(&three), "{} words", words(&three));
    let segments = three["segments"].as_array().unwrap();
    let time = |segment: &serde_json::Value, key: &str| segment[key].as_f64().unwrap();
    assert!(segments.windows(2).all(|pair| time(&pair[0], "start") <= time(&pair[1], "start")));
    assert!(time(segments.last().unwrap(), "end") > seconds - 20.0);
    // A few windows, and what is known of where speech is.
    let more = (most - least).saturating_sub(long.len() - short.len());
    assert!(more < 64 << 20, "{} MiB more", more >> 20);
}
