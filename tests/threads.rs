//! Ten lives of an instance in one process: no thread stays behind.
//!
//! Alone in its binary, because it counts the process' threads.
#![cfg(all(feature = "fake", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use greenroom::actors::Greenroom;
use greenroom::config::Config;
use greenroom::model::fake::{FakeModel, Script};
use greenroom::types::{ChatEvent, ChatMessage, ChatRequest, Role};

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

async fn live() {
    let model = FakeModel::new("fake", Script::new().say("hello", "Hi"));
    let greenroom = Greenroom::builder(Config::default()).model(Arc::new(model)).start().await.unwrap();
    greenroom.ready().await.unwrap();
    let request =
        ChatRequest { messages: vec![ChatMessage::text(Role::User, "hello")], ..ChatRequest::default() };
    let mut stream = greenroom.chat(request).await.unwrap();
    while !stream.events.recv().await.as_ref().is_none_or(ChatEvent::is_terminal) {}
    assert!(threads() > 2, "it has threads of its own");
    greenroom.stop().await;
}

/// Joined threads leave the kernel's list a moment after their join.
async fn settles_at(count: usize) -> bool {
    let begun = Instant::now();
    while threads() > count && begun.elapsed() < Duration::from_secs(40) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    threads() <= count
}

#[test]
fn ten_lives_leave_no_thread() {
    actix::System::new().block_on(async {
        let before = threads();
        for life in 1..=10 {
            live().await;
            assert!(settles_at(before).await, "life {life}: {} threads, {before} before", threads());
        }
    });
}
