//! `GET /v1/requests` and `GET /v1/requests/{id}/trace`: what became of the latest requests.

use actix_web::http::StatusCode;
use actix_web::{HttpResponse, web};
use serde_json::json;

use super::api_error::ApiError;
use super::dto::List;
use super::messages::short;
use super::state::State;
use crate::types::Trace;

/// The latest requests, the last first; those under way without an outcome.
pub(super) async fn list(state: web::Data<State>) -> HttpResponse {
    let now = state.handles.clock().now();
    let summary = |trace: Trace| {
        let record = trace.record(now);
        json!({
            "traceId": record.trace_id,
            "requestId": record.request_id,
            "route": record.route,
            "outcome": record.outcome,
            "end": record.end,
            "startedAtMs": record.started_at_ms,
            "totalMs": record.total_ms,
        })
    };
    let data: Vec<_> = state.handles.traces().recent().into_iter().map(summary).collect();
    HttpResponse::Ok().json(List { object: "list", data })
}

/// What answers' ids begin with; a request's id follows.
const PREFIXES: [&str; 4] = ["chatcmpl-", "cmpl-", "resp_", "msg_"];

/// Where one request's time went, by either of its ids or its answer's.
pub(super) async fn trace(id: web::Path<String>, state: web::Data<State>) -> Result<HttpResponse, ApiError> {
    let traces = state.handles.traces();
    let of_answer = || traces.find(PREFIXES.iter().find_map(|prefix| id.strip_prefix(prefix))?);
    let Some(trace) = traces.find(&id).or_else(of_answer) else {
        let message = format!(
            "there is no trace of the request `{}`: it is unknown here, or older than the latest that are kept (trace.ring)",
            short(&id)
        );
        return Err(ApiError::invalid(StatusCode::NOT_FOUND, "request_not_found", message));
    };
    Ok(HttpResponse::Ok().json(trace.record(state.handles.clock().now())))
}
