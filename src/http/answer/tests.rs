//! What a client's parser makes of the bytes.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use proptest::prelude::*;
use serde_json::Value;
use tokio::sync::mpsc;

use super::*;
use crate::http::recorder::Recorder;
use crate::types::{Clock, ManualClock, RequestId, Timings, Trace};

fn head(include_usage: bool, choices: usize) -> Head {
    let (id, model) = ("chatcmpl-1".into(), "a \"content\":\"\" and \"text\":\"\" of a model".into());
    Head { id, created: 5, model, service_tier: None, include_usage, has_scores: false, choices }
}

fn chat(include_usage: bool) -> ChatWriter {
    ChatWriter::new(head(include_usage, 1))
}

fn written(write: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::new();
    write(&mut out);
    out
}

fn piece(writer: &mut impl Writer, choice: usize, text: &str) -> Vec<u8> {
    written(|out| writer.piece(out, choice, ChatEvent::Text(text.into())))
}

/// The one event in these bytes.
fn parse(bytes: &[u8]) -> Value {
    let text = std::str::from_utf8(bytes).unwrap();
    let data = text.strip_prefix("data: ").and_then(|rest| rest.strip_suffix("\n\n")).unwrap();
    assert!(!data.contains(['\n', '\r']), "an event is one line");
    serde_json::from_str(data).unwrap()
}

fn recorder(trace: &Trace) -> Recorder {
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::new());
    Recorder::new(trace.clone(), &clock)
}

fn trace() -> Trace {
    Trace::new(RequestId(1), Duration::ZERO)
}

proptest! {
    #[test]
    fn any_text_is_one_event_that_gives_it_back(
        text in "(?s).*", usage in any::<bool>(), choice in 0_usize..3,
    ) {
        let chunk = parse(&piece(&mut ChatWriter::new(head(usage, 3)), choice, &text));
        let got = &chunk["choices"][0];
        prop_assert_eq!(got["delta"]["content"].as_str(), Some(text.as_str()));
        prop_assert_eq!(got["index"].as_u64(), Some(choice as u64));
        prop_assert_eq!(chunk.get("usage").is_some(), usage);
        let chunk = parse(&piece(&mut TextWriter::new(head(usage, 3)), choice, &text));
        let got = &chunk["choices"][0];
        prop_assert_eq!(got["text"].as_str(), Some(text.as_str()));
        prop_assert_eq!(got["index"].as_u64(), Some(choice as u64));
    }
}

#[test]
fn the_end_has_finish_usage_and_done() {
    let usage = Usage { prompt_tokens: 7, cached_tokens: 3, completion_tokens: 2, ..Usage::default() };
    let mut writer = chat(true);
    let bytes = written(|out| {
        writer.finish(out, 0, FinishReason::Length, None);
        writer.end(out, usage);
    });
    let text = std::str::from_utf8(&bytes).unwrap();
    let events: Vec<&str> = text.split_inclusive("\n\n").collect();
    assert_eq!(events.len(), 3);
    let finish = parse(events[0].as_bytes());
    assert_eq!(
        (finish["choices"][0]["finish_reason"].as_str(), &finish["usage"]),
        (Some("length"), &Value::Null)
    );
    let last = parse(events[1].as_bytes());
    assert_eq!(last["choices"], serde_json::json!([]));
    assert_eq!(last["usage"]["total_tokens"], 9);
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    assert_eq!(events[2], "data: [DONE]\n\n");
}

#[tokio::test]
async fn silence_is_filled_with_comments_and_a_lost_sender_ends_the_stream() {
    let (tx, events) = mpsc::channel(4);
    let trace = trace();
    let choices = Choices::new(vec![events]);
    let stream = body(chat(false), choices, Duration::from_millis(1), recorder(&trace));
    let mut stream = std::pin::pin!(stream);
    let role = stream.next().await.unwrap().unwrap();
    assert_eq!(parse(&role)["choices"][0]["delta"]["role"], "assistant");
    for _ in 0..3 {
        assert_eq!(&stream.next().await.unwrap().unwrap()[..], HEARTBEAT);
    }
    tx.send(ChatEvent::Text("x".into())).await.unwrap();
    assert_eq!(parse(&stream.next().await.unwrap().unwrap())["choices"][0]["delta"]["content"], "x");
    drop(tx);
    assert_eq!(parse(&stream.next().await.unwrap().unwrap())["error"]["code"], "generation_failed");
    assert!(stream.next().await.is_none());
    let phases: Vec<_> = trace.events().iter().map(|event| event.phase).collect();
    assert_eq!(
        phases,
        ["response.first_write", "response.final_write"],
        "nothing a token, nothing a comment"
    );
    assert_eq!(trace.outcome().map(|(outcome, _)| outcome), Some("failed"));
}

