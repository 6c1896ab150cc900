//! Plays the service manager: the real binary with the real demo model,
//! started, asked, stopped, killed, started again, and started wrongly.
//!
//! Where the demo model is not there, a test that needs it fails and says how to get it.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![cfg(all(feature = "cpu", unix))]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

mod common;
mod wire;
use wire::{Connection, PATIENCE, ask, with};

/// Exact arithmetic: so small a model knows the capital of France only just.
const EXACT: [(&str, &str); 2] = [("GREENROOM__CPU__ACTIVATIONS", "f32"), ("GREENROOM__CPU__KV", "f32")];

/// The binary under supervision.
struct Service {
    child: Child,
    lines: mpsc::Receiver<String>,
    said: String,
}

impl Service {
    fn start(home: &Path, args: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_greenroom"));
        command.arg("serve").args(args).env("GREENROOM_HOME", home);
        command.envs(variables.iter().copied());
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (send, lines) = mpsc::channel();
        let outputs: [Box<dyn Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        for output in outputs {
            let send = send.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    let _ = send.send(line);
                }
            });
        }
        Self { child, lines, said: String::new() }
    }

    /// Waits for a line with this in it.
    fn line(&mut self, mark: &str) -> String {
        loop {
            let line = self
                .lines
                .recv_timeout(PATIENCE)
                .unwrap_or_else(|_| panic!("`{mark}` was not said, only:\n{}", self.said));
            self.said.push_str(&line);
            self.said.push('\n');
            if line.contains(mark) {
                return line;
            }
        }
    }

    /// Waits until it answers; gives its address.
    fn ready(&mut self) -> SocketAddr {
        let line = self.line("http://127.0.0.1:");
        self.line("ready");
        line.rsplit("http://").next().unwrap().trim().parse().unwrap()
    }

    fn signal(&self, name: &str) {
        let status =
            Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()).status().unwrap();
        assert!(status.success());
    }

    /// Waits for the end; gives the exit status and everything that was said.
    fn end(mut self) -> (ExitStatus, String) {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "it does not end:\n{}", self.said);
            // A child has no event to wait for without unsafe code: ask again.
            std::thread::sleep(Duration::from_millis(10));
        };
        let rest: Vec<String> = self.lines.iter().collect();
        (status, std::mem::take(&mut self.said) + &rest.join("\n"))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn chat(host: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// An answer that does not end before it is stopped.
fn endless() -> Value {
    with(ask("Count from one to one thousand."), json!({"stream": true, "ignore_eos": true}))
}

/// Opens a stream and reads until text has come.
fn open_stream(address: SocketAddr) -> Connection {
    let mut connection = Connection::tcp(address);
    connection.write(chat(&address.to_string(), &endless()));
    assert_eq!(connection.read_head().status, 200);
    for _ in 0..3 {
        connection.read_chunk().unwrap();
    }
    connection
}

#[test]
fn it_answers_and_a_stop_ends_streams_properly() {
    let model = common::demo_model();
    let home = tempfile::tempdir().unwrap();
    let model = model.to_str().unwrap();
    let mut service = Service::start(
        home.path(),
        &[model, "--port", "0"],
        &[("GREENROOM__HTTP__DRAIN_S", "1"), EXACT[0], EXACT[1]],
    );
    let address = service.ready();
    let mut connection = Connection::tcp(address);
    connection.write(chat(
        &address.to_string(),
        &with(ask("What is the capital of France?"), json!({"temperature": 0, "max_tokens": 24})),
    ));
    let answer = connection.read_response();
    assert!(answer.text().contains("Paris"), "{}", answer.text());

    let mut stream = open_stream(address);
    service.signal("TERM");
    let mut text = String::new();
    while let Some(chunk) = stream.read_chunk() {
        text.push_str(&String::from_utf8(chunk).unwrap());
    }
    let events = wire::events(&text);
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "shutting_down", "{last}");
    let (status, said) = service.end();
    assert_eq!(status.code(), Some(0), "{said}");
    assert!(said.contains("outcome"), "one line a request: {said}");
    assert!(!said.contains("capital of France"), "no prompt text in the log");
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let model = common::demo_model();
    let home = tempfile::tempdir().unwrap();
    let model = model.to_str().unwrap();
    let mut service =
        Service::start(home.path(), &[model, "--port", "0"], &[("GREENROOM__HTTP__DRAIN_S", "600")]);
    let address = service.ready();
    let _stream = open_stream(address);
    service.signal("INT");
    service.line("stopping");
    service.signal("INT");
    assert_eq!(service.end().0.code(), Some(0));
}

