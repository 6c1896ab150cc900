//! Who is measured: the actors in this process, or a server by its address.
//!
//! A server is anybody's: what it sends is bounded and read as OpenAI's text
//! completions, and a token that it does not count is counted by its piece.

use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant};

use greenroom::Greenroom;
use greenroom::types::{ChatEvent, ChatRequest, SamplingOptions};
use serde_json::{Value, json};

use super::Stop;
use super::figures::Answer;
use crate::exit::Exit;

/// How long a server may take to connect, and to say anything.
const PATIENCE: Duration = Duration::from_secs(600);
/// Longest line of an event stream, bytes.
const MAX_LINE: u64 = 1 << 20;

/// One request.
pub(super) struct Ask {
    pub(super) prompt: String,
    /// Tokens to produce.
    pub(super) tokens: u32,
}

/// See the module.
pub(super) enum Target<'a> {
    Here(&'a Greenroom),
    Server(Server),
}

/// A server that speaks OpenAI's API.
#[derive(Clone)]
pub(super) struct Server {
    agent: ureq::Agent,
    /// Of text completions.
    url: String,
    model: Option<String>,
}

impl<'a> Target<'a> {
    pub(super) fn here(greenroom: &'a Greenroom) -> Self {
        Self::Here(greenroom)
    }

    /// `url` with or without `/v1`.
    pub(super) fn server(url: &str, model: Option<&str>) -> Result<Self, Stop> {
        if !(url.starts_with("http://") || url.starts_with("https://")) {
            return Err(Stop::new(
                Exit::Usage,
                format!("--url: {url} does not begin with http:// or https://"),
            ));
        }
        let root = url.trim_end_matches('/').trim_end_matches("/v1");
        let agent = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(PATIENCE))
            .timeout_recv_response(Some(PATIENCE))
            .build()
            .new_agent();
        let url = format!("{root}/v1/completions");
        Ok(Self::Server(Server { agent, url, model: model.map(str::to_owned) }))
    }

    pub(super) fn name(&self) -> String {
        match self {
            Self::Here(_) => format!("greenroom {} in process", env!("CARGO_PKG_VERSION")),
            Self::Server(server) => server.url.clone(),
        }
    }

    /// Asks, and notes when what came.
    pub(super) async fn ask(&self, ask: &Ask) -> Result<Answer, Stop> {
        match self {
            Self::Here(greenroom) => here(greenroom, ask).await,
            Self::Server(server) => {
                let (server, body) = (server.clone(), server.body(ask));
                let answer = tokio::task::spawn_blocking(move || server.ask(&body)).await;
                answer.map_err(|error| Stop::new(Exit::Software, error.to_string()))?
            }
        }
    }

    /// Of this process where it does the work.
    pub(super) fn peak_memory(&self) -> Option<u64> {
        let Self::Here(_) = self else { return None };
        // PORTABLE: Linux alone has it; elsewhere the line is left out.
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
        line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
    }
}

async fn here(greenroom: &Greenroom, ask: &Ask) -> Result<Answer, Stop> {
    let began = Instant::now();
    let request = ChatRequest {
        prompt: Some(ask.prompt.clone()),
        sampling: SamplingOptions { temperature: Some(0.0), ..SamplingOptions::default() },
        max_tokens: Some(ask.tokens),
        ignore_eos: true,
        ..ChatRequest::default()
    };
    let failed = |message: String| Stop::new(Exit::Failure, message);
    let mut stream = greenroom.chat(request).await.map_err(|refusal| failed(refusal.to_string()))?;
    let mut answer = Answer::default();
    while let Some(event) = stream.events.recv().await {
        match event {
            ChatEvent::Text(_) | ChatEvent::Reasoning(_) => answer.pieces.push(began.elapsed()),
            ChatEvent::Done { usage, .. } => {
                answer.whole = began.elapsed();
                answer.prompt_tokens = usage.prompt_tokens;
                answer.cached_tokens = usage.cached_tokens;
                answer.completion_tokens = usage.completion_tokens;
                return Ok(answer);
            }
            ChatEvent::Failed(failure) => return Err(failed(failure.message)),
            _ => {}
        }
    }
    Err(failed("the answer broke off".to_owned()))
}

