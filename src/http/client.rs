//! Who is asking, for fairness and logs: API key, `X-Client-Id`, `user`, peer
//! address, whichever comes first. Not authentication.

use std::hash::{DefaultHasher, Hash, Hasher};

use actix_web::HttpRequest;
use actix_web::http::header;

use crate::types::ClientId;

/// Longest identity, bytes.
const MAX_BYTES: usize = 256;

/// The identity of a request. A key appears as a hash: identities are logged.
pub(super) fn client_id(request: &HttpRequest, user: Option<&str>) -> ClientId {
    let header = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok());
    let key = header(header::AUTHORIZATION.as_str())
        .and_then(|value| value.split_once(' '))
        .map(|(_, key)| key.trim())
        .filter(|key| !key.is_empty());
    if let Some(key) = key {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        return ClientId(format!("key:{:016x}", hasher.finish()));
    }
    let named = header("x-client-id").or(user).filter(|name| !name.is_empty());
    if let Some(name) = named {
        return ClientId(cut(name).to_owned());
    }
    let peer = request.peer_addr().map_or_else(|| "unix".to_owned(), |peer| peer.ip().to_string());
    ClientId(peer)
}

fn cut(name: &str) -> &str {
    let mut end = name.len().min(MAX_BYTES);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name[..end]
}
