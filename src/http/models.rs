//! `GET /v1/models` and `GET /v1/models/{id}`.

use actix_web::{HttpResponse, web};
use serde_json::{Map, Value};

use super::api_error::ApiError;
use super::chat::unix_seconds;
use super::dto::{List, ModelBody};
use super::state::State;
use crate::actors::{ModelState, ModelStatus};
use crate::types::Refusal;

/// All models, the default one first.
pub(super) async fn list(state: web::Data<State>) -> HttpResponse {
    HttpResponse::Ok().json(List { object: "list", data: all(&state) })
}

/// One model.
pub(super) async fn one(state: web::Data<State>, id: web::Path<String>) -> Result<HttpResponse, ApiError> {
    let asked = id.into_inner();
    let models = all(&state);
    let known = models.iter().map(|model| model.id.clone()).collect();
    match models.into_iter().find(|model| model.id == asked) {
        Some(model) => Ok(HttpResponse::Ok().json(model)),
        None => Err(Refusal::UnknownModel { asked, known }.into()),
    }
}

/// Chat models, then the speech model, whose weights come and go.
fn all(state: &State) -> Vec<ModelBody> {
    let mut models: Vec<_> = state.handles.models().into_iter().map(model_body).collect();
    if let Some(id) = state.handles.speech_model() {
        let created = models.first().map_or(0, |model| model.created);
        let facts =
            [("kind", "transcription"), ("endpoints", "/v1/audio/transcriptions, /v1/audio/translations")];
        let facts = facts.into_iter().map(|(name, value)| (name.to_owned(), Value::from(value)));
        models.push(ModelBody {
            id: id.to_owned(),
            object: "model",
            created,
            owned_by: "greenroom",
            state: "ready".to_owned(),
            context_length: None,
            facts: facts.collect(),
        });
    }
    models
}

fn model_body(model: ModelStatus) -> ModelBody {
    let facts = model.facts.into_iter().map(|(name, value)| (name, Value::String(value)));
    ModelBody {
        id: model.id,
        object: "model",
        created: unix_seconds(model.created),
        owned_by: "greenroom",
        state: state_name(&model.state).to_owned(),
        context_length: model.context,
        facts: facts.collect::<Map<_, _>>(),
    }
}

/// A model's state in one word.
pub(super) fn state_name(state: &ModelState) -> &'static str {
    match state {
        ModelState::Loading => "loading",
        ModelState::Ready => "ready",
        ModelState::Restarting => "restarting",
        ModelState::Failed { .. } => "failed",
    }
}
