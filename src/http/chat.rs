//! `POST /v1/chat/completions` and `POST /v1/completions`: an answer as events, or whole.
//!
//! The status line and headers of a stream go out once the request is
//! admitted, before its prompt is computed. A connection that goes away drops
//! this handler, or the body, and with it the receiver: that is the cancellation.

use std::borrow::Cow;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use actix_web::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use actix_web::{HttpRequest, HttpResponse, HttpResponseBuilder, ResponseError, web};

use super::api_error::ApiError;
use super::body::read_json;
use super::chat_request::read_chat;
use super::client::{client_id, session_header};
use super::completion_request::read_completion;
use super::identity::{Identity, REQUEST_ID};
use super::options::Call;
use super::recorder::Recorder;
use super::sse::{self, Answer, AnswerWriter, Surface, broken_off};
use super::state::State;
use crate::actors::ChatStream;
use crate::types::{ChatEvent, Failure};

/// The seed in use: with it, the same request gives the same answer.
const SEED: HeaderName = HeaderName::from_static("x-greenroom-seed");
/// Where the time of an answer went, in the browsers' form.
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
/// Longest text of a `Warning` header, bytes.
const MAX_WARNING: usize = 1024;
/// Longest name of a field in it, bytes.
const MAX_NAME: usize = 200;

/// Answers a conversation.
pub(super) async fn chat(
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
) -> HttpResponse {
    answer(&request, payload, &state, Surface::Chat).await
}

/// Goes on from a text.
pub(super) async fn text(
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
) -> HttpResponse {
    answer(&request, payload, &state, Surface::Text).await
}

async fn answer(
    request: &HttpRequest,
    payload: web::Payload,
    state: &State,
    surface: Surface,
) -> HttpResponse {
    let recorder = Recorder::begin(request, state, surface.route());
    let opened = open(request, payload, state, surface, &recorder).await;
    let (call, chat, writer) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            recorder.refused(&error);
            let mut response = error.error_response();
            add_timing(response.headers_mut(), &recorder.server_timing(None));
            return response;
        }
    };
    let mut response = HttpResponse::Ok();
    add_headers(&mut response, &Identity::of(request, state), &call, &chat);
    if !call.stream {
        return whole(response, chat, writer, recorder).await;
    }
    let heartbeat = Duration::from_secs(state.config.heartbeat_s);
    sse::add_stream_headers(&mut response);
    response.streaming(sse::body(writer, chat.events, heartbeat, recorder))
}

/// Reads the request and has it accepted.
async fn open(
    request: &HttpRequest,
    payload: web::Payload,
    state: &State,
    surface: Surface,
    recorder: &Recorder,
) -> Result<(Call, ChatStream, AnswerWriter), ApiError> {
    let call = read_json(request, payload, state).await.and_then(|body| match surface {
        Surface::Chat => read_chat(body),
        Surface::Text => read_completion(body),
    });
    recorder.parsed();
    let mut call = call?;
    call.request.client = client_id(request, &call.client);
    let cache = &mut call.request.cache;
    cache.session = cache.session.take().or_else(|| session_header(request.headers()));
    call.request.trace = Some(recorder.trace().clone());
    let service_tier = call.terms.settle(request.headers(), &mut call.request)?;
    let has_scores = call.request.scores.is_some();
    let chat = state.handles.chat(std::mem::take(&mut call.request)).await.map_err(|refusal| {
        let mut error = ApiError::from(refusal);
        // What is wrong with the prompt as a whole is said of the field that holds it here.
        if surface == Surface::Text && error.param.as_deref() == Some("messages") {
            error.param = Some("prompt".to_owned());
        }
        error
    })?;
    let writer = AnswerWriter {
        surface,
        id: format!("{}-{}", surface.prefix(), chat.id),
        created: unix_seconds(chat.created),
        model: chat.model.clone(),
        service_tier,
        include_usage: call.include_usage,
        has_scores,
    };
    Ok((call, chat, writer))
}

