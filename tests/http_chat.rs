//! The chat route over real sockets with a scripted engine: answers, streams,
//! fields, errors, cancellation, back-pressure, drain.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "fake")]

use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::Duration;

use greenroom::model::fake::{FakeModel, Fault, Script};
use greenroom::model::{LoadedModel, ModelSource};
use greenroom::observe::Outcome;
use greenroom::types::{EngineError, LoadError};
use serde_json::{Value, json};

mod harness;
mod wire;
use harness::Server;
use wire::{ask, with};

fn greeter() -> Server {
    Server::start(Script::new().say("hello", "Good day to you! 🙂").repeat("forever", "again "))
}

#[test]
fn a_whole_answer_has_openais_shape() {
    let server = greeter();
    let response = server.chat(&with(ask("hello"), json!({"seed": 7, "model": "default"})));
    assert_eq!(response.status, 200, "{}", response.text());
    let body = response.json();
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["model"], "scripted");
    assert_eq!(
        body["choices"][0]["message"],
        json!({"role": "assistant", "content": "Good day to you! 🙂", "refusal": null})
    );
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert_eq!(body["choices"].as_array().unwrap().len(), 1);
    let usage = &body["usage"];
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    assert!(usage["prompt_tokens"].as_u64().unwrap() > 5);
    // One token a byte, and the end.
    assert_eq!(usage["completion_tokens"], "Good day to you! 🙂".len() + 1);
    let sum = usage["prompt_tokens"].as_u64().unwrap() + usage["completion_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"], sum);
    assert!(body["system_fingerprint"].is_string());
    assert!(body["created"].as_u64().is_some());
    let id = body["id"].as_str().unwrap();
    assert_eq!(id, format!("chatcmpl-{}", response.header("x-request-id").unwrap()));
    assert_eq!(response.header("x-greenroom-seed"), Some("7"));
}

#[test]
fn a_stream_has_role_pieces_finish_and_done_in_this_order() {
    let server = greeter();
    let response = server.chat(&with(ask("hello"), json!({"stream": true})));
    assert_eq!(response.status, 200);
    assert!(response.header("content-type").unwrap().starts_with("text/event-stream"));
    let events = response.events();
    assert_eq!(events.last().unwrap(), "[DONE]");
    let chunks: Vec<Value> =
        events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let text: String =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "Good day to you! 🙂");
    let last = chunks.last().unwrap();
    assert_eq!(last["choices"][0]["delta"], json!({}));
    assert_eq!(last["choices"][0]["finish_reason"], "stop");
    for chunk in &chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        for same in ["id", "created", "model", "system_fingerprint"] {
            assert_eq!(chunk[same], chunks[0][same]);
        }
        assert!(chunk.get("usage").is_none(), "nobody asked for usage");
        assert_eq!(chunk["choices"].as_array().unwrap().len(), 1);
    }
    assert!(chunks[..chunks.len() - 1].iter().all(|chunk| chunk["choices"][0]["finish_reason"].is_null()));
}

#[test]
fn usage_comes_in_a_chunk_of_its_own_and_only_when_asked_for() {
    let server = greeter();
    let ask_with = |include: bool| {
        let options = json!({"stream": true, "stream_options": {"include_usage": include}});
        server.chat(&with(ask("hello"), options)).events()
    };
    let events = ask_with(true);
    let chunks: Vec<Value> =
        events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let (last, rest) = chunks.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], "Good day to you! 🙂".len() + 1);
    assert!(rest.iter().all(|chunk| chunk.get("usage").is_some_and(Value::is_null)));
    assert!(!ask_with(false).iter().any(|event| event.contains("usage")));
}

#[test]
fn unknown_fields_are_served_and_named() {
    let server = greeter();
    let body = json!({
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello", "cache\"": 1}], "mood": "gay"}],
        "frobnicate": true, "nothing": null, "stream_options": {"extra": 1},
    });
    let response = server.chat(&body);
    assert_eq!(response.status, 200, "{}", response.text());
    let warning = response.header("warning").unwrap();
    for name in ["frobnicate", "messages[0].mood", "messages[0].content[0].cache?", "stream_options.extra"] {
        assert!(warning.contains(name), "{warning}");
    }
    assert!(!warning.contains("nothing"));
    assert!(server.chat(&ask("hello")).header("warning").is_none());
}

