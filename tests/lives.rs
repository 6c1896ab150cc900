//! Ten lives of a whole instance with a real model on each backend: no thread and no
//! memory stays behind.
//!
//! Alone in its binary and in one test, because it counts the process' threads and memory.
#![cfg(all(any(feature = "cpu", feature = "mlx"), target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use greenroom::actors::Greenroom;
use greenroom::config::{Config, DeviceChoice};
use greenroom::model::source::FileModel;
use greenroom::types::{ChatEvent, ChatMessage, ChatRequest, FinishReason, Role};

/// What ten lives may leave in the allocator's hands.
const MEMORY_KIB: u64 = 8 * 1024;

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Starts, answers one request, stops. Gives the answer.
async fn live(device: DeviceChoice) -> String {
    let mut config = Config::default();
    config.engine.device = device;
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/llama");
    let model = FileModel::new(path, &config).unwrap();
    let greenroom = Greenroom::builder(config).model(Arc::new(model)).start().await.unwrap();
    greenroom.ready().await.unwrap();
    let mut request =
        ChatRequest { messages: vec![ChatMessage::text(Role::User, "hello")], ..ChatRequest::default() };
    (request.max_tokens, request.ignore_eos, request.sampling.temperature) = (Some(20), true, Some(0.0));
    let mut stream = greenroom.chat(request).await.unwrap();
    let mut text = String::new();
    loop {
        match stream.events.recv().await.expect("a stream has an end event") {
            ChatEvent::Text(piece) => text.push_str(&piece),
            ChatEvent::Done { finish, .. } => {
                assert_eq!(finish, FinishReason::Length);
                break;
            }
            ChatEvent::Failed(failure) => panic!("{failure:?}"),
            _ => {}
        }
    }
    greenroom.stop().await;
    text
}

/// Joined threads leave the kernel's list a moment after their join.
async fn settles_at(count: usize) -> bool {
    let begun = Instant::now();
    while threads() > count && begun.elapsed() < Duration::from_secs(40) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    threads() <= count
}

/// `staying`: whether the backend's library keeps threads of its own after the first life.
async fn ten_lives(device: DeviceChoice, staying: bool) {
    let before = threads();
    let answer = live(device).await;
    if !staying {
        assert!(settles_at(before).await, "{device:?}: {} threads, {before} before", threads());
    }
    let (kept, resident) = (threads(), resident_kib());
    for life in 2..=11 {
        assert_eq!(live(device).await, answer, "{device:?}, life {life}");
        assert!(settles_at(kept).await, "{device:?}, life {life}: {} threads, {kept} before", threads());
    }
    let grown = resident_kib().saturating_sub(resident);
    assert!(grown <= MEMORY_KIB, "{device:?}: {grown} KiB more after ten lives");
}

#[test]
fn ten_lives_of_a_real_model_leave_no_thread_and_no_memory() {
    actix::System::new().block_on(async {
        if cfg!(feature = "cpu") {
            ten_lives(DeviceChoice::Cpu, false).await;
        }
        if cfg!(feature = "mlx") {
            ten_lives(DeviceChoice::Mlx, true).await;
        }
    });
}
