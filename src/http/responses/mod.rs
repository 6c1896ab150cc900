//! OpenAI's responses: `POST /v1/responses`, and what can be done with one afterwards.

use std::sync::Arc;
use std::time::Duration;

use actix_web::http::StatusCode;
use actix_web::{HttpRequest, HttpResponse, web};
use serde_json::{Map, json};

use super::answer::Choices;
use super::api_error::ApiError;
use super::body::read_json;
use super::chat::{self, Admitted};
use super::messages::short;
use super::recorder::Recorder;
use super::state::State;
use crate::types::ChatMessage;

mod input;
mod items;
mod store;
mod writer;

use input::{ResponseCall, read_response};
pub(super) use store::Store;
use writer::{Keep, ResponseWriter};

/// Its path.
const ROUTE: &str = "/v1/responses";
/// What a response's id begins with; the request's follows.
const PREFIX: &str = "resp_";

/// Gives a response.
pub(super) async fn create(
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
) -> HttpResponse {
    let recorder = Recorder::begin(&request, &state, ROUTE);
    let opened = open(&request, payload, &state, &recorder).await;
    let (call, writer, admitted) = match opened {
        Ok(opened) => opened,
        Err(error) => return chat::refused(&recorder, &error),
    };
    let response = chat::accepted(&request, &state, &call.call, &admitted);
    let heartbeat = call.call.stream.then(|| Duration::from_secs(state.config.heartbeat_s));
    chat::respond(response, writer, Choices::new(admitted.events()), recorder, heartbeat).await
}

async fn open(
    request: &HttpRequest,
    payload: web::Payload,
    state: &State,
    recorder: &Recorder,
) -> Result<(ResponseCall, ResponseWriter, Admitted), ApiError> {
    let call = read_json(request, payload, state).await.and_then(read_response);
    recorder.parsed();
    let mut call = call?;
    let before = match &call.previous {
        Some(id) => Some(find(state, id, "previous_response_id")?),
        None => None,
    };
    let history: Vec<ChatMessage> =
        before.as_ref().map(|before| before.conversation.clone()).unwrap_or_default();
    let conversation = call.compose(history);
    // A conversation that is kept here is one for the prompt cache as well.
    let own = call.store.then(|| recorder.trace().id().to_string());
    let session = call.call.request.cache.session.clone();
    let session = session.or_else(|| before.and_then(|before| before.session.clone())).or(own);
    call.call.request.cache.session.clone_from(&session);
    let admitted = chat::admit(request, state, recorder, &mut call.call).await.map_err(|mut error| {
        // What is wrong with the conversation is said of the field that holds it here.
        if error.param.as_deref().is_some_and(|param| param.starts_with("messages")) {
            error.param = Some("input".to_owned());
        }
        error
    })?;
    let first = admitted.first();
    let mut head = Map::new();
    for (name, value) in [
        ("id", json!(format!("{PREFIX}{}", first.id))),
        ("object", json!("response")),
        ("created_at", json!(chat::unix_seconds(first.created))),
        ("model", json!(first.model)),
        ("background", json!(false)),
        ("service_tier", json!(admitted.service_tier().unwrap_or("default"))),
    ] {
        head.insert(name.to_owned(), value);
    }
    head.extend(std::mem::take(&mut call.echo));
    let keep = call.store.then(|| Keep {
        store: Arc::clone(&state.responses),
        input: std::mem::take(&mut call.input),
        conversation,
        session,
    });
    Ok((call, ResponseWriter::new(head, keep), admitted))
}

/// A response that was given.
pub(super) async fn get(id: web::Path<String>, state: web::Data<State>) -> Result<HttpResponse, ApiError> {
    Ok(HttpResponse::Ok().json(&find(&state, &id, "id")?.body))
}

/// The items that it was asked with.
pub(super) async fn input_items(
    id: web::Path<String>,
    state: web::Data<State>,
) -> Result<HttpResponse, ApiError> {
    let stored = find(&state, &id, "id")?;
    Ok(HttpResponse::Ok().json(json!({"object": "list", "data": stored.input, "has_more": false})))
}

/// Forgets a response.
pub(super) async fn delete(id: web::Path<String>, state: web::Data<State>) -> Result<HttpResponse, ApiError> {
    match state.responses.remove(&id) {
        true => Ok(HttpResponse::Ok().json(json!({"id": *id, "object": "response", "deleted": true}))),
        false => Err(unknown(&id, "id")),
    }
}

/// Nothing runs that nobody waits for: who wants a response no more closes the connection.
pub(super) async fn cancel(id: web::Path<String>, state: web::Data<State>) -> Result<HttpResponse, ApiError> {
    find(&state, &id, "id")?;
    let message = "only background responses can be cancelled, and there are none here: close the connection";
    Err(ApiError::invalid(StatusCode::BAD_REQUEST, "invalid_request", message))
}

fn find(state: &State, id: &str, field: &str) -> Result<Arc<store::Stored>, ApiError> {
    state.responses.get(id).ok_or_else(|| unknown(id, field))
}

fn unknown(id: &str, field: &str) -> ApiError {
    let message = format!(
        "{field}: there is no response `{}`: it was not stored, was deleted, or is older than those that are kept",
        short(id)
    );
    let mut error = ApiError::invalid(StatusCode::NOT_FOUND, "response_not_found", message);
    error.param = Some(field.to_owned());
    error
}
