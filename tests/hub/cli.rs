//! The program's side: `pull`, and a hub id given to `serve`.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use super::server::{COMMIT, HubServer};

fn greenroom(home: &Path, server: &HubServer, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_greenroom"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy().into_owned();
        if text.starts_with("GREENROOM__") || text.starts_with("HF_") {
            command.env_remove(name);
        }
    }
    command.args(args).stdin(Stdio::null());
    command.env("GREENROOM_HOME", home).env("HF_HOME", home.join("hf")).env("HF_ENDPOINT", server.endpoint());
    command
}

fn run(command: &mut Command) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn pull_says_where_the_model_is_and_what_it_fetched() {
    let (home, server) = (tempfile::tempdir().unwrap(), HubServer::start());
    server.small("config.json", "{}");
    server.small("tokenizer.json", "{}");
    server.large("model.safetensors", vec![1; 3000]);
    let (code, out, err) = run(&mut greenroom(home.path(), &server, &["pull", "org/name"]));
    let path = home.path().join("hf/hub/models--org--name/snapshots").join(COMMIT);
    assert_eq!((code, out.trim()), (Some(0), &*path.to_string_lossy()), "{err}");
    assert!(err.contains("model.safetensors  2.9 KiB") && err.contains("fetched"), "{err}");
    let (code, _, err) =
        run(greenroom(home.path(), &server, &["pull", "org/name"]).env("HF_HUB_OFFLINE", "1"));
    assert!(code == Some(78) && err.contains("offline"), "{err}");
    let (code, _, err) = run(&mut greenroom(home.path(), &server, &["pull", "org/name", "--file", "*.gguf"]));
    assert!(code == Some(64) && err.contains("--file *.gguf"), "{err}");
    let (code, _, err) = run(&mut greenroom(home.path(), &server, &["pull", "no-slash"]));
    assert!(code == Some(64) && err.contains("ORG/NAME") && err.contains("demo"), "{err}");
}

#[test]
fn an_id_given_to_run_is_pulled_unless_that_is_not_wanted() {
    let (home, server) = (tempfile::tempdir().unwrap(), HubServer::start());
    server.small("config.json", r#"{"model_type": "abacus"}"#);
    server.small("tokenizer.json", "{}");
    server.large("model.safetensors", vec![1; 3000]);
    let args = ["run", "org/name", "hello"];
    let (code, _, err) = run(greenroom(home.path(), &server, &args).env("HF_HUB_OFFLINE", "1"));
    assert!(code == Some(78) && err.contains("greenroom pull org/name"), "{err}");
    let (code, _, err) =
        run(greenroom(home.path(), &server, &args).env("GREENROOM__HUB__AUTO_PULL", "false"));
    assert!(code == Some(78) && err.contains("greenroom pull org/name"), "{err}");
    assert!(server.requests().is_empty());
    let (code, _, err) = run(&mut greenroom(home.path(), &server, &args));
    assert!(code == Some(78) && err.contains("pulling it"), "pulled, then found to be no model: {err}");
    let asked = server.requests().len();
    let (code, _, _) = run(&mut greenroom(home.path(), &server, &args));
    assert_eq!((code, server.requests().len()), (Some(78), asked), "what is here needs nobody");
}

#[cfg(feature = "cpu")]
#[test]
fn a_pulled_model_answers() {
    let (home, server) = (tempfile::tempdir().unwrap(), HubServer::start());
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/llama");
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        server.large(&entry.file_name().to_string_lossy(), std::fs::read(entry.path()).unwrap());
    }
    let args = ["run", "org/tiny-llama", "hello", "--max-tokens", "2", "--device", "cpu"];
    let (code, _, err) = run(&mut greenroom(home.path(), &server, &args));
    // A tiny model without a template: it loads, and says that it cannot chat.
    assert!(code == Some(0) || err.contains("`tiny-llama`"), "{code:?}: {err}");
}
