//! `POST /v1/responses`, outward.
//!
//! A response is a list of items: a thought, a message, a call, in the order in which the model writes
//! them. Order of a stream: `response.created`, `response.in_progress`; for each item
//! `response.output_item.added`, what belongs to it, `response.output_item.done`; `response.completed`,
//! or `.incomplete`, or `.failed`. Every event has the next number.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Map, Value, json};

use super::super::answer::{Answer, Writer};
use super::super::api_error::ApiError;
use super::store::{Store, Stored};
use crate::types::{CallEvent, ChatEvent, ChatMessage, Failure, FinishReason, Role, ToolCall, Usage};

/// What becomes of a response when it is complete.
#[derive(Debug)]
pub struct Keep {
    /// Where it is kept.
    pub store: Arc<Store>,
    /// Items of its request.
    pub input: Vec<Value>,
    /// The conversation before it.
    pub conversation: Vec<ChatMessage>,
    /// The prompt cache's name for the conversation.
    pub session: Option<String>,
}

/// See the module.
#[derive(Debug)]
pub struct ResponseWriter {
    /// The response without output, status and usage.
    head: Map<String, Value>,
    /// `resp_…` without its prefix: items are named after it.
    number: String,
    keep: Option<Keep>,
    /// Items that are complete.
    output: Vec<Value>,
    open: Option<Open>,
    finish: FinishReason,
    events: u64,
}

/// The item under way.
#[derive(Debug)]
enum Open {
    Thought { id: String, text: String },
    Message { id: String, text: String },
    Call { id: String, call_id: String, name: String, arguments: String },
}

impl ResponseWriter {
    /// Of a response whose fields are these: `id`, `model` and so on, and what it repeats of its request.
    pub fn new(head: Map<String, Value>, keep: Option<Keep>) -> Self {
        let id = head.get("id").and_then(Value::as_str).unwrap_or_default();
        Self {
            number: id.trim_start_matches("resp_").to_owned(),
            head,
            keep,
            output: Vec::new(),
            open: None,
            finish: FinishReason::Stop,
            events: 0,
        }
    }

    fn event(&mut self, out: &mut Vec<u8>, kind: &str, mut body: Value) {
        body["type"] = kind.into();
        body["sequence_number"] = self.events.into();
        self.events += 1;
        out.extend_from_slice(format!("event: {kind}\ndata: {body}\n\n").as_bytes());
    }

    /// The response as it is now.
    fn body(&self, status: &str, usage: Option<Usage>) -> Value {
        let mut body = self.head.clone();
        let cut = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        for (name, value) in [
            ("status", status.into()),
            ("error", Value::Null),
            ("incomplete_details", cut.unwrap_or_default()),
            ("output", self.output.clone().into()),
            ("usage", usage.map(usage_body).unwrap_or_default()),
        ] {
            body.insert(name.into(), value);
        }
        body.into()
    }

    /// A new item's id.
    fn item_id(&self, prefix: &str) -> String {
        format!("{prefix}_{}_{}", self.number, self.output.len())
    }

    /// Begins an item.
    fn open(&mut self, out: &mut Vec<u8>, open: Open) {
        self.close(out);
        let index = self.output.len();
        let item = item(&open, "in_progress", false);
        self.event(out, "response.output_item.added", json!({"output_index": index, "item": item}));
        if let Some(part) = part(&open, false) {
            let body = json!({
                "item_id": open.id(), "output_index": index, "content_index": 0, "part": part,
            });
            self.event(out, "response.content_part.added", body);
        }
        self.open = Some(open);
    }