#[test]
fn a_signal_while_it_starts_ends_it() {
    let model = common::demo_model();
    let home = tempfile::tempdir().unwrap();
    let mut service = Service::start(home.path(), &[model.to_str().unwrap(), "--port", "0"], &[]);
    service.line("address");
    service.signal("TERM");
    assert_eq!(service.end().0.code(), Some(0));
}

#[test]
fn killed_it_starts_again_over_its_old_socket() {
    let model = common::demo_model();
    let home = tempfile::tempdir().unwrap();
    let socket = home.path().join("run/api.sock");
    let args = [model.to_str().unwrap(), "--unix-socket", socket.to_str().unwrap()];
    let mut service = Service::start(home.path(), &args, &[]);
    service.line("ready");
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(std::fs::metadata(socket.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
    assert!(!service.said.contains("http://127.0.0.1"), "a socket alone was asked for");

    // A live one is not pushed aside.
    let (status, said) = Service::start(home.path(), &args, &[]).end();
    assert_eq!(status.code(), Some(69), "{said}");
    assert!(said.contains("another server is listening"), "{said}");

    service.signal("KILL");
    service.end();
    assert!(socket.exists(), "a killed process removes nothing");
    let mut service = Service::start(home.path(), &args, &[]);
    service.line("ready");
    let mut connection = Connection::unix(&socket);
    connection.write(chat("any.name", &with(ask("Hi"), json!({"max_tokens": 4}))));
    assert_eq!(connection.read_response().status, 200);
    drop(connection);
    service.signal("TERM");
    assert_eq!(service.end().0.code(), Some(0));
    assert!(!socket.exists(), "it removes its socket at the end");
}

#[test]
fn what_is_not_a_socket_is_left_alone() {
    let model = common::demo_model();
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("precious");
    std::fs::write(&path, "data").unwrap();
    let args = [model.to_str().unwrap(), "--unix-socket", path.to_str().unwrap()];
    let (status, said) = Service::start(home.path(), &args, &[]).end();
    assert_eq!(status.code(), Some(69), "{said}");
    assert!(said.contains("not a socket"), "{said}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "data");
    // A socket that somebody listens on without answering is live as well.
    let path = home.path().join("held.sock");
    let _holder = UnixListener::bind(&path).unwrap();
    let args = [model.to_str().unwrap(), "--unix-socket", path.to_str().unwrap()];
    assert_eq!(Service::start(home.path(), &args, &[]).end().0.code(), Some(69));
}

#[test]
fn a_port_that_is_taken_ends_it_with_one_line() {
    let model = common::demo_model();
    let home = tempfile::tempdir().unwrap();
    let holder = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = holder.local_addr().unwrap().port().to_string();
    let (status, said) = Service::start(home.path(), &[model.to_str().unwrap(), "--port", &port], &[]).end();
    assert_eq!(status.code(), Some(69), "{said}");
    let errors: Vec<&str> = said.lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(errors.len(), 1, "{said}");
    assert!(errors[0].contains(&port) && errors[0].contains("--port"), "{said}");
}

#[test]
fn a_model_file_that_is_none_ends_it_with_78() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("broken.gguf");
    std::fs::write(&file, "this is no model").unwrap();
    let args = [file.to_str().unwrap(), "--port", "0"];
    let (status, said) = Service::start(home.path(), &args, &[]).end();
    assert_eq!(status.code(), Some(78), "{said}");
    assert!(
        said.lines().any(|line| line.starts_with("greenroom: ") && line.contains("broken.gguf")),
        "{said}"
    );
}

#[test]
fn systemd_is_told_when_it_is_ready_and_when_it_stops() {
    let model = common::demo_model();
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let args = [model.to_str().unwrap(), "--port", "0", "--service", "systemd", "--log-format", "json"];
    let mut service = Service::start(home.path(), &args, &[("NOTIFY_SOCKET", path.to_str().unwrap())]);
    let state = || {
        let mut buffer = [0; 100];
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    };
    assert_eq!(state(), "READY=1");
    let address = service.ready();
    assert!(TcpStream::connect(address).is_ok());
    service.signal("TERM");
    assert_eq!(state(), "STOPPING=1");
    let (status, said) = service.end();
    assert_eq!(status.code(), Some(0));
    let json_lines = said.lines().filter(|line| line.starts_with('{'));
    assert!(json_lines.clone().count() > 0, "{said}");
    for line in json_lines {
        assert!(serde_json::from_str::<Value>(line).is_ok(), "{line}");
    }
}

#[test]
fn run_continues_a_text_where_the_model_has_no_template() {
    let home = tempfile::tempdir().unwrap();
    let base = common::tiny_copy("llama");
    common::edit_json(&base.path().join("tokenizer_config.json"), |config| {
        assert!(config.as_object_mut().unwrap().remove("chat_template").is_some());
    });
    let mut command = Command::new(env!("CARGO_BIN_EXE_greenroom"));
    command.arg("run").arg(base.path()).args([
        "Once upon a",
        "--temperature",
        "0",
        "--max-tokens",
        "5",
        "--stats",
    ]);
    let output =
        command.env("GREENROOM_HOME", home.path()).envs(EXACT).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("answer 5 tokens"), "{said}");
    assert!(!output.stdout.is_empty());
    // What it cannot take is not passed over.
    let mut command = Command::new(env!("CARGO_BIN_EXE_greenroom"));
    command.arg("run").arg(base.path()).args(["Once", "--system", "Be brief."]);
    let output = command.env("GREENROOM_HOME", home.path()).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(64));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--system"));
}

