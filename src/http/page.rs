//! The page for chat and dictation, embedded in the binary: five files, nothing from elsewhere.
//!
//! All its addresses are relative, so it works wherever the routes are mounted;
//! for that the page's own address must end with a slash.

use actix_web::http::header::{self, HeaderName, HeaderValue};
use actix_web::{HttpRequest, HttpResponse};

/// Only the page's own script, style and server; no frame around it.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'";
/// Of what a browser asks its user about, the page needs the microphone.
const PERMISSIONS: &str = "microphone=(self), camera=(), geolocation=()";
const SCRIPT: &str = "text/javascript; charset=utf-8";
/// Longest `Host` that becomes part of the policy.
const MAX_HOST: usize = 260;

/// The page, or the way to its address with a slash.
pub(super) async fn index(request: HttpRequest) -> HttpResponse {
    if !request.path().ends_with('/') {
        let last = request.path().rsplit('/').next().unwrap_or_default();
        return HttpResponse::PermanentRedirect()
            .insert_header((header::LOCATION, format!("{last}/")))
            .finish();
    }
    let mut response = asset("text/html; charset=utf-8", include_str!("page/index.html"));
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    let headers = response.headers_mut();
    if let Ok(policy) = HeaderValue::from_str(&page_policy(host.unwrap_or_default())) {
        headers.insert(header::CONTENT_SECURITY_POLICY, policy);
    }
    headers.insert(header::PERMISSIONS_POLICY, HeaderValue::from_static(PERMISSIONS));
    response
}

/// The policy with this server's WebSockets by name: not every browser counts them as `'self'`.
fn page_policy(host: &str) -> String {
    let harmless = |byte: u8| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte);
    if host.is_empty() || host.len() > MAX_HOST || !host.bytes().all(harmless) {
        return POLICY.to_owned();
    }
    format!("{POLICY} ws://{host} wss://{host}")
}

/// The chat's behaviour, and the page's.
pub(super) async fn script() -> HttpResponse {
    asset(SCRIPT, include_str!("page/app.js"))
}

/// What the page's scripts share.
pub(super) async fn base() -> HttpResponse {
    asset(SCRIPT, include_str!("page/base.js"))
}

/// The dictation's behaviour.
pub(super) async fn dictate() -> HttpResponse {
    asset(SCRIPT, include_str!("page/dictate.js"))
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

#[cfg(test)]
mod tests {
    use super::{POLICY, page_policy};

    #[test]
    fn only_a_plain_host_becomes_part_of_the_policy() {
        assert_eq!(page_policy("box:8080"), format!("{POLICY} ws://box:8080 wss://box:8080"));
        assert!(page_policy("[::1]:80").ends_with(" ws://[::1]:80 wss://[::1]:80"));
        for host in ["", "a b", "a; script-src *", "a,b", "*", "http://a", &"a".repeat(300)] {
            assert_eq!(page_policy(host), POLICY, "{host}");
        }
    }
}
