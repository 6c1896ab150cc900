//! `/livez`, `/readyz`, `/health`, `/metrics`.
//!
//! All from atomics and a watch channel: they answer also when the compute
//! thread hangs, which is what `/livez` is there to see.

use std::time::Duration;

use actix_web::http::header;
use actix_web::{HttpResponse, web};
use serde_json::json;

use super::models::state_name;
use super::state::State;
use crate::actors::{Health, ModelState};

/// A step loop that has work and has not moved for so long hangs. Far above any chunk's time.
const HANGS_AFTER: Duration = Duration::from_secs(120);

/// How long the speech service may take to answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Alive: the step loop moves, or has nothing to do.
pub(super) async fn livez(state: web::Data<State>) -> HttpResponse {
    match state.handles.step_age().filter(|age| *age > HANGS_AFTER) {
        None => HttpResponse::Ok().json(json!({"status": "alive"})),
        Some(age) => HttpResponse::ServiceUnavailable()
            .json(json!({"status": "hanging", "seconds_since_last_step": age.as_secs()})),
    }
}

/// Ready: a request sent now would be taken.
pub(super) async fn readyz(state: web::Data<State>) -> HttpResponse {
    let health = state.handles.health();
    let body = json!({"status": health_name(&health)});
    match health {
        Health::Ready => HttpResponse::Ok().json(body),
        _ => HttpResponse::ServiceUnavailable().insert_header((header::RETRY_AFTER, "1")).json(body),
    }
}

/// State in words, for people and the page.
pub(super) async fn health(state: web::Data<State>) -> HttpResponse {
    let health = state.handles.health();
    let models: Vec<_> = state
        .handles
        .models()
        .into_iter()
        .map(|model| {
            let message = match &model.state {
                // The reason names files and is for the log.
                ModelState::Failed { .. } => Some("it could not be loaded; see the server's log"),
                _ => None,
            };
            json!({"id": model.id, "state": state_name(&model.state), "message": message})
        })
        .collect();
    let body = json!({
        "status": health_name(&health),
        "version": env!("CARGO_PKG_VERSION"),
        "models": models,
        "speech": state.handles.speech_model().map(|id| json!({
            "id": id,
            "state": if state.handles.is_speech_loaded() { "loaded" } else { "unloaded" },
        })),
        "requests": state.handles.gauges().tickets_live(),
    });
    match health {
        Health::Ready => HttpResponse::Ok().json(body),
        _ => HttpResponse::ServiceUnavailable().insert_header((header::RETRY_AFTER, "1")).json(body),
    }
}

/// How the speech model is; it is asked, so a compute thread that hangs gives nothing.
pub(super) async fn stats(state: web::Data<State>) -> HttpResponse {
    let speech = tokio::time::timeout(PATIENCE, super::audio::speech_body(&state)).await;
    HttpResponse::Ok().json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "requests": state.handles.gauges().tickets_live(),
        "transcription": speech.unwrap_or_default(),
    }))
}

/// Gauges and counters in Prometheus' text format.
pub(super) async fn metrics(state: web::Data<State>) -> HttpResponse {
    HttpResponse::Ok()
        .insert_header((header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8"))
        .body(state.handles.gauges().render())
}

fn health_name(health: &Health) -> &'static str {
    match health {
        Health::Loading => "loading",
        Health::Ready => "ready",
        Health::Restarting => "restarting",
        Health::Draining => "draining",
        Health::Failed { .. } => "failed",
    }
}
