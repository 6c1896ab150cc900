//! The safetensors container: a JSON header and the data. Untrusted.

use std::ops::Range;
use std::path::Path;

use serde_json::Value;

use super::super::malformed;
use crate::types::LoadError;

/// Longest header accepted, as the format's own readers have it.
const MAX_HEADER: u64 = 100_000_000;

/// Element types that matter here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::model::load) enum Dtype {
    F32,
    F16,
    BF16,
    /// MLX's packed codes.
    U32,
    Other,
}

/// A tensor of a file; its range is as long as its shape asks.
#[derive(Debug)]
pub(in crate::model::load) struct Stored {
    pub dtype: Dtype,
    /// As the file spells it.
    pub dtype_name: String,
    pub shape: Vec<usize>,
    /// In the file, header included.
    pub bytes: Range<usize>,
}

/// Parses the header and checks that data and header cover each other exactly.
pub(in crate::model::load) fn parse(bytes: &[u8], path: &Path) -> Result<Vec<(String, Stored)>, LoadError> {
    let wrong = |message: String| malformed(path, message);
    let (length, rest) =
        bytes.split_first_chunk::<8>().ok_or_else(|| wrong("is too short for a header".into()))?;
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER || length > rest.len() as u64 {
        return Err(wrong(format!("claims a header of {length} bytes; the file has {}", bytes.len())));
    }
    let header = &rest[..length as usize];
    let header: Value = serde_json::from_slice(header).map_err(|error| wrong(format!("header: {error}")))?;
    let header = header.as_object().ok_or_else(|| wrong("the header is not a JSON object".into()))?;
    let start = 8 + length as usize;
    let mut tensors = Vec::with_capacity(header.len());
    for (name, info) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        tensors.push((name.clone(), stored(name, info, start, path)?));
    }
    let last = tensors.iter().max_by_key(|(_, tensor)| tensor.bytes.end);
    let end = last.map_or(start, |(_, tensor)| tensor.bytes.end);
    if let Some((name, _)) = tensors.iter().find(|(_, tensor)| tensor.bytes.end > bytes.len()) {
        return Err(wrong(format!(
            "is cut short: tensor `{name}` is not all there; the file has {} bytes, {} bytes are missing",
            bytes.len(),
            end - bytes.len()
        )));
    }
    check_cover(&tensors, start, bytes.len(), path)?;
    Ok(tensors)
}

fn stored(name: &str, info: &Value, start: usize, path: &Path) -> Result<Stored, LoadError> {
    let wrong = |message: String| malformed(path, format!("tensor `{name}`: {message}"));
    let dtype_name = info.get("dtype").and_then(Value::as_str).ok_or_else(|| wrong("no dtype".into()))?;
    let (dtype, bits) = match dtype_name {
        "F32" => (Dtype::F32, 32),
        "F16" => (Dtype::F16, 16),
        "BF16" => (Dtype::BF16, 16),
        "U32" => (Dtype::U32, 32),
        "F64" | "I64" | "U64" => (Dtype::Other, 64),
        "I32" => (Dtype::Other, 32),
        "I16" | "U16" => (Dtype::Other, 16),
        "I8" | "U8" | "BOOL" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" => (Dtype::Other, 8),
        other => {
            let message = format!(
                "tensor `{name}` in {} is {other}; supported are F32, F16, BF16 and MLX's affine quantisation",
                path.display()
            );
            return Err(LoadError::Unsupported { message });
        }
    };
    let number = |value: &Value| value.as_u64().and_then(|value| usize::try_from(value).ok());
    let list = |key: &str| -> Option<Vec<usize>> { info.get(key)?.as_array()?.iter().map(number).collect() };
    let shape = list("shape").ok_or_else(|| wrong("no shape".into()))?;
    let (from, to) = match list("data_offsets").as_deref() {
        Some(&[from, to]) if from <= to => (from, to),
        _ => return Err(wrong("no data_offsets of two ascending numbers".into())),
    };
    let size = shape
        .iter()
        .try_fold(bits / 8, |size: usize, &dim| size.checked_mul(dim))
        .ok_or_else(|| wrong(format!("the shape {shape:?} is impossible")))?;
    if size != to - from {
        return Err(wrong(format!(
            "{shape:?} of {dtype_name} are {size} bytes, the offsets span {}",
            to - from
        )));
    }
    let end = start.checked_add(to).ok_or_else(|| wrong(format!("the offset {to} is impossible")))?;
    Ok(Stored { dtype, dtype_name: dtype_name.to_owned(), shape, bytes: start + from..end })
}

/// Tensors must neither overlap nor leave bytes that nobody explains.
fn check_cover(tensors: &[(String, Stored)], start: usize, end: usize, path: &Path) -> Result<(), LoadError> {
    let mut spans: Vec<(&Range<usize>, &str)> =
        tensors.iter().map(|(name, tensor)| (&tensor.bytes, name.as_str())).collect();
    spans.sort_by_key(|(span, _)| (span.start, span.end));
    let mut at = start;
    for (span, name) in spans {
        if span.start != at {
            return Err(malformed(path, format!("tensor `{name}` begins at {}, not at {at}", span.start)));
        }
        at = span.end;
    }
    if at != end {
        return Err(malformed(path, format!("{} bytes follow the last tensor", end - at)));
    }
    Ok(())
}
