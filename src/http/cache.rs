//! `/v1/cache` and `/v1/cache/sessions`: what the prompt cache holds, and what a client may say of its
//! own conversations.

use actix_web::http::StatusCode;
use actix_web::{HttpRequest, HttpResponse, web};
use serde_json::{Value, json};

use super::api_error::ApiError;
use super::body::read_json;
use super::client::{NamedClient, client_id};
use super::dto::List;
use super::fields::Fields;
use super::messages::short;
use super::state::State;
use crate::actors::{
    CacheReport, CacheStatistics, ChangeSession, ClearCache, ListSessions, SessionChange, SessionReport,
};

/// What is kept, and what came of it.
pub(super) async fn report(state: web::Data<State>) -> Result<HttpResponse, ApiError> {
    let report = state.handles.cache().send(CacheStatistics).await.map_err(|_| going_down())?;
    Ok(HttpResponse::Ok().json(body(&report)))
}

/// Forgets what is kept in memory; with `?disk=true` on disk as well.
pub(super) async fn clear(
    query: web::Query<Vec<(String, String)>>,
    state: web::Data<State>,
) -> Result<HttpResponse, ApiError> {
    let mut disk = false;
    for (name, value) in query.iter() {
        disk = match (name.as_str(), value.as_str()) {
            ("disk", "true") => true,
            ("disk", "false") => false,
            ("disk", _) => return Err(ApiError::field("disk", "invalid_value", "must be true or false")),
            _ => {
                return Err(ApiError::field(
                    &short(name),
                    "invalid_value",
                    "is no parameter here; there is disk=true",
                ));
            }
        };
    }
    let report = state.handles.clear_cache().send(ClearCache { disk }).await.map_err(|_| going_down())?;
    Ok(HttpResponse::Ok().json(body(&report)))
}

/// The caller's conversations, the latest first.
pub(super) async fn sessions(
    request: HttpRequest,
    state: web::Data<State>,
) -> Result<HttpResponse, ApiError> {
    let list = ListSessions { owner: owner(&request) };
    let sessions = state.handles.list_sessions().send(list).await.map_err(|_| going_down())?;
    let data: Vec<Value> = sessions.iter().map(session).collect();
    Ok(HttpResponse::Ok().json(List { object: "list", data }))
}

/// Pins a conversation or lets it go: `{"pinned": true}`.
pub(super) async fn pin(
    id: web::Path<String>,
    request: HttpRequest,
    payload: web::Payload,
    state: web::Data<State>,
) -> Result<HttpResponse, ApiError> {
    let mut fields = Fields::new("", read_json(&request, payload, &state).await?)?;
    let pinned = fields.boolean("pinned")?.ok_or_else(|| fields.missing("pinned", "true or false"))?;
    let change = if pinned { SessionChange::Pin } else { SessionChange::Unpin };
    change_session(&id, &request, &state, change).await?;
    Ok(HttpResponse::Ok().json(json!({"id": *id, "pinned": pinned})))
}

/// Gives a conversation's state up.
pub(super) async fn forget(
    id: web::Path<String>,
    request: HttpRequest,
    state: web::Data<State>,
) -> Result<HttpResponse, ApiError> {
    change_session(&id, &request, &state, SessionChange::Drop).await?;
    Ok(HttpResponse::Ok().json(json!({"id": *id, "deleted": true})))
}

async fn change_session(
    id: &str,
    request: &HttpRequest,
    state: &State,
    change: SessionChange,
) -> Result<(), ApiError> {
    let order = ChangeSession { owner: owner(request), id: id.to_owned(), change };
    if state.handles.change_session().send(order).await.map_err(|_| going_down())? {
        return Ok(());
    }
    let message = match change {
        SessionChange::Pin => format!("there is no session `{}`, or as many are pinned as may be", short(id)),
        SessionChange::Unpin | SessionChange::Drop => format!("there is no session `{}`", short(id)),
    };
    Err(ApiError::invalid(StatusCode::NOT_FOUND, "session_not_found", message))
}

/// Whose conversations a request may see: those of its API key, or those of all without one.
fn owner(request: &HttpRequest) -> String {
    client_id(request, &NamedClient::default()).api_key().unwrap_or_default().to_owned()
}

fn going_down() -> ApiError {
    ApiError::from(crate::types::Refusal::Draining)
}

fn body(report: &CacheReport) -> Value {
    json!({
        "object": "cache",
        "kind": report.kind,
        "enabled": report.enabled,
        "entries": report.entries,
        "tokens": report.tokens,
        "hits": report.hits,
        "misses": report.misses,
        "hit_tokens": report.hit_tokens,
        "evicted": report.evicted,
        "ssd_segments": report.ssd_segments,
        "ssd_bytes": report.ssd_bytes,
        "ssd_budget_bytes": report.ssd_budget_bytes,
    })
}

fn session(session: &SessionReport) -> Value {
    json!({
        "object": "cache.session",
        "id": session.id,
        "model": session.model,
        "tokens": session.tokens,
        "turns": session.turns,
        "idle_s": session.idle.as_secs(),
        "pinned": session.pinned,
    })
}
