//! The edges of HTTP over raw sockets: what no client library sends, and what
//! pages from elsewhere would.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that cannot go on fails")]
#![cfg(feature = "fake")]

use std::net::Shutdown;
use std::sync::Arc;

use greenroom::http::Listeners;
use greenroom::model::fake::{FakeModel, Script};
use greenroom::model::{LoadedModel, ModelSource};
use greenroom::observe::Outcome;
use greenroom::types::LoadError;
use serde_json::json;

mod harness;
mod wire;
use harness::Server;
use wire::{ask, with};

fn server() -> Server {
    Server::start(Script::new().say("hello", "Hi there").repeat("forever", "again "))
}

/// A request line and headers of the test's choice; `Host` only where it is among them.
fn raw(first: &str, headers: &[(&str, &str)], body: &str) -> String {
    let mut text = format!("{first} HTTP/1.1\r\n");
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text + "\r\n" + body
}

#[test]
fn unknown_paths_say_which_was_meant() {
    let server = server();
    for (path, hint) in [
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/health", "did you mean /health?"),
        ("/dashboard/billing/usage", "the API is at /v1/chat/completions"),
    ] {
        let response = server.send(server.post(path, "application/json", "{}"));
        let (code, _, message) = response.error();
        assert_eq!((response.status, code.as_str()), (404, "not_found"), "{path}");
        assert!(message.contains(hint), "{message}");
        assert_eq!(response.json()["error"]["type"], "invalid_request_error");
    }
    let (_, _, message) = server.get("/v1/embeddings").error();
    assert!(message.contains("not supported yet"), "{message}");
}

#[test]
fn wrong_methods_are_405_and_name_the_right_one() {
    let server = server();
    let response = server.get("/v1/chat/completions");
    assert_eq!((response.status, response.header("allow")), (405, Some("POST")));
    assert_eq!(response.error().0, "method_not_allowed");
    let response = server.send(server.post("/v1/models", "application/json", "{}"));
    assert_eq!((response.status, response.header("allow")), (405, Some("GET, HEAD")));
}

#[test]
fn only_plain_json_is_read() {
    let server = server();
    for media_type in
        ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
    {
        let response =
            server.send(server.post("/v1/chat/completions", media_type, &ask("hello").to_string()));
        assert_eq!(
            (response.status, response.error().0.as_str()),
            (415, "unsupported_media_type"),
            "{media_type}"
        );
    }
    let body = ask("hello").to_string();
    let host = server.address.to_string();
    let length = body.len().to_string();
    let headers = [
        ("Host", host.as_str()),
        ("Content-Type", "application/json"),
        ("Content-Length", &length),
        ("Content-Encoding", "gzip"),
    ];
    let response = server.send(raw("POST /v1/chat/completions", &headers, &body));
    assert_eq!(response.status, 415);
    assert!(response.error().2.contains("content-encoding"));
    let response = server.send(server.post("/v1/chat/completions", "application/json; charset=utf-8", &body));
    assert_eq!(response.status, 200);
}

#[test]
fn broken_json_is_400_with_its_place() {
    let server = server();
    let post = |body: &str| server.send(server.post("/v1/chat/completions", "application/json", body));
    let response = post("{\n  \"messages\": [,]\n}");
    let (code, _, message) = response.error();
    assert_eq!((response.status, code.as_str()), (400, "invalid_json"));
    assert!(message.contains("line 2 column"), "{message}");
    assert!(post("").error().2.contains("empty"));
    let deep = "[".repeat(100_000);
    assert_eq!(post(&deep).error().0, "invalid_json");
    let mut bytes = server.post("/v1/chat/completions", "application/json", "{\"a\": \"xx\"}");
    let at = bytes.len() - 4;
    bytes[at] = 0xff;
    let response = server.send(bytes);
    assert_eq!((response.status, response.error().0.as_str()), (400, "invalid_utf8"));
    assert!(response.error().2.contains("offset 7"), "{}", response.error().2);
}