#[test]
fn what_is_known_and_not_supported_is_refused_by_name() {
    let server = greeter();
    let tool = |extra: Value| {
        let mut function = json!({"name": "f"});
        function.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        json!([{"type": "function", "function": function}])
    };
    for (param, value) in [
        ("best_of", json!(3)),
        ("response_format", json!({"type": "json_object"})),
        ("response_format", json!({"type": "json_schema", "json_schema": {}})),
        ("tool_choice", json!("required")),
        ("tool_choice", json!({"type": "function", "function": {"name": "f"}})),
        ("audio", json!({"voice": "x"})),
        ("modalities", json!(["text", "audio"])),
        ("prediction", json!({"type": "content"})),
        ("web_search_options", json!({})),
        ("store", json!(true)),
        ("functions", json!([{"name": "f"}])),
        ("function_call", json!({"name": "f"})),
        ("guided_json", json!({})),
        ("grammar", json!("root ::= x")),
        ("continue_final_message", json!(true)),
        ("add_generation_prompt", json!(false)),
        ("stop_token_ids", json!([1])),
        ("min_tokens", json!(5)),
        ("tools[0].function.strict", tool(json!({"strict": true}))),
    ] {
        let field = param.split(['[', '.']).next().unwrap();
        let response = server.chat(&with(ask("hello"), json!({field: value})));
        assert_eq!(response.status, 400, "{param}: {}", response.text());
        let (code, named, message) = response.error();
        assert_eq!((code.as_str(), named.as_deref()), ("unsupported_parameter", Some(param)), "{message}");
        assert!(message.starts_with(&format!("{param}: ")), "{message}");
    }
}

#[test]
fn values_that_ask_for_nothing_are_accepted() {
    let server = greeter();
    let harmless = json!({
        "n": 1, "logprobs": false, "top_logprobs": 0, "response_format": {"type": "text"}, "tool_choice": "auto",
        "parallel_tool_calls": true, "store": false, "metadata": {"a": "b"}, "user": "me", "modalities": ["text"],
        "service_tier": "auto", "functions": [], "function_call": "none", "verbosity": "medium", "tools": [],
        "stop": [], "logit_bias": {}, "stream": false, "prompt_cache_key": "k", "safety_identifier": "s",
        "top_k": -1, "max_tokens": 40, "temperature": 0, "reasoning_effort": "low", "chat_template_kwargs": {"x": 1},
    });
    let response = server.chat(&with(ask("hello"), harmless.clone()));
    assert_eq!(response.status, 200, "{}", response.text());
    assert!(response.header("warning").is_none(), "{:?}", response.header("warning"));
    // null is absent, for every field there is.
    let nulls: serde_json::Map<String, Value> =
        harmless.as_object().unwrap().keys().map(|name| (name.clone(), Value::Null)).collect();
    let more = json!({"seed": null, "max_completion_tokens": null, "stream_options": null, "audio": null, "min_p": null});
    let response = server.chat(&with(with(ask("hello"), Value::Object(nulls)), more));
    assert_eq!(response.status, 200, "{}", response.text());
    assert!(response.header("warning").is_none());
}