fn add_headers(response: &mut HttpResponseBuilder, identity: &Identity, call: &Call, chat: &ChatStream) {
    response.insert_header((REQUEST_ID, identity.header()));
    response.insert_header((SEED, chat.seed.to_string()));
    if !call.unknown.is_empty() {
        response.insert_header((header::WARNING, warning(&call.unknown)));
    }
}

fn add_timing(headers: &mut HeaderMap, timing: &str) {
    // Names and numbers of ours: always a value.
    if let Ok(value) = HeaderValue::from_str(timing) {
        headers.insert(SERVER_TIMING, value);
    }
}

/// Names fields that were ignored. Their names are the client's: made printable, and cut.
pub(super) fn warning(fields: &[String]) -> String {
    let mut names = String::new();
    for field in fields {
        let field = cut(field);
        if names.len() + field.len() > MAX_WARNING {
            names.push_str(", …");
            break;
        }
        names.push_str(if names.is_empty() { "" } else { ", " });
        names.push_str(&field);
    }
    let plain = |c: char| if (' '..='~').contains(&c) && c != '"' && c != '\\' { c } else { '?' };
    let names: String = names.replace('…', "...").chars().map(plain).collect();
    format!("299 greenroom \"unknown fields ignored: {names}\"")
}

fn cut(name: &str) -> Cow<'_, str> {
    match name.char_indices().find(|(at, c)| at + c.len_utf8() > MAX_NAME) {
        Some((end, _)) => format!("{}…", &name[..end]).into(),
        None => name.into(),
    }
}

async fn whole(
    mut response: HttpResponseBuilder,
    mut chat: ChatStream,
    writer: AnswerWriter,
    mut recorder: Recorder,
) -> HttpResponse {
    let mut answer = Answer::default();
    let end = loop {
        match chat.events.recv().await.unwrap_or_else(|| ChatEvent::Failed(broken_off())) {
            ChatEvent::Text(text) => answer.text.push_str(&text),
            ChatEvent::Scores(scores) => answer.scores.extend(scores),
            end => break end,
        }
    };
    recorder.ended(&end);
    let (mut response, timings) = match end {
        ChatEvent::Done { finish, usage, timings } => {
            let body = writer.whole(&answer, finish, usage);
            (response.content_type("application/json").body(body), Some(timings))
        }
        ChatEvent::Failed(failure) => (failed(&mut response, failure), None),
        // The loop above ends with a terminal event.
        ChatEvent::Text(_) | ChatEvent::Scores(_) => (failed(&mut response, broken_off()), None),
    };
    add_timing(response.headers_mut(), &recorder.server_timing(timings));
    response
}

/// An accepted request that failed: it keeps its id, by which its log line is found.
fn failed(accepted: &mut HttpResponseBuilder, failure: Failure) -> HttpResponse {
    let mut response = ApiError::from(failure).error_response();
    for (name, value) in accepted.finish().headers() {
        response.headers_mut().insert(name.clone(), value.clone());
    }
    response
}

/// Seconds since 1970.
pub(super) fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use actix_web::http::header::HeaderValue;
    use proptest::prelude::*;

    use super::{MAX_NAME, MAX_WARNING, warning};

    proptest! {
        #[test]
        fn a_warning_names_the_first_field_and_stays_short(
            names in prop::collection::vec("\\PC{1,400}|[a-z]{1,3000}", 1..40),
        ) {
            let text = warning(&names);
            prop_assert!(HeaderValue::from_str(&text).is_ok_and(|value| value.to_str().is_ok()), "{text}");
            prop_assert!(text.len() <= MAX_WARNING + 60, "{}", text.len());
            let said = text.strip_prefix("299 greenroom \"unknown fields ignored: ").unwrap();
            let begin: String = names[0].chars().take(MAX_NAME / 4).map(|c| {
                if (' '..='~').contains(&c) && c != '"' && c != '\\' { c } else { '?' }
            }).collect();
            prop_assert!(said.starts_with(&begin) || names[0].contains('…'), "{text}");
        }
    }
}
