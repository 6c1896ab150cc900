//! `POST /v1/messages`, outward.
//!
//! A message is a list of blocks: thinking, text, tool_use, in the order in which the model writes them.
//! Order of a stream: `message_start`; for each block `content_block_start`, its deltas,
//! `content_block_stop`; `message_delta`, `message_stop`. `ping` where nothing has happened for a while,
//! or one `error` and the end.

use actix_web::http::StatusCode;
use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::super::answer::{Answer, Writer};
use super::super::api_error::ApiError;
use super::PREFIX;
use crate::types::{CallEvent, ChatEvent, Failure, FinishReason, Usage};

/// Where nothing has happened for a while.
const PING: &[u8] = b"event: ping\ndata: {\"type\": \"ping\"}\n\n";
/// Clients want thoughts signed, and send the signature back. Nothing is proven by it here.
const SIGNATURE: &str = "Z3JlZW5yb29t";

/// See the module.
#[derive(Debug)]
pub struct MessageWriter {
    id: String,
    model: String,
    prompt_tokens: u32,
    /// The request marked what is worth keeping: only then something is said to be written.
    marks_cache: bool,
    open: Option<Block>,
    /// Blocks that are complete.
    blocks: usize,
    called: bool,
    reason: (&'static str, Option<String>),
}

/// The kind of the block under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Block {
    Thinking,
    Text,
    Tool,
}

impl MessageWriter {
    /// Of a message with this id from this model, to a prompt of so many tokens.
    pub fn new(id: String, model: String, prompt_tokens: u32, marks_cache: bool) -> Self {
        let reason = ("end_turn", None);
        Self { id, model, prompt_tokens, marks_cache, open: None, blocks: 0, called: false, reason }
    }

    fn message(&self, content: Vec<Value>, reason: Option<(&str, Option<&str>)>, usage: Value) -> Value {
        let (stop_reason, stop_sequence) = reason.map_or((None, None), |(reason, stop)| (Some(reason), stop));
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": stop_reason, "stop_sequence": stop_sequence, "usage": usage,
        })
    }

    /// Begins a block, and ends the one before.
    fn start(&mut self, out: &mut Vec<u8>, block: Block, content: &Value) {
        self.stop(out);
        event(out, "content_block_start", json!({"index": self.blocks, "content_block": content}));
        self.open = Some(block);
    }

    fn delta(&self, out: &mut Vec<u8>, delta: &Value) {
        event(out, "content_block_delta", json!({"index": self.blocks, "delta": delta}));
    }

    /// Ends the block under way.
    fn stop(&mut self, out: &mut Vec<u8>) {
        let Some(block) = self.open.take() else { return };
        if block == Block::Thinking {
            self.delta(out, &json!({"type": "signature_delta", "signature": SIGNATURE}));
        }
        event(out, "content_block_stop", json!({"index": self.blocks}));
        self.blocks += 1;
    }

    /// The prompt's tokens: those that were read from the cache, or written to it, are counted by themselves.
    fn usage(&self, usage: Usage) -> Value {
        let created = if self.marks_cache { usage.created_tokens } else { 0 };
        let rest = usage.prompt_tokens.saturating_sub(usage.cached_tokens).saturating_sub(created);
        json!({
            "input_tokens": rest,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        })
    }
}

impl Writer for MessageWriter {
    fn begin(&mut self, out: &mut Vec<u8>) {
        // How much of it is in the cache is not known yet; the end has the whole truth.
        let usage = self.usage(Usage { prompt_tokens: self.prompt_tokens, ..Usage::default() });
        event(out, "message_start", json!({"message": self.message(Vec::new(), None, usage)}));
    }

