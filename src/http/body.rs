//! Reads a JSON body: media type, size, time, text, syntax, each with its own
//! answer.
//!
//! A body over the limit is read on, without being kept, for a while: a client
//! that is cut off while it still sends never sees the answer.
//!
//! What a request can take is bounded before anything is parsed: few large
//! bodies are held at a time, and a body with too many values is refused.

use std::time::Duration;

use actix_web::error::PayloadError;
use actix_web::http::{StatusCode, header};
use actix_web::{HttpRequest, web};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use serde_json::Value;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};

use super::api_error::ApiError;
use super::state::State;
use crate::config::HttpConfig;

/// How much of a body over the limit is read and thrown away.
const DISCARD_BYTES: usize = 128 * 1024 * 1024;
/// Above this a body needs a place to be read on, bytes.
const LARGE_BODY: usize = 1024 * 1024;
/// Places for large bodies.
pub(super) const LARGE_BODIES: usize = 8;
/// Most arrays, objects and commas of a body. A parsed value takes many times the
/// bytes it is written with; strings take no more than theirs, and do not count.
pub(super) const MAX_STRUCTURE: usize = 500_000;

/// Reads and parses a request's body.
///
/// # Errors
/// 415 for another media type or an encoded body, 413 over the limit, 408 when
/// it does not arrive in time, 400 for text that is not UTF-8 or not JSON.
///
/// # Cancellation
/// Safe; the connection ends with it.
pub(super) async fn read_json(
    request: &HttpRequest,
    payload: web::Payload,
    state: &State,
) -> Result<Value, ApiError> {
    check_media_type(request)?;
    // The place is kept until the body is parsed.
    let (bytes, _place) = read_bytes(payload, &state.config, &state.large_bodies).await?;
    parse(&bytes)
}

fn check_media_type(request: &HttpRequest) -> Result<(), ApiError> {
    let refuse = |message: String| {
        ApiError::invalid(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)
    };
    check_encoding(request, "plain JSON")?;
    let given = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = given.unwrap_or_default().split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json")) {
        return Ok(());
    }
    // Other types can be sent by any web page without asking first.
    Err(refuse("content-type: must be application/json".into()).closing())
}

/// Refuses a body that is compressed; `wanted` is what to send instead.
///
/// # Errors
/// 415.
pub(super) fn check_encoding(request: &HttpRequest, wanted: &str) -> Result<(), ApiError> {
    match request.headers().get(header::CONTENT_ENCODING) {
        Some(encoding) if !encoding.as_bytes().eq_ignore_ascii_case(b"identity") => {
            let message = format!("content-encoding: encoded bodies are not supported; send {wanted}");
            let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            Err(ApiError::invalid(status, "unsupported_media_type", message).closing())
        }
        _ => Ok(()),
    }
}

/// A body, or a part of one, of bounded size. What goes over is read on without being kept, for a while.
pub(super) struct Bounded {
    most: usize,
    total: usize,
    kept: BytesMut,
}

impl Bounded {
    /// So many bytes at most.
    pub(super) fn new(most: usize) -> Self {
        Self { most, total: 0, kept: BytesMut::new() }
    }

    /// Takes the next bytes; whether it is worth to read on.
    pub(super) fn push(&mut self, chunk: &[u8]) -> bool {
        self.total = self.total.saturating_add(chunk.len());
        if self.is_over() {
            self.kept = BytesMut::new();
        } else {
            self.kept.extend_from_slice(chunk);
        }
        self.total <= self.most.saturating_add(DISCARD_BYTES)
    }

    fn is_over(&self) -> bool {
        self.total > self.most
    }

    /// All of it; `None` where it was over the limit.
    pub(super) fn finish(self) -> Option<Bytes> {
        (!self.is_over()).then(|| self.kept.freeze())
    }
}

/// The body, and the place that a large one takes. Waiting for a place leaves the rest
/// of the body with its sender, whose time that does not cost.
async fn read_bytes<'a>(
    mut payload: web::Payload,
    config: &HttpConfig,
    places: &'a Semaphore,
) -> Result<(Bytes, Option<SemaphorePermit<'a>>), ApiError> {
    let limit = config.max_json_bytes;
    let mut deadline = Instant::now() + Duration::from_secs(config.body_timeout_s);
    let mut body = Bounded::new(limit);
    let mut place = None;
    while let Some(chunk) = timeout_at(deadline, payload.next()).await.map_err(|_| late(config))? {
        let chunk = chunk.map_err(|error| unreadable(&error))?;
        if !body.push(&chunk) {
            break;
        }
        if body.is_over() {
            place = None;
        } else if body.total > LARGE_BODY && place.is_none() {
            let asked = Instant::now();
            // Nobody closes it, so there is always a place to wait for.
            place = places.acquire().await.ok();
            deadline += asked.elapsed();
        }
    }
    let Some(bytes) = body.finish() else {
        let message = format!("the body is larger than {limit} bytes, the limit (http.max_json_bytes)");
        let status = StatusCode::PAYLOAD_TOO_LARGE;
        return Err(ApiError::invalid(status, "body_too_large", message).closing());
    };
    Ok((bytes, place))
}

/// The error of a body that broke off.
pub(super) fn unreadable(error: &PayloadError) -> ApiError {
    let message = format!("the body could not be read: {error}");
    ApiError::invalid(StatusCode::BAD_REQUEST, "body_unreadable", message).closing()
}

/// The error of a body that takes too long.
pub(super) fn late(config: &HttpConfig) -> ApiError {
    let message = format!("the body did not arrive within {} s (http.body_timeout_s)", config.body_timeout_s);
    ApiError::invalid(StatusCode::REQUEST_TIMEOUT, "body_timeout", message).closing()
}

fn parse(bytes: &[u8]) -> Result<Value, ApiError> {
    let invalid = |code, message| ApiError::invalid(StatusCode::BAD_REQUEST, code, message);
    let text = std::str::from_utf8(bytes).map_err(|error| {
        invalid(
            "invalid_utf8",
            format!("the body is not UTF-8: wrong byte at offset {}", error.valid_up_to()),
        )
    })?;
    if text.trim().is_empty() {
        return Err(invalid("invalid_json", "the body is empty; a JSON object is needed".into()));
    }
    if structure(bytes) > MAX_STRUCTURE {
        let message =
            format!("the body holds more than {MAX_STRUCTURE} values, the limit; send a smaller request");
        return Err(invalid("invalid_json", message));
    }
    // serde_json's words end with the line and the column.
    serde_json::from_str(text)
        .map_err(|error| invalid("invalid_json", format!("the body is not valid JSON: {error}")))
}

/// Arrays, objects and commas outside strings, in a text that is JSON as far as it is
/// valid: there are at most as many values, and one.
pub(super) fn structure(json: &[u8]) -> usize {
    let (mut count, mut in_string, mut escaped) = (0, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_string,
            b'"' => in_string = !in_string,
            b'[' | b'{' | b',' if !in_string => count += 1,
            _ => {}
        }
    }
    count
}

#[cfg(test)]
mod tests;