#[test]
fn a_body_over_the_limit_is_413_and_names_the_setting() {
    let server = Server::with(Script::new().say("hello", "Hi"), |config| config.http.max_json_bytes = 4096);
    let body = |length: usize| {
        let mut text = ask("hello").to_string();
        text.push_str(&" ".repeat(length - text.len()));
        text
    };
    let post = |body: &str| server.send(server.post("/v1/chat/completions", "application/json", body));
    assert_eq!(post(&body(4096)).status, 200, "at the limit");
    for length in [4097, 3_000_000] {
        let response = post(&body(length));
        assert_eq!((response.status, response.error().0.as_str()), (413, "body_too_large"));
        let message = response.error().2;
        assert!(message.contains("4096") && message.contains("http.max_json_bytes"), "{message}");
        assert_eq!(response.header("connection"), Some("close"));
    }
}

#[test]
fn a_large_body_within_the_limit_is_read() {
    let server = server();
    let long = format!("hello {}", "x".repeat(3_000_000));
    let response = server.chat(&ask(&long));
    assert_eq!(response.error().0, "context_length_exceeded");
}

#[test]
fn a_body_that_does_not_come_is_408() {
    let server = Server::with(Script::new(), |config| config.http.body_timeout_s = 1);
    let mut connection = server.connect();
    let head = server.post("/v1/chat/completions", "application/json", &ask("hello").to_string());
    connection.write(&head[..head.len() - 5]);
    let response = connection.read_response();
    assert_eq!((response.status, response.error().0.as_str()), (408, "body_timeout"));
    assert!(response.error().2.contains("http.body_timeout_s"));
}

#[test]
fn chunked_bodies_and_expect_are_served() {
    let server = server();
    let host = server.address.to_string();
    let body = ask("hello").to_string();
    let (first, second) = body.split_at(10);
    let chunked = format!("{:x}\r\n{first}\r\n{:x}\r\n{second}\r\n0\r\n\r\n", first.len(), second.len());
    let headers =
        [("Host", host.as_str()), ("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")];
    let response = server.send(raw("POST /v1/chat/completions", &headers, &chunked));
    assert_eq!(response.status, 200, "{}", response.text());
    let length = body.len().to_string();
    let headers = [
        ("Host", host.as_str()),
        ("Content-Type", "application/json"),
        ("Content-Length", &length),
        ("Expect", "100-continue"),
    ];
    let mut connection = server.connect();
    connection.write(raw("POST /v1/chat/completions", &headers, ""));
    assert_eq!(connection.read_head().status, 100);
    connection.write(&body);
    assert_eq!(connection.read_response().status, 200);
}

#[test]
fn one_connection_serves_many_requests_also_pipelined() {
    let server = server();
    let mut connection = server.connect();
    let one = server.chat_bytes(&ask("hello"));
    connection.write([one.clone(), one.clone(), one].concat());
    for _ in 0..3 {
        let response = connection.read_response();
        assert_eq!(response.json()["choices"][0]["message"]["content"], "Hi there");
    }
}

#[test]
fn foreign_hosts_are_403_and_our_own_are_served() {
    let server = Server::with(Script::new(), |config| config.http.allowed_hosts = vec!["box.example".into()]);
    let port = server.address.port();
    for host in ["evil.example", &format!("evil.example:{port}"), "127.0.0.1.evil.example", "10.0.0.1"] {
        let response = server.send(raw("GET /v1/models", &[("Host", host)], ""));
        assert_eq!((response.status, response.error().0.as_str()), (403, "host_not_allowed"), "{host}");
        assert!(response.error().2.contains("http.allowed_hosts"));
    }
    for host in ["localhost", "127.0.0.1", "[::1]:1", "Box.example"] {
        assert_eq!(server.send(raw("GET /v1/models", &[("Host", host)], "")).status, 200, "{host}");
    }
    let response = server.send(raw("GET http://evil.example/v1/models", &[("Host", "localhost")], ""));
    assert_eq!(response.status, 403, "the target's own host counts");
}

