//! `/v1/audio/sessions`: live dictation over plain HTTP.
//!
//! A session belongs to nobody's connection: it is made, fed, asked and finished by requests of their
//! own, and ends by itself where they stop coming. Its id is its key.

use std::convert::Infallible;
use std::time::Duration;

use actix_web::http::StatusCode;
use actix_web::{HttpRequest, HttpResponse, web};
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout, timeout_at};

use super::answer::{HEARTBEAT, add_stream_headers};
use super::api_error::ApiError;
use super::audio::{add_warning, named, transcript_head};
use super::body::{Bounded, check_encoding, late, read_json, unreadable};
use super::chat::unix_seconds;
use super::messages::short;
use super::session_request::{input_body, read_session};
use super::state::State;
use crate::actors::{SessionReader, SpeechSession};
use crate::types::speech::{
    self, AppendError, Segment, SessionEnd, SessionEvent, SessionNews, SessionStatus, SpeechFailure, Word,
};

/// Largest chunk of audio, bytes.
pub(super) const MAX_CHUNK: usize = 8 << 20;
/// A poll waits so long at most.
const LONGEST_WAIT_MS: u64 = 60_000;
/// What a client is told to wait when audio comes faster than it can be heard.
const RETRY: Duration = Duration::from_secs(1);

/// Begins a session.
pub(super) async fn create(
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
) -> Result<HttpResponse, ApiError> {
    let call = read_session(read_json(&request, payload, &state).await?)?;
    let session = state.handles.open_session(call.spec).await?;
    let mut response = HttpResponse::Created();
    add_warning(&mut response, &call.unknown);
    Ok(response.json(session_body(&session, &state)))
}

/// A session as its maker sees it.
pub(super) fn session_body(session: &SpeechSession, state: &State) -> Value {
    let created = unix_seconds(session.created());
    let spec = session.spec();
    json!({
        "id": session.id(),
        "object": "audio.session",
        "status": session.status().name(),
        "model": session.model(),
        "created_at": created,
        // When it will have finished whatever happens.
        "expires_at": created + session.max_duration().as_secs() + session.idle().as_secs(),
        "input": input_body(spec.input),
        "partials": spec.partials,
        "limits": {
            "max_duration_s": session.max_duration().as_secs(),
            "idle_timeout_s": session.idle().as_secs_f64(),
            "max_chunk_bytes": MAX_CHUNK,
            "max_sessions": state.handles.max_sessions(),
        },
    })
}

pub(super) fn find(id: &str, state: &State) -> Result<SpeechSession, ApiError> {
    state.handles.find_session(id).ok_or_else(|| {
        let message = format!(
            "there is no live session `{}`: it is unknown here, was deleted, or ended a while ago",
            short(id)
        );
        ApiError::invalid(StatusCode::NOT_FOUND, "session_not_found", message)
    })
}

impl From<AppendError> for ApiError {
    fn from(error: AppendError) -> Self {
        let conflict = StatusCode::CONFLICT;
        match error {
            AppendError::Closed { .. } => Self::invalid(conflict, "session_closed", error.to_string()),
            AppendError::DurationLimit => Self::invalid(conflict, "duration_limit", error.to_string()),
            AppendError::OutOfOrder { .. } => {
                let mut wrong = Self::invalid(conflict, "out_of_order", format!("seq: {error}"));
                wrong.param = Some("seq".into());
                wrong
            }
            _ => {
                let mut full =
                    Self::invalid(StatusCode::TOO_MANY_REQUESTS, "audio_backlog", error.to_string());
                full.retry_after = Some(RETRY);
                full
            }
        }
    }
}

/// Takes audio in.
pub(super) async fn append(
    id: web::Path<String>,
    request: HttpRequest,
    query: web::Query<Vec<(String, String)>>,
    payload: web::Payload,
    state: web::Data<State>,
) -> Result<HttpResponse, ApiError> {
    let session = find(&id, &state).map_err(ApiError::closing)?;
    let mut seq = None;
    for (name, value) in query.iter() {
        match name.as_str() {
            "seq" => seq = Some(whole_number("seq", value)?),
            _ => return Err(no_parameter(name, "seq")),
        }
    }
    let chunk = read_chunk(&request, payload, &state).await?;
    if chunk.is_empty() {
        return Err(ApiError::field("body", "invalid_value", "is empty: the audio is the body, as it is"));
    }
    session.append(seq, chunk)?;
    let now = session.state(0);
    Ok(HttpResponse::Accepted().json(json!({
        "id": session.id(),
        "status": now.status.name(),
        "received_s": now.received_s,
        "processed_s": now.processed_s,
        "committed": now.committed,
        "tentative": now.tentative,
        "revision": now.revision,
    })))
}

