//! `/v1/audio/…` of a real server with the demo models: formats, streams, errors, unloading, chat beside it.
#![cfg(feature = "cpu")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test")]

mod common;
#[path = "http_audio/sessions.rs"]
mod sessions;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A server that ends with the test.
struct Server {
    child: Child,
    address: String,
}

struct Reply {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Reply {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {}", self.text()))
    }
}

impl Server {
    /// Speech beside chat.
    fn start(settings: &[(&str, &str)]) -> Self {
        let (chat, speech) = (common::demo_model(), common::speech_model("whisper-tiny.en"));
        Self::serve(&[chat.as_os_str(), "--speech-model".as_ref(), speech.as_os_str()], settings)
    }

    /// Speech alone.
    fn alone(settings: &[(&str, &str)]) -> Self {
        Self::serve(&[common::speech_model("whisper-tiny.en").as_os_str()], settings)
    }

    fn serve(arguments: &[&OsStr], settings: &[(&str, &str)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_greenroom"));
        command.arg("serve").args(arguments).args(["--device", "cpu", "--port", "0"]);
        command.envs(settings.iter().copied()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut address = String::new();
        for line in lines.by_ref() {
            let line = line.unwrap();
            if let Some(found) = line.strip_prefix("address  http://") {
                address = found.to_owned();
            }
            if line.starts_with("ready") {
                break;
            }
        }
        // What comes later is read by nobody, but the pipe stays open.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        stream
    }

    fn send(&self, method: &str, path: &str, kind: &str, body: &[u8]) -> Reply {
        let mut stream = self.connect();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n",
            self.address,
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        // A server that refuses early does not read on.
        let _ = stream.write_all(body);
        let mut all = Vec::new();
        let _ = stream.read_to_end(&mut all);
        reply(&all)
    }

    fn get(&self, path: &str) -> Value {
        self.send("GET", path, "text/plain", b"").json()
    }

    fn transcribe(&self, file: &[u8], fields: &[(&str, &str)]) -> Reply {
        self.send("POST", "/v1/audio/transcriptions", KIND, &form(file, fields))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const KIND: &str = "multipart/form-data; boundary=frontier";

/// A form with the fields after the file.
fn form(file: &[u8], fields: &[(&str, &str)]) -> Vec<u8> {
    let mut body =
        b"--frontier\r\nContent-Disposition: form-data; name=\"file\"; filename=\"blob\"\r\nContent-Type: \
        application/octet-stream\r\n\r\n"
            .to_vec();
    body.extend_from_slice(file);
    for (name, value) in fields {
        body.extend_from_slice(
            format!("\r\n--frontier\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}")
                .as_bytes(),
        );
    }
    body.extend_from_slice(b"\r\n--frontier--\r\n");
    body
}

fn reply(all: &[u8]) -> Reply {
    let at = all.windows(4).position(|four| four == b"\r\n\r\n").unwrap_or_else(|| {
        panic!("no head: {}", String::from_utf8_lossy(all));
    });
    let head = String::from_utf8_lossy(&all[..at]).into_owned();
    let status = head[9..12].parse().unwrap();
    let mut rest = &all[at + 4..];
    if !head.to_lowercase().contains("transfer-encoding: chunked") {
        return Reply { status, head, body: rest.to_vec() };
    }
    let mut body = Vec::new();
    while let Some(end) = rest.windows(2).position(|two| two == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap(), 16).unwrap();
        let end = end + 2;
        body.extend_from_slice(&rest[end..end + size]);
        rest = &rest[(end + size + 2).min(rest.len())..];
        if size == 0 {
            break;
        }
    }
    Reply { status, head, body }
}

fn clip(name: &str) -> Vec<u8> {
    std::fs::read(common::data("audio").join(name)).unwrap()
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_recording_is_written_down_in_every_form() {
    let server = Server::start(&[]);
    let jfk = clip("jfk.webm");
    let models = server.get("/v1/models");
    let ids: Vec<_> =
        models["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert!(ids.contains(&"whisper-tiny.en"), "{ids:?}");
    let body = server.transcribe(&jfk, &[("model", "whisper-1")]).json();
    assert!(body["text"].as_str().unwrap().ends_with("ask what you can do for your country."), "{body}");
    assert_eq!(body["usage"]["type"], "duration");
    let srt = server.transcribe(&jfk, &[("response_format", "srt")]);
    assert!(srt.text().starts_with("1\n00:00:00,"), "{}", srt.text());
    assert!(srt.head.contains("application/x-subrip"), "{}", srt.head);
    let fields =
        [("response_format", "verbose_json"), ("timestamp_granularities[]", "word"), ("colour", "blue")];
    let verbose = server.transcribe(&jfk, &fields);
    assert!(
        verbose.head.to_lowercase().contains("warning: 299 greenroom \"unknown fields ignored: colour\""),
        "{}",
        verbose.head
    );
    let verbose = verbose.json();
    assert_eq!(
        (&verbose["task"], &verbose["language"]),
        (&Value::from("transcribe"), &Value::from("english"))
    );
    let words = verbose["words"].as_array().unwrap();
    assert!(
        words.iter().any(|word| word["word"] == "Americans" && word["start"].as_f64().unwrap() < 1.8),
        "{words:?}"
    );
    let logprobs = server.transcribe(&jfk, &[("include[]", "logprobs")]).json();
    let entries = logprobs["logprobs"].as_array().unwrap();
    assert!(
        entries.len() > 15 && entries.iter().all(|entry| entry["logprob"].as_f64().unwrap() <= 0.0),
        "{logprobs}"
    );
    let silence = server.transcribe(&clip("silence-5s.wav"), &[("response_format", "verbose_json")]);
    assert_eq!((silence.status, &silence.json()["text"]), (200, &Value::from("")));
}

#[test]
fn a_stream_ends_with_one_done_whose_text_is_that_of_its_deltas() {
    let server = Server::start(&[]);
    let reply = server.transcribe(&clip("long-60s.wav"), &[("stream", "true")]);
    assert_eq!(reply.status, 200, "{}", reply.text());
    let text = reply.text();
    let events: Vec<Value> = text
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    let (done, deltas) = events.split_last().unwrap();
    assert!(
        deltas.len() > 1 && deltas.iter().all(|event| event["type"] == "transcript.text.delta"),
        "{text}"
    );
    assert_eq!(done["type"], "transcript.text.done");
    let joined: String = deltas.iter().map(|event| event["delta"].as_str().unwrap()).collect();
    assert_eq!(joined.trim(), done["text"].as_str().unwrap());
    let mut heard = 0.0;
    for event in deltas {
        let (start, end) = (event["start"].as_f64().unwrap(), event["end"].as_f64().unwrap());
        assert!(start >= heard && end >= start && end <= 60.0, "{event}");
        heard = start;
    }
}

#[test]
fn what_is_wrong_is_said_at_once_and_names_the_field() {
    let server = Server::start(&[("GREENROOM__SPEECH__MAX_FILE_MIB", "1")]);
    let wav = |seconds: f64| {
        let samples = (seconds * 16_000.0) as u32;
        let mut wav =
            b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0\x01\0\x01\0\x80\x3e\0\0\0\x7d\0\0\x02\0\x10\0data"
                .to_vec();
        wav.extend_from_slice(&(samples * 2).to_le_bytes());
        wav.resize(wav.len() + samples as usize * 2, 0);
        wav
    };
    for (file, fields, status, code, param) in [
        (b"%PDF-1.7 no audio".to_vec(), &[][..], 400, "invalid_value", "file"),
        (Vec::new(), &[], 400, "empty_file", "file"),
        (wav(0.01), &[], 400, "audio_too_short", "file"),
        (wav(0.0), &[], 400, "audio_too_short", "file"),
        (vec![0; 40 << 20], &[], 413, "request_too_large", "file"),
        (wav(1.0), &[("model", "gpt-4")], 404, "model_not_found", "model"),
        (wav(1.0), &[("language", "de")], 400, "unsupported_language", "language"),
        (wav(1.0), &[("response_format", "xml")], 400, "unsupported_value", "response_format"),
        (b"%PDF-1.7 no audio".to_vec(), &[("stream", "true")], 400, "invalid_value", "file"),
    ] {
        let reply = server.transcribe(&file, fields);
        let error = &reply.json()["error"];
        assert_eq!(
            (reply.status, &error["code"], &error["param"]),
            (status, &code.into(), &param.into()),
            "{error}"
        );
    }
    let reply = server.send("POST", "/v1/audio/translations", KIND, &form(&wav(1.0), &[]));
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (400, &Value::from("unsupported_task")));
    let reply = server.send("POST", "/v1/audio/transcriptions", "text/plain", b"{}");
    assert_eq!(reply.status, 415);
    for (body, param) in
        [("{}", "file"), ("{\"file\": 5}", "file"), ("{\"file\": \"!\"}", "file"), ("[]", "body")]
    {
        let reply = server.send("POST", "/v1/audio/transcriptions", "application/json", body.as_bytes());
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &param.into()), "{body}");
    }
    let reply = server.send("POST", "/v1/audio/transcriptions", KIND, b"--frontier--\r\n");
    assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &Value::from("file")));
}

