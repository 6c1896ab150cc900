//! An instance that has nothing to do uses no processor, whatever the number of compute threads.
//!
//! Alone in its binary, because it reads the process' processor time.
#![cfg(all(feature = "cpu", target_os = "linux"))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "a test may panic")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use greenroom::actors::Greenroom;
use greenroom::config::{Config, DeviceChoice};
use greenroom::model::source::FileModel;
use greenroom::types::{ChatEvent, ChatMessage, ChatRequest, Role};

/// How long it is watched.
const WATCHED: Duration = Duration::from_millis(300);
/// One hundredth of that: timers of the runtime, and the watching.
const MOST: Duration = Duration::from_millis(3);
/// Windows within which it must have come to rest.
const WINDOWS: usize = 20;

/// Processor time of all threads so far, and of the compute threads alone.
fn processor_time() -> (Duration, usize) {
    let (mut total, mut compute) = (0, 0);
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        // A thread may end meanwhile.
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        total += read("schedstat").split_whitespace().next().map_or(0, |ns| ns.parse().unwrap());
        compute += usize::from(read("comm").starts_with("greenroom-cpu-"));
    }
    (Duration::from_nanos(total), compute)
}

async fn answer(greenroom: &Greenroom) {
    let mut request =
        ChatRequest { messages: vec![ChatMessage::text(Role::User, "hello")], ..ChatRequest::default() };
    (request.max_tokens, request.ignore_eos) = (Some(30), true);
    let mut stream = greenroom.chat(request).await.unwrap();
    while !stream.events.recv().await.as_ref().is_none_or(ChatEvent::is_terminal) {}
}

#[test]
fn idle_costs_no_processor_before_and_after_work() {
    actix::System::new().block_on(async {
        let mut config = Config::default();
        config.engine.device = DeviceChoice::Cpu;
        config.cpu.threads = Some(4);
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/llama");
        let model = FileModel::new(path, &config).unwrap();
        let greenroom = Greenroom::builder(config).model(Arc::new(model)).start().await.unwrap();
        greenroom.ready().await.unwrap();
        for round in 0..2 {
            let mut used = Vec::new();
            loop {
                let (before, _) = processor_time();
                let begun = Instant::now();
                // The measured span itself: nothing is waited for.
                tokio::time::sleep(WATCHED).await;
                let (after, threads) = processor_time();
                let spent = after - before;
                println!("round {round}: {spent:?} in {:?}", begun.elapsed());
                used.push(spent);
                // As many compute threads as set, the caller being the fourth. A thread names itself once it
                // runs, which on a busy machine may be after the model is ready.
                if spent < MOST && threads == 3 {
                    break;
                }
                assert!(used.len() < WINDOWS, "never at rest with 3 threads, but {threads}: {used:?}");
            }
            answer(&greenroom).await;
        }
        greenroom.stop().await;
    });
}
