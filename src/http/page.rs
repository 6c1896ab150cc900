//! The chat page, embedded in the binary: three files, nothing from elsewhere.
//!
//! All its addresses are relative, so it works wherever the routes are mounted;
//! for that the page's own address must end with a slash.

use actix_web::http::header::{self, HeaderName};
use actix_web::{HttpRequest, HttpResponse};

/// Only the page's own script, style and server; no frame around it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
     connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The page, or the way to its address with a slash.
pub(super) async fn index(request: HttpRequest) -> HttpResponse {
    if !request.path().ends_with('/') {
        let last = request.path().rsplit('/').next().unwrap_or_default();
        return HttpResponse::PermanentRedirect()
            .insert_header((header::LOCATION, format!("{last}/")))
            .finish();
    }
    asset("text/html; charset=utf-8", include_str!("page/index.html"))
}

/// The page's behaviour.
pub(super) async fn script() -> HttpResponse {
    asset("text/javascript; charset=utf-8", include_str!("page/app.js"))
}

/// The page's looks.
pub(super) async fn style() -> HttpResponse {
    asset("text/css; charset=utf-8", include_str!("page/style.css"))
}

fn asset(media_type: &'static str, text: &'static str) -> HttpResponse {
    HttpResponse::Ok()
        .insert_header((header::CONTENT_TYPE, media_type))
        .insert_header((header::CONTENT_SECURITY_POLICY, POLICY))
        .insert_header((header::REFERRER_POLICY, "no-referrer"))
        // The files change with the binary: asking again costs nothing on one's own machine.
        .insert_header((header::CACHE_CONTROL, "no-cache"))
        .insert_header((HeaderName::from_static("cross-origin-opener-policy"), "same-origin"))
        .body(text)
}
