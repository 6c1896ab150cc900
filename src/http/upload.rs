//! Reads an upload: a form with a recording, or JSON that holds one in base64.

use actix_multipart::{Field, Multipart, MultipartError};
use actix_web::http::StatusCode;
use actix_web::http::header;
use actix_web::{HttpRequest, web};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::StreamExt;
use serde_json::Value;

use super::api_error::ApiError;
use super::body::{Bounded, check_encoding, unreadable};
use super::fields::Fields;
use super::speech_request::too_large;

/// Largest text field, bytes.
const MAX_FIELD: usize = 64 * 1024;
/// Most fields of a form.
const MAX_FIELDS: usize = 256;
/// What the name of a type of raw samples is: 16 bits, little-endian.
const RAW: [&str; 3] = ["audio/pcm", "audio/raw", "audio/x-raw"];

/// Text fields in order, and the recording.
pub(super) type Upload = (Vec<(String, String)>, Option<Bytes>);

/// Reads an upload whose recording has at most `limit` bytes.
///
/// # Errors
/// 415 for another media type or an encoded body, 413 over the limit, 400 for what cannot be read.
pub(super) async fn read_upload(
    request: &HttpRequest,
    payload: web::Payload,
    limit: usize,
) -> Result<Upload, ApiError> {
    check_encoding(request, "the upload as it is")?;
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("");
    let essence = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    match essence.as_str() {
        "multipart/form-data" => read_form(Multipart::new(request.headers(), payload), limit).await,
        "application/json" => read_json(payload, limit).await,
        _ => {
            let message = "content-type: must be multipart/form-data, with the recording as `file`, or application/json, \
                 with it in base64";
            let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
            Err(ApiError::invalid(status, "unsupported_media_type", message).closing())
        }
    }
}

fn broken(error: MultipartError) -> ApiError {
    let message = format!("the form cannot be read: {error}");
    ApiError::invalid(StatusCode::BAD_REQUEST, "invalid_multipart", message).closing()
}

/// Reads a form's parts, in whatever order they come.
async fn read_form(mut form: Multipart, limit: usize) -> Result<Upload, ApiError> {
    let (mut fields, mut file) = (Vec::new(), None);
    while let Some(part) = form.next().await {
        let mut part = part.map_err(broken)?;
        let name = part.name().unwrap_or_default().to_owned();
        // A part called `file` is the recording, whatever it says of itself.
        let is_file = name == "file";
        let header = if is_file { raw_header(&part)? } else { None };
        let most = if is_file { limit } else { MAX_FIELD };
        let mut kept = Bounded::new(most);
        while let Some(chunk) = part.next().await {
            if !kept.push(&chunk.map_err(broken)?) {
                break;
            }
        }
        let Some(bytes) = kept.finish() else {
            return Err(match is_file {
                true => too_large(limit),
                false => {
                    ApiError::field(&name, "invalid_value", format!("is over {MAX_FIELD} bytes")).closing()
                }
            });
        };
        if is_file {
            file = Some(match header {
                Some(header) if !bytes.is_empty() => [&header, &bytes[..]].concat().into(),
                _ => bytes,
            });
            continue;
        }
        if fields.len() == MAX_FIELDS {
            let message = format!("the form has more than {MAX_FIELDS} fields");
            return Err(ApiError::invalid(StatusCode::BAD_REQUEST, "invalid_multipart", message).closing());
        }
        let text = String::from_utf8(bytes.to_vec())
            .map_err(|_| ApiError::field(&name, "invalid_value", "is not UTF-8"))?;
        fields.push((name, text));
    }
    Ok((fields, file))
}

/// What makes a WAV file of raw samples, where a part's type says that it holds them: `audio/pcm`, with
/// `rate` (16000) and `channels` (1) as parameters.
fn raw_header(part: &Field) -> Result<Option<Vec<u8>>, ApiError> {
    let Some(kind) = part.content_type().filter(|kind| RAW.contains(&kind.essence_str())) else {
        return Ok(None);
    };
    let parameter = |name: &str, usual: u32, low: u32, high: u32| -> Result<u32, ApiError> {
        let Some(text) = kind.get_param(name) else { return Ok(usual) };
        let value = text.as_str().parse().ok().filter(|value| (low..=high).contains(value));
        let message = format!("the type's {name} must be from {low} to {high}");
        value.ok_or_else(|| ApiError::field("file", "invalid_value", message))
    };
    let rate = parameter("rate", 16_000, 1000, 384_000)?;
    let channels = parameter("channels", 1, 1, 8)?;
    let mut header = b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0\x01\0".to_vec();
    header.extend_from_slice(&(channels as u16).to_le_bytes());
    header.extend_from_slice(&rate.to_le_bytes());
    header.extend_from_slice(&(rate * channels * 2).to_le_bytes());
    header.extend_from_slice(&(channels as u16 * 2).to_le_bytes());
    // A size of nothing stands for the rest of the file.
    header.extend_from_slice(b"\x10\0data\0\0\0\0");
    Ok(Some(header))
}

/// Reads JSON: the form's fields, with the recording in base64, also as a `data:` address.
async fn read_json(mut payload: web::Payload, limit: usize) -> Result<Upload, ApiError> {
    // Four letters are three bytes.
    let mut body = Bounded::new(limit.div_ceil(3).saturating_mul(4).saturating_add(MAX_FIELD));
    while let Some(chunk) = payload.next().await {
        if !body.push(&chunk.map_err(|error| unreadable(&error))?) {
            break;
        }
    }
    let body = body.finish().ok_or_else(|| too_large(limit))?;
    let body: Value = serde_json::from_slice(&body).map_err(|error| {
        let message = format!("the body is not valid JSON: {error}");
        ApiError::invalid(StatusCode::BAD_REQUEST, "invalid_json", message)
    })?;
    let mut fields = Fields::new("", body)?;
    let file = fields.string("file")?.map(|text| decode(&text)).transpose()?;
    if file.as_ref().is_some_and(|file| file.len() > limit) {
        return Err(too_large(limit));
    }
    let text = |value: Value| if let Value::String(text) = value { text } else { value.to_string() };
    Ok((fields.rest().map(|(name, value)| (name, text(value))).collect(), file))
}

/// The bytes of base64, or of a `data:` address.
fn decode(text: &str) -> Result<Bytes, ApiError> {
    let wrong = |what: String| ApiError::field("file", "invalid_value", format!("must be base64: {what}"));
    let text = match text.strip_prefix("data:") {
        Some(rest) => {
            let (kind, text) =
                rest.split_once(',').ok_or_else(|| wrong("the address has no comma".into()))?;
            if !kind.ends_with(";base64") {
                return Err(wrong("the address is not ;base64".into()));
            }
            text
        }
        None => text,
    };
    STANDARD.decode(text.trim()).map(Bytes::from).map_err(|error| wrong(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_comes_alone_or_in_an_address() {
        for text in ["aGVsbG8=", " aGVsbG8=\n", "data:audio/wav;base64,aGVsbG8="] {
            assert_eq!(decode(text).unwrap(), "hello", "{text}");
        }
        for text in ["hello!", "data:audio/wav,hello", "data:audio/wav;base64"] {
            assert_eq!(decode(text).unwrap_err().param.as_deref(), Some("file"), "{text}");
        }
    }
}
