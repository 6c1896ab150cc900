//! Live sessions of a server that has no chat model: plain HTTP, events, our WebSocket, OpenAI's realtime.

use std::io::Write;
use std::net::TcpStream;

use serde_json::{Value, json};
use tungstenite::handshake::client::generate_key;
use tungstenite::http::Request;
use tungstenite::{Message, WebSocket};

use super::{Reply, Server, clip, until};

/// The samples of a 16 kHz WAV file.
fn pcm(name: &str) -> Vec<u8> {
    clip(name)[44..].to_vec()
}

impl Server {
    fn post(&self, path: &str, body: &Value) -> Reply {
        self.send("POST", path, "application/json", body.to_string().as_bytes())
    }

    fn session(&self, body: &Value) -> String {
        let reply = self.post("/v1/audio/sessions", body);
        assert_eq!(reply.status, 201, "{}", reply.text());
        reply.json()["id"].as_str().unwrap().to_owned()
    }

    fn socket(&self, path: &str, headers: &[(&str, &str)]) -> Result<WebSocket<TcpStream>, String> {
        let stream = self.connect();
        let mut request = Request::get(format!("ws://{}{path}", self.address))
            .header("host", &self.address)
            .header("connection", "upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", generate_key());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(()).unwrap();
        tungstenite::client(request, stream).map(|(socket, _)| socket).map_err(|error| error.to_string())
    }
}

/// Messages up to the end of the connection, and its closing code.
fn all(socket: &mut WebSocket<TcpStream>) -> (Vec<Value>, u16) {
    let mut messages = Vec::new();
    loop {
        match socket.read().unwrap() {
            Message::Text(text) => messages.push(serde_json::from_str(&text).unwrap()),
            Message::Close(frame) => return (messages, frame.map_or(1005, |frame| frame.code.into())),
            _ => {}
        }
    }
}

/// Messages up to one of this type.
fn until_type(socket: &mut WebSocket<TcpStream>, kind: &str) -> Vec<Value> {
    let mut messages: Vec<Value> = Vec::new();
    while messages.last().is_none_or(|message| message["type"] != kind) {
        if let Message::Text(text) = socket.read().unwrap() {
            messages.push(serde_json::from_str(&text).unwrap());
        }
    }
    messages
}

fn types(messages: &[Value]) -> Vec<&str> {
    messages.iter().map(|message| message["type"].as_str().unwrap()).collect()
}

fn of<'a>(messages: &'a [Value], kind: &str) -> Vec<&'a Value> {
    messages.iter().filter(|message| message["type"] == kind).collect()
}

#[test]
fn speech_alone_is_ready_without_a_chat_model() {
    let server = Server::alone(&[]);
    let health = server.get("/health");
    assert_eq!((&health["status"], &health["models"]), (&json!("ready"), &json!([])));
    assert_eq!(health["speech"], json!({"id": "whisper-tiny.en", "state": "unloaded"}));
    let chat = server.post("/v1/chat/completions", &json!({"messages": [{"role": "user", "content": "hi"}]}));
    assert_eq!(chat.status, 501, "{}", chat.text());
    assert!(chat.text().contains("no chat model"), "{}", chat.text());
    assert!(server.transcribe(&clip("ps-goforward.wav"), &[]).json()["text"].is_string());
    assert_eq!(server.get("/health")["speech"]["state"], "loaded");
    assert_eq!(server.get("/v1/models")["data"][0]["id"], "whisper-tiny.en");
}

