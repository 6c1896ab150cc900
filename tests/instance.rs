//! A tiny model with random weights behind a whole instance, on our CPU backend and on MLX's CPU
//! device: what an answer says does not depend on who else is there, on kept rows, on steps that
//! overlap or on tokens that were proposed.
#![cfg(any(feature = "cpu", feature = "mlx"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use greenroom::actors::{ChatStream, Greenroom};
use greenroom::config::{Config, DeviceChoice};
use greenroom::model::source::FileModel;
use greenroom::types::{ChatEvent, ChatMessage, ChatRequest, Role, Usage};

const ASKED: usize = 8;

/// No test takes so long unless something hangs.
const DEADLINE: Duration = Duration::from_secs(300);

fn devices() -> Vec<DeviceChoice> {
    let cpu = cfg!(feature = "cpu").then_some(DeviceChoice::Cpu);
    let mlx = cfg!(feature = "mlx").then_some(DeviceChoice::Mlx);
    cpu.into_iter().chain(mlx).collect()
}

fn run(test: impl Future<Output = ()>) {
    actix::System::new().block_on(async {
        tokio::time::timeout(DEADLINE, test).await.expect("the test hangs");
    });
}

async fn start(device: DeviceChoice, change: impl FnOnce(&mut Config)) -> Greenroom {
    let mut config = Config::default();
    config.engine.device = device;
    change(&mut config);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/llama");
    let model = FileModel::new(path, &config).unwrap();
    let greenroom = Greenroom::builder(config).model(Arc::new(model)).start().await.unwrap();
    greenroom.ready().await.unwrap();
    greenroom
}

fn ask(text: &str) -> ChatRequest {
    ChatRequest { messages: vec![ChatMessage::text(Role::User, text)], ..ChatRequest::default() }
}

fn request(number: usize) -> ChatRequest {
    let mut request =
        ask(&format!("{} {number}: {}", "alike at first".repeat(4), "word ".repeat(number * 7)));
    request.max_tokens = Some(30 + u32::try_from(number).unwrap());
    request.ignore_eos = true;
    request.sampling.temperature = Some(if number.is_multiple_of(2) { 0.0 } else { 0.8 });
    request.sampling.seed = Some(number as u64);
    request
}

fn greedy(number: usize) -> ChatRequest {
    let mut request = request(number * 2);
    request.max_tokens = Some(60);
    request
}

async fn read(mut stream: ChatStream) -> (String, Usage) {
    let mut text = String::new();
    loop {
        match stream.events.recv().await.expect("a stream has an end event") {
            ChatEvent::Text(piece) => text.push_str(&piece),
            ChatEvent::Done { usage, .. } => return (text, usage),
            ChatEvent::Failed(failure) => panic!("{failure:?}"),
            _ => {}
        }
    }
}

/// Answers of requests that run at the same time.
async fn together(greenroom: &Greenroom, request: impl Fn(usize) -> ChatRequest) -> Vec<(String, Usage)> {
    let asked = (0..ASKED).map(|number| {
        let request = request(number);
        async move {
            let expected = request.max_tokens;
            let (text, usage) = read(greenroom.chat(request).await.unwrap()).await;
            assert_eq!(Some(usage.completion_tokens), expected);
            (text, usage)
        }
    });
    futures_util::future::join_all(asked).await
}

fn texts(answers: Vec<(String, Usage)>) -> Vec<String> {
    answers.into_iter().map(|(text, _)| text).collect()
}

