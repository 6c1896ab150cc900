//! `POST /v1/audio/transcriptions` and `/translations`: a form with a file, answered whole or as events.
//!
//! Nothing is sent before the recording was looked through: a file that cannot be heard is a proper 400. A
//! connection that goes away drops the stream of events, and that is the cancellation.

use std::convert::Infallible;
use std::time::Duration;

use actix_web::http::StatusCode;
use actix_web::http::header::{self, HeaderName, HeaderValue};
use actix_web::{HttpRequest, HttpResponse, HttpResponseBuilder, ResponseError, web};
use bytes::Bytes;
use futures_util::stream;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

use super::answer::{HEARTBEAT, add_stream_headers};
use super::api_error::ApiError;
use super::chat::warning;
use super::recorder::Recorder;
use super::speech_request::{SpeechCall, read_form};
use super::state::State;
use super::upload::read_upload;
use crate::actors::{Transcribe, TranscriptStream};
use crate::observe::Outcome;
use crate::types::Refusal;
use crate::types::speech::{self, AudioFaultKind, Format, SpeechEvent, SpeechFailure, Task, Transcription};

/// An upload of the largest size may take so many times the time of other bodies.
const SLOW_UPLOADS: u32 = 10;
/// Says that a recording ended early.
const WARNING: HeaderName = HeaderName::from_static("x-audio-warning");

/// What is said.
pub(super) async fn transcriptions(
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
) -> HttpResponse {
    answer(&request, payload, &state, Task::Transcribe).await
}

/// What is said, in English.
pub(super) async fn translations(
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
) -> HttpResponse {
    answer(&request, payload, &state, Task::Translate).await
}

/// Gives the speech model's memory back.
pub(super) async fn unload(state: web::Data<State>) -> HttpResponse {
    let unloaded = state.handles.unload_speech().await;
    let mut body = speech_body(&state).await;
    body["unloaded"] = unloaded.into();
    HttpResponse::Ok().json(body)
}

/// How the speech model is, for `/health` and `/stats`; an empty object without one.
pub(super) async fn speech_body(state: &State) -> Value {
    let Some(status) = state.handles.speech().await else { return json!({}) };
    json!({
        "model": status.model,
        "resident": status.is_resident,
        "weight_bytes": status.weight_bytes,
        "state_bytes": status.state_bytes,
        "running": status.running,
        "sessions": status.sessions,
        "queued": status.queued,
        "requests": status.requests,
        "cancelled": status.cancelled,
        "loads": status.loads,
        "unloads": status.unloads,
        "last_load_ms": status.last_load_ms,
    })
}

async fn answer(request: &HttpRequest, payload: web::Payload, state: &State, task: Task) -> HttpResponse {
    let route = match task {
        Task::Transcribe => "/v1/audio/transcriptions",
        Task::Translate => "/v1/audio/translations",
    };
    let mut recorder = Recorder::begin(request, state, route);
    let opened = open(request, payload, state, task, &recorder).await;
    let (call, stream) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            recorder.refused(&error);
            return error.error_response();
        }
    };
    if call.stream {
        return events(stream, &call, state, recorder).await.unwrap_or_else(|error| error.error_response());
    }
    let answered = whole(stream, &call).await;
    recorder.closed(if answered.is_ok() { Outcome::Stop } else { Outcome::Failed });
    answered.unwrap_or_else(|error| error.error_response())
}

/// Reads the request and has it accepted.
async fn open(
    request: &HttpRequest,
    payload: web::Payload,
    state: &State,
    task: Task,
    recorder: &Recorder,
) -> Result<(SpeechCall, TranscriptStream), ApiError> {
    let call = read(request, payload, state, task).await;
    recorder.parsed();
    let (call, file) = call?;
    let mut ask = Transcribe::new(file, call.options.clone());
    ask.model = call.model.clone();
    ask.trace = Some(recorder.trace().clone());
    Ok((call, state.handles.transcribe_file(ask).await?))
}

/// What is asked for, and the recording.
async fn read(
    request: &HttpRequest,
    payload: web::Payload,
    state: &State,
    task: Task,
) -> Result<(SpeechCall, Bytes), ApiError> {
    if state.handles.speech_model().is_none() {
        return Err(ApiError::from(Refusal::no_speech_model()).closing());
    }
    let timeout = Duration::from_secs(state.config.body_timeout_s) * SLOW_UPLOADS;
    let read = read_upload(request, payload, state.handles.max_recording_bytes());
    let (fields, file) = match timeout_at(Instant::now() + timeout, read).await {
        Ok(read) => read?,
        Err(_) => {
            let message = "the upload did not arrive in time".to_owned();
            return Err(ApiError::invalid(StatusCode::REQUEST_TIMEOUT, "body_timeout", message).closing());
        }
    };
    let call = read_form(&fields, task)?;
    let Some(file) = file else {
        return Err(ApiError::field(
            "file",
            "missing_required_parameter",
            "the form has no file of this name",
        ));
    };
    if file.is_empty() {
        return Err(ApiError::field("file", "empty_file", "is empty: 0 bytes"));
    }
    Ok((call, file))
}