#[test]
fn foreign_origins_are_403_and_listed_ones_get_cors_everywhere() {
    let server = Server::with(Script::new().say("hello", "Hi"), |config| {
        config.http.allowed_origins = vec!["https://chat.example".into()];
    });
    let host = server.address.to_string();
    let body = with(ask("hello"), json!({"stream": true})).to_string();
    let length = body.len().to_string();
    let post = |origin: &str| {
        let headers = [
            ("Host", host.as_str()),
            ("Content-Type", "application/json"),
            ("Content-Length", &length),
            ("Origin", origin),
        ];
        server.send(raw("POST /v1/chat/completions", &headers, &body))
    };
    for origin in ["https://evil.example", "null", "http://localhost:3000"] {
        let response = post(origin);
        assert_eq!((response.status, response.error().0.as_str()), (403, "origin_not_allowed"), "{origin}");
        assert!(response.header("access-control-allow-origin").is_none());
    }
    assert_eq!(post(&format!("http://{host}")).status, 200, "our own page");
    let stream = post("https://chat.example");
    assert_eq!(stream.status, 200);
    assert_eq!(stream.header("access-control-allow-origin"), Some("https://chat.example"));
    assert!(stream.header("access-control-expose-headers").unwrap().contains("x-greenroom-seed"));
    let listed = [("Host", host.as_str()), ("Origin", "https://chat.example")];
    for path in ["/health", "/nowhere", "/metrics", "/v1/chat/completions"] {
        let response = server.send(raw(&format!("GET {path}"), &listed, ""));
        assert_eq!(response.header("access-control-allow-origin"), Some("https://chat.example"), "{path}");
    }
}

#[test]
fn preflights_are_answered_for_listed_origins_only() {
    let server = Server::with(Script::new(), |config| {
        config.http.allowed_origins = vec!["https://chat.example".into()];
    });
    let host = server.address.to_string();
    for path in ["/v1/chat/completions", "/v1/models", "/health", "/v1/audio/transcriptions"] {
        let preflight = |origin: &str| {
            let headers = [
                ("Host", host.as_str()),
                ("Origin", origin),
                ("Access-Control-Request-Method", "POST"),
                ("Access-Control-Request-Headers", "authorization, content-type, x-api-key"),
            ];
            server.send(raw(&format!("OPTIONS {path}"), &headers, ""))
        };
        let response = preflight("https://chat.example");
        assert_eq!(response.status, 204, "{path}");
        assert!(response.header("access-control-allow-methods").unwrap().contains("POST"));
        assert!(response.header("access-control-allow-headers").unwrap().contains("x-api-key"));
        assert_eq!(response.header("access-control-allow-origin"), Some("https://chat.example"));
        assert_eq!(preflight("https://evil.example").status, 403);
    }
}

#[test]
fn a_half_closed_client_is_gone_unless_the_setting_says_otherwise() {
    for allow in [false, true] {
        let script = Script::new().gated();
        // What is given up must not be over before that is noticed.
        let script = if allow { script.say("hello", "Hi") } else { script.repeat("hello", "again ") };
        let server = Server::with(script, |config| config.http.allow_half_close = allow);
        let mut connection = server.connect();
        connection.write(server.chat_bytes(&ask("hello")));
        assert!(server.control.wait_begun(1));
        connection.stream().shutdown(Shutdown::Write).unwrap();
        if allow {
            server.control.open();
            assert_eq!(connection.read_response().status, 200);
        } else {
            // The connection ends while the engine still stands at its gate.
            assert!(connection.ends());
            server.control.open();
            server.wait("the cancellation", |handles| handles.gauges().requests(Outcome::Cancelled) == 1);
        }
    }
}