#[test]
#[cfg(feature = "cpu")]
fn an_answer_does_not_depend_on_neighbours_chunks_or_kept_rows() {
    run(async {
        let lonely = start(DeviceChoice::Cpu, |config| {
            config.scheduler.max_rows = 1;
            config.cache.enabled = false;
        })
        .await;
        let expected = texts(together(&lonely, request).await);
        lonely.stop().await;
        for chunk in [7, 512] {
            let crowd = start(DeviceChoice::Cpu, |config| config.scheduler.max_chunk_tokens = chunk).await;
            for round in 0..2 {
                let answers = together(&crowd, request).await;
                for (number, (text, usage)) in answers.iter().enumerate() {
                    assert_eq!(text, &expected[number], "request {number}, chunk {chunk}, round {round}");
                    assert!(round == 0 || usage.cached_tokens > 0, "request {number} finds its own kept row");
                }
            }
            crowd.stop().await;
        }
    });
}

/// Prompts that repeat themselves, and answers of a model that does: some proposals are right.
#[test]
fn looked_up_tokens_change_no_greedy_answer() {
    run(async {
        for device in devices() {
            let plain = start(device, |_| {}).await;
            let expected = texts(together(&plain, greedy).await);
            assert_eq!(plain.handles().gauges().proposed_tokens.get(), 0);
            plain.stop().await;
            let looks_up = start(device, |config| config.scheduler.prompt_lookup = true).await;
            assert_eq!(texts(together(&looks_up, greedy).await), expected, "{device:?}");
            let handles = looks_up.handles();
            let gauges = handles.gauges();
            let (proposed, right) = (gauges.proposed_tokens.get(), gauges.proposed_right_tokens.get());
            assert!(right > 0 && right <= proposed, "{device:?}: {right} of {proposed}");
            looks_up.stop().await;
        }
    });
}

/// MLX draws greedy tokens itself and begins steps early; with a penalty, which changes nothing
/// when it is this small, the host draws and each step ends before the next.
#[test]
#[cfg(feature = "mlx")]
fn steps_that_overlap_change_no_answer() {
    run(async {
        let mlx = start(DeviceChoice::Mlx, |config| config.cache.enabled = false).await;
        let host = |number| {
            let mut request = greedy(number);
            request.sampling.frequency_penalty = Some(1e-30);
            request
        };
        let overlapped = || mlx.handles().gauges().overlapped_steps.get();
        let expected = texts(together(&mlx, host).await);
        assert_eq!(overlapped(), 0);
        assert_eq!(texts(together(&mlx, greedy).await), expected);
        assert!(overlapped() > 40, "{} steps", overlapped());
        mlx.stop().await;
    });
}

/// What is rounded has a place of its own on disk, takes half of it, and says so.
#[test]
#[cfg(feature = "cpu")]
fn state_in_8_bits_is_kept_apart_and_told() {
    use greenroom::actors::CacheStatistics;
    use greenroom::config::SsdKv;

    run(async {
        let dir = tempfile::tempdir().unwrap();
        let request = || {
            let mut request = ask(&"something long that is asked again and again ".repeat(10));
            request.max_tokens = Some(8);
            request.sampling.temperature = Some(0.0);
            request
        };
        let mut bytes = Vec::new();
        for kind in [SsdKv::Stored, SsdKv::Q8] {
            let life = || {
                start(DeviceChoice::Cpu, |config| {
                    config.cache.dir = Some(dir.path().to_path_buf());
                    config.cache.ssd_kv = kind;
                })
            };
            let first = life().await;
            let (text, usage) = read(first.chat(request()).await.unwrap()).await;
            assert_eq!(usage.cached_tokens, 0, "{kind:?} finds nothing of the other's");
            let report = first.handles().cache().send(CacheStatistics).await.unwrap();
            assert_eq!(report.kind.contains("8 bits"), kind == SsdKv::Q8, "{report:?}");
            let gauges = first.handles().gauges().clone();
            first.stop().await;
            bytes.push(gauges.ssd_written_bytes.get());
            let second = life().await;
            let (again, usage) = read(second.chat(request()).await.unwrap()).await;
            assert_eq!(usage.ssd_cached_tokens, usage.prompt_tokens - 1);
            assert!(kind == SsdKv::Q8 || again == text);
            second.stop().await;
        }
        assert!(bytes[1] * 10 < bytes[0] * 7, "{bytes:?}");
    });
}

