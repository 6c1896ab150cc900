//! A tiny model with random weights on our own CPU backend, behind the whole instance:
//! what an answer says does not depend on who else is there, on kept rows or on memory.

use std::path::Path;
use std::sync::Arc;

use greenroom::actors::Greenroom;
use greenroom::config::{Config, DeviceChoice};
use greenroom::model::source::FileModel;
use greenroom::types::{ChatEvent, ChatRequest};

use crate::harness::{ask, read, run, stop};

const ASKED: usize = 8;

async fn start(change: impl FnOnce(&mut Config)) -> Greenroom {
    let mut config = Config::default();
    config.engine.device = DeviceChoice::Cpu;
    change(&mut config);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny/llama");
    let model = FileModel::new(path, &config).unwrap();
    let greenroom = Greenroom::builder(config).model(Arc::new(model)).start().await.unwrap();
    greenroom.ready().await.unwrap();
    greenroom
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

/// Text and reused tokens of each.
async fn together(greenroom: &Greenroom) -> Vec<(String, u32)> {
    let asked = (0..ASKED).map(|number| async move {
        let (text, end) = read(greenroom.chat(request(number)).await.unwrap()).await;
        let ChatEvent::Done { usage, .. } = end else { panic!("{end:?}") };
        assert_eq!(usage.completion_tokens as usize, 30 + number);
        (text, usage.cached_tokens)
    });
    futures_util::future::join_all(asked).await
}

#[test]
fn an_answer_does_not_depend_on_neighbours_chunks_or_kept_rows() {
    run(async {
        let lonely = start(|config| {
            config.scheduler.max_rows = 1;
            config.cache.enabled = false;
        })
        .await;
        let expected: Vec<String> = together(&lonely).await.into_iter().map(|(text, _)| text).collect();
        stop(lonely).await;
        for chunk in [7, 512] {
            let crowd = start(|config| config.scheduler.max_chunk_tokens = chunk).await;
            for round in 0..2 {
                let answers = together(&crowd).await;
                for (number, (text, cached)) in answers.iter().enumerate() {
                    assert_eq!(text, &expected[number], "request {number}, chunk {chunk}, round {round}");
                    assert!(round == 0 || *cached > 0, "request {number} finds its own kept row");
                }
            }
            stop(crowd).await;
        }
    });
}
