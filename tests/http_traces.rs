//! Where requests spent their time, over real sockets with a scripted engine: their names,
//! their traces, the list of them, the timing of answers, what is counted.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "fake")]

use greenroom::model::fake::Script;
use greenroom::types::{ChatMessage, ChatRequest, RequestId, Role};
use serde_json::{Value, json};

mod harness;
mod wire;
use harness::Server;
use wire::{Response, ask, with};

fn script() -> Script {
    Script::new().say("hello", "Hi").repeat("forever", "again ")
}

/// A chat request with more headers.
fn chat_with(server: &Server, headers: &[(&str, &str)], body: &Value) -> String {
    let body = body.to_string();
    let mut head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n",
        server.address
    );
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    format!("{head}Content-Length: {}\r\n\r\n{body}", body.len())
}

fn trace(server: &Server, id: &str) -> Value {
    let response = server.get(&format!("/v1/requests/{id}/trace"));
    assert_eq!(response.status, 200, "{}", response.text());
    response.json()
}

/// Waits until a request has ended; gives its trace.
fn ended(server: &Server, id: &str) -> Value {
    server.wait("the end of the request", |_| !trace(server, id)["outcome"].is_null());
    trace(server, id)
}

/// The event of this phase.
fn event<'a>(trace: &'a Value, phase: &str) -> &'a Value {
    let found = trace["events"].as_array().unwrap().iter().find(|event| event["phase"] == phase);
    found.unwrap_or_else(|| panic!("no {phase} in {trace:#}"))
}

fn phases(trace: &Value) -> Vec<&str> {
    trace["events"].as_array().unwrap().iter().map(|event| event["phase"].as_str().unwrap()).collect()
}

/// The metrics of a `server-timing` header, in milliseconds.
fn timing(response: &Response) -> Vec<(String, f64)> {
    let header = response.header("server-timing").unwrap();
    let metrics = header.split(", ").map(|metric| {
        let (name, time) = metric.split_once(";dur=").unwrap_or_else(|| panic!("{header}"));
        (name.to_owned(), time.parse().unwrap())
    });
    metrics.collect()
}

#[test]
fn a_request_keeps_the_name_that_its_client_gave_it() {
    let server = Server::start(script());
    let named = [("X-Request-Id", "agent-7.3")];
    for body in [ask("hello"), with(ask("hello"), json!({"stream": true})), json!({"messages": []})] {
        let response = server.send(chat_with(&server, &named, &body));
        assert_eq!(response.header("x-request-id"), Some("agent-7.3"), "{body}");
    }
    let missing = format!("GET /nowhere HTTP/1.1\r\nHost: {}\r\nX-Request-Id: lost\r\n\r\n", server.address);
    assert_eq!(server.send(missing).header("x-request-id"), Some("lost"));
    for insane in ["", "\u{e9}t\u{e9}", &"x".repeat(129)] {
        let response = server.send(chat_with(&server, &[("X-Request-Id", insane)], &ask("hello")));
        let id = response.header("x-request-id").unwrap();
        assert_eq!(response.json()["id"], format!("chatcmpl-{id}"), "ours stands in for `{insane}`");
    }
}

#[test]
fn a_trace_is_found_by_the_clients_name_ours_and_the_answers() {
    let server = Server::start(script());
    let name = "run 5/step 2";
    let answer = server.send(chat_with(&server, &[("X-Request-Id", name)], &ask("hello"))).json();
    let answer_id = answer["id"].as_str().unwrap();
    let own = answer_id.strip_prefix("chatcmpl-").unwrap();
    let found = ended(&server, own);
    assert_eq!((&found["traceId"], &found["requestId"]), (&json!(name), &json!(own)));
    for id in [answer_id, "run%205%2Fstep%202"] {
        assert_eq!(trace(&server, id), found, "{id}");
    }
    let unknown = server.get("/v1/requests/nobody/trace");
    let (code, _, message) = unknown.error();
    assert_eq!((unknown.status, code.as_str()), (404, "request_not_found"));
    assert!(message.contains("`nobody`") && message.contains("trace.ring"), "{message}");
    let request = server.send(server.post("/v1/requests/nobody/trace", "application/json", "{}"));
    assert_eq!((request.status, request.header("allow")), (405, Some("GET, HEAD")));
}