    /// Ends the item under way.
    fn close(&mut self, out: &mut Vec<u8>) {
        let Some(open) = self.open.take() else { return };
        let index = self.output.len();
        let of = |more: Value| {
            let mut body = json!({"item_id": open.id(), "output_index": index, "content_index": 0});
            if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
                body.extend(more);
            }
            body
        };
        match &open {
            Open::Thought { text, .. } => {
                self.event(out, "response.reasoning_text.done", of(json!({"text": text})));
            }
            Open::Message { text, .. } => {
                self.event(out, "response.output_text.done", of(json!({"text": text, "logprobs": []})));
            }
            Open::Call { id, name, arguments, .. } => {
                let body = json!({
                    "item_id": id, "output_index": index, "name": name, "arguments": arguments,
                });
                self.event(out, "response.function_call_arguments.done", body);
            }
        }
        if let Some(part) = part(&open, true) {
            self.event(out, "response.content_part.done", of(json!({"part": part})));
        }
        let item = item(&open, "completed", true);
        self.event(out, "response.output_item.done", json!({"output_index": index, "item": item.clone()}));
        self.output.push(item);
    }

    /// More text of a thought or a message, which is begun where it is not under way.
    fn text(&mut self, out: &mut Vec<u8>, is_thought: bool, more: &str) {
        let goes_on = match &self.open {
            Some(Open::Thought { .. }) => is_thought,
            Some(Open::Message { .. }) => !is_thought,
            _ => false,
        };
        if !goes_on {
            self.close(out);
            let text = String::new();
            let open = match is_thought {
                true => Open::Thought { id: self.item_id("rs"), text },
                false => Open::Message { id: self.item_id("msg"), text },
            };
            self.open(out, open);
        }
        let index = self.output.len();
        let Some(Open::Thought { id, text } | Open::Message { id, text }) = &mut self.open else { return };
        text.push_str(more);
        let mut body = json!({"item_id": id, "output_index": index, "content_index": 0, "delta": more});
        if is_thought {
            self.event(out, "response.reasoning_text.delta", body);
        } else {
            body["logprobs"] = json!([]);
            self.event(out, "response.output_text.delta", body);
        }
    }

    fn call(&mut self, out: &mut Vec<u8>, event: CallEvent) {
        match event {
            CallEvent::Started { id: call_id, name, .. } => {
                self.close(out);
                let id = self.item_id("fc");
                self.open(out, Open::Call { id, call_id, name, arguments: String::new() });
            }
            CallEvent::Arguments { text, .. } => {
                let index = self.output.len();
                let Some(Open::Call { id, arguments, .. }) = &mut self.open else { return };
                arguments.push_str(&text);
                let body = json!({"item_id": id, "output_index": index, "delta": text});
                self.event(out, "response.function_call_arguments.delta", body);
            }
            CallEvent::Finished { .. } => self.close(out),
        }
    }

    /// Keeps the response, where it is to be kept.
    fn store(&self, body: &Value) {
        let Some(keep) = &self.keep else { return };
        let id = self.head.get("id").and_then(Value::as_str).unwrap_or_default();
        let mut conversation = keep.conversation.clone();
        conversation.push(message(body["output"].as_array().map_or(&[], Vec::as_slice)));
        let (input, session) = (keep.input.clone(), keep.session.clone());
        keep.store.put(id, Stored { body: body.clone(), input, conversation, session });
    }
}

impl Writer for ResponseWriter {
    fn begin(&mut self, out: &mut Vec<u8>) {
        for kind in ["response.created", "response.in_progress"] {
            let body = json!({"response": self.body("in_progress", None)});
            self.event(out, kind, body);
        }
    }

    fn piece(&mut self, out: &mut Vec<u8>, _: usize, event: ChatEvent) {
        match event {
            ChatEvent::Text(text) => self.text(out, false, &text),
            ChatEvent::Reasoning(text) => self.text(out, true, &text),
            ChatEvent::Call(event) => self.call(out, event),
            ChatEvent::Scores(_) | ChatEvent::Done { .. } | ChatEvent::Failed(_) => {}
        }
    }

    fn finish(&mut self, out: &mut Vec<u8>, _: usize, finish: FinishReason, _: Option<&str>) {
        self.close(out);
        self.finish = finish;
    }

    fn end(&mut self, out: &mut Vec<u8>, usage: Usage) {
        let status = status(self.finish);
        let body = self.body(status, Some(usage));
        self.store(&body);
        self.event(out, &format!("response.{status}"), json!({"response": body}));
    }

    fn fail(&mut self, out: &mut Vec<u8>, failure: Failure) {
        self.close(out);
        let error = ApiError::from(failure);
        let mut body = self.body("failed", None);
        // The API knows few codes; the message says the rest.
        body["error"] = json!({"code": "server_error", "message": error.message});
        self.event(out, "response.failed", json!({"response": body}));
    }