impl From<SpeechFailure> for ApiError {
    fn from(failure: SpeechFailure) -> Self {
        match failure {
            SpeechFailure::Audio(fault) => {
                let code = match fault.kind {
                    AudioFaultKind::Empty => "empty_file",
                    AudioFaultKind::Undecodable => "invalid_value",
                    AudioFaultKind::TooShort => "audio_too_short",
                    AudioFaultKind::TooLong => "audio_too_long",
                };
                Self::field("file", code, fault.message)
            }
            SpeechFailure::Option { field, message } => {
                let code = if field == "task" { "unsupported_task" } else { "unsupported_language" };
                Self::field(field, code, message)
            }
            SpeechFailure::ShuttingDown => Self::from(Refusal::Draining),
            SpeechFailure::Unavailable { .. } => {
                // Its cause names paths: that is for the log.
                let message = "the speech model could not be loaded; see the server's log";
                Self::server(StatusCode::SERVICE_UNAVAILABLE, "model_unavailable", message)
            }
            SpeechFailure::Internal { message } => {
                Self::server(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
            }
        }
    }
}

/// The head of an answer that is a whole transcript.
pub(super) fn transcript_head(heard: &Transcription, format: Format) -> HttpResponseBuilder {
    let kind = match format {
        Format::Json | Format::VerboseJson => "application/json",
        Format::Text => "text/plain; charset=utf-8",
        Format::Srt => "application/x-subrip; charset=utf-8",
        Format::Vtt => "text/vtt; charset=utf-8",
    };
    let mut response = HttpResponse::Ok();
    response.insert_header((header::CONTENT_TYPE, kind));
    if heard.warning.is_some() {
        response.insert_header((WARNING, HeaderValue::from_static("truncated")));
    }
    response
}

async fn whole(stream: TranscriptStream, call: &SpeechCall) -> Result<HttpResponse, ApiError> {
    let heard = stream.whole().await?;
    let mut response = transcript_head(&heard, call.format);
    add_warning(&mut response, &call.unknown);
    let body = match call.format {
        Format::Json if call.logprobs => {
            let mut body = speech::json(&heard);
            body["logprobs"] = logprobs(&heard);
            body.to_string()
        }
        format => speech::write(&heard, call.options.task, format),
    };
    Ok(response.body(body))
}

/// Names fields that were not understood.
pub(super) fn add_warning(response: &mut HttpResponseBuilder, unknown: &[String]) {
    if !unknown.is_empty() {
        response.insert_header((header::WARNING, warning(unknown)));
    }
}

/// Of each segment's text tokens; a token's own text is not told apart.
fn logprobs(heard: &Transcription) -> Value {
    let all = heard.segments.iter().flat_map(|segment| segment.token_texts.iter().zip(&segment.logprobs));
    let entry = |(bytes, logprob): (&Vec<u8>, &f32)| json!({"token": String::from_utf8_lossy(bytes), "bytes": bytes, "logprob": logprob});
    all.map(entry).collect()
}

/// Where a stream of events is.
struct Out {
    stream: TranscriptStream,
    heartbeat: Duration,
    text: String,
    over: bool,
    recorder: Recorder,
}

async fn events(
    mut stream: TranscriptStream,
    call: &SpeechCall,
    state: &State,
    mut recorder: Recorder,
) -> Result<HttpResponse, ApiError> {
    // Until it is known that the recording can be heard, an error is a proper status.
    match stream.next().await {
        Some(SpeechEvent::Failed(failure)) => return Err(failure.into()),
        Some(_) => {}
        None => return Err(SpeechFailure::ShuttingDown.into()),
    }
    let heartbeat = Duration::from_secs(state.config.heartbeat_s);
    recorder.written();
    let out = Out { stream, heartbeat, text: String::new(), over: false, recorder };
    let body = stream::unfold(out, |mut out| async move {
        let bytes = out.next().await?;
        Some((Ok::<_, Infallible>(bytes), out))
    });
    let mut response = HttpResponse::Ok();
    add_stream_headers(&mut response);
    add_warning(&mut response, &call.unknown);
    Ok(response.streaming(body))
}

impl Out {
    /// The next event's bytes; a comment where none comes for a while.
    async fn next(&mut self) -> Option<Bytes> {
        if self.over {
            return None;
        }
        let event = match timeout_at(Instant::now() + self.heartbeat, self.stream.next()).await {
            Ok(event) => event,
            Err(_) => return Some(Bytes::from_static(HEARTBEAT)),
        };
        Some(match event {
            Some(SpeechEvent::Started { .. }) => Bytes::from_static(HEARTBEAT),
            Some(SpeechEvent::Segment(segment)) => {
                // What was sent is never taken back: deltas join to the text at the end.
                let delta = if self.text.is_empty() { segment.text.trim_start() } else { &segment.text };
                self.text.push_str(delta);
                // Where it is heard is ours: OpenAI's clients pass it over.
                let (start, end) = (segment.start, segment.end);
                let body =
                    json!({"type": "transcript.text.delta", "delta": delta, "start": start, "end": end});
                named("transcript.text.delta", &body)
            }
            Some(SpeechEvent::Done(heard)) => {
                self.over = true;
                self.recorder.closed(Outcome::Stop);
                let usage = speech::usage(&heard);
                let text = heard.text();
                let body = json!({"type": "transcript.text.done", "text": text, "usage": usage});
                named("transcript.text.done", &body)
            }
            Some(SpeechEvent::Failed(failure)) => self.failed(failure),
            None => self.failed(SpeechFailure::ShuttingDown),
        })
    }

    fn failed(&mut self, failure: SpeechFailure) -> Bytes {
        self.over = true;
        self.recorder.closed(Outcome::Failed);
        let error = ApiError::from(failure);
        named("error", &json!({"type": "error", "error": error.body().error}))
    }
}

/// One event with a name.
pub(super) fn named(event: &str, body: &Value) -> Bytes {
    format!("event: {event}\ndata: {body}\n\n").into()
}