#[test]
fn a_recording_comes_as_json_or_as_raw_samples_too() {
    let server = Server::start(&[]);
    let wav = clip("ps-goforward.wav");
    let file = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, &wav);
    for file in [file.clone(), format!("data:audio/wav;base64,{file}")] {
        let body =
            serde_json::json!({"file": file, "response_format": "text", "vad": true, "temperature": 0});
        let path = "/v1/audio/transcriptions";
        let reply = server.send("POST", path, "application/json", body.to_string().as_bytes());
        assert_eq!((reply.status, reply.text().trim()), (200, "Go forward 10 meters."));
    }
    let mut body =
        b"--frontier\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\nContent-Type: \
        audio/pcm;rate=16000;channels=1\r\n\r\n"
            .to_vec();
    body.extend_from_slice(&wav[44..]);
    body.extend_from_slice(b"\r\n--frontier--\r\n");
    let reply = server.send("POST", "/v1/audio/transcriptions", KIND, &body);
    assert_eq!(reply.json()["text"], "Go forward 10 meters.", "{}", reply.text());
}

#[test]
fn a_recordings_way_is_in_its_trace() {
    let server = Server::start(&[]);
    let trace = |route: &str| {
        let list = server.get("/v1/requests");
        let find = |entry: &&Value| entry["route"] == route;
        let entry = list["data"].as_array().unwrap().iter().find(find).unwrap();
        server.get(&format!("/v1/requests/{}/trace", entry["traceId"].as_str().unwrap()))
    };
    let phases = |trace: &Value| {
        let events = trace["events"].as_array().unwrap().clone();
        events
            .into_iter()
            .map(|event| (event["phase"].as_str().unwrap().to_owned(), event))
            .collect::<std::collections::HashMap<_, _>>()
    };
    assert_eq!(server.transcribe(&clip("jfk.wav"), &[]).status, 200);
    let heard = trace("/v1/audio/transcriptions");
    assert_eq!(heard["end"], "stop", "{heard}");
    let phases_of = phases(&heard);
    for phase in ["total", "queued", "load", "survey", "recognise"] {
        let event = &phases_of[&format!("transcription.{phase}")];
        assert!(event["durationMs"].as_f64().is_some() && event["open"].is_null(), "{event}");
    }
    assert_eq!(phases_of["transcription.load"]["attributes"]["resident"], false);
    assert_eq!(phases_of["transcription.survey"]["attributes"]["audioMs"], 11_000);
    assert!(!heard.to_string().contains("country"), "no text is in a trace");
    let body = form(&clip("ps-goforward.wav"), &[("stream", "true")]);
    assert_eq!(server.send("POST", "/v1/audio/transcriptions", KIND, &body).status, 200);
    let streamed = trace("/v1/audio/transcriptions");
    assert_eq!(streamed["end"], "stop", "{streamed}");
    assert_eq!(phases(&streamed)["transcription.load"]["attributes"]["resident"], true);
    assert_eq!(server.send("POST", "/v1/audio/translations", KIND, &form(b"RIFF", &[])).status, 400);
    assert_eq!(trace("/v1/audio/translations")["end"], "failed");
    assert_eq!(server.transcribe(b"", &[]).status, 400);
    assert_eq!(trace("/v1/audio/transcriptions")["end"], "refused");
}

