//! Who is asking, for fairness and logs: API key, `X-Client-Id`, `user`, session, peer
//! address, whichever comes first. Not authentication.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;

use actix_web::HttpRequest;
use actix_web::http::header::{self, HeaderMap};

use super::api_error::ApiError;
use super::fields::Fields;
use crate::types::ClientId;

/// Longest identity, bytes.
const MAX_BYTES: usize = 256;
/// Headers that name a session, where the body names none.
const SESSION_HEADERS: [&str; 2] = ["x-session-affinity", "session_id"];

/// What a body says of whose request it is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NamedClient {
    /// `user`.
    pub user: Option<String>,
    /// `session_id`, or what comes closest to it.
    pub session: Option<String>,
}

impl NamedClient {
    /// Takes the fields out of a body.
    ///
    /// # Errors
    /// `invalid_type`.
    pub fn read(body: &mut Fields) -> Result<Self, ApiError> {
        let user = body.string("user")?;
        let key = body.string("prompt_cache_key")?;
        Ok(Self { user, session: body.string("session_id")?.or(key) })
    }
}

/// The identity of a request.
pub(super) fn client_id(request: &HttpRequest, named: &NamedClient) -> ClientId {
    identity(request.headers(), named, request.peer_addr().map(|peer| peer.ip()))
}

/// A key appears as a hash: identities are logged.
fn identity(headers: &HeaderMap, named: &NamedClient, peer: Option<IpAddr>) -> ClientId {
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let said = |name: Option<&str>| name.filter(|name| !name.is_empty()).map(|name| cut(name).to_owned());
    let bearer = header(header::AUTHORIZATION.as_str()).and_then(|value| value.split_once(' '));
    let key = bearer.map(|(_, key)| key).or_else(|| header("x-api-key"));
    let key = key.map(str::trim).filter(|key| !key.is_empty());
    if let Some(key) = key {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        return ClientId(format!("{}{:016x}", ClientId::KEY, hasher.finish()));
    }
    if let Some(name) = said(header("x-client-id")).or_else(|| said(named.user.as_deref())) {
        // Nobody is a key by saying so.
        let claims = name.starts_with(ClientId::KEY);
        return ClientId(if claims { format!("client:{name}") } else { name });
    }
    let session = said(named.session.as_deref()).or_else(|| session_header(headers));
    if let Some(session) = session {
        return ClientId(format!("session:{session}"));
    }
    ClientId(peer.map_or_else(|| "unix".to_owned(), |peer| peer.to_string()))
}

/// The conversation as a header names it.
pub(super) fn session_header(headers: &HeaderMap) -> Option<String> {
    let header = |name: &&str| headers.get(*name).and_then(|value| value.to_str().ok());
    let named = SESSION_HEADERS.iter().find_map(header).filter(|name| !name.is_empty());
    named.map(|name| cut(name).to_owned())
}

fn cut(name: &str) -> &str {
    let mut end = name.len().min(MAX_BYTES);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name[..end]
}

#[cfg(test)]
mod tests {
    use actix_web::http::header::{HeaderName, HeaderValue};

    use super::*;

    #[test]
    fn whichever_name_comes_first_is_the_client() {
        let mut headers = HeaderMap::new();
        let mut named = NamedClient::default();
        let peer = Some(IpAddr::from([10, 0, 0, 7]));
        let who = |headers: &HeaderMap, named: &NamedClient| identity(headers, named, peer).0;
        let set = |headers: &mut HeaderMap, name: &'static str, value: &'static str| {
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
        };
        assert_eq!(identity(&headers, &named, None).0, "unix");
        assert_eq!(who(&headers, &named), "10.0.0.7");
        set(&mut headers, "session_id", "h2");
        assert_eq!(who(&headers, &named), "session:h2");
        set(&mut headers, "x-session-affinity", "h1");
        assert_eq!(who(&headers, &named), "session:h1");
        named.session = Some("s".into());
        assert_eq!(who(&headers, &named), "session:s");
        named.user = Some(String::new());
        assert_eq!(who(&headers, &named), "session:s", "an empty name is none");
        named.user = Some("ann".into());
        assert_eq!(who(&headers, &named), "ann");
        set(&mut headers, "x-client-id", "");
        assert_eq!(who(&headers, &named), "ann", "an empty header does not hide the user");
        set(&mut headers, "x-client-id", "agent");
        assert_eq!(who(&headers, &named), "agent");
        set(&mut headers, "authorization", "Bearer secret");
        let key = who(&headers, &named);
        assert!(key.starts_with("key:") && !key.contains("secret"), "{key}");
    }

    #[test]
    fn a_long_name_is_cut_between_characters() {
        let named = NamedClient { user: Some("é".repeat(200)), session: None };
        assert_eq!(identity(&HeaderMap::new(), &named, None).0, "é".repeat(MAX_BYTES / 2));
    }
}
