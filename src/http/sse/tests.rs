//! What a client's parser makes of the bytes.

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::types::{Clock, ManualClock, RequestId, Trace};

fn writer(include_usage: bool) -> AnswerWriter {
    let surface = Surface::Chat;
    let service_tier = None;
    AnswerWriter {
        surface,
        id: "chatcmpl-1".into(),
        created: 5,
        model: "m".into(),
        service_tier,
        include_usage,
        has_scores: false,
    }
}

/// The one event in these bytes.
fn parse(bytes: &[u8]) -> Value {
    let text = std::str::from_utf8(bytes).unwrap();
    let data = text.strip_prefix("data: ").and_then(|rest| rest.strip_suffix("\n\n")).unwrap();
    assert!(!data.contains(['\n', '\r']), "an event is one line");
    serde_json::from_str(data).unwrap()
}

proptest! {
    #[test]
    fn any_text_is_one_event_that_gives_it_back(text in "(?s).*", usage in any::<bool>()) {
        let chunk = parse(&writer(usage).text(&text));
        prop_assert_eq!(chunk["choices"][0]["delta"]["content"].as_str(), Some(text.as_str()));
    }
}

#[test]
fn the_end_has_finish_usage_and_done() {
    let usage = Usage { prompt_tokens: 7, cached_tokens: 3, completion_tokens: 2, ..Usage::default() };
    let bytes = writer(true).done(FinishReason::Length, usage);
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
    assert_eq!(events[2].as_bytes(), DONE);
}

#[tokio::test]
async fn silence_is_filled_with_comments_and_a_lost_sender_ends_the_stream() {
    use futures_util::StreamExt;

    let (tx, events) = mpsc::channel(4);
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::new());
    let trace = Trace::new(RequestId(1), clock.now());
    let recorder = Recorder::new(trace.clone(), &clock);
    let mut stream = std::pin::pin!(body(writer(false), events, Duration::from_millis(1), recorder));
    let role = stream.next().await.unwrap().unwrap();
    assert_eq!(parse(&role)["choices"][0]["delta"]["role"], "assistant");
    for _ in 0..3 {
        assert_eq!(&stream.next().await.unwrap().unwrap()[..], HEARTBEAT);
    }
    tx.send(ChatEvent::Text("x".into())).await.unwrap();
    drop(tx);
    assert_eq!(parse(&stream.next().await.unwrap().unwrap())["choices"][0]["delta"]["content"], "x");
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

#[test]
fn a_piece_in_its_frame_is_the_piece_written_whole() {
    for text in ["a", "", "\"content\":\"\"", "line\nbreak \\ and \u{1f} and ü🦀", "\u{2028}"] {
        for surface in [Surface::Chat, Surface::Text] {
            for include_usage in [false, true] {
                let mut writer = writer(include_usage);
                writer.surface = surface;
                writer.model = "a \"content\":\"\" and \"text\":\"\" of a model".into();
                let mut framed = Vec::new();
                PieceFrame::of(&writer).write(&mut framed, text);
                assert_eq!(framed, writer.text(text));
            }
        }
    }
}

#[tokio::test]
async fn events_that_wait_go_out_together_and_in_order() {
    use futures_util::StreamExt;

    let (send, events) = tokio::sync::mpsc::channel(8);
    for text in ["a", "b"] {
        send.try_send(ChatEvent::Text(text.into())).unwrap();
    }
    send.try_send(ChatEvent::Failed(broken_off())).unwrap();
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::new());
    let recorder = Recorder::new(Trace::new(RequestId(1), clock.now()), &clock);
    let writer = writer(false);
    let mut stream = std::pin::pin!(body(writer.clone(), events, Duration::from_secs(60), recorder));
    assert_eq!(stream.next().await.unwrap().unwrap(), writer.role());
    let mut wanted = writer.text("a").to_vec();
    wanted.extend_from_slice(&writer.text("b"));
    wanted.extend_from_slice(&writer.failed(broken_off()));
    assert_eq!(stream.next().await.unwrap().unwrap(), wanted);
    assert!(stream.next().await.is_none());
}