    fn piece(&mut self, out: &mut Vec<u8>, _: usize, piece: ChatEvent) {
        match piece {
            ChatEvent::Reasoning(text) => {
                if self.open != Some(Block::Thinking) {
                    let content = json!({"type": "thinking", "thinking": "", "signature": ""});
                    self.start(out, Block::Thinking, &content);
                }
                self.delta(out, &json!({"type": "thinking_delta", "thinking": text}));
            }
            ChatEvent::Text(text) => {
                if self.open != Some(Block::Text) {
                    self.start(out, Block::Text, &json!({"type": "text", "text": ""}));
                }
                self.delta(out, &json!({"type": "text_delta", "text": text}));
            }
            ChatEvent::Call(CallEvent::Started { id, name, .. }) => {
                self.called = true;
                let content = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                self.start(out, Block::Tool, &content);
            }
            ChatEvent::Call(CallEvent::Arguments { text, .. }) => {
                self.delta(out, &json!({"type": "input_json_delta", "partial_json": text}));
            }
            ChatEvent::Call(CallEvent::Finished { .. }) => self.stop(out),
            ChatEvent::Scores(_) | ChatEvent::Done { .. } | ChatEvent::Failed(_) => {}
        }
    }

    fn finish(&mut self, out: &mut Vec<u8>, _: usize, finish: FinishReason, stop_string: Option<&str>) {
        self.stop(out);
        self.reason = (reason(finish, self.called, stop_string), stop_string.map(str::to_owned));
    }

    fn end(&mut self, out: &mut Vec<u8>, usage: Usage) {
        let (stop_reason, stop_sequence) = &self.reason;
        let delta = json!({"stop_reason": stop_reason, "stop_sequence": stop_sequence});
        event(out, "message_delta", json!({"delta": delta, "usage": self.usage(usage)}));
        event(out, "message_stop", json!({}));
    }

    fn fail(&mut self, out: &mut Vec<u8>, failure: Failure) {
        event(out, "error", error_body(&ApiError::from(failure), None));
    }

    fn heartbeat(&self) -> &'static [u8] {
        PING
    }

    fn error(&self, error: &ApiError) -> Bytes {
        error_body(error, Some(self.id.trim_start_matches(PREFIX))).to_string().into()
    }

    fn whole(&self, answers: &[Answer], usage: Usage) -> Bytes {
        let Some(answer) = answers.first() else { return Bytes::new() };
        let mut content = Vec::new();
        if !answer.reasoning.is_empty() {
            content.push(json!({"type": "thinking", "thinking": answer.reasoning, "signature": SIGNATURE}));
        }
        if !answer.text.is_empty() {
            content.push(json!({"type": "text", "text": answer.text}));
        }
        for call in &answer.calls {
            // Arguments that were cut are no JSON: the call stands without them.
            let input = serde_json::from_str::<Map<String, Value>>(&call.arguments).unwrap_or_default();
            content.push(json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input}));
        }
        let stop = answer.stop_string.as_deref();
        let reason = reason(answer.finish, !answer.calls.is_empty(), stop);
        self.message(content, Some((reason, stop)), self.usage(usage)).to_string().into()
    }
}

fn event(out: &mut Vec<u8>, kind: &str, mut body: Value) {
    body["type"] = kind.into();
    out.extend_from_slice(format!("event: {kind}\ndata: {body}\n\n").as_bytes());
}

fn reason(finish: FinishReason, called: bool, stop_string: Option<&str>) -> &'static str {
    match finish {
        FinishReason::Length => "max_tokens",
        FinishReason::Stop if called => "tool_use",
        FinishReason::Stop if stop_string.is_some() => "stop_sequence",
        FinishReason::Stop => "end_turn",
    }
}

