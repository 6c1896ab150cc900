//! What a client's parser makes of the bytes.

use proptest::prelude::*;
use serde_json::Value;

use super::*;

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
    let usage = Usage { prompt_tokens: 7, cached_tokens: 3, completion_tokens: 2 };
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
    let mut stream = std::pin::pin!(body(writer(false), events, Duration::from_millis(1)));
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
}