#[test]
fn a_trace_tells_the_phases_in_order_and_within_the_whole() {
    let server = Server::start(script());
    for stream in [false, true] {
        let body = with(ask("hello"), json!({"stream": stream, "priority": "background"}));
        let response = server.send(chat_with(&server, &[], &body));
        let trace = ended(&server, response.header("x-request-id").unwrap());
        assert_eq!((&trace["version"], &trace["clock"]), (&json!(1), &json!("monotonic-ms")));
        assert_eq!((&trace["outcome"], &trace["end"]), (&json!("success"), &json!("stop")));
        assert_eq!((&trace["route"], &trace["dropped"]), (&json!("/v1/chat/completions"), &json!(0)));
        let phases = phases(&trace);
        let at = |phase: &str| {
            phases.iter().position(|known| *known == phase).unwrap_or_else(|| panic!("{phase}"))
        };
        let order =
            ["request.body_parse", "completion.total", "request.prompt_prepare", "response.first_write"];
        assert!(order.windows(2).all(|pair| at(pair[0]) < at(pair[1])), "{phases:?}");
        assert!(at("response.first_write") < at("response.final_write"), "{phases:?}");
        let total = trace["totalMs"].as_f64().unwrap();
        for event in trace["events"].as_array().unwrap() {
            let end = event["startMs"].as_f64().unwrap() + event["durationMs"].as_f64().unwrap();
            assert!(end <= total + 0.01, "{event} after {total}");
            assert!(event.get("open").is_none(), "{event}");
        }
        assert_eq!(event(&trace, "completion.total")["attributes"], json!({"priority": "background"}));
        let prompt = &event(&trace, "request.prompt_prepare")["attributes"]["promptTokens"];
        assert!(prompt.as_u64().unwrap() > 5, "{prompt}");
        assert!(!trace.to_string().contains("hello"), "no content");
    }
}

#[test]
fn a_request_under_way_has_a_trace_without_an_outcome() {
    let server = Server::start(script().gated());
    let mut connection = server.connect();
    let body = with(ask("hello"), json!({"stream": true}));
    connection.write(chat_with(&server, &[("X-Request-Id", "waits")], &body));
    assert_eq!(connection.read_head().status, 200);
    let found = trace(&server, "waits");
    assert_eq!((&found["outcome"], &found["end"]), (&Value::Null, &Value::Null));
    assert_eq!(event(&found, "completion.total")["open"], true);
    let list = server.get("/v1/requests").json();
    assert_eq!((&list["object"], &list["data"][0]["traceId"]), (&json!("list"), &json!("waits")));
    assert!(list["data"][0]["outcome"].is_null());
    server.control.open();
    while connection.read_chunk().is_some() {}
    assert_eq!(ended(&server, "waits")["outcome"], "success");
}

#[test]
fn what_was_refused_or_given_up_has_a_trace_as_well() {
    let server = Server::with(script(), |config| {
        config.scheduler.max_rows = 1;
        config.scheduler.max_queue = 0;
    });
    server.send(chat_with(&server, &[("X-Request-Id", "wrong")], &json!({"messages": []})));
    let wrong = trace(&server, "wrong");
    assert_eq!((&wrong["outcome"], &wrong["end"]), (&json!("error"), &json!("refused")));
    let attributes = &event(&wrong, "response.refused")["attributes"];
    assert_eq!(*attributes, json!({"status": 400, "code": "invalid_value"}));
    server.send(chat_with(&server, &[("X-Request-Id", "broken")], &json!("text")));
    assert_eq!(event(&trace(&server, "broken"), "response.refused")["attributes"]["code"], "invalid_type");
    let mut leaving = server.connect();
    let endless = with(ask("forever"), json!({"stream": true}));
    leaving.write(chat_with(&server, &[("X-Request-Id", "leaves")], &endless));
    leaving.read_head();
    server.send(chat_with(&server, &[("X-Request-Id", "late")], &ask("hello")));
    let late = trace(&server, "late");
    assert_eq!(late["end"], "refused");
    assert_eq!(
        event(&late, "response.refused")["attributes"],
        json!({"status": 429, "code": "rate_limit_exceeded"})
    );
    assert!(!phases(&late).contains(&"completion.total"), "it was never begun");
    drop(leaving);
    let left = ended(&server, "leaves");
    assert_eq!((&left["outcome"], &left["end"]), (&json!("abort"), &json!("cancelled")));
}

