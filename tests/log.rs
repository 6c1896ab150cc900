//! What chat requests leave in the log: one line each, whatever became of them.
//!
//! Alone in its binary, because it installs the process' subscriber.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "fake")]

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use greenroom::model::fake::Script;
use serde_json::json;
use tracing_subscriber::filter::LevelFilter;

mod harness;
mod wire;
use harness::Server;
use wire::{ask, with};

/// Where the log goes.
#[derive(Clone, Default)]
struct Pages(Arc<Mutex<Vec<u8>>>);

impl Write for Pages {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn every_request_leaves_one_line_with_all_its_phases() {
    let pages = Pages::default();
    let writer = pages.clone();
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_max_level(LevelFilter::INFO)
        .with_writer(move || writer.clone())
        .init();
    let server =
        Server::start(Script::new().say("hello", "Good day, a secret answer").repeat("forever", "again "));
    let mut ids = Vec::new();
    for options in [json!({}), json!({"stream": true})] {
        let response = server.chat(&with(ask("hello"), options));
        assert_eq!(response.status, 200);
        ids.push((response.header("x-request-id").unwrap().to_owned(), "outcome=\"stop\""));
    }
    let mut leaving = server.connect();
    leaving.write(server.chat_bytes(&with(ask("forever"), json!({"stream": true}))));
    let head = leaving.read_head();
    ids.push((head.header("x-request-id").unwrap().to_owned(), "outcome=\"cancelled\""));
    drop(leaving);
    server.wait("the one that left", |handles| handles.gauges().tickets_live() == 0);
    drop(server);
    let log = String::from_utf8(pages.0.lock().unwrap().clone()).unwrap();
    for (id, finish) in ids {
        let lines: Vec<&str> = log.lines().filter(|line| line.contains(&id)).collect();
        let [line] = lines.as_slice() else { panic!("{} lines for {id} in\n{log}", lines.len()) };
        for part in [" INFO ", finish, "prompt_tokens=", "queued_ms=", "prefill_ms=", "decode_ms="] {
            assert!(line.contains(part), "{part} in {line}");
        }
    }
    assert!(!log.contains("secret"), "no word of an answer");
}