#[test]
fn a_session_over_plain_http() {
    let server = Server::alone(&[]);
    let id = server.session(&json!({"response_format": "verbose_json", "partials": false}));
    let base = format!("/v1/audio/sessions/{id}");
    let audio = [pcm("ps-goforward.wav"), vec![0; 32_000]].concat();
    for (seq, chunk) in audio.chunks(32_001).enumerate() {
        for attempt in 0..2 {
            let path = format!("{base}/audio?seq={seq}");
            let reply = server.send("POST", &path, "application/octet-stream", chunk);
            assert_eq!(reply.status, 202, "{attempt}: {}", reply.text());
        }
    }
    let gap = server.send("POST", &format!("{base}/audio?seq=99"), "application/octet-stream", b"ab");
    assert_eq!((gap.status, &gap.json()["error"]["code"]), (409, &json!("out_of_order")));
    // The utterance is over by itself; its text comes without being finished.
    let mut revision = 0;
    until("committed text", || {
        let state = server.get(&format!("{base}?since={revision}&wait_ms=2000"));
        revision = state["revision"].as_u64().unwrap();
        state["committed"].as_str().unwrap().to_lowercase().contains("forward")
    });
    let finish = || server.send("POST", &format!("{base}/finish"), "text/plain", b"");
    let body = finish();
    assert_eq!(body.status, 200);
    let heard = body.json();
    assert_eq!(heard["duration"].as_f64().unwrap(), (audio.len() as f64 / 320.0).round() / 100.0);
    assert!(heard["segments"][0]["text"].as_str().unwrap().to_lowercase().contains("forward"));
    assert_eq!(finish().text(), body.text(), "the same again");
    let closed = server.send("POST", &format!("{base}/audio"), "application/octet-stream", b"ab");
    assert_eq!((closed.status, &closed.json()["error"]["code"]), (409, &json!("session_closed")));
    // Events tell all of it from the beginning, also afterwards.
    let events = server.send("GET", &format!("{base}/events"), "text/plain", b"").text();
    let names: Vec<&str> = events.lines().filter_map(|line| line.strip_prefix("event: ")).collect();
    let expected = [
        "session.created",
        "speech.started",
        "speech.stopped",
        "transcript.committed",
        "transcript.final",
        "session.done",
    ];
    assert_eq!(names, expected);
    assert_eq!(server.send("DELETE", &base, "text/plain", b"").status, 204);
    let gone = server.send("DELETE", &base, "text/plain", b"");
    assert_eq!((gone.status, &gone.json()["error"]["code"]), (404, &json!("session_not_found")));
}

#[test]
fn what_is_wrong_with_a_session_is_said() {
    let server = Server::alone(&[("GREENROOM__SPEECH__MAX_SESSIONS", "1")]);
    for (body, param) in [
        (json!({"input": {"encoding": "flac"}}), "input.encoding"),
        (json!({"model": "whisper-9"}), "model"),
        (json!([]), "body"),
    ] {
        let reply = server.post("/v1/audio/sessions", &body);
        assert!((400..=404).contains(&reply.status), "{}", reply.text());
        assert_eq!(reply.json()["error"]["param"], param);
    }
    let id = server.session(&json!({"colour": "blue", "input": {"encoding": "container"}}));
    let full = server.post("/v1/audio/sessions", &json!({}));
    assert_eq!((full.status, &full.json()["error"]["code"]), (429, &json!("session_limit")));
    assert!(full.head.to_lowercase().contains("retry-after"), "{}", full.head);
    let base = format!("/v1/audio/sessions/{id}");
    for (path, body, status) in [
        (format!("{base}/audio?seq=-1"), &b"ab"[..], 400),
        (format!("{base}/audio?sequence=1"), b"ab", 400),
        (format!("{base}/audio"), b"", 400),
        (
            format!("{base}/audio"),
            b"%PDF-1.7 is what this file is, and it goes on for long enough to be looked at",
            202,
        ),
    ] {
        assert_eq!(server.send("POST", &path, "application/octet-stream", body).status, status, "{path}");
    }
    let large =
        server.send("POST", &format!("{base}/audio"), "application/octet-stream", &vec![0; (8 << 20) + 1]);
    assert_eq!((large.status, &large.json()["error"]["code"]), (413, &json!("request_too_large")));
    let failed = server.send("POST", &format!("{base}/finish"), "text/plain", b"");
    assert_eq!(failed.status, 400);
    assert!(failed.text().contains("a PDF document"), "{}", failed.text());
    assert_eq!(server.get(&base)["status"], "failed");
    assert!(server.socket("/v1/audio/stream?colour=blue", &[]).is_err());
    assert!(server.socket("/v1/audio/stream", &[("origin", "http://elsewhere.example")]).is_err());
    assert_eq!(server.send("GET", "/v1/audio/stream", "text/plain", b"").status, 400);
}