#[test]
fn models_and_health_and_metrics() {
    let server = server();
    let list = server.get("/v1/models").json();
    assert_eq!(list["object"], "list");
    let model = &list["data"][0];
    assert_eq!((model["id"].as_str(), model["object"].as_str()), (Some("scripted"), Some("model")));
    assert_eq!((model["state"].as_str(), model["context_length"].as_u64()), (Some("ready"), Some(4096)));
    assert_eq!(server.get("/v1/models/scripted").json()["id"], "scripted");
    let missing = server.get("/v1/models/org/other");
    assert_eq!((missing.status, missing.error().0.as_str()), (404, "model_not_found"));
    assert!(missing.error().2.contains("org/other"));
    assert_eq!(server.get("/health").json()["status"], "ready");
    for path in ["/livez", "/readyz"] {
        assert_eq!(server.get(path).status, 200);
    }
    let host = server.address.to_string();
    let mut connection = server.connect();
    connection.write(raw("HEAD /health", &[("Host", &host)], ""));
    assert_eq!(connection.read_head().status, 200);
    server.chat(&ask("hello"));
    let metrics = server.get("/metrics");
    assert!(metrics.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    assert!(metrics.text().contains("greenroom_requests_total{outcome=\"stop\"} 1"), "{}", metrics.text());
}

#[test]
fn the_page_is_served_with_a_strict_policy() {
    let server = server();
    let page = server.get("/");
    assert_eq!(page.status, 200);
    assert!(page.header("content-type").unwrap().starts_with("text/html"));
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
    assert!(policy.ends_with(&format!("connect-src 'self' ws://{0} wss://{0}", server.address)), "{policy}");
    assert!(page.header("permissions-policy").unwrap().contains("microphone=(self)"));
    for (path, media_type) in [
        ("/page/app.js", "text/javascript"),
        ("/page/base.js", "text/javascript"),
        ("/page/dictate.js", "text/javascript"),
        ("/page/style.css", "text/css"),
    ] {
        let asset = server.get(path);
        assert_eq!(asset.status, 200, "{path}");
        assert!(asset.header("content-type").unwrap().starts_with(media_type));
    }
}

#[test]
fn speech_says_what_it_lacks() {
    let server = server();
    let response =
        server.send(server.post("/v1/audio/transcriptions", "multipart/form-data; boundary=x", "--x--"));
    assert_eq!((response.status, response.error().0.as_str()), (501, "not_available"));
    assert!(response.error().2.contains("speech model"), "{}", response.error().2);
    assert_eq!(response.header("x-should-retry"), Some("false"));
}

#[test]
fn every_response_has_an_id() {
    let server = server();
    let mut ids: Vec<String> = ["/health", "/nowhere", "/v1/models", "/v1/chat/completions"]
        .iter()
        .map(|path| server.get(path).header("x-request-id").unwrap().to_owned())
        .collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 4);
}

