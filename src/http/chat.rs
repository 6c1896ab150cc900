//! `POST /v1/chat/completions` and `POST /v1/completions`: an answer as events, or whole.
//!
//! The status line and headers of a stream go out once the request is
//! admitted, before its prompt is computed. A connection that goes away drops
//! this handler, or the body, and with it the receiver: that is the cancellation.

use std::borrow::Cow;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use actix_web::body::BoxBody;
use actix_web::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use actix_web::{HttpRequest, HttpResponse, HttpResponseBuilder, ResponseError, web};
use tokio::sync::mpsc;

use super::answer::{self, ChatWriter, Choices, Head, TextWriter, Writer};
use super::api_error::ApiError;
use super::body::read_json;
use super::chat_request::read_chat;
use super::client::{client_id, session_header};
use super::completion_request::read_completion;
use super::identity::{Identity, REQUEST_ID};
use super::options::Call;
use super::recorder::Recorder;
use super::state::State;
use crate::actors::ChatStream;
use crate::observe::Outcome;
use crate::types::{ChatEvent, ChatRequest, Failure, FinishReason, Refusal};

/// The seed in use: with it, the same request gives the same answer.
const SEED: HeaderName = HeaderName::from_static("x-greenroom-seed");
/// Where the time of an answer went, in the browsers' form.
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
/// Longest text of a `Warning` header, bytes.
const MAX_WARNING: usize = 1024;
/// Longest name of a field in it, bytes.
const MAX_NAME: usize = 200;

/// Which of OpenAI's two shapes an answer has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Surface {
    /// `POST /v1/chat/completions`: messages.
    Chat,
    /// `POST /v1/completions`: text.
    Text,
}

impl Surface {
    /// Its path.
    fn route(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Text => "/v1/completions",
        }
    }

    /// What an answer's id begins with.
    fn prefix(self) -> &'static str {
        match self {
            Self::Chat => "chatcmpl",
            Self::Text => "cmpl",
        }
    }
}

/// Answers a conversation.
pub(super) async fn chat(
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
) -> HttpResponse {
    serve(&request, payload, &state, Surface::Chat).await
}

/// Goes on from a text.
pub(super) async fn text(
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
) -> HttpResponse {
    serve(&request, payload, &state, Surface::Text).await
}

async fn serve(
    request: &HttpRequest,
    payload: web::Payload,
    state: &State,
    surface: Surface,
) -> HttpResponse {
    let recorder = Recorder::begin(request, state, surface.route());
    let opened = open(request, payload, state, surface, &recorder).await;
    let (call, admitted) = match opened {
        Ok(opened) => opened,
        Err(error) => return refused(&recorder, &error),
    };
    let response = accepted(request, state, &call, &admitted);
    let first = admitted.first();
    let head = Head {
        id: format!("{}-{}", surface.prefix(), first.id),
        created: unix_seconds(first.created),
        model: first.model.clone(),
        service_tier: admitted.service_tier,
        include_usage: call.include_usage,
        has_scores: admitted.has_scores,
        choices: call.choices,
    };
    let choices = Choices::new(admitted.events());
    let heartbeat = call.stream.then(|| Duration::from_secs(state.config.heartbeat_s));
    match surface {
        Surface::Chat => respond(response, ChatWriter::new(head), choices, recorder, heartbeat).await,
        Surface::Text => respond(response, TextWriter::new(head), choices, recorder, heartbeat).await,
    }
}

/// Reads the request and has it accepted.
async fn open(
    request: &HttpRequest,
    payload: web::Payload,
    state: &State,
    surface: Surface,
    recorder: &Recorder,
) -> Result<(Call, Admitted), ApiError> {
    let call = read_json(request, payload, state).await.and_then(|body| match surface {
        Surface::Chat => read_chat(body),
        Surface::Text => read_completion(body),
    });
    recorder.parsed();
    let mut call = call?;
    let admitted = admit(request, state, recorder, &mut call).await.map_err(|mut error| {
        // What is wrong with the prompt as a whole is said of the field that holds it here.
        if surface == Surface::Text && error.param.as_deref() == Some("messages") {
            error.param = Some("prompt".to_owned());
        }
        error
    })?;
    Ok((call, admitted))
}

/// A request that was accepted.
pub(super) struct Admitted {
    first: ChatStream,
    rest: Vec<ChatStream>,
    service_tier: Option<&'static str>,
    has_scores: bool,
}