/// Little memory, short chunks, a folder that is too small, clients that go away, orders to forget in
/// between: the cache may lose everything at any time, and no answer shows it.
#[test]
#[cfg(feature = "cpu")]
fn whatever_becomes_of_the_cache_answers_stay_the_same() {
    use greenroom::actors::ClearCache;

    let asked = |number: usize| {
        let begins = ["alpha beta gamma ", "one two three "][number % 2];
        let mut request = ask(&format!("{}{}", begins.repeat(8 + number % 7 * 5), "tail ".repeat(number)));
        request.max_tokens = Some(8);
        request.ignore_eos = true;
        request.sampling.temperature = Some(0.0);
        request.cache.session = Some(format!("session {}", number % 3));
        request
    };
    run(async {
        let without = start(DeviceChoice::Cpu, |config| config.cache.enabled = false).await;
        let expected = texts(together(&without, |number| asked(number * 3)).await);
        without.stop().await;
        for (memory_mib, chunk, rows) in [(1, 512, 16), (1, 20, 3), (64, 7, 16)] {
            let dir = tempfile::tempdir().unwrap();
            for _life in 0..2 {
                let greenroom = start(DeviceChoice::Cpu, |config| {
                    config.engine.kv_memory_mib = Some(memory_mib);
                    config.scheduler.max_chunk_tokens = chunk;
                    config.scheduler.max_rows = rows;
                    config.cache.dir = Some(dir.path().to_path_buf());
                    config.cache.ssd_gb = 0.001;
                })
                .await;
                let handles = greenroom.handles();
                for round in 0..6 {
                    let gone = greenroom.chat(asked(round)).await.unwrap();
                    let answers = texts(together(&greenroom, |number| asked(number * 3)).await);
                    assert_eq!(answers, expected, "{memory_mib} MiB, chunks of {chunk}, round {round}");
                    drop(gone);
                    if round % 3 == 1 {
                        let order = ClearCache { disk: round == 4 };
                        handles.clear_cache().send(order).await.unwrap();
                    }
                }
                let gauges = handles.gauges().clone();
                greenroom.stop().await;
                assert_eq!((gauges.tickets_live(), gauges.kv_used_bytes.get()), (0, 0));
            }
        }
    });
}

/// A conversation that goes on from its own end, and one that branches off, on every device.
#[test]
fn turns_of_a_conversation_reuse_what_was_computed() {
    run(async {
        for device in devices() {
            let (mut texts, mut cached) = (Vec::new(), Vec::new());
            for enabled in [false, true] {
                let greenroom = start(device, |config| config.cache.enabled = enabled).await;
                let mut messages =
                    vec![ChatMessage::text(Role::User, "a question of some length ".repeat(12))];
                let mut said = Vec::new();
                for turn in 0..4 {
                    let mut request = ChatRequest { messages: messages.clone(), ..ChatRequest::default() };
                    request.max_tokens = Some(12);
                    request.ignore_eos = true;
                    request.sampling.temperature = Some(0.0);
                    let (text, usage) = read(greenroom.chat(request).await.unwrap()).await;
                    cached.extend(enabled.then_some((usage.cached_tokens, usage.prompt_tokens)));
                    said.push(text.clone());
                    // The third turn goes back to the first answer.
                    messages.truncate(if turn == 1 { 1 } else { messages.len() });
                    messages.push(ChatMessage::text(Role::Assistant, text));
                    messages.push(ChatMessage::text(Role::User, format!("and then, for the time {turn}?")));
                }
                greenroom.stop().await;
                texts.push(said);
            }
            assert_eq!(texts[0], texts[1], "{device:?}");
            assert_eq!(cached[0].0, 0);
            assert!(
                cached[1..].iter().all(|(cached, prompt)| *cached > 200 && cached < prompt),
                "{cached:?}"
            );
        }
    });
}
