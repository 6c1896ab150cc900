//! `POST /v1/audio/transcriptions`: asks the transcription service, which says
//! what it lacks. The upload is not read: nothing could be done with it.

use actix_web::{HttpResponse, web};

use super::api_error::ApiError;
use super::state::State;
use crate::actors::Transcribe;
use crate::types::Refusal;

/// Answers a transcription request.
pub(super) async fn transcriptions(state: web::Data<State>) -> Result<HttpResponse, ApiError> {
    let reply = state.handles.transcribe().send(Transcribe::default()).await;
    let transcript =
        reply.unwrap_or(Err(Refusal::Draining)).map_err(|refusal| ApiError::from(refusal).closing())?;
    Ok(HttpResponse::Ok().json(serde_json::json!({"text": transcript.text})))
}
