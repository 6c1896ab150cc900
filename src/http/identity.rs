//! A request's two names, and when its head was read: ours, and the client's where it
//! sent a sane `x-request-id`. Made once a request, in the middleware.

use std::time::Duration;

use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};
use actix_web::{HttpMessage, HttpRequest};

use super::state::State;
use crate::types::RequestId;

/// A request's identity, in every response.
pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest name that a client may give a request, bytes.
const MAX_BYTES: usize = 128;

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    /// Ours.
    pub(super) id: RequestId,
    /// The client's.
    pub(super) client_id: Option<String>,
    /// When the head was read, on the instance's clock.
    pub(super) begun: Duration,
}

impl Identity {
    /// Of a request with these headers whose head has just been read.
    pub(super) fn new(headers: &HeaderMap, begun: Duration) -> Self {
        Self { id: fresh_id(), client_id: headers.get(&REQUEST_ID).and_then(sane), begun }
    }

    /// The one that the middleware made.
    pub(super) fn of(request: &HttpRequest, state: &State) -> Self {
        let made = request.extensions().get::<Self>().cloned();
        made.unwrap_or_else(|| Self::new(request.headers(), state.handles.clock().now()))
    }

    /// What responses carry: the client's name, else ours.
    pub(super) fn header(&self) -> HeaderValue {
        let given = self.client_id.as_deref().and_then(|name| HeaderValue::from_str(name).ok());
        // 32 digits are always a value.
        given
            .or_else(|| HeaderValue::from_str(&self.id.to_string()).ok())
            .unwrap_or(HeaderValue::from_static("-"))
    }
}

/// A name that can go into headers, logs and addresses as it is.
fn sane(value: &HeaderValue) -> Option<String> {
    let name = value.to_str().ok()?.trim();
    let printable = name.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    (printable && !name.is_empty() && name.len() <= MAX_BYTES).then(|| name.to_owned())
}

fn fresh_id() -> RequestId {
    let mut bytes = [0; 16];
    // Without randomness the id is zero: it only names a line in the log, and the gateway refuses.
    let _ = getrandom::fill(&mut bytes);
    RequestId(u128::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_name_is_taken_as_it_is_or_not_at_all(bytes in prop::collection::vec(any::<u8>(), 0..160)) {
            let Ok(value) = HeaderValue::from_bytes(&bytes) else { return Ok(()) };
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, value);
            let identity = Identity::new(&headers, Duration::ZERO);
            let shown = identity.header();
            match &identity.client_id {
                Some(name) => {
                    prop_assert_eq!(shown.as_bytes(), bytes.trim_ascii());
                    prop_assert!(name.len() <= MAX_BYTES);
                }
                None => prop_assert_eq!(shown.to_str().unwrap(), identity.id.to_string()),
            }
        }
    }

    #[test]
    fn names_that_are_empty_long_or_not_plain_are_not_taken() {
        let taken = |value: &[u8]| sane(&HeaderValue::from_bytes(value).unwrap());
        assert_eq!(taken(b"trace 1/2").as_deref(), Some("trace 1/2"));
        assert!(taken(&[b'x'; 128]).is_some());
        for wrong in [&b""[..], b"  ", &[b'x'; 129], "é".as_bytes(), b"a\tb"] {
            assert!(taken(wrong).is_none(), "{wrong:?}");
        }
    }
}