    fn whole(&self, answers: &[Answer], usage: Usage) -> Bytes {
        let mut writer = Self {
            open: None,
            output: Vec::new(),
            number: self.number.clone(),
            ..Self::new(self.head.clone(), None)
        };
        let Some(answer) = answers.first() else { return Bytes::new() };
        let mut events = Vec::new();
        for (is_thought, text) in [(true, &answer.reasoning), (false, &answer.text)] {
            if !text.is_empty() {
                writer.text(&mut events, is_thought, text);
            }
        }
        for (index, call) in (0..).zip(&answer.calls) {
            let (id, name) = (call.id.clone(), call.name.clone());
            writer.call(&mut events, CallEvent::Started { index, id, name });
            writer.call(&mut events, CallEvent::Arguments { index, text: call.arguments.clone() });
        }
        writer.close(&mut events);
        let body = writer.body(status(answer.finish), Some(usage));
        self.store(&body);
        body.to_string().into()
    }
}

impl Open {
    fn id(&self) -> &str {
        match self {
            Self::Thought { id, .. } | Self::Message { id, .. } | Self::Call { id, .. } => id,
        }
    }
}

/// The content of an item; `whole`: with its text.
fn part(open: &Open, whole: bool) -> Option<Value> {
    let said = |text: &str| if whole { text.to_owned() } else { String::new() };
    match open {
        Open::Thought { text, .. } => Some(json!({"type": "reasoning_text", "text": said(text)})),
        Open::Message { text, .. } => {
            Some(json!({"type": "output_text", "text": said(text), "annotations": [], "logprobs": []}))
        }
        Open::Call { .. } => None,
    }
}

fn item(open: &Open, status: &str, whole: bool) -> Value {
    let content: Vec<Value> = part(open, true).filter(|_| whole).into_iter().collect();
    match open {
        Open::Thought { id, .. } => {
            json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": content})
        }
        Open::Message { id, .. } => {
            json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": content})
        }
        Open::Call { id, call_id, name, arguments } => json!({
            "id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
            "arguments": if whole { arguments.as_str() } else { "" },
        }),
    }
}

/// A response's output as the conversation's next message.
fn message(output: &[Value]) -> ChatMessage {
    let mut message = ChatMessage::text(Role::Assistant, "");
    message.content = None;
    for item in output {
        let said = item["content"][0]["text"].as_str().unwrap_or_default();
        match item["type"].as_str() {
            Some("reasoning") => message.reasoning.get_or_insert_default().push_str(said),
            Some("message") => message.content.get_or_insert_default().push_str(said),
            _ => {
                let text = |name: &str| item[name].as_str().unwrap_or_default();
                // Arguments that were cut are no JSON: the call stands without them.
                let arguments =
                    serde_json::from_str::<Map<String, Value>>(text("arguments")).unwrap_or_default();
                let (id, name) = (Some(text("call_id").to_owned()), text("name").to_owned());
                message.tool_calls.push(ToolCall { id, name, arguments: arguments.into() });
            }
        }
    }
    if message.tool_calls.is_empty() {
        message.content.get_or_insert_default();
    }
    message
}

fn status(finish: FinishReason) -> &'static str {
    match finish {
        FinishReason::Stop => "completed",
        FinishReason::Length => "incomplete",
    }
}

