//! What is done around every route: who may ask, CORS, request ids, drain, log.
//!
//! Runs as middleware, so that it holds for errors, streams and unknown paths
//! alike.

use std::sync::Arc;
use std::time::Duration;

use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use actix_web::http::{ConnectionType, Method, StatusCode};
use actix_web::middleware::Next;
use actix_web::{HttpMessage, HttpResponse, ResponseError};

use super::api_error::ApiError;
use super::guard::OriginVerdict;
use super::identity::{Identity, REQUEST_ID};
use super::state::State;
use crate::observe::fields;
use crate::types::Refusal;

const PRIVATE_NETWORK_ASKED: HeaderName = HeaderName::from_static("access-control-request-private-network");
const PRIVATE_NETWORK: HeaderName = HeaderName::from_static("access-control-allow-private-network");
const CORP: HeaderName = HeaderName::from_static("cross-origin-resource-policy");
/// What scripts of listed pages may read besides the simple headers.
const EXPOSED: &str = "x-request-id, x-greenroom-seed, retry-after, server-timing, warning";

/// The middleware.
pub(super) async fn around<B: MessageBody + 'static>(
    state: State,
    request: ServiceRequest,
    next: Next<B>,
) -> Result<ServiceResponse<BoxBody>, actix_web::Error> {
    let clock = Arc::clone(state.handles.clock());
    let identity = Identity::new(request.headers(), clock.now());
    request.extensions_mut().insert(identity.clone());
    let origin = admit(&state, &request);
    let listed = matches!(origin, Ok(OriginVerdict::Listed));
    let origin_header = listed.then(|| request.headers().get(header::ORIGIN).cloned()).flatten();
    let early = match origin {
        Err(error) => Some(error.error_response()),
        Ok(_) if is_preflight(&request) => Some(preflight(&request)),
        Ok(_) if state.handles.is_draining() && !is_health(&request) => {
            Some(ApiError::from(Refusal::Draining).error_response())
        }
        Ok(_) => None,
    };
    let mut response = match early {
        Some(response) => request.into_response(response),
        None => next.call(request).await?.map_into_boxed_body(),
    };
    if state.handles.is_draining() {
        response.response_mut().head_mut().set_connection_type(ConnectionType::Close);
    }
    if let Some(origin) = origin_header {
        add_cors(response.headers_mut(), origin);
    }
    let took = clock.now().saturating_sub(identity.begun);
    finish(&mut response, &identity, took);
    Ok(response)
}

/// Whether the request may be served at all.
fn admit(state: &State, request: &ServiceRequest) -> Result<OriginVerdict, ApiError> {
    let forbidden = |code, message: String| ApiError::invalid(StatusCode::FORBIDDEN, code, message).closing();
    let hosts: Vec<_> = request.headers().get_all(header::HOST).collect();
    // The Unix socket has no address: pages cannot reach it, its clients name any host.
    let over_tcp = request.peer_addr().is_some();
    let host = match hosts.as_slice() {
        [] => None,
        [host] => Some(host.to_str().unwrap_or_default()),
        _ => {
            let message = "there is more than one Host header";
            return Err(ApiError::invalid(StatusCode::BAD_REQUEST, "invalid_host", message).closing());
        }
    };
    // In the absolute form of a request the target's own host counts as well.
    let named = [host, request.uri().authority().map(|authority| authority.as_str())];
    if over_tcp && named.into_iter().flatten().any(|name| !state.guard.host_is_ours(name)) {
        let message = "this host name is not allowed here; use the address it listens on, or list the name in http.allowed_hosts";
        return Err(forbidden("host_not_allowed", message.into()));
    }
    let origin = request.headers().get(header::ORIGIN).map(|origin| origin.to_str().unwrap_or_default());
    match state.guard.origin(origin, host) {
        OriginVerdict::Foreign => {
            let message =
                "pages of this origin may not call this server; list the origin in http.allowed_origins";
            Err(forbidden("origin_not_allowed", message.into()))
        }
        verdict => Ok(verdict),
    }
}

fn is_preflight(request: &ServiceRequest) -> bool {
    request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

fn preflight(request: &ServiceRequest) -> HttpResponse {
    let mut response = HttpResponse::NoContent();
    response
        .insert_header((header::ACCESS_CONTROL_ALLOW_METHODS, "GET, HEAD, POST, OPTIONS"))
        .insert_header((header::ACCESS_CONTROL_MAX_AGE, "600"));
    if let Some(asked) = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        response.insert_header((header::ACCESS_CONTROL_ALLOW_HEADERS, asked.clone()));
    }
    if request.headers().contains_key(PRIVATE_NETWORK_ASKED) {
        response.insert_header((PRIVATE_NETWORK, "true"));
    }
    response.finish()
}

/// Health stays visible while the server goes down.
fn is_health(request: &ServiceRequest) -> bool {
    let last = request.path().rsplit('/').next().unwrap_or_default();
    matches!(last, "livez" | "readyz" | "health" | "metrics")
}

fn add_cors(headers: &mut HeaderMap, origin: HeaderValue) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED));
    headers.append(header::VARY, HeaderValue::from_static("origin"));
}

/// Headers that every response has, and the log line of those that have no other.
fn finish(response: &mut ServiceResponse<BoxBody>, identity: &Identity, took: Duration) {
    let status = response.status();
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(CORP, HeaderValue::from_static("same-origin"));
    // An accepted chat brings its id, and writes its own line when it ends.
    if headers.contains_key(REQUEST_ID) {
        return;
    }
    headers.insert(REQUEST_ID, identity.header());
    let ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    let request = response.request();
    let (method, path, status) = (request.method(), request.path(), status.as_u16());
    let (request_id, client_id) = (identity.id, identity.client_id.as_deref());
    // Probes come every few seconds for months.
    if PROBES.iter().any(|probe| path.ends_with(probe)) {
        tracing::debug!(target: fields::REQUEST, %request_id, client_request_id = client_id, %method, path, status, total_ms = ms, "http");
    } else {
        tracing::info!(target: fields::REQUEST, %request_id, client_request_id = client_id, %method, path, status, total_ms = ms, "http");
    }
}

/// Routes that machines ask.
const PROBES: [&str; 4] = ["/livez", "/readyz", "/health", "/metrics"];