#[test]
fn the_latest_requests_are_listed_and_only_as_many_as_are_kept() {
    let listed = |server: &Server| {
        let list = server.get("/v1/requests").json();
        let ids = list["data"].as_array().unwrap().iter().map(|request| request["traceId"].clone());
        ids.collect::<Vec<_>>()
    };
    let ask_all = |server: &Server| {
        for name in ["one", "two", "three"] {
            server.send(chat_with(server, &[("X-Request-Id", name)], &ask("hello")));
            server.wait("its end", |handles| {
                handles.traces().recent().iter().all(|trace| trace.outcome().is_some())
            });
        }
    };
    let server = Server::with(script(), |config| config.trace.ring = 2);
    ask_all(&server);
    assert_eq!(listed(&server), ["three", "two"]);
    assert_eq!(server.get("/v1/requests/one/trace").status, 404);
    let summary = server.get("/v1/requests").json()["data"][0].clone();
    assert_eq!((&summary["outcome"], &summary["end"]), (&json!("success"), &json!("stop")));
    assert_eq!(summary["totalMs"], trace(&server, "three")["totalMs"]);
    let none = Server::with(script(), |config| config.trace.ring = 0);
    ask_all(&none);
    assert_eq!(listed(&none), Vec::<Value>::new());
}

#[test]
fn an_application_of_its_own_gets_traces_too() {
    let server = Server::start(script());
    let handles = server.handles.clone();
    let messages = vec![ChatMessage::text(Role::User, "hello")];
    let request = move |model: Option<&str>| ChatRequest {
        model: model.map(str::to_owned),
        messages: messages.clone(),
        ..ChatRequest::default()
    };
    let (answered, refused) = std::thread::spawn(move || {
        actix_rt::System::new().block_on(async move {
            let mut stream = handles.chat(request(None)).await.unwrap();
            while stream.events.recv().await.is_some_and(|event| !event.is_terminal()) {}
            (stream.id, handles.chat(request(Some("other"))).await.is_err())
        })
    })
    .join()
    .unwrap();
    assert!(refused);
    let list = server.get("/v1/requests").json();
    assert_eq!(list["data"].as_array().unwrap().len(), 2);
    assert_eq!(
        (&list["data"][0]["end"], &list["data"][0]["route"]),
        (&json!("refused"), &json!("in-process"))
    );
    let RequestId(_) = answered;
    let trace = trace(&server, &answered.to_string());
    assert!(phases(&trace).contains(&"completion.total"), "{trace:#}");
}

#[test]
fn an_answer_that_is_no_stream_says_where_its_time_went() {
    let server =
        Server::with(script(), |config| config.http.allowed_origins = vec!["https://chat.example".into()]);
    let headers = [("Origin", "https://chat.example")];
    let response = server.send(chat_with(&server, &headers, &ask("hello")));
    let names: Vec<_> = timing(&response).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["prepare", "queue", "prefill", "decode", "total"]);
    let (total, parts) = timing(&response).split_last().map(|(last, rest)| (last.1, rest.to_vec())).unwrap();
    let sum: f64 = parts.iter().map(|(_, time)| time).sum();
    assert!(sum <= total + 0.01 && total > 0.0, "{sum} of {total}");
    assert!(response.header("access-control-expose-headers").unwrap().contains("server-timing"));
    let refused = server.send(chat_with(&server, &[], &json!({"messages": []})));
    assert_eq!(timing(&refused).len(), 1, "{:?}", refused.header("server-timing"));
    let streamed = server.send(chat_with(&server, &[], &with(ask("hello"), json!({"stream": true}))));
    assert!(streamed.header("server-timing").is_none());
}

#[test]
fn admissions_count_by_priority_and_refusals_by_reason() {
    let server = Server::start(script());
    server.chat(&with(ask("hello"), json!({"priority": "interactive"})));
    server.chat(&with(ask("hello"), json!({"service_tier": "flex"})));
    server.chat(&with(ask("hello"), json!({"model": "other"})));
    server.chat(&ask(&"hello ".repeat(100_000)));
    let metrics = server.get("/metrics").text();
    for line in [
        "greenroom_admitted_total{priority=\"interactive\"} 1",
        "greenroom_admitted_total{priority=\"normal\"} 0",
        "greenroom_admitted_total{priority=\"background\"} 1",
        "greenroom_refusals_total{reason=\"unknown_model\"} 1",
        "greenroom_refusals_total{reason=\"prompt\"} 1",
        "greenroom_refusals_total{reason=\"busy\"} 0",
    ] {
        assert!(metrics.contains(&format!("{line}\n")), "{line} in\n{metrics}");
    }
}