/// An error in Anthropic's shape: its kinds go by the status.
pub fn error_body(error: &ApiError, request_id: Option<&str>) -> Value {
    let kind = match error.status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    };
    let mut body = json!({"type": "error", "error": {"type": kind, "message": error.message}});
    if let Some(id) = request_id {
        body["request_id"] = id.into();
    }
    body
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::FailureReason;

    fn writer() -> MessageWriter {
        MessageWriter::new("msg_1".into(), "m".into(), 9, true)
    }

    /// A thought, a text, two calls.
    fn parts() -> Vec<ChatEvent> {
        let call = |index: u32, text: &str| {
            [
                CallEvent::Started { index, id: format!("t{index}"), name: "add".into() },
                CallEvent::Arguments { index, text: text.into() },
                CallEvent::Finished { index, complete: true },
            ]
            .map(ChatEvent::Call)
        };
        let mut parts = vec![ChatEvent::Reasoning("hm".into()), ChatEvent::Text("So".into())];
        parts.push(ChatEvent::Text(": ".into()));
        parts.extend(call(0, "{\"a\":1}"));
        parts.extend(call(1, "{\"b"));
        parts
    }

    fn events(bytes: &[u8]) -> Vec<Value> {
        let text = std::str::from_utf8(bytes).unwrap();
        let read = |event: &str| {
            let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
            let body: Value = serde_json::from_str(data).unwrap();
            assert_eq!(body["type"], name);
            body
        };
        text.split_terminator("\n\n").map(read).collect()
    }

    #[test]
    fn blocks_come_one_after_the_other() {
        let mut writer = writer();
        let mut out = Vec::new();
        writer.begin(&mut out);
        parts().into_iter().for_each(|event| writer.piece(&mut out, 0, event));
        writer.finish(&mut out, 0, FinishReason::Stop, None);
        let usage = Usage {
            prompt_tokens: 9,
            cached_tokens: 4,
            created_tokens: 3,
            completion_tokens: 7,
            ..Usage::default()
        };
        writer.end(&mut out, usage);
        let events = events(&out);
        let short = |event: &Value| {
            let kind = event["type"].as_str().unwrap().trim_start_matches("content_block_").to_owned();
            let inner = event["delta"]["type"].as_str().or(event["content_block"]["type"].as_str());
            let index = event["index"].as_u64().map(|index| index.to_string());
            [index, Some(kind), inner.map(str::to_owned)].into_iter().flatten().collect::<Vec<_>>().join(" ")
        };
        let order: Vec<String> = events.iter().map(short).collect();
        assert_eq!(
            order,
            [
                "message_start",
                "0 start thinking",
                "0 delta thinking_delta",
                "0 delta signature_delta",
                "0 stop",
                "1 start text",
                "1 delta text_delta",
                "1 delta text_delta",
                "1 stop",
                "2 start tool_use",
                "2 delta input_json_delta",
                "2 stop",
                "3 start tool_use",
                "3 delta input_json_delta",
                "3 stop",
                "message_delta",
                "message_stop",
            ]
        );
        assert_eq!(events[0]["message"]["usage"]["input_tokens"], 9);
        let last = &events[events.len() - 2];
        assert_eq!(last["delta"]["stop_reason"], "tool_use");
        let expected = json!({
            "input_tokens": 2, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 7,
        });
        assert_eq!(last["usage"], expected);
    }

    #[test]
    fn a_whole_message_has_the_same_blocks() {
        let mut answer = Answer::default();
        parts().into_iter().for_each(|event| answer.push(event));
        let body: Value = serde_json::from_slice(&writer().whole(&[answer], Usage::default())).unwrap();
        let kinds: Vec<&str> =
            body["content"].as_array().unwrap().iter().map(|block| block["type"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["thinking", "text", "tool_use", "tool_use"]);
        assert_eq!(
            (&body["content"][2]["input"], &body["content"][3]["input"]),
            (&json!({"a": 1}), &json!({}))
        );
        let stopped = Answer { text: "x".into(), stop_string: Some("END".into()), ..Answer::default() };
        let body: Value = serde_json::from_slice(&writer().whole(&[stopped], Usage::default())).unwrap();
        assert_eq!((&body["stop_reason"], &body["stop_sequence"]), (&json!("stop_sequence"), &json!("END")));
    }

    #[test]
    fn a_failure_is_an_error_event() {
        let mut out = Vec::new();
        writer().fail(&mut out, Failure::new(FailureReason::ShuttingDown, "gone"));
        let event = &events(&out)[0];
        assert_eq!((&event["type"], &event["error"]["type"]), (&json!("error"), &json!("overloaded_error")));
    }
}
