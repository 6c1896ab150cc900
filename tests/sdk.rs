//! The clients that people use, against the real binary and the demo model:
//! the official Python client, and the snippets of the README as they stand.
//!
//! A part whose program is not installed says so loudly and passes: without
//! `GREENROOM_SDK_PYTHON` (the Makefile sets it) or Node. Without the demo model it fails.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![cfg(all(feature = "cpu", unix))]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

mod common;

struct Service {
    child: Child,
    address: String,
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The server with a model, once it is ready.
fn service(model: &Path) -> Service {
    let mut command = Command::new(env!("CARGO_BIN_EXE_greenroom"));
    command.arg("serve").arg(model).args(["--port", "0"]);
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut address = String::new();
    for line in BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok) {
        if let Some((_, found)) = line.split_once("http://").filter(|_| line.starts_with("address")) {
            address = found.trim().to_owned();
        }
        if line.starts_with("ready") {
            return Service { child, address };
        }
    }
    panic!("the server ended before it was ready: {}", child.wait().unwrap());
}

fn skipped(reason: &str) {
    // Past the harness' capture: a test that did not run must be seen.
    let _ = writeln!(std::io::stderr(), "\nSKIPPED: {reason}\n");
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sdk").join(name)
}

/// A snippet of the README, talking to this server instead of the usual port.
fn snippet(folder: &Path, name: &str, address: &str) -> PathBuf {
    let text = std::fs::read_to_string(script(name)).unwrap();
    let readme = include_str!("../README.md");
    assert!(readme.contains(text.trim()), "the README does not show {name} as it is run");
    // A small model may never end its answer: without a limit the snippet runs to the end of the
    // context, and a client that waits for the whole answer gives up before.
    assert!(text.contains("max_tokens"), "{name} asks for an answer without end");
    let path = folder.join(name);
    std::fs::write(&path, text.replace("127.0.0.1:8080", address)).unwrap();
    path
}

fn run(program: impl AsRef<std::ffi::OsStr>, args: &[&std::ffi::OsStr]) -> String {
    let output = Command::new(program).args(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn the_official_python_client_is_served() {
    let Some(python) = std::env::var_os("GREENROOM_SDK_PYTHON") else {
        return skipped("GREENROOM_SDK_PYTHON names no interpreter with the openai package");
    };
    let service = service(&common::demo_model());
    let base = format!("http://{}/v1", service.address);
    let said = run(&python, &[script("openai_client.py").as_os_str(), base.as_ref()]);
    assert!(said.contains("is served"), "{said}");
    let folder = tempfile::tempdir().unwrap();
    let path = snippet(folder.path(), "readme_stream.py", &service.address);
    assert!(!run(&python, &[path.as_os_str()]).trim().is_empty());
}

#[test]
fn anthropics_python_client_is_served() {
    let Some(python) = std::env::var_os("GREENROOM_SDK_PYTHON") else {
        return skipped("GREENROOM_SDK_PYTHON names no interpreter with the anthropic package");
    };
    let service = service(&common::demo_model());
    let base = format!("http://{}", service.address);
    let said = run(&python, &[script("anthropic_client.py").as_os_str(), base.as_ref()]);
    assert!(said.contains("client is served"), "{said}");
}

#[test]
fn the_official_python_client_is_heard() {
    let Some(python) = std::env::var_os("GREENROOM_SDK_PYTHON") else {
        return skipped("GREENROOM_SDK_PYTHON names no interpreter with the openai package");
    };
    let service = service(&common::speech_model("whisper-tiny.en"));
    let base = format!("http://{}/v1", service.address);
    let clip = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/audio/jfk.wav");
    let said = run(&python, &[script("openai_audio.py").as_os_str(), base.as_ref(), clip.as_os_str()]);
    assert!(said.contains("is heard"), "{said}");
}

#[test]
fn the_readmes_javascript_runs() {
    if Command::new("node").arg("--version").output().is_err() {
        return skipped("node is not installed");
    }
    let service = service(&common::demo_model());
    let folder = tempfile::tempdir().unwrap();
    let path = snippet(folder.path(), "readme_fetch.mjs", &service.address);
    assert!(!run("node", &[path.as_os_str()]).trim().is_empty());
}
