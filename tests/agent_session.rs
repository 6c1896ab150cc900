//! A coding agent's session replayed on the demo model: nearly nothing of its prompts is computed twice,
//! not even after a restart. That the answers are those of a server without a cache is `warm.rs`' affair.
//!
//! The session is recorded (`tests/data/agent`): a system prompt of some 6,000 tokens with tools, then 40
//! turns of calls, results and short answers, each request holding the one before it whole.
#![cfg(feature = "cpu")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test that cannot go on fails"
)]

use std::path::Path;
use std::sync::Arc;

use greenroom::Greenroom;
use greenroom::config::{Config, DeviceChoice};
use greenroom::http::read_chat_request;
use greenroom::model::source::FileModel;
use greenroom::types::{ChatEvent, ChatRequest, Usage};
use serde_json::{Value, json};

mod common;

/// Of the prompts' tokens, those that must come from the cache in a replay, percent.
const LEAST_SHARE: f64 = 98.0;

fn session() -> Vec<ChatRequest> {
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/agent/session.json");
    let recorded: Value = serde_json::from_str(&std::fs::read_to_string(recorded).unwrap()).unwrap();
    let messages = recorded["messages"].as_array().unwrap();
    let turn = |count: &Value| {
        let body = json!({
            "messages": messages[..count.as_u64().unwrap() as usize], "max_tokens": 3, "temperature": 0,
            "session_id": "agent",
        });
        read_chat_request(&body.to_string()).unwrap()
    };
    recorded["turns"].as_array().unwrap().iter().map(turn).collect()
}

async fn start(change: impl FnOnce(&mut Config)) -> Greenroom {
    let mut config = Config::default();
    config.engine.device = DeviceChoice::Cpu;
    change(&mut config);
    let model = FileModel::new(common::demo_model(), &config).unwrap();
    let greenroom = Greenroom::builder(config).model(Arc::new(model)).start().await.unwrap();
    greenroom.ready().await.unwrap();
    greenroom
}

async fn answer(greenroom: &Greenroom, request: ChatRequest) -> (String, Usage) {
    let mut stream = greenroom.chat(request).await.unwrap();
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

/// All turns in order: the answers, and the share of prompt tokens that were not computed, percent.
async fn replay(greenroom: &Greenroom, requests: &[ChatRequest]) -> (Vec<String>, Vec<Usage>) {
    let (mut texts, mut usages) = (Vec::new(), Vec::new());
    for request in requests {
        let (text, usage) = answer(greenroom, request.clone()).await;
        texts.push(text);
        usages.push(usage);
    }
    (texts, usages)
}

fn share(usages: &[Usage]) -> f64 {
    let sum = |count: fn(&Usage) -> u32| usages.iter().map(|usage| f64::from(count(usage))).sum::<f64>();
    100.0 * sum(|usage| usage.cached_tokens) / sum(|usage| usage.prompt_tokens)
}

#[test]
fn an_agents_session_is_computed_once() {
    let dir = tempfile::tempdir().unwrap();
    let requests = session();
    assert_eq!(requests.len(), 40);
    actix::System::new().block_on(async {
        let disk = |config: &mut Config| config.cache.dir = Some(dir.path().join("cache"));
        let greenroom = start(disk).await;
        let (first, recorded) = replay(&greenroom, &requests).await;
        assert!(recorded[0].prompt_tokens > 5_500, "{:?}", recorded[0]);
        // Of the first time only what is new in each turn is computed.
        let new = share(&recorded[1..]);
        let (again, usages) = replay(&greenroom, &requests).await;
        assert_eq!(again, first);
        let memory = share(&usages);
        greenroom.stop().await;
        let greenroom = start(disk).await;
        let (again, usages) = replay(&greenroom, &requests).await;
        assert_eq!(again, first);
        let restarted = share(&usages);
        assert!(usages[0].ssd_cached_tokens > 5_500, "{:?}", usages[0]);
        greenroom.stop().await;
        println!("from the cache: {new:.2} % while it is recorded, {memory:.2} % replayed, {restarted:.2} % after a restart");
        assert!(new >= LEAST_SHARE && memory >= LEAST_SHARE && restarted >= LEAST_SHARE);
    });
}