impl Server {
    fn body(&self, ask: &Ask) -> String {
        let mut body = json!({
            "prompt": ask.prompt,
            "max_tokens": ask.tokens,
            "temperature": 0,
            "ignore_eos": true,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        if let Some(model) = &self.model {
            body["model"] = json!(model);
        }
        body.to_string()
    }

    fn ask(&self, body: &str) -> Result<Answer, Stop> {
        let failed = |message: String| Stop::new(Exit::Failure, format!("{}: {message}", self.url));
        let began = Instant::now();
        let mut response = self
            .agent
            .post(&self.url)
            .header("content-type", "application/json")
            .send(body)
            .map_err(|error| failed(error.to_string()))?;
        if !response.status().is_success() {
            let text = response.body_mut().with_config().limit(MAX_LINE).read_to_string().unwrap_or_default();
            let said: String = text.chars().take(500).collect();
            return Err(failed(format!("{} {said}", response.status())));
        }
        let reader = BufReader::new(response.into_body().into_reader());
        read(reader, began).map_err(failed)
    }
}

/// Reads an event stream to its end.
fn read(mut stream: impl BufRead, began: Instant) -> Result<Answer, String> {
    let mut answer = Answer::default();
    let mut line = Vec::new();
    loop {
        line.clear();
        let got = stream.by_ref().take(MAX_LINE).read_until(b'\n', &mut line);
        if got.map_err(|error| error.to_string())? == 0 {
            break;
        }
        let text = String::from_utf8_lossy(&line);
        match text.trim_end().strip_prefix("data:").map(str::trim_start) {
            Some("[DONE]") => break,
            Some(data) => {
                let event =
                    serde_json::from_str(data).map_err(|error| format!("an event is no JSON: {error}"))?;
                note(&mut answer, &event, began.elapsed())?;
            }
            None => {}
        }
    }
    answer.whole = began.elapsed();
    if answer.completion_tokens == 0 {
        answer.completion_tokens = u32::try_from(answer.pieces.len()).unwrap_or(u32::MAX);
    }
    Ok(answer)
}

fn note(answer: &mut Answer, event: &Value, now: Duration) -> Result<(), String> {
    if let Some(error) = event.get("error").filter(|error| !error.is_null()) {
        return Err(error.get("message").and_then(Value::as_str).unwrap_or("an error").to_owned());
    }
    if event.pointer("/choices/0/text").and_then(Value::as_str).is_some_and(|text| !text.is_empty()) {
        answer.pieces.push(now);
    }
    let count = |path: &str| event.pointer(path).and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
    if let Some(prompt) = count("/usage/prompt_tokens") {
        answer.prompt_tokens = prompt;
        answer.completion_tokens = count("/usage/completion_tokens").unwrap_or(0);
        answer.cached_tokens = count("/usage/prompt_tokens_details/cached_tokens").unwrap_or(0);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_read_whoever_wrote_it() {
        let stream = b": a comment\n\ndata: {\"choices\":[{\"text\":\"a\"}]}\r\n\r\ndata:{\"choices\":[{\"text\":\"\"}]}\n\n\
            data: {\"choices\":[{\"text\":\"b\"}],\"usage\":null}\n\n\
            data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3}}\n\ndata: [DONE]\n\n";
        let answer = read(&stream[..], Instant::now()).unwrap();
        assert_eq!((answer.pieces.len(), answer.prompt_tokens, answer.completion_tokens), (2, 7, 3));
        let uncounted = read(&b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n"[..], Instant::now()).unwrap();
        assert_eq!((uncounted.prompt_tokens, uncounted.completion_tokens), (0, 1));
        for wrong in ["data: {\"error\":{\"message\":\"no\"}}\n\n", "data: {\n\n"] {
            assert!(read(wrong.as_bytes(), Instant::now()).is_err());
        }
    }
}