#[test]
fn run_answers_in_the_terminal() {
    let model = common::demo_model();
    let home = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_greenroom"));
        command.arg("run").arg(&model).args(args).env("GREENROOM_HOME", home.path()).envs(EXACT);
        command
    };
    let output =
        run(&["What is the capital of France?", "--temperature", "0", "--max-tokens", "24", "--stats"])
            .stdin(Stdio::null())
            .output()
            .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("Paris"));
    assert!(said.contains("tokens in"), "{said}");

    // The prompt from a pipe.
    let mut child = run(&["--temperature", "0", "--max-tokens", "24"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"What is the capital of France?\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).contains("Paris"));

    // A reader that goes away ends it quietly.
    let mut child = run(&["Count to one thousand."])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut [0; 1]).unwrap();
    drop(out);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_log_that_nobody_reads_stops_nothing() {
    let model = common::demo_model();
    let home = tempfile::tempdir().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_greenroom"))
        .args(["serve", model.to_str().unwrap(), "--port", "0", "--log-level", "trace"])
        .env("GREENROOM_HOME", home.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut unread = child.stderr.take().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let address =
        said.find_map(|line| line.split_once("http://").map(|(_, found)| found.to_owned())).unwrap();
    assert!(said.any(|line| line.starts_with("ready")));
    let mut connection = Connection::tcp(address.trim().parse().unwrap());
    for _ in 0..200 {
        connection.write(format!("GET /v1/models HTTP/1.1\r\nHost: {address}\r\n\r\n"));
        assert_eq!(connection.read_response().status, 200);
    }
    connection.write(chat(&address, &with(ask("Hello"), json!({"max_tokens": 16}))));
    assert_eq!(connection.read_response().status, 200);
    child.kill().unwrap();
    child.wait().unwrap();
    let mut log = Vec::new();
    unread.read_to_end(&mut log).unwrap();
    // A pipe holds 64 KiB, less what the next line had no room for: it was full, and more waited.
    assert!(log.len() > 60 * 1024, "only {} bytes were logged", log.len());
}
