//! Anthropic's messages: `POST /v1/messages` and `/v1/messages/count_tokens`.

use std::time::Duration;

use actix_web::body::BoxBody;
use actix_web::{HttpRequest, HttpResponse, ResponseError, web};
use serde_json::json;

use super::answer::Choices;
use super::api_error::ApiError;
use super::body::read_json;
use super::chat::{self, Admitted};
use super::client::client_id;
use super::identity::Identity;
use super::options::Call;
use super::recorder::Recorder;
use super::state::State;

mod input;
mod writer;

use input::{Purpose, read_message_request};
use writer::{MessageWriter, error_body};

/// Its path.
const ROUTE: &str = "/v1/messages";
/// What a message's id begins with; the request's follows.
pub(super) const PREFIX: &str = "msg_";

/// Answers a conversation.
pub(super) async fn messages(
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
) -> HttpResponse {
    let recorder = Recorder::begin(&request, &state, ROUTE);
    let (call, admitted) = match open(&request, payload, &state, &recorder).await {
        Ok(opened) => opened,
        Err(error) => {
            recorder.refused(&error);
            return refused(&request, &state, &error);
        }
    };
    let response = chat::accepted(&request, &state, &call, &admitted);
    let first = admitted.first();
    let id = format!("{PREFIX}{}", first.id);
    let writer = MessageWriter::new(id, first.model.clone(), first.prompt_tokens, call.marks_cache);
    let heartbeat = call.stream.then(|| Duration::from_secs(state.config.heartbeat_s));
    chat::respond(response, writer, Choices::new(admitted.events()), recorder, heartbeat).await
}

/// Tells how many tokens a conversation's prompt has.
pub(super) async fn count_tokens(
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
) -> HttpResponse {
    let counted = async {
        let body = read_json(&request, payload, &state).await?;
        let mut call = read_message_request(body, Purpose::Count)?;
        call.request.client = client_id(&request, &call.client);
        Ok(state.handles.count_tokens(call.request).await?)
    };
    match counted.await {
        Ok(tokens) => HttpResponse::Ok().json(json!({"input_tokens": tokens})),
        Err(error) => refused(&request, &state, &error),
    }
}

async fn open(
    request: &HttpRequest,
    payload: web::Payload,
    state: &State,
    recorder: &Recorder,
) -> Result<(Call, Admitted), ApiError> {
    let call =
        read_json(request, payload, state).await.and_then(|body| read_message_request(body, Purpose::Answer));
    recorder.parsed();
    let mut call = call?;
    let admitted = chat::admit(request, state, recorder, &mut call).await?;
    Ok((call, admitted))
}

/// An error in Anthropic's shape.
fn refused(request: &HttpRequest, state: &State, error: &ApiError) -> HttpResponse {
    let id = Identity::of(request, state).id.to_string();
    let body = error_body(error, Some(&id)).to_string();
    error.error_response().map_body(|_, _| BoxBody::new(body))
}