#[tokio::test]
async fn events_that_wait_go_out_together_and_in_order() {
    let (send, events) = mpsc::channel(8);
    for text in ["a", "b"] {
        send.try_send(ChatEvent::Text(text.into())).unwrap();
    }
    send.try_send(ChatEvent::Failed(broken_off())).unwrap();
    let choices = Choices::new(vec![events]);
    let stream = body(chat(false), choices, Duration::from_secs(60), recorder(&trace()));
    let mut stream = std::pin::pin!(stream);
    let mut writer = chat(false);
    assert_eq!(stream.next().await.unwrap().unwrap(), written(|out| writer.begin(out)));
    let mut wanted = piece(&mut writer, 0, "a");
    wanted.extend(piece(&mut writer, 0, "b"));
    writer.fail(&mut wanted, broken_off());
    assert_eq!(stream.next().await.unwrap().unwrap(), wanted);
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn choices_end_each_for_itself_and_the_stream_with_the_last() {
    let done = |tokens| {
        let usage = Usage { prompt_tokens: 4, completion_tokens: tokens, ..Usage::default() };
        ChatEvent::Done { finish: FinishReason::Stop, stop_string: None, usage, timings: Timings::default() }
    };
    let mut streams = Vec::new();
    for texts in [&["a", "b"][..], &["c"]] {
        let (send, events) = mpsc::channel(8);
        texts.iter().for_each(|text| send.try_send(ChatEvent::Text((*text).into())).unwrap());
        send.try_send(done(texts.len() as u32)).unwrap();
        streams.push(events);
    }
    let trace = trace();
    let writer = ChatWriter::new(head(true, 2));
    let stream = body(writer, Choices::new(streams), Duration::from_secs(60), recorder(&trace));
    let bytes: Vec<u8> = stream.map(|bytes| bytes.unwrap().to_vec()).concat().await;
    let text = String::from_utf8(bytes).unwrap();
    let mut events: Vec<&str> = text.split_inclusive("\n\n").collect();
    assert_eq!(events.pop(), Some("data: [DONE]\n\n"));
    let chunks: Vec<Value> = events.iter().map(|event| parse(event.as_bytes())).collect();
    for (index, said) in [(0, "ab"), (1, "c")] {
        let of = || {
            let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
            choices.filter(move |choice| choice["index"] == index)
        };
        let text: String = of().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(text, said);
        assert_eq!(of().filter(|choice| choice["finish_reason"] == "stop").count(), 1);
    }
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 3);
    assert_eq!(trace.outcome().map(|(outcome, _)| outcome), Some("stop"));
}

/// A thought, a text and two calls, the second one cut.
fn parts() -> Vec<ChatEvent> {
    let started =
        |index, name: &str| CallEvent::Started { index, id: format!("call_{index}"), name: name.into() };
    let arguments = |index, text: &str| CallEvent::Arguments { index, text: text.into() };
    let calls = [
        started(0, "add"),
        arguments(0, "{\"a\":"),
        arguments(0, "1}"),
        CallEvent::Finished { index: 0, complete: true },
        started(1, "sub"),
        arguments(1, "{\"b"),
        CallEvent::Finished { index: 1, complete: false },
    ];
    let texts = [ChatEvent::Reasoning("hm".into()), ChatEvent::Text("So: ".into())];
    texts.into_iter().chain(calls.map(ChatEvent::Call)).collect()
}

#[test]
fn a_chats_stream_has_thought_text_and_calls_as_they_come() {
    let mut writer = chat(false);
    let bytes = written(|out| {
        parts().into_iter().for_each(|event| writer.piece(out, 0, event));
        writer.finish(out, 0, FinishReason::Stop, None);
    });
    let text = String::from_utf8(bytes).unwrap();
    let chunks = text.split_inclusive("\n\n").map(|event| parse(event.as_bytes())["choices"][0].clone());
    let deltas: Vec<Value> = chunks.clone().map(|choice| choice["delta"].clone()).collect();
    let call = |body: Value| serde_json::json!({"tool_calls": [body]});
    let more =
        |index: u32, text: &str| call(serde_json::json!({"index": index, "function": {"arguments": text}}));
    let first = |index: u32, name: &str| {
        let function = serde_json::json!({"name": name, "arguments": ""});
        call(serde_json::json!({
            "index": index, "id": format!("call_{index}"), "type": "function", "function": function,
        }))
    };
    assert_eq!(
        deltas,
        [
            serde_json::json!({"reasoning_content": "hm"}),
            serde_json::json!({"content": "So: "}),
            first(0, "add"),
            more(0, "{\"a\":"),
            more(0, "1}"),
            first(1, "sub"),
            more(1, "{\"b"),
            serde_json::json!({}),
        ]
    );
    assert_eq!(chunks.last().unwrap()["finish_reason"], "tool_calls");
}

#[test]
fn a_whole_chat_has_them_in_its_message() {
    let mut answer = Answer::default();
    parts().into_iter().for_each(|event| answer.push(event));
    let body: Value =
        serde_json::from_slice(&chat(false).whole(&[answer.clone()], Usage::default())).unwrap();
    let (choice, message) = (&body["choices"][0], &body["choices"][0]["message"]);
    assert_eq!((&choice["finish_reason"], &message["content"]), (&"tool_calls".into(), &"So: ".into()));
    assert_eq!(message["reasoning_content"], "hm");
    let function = serde_json::json!({"name": "add", "arguments": "{\"a\":1}"});
    let call = serde_json::json!({"id": "call_0", "type": "function", "function": function});
    assert_eq!((&message["tool_calls"][0], message["tool_calls"].as_array().unwrap().len()), (&call, 2));
    answer.text.clear();
    let silent: Value = serde_json::from_slice(&chat(false).whole(&[answer], Usage::default())).unwrap();
    assert_eq!(silent["choices"][0]["message"]["content"], Value::Null, "it only calls");
}