#[test]
fn wrong_fields_are_named_with_their_path() {
    let server = greeter();
    let message = |message: Value| json!({"messages": [{"role": "user", "content": "a"}, message]});
    let call = |arguments: Value| {
        let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
        json!({"messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": ""}}, call]},
        ]})
    };
    let field = |name: &str, value: Value| with(ask("hello"), json!({name: value}));
    let many: Vec<String> = (0..17).map(|n| n.to_string()).collect();
    for (body, param) in [
        (json!({}), "messages"),
        (json!({"messages": "hello"}), "messages"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": [{"role": "assistant", "content": ""}]}), "messages"),
        (message(json!("x")), "messages[1]"),
        (message(json!({"content": "x"})), "messages[1].role"),
        (message(json!({"role": "robot", "content": "x"})), "messages[1].role"),
        (message(json!({"role": "user"})), "messages[1].content"),
        (message(json!({"role": "user", "content": 5})), "messages[1].content"),
        (message(json!({"role": "user", "content": [{"text": "x"}]})), "messages[1].content[0].type"),
        (message(json!({"role": "user", "content": [{"type": "text"}]})), "messages[1].content[0].text"),
        (
            message(
                json!({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}]}),
            ),
            "messages[1].content[1].type",
        ),
        (message(json!({"role": "user", "content": "x", "name": 3})), "messages[1].name"),
        (call(json!("{broken")), "messages[1].tool_calls[1].function.arguments"),
        (call(json!("[1]")), "messages[1].tool_calls[1].function.arguments"),
        (call(json!(7)), "messages[1].tool_calls[1].function.arguments"),
        (field("temperature", json!(-0.1)), "temperature"),
        (field("temperature", json!("hot")), "temperature"),
        (field("top_p", json!(1.1)), "top_p"),
        (field("min_p", json!(2)), "min_p"),
        (field("top_k", json!(-2)), "top_k"),
        (field("top_k", json!(1.5)), "top_k"),
        (field("presence_penalty", json!(2.5)), "presence_penalty"),
        (field("frequency_penalty", json!(-3)), "frequency_penalty"),
        (field("repetition_penalty", json!(0)), "repetition_penalty"),
        (field("repetition_penalty", json!(1e-40)), "repetition_penalty"),
        (field("repetition_penalty", json!(100.1)), "repetition_penalty"),
        (field("tools", json!([{"type": "function", "function": {"name": ""}}])), "tools[0].function.name"),
        (
            field("tools", json!([{"function": {"name": "f", "parameters": 1}}])),
            "tools[0].function.parameters",
        ),
        (field("tools", json!([{"function": 1}])), "tools[0].function"),
        (field("tools", json!(["f"])), "tools[0]"),
        (field("max_tokens", json!(0)), "max_tokens"),
        (field("max_completion_tokens", json!(-1)), "max_completion_tokens"),
        (field("seed", json!(1.5)), "seed"),
        (field("logit_bias", json!({"x": 1})), "logit_bias.x"),
        (field("logit_bias", json!({"5": 101})), "logit_bias.5"),
        (field("stop", json!("")), "stop"),
        (field("stop", json!(["a", ""])), "stop[1]"),
        (field("stop", json!(many)), "stop"),
        (field("stream", json!("yes")), "stream"),
        (field("stream_options", json!({"include_usage": 1})), "stream_options.include_usage"),
        (field("reasoning_effort", json!("much")), "reasoning_effort"),
        (field("chat_template_kwargs", json!({"messages": []})), "chat_template_kwargs.messages"),
        (field("tools", json!([{"type": "web"}])), "tools[0].type"),
        (field("tools", json!([{"type": "function", "function": {}}])), "tools[0].function.name"),
        (field("tool_choice", json!("perhaps")), "tool_choice"),
        (field("model", json!(1)), "model"),
        (json!([1]), "body"),
    ] {
        let response = server.chat(&body);
        assert_eq!(response.status, 400, "{body}: {}", response.text());
        let (_, named, text) = response.error();
        let named = named.unwrap();
        assert_eq!(named, param, "{text}");
        assert!(text.starts_with(&format!("{param}: ")), "{text}");
        assert_eq!(response.json()["error"]["type"], "invalid_request_error");
    }
}

#[test]
fn reasoning_effort_lists_what_it_may_be() {
    let server = greeter();
    let (_, _, text) = server.chat(&with(ask("hello"), json!({"reasoning_effort": "much"}))).error();
    assert!(text.contains("none, minimal, low, medium, high"), "{text}");
}