fn whole_number(name: &str, value: &str) -> Result<u64, ApiError> {
    let wrong = |_| ApiError::field(name, "invalid_value", "must be a whole number from 0 on");
    value.parse().map_err(wrong)
}

fn no_parameter(name: &str, known: &str) -> ApiError {
    ApiError::field(&short(name), "invalid_value", format!("is no parameter here; there is {known}"))
}

async fn read_chunk(
    request: &HttpRequest,
    mut payload: web::Payload,
    state: &State,
) -> Result<Bytes, ApiError> {
    check_encoding(request, "the audio as it is")?;
    let deadline = Instant::now() + Duration::from_secs(state.config.body_timeout_s);
    let mut chunk = Bounded::new(MAX_CHUNK);
    while let Some(part) = timeout_at(deadline, payload.next()).await.map_err(|_| late(&state.config))? {
        let part = part.map_err(|error| unreadable(&error))?;
        if !chunk.push(&part) {
            break;
        }
    }
    chunk.finish().ok_or_else(|| {
        let message = format!("the chunk is over {} MiB; send smaller ones", MAX_CHUNK >> 20);
        ApiError::invalid(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message).closing()
    })
}

/// How it is; with `wait_ms`, once something has changed after the revision `since`.
pub(super) async fn state(
    id: web::Path<String>,
    query: web::Query<Vec<(String, String)>>,
    state: web::Data<State>,
) -> Result<HttpResponse, ApiError> {
    let session = find(&id, &state)?;
    let (mut since, mut wait) = (0, 0);
    for (name, value) in query.iter() {
        match name.as_str() {
            "since" => since = whole_number(name, value)?,
            "wait_ms" => wait = whole_number(name, value)?.min(LONGEST_WAIT_MS),
            _ => return Err(no_parameter(name, "since and wait_ms")),
        }
    }
    if wait > 0 {
        // Nothing new is an answer as well.
        let _late = timeout(Duration::from_millis(wait), session.changed_since(since)).await;
    }
    let now = session.state(since);
    let mut body = session_body(&session, &state);
    body["status"] = now.status.name().into();
    body["revision"] = now.revision.into();
    body["received_s"] = now.received_s.into();
    body["processed_s"] = now.processed_s.into();
    body["committed"] = now.committed.into();
    body["tentative"] = now.tentative.into();
    if let Some(SessionEnd::Failed(failure)) = session.end_now() {
        body["error"] = json!(ApiError::from(failure).body().error);
    }
    Ok(HttpResponse::Ok().json(body))
}

/// Ends the utterance now.
pub(super) async fn commit(id: web::Path<String>, state: web::Data<State>) -> Result<HttpResponse, ApiError> {
    let session = find(&id, &state)?;
    session.commit()?;
    Ok(HttpResponse::Accepted().json(session_body(&session, &state)))
}

/// No more audio comes: the transcript, once all is written down. The same again when asked again.
pub(super) async fn finish(id: web::Path<String>, state: web::Data<State>) -> Result<HttpResponse, ApiError> {
    let session = find(&id, &state)?;
    session.finish();
    match session.ended().await {
        SessionEnd::Done(heard) => {
            let spec = session.spec();
            let body = speech::write(&heard, spec.options.task, spec.format);
            Ok(transcript_head(&heard, spec.format).body(body))
        }
        SessionEnd::Failed(failure) => Err(failure.into()),
        SessionEnd::Cancelled => Err(AppendError::Closed { status: SessionStatus::Cancelled }.into()),
    }
}

/// Gives it up.
pub(super) async fn delete(id: web::Path<String>, state: web::Data<State>) -> Result<HttpResponse, ApiError> {
    find(&id, &state)?.delete();
    Ok(HttpResponse::NoContent().finish())
}