impl Admitted {
    /// The first choice's.
    pub(super) fn first(&self) -> &ChatStream {
        &self.first
    }

    /// The tier to name in the answer, if one was asked for.
    pub(super) fn service_tier(&self) -> Option<&'static str> {
        self.service_tier
    }

    /// Of each choice.
    pub(super) fn events(self) -> Vec<mpsc::Receiver<ChatEvent>> {
        [self.first].into_iter().chain(self.rest).map(|chat| chat.events).collect()
    }
}

/// Completes a request by what its head says, and has each of its choices accepted, or none.
pub(super) async fn admit(
    request: &HttpRequest,
    state: &State,
    recorder: &Recorder,
    call: &mut Call,
) -> Result<Admitted, ApiError> {
    call.request.client = client_id(request, &call.client);
    let cache = &mut call.request.cache;
    cache.session = cache.session.take().or_else(|| session_header(request.headers()));
    call.request.trace = Some(recorder.trace().clone());
    let service_tier = call.terms.settle(request.headers(), &mut call.request)?;
    let has_scores = call.request.scores.is_some();
    let asked = std::mem::take(&mut call.request);
    let (first, rest) = open_choices(state, asked, call.choices).await?;
    Ok(Admitted { first, rest, service_tier, has_scores })
}

/// They differ in their seeds; the prompt is computed once, for those that come later find it in the cache.
async fn open_choices(
    state: &State,
    asked: ChatRequest,
    count: usize,
) -> Result<(ChatStream, Vec<ChatStream>), Refusal> {
    let again = (count > 1).then(|| asked.clone());
    let first = state.handles.chat(asked).await?;
    let mut rest = Vec::new();
    for (number, mut next) in (1_u64..).zip(std::iter::repeat_n(again, count - 1).flatten()) {
        next.trace = None;
        next.sampling.seed = Some(first.seed.wrapping_add(number));
        rest.push(state.handles.chat(next).await?);
    }
    Ok((first, rest))
}

/// The answer to a request that was not accepted.
pub(super) fn refused(recorder: &Recorder, error: &ApiError) -> HttpResponse {
    recorder.refused(error);
    let mut response = error.error_response();
    add_timing(response.headers_mut(), &recorder.server_timing(None));
    response
}

/// The head of an answer to a request that was accepted.
pub(super) fn accepted(
    request: &HttpRequest,
    state: &State,
    call: &Call,
    admitted: &Admitted,
) -> HttpResponseBuilder {
    let mut response = HttpResponse::Ok();
    response.insert_header((REQUEST_ID, Identity::of(request, state).header()));
    // With it, the first choice can be had again.
    response.insert_header((SEED, admitted.first.seed.to_string()));
    if !call.unknown.is_empty() {
        response.insert_header((header::WARNING, warning(&call.unknown)));
    }
    response
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

/// Sends an answer: as events where comments are to come so often, else as one document.
pub(super) async fn respond(
    mut response: HttpResponseBuilder,
    writer: impl Writer + 'static,
    choices: Choices,
    mut recorder: Recorder,
    heartbeat: Option<Duration>,
) -> HttpResponse {
    if let Some(heartbeat) = heartbeat {
        answer::add_stream_headers(&mut response);
        return response.streaming(answer::body(writer, choices, heartbeat, recorder));
    }
    let (mut response, timings) = match answer::collect(choices).await {
        Ok((answers, usage, timings)) => {
            let cut = answers.iter().any(|answer| answer.finish == FinishReason::Length);
            recorder.closed(if cut { Outcome::Length } else { Outcome::Stop });
            (response.content_type("application/json").body(writer.whole(&answers, usage)), timings)
        }
        Err(failure) => {
            recorder.closed(Outcome::Failed);
            (failed(&mut response, failure, &writer), None)
        }
    };
    add_timing(response.headers_mut(), &recorder.server_timing(timings));
    response
}

/// An accepted request that failed: it keeps its id, by which its log line is found.
fn failed(accepted: &mut HttpResponseBuilder, failure: Failure, writer: &impl Writer) -> HttpResponse {
    let error = ApiError::from(failure);
    let body = writer.error(&error);
    let mut response = error.error_response().map_body(|_, _| BoxBody::new(body));
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