#[test]
fn too_many_values_are_refused_wherever_they_are_and_text_is_not() {
    let server = server();
    let zeros = |count: usize| vec!["0"; count].join(",");
    let call = |count: usize| {
        let arguments = format!("{{\"a\":[{}]}}", zeros(count));
        json!({"function": {"name": "f", "arguments": arguments}}).to_string()
    };
    let user = r#"{"role": "user", "content": "hello"}"#;
    let said = |calls: &str| {
        format!(r#"{{"messages": [{{"role": "assistant", "tool_calls": [{calls}]}}, {user}]}}"#)
    };
    let tool = |parameters: &str| format!(r#"{{"function": {{"name": "f", "parameters": {parameters}}}}}"#);
    let many = zeros(600_000);
    let post = |body: &str| server.send(server.post("/v1/chat/completions", "application/json", body));
    for body in [
        format!("[{many}]"),
        format!(r#"{{"messages": [{many}]}}"#),
        format!(r#"{{"messages": [{user}], "what": [{many}]}}"#),
        format!(r#"{{"messages": [{user}], "metadata": {{"x": [{many}]}}}}"#),
        format!(r#"{{"messages": [{user}], "chat_template_kwargs": {{"x": [{many}]}}}}"#),
        format!(r#"{{"messages": [{user}], "tools": [{}]}}"#, tool(&format!(r#"{{"x": [{many}]}}"#))),
        format!(r#"{{"messages": [{user}], "tools": [{}]}}"#, vec!["[]"; 300_000].join(",")),
        format!(r#"{{"x": {}"#, "{\"a\":{},".repeat(300_000)),
    ] {
        let response = post(&body);
        let (code, _, message) = response.error();
        assert_eq!((response.status, code.as_str()), (400, "invalid_json"), "{message}");
        assert!(message.contains("500000 values"), "{message}");
    }
    // Arguments are JSON in a string: they count when they are read, all together.
    for calls in [call(600_000), [call(300_000), call(300_000)].join(",")] {
        let response = post(&said(&calls));
        let (code, param, message) = response.error();
        assert_eq!((response.status, code.as_str()), (400, "invalid_value"), "{message}");
        assert!(param.unwrap().ends_with("function.arguments") && message.contains("500000"), "{message}");
    }
    let text = ask(&"[{,".repeat(200_000));
    assert_eq!(server.chat(&text).error().0, "context_length_exceeded");
    let few = format!(r#"{{"messages": [{user}], "what": [{}]}}"#, zeros(400_000));
    assert_eq!(post(&few).status, 200);
}

/// More connections than there are places for large bodies.
#[test]
fn large_bodies_that_do_not_come_keep_nobody_else_waiting() {
    let server = server();
    // Large by spaces between its parts, so that there is little to compute.
    let body = ask("hello").to_string() + &" ".repeat(1_500_000);
    let large = server.post("/v1/chat/completions", "application/json", &body);
    let mut slow: Vec<_> = (0..12).map(|_| server.connect()).collect();
    // Just over what needs a place: those that wait for one are not read on.
    let (begin, rest) = large.split_at(1_100_000);
    for connection in &mut slow {
        connection.write(begin);
    }
    assert_eq!(server.chat(&ask("hello")).status, 200, "a small one needs no place");
    std::thread::scope(|scope| {
        for mut connection in slow {
            scope.spawn(move || {
                connection.write(rest);
                assert_eq!(connection.read_response().status, 200);
            });
        }
    });
}

/// A model that cannot be loaded, for a reason that names a file.
struct Unloadable;

impl ModelSource for Unloadable {
    fn id(&self) -> &str {
        "unloadable"
    }

    fn load(&self) -> Result<LoadedModel, LoadError> {
        let path = "/home/somebody/secret/model.gguf".into();
        Err(LoadError::Format { path, message: "there is no tensor in it".into() })
    }
}

#[test]
fn no_response_names_a_file() {
    let control = FakeModel::new("none", Script::new()).control();
    let server = Server::serving(Arc::new(Unloadable), control, |_| {});
    server.wait("the failure", |handles| matches!(handles.health(), greenroom::Health::Failed { .. }));
    let mut responses: Vec<_> =
        ["/health", "/readyz", "/livez", "/metrics", "/v1/models", "/v1/models/unloadable", "/v1/models/x"]
            .iter()
            .map(|path| server.get(path))
            .collect();
    assert_eq!(responses[0].json()["models"][0]["message"], "it could not be loaded; see the server's log");
    responses.push(server.chat(&ask("hello")));
    assert_eq!(responses.last().unwrap().error().0, "engine_failed");
    for response in responses {
        assert!(!format!("{:?}{}", response.headers, response.text()).contains("secret"), "{response:?}");
    }
}

/// The private name under which a socket is bound is a name like any other: somebody may have it.
#[cfg(unix)]
#[test]
fn no_file_of_anybody_is_removed_for_a_socket() {
    use std::os::unix::net::{UnixListener, UnixStream};
    let bind = |folder: &std::path::Path| {
        let mut config = harness::config().http;
        config.tcp = false;
        config.unix_socket = Some(folder.join("api.sock"));
        Listeners::bind(&config)
    };
    let id = std::process::id();
    let names = [format!(".gr{id:x}"), format!(".{id:x}"), format!(".gr{id}"), format!(".{id}")];
    for name in &names {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, "precious").unwrap();
        let bound = bind(folder.path());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious", "{name}");
        if let Err(error) = bound {
            assert!(error.to_string().contains(name.as_str()), "{error}");
        }
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join(name));
        let _held = UnixListener::bind(&target).unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        drop(bind(folder.path()));
        assert!(link.is_symlink() && UnixStream::connect(&target).is_ok(), "{name}");
    }
    // What a killed process left behind is in nobody's way.
    let folder = tempfile::tempdir().unwrap();
    for name in &names {
        drop(UnixListener::bind(folder.path().join(name)).unwrap());
    }
    let bound = bind(folder.path()).unwrap();
    assert!(UnixStream::connect(folder.path().join("api.sock")).is_ok());
    drop(bound);
    assert!(!folder.path().join("api.sock").exists());
}