/// What happens in it, as server-sent events from its beginning on.
pub(super) async fn events(id: web::Path<String>, state: web::Data<State>) -> Result<HttpResponse, ApiError> {
    let session = find(&id, &state)?;
    let heartbeat = Duration::from_secs(state.config.heartbeat_s);
    let reader = session.reader();
    let first =
        ("session.created", json!({"type": "session.created", "session": session_body(&session, &state)}));
    let told = Told { reader, teller: Teller::new(&session), first: Some(first) };
    let body = stream::unfold(told, move |mut told| async move {
        if let Some((name, body)) = told.first.take() {
            return Some((Ok::<_, Infallible>(named(name, &body)), told));
        }
        let bytes = match timeout(heartbeat, told.reader.next()).await {
            Ok(Some(news)) => {
                told.teller.tell(news).iter().flat_map(|(name, body)| named(name, body)).collect()
            }
            Ok(None) => return None,
            Err(_) => Bytes::from_static(HEARTBEAT),
        };
        Some((Ok(bytes), told))
    });
    let mut response = HttpResponse::Ok();
    add_stream_headers(&mut response);
    Ok(response.streaming(body))
}

struct Told {
    reader: SessionReader,
    teller: Teller,
    first: Option<(&'static str, Value)>,
}

/// Puts what happens into words: names of events and their JSON. The same for events and sockets.
pub(super) struct Teller {
    session: SpeechSession,
    /// The latest utterance that was told of, and what of it was told as committed, bytes.
    told: (usize, usize),
}

impl Teller {
    /// For somebody who knows nothing yet.
    pub(super) fn new(session: &SpeechSession) -> Self {
        Self { session: session.clone(), told: (0, 0) }
    }

    /// Usually one event; none for what only other protocols have.
    pub(super) fn tell(&mut self, news: SessionNews) -> Vec<(&'static str, Value)> {
        let (name, mut body) = match news {
            SessionNews::Partial(partial) => {
                let told = if self.told.0 == partial.utterance { self.told.1 } else { 0 };
                let delta = partial.committed.get(told..).unwrap_or_default().to_owned();
                self.told = (partial.utterance, partial.committed.len());
                let body = json!({
                    "revision": partial.revision, "utterance": partial.utterance, "committed": partial.committed,
                    "committed_delta": delta, "tentative": partial.tentative, "audio_s": partial.audio_s,
                });
                ("transcript.partial", body)
            }
            SessionNews::Event(event) => match &*event {
                SessionEvent::SpeechStarted { utterance, start, .. } => {
                    ("speech.started", json!({"utterance": utterance, "start": start}))
                }
                SessionEvent::SpeechStopped { utterance, end } => {
                    ("speech.stopped", json!({"utterance": utterance, "end": end}))
                }
                SessionEvent::Committed { utterance, text, words } => {
                    let words: Vec<Value> = words.iter().map(word_body).collect();
                    ("transcript.committed", json!({"utterance": utterance, "text": text, "words": words}))
                }
                SessionEvent::Final { utterance, text, segments } => {
                    let segments: Vec<Value> = segments.iter().map(segment_body).collect();
                    ("transcript.final", json!({"utterance": utterance, "text": text, "segments": segments}))
                }
                SessionEvent::Cleared { .. } => ("audio.cleared", json!({})),
                SessionEvent::TurnEnded { .. } | SessionEvent::TurnFinal { .. } => return Vec::new(),
            },
            SessionNews::End(SessionEnd::Done(heard)) => {
                let spec = self.session.spec();
                let body = match spec.format {
                    speech::Format::Json => speech::json(&heard),
                    speech::Format::VerboseJson => speech::verbose(&heard, spec.options.task),
                    format => Value::String(speech::write(&heard, spec.options.task, format)),
                };
                ("session.done", json!({"body": body}))
            }
            SessionNews::End(SessionEnd::Failed(failure)) => ("error", error_body(failure)),
            SessionNews::End(SessionEnd::Cancelled) => ("session.cancelled", json!({})),
        };
        body["type"] = name.into();
        vec![(name, body)]
    }
}

fn error_body(failure: SpeechFailure) -> Value {
    json!({"error": ApiError::from(failure).body().error})
}

fn word_body(word: &Word) -> Value {
    json!({"word": word.word.trim(), "start": round(word.start), "end": round(word.end)})
}

fn segment_body(segment: &Segment) -> Value {
    let mut body = json!({
        "id": segment.id, "start": round(segment.start), "end": round(segment.end), "text": segment.text.trim(),
    });
    if !segment.words.is_empty() {
        body["words"] = segment.words.iter().map(word_body).collect();
    }
    body
}

/// To the hundredth of a second.
fn round(seconds: f64) -> f64 {
    (seconds * 100.0).round() / 100.0
}
