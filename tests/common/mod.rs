//! Where tests find the demo model and the test data.
#![allow(
    dead_code,
    clippy::expect_used,
    reason = "every test binary uses a part of this and fails by panicking"
)]

use std::path::{Path, PathBuf};

/// The demo model's file.
const DEMO: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// The demo model; without it a test that asks for it fails and says how to get it.
pub fn demo_model() -> PathBuf {
    let path = std::env::var_os("GREENROOM_DEMO_MODEL")
        .map_or_else(|| home().join("models").join(DEMO), PathBuf::from);
    assert!(path.is_file(), "the demo model is not at {}: run `make model` first", path.display());
    path
}

/// A file in Greenroom's data folder that a script of `native/` fetches for the long tests.
pub fn fetched(name: &str) -> PathBuf {
    let path = home().join(name);
    assert!(path.is_file(), "{} is missing: `make test-full` fetches it", path.display());
    path
}

fn home() -> PathBuf {
    if let Some(home) = std::env::var_os("GREENROOM_HOME") {
        return home.into();
    }
    let user = PathBuf::from(std::env::var_os("HOME").expect("HOME is set"));
    let below = if cfg!(target_os = "macos") {
        "Library/Application Support/greenroom"
    } else {
        ".local/share/greenroom"
    };
    user.join(below)
}

/// A file or folder below `tests/data`.
pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// A JSON file below `tests/data`.
pub fn json(name: &str) -> serde_json::Value {
    let path = data(name);
    let text = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).expect("test data is JSON")
}

/// A copy of a tiny checkpoint that a test may spoil.
pub fn tiny_copy(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for file in std::fs::read_dir(data("tiny").join(name)).expect("test data") {
        let file = file.expect("an entry").path();
        let name = file.file_name().expect("a name");
        if name != "golden.safetensors" {
            std::fs::copy(&file, folder.path().join(name)).expect("copies");
        }
    }
    folder
}

/// Changes a JSON file.
pub fn edit_json(path: &Path, edit: impl FnOnce(&mut serde_json::Value)) {
    let text = std::fs::read(path).expect("reads");
    let mut value = serde_json::from_slice(&text).expect("is JSON");
    edit(&mut value);
    std::fs::write(path, value.to_string()).expect("writes");
}

/// The cases of a tokenizer's golden file below `tests/data/tokenizer`: all of the tricky strings.
pub fn token_cases(name: &str) -> Vec<serde_json::Value> {
    let golden = json(&format!("tokenizer/{name}.json"));
    let cases = golden["cases"].as_array().expect("cases").clone();
    assert!(cases.len() >= 40, "{name}");
    cases
}

/// A speech model that `make speech-model` fetches (`whisper-tiny.en`), or `make test-full` (`whisper-base`).
pub fn speech_model(name: &str) -> PathBuf {
    let path = home().join("models").join(name);
    assert!(path.is_dir(), "{name} is not at {}: run `make speech-model` first", path.display());
    path
}

/// Samples of a 16-bit mono WAV file at 16 kHz below `tests/data/audio`.
pub fn samples(name: &str) -> Vec<f32> {
    let bytes = std::fs::read(data("audio").join(name)).expect("a clip");
    let at = bytes.windows(4).position(|four| four == b"data").expect("a data chunk") + 8;
    bytes[at..]
        .chunks_exact(2)
        .map(|pair| f32::from(i16::from_le_bytes([pair[0], pair[1]])) / 32768.0)
        .collect()
}