#[test]
fn weights_come_with_the_first_recording_and_go_when_nobody_speaks() {
    let server = Server::start(&[("GREENROOM__SPEECH__IDLE_UNLOAD_S", "1")]);
    let stats = || server.get("/stats")["transcription"].clone();
    assert_eq!((&stats()["resident"], &stats()["loads"]), (&false.into(), &0.into()));
    // Many at once share one load.
    std::thread::scope(|scope| {
        let asks: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| server.transcribe(&clip("ps-goforward.wav"), &[]).json()))
            .collect();
        for ask in asks {
            assert_eq!(ask.join().unwrap()["text"], "Go forward 10 meters.");
        }
    });
    assert_eq!(stats()["loads"], 1);
    until("the weights go", || stats()["resident"] == false);
    assert_eq!((&stats()["unloads"], &stats()["state_bytes"]), (&1.into(), &0.into()));
    assert_eq!(server.transcribe(&clip("ps-something.wav"), &[]).status, 200);
    let unloaded = server.send("POST", "/admin/transcription/unload", "text/plain", b"").json();
    assert_eq!((&unloaded["unloaded"], &unloaded["resident"]), (&true.into(), &false.into()));
}

#[test]
fn who_goes_away_frees_the_place_at_once_and_chat_goes_on() {
    let server =
        Server::start(&[("GREENROOM__SPEECH__MAX_RUNNING", "1"), ("GREENROOM__SPEECH__MAX_QUEUE", "1")]);
    let stats = || server.get("/stats")["transcription"].clone();
    let long: Vec<u8> = clip("long-60s.wav");
    let open = |count: u64| {
        let body = form(&long, &[]);
        let mut stream = server.connect();
        let head = format!(
            "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: {}\r\nContent-Type: {KIND}\r\nContent-Length: {}\r\n\r\n",
            server.address,
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(&body).unwrap();
        until("it is taken", || {
            stats()["running"].as_u64().unwrap() + stats()["queued"].as_u64().unwrap() >= count
        });
        stream
    };
    let (running, waiting) = (open(1), open(2));
    let refused = server.transcribe(&long, &[]);
    assert_eq!(
        (refused.status, &refused.json()["error"]["code"]),
        (429, &Value::from("rate_limit_exceeded"))
    );
    assert!(refused.head.to_lowercase().contains("retry-after:"), "{}", refused.head);
    let chat = br#"{"messages":[{"role":"user","content":"Say hi."}],"max_tokens":4}"#;
    assert_eq!(server.send("POST", "/v1/chat/completions", "application/json", chat).status, 200);
    drop((running, waiting));
    until("both places are free", || stats()["running"] == 0 && stats()["queued"] == 0);
    assert_eq!(stats()["state_bytes"], 0);
    assert_eq!(server.transcribe(&clip("ps-goforward.wav"), &[]).json()["text"], "Go forward 10 meters.");
}
