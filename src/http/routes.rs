//! The table of routes, and what is said where there is none.

use actix_web::http::header::{self, HeaderValue};
use actix_web::http::{Method, StatusCode};
use actix_web::middleware::from_fn;
use actix_web::{HttpRequest, HttpResponse, Resource, ResponseError, Route, web};

use super::api_error::ApiError;
use super::state::State;
use super::{
    anthropic, audio, cache, chat, dictation, edge, health, models, page, realtime, requests, responses,
    speech_sessions as sessions,
};
use crate::actors::Handles;
use crate::config::HttpConfig;

/// Every path of the API, for suggestions.
const PATHS: [&str; 17] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/sessions",
    "/v1/audio/stream",
    "/v1/realtime",
    "/admin/transcription/unload",
    "/stats",
    "/v1/requests",
    "/v1/cache",
    "/v1/cache/sessions",
    "/health",
    "/livez",
    "/readyz",
    "/metrics",
];
/// Paths of OpenAI's API and others' that clients try, not served yet.
const NOT_YET: [&str; 4] = ["/v1/responses", "/v1/embeddings", "/v1/messages", "/v1/audio/speech"];

/// Greenroom's routes, to be mounted in an application or under a scope of it.
///
/// The result can be cloned into an application factory: all clones share one
/// state. Routes, error pages and the checks of `Host` and `Origin` concern
/// only what lies under the place where they are mounted.
pub fn configure(
    handles: Handles,
    config: &HttpConfig,
) -> impl FnOnce(&mut web::ServiceConfig) + Clone + Send + 'static {
    let state = State::new(handles, config);
    move |services| {
        let data = web::Data::new(state.clone());
        let scope = web::scope("")
            .app_data(data)
            .wrap(from_fn(move |request, next| edge::around(state.clone(), request, next)))
            .service(only_get("/v1/models", || web::get().to(models::list), || web::head().to(models::list)))
            .service(only_get(
                "/v1/models/{id:.+}",
                || web::get().to(models::one),
                || web::head().to(models::one),
            ))
            .service(only_post("/v1/chat/completions", web::post().to(chat::chat)))
            .service(only_post("/v1/completions", web::post().to(chat::text)))
            .service(only_post("/v1/messages", web::post().to(anthropic::messages)))
            .service(only_post("/v1/messages/count_tokens", web::post().to(anthropic::count_tokens)))
            .service(only_post("/v1/responses", web::post().to(responses::create)))
            .service(
                web::resource("/v1/responses/{id}")
                    .route(web::get().to(responses::get))
                    .route(web::head().to(responses::get))
                    .route(web::delete().to(responses::delete))
                    .default_service(web::to(|request: HttpRequest| async move {
                        wrong_method(&request, "GET, HEAD, DELETE")
                    })),
            )
            .service(only_post("/v1/responses/{id}/cancel", web::post().to(responses::cancel)))
            .service(only_get(
                "/v1/responses/{id}/input_items",
                || web::get().to(responses::input_items),
                || web::head().to(responses::input_items),
            ))
            .service(only_post("/v1/audio/transcriptions", web::post().to(audio::transcriptions)))
            .service(only_post("/v1/audio/translations", web::post().to(audio::translations)))
            .service(only_post("/v1/audio/sessions", web::post().to(sessions::create)))
            .service(
                web::resource("/v1/audio/sessions/{id}")
                    .route(web::get().to(sessions::state))
                    .route(web::head().to(sessions::state))
                    .route(web::delete().to(sessions::delete))
                    .default_service(web::to(|request: HttpRequest| async move {
                        wrong_method(&request, "GET, HEAD, DELETE")
                    })),
            )
            .service(only_post("/v1/audio/sessions/{id}/audio", web::post().to(sessions::append)))
            .service(only_post("/v1/audio/sessions/{id}/commit", web::post().to(sessions::commit)))
            .service(only_post("/v1/audio/sessions/{id}/finish", web::post().to(sessions::finish)))
            .service(only_get(
                "/v1/audio/sessions/{id}/events",
                || web::get().to(sessions::events),
                || web::head().to(sessions::state),
            ))
            .service(socket("/v1/audio/sessions/{id}/ws", web::get().to(dictation::attach)))
            .service(socket("/v1/audio/stream", web::get().to(dictation::stream)))
            .service(socket("/v1/realtime", web::get().to(realtime::realtime)))
            .service(only_post("/admin/transcription/unload", web::post().to(audio::unload)))
            .service(only_get("/stats", || web::get().to(health::stats), || web::head().to(health::stats)))
            .service(
                web::resource("/v1/cache")
                    .route(web::get().to(cache::report))
                    .route(web::head().to(cache::report))
                    .route(web::delete().to(cache::clear))
                    .default_service(web::to(|request: HttpRequest| async move {
                        wrong_method(&request, "GET, HEAD, DELETE")
                    })),
            )
            .service(only_get(
                "/v1/cache/sessions",
                || web::get().to(cache::sessions),
                || web::head().to(cache::sessions),
            ))
            .service(
                web::resource("/v1/cache/sessions/{id:.+}")
                    .route(web::post().to(cache::pin))
                    .route(web::delete().to(cache::forget))
                    .default_service(web::to(|request: HttpRequest| async move {
                        wrong_method(&request, "POST, DELETE")
                    })),
            )
            .service(only_get(
                "/v1/requests",
                || web::get().to(requests::list),
                || web::head().to(requests::list),
            ))
            .service(only_get(
                "/v1/requests/{id:.+}/trace",
                || web::get().to(requests::trace),
                || web::head().to(requests::trace),
            ))
            .service(only_get("/health", || web::get().to(health::health), || web::head().to(health::health)))
            .service(only_get("/livez", || web::get().to(health::livez), || web::head().to(health::livez)))
            .service(only_get("/readyz", || web::get().to(health::readyz), || web::head().to(health::readyz)))
            .service(only_get(
                "/metrics",
                || web::get().to(health::metrics),
                || web::head().to(health::metrics),
            ))
            .service(only_get(
                "/page/app.js",
                || web::get().to(page::script),
                || web::head().to(page::script),
            ))
            .service(only_get("/page/base.js", || web::get().to(page::base), || web::head().to(page::base)))
            .service(only_get(
                "/page/dictate.js",
                || web::get().to(page::dictate),
                || web::head().to(page::dictate),
            ))
            .service(only_get(
                "/page/style.css",
                || web::get().to(page::style),
                || web::head().to(page::style),
            ))
            .service(only_get("/", || web::get().to(page::index), || web::head().to(page::index)))
            .service(only_get("", || web::get().to(page::index), || web::head().to(page::index)))
            .default_service(web::to(not_found));
        services.service(scope);
    }
}