fn usage_body(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens.saturating_add(usage.completion_tokens),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::FailureReason;

    fn head() -> Map<String, Value> {
        let head = json!({"id": "resp_1", "object": "response", "model": "m"});
        head.as_object().cloned().unwrap_or_default()
    }

    fn call(index: u32, texts: &[&str]) -> Vec<ChatEvent> {
        let started = CallEvent::Started { index, id: format!("call_{index}"), name: "add".into() };
        let arguments = texts.iter().map(|text| CallEvent::Arguments { index, text: (*text).into() });
        let all =
            [started].into_iter().chain(arguments).chain([CallEvent::Finished { index, complete: true }]);
        all.map(ChatEvent::Call).collect()
    }

    /// A thought, a text, two calls.
    fn parts() -> Vec<ChatEvent> {
        let mut parts = vec![ChatEvent::Reasoning("hm".into())];
        parts.extend(["So", ": "].map(|text| ChatEvent::Text(text.into())));
        parts.extend(call(0, &["{\"a\":", "1}"]));
        parts.extend(call(1, &["{}"]));
        parts
    }

    /// Names and bodies of events.
    fn events(bytes: &[u8]) -> Vec<(String, Value)> {
        let text = std::str::from_utf8(bytes).unwrap();
        let read = |event: &str| {
            let (name, data) = event.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
            let body: Value = serde_json::from_str(data).unwrap();
            assert_eq!(body["type"], name);
            (name.to_owned(), body)
        };
        text.split_terminator("\n\n").map(read).collect()
    }

    fn streamed(writer: &mut ResponseWriter, finish: FinishReason) -> Vec<(String, Value)> {
        let mut out = Vec::new();
        writer.begin(&mut out);
        parts().into_iter().for_each(|event| writer.piece(&mut out, 0, event));
        writer.finish(&mut out, 0, finish, None);
        writer.end(&mut out, Usage { prompt_tokens: 3, completion_tokens: 4, ..Usage::default() });
        events(&out)
    }

    #[test]
    fn events_come_in_order_and_are_numbered() {
        let events = streamed(&mut ResponseWriter::new(head(), None), FinishReason::Stop);
        let names: Vec<&str> = events.iter().map(|(name, _)| name.trim_start_matches("response.")).collect();
        let call = |deltas: usize| {
            let mut names = vec!["output_item.added"];
            names.extend(vec!["function_call_arguments.delta"; deltas]);
            names.extend(["function_call_arguments.done", "output_item.done"]);
            names
        };
        let mut expected = vec!["created", "in_progress"];
        expected.extend(["output_item.added", "content_part.added", "reasoning_text.delta"]);
        expected.extend(["reasoning_text.done", "content_part.done", "output_item.done"]);
        expected.extend([
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
        ]);
        expected.extend(["output_text.done", "content_part.done", "output_item.done"]);
        expected.extend(call(2));
        expected.extend(call(1));
        expected.push("completed");
        assert_eq!(names, expected);
        for (number, (_, body)) in (0_u64..).zip(&events) {
            assert_eq!(body["sequence_number"], number);
        }
        let response = &events.last().unwrap().1["response"];
        assert_eq!(
            (&response["status"], &response["usage"]["total_tokens"]),
            (&json!("completed"), &json!(7))
        );
        let output = response["output"].as_array().unwrap();
        let kinds: Vec<&str> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["reasoning", "message", "function_call", "function_call"]);
        assert_eq!(output[2]["arguments"], "{\"a\":1}");
        // Each item's events bear its index and its id.
        for (_, body) in events.iter().filter(|(_, body)| body.get("item_id").is_some()) {
            let index = body["output_index"].as_u64().unwrap() as usize;
            assert_eq!(body["item_id"], output[index]["id"]);
        }
    }

    #[test]
    fn whole_or_in_a_stream_the_response_is_the_same_and_can_be_gone_on_from() {
        let store = Arc::new(Store::default());
        let keep = || Keep {
            store: Arc::clone(&store),
            input: vec![json!("x")],
            conversation: vec![ChatMessage::text(Role::User, "x")],
            session: Some("s".into()),
        };
        let events = streamed(&mut ResponseWriter::new(head(), Some(keep())), FinishReason::Length);
        let response = &events.last().unwrap().1["response"];
        assert_eq!(response["incomplete_details"]["reason"], "max_output_tokens");
        let mut answer = Answer { finish: FinishReason::Length, ..Answer::default() };
        parts().into_iter().for_each(|event| answer.push(event));
        let usage = Usage { prompt_tokens: 3, completion_tokens: 4, ..Usage::default() };
        let whole = ResponseWriter::new(head(), Some(keep())).whole(&[answer], usage);
        assert_eq!(&serde_json::from_slice::<Value>(&whole).unwrap(), response);
        let stored = store.get("resp_1").unwrap();
        assert_eq!(&stored.body, response);
        let last = stored.conversation.last().unwrap();
        assert_eq!((last.reasoning.as_deref(), last.content.as_deref()), (Some("hm"), Some("So: ")));
        assert_eq!(last.tool_calls[0].arguments, json!({"a": 1}));
    }

    #[test]
    fn a_failure_ends_the_item_and_is_not_kept() {
        let store = Arc::new(Store::default());
        let keep =
            Keep { store: Arc::clone(&store), input: Vec::new(), conversation: Vec::new(), session: None };
        let mut writer = ResponseWriter::new(head(), Some(keep));
        let mut out = Vec::new();
        writer.piece(&mut out, 0, ChatEvent::Text("So".into()));
        writer.fail(&mut out, Failure::new(FailureReason::EngineRestarted, "gone"));
        let (name, body) = events(&out).pop().unwrap();
        assert_eq!((name.as_str(), &body["response"]["status"]), ("response.failed", &json!("failed")));
        assert_eq!(body["response"]["error"]["code"], "server_error");
        assert!(store.get("resp_1").is_none());
    }
}