#[test]
fn dictation_over_a_websocket() {
    let server = Server::alone(&[("GREENROOM__SPEECH__PRELOAD", "true")]);
    let mut socket = server.socket("/v1/audio/stream?partials=true&response_format=json", &[]).unwrap();
    socket.send(Message::text(r#"{"type": "ping"}"#)).unwrap();
    assert_eq!(types(&until_type(&mut socket, "pong")), ["session.created", "pong"]);
    socket.send(Message::text(r#"{"type": "sing"}"#)).unwrap();
    assert_eq!(until_type(&mut socket, "error")[0]["error"]["param"], "type");
    for chunk in pcm("jfk.wav").chunks(7_777) {
        socket.send(Message::binary(chunk.to_vec())).unwrap();
    }
    socket.send(Message::text(r#"{"type": "finish"}"#)).unwrap();
    let (messages, code) = all(&mut socket);
    assert_eq!(code, 1000);
    let kinds = types(&messages);
    assert_eq!((kinds[0], kinds[kinds.len() - 1]), ("speech.started", "session.done"));
    assert!(messages[messages.len() - 1]["body"]["text"].as_str().unwrap().contains("country"));
    let finals = of(&messages, "transcript.final");
    assert_eq!(finals.len(), of(&messages, "speech.started").len());
    // What was told piece by piece is the beginning of what was committed.
    for committed in of(&messages, "transcript.committed") {
        let partials = of(&messages, "transcript.partial").into_iter();
        let deltas: String = partials
            .filter(|partial| partial["utterance"] == committed["utterance"])
            .map(|partial| partial["committed_delta"].as_str().unwrap())
            .collect();
        assert!(committed["text"].as_str().unwrap().starts_with(&deltas), "{deltas:?} {committed}");
    }
}

#[test]
fn a_lost_connection_can_be_taken_up_again_and_a_client_can_give_up() {
    let server = Server::alone(&[]);
    let mut socket = server.socket("/v1/audio/stream", &[]).unwrap();
    socket.send(Message::text(r#"{"type": "config", "partials": false}"#)).unwrap();
    let id = until_type(&mut socket, "session.created")[0]["session"]["id"].as_str().unwrap().to_owned();
    let audio = pcm("ps-goforward.wav");
    let (first, second) = audio.split_at(audio.len() / 2);
    socket.send(Message::binary(first.to_vec())).unwrap();
    socket.flush().unwrap();
    until("audio", || server.get(&format!("/v1/audio/sessions/{id}"))["received_s"].as_f64() > Some(0.5));
    drop(socket);
    let mut socket = server.socket(&format!("/v1/audio/sessions/{id}/ws"), &[]).unwrap();
    socket.send(Message::binary(second.to_vec())).unwrap();
    socket.send(Message::text(r#"{"type": "finish"}"#)).unwrap();
    let (messages, code) = all(&mut socket);
    let body = &messages[messages.len() - 1]["body"];
    assert!(body["text"].as_str().unwrap().to_lowercase().contains("forward"), "{body}");
    assert_eq!(code, 1000);
    let mut socket = server.socket("/v1/audio/stream", &[]).unwrap();
    socket.send(Message::binary(vec![0; 64])).unwrap();
    socket.send(Message::text(r#"{"type": "cancel"}"#)).unwrap();
    assert_eq!(types(&all(&mut socket).0), ["session.created", "session.cancelled"]);
    until("no session left", || server.get("/stats")["transcription"]["sessions"] == 0);
}

#[test]
fn openai_realtime_transcription() {
    let server = Server::alone(&[("GREENROOM__SPEECH__PRELOAD", "true")]);
    for older in [false, true] {
        let headers: &[(&str, &str)] = if older { &[("openai-beta", "realtime=v1")] } else { &[] };
        let mut socket = server.socket("/v1/realtime?intent=transcription", headers).unwrap();
        let say = |socket: &mut WebSocket<TcpStream>, message: Value| {
            socket.send(Message::text(message.to_string())).unwrap();
        };
        let (prefix, update) = match older {
            true => (
                "transcription_session",
                json!({"input_audio_format": "g711_ulaw", "input_audio_transcription": {"model": "whisper-1"}}),
            ),
            false => (
                "session",
                json!({"type": "transcription", "audio": {"input": {
                    "format": {"type": "audio/pcmu"}, "transcription": {"model": "whisper-1", "language": "en"},
                    "turn_detection": {"type": "server_vad", "silence_duration_ms": 400},
                }}}),
            ),
        };
        until_type(&mut socket, &format!("{prefix}.created"));
        say(&mut socket, json!({"type": format!("{prefix}.update"), "session": update}));
        let updated = until_type(&mut socket, &format!("{prefix}.updated"));
        assert!(updated[0]["event_id"].is_string(), "{}", updated[0]);
        say(&mut socket, json!({"type": "input_audio_buffer.commit", "event_id": "mine"}));
        let error = until_type(&mut socket, "error");
        assert_eq!(error[0]["error"]["code"], "input_audio_buffer_commit_empty");
        assert_eq!(error[0]["error"]["event_id"], "mine");
        // 8 kHz µ-law, behind its header.
        let telephone = clip("jfk-8k-mulaw.wav");
        let at = telephone.windows(4).position(|four| four == b"data").unwrap() + 8;
        let audio = [&telephone[at..], &[0xff; 16_000]].concat();
        for chunk in audio.chunks(4_000) {
            say(&mut socket, json!({"type": "input_audio_buffer.append", "audio": base64(chunk)}));
        }
        let done = "conversation.item.input_audio_transcription.completed";
        let mut messages = until_type(&mut socket, done);
        while !of(&messages, done)
            .iter()
            .any(|said| said["transcript"].as_str().unwrap().trim_end_matches('.').ends_with("your country"))
        {
            messages.extend(until_type(&mut socket, done));
        }
        let kinds = types(&messages);
        assert_eq!(kinds[0], "input_audio_buffer.speech_started", "{kinds:?}");
        for kind in ["input_audio_buffer.speech_stopped", "input_audio_buffer.committed"] {
            assert!(of(&messages, kind).len() >= of(&messages, done).len(), "{kinds:?}");
        }
        let item = of(&messages, done)[0]["item_id"].clone();
        assert_eq!(item, of(&messages, "input_audio_buffer.speech_started")[0]["item_id"]);
        assert_eq!(item, of(&messages, "input_audio_buffer.committed")[0]["item_id"]);
        let deltas: String = of(&messages, "conversation.item.input_audio_transcription.delta")
            .into_iter()
            .filter(|delta| delta["item_id"] == item)
            .map(|delta| delta["delta"].as_str().unwrap())
            .collect();
        assert!(deltas.to_lowercase().contains("fellow americans"), "{deltas}");
        say(&mut socket, json!({"type": "input_audio_buffer.clear"}));
        until_type(&mut socket, "input_audio_buffer.cleared");
        // The session goes with its connection, even without a farewell.
        let _gone = socket.get_mut().flush();
        drop(socket);
        until("no session left", || server.get("/stats")["transcription"]["sessions"] == 0);
    }
    assert!(server.socket("/v1/realtime?intent=conversation", &[]).is_err());
}

fn base64(bytes: &[u8]) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}