/// Tokens of the prompt that a body makes.
fn prompt_tokens(server: &Server, body: Value) -> u64 {
    let response = server.chat(&with(body, json!({"max_tokens": 1})));
    assert_eq!(response.status, 200, "{}", response.text());
    response.json()["usage"]["prompt_tokens"].as_u64().unwrap()
}

#[test]
fn forms_that_mean_the_same_make_the_same_prompt() {
    let server = greeter();
    let plain = json!({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello world"}]});
    let expected = prompt_tokens(&server, plain.clone());
    for body in [
        json!({"messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hello world"}]}),
        json!({"messages": [{"role": "system", "content": [{"type": "text", "text": "be brief"}]},
            {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": " world"}]}]}),
        json!({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello world"},
            {"role": "assistant", "content": ""}]}),
        json!({"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello world"},
            {"role": "assistant", "content": null}]}),
    ] {
        assert_eq!(prompt_tokens(&server, body.clone()), expected, "{body}");
    }
}

#[test]
fn limits_cut_and_the_newer_field_wins() {
    let server = greeter();
    for fields in [
        json!({"max_tokens": 5}),
        json!({"max_completion_tokens": 5}),
        json!({"max_completion_tokens": 5, "max_tokens": 50}),
        json!({"max_completion_tokens": 5, "max_tokens": 2}),
    ] {
        let body = server.chat(&with(ask("forever"), fields)).json();
        assert_eq!(body["choices"][0]["finish_reason"], "length");
        assert_eq!(body["usage"]["completion_tokens"], 5);
        assert_eq!(body["choices"][0]["message"]["content"], "again");
    }
}

#[test]
fn stop_strings_are_cut_off_and_never_leak() {
    let server = greeter();
    for stop in [json!("day"), json!(["zebra", "day to"])] {
        let body = server.chat(&with(ask("hello"), json!({"stop": stop}))).json();
        assert_eq!(body["choices"][0]["message"]["content"], "Good ");
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
        let response = server.chat(&with(ask("hello"), json!({"stop": stop, "stream": true})));
        let deltas = response.events();
        let text: String = deltas
            .iter()
            .filter_map(|event| serde_json::from_str::<Value>(event).ok())
            .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
            .collect();
        assert_eq!(text, "Good ");
    }
}

#[test]
fn unknown_models_and_long_prompts_say_what_there_is() {
    let server = greeter();
    let response = server.chat(&with(ask("hello"), json!({"model": "gpt-5"})));
    let (code, param, message) = response.error();
    assert_eq!((response.status, code.as_str(), param.as_deref()), (404, "model_not_found", Some("model")));
    assert!(message.contains("scripted"), "{message}");
    let response = server.chat(&ask(&"x".repeat(5000)));
    let (code, _, message) = response.error();
    assert_eq!((response.status, code.as_str()), (400, "context_length_exceeded"));
    assert!(message.contains("4096") && message.contains("shorten"), "{message}");
}

#[test]
fn headers_and_comments_come_before_the_prompt_is_computed() {
    let script = Script::new().say("hello", "Hi").gated();
    let server = Server::with(script, |config| config.http.heartbeat_s = 1);
    let mut connection = server.connect();
    connection.write(server.chat_bytes(&with(ask("hello"), json!({"stream": true}))));
    let head = connection.read_head();
    assert_eq!(head.status, 200);
    assert!(head.header("x-request-id").is_some());
    let first = String::from_utf8(connection.read_chunk().unwrap()).unwrap();
    assert!(first.contains("\"role\":\"assistant\""), "{first}");
    let second = connection.read_chunk().unwrap();
    assert!(second.starts_with(b":"), "a comment, while nothing is computed");
    server.control.open();
    let mut rest = String::new();
    while let Some(chunk) = connection.read_chunk() {
        rest.push_str(&String::from_utf8(chunk).unwrap());
    }
    assert_eq!(wire::events(&rest).last().unwrap(), "[DONE]");
}

#[test]
fn a_client_that_goes_away_cancels_its_request() {
    for stream in [false, true] {
        let server = Server::start(Script::new().repeat("forever", "again ").gated());
        let mut connection = server.connect();
        connection.write(server.chat_bytes(&with(ask("forever"), json!({"stream": stream}))));
        assert!(server.control.wait_begun(1));
        drop(connection);
        server.control.open();
        server.wait("the request to be cancelled", |handles| {
            handles.gauges().requests(Outcome::Cancelled) == 1 && handles.gauges().tickets_live() == 0
        });
    }
}

#[test]
fn a_full_house_is_429_with_a_time_to_come_back() {
    let server = Server::with(Script::new().repeat("forever", "again ").gated(), |config| {
        config.scheduler.max_rows = 1;
        config.scheduler.max_queue = 0;
    });
    let mut taken = server.connect();
    taken.write(server.chat_bytes(&with(ask("forever"), json!({"stream": true}))));
    assert_eq!(taken.read_head().status, 200);
    let response = server.chat(&ask("hello"));
    assert_eq!(response.status, 429, "{}", response.text());
    assert_eq!(response.json()["error"]["type"], "rate_limit_error");
    assert!(response.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    drop(taken);
    server.control.open();
    server.wait("the place to be free again", |handles| handles.gauges().tickets_live() == 0);
    assert_eq!(server.chat(&with(ask("hello"), json!({"max_tokens": 3}))).status, 200);
}

#[test]
fn a_failure_midway_is_an_error_event_and_a_proper_end() {
    let server = Server::start((20..22).fold(Script::new().repeat("forever", "again "), |script, step| {
        script.at_step(step, Fault::Panic("index out of range".into()))
    }));
    let response = server.chat(&with(ask("forever"), json!({"stream": true})));
    assert_eq!(response.status, 200);
    let events = response.events();
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "generation_failed");
    assert_eq!(last["error"]["type"], "server_error");
    assert!(!response.text().contains("index out of range"), "a panic's words are not the client's");
    assert!(!response.text().contains("[DONE]"));
}

#[test]
fn a_failure_of_a_whole_answer_is_a_status() {
    let server =
        Server::start(Script::new().repeat("forever", "again ").fail_rows("poison", EngineError::NotANumber));
    let response = server.chat(&ask("poison"));
    assert_eq!((response.status, response.error().0.as_str()), (500, "generation_failed"));
    assert_eq!(response.header("x-should-retry"), Some("false"));
}

/// Everything that this process logs, as JSON lines.
fn logged() -> Arc<Mutex<Vec<u8>>> {
    #[derive(Clone)]
    struct Into(Arc<Mutex<Vec<u8>>>);
    impl std::io::Write for Into {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    static LOG: OnceLock<Arc<Mutex<Vec<u8>>>> = OnceLock::new();
    let log = LOG.get_or_init(|| {
        let log = Arc::new(Mutex::new(Vec::new()));
        let into = Into(Arc::clone(&log));
        tracing_subscriber::fmt().json().flatten_event(true).with_writer(move || into.clone()).init();
        log
    });
    Arc::clone(log)
}

#[test]
fn every_request_has_one_line_in_the_log_under_the_id_of_its_response() {
    let log = logged();
    let server = Server::start(Script::new().say("hello", "Hi").fail_rows("poison", EngineError::NotANumber));
    let lines = |id: &str| {
        let text = String::from_utf8(log.lock().unwrap().clone()).unwrap();
        let all = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        // Besides that line a failed row leaves a warning with its cause.
        all.filter(|line| line["request_id"] == id && line["level"] == "INFO").collect::<Vec<_>>()
    };
    for (prompt, stream, status, outcome) in [
        ("hello", false, 200, Some("stop")),
        ("hello", true, 200, Some("stop")),
        ("poison", false, 500, Some("failed")),
        ("poison", true, 200, Some("failed")),
        ("", false, 400, None),
    ] {
        let messages = if prompt.is_empty() { json!({"messages": []}) } else { ask(prompt) };
        let response = server.chat(&with(messages, json!({"stream": stream, "seed": 5, "odd": 1})));
        assert_eq!(response.status, status, "{prompt}");
        let id = response.header("x-request-id").unwrap();
        server.wait("its line in the log", |_| !lines(id).is_empty());
        // Whatever is logged for one request is logged before the next one is answered.
        assert_eq!(server.get("/livez").status, 200);
        let found = lines(id);
        assert_eq!(found.len(), 1, "{prompt}, stream: {stream}: {found:?}");
        assert_eq!(found[0].get("outcome").and_then(Value::as_str), outcome, "{found:?}");
        // A client that failed can say which seed and which fields it was.
        if outcome.is_some() {
            assert_eq!(response.header("x-greenroom-seed"), Some("5"));
            assert!(response.header("warning").unwrap().contains("odd"));
        }
    }
}

#[test]
fn names_of_any_length_are_warned_of() {
    let server = greeter();
    for length in [1, 199, 200, 201, 1023, 1024, 1025, 100_000] {
        let name = "x".repeat(length);
        let response = server.chat(&with(ask("hello"), json!({name: 1, "last": 2})));
        assert_eq!(response.status, 200);
        let warning = response.header("warning").unwrap();
        assert!(warning.contains("ignored: x") && warning.contains(", last\""), "{warning}");
        assert!(warning.len() < 1100, "{}", warning.len());
    }
}

/// A model whose load waits for the test.
struct Slow {
    inner: FakeModel,
    gate: Mutex<mpsc::Receiver<()>>,
}

impl ModelSource for Slow {
    fn id(&self) -> &str {
        self.inner.id()
    }

    fn load(&self) -> Result<LoadedModel, LoadError> {
        let _ = self.gate.lock().unwrap().recv();
        self.inner.load()
    }
}

#[test]
fn while_the_model_loads_requests_are_503_and_readiness_says_so() {
    let inner = FakeModel::new("slow", Script::new().say("hello", "Hi"));
    let control = inner.control();
    let (open, gate) = mpsc::channel();
    let server = Server::serving(Arc::new(Slow { inner, gate: Mutex::new(gate) }), control, |_| {});
    let response = server.chat(&ask("hello"));
    assert_eq!((response.status, response.error().0.as_str()), (503, "model_loading"));
    assert!(response.header("retry-after").is_some());
    assert_eq!(server.get("/readyz").status, 503);
    assert_eq!(server.get("/livez").status, 200);
    assert_eq!(server.get("/health").json()["status"], "loading");
    assert_eq!(server.get("/v1/models").json()["data"][0]["state"], "loading");
    open.send(()).unwrap();
    server.wait("the model", |handles| handles.health() == greenroom::Health::Ready);
    assert_eq!(server.get("/readyz").status, 200);
    assert_eq!(server.chat(&ask("hello")).status, 200);
}

#[test]
fn a_drain_ends_streams_with_an_error_event_and_refuses_new_requests() {
    let server = Server::start(Script::new().repeat("forever", "again ").gated());
    let mut connection = server.connect();
    connection.write(server.chat_bytes(&with(ask("forever"), json!({"stream": true}))));
    assert_eq!(connection.read_head().status, 200);
    server.drain(Duration::ZERO);
    server.wait("the drain", |handles| handles.is_draining());
    let refused = server.chat(&ask("hello"));
    assert_eq!((refused.status, refused.error().0.as_str()), (503, "shutting_down"));
    assert!(refused.header("retry-after").is_some());
    assert_eq!(refused.header("connection"), Some("close"));
    assert_eq!(server.get("/health").json()["status"], "draining");
    let text = std::thread::scope(|scope| {
        // Step by step: the answer must not end by itself before the drain reaches it.
        let (over, ended) = mpsc::channel::<()>();
        let control = server.control.clone();
        scope.spawn(move || {
            while ended.recv_timeout(Duration::from_millis(2)) == Err(mpsc::RecvTimeoutError::Timeout) {
                control.allow(1);
            }
        });
        let mut text = String::new();
        while let Some(chunk) = connection.read_chunk() {
            text.push_str(&String::from_utf8(chunk).unwrap());
        }
        drop(over);
        text
    });
    let events = wire::events(&text);
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "shutting_down", "{last}");
}