fn only_get(path: &str, get: fn() -> Route, head: fn() -> Route) -> Resource {
    web::resource(path)
        .route(get())
        .route(head())
        .default_service(web::to(|request: HttpRequest| async move { wrong_method(&request, "GET, HEAD") }))
}

/// For a WebSocket's handshake.
fn socket(path: &str, get: Route) -> Resource {
    web::resource(path)
        .route(get)
        .default_service(web::to(|request: HttpRequest| async move { wrong_method(&request, "GET") }))
}

fn only_post(path: &str, post: Route) -> Resource {
    web::resource(path)
        .route(post)
        .default_service(web::to(|request: HttpRequest| async move { wrong_method(&request, "POST") }))
}

fn wrong_method(request: &HttpRequest, allowed: &'static str) -> HttpResponse {
    let message = format!("{} is not allowed here; use {allowed}", method_name(request.method()));
    let error = ApiError::invalid(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message).closing();
    let mut response = error.error_response();
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
    response
}

async fn not_found(request: HttpRequest) -> HttpResponse {
    let path = request.path();
    let shown: String = path.chars().take(200).collect();
    let hint = match meant(path) {
        Some(path) => format!("did you mean {path}?"),
        None => "the API is at /v1/chat/completions, /v1/completions and /v1/models".to_owned(),
    };
    let not_yet = NOT_YET.iter().any(|known| path.ends_with(known));
    let what = if not_yet { "is not supported yet" } else { "does not exist" };
    let message = format!("{} {shown} {what}; {hint}", method_name(request.method()));
    ApiError::invalid(StatusCode::NOT_FOUND, "not_found", message).closing().error_response()
}

/// A method's name; unknown ones are the client's own words.
fn method_name(method: &Method) -> String {
    method.as_str().chars().take(20).collect()
}

/// The path that a wrong one was meant to be: doubled or missing `/v1`, doubled slashes, one at the end.
fn meant(path: &str) -> Option<String> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != "v1").collect();
    let tail = format!("/{}", parts.join("/"));
    let known = |candidate: &String| PATHS.contains(&candidate.as_str());
    let found = [format!("/v1{tail}"), tail.clone()].into_iter().find(known);
    let chat = ["/chat", "/api/chat", "/responses", "/messages"].contains(&tail.as_str());
    found.or_else(|| chat.then(|| PATHS[0].to_owned()))
}

#[cfg(test)]
mod tests {
    use super::meant;

    #[test]
    fn wrong_paths_lead_to_the_one_that_was_meant() {
        let chat = Some("/v1/chat/completions".to_owned());
        for path in
            ["/v1/v1/chat/completions", "/chat/completions", "//v1/chat/completions/", "/v1/responses"]
        {
            assert_eq!(meant(path), chat, "{path}");
        }
        assert_eq!(meant("/completions"), Some("/v1/completions".to_owned()));
        assert_eq!(meant("/v1/health"), Some("/health".to_owned()));
        assert_eq!(meant("/dashboard/billing/usage"), None);
    }
}
